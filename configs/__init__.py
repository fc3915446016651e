"""Typed configuration: `load` composes overrides into a checked `Config`, as `python train.py <overrides>` does.

schema        every key: its type, default, meaning, range, and where it counts
*.yaml        values that differ from those defaults, by group; train, ablate and compare.yaml are what hydra.main composes
keys          which names exist, and which name is nearest to a wrong one
compose       composition by Hydra, and conversion to `Config` and back
rules         checks of numbers, of several keys together, and against the machine
machine       what the rules need to know about this machine
command_line  how a program ends with an error of its command
"""

from configs.compose import compose_only, from_dict, load, read_yaml, to_dict, to_yaml
from configs.keys import ConfigError
from configs.schema import Config

__all__ = ["Config", "ConfigError", "compose_only", "from_dict", "load", "read_yaml", "to_dict", "to_yaml"]
