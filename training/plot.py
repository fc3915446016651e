"""The loss curve of one run as a picture, or of several runs in one picture.

python -m training.plot runs/A runs/B ...                  the picture is runs.png here; --output FILE puts it elsewhere
python -m training.plot runs/*_sweep/* --unit bits         bits per byte; by default where the runs' tokenizers differ
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

import configs
from configs import ConfigError, keys
from measure.plots import GREY, bare, pyplot, save_figure, ticker
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
PARTS = ("train", "val")
MOST_NAMED = 4  # keys in an entry of the legend


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl that are records: `step`, and figures by name. Damaged lines are left out."""
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            numbers = isinstance(record, dict) and all(type(value) in (int, float) for value in record.values())
            if numbers and type(record.get("step")) is int:
                lines.append(record)
    return lines


def points(lines: Sequence[dict[str, Any]], name: str, against: str = "step") -> list[tuple[float, float]]:
    """A figure by the step, or by another figure of the same line."""
    return [(line[against], line[name]) for line in lines if name in line and against in line]


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


def limits(shown: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The y axis for these points. The first losses, as large as ln(vocabulary), would flatten the rest: leave them out."""
    low, high = min(y for _, y in shown), max(y for _, y in shown)
    room = high - low or 0.1 * abs(high) or 1.0
    return low - 0.05 * room, high + 0.08 * room


# --- several runs ---


@dataclass(frozen=True)
class Curve:
    """What one run has logged."""

    folder: Path
    config: dict[str, Any]  # by dotted name
    lines: list[dict[str, Any]]

    def drawn(self, unit: str, against: str) -> list[list[tuple[float, float]]]:
        """The losses of training and of validation, in `unit`, by step, tokens or minutes."""
        found = [points(self.lines, f"{part}/{FIGURES[unit]}", "step" if against == MINUTES else against) for part in PARTS]
        if against == MINUTES:
            minutes = minutes_of(self.lines)
            found = [[(minutes[step], loss) for step, loss in of if step in minutes] for of in found]
        return found

    @property
    def bits_per_nat(self) -> float | None:
        """How many bits per byte a nat per token is, in its validation text; None without validation."""
        ratios = [
            line["val/bits_per_byte"] / line["val/loss"]
            for line in self.lines
            if line.get("val/loss") and "val/bits_per_byte" in line
        ]
        return round(ratios[-1], 6) if ratios else None


def without_sweep_files(given: Sequence[Path]) -> list[Path]:
    """Without multirun.yaml, which Hydra writes beside the runs of a sweep and runs/*_sweep/* matches."""
    return [path for path in given if path.name != "multirun.yaml"] or list(given)


def read_run(folder: Path) -> Curve:
    """A run by its folder.

    Raises:
        ConfigError: no run there, or one without a line of metrics.
    """
    for name in ("metrics.jsonl", "config.yaml"):
        if not (folder / name).is_file():
            if any(folder.glob("*/metrics.jsonl")):
                raise ConfigError(f"{folder}: no run, but a folder of runs, such as a sweep's. Name those: {folder}/*.")
            what = "no run has logged anything there" if folder.is_dir() else "no such folder"
            raise ConfigError(f"{folder}: {what} ({name} is missing). Name run folders, such as runs/*.")
    lines = read_metrics(folder / "metrics.jsonl")
    cfg = configs.read_yaml(folder / "config.yaml")
    config = {name: attrgetter(name)(cfg) for name in keys.schema()}
    if not any(f"{part}/{FIGURES[NATS]}" in line for part in PARTS for line in lines):
        raise ConfigError(f"{folder}: metrics.jsonl has no loss yet.")
    return Curve(folder, config, lines)


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


def names_of(curves: Sequence[Curve]) -> list[str]:
    """A name for each run: the keys whose values differ, and its folder where those are not enough."""
    differing = [
        name
        for name in curves[0].config
        if name not in keys.affecting("nothing")
        if len({str(curve.config[name]) for curve in curves}) > 1
    ]
    found = []
    for curve in curves:
        text = ", ".join(f"{name}={keys.shown(curve.config[name])}" for name in differing[:MOST_NAMED])
        found.append(text + ", …" * (len(differing) > MOST_NAMED))
    return [
        name
        if name and found.count(name) == 1 and len(differing) <= MOST_NAMED
        else f"{curve.folder.name}: {name}".rstrip(": ")
        for name, curve in zip(found, curves, strict=True)
    ]


def overlay(curves: Sequence[Curve], to: Path, unit: str | None = None, against: str = STEP) -> str:
    """Draws the runs by step or tokens, and beside it by minutes of training if all have recorded their speed.

    Validation losses are lines with dots, training losses thin lines behind them.

    Args:
        unit: nats or bits; None: nats, but bits where a nat stands for different numbers of bytes.
        against: step or tokens.

    Returns:
        The unit.

    Raises:
        ConfigError: a run that has not recorded these figures.
    """
    per_nat = {curve.bits_per_nat for curve in curves}
    unit = unit or (BITS if len(per_nat) > 1 and None not in per_nat else NATS)
    for curve in curves:
        if not any(curve.drawn(unit, against)):
            raise ConfigError(f"{curve.folder}: it has recorded no {LABELS[unit]} by {against}. Use other --unit and --by.")
    clocks = [against] + [MINUTES] * all(any(curve.drawn(unit, MINUTES)) for curve in curves)
    width = 2.4 + 4.8 * len(clocks)
    # a character of the legend is about 0.07 inches wide, and a line 0.2 high
    names = [textwrap.fill(name, int(width / 0.07) - 8) for name in names_of(curves)]
    columns = 2 if len(clocks) == 2 and max(map(len, names)) < width / 0.07 / 2 - 8 else 1
    rows = sum(name.count("\n") + 1 for name in names) / columns
    figure, panels = pyplot.subplots(
        1, len(clocks), figsize=(width, 4.4 + 0.2 * rows), dpi=130, layout="constrained", squeeze=False, sharey=True
    )
    ends: list[float] = []
    for at, (curve, name) in enumerate(zip(curves, names, strict=True)):
        style = {"color": COLOURS[at % len(COLOURS)], "linestyle": DASHES[at // len(COLOURS) % len(DASHES)]}
        for axes, clock in zip(panels.flat, clocks, strict=True):
            train, val = curve.drawn(unit, clock)
            ends += limits(train[len(train) // 20 :] + val)
            dots = {"marker": "o", "markersize": 4}
            for shown, how in (
                (train, {"linewidth": 1.0, "alpha": 0.45} | (dots if len(train) == 1 else {})),
                (val, {"linewidth": 1.8, "clip_on": False} | dots),
            ):
                if shown:
                    label = name if shown is (val or train) else None
                    axes.plot(*zip(*shown, strict=True), label=label, **style, **how)
    for axes, clock in zip(panels.flat, clocks, strict=True):
        axes.set_xlim(left=0)
        axes.set_ylim(min(ends), max(ends))
        axes.set_xlabel(CLOCKS[clock])
        bare(axes, "y")
    panels.flat[0].xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    panels.flat[0].set_ylabel(LABELS[unit])
    figure.legend(
        *panels.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )
    figure.suptitle(textwrap.fill(_same(curves), int(width / 0.09)), x=0.01, ha="left", fontsize=11)
    to.parent.mkdir(parents=True, exist_ok=True)
    with as_storage_errors(to):
        save_figure(figure, to)
    return unit


def _same(curves: Sequence[Curve]) -> str:
    """A title: the values that all runs share, and what the lines are."""
    config = curves[0].config
    shared = [
        text.format(v=keys.shown(config[name]), s="s" * (config[name] != 1))
        for name, text in (
            ("data.name", "{v}"),
            ("model.layers", "{v} layer{s}"),
            ("model.width", "width {v}"),
            ("norm.kind", "{v}"),
        )
        if len({str(curve.config[name]) for curve in curves}) == 1
    ]
    lines = "dots: validation; thin: training" if any(points(curve.lines, "val/loss") for curve in curves) else "training loss"
    return f"{', '.join(shared) or f'{len(curves)} runs'} ({lines})"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.plot", description="Lays the losses of runs over one another.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--output", type=Path, default=Path("runs.png"), help="the picture, a PNG (%(default)s)")
    parser.add_argument("--by", choices=(STEP, TOKENS), default=STEP, help="what is on the axis below (%(default)s)")
    parser.add_argument("--unit", choices=(NATS, BITS), help="nats per token, or bits per byte (bits where tokenizers differ)")
    options = parser.parse_args(arguments)
    curves, refused = [], []
    try:
        for folder in without_sweep_files(options.runs):
            try:
                curves.append(read_run(folder))
            except ConfigError as error:
                refused.append(error)
        if not curves:
            raise ConfigError("\n".join(map(str, refused)))
        for why in refused:
            print(f"left out: {why}", file=sys.stderr)
        unit = overlay(curves, options.output, options.unit, options.by)
    except (ConfigError, StorageError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.output}: {LABELS[unit]}, {len(curves)} run{'s' * (len(curves) > 1)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
