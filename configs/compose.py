"""From overrides to a checked `Config`: Hydra composes, the schema types, the rules check."""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from operator import attrgetter
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

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


def compose_only(overrides: Sequence[str] = ()) -> Config:
    """`load` without the rules: names and types are checked; values are not checked against each other and the machine."""
    parse(overrides)
    with _explained(overrides), hydra.initialize_config_dir(version_base="1.3", config_dir=str(keys.FOLDER)):
        composed = hydra.compose("config", overrides=list(overrides))
    return from_dict(composed)


def parse(overrides: Sequence[str]) -> list[Override]:
    """The overrides, as Hydra reads them. Raises ConfigError for an argument that sets no key or group."""
    with _explained():
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    for one in parsed:
        if one.is_delete():
            raise ConfigError(f"{one.input_line}: no key can be taken away. Give it another value.")
        if one.key_or_group in keys.GROUPS and not (one.is_sweep_override() or isinstance(one.value(), str)):
            raise ConfigError(f"{one.input_line}: a group has one option, the name of a file in configs/{one.key_or_group}/.")
    return parsed


def jobs(overrides: Sequence[str]) -> Iterator[list[str]]:
    """The overrides of each run of a sweep, as Hydra will make them: all combinations of the values."""
    values = []
    for one in parse(overrides):
        if one.value_type in (ValueType.INTERVAL_SWEEP, ValueType.GLOB_CHOICE_SWEEP):
            key = one.get_key_element()
            raise ConfigError(f"{one.input_line}: a sweep needs its values: {key}=A,B, or for numbers {key}=range(1,4).")
        swept = one.is_sweep_override()
        values.append([f"{one.get_key_element()}={v}" for v in one.sweep_string_iterator()] if swept else [str(one.input_line)])
    return map(list, product(*values))


def as_typed(key: str, value: object) -> str:
    """`key=value` as a user types it, with Hydra's quotes and the shell's quotes where they are needed."""
    plain = re.fullmatch(r"[A-Za-z0-9_./+-]+", str(value))
    return shlex.quote(f"{key}={value if plain else json.dumps(str(value), ensure_ascii=False)}")


def from_dict(plain: DictConfig | dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """The config in a dict or in Hydra's DictConfig, with single values overridden. A key that it lacks gets its default.

    Raises:
        ConfigError: a key that the schema lacks, or a value of the wrong type.
    """
    parsed = parse(overrides)
    if groups := [one.input_line for one in parsed if one.key_or_group in keys.GROUPS]:
        raise ConfigError(f"{groups[0]}: a resumed run keeps its groups. Override single keys instead.")
    with _explained(overrides):
        given = _as_named_today(OmegaConf.to_container(OmegaConf.create(plain), throw_on_missing=True))
        config = OmegaConf.merge(OmegaConf.structured(Config), given)
        for one in parsed:
            OmegaConf.update(config, one.key_or_group, one.value())
        cfg = OmegaConf.to_object(config)
    assert isinstance(cfg, Config)
    if cfg.optim.warmup_steps is None:  # a resumed run with more steps keeps this number
        cfg.optim.warmup_steps = max(cfg.train.steps, 0) // 20
    cfg.folder = cfg.folder and str(machine.expanded(cfg.folder))
    cfg.resume = str(machine.expanded(cfg.resume))
    cfg.data.name = cfg.data.called  # the config.yaml of a run then has the name
    return cfg


def _as_named_today(given: Any) -> Any:
    """The plain config of an older run under the keys of this version."""
    if isinstance(train := given.get("train"), dict) and "compile_loss" in train:
        given = {**given, "train": {key: value for key, value in train.items() if key != "compile_loss"}}
        if train["compile_loss"] is not None:
            given["loss"] = {"impl": "compiled" if train["compile_loss"] else "torch", **given.get("loss", {})}
    return given


def to_dict(cfg: Config) -> dict[str, Any]:
    """Plain containers and plain strings, for YAML, checkpoints and W&B. `from_dict` is the reverse."""
    return OmegaConf.to_container(OmegaConf.structured(cfg), enum_to_str=True)  # type: ignore[return-value]


def to_yaml(cfg: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(cfg)))


@contextmanager
def _explained(overrides: Sequence[str] = ()) -> Iterator[None]:
    """Raises errors of Hydra and OmegaConf as a ConfigError with the key, what it accepts, and the nearest valid name."""
    try:
        yield
    except OverrideParseException as error:
        raise ConfigError(
            f"{error.override}: Hydra can't read this. Write key=value without dashes, such as train.steps=100. Some values "
            """need quotes for Hydra within quotes for the shell: 'folder="~/runs"', 'data.files=["~/a.txt",b.txt]'."""
        ) from error
    except MissingConfigException as error:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        options = error.options or []
        near = "".join(f" Did you mean {group}={name}?" for name in keys.nearest(option, options))
        raise ConfigError(f"{group}={option}: no such option.{near} Options of {group}: {', '.join(options)}.") from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
        if not isinstance(cause, OmegaConfBaseException):
            raise ConfigError(str(error)) from error
        name, why = re.sub(r"\[\d+\]$", "", str(cause.full_key)), str(cause).splitlines()[0].rstrip(".")
        if name in keys.schema():
            default = keys.shown(attrgetter(name)(Config()))
            raise ConfigError(f"{name}: {why}. The default is {name}={default}.") from error
        if not any(key.startswith(f"{name}.") for key in keys.schema()):  # of such a section OmegaConf has no key
            typed = (text.lstrip("+").partition("=")[0] for text in overrides)
            name = next((key for key in typed if key.startswith(f"{name}.")), name)
        raise keys.unknown_key(name) from error
