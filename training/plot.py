"""The loss curve of one run as a picture, or of several runs in one picture.

python -m training.plot runs/A runs/B ...                  the picture is runs.png here; --output FILE puts it elsewhere
python -m training.plot runs/*_sweep/* --unit bits         bits per byte; by default where the runs' tokenizers differ
"""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from operator import attrgetter, mul
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display needed, and none opened
from matplotlib import pyplot
from matplotlib.ticker import MaxNLocator

import configs
from configs import ConfigError, keys
from training import storage
from training.storage import StorageError

TRAIN, VAL, GREY = "#9db8d2", "#c2410c", "#6b7280"
# Of several runs. Colours differ in lightness too, and dashes repeat after the last colour.
COLOURS = ("#111111", "#c2410c", "#2563eb", "#0f8a6d", "#b58900", "#7c3aed", "#8b8b8b")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)))
NATS, BITS = "nats", "bits"
LABELS = {NATS: "loss, nats per token", BITS: "bits per byte"}
MOST_NAMED = 4  # keys in an entry of the legend


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, without damaged ones."""
    lines = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(json.JSONDecodeError):
            lines.append(json.loads(line))
    return lines


def loss_curve(metrics: Path, to: Path, title: str, bytes_per_token: float) -> bool:
    """Draws training and validation loss against the step, in nats per token on the left and bits per byte on the right.

    Args:
        bytes_per_token: of the validation text, which ties the two axes together.

    Returns:
        Whether there was anything to draw.
    """
    lines = read_metrics(metrics)
    train = [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]
    val = [(line["step"], line["val/loss"]) for line in lines if "val/loss" in line]
    if len(train) < 2:
        return False

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=130, layout="constrained")
    axes.plot(*zip(*train, strict=True), color=TRAIN, linewidth=1.6, label="training")
    if val:
        label = f"validation: {val[-1][1] / _nats(bytes_per_token):.3f} bits per byte after {val[-1][0]:,} steps"
        axes.plot(*zip(*val, strict=True), color=VAL, linewidth=1.6, marker="o", markersize=4, clip_on=False, label=label)
    # The first losses are as large as ln(vocabulary), and would flatten the rest of the curve.
    losses = [loss for _, loss in train[len(train) // 20 :] + val]
    low, high = min(losses), max(losses)
    axes.set_ylim(low - 0.05 * (high - low), high + 0.08 * (high - low))
    axes.set_xlim(0, max(step for step, _ in train + val))

    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per token")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    nats = _nats(bytes_per_token)
    right = axes.secondary_yaxis("right", functions=(partial(mul, 1 / nats), partial(mul, nats)))
    right.set_ylabel("bits per byte")
    axes.grid(axis="y", color=GREY, alpha=0.2, linewidth=0.8)
    for side in (axes.spines["top"], axes.spines["right"], right.spines["right"]):
        side.set_visible(False)
    axes.legend(frameon=False, loc="upper right")
    save_figure(figure, to)
    return True


def save_figure(figure: Any, to: Path) -> None:
    """Writes a figure in the format of the file's suffix, and closes it."""
    drawn = BytesIO()
    figure.savefig(drawn, format=to.suffix.lstrip(".") or None)
    pyplot.close(figure)
    storage.replace(to, lambda file: file.write(drawn.getvalue()))


def _nats(bytes_per_token: float) -> float:
    """Nats per token in one bit per byte."""
    return 0.6931471805599453 * bytes_per_token


# --- several runs ---


@dataclass(frozen=True)
class Curve:
    """The losses of one run, in nats per token."""

    folder: Path
    config: dict[str, Any]  # by dotted name
    train: list[tuple[int, float]]  # step, loss
    val: list[tuple[int, float]]
    bits_per_nat: float | None  # bits per byte of a nat per token, in its validation text; None without validation
    minutes: dict[int, float]  # of training until a step; empty where no speed was recorded


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
    train = [(line["step"], line["train/loss"]) for line in lines if "train/loss" in line]
    val = [(line["step"], line["val/loss"]) for line in lines if "val/loss" in line]
    if not train and not val:
        raise ConfigError(f"{folder}: metrics.jsonl has no loss yet.")
    ratios = [
        line["val/bits_per_byte"] / line["val/loss"] for line in lines if "val/bits_per_byte" in line and line["val/loss"]
    ]
    tokens = config["train.batch_size"] * config["model.context"]
    return Curve(folder, config, train, val, ratios[-1] if ratios else None, minutes_of(lines, tokens))


def minutes_of(lines: Sequence[dict[str, Any]], batch_tokens: int) -> dict[int, float]:
    """Minutes of training until each line's step, from the recorded tokens per second. This is the time of steps, without
    evaluation, checkpoints and compilation. Lines before the first speed get that speed. Empty: no speed was recorded."""
    speeds = {line["step"]: line["perf/tokens_per_s"] for line in lines if "perf/tokens_per_s" in line}
    if not speeds:
        return {}
    found, minutes, before = {}, 0.0, 0
    speed = next(iter(speeds.values()))
    for step in sorted({line["step"] for line in lines}):
        speed = speeds.get(step, speed)
        minutes += (step - before) * batch_tokens / speed / 60
        found[step], before = minutes, step
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


def overlay(curves: Sequence[Curve], to: Path, unit: str | None = None) -> str:
    """Draws the runs by step, and beside it by minutes of training if all have recorded their speed.

    Validation losses are lines with dots, training losses thin lines behind them.

    Args:
        unit: nats or bits; None: nats, but bits where a nat stands for different numbers of bytes.

    Returns:
        The unit.

    Raises:
        ConfigError: bits, and a run without a validation loss, which would tell how many bytes a token has.
    """
    per_nat = {None if curve.bits_per_nat is None else round(curve.bits_per_nat, 6) for curve in curves}
    unit = unit or (BITS if len(per_nat) > 1 and None not in per_nat else NATS)
    if unit == BITS and None in per_nat:
        lacking = next(curve.folder for curve in curves if curve.bits_per_nat is None)
        raise ConfigError(f"{lacking}: no validation loss yet, so its bytes per token are not known. Use --unit nats.")
    timed = all(curve.minutes for curve in curves)
    figure, panels = pyplot.subplots(
        1, 1 + timed, figsize=(7.2 + 4.8 * timed, 4.8), dpi=130, layout="constrained", squeeze=False, sharey=True
    )
    lows, highs = [], []
    for at, (curve, name) in enumerate(zip(curves, names_of(curves), strict=True)):
        scale = curve.bits_per_nat if unit == BITS and curve.bits_per_nat else 1.0
        style = {"color": COLOURS[at % len(COLOURS)], "linestyle": DASHES[at // len(COLOURS) % len(DASHES)]}
        train, val = ([(step, scale * loss) for step, loss in points] for points in (curve.train, curve.val))
        # without the first losses, as in a single run's picture
        losses = [loss for _, loss in train[len(train) // 20 :] + val]
        lows.append(min(losses))
        highs.append(max(losses))
        for axes, clock in zip(panels.flat, (None, curve.minutes), strict=False):
            for points, how in (
                (train, {"linewidth": 1.0, "alpha": 0.45}),
                (val, {"linewidth": 1.8, "marker": "o", "markersize": 4}),
            ):
                if points:
                    where = [step if clock is None else clock[step] for step, _ in points]
                    label = name if points is (val or train) else None
                    axes.plot(where, [loss for _, loss in points], label=label, **style, **how)
    low, high = min(lows), max(highs)
    room = (high - low) or 1.0
    for axes, what in zip(panels.flat, ("step", "minutes of training, without evaluation and compilation"), strict=False):
        axes.set_xlim(left=0)
        axes.set_ylim(low - 0.05 * room, high + 0.08 * room)
        axes.set_xlabel(what)
        axes.grid(axis="y", color=GREY, alpha=0.2, linewidth=0.8)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    panels.flat[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels.flat[0].set_ylabel(LABELS[unit])
    figure.legend(
        *panels.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=1 + timed, frameon=False, fontsize=9
    )
    figure.suptitle(_same(curves), x=0.01, ha="left", fontsize=11)
    to.parent.mkdir(parents=True, exist_ok=True)
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
    lines = "dots: validation; thin: training" if any(curve.val for curve in curves) else "training loss"
    return f"{', '.join(shared) or f'{len(curves)} runs'} ({lines})"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.plot", description="Lays the losses of runs over one another.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--output", type=Path, default=Path("runs.png"), help="the picture, a PNG (%(default)s)")
    parser.add_argument("--unit", choices=(NATS, BITS), help="nats per token, or bits per byte (bits where tokenizers differ)")
    options = parser.parse_args(arguments)
    runs = without_sweep_files(options.runs)
    try:
        unit = overlay([read_run(folder) for folder in runs], options.output, options.unit)
    except (ConfigError, StorageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.output}: {LABELS[unit]}, {len(runs)} run{'s' * (len(runs) > 1)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
