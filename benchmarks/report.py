"""Tables of records with shares of copy bandwidth, and the picture of the norms."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import BOTH, CASES, DIRECTIONS, MODEL_WIDTHS, SITES
from benchmarks.command import Record
from benchmarks.providers import PROVIDERS
from measure.plots import ARMS, DPI, GREY, bare, finish, legend_below, pyplot
from measure.tables import NOTHING, aligned, compact_markdown, machine

LABELS = {name: case.label for name, case in (CASES | SITES).items()} | {
    "rotary": "rotary", "rms_rotary": "RMS+rotary", "softmax": "softmax", "cross_entropy": "cross-entropy",
    "gelu": "GELU", "bias_gelu": "bias + GELU", "swiglu": "SwiGLU", "bias_geglu": "bias + GEGLU",
    "adaln": "adaLN", "adaln_zero": "adaLN-zero", "adaln_zero_fp32": "adaLN-zero, fp32 stream",
    "rms_adaln_zero": "RMS adaLN-zero",
}  # fmt: skip
UNTOLD = ("asked_rows", "bytes", "copy_gb_per_s", "p10", "p90", "gb_per_s", "sets")  # on a terminal
File = dict[str, Any]  # of results
Size = tuple[int, ...]


def size_of(record: Record) -> Size:
    """What makes a row of a table: a width; of losses rows too, of modulated norms the tokens of a sample; of rotary positions
    the heads and their width."""
    if "heads" in record:
        return record["heads"], record["kv_heads"], record["D"]
    if "tokens" in record:
        return record["tokens"], record["N"]
    return (record["M"], record["N"]) if "dtype" in record else (record["N"],)


def size_label(size: Size) -> str:
    if len(size) == 3:
        return "{}/{} × {}".format(*size)
    model = MODEL_WIDTHS.get(size[0]) if len(size) == 1 else None
    return " × ".join(map(str, size)) + (f", {model}" if model else "")


def percent(record: Record | None) -> str:
    """Of copy bandwidth."""
    if record is None:
        return NOTHING
    return "failed" if record.get("error") else f"{100 * record['share']:.0f}"


# ---- for a terminal ---------------------------------------------------------------------------------------------------------


def text(records: Sequence[Record]) -> str:
    """A line for each record, a column for each field that a reader compares."""
    names = list(dict.fromkeys(name for record in records for name in record if name not in UNTOLD))
    rows = [[str(record.get(name, NOTHING)) for name in names] for record in records]
    return aligned(names, rows)


# ---- for the pages ----------------------------------------------------------------------------------------------------------


def of_pages(file: File) -> list[Record]:
    """Its records; of those with a residual stream the ones that keep it in fp32."""
    return [record for record in file["records"] if record.get("residual_dtype") in (None, "fp32")]


def markdown(file: File) -> str:
    """Ours and the best peer: a table for each direction, a row for each size, a column for each case."""
    parts = []
    for direction in (*DIRECTIONS, BOTH):
        of = [record for record in of_pages(file) if record["direction"] == direction]
        sizes = sorted({size_of(record) for record in of})
        if sizes:
            words = {BOTH: "forward and backward"}.get(direction, direction)
            what = {1: "N", 2: "tokens × N" if "tokens" in of[0] else "M × N", 3: "heads"}[len(sizes[0])]
            cases = {record["case"] for record in of}
            columns = {LABELS[name]: (name, direction) for name in LABELS if name in cases}
            parts.append(_table(of, f"{words}, {what} =", columns, sizes))
    return "\n\n".join(parts)


def by_width(file: File, widths: Sequence[str]) -> str:
    """Add + norm in both directions, ours and the best peer: a row for each of these widths."""
    columns = {f"{LABELS[case]} {direction}": (case, direction) for case in ("add_ln", "add_rms") for direction in DIRECTIONS}
    return _table(of_pages(file), "hidden size", columns, [(int(width),) for width in widths])


def _table(records: Sequence[Record], corner: str, columns: Mapping[str, tuple[str, str]], sizes: Iterable[Size]) -> str:
    """columns: case and direction, by their heading."""
    rows = []
    for size in sizes:
        of = [record for record in records if size_of(record) == size]
        cells = [[r for r in of if (r["case"], r["direction"]) == column] for column in columns.values()]
        rows.append([size_label(size), *map(_cell, cells)])
    return compact_markdown([corner, *columns], rows)


def _cell(records: Sequence[Record]) -> str:
    """Ours first, bold where the best peer is slower by more than chance (95 %), italic where faster; then that peer."""
    ours = percent(next((r for r in records if r["provider"] == "ours"), None))
    peers = [r for r in records if r["provider"] in PROVIDERS and r["provider"] != "ours" and r.get("us") is not None]
    if not peers:
        return ours
    peer = min(peers, key=lambda record: record["us"])
    low, high = peer.get("times_ours_95") or (1.0, 1.0)  # none of few rounds
    mark = "**" if low > 1.0 else "*" if high < 1.0 else ""
    return f"{mark}{ours}{mark} / {percent(peer)} {peer['provider'].partition('-')[0]}"


# ---- the picture ------------------------------------------------------------------------------------------------------------


LINES = {  # the arm of an ablation that a provider is, and its name
    "ours": ("fused", "fused (ours)"),
    "compile": ("compiled", "torch.compile"),
    "flash-attn": ("flash_attn", "flash-attn"),
    "liger-kernel": ("liger", "Liger"),
    "quack-kernels": ("quack", "quack"),
}


def plot(file: File, path: Path) -> None:
    """add+RMS backward: one panel of the widths of models, five names, % of copy bandwidth."""
    records = [r for r in of_pages(file) if (r["case"], r["direction"]) == ("add_rms", "backward") and r["us"] is not None]
    widths = sorted({r["N"] for r in records})
    figure, axes = pyplot.subplots(figsize=(7.4, 3.6), dpi=DPI, layout="constrained")
    entries = {}
    for name, (arm, title) in LINES.items():
        points = sorted((widths.index(r["N"]), 100 * r["share"]) for r in records if r["provider"] == name)
        if points:
            style = {"linewidth": 1.5, "markersize": 5} | ARMS[arm]
            (entries[title],) = axes.plot(*zip(*points, strict=True), label=title, **style)
    axes.axhline(100, color=GREY, linewidth=1.0)
    axes.set_ylim(0, 110)
    ticks = [size_label((n,)).replace(", ", "\n").replace(" ", "\n", 1) for n in widths]
    axes.set_xticks(range(len(widths)), ticks, fontsize=7)
    axes.set_ylabel("% of copy bandwidth")
    bare(axes, "y")
    legend_below(figure, entries)
    title = "add+RMS backward: x bf16, stream and weights fp32, 32768 rows"
    finish(figure, title, machine(file["environment"]), path)
