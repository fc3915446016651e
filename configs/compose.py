"""From overrides to a checked `Config`, and back: Hydra composes, the schema types, the rules check."""

import json
import re
import shlex
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import hydra
import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from configs import keys, machine, rules
from configs.keys import ConfigError, as_config_errors
from configs.schema import Choice, Config
from measure.sources import note_yaml

Of = TypeVar("Of", bound=Config)


def register(of: type[Config]) -> None:
    """Makes a class of keys the node from which configs/PROGRAM.yaml starts: OmegaConf checks all that is set against it."""
    node = OmegaConf.structured(of)
    for name, key in keys.schema(of).items():
        if key.type in (str, str | None):  # takes text alone: OmegaConf would make 20240105 of 2024_01_05
            section, _, leaf = name.rpartition(".")
            (node[section] if section else node)._get_node(leaf)._set_flag("convert", False)
    ConfigStore.instance().store(f"{of.program}_schema", node)


register(Config)


def load(overrides: Sequence[str] = (), on: machine.Machine | None = None, of: type[Config] = Config) -> Config:
    """The config of `python train.py <overrides>`, or of the program of `of`, checked against the machine `on` (default: this).

    Raises:
        ConfigError: a name, a value or a combination that can't be used.
    """
    [cfg] = check_jobs([overrides], on, of)
    return cfg


def check_jobs(jobs: Sequence[Sequence[str]], on: machine.Machine | None = None, of: type[Config] = Config) -> list[Config]:
    """The configs of the jobs of one command, each given by its overrides.

    Raises:
        ConfigError: a job can't start, or a key that they have does nothing in any of them.
    """
    found = []
    for job in jobs:
        try:
            found.append(cfg := compose_only(job, of))
            if cfg.resume in ("never", "auto"):  # else the config is that of the resumed run
                rules.check(cfg, on or machine.inspect(cfg.device))
        except ConfigError as error:
            raise ConfigError(f"{error}\n(in the job {' '.join(job)})") if len(jobs) > 1 else error from None
    if all(cfg.resume in ("never", "auto") for cfg in found):
        rules.check_given((name for job in jobs for name in given(job)), found)
    return found


def compose_only(overrides: Sequence[str], of: type[Of]) -> Of:
    """`load` without the rules: names and types are checked; values are not checked against each other and the machine.

    Within a program of `hydra.main` it has the search path and the config of that one: --config-dir, --config-name.
    """
    running = GlobalHydra.instance().is_initialized()
    name = HydraConfig.get().job.config_name if HydraConfig.initialized() else of.program
    with explained(of), nullcontext() if running else hydra.initialize_config_dir(str(keys.FOLDER), version_base=None):
        composed = hydra.compose(name, list(overrides), return_hydra_config=True)
        chosen = [f"{group}/{option}" for group, option in composed.hydra.runtime.choices.items()]
        note_yaml(keys.FOLDER / f"{file}.yaml" for file in (name, "config", *chosen))
        with open_dict(composed):
            del composed["hydra"]
        return typed(composed, of)


def typed(composed: DictConfig, of: type[Of]) -> Of:
    """What Hydra composed, as values of the schema's types; what a command interpolates is resolved here, and nowhere else."""
    with explained(of):
        return _config(OmegaConf.to_container(composed, resolve=True), (), of)


def _config(plain: Any, overrides: Sequence[str], of: type[Of]) -> Of:
    """Values that follow from others get theirs, which the config.yaml of a run then has."""
    with explained(of):
        config = OmegaConf.unsafe_merge(ConfigStore.instance().load(f"{of.program}_schema.yaml").node, _literal(plain))
        for one in parse(overrides):
            if one.key_or_group in keys.GROUPS:
                raise ConfigError(f"{one.input_line}: a resumed run keeps its groups. Override single keys of it instead.")
            OmegaConf.update(config, one.key_or_group, one.value())
        cfg: Any = OmegaConf.to_object(config)
    if cfg.optim.warmup_steps is None:  # a resumed run with more steps keeps this number
        cfg.optim.warmup_steps = max(cfg.train.steps, 0) // 20
    cfg.data.name = cfg.data.called
    return cfg


# ---- overrides ---------------------------------------------------------------------------------------------------------------


def parse(overrides: Sequence[str]) -> list[Override]:
    """The overrides, as Hydra reads them. In a program of `hydra.main`, glob(*) is every option of a group."""
    running = GlobalHydra.instance()
    with explained():
        parser = OverridesParser.create(running.config_loader() if running.is_initialized() else None)
        return parser.parse_overrides(list(overrides))


def given(overrides: Sequence[str]) -> list[str]:
    """The names of keys and groups in the overrides."""
    return [one.key_or_group for one in parse(overrides)]


def swept(overrides: Sequence[str]) -> list[str]:
    """The names that have several values."""
    return [one.get_key_element() for one in parse(overrides) if one.is_sweep_override()]


def jobs(overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each run of a sweep: all combinations of the values. Of a key that comes twice, the last counts."""
    with explained():
        return BasicSweeper.split_arguments(parse(overrides), max_batch_size=None)[0]


# ---- stored configs ----------------------------------------------------------------------------------------------------------


def as_typed(key: str, text: str) -> str:
    """`key=text` as a user types it. A text that is no plain path gets Hydra's quotes, and the shell's around them."""
    if not re.fullmatch(r"[\w.+-]*/[\w./+-]*", text, re.ASCII):
        text = QuotedString(_literal(text), Quote.double).with_quotes()
    return shlex.quote(f"{key}={text}")


def _literal(plain: Any) -> Any:
    r"""The values, with their text such that OmegaConf gives it back unchanged and sees no interpolation in it: `${` gets a
    backslash, and as many more as stand before it. In JSON each is two."""
    return json.loads(re.sub(r"(\\*)\$\{", r"\1\1\\\\${", json.dumps(plain)))


def from_dict(plain: dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """The config that `to_dict` made plain, with single values overridden. A key that it lacks gets its default.

    All text in `plain` is taken as it is: a stored config reads nothing of the environment. Overrides may interpolate.

    Raises:
        ConfigError: an unknown key, a value of a wrong type, or an override of a whole group.
    """
    return _config(_as_named_today(plain), overrides, Config)


def _as_named_today(given: dict[str, Any]) -> dict[str, Any]:
    """The plain config of an older run under the keys of this version."""
    given = deepcopy(given)
    given.pop("ablate", None)
    given.pop("compare", None)
    given.get("data", {}).pop("processes", None)
    given.get("checkpoint", {}).pop("background", None)
    given.get("train", {}).pop("compile_mode", None)
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
        cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
        if key := getattr(cause, "full_key", None):
            if isinstance(cause, ConfigAttributeError | ConfigKeyError) and not key.startswith("hydra"):
                raise keys.unknown_key(key, of) from error
            said = f"{key}: {str(cause).partition(chr(10))[0].rstrip('.')}."
            said += next((f" {hint}" for part, hint in HINTS.items() if part in said), "")
        else:
            said = " ".join(str(error).partition("Config search path")[0].split())
        if isinstance(error, MissingConfigException) and error.options:
            said += keys.did_you_mean(str(error.missing_cfg_file).rpartition("/")[2], error.options)
        raise ConfigError(said) from error
    except (ValueError, OSError, yaml.YAMLError) as error:  # Hydra says what options don't go together, and makes folders
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if isinstance(error, BrokenPipeError) or not frame.f_globals["__name__"].startswith(("hydra.", "pathlib", "yaml")):
            raise
        with as_config_errors():
            raise


HINTS = {  # by a part of what OmegaConf says
    "ListConfig": "Write a list as '[a,b]', with quotes for the shell.",
    "type hint": """Text that looks like a number, true or false needs quotes, as in 'KEY="TEXT"'.""",
}
