"""Names of the configuration: which keys exist, what each accepts, and which one a misspelt name was meant to be."""

import difflib
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from inspect import getsource
from pathlib import Path

from configs.schema import Config

FOLDER = Path(__file__).parent


class ConfigError(ValueError):
    """A configuration that can't run. The message names the key, what was given, what is accepted and what to do."""


@dataclass(frozen=True)
class Key:
    """One leaf of the configuration."""

    name: str  # dotted, as on the command line
    type: type  # of the value when it is not null
    optional: bool  # null is accepted
    default: object
    meaning: str  # the comment beside the field
    choices: dict[str, str]  # of an enum: each value and the comment beside it

    @property
    def accepts(self) -> str:
        if issubclass(self.type, Enum):
            what = "one of " + ", ".join(self.choices)
        else:
            what = {bool: "true or false", int: "a whole number", float: "a number", list: "a list [a,b]"}.get(
                self.type, "text"
            )
        return what + (" or null" if self.optional else "")


@cache
def schema() -> dict[str, Key]:
    """Every key of the schema by its dotted name, in the order of declaration."""
    return {key.name: key for key in _walk(Config, "")}


def sections() -> list[str]:
    return [field.name for field in fields(Config) if is_dataclass(field.type)]


@cache
def groups() -> dict[str, list[str]]:
    """Config groups and their options: the folders of YAML files beside this file."""
    options: dict[str, list[str]] = {}
    for path in sorted(FOLDER.glob("*/*.yaml")):
        options.setdefault(path.parent.name, []).append(path.stem)
    return options


def unknown_key(name: str) -> ConfigError:
    """The error for a key that does not exist, with the name that was probably meant."""
    section, _, leaf = name.rpartition(".")
    siblings = [key for key in schema() if key.rpartition(".")[0] == section]
    message = f"{name}: no such key."
    if guess := _nearest(name, leaf, siblings):
        message += f" Did you mean {guess}?"
    if section and siblings:
        message += f" Keys of {section}: {', '.join(key.rpartition('.')[2] for key in siblings)}."
    program, which = ("ablate.py", "its own keys") if section == "ablate" else ("train.py", "all keys")
    return ConfigError(message + f" `python {program} --help` lists {which}.")


def unknown_option(group: str, option: str) -> ConfigError:
    """The error for a file that a group does not have."""
    near = difflib.get_close_matches(option, groups()[group], n=1, cutoff=0.5)
    hint = f" Did you mean {group}={near[0]}?" if near else ""
    return ConfigError(f"{group}={option}: no such option.{hint} Options of {group}: {', '.join(groups()[group])}.")


def bad_value(name: str, value: object = None) -> ConfigError:
    """The error for a value that a key's type refuses."""
    key = schema()[name]
    hint = ""
    if issubclass(key.type, Enum):
        near = difflib.get_close_matches(str(value), list(key.choices), n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]}?" if near else ""
    elif key.type is list and isinstance(value, str | int | float):
        hint = f" Use {name}=[{shown(value)}]."
    given = name if value is None else f"{name}={value}"
    return ConfigError(f"{given}: must be {key.accepts}.{hint}")


def shown(value: object) -> str:
    """A value as the command line takes it."""
    if isinstance(value, list):
        return f"[{','.join(map(shown, value))}]"
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)


def _nearest(name: str, leaf: str, siblings: list[str]) -> str | None:
    """First among the neighbours, then the same leaf elsewhere (`lr` → `optim.lr`), then any key or group that looks alike."""
    if near := difflib.get_close_matches(leaf, [key.rpartition(".")[2] for key in siblings], n=1, cutoff=0.6):
        return next(key for key in siblings if key.rpartition(".")[2] == near[0])
    # norm.fusd: a value taken for a key
    values = {member.name: key for key in siblings if issubclass(schema()[key].type, Enum) for member in schema()[key].type}  # type: ignore[attr-defined]
    if near := difflib.get_close_matches(leaf, values, n=1, cutoff=0.7):
        return f"{values[near[0]]}={near[0]}"
    if elsewhere := [key for key in schema() if key.rpartition(".")[2] == leaf]:
        return " or ".join(elsewhere)
    if near := difflib.get_close_matches(name, [*schema(), *groups()], n=1, cutoff=0.6):
        return near[0]
    leaves = {key.rpartition(".")[2]: key for key in schema()}
    if near := difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.7):
        return leaves[near[0]]
    return None


def _walk(cls: type, prefix: str) -> Iterator[Key]:
    hints, comments = typing.get_type_hints(cls), _comments(cls)
    instance = cls()
    for field in fields(cls):
        hint, name = hints[field.name], prefix + field.name
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from _walk(hint, f"{name}.")
            continue
        optional = False
        if isinstance(hint, types.UnionType):
            optional = True
            hint = next(arm for arm in typing.get_args(hint) if arm is not type(None))
        leaf = typing.get_origin(hint) or hint
        choices = {member.name: _comments(leaf).get(member.name, "") for member in leaf} if issubclass(leaf, Enum) else {}
        yield Key(name, leaf, optional, getattr(instance, field.name), comments.get(field.name, ""), choices)


def _comments(cls: type) -> dict[str, str]:
    """What stands beside each field, or each value of an enum, in schema.py: the one place where its meaning is written."""
    found = (re.match(r"    (\w+)(?:: | = )[^#]*?#\s*(.*)", line) for line in getsource(cls).splitlines())
    return {match[1]: match[2] for match in found if match}
