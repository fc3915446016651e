"""The cycles of an ablation and its seeds of parity on disk: each is written as it ends, and `resume` goes on behind the last.

A process that goes on builds and warms up its arms again, and runs the last cycle that was kept once more without counting it.
Pairs are of one cycle and so of one process; cells have cycles of several.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import configs
from ablation.records import SeedRun
from ablation.rounding import Distances
from ablation.variants import Variant
from configs import keys
from measure.schedule import Cycle
from measure.store import Store, comparable
from measure.tables import flat, label

FILE = "cycles.jsonl"


class Kept(Store):
    """A line is a cycle or a seed of parity; behind the last one of an ablation that has finished its exit code stands."""

    def keep(self, variant: Variant, mode: str, blocks_ms: Cycle) -> None:
        self.add({"overrides": variant.overrides, "mode": mode, "blocks_ms": blocks_ms})

    def of(self, variant: Variant, mode: str, arms: Collection[str]) -> list[Cycle]:
        """The blocks of each cycle of a cell with these arms; an arm that failed since has left none."""
        of_cell = (c["blocks_ms"] for c in self._cycles if (c["overrides"], c["mode"]) == (variant.overrides, mode))
        return [blocks_ms for blocks_ms in of_cell if blocks_ms.keys() == set(arms)]

    def keep_seed(self, variant: Variant, run: SeedRun) -> None:
        self.add({"overrides": variant.overrides, "parity": asdict(run)})

    def seeds_of(self, variant: Variant) -> list[SeedRun]:
        """The seeds of parity of a variant, in order. A loss that was no finite number is NaN."""
        found = [line["parity"] for line in self.lines if "parity" in line and line["overrides"] == variant.overrides]
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


def facts_of(variants: Sequence[Variant], environment: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for cycles to belong together: what affects a step or the plan of the ablation, and the machine."""
    free = keys.affecting("nothing")
    found: dict[str, Any] = {}
    for variant in variants:
        of = f" ({label(variant.overrides)})" if len(variants) > 1 else ""
        found |= {f"{key}{of}": value for key, value in flat(configs.to_dict(variant.cfg)).items() if key not in free}
    return found | comparable(environment)
