"""From overrides to a checked `Config`, and back: Hydra composes, the schema types, the rules check."""

import re
import shlex
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

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


def compose_only(overrides: Sequence[str] = (), primary: str = "config") -> Config:
    """`load` without the rules: names and types are checked; values are not checked against each other and the machine."""
    return typed(composed(overrides, primary))


def composed(overrides: Sequence[str], primary: str = "config") -> DictConfig:
    """The whole config of a command, with Hydra's node. In a program of `hydra.main` it has that one's search path."""
    parse(overrides)
    running = GlobalHydra.instance().is_initialized()
    with explained(), nullcontext() if running else hydra.initialize_config_dir(str(keys.FOLDER), version_base=None):
        return hydra.compose(primary, list(overrides), return_hydra_config=True)


def typed(composed: DictConfig) -> Config:
    """What Hydra composed, as values of the schema's types; what a command interpolates is resolved here, and nowhere else."""
    with explained():
        own = OmegaConf.masked_copy(composed, [str(name) for name in composed if name != "hydra"])
        return _finished(OmegaConf.merge(OmegaConf.structured(Config), _literal(OmegaConf.to_container(own, resolve=True))))


# ---- overrides ---------------------------------------------------------------------------------------------------------------


def parse(overrides: Sequence[str]) -> list[Override]:
    """The overrides, as Hydra reads them. Raises ConfigError for a number, true or None as a text: Hydra would make 20240105 of
    2024_01_05, and a name of None."""
    loader = GlobalHydra.instance().config_loader() if GlobalHydra.instance().is_initialized() else None
    with explained():
        parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
    for one in parsed:
        name, value = one.key_or_group, one.value()  # each value of a sweep is parsed again, as one of its run
        if any(key.startswith(f"{name}.") for key in keys.schema()) and name not in keys.GROUPS:
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


def swept(overrides: Sequence[str]) -> list[str]:
    """The names that have several values."""
    return [one.get_key_element() for one in parse(overrides) if one.is_sweep_override()]


def jobs(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each run of a sweep, as Hydra will make them: all combinations of the values. The last of a key counts.

    Raises:
        ConfigError: no value, such as glob() of what is no group, or an interval, which needs another sweeper.
    """
    values: dict[str, list[str]] = {}
    for one in parse(overrides):
        key = one.get_key_element()
        values[key] = [str(one.input_line)]
        if one.is_sweep_override():
            with explained():
                found = one.sweep_string_iterator() if one.is_discrete_sweep() else ()
                values[key] = [f"{key}={value}" for value in found]
        if not values[key]:
            raise ConfigError(f"{one.input_line}: gives no values to sweep. List them: {key}=A,B.")
    return list(map(list, product(*values.values())))


# ---- stored configs ----------------------------------------------------------------------------------------------------------


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
    with explained():
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
def explained() -> Iterator[None]:
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
    except (HydraException, OmegaConfBaseException) as error:
        cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
        unknown = re.match("Could not override '(.*?)'", str(error))
        key = unknown[1] if unknown else str(getattr(cause, "full_key", None) or "")
        if isinstance(cause, ConfigAttributeError | ConfigKeyError) and not key.startswith(("hydra", *keys.schema())):
            raise keys.unknown_key(key) from error
        list_ = " Write a list as '[a,b]', with quotes for the shell." if "ListConfig" in str(cause) else ""
        raise ConfigError(
            f"{key}: {str(cause).splitlines()[0].rstrip('.')}.{list_}" if key and cause else str(error)
        ) from error
    except ValueError as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if not frame.f_globals["__name__"].startswith("hydra."):  # which says what options don't go together
            raise
        raise ConfigError(str(error)) from error
