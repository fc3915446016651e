"""The cycles of an ablation on disk, while it runs: each is written as it ends, and `resume` goes on behind the last of them.

A process that goes on builds and warms up its arms again, and runs the last cycle that was kept once more without counting it.
Pairs are of one cycle and so of one process; cells have cycles of several.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import configs
from ablation.variants import Variant
from configs import ConfigError, keys
from measure.schedule import Cycle
from measure.tables import flat, label
from training.storage import relative, replace_text

FILE = "cycles.jsonl"


class Kept:
    """The cycles in a folder. `facts`, the first line of the file, says of what they are: configurations, card, versions."""

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Reads those of an earlier process, if there are any.

        Raises:
            ConfigError: they are of something else.
        """
        self._path, self._facts, self._cycles = folder / FILE, facts, list[dict[str, Any]]()
        if self._path.is_file():
            before, *self._cycles = map(json.loads, self._path.read_text(encoding="utf-8").splitlines())
            if changed := [name for name in before | dict(facts) if before.get(name) != facts.get(name)]:
                pairs = (f"{name}={keys.shown(facts.get(name))}, there {keys.shown(before.get(name))}" for name in changed[:4])
                raise ConfigError(
                    f"{relative(folder)} has cycles of something else: {'; '.join(pairs)}. Change it, or begin anew."
                )
        self._write()

    def add(self, variant: Variant, mode: str, blocks_ms: Cycle) -> None:
        self._cycles.append({"overrides": variant.overrides, "mode": mode, "blocks_ms": blocks_ms})
        self._write()

    def _write(self) -> None:
        lines = (json.dumps(line, ensure_ascii=False) + "\n" for line in (self._facts, *self._cycles))
        replace_text(self._path, "".join(lines))

    def of(self, variant: Variant, mode: str, arms: Collection[str]) -> list[Cycle]:
        """The blocks of each cycle of a cell with these arms; an arm that failed since has left none."""
        of_cell = (c["blocks_ms"] for c in self._cycles if (c["overrides"], c["mode"]) == (variant.overrides, mode))
        return [blocks_ms for blocks_ms in of_cell if blocks_ms.keys() == set(arms)]

    def __str__(self) -> str:
        """3 of eager; nothing where there is no cycle"""
        cells = [label(cycle["overrides"], cycle["mode"]) for cycle in self._cycles]
        return ", ".join(f"{cells.count(cell)} of {cell}" for cell in dict.fromkeys(cells))

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def facts_of(variants: Sequence[Variant], environment: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for cycles to belong together: what affects a step or the plan of the ablation, and the machine."""
    free = {key for key in keys.affecting("nothing") if not key.startswith("ablate.")}
    found: dict[str, Any] = {}
    for variant in variants:
        of = f" ({label(variant.overrides)})" if len(variants) > 1 else ""
        found |= {f"{key}{of}": value for key, value in flat(configs.to_dict(variant.cfg)).items() if key not in free}
    machine = flat(dict(environment))
    return found | {name: machine.get(name) for name in ("gpu.name", "versions.torch", "versions.triton", "sources.step")}
