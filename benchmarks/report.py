"""Tables and pictures of records with shares of copy bandwidth; bars for host.py and memory.py."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES, DIRECTIONS, MODEL_WIDTHS, SITES
from benchmarks.command import Record, ResultsError
from benchmarks.providers import OURS, PROVIDERS, TRAFFIC
from measure import plots
from measure.plots import ARMS, DPI, GREY, bare, legend_below, pyplot
from measure.tables import NOTHING, aligned, compact_markdown, machine

LABELS_OF_CASES = {name: case.label for name, case in (CASES | SITES).items()} | {
    "rotary": "rotary", "rms_rotary": "RMS+rotary", "ln_rotary": "LN+rotary",
    "softmax": "softmax", "log_softmax": "log-softmax", "cross_entropy": "cross-entropy",
}  # fmt: skip


def label(case: str, residual: str | None = None) -> str:
    name = LABELS_OF_CASES.get(case, case)
    return f"{name}, {residual} stream" if residual else name


Size = tuple[int, ...]


def size_of(record: Record) -> Size:
    """What makes a row of a table: a width; of losses rows too; of rotary positions the heads and their width."""
    if "heads" in record:
        return record["heads"], record["kv_heads"], record["D"]
    return (record["M"], record["N"]) if "dtype" in record else (record["N"],)


def size_label(size: Size) -> str:
    if len(size) == 3:
        return "{}/{} × {}".format(*size)
    model = MODEL_WIDTHS.get(size[0]) if len(size) == 1 else None
    return " × ".join(map(str, size)) + (f", {model}" if model else "")


def grouped(records: Iterable[Record]) -> dict[tuple[str, str, str | None, str | None], dict[Size, dict[str, Record]]]:
    """(case, direction, stream's dtype, other dtype) → size → provider → record, in the order of the cases; of one sweep."""
    found: dict[Any, dict[Size, dict[str, Record]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        dtype = record.get("weight_dtype") or record.get("dtype")
        group = (record["case"], record["direction"], record.get("residual_dtype"), dtype)
        found[group][size_of(record)][record["provider"]] = record
    order = list(LABELS_OF_CASES)
    keys = sorted(found, key=lambda g: (g[3] or "", order.index(g[0]) if g[0] in order else -1, g[1] == "backward", g[2] or ""))
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


CELL = ("case", "residual_dtype", "weight_dtype", "dtype", "N", "heads", "kv_heads", "D", "M", "direction")


def by_cell(records: Iterable[Record]) -> list[dict[str, Record]]:
    """Provider → record, of each comparison in turn."""
    found: dict[tuple[Any, ...], dict[str, Record]] = defaultdict(dict)
    for record in records:
        found[tuple(record.get(name) for name in CELL)][record["provider"]] = record
    return list(found.values())


def cell_label(record: Record) -> str:
    weights = f", {record['weight_dtype']} weights" if record.get("weight_dtype", "bf16") != "bf16" else ""
    dtype = f", {record['dtype']}" if "dtype" in record else ""
    width = size_label(size_of(record)) if "heads" in record else record["N"]
    stream = label(record["case"], record.get("residual_dtype"))
    return f"{stream}{weights}{dtype}, {record['direction']} {record['M']}×{width}"


def ratio(record: Record | None) -> str:
    """A provider's time over ours, with the 95 % interval."""
    if record is None or record.get("times_ours") is None:
        return NOTHING
    interval = record.get("times_ours_95")
    return f"{record['times_ours']:.3f}" + (f" ({interval[0]:.3f} to {interval[1]:.3f})" if interval else "")


def shares_text(records: Sequence[Record]) -> str:
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
    measured = {size[0] for found in cases.values() for size in found}
    if missing := [width for width in widths if width not in map(str, measured)]:
        known = ", ".join(map(str, sorted(measured)))
        raise ResultsError(
            f"no add + norm of width {', '.join(missing)} is recorded with a stream in {stream}; there are {known}"
        )
    rows = [
        [size_label((width,)), *(norms_cell(cases[key].get((width,), {})) for key in columns)] for width in map(int, widths)
    ]
    return compact_markdown(["hidden size", *(f"{CASES[key[0]].label} {key[1]}" for key in columns)], rows)


def shares_markdown(records: Sequence[Record], stream: str = "fp32") -> str:
    """Ours and the best peer, a row for each size, a column for each case; where there is a stream, of one dtype of it."""
    parts = []
    for direction in (*DIRECTIONS, "both"):
        cases = grouped(r for r in records if r["direction"] == direction and r.get("residual_dtype") in (None, stream))
        sizes = sorted({size for found in cases.values() for size in found})
        rows = [[size_label(size), *(norms_cell(found.get(size, {})) for found in cases.values())] for size in sizes]
        if rows:
            words = {"both": "forward and backward"}.get(direction, direction)
            what = {1: "N", 2: "M × N", 3: "heads"}[len(sizes[0])]
            parts.append(compact_markdown([f"{words}, {what} =", *(label(case) for case, *_ in cases)], rows))
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
    lines, cells = [], by_cell(records)
    for who in ("the fastest other", *(["before"] if any("before" in cell for cell in cells) else [])):
        others = [cell.get("before") if who == "before" else best_peer(cell) for cell in cells if "ours" in cell]
        behind = [other for other in others if other and (other.get("times_ours_95") or [1, 1])[1] < LEVEL]
        lines.append(f"more than {1 - LEVEL:.0%} behind {who}: {len(behind)} of {len(cells)} cells")
        lines += [f"  {cell_label(other)}: {other['provider']} {ratio(other)}" for other in behind]
    return "\n".join(lines)


MAIN_LINES = ("ours", "compile", "flash-attn", "liger-kernel", "quack-kernels")  # of the picture in README


PICTURED = {  # by record: the case and the direction of its picture
    "norms_models": ("add_rms", "backward"),
    "sites": ("norm_add_norm", "backward"),
    "rotary": ("rms_rotary", "backward"),
    "losses": ("cross_entropy", "both"),
}


def plot_shares(file: dict[str, Any], path: Path, stream: str = "fp32") -> bool:
    """One panel of the sizes of a case, five names, % of copy bandwidth; whether there was any. The file's name says which."""
    case, direction = PICTURED[path.stem]
    records = [r for r in file["records"] if (r["case"], r["direction"]) == (case, direction) and r.get("us") is not None]
    records = [r for r in records if r.get("residual_dtype") in (None, stream)]
    if not records:
        return False
    figure, axes = pyplot.subplots(figsize=(7.4, 3.6), dpi=DPI, layout="constrained")
    sizes = sorted({size_of(r) for r in records})
    for name in MAIN_LINES:
        points = [(sizes.index(size_of(r)), 100 * r["share"]) for r in records if r["provider"] == name]
        if points:
            line(axes, name, sorted(points))
    axes.axhline(100, color=GREY, linewidth=1.0)
    axes.set_ylim(0, 110)
    axes.set_xticks(range(len(sizes)), [size_label(n).replace(", ", "\n").replace(" ", "\n", 1) for n in sizes], fontsize=7)
    axes.set_ylabel("% of copy bandwidth")
    bare(axes, "y")
    what = f"{label(case)} {direction}".replace("both", "forward and backward")
    dtypes = f"x bf16, stream and weights {stream}" if "residual_dtype" in records[0] else "bf16"
    rows = " to ".join(map(str, dict.fromkeys(f([r["M"] for r in records]) for f in (min, max))))
    rows = {1: f", {rows} rows", 2: "", 3: f", {rows} tokens"}[len(sizes[0])]
    finish(figure, [axes], f"{what}: {dtypes}{rows}", {"environment": file["environment"], "records": records}, path)
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
