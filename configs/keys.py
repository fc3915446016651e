"""Names of the configuration: which keys exist, what each accepts, and which key a misspelt name means."""

import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from math import inf
from pathlib import Path

from configs.schema import Choice, Config

FOLDER = Path(__file__).parent


class ConfigError(ValueError):
    """A configuration that can't run. The message names the key, what was given, what is accepted and what to do."""


@dataclass(frozen=True)
class Key:
    """One value of the configuration."""

    name: str  # dotted, as on the command line
    type: type  # of the value when it is not null
    optional: bool  # null is accepted
    default: object
    meaning: str
    range: tuple[float, float, float, float]  # at_least, above, at_most, below

    @property
    def choices(self) -> dict[str, str]:
        """The values of an enum, with their meanings."""
        return {choice.value: choice.meaning for choice in self.type} if issubclass(self.type, Choice) else {}

    @property
    def accepts(self) -> str:
        names = {bool: "true or false", int: "a whole number", float: "a number", list: "a list [a,b]", str: "text"}
        what = "one of " + ", ".join(self.choices) if self.choices else names[self.type]
        return what + (" or null" if self.optional else "")

    def refused(self, value: object) -> str | None:
        """The error for a number out of range."""
        at_least, above, at_most, below = self.range
        if not isinstance(value, int | float) or (at_least <= value <= at_most and above < value < below):  # not NaN
            return None
        limits = {"at least": at_least, "more than": above, "at most": at_most, "less than": below}
        bounds = [f"{words} {limit}" for words, limit in limits.items() if abs(limit) != inf]
        finite = ["finite"] if self.type is float and min(at_most, below) == inf else []
        return f"{self.name}={value}: must be {' and '.join(bounds + finite)}."


@cache
def schema() -> dict[str, Key]:
    """Every key by its dotted name, in the order of declaration."""
    return {key.name: key for key in _walk(Config)}


def sections() -> list[str]:
    return [field.name for field in fields(Config) if is_dataclass(field.type)]


@cache
def groups() -> dict[str, list[str]]:
    """Config groups and their options, which are the YAML files in a group's folder."""
    options: dict[str, list[str]] = {}
    for path in sorted(FOLDER.glob("*/*.yaml")):
        options.setdefault(path.parent.name, []).append(path.stem)
    return options


def unknown_key(name: str) -> ConfigError:
    """The error for a key that does not exist, with the name that was probably meant."""
    section = name.rpartition(".")[0]
    guess, siblings = _nearest(name), ", ".join(key.rpartition(".")[2] for key in _siblings(section))
    program, which = ("ablate.py", "its own keys") if section == "ablate" else ("train.py", "all keys")
    return ConfigError(
        f"{name}: no such key."
        + (f" Did you mean {guess}?" if guess else "")
        + (f" Keys of {section}: {siblings}." if section and siblings else "")
        + f" `python {program} --help` lists {which}."
    )


def unknown_option(group: str, option: object) -> ConfigError:
    """The error for a file that a group does not have."""
    near = get_close_matches(str(option), groups()[group], n=1, cutoff=0.5)
    hint = f" Did you mean {group}={near[0]}?" if near else ""
    return ConfigError(f"{group}={shown(option)}: no such option.{hint} Options of {group}: {', '.join(groups()[group])}.")


def bad_value(name: str, value: object = None) -> ConfigError:
    """The error for a value that the type of a key, or a section, refuses."""
    given = name if value is None else f"{name}={value}"
    if name in sections():
        return ConfigError(f"{given}: {name} is a group of keys. Set one of them: {', '.join(_siblings(name))}.")
    key, hint = schema()[name], ""
    if near := get_close_matches(str(value), key.choices, n=1, cutoff=0.5):
        hint = f" Did you mean {near[0]}?"
    elif key.type is list and isinstance(value, str | int | float):
        hint = f" Use {name}=[{shown(value)}]."
    return ConfigError(f"{given}: must be {key.accepts}.{hint}")


def shown(value: object) -> str:
    """A value as the command line takes it."""
    if isinstance(value, list):
        return f"[{','.join(map(shown, value))}]"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def _siblings(section: str) -> list[str]:
    return [key for key in schema() if key.rpartition(".")[0] == section]


def _nearest(name: str) -> str | None:
    """Looks among the keys of the section, then for the same last name elsewhere (`lr` → `optim.lr`), then everywhere."""
    section, _, leaf = name.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in _siblings(section)}
    choices = {choice: f"{key}={choice}" for key in siblings.values() for choice in schema()[key].choices}
    leaves = {key.rpartition(".")[2]: key for key in schema()}
    anywhere = {key: key for key in [*schema(), *groups()]}
    # norm.fusd is a choice in place of a key
    for word, among, cutoff in ((leaf, siblings, 0.6), (leaf, choices, 0.7), (leaf, leaves, 1), (name, anywhere, 0.6)):
        if near := get_close_matches(word, among, n=1, cutoff=cutoff):
            return among[near[0]]
    return None


def _walk(cls: typing.Any, prefix: str = "") -> Iterator[Key]:
    for field in fields(cls):
        if is_dataclass(field.type):
            yield from _walk(field.type, f"{prefix}{field.name}.")
            continue
        optional = isinstance(field.type, types.UnionType)
        kind: typing.Any = typing.get_args(field.type)[0] if optional else field.type
        default = field.default if field.default_factory is MISSING else field.default_factory()
        yield Key(prefix + field.name, typing.get_origin(kind) or kind, optional, default, **field.metadata)
