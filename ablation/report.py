"""report.md: what an ablation found, for somebody who was not there; and the same, unpaired, from finished training runs.

python -m ablation.report RUN_FOLDER…        folders that train.py wrote, or that hold those of a sweep
"""

import argparse
import json
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import numpy as np
from omegaconf import OmegaConf

import configs
from ablation import plots
from ablation.plots import label
from ablation.records import AGAIN, FUSED, TORCH, Ablation, ArmTimes, Attribution, Cell, Parity, Quantity
from ablation.statistics import Interval, paired_difference, spread
from ablation.verdict import differs, plain
from training.plot import read_metrics

NO_KERNEL = "No kernel was measured: fused norms took the CPU reference path, so the figures say nothing about the kernels"
MODES = ("eager", "compiled")
SHIFT = ", shift"  # how parity ends the names of what it looks at for a sign that all seeds share
MOST_QUANTITIES = 20
PARITY_RULE = (
    "Every arm has the same initial weights, batches and dropout masks. reference: PyTorch's norms, everything in fp32 (in "
    "fp64 where the run is in fp32). torch, fused: the run's precision. reordered: torch with the sums of its norms in another "
    "order, which is what a legitimate change looks like. Distances and shifts are from the reference, over what the run's "
    "rounding leads one to expect. The statistic and its level are stated in ablation/parity.py."
)


def write(ablation: Ablation, folder: Path) -> Path:
    """Writes report.md and its plots; returns the path of report.md."""
    folder.mkdir(parents=True, exist_ok=True)
    cells = ablation.cells
    parts = [
        _verdicts(ablation),
        _section("Step times", _step_times(cells)),
        _section("Fused against torch", _comparisons(cells)),
        _section("Forward, backward, optimizer", _split(cells)),
        _section("What torch.compile buys, and what is left", _compile(cells)),
        _section("Where the GPU time goes", "\n\n".join(_attribution(cell) for cell in cells if cell.attribution)),
        _section("Parity", "\n\n".join([*map(_parity, ablation.parity), _wrapped(PARITY_RULE)]) if ablation.parity else ""),
        _section("Plots", _pictures(ablation, folder)),
        _section("Notes", "\n".join(_wrapped(f"- {note}") for note in ablation.notes)),
        _section("Environment", _environment({k: v for k, v in ablation.environment.items() if k != "command"})),
        _section("Command", f"```\n{ablation.command}\n```"),
        _section("Configuration", f"```yaml\n{ablation.config.rstrip()}\n```"),
    ]
    path = folder / "report.md"
    path.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
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
    text = _aligned([header[i] for i in kept], [[row[i] for i in kept] for row in rows])
    lines += [text, "", *(f"{label(cell.overrides, cell.mode)}: {cell.verdict}." for cell in ablation.cells)]
    lines += [_parity_sentence(parity, several=len(ablation.parity) > 1) for parity in ablation.parity]
    return "\n".join(lines)


# ---- the verdict, in three lines -------------------------------------------------------------------------------------------


def _verdicts(ablation: Ablation) -> str:
    """A heading and two lines; hard line breaks, so that they stay lines when Markdown is rendered."""
    parity = ablation.parity
    broken = [one for one in parity if not one.holds]
    agreement = "parity was not measured" if not parity else "parity FAILS" if broken else "parity holds"
    if ablation.kernels:
        heading = f"# Fused norms against PyTorch's: {_headline(ablation.cells)}; {agreement}"
    else:
        heading = f"# {NO_KERNEL}"
    timing = ("" if ablation.kernels else "Of the reference path: ") + _timing(ablation.cells)
    if not parity:
        return f"{heading}\n{timing}  \nParity was not measured."
    if len(parity) == 1:
        return f"{heading}\n{timing}  \n{_parity_sentence(parity[0], several=False)}"
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
        return " ".join(f"{_capital(label(cell.overrides, cell.mode))}: {cell.verdict}." for cell in cells)
    found = [cell for cell in cells if differs(cell.fused, cell.control)]
    slower = sum(cell.fused.speedup.median < 1 for cell in found)
    off = max(abs(end - 1) for cell in cells for end in (cell.control.speedup.low, cell.control.speedup.high))
    counts = {"faster": len(found) - slower, "slower": slower, "no difference found": len(cells) - len(found)}
    words = ", ".join(f"{outcome} in {count}" for outcome, count in counts.items() if count)
    return f"Fused norms in {len(cells)} cells: {words}. The 95 % interval of A/A reaches {100 * off:.2f} % from 1 at most."


def _parity_sentence(parity: Parity, several: bool) -> str:
    where = f"{_capital(label(parity.overrides))}: p" if several else "P"
    words = f"{where}arity {'holds' if parity.holds else 'FAILS'}"
    said = parity.verdict.rstrip(".")
    # The verdict may or may not begin with the words that are already here.
    for opening in ("parity holds", "parity fails", "parity does not hold"):
        if said.lower().startswith(opening):
            said = said[len(opening) :].lstrip(" :,;.")
    return f"{words}: {said}." if said else f"{words}."


# ---- tables ----------------------------------------------------------------------------------------------------------------


def _step_times(cells: Sequence[Cell]) -> str:
    header = ["cell", "arm", "median ms", "p10", "p90", "tokens/s", "peak GiB", "launches"]
    rows = [
        [name if first else "", _arm(arm), *_arm_figures(cell, of)]
        for cell, name in zip(cells, _short_labels(cells), strict=True)
        for first, arm, of in _firsts(cell.arms.items())
    ]
    return f"{_markdown(header, rows)}\n\nMilliseconds a step; tokens/s from the mean; kernel launches a step." if rows else ""


def _comparisons(cells: Sequence[Cell]) -> str:
    header = ["cell", "arm", "ms over torch (95 %)", "times as fast (95 %)"]
    rows = [
        [name if first else "", arm, plain(comparison.difference_ms), plain(comparison.speedup)]
        for cell, name in zip(cells, _short_labels(cells), strict=True)
        for first, arm, comparison in _firsts([(FUSED, cell.fused), ("A/A", cell.control)])
    ]
    if not rows:
        return ""
    verdicts = "\n".join(_wrapped(f"- {label(cell.overrides, cell.mode)}: {cell.verdict}.") for cell in cells)
    rule = (
        "The A/A control is torch's arm under a second name in the same schedule: what the protocol makes of no difference. "
        "No speed-up and no slow-down is claimed where the interval of fused contains 1, or where it is no further from 1 than "
        "the far end of A/A's interval."
    )
    return f"{_markdown(header, rows)}\n\n{verdicts}\n\n{_wrapped(rule)}"


def _split(cells: Sequence[Cell]) -> str:
    header = ["cell", "arm", "forward ms", "backward ms", "optimizer ms"]
    rows = [
        [name if first else "", arm, *(_number(ms) for ms in (of.forward_ms, of.backward_ms, of.optimizer_ms))]
        for cell, name in zip(cells, _short_labels(cells), strict=True)
        for first, arm, of in _firsts((arm, cell.arms[arm]) for arm in (TORCH, FUSED) if arm in cell.arms)
    ]
    note = "Medians of a short window of its own: marks inside a step cost time, so the parts need not add up to the step."
    return f"{_markdown(header, rows)}\n\n{note}" if rows else ""


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
        sentences.append(_wrapped(f"- {label(overrides)}: {said}"))
    if not rows:
        return ""
    header = ["configuration", "compile alone", "fused after compile", "both"]
    note = (
        "Times as fast, with 95 % intervals; `both` is fused and compiled over torch and eager. `compile alone` and `both` are "
        "unpaired: those cells ran one after the other."
    )
    return _markdown(header, rows) + "\n\n" + "\n".join(sentences) + "\n\n" + _wrapped(note)


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
            row += [_number(share.ms), f"{100 * share.ms / totals[name]:.1f}", f"{share.launches:,}"] if share else ["–"] * 3
        rows.append(row)
    launches = [sum(share.launches for share in shares) for shares in (found.torch, found.fused)]
    rows.append(["all", _number(totals[TORCH]), "", f"{launches[0]:,}", _number(totals[FUSED]), "", f"{launches[1]:,}"])
    header = ["GPU time", "torch ms", "%", "launches", "fused ms", "%", "launches"]
    title = f"### {_capital(label(cell.overrides, cell.mode))}"
    return f"{title}\n\n{_markdown(header, rows)}\n\n{_wrapped(_bound(found))}"


def _bound(found: Attribution) -> str:
    """The upper bound of any norm kernel, and how much of it was had."""
    norms = [sum(s.ms for s in shares if s.group.lower().startswith("norm")) for shares in (found.torch, found.fused)]
    least = found.norm_bytes / found.copy_gb_per_s / 1e6  # bytes / (10⁹ bytes / s) in ms
    rates = [f"{100 * least / ms:.0f} %" if ms else "–" for ms in norms]
    return (
        f"The norm sites of a step must move {found.norm_bytes / 1e9:.2f} GB, which takes {_number(least)} ms at the "
        f"{found.copy_gb_per_s:,.0f} GB/s that a copy reached here. Torch's take {_number(norms[0])} ms ({rates[0]} of copy "
        f"bandwidth), fused ones {_number(norms[1])} ms ({rates[1]}). So no norm kernel makes this step more than "
        f"{found.bound:.3f} × as fast as with torch's (Amdahl); of the time between, fused norms save "
        f"{100 * found.realised:.0f} %."
    )


def _parity(parity: Parity) -> str:
    size = [one for one in parity.quantities if not one.name.endswith(SHIFT)]
    shift = [replace(one, name=one.name.removesuffix(SHIFT)) for one in parity.quantities if one.name.endswith(SHIFT)]
    arms = list(parity.val_loss)
    rows = [[str(seed), *(_loss(parity.val_loss[arm][i]) for arm in arms)] for i, seed in enumerate(parity.seeds)]
    if len(parity.seeds) > 1:
        rows.append(["mean", *(_loss(fmean(parity.val_loss[arm])) for arm in arms)])
        spread_words = f"paired by seed; standard deviation of torch's over seeds {parity.val_spread:.3g}."
    else:
        spread_words = "of one seed, so without an interval."
    difference = plain(parity.val_difference, 6) if len(parity.seeds) > 1 else _signed(parity.val_difference.median, 6)
    parts = [
        f"### {_capital(label(parity.overrides))}",
        _wrapped(_parity_sentence(parity, several=False)),
        _quantities("distance from reference", size),
        _quantities("shift in one direction", shift),
        "Final validation loss, nats per token:",
        _markdown(["seed", *arms], rows),
        _wrapped(f"Fused − torch {difference}, {spread_words}"),
    ]
    return "\n\n".join(part for part in parts if part)


def _quantities(title: str, quantities: Sequence[Quantity]) -> str:
    """What failed and what came nearest to it; a deep model has more layers than anybody reads."""
    worst = sorted(quantities, key=lambda one: (one.holds, -abs(one.fused.median)))[:MOST_QUANTITIES]
    rows = [[one.name, plain(one.fused, 2), plain(one.reordered, 2), "yes" if one.holds else "NO"] for one in worst]
    if not rows:
        return ""
    kept = _markdown([title, "fused (95 %)", "reordered (95 %)", "holds"], rows)
    rest = len(quantities) - len(worst)
    return kept + (f"\n\nThe {len(worst)} largest of {len(quantities)}; the others are in report.json." if rest else "")


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
    for number, parity in enumerate(ablation.parity):
        name = "parity.png" if len(ablation.parity) == 1 else f"parity_{number}.png"
        plots.losses(parity, folder / name)
        shown.append((name, f"Loss of every arm, and its distance from the reference: {label(parity.overrides)}"))
    return "\n\n".join(f"![{words}]({name})" for name, words in shown)


def _environment(facts: dict[str, Any]) -> str:
    """All that is known, a line each, in the order in which it was noted."""
    known = [(name, value) for name, value in _flat(facts).items() if value is not None]
    return "```\n" + _aligned(None, [[name, _fact(value)] for name, value in known], left=2) + "\n```"


# ---- finished training runs ------------------------------------------------------------------------------------------------

# What may differ between runs that are compared: the operator, the seed, and where and how a run is kept.
FREE = ("norm.impl", "seed", "resume", "logging.", "ablate.", "data.cache_dir")
MACHINE = ("gpu.name", "gpu.driver", "cpus", "versions.torch", "versions.triton", "git.revision", "git.dirty")


@dataclass(frozen=True)
class FinishedRun:
    """What train.py left in a folder."""

    folder: Path
    config: dict[str, Any]  # by dotted name
    environment: dict[str, Any]  # by dotted name
    windows_ms: list[float]  # medians of step time between two lines of metrics
    val_loss: float  # the last one, nats per token

    @property
    def impl(self) -> str:
        return self.config["norm.impl"]

    @property
    def seed(self) -> int:
        return self.config["seed"]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report of finished runs and writes it to --output; returns the exit code, 2 for folders it can't use."""
    parser = argparse.ArgumentParser(
        prog="python -m ablation.report",
        description="Compares finished training runs with norm.impl=torch and norm.impl=fused.",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_FOLDER", help="a run, or a folder of runs (a sweep)")
    parser.add_argument("--output", type=Path, default=Path("report"), help="the folder for report.md (default: ./report)")
    arguments = parser.parse_args(argv)
    try:
        text = of_runs([read_run(folder) for given in arguments.folders for folder in run_folders(given)])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "report.md").write_text(text, encoding="utf-8")
    print(text, end="")
    return 0


def run_folders(folder: Path) -> list[Path]:
    """The folder itself, or the runs in it.

    Raises:
        ValueError: neither is there.
    """
    if (folder / "config.yaml").is_file():
        return [folder]
    inside = sorted(path.parent for path in folder.glob("*/config.yaml"))
    if not inside:
        why = "has no config.yaml, nor has a folder in it" if folder.is_dir() else "is no folder"
        raise ValueError(f"{folder}: no training run: it {why}. Give folders that train.py wrote, such as runs/….")
    return inside


def read_run(folder: Path) -> FinishedRun:
    """A run from its files.

    Raises:
        ValueError: a file is missing or is not what train.py writes.
    """
    for name in ("metrics.jsonl", "environment.json", "summary.json"):
        if not (folder / name).is_file():
            resume = f" The run did not finish; to go on: python train.py resume={folder}" if name == "summary.json" else ""
            raise ValueError(f"{folder}: no {name}.{resume}")
    try:
        stored = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
        config = _flat(configs.to_dict(configs.from_dict(stored)))  # type: ignore[arg-type]
        environment, summary = (
            json.loads((folder / name).read_text(encoding="utf-8")) for name in ("environment.json", "summary.json")
        )
        metrics = read_metrics(folder / "metrics.jsonl")
        windows = [line["perf/step_ms"] for line in metrics if line.get("perf/step_ms") is not None]
        return FinishedRun(folder, config, _flat(environment), windows, float(summary["final"]["loss"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder}: not as train.py writes it: {type(error).__name__}: {error}") from error


def of_runs(runs: Sequence[FinishedRun]) -> str:
    """The report of finished runs, as Markdown.

    Raises:
        ValueError: runs with only one of the two operators.
    """
    runs = list({run.folder.resolve(): run for run in runs}.values())
    groups = _grouped(runs)
    found = [(overrides, of, _ratio(of)) for overrides, of in groups]
    outcomes = [_outcome(ratio) + (f" with {label(overrides)}" if overrides else "") for overrides, _, ratio in found]
    heading = "; ".join(outcomes) if len(found) <= 2 else f"{len(found)} groups"
    top = [
        f"# Fused norms against PyTorch's, from {len(runs)} finished runs, unpaired: {heading}",
        "Unpaired: whatever else changed from run to run is in these ratios, and no A/A control shows how much that is.  ",
        "So they have a range and no interval, and prove no speed-up: `python ablate.py` measures in pairs.",
    ]
    if any(run.impl == FUSED and run.environment.get("gpu.name") is None for run in runs):
        top[0] = f"# {NO_KERNEL}"
        top += [f"Of the reference path: {heading}."]
    parts = ["\n".join(top), *(_group(overrides, of, ratio) for overrides, of, ratio in found)]
    notes = _unlike(runs)
    parts.append(_section("Notes", "\n".join(f"- {note}" for note in notes)))
    parts.append(_section("Environment of the first run", _environment(runs[0].environment)))
    return "\n\n".join(part for part in parts if part) + "\n"


def _grouped(runs: Sequence[FinishedRun]) -> list[tuple[dict[str, str], list[FinishedRun]]]:
    """Runs that differ in nothing but FREE, with the keys and values that set their group apart."""
    kept = [{key: _fact(value) for key, value in run.config.items() if not key.startswith(FREE)} for run in runs]
    varied = [key for key in dict.fromkeys(chain(*kept)) if len({of.get(key) for of in kept}) > 1]
    groups: dict[tuple[str, ...], list[FinishedRun]] = defaultdict(list)
    for run, of in zip(runs, kept, strict=True):
        groups[tuple(of.get(key, "not set") for key in varied)].append(run)
    found = []
    for values, members in groups.items():
        overrides = dict(zip(varied, values, strict=True))
        for impl in (TORCH, FUSED):
            if all(run.impl != impl for run in members):
                names = ", ".join(str(run.folder) for run in members)
                which = f" with {label(overrides)}" if overrides else ""
                raise ValueError(
                    f"no run{which} has norm.impl={impl}, to compare with {names}. "
                    "Runs are compared that differ in nothing but norm.impl and seed."
                )
        found.append((overrides, members))
    return found


def _ratio(runs: Sequence[FinishedRun]) -> Interval | None:
    """Torch's step time over that of fused: of the medians of runs, and between the outer tenths of their windows."""
    torch, fused = ([spread(run.windows_ms) for run in runs if run.impl == i and run.windows_ms] for i in (TORCH, FUSED))
    if not torch or not fused:
        return None
    return Interval(
        median(one.median for one in torch) / median(one.median for one in fused),
        min(one.p10 for one in torch) / max(one.p90 for one in fused),
        max(one.p90 for one in torch) / min(one.p10 for one in fused),
    )


def _outcome(ratio: Interval | None) -> str:
    if ratio is None:
        return "not timed"
    words = f"{ratio.median:.3f} × as fast (range {ratio.low:.3f} to {ratio.high:.3f})"
    return f"no difference found, {words}" if ratio.holds(1) else words


def _group(overrides: dict[str, str], runs: Sequence[FinishedRun], ratio: Interval | None) -> str:
    rows = []
    for run in sorted(runs, key=lambda run: (run.impl != TORCH, run.seed)):
        windows = spread(run.windows_ms) if run.windows_ms else None
        figures = [_number(ms) for ms in (windows.median, windows.p10, windows.p90)] if windows else ["–"] * 3
        rows.append([run.folder.name, run.impl, str(run.seed), *figures, _loss(run.val_loss)])
    header = ["run", "norm.impl", "seed", "step ms", "p10", "p90", "final val loss"]
    lines = [_markdown(header, rows), ""]
    lines.append(f"- Step time of fused over torch: {_outcome(ratio)}; unpaired.")
    lines.append(_wrapped(f"- {_validation(runs)}"))
    note = (
        "Step time: median, p10 and p90 over the windows between two lines of metrics, in ms. The range is from torch's least "
        "p10 over fused's largest p90 to torch's largest p90 over fused's least p10. Loss in nats per token."
    )
    lines += ["", _wrapped(note)]
    return _section(_capital(label(overrides)), "\n".join(lines))


def _validation(runs: Sequence[FinishedRun]) -> str:
    """Final validation loss of runs with the same seed, hence the same initial weights and batches: those are pairs."""
    by: dict[str, dict[int, float]] = {TORCH: {}, FUSED: {}}
    for run in runs:
        by[run.impl][run.seed] = run.val_loss
    seeds = sorted(by[TORCH].keys() & by[FUSED].keys())
    torch, fused = ([by[impl][seed] for seed in seeds] for impl in (TORCH, FUSED))
    if not seeds:
        difference = fmean(by[FUSED].values()) - fmean(by[TORCH].values())
        return f"Final validation loss: fused − torch {_signed(difference)}; no seed has both, so this includes their spread."
    over = f"; standard deviation of torch's over seeds {stdev(torch):.5f}" if len(seeds) > 1 else ""
    if len(seeds) < 3:
        each = ", ".join(f"{_signed(f - t)} (seed {s})" for s, t, f in zip(seeds, torch, fused, strict=True))
        return f"Final validation loss: fused − torch {each}{over}; too few seeds for an interval."
    interval = plain(paired_difference(fused, torch), 5)
    return f"Final validation loss: fused − torch {interval}, median and 95 % interval, paired over {len(seeds)} seeds{over}."


def _unlike(runs: Sequence[FinishedRun]) -> list[str]:
    """What else could explain a difference."""
    notes = []
    for name in MACHINE:
        values = list(dict.fromkeys(_fact(run.environment.get(name)) for run in runs))
        if len(values) > 1:
            notes.append(f"The runs differ in {name}: {', '.join(values)}.")
    resumed = [run.folder.name for run in runs if run.config.get("resume")]
    if resumed:
        notes.append(f"Resumed, so timed over a part of their steps: {', '.join(resumed)}.")
    return notes


# ---- text ------------------------------------------------------------------------------------------------------------------


def _section(title: str, body: str) -> str:
    return f"## {title}\n\n{body}" if body else ""


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose source is aligned, since a pager shows the source."""
    lines = [list(header), *map(list, rows)]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(header))]
    # Words to the left, numbers to the right.
    words = [i == 0 or all(not _numeric(line[i]) for line in lines[1:]) for i in range(len(header))]

    def shown(line: Sequence[str]) -> str:
        cells = (cell.ljust(w) if left else cell.rjust(w) for cell, w, left in zip(line, widths, words, strict=True))
        return f"| {' | '.join(cells)} |"

    rule = ["-" * w if left else "-" * (w - 1) + ":" for w, left in zip(widths, words, strict=True)]
    return "\n".join([shown(lines[0]), f"| {' | '.join(rule)} |", *map(shown, lines[1:])])


def _aligned(header: Sequence[str] | None, rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Columns padded to their widest entry, the first `left` to the left and all others to the right; titles take no room."""
    lines = [*([list(header)] if header else []), *map(list, rows)]
    if not lines:
        return ""
    # A line with nothing but its first entry is a title, and may reach over the other columns.
    full = [line for line in lines if any(line[1:])] or lines
    widths = [max(len(line[i]) for line in full) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            entry.ljust(w) if i < left else entry.rjust(w) for i, (entry, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _wrapped(words: str) -> str:
    """Lines that a pager shows whole; those of a list's item are indented."""
    indent = "  " if words.startswith("- ") else ""
    return textwrap.fill(words, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _arm_figures(cell: Cell, arm: ArmTimes) -> list[str]:
    """Median, p10 and p90 in ms, tokens/s, peak GiB, launches."""
    steps = list(chain(*arm.blocks_ms))
    whole = spread(steps)
    return [
        *(_number(ms) for ms in (whole.median, whole.p10, whole.p90)),
        f"{1000 * cell.tokens_per_step / fmean(steps):,.0f}",  # from the mean: slow steps count
        "–" if arm.peak_gb is None else f"{arm.peak_gb:.2f}",
        "–" if arm.launches is None else f"{arm.launches:,}",
    ]


def _unpaired_ratio(numerator: ArmTimes, denominator: ArmTimes, resamples: int = 2000) -> Interval:
    """Of the medians over blocks of each, with a bootstrap 95 % interval that draws the blocks of each on their own."""
    draw = np.random.default_rng(0)
    blocks = [np.array([median(block) for block in arm.blocks_ms]) for arm in (numerator, denominator)]
    over, under = (np.median(of[draw.integers(0, len(of), (resamples, len(of)))], axis=1) for of in blocks)
    low, high = np.percentile(over / under, (2.5, 97.5))
    return Interval(float(np.median(blocks[0]) / np.median(blocks[1])), float(low), float(high))


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


def _firsts(pairs: Iterable[tuple[str, Any]]) -> Iterable[tuple[bool, str, Any]]:
    return ((i == 0, *pair) for i, pair in enumerate(pairs))


def _arm(name: str) -> str:
    return f"{name} (A/A)" if name == AGAIN else name


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted name."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _fact(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _numeric(entry: str) -> bool:
    return entry[:1].isdigit() or entry[:1] in ("−", "–")


def _number(ms: float) -> str:
    """Four digits or so: 131.70, 12.310, 1.234."""
    return f"{ms:.1f}" if ms >= 1000 else f"{ms:.2f}" if ms >= 10 else f"{ms:.3f}"


def _loss(nats: float) -> str:
    return f"{nats:.5f}"


def _signed(value: float, digits: int = 5) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def _capital(words: str) -> str:
    """With a capital letter, unless the first word is the name of a key."""
    return words if "=" in words.partition(",")[0] else words[:1].upper() + words[1:]


if __name__ == "__main__":
    sys.exit(main())
