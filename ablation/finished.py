"""The losses of finished training runs with fused norms and with PyTorch's, which `python -m ablation.report` compares.

Runs that are compared differ in norm.impl, the seed, and keys that affect nothing (configs/schema.py): neither a step, nor its
time, nor the final validation loss. Runs of one seed are pairs: they have the same initial weights and batches. Runs that were
made again with their seed are the control, A/A.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from ablation.plots import losses_apart
from configs import keys
from configs.schema import DropoutMasks
from measure.comparison import FUSED, NO_KERNEL, TORCH
from measure.statistics import mean_interval
from measure.tables import NOTHING, fact, flat, interval_text, loss, markdown, number, section, signed, wrapped
from training import plot
from training.console import take_any_encoding
from training.storage import replace_text, resume_command

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
        check_comparable(runs)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = report(runs, arguments.output, left_out)
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


def check_comparable(runs: Sequence[FinishedRun]) -> None:
    """
    Raises:
        ValueError: there are not runs of both operators, or they differ in a key that counts.
    """
    if missing := {TORCH, FUSED} - {run.impl for run in runs}:
        raise ValueError(f"no finished run has norm.impl={' nor '.join(sorted(missing))}: two implementations are compared.")
    free = {"norm.impl", "seed", *keys.affecting("nothing")}
    for key in (key for key in runs[0].config if key not in free):
        if len(values := dict.fromkeys(keys.shown(run.config[key]) for run in runs)) > 1:
            raise ValueError(
                f"the runs differ in {key} ({', '.join(values)}), and only norm.impl and seed may differ. Give those of one "
                "value."
            )


def report(runs: Sequence[FinishedRun], folder: Path, left_out: Sequence[str]) -> str:
    """The report of finished runs, as Markdown; draws how far their losses are apart in `folder`."""
    kernels = all(run.environment.get("gpu.name") for run in runs if run.impl == FUSED)
    top = [
        f"# Losses of fused norms and PyTorch's, from {len(runs)} finished runs" if kernels else f"# {NO_KERNEL}",
        f"{_validation(runs)}  ",
        "Step times of runs are unpaired and prove no speed-up: `python ablate.py` measures in pairs.",
    ]
    losses_apart([(run.impl, run.seed, plot.points(run.lines, "val/loss")) for run in runs], folder / "losses.png")
    picture = "![How far the validation loss of fused norms is from that of torch's, by step](losses.png)"
    rows = []
    for run in sorted(runs, key=lambda run: (run.impl != TORCH, run.seed)):
        ms, rates, peaks = (run.figures(f"perf/{name}") for name in ("step_ms", "tokens_per_s", "peak_gb"))
        times = [number(median(ms)) if ms else NOTHING, f"{median(rates):,.0f}" if rates else NOTHING]
        peak = f"{max(peaks):.2f}" if peaks else NOTHING
        rows.append([run.folder.name, run.impl, str(run.seed), *times, peak, loss(run.val_loss)])
    table = markdown(["run", "norm.impl", "seed", "step ms", "tokens/s", "peak GiB", "final val loss"], rows)
    note = "Medians over the windows between two lines of metrics. Loss in nats per token."
    notes = _notes(runs)
    if left_out:
        notes.append(f"Given too, and left out, being no finished runs: {', '.join(left_out)}.")
    parts = ["\n".join(top), picture, table, note, section("Notes", "\n".join(wrapped(f"- {note}") for note in notes))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _validation(runs: Sequence[FinishedRun]) -> str:
    """The final validation loss in words.

    Fused and torch are called different if the interval of their differences leaves out 0, and the A/A interval is nearer to 0.
    """
    by: dict[tuple[str, int], list[float]] = defaultdict(list)  # by operator and seed; a run made again gives more than one
    for run in runs:
        by[run.impl, run.seed].append(run.val_loss)
    seeds = sorted({seed for impl, seed in by if impl == TORCH} & {seed for impl, seed in by if impl == FUSED})
    pairs = {seed: fmean(by[FUSED, seed]) - fmean(by[TORCH, seed]) for seed in seeds}
    if not pairs:
        torch, fused = ([run.val_loss for run in runs if run.impl == impl] for impl in (TORCH, FUSED))
        difference = signed(fmean(fused) - fmean(torch))
        return f"Final validation loss: fused − torch {difference}; no seed has both, so this includes their spread."
    over = ""
    if len(pairs) > 1:
        over = f"; standard deviation of torch's over seeds {stdev(fmean(by[TORCH, seed]) for seed in pairs):.5f}"
    if len(pairs) < LEAST_SEEDS:
        each = ", ".join(f"{signed(difference)} (seed {seed})" for seed, difference in pairs.items())
        return f"Final validation loss: fused − torch {each}{over}; too few seeds for an interval."
    made_again = [one - first for first, *more in by.values() for one in more]
    apart, again = mean_interval([*pairs.values()]), mean_interval(made_again) if len(made_again) >= LEAST_SEEDS else None
    # What chance makes of a run is in the pairs' own scatter, but five pairs may agree by chance too: hence A/A.
    differ = not apart.holds(0) and (again is None or abs(apart.median) > max(abs(again.low), abs(again.high)))
    found = f"{'' if differ else 'no difference found, '}fused − torch {interval_text(apart, 5)}"
    control = f"; A/A, of {len(made_again)} runs made again, {interval_text(again, 5)}" if again else ""
    return f"Final validation loss: {found}, mean and 95 % t-interval, paired over {len(pairs)} seeds{control}{over}."


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
