"""From overrides to a checked `Config`, and back: Hydra composes, the schema types, the rules check."""

import re
import shlex
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import asdict, fields, is_dataclass
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
from omegaconf import DictConfig, OmegaConf, open_dict
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
    """`load` without the rules: names and types are checked; values are not checked against each other and the machine.

    Within a program of `hydra.main` it has the search path of that one, with --config-dir.
    """
    parse(overrides)
    running = GlobalHydra.instance().is_initialized()
    with explained(), nullcontext() if running else hydra.initialize_config_dir(str(keys.FOLDER), version_base=None):
        return typed(hydra.compose(primary, list(overrides)))


def typed(composed: DictConfig) -> Config:
    """What Hydra composed, as values of the schema's types; what a command interpolates is resolved here, and nowhere else."""
    own = deepcopy(composed)
    with explained(), open_dict(own):
        own.pop("hydra", None)
        cfg = _finished(own)
    for part, of in {"": cfg, **{f"{name}.": of for name, of in vars(cfg).items() if is_dataclass(of)}}.items():
        if added := vars(of).keys() - {field.name for field in fields(of)}:
            raise keys.unknown_key(f"{part}{min(added)}")
    return cfg


def check_jobs(
    jobs: Sequence[list[str]], composed: Callable[[list[str]], DictConfig], program: str | None = None
) -> list[Config]:
    """The configs of jobs that are given by their overrides. If they are all jobs of a command of `program`, such as
    "train.py", a key does something in one of them.

    Raises:
        ConfigError: a job can't start, or a key that they have does nothing in any of them.
    """
    found, begun = [], []
    for job in jobs:
        try:
            parse(job)
            with explained():
                found.append(cfg := typed(composed(job)))
            if cfg.resume in ("never", "auto"):  # else the config is that of the resumed run
                rules.check(cfg, machine.inspect(cfg.device))
                begun.append(cfg)
        except ConfigError as error:
            raise ConfigError(f"{error}\n(in the job {' '.join(job)})") if len(jobs) > 1 else error from None
    if begun and program:
        rules.check_given((name for job in jobs for name in given(job)), begun, program)
    return found


# ---- overrides ---------------------------------------------------------------------------------------------------------------


def parse(overrides: Sequence[str]) -> list[Override]:
    """The overrides, as Hydra reads them. Raises ConfigError for a number, true or None as a text: Hydra would make 20240105 of
    2024_01_05, and a name of None."""
    with explained():
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    for one, name, value in ((each, *pair) for each in parsed for pair in _pairs(each)):
        is_text = name in keys.schema() and keys.schema()[name].type in (str, str | None, list[str], list[str] | None)
        numbers = any(isinstance(each, bool | int | float) for each in (value if isinstance(value, list) else [value]))
        if is_text and (numbers or str(one.input_line).endswith("=None")):
            raise ConfigError(
                f"{one.input_line}: takes text ({keys.schema()[name].metadata['meaning']}). Text that looks like a number, "
                f"""true or None needs quotes, as in '{name}="TEXT"'. null is no text."""
            )
    return parsed


def _pairs(one: Override) -> list[tuple[str, Any]]:
    """The names of an override and their values: several of section={key: value, …}. A sweep is parsed again for each run."""
    name, value = one.key_or_group, one.value()
    several = isinstance(value, dict) and name not in keys.schema()
    return [(f"{name}.{key}", each) for key, each in value.items()] if several else [(name, value)]  # type: ignore[union-attr]


def given(overrides: Sequence[str]) -> list[str]:
    """The names of keys and groups in the overrides."""
    return [name for one in parse(overrides) for name, _ in _pairs(one)]


def swept(overrides: Sequence[str]) -> list[str]:
    """The names that have several values."""
    return [one.get_key_element() for one in parse(overrides) if one.is_sweep_override()]


def jobs(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each run of a sweep: all combinations of the values. Of a key that comes twice, the last counts.

    Raises:
        ConfigError: an interval, which only a sweeper that searches can take values from.
    """
    values = {}
    for one in parse(overrides):
        name = one.get_key_element()
        if one.is_sweep_override() and not one.is_discrete_sweep():
            raise ConfigError(f"{one.input_line}: gives no values to sweep. List them: {name}=A,B.")
        several = one.is_sweep_override()
        values[name] = [f"{name}={value}" for value in one.sweep_string_iterator()] if several else [str(one.input_line)]
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
    except (HydraException, OmegaConfBaseException) as error:
        said: BaseException | None = error
        while said and not isinstance(said, ConfigError):
            said = said.__cause__ or said.__context__
        if said:  # of a resolver
            raise said from error
        if isinstance(error, MissingConfigException) and error.options:
            group, _, option = str(error.missing_cfg_file).rpartition("/")
            near = keys.did_you_mean(option, error.options)
            raise ConfigError(
                f"{group}={option}: no such option.{near} Options of {group}: {', '.join(error.options)}."
            ) from error
        cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
        overridden = re.match("Could not (?:override|append) .*?'(.*?)'", str(error))
        key = str(getattr(cause, "full_key", None) or (overridden[1] if overridden else ""))
        if isinstance(cause, ConfigAttributeError | ConfigKeyError) and not key.startswith("hydra"):
            raise keys.unknown_key(key) from error
        list_ = " Write a list as '[a,b]', with quotes for the shell." if "ListConfig" in str(cause) else ""
        raise ConfigError(
            f"{key}: {str(cause).splitlines()[0].rstrip('.')}.{list_}" if key and cause else str(error)
        ) from error
    except yaml.YAMLError as error:  # which names the file
        raise ConfigError(" ".join(str(error).split())) from error
    except (ValueError, OSError) as error:
        modules = (frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__))
        *_, module = (name for name in modules if not name.startswith("pathlib"))
        # Hydra says what options don't go together, and makes folders
        if not module.startswith("hydra.") or isinstance(error, ConfigError | BrokenPipeError):
            raise
        raise ConfigError(f"{error.filename}: {error.strerror}." if isinstance(error, OSError) else str(error)) from error
