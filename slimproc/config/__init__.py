"""The configuration: one strict YAML file under ``.env``, environment and flags, parsed once into frozen structs.

The process's environment is looked at nowhere else in the front.
"""

from slimproc.config.load import default_file, load_config
from slimproc.config.model import ModelConfig
from slimproc.config.runtime import RuntimeDirectory
from slimproc.config.upstream import Command, MemoryPolicy, MemoryProfile, Remote
from slimproc.config.values import Listen
from slimproc.config.whole import Config

__all__ = [
    "Command",
    "Config",
    "Listen",
    "MemoryPolicy",
    "MemoryProfile",
    "ModelConfig",
    "Remote",
    "RuntimeDirectory",
    "default_file",
    "load_config",
]
