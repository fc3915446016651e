"""Typed configuration: `load` composes overrides into a checked `Config`, as `python train.py <overrides>` does.

schema        every key: its type, default, meaning and range
*.yaml        values that differ from those defaults, by group
keys          which names exist, and which name is nearest to a wrong one
compose       composition by Hydra, and conversion to `Config` and back
rules         checks of numbers, of several keys together, and against the machine
machine       what the rules need to know about this machine
command_line  what --help prints, names of run folders, and how an error of a command is shown
"""

from configs.compose import compose_only, from_dict, given, jobs, load, parse, read_yaml, swept, to_dict, to_yaml
from configs.keys import ConfigError
from configs.schema import Config

__all__ = ["Config", "ConfigError", "compose_only", "from_dict", "given", "jobs", "load", "parse"]
__all__ += ["read_yaml", "swept", "to_dict", "to_yaml"]
