"""Where the GPU time of a step goes, under which clocks, and what any norm kernel could save of it: a section of the report."""

from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import median

from ablation.compared import FUSED, TORCH
from ablation.plots import label
from ablation.records import Attribution, Cell
from ablation.text import capital, markdown, number, wrapped

AT_LIMIT = 0.97  # of the power limit: of a GPU that is held there nvidia-smi tells a little more or less


def gpu_time(cells: Sequence[Cell]) -> str:
    """The section, of cells that have an attribution; empty if there are none."""
    note = (
        "From a profile of a few steps of each arm. kernels.jsonl has every kernel and the kind of work that it counts as. "
        "Compiled kernels that fuse a norm with other work count as norm. "
        "A timed step is longer than all its GPU time where the GPU waits for the host, or clocks drop under a longer load."
    )
    return "\n\n".join([*map(_attribution, cells), wrapped(note)]) if cells else ""


def _attribution(cell: Cell) -> str:
    found = cell.attribution
    assert found is not None
    totals = {name: sum(share.ms for share in shares) for name, shares in ((TORCH, found.torch), (FUSED, found.fused))}
    torch, fused = ({share.group: share for share in shares} for shares in (found.torch, found.fused))
    rows = []
    for group in dict.fromkeys([*torch, *fused]):
        row = [group]
        for shares, name in ((torch, TORCH), (fused, FUSED)):
            share = shares.get(group)
            row += [number(share.ms), f"{100 * share.ms / totals[name]:.1f}", f"{share.launches:,}"] if share else ["–"] * 3
        rows.append(row)
    launches = [sum(share.launches for share in shares) for shares in (found.torch, found.fused)]
    rows.append(["all", number(totals[TORCH]), "", f"{launches[0]:,}", number(totals[FUSED]), "", f"{launches[1]:,}"])
    timed = [number(median(chain(*cell.arms[name].blocks_ms))) for name in (TORCH, FUSED)]
    rows.append(["a timed step", timed[0], "", "", timed[1], "", ""])
    header = ["GPU time", "torch ms", "%", "launches", "fused ms", "%", "launches"]
    title = f"### {capital(label(cell.overrides, cell.mode))}"
    words = _bound(found)
    if cell.fused.speedup.low > found.bound:
        words += (
            f" The step is {cell.fused.speedup.median:.3f} × as fast, which is more: part of what torch's norms take is not in "
            "their group above, or the GPU waits."
        )
    words += _power(cell.gpu)
    return f"{title}\n\n{markdown(header, rows)}\n\n{wrapped(words)}"


def _bound(found: Attribution) -> str:
    """The upper bound of any norm kernel, and how much of it was had."""
    norms = [sum(s.ms for s in shares if s.group.lower().startswith("norm")) for shares in (found.torch, found.fused)]
    least = found.norm_bytes / found.copy_gb_per_s / 1e6  # bytes / (10⁹ bytes / s) in ms
    rates = [f"{100 * least / ms:.0f} %" if ms else "–" for ms in norms]
    return (
        f"The norm sites of a step must move {found.norm_bytes / 1e9:.2f} GB, which takes {number(least)} ms at the "
        f"{found.copy_gb_per_s:,.0f} GB/s that a copy reached here. Torch's take {number(norms[0])} ms ({rates[0]} of copy "
        f"bandwidth), fused ones {number(norms[1])} ms ({rates[1]}). So no norm kernel makes this step more than "
        f"{found.bound:.3f} × as fast as with torch's (Amdahl), unless the GPU waits for the host, where fewer launches may "
        f"save more; of the time between, fused norms save {100 * found.realised:.0f} %."
    )


def _power(gpu: Mapping[str, Mapping[str, str]]) -> str:
    """Clocks and power under each arm; and what it means where the power limit sets the clocks."""
    told, limited = [], []
    for name, state in gpu.items():
        try:
            clock, most, draw, limit = (
                float(state[field].split()[0]) for field in ("clocks.sm", "clocks.max.sm", "power.draw", "power.limit")
            )
        except (KeyError, ValueError):  # nvidia-smi was not there, or does not know it of this GPU
            continue
        told.append(f"{clock:.0f} of {most:.0f} MHz and {draw:.0f} of {limit:.0f} W under {name}")
        limited += [name] if draw > AT_LIMIT * limit else []
    if not told:
        return ""
    words = f" Read once while it took steps, the GPU was at {', '.join(told)}."
    if limited:
        words += (
            f" Under {' and '.join(limited)} that is its power limit: clocks follow what the kernels draw, and GPU time that "
            "is saved need not all be step time saved."
        )
    return words
