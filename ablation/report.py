"""report.md: what an ablation found, for somebody who was not there; and the same, unpaired, from finished training runs.

python -m ablation.report RUN_FOLDER…        folders that train.py wrote, or that hold those of a sweep
"""

import sys
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean

from ablation import finished, plots
from ablation.gpu_time import gpu_time
from ablation.records import Ablation, ArmTimes, Cell
from ablation.report_parity import parity_sections, parity_sentence
from measure.comparison import AGAIN, NO_KERNEL, TORCH, cycle_times, is_different
from measure.statistics import spread, unpaired_ratio
from measure.tables import (
    NOTHING,
    aligned,
    capital,
    environment,
    flat,
    interval_text,
    label,
    machine,
    markdown,
    number,
    section,
    wrapped,
)
from training.storage import as_storage_errors, replace_text


def write(ablation: Ablation, folder: Path) -> Path:
    """Writes report.md and its plots; returns the path of report.md."""
    folder.mkdir(parents=True, exist_ok=True)
    cells = ablation.cells
    with as_storage_errors(folder):
        first, rest = _pictures(ablation, folder)
    parts = [
        _verdicts(ablation),
        first,
        section("What was measured", _setting(ablation)),
        section("Every pair", _comparisons(cells)),
        section("What torch.compile buys, and what is left", _compile(cells)),
        section("What the swept keys cost", _prices(cells)),
        section("Where the time goes", gpu_time([cell for cell in cells if cell.attribution])),
        section("Dropout masks", _masks(cells)),
        section("Parity", parity_sections(ablation.parity)),
        section("More plots", rest),
        section("Step times", _step_times(cells)),
        section("Environment", environment({name: of for name, of in ablation.environment.items() if name != "command"})),
        section("Command", f"```\n{ablation.command}\n```"),
        section("Configuration", f"```yaml\n{ablation.config.rstrip()}\n```"),
    ]
    path = folder / "report.md"
    replace_text(path, "\n\n".join(part for part in parts if part) + "\n")
    return path


def table(ablation: Ablation) -> str:
    """The step times and the conclusions, as text for a terminal."""
    header = ["", "median ms", "p10", "p90", "speed-up over it (95 %)", "tokens/s", "peak GiB", "launches"]
    lines = [] if ablation.kernels else [f"{NO_KERNEL}.", ""]
    for cell in ablation.cells:
        speedups = {base: interval_text(cell.against(base).speedup) for base in cell.opponents}
        speedups[AGAIN] = interval_text(cell.control.speedup)
        rows = []
        for name, arm in cell.arms.items():
            figures = _arm_figures(cell, arm)
            rows.append([_arm(name), *figures[:3], speedups.get(name, ""), *figures[3:]])
        # What only a GPU tells has no column elsewhere.
        kept = [i for i in range(len(header)) if i == 0 or any(row[i] not in ("", NOTHING) for row in rows)]
        table = aligned([header[i] for i in kept], [[row[i] for i in kept] for row in rows])
        lines += [label(cell.overrides, cell.mode), table, ""]
    if ablation.cells:
        lines += [
            f"The speed-up is that of {_subjects(ablation.cells)} over the arm of the row: the median over cycles of each "
            "cycle's ratio.",
            "That of torch again is over torch: A/A, what no difference looks like.",
            "",
        ]
    lines += [f"{label(cell.overrides, cell.mode)}: {cell.verdict}." for cell in ablation.cells]
    lines += _left_out(ablation.cells)
    lines += [parity_sentence(parity, several=len(ablation.parity) > 1) for parity in ablation.parity]
    return "\n".join(lines)


# ---- the verdict, in three lines -------------------------------------------------------------------------------------------


def _verdicts(ablation: Ablation) -> str:
    """A heading and two lines, with hard line breaks for rendered Markdown."""
    parity = ablation.parity
    broken = [one for one in parity if not one.holds]
    agreement = "parity was not measured" if not parity else "parity FAILS" if broken else "parity holds"
    heading = f"{_headline(ablation.cells)}; {agreement}" if ablation.kernels else NO_KERNEL
    timing = _timing(ablation.cells)
    if not ablation.kernels:
        timing = f"Of the reference path: {timing[:1].lower()}{timing[1:]}"
    if len(parity) == 1:
        # Of a sweep that was stopped it is one of several.
        agreement = parity_sentence(parity[0], several=bool(ablation.unfinished and parity[0].overrides))
    elif broken:
        fails = " ".join(parity_sentence(one, several=True) for one in broken)
        agreement = f"Parity FAILS in {len(broken)} of {len(parity)} tests. {fails}"
    elif parity:
        agreement = f"Parity holds in each of {len(parity)} tests."
    else:
        agreement = "Parity was not measured."
    unfinished = f"NOT FINISHED ({ablation.unfinished}). " if ablation.unfinished else ""
    return f"# {unfinished}{capital(heading)}\n{timing}  \n{agreement}"


def _headline(cells: Sequence[Cell]) -> str:
    """fused against the fastest other arm: 1.040 × as fast eager (against compiled), 1.070 × compiled (against torch)"""
    if not cells:
        return "step times were not measured"
    parts: list[str] = []
    for mode in dict.fromkeys(cell.mode for cell in cells):
        of = [cell for cell in cells if cell.mode == mode]
        found = [cell.against(cell.fastest).speedup.median for cell in of if _is_found(cell)]
        low, high = (f"{extreme(found, default=0.0):.3f}" for extreme in (min, max))
        fast = "×" if any("as fast" in part for part in parts) else "× as fast"
        words = f"{low if low == high else f'{low} to {high}'} {fast} {mode}" if found else f"no difference found {mode}"
        missing = f", no difference found in {len(of) - len(found)} of {len(of)}" if 0 < len(found) < len(of) else ""
        fastest = " or ".join(dict.fromkeys(cell.fastest for cell in of))
        parts.append(f"{words} (against {fastest}{missing})")
    return f"{_subjects(cells)} against the fastest other arm: {', '.join(parts)}"


def _timing(cells: Sequence[Cell]) -> str:
    if not cells:
        return "Step times were not measured."
    if len(cells) <= 2:
        return " ".join(f"{capital(label(cell.overrides, cell.mode))}: {cell.verdict}." for cell in cells)
    found = [cell.against(cell.fastest).speedup.median for cell in cells if _is_found(cell)]
    slower = sum(speedup < 1 for speedup in found)
    off = max(abs(end - 1) for cell in cells for end in (cell.control.speedup.low, cell.control.speedup.high))
    counts = {"faster": len(found) - slower, "slower": slower, "no difference found": len(cells) - len(found)}
    words = ", ".join(f"{outcome} in {count}" for outcome, count in counts.items() if count)
    return (
        f"{capital(_subjects(cells))} against the fastest other arm in {len(cells)} cells: {words}. "
        f"The 95 % interval of A/A reaches {100 * off:.2f} % from 1 at most."
    )


def _is_found(cell: Cell) -> bool:
    """Whether the subject differs from its fastest opponent."""
    return is_different(cell.against(cell.fastest), cell.control)


def _subjects(cells: Sequence[Cell]) -> str:
    return " and ".join(dict.fromkeys(cell.subject for cell in cells))


# ---- tables ----------------------------------------------------------------------------------------------------------------


def _setting(ablation: Ablation) -> str:
    """The sizes of a step and the machine: a reader needs them before the first figure."""
    known = flat(ablation.environment)
    libraries = [f"{name} {known[key]}" for name in ("torch", "triton") if known.get(key := f"versions.{name}")]
    card = ", ".join([known.get("gpu.name") or "No CUDA device", *libraries])
    took = f" The ablation has taken {known['minutes']} minutes." if "minutes" in known else ""
    notes = [*ablation.notes, *_left_out(ablation.cells)]
    if ablation.unfinished:
        notes.append(f"Not finished: {ablation.unfinished}. What is missing below has not been measured.")
    return "\n".join(wrapped(f"- {note}") for note in [*notes, f"{card}.{took}"])


def _left_out(cells: Sequence[Cell]) -> list[str]:
    return [
        f"{label(cell.overrides, cell.mode)}: {arm} was left out. {why}" for cell in cells for arm, why in cell.left_out.items()
    ]


def _step_times(cells: Sequence[Cell]) -> str:
    header = ["cell", "arm", "median", "p10", "p90", "tokens/s", "peak GiB", "kernels"]
    rows = _rows(cells, lambda cell: [[_arm(name), *_arm_figures(cell, arm)] for name, arm in cell.arms.items()])
    if not rows:
        return ""
    blocks = [(len(cell.arms[TORCH].blocks_ms), len(cell.arms[TORCH].blocks_ms[0])) for cell in cells]
    counted = [f"{name}: {count} of {steps} steps" for name, (count, steps) in zip(_short_labels(cells), blocks, strict=True)]
    if len(set(blocks)) == 1:
        counted = ["{} of {} steps".format(*blocks[0])]
    note = (
        f"Milliseconds a step; tokens/s from the mean; kernel launches a step. Blocks of each arm: {'; '.join(counted)}; two "
        "in each cycle, after warm-up and one uncounted cycle, and without the first step of each. docs/ablation.md has the "
        "protocol."
    )
    parts = _rows(
        [cell for cell in cells if cell.arms[TORCH].forward_ms is not None],
        lambda cell: [
            [_arm(name), *(number(ms or 0.0) for ms in (arm.forward_ms, arm.backward_ms, arm.optimizer_ms))]
            for name, arm in cell.arms.items()
        ],
    )
    split = markdown(["cell", "arm", "forward ms", "backward ms", "optimizer ms"], parts) if parts else ""
    of_parts = "Medians of short windows of their own: marks inside a step cost time, so the parts need not add up to the step."
    return "\n\n".join([markdown(header, rows), wrapped(note), *([split, wrapped(of_parts)] if split else [])])


def _comparisons(cells: Sequence[Cell]) -> str:
    header = ["cell", "arm over base", "ms (95 %)", "speed-up (95 %)"]
    rows = _rows(
        cells,
        lambda cell: [
            [f"{arm} over {base}", interval_text(found.difference_ms), interval_text(found.speedup)]
            for base, of in cell.pairs.items()
            for arm, found in of.items()
        ],
    )
    if not rows:
        return ""
    verdicts = "\n".join(wrapped(f"- {label(cell.overrides, cell.mode)}: {cell.verdict}.") for cell in cells)
    paired = (
        "ms: the arm's step minus the base's. Speed-up: the base's step over the arm's. Both are paired: medians over cycles "
        "of each cycle's difference and ratio. They may differ from the ratio of the medians, in sign too if cycles scatter."
    )
    rule = (
        "The A/A control, torch again, is a second arm of torch in the same schedule. It shows what the protocol "
        "measures where there is no difference. The report claims a difference of two arms only if their interval leaves out 1 "
        "and their median is further from 1 than both ends of A/A's interval."
    )
    return f"{verdicts}\n\n{markdown(header, rows)}\n\n{wrapped(paired)}\n\n{wrapped(rule)}"


def _masks(cells: Sequence[Cell]) -> str:
    """A line for each arm that draws masks of its own."""
    lines = []
    for cell in cells:
        for one in cell.masks:
            words = "as independent masks are" if one.holds else "which independent masks are NOT"
            lines.append(
                f"- {label(cell.overrides, cell.mode)}, {one.arm}: {100 * one.dropped:.3f} % dropped of {2 * one.elements:,} "
                f"elements, {100 * one.dropout:g} % asked for. The most alike are pairs {one.where}, with a correlation of "
                f"{one.correlation:.4f}, {words}."
            )
    note = "Each arm's own dropout, without shared masks, on ones. ablation/masks.py states the test."
    return "\n".join([*map(wrapped, lines), "", wrapped(note)]) if lines else ""


def _compile(cells: Sequence[Cell]) -> str:
    """Torch eager against torch compiled. The cells run one after the other, so this comparison is unpaired.

    Its bootstrap draws cycles, because what slows one block of a cycle slows the other too: on an H200 the two blocks of GPT-2
    are correlated by up to 0.5. An interval that draws the 20 blocks one by one then misses the truth 9 times in 100.
    """
    compiled_cells = {tuple(cell.overrides.items()): cell for cell in cells if cell.mode == "compiled"}
    eager_cells = [cell for cell in cells if cell.mode == "eager" and tuple(cell.overrides.items()) in compiled_cells]
    rows: list[list[str]] = []
    for name, eager in zip(_short_labels(eager_cells, mode=False), eager_cells, strict=True):
        compiled = compiled_cells[tuple(eager.overrides.items())]
        torch, *after = (
            cycle_times(arm.blocks_ms) for arm in (eager.arms[TORCH], compiled.arms[TORCH], compiled.arms[compiled.subject])
        )
        alone, both = (unpaired_ratio(torch, times) for times in after)
        rows.append([name, *map(interval_text, (alone, compiled.against(TORCH).speedup, both))])
    if not rows:
        return ""
    header = ["configuration", "compile alone", f"{_subjects(list(compiled_cells.values()))} after compile", "both"]
    note = (
        "Speed-ups of the whole model under torch.compile, with 95 % intervals; `both` is over torch and eager. `compile "
        "alone` and `both` are unpaired: those cells ran one after the other."
    )
    return f"{markdown(header, rows)}\n\n{wrapped(note)}"


def _prices(cells: Sequence[Cell]) -> str:
    """The step time of each arm over that of the same arm in the first cell: what another placement or kind costs."""
    rows: list[list[str]] = []
    named = list(zip(cells, _short_labels(cells, mode=False), strict=True))
    for mode in dict.fromkeys(cell.mode for cell in cells):
        (first, base), *others = [(cell, name) for cell, name in named if cell.mode == mode]
        for cell, name in others:
            for arm in [arm for arm in cell.arms if arm in first.arms and arm != AGAIN]:
                ratio = unpaired_ratio(*(cycle_times(of.arms[arm].blocks_ms) for of in (cell, first)))
                rows.append([f"{mode}, {name}", base, arm, interval_text(ratio)])
    if not rows:
        return ""
    note = "Above 1: the cell's step takes longer. Unpaired, as cells run one after the other; 95 % intervals over cycles."
    return f"{markdown(['cell', 'over', 'arm', 'step time (95 %)'], rows)}\n\n{wrapped(note)}"


def _pictures(ablation: Ablation, folder: Path) -> tuple[str, str]:
    """Draws the pictures; two that come first, and the others. Each has a sentence, for a reader who sees only text."""
    first, rest, footer = [], [], machine(ablation.environment)
    if ablation.cells:
        plots.lead([plots.bars_of(cell) for cell in ablation.cells], folder / "speedup.png", footer)
        first.append(("speedup.png", "Step time of every arm on one axis, and the speed-up over each with its 95 % interval"))
        if plots.attributions(ablation.cells, folder / "attribution.png", footer):
            first.append(("attribution.png", "Time of a step by kind of work, and idle time, of every arm on one axis"))
        plots.step_times(ablation.cells, folder / "step_times.png", footer)
        rest.append(("step_times.png", "Step times of every arm: quartiles, 10th and 90th percentile, medians of blocks"))
    if ablation.parity:
        plots.parity(ablation.parity, folder / "parity.png", footer)
        rest.insert(0, ("parity.png", "Found over expected error of every quantity, beside the band that is accepted"))
    shown = ["\n\n".join(f"![{words}]({name})" for name, words in pictures) for pictures in (first, rest)]
    return shown[0], shown[1]


def _rows(cells: Sequence[Cell], of: Callable[[Cell], list[list[str]]]) -> list[list[str]]:
    """The rows of every cell, with its name before the first of them."""
    return [
        [name if at == 0 else "", *row]
        for cell, name in zip(cells, _short_labels(cells), strict=True)
        for at, row in enumerate(of(cell))
    ]


def _arm_figures(cell: Cell, arm: ArmTimes) -> list[str]:
    """Median, p10 and p90 in ms, tokens/s, peak GiB, launches."""
    steps = list(chain(*arm.blocks_ms))
    whole = spread(steps)
    return [
        *(number(ms) for ms in (whole.median, whole.p10, whole.p90)),
        f"{1000 * cell.tokens_per_step / fmean(steps):,.0f}",  # from the mean: slow steps count
        NOTHING if arm.peak_gb is None else f"{arm.peak_gb:.2f}",
        NOTHING if arm.launches is None else f"{arm.launches:,}",
    ]


def _short_labels(cells: Sequence[Cell], mode: bool = True) -> list[str]:
    """Labels with the last part of each key, where no two keys share it: a table has little room."""
    names = {key for cell in cells for key in cell.overrides}
    last = {name: name.rpartition(".")[2] for name in names}
    if len(set(last.values())) < len(names):
        last = {name: name for name in names}
    short = [{last[key]: value for key, value in cell.overrides.items()} for cell in cells]
    return [label(of, cell.mode if mode else "") for of, cell in zip(short, cells, strict=True)]


def _arm(name: str) -> str:
    return f"{name} (A/A)" if name == AGAIN else name


if __name__ == "__main__":
    sys.exit(finished.main())
