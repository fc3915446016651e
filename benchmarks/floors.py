"""What the kernels are held to: the least share of copy bandwidth at each width, and the fastest other library.

Floors are for tensors so large that a plain copy reaches its bandwidth.
"""

from collections.abc import Sequence

from benchmarks import tables
from benchmarks.cases import BACKWARD, FORWARD
from benchmarks.results import Record

LARGE = 2**26  # elements
FLOORS = {  # from this width on, widest first
    FORWARD: ((16385, 0.80), (1600, 0.93), (1024, 0.90), (512, 0.83)),
    BACKWARD: ((16385, 0.80), (1600, 0.90), (1024, 0.87), (512, 0.78)),
}
LEVEL = 0.98  # of our time: whoever takes less is ahead


def floor(direction: str, rows: int, width: int) -> float:
    """0 where there is none."""
    return 0.0 if rows * width < LARGE else next((least for n, least in FLOORS[direction] if width >= n), 0.0)


def summary(records: Sequence[Record]) -> str:
    """The cells under their floor, and those where another is ahead with all of its interval."""
    cells = tables.by_cell(records)
    low: list[str] = []
    behind: dict[str, list[str]] = {"the fastest other": [], "before": []}
    held = 0
    for providers in cells:
        ours = providers.get("ours")
        if ours is None:
            continue
        least = floor(ours["direction"], ours["M"], ours["N"])
        held += least > 0
        if least and (ours.get("share") or 0) < least:
            low.append(f"  {tables.cell_label(ours)}: {tables.share(ours)}, floor {least:.2f}")
        for who, other in (("the fastest other", tables.best_peer(providers)), ("before", providers.get("before"))):
            if other and other.get("times_ours_95") and other["times_ours_95"][1] < LEVEL:
                behind[who].append(f"  {tables.cell_label(ours)}: {other['provider']} {tables.ratio(other)}")
    lines = [f"under the floor: {len(low)} of {held} cells of 2^26 elements or more", *low]
    for who, found in behind.items():
        lines += [f"more than {1 - LEVEL:.0%} behind {who}: {len(found)} of {len(cells)} cells", *found]
    return "\n".join(lines)
