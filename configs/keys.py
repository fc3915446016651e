"""Names of the configuration: which keys exist, where they count, what help says of them, and what a misspelt name means."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import Field, fields, is_dataclass
from difflib import get_close_matches
from itertools import chain
from operator import attrgetter
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import yaml

from configs.schema import Affects, Choice, Config

FOLDER = Path(__file__).parent
GROUPS = ("data", "experiment", "model", "tokenizer")  # of a run
PROGRAMS = ("ablate", "compare")  # with a section of keys of their own, which has their name


class ConfigError(ValueError):
    """A configuration that can't run. The message names the key, what was given, what is accepted and what to do."""


@contextmanager
def as_config_errors(argument: str = "") -> Iterator[None]:
    """Raises what the data or the model refuse, and an OSError of a path, as a ConfigError. Its message begins with `argument`,
    such as resume=PATH."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, OSError, yaml.YAMLError) as error:
        where, why = argument, str(error)
        if isinstance(error, OSError) and error.strerror:
            where, why = argument or str(error.filename), f"{error.strerror}."
        raise ConfigError(f"{where}: {why}" if where else why) from error


def schema(of: type[Config] = Config) -> dict[str, Field]:
    """The field of every key by the key's dotted name, in the order of declaration. `metadata` has its meaning and limits."""
    found: dict[str, Field] = {}
    for field in fields(of):
        inner = {f"{field.name}.{key.name}": key for key in fields(field.type)} if is_dataclass(field.type) else {}
        found |= inner or {field.name: field}
    return found


def affecting(*what: Affects) -> list[str]:
    """The keys on which this depends."""
    return [name for name, key in schema().items() if key.metadata["affects"] in what]


def only(name: str, key: Field) -> str:
    """Where a key counts, as it is declared, with whole names; empty if it always does."""
    return re.sub(r"(?<![\w.])(?=\w+!?=)", name[: name.rfind(".") + 1], key.metadata["only"])


def counts(name: str, cfg: Config) -> bool:
    """Whether a key counts in this config."""
    words = only(name, schema(type(cfg))[name])
    return not words or holds(words, cfg)


def holds(words: str, cfg: Config) -> bool:
    """Whether a config has what these words say: a.b=VALUE,VALUE and c!=VALUE or ..."""

    def has(condition: str) -> bool:
        name, _, values = condition.partition("=")
        return (attrgetter(name.rstrip("!"))(cfg) in yaml.safe_load(f"[{values}]")) is not name.endswith("!")

    return any(all(map(has, each.split(" and "))) for each in words.split(" or "))


def here(words: str, cfg: Config) -> str:
    """The keys in these words with their values in a config."""
    return ", ".join(f"{name}={shown(attrgetter(name)(cfg))}" for name in dict.fromkeys(re.findall(r"([\w.]+)!?=", words)))


def limits(key: Field) -> str:
    """Which numbers a key takes, in words; empty if any."""
    return " and ".join(f"{word.replace('_', ' ')} {limit}" for word, limit in key.metadata["limits"].items())


# ---- for people --------------------------------------------------------------------------------------------------------------


def help_text(cfg: Config) -> str:
    """What `train.py --help` prints, with the values of this config. Hydra fills in the groups."""
    return (FOLDER / "help.txt").read_text(encoding="utf-8").format(keys=describe(cfg))


def describe(cfg: Config, section: str = "") -> str:
    """Every key, or those of one section, with its value and its meaning; under a key with choices, each with its meaning."""
    lines: dict[str, list[str]] = {}
    for name, key in schema(type(cfg)).items():
        own = lines.setdefault(name.rpartition(".")[0], [""])
        needs = f"with {words}: " if (words := only(name, key)) else ""
        takes = f" ({words})" if (words := limits(key)) else ""
        own.append(f"  {f'{name}={shown(attrgetter(name)(cfg))}':<33}  {needs}{key.metadata['meaning']}{takes}")
        wide = max(map(len, choices(key)), default=0)
        own += [f"  {'':<34}   {choice:<{wide}}  {meaning}" for choice, meaning in choices(key).items()]
    return "\n".join(lines[section] if section else chain(*lines.values())) + "\n"


def choices(key: Field) -> dict[str, str]:
    """The values of an enum, with their meanings. Empty for other types."""
    kind: Any = get_args(key.type)[0] if isinstance(key.type, UnionType) else key.type
    return {choice.value: choice.meaning for choice in kind} if isinstance(kind, type) and issubclass(kind, Choice) else {}


def unknown_key(name: str, of: type[Config]) -> ConfigError:
    """The error for a key that does not exist, with the name that was probably meant and the keys beside it."""
    section, _, leaf = name.rpartition(".")
    if name in GROUPS:  # Hydra puts what a file of the group has under the group's name, unless it begins so
        return ConfigError(f"{name} is a group. Begin your own file of it with the line `# @package _global_`.")
    if (program := name.partition(".")[0]) in {*PROGRAMS} - {of.program}:
        return ConfigError(
            f"{name}: {program}.py has such keys, {of.program}.py has none. `python {program}.py --help` lists them."
        )
    beside = [key for key in schema(of) if key.startswith(f"{section}.")]
    # the same name in another section (`lr` → `optim.lr`), or else one that is written alike
    twin = next((f" Did you mean {key}?" for key in schema(of) if key.endswith(f".{leaf}")), "")
    near = twin or did_you_mean(name, [*schema(of), *(field.name for field in fields(of)), *GROUPS])
    others = f" Keys of {section}: {', '.join(beside)}." if beside else ""
    return ConfigError(f"{name}: no such key.{near}{others} `python {of.program}.py --help` lists all keys.")


def did_you_mean(name: str, among: Sequence[str]) -> str:
    """A sentence with the name that was probably meant; empty if there is none."""
    near = get_close_matches(name, among, n=1, cutoff=0.75)
    return f" Did you mean {near[0]}?" if near else ""


def shown(value: object) -> str:
    """A value as --help and messages show it."""
    if isinstance(value, list | dict):
        ends = "[]" if isinstance(value, list) else "{}"
        return ends[0] + ",".join(map(shown, value)) + ends[1]
    return {"None": "null", "True": "true", "False": "false", "\n": r"""$'"\n"'"""}.get(str(value), str(value))
