"""Names of the configuration: which keys exist, and which key a misspelt name means."""

from collections.abc import Sequence
from dataclasses import Field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args

from configs.schema import Choice, Config

FOLDER = Path(__file__).parent
# study/ has no options of a run: its files are for compare.py alone.
GROUPS = sorted({path.parent.name for path in FOLDER.glob("*/*.yaml")} - {"study"})


class ConfigError(ValueError):
    """A configuration that can't run. The message names the key, what was given, what is accepted and what to do."""


@cache
def schema() -> dict[str, Field]:
    """The field of every key by the key's dotted name, in the order of declaration. `metadata` has its meaning and limits."""
    found: dict[str, Field] = {}
    for field in fields(Config):
        if is_dataclass(field.type):
            found |= {f"{field.name}.{key.name}": key for key in fields(field.type)}
        else:
            found[field.name] = field
    return found


def affecting(*what: str) -> list[str]:
    """The keys on which this depends: weights, results, speed or nothing."""
    return [name for name, key in schema().items() if key.metadata["affects"] in what]


def not_in_ablate() -> dict[str, str]:
    """The keys that `python ablate.py` refuses, and why."""
    return {name: why for name, key in schema().items() if (why := key.metadata["not_in_ablate"])}


def choices(key: Field) -> dict[str, str]:
    """The values of an enum, with their meanings. Empty for other types."""
    kind: Any = get_args(key.type)[0] if isinstance(key.type, UnionType) else key.type
    return {choice.value: choice.meaning for choice in kind} if isinstance(kind, type) and issubclass(kind, Choice) else {}


def unknown_key(name: str) -> ConfigError:
    """The error for a key that does not exist, with the name that was probably meant and the keys beside it."""
    section, _, leaf = name.rpartition(".")
    section = section or name  # of a value for a whole section
    # the same name in another section (`lr` → `optim.lr`), or else one that is written alike
    near = [key for key in schema() if key.endswith(f".{leaf}")] or nearest(name, [*schema(), *GROUPS])
    beside = [key for key in schema() if key.startswith(f"{section}.")]
    return ConfigError(
        f"{name}: {'several keys; set one of them' if section == name and beside else 'no such key'}."
        + (f" Did you mean {near[0]}?" if near else "")
        + (f" Keys of {section}: {', '.join(beside)}." if beside else "")
        + " `python train.py --help` lists all keys."
    )


def nearest(name: str, among: Sequence[str]) -> list[str]:
    """The name that was probably meant, or none."""
    return get_close_matches(name, among, n=1, cutoff=0.75)


def shown(value: object) -> str:
    """A value as --help and messages show it."""
    if isinstance(value, list):
        return f"[{','.join(map(shown, value))}]"
    return {"None": "null", "True": "true", "False": "false", "\n": r"""$'"\n"'"""}.get(str(value), str(value))
