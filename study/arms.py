"""The arms of a study: what the command line or a file of configs/study/ sweeps, but for learning rates and seeds."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import configs
from configs import Config, ConfigError, keys, machine, rules
from configs.schema import CUDA_GRAPHS, Parallel, Precision
from measure.statistics import LEAST_SAMPLES
from measure.tables import flat
from model import GPT
from training.tracking import with_defaults

RATE, SEED = "optim.lr", "seed"
FOLDER = keys.FOLDER / "study"
WORDS = ("claim", "source", "limits")  # of a file, beside its arguments and arms


@dataclass(frozen=True)
class Arm:
    """One model, trained at every learning rate with every seed.

    Args:
        fill: called with the model before its step is captured, and for its initial weights. It may set weights and register
            hooks of gradients. No key sets it: benchmarks/study_proofs.py makes an arm with it that has to be worse.
    """

    name: str
    cfg: Config
    fill: Callable[[GPT], object] = lambda model: None

    def at(self, rate: float, seed: int) -> Config:
        """The config of one run: that of `python train.py` with the same keys."""
        cfg = copy.deepcopy(self.cfg)
        cfg.optim.lr, cfg.seed = rate, seed
        return cfg


@dataclass(frozen=True)
class Study:
    arms: list[Arm]
    rates: list[float]
    seeds: list[int]
    words: dict[str, str]  # claim, source and limits of a named study

    @property
    def cfg(self) -> Config:
        """What all arms share: data, sizes of the report, W&B."""
        return self.arms[0].cfg

    @property
    def baseline(self) -> Arm:
        wanted = self.cfg.compare.baseline
        return next((arm for arm in self.arms if arm.name == wanted), self.arms[0])

    @property
    def facts(self) -> dict[str, Any]:
        """What has to agree where a study goes on."""
        affecting = {*keys.affecting("weights", "results", "speed"), "compare.diverged", "compare.probe_every", "eval.every"}
        of = {arm.name: flat(configs.to_dict(arm.cfg)) for arm in self.arms}
        arms = {name: {key: value for key, value in every.items() if key in affecting} for name, every in of.items()}
        return {"rates": self.rates, "seeds": self.seeds, "arms": arms}


def study_of(arguments: Sequence[str]) -> Study:
    """The study of a command line.

    Raises:
        ConfigError: a name, a value or a combination that can't be used, or a key that a comparison has no use for.
    """
    named = [text for text in arguments if text.startswith("study=")]
    given = [text for text in arguments if text not in named]
    found = _read(named[-1].partition("=")[2]) if named else {}
    own = {one.get_key_element() for one in configs.parse(given)}
    shared = [text for text in found.get("arguments", []) if configs.parse([text])[0].get_key_element() not in own]
    parsed = {one.get_key_element(): one for one in configs.parse([*shared, *given])}
    if taken := [key for key in parsed if key.startswith("hydra.") or (key == "folder" and parsed[key].is_sweep_override())]:
        raise ConfigError(f"{taken[0]}: a study has one folder. Use folder=PATH.")
    rates, seeds = (_values(parsed.pop(key, None), key) for key in (RATE, SEED))
    overrides = [str(one.input_line) for one in parsed.values()]
    swept = {key for key, one in parsed.items() if one.is_sweep_override()}
    arms = {}
    for name, more in (found.get("arms") or {"": []}).items():
        for job in configs.jobs([*overrides, *more]):
            label = " ".join([*([name] if name else []), *(text for text in job if text.partition("=")[0] in swept)])
            if label in arms:
                raise ConfigError(f"{label or 'an arm'} comes twice. Leave one.")
            arms[label or "this configuration"] = configs.compose_only(job)
    return _checked([Arm(name, cfg) for name, cfg in arms.items()], rates, seeds, found)


def _checked(arms: list[Arm], rates: list[Any], seeds: list[Any], found: dict[str, Any]) -> Study:
    first = arms[0].cfg
    rates, seeds = rates or [first.optim.lr], seeds or [first.seed]
    if len(set(rates)) < len(rates) or len(set(seeds)) < len(seeds):
        raise ConfigError("optim.lr or seed: a value comes twice. Leave one.")
    on = machine.inspect(first.device)
    for arm in arms:
        cfg = arm.cfg
        for rate in rates:
            rules.check(arm.at(rate, seeds[0]), on)
        graphs = cfg.train.compile and cfg.train.compile_mode in CUDA_GRAPHS
        if graphs or cfg.train.precision is Precision.fp16 or cfg.parallel is not Parallel.auto or cfg.profile:
            raise ConfigError(
                f"train.precision={cfg.train.precision}, train.compile_mode={cfg.train.compile_mode}, parallel={cfg.parallel}, "
                f"profile={keys.shown(cfg.profile)}: compare.py takes train.precision=bf16 or fp32, "
                "train.compile_mode=default, parallel=auto and profile=false."
            )
        if 0 < (cfg.compare.timing_cycles or 0) < LEAST_SAMPLES:
            raise ConfigError(
                f"compare.timing_cycles={cfg.compare.timing_cycles}: takes 0, which times nothing, or {LEAST_SAMPLES} and "
                "more, of which an interval can be made."
            )
        cfg.logging = with_defaults(cfg.logging)[0]
    names = [arm.name for arm in arms]
    if (wanted := first.compare.baseline) is not None and wanted not in names:
        near = keys.did_you_mean(wanted, names)
        raise ConfigError(f"compare.baseline={wanted}: no such arm.{near} Arms: {', '.join(names)}.")
    if first.resume not in ("never", "auto"):
        raise ConfigError(f"resume={first.resume}: a study goes on with folder=PATH resume=auto and the same arguments.")
    return Study(arms, rates, seeds, {name: " ".join(str(found[name]).split()) for name in WORDS if name in found})


def _values(one: Any, key: str) -> list[Any]:
    """The values of an override, as numbers; none where there is no override."""
    if one is None:
        return []
    texts = list(one.sweep_string_iterator()) if one.is_sweep_override() else [str(one.value())]
    try:
        return [float(text) if key == RATE else int(text) for text in texts]
    except ValueError:
        raise ConfigError(f"{one.input_line}: {key} takes numbers: {key}={'1e-3,3e-3' if key == RATE else '1,2,3'}.") from None


def _read(name: str) -> dict[str, Any]:
    """A study of configs/study/ by its name, or of any file by its path."""
    path = Path(name) if name.endswith(".yaml") else FOLDER / f"{name}.yaml"
    known = sorted(path.stem for path in FOLDER.glob("*.yaml"))
    if not path.is_file():
        near = keys.did_you_mean(name, known)
        raise ConfigError(f"study={name}: no such study.{near} Studies: {', '.join(known)}; or the path of a .yaml file.")
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    takes = {*WORDS, "arguments", "arms"}
    if not isinstance(found, dict) or set(found) - takes:
        raise ConfigError(f"study={name}: takes {', '.join(sorted(takes))}, got {', '.join(found or [])}.")
    return found
