"""Tables and pictures of the norms' records, and what the kernels are held to; bars for host.py and memory.py."""

import math
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES, DIRECTIONS, MODEL_WIDTHS
from benchmarks.command import Record
from benchmarks.providers import OURS, PROVIDERS, TRAFFIC
from measure.plots import GREY, bare, pyplot, save, ticker
from measure.tables import NOTHING, aligned, compact_markdown, machine, measured_at


def label(case: str, residual: str | None) -> str:
    name = CASES[case].label
    return f"{name}, {residual} stream" if residual else name


def rows_label(rows: set[int]) -> str:
    """32768 rows; or with fewer of the wide ones: 32768 rows, 8192 of the widest."""
    return f"{max(rows)} rows" if len(rows) == 1 else f"{max(rows)} rows, {min(rows)} of the widest"


def grouped(records: Iterable[Record]) -> dict[tuple[str, str, str | None, str], dict[int, dict[str, Record]]]:
    """(case, direction, residual dtype, weight dtype) → width → provider → record, in the order of CASES; of one sweep."""
    found: dict[Any, dict[int, dict[str, Record]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        group = (record["case"], record["direction"], record["residual_dtype"], record["weight_dtype"])
        found[group][record["N"]][record["provider"]] = record
    order = list(CASES)
    keys = sorted(found, key=lambda g: (DIRECTIONS.index(g[1]), g[3], order.index(g[0]), g[2] or ""))
    return {key: found[key] for key in keys}


def by_rows(records: Sequence[Record]) -> dict[int, list[Record]]:
    """The sweeps in `records` by the number of rows asked for, most rows first; wide rows may have been fewer."""
    sweeps: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        sweeps[record["asked_rows"]].append(record)
    return dict(sorted(sweeps.items(), reverse=True))


def bandwidth_share(record: Record | None) -> str:
    if record is None:
        return NOTHING
    return "failed" if record.get("error") else f"{record['share']:.2f}"


def best_peer(providers: dict[str, Record]) -> Record | None:
    """The fastest library: not ours, and not the kernel that only moves the tensors."""
    peers = [r for name, r in providers.items() if name not in (*OURS, TRAFFIC) and r.get("us") is not None]
    return min(peers, key=lambda record: record["us"], default=None)


def by_cell(records: Iterable[Record]) -> list[dict[str, Record]]:
    """Provider → record, of each comparison in turn."""
    found: dict[tuple[Any, ...], dict[str, Record]] = defaultdict(dict)
    for record in records:
        cell = tuple(record[name] for name in ("case", "residual_dtype", "weight_dtype", "N", "M", "direction"))
        found[cell][record["provider"]] = record
    return list(found.values())


def cell_label(record: Record) -> str:
    weights = f", {record['weight_dtype']} weights" if record["weight_dtype"] != "bf16" else ""
    where = f"{record['direction']} {record['M']}×{record['N']}"
    return f"{label(record['case'], record['residual_dtype'])}{weights}, {where}"


def ratio(record: Record | None) -> str:
    """A provider's time over ours, with the 95 % interval."""
    if record is None or record.get("times_ours") is None:
        return NOTHING
    interval = record.get("times_ours_95")
    return f"{record['times_ours']:.3f}" + (f" ({interval[0]:.3f} to {interval[1]:.3f})" if interval else "")


def norms_text(records: Sequence[Record]) -> str:
    """A line for each cell: shares of copy bandwidth, then how many times as long as ours the fastest other takes."""
    cells = by_cell(records)
    names = [name for name in (TRAFFIC, *PROVIDERS) if any(name in cell for cell in cells)]
    rows, before = [], "before" in names
    for cell in cells:
        peer = best_peer(cell)
        row = [cell_label(next(iter(cell.values()))), *(bandwidth_share(cell.get(name)) for name in names)]
        row += [
            NOTHING if peer is None else short(peer["provider"]),
            ratio(peer),
            *([ratio(cell.get("before"))] if before else []),
        ]
        rows.append(row)
    header = ["share of copy bandwidth", *map(short, names), "fastest other", "its time / ours"]
    return aligned([*header, *(["before / ours"] if before else [])], rows)


NARROW = 512  # rows up to this wide have tables of their own: sixteen columns are too many to read


def norms_markdown(records: Sequence[Record]) -> str:
    """Ours and the best peer, a row for each case, a column for each width; the largest sweep, weights in bf16."""
    sweep = [record for record in next(iter(by_rows(records).values()), []) if record["weight_dtype"] == "bf16"]
    widths = sorted({record["N"] for record in sweep})
    parts = []
    for columns in ([n for n in widths if n > NARROW], [n for n in widths if n <= NARROW]):
        for direction in DIRECTIONS:
            cases = grouped([r for r in sweep if r["direction"] == direction and r["N"] in columns])
            lines = []
            for (case, _, residual, _), found in cases.items():
                cells = [norms_cell(found[n]) if n in found else NOTHING for n in columns]
                lines.append([label(case, residual), *cells])
            if lines:
                parts.append(compact_markdown([f"{direction}, N =", *map(str, columns)], lines))
    return "\n\n".join(parts)


def models_markdown(records: Sequence[Record], stream: str = "fp32") -> str:
    """Ours and the best peer, a row for each width and whose it is, a column for each case; of one dtype of the stream."""
    parts = []
    for direction in DIRECTIONS:
        cases = grouped(r for r in records if r["direction"] == direction and r["residual_dtype"] == stream)
        widths = sorted({width for found in cases.values() for width in found})
        rows = [
            [
                f"{n}, {MODEL_WIDTHS[n]}" if n in MODEL_WIDTHS else str(n),
                *(norms_cell(found.get(n, {})) for found in cases.values()),
            ]
            for n in widths
        ]
        if rows:
            parts.append(compact_markdown([f"{direction}, N =", *(CASES[case].label for case, *_ in cases)], rows))
    return "\n\n".join(parts)


def norms_cell(providers: dict[str, Record]) -> str:
    """Ours first, bold where the best peer is slower by more than chance (95 %), italic where faster; then that peer."""
    ours, peer = providers.get("ours"), best_peer(providers)
    text = bandwidth_share(ours)
    if peer is None:
        return text
    low, high = peer.get("times_ours_95") or (1.0, 1.0)  # none where not measured in one run, or in few rounds
    if low > 1.0:
        text = f"**{text}**"
    elif high < 1.0:
        text = f"*{text}*"
    return f"{text} / {bandwidth_share(peer)} {short(peer['provider'])}"


def short(provider: str) -> str:
    return {"flash-attn": "flash", "liger-kernel": "liger", "quack-kernels": "quack"}.get(provider, provider)


# ---- pictures ---------------------------------------------------------------------------------------------------------------


# Colours differ in lightness too; marker and dash tell lines apart where colour does not.
STYLES: dict[str, dict[str, Any]] = {
    TRAFFIC: {"color": GREY, "marker": "+", "linestyle": (0, (1, 2)), "linewidth": 1.0, "zorder": 1},
    "ours": {"color": "#111111", "marker": "o", "linestyle": "-", "linewidth": 2.8, "markersize": 6, "zorder": 5},
    "ours-seeded": {"color": "#111111", "marker": "o", "linestyle": ":", "linewidth": 1.6, "markerfacecolor": "white"},
    "torch": {"color": "#c2410c", "marker": "s", "linestyle": "--"},
    "compile": {"color": "#2563eb", "marker": "^", "linestyle": "-."},
    "flash-attn": {"color": "#0f8a6d", "marker": "D", "linestyle": (0, (5, 1))},
    "liger-kernel": {"color": "#b58900", "marker": "v", "linestyle": (0, (3, 1, 1, 1, 1, 1))},
    "quack-kernels": {"color": "#7c3aed", "marker": "P", "linestyle": (0, (1, 1))},
    "apex": {"color": "#8b8b8b", "marker": "x", "linestyle": (0, (4, 3))},
    "tutorial": {"color": "#0f8a6d", "marker": "D", "linestyle": (0, (5, 1))},
}
LABELS = {
    TRAFFIC: "the same tensors, moved alone",
    "compile": "torch.compile",
    "ours-seeded": "ours, seed given",
    "flash-attn": "flash-attn (Triton)",
    "liger-kernel": "Liger",
    "quack-kernels": "quack",
    "tutorial": "Triton tutorial's way",
}


def plot_norms(file: dict[str, Any], folder: Path) -> list[Path]:
    """One picture for each direction and number of rows, a panel for each case; returns what it wrote."""
    written = []
    sweeps = by_rows(file["records"])
    for weights in sorted({record["weight_dtype"] for record in file["records"]}):
        for rows, sweep in sweeps.items():
            for direction in DIRECTIONS:
                chosen = [r for r in sweep if r["direction"] == direction and r["weight_dtype"] == weights]
                if any(record.get("us") is not None for record in chosen):
                    name = f"norms_{direction}" + ("" if rows == max(sweeps) else f"_m{rows}")
                    path = folder / f"{name}{'' if weights == 'bf16' else f'_weights_{weights}'}.png"
                    _plot_norms(file["environment"], chosen, direction, path)
                    written.append(path)
    return written


def _plot_norms(environment: dict[str, Any], records: Sequence[dict[str, Any]], direction: str, path: Path) -> None:
    groups = grouped(records)
    columns = min(2, len(groups))
    lines = math.ceil(len(groups) / columns)
    figure, grid = pyplot.subplots(
        lines, columns, figsize=(5.6 * columns, 3.0 * lines + 1.1), dpi=110, layout="constrained", squeeze=False,
        sharex=True, sharey=True,
    )  # fmt: skip
    panels = list(grid.flat)
    top = max(1.1, 1.05 * max(record["share"] for record in records if record.get("us") is not None))
    for axes, ((case, _, residual, _), widths) in zip(panels, groups.items(), strict=False):
        names = [name for name in STYLES if any(name in at for at in widths.values())]
        for name in names:
            points = [(n, at[name]["share"]) for n, at in sorted(widths.items()) if name in at and at[name].get("us")]
            if points:
                line(axes, name, points)
        axes.axhline(1.0, color=GREY, linewidth=1.0)
        axes.set_ylim(0, top)
        axes.set_title(label(case, residual), loc="left", fontsize=10)
        width_axis(axes, sorted({record["N"] for record in records}))
    for axes in panels[len(groups) :]:
        axes.set_visible(False)
    for i, axes in enumerate(panels[: len(groups)]):
        if i + columns >= len(groups):
            axes.set_xlabel("N, features in a row")
            axes.tick_params(labelbottom=True)
        if i % columns == 0:
            axes.set_ylabel("share of copy bandwidth")
    rows = rows_label({record["M"] for record in records})
    weights = records[0]["weight_dtype"]
    title = f"{direction} of norms, x in bf16, weights in {weights}, {rows}; minimum bytes over time, cold L2"
    finish(figure, panels, title, {"environment": environment, "records": records}, path)


def line(axes: Any, name: str, points: Sequence[tuple[float, float]]) -> None:
    style = {"linewidth": 1.5, "markersize": 5, **STYLES[name]}
    axes.plot(*zip(*points, strict=True), label=LABELS.get(name, name), **style)


def width_axis(axes: Any, widths: Sequence[int], linear: bool = False) -> None:
    """Powers of two along the bottom, whatever widths were measured; or a linear axis from zero."""
    if linear:
        axes.set_xlim(left=0)
    else:
        axes.set_xscale("log", base=2)
        low, high = math.floor(math.log2(widths[0])), math.ceil(math.log2(widths[-1]))
        step = max(1, math.ceil((high - low) / 8))
        axes.set_xticks([2**i for i in range(low, high + 1, step)])
    axes.xaxis.set_major_formatter(
        ticker.FuncFormatter(lambda n, _: f"{n / 1024:g}k" if n >= 1024 and n % 1024 == 0 else f"{n:g}")
    )
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    bare(axes)


def finish(figure: Any, panels: Sequence[Any], title: str, file: dict[str, Any], path: Path) -> None:
    """One legend for all panels, a title with machine and versions; writes and closes. file: the records that it shows."""
    entries: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        entries.update(zip(labels, handles, strict=True))
    for columns in range(len(entries), 0, -1):  # as few lines as the picture is wide enough for
        legend = figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns, frameon=False)
        if columns == 1 or legend.get_window_extent().width < figure.bbox.width:
            break
        legend.remove()
    letters = int(13 * figure.get_figwidth())  # thirteen of the title's to an inch
    lines = [textwrap.fill(line, letters) for line in (title, machine(file["environment"], measured_at(file)))]
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=10)
    save(figure, path)


# ---- bars -------------------------------------------------------------------------------------------------------------------


HEIGHT = 0.8  # of all bars of a group; groups are 1 apart


def bar_panels(lines: int, columns: int, groups: int) -> tuple[Any, Any]:
    height = 1.0 + max(1.5, groups)
    return pyplot.subplots(
        lines, columns, figsize=(5.6 * columns, height * lines + 1.1), dpi=110, layout="constrained", squeeze=False, sharey=True
    )


def draw_bars(axes: Any, groups: dict[str, dict[str, float]], ranges: dict[str, tuple[float, float]]) -> None:
    """Groups from the top down, in each a bar for each provider.

    ranges: how far a provider's whiskers reach down and up; for one group alone.
    """
    names = _providers_of(groups)
    thick = HEIGHT / max(1, len(names))  # none where all that were tried have failed
    for i, name in enumerate(names):
        at = [(place + (i - (len(names) - 1) / 2) * thick, v[name]) for place, v in enumerate(groups.values()) if name in v]
        heights, values = [y for y, _ in at], [value for _, value in at]
        whiskers = [[down] for down in ranges[name]] if name in ranges else None
        color = STYLES.get(name, {"color": GREY})["color"]
        drawn = axes.barh(heights, values, 0.9 * thick, label=LABELS.get(name, name), color=color, xerr=whiskers, ecolor=GREY)
        axes.bar_label(drawn, [f"{value:.{1 if value < 100 else 0}f}" for value in values], padding=4, fontsize=8)
    axes.set_yticks(range(len(groups)), list(groups))
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.margins(x=0.12)
    bare(axes, "x")


def _providers_of(groups: dict[str, dict[str, float]]) -> list[str]:
    """The providers in the order of the other plots, then those that only bars have."""
    present = dict.fromkeys(name for values in groups.values() for name in values)
    return [*(name for name in STYLES if name in present), *(name for name in present if name not in STYLES)]
