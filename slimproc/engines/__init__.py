"""What runs inside an engine process. The front never imports it: it starts ``python -m slimproc.engines``."""
