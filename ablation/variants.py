"""What a command line of ablate.py asks for: configurations, and the arms and cells of each. Everything is refused here that
can be refused without data or a model."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from omegaconf import OmegaConf

import configs
from ablation.arms import switched
from configs import Config, ConfigError, compose, keys, machine, rules
from configs.schema import DropoutMasks, LossImpl, NormImpl, Switch, WandbMode
from measure.comparison import AGAIN, FUSED, NANOGPT, TORCH
from measure.tables import label
from training.tracking import agent_job, with_defaults

NOT_IN_ABLATE = {  # the keys that ablate.py refuses, and why
    "train.compile": "is compared too. Use ablate.compile=true.",
    "deterministic": "would change the operators. Leave it out.",
    "profile": "is done by ablate.py itself, for each cell on a GPU. Leave it out.",
}
OmegaConf.register_new_resolver(  # for the help
    "prenorm.refused", lambda: "".join(f"  {key:<33}  {why}\n" for key, why in NOT_IN_ABLATE.items())
)
EAGER, COMPILED, PARITY = "eager", "compiled", "parity"  # the parts of an ablation


@dataclass(frozen=True)
class Variant:
    """One of the swept configurations, whose arms differ in norm.impl alone, or in loss.impl."""

    cfg: Config
    overrides: dict[str, str]  # the swept keys
    refused: dict[str, str]  # arms that this configuration can't have, and why

    @property
    def modes(self) -> list[str]:
        # compiled is torch in a model that is compiled whole, the norms and the loss alike
        compiled = self.cfg.train.compile and self.subject != NormImpl.compiled
        return [EAGER] * self.cfg.ablate.eager + [COMPILED] * compiled

    @property
    def subject(self) -> str:
        """The arm that the verdict is about: fused, or else the last."""
        ours = [arm for arm in self.cfg.ablate.arms if arm != NANOGPT and arm not in self.refused]
        return FUSED if FUSED in ours else ours[-1]

    def arms(self, mode: str) -> list[str]:
        """The names of a cell's arms: the control first, the subject last, so that all pairs have it as their second."""
        left = {TORCH, self.subject, *self.refused}
        if mode == COMPILED:
            left.add(NormImpl.compiled)  # which there is torch
        others = [arm for arm in self.cfg.ablate.arms if arm not in left]
        return [TORCH, AGAIN, *others, self.subject]

    @property
    def tested(self) -> list[str]:
        """The arms that have a parity test: eager ones of ours that can take the shared dropout masks."""
        shared = copy.deepcopy(self.cfg)
        shared.norm.dropout_masks = DropoutMasks.shared
        arms = [arm for arm in self.arms(EAGER)[2:] if arm != NANOGPT] if shared.ablate.parity_seeds else []
        return [arm for arm in arms if not why_not(shared, arm)]

    @property
    def parts(self) -> list[str]:
        return [*self.modes, *([PARITY] if self.tested else [])]


def why_not(cfg: Config, arm: str) -> str:
    """Why another library's arm can't have this configuration here; empty where it can."""
    return "" if arm == NANOGPT else " ".join(rules.refused_by_library(switched(cfg, arm), machine.inspect(cfg.device)))


def variants_of(arguments: Sequence[str]) -> list[Variant]:
    """The configurations of a command line. key=A,B gives two.

    Raises:
        ConfigError: a name, a value or a combination that can't be used, or a key whose values are what is compared.
    """
    swept = set(compose.swept(arguments))
    if "folder" in swept:
        raise ConfigError("folder has several values, and an ablation has one folder. Name one.")
    found: list[Variant] = []
    for job in compose.jobs(arguments):
        check_ablation(job)
        cfg = configs.compose_only(job, "ablate")
        on = machine.inspect(cfg.device)
        # As the arms will have it, whatever the config says.
        cfg = switched(cfg, TORCH)
        cfg.train.compile = on.device == "cuda" if cfg.ablate.compile is None else cfg.ablate.compile
        rules.check(cfg, on)
        check_arms(cfg)
        if with_defaults(cfg.logging)[0].wandb is not WandbMode.disabled and agent_job():
            raise ConfigError("an ablation is several runs, a W&B agent's job is one. Sweep with ablate.py KEY=A,B instead.")
        pairs = (override.partition("=")[::2] for override in job)
        refused = {arm: why for arm in cfg.ablate.arms if (why := why_not(cfg, arm))}
        found.append(Variant(cfg, {key: value for key, value in pairs if key in swept}, refused))
        if not found[-1].modes:
            raise ConfigError("ablate.eager=false: leaves nothing to time. Use ablate.compile=true, with fused among the arms.")
    used = [switched(one.cfg, arm) for one in found for arm in one.cfg.ablate.arms if arm != NANOGPT]
    rules.check_given(compose.given(arguments), used, "ablate.py")
    for variant in found:
        for arm, why in variant.refused.items():
            if variant.subject == TORCH or all(arm in other.refused for other in found):
                raise ConfigError(f"ablate.arms: {arm} can't take part in {label(variant.overrides)}. {why}")
    return found


def check_ablation(overrides: Sequence[str]) -> None:
    """Raises ConfigError, one line per override, for keys that `python ablate.py` sets itself or has no use for."""
    given = [(text, text.partition("=")[0].lstrip("+")) for text in overrides]
    switch = next((text.partition("=")[2] for text, key in reversed(given) if key == "ablate.switch"), Switch.norm)
    refused = NOT_IN_ABLATE | {f"{switch}.impl": "is what ablate.py compares. Use ablate.arms=[torch,compiled,fused]."}
    rules.raise_if(f"{text}: {key} {refused[key]}" for text, key in given if key in refused)


def check_arms(cfg: Config) -> None:
    """Raises ConfigError: ablate.arms are not what `python ablate.py` can compare."""
    switch, arms = cfg.ablate.switch, cfg.ablate.arms
    known = [*(NormImpl if switch is Switch.norm else LossImpl), NANOGPT]
    given = f"ablate.arms=[{','.join(arms)}]"
    if unknown := [arm for arm in arms if arm not in known]:
        mean = keys.did_you_mean(unknown[0], known)
        raise ConfigError(f"{given}: {unknown[0]} is none of {', '.join(known)}.{mean}")
    if "torch" not in arms or not set(arms) - {"torch", NANOGPT} or len(set(arms)) < len(arms):
        raise ConfigError(f"{given}: needs torch, the control, and another value of {switch.key}, each once.")
    if (NANOGPT in arms) != bool(cfg.ablate.nanogpt):
        raise ConfigError(f"{given} with ablate.nanogpt={keys.shown(cfg.ablate.nanogpt)}: give both, or neither.")
