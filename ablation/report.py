"""report.md: what an ablation found, for somebody who was not there; and the same, unpaired, from finished training runs.

python -m ablation.report RUN_FOLDER…        folders that train.py wrote, or that hold those of a sweep
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean

import numpy as np

from ablation import finished, plots
from ablation.compared import AGAIN, FUSED, TORCH, Quantity
from ablation.gpu_time import clocks, gpu_time
from ablation.plots import label
from ablation.records import Ablation, ArmTimes, Cell, Parity
from ablation.statistics import Interval, spread
from ablation.text import aligned, capital, environment, firsts, flat, loss, markdown, number, section, signed, wrapped
from ablation.turns import per_cycle
from ablation.verdict import NO_KERNEL, differs, plain
from training.storage import replace_text

MODES = ("eager", "compiled")
SHIFT = ", shift"  # how parity ends the names of what it looks at for a sign that all seeds share
MOST_QUANTITIES = 10
PARITY_RULE = (
    "Every arm runs eager, but for its loss where train.compile_loss compiles that, without dropout on attention weights, from "
    "the same initial weights, batches and dropout masks; models compiled whole were not compared. reference: PyTorch's norms, "
    "everything in fp32 (in fp64 where the run is in fp32). torch, fused: the run's precision. reordered: torch with the "
    "sums of its norms in another order, which is what a legitimate change looks like. Distances and shifts are from the "
    "reference, over what the run's rounding leads one to expect; means over seeds, geometric ones of distances, with "
    "Student's intervals. The statistic and its level are stated in ablation/parity.py."
)


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
        section("Parity", "\n\n".join([*map(_parity, ablation.parity), wrapped(PARITY_RULE)]) if ablation.parity else ""),
        section("Plots", _pictures(ablation, folder)),
        section("Environment", _environment(ablation)),
        section("Command", f"```\n{ablation.command}\n```"),
        section("Configuration", f"```yaml\n{ablation.config.rstrip()}\n```"),
    ]
    path = folder / "report.md"
    replace_text(path, "\n\n".join(part for part in parts if part) + "\n")
    return path


def table(ablation: Ablation) -> str:
    """The verdicts and the step times, as aligned text for a terminal."""
    lines = [] if ablation.kernels else [f"{NO_KERNEL}.", ""]
    header = ["", "median ms", "p10", "p90", "times as fast as torch (95 %)", "tokens/s", "peak GiB", "launches"]
    rows = []
    for cell in ablation.cells:
        rows.append([label(cell.overrides, cell.mode), *[""] * 7])
        speedups = {AGAIN: plain(cell.control.speedup), FUSED: plain(cell.fused.speedup)}
        for name, arm in cell.arms.items():
            figures = _arm_figures(cell, arm)
            rows.append([f"  {_arm(name)}", *figures[:3], speedups.get(name, ""), *figures[3:]])
    # What only a GPU tells has no column where there was none.
    kept = [i for i in range(len(header)) if i == 0 or any(row[i] not in ("", "–") for row in rows)]
    text = aligned([header[i] for i in kept], [[row[i] for i in kept] for row in rows])
    paired = "times as fast is paired: the median over cycles of each cycle's ratio, which need not be that of the medians."
    lines += [text, *(["", paired] if rows else []), ""]
    lines += [f"{label(cell.overrides, cell.mode)}: {cell.verdict}." for cell in ablation.cells]
    lines += [_parity_sentence(parity, several=len(ablation.parity) > 1) for parity in ablation.parity]
    return "\n".join(lines)


# ---- the verdict, in three lines -------------------------------------------------------------------------------------------


def _verdicts(ablation: Ablation) -> str:
    """A heading and two lines; hard line breaks, so that they stay lines when Markdown is rendered."""
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
        return f"{heading}\n{timing}  \n{_parity_sentence(parity[0], several=one_of_several)}"
    if not broken:
        return f"{heading}\n{timing}  \nParity holds in each of {len(parity)} configurations."
    fails = " ".join(_parity_sentence(one, several=True) for one in broken)
    return f"{heading}\n{timing}  \nParity FAILS in {len(broken)} of {len(parity)} configurations. {fails}"


def _headline(cells: Sequence[Cell]) -> str:
    """1.203 × as fast eager, 1.070 × compiled"""
    if not cells:
        return "step times were not measured"
    parts: list[str] = []
    for mode, of in _by_mode(cells).items():
        found = [cell.fused.speedup.median for cell in of if differs(cell.fused, cell.control)]
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
    found = [cell for cell in cells if differs(cell.fused, cell.control)]
    slower = sum(cell.fused.speedup.median < 1 for cell in found)
    off = max(abs(end - 1) for cell in cells for end in (cell.control.speedup.low, cell.control.speedup.high))
    counts = {"faster": len(found) - slower, "slower": slower, "no difference found": len(cells) - len(found)}
    words = ", ".join(f"{outcome} in {count}" for outcome, count in counts.items() if count)
    return f"Fused norms in {len(cells)} cells: {words}. The 95 % interval of A/A reaches {100 * off:.2f} % from 1 at most."


def _parity_sentence(parity: Parity, several: bool) -> str:
    where = f"{capital(label(parity.overrides))}: p" if several else "P"
    words = f"{where}arity {'holds' if parity.holds else 'FAILS'}"
    said = parity.verdict.rstrip(".")
    # The verdict may or may not begin with the words that are already here.
    for opening in ("parity holds", "parity fails", "parity does not hold"):
        if said.lower().startswith(opening):
            said = said[len(opening) :].lstrip(" :,;.")
    return f"{words}: {said}." if said else f"{words}."


# ---- tables ----------------------------------------------------------------------------------------------------------------


def _setting(ablation: Ablation) -> str:
    """What a reader has to know before any figure: what a step is made of, and on what it ran."""
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
    header = ["cell", "arm", "median ms", "p10", "p90", "tokens/s", "peak GiB", "launches"]
    rows = [
        [name if first else "", _arm(arm), *_arm_figures(cell, of)]
        for cell, name in zip(cells, _short_labels(cells), strict=True)
        for first, arm, of in firsts(cell.arms.items())
    ]
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
        "some order and then in its reverse; every third order is drawn by seed, and in between the first goes last. A block "
        "opens with a step that is not counted: it fills the GPU's queue, which copying weights back has emptied. Between "
        "cycles the arms trade places: weights and optimizer state of each move to where another's lay in memory, but for CUDA "
        "graphs, which have the addresses in them."
    )


def _comparisons(cells: Sequence[Cell]) -> str:
    header = ["cell", "arm", "ms over torch (95 %)", "times as fast (95 %)"]
    rows = [
        [name if first else "", arm, plain(comparison.difference_ms), plain(comparison.speedup)]
        for cell, name in zip(cells, _short_labels(cells), strict=True)
        for first, arm, comparison in firsts([(FUSED, cell.fused), ("A/A", cell.control)])
    ]
    if not rows:
        return ""
    verdicts = "\n".join(wrapped(f"- {label(cell.overrides, cell.mode)}: {cell.verdict}.") for cell in cells)
    paired = (
        "Both columns are paired: medians over cycles of each cycle's difference and ratio. They need not agree with the "
        "medians above; where cycles scatter, not even in sign."
    )
    rule = (
        "The A/A control is a second arm with torch's norms in the same schedule: what the protocol makes of no difference. "
        "No speed-up and no slow-down is claimed where the interval of fused contains 1, or where it is no further from 1 than "
        "the far end of A/A's interval."
    )
    return f"{markdown(header, rows)}\n\n{wrapped(paired)}\n\n{verdicts}\n\n{wrapped(rule)}"


def _split(cells: Sequence[Cell]) -> str:
    header = ["cell", "arm", "forward ms", "backward ms", "optimizer ms"]
    rows = [
        [name if first else "", arm, *(number(ms) for ms in (of.forward_ms, of.backward_ms, of.optimizer_ms))]
        for cell, name in zip(cells, _short_labels(cells), strict=True)
        for first, arm, of in firsts((arm, cell.arms[arm]) for arm in (TORCH, FUSED) if arm in cell.arms)
    ]
    note = "Medians of short windows of their own: marks inside a step cost time, so the parts need not add up to the step."
    return f"{markdown(header, rows)}\n\n{note}" if rows else ""


def _compile(cells: Sequence[Cell]) -> str:
    """Torch eager against torch compiled of the same overrides; cells run one after another, so this is not paired."""
    pairs: dict[tuple[tuple[str, str], ...], dict[str, Cell]] = defaultdict(dict)
    for cell in cells:
        pairs[tuple(cell.overrides.items())][cell.mode] = cell
    both = [(dict(key), modes["eager"], modes["compiled"]) for key, modes in pairs.items() if modes.keys() >= set(MODES)]
    rows: list[list[str]] = []
    sentences: list[str] = []
    names = _short_labels([eager for _, eager, _ in both], mode=False)
    for name, (overrides, eager, compiled) in zip(names, both, strict=True):
        alone = _unpaired_ratio(eager.arms[TORCH], compiled.arms[TORCH])
        together = _unpaired_ratio(eager.arms[TORCH], compiled.arms[FUSED])
        left = compiled.fused.speedup
        rows.append([name, *map(plain, (alone, left, together))])
        gain = "no difference found" if alone.holds(1) else f"{alone.median:.3f} × as fast"
        rest = f"{left.median:.3f} × as fast" if differs(compiled.fused, compiled.control) else "no difference found"
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


def _parity(parity: Parity) -> str:
    size = [one for one in parity.quantities if not one.name.endswith(SHIFT)]
    shift = [replace(one, name=one.name.removesuffix(SHIFT)) for one in parity.quantities if one.name.endswith(SHIFT)]
    arms = list(parity.val_loss)
    rows = [[str(seed), *(loss(parity.val_loss[arm][i]) for arm in arms)] for i, seed in enumerate(parity.seeds)]
    if len(parity.seeds) > 1:
        rows.append(["mean", *(loss(fmean(parity.val_loss[arm])) for arm in arms)])
        spread_words = (
            f"mean and 95 % t-interval, paired by seed; standard deviation of torch's over seeds {parity.val_spread:.3g}."
        )
    else:
        spread_words = "of one seed, so without an interval."
    difference = plain(parity.val_difference, 6) if len(parity.seeds) > 1 else signed(parity.val_difference.median, 6)
    parts = [
        f"### {capital(label(parity.overrides))}",
        wrapped(_parity_sentence(parity, several=False)),
        _quantities(
            "distance from reference",
            size,
            "fused over reordered",
            lambda one: one.fused.median / max(one.reordered.median, 1e-9),
        ),
        _quantities("shift in one direction", shift, "the size of fused", lambda one: abs(one.fused.median)),
        "Final validation loss, nats per token:",
        markdown(["seed", *arms], rows),
        wrapped(f"Fused − torch {difference}, {spread_words}"),
    ]
    return "\n\n".join(part for part in parts if part)


def _quantities(title: str, quantities: Sequence[Quantity], by: str, nearness: Callable[[Quantity], float]) -> str:
    """What failed and what came nearest to it, which is `by` in words; a deep model has more layers than anybody reads."""
    worst = sorted(quantities, key=lambda one: (one.holds, -nearness(one)))[:MOST_QUANTITIES]
    rows = [[one.name, plain(one.fused, 2), plain(one.reordered, 2), "yes" if one.holds else "NO"] for one in worst]
    if not rows:
        return ""
    kept = markdown([title, "fused (95 %)", "reordered (95 %)", "holds"], rows)
    if len(worst) < len(quantities):
        order = f"The first {len(worst)} of {len(quantities)}: what failed, then by {by}. report.json has all."
    else:
        order = f"In order: what failed, then by {by}."
    return f"{kept}\n\n{order}"


def _pictures(ablation: Ablation, folder: Path) -> str:
    """Draws what there is; each picture stands with a sentence, for a reader who sees only text."""
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
        what = "Loss of every arm, and its distance from the reference"
        if parity.gradient_errors:
            what += "; error of the worst layer's gradient at every step"
        shown.append((name, f"{what}: {label(parity.overrides)}"))
    return "\n\n".join(f"![{words}]({name})" for name, words in shown)


def _arm_figures(cell: Cell, arm: ArmTimes) -> list[str]:
    """Median, p10 and p90 in ms, tokens/s, peak GiB, launches."""
    steps = list(chain(*arm.blocks_ms))
    whole = spread(steps)
    return [
        *(number(ms) for ms in (whole.median, whole.p10, whole.p90)),
        f"{1000 * cell.tokens_per_step / fmean(steps):,.0f}",  # from the mean: slow steps count
        "–" if arm.peak_gb is None else f"{arm.peak_gb:.2f}",
        "–" if arm.launches is None else f"{arm.launches:,}",
    ]


def _unpaired_ratio(numerator: ArmTimes, denominator: ArmTimes, resamples: int = 2000) -> Interval:
    """Of the medians over cycles of each, with a bootstrap 95 % interval that draws the cycles of each on their own.

    Cycles, since what slows one slows both of its blocks: of GPT-2's on an H200 the two are correlated by up to 0.5. Where they
    are by that, an interval that draws 20 blocks as if each were another measurement misses the truth 9 times in 100.
    """
    draw = np.random.default_rng(0)
    cycles = [np.array(per_cycle(arm.blocks_ms)) for arm in (numerator, denominator)]
    over, under = (np.median(of[draw.integers(0, len(of), (resamples, len(of)))], axis=1) for of in cycles)
    low, high = np.percentile(over / under, (2.5, 97.5))
    return Interval(float(np.median(cycles[0]) / np.median(cycles[1])), float(low), float(high))


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
