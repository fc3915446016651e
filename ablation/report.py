"""report.md: what an ablation found, for somebody who was not there; and the same, unpaired, from finished training runs.

python -m ablation.report RUN_FOLDER…        folders that train.py wrote, or that hold those of a sweep
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean

from ablation import finished, plots
from ablation.gpu_time import clocks, gpu_time
from ablation.records import Ablation, ArmTimes, Cell
from ablation.report_parity import parity_sections, parity_sentence
from measure.comparison import AGAIN, FUSED, NO_KERNEL, TORCH, cycle_times, is_different
from measure.statistics import Interval, spread, unpaired_ratio
from measure.tables import (
    NOTHING,
    aligned,
    capital,
    environment,
    flat,
    interval_text,
    label,
    markdown,
    number,
    section,
    wrapped,
)
from training.storage import replace_text

MODES = ("eager", "compiled")


def write(ablation: Ablation, folder: Path) -> Path:
    """Writes report.md and its plots; returns the path of report.md."""
    folder.mkdir(parents=True, exist_ok=True)
    cells = ablation.cells
    parts = [
        _verdicts(ablation),
        section("What was measured", _setting(ablation)),
        section("Step times", _step_times(cells)),
        section("Fused against torch", _comparisons(cells)),
        section("Forward, backward, optimizer", _split(cells)),
        section("What torch.compile buys, and what is left", _compile(cells)),
        section("Where the GPU time goes", gpu_time([cell for cell in cells if cell.attribution])),
        section("Parity", parity_sections(ablation.parity)),
        section("Plots", _pictures(ablation, folder)),
        section("Environment", _environment(ablation)),
        section("Command", f"```\n{ablation.command}\n```"),
        section("Configuration", f"```yaml\n{ablation.config.rstrip()}\n```"),
    ]
    path = folder / "report.md"
    replace_text(path, "\n\n".join(part for part in parts if part) + "\n")
    return path


def table(ablation: Ablation) -> str:
    """The step times and the conclusions, as text for a terminal."""
    header = ["", "median ms", "p10", "p90", "times as fast as torch (95 %)", "tokens/s", "peak GiB", "launches"]
    lines = [] if ablation.kernels else [f"{NO_KERNEL}.", ""]
    for cell in ablation.cells:
        speedups = {AGAIN: interval_text(cell.control.speedup), FUSED: interval_text(cell.fused.speedup)}
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
            "times as fast is paired: the median over cycles of each cycle's ratio. The ratio of the medians may differ.",
            "",
        ]
    lines += [f"{label(cell.overrides, cell.mode)}: {cell.verdict}." for cell in ablation.cells]
    lines += [parity_sentence(parity, several=len(ablation.parity) > 1) for parity in ablation.parity]
    return "\n".join(lines)


# ---- the verdict, in three lines -------------------------------------------------------------------------------------------


def _verdicts(ablation: Ablation) -> str:
    """A heading and two lines, with hard line breaks for rendered Markdown."""
    parity = ablation.parity
    broken = [one for one in parity if not one.holds]
    agreement = "parity was not measured" if not parity else "parity FAILS" if broken else "parity holds"
    found = f"Fused norms against PyTorch's: {_headline(ablation.cells)}; {agreement}" if ablation.kernels else NO_KERNEL
    heading = f"# {f'NOT FINISHED ({ablation.unfinished}). ' if ablation.unfinished else ''}{found}"
    timing = _timing(ablation.cells)
    if not ablation.kernels:
        timing = f"Of the reference path: {timing[:1].lower()}{timing[1:]}"
    if not parity:
        return f"{heading}\n{timing}  \nParity was not measured."
    if len(parity) == 1:
        one_of_several = bool(ablation.unfinished and parity[0].overrides)  # of a sweep that was stopped
        return f"{heading}\n{timing}  \n{parity_sentence(parity[0], several=one_of_several)}"
    if not broken:
        return f"{heading}\n{timing}  \nParity holds in each of {len(parity)} configurations."
    fails = " ".join(parity_sentence(one, several=True) for one in broken)
    return f"{heading}\n{timing}  \nParity FAILS in {len(broken)} of {len(parity)} configurations. {fails}"


def _headline(cells: Sequence[Cell]) -> str:
    """1.203 × as fast eager, 1.070 × compiled"""
    if not cells:
        return "step times were not measured"
    parts: list[str] = []
    for mode, of in _by_mode(cells).items():
        found = [cell.fused.speedup.median for cell in of if is_different(cell.fused, cell.control)]
        low, high = (f"{extreme(found, default=0.0):.3f}" for extreme in (min, max))
        fast = "× as fast" if not any("fast" in part for part in parts) else "×"
        words = f"{low if low == high else f'{low} to {high}'} {fast} {mode}" if found else f"no difference found {mode}"
        missing = f" (no difference found in {len(of) - len(found)} of {len(of)})" if 0 < len(found) < len(of) else ""
        parts.append(words + missing)
    return ", ".join(parts)


def _timing(cells: Sequence[Cell]) -> str:
    if not cells:
        return "Step times were not measured."
    if len(cells) <= 2:
        return " ".join(f"{capital(label(cell.overrides, cell.mode))}: {cell.verdict}." for cell in cells)
    found = [cell for cell in cells if is_different(cell.fused, cell.control)]
    slower = sum(cell.fused.speedup.median < 1 for cell in found)
    off = max(abs(end - 1) for cell in cells for end in (cell.control.speedup.low, cell.control.speedup.high))
    counts = {"faster": len(found) - slower, "slower": slower, "no difference found": len(cells) - len(found)}
    words = ", ".join(f"{outcome} in {count}" for outcome, count in counts.items() if count)
    return f"Fused norms in {len(cells)} cells: {words}. The 95 % interval of A/A reaches {100 * off:.2f} % from 1 at most."


# ---- tables ----------------------------------------------------------------------------------------------------------------


def _setting(ablation: Ablation) -> str:
    """The sizes of a step and the machine: a reader needs them before the first figure."""
    known = flat(ablation.environment)
    libraries = [f"{name} {known[key]}" for name in ("torch", "triton") if known.get(key := f"versions.{name}")]
    machine = ", ".join([known.get("gpu.name") or "No CUDA device", *libraries])
    took = f" The ablation has taken {known['minutes']} minutes." if "minutes" in known else ""
    missing = f"Not finished: {ablation.unfinished}. What is missing below has not been measured."
    notes = [*ablation.notes, *([missing] if ablation.unfinished else []), f"{machine}.{took}"]
    return "\n".join(wrapped(f"- {note}") for note in notes)


def _environment(ablation: Ablation) -> str:
    facts = environment({name: fact for name, fact in ablation.environment.items() if name != "command"})
    return "\n\n".join(part for part in (facts, clocks(ablation.cells)) if part)


def _step_times(cells: Sequence[Cell]) -> str:
    header = ["cell", "arm", "median", "p10", "p90", "tokens/s", "peak GiB", "kernels"]
    rows = _rows(cells, lambda cell: [[_arm(name), *_arm_figures(cell, arm)] for name, arm in cell.arms.items()])
    if not rows:
        return ""
    note = f"Milliseconds a step; tokens/s from the mean; kernel launches a step. {_blocks(cells)}"
    return f"{markdown(header, rows)}\n\n{wrapped(note)}"


def _blocks(cells: Sequence[Cell]) -> str:
    """Each arm was timed in 20 blocks of 5 steps (eager), of 12 steps (compiled)."""
    lengths: dict[tuple[int, int], list[str]] = defaultdict(list)  # by how many blocks and steps, which cells
    for cell, name in zip(cells, _short_labels(cells), strict=True):
        blocks = cell.arms[TORCH].blocks_ms
        lengths[len(blocks), len(blocks[0])].append(name)
    words = [f"{count} blocks of {steps} steps" for count, steps in lengths]
    if len(words) > 1:
        words = [f"{of} ({'; '.join(names)})" for of, names in zip(words, lengths.values(), strict=True)]
    return (
        f"Each arm has {', '.join(words)}: two in each cycle, after warm-up and one uncounted cycle. A cycle has the arms in "
        "some order and then in its reverse. The seed draws every third order; in between, the first arm moves to the end. The "
        "first step of a block is not counted: it fills the GPU's queue, which is empty after the copy of the weights. Between "
        "cycles the arms exchange their places in memory: weights and optimizer state of each arm move to the addresses of "
        "another's. With CUDA graphs, which contain the addresses, they stay."
    )


def _comparisons(cells: Sequence[Cell]) -> str:
    header = ["cell", "arm", "ms over torch (95 %)", "times as fast (95 %)"]
    rows = _rows(
        cells,
        lambda cell: [
            [arm, interval_text(found.difference_ms), interval_text(found.speedup)]
            for arm, found in ((FUSED, cell.fused), ("A/A", cell.control))
        ],
    )
    if not rows:
        return ""
    verdicts = "\n".join(wrapped(f"- {label(cell.overrides, cell.mode)}: {cell.verdict}.") for cell in cells)
    paired = (
        "Both columns are paired: they are medians over cycles of each cycle's difference and ratio. They may differ from the "
        "ratio of the medians above, in sign too if cycles scatter."
    )
    rule = (
        "The A/A control is a second arm with torch's norms in the same schedule. It shows what the protocol measures where "
        "there is no difference. The report claims a speed-up or a slow-down only if the interval of fused leaves out 1 and "
        "its median is further from 1 than both ends of A/A's interval."
    )
    return f"{markdown(header, rows)}\n\n{wrapped(paired)}\n\n{verdicts}\n\n{wrapped(rule)}"


def _split(cells: Sequence[Cell]) -> str:
    header = ["cell", "arm", "forward ms", "backward ms", "optimizer ms"]
    rows = _rows(
        cells,
        lambda cell: [
            [name, *(number(ms) for ms in (arm.forward_ms, arm.backward_ms, arm.optimizer_ms))]
            for name, arm in cell.arms.items()
            if name != AGAIN
        ],
    )
    note = "Medians of short windows of their own: marks inside a step cost time, so the parts need not add up to the step."
    return f"{markdown(header, rows)}\n\n{note}" if rows else ""


def _compile(cells: Sequence[Cell]) -> str:
    """Torch eager against torch compiled. The cells run one after the other, so this comparison is unpaired."""
    pairs: dict[tuple[tuple[str, str], ...], dict[str, Cell]] = defaultdict(dict)
    for cell in cells:
        pairs[tuple(cell.overrides.items())][cell.mode] = cell
    both = [(dict(key), modes["eager"], modes["compiled"]) for key, modes in pairs.items() if modes.keys() >= set(MODES)]
    rows: list[list[str]] = []
    sentences: list[str] = []
    names = _short_labels([eager for _, eager, _ in both], mode=False)
    for name, (overrides, eager, compiled) in zip(names, both, strict=True):
        alone = _unpaired(eager.arms[TORCH], compiled.arms[TORCH])
        together = _unpaired(eager.arms[TORCH], compiled.arms[FUSED])
        left = compiled.fused.speedup
        rows.append([name, *map(interval_text, (alone, left, together))])
        gain = "no difference found" if alone.holds(1) else f"{alone.median:.3f} × as fast"
        rest = f"{left.median:.3f} × as fast" if is_different(compiled.fused, compiled.control) else "no difference found"
        said = f"torch.compile alone: {gain}. What is left for fused norms after it: {rest}."
        sentences.append(wrapped(f"- {label(overrides)}: {said}"))
    if not rows:
        return ""
    header = ["configuration", "compile alone", "fused after compile", "both"]
    note = (
        "Times as fast, with 95 % intervals; `both` is fused and compiled over torch and eager. `compile alone` and `both` are "
        "unpaired: those cells ran one after the other."
    )
    return markdown(header, rows) + "\n\n" + "\n".join(sentences) + "\n\n" + wrapped(note)


def _pictures(ablation: Ablation, folder: Path) -> str:
    """Draws the pictures. Each has a sentence, for a reader who sees only text."""
    shown = []
    if ablation.cells:
        plots.step_times(ablation.cells, folder / "step_times.png")
        shown.append(("step_times.png", "Step times of every arm: quartiles, 10th and 90th percentile, medians of blocks"))
        plots.speedups(ablation.cells, folder / "speedup.png")
        shown.append(("speedup.png", "Speed-up of fused norms with its 95 % interval, beside the A/A control's"))
        if plots.attributions(ablation.cells, folder / "attribution.png"):
            shown.append(("attribution.png", "GPU time of a step by kind of work, torch beside fused"))
    if len(ablation.parity) > 1:
        (folder / "parity.png").unlink(missing_ok=True)  # drawn when the first of them was all there was
    for index, parity in enumerate(ablation.parity):
        name = "parity.png" if len(ablation.parity) == 1 else f"parity_{index}.png"
        plots.losses(parity, folder / name)
        what = "Loss of every arm, and its distance from the reference; error of the worst layer's gradient at every step"
        shown.append((name, f"{what}: {label(parity.overrides)}"))
    return "\n\n".join(f"![{words}]({name})" for name, words in shown)


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


def _unpaired(numerator: ArmTimes, denominator: ArmTimes) -> Interval:
    """Ratio of the medians over cycles.

    The bootstrap draws cycles, because what slows one block of a cycle slows the other too: on an H200 the two blocks of GPT-2
    are correlated by up to 0.5. An interval that draws the 20 blocks one by one then misses the truth 9 times in 100.
    """
    return unpaired_ratio(*(cycle_times(arm.blocks_ms) for arm in (numerator, denominator)))


def _by_mode(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    found: dict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        found[cell.mode].append(cell)
    return found


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
