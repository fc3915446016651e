"""The unpaired report of finished training runs, which `python -m ablation.report` prints."""

import argparse
import shlex
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from ablation.finished_runs import FinishedRun, Group, grouped, read_run, run_folders, unfinished
from ablation.plots import trained
from configs.schema import DropoutMasks
from measure.comparison import FUSED, NO_KERNEL, TORCH
from measure.statistics import mean_interval, spread
from measure.tables import (
    NOTHING,
    capital,
    environment,
    fact,
    interval_text,
    label,
    loss,
    markdown,
    number,
    section,
    signed,
    wrapped,
)
from training.console import take_any_encoding
from training.plot import without_sweep_files
from training.storage import replace_text

LEAST_SEEDS = 3  # that a difference of losses needs for an interval
COMMANDS = "## Commands"
MACHINE = ("gpu.name", "gpu.driver", "cpus", "versions.torch", "versions.triton", "git.revision", "git.dirty")


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the report of finished runs to --output and prints it. The exit code is 2 for folders that it can't use.

    Runs that did not finish are named and left out, unless nothing is left to compare.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ablation.report",
        description="Compares finished training runs with norm.impl=torch and norm.impl=fused.",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_FOLDER", help="a run, or a folder of runs (a sweep)")
    parser.add_argument("--output", type=Path, default=Path("report"), help="the folder for report.md (default: ./report)")
    take_any_encoding()
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = parser.parse_args(words)
    try:
        given = without_sweep_files(arguments.folders)
        folders: dict[Path, Path] = {}
        missing: dict[Path, str] = {}
        for one in given:
            try:
                folders |= {folder.resolve(): folder for folder in run_folders(one)}
            except ValueError as error:  # no run; others may be
                missing[one] = str(error)
        missing |= {folder: why for folder in folders.values() if (why := unfinished(folder))}
        for why in missing.values():
            print(f"left out: {why}", file=sys.stderr)
        runs = [read_run(folder) for folder in folders.values() if folder not in missing]
        if not runs:
            raise ValueError("no finished run is left to compare.")
        groups = grouped(runs)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    arguments.output.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "-m", "ablation.report", *words])
    text = report(groups, draw(groups, arguments.output), command, left_out=list(missing))
    replace_text(arguments.output / "report.md", text)
    print(f"{text.partition(COMMANDS)[0].rstrip()}\n\nreport: {arguments.output}/report.md")
    return 0


def report(groups: Sequence[Group], pictures: Sequence[str], command: str, left_out: Sequence[Path] = ()) -> str:
    """The report of finished runs, as Markdown; `pictures` are the files that belong to the groups."""
    runs = [run for _, of in groups for run in of]
    top = [
        f"# Losses of fused norms and PyTorch's, from {len(runs)} finished runs",
        f"{_losses(groups)}  ",
        "Step times of runs are unpaired and prove no speed-up: `python ablate.py` measures in pairs.",
    ]
    if any(run.impl == FUSED and run.environment.get("gpu.name") is None for run in runs):
        top[0] = f"# {NO_KERNEL}"
    parts = ["\n".join(top)]
    parts += [_group(overrides, of, picture) for (overrides, of), picture in zip(groups, pictures, strict=True)]
    notes = _unlike(runs)
    if left_out:
        notes.append(f"Given too, and left out, being no finished runs: {', '.join(folder.name for folder in left_out)}.")
    parts.append(section("Notes", "\n".join(wrapped(f"- {note}") for note in notes)))
    commands = dict.fromkeys(run.environment.get("command") for run in runs)
    parts.append(
        section(
            COMMANDS.removeprefix("## "),
            "```\n" + "\n".join([command, *(f"python {one}" for one in commands if one)]) + "\n```",
        )
    )
    facts = {name: value for name, value in runs[0].environment.items() if name != "command"}
    parts.append(section("Environment of the first run", environment(facts)))
    parts.append(section("Configuration of the first run", f"```yaml\n{runs[0].yaml.rstrip()}\n```"))
    return "\n\n".join(part for part in parts if part) + "\n"


def draw(groups: Sequence[Group], folder: Path) -> list[str]:
    """Draws the losses of each group, and returns the names of the files."""
    names = ["losses.png"] if len(groups) == 1 else [f"losses_{index}.png" for index in range(len(groups))]
    for name, (overrides, runs) in zip(names, groups, strict=True):
        trained([(run.impl, run.seed, run.val_losses) for run in runs], label(overrides), folder / name)
    return names


def _group(overrides: dict[str, str], runs: Sequence[FinishedRun], picture: str) -> str:
    rows = []
    for run in sorted(runs, key=lambda run: (run.impl != TORCH, run.seed)):
        windows = spread(run.windows_ms) if run.windows_ms else None
        figures = [number(ms) for ms in (windows.median, windows.p10, windows.p90)] if windows else [NOTHING] * 3
        rate = NOTHING if run.tokens_per_s is None else f"{run.tokens_per_s:,.0f}"
        peak = NOTHING if run.peak_gb is None else f"{run.peak_gb:.2f}"
        rows.append([run.folder.name, run.impl, str(run.seed), *figures, rate, peak, loss(run.val_loss)])
    header = ["run", "norm.impl", "seed", "step ms", "p10", "p90", "tokens/s", "peak GiB", "final val loss"]
    lines = [markdown(header, rows), ""]
    lines.append(wrapped(f"- {_validation(runs)}"))
    note = "Step time: median, p10 and p90 over the windows between two lines of metrics, in ms. Loss in nats per token."
    words = "Validation loss of every run, and how far fused is from torch"
    lines += ["", wrapped(note), "", f"![{words}]({picture})"]
    return section(capital(label(overrides)), "\n".join(lines))


def _losses(groups: Sequence[Group]) -> str:
    """The final validation losses in a line."""
    if len(groups) == 1:
        return _validation(groups[0][1])
    judged = [_apart([*pairs.values()], _again(runs)) for _, runs in groups if len(pairs := _paired(runs)) >= LEAST_SEEDS]
    counts = {
        "no difference found": len(judged) - sum(judged),
        "a difference": sum(judged),
        "too few seeds for an interval": len(groups) - len(judged),
    }
    words = ", ".join(f"{outcome} in {count}" for outcome, count in counts.items() if count)
    return f"Final validation loss, in {len(groups)} groups: {words}."


def _validation(runs: Sequence[FinishedRun]) -> str:
    """The final validation loss in words. Runs with the same seed are pairs: they have the same initial weights and batches."""
    by, pairs = _final_losses(runs), _paired(runs)
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
    apart, again = [*pairs.values()], _again(runs)
    found = (
        "" if _apart(apart, again) else "no difference found, "
    ) + f"fused − torch {interval_text(mean_interval(apart), 5)}"
    control = (
        f"; A/A, of {len(again)} runs made again, {interval_text(mean_interval(again), 5)}" if len(again) >= LEAST_SEEDS else ""
    )
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
    return {
        seed: fmean(by[FUSED, seed]) - fmean(by[TORCH, seed])
        for impl, seed in sorted(by)
        if impl == TORCH and (FUSED, seed) in by
    }


def _again(runs: Sequence[FinishedRun]) -> list[float]:
    """A/A: each repeated run of an operator and a seed, minus the first one."""
    return [loss - first for first, *more in _final_losses(runs).values() for loss in more]


def _apart(paired: Sequence[float], again: Sequence[float]) -> bool:
    """Whether fused and torch may be called different: the interval leaves out 0, and the A/A interval is nearer to 0.

    What chance makes of a run is in the pairs' own scatter, but five pairs may agree by chance too.
    """
    found = mean_interval(paired)
    control = mean_interval(again) if len(again) >= LEAST_SEEDS else None
    return not found.holds(0) and (control is None or abs(found.median) > max(abs(control.low), abs(control.high)))


def _unlike(runs: Sequence[FinishedRun]) -> list[str]:
    """What else could explain a difference."""
    notes = []
    for name in MACHINE:
        values = list(dict.fromkeys(fact(run.environment.get(name)) for run in runs))
        if len(values) > 1:
            notes.append(f"The runs differ in {name}: {', '.join(values)}.")
    if any(run.config["model.dropout"] and run.config["norm.dropout_masks"] == DropoutMasks.native for run in runs):
        notes.append(
            "Runs of one seed share initial weights and batches, and not the masks of dropout: norm.dropout_masks=shared would "
            "have made those the same too."
        )
    resumed = [run.folder.name for run in runs if run.config.get("resume") not in ("never", "auto")]
    if resumed:
        notes.append(f"Resumed, so timed over a part of their steps: {', '.join(resumed)}.")
    return notes
