"""The configuration: one strict YAML file under ``.env``, environment and flags, parsed once into frozen structs.

The process's environment is looked at nowhere else in the front.
"""

from slimproc.config.load import default_file, load_config
from slimproc.config.model import Config, ModelConfig
from slimproc.config.runtime import RuntimeDirectory
from slimproc.config.values import Listen

__all__ = ["Config", "Listen", "ModelConfig", "RuntimeDirectory", "default_file", "load_config"]
