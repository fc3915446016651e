"""Plots of an ablation, narrow enough for a column and readable in greyscale."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ablation.records import Cell, Parity
from measure.comparison import AGAIN, FUSED, TORCH
from measure.plots import GREY, GROUP_FILLS, bare, pyplot, save, ticker
from measure.statistics import spread
from measure.tables import interval_text, label

WIDTH, DPI = 6.4, 130  # inches, and dots in one: 832 pixels
FILL = {TORCH: "#e2b79e", AGAIN: "#ffffff", FUSED: "#9db8d2"}
HATCH = {TORCH: "", AGAIN: "....", FUSED: "////"}
# Colours differ in lightness too; dash and width tell lines apart where colour does not.
LINES: list[dict[str, Any]] = [
    {"color": "#9ca3af", "linestyle": "-", "linewidth": 4.0},
    {"color": "#c2410c", "linestyle": "--", "linewidth": 1.8},
    {"color": "#111111", "linestyle": "-", "linewidth": 1.2},
    {"color": "#2563eb", "linestyle": ":", "linewidth": 1.8},
]


def step_times(cells: Sequence[Cell], path: Path) -> None:
    """A panel for each cell: every arm's steps, and its blocks as dots."""
    titled = [(label(cell.overrides, cell.mode), {name: arm.blocks_ms for name, arm in cell.arms.items()}) for cell in cells]
    boxes_of(titled, "blocks", path)


def boxes_of(titled: Sequence[tuple[str, dict[str, list[list[float]]]]], dots: str, path: Path) -> None:
    """A panel for each title: by arm a box between quartiles, whiskers p10 to p90; the medians of its parts as dots.

    Args:
        titled: of each arm milliseconds of steps, in parts.
        dots: what the parts are, in the plural.
    """
    figure, panels = _rows(len(titled), each=1.25)
    for axes, (title, parts) in zip(panels, titled, strict=True):
        arms = list(parts)
        boxes = axes.bxp(
            [_box(parts[name]) for name in arms],
            positions=range(len(arms)), orientation="horizontal", widths=0.62, showfliers=False, patch_artist=True,
            medianprops={"color": "#111111", "linewidth": 2.2},
        )  # fmt: skip
        for name, box in zip(arms, boxes["boxes"], strict=True):
            box.set(facecolor=FILL.get(name, "white"), hatch=HATCH.get(name, ""), edgecolor=GREY)
        scatter = np.random.default_rng(0)
        for at, name in enumerate(arms):
            middles = [float(np.median(part)) for part in parts[name]]
            heights = at + scatter.uniform(-0.24, 0.24, len(middles))
            axes.plot(middles, heights, "o", markersize=2.6, color="#111111", markerfacecolor="white", markeredgewidth=0.7)
        axes.set_yticks(range(len(arms)), [_arm(name) for name in arms])
        axes.invert_yaxis()
        axes.set_title(title, loc="left", fontsize=9)
        axes.xaxis.set_major_locator(ticker.MaxNLocator(6))
        _bare(axes, grid="x")
    panels[-1].set_xlabel(f"ms a step: box 25 to 75 %, line the median, whiskers 10 to 90 %, dots {dots}")
    _finish(figure, "Step time (axes need not begin at 0)", path)


def speedups(cells: Sequence[Cell], path: Path) -> None:
    """A forest plot: in each cell the speed-up of fused over torch, under it the A/A control, both with 95 % intervals."""
    figure, axes = pyplot.subplots(figsize=(WIDTH, 1.2 + 0.62 * len(cells)), dpi=DPI, layout="constrained")
    axes.axvline(1.0, color="#111111", linewidth=1.0)
    fused: dict[str, Any] = {"marker": "o", "color": "#111111", "markersize": 6, "linewidth": 2.0, "label": "fused"}
    control: dict[str, Any] = {
        "marker": "s",
        "color": GREY,
        "markersize": 5,
        "linewidth": 1.2,
        "markerfacecolor": "white",
        "label": "A/A control",
    }
    for at, cell in enumerate(cells):
        for comparison, height, style in ((cell.fused, at - 0.16, fused), (cell.control, at + 0.2, control)):
            low, median, high = comparison.speedup.low, comparison.speedup.median, comparison.speedup.high
            marker = {key: value for key, value in style.items() if key not in ("linewidth", "label")}
            axes.plot(
                [low, high], [height, height], color=style["color"], linewidth=style["linewidth"], marker="|", markersize=7
            )
            axes.plot([median], [height], linestyle="", **marker, label=style["label"] if at == 0 else None)
            axes.text(
                1.02, height, interval_text(comparison.speedup), transform=axes.get_yaxis_transform(), va="center", fontsize=8,
                color=style["color"],
            )  # fmt: skip
    axes.set_yticks(range(len(cells)), [_folded(cell) for cell in cells])
    axes.set_ylim(len(cells) - 0.45, -0.55)
    axes.margins(x=0.06)
    left, right = axes.get_xlim()
    axes.set_xlim(min(left, 0.99), max(right, 1.01))  # a thousandth should not look like much
    axes.set_xlabel("times as fast as PyTorch's norms, with 95 % interval")
    _bare(axes, grid="x")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    _finish(figure, "Speed-up of fused norms beside the A/A control", path)


def losses(parity: Parity, path: Path) -> None:
    """The loss of every arm, mean over seeds; below, how far each is from the first, the reference: root mean square.

    Last the errors of the gradients: the layer with the largest, mean over seeds.
    """
    figure, (above, below, last) = pyplot.subplots(3, 1, figsize=(WIDTH, 8.1), dpi=DPI, layout="constrained", sharex=True)
    steps = min(len(run) for runs in parity.losses.values() for run in runs)
    runs = {name: np.asarray([run[:steps] for run in of], dtype=np.float64) for name, of in parity.losses.items()}
    first, *others = runs
    off = {name: np.sqrt(np.mean((runs[name] - runs[first]) ** 2, axis=0)) for name in others}
    least = min((distance[distance > 0].min(initial=np.inf) for distance in off.values()), default=np.inf)
    styles = dict(zip(runs, LINES, strict=False))  # an arm looks the same in every panel
    for name, of in runs.items():
        above.plot(np.mean(of, axis=0), label=name, **styles[name])
    for name, distance in off.items():
        same = ": no difference" if (distance == 0).all() else ""
        below.plot(distance, label=name + same, **styles[name])
    most = max((distance[np.isfinite(distance)].max(initial=0.0) for distance in off.values()), default=0.0)
    if most < 10 * least < np.inf:
        below.set_ylim(bottom=0)  # on a logarithm less than a decade has one label, which gives no scale
    elif np.isfinite(least):
        # Linear below the smallest distance: many a loss is the reference's to the bit, and a logarithm has no place for zero.
        below.set_yscale("symlog", linthresh=least, linscale=0.5)
        below.set_ylim(bottom=0)
    else:
        below.set_yticks([0.0])
    above.set_ylabel("loss, nats per token", fontsize=9)
    below.set_ylabel(f"distance from\n{first}, nats", fontsize=9)
    for name, errors in parity.gradient_errors.items():
        largest = [[max(layers.values()) for layers in run[:steps]] for run in errors]
        last.plot(np.mean(largest, axis=0), label=name, **styles[name])
    shown = np.concatenate([np.ravel(line.get_ydata()) for line in last.lines])
    if 0 < 10 * shown.min() < shown.max():
        last.set_yscale("log")
    else:
        last.set_ylim(bottom=0)
    last.set_ylabel("gradient's error,\nworst layer", fontsize=9)
    last.set_xlabel("step")
    last.set_xlim(0, max(1, steps - 1))
    last.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    for axes in (above, below, last):
        _bare(axes, grid="both")
        axes.legend(frameon=False, fontsize=8, loc="best", handlelength=3.2)
    seeds = f"{len(parity.seeds)} seed{'' if len(parity.seeds) == 1 else 's'}"
    _finish(figure, f"Parity over {seeds}, {parity.precision}: {label(parity.overrides)}", path)


# Its operator, seed, step and loss of each evaluation, and final loss.
TrainedRun = tuple[str, int, list[tuple[int, float]], float]


def trained(runs: Sequence[TrainedRun], title: str, path: Path) -> None:
    """Three panels: the validation loss of every run as it trained; how far fused is above torch, a line for each seed that has
    both (means of runs made again) and a wide one for their mean, beside dotted ones of how far each run made again is from the
    first; and the final losses, a row for each operator, seeds numbered, with the means over the seeds that have both.
    """
    figure, (above, between, below) = pyplot.subplots(
        3, 1, figsize=(WIDTH, 7.2), dpi=DPI, layout="constrained", height_ratios=(3, 2, 1.3)
    )
    styles = {TORCH: LINES[0] | {"linewidth": 2.6}, FUSED: LINES[2] | {"linewidth": 1.0}}
    for at, (impl, style) in enumerate(styles.items()):
        for index, evaluated in enumerate(evaluated for name, _, evaluated, _ in runs if name == impl):
            steps, values = zip(*evaluated, strict=True) if evaluated else ((), ())
            above.plot(steps, values, label=impl if index == 0 else None, zorder=2 + at, **style)
    _losses_apart(between, runs)
    _final_losses(below, runs)
    between.axhline(0.0, color="#c2410c", linewidth=1.0, linestyle="--")
    above.set_ylabel("validation loss,\nnats per token", fontsize=9)
    between.set_ylabel("fused − torch, nats:\nseeds and their mean", fontsize=9)
    between.set_xlabel("step")
    between.sharex(above)
    above.legend(frameon=False, fontsize=8, handlelength=3.2)
    _bare(above, grid="both")
    _bare(between, grid="both")
    _bare(below, grid="x")
    _finish(figure, f"Runs to their end: {title}", path)


def _losses_apart(axes: Any, runs: Sequence[TrainedRun]) -> None:
    curves: dict[tuple[str, int], list[dict[int, float]]] = {}
    for name, seed, evaluated, _ in runs:
        curves.setdefault((name, seed), []).append(dict(evaluated))
    means = {
        which: {step: float(np.mean([of[step] for of in made])) for step in _common(made)} for which, made in curves.items()
    }
    apart = [_minus(of, means[TORCH, seed]) for (name, seed), of in means.items() if name == FUSED and (TORCH, seed) in means]
    again = [_minus(of, first) for first, *more in curves.values() for of in more]
    for differences, words, style in (
        (apart, "a seed", {"color": GREY, "linewidth": 0.8}),
        (again, "a run made again, minus the first (A/A)", {"color": "#2563eb", "linewidth": 0.8, "linestyle": ":"}),
    ):
        for index, difference in enumerate(differences):
            axes.plot(list(difference), list(difference.values()), label=words if index == 0 else None, **style)
    if shared := _common(apart):
        mean = [np.mean([of[step] for of in apart]) for step in shared]
        axes.plot(shared, mean, color="#111111", linewidth=2.0, label="mean")
    if again:
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.15 * (high - low))  # room for the legend
        axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper right")


def _final_losses(axes: Any, runs: Sequence[TrainedRun]) -> None:
    finals: dict[str, dict[int, list[float]]] = {TORCH: {}, FUSED: {}}  # by operator and seed; several where made again
    for name, seed, _, final in runs:
        finals[name].setdefault(seed, []).append(final)
    both = finals[TORCH].keys() & finals[FUSED].keys()
    for at, of in enumerate(finals.values()):
        mean = np.mean([np.mean(of[seed]) for seed in both or of])
        axes.plot([mean] * 2, [at - 0.3, at + 0.3], color="#c2410c", linewidth=1.6)
        for seed, made in of.items():
            for index, final in enumerate(made):
                # What was made again is hollow, its number beneath: it may end where the first did.
                fill, above = ("white", -10) if index else ("#111111", 5)
                axes.plot([final], [at], "o", markersize=3.5, color="#111111", markerfacecolor=fill)
                axes.annotate(str(seed), (final, at), xytext=(0, above), textcoords="offset points", ha="center", fontsize=7)
    several = any(len(made) > 1 for of in finals.values() for made in of.values())
    dots = f"dots are seeds{' (hollow: made again)' if several else ''}, lines means of pairs"
    axes.set_yticks(range(len(finals)), list(finals))
    axes.set_ylim(len(finals) - 0.4, -0.6)
    axes.set_xlabel(f"final loss, nats per token: {dots}")


def _common(curves: Sequence[dict[int, float]]) -> list[int]:
    """The steps that all of them have."""
    return sorted(set.intersection(*map(set, curves))) if curves else []


def _minus(curve: dict[int, float], other: dict[int, float]) -> dict[int, float]:
    return {step: curve[step] - other[step] for step in _common([curve, other])}


def attributions(cells: Sequence[Cell], path: Path) -> bool:
    """GPU time of a step by kind of work, torch above fused, for each cell that was profiled; returns whether any was."""
    profiled = [cell for cell in cells if cell.attribution is not None]
    if not profiled:
        return False
    figure, panels = _rows(len(profiled), each=1.15, extra=1.0)
    entries: dict[str, Any] = {}
    for axes, cell in zip(panels, profiled, strict=True):
        assert cell.attribution is not None
        arms = {TORCH: cell.attribution.torch, FUSED: cell.attribution.fused}
        whole = max(sum(share.ms for share in shares) for shares in arms.values())
        # About the width of a label, in either arm: who compares them looks for both.
        wide = {share.group for shares in arms.values() for share in shares if share.ms > 0.05 * whole}
        for at, shares in enumerate(arms.values()):
            left = 0.0
            for share in sorted(shares, key=lambda share: _order(share.group)):
                colour, hatch = GROUP_FILLS[_kind(share.group)]
                bar = axes.barh(at, share.ms, 0.66, left=left, color=colour, hatch=hatch, edgecolor="#374151", linewidth=0.8)
                entries.setdefault(share.group, bar[0])
                if share.group in wide:
                    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.9}
                    axes.bar_label(bar, [_ms(share.ms)], label_type="center", fontsize=8, bbox=box)
                left += share.ms
            axes.text(left + 0.01 * whole, at, f"{_ms(left)} ms", va="center", fontsize=8)
        axes.set_xlim(0, 1.12 * whole)
        axes.set_yticks(range(len(arms)), list(arms))
        axes.set_ylim(1.5, -0.5)
        axes.set_title(label(cell.overrides, cell.mode), loc="left", fontsize=9)
        _bare(axes, grid="")
    panels[-1].set_xlabel("GPU time of a step, ms")
    figure.legend(entries.values(), entries, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    _finish(figure, "Where the GPU time of a step goes (each panel has an axis of its own)", path)
    return True


def _folded(cell: Cell) -> str:
    """The label of a cell with a line for each override, so that tick labels leave room for the plot."""
    return "\n".join([cell.mode, *(f"{key}={value}" for key, value in cell.overrides.items())])


def _ms(ms: float) -> str:
    return f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def _arm(name: str) -> str:
    return f"{name}\n(A/A)" if name == AGAIN else name


def _kind(group: str) -> str:
    """The key in GROUP_FILLS of a group's name."""
    lowered = group.lower()
    return next((kind for kind in GROUP_FILLS if lowered.startswith(kind)), "other")


def _order(group: str) -> int:
    return list(GROUP_FILLS).index(_kind(group))


def _box(blocks: Sequence[Sequence[float]]) -> dict[str, float]:
    samples = [ms for block in blocks for ms in block]
    whole = spread(samples)
    low, high = np.percentile(samples, (25, 75))
    return {"med": whole.median, "q1": float(low), "q3": float(high), "whislo": whole.p10, "whishi": whole.p90}


def _rows(count: int, each: float, extra: float = 0.8) -> tuple[Any, list[Any]]:
    """A figure of `count` panels one below the other."""
    figure, grid = pyplot.subplots(
        count, 1, figsize=(WIDTH, extra + each * count), dpi=DPI, layout="constrained", squeeze=False
    )
    return figure, list(grid.flat)


def _bare(axes: Any, grid: str) -> None:
    axes.tick_params(labelsize=8)
    if axes.get_xscale() == "linear":
        axes.ticklabel_format(axis="x", useOffset=False, style="plain")
    axes.xaxis.label.set_size(9)
    bare(axes, grid)


def _finish(figure: Any, title: str, path: Path) -> None:
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, fontweight="bold")
    save(figure, path)
