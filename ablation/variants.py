"""What a command line of ablate.py asks for: configurations, and the arms and cells of each. Everything is refused here that
can be refused without data or a model."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import configs
from ablation.arms import switched
from ablation.config import NANOGPT, Config, check
from configs import ConfigError, keys, machine, rules
from configs.schema import DropoutMasks, NormImpl, WandbMode
from measure.comparison import FUSED, TORCH, TWIN, is_twin
from measure.store import comparable
from measure.tables import flat, label
from training.tracking import agent_job, with_defaults

EAGER, COMPILED, GRAPH, COMPILED_GRAPH, PARITY = "eager", "compiled", "graph", "compiled graph", "parity"  # the parts
IS_COMPILED, AS_GRAPH = (COMPILED, COMPILED_GRAPH), {EAGER: GRAPH, COMPILED: COMPILED_GRAPH}
IS_GRAPH = tuple(AS_GRAPH.values())


@dataclass(frozen=True)
class Variant:
    """One of the swept configurations, whose arms differ in norm.impl alone, or in loss.impl, or in mlp.impl."""

    cfg: Config
    overrides: dict[str, str]  # the swept keys
    refused: dict[str, str]  # arms that this configuration can't have, and why
    no_graph: str = ""  # why its step can't be one CUDA graph

    @property
    def modes(self) -> list[str]:
        # compiled is torch in a model that is compiled whole, the norms and the loss alike
        compiled = self.cfg.train.compile and self.subject != NormImpl.compiled
        cells = [EAGER] * self.cfg.ablate.eager + [COMPILED] * compiled
        graph = self.cfg.ablate.graph is not False and not self.no_graph
        return cells + [AS_GRAPH[cell] for cell in cells if graph]

    @property
    def subject(self) -> str:
        """The arm that the verdict is about: fused, or else the last."""
        ours = [arm for arm in self.cfg.ablate.arms if arm != NANOGPT and arm not in self.refused]
        return FUSED if FUSED in ours else ours[-1]

    def arms(self, mode: str) -> list[str]:
        """The names of a cell's arms: torch first, the subject last, so that all pairs have it as their second.

        The pair that is the fastest as a rule is timed twice, for A/A: the subject, and compiled sites or else PyTorch's. A/A
        of another arm tells little: steps that wait for the host scatter many times as much as those that don't.
        """
        left = {TORCH, self.subject, *self.refused}
        if mode in IS_COMPILED:
            left.add(NormImpl.compiled)  # which there is torch
        if mode in IS_GRAPH:
            left.add(NANOGPT)  # whose step is its own
        others = [arm for arm in self.cfg.ablate.arms if arm not in left]
        twice = {self.subject, NormImpl.compiled if NormImpl.compiled in others else TORCH}
        names = dict.fromkeys([TORCH, *others, self.subject])
        return [own for name in names for own in ([name, name + TWIN] if name in twice else [name])]

    @property
    def tested(self) -> list[str]:
        """The arms that have a parity test: eager ones of ours that can take the shared dropout masks."""
        shared = copy.deepcopy(self.cfg)
        shared.norm.dropout_masks = DropoutMasks.shared
        arms = (
            [arm for arm in self.arms(EAGER) if arm not in (TORCH, NANOGPT) and not is_twin(arm)]
            if shared.ablate.parity_seeds
            else []
        )
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
    swept = set(configs.swept(arguments))
    found: list[Variant] = []
    for job in configs.jobs(arguments):
        cfg = configs.compose_only(job, Config)
        check(cfg, configs.given(job))
        on = machine.inspect(cfg.device)
        # As the arms will have it, whatever the config says.
        cfg = switched(cfg, TORCH)
        cfg.train.compile = on.device == "cuda" if cfg.ablate.compile is None else cfg.ablate.compile
        no_graph = rules.why_no_graph(cfg, on)
        if cfg.ablate.graph and no_graph:
            raise ConfigError(f"ablate.graph=true: {no_graph}. Use ablate.graph=false.")
        rules.check(cfg, on)
        if with_defaults(cfg.logging)[0].wandb is not WandbMode.disabled and agent_job():
            raise ConfigError("an ablation is several runs, a W&B agent's job is one. Sweep with ablate.py KEY=A,B instead.")
        pairs = (override.partition("=")[::2] for override in job)
        refused = {arm: why for arm in cfg.ablate.arms if (why := why_not(cfg, arm))}
        found.append(Variant(cfg, {key: value for key, value in pairs if key in swept}, refused, no_graph))
        if not found[-1].modes:
            raise ConfigError("ablate.eager=false: leaves nothing to time. Use ablate.compile=true, with fused among the arms.")
    used = [switched(one.cfg, arm) for one in found for arm in one.cfg.ablate.arms if arm != NANOGPT]
    rules.check_given(configs.given(arguments), used)
    for variant in found:
        for arm, why in variant.refused.items():
            if variant.subject == TORCH or all(arm in other.refused for other in found):
                raise ConfigError(f"ablate.arms: {arm} can't take part in {label(variant.overrides)}. {why}")
    return found


def facts_of(variants: Sequence[Variant], environment: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for cycles to belong together: what affects a step or the plan of the ablation, and the machine."""
    free = keys.affecting("nothing")
    found: dict[str, Any] = {}
    for variant in variants:
        of = f" ({label(variant.overrides)})" if len(variants) > 1 else ""
        found |= {f"{key}{of}": value for key, value in flat(configs.to_dict(variant.cfg)).items() if key not in free}
    return found | comparable(environment)
