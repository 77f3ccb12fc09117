"""slimproc: many clients, several small language models, one machine."""

__version__ = "0.1.0"
