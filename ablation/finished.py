"""The losses of finished training runs with fused norms and with PyTorch's, which `python -m ablation.report` compares.

Runs of one group differ in norm.impl, the seed, and keys that affect nothing (configs/schema.py): neither a step, nor its time,
nor the final validation loss. All other keys count. In a group, runs of one seed are pairs: they have the same initial weights
and batches. Runs that were made again with their seed are the control, A/A.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from ablation.plots import losses_apart
from configs import keys
from configs.schema import DropoutMasks
from measure.comparison import FUSED, NO_KERNEL, TORCH
from measure.statistics import Interval, mean_interval
from measure.tables import NOTHING, capital, fact, flat, interval_text, label, loss, markdown, number, section, signed, wrapped
from training import plot
from training.console import take_any_encoding
from training.storage import replace_text, resume_command

COMPARED = {"norm.impl", "seed"}
LEAST_SEEDS = 3  # that a difference of losses needs for an interval
MACHINE = ("gpu.name", "gpu.driver", "cpus", "versions.torch", "versions.triton", "git.revision", "git.dirty")


@dataclass(frozen=True)
class FinishedRun:
    """What train.py left in a folder."""

    folder: Path
    config: dict[str, Any]  # by dotted name
    environment: dict[str, Any]  # by dotted name
    lines: list[dict[str, Any]]  # of metrics.jsonl
    val_loss: float  # the last one, nats per token

    @property
    def impl(self) -> str:
        return self.config["norm.impl"]

    @property
    def seed(self) -> int:
        return self.config["seed"]

    def figures(self, name: str) -> list[float]:
        return [float(line[name]) for line in self.lines if line.get(name) is not None]


Group = tuple[dict[str, str], list[FinishedRun]]  # what sets it apart, and its runs


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the report of finished runs to --output and prints it. The exit code is 2 for folders that it can't use.

    Folders without a finished run are named and left out, unless nothing is left to compare.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ablation.report",
        description="Compares finished training runs with norm.impl=torch and norm.impl=fused.",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_FOLDER", help="a run, such as those of runs/*_sweep/*")
    parser.add_argument("--output", type=Path, default=Path("report"), help="the folder for report.md (default: ./report)")
    take_any_encoding()
    arguments = parser.parse_args(sys.argv[1:] if argv is None else argv)
    runs, left_out = [], []
    for folder in plot.without_sweep_files(arguments.folders):
        try:
            runs.append(read_run(folder))
        except ValueError as error:
            print(f"left out: {error}", file=sys.stderr)
            left_out.append(folder.name)
    try:
        groups = grouped(runs)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = report(groups, arguments.output, left_out)
    replace_text(arguments.output / "report.md", text)
    print(f"{text}\nreport: {arguments.output}/report.md")
    return 0


def read_run(folder: Path) -> FinishedRun:
    """Reads a finished run from its files.

    Raises:
        ValueError: there is none, or a file is not what train.py writes.
    """
    if (folder / "report.json").is_file():
        raise ValueError(f"{folder}: an ablation, whose report is {folder}/report.md.")
    curve = plot.read_run(folder)
    if not (folder / "summary.json").is_file():
        raise ValueError(f"{folder}: no summary.json. The run did not finish; to go on: {resume_command(folder)}")
    try:
        environment, summary = (
            json.loads((folder / name).read_text(encoding="utf-8")) for name in ("environment.json", "summary.json")
        )
        return FinishedRun(folder, curve.config, flat(environment), curve.lines, float(summary["final"]["loss"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder}: not as train.py writes it: {type(error).__name__}: {error}") from error


def grouped(runs: Sequence[FinishedRun]) -> list[Group]:
    """Groups of runs that differ in free keys alone, with the keys and values that distinguish the group.

    Raises:
        ValueError: no run, or a group with only one of the two operators.
    """
    if not runs:
        raise ValueError("no finished run is left to compare.")
    free = COMPARED | set(keys.affecting("nothing"))
    kept = [{key: keys.shown(value) for key, value in run.config.items() if key not in free} for run in runs]
    varied = [key for key in dict.fromkeys(chain(*kept)) if len({of[key] for of in kept}) > 1]
    groups: dict[tuple[str, ...], list[FinishedRun]] = defaultdict(list)
    for run, of in zip(runs, kept, strict=True):
        groups[tuple(of[key] for key in varied)].append(run)
    found = [(dict(zip(varied, values, strict=True)), members) for values, members in groups.items()]
    for overrides, members in found:
        for impl in (TORCH, FUSED):
            if all(run.impl != impl for run in members):
                names = ", ".join(str(run.folder) for run in members)
                which = f" with {label(overrides)}" if overrides else ""
                raise ValueError(
                    f"no run{which} has norm.impl={impl}, to compare with {names}. "
                    "Runs are compared that differ in nothing but norm.impl and seed."
                )
    return found


def report(groups: Sequence[Group], folder: Path, left_out: Sequence[str]) -> str:
    """The report of finished runs, as Markdown; draws the losses of each group in `folder`."""
    runs = [run for _, of in groups for run in of]
    kernels = all(run.environment.get("gpu.name") for run in runs if run.impl == FUSED)
    top = [
        f"# Losses of fused norms and PyTorch's, from {len(runs)} finished runs" if kernels else f"# {NO_KERNEL}",
        f"{_losses(groups)}  ",
        "Step times of runs are unpaired and prove no speed-up: `python ablate.py` measures in pairs.",
    ]
    parts = ["\n".join(top)]
    for index, (overrides, of) in enumerate(groups):
        picture = "losses.png" if len(groups) == 1 else f"losses_{index}.png"
        losses_apart(
            [(run.impl, run.seed, plot.points(run.lines, "val/loss")) for run in of], label(overrides), folder / picture
        )
        parts.append(section(capital(label(overrides)), _group(of, picture)))
    notes = _notes(runs)
    if left_out:
        notes.append(f"Given too, and left out, being no finished runs: {', '.join(left_out)}.")
    parts.append(section("Notes", "\n".join(wrapped(f"- {note}") for note in notes)))
    return "\n\n".join(part for part in parts if part) + "\n"


def _group(runs: Sequence[FinishedRun], picture: str) -> str:
    rows = []
    for run in sorted(runs, key=lambda run: (run.impl != TORCH, run.seed)):
        ms, rates, peaks = (run.figures(f"perf/{name}") for name in ("step_ms", "tokens_per_s", "peak_gb"))
        times = [number(median(ms)) if ms else NOTHING, f"{median(rates):,.0f}" if rates else NOTHING]
        peak = f"{max(peaks):.2f}" if peaks else NOTHING
        rows.append([run.folder.name, run.impl, str(run.seed), *times, peak, loss(run.val_loss)])
    header = ["run", "norm.impl", "seed", "step ms", "tokens/s", "peak GiB", "final val loss"]
    note = "Medians over the windows between two lines of metrics. Loss in nats per token."
    words = "How far the validation loss of fused norms is from that of torch's, by step"
    return f"{markdown(header, rows)}\n\n{wrapped(f'- {_validation(runs)}')}\n\n{note}\n\n![{words}]({picture})"


def _losses(groups: Sequence[Group]) -> str:
    """The final validation losses in a line."""
    if len(groups) == 1:
        return _validation(groups[0][1])
    judged = [_differ(*intervals) for _, runs in groups if (intervals := _intervals(runs))]
    counts = {
        "no difference found": len(judged) - sum(judged),
        "a difference": sum(judged),
        "too few seeds for an interval": len(groups) - len(judged),
    }
    words = ", ".join(f"{outcome} in {count}" for outcome, count in counts.items() if count)
    return f"Final validation loss, in {len(groups)} groups: {words}."


def _validation(runs: Sequence[FinishedRun]) -> str:
    """The final validation loss in words."""
    by, pairs = _final_losses(runs), _paired(runs)
    if not pairs:
        torch, fused = ([run.val_loss for run in runs if run.impl == impl] for impl in (TORCH, FUSED))
        difference = signed(fmean(fused) - fmean(torch))
        return f"Final validation loss: fused − torch {difference}; no seed has both, so this includes their spread."
    over = ""
    if len(pairs) > 1:
        over = f"; standard deviation of torch's over seeds {stdev(fmean(by[TORCH, seed]) for seed in pairs):.5f}"
    if not (intervals := _intervals(runs)):
        each = ", ".join(f"{signed(difference)} (seed {seed})" for seed, difference in pairs.items())
        return f"Final validation loss: fused − torch {each}{over}; too few seeds for an interval."
    apart, again = intervals
    found = f"{'' if _differ(apart, again) else 'no difference found, '}fused − torch {interval_text(apart, 5)}"
    control = f"; A/A, of {len(_again(runs))} runs made again, {interval_text(again, 5)}" if again else ""
    return f"Final validation loss: {found}, mean and 95 % t-interval, paired over {len(pairs)} seeds{control}{over}."


def _final_losses(runs: Sequence[FinishedRun]) -> dict[tuple[str, int], list[float]]:
    """Final losses by operator and seed. A repeated run gives more than one."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for run in runs:
        found[run.impl, run.seed].append(run.val_loss)
    return found


def _paired(runs: Sequence[FinishedRun]) -> dict[int, float]:
    """Fused − torch of the final losses, by seed, for seeds that have both. Repeated runs count by their mean."""
    by = _final_losses(runs)
    seeds = sorted({seed for impl, seed in by if impl == TORCH} & {seed for impl, seed in by if impl == FUSED})
    return {seed: fmean(by[FUSED, seed]) - fmean(by[TORCH, seed]) for seed in seeds}


def _again(runs: Sequence[FinishedRun]) -> list[float]:
    """A/A: each repeated run of an operator and a seed, minus the first one."""
    return [loss - first for first, *more in _final_losses(runs).values() for loss in more]


def _intervals(runs: Sequence[FinishedRun]) -> tuple[Interval, Interval | None] | None:
    """Those of the paired differences, and of A/A if enough runs were made again; None: of too few seeds."""
    pairs, again = _paired(runs), _again(runs)
    if len(pairs) < LEAST_SEEDS:
        return None
    return mean_interval([*pairs.values()]), mean_interval(again) if len(again) >= LEAST_SEEDS else None


def _differ(apart: Interval, again: Interval | None) -> bool:
    """Whether fused and torch may be called different: the interval leaves out 0, and the A/A interval is nearer to 0.

    What chance makes of a run is in the pairs' own scatter, but five pairs may agree by chance too.
    """
    return not apart.holds(0) and (again is None or abs(apart.median) > max(abs(again.low), abs(again.high)))


def _notes(runs: Sequence[FinishedRun]) -> list[str]:
    """What else could explain a difference."""
    facts = {name: list(dict.fromkeys(fact(run.environment.get(name)) for run in runs)) for name in MACHINE}
    shared = ", ".join(f"{name} {values[0]}" for name, values in facts.items() if len(values) == 1 and values != ["None"])
    notes = [f"All runs: {shared}."] if shared else []
    notes += [f"The runs differ in {name}: {', '.join(values)}." for name, values in facts.items() if len(values) > 1]
    if any(run.config["model.dropout"] and run.config["norm.dropout_masks"] == DropoutMasks.native for run in runs):
        notes.append(
            "Runs of one seed share initial weights and batches, and not the masks of dropout: norm.dropout_masks=shared would "
            "have made those the same too."
        )
    resumed = [run.folder.name for run in runs if run.config.get("resume") not in ("never", "auto")]
    if resumed:
        notes.append(f"Resumed, so timed over a part of their steps: {', '.join(resumed)}.")
    return notes
