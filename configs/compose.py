"""From overrides to a checked `Config`: Hydra composes, the schema types, the rules check."""

import json
import re
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from configs import keys, machine, rules
from configs.keys import ConfigError
from configs.schema import Config

# config.yaml starts from this node, so that OmegaConf checks all that it and the groups set against the dataclasses.
ConfigStore.instance().store(name="schema", node=Config)


def load(overrides: Sequence[str] = (), on: machine.Machine | None = None) -> Config:
    """The config of `python train.py <overrides>`, checked against the machine `on` (default: this one).

    Raises:
        ConfigError: a name, a value or a combination that can't be used.
    """
    cfg = compose_only(overrides)
    rules.check(cfg, on or machine.inspect(cfg.device))
    return cfg


def compose_only(overrides: Sequence[str]) -> Config:
    """`load` without the rules: names and types are checked; values are not checked against each other and the machine."""
    sections = {"hydra", *keys.groups(), *(key.partition(".")[0] for key in keys.schema())}
    for override in parse(overrides):
        name, option = override.key_or_group, override.value()
        if re.split("[./]", name)[0] not in sections:  # Hydra's error would have the section alone, without the key
            raise keys.unknown_key(name)
        several = override.is_sweep_override() or isinstance(option, list)
        if name in keys.groups() and (several or option not in keys.groups()[name]):
            more = f" Several options make several runs: -m {name}=A,B." if several else ""
            option = str(override.input_line).partition("=")[2]
            raise ConfigError(f"{keys.unknown_option(name, option)}{more}")
    try:
        return from_dict(composed(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise _explained(error) from error


def composed(overrides: Sequence[str] = ()) -> DictConfig:
    """What Hydra makes of the groups and the overrides."""
    started = GlobalHydra.instance().is_initialized()  # by @hydra.main, whose --help needs this
    with nullcontext() if started else hydra.initialize_config_dir(version_base="1.3", config_dir=str(keys.FOLDER)):
        return hydra.compose("config", overrides=list(overrides))


def parse(overrides: Sequence[str]) -> list[Override]:
    """The overrides, as Hydra reads them.

    Raises:
        ConfigError: an argument that is no override.
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
                quoted = as_typed(key, value, known.type)
                raise ConfigError(
                    f"{text}: Hydra needs quotes around this value, and the shell around those: {quoted}."
                ) from None
            raise ConfigError(f"{text}: an override is written key=value, such as train.steps=100 or model=gpt2.") from None
        if parsed[-1].is_delete():
            raise ConfigError(f"{text}: no key can be taken away. Give it another value, or null where it accepts that.")
    return parsed


def as_typed(key: str, value: object, kind: type = str) -> str:
    """`key=value` as a user types it, with Hydra's quotes and the shell's quotes where they are needed."""
    return shlex.quote(f"{key}={_quoted(str(value), kind)}")


def _quoted(text: str, kind: type) -> str:
    if kind is list:
        return f"[{','.join(_quoted(item.strip(), str) for item in text.strip('[]').split(','))}]"
    return text if re.fullmatch(r"[A-Za-z0-9_./+-]+", text) else json.dumps(text.strip("\"'"), ensure_ascii=False)


def from_dict(plain: DictConfig | dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """The config in a dict or in Hydra's DictConfig, with single values overridden. A key that it lacks gets its default.

    Raises:
        ConfigError: a key that the schema lacks, or a value of the wrong type.
    """
    try:
        given = OmegaConf.to_container(OmegaConf.create(plain), throw_on_missing=True)
        config = OmegaConf.merge(OmegaConf.structured(Config), given)
        for override in parse(overrides):
            name = override.get_key_element().lstrip("+")
            if name in keys.groups():
                raise ConfigError(f"{override.input_line}: a resumed run keeps its {name}. Override single keys instead.")
            if name.partition(".")[0] != "hydra":
                OmegaConf.update(config, name, override.value())
        cfg = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise _explained(error) from error
    assert isinstance(cfg, Config)
    if cfg.optim.warmup_steps is None:  # a resumed run with more steps keeps this number
        cfg.optim.warmup_steps = max(cfg.train.steps, 0) // 20
    cfg.folder = cfg.folder and str(Path(cfg.folder).expanduser())
    cfg.resume = cfg.resume and str(Path(cfg.resume).expanduser())
    cfg.data.name = cfg.data.called  # the config.yaml of a run then has the name
    return cfg


def to_dict(cfg: Config) -> dict[str, Any]:
    """Plain containers and plain strings, for YAML, checkpoints and W&B. `from_dict` is the reverse."""
    return OmegaConf.to_container(OmegaConf.structured(cfg), enum_to_str=True)  # type: ignore[return-value]


def to_yaml(cfg: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(cfg)))


def _explained(error: BaseException) -> ConfigError:
    """An error of Hydra or OmegaConf, with the key, what it accepts, and the nearest valid name."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__
    if cause is None:
        return ConfigError(str(error))
    name = cause.full_key or ""
    if isinstance(cause, InterpolationResolutionError):  # the message names what is missing, such as an environment variable
        return ConfigError(f"{name}: {str(cause.msg).splitlines()[0]}.")
    if name in keys.schema() or name in keys.sections():
        return keys.bad_value(name, getattr(cause, "value", None))
    return keys.unknown_key(name) if name else ConfigError(str(cause))
