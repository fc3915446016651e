"""From overrides to a checked `Config`: Hydra composes, the schema types it, the rules pass it."""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import reduce
from operator import getitem
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from configs import keys, machine, rules
from configs.keys import ConfigError
from configs.schema import Config

# config.yaml starts from this node, so that whatever it and the groups set is checked against the dataclasses.
ConfigStore.instance().store(name="schema", node=Config)


def load(overrides: Sequence[str] = (), on: machine.Machine | None = None) -> Config:
    """The config of `python train.py <overrides>`.

    Args:
        overrides: as on the command line, such as ["model=gpt2", "train.steps=10"].
        on: the machine to check against; None: this one.

    Raises:
        ConfigError: a name, a value or a combination that can't be used.
    """
    cfg = compose_only(overrides)
    rules.check(cfg, on or machine.inspect(cfg.device))
    return cfg


def compose_only(overrides: Sequence[str]) -> Config:
    """`load` without the rules: names and types are checked, values not yet against each other and the machine."""
    parse(overrides)
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(keys.FOLDER)):
            return typed(compose(config_name="config", overrides=list(overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        raise _explained(error) from error


def defaults() -> dict[str, Any]:
    """What each key is in a plain run: the schema's default, or what the groups that config.yaml picks make of it."""
    started = GlobalHydra.instance().is_initialized()  # by @hydra.main, of whose help this is a part
    with nullcontext() if started else initialize_config_dir(version_base="1.3", config_dir=str(keys.FOLDER)):
        composed = OmegaConf.to_container(compose(config_name="config"), enum_to_str=True)
    return {name: reduce(getitem, name.split("."), composed) for name in keys.schema()}  # type: ignore[arg-type]


def parse(overrides: Sequence[str]) -> list[Override]:
    """The overrides, once their names are known to exist. Values are left to the schema.

    Hydra takes any key after `+`; here a key that the schema lacks is an error however it is written.
    """
    parsed = []
    for text in overrides:
        if text.startswith("-"):
            raise ConfigError(f"{text}: no such option. Settings are written key=value, without dashes: train.steps=100.")
        try:
            parsed.append(OverridesParser.create().parse_override(text))
        except HydraException:
            key, equals, value = text.partition("=")
            known = keys.schema().get(key.lstrip("+"))
            if equals and known and known.type in (str, list):
                why = "Hydra has a use of its own for an unquoted ~ (it takes keys away). " if "~" in value else ""
                quoted = as_typed(key, value, known.type)
                raise ConfigError(f"{text}: {why}This value needs quotes, and the shell some around them: {quoted}.") from None
            raise ConfigError(f"{text}: an override is written key=value, such as train.steps=100 or model=gpt2.") from None
        _check_names(parsed[-1])
    return parsed


def as_typed(key: str, value: object, kind: type = str) -> str:
    """`key=value` as a user types it, for texts that may need quotes: Hydra's, and around them the shell's."""
    return shlex.quote(f"{key}={_quoted(str(value), kind)}")


def _quoted(text: str, kind: type) -> str:
    if kind is list:
        return f"[{','.join(_quoted(item.strip(), str) for item in text.strip('[]').split(','))}]"
    return text if re.fullmatch(r"[A-Za-z0-9_./+-]+", text) else json.dumps(text.strip("\"'"), ensure_ascii=False)


def typed(composed: DictConfig) -> Config:
    """What Hydra composed, as dataclasses.

    Raises:
        ConfigError: a key that the schema lacks, or a value of the wrong type.
    """
    known, parts = set(keys.schema()), set(keys.sections())
    for name in _names(OmegaConf.to_container(composed)):
        if name not in known and name not in parts:
            raise keys.unknown_key(name)
    for name in sorted(OmegaConf.missing_keys(composed)):  # OmegaConf would take the default
        raise keys.bad_value(name, "???")
    try:
        cfg = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), composed))
    except OmegaConfBaseException as error:
        raise _explained(error) from error
    assert isinstance(cfg, Config)
    if cfg.optim.warmup_steps is None:  # settled here, so that a resumed run with more steps keeps its warm-up
        cfg.optim.warmup_steps = max(cfg.train.steps, 0) // 20
    cfg.folder = cfg.folder and str(machine.expanded(cfg.folder))
    cfg.resume = cfg.resume and str(machine.expanded(cfg.resume))
    cfg.data.name = cfg.data.called  # for all who read the config.yaml of a run
    return cfg


def to_dict(cfg: Config) -> dict[str, Any]:
    """Plain containers and plain strings, for YAML, checkpoints and W&B."""
    plain = OmegaConf.to_container(OmegaConf.structured(cfg), enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def from_dict(plain: dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """The reverse of `to_dict`, with single values overridden. Keys that an older `plain` lacks take their defaults."""
    base = OmegaConf.create(plain)
    for override in parse(overrides):
        name = override.get_key_element().lstrip("+")
        if name in keys.groups():
            raise ConfigError(f"{override.input_line}: a resumed run keeps its {name}. Override single keys instead.")
        if not name.startswith("hydra"):
            OmegaConf.update(base, name, override.value(), force_add=True)
    assert isinstance(base, DictConfig)
    return typed(base)


def to_yaml(cfg: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(cfg)))


def _check_names(override: Override) -> None:
    name, text = override.key_or_group, override.input_line
    if name.split(".")[0].split("/")[0] == "hydra":
        return  # Hydra's own settings, which it checks itself
    if override.is_delete():
        raise ConfigError(f"{text}: no key can be taken away. Give it another value, or null where it accepts that.")
    if override.value_type in (ValueType.INTERVAL_SWEEP, ValueType.GLOB_CHOICE_SWEEP):
        known = keys.schema().get(name)
        numbers = f" or {name}=range(1,4)" if known and known.type in (int, float) else ""
        raise ConfigError(f"{text}: a sweep needs its values, one after the other: {name}=A,B{numbers}.")
    added = override.is_add() and not override.is_force_add()
    if name in keys.groups():
        if override.is_add() or override.is_force_add():
            raise ConfigError(f"{text}: drop the +, {name} has a choice already.")
        for option in override.sweep_iterator() if override.is_sweep_override() else [override.value()]:
            if isinstance(option, list | dict):
                raise ConfigError(f"{text}: {name} takes one option. Several make several runs: -m {name}=A,B.")
            option = getattr(option, "text", option)  # of a quoted string
            if option not in keys.groups()[name]:
                raise keys.unknown_option(name, "null" if option is None else str(option))
    elif name in keys.schema():
        if added:
            raise ConfigError(f"{text}: drop the +, the key exists already.")
    elif name not in keys.sections():
        raise keys.unknown_key(name)
    else:
        values = None if override.is_sweep_override() else override.value()
        if not isinstance(values, dict):
            siblings = ", ".join(key for key in keys.schema() if key.startswith(f"{name}."))
            raise ConfigError(f"{text}: {name} is a group of keys. Set one of them: {siblings}.")
        for key, value in values.items():
            if value == "???":  # OmegaConf would pass over it
                raise keys.bad_value(f"{name}.{key}", "???")


def _names(tree: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of all leaves."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _names(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _explained(error: BaseException) -> ConfigError:
    """OmegaConf's complaint about a key, in the words of the schema."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__
    if cause is None:
        return ConfigError(str(error))
    name, value = cause.full_key or "", getattr(cause, "value", None)
    if isinstance(cause, InterpolationResolutionError):  # names what could not be found, such as an environment variable
        return ConfigError(f"{name}: {str(cause.msg).splitlines()[0]}.")
    if name in keys.schema():
        return keys.bad_value(name, _given(str(cause.msg)) if value is None else value)
    return keys.unknown_key(name) if name else ConfigError(str(cause))


def _given(message: str) -> str | None:
    """The value in OmegaConf's message, which puts it in quotes."""
    parts = message.split("'")
    return parts[1] if len(parts) > 2 and message.startswith(("Value '", "Invalid value '")) else None
