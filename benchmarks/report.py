"""Tables and pictures of the norms' records, and what the kernels are held to; bars for host.py and memory.py."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES, DIRECTIONS, MODEL_WIDTHS
from benchmarks.command import Record, ResultsError
from benchmarks.providers import OURS, PROVIDERS, TRAFFIC
from measure import plots
from measure.plots import ARMS, DPI, GREY, bare, legend_below, pyplot
from measure.tables import NOTHING, aligned, compact_markdown, machine


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


def bandwidth_percent(record: Record | None) -> str:
    if record is None:
        return NOTHING
    return "failed" if record.get("error") else f"{100 * record['share']:.0f}"


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
        row = [cell_label(next(iter(cell.values()))), *(bandwidth_percent(cell.get(name)) for name in names)]
        row += [
            NOTHING if peer is None else short(peer["provider"]),
            ratio(peer),
            *([ratio(cell.get("before"))] if before else []),
        ]
        rows.append(row)
    header = ["% of copy bandwidth", *map(short, names), "fastest other", "its time / ours"]
    return aligned([*header, *(["before / ours"] if before else [])], rows)


def by_width(records: Sequence[Record], widths: Sequence[str], stream: str = "fp32") -> str:
    """Add + norm in both directions, ours and the best peer: a row for each of these widths; of the most rows."""
    most = next(iter(by_rows(records).values()), [])
    cases = {key: found for key, found in grouped(most).items() if key[0] in ("add_ln", "add_rms") and key[2] == stream}
    columns = sorted(cases, key=lambda key: (key[0], DIRECTIONS.index(key[1])))
    measured = {width for found in cases.values() for width in found}
    if missing := [width for width in widths if width not in map(str, measured)]:
        known = ", ".join(map(str, sorted(measured)))
        raise ResultsError(
            f"no add + norm of width {', '.join(missing)} is recorded with a stream in {stream}; there are {known}"
        )
    rows = [
        [
            f"{width}, {MODEL_WIDTHS.get(width, '')}".removesuffix(", "),
            *(norms_cell(cases[key].get(width, {})) for key in columns),
        ]
        for width in map(int, widths)
    ]
    return compact_markdown(["hidden size", *(f"{CASES[key[0]].label} {key[1]}" for key in columns)], rows)


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
    text = bandwidth_percent(ours)
    if peer is None:
        return text
    low, high = peer.get("times_ours_95") or (1.0, 1.0)  # none where not measured in one run, or in few rounds
    if low > 1.0:
        text = f"**{text}**"
    elif high < 1.0:
        text = f"*{text}*"
    return f"{text} / {bandwidth_percent(peer)} {short(peer['provider'])}"


def short(provider: str) -> str:
    return {"flash-attn": "flash", "liger-kernel": "liger", "quack-kernels": "quack"}.get(provider, provider)


# ---- pictures ---------------------------------------------------------------------------------------------------------------


# Which implementation of a norm a provider is.
IMPLS = {
    "ours": "fused", "ours-seeded": "fused", "before": "fused", "ours-compiled": "fused", "compile": "compiled",
    "flash-attn": "flash_attn", "liger-kernel": "liger", "quack-kernels": "quack",
}  # fmt: skip
LABELS = {TRAFFIC: "the same tensors, moved alone", "compile": "torch.compile"}
LABELS |= {
    "ours": "fused (ours)",
    "ours-compiled": "fused (ours) under torch.compile",
    "ours-seeded": "fused, seed given",
    "liger-kernel": "Liger",
    "quack-kernels": "quack",
}
LINES = (TRAFFIC, "ours", "ours-seeded", "torch", "compile", "flash-attn", "liger-kernel", "quack-kernels")


def style(provider: str) -> dict[str, Any]:
    found = ARMS.get(IMPLS.get(provider, provider), {"color": GREY})
    if provider == "ours-compiled":
        return found | {"color": "#64748b"}
    return found | {"linestyle": ":", "linewidth": 1.4, "markerfacecolor": "white"} if provider == "ours-seeded" else found


LEVEL = 0.98  # of our time: whoever takes less is ahead


def behind_summary(records: Sequence[Record]) -> str:
    """The cells where another library, or another revision of ours, is faster by its whole interval."""
    lines = []
    cells = by_cell(records)
    for who in ("the fastest other", "before"):
        found = []
        for providers in cells:
            other = providers.get("before") if who == "before" else best_peer(providers)
            if other and "ours" in providers and (other.get("times_ours_95") or [1, 1])[1] < LEVEL:
                found.append(f"  {cell_label(other)}: {other['provider']} {ratio(other)}")
        lines += [f"more than {1 - LEVEL:.0%} behind {who}: {len(found)} of {len(cells)} cells", *found]
    return "\n".join(lines)


MAIN_LINES = ("ours", "compile", "flash-attn", "liger-kernel", "quack-kernels")  # of the picture in README


def plot_models(file: dict[str, Any], path: Path, case: str = "add_rms", stream: str = "fp32") -> bool:
    """One panel of the widths of models: backward of a case, five names, % of copy bandwidth; whether there was any."""
    records = [r for r in file["records"] if (r["case"], r["residual_dtype"], r["direction"]) == (case, stream, "backward")]
    records = [r for r in records if r.get("us") is not None]
    if not records:
        return False
    figure, axes = pyplot.subplots(figsize=(7.4, 3.6), dpi=DPI, layout="constrained")
    widths = sorted({r["N"] for r in records})
    for name in MAIN_LINES:
        points = [(widths.index(r["N"]), 100 * r["share"]) for r in records if r["provider"] == name]
        if points:
            line(axes, name, sorted(points))
    axes.axhline(100, color=GREY, linewidth=1.0)
    axes.set_ylim(0, 110)
    axes.set_xticks(range(len(widths)), [f"{n}\n{MODEL_WIDTHS.get(n, '')}".replace(" ", "\n", 1) for n in widths], fontsize=7)
    axes.set_ylabel("% of copy bandwidth")
    bare(axes, "y")
    title = f"{CASES[case].label} backward: x in bf16, stream and weights in {stream}, {rows_label({r['M'] for r in records})}"
    finish(figure, [axes], title, {"environment": file["environment"], "records": records}, path)
    return True


def line(axes: Any, name: str, points: Sequence[tuple[float, float]]) -> None:
    axes.plot(*zip(*points, strict=True), label=LABELS.get(name, name), **{"linewidth": 1.5, "markersize": 5} | style(name))


def finish(figure: Any, panels: Sequence[Any], title: str, file: dict[str, Any], path: Path) -> None:
    """One legend for all panels; card, versions and revision beneath. file: the records that it shows."""
    entries: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        entries.update(zip(labels, handles, strict=True))
    legend_below(figure, entries)
    plots.finish(figure, title, machine(file["environment"]), path)


# ---- bars -------------------------------------------------------------------------------------------------------------------


HEIGHT = 0.8  # of all bars of a group; groups are 1 apart


def bar_panels(lines: int, columns: int, groups: int) -> tuple[Any, Any]:
    height = 1.0 + max(1.5, groups)
    return pyplot.subplots(
        lines, columns, figsize=(5.6 * columns, height * lines + 1.1), dpi=DPI, layout="constrained", squeeze=False, sharey=True
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
        color = style(name)["color"]
        drawn = axes.barh(heights, values, 0.9 * thick, label=LABELS.get(name, name), color=color, xerr=whiskers, ecolor=GREY)
        axes.bar_label(drawn, [f"{value:.{1 if value < 100 else 0}f}" for value in values], padding=4, fontsize=8)
    axes.set_yticks(range(len(groups)), list(groups))
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.margins(x=0.12)
    bare(axes, "x")


def _providers_of(groups: dict[str, dict[str, float]]) -> list[str]:
    """The providers in the order of the other plots, then those that only bars have."""
    present = dict.fromkeys(name for values in groups.values() for name in values)
    return [*(name for name in LINES if name in present), *(name for name in present if name not in LINES)]
