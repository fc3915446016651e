"""The loss curve of one run as a picture, or of several runs in one picture.

python -m training.plot runs/A runs/B ...                  the picture is runs.png here; --output FILE puts it elsewhere
python -m training.plot runs/*_sweep/* --unit nats         nats per token; by default bits per byte, for any tokenizers
"""

import argparse
import math
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import configs
from configs import ConfigError, as_config_errors, keys
from measure.files import StorageError
from measure.plots import COLOURS, GREY, bare, finish, legend_below, look, may_replace, pyplot, ticker
from training.storage import read_metrics

NATS, BITS = "nats", "bits"
FIGURES = {NATS: "loss", BITS: "bits_per_byte"}  # in metrics.jsonl, after train/ and val/
LABELS = {NATS: "loss, nats per token", BITS: "bits per byte"}
MOST_LOOKS = 12  # that an eye tells apart
MOST_NAMED = 4  # keys in an entry of the legend
Points = list[tuple[float, float]]


def points(lines: Sequence[dict[str, Any]], name: str, against: str = "step") -> Points:
    """A figure by the step, or by another figure of the same line."""
    return [(line[against], line[name]) for line in lines if name in line and against in line]


def limits(train: Points, val: Points) -> tuple[float, float]:
    """The y axis. The first losses, as large as ln(vocabulary), would flatten the rest: leave them out."""
    shown = [y for _, y in train[len(train) // 20 :] + val]
    room = max(shown) - min(shown) or 0.1 * abs(max(shown)) or 1.0
    return min(shown) - 0.05 * room, max(shown) + 0.08 * room


def loss_curve(lines: Sequence[dict[str, Any]], to: Path, title: str) -> bool:
    """Draws bits per byte of training and validation, the gradient norm and the learning rate, by step.

    Returns:
        Whether there was anything to draw.
    """
    train, val = points(lines, "train/bits_per_byte"), points(lines, "val/bits_per_byte")
    if len(train) < 2:
        return False
    figure, (axes, *below) = pyplot.subplots(3, 1, figsize=(8, 6.5), sharex=True, height_ratios=(4, 1, 1))
    axes.plot(*zip(*train, strict=True), color="#9db8d2", label=f"training: {train[-1][1]:.3f}")
    if val:
        label = f"validation: {val[-1][1]:.3f} bits per byte after {val[-1][0]:,} steps"
        axes.plot(*zip(*val, strict=True), color=COLOURS[1], marker="o", markersize=4, clip_on=False, label=label)
    axes.set(ylim=limits(train, val), xlim=(0, max(step for step, _ in train + val)), ylabel=LABELS[BITS])
    axes.legend(loc="upper right")
    for panel, name, label in zip(below, ("train/grad_norm", "train/lr"), ("gradient norm", "learning rate"), strict=True):
        if found := points(lines, name):
            panel.plot(*zip(*found, strict=True), color=GREY, linewidth=1.2)
        panel.set_ylabel(label)
    below[0].set_yscale("log")
    below[-1].set_xlabel("step")
    below[-1].xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    for panel in (axes, *below):
        bare(panel, "y")
    figure.align_ylabels()
    finish(figure, title, "", to)
    return True


# ---- several runs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """What one run has logged."""

    folder: Path
    config: dict[str, Any]  # by dotted name
    lines: list[dict[str, Any]]


def read_run(folder: Path) -> Curve:
    """A run by its folder. Raises ConfigError: no run there."""
    with as_config_errors(str(folder)):
        for name in ("metrics.jsonl", "config.yaml"):
            if not (folder / name).is_file():
                raise ConfigError(f"{folder}: no {name} there. Name folders of runs that have begun, such as runs/*.")
        cfg = configs.read_yaml(folder / "config.yaml")
        return Curve(folder, {name: attrgetter(name)(cfg) for name in keys.schema()}, read_metrics(folder))


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seeds alone."""

    name: str
    curves: list[Curve]

    def points(self, name: str, against: str) -> tuple[Points, list[tuple[float, float]]]:
        """The mean over the runs of a figure, where all of them have it, and the least and the largest of it."""
        runs = [dict(points(curve.lines, name, against)) for curve in self.curves]
        shared = sorted(set(runs[0]).intersection(*runs))
        of_each = [[run[at] for run in runs] for at in shared]
        return [(at, fmean(of)) for at, of in zip(shared, of_each, strict=True)], [(min(of), max(of)) for of in of_each]


def grouped(curves: Sequence[Curve]) -> list[Group]:
    """The runs by the keys whose values differ, in the natural order of their names: these keys, and a folder where they do not
    tell. Runs with the same seed and all else equal are groups of their own."""
    values = {name: [keys.shown(curve.config[name]) for curve in curves] for name in curves[0].config}
    varied = [name for name, of in values.items() if name not in (*keys.affecting("nothing"), "seed") and len(set(of)) > 1]
    of_settings: dict[tuple[str, ...], list[Curve]] = {}
    for at, curve in enumerate(curves):
        of_settings.setdefault(tuple(f"{name}={values[name][at]}" for name in varied), []).append(curve)
    groups = []
    for settings, of in of_settings.items():
        shown = ", ".join(settings[:MOST_NAMED])
        alike = sum(other[:MOST_NAMED] == settings[:MOST_NAMED] for other in of_settings)
        distinct = len({curve.config["seed"] for curve in of}) == len(of)
        for runs in [of] if distinct else [[curve] for curve in of]:
            told = shown if alike == 1 and distinct and (shown or len(runs) > 1) else f"{runs[0].folder}: {shown}"
            groups.append(
                Group(f"{told}, mean of {len(runs)} seeds".strip(", ") if len(runs) > 1 else told.removesuffix(": "), runs)
            )
    return sorted(groups, key=lambda group: natural(group.name))


def natural(name: str) -> list[tuple[float, str]]:
    """A key to sort names by, in which 2 comes before 10."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)", name)
    return [(float(part), "") if at % 2 else (-math.inf, part) for at, part in enumerate(parts)]


def overlay(curves: Sequence[Curve], to: Path, unit: str = BITS, against: str = "step", best: int = MOST_LOOKS) -> None:
    """Draws the runs by step or tokens. Lines with markers are the mean validation losses of runs that differ in their seeds,
    with a band from the least to the largest; thin lines behind them are training losses.

    The `best` groups by their last validation loss have a look of their own; all others are grey.

    Raises:
        ConfigError: a run that has not recorded these figures.
    """
    groups, drawn = grouped(curves), []
    for group in groups:
        (trained, _), (valid, spread) = (group.points(f"{part}/{FIGURES[unit]}", against) for part in ("train", "val"))
        if not trained + valid:
            where = ", ".join(str(curve.folder) for curve in group.curves)
            raise ConfigError(f"{where}: recorded no {LABELS[unit]} by the same {against}. Use other --unit and --by.")
        drawn.append((group.name, trained, valid, spread))
    ranked = sorted(range(len(drawn)), key=lambda at: (drawn[at][2] or drawn[at][1])[-1][1])
    chosen = sorted(ranked[:best])
    names = [textwrap.fill(drawn[at][0], 90) for at in chosen]
    figure, axes = pyplot.subplots(figsize=(7.2, 4.4 + 0.2 * sum(name.count("\n") + 1 for name in names)))
    for at in sorted(ranked[best:]):
        axes.plot(*zip(*(drawn[at][2] or drawn[at][1]), strict=True), color=GREY, linewidth=0.6, alpha=0.4)
    ends: list[float] = []
    entries = {}
    for number, (at, name) in enumerate(zip(chosen, names, strict=True)):
        _, train, val, band = drawn[at]
        ends += limits(train, val)
        for shown, how in (
            (train, {"linewidth": 1.0, "alpha": 0.45} | ({} if len(train) == 1 else {"marker": ""})),
            (val, {"linewidth": 1.8, "clip_on": False, "label": name}),
        ):
            if shown:
                (entries[name],) = axes.plot(*zip(*shown, strict=True), **look(number) | how)
        if any(low < high for low, high in band):
            x, (low, high) = [at for at, _ in val], zip(*band, strict=True)
            axes.fill_between(x, low, high, color=look(number)["color"], alpha=0.15, linewidth=0)
    axes.set(ylim=(min(ends), max(ends)), xlabel=against, ylabel=LABELS[unit])
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    bare(axes, "y")
    legend_below(figure, entries)
    said = f"the best {len(chosen)} of {len(drawn)} lines, the others grey; " * (len(chosen) < len(drawn))
    bands = "; bands: lowest and highest seed" * any(len(group.curves) > 1 for group in groups)
    finish(figure, f"{said}markers: validation; thin lines: training{bands}", "", to)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.plot", description="Lays the losses of runs over one another.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--output", type=Path, default=Path("runs.png"), help="the picture, a PNG (%(default)s)")
    parser.add_argument("--best", type=int, choices=range(1, MOST_LOOKS + 1), default=MOST_LOOKS, metavar="N",
                        help="lines with a look of their own: the N with the least validation loss (%(default)s)")  # fmt: skip
    parser.add_argument("--by", choices=("step", "tokens"), default="step", help="what is on the axis below (%(default)s)")
    parser.add_argument("--unit", choices=(NATS, BITS), default=BITS, help="nats per token, or bits per byte (%(default)s)")
    options = parser.parse_args(arguments)
    curves = []
    for folder in options.runs:
        try:
            curves.append(read_run(folder))
        except ConfigError as error:
            print(f"left out: {error}", file=sys.stderr)
    output = options.output
    try:
        if not curves:
            raise ConfigError("none of these is a run.")
        with as_config_errors(f"--output {output}"):
            if not may_replace(output):
                raise ConfigError(f"--output {output}: is there already, and no picture of this program. Name a new file.")
            overlay(curves, output, options.unit, options.by, options.best)
    except (ConfigError, StorageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{output}: {LABELS[options.unit]}, {len(curves)} run{'s' * (len(curves) > 1)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
