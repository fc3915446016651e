"""The arms of a study: what the command line or an option of the group study sweeps, but for learning rates and seeds."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from sysconfig import get_path
from typing import Any

import configs
from configs import ConfigError, keys, machine, rules
from configs.schema import Parallel, Precision, WandbMode
from measure.statistics import LEAST_SAMPLES
from measure.tables import flat
from study.config import Config
from training.tracking import with_defaults

RATE, SEED = "optim.lr", "seed"
FRESH_SEEDS, AGAIN_SEEDS, MORE_SEEDS = 1001, 2001, 3001  # the first of those that no command gives
FOLDER = keys.FOLDER / "study"
PACKAGES = "{packages}"  # in the arguments of a study: where Python's packages are installed
WORDS = ("claim", "source", "limits")


@dataclass(frozen=True)
class Arm:
    """One model, trained at every learning rate with every seed."""

    name: str
    cfg: Config

    def at(self, rate: float, seed: int) -> Config:
        """The config of one run: that of `python train.py` with the same keys."""
        cfg = copy.deepcopy(self.cfg)
        cfg.optim.lr, cfg.seed = rate, seed
        return cfg

    def of_length(self, steps: int) -> "Arm":
        """With a schedule of so many steps."""
        cfg = copy.deepcopy(self.cfg)
        cfg.train.steps = steps
        return replace(self, cfg=cfg)


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
    def compared(self) -> list[int]:
        """The seeds that are compared: if there is a choice of rates, ones that had no part in it."""
        return self.seeds if len(self.rates) == 1 else [FRESH_SEEDS + i for i in range(self.cfg.compare.fresh)]

    @property
    def again(self) -> list[int]:
        """The baseline's seeds beside those, as many."""
        return [AGAIN_SEEDS + i for i in range(len(self.compared))]

    def facts(self, arm: Arm) -> dict[str, Any]:
        """The keys of an arm that its runs have to agree in."""
        affecting = {*keys.affecting("weights", "results", "speed"), "compare.diverged", "eval.every"}
        affecting |= {"compare.race_steps"}  # a race compares losses of one step
        every = flat(configs.to_dict(arm.cfg))
        return {key: value for key, value in every.items() if key in affecting - {RATE, SEED}}


def sizes_of(arguments: Sequence[str]) -> list[str]:
    """The sizes of the named study, if it is a ladder. Raises ConfigError for fewer than four."""
    sizes = list(configs.compose_only(_named(arguments), Config).compare.sizes)
    if 0 < len(sizes) < 4:
        raise ConfigError(f"compare.sizes has {', '.join(sizes)}. A law through three sizes predicts a fourth: give four.")
    return sizes


def _named(arguments: Sequence[str]) -> list[str]:
    """The argument that names a study, if any does."""
    return [text for text in arguments if text.startswith("study=")]


def study_of(arguments: Sequence[str], size: str = "") -> Study:
    """The study of a command line.

    Args:
        size: of a ladder.

    Raises:
        ConfigError: a name, a value or a combination that can't be used, or a key that a comparison has no use for.
    """
    named = _named(arguments)
    found, given = configs.compose_only(named, Config).compare, [text for text in arguments if text not in named]
    own = [text.replace(PACKAGES, get_path("purelib")) for text in [*found.arguments, *(found.sizes[size] if size else [])]]
    # of a key that comes twice, the last
    parsed = {one.get_key_element(): str(one.input_line) for one in configs.parse([*own, *given])}
    if only_in_files := {f"compare.{name}" for name in ("arguments", "arms", "sizes", *WORDS)} & parsed.keys():
        raise ConfigError(f"{min(only_in_files)}: belongs in a file of the group study. Write one, and give study=NAME.")
    rates, seeds = (_values(key, parsed.pop(key, None)) for key in (RATE, SEED))
    swept = set(configs.swept(list(parsed.values())))
    arms: dict[str, Config] = {}
    for name, more in (found.arms or {"": []}).items():
        if of_all := {RATE, SEED} & {one.get_key_element() for one in configs.parse(more)}:
            raise ConfigError(
                f"{min(of_all)} in the arm {name}: every arm is trained at all rates with all seeds. "
                "Give it in `arguments` or on the command line, for all arms."
            )
        for job in configs.jobs([*named, *parsed.values(), *more]):
            label = " ".join([*([name] if name else []), *(text for text in job if text.partition("=")[0] in swept)])
            label = label or "this configuration"
            if arms.setdefault(label, cfg := configs.compose_only(job, Config)) != cfg:
                raise ConfigError(f"{label}: two arms have this name. List their keys under different names, or sweep them.")
    words = {name: " ".join(text.split()) for name in WORDS if (text := getattr(found, name))}
    first = next(iter(arms.values()))
    made = [Arm(name, cfg) for name, cfg in arms.items()]
    rules.check_given(configs.given(given), list(arms.values()))
    if size and "logging.wandb" in configs.given(given) and first.logging.wandb not in (None, WandbMode.disabled):
        raise ConfigError(f"logging.wandb={first.logging.wandb}: compare.sizes is in no W&B run. Leave it out.")
    return _checked(Study(made, rates or [first.optim.lr], seeds or [first.seed], words))


def _values(key: str, override: str | None) -> list[Any]:
    """The values of an override, each once; none without an override."""
    texts = [text for job in configs.jobs([override]) for text in job] if override else []
    return list(dict.fromkeys(attrgetter(key)(configs.from_dict({}, [text])) for text in texts))


def _checked(study: Study) -> Study:
    on = machine.inspect(study.cfg.device)
    for arm, rate, seed in product(study.arms, study.rates, study.seeds):
        rules.check(arm.at(rate, seed), on)
    for cfg in (arm.cfg for arm in study.arms):
        if cfg.train.precision is Precision.fp16 or cfg.parallel is not Parallel.auto or cfg.profile:
            raise ConfigError(
                f"train.precision={cfg.train.precision}, parallel={cfg.parallel}, profile={keys.shown(cfg.profile)}: "
                "compare.py takes train.precision=bf16 or fp32, parallel=auto and profile=false."
            )
        if 0 < (cfg.compare.timing_cycles or 0) < LEAST_SAMPLES:
            raise ConfigError(
                f"compare.timing_cycles={cfg.compare.timing_cycles}: takes 0, which times nothing, or {LEAST_SAMPLES} and "
                "more, of which an interval can be made."
            )
        cfg.logging = with_defaults(cfg.logging)[0]
    if max(study.seeds) >= FRESH_SEEDS:
        raise ConfigError(f"seed={max(study.seeds)}: compare.py takes seeds below {FRESH_SEEDS}; it has its own from there on.")
    names, wanted = [arm.name for arm in study.arms], study.cfg.compare.baseline
    if wanted not in (None, *names):
        near = keys.did_you_mean(str(wanted), names)
        raise ConfigError(f"compare.baseline={wanted}: no such arm.{near} Arms: {', '.join(names)}.")
    return study
