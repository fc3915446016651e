"""The cycles of an ablation on disk, while it runs: each is written as it ends, and `resume` goes on behind the last of them.

A process that goes on builds and warms up its arms again, and runs the last cycle that was kept once more without counting it.
Pairs are of one cycle and so of one process; cells have cycles of several.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import configs
from configs import Config, ConfigError, keys
from measure.tables import flat, label
from training.storage import relative, replace_text

FILE = "cycles.jsonl"


@dataclass(frozen=True)
class Cycle:
    """What the arms of a cell took in one counted cycle."""

    overrides: dict[str, str]
    mode: str
    block_steps: int
    blocks_ms: dict[str, list[list[float]]]  # by arm: the steps of its two blocks
    peaks_gb: dict[str, list[float]]  # by arm


class Kept:
    """The cycles in a folder. `facts` says of what they are: configurations, card, versions."""

    def __init__(self, folder: Path, facts: Mapping[str, Any], cycles: Sequence[Cycle] = ()) -> None:
        self._path, self._facts = folder / FILE, facts
        self._cycles = list(cycles)

    @classmethod
    def read(cls, folder: Path, facts: Mapping[str, Any]) -> "Kept":
        """Those of an earlier process. A last line without its end, of a process that was killed, does not count.

        Raises:
            ConfigError: there are none, they are of something else, or a line is damaged.
        """
        if not (folder / FILE).is_file():
            raise ConfigError(
                f"resume={relative(folder)}: no ablation that was stopped is there. For the weights of a run: init_from=PATH."
            )
        found: list[Any] = []
        for number, line in enumerate((folder / FILE).read_bytes().split(b"\n")[:-1], start=1):
            try:
                entry = json.loads(line)
                found.append(Cycle(**entry) if found else dict(entry))
            except (ValueError, TypeError) as error:
                todo = "Delete this line; its cycle is then measured again." if found else "Begin anew in another folder."
                raise ConfigError(f"{relative(folder / FILE)}, line {number}: is damaged ({error}). {todo}") from None
        if not found:
            raise ConfigError(f"{relative(folder / FILE)}, line 1: is cut off. Begin anew in another folder.")
        first, *cycles = found
        if changed := [name for name in first | facts if first.get(name) != facts.get(name)]:
            pairs = (f"{name}={keys.shown(facts.get(name))}, there {keys.shown(first.get(name))}" for name in changed[:4])
            raise ConfigError(
                f"resume={relative(folder)}: its cycles are of something else: {'; '.join(pairs)}. Change it, or begin anew."
            )
        return cls(folder, facts, cycles)

    def add(self, cycle: Cycle) -> None:
        self._cycles.append(cycle)
        lines = [self._facts, *map(asdict, self._cycles)]
        replace_text(self._path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))

    def of(self, overrides: Mapping[str, str], mode: str, arms: Collection[str]) -> list[Cycle]:
        """The cycles of a cell with these arms; an arm that failed since has left none."""
        return [c for c in self._cycles if (c.overrides, c.mode) == (overrides, mode) and c.blocks_ms.keys() == set(arms)]

    def __str__(self) -> str:
        """3 of eager"""
        cells = [label(cycle.overrides, cycle.mode) for cycle in self._cycles]
        return ", ".join(f"{cells.count(cell)} of {cell}" for cell in dict.fromkeys(cells))

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def facts_of(cfgs: Sequence[tuple[Mapping[str, str], Config]], environment: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for cycles to belong together: what affects a step or the plan of the ablation, and the machine."""
    free = {key for key in keys.affecting("nothing") if not key.startswith("ablate.")}
    found: dict[str, Any] = {}
    for overrides, cfg in cfgs:
        of = f" ({label(dict(overrides))})" if len(cfgs) > 1 else ""
        found |= {f"{key}{of}": value for key, value in flat(configs.to_dict(cfg)).items() if key not in free}
    machine = flat(dict(environment))
    return found | {name: machine.get(name) for name in ("gpu.name", "versions.torch", "versions.triton", "sources.step")}
