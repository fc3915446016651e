"""From overrides to a checked `Config`: Hydra composes, the schema types, the rules check."""

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from configs import keys, machine, rules
from configs.keys import ConfigError
from configs.schema import Choice, Config

# config.yaml starts from this node, so that OmegaConf checks all that it and the groups set against the dataclasses.
ConfigStore.instance().store(name="schema", node=Config)


def load(overrides: Sequence[str] = (), on: machine.Machine | None = None) -> Config:
    """The config of `python train.py <overrides>`, checked against the machine `on` (default: this one).

    Raises:
        ConfigError: a name, a value or a combination that can't be used.
    """
    cfg = compose_only(overrides)
    rules.check(cfg, on or machine.inspect(cfg.device))
    rules.check_given(given(overrides), [cfg])
    return cfg


def compose_only(overrides: Sequence[str] = ()) -> Config:
    """`load` without the rules: names and types are checked; values are not checked against each other and the machine."""
    return composed(overrides)[0]


def composed(overrides: Sequence[str]) -> tuple[Config, str]:
    """`compose_only`, and the option of the group model. What the command interpolates is resolved here, and nowhere else."""
    parse(overrides)
    with _explained(), hydra.initialize_config_dir(version_base="1.3", config_dir=str(keys.FOLDER)):
        found = hydra.compose("config", overrides=list(overrides), return_hydra_config=True)
        model = str(found.hydra.runtime.choices.get("model"))
        with open_dict(found):
            del found["hydra"]
        return _finished(found), model


def parse(overrides: Sequence[str]) -> list[Override]:
    """The overrides, as Hydra reads them. Raises ConfigError for an unknown key, and for a number, true or None as a text:
    Hydra would make 20240105 of 2024_01_05, and a name of None."""
    with _explained():
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    for one in parsed:
        name, value = one.key_or_group, one.value()  # each value of a sweep is parsed again, as one of its run
        if name not in [*keys.schema(), *keys.GROUPS]:
            raise keys.unknown_key(name)
        is_text = name in keys.schema() and keys.schema()[name].type in (str, str | None, list[str], list[str] | None)
        numbers = any(isinstance(each, bool | int | float) for each in (value if isinstance(value, list) else [value]))
        if is_text and (numbers or str(one.input_line).endswith("=None")):
            raise ConfigError(
                f"{one.input_line}: takes text ({keys.schema()[name].metadata['meaning']}). Text that looks like a number, "
                f"""true or None needs quotes, as in '{name}="TEXT"'. null is no text."""
            )
    return parsed


def given(overrides: Sequence[str]) -> list[str]:
    """The names of keys and groups in the overrides."""
    return [one.key_or_group for one in parse(overrides)]


def jobs(overrides: Sequence[str]) -> Iterator[list[str]]:
    """The overrides of each run of a sweep, as Hydra will make them: all combinations of the values."""
    values, parsed = [], parse(overrides)
    with _explained():
        for one in parsed:
            swept = one.is_sweep_override()
            key = one.get_key_element()
            values.append([f"{key}={value}" for value in one.sweep_string_iterator()] if swept else [str(one.input_line)])
    return map(list, product(*values))


def as_typed(key: str, text: str) -> str:
    """`key=text` as a user types it. A text that is no plain path gets Hydra's quotes, and the shell's around them."""
    if not re.fullmatch(r"[\w.+-]*/[\w./+-]*", text, re.ASCII):
        text = '"' + _literal(text).replace('"', r"\"") + '"'
    return shlex.quote(f"{key}={text}")


def _literal(value: Any) -> Any:
    """The value, with its text such that OmegaConf gives it back unchanged and sees no interpolation in it."""
    if isinstance(value, dict):
        return {key: _literal(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_literal(one) for one in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def from_dict(plain: dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """The config that `to_dict` made plain, with single values overridden. A key that it lacks gets its default.

    All text in `plain` is taken as it is: a stored config reads nothing of the environment. Overrides may interpolate.

    Raises:
        ConfigError: an unknown key, a value of a wrong type, or an override of a whole group.
    """
    parsed = parse(overrides)
    for one in parsed:
        if one.key_or_group in keys.GROUPS:
            raise ConfigError(f"{one.input_line}: a resumed run keeps its groups. Override single keys of it instead.")
    with _explained():
        config = OmegaConf.merge(OmegaConf.structured(Config), _literal(_as_named_today(plain)))
        for one in parsed:
            OmegaConf.update(config, one.key_or_group, one.value())
        return _finished(config)


def _finished(config: Any) -> Config:
    """The config with the values that follow from others, which the config.yaml of a run then has."""
    cfg = OmegaConf.to_object(config)
    assert isinstance(cfg, Config)
    if cfg.optim.warmup_steps is None:  # a resumed run with more steps keeps this number
        cfg.optim.warmup_steps = max(cfg.train.steps, 0) // 20
    cfg.folder = cfg.folder and str(machine.expanded(cfg.folder))
    cfg.resume = str(machine.expanded(cfg.resume))
    cfg.data.name = cfg.data.called
    return cfg


def _as_named_today(given: dict[str, Any]) -> dict[str, Any]:
    """The plain config of an older run under the keys of this version."""
    given = deepcopy(given)
    given.get("data", {}).pop("processes", None)
    given.get("checkpoint", {}).pop("background", None)
    compiled = given.get("train", {}).pop("compile_loss", None)
    if compiled is not None:
        given["loss"] = {"impl": "compiled" if compiled else "torch", **given.get("loss", {})}
    return given


def to_dict(cfg: Config) -> dict[str, Any]:
    """Plain containers and plain strings, for YAML, checkpoints and W&B. `from_dict` is the reverse."""
    return asdict(cfg, dict_factory=lambda pairs: {key: v.value if isinstance(v, Choice) else v for key, v in pairs})


def to_yaml(cfg: Config) -> str:
    return yaml.safe_dump(to_dict(cfg), sort_keys=False, allow_unicode=True, width=1000)


def read_yaml(path: Path) -> Config:
    """The config that `to_yaml` wrote to a file. Raises ConfigError if it is not there, or not as this program writes it."""
    try:
        plain = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(plain, dict):
            raise ConfigError("no keys and values")
        return from_dict(plain)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error


@contextmanager
def _explained() -> Iterator[None]:
    """Raises errors of Hydra and OmegaConf as a ConfigError: their first sentence with the key, or the nearest valid name."""
    try:
        yield
    except OverrideParseException as error:
        raise ConfigError(
            f"{error.override}: Hydra can't read this. Write key=value without dashes, such as train.steps=100. Some values "
            """need quotes for Hydra within quotes for the shell: 'folder="~/runs"', 'data.files=["~/a.txt",b.txt]'."""
        ) from error
    except MissingConfigException as error:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        near = keys.did_you_mean(option, options := error.options or [])
        raise ConfigError(f"{group}={option}: no such option.{near} Options of {group}: {', '.join(options)}.") from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
        key = getattr(cause, "full_key", None)
        list_ = " Write a list as '[a,b]', with quotes for the shell." if "ListConfig" in str(cause) else ""
        raise ConfigError(f"{key}: {str(cause).splitlines()[0].rstrip('.')}.{list_}" if key else str(error)) from error
