"""Typed configuration: `load` composes overrides into a checked `Config`, as `python train.py <overrides>` does.

schema   every key: its type, default, meaning and range
*.yaml   values that differ from those defaults, by group
keys     which names exist, where they count, what --help says of them, and which name is nearest to a wrong one
compose  composition by Hydra, and conversion to `Config` and back
rules    checks of numbers, of several keys together, and against the machine
machine  what the rules need to know about this machine
"""

from configs.compose import compose_only, from_dict, given, jobs, load, parse, read_yaml, swept, to_dict, to_yaml
from configs.keys import ConfigError, as_config_errors
from configs.schema import Config

__all__ = ["Config", "ConfigError", "as_config_errors", "compose_only", "from_dict", "given", "jobs", "load", "parse"]
__all__ += ["read_yaml", "swept", "to_dict", "to_yaml"]
