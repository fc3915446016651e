"""The loss curve of one run as a picture, or of several runs in one picture.

python -m training.plot runs/A runs/B ...                  the picture is runs.png here; --output FILE puts it elsewhere
python -m training.plot runs/*_sweep/* --unit nats         nats per token; by default bits per byte, for any tokenizers
"""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import configs
from configs import ConfigError, keys
from configs.command_line import as_config_errors
from measure.files import StorageError
from measure.plots import COLOURS, GREY, bare, finish, legend_below, look, may_replace, pyplot, ticker
from training.storage import read_metrics

NATS, BITS = "nats", "bits"
FIGURES = {NATS: "loss", BITS: "bits_per_byte"}  # in metrics.jsonl, after train/ and val/
LABELS = {NATS: "loss, nats per token", BITS: "bits per byte"}
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


def names_of(curves: Sequence[Curve]) -> list[str]:
    """A name for each run: the keys whose values differ, and its folder where those are not enough."""
    values = {name: [keys.shown(curve.config[name]) for curve in curves] for name in curves[0].config}
    differing = [name for name, of in values.items() if name not in keys.affecting("nothing") and len(set(of)) > 1]
    names = [", ".join(f"{name}={values[name][at]}" for name in differing[:MOST_NAMED]) for at in range(len(curves))]
    if len(set(names)) < len(names) or not differing:
        names = [f"{curve.folder}: {name}".removesuffix(": ") for curve, name in zip(curves, names, strict=True)]
    return names


def overlay(curves: Sequence[Curve], to: Path, unit: str = BITS, against: str = "step") -> None:
    """Draws the runs by step or tokens. Validation losses are lines with markers, training losses thin lines behind them.

    Raises:
        ConfigError: a run that has not recorded these figures.
    """
    names = [textwrap.fill(name, 90) for name in names_of(curves)]
    height = 4.4 + 0.2 * sum(name.count("\n") + 1 for name in names)
    figure, axes = pyplot.subplots(figsize=(7.2, height))
    ends: list[float] = []
    entries = {}
    for at, (curve, name) in enumerate(zip(curves, names, strict=True)):
        train, val = (points(curve.lines, f"{part}/{FIGURES[unit]}", against) for part in ("train", "val"))
        if not train + val:
            raise ConfigError(f"{curve.folder}: it has recorded no {LABELS[unit]} by {against}. Use other --unit and --by.")
        ends += limits(train, val)
        for shown, how in (
            (train, {"linewidth": 1.0, "alpha": 0.45} | ({} if len(train) == 1 else {"marker": ""})),
            (val, {"linewidth": 1.8, "clip_on": False, "label": name}),
        ):
            if shown:
                (entries[name],) = axes.plot(*zip(*shown, strict=True), **look(at) | how)
    axes.set(ylim=(min(ends), max(ends)), xlabel=against, ylabel=LABELS[unit])
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    bare(axes, "y")
    legend_below(figure, entries)
    finish(figure, "markers: validation; thin lines: training", "", to)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.plot", description="Lays the losses of runs over one another.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--output", type=Path, default=Path("runs.png"), help="the picture, a PNG (%(default)s)")
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
            overlay(curves, output, options.unit, options.by)
    except (ConfigError, StorageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{output}: {LABELS[options.unit]}, {len(curves)} run{'s' * (len(curves) > 1)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
