"""What an ablation finds, as plain data, and on disk: report.json, kernels.jsonl and cycles.jsonl."""

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ablation.config import NANOGPT
from ablation.rounding import Distances, Quantity
from measure.attribution import Kernel, Share
from measure.comparison import TWIN, Comparison, Pairs, conclusion, cycle_times, is_twin
from measure.files import json_text, replace_text
from measure.schedule import Cycle
from measure.statistics import Interval, Spread, spread
from measure.store import Store
from measure.tables import label


@dataclass(frozen=True)
class ArmTimes:
    """Step times of one arm of a cell."""

    blocks_ms: list[list[float]]  # a list for each block, in the order in which the blocks ran
    peak_gb: float | None  # GiB; None but on CUDA, and with CUDA graphs, whose memory the allocator does not tell
    launches: int | None  # kernels a step; None but on CUDA
    first_loss: float = math.nan  # of its first step, nats per token


@dataclass(frozen=True)
class Attribution:
    """Where the GPU time of a step goes, and what that leaves for any norm kernel to gain."""

    shares: dict[str, list[Share]]  # by arm
    norm_bytes: int  # the fewest that the norm sites of a step must move, or its loss where that is compared
    copy_gb_per_s: float  # measured in the same process
    # Amdahl limit, by base: the speed-up over it of a step whose norm sites run at copy bandwidth. A CPU-bound base has none.
    limits: dict[str, float]
    realised: dict[str, float]  # by base: of the time up to that limit, the part that the subject saves; 1 is all
    kernels: dict[str, list[Kernel]] = field(default_factory=dict)  # by arm: what the shares are sums of, longest first
    group: str = "norm"  # of the shares: what is compared


@dataclass(frozen=True)
class Masks:
    """What an arm's own dropout dropped, looked at for repetition."""

    arm: str
    dropout: float  # asked for
    dropped: float  # found
    elements: int  # of a mask
    where: str  # the pairs that are most alike: so many elements apart, or of two calls
    correlation: float  # of these pairs
    holds: bool


@dataclass(frozen=True)
class Cell:
    """One configuration, eager or compiled."""

    overrides: dict[str, str]  # the swept keys and their values
    mode: str  # of ablation.variants
    tokens_per_step: int
    arms: dict[str, ArmTimes]  # by name, torch first
    subject: str  # the arm that the verdict is about
    pairs: Pairs
    attribution: Attribution | None = None  # None but on CUDA
    left_out: dict[str, str] = field(default_factory=dict)  # arms that were asked for: why they are missing
    masks: list[Masks] = field(default_factory=list)

    @property
    def title(self) -> str:
        return label(self.overrides, self.mode)

    @property
    def verdict(self) -> str:
        return conclusion(self.subject, {base: self.against(base) for base in self.opponents}, *self.controls)

    @property
    def controls(self) -> list[Comparison]:
        """A/A: what no difference looks like."""
        return [arms[base + TWIN] for base, arms in self.pairs.items() if base + TWIN in arms]

    @property
    def steps_ms(self) -> dict[str, float]:
        """By arm, a step's time: the median over cycles. Without A/A and another project's."""
        return {n: median(cycle_times(arm.blocks_ms)) for n, arm in self.arms.items() if n != NANOGPT and not is_twin(n)}

    @property
    def opponents(self) -> list[str]:
        """The arms that the subject is compared with, the fastest first. Another project's step is none."""
        steps = self.steps_ms
        return sorted(steps.keys() - {self.subject}, key=steps.__getitem__)

    def against(self, base: str) -> Comparison:
        """The subject with another arm."""
        return self.pairs[base][self.subject]


@dataclass(frozen=True)
class SeedRun:
    """What the arms of parity did at one seed."""

    seed: int
    losses: dict[str, list[float]]  # by arm: for each step; nats per token
    distances: dict[str, dict[str, Distances]]  # by tested arm, by quantity


@dataclass(frozen=True)
class Parity:
    overrides: dict[str, str]
    arm: str  # that was tested
    precision: str  # of the run
    seeds: list[int]
    steps: int
    quantities: list[Quantity]
    holds: bool | None  # None: it can't be judged
    verdict: str
    distances: dict[str, list[Distances]]  # by quantity: for each seed; the tests are of these


@dataclass(frozen=True)
class Ablation:
    cells: list[Cell]
    parity: list[Parity]
    environment: dict[str, Any]
    command: str
    config: str  # YAML
    kernels: bool  # whether fused ran kernels; else the PyTorch reference
    notes: list[str] = field(default_factory=list)  # what a reader must know beside the figures
    code: dict[str, Any] = field(default_factory=dict)  # what ran, of measure/sources.py
    unfinished: str = ""  # how much there is of what was asked for, if not all


def save(ablation: Ablation, folder: Path) -> None:
    """Writes both files, report.json last. Each is replaced in one step, so that no reader sees half a file.

    A line of kernels.jsonl is a kernel. report.json has the fields of this module, with cells as `recorded` makes them.
    """
    kernels = list[str]()
    for cell in ablation.cells:
        for arm, launched in (cell.attribution.kernels if cell.attribution else {}).items():
            of = {"overrides": cell.overrides, "mode": cell.mode, "arm": arm}
            kernels += [json_text(of | asdict(kernel), ensure_ascii=False) + "\n" for kernel in launched]
    report = asdict(ablation) | {"cells": [recorded(cell) for cell in ablation.cells]}
    replace_text(folder / "kernels.jsonl", "".join(kernels))
    replace_text(folder / "report.json", json_text(report, indent=2, ensure_ascii=False) + "\n")


# ---- cycles.jsonl ------------------------------------------------------------------------------------------------------------


class Kept(Store):
    """The cycles of an ablation and its seeds of parity, a line each, as they end; behind the last one of an ablation that has
    finished its exit code stands.

    A process that goes on builds and warms up its arms again, and runs the last cycle that was kept once more without counting
    it. Pairs are of one cycle and so of one process; cells have cycles of several.
    """

    def keep(self, overrides: dict[str, str], mode: str, blocks_ms: Cycle) -> None:
        self.add({"overrides": overrides, "mode": mode, "blocks_ms": blocks_ms})

    def of(self, overrides: dict[str, str], mode: str, arms: Collection[str]) -> list[Cycle]:
        """The blocks of each cycle of a cell with these arms; an arm that failed since has left none."""
        of_cell = (c["blocks_ms"] for c in self._cycles if (c["overrides"], c["mode"]) == (overrides, mode))
        return [blocks_ms for blocks_ms in of_cell if blocks_ms.keys() == set(arms)]

    def keep_seed(self, overrides: dict[str, str], run: SeedRun) -> None:
        self.add({"overrides": overrides, "parity": asdict(run)})

    def seeds_of(self, overrides: dict[str, str]) -> list[SeedRun]:
        """The seeds of parity of a variant, in order. A loss that was no finite number is NaN."""
        found = [line["parity"] for line in self.lines if "parity" in line and line["overrides"] == overrides]
        return [
            SeedRun(
                run["seed"],
                {arm: [math.nan if loss is None else loss for loss in of] for arm, of in run["losses"].items()},
                {arm: {name: Distances(**one) for name, one in of.items()} for arm, of in run["distances"].items()},
            )
            for run in found
        ]

    def __str__(self) -> str:
        """3 of eager; nothing where there is no cycle"""
        cells = [label(cycle["overrides"], cycle["mode"]) for cycle in self._cycles]
        return ", ".join(f"{cells.count(cell)} of {cell}" for cell in dict.fromkeys(cells))

    @property
    def _cycles(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if "mode" in line]

    @property
    def exit_code(self) -> int | None:
        """None: it has not finished."""
        return self.lines[-1].get("exit_code") if self.lines else None


# ---- a cell of report.json ---------------------------------------------------------------------------------------------------

Recorded = dict[str, Any]


def recorded(cell: Cell) -> Recorded:
    """A cell with its verdict, and without what kernels.jsonl and cycles.jsonl have. For step times it has `block_steps`, the
    number in each block, and `step_ms`, their spread."""
    found = asdict(cell) | {"verdict": cell.verdict}
    if cell.attribution:
        del found["attribution"]["kernels"]
    for arm in found["arms"].values():
        blocks = arm.pop("blocks_ms")
        arm["block_steps"] = [len(block) for block in blocks]
        arm["step_ms"] = asdict(spread([ms for block in blocks for ms in block]))
    return found


def steps_of(cell: Recorded) -> dict[str, Spread]:
    """By arm, without A/A."""
    return {name: Spread(**of["step_ms"]) for name, of in cell["arms"].items() if not is_twin(name)}


def fastest(cell: Recorded) -> str:
    """The fastest arm beside the subject and another project's."""
    steps = steps_of(cell)
    return min(steps.keys() - {cell["subject"], NANOGPT}, key=lambda name: steps[name].median)


def speedup(cell: Recorded, base: str) -> Interval:
    """Of the subject."""
    return Interval(**cell["pairs"][base][cell["subject"]]["speedup"])


def controls(cell: Recorded) -> list[Interval]:
    """A/A."""
    return [Interval(**of[base + TWIN]["speedup"]) for base, of in cell["pairs"].items() if base + TWIN in of]
