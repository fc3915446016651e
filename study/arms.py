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
from model import GPT
from training.tracking import settle

RATE, SEED = "optim.lr", "seed"
FOLDER = keys.FOLDER / "study"
WORDS: tuple[str, ...] = ("claim", "source", "limits")
FIELDS = {"claim", "source", "limits", "arguments", "arms"}  # of a file


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
        affecting = [*keys.affecting("weights", "results", "speed"), "compare.diverged", "compare.probe_every", "eval.every"]

        def of(cfg: Config) -> dict[str, Any]:
            plain = configs.to_dict(cfg)
            return {key: plain[key] if "." not in key else plain[key.split(".")[0]][key.split(".")[1]] for key in affecting}

        return {"rates": self.rates, "seeds": self.seeds, "arms": {arm.name: of(arm.cfg) for arm in self.arms}}


def study_of(arguments: Sequence[str]) -> Study:
    """The study of a command line.

    Raises:
        ConfigError: a name, a value or a combination that can't be used, or a key that a comparison has no use for.
    """
    named = [text for text in arguments if text.startswith("study=")]
    if len(named) > 1:
        raise ConfigError(f"{' '.join(named)}: a comparison is one study. Name one.")
    given = [text for text in arguments if not text.startswith("study=")]
    found = _read(named[0].partition("=")[2]) if named else {}
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
        train, logging = arm.cfg.train, arm.cfg.logging
        for rate in rates:
            rules.check(arm.at(rate, seeds[0]), on)
        if train.compile and train.compile_mode in CUDA_GRAPHS:
            raise ConfigError(f"train.compile_mode={train.compile_mode}: compare.py makes the CUDA graph itself. Use default.")
        if train.precision is Precision.fp16 or arm.cfg.parallel is not Parallel.auto or arm.cfg.profile:
            raise ConfigError(
                f"train.precision={train.precision}, parallel={arm.cfg.parallel}, profile={keys.shown(arm.cfg.profile)}: "
                "compare.py takes train.precision=bf16 or fp32, parallel=auto and profile=false."
            )
        if 0 < (arm.cfg.compare.timing_cycles or 0) < LEAST_SAMPLES:
            raise ConfigError(
                f"compare.timing_cycles={arm.cfg.compare.timing_cycles}: takes 0, which times nothing, or {LEAST_SAMPLES} and "
                "more, of which an interval can be made."
            )
        arm.cfg.logging = settle(logging)[0]
    names = [arm.name for arm in arms]
    if (wanted := first.compare.baseline) is not None and wanted not in names:
        near = keys.did_you_mean(wanted, names)
        raise ConfigError(f"compare.baseline={wanted}: no such arm.{near} Arms: {', '.join(names)}.")
    if first.resume not in ("never", "auto"):
        raise ConfigError(f"resume={first.resume}: a study goes on with folder=PATH resume=auto and the same arguments.")
    words: dict[str, str] = {name: " ".join(str(found[name]).split()) for name in WORDS if name in found}
    return Study(arms, rates, seeds, words)


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
    if not isinstance(found, dict) or set(found) - FIELDS:
        raise ConfigError(
            f"study={name}: takes {', '.join(sorted(FIELDS))}, got {found if isinstance(found, str) else [*found]}."
        )
    return found
