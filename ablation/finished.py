"""The comparison from finished training runs: unpaired, since each ran by itself; `python -m ablation.report` prints it.

Runs belong together that differ in nothing but norm.impl, seed, and keys that change neither a step, nor its time, nor the
final validation loss: where and how a run is kept (folder, resume, resume_with_changes, logging, checkpoint.every, .minutes
and .keep, data.cache_dir, data.processes), and what happens while the clock stands (eval.every, sample, profile) or elsewhere
(ablate). Every other key counts: also eval.batches, which the loss is taken over, checkpoint.background, by which a thread
writes beside the steps, and logging.every, the length of the windows that step times are of.
"""

import argparse
import json
import shlex
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from omegaconf import OmegaConf

import configs
from ablation.compared import FUSED, TORCH
from ablation.plots import boxes_of, label, trained
from ablation.statistics import Interval, mean_interval, spread
from ablation.text import capital, environment, fact, flat, loss, markdown, number, section, signed, wrapped
from ablation.verdict import NO_KERNEL, plain
from configs import keys
from configs.schema import DropoutMasks
from training.console import take_any_encoding
from training.plot import read_metrics, without_sweep_files
from training.storage import replace_text, resume_command

FREE = {
    *("norm.impl", "seed", "folder", "resume", "resume_with_changes"),
    *("checkpoint.every", "checkpoint.minutes", "checkpoint.keep"),
    *(f"logging.{key}" for key in ("wandb", "without_key", "project", "entity", "group", "name", "tags")),
    *("data.cache_dir", "data.processes", "eval.every", "profile"),
}
FREE_SECTIONS = {"sample", "ablate"}
LEAST_SEEDS = 3  # that a difference of losses needs for an interval
STEP_TIMES, COMMANDS = "step_times.png", "## Commands"
MACHINE = ("gpu.name", "gpu.driver", "cpus", "versions.torch", "versions.triton", "git.revision", "git.dirty")


@dataclass(frozen=True)
class FinishedRun:
    """What train.py left in a folder."""

    folder: Path
    config: dict[str, Any]  # by dotted name
    environment: dict[str, Any]  # by dotted name
    windows_ms: list[float]  # medians of step time between two lines of metrics
    tokens_per_s: float | None  # median over these windows
    peak_gb: float | None  # GiB; None but on CUDA
    val_loss: float  # the last one, nats per token
    val_losses: list[tuple[int, float]]  # step and loss of every evaluation
    yaml: str  # its config.yaml

    @property
    def impl(self) -> str:
        return self.config["norm.impl"]

    @property
    def seed(self) -> int:
        return self.config["seed"]


Group = tuple[dict[str, str], list[FinishedRun]]  # what sets it apart, and its runs


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the report of finished runs to --output and prints what it found; the exit code is 2 for folders it can't use.

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
        folders = {folder.resolve(): folder for one in given for folder in run_folders(one)}.values()
        missing = {folder: why for folder in folders if (why := unfinished(folder))}
        for why in missing.values():
            print(f"left out: {why}", file=sys.stderr)
        runs = [read_run(folder) for folder in folders if folder not in missing]
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


def run_folders(folder: Path) -> list[Path]:
    """The folder itself, or the runs in it.

    Raises:
        ValueError: neither is there.
    """
    if (folder / "config.yaml").is_file():
        return [folder]
    inside = sorted(path.parent for path in folder.glob("*/config.yaml"))
    if not inside and any(folder.glob("*/*/config.yaml")):
        raise ValueError(f"{folder}: no training run, but a folder of sweeps. Give those: {folder}/*.")
    if not inside:
        why = "has no config.yaml, nor has a folder in it" if folder.is_dir() else "is no folder"
        raise ValueError(f"{folder}: no training run: it {why}. Give folders that train.py wrote, such as runs/….")
    return inside


def unfinished(folder: Path) -> str:
    """Which file of a finished run is missing, in words; empty if none is."""
    if (folder / "report.json").is_file():
        return f"{folder}: an ablation, whose report is {folder}/report.md."
    for name in ("metrics.jsonl", "environment.json", "summary.json"):
        if not (folder / name).is_file():
            resume = f" The run did not finish; to go on: {resume_command(folder)}" if name == "summary.json" else ""
            return f"{folder}: no {name}.{resume}"
    return ""


def read_run(folder: Path) -> FinishedRun:
    """A run from its files; it has finished.

    Raises:
        ValueError: a file is not what train.py writes.
    """
    try:
        yaml = (folder / "config.yaml").read_text(encoding="utf-8")
        stored = OmegaConf.to_container(OmegaConf.create(yaml))
        config = flat(configs.to_dict(configs.from_dict(stored)))  # type: ignore[arg-type]
        environment, summary = (
            json.loads((folder / name).read_text(encoding="utf-8")) for name in ("environment.json", "summary.json")
        )
        metrics = read_metrics(folder / "metrics.jsonl")
        windows, rates, peaks = (
            [float(line[name]) for line in metrics if line.get(name) is not None]
            for name in ("perf/step_ms", "perf/tokens_per_s", "perf/peak_gb")
        )
        evaluated = [(int(line["step"]), float(line["val/loss"])) for line in metrics if line.get("val/loss") is not None]
        rate, peak = median(rates) if rates else None, max(peaks, default=None)
        final = float(summary["final"]["loss"])
        return FinishedRun(folder, config, flat(environment), windows, rate, peak, final, evaluated, yaml)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder}: not as train.py writes it: {type(error).__name__}: {error}") from error


def report(groups: Sequence[Group], pictures: Sequence[str], command: str, left_out: Sequence[Path] = ()) -> str:
    """The report of finished runs, as Markdown; `pictures` are the files that belong to the groups."""
    runs = [run for _, of in groups for run in of]
    found = [(overrides, of, _ratio(of)) for overrides, of in groups]
    outcomes = [_outcome(ratio) + (f" with {label(overrides)}" if overrides else "") for overrides, _, ratio in found]
    heading = "; ".join(outcomes) if len(found) <= 2 else f"{len(found)} groups"
    top = [
        f"# Fused norms against PyTorch's, from {len(runs)} finished runs, unpaired: {heading}",
        f"{_losses(groups)}  ",
        "Step times are unpaired: whatever else changed from run to run is in their ratio, and no A/A control shows how much. "
        "So it has a range and no interval, and proves no speed-up: `python ablate.py` measures in pairs.",
    ]
    if any(run.impl == FUSED and run.environment.get("gpu.name") is None for run in runs):
        top[0] = f"# {NO_KERNEL}"
        top[2] = f"Of the reference path: {heading}. {top[2]}"
    parts = ["\n".join(top)]
    parts += [_group(overrides, of, ratio, picture) for (overrides, of, ratio), picture in zip(found, pictures, strict=True)]
    if any(run.windows_ms for run in runs):
        parts.append(f"![Step times: quartiles, 10th and 90th percentile, medians of runs]({STEP_TIMES})")
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


def grouped(runs: Sequence[FinishedRun]) -> list[Group]:
    """Runs that differ in nothing but what is free, with the keys and values that set their group apart, as one types them.

    Raises:
        ValueError: a group with only one of the two operators.
    """
    kept = [
        {
            key: keys.shown(value)
            for key, value in run.config.items()
            if key not in FREE and key.partition(".")[0] not in FREE_SECTIONS
        }
        for run in runs
    ]
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


def draw(groups: Sequence[Group], folder: Path) -> list[str]:
    """The picture of each group's losses, and its name in `folder`; beside them one of all step times."""
    timed = [
        (label(overrides), {i: [run.windows_ms for run in runs if run.impl == i and run.windows_ms] for i in (TORCH, FUSED)})
        for overrides, runs in groups
    ]
    if timed := [(title, {i: parts for i, parts in of.items() if parts}) for title, of in timed if any(of.values())]:
        boxes_of(timed, "runs", folder / STEP_TIMES)
    names = ["losses.png"] if len(groups) == 1 else [f"losses_{index}.png" for index in range(len(groups))]
    for name, (overrides, runs) in zip(names, groups, strict=True):
        trained([(run.impl, run.seed, run.val_losses, run.val_loss) for run in runs], label(overrides), folder / name)
    return names


def _group(overrides: dict[str, str], runs: Sequence[FinishedRun], ratio: Interval | None, picture: str) -> str:
    rows = []
    for run in sorted(runs, key=lambda run: (run.impl != TORCH, run.seed)):
        windows = spread(run.windows_ms) if run.windows_ms else None
        figures = [number(ms) for ms in (windows.median, windows.p10, windows.p90)] if windows else ["–"] * 3
        rate = "–" if run.tokens_per_s is None else f"{run.tokens_per_s:,.0f}"
        peak = "–" if run.peak_gb is None else f"{run.peak_gb:.2f}"
        rows.append([run.folder.name, run.impl, str(run.seed), *figures, rate, peak, loss(run.val_loss)])
    header = ["run", "norm.impl", "seed", "step ms", "p10", "p90", "tokens/s", "peak GiB", "final val loss"]
    lines = [markdown(header, rows), ""]
    lines.append(f"- Steps of fused beside those of torch: {_outcome(ratio)}; unpaired.")
    lines.append(wrapped(f"- {_validation(runs)}"))
    note = (
        "Step time: median, p10 and p90 over the windows between two lines of metrics, in ms. The range is from torch's least "
        "p10 over fused's largest p90 to torch's largest p90 over fused's least p10. Loss in nats per token."
    )
    words = "Validation loss of every run, how far fused is from torch, and the final losses by seed"
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
    """Final validation loss of runs with the same seed, hence the same initial weights and batches: those are pairs."""
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
    verdict = "" if _apart(apart, again) else "no difference found, "
    control = f"; A/A, of {len(again)} runs made again, {plain(mean_interval(again), 5)}" if len(again) >= LEAST_SEEDS else ""
    return (
        f"Final validation loss: {verdict}fused − torch {plain(mean_interval(apart), 5)}, mean and 95 % t-interval, paired "
        f"over {len(pairs)} seeds{control}{over}."
    )


def _final_losses(runs: Sequence[FinishedRun]) -> dict[tuple[str, int], list[float]]:
    """By operator and seed; more than one where a run was made again."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for run in runs:
        found[run.impl, run.seed].append(run.val_loss)
    return found


def _paired(runs: Sequence[FinishedRun]) -> dict[int, float]:
    """Fused − torch of the final losses, by each seed that has both, in their order; of runs made again, the mean."""
    by = _final_losses(runs)
    return {
        seed: fmean(by[FUSED, seed]) - fmean(by[TORCH, seed])
        for impl, seed in sorted(by)
        if impl == TORCH and (FUSED, seed) in by
    }


def _again(runs: Sequence[FinishedRun]) -> list[float]:
    """A/A: each run of an operator and a seed that have had one before, minus that first one."""
    return [loss - first for first, *more in _final_losses(runs).values() for loss in more]


def _apart(paired: Sequence[float], again: Sequence[float]) -> bool:
    """Whether fused and torch may be called different: the interval leaves out 0, and A/A does not reach as far.

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
