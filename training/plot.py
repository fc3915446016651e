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

import numpy as np

import configs
from configs import ConfigError, keys
from measure.plots import GREY, bare, finish, legend_below, pyplot, save_figure, ticker
from training.metrics import read_metrics
from training.storage import StorageError, as_storage_errors

TRAIN, VAL = "#9db8d2", "#c2410c"
# Of several runs. Colours differ in lightness too, and dashes repeat after the last colour.
COLOURS = ("#111111", "#c2410c", "#2563eb", "#0f8a6d", "#b58900", "#7c3aed", "#8b8b8b")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)))
NATS, BITS = "nats", "bits"
FIGURES = {NATS: "loss", BITS: "bits_per_byte"}  # in metrics.jsonl, after train/ and val/
LABELS = {NATS: "loss, nats per token", BITS: "bits per byte"}
STEP, TOKENS, MINUTES = "step", "tokens", "minutes"
CLOCKS = {STEP: "step", TOKENS: "tokens", MINUTES: "minutes of training, without evaluation and compilation"}
MOST_NAMED = 4  # keys in an entry of the legend
Points = list[tuple[float, float]]


def points(lines: Sequence[dict[str, Any]], name: str, against: str = STEP) -> Points:
    """A figure by the step, or by another figure of the same line."""
    return [(line[against], line[name]) for line in lines if name in line and against in line]


def limits(shown: Points) -> tuple[float, float]:
    """The y axis for these points. The first losses, as large as ln(vocabulary), would flatten the rest: leave them out."""
    low, high = min(y for _, y in shown), max(y for _, y in shown)
    room = high - low or 0.1 * abs(high) or 1.0
    return low - 0.05 * room, high + 0.08 * room


def loss_curve(metrics: Path, to: Path, title: str) -> bool:
    """Draws bits per byte of training and validation, the gradient norm and the learning rate, by step and by tokens.

    Returns:
        Whether there was anything to draw.
    """
    lines = read_metrics(metrics)
    train, val = points(lines, "train/bits_per_byte"), points(lines, "val/bits_per_byte")
    if len(train) < 2:
        return False

    figure, (axes, *below) = pyplot.subplots(
        3, 1, figsize=(8, 6.5), dpi=130, layout="constrained", sharex=True, height_ratios=(4, 1, 1)
    )
    axes.plot(*zip(*train, strict=True), color=TRAIN, linewidth=1.6, label=f"training: {train[-1][1]:.3f}")
    if val:
        label = f"validation: {val[-1][1]:.3f} bits per byte after {val[-1][0]:,} steps"
        axes.plot(*zip(*val, strict=True), color=VAL, linewidth=1.6, marker="o", markersize=4, clip_on=False, label=label)
    axes.set_ylim(*limits(train[len(train) // 20 :] + val))
    axes.set_xlim(0, max(step for step, _ in train + val))
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_ylabel(LABELS[BITS])
    axes.legend(frameon=False, loc="upper right")
    for panel, name, label in zip(below, ("train/grad_norm", "train/lr"), ("gradient norm", "learning rate"), strict=True):
        if found := points(lines, name):
            panel.plot(*zip(*found, strict=True), color=GREY, linewidth=1.2)
        panel.set_ylabel(label)
    below[0].set_yscale("log")
    below[0].yaxis.set_minor_formatter(ticker.NullFormatter())
    below[-1].set_xlabel("step")
    below[-1].xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    steps, tokens = (np.array([0, *of, 2 * of[-1]], float) for of in zip(*points(lines, "tokens"), strict=True))
    top = axes.secondary_xaxis("top", functions=(lambda x: np.interp(x, steps, tokens), lambda x: np.interp(x, tokens, steps)))
    top.set_xlabel("tokens")
    for panel in (axes, *below):
        bare(panel, "y")
    figure.align_ylabels()
    with as_storage_errors(to):
        save_figure(figure, to)
    return True


# --- several runs ---


@dataclass(frozen=True)
class Curve:
    """What one run has logged."""

    folder: Path
    config: dict[str, Any]  # by dotted name
    lines: list[dict[str, Any]]

    def drawn(self, unit: str, against: str) -> tuple[Points, Points]:
        """The losses of training and of validation, in `unit`, by step, tokens or minutes."""
        names = [f"{part}/{FIGURES[unit]}" for part in ("train", "val")]
        if against != MINUTES:
            train, val = (points(self.lines, name, against) for name in names)
        else:
            minutes = minutes_of(self.lines)
            train, val = ([(minutes[x], y) for x, y in points(self.lines, name) if x in minutes] for name in names)
        return train, val


def read_run(folder: Path) -> Curve:
    """A run by its folder. Raises ConfigError: no run there."""
    for name in ("metrics.jsonl", "config.yaml"):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder}: no {name} there. Name folders of runs that have begun, such as runs/*.")
    cfg = configs.read_yaml(folder / "config.yaml")
    config = {name: attrgetter(name)(cfg) for name in keys.schema()}
    return Curve(folder, config, read_metrics(folder / "metrics.jsonl"))


def minutes_of(lines: Sequence[dict[str, Any]]) -> dict[float, float]:
    """Minutes of training until each line's step, from the recorded tokens per second. This is the time of steps, without
    evaluation, checkpoints and compilation. Lines before the first speed get that speed. Empty: no speed was recorded."""
    speeds = dict(points(lines, "perf/tokens_per_s"))
    found, minutes, before = {}, 0.0, 0.0
    speed = next(iter(speeds.values()), 0.0)
    for step, tokens in sorted(points(lines, "tokens")) if speed else ():
        speed = speeds.get(step, speed)
        minutes += (tokens - before) / speed / 60
        found[step], before = minutes, tokens
    return found


def without_sweep_files(given: Sequence[Path]) -> list[Path]:
    """Without multirun.yaml, which Hydra writes beside the runs of a sweep and runs/*_sweep/* matches."""
    return [path for path in given if path.name != "multirun.yaml"] or list(given)


def names_of(curves: Sequence[Curve]) -> list[str]:
    """A name for each run: the keys whose values differ, and its folder where those are not enough."""
    values = {name: [keys.shown(curve.config[name]) for curve in curves] for name in curves[0].config}
    differing = [name for name, of in values.items() if name not in keys.affecting("nothing") and len(set(of)) > 1]
    names = [", ".join(f"{name}={values[name][at]}" for name in differing[:MOST_NAMED]) for at in range(len(curves))]
    if len(differing) > MOST_NAMED or len(set(names)) < len(names) or not differing:
        more = ", …" * (len(differing) > MOST_NAMED)
        names = [f"{curve.folder}: {name}{more}".removesuffix(": ") for curve, name in zip(curves, names, strict=True)]
    return names


def overlay(curves: Sequence[Curve], to: Path, unit: str = BITS, against: str = STEP) -> None:
    """Draws the runs by step or tokens, and beside it by minutes of training if all have recorded their speed.

    Validation losses are lines with dots, training losses thin lines behind them.

    Args:
        unit: nats or bits.
        against: step or tokens.

    Raises:
        ConfigError: a run that has not recorded these figures.
    """
    for curve in curves:
        if not any(curve.drawn(unit, against)):
            raise ConfigError(f"{curve.folder}: it has recorded no {LABELS[unit]} by {against}. Use other --unit and --by.")
    clocks = [against] + [MINUTES] * all(any(curve.drawn(unit, MINUTES)) for curve in curves)
    width = 2.4 + 4.8 * len(clocks)
    names = [textwrap.fill(name, int(13 * width)) for name in names_of(curves)]  # thirteen letters of the legend to an inch
    rows = sum(name.count("\n") + 1 for name in names)
    figure, panels = pyplot.subplots(
        1, len(clocks), figsize=(width, 4.4 + 0.2 * rows), dpi=130, layout="constrained", squeeze=False, sharey=True
    )
    ends: list[float] = []
    entries = {}
    for at, (curve, name) in enumerate(zip(curves, names, strict=True)):
        style = {"color": COLOURS[at % len(COLOURS)], "linestyle": DASHES[at // len(COLOURS) % len(DASHES)], "markersize": 4}
        for axes, clock in zip(panels.flat, clocks, strict=True):
            train, val = curve.drawn(unit, clock)
            ends += limits(train[len(train) // 20 :] + val)
            for shown, how in (
                (train, {"linewidth": 1.0, "alpha": 0.45, "marker": "o" if len(train) == 1 else ""}),
                (val, {"linewidth": 1.8, "clip_on": False, "marker": "o", "label": name}),
            ):
                if shown:
                    (entries[name],) = axes.plot(*zip(*shown, strict=True), **style, **how)
    for axes, clock in zip(panels.flat, clocks, strict=True):
        axes.set_xlim(left=0)
        axes.set_ylim(min(ends), max(ends))
        axes.set_xlabel(CLOCKS[clock])
        bare(axes, "y")
    panels.flat[0].xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    panels.flat[0].set_ylabel(LABELS[unit])
    legend_below(figure, entries)
    with as_storage_errors(to):
        finish(figure, "dots: validation; thin lines: training", "", to)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.plot", description="Lays the losses of runs over one another.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--output", type=Path, default=Path("runs.png"), help="the picture, a PNG (%(default)s)")
    parser.add_argument("--by", choices=(STEP, TOKENS), default=STEP, help="what is on the axis below (%(default)s)")
    parser.add_argument("--unit", choices=(NATS, BITS), default=BITS, help="nats per token, or bits per byte (%(default)s)")
    options = parser.parse_args(arguments)
    curves, refused = [], []
    for folder in without_sweep_files(options.runs):
        try:
            curves.append(read_run(folder))
        except ConfigError as error:
            refused.append(f"left out: {error}")
    print(*refused, sep="\n", end="\n" * bool(refused), file=sys.stderr)
    try:
        if not curves:
            raise ConfigError("none of these is a run.")
        overlay(curves, options.output, options.unit, options.by)
    except (ConfigError, StorageError, ValueError) as error:  # ValueError: of a suffix that matplotlib does not know
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.output}: {LABELS[options.unit]}, {len(curves)} run{'s' * (len(curves) > 1)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
