"""Typed configuration: `load` composes overrides into a checked `Config`, as `python train.py <overrides>` does.

schema        every key, its type, default, unit and meaning
*.yaml        what differs from those defaults, by group
keys          names: which exist, which is nearest, what each accepts
compose       Hydra composition, and the way from its result to `Config`
rules         checks that span several keys
machine       what the rules need to know about this machine
command_line  every job of a command, checked before Hydra starts the first
"""

from configs.compose import compose_only, from_dict, load, parse, to_dict, to_yaml, typed
from configs.keys import ConfigError
from configs.schema import Config

__all__ = ["Config", "ConfigError", "compose_only", "from_dict", "load", "parse", "to_dict", "to_yaml", "typed"]
