"""Finished training runs: what train.py left in their folders, and which of them can be compared.

Runs of one group differ in norm.impl, the seed, and keys that affect nothing (configs/schema.py): neither a step, nor its time,
nor the final validation loss. All other keys count.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import configs
from configs import keys
from measure.comparison import FUSED, TORCH
from measure.tables import (
    flat,
    label,
)
from training.metrics import read_metrics
from training.storage import resume_command

COMPARED = {"norm.impl", "seed"}


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
    """Says which file of a finished run is missing. Empty if none is."""
    if (folder / "report.json").is_file():
        return f"{folder}: an ablation, whose report is {folder}/report.md."
    for name in ("metrics.jsonl", "environment.json", "summary.json"):
        if not (folder / name).is_file():
            resume = f" The run did not finish; to go on: {resume_command(folder)}" if name == "summary.json" else ""
            return f"{folder}: no {name}.{resume}"
    return ""


def read_run(folder: Path) -> FinishedRun:
    """Reads a finished run from its files.

    Raises:
        ValueError: a file is not what train.py writes.
    """
    try:
        yaml = (folder / "config.yaml").read_text(encoding="utf-8")
        config = flat(configs.to_dict(configs.read_yaml(folder / "config.yaml")))
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


def grouped(runs: Sequence[FinishedRun]) -> list[Group]:
    """Groups of runs that differ in free keys alone, with the keys and values that distinguish the group.

    Raises:
        ValueError: a group with only one of the two operators.
    """
    kept = [
        {
            key: keys.shown(value)
            for key, value in run.config.items()
            if key not in COMPARED and key not in keys.affecting("nothing")
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
