"""report.md: what an ablation found, for somebody who was not there."""

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean

from ablation import plots
from ablation.gpu_time import IDLE, WAITING, parts_ms
from ablation.records import Ablation, Cell, recorded
from ablation.variants import GRAPH
from measure import tables
from measure.comparison import NO_KERNEL, TORCH, is_different, is_twin, stalls
from measure.files import replace_text
from measure.statistics import spread
from measure.tables import aligned, capital, interval_text, label, listed, markdown, number, section, wrapped

EXPLAINED = "docs/ablation.md has the protocol, and explains each table. report.json and config.yaml have all figures and keys."


def write(ablation: Ablation, folder: Path) -> Path:
    """Writes report.md and its plots; returns the path of report.md."""
    cells = ablation.cells
    minutes = ablation.environment.get("minutes")
    took = f"{tables.machine(ablation.environment)}. The process that wrote this has taken {minutes} minutes."
    pictures = _pictures(ablation, folder)
    text = tables.document(
        _headline(ablation),
        listed(_verdicts(ablation)),
        pictures,
        section("What was measured", listed([*ablation.notes, *_left_out(cells), took])),
        section("Every pair", _pairs(cells)),
        section("Where the time goes", _gpu_time(cells)),
        section("Dropout masks", listed(_masks(cells))),
        section("Step times", _steps(cells)),
        section("Environment", tables.environment(ablation.environment)),
        section("Command", f"```\n{ablation.command}\n```\n\n{EXPLAINED}"),
    )
    path = folder / "report.md"
    replace_text(path, text)
    return path


def table(ablation: Ablation) -> str:
    """The step times and the conclusions, as text for a terminal."""
    tables = [f"{cell.title}\n{aligned(*step_times(cell))}\n" for cell in ablation.cells]
    no_kernel = [] if ablation.kernels else [f"{NO_KERNEL}.\n"]
    return "\n".join([*no_kernel, *tables, *_verdicts(ablation), *_left_out(ablation.cells)])


# ---- the verdict -------------------------------------------------------------------------------------------------------------


def _headline(ablation: Ablation) -> str:
    """Fused against the fastest other arm: eager 1.040 ×, compiled 1.070 ×; parity holds"""
    if not ablation.kernels:
        said = NO_KERNEL
    else:
        found = []
        for cell in ablation.cells:
            pair = cell.against(cell.opponents[0])
            speedup = f"{pair.speedup.median:.3f} ×" if is_different(pair, *cell.controls) else "no difference found"
            found.append(f"{cell.title} {speedup}")
        subjects = " and ".join(dict.fromkeys(cell.subject for cell in ablation.cells))
        said = f"{capital(subjects)} against the fastest other arm: {'; '.join(found)}"
    held = {one.holds for one in ablation.parity}
    parity = "FAILS" if False in held else "can't be judged" if None in held else "holds"
    unfinished = f"NOT FINISHED ({ablation.unfinished}). " if ablation.unfinished else ""
    return f"{unfinished}{said}; parity {parity if ablation.parity else 'was not measured'}"


def _verdicts(ablation: Ablation) -> list[str]:
    """A line for each cell, and for each test of parity."""
    timed = [f"{capital(cell.title)}: {cell.verdict}." for cell in ablation.cells]
    fastest = [f"{capital(label(over, 'all cells'))}: {said}." for over, said in _fastest(ablation.cells)]
    return fastest + timed + [f"{capital(label(one.overrides))}, {one.arm}: {one.verdict}" for one in ablation.parity]


def _fastest(cells: Sequence[Cell]) -> Iterator[tuple[dict[str, str], str]]:
    """Of each configuration with a CUDA graph among its cells: the fastest way to train it, and the fastest with other arms."""
    for overrides in [cell.overrides for cell in cells if cell.mode == GRAPH]:
        own = [cell for cell in cells if cell.overrides == overrides]
        ours = min(own, key=lambda cell: cell.steps_ms[cell.subject])
        other = min(own, key=lambda cell: cell.steps_ms[cell.opponents[0]])
        ms, its_ms = ours.steps_ms[ours.subject], other.steps_ms[other.opponents[0]]
        found = ours.against(ours.opponents[0]).speedup
        paired = f"{found.median:.3f} × (95 % {found.low:.3f} to {found.high:.3f})"
        said = f"the fastest step with {ours.subject} takes {number(ms)} ms ({ours.mode}), the fastest with another arm "
        said += f"{number(its_ms)} ms ({other.opponents[0]}, {other.mode}): "
        yield overrides, said + (paired if ours is other else f"{its_ms / ms:.3f} ×, of two cells")


def _pictures(ablation: Ablation, folder: Path) -> str:
    """Draws the pictures. Each has a sentence, for a reader who sees only text."""
    footer = tables.machine(ablation.environment)
    plots.lead({cell.title: recorded(cell) for cell in ablation.cells}, folder / "speedup.png", footer)
    drawn = {"speedup": "Step time of every arm on one axis, and the speed-up over each with its 95 % interval"}
    if profiled := [cell for cell in ablation.cells if cell.attribution]:
        plots.attributions(profiled, folder / "attribution.png", footer)
        drawn["attribution"] = "Time of a step by kind of work, and idle time, of every arm on one axis"
    if ablation.parity:
        plots.parity(ablation.parity, folder / "parity.png", footer)
        drawn["parity"] = "Found over expected error of every quantity, beside the band that is accepted"
    return "\n\n".join(f"![{words}]({name}.png)" for name, words in drawn.items())


# ---- sections ----------------------------------------------------------------------------------------------------------------


def _left_out(cells: Sequence[Cell]) -> list[str]:
    return [f"{cell.title}: {arm} was left out. {why}" for cell in cells for arm, why in cell.left_out.items()]


def _pairs(cells: Sequence[Cell]) -> str:
    header = ["cell", "arm over base", "ms (95 %)", "speed-up (95 %)", "of all steps (95 %)"]
    rows = [
        [cell.title, f"{arm} over {base}", *map(interval_text, (of.difference_ms, of.speedup, of.mean_speedup))]
        for cell in cells
        for base, arms in cell.pairs.items()
        for arm, of in arms.items()
    ]
    return markdown(header, rows)


def _gpu_time(cells: Sequence[Cell]) -> str:
    """For each profiled cell the milliseconds of its arms by kind of work, and the Amdahl limit."""
    sections = []
    for cell in cells:
        if (found := cell.attribution) is None:
            continue
        parts = parts_ms(cell)
        rows = [[group, *(number(of[group]) for of in parts.values())] for group in next(iter(parts.values()))]
        rows.append(["all", *(number(sum(of.values())) for of in parts.values())])
        least = found.norm_bytes / found.copy_gb_per_s / 1e6  # bytes / (10⁹ bytes / s) in ms
        reached = [f"{100 * least / ms:.0f} % under {name}" for name, of in parts.items() if (ms := of[found.group])]
        limits = [
            f"{limit:.3f} × as fast as with {base} ({cell.subject} saves {100 * found.realised[base]:.0f} % of that gain)"
            for base, limit in found.limits.items()
        ]
        said = (
            f"{'The norm sites' if found.group == 'norm' else 'The loss'} of a step must move {found.norm_bytes / 1e9:.2f} GB, "
            f"which takes {number(least)} ms at the {found.copy_gb_per_s:,.0f} GB/s that a copy reached here; of this copy "
            f"bandwidth they reach {', '.join(reached) or 'nothing'}."
        )
        if limits:
            said += f" Amdahl limit, an estimate: at copy bandwidth this step is {' and '.join(limits)}."
        if above := [base for base, limit in found.limits.items() if cell.against(base).speedup.low > limit]:
            said += f" The speed-up over {' and '.join(above)} is above it: the GPU is idle for less time, too."
        # Of F.rms_norm PyTorch has more than one from 2.13 on.
        ran = {kernel.name for kernel in found.kernels.get(TORCH, ()) if kernel.group == "norm"}
        if own := sorted({match[0][:60] for name in ran if (match := re.search(r"\w*norm\w*", name, re.IGNORECASE))}):
            said += f" The norms of {TORCH} ran {', '.join(own)}."
        waits = {name: of[IDLE] / sum(of.values()) for name, of in parts.items()}
        if max(waits.values()) > WAITING:
            idle = " and ".join(f"{100 * share:.0f} % of a step under {name}" for name, share in waits.items())
            said += (
                f" The GPU is idle in {idle}: this step is CPU-bound. One CUDA graph of the step removes the idle time: see "
                "the cells of graphs (ablate.graph)."
            )
        by_kind = markdown(["ms of a step", *parts], rows)
        sections.append(f"### {capital(cell.title)}\n\n{by_kind}\n\n{wrapped(said)}")
    return "\n\n".join(sections)


def _masks(cells: Sequence[Cell]) -> list[str]:
    """A line for each arm that draws masks of its own; ablation/masks.py states the test."""
    return [
        f"{cell.title}, {one.arm}: {100 * one.dropped:.3f} % dropped of {2 * one.elements:,} elements, "
        f"{100 * one.dropout:g} % asked for. The most alike are pairs {one.where}, with a correlation of "
        f"{one.correlation:.4f}, {'as independent masks are' if one.holds else 'which independent masks are NOT'}."
        for cell in cells
        for one in cell.masks
    ]


def _steps(cells: Sequence[Cell]) -> str:
    return "\n\n".join(f"### {capital(cell.title)}\n\n{markdown(*step_times(cell))}" for cell in cells)


def step_times(cell: Cell) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a table, without the columns that only a GPU tells where there is none."""
    rows = []
    for name, arm in cell.arms.items():
        steps = list(chain(*arm.blocks_ms))
        of, per_s = spread(steps), 1000 * cell.tokens_per_step / fmean(steps)  # from the mean: slow steps count
        row = {"arm": f"{name} (A/A)" if is_twin(name) else name, "median ms": number(of.median), "p10": number(of.p10)}
        row |= {"p90": number(of.p90), "tokens/s": f"{per_s:,.0f}"}
        count, share = stalls(arm.blocks_ms)
        row |= {"stalls, of time": f"{count} of {len(steps)}, {100 * share:.1f} %"} if count else {}
        row |= {} if arm.peak_gb is None else {"peak GiB": f"{arm.peak_gb:.2f}"}
        row |= {} if arm.launches is None else {"kernels": f"{arm.launches:,}"}
        rows.append(row)
    return tables.columns(rows)
