"""The loss curve of a run, as a picture."""

import json
from contextlib import suppress
from functools import partial
from operator import mul
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display needed, and none opened
from matplotlib import pyplot
from matplotlib.ticker import MaxNLocator

TRAIN, VAL, GREY = "#9db8d2", "#c2410c", "#6b7280"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; those that are torn or damaged are left out."""
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
    # The first few losses are the size of ln(vocabulary) and would flatten everything that follows.
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
    figure.savefig(to)
    pyplot.close(figure)
    return True


def _nats(bytes_per_token: float) -> float:
    """Nats per token in one bit per byte."""
    return 0.6931471805599453 * bytes_per_token
