"""From overrides to a checked `Config`, and back: Hydra composes, the schema types, the rules check."""

import re
import shlex
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import asdict, fields
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

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
from measure.sources import note_yaml

# train.yaml starts from this node, so that OmegaConf checks all that it and the groups set against the dataclasses; ablate.yaml
# and compare.yaml start from theirs.
ConfigStore.instance().store(name="train_schema", node=Config)


Of = TypeVar("Of", bound=Config)


def load(overrides: Sequence[str] = (), on: machine.Machine | None = None, of: type[Config] = Config) -> Config:
    """The config of `python train.py <overrides>`, or of the program of `of`, checked against the machine `on` (default: this).

    Raises:
        ConfigError: a name, a value or a combination that can't be used.
    """
    [cfg] = check_jobs([overrides], lambda job: compose_only(job, of), on)
    return cfg


def compose_only(overrides: Sequence[str], of: type[Of]) -> Of:
    """`load` without the rules: names and types are checked; values are not checked against each other and the machine.

    Within a program of `hydra.main` it has the search path of that one, with --config-dir.
    """
    running = GlobalHydra.instance().is_initialized()
    with explained(of), nullcontext() if running else hydra.initialize_config_dir(str(keys.FOLDER), version_base=None):
        return typed(hydra.compose(of.program, list(overrides), return_hydra_config=True), overrides, of)


def typed(composed: DictConfig, overrides: Sequence[str], of: type[Of]) -> Of:
    """What Hydra composed of overrides, as values of the schema's types; what a command interpolates is resolved here, and
    nowhere else. Values that follow from others get theirs, which the config.yaml of a run then has."""
    check_text(overrides, of)
    if "hydra" in composed:
        chosen = [f"{group}/{option}" for group, option in composed.hydra.runtime.choices.items()]
        note_yaml(keys.FOLDER / f"{name}.yaml" for name in (of.program, "config", *chosen))
    sections, known = keys.sections(of), keys.schema(of)
    found = [f"{name}.{key}" for name in sections for key in composed[name]]
    found += [str(name) for name in composed if name not in (*sections, "hydra")]
    if added := [name for name in found if name not in known]:  # by +key=value
        raise keys.unknown_key(added[0], of)
    with explained(of):
        values: dict[str, Any] = {field.name: composed[field.name] for field in fields(of)}
        values |= {name: OmegaConf.to_object(one) for name, one in values.items() if OmegaConf.is_config(one)}
    cfg = of(**values)
    if cfg.optim.warmup_steps is None:  # a resumed run with more steps keeps this number
        cfg.optim.warmup_steps = max(cfg.train.steps, 0) // 20
    cfg.folder = cfg.folder and str(machine.expanded(cfg.folder))
    cfg.resume = str(machine.expanded(cfg.resume))
    cfg.data.name = cfg.data.called
    return cfg


def check_jobs(
    jobs: Sequence[Sequence[str]], composed: Callable[[Sequence[str]], Config], on: machine.Machine | None = None
) -> list[Config]:
    """The configs of the jobs of one command, each given by its overrides.

    Raises:
        ConfigError: a job can't start, or a key that they have does nothing in any of them.
    """
    found = []
    for job in jobs:
        try:
            found.append(cfg := composed(job))
            if cfg.resume in ("never", "auto"):  # else the config is that of the resumed run
                rules.check(cfg, on or machine.inspect(cfg.device))
        except ConfigError as error:
            raise ConfigError(f"{error}\n(in the job {' '.join(job)})") if len(jobs) > 1 else error from None
    if all(cfg.resume in ("never", "auto") for cfg in found):
        rules.check_given((name for job in jobs for name in given(job)), found)
    return found


# ---- overrides ---------------------------------------------------------------------------------------------------------------


def parse(overrides: Sequence[str]) -> list[Override]:
    """The overrides, as Hydra reads them."""
    with explained():
        return OverridesParser.create().parse_overrides(list(overrides))


def check_text(overrides: Sequence[str], of: type[Config]) -> None:
    """Raises ConfigError for a number, true or None as a text: Hydra would make 20240105 of 2024_01_05, and a name of None."""
    known = keys.schema(of)
    for one in parse(overrides):
        for name, value in _values(one).items():
            key = known.get(name)
            is_text = key and key.type in (str, str | None, list[str], list[str] | None)
            numbers = any(isinstance(each, bool | int | float) for each in (value if isinstance(value, list) else [value]))
            if key and is_text and (numbers or str(one.input_line).endswith("=None")):
                raise ConfigError(
                    f"{one.input_line}: takes text ({key.metadata['meaning']}). Text that looks like a number, true or None "
                    f"""needs quotes, as in '{name}="TEXT"'. null is no text."""
                )


def _values(one: Override) -> dict[str, Any]:
    """What an override gives, by key: section={key: value, …} several. The values of a sweep are parsed again for each job."""
    name, value = one.key_or_group, one.value()
    if isinstance(value, dict):
        return {f"{name}.{key}": of for key, of in value.items()}
    return {name: value}


def given(overrides: Sequence[str]) -> list[str]:
    """The names of keys and groups in the overrides."""
    return [name for one in parse(overrides) for name in _values(one)]


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
        name, several = one.get_key_element(), one.is_sweep_override()
        if several and not one.is_discrete_sweep():
            raise ConfigError(f"{one.input_line}: gives no values to sweep. List them: {name}=A,B.")
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
    with explained():
        config = OmegaConf.merge(OmegaConf.structured(Config), _literal(_as_named_today(plain)))
        for one in parse(overrides):
            if one.key_or_group in keys.GROUPS:
                raise ConfigError(f"{one.input_line}: a resumed run keeps its groups. Override single keys of it instead.")
            OmegaConf.update(config, one.key_or_group, one.value())
    assert isinstance(config, DictConfig)
    return typed(config, overrides, Config)


def _as_named_today(given: dict[str, Any]) -> dict[str, Any]:
    """The plain config of an older run under the keys of this version."""
    given = deepcopy(given)
    given.pop("ablate", None)
    given.pop("compare", None)
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


# ---- errors of Hydra and OmegaConf -------------------------------------------------------------------------------------------


@contextmanager
def explained(of: type[Config] = Config) -> Iterator[None]:
    """Raises an error of Hydra or OmegaConf as a ConfigError: its first sentence with the key, or the nearest valid name of the
    keys of `of`."""
    try:
        yield
    except OverrideParseException as error:
        raise ConfigError(
            f"{error.override}: Hydra can't read this. Write key=value without dashes, such as train.steps=100. Some values "
            """need quotes for Hydra within quotes for the shell: 'folder="~/runs"', 'data.files=["~/a.txt",b.txt]'."""
        ) from error
    except (HydraException, OmegaConfBaseException) as error:
        if isinstance(error, MissingConfigException) and error.options:
            group, _, option = str(error.missing_cfg_file).rpartition("/")
            near = keys.did_you_mean(option, error.options)
            said = f"{group}={option}: no such option.{near} Options of {group}: {', '.join(error.options)}."
            raise ConfigError(said) from error
        cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
        key, said = getattr(cause, "full_key", None), str(cause).partition("\n")[0].rstrip(".")
        if not key:
            raise ConfigError(str(error)) from error
        if isinstance(cause, ConfigAttributeError | ConfigKeyError) and not key.startswith("hydra"):
            raise keys.unknown_key(key, of) from error
        list_ = " Write a list as '[a,b]', with quotes for the shell." if "ListConfig" in said else ""
        raise ConfigError(f"{key}: {said}.{list_}") from error
    except yaml.YAMLError as error:  # which names the file
        raise ConfigError(" ".join(str(error).split())) from error
    except (ValueError, OSError) as error:  # Hydra says what options don't go together, and makes folders
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if isinstance(error, BrokenPipeError) or not frame.f_globals["__name__"].startswith(("hydra.", "pathlib")):
            raise
        raise ConfigError(f"{error.filename}: {error.strerror}." if isinstance(error, OSError) else str(error)) from error
