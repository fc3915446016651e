"""The keys of ablate.py: those of train.py and a section of its own, and what a command can't ask of it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import configs
from configs import ConfigError, compose, keys
from configs.schema import Choice, LossImpl, MlpImpl, NormImpl, key

NANOGPT = "nanogpt"  # an arm that is no value of norm.impl
REFUSED = {  # the keys that ablate.py refuses, and why
    "train.compile": "is compared too. Use ablate.compile=true.",
    "train.graph": "is compared too. Use ablate.graph=true.",
    "deterministic": "would change the operators. Leave it out.",
    "profile": "is done by ablate.py itself, for each cell on a GPU. Leave it out.",
}


class Switch(Choice):
    norm = "norm", "norm.impl, what runs at the norm sites"
    loss = "loss", "loss.impl, what computes the loss"
    mlp = "mlp", "mlp.impl, what computes the activation and product of gated MLPs"

    @property
    def key(self) -> str:
        return f"{self}.impl"

    @property
    def impls(self) -> type[Choice]:
        return {Switch.norm: NormImpl, Switch.loss: LossImpl, Switch.mlp: MlpImpl}[self]


@dataclass
class AblateConfig:
    """What is compared, and how long it is measured."""

    switch: Switch = key(Switch.norm, "whose impl is compared; the others are held fixed", "nothing")
    arms: list[str] = key(("torch", "compiled", "fused"), "impls, or nanogpt; two are timed twice (A/A)", "nothing")
    nanogpt: str | None = key(None, "arms has nanogpt: a checkout of nanoGPT, whose step is timed too", "nothing")
    cycles: int = key(12, "cycles of two blocks per arm; a multiple of the arms favours none", "nothing", at_least=6)
    block_steps: int | None = key(None, "steps of a block, after one uncounted; null: 250 ms", "nothing", at_least=1)
    warmup_steps: int = key(3, "steps before the first block of an arm", "nothing", at_least=1)
    compile: bool | None = key(None, "true: eager and compiled; false: eager; null: compiled too on a GPU", "nothing")
    eager: bool = key(True, "false: compiled cells alone; needs ablate.compile=true, or a GPU", "nothing")
    graph: bool | None = key(None, "true: as one CUDA graph too; null: on a GPU if a step is short", "nothing")
    processes: int = key(1, "processes, one after the other, whose variation enters intervals", "nothing", at_least=1)
    parity_seeds: int = key(5, "parity runs of each arm; 0: no parity", "nothing", at_least=0)
    parity_steps: int = key(10, "optimizer steps of a parity run", "nothing", at_least=1)


@dataclass
class Config(configs.Config):
    program: ClassVar[str] = "ablate"
    together: ClassVar[bool] = True
    ablate: AblateConfig = field(default_factory=AblateConfig)


compose.register(Config)


def check(cfg: Config, names: Iterable[str]) -> None:
    """Raises ConfigError: a command gives keys, `names`, that ablate.py sets itself or has no use for, or arms that it can't
    compare."""
    refused = REFUSED | {cfg.ablate.switch.key: "is what ablate.py compares. Use ablate.arms=[torch,compiled,fused]."}
    if broken := [f"{name} {refused[name]}" for name in names if name in refused]:
        raise ConfigError("\n".join(broken))
    switch = cfg.ablate.switch
    if not keys.counts(switch.key, cfg):
        only = keys.only(switch.key, keys.schema(Config)[switch.key])
        raise ConfigError(f"ablate.switch={switch}: {switch.key} is read only with {only}; here {keys.here(only, cfg)}.")
    arms, known = cfg.ablate.arms, [*cfg.ablate.switch.impls, NANOGPT]
    given = f"ablate.arms=[{','.join(arms)}]"
    if unknown := [arm for arm in arms if arm not in known]:
        mean = keys.did_you_mean(unknown[0], known)
        raise ConfigError(f"{given}: {unknown[0]} is none of {', '.join(known)}.{mean}")
    if "torch" not in arms or not set(arms) - {"torch", NANOGPT} or len(set(arms)) < len(arms):
        raise ConfigError(f"{given}: needs torch, the control, and another value of {cfg.ablate.switch.key}, each once.")
    if (NANOGPT in arms) != bool(cfg.ablate.nanogpt):
        raise ConfigError(f"{given} with ablate.nanogpt={keys.shown(cfg.ablate.nanogpt)}: give both, or neither.")
