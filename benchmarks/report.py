"""Tables and pictures of records with shares of copy bandwidth."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES, DIRECTIONS, MODEL_WIDTHS, SITES
from benchmarks.command import Record
from benchmarks.providers import OURS, PROVIDERS, TRAFFIC
from measure.plots import ARMS, DPI, GREY, bare, finish, legend_below, pyplot
from measure.tables import NOTHING, aligned, compact_markdown, machine

LABELS = {name: case.label for name, case in (CASES | SITES).items()} | {
    "rotary": "rotary", "rms_rotary": "RMS+rotary", "ln_rotary": "LN+rotary",
    "softmax": "softmax", "log_softmax": "log-softmax", "cross_entropy": "cross-entropy",
}  # fmt: skip
File = dict[str, Any]  # of results
Size = tuple[int, ...]


class ResultsError(ValueError):
    """A page asks for what no record has."""


def label(case: str, residual: str | None = None) -> str:
    return f"{LABELS[case]}, {residual} stream" if residual else LABELS[case]


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


# ---- for a terminal ---------------------------------------------------------------------------------------------------------


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
    return f"{stream}{weights}{dtype}, {record.get('direction', '')} {record['M']}×{width}"


def shares_text(records: Sequence[Record]) -> str:
    """A line for each cell: shares of copy bandwidth, then how many times as long as ours the fastest other takes."""
    cells = by_cell(records)
    names = [name for name in (TRAFFIC, *PROVIDERS) if any(name in cell for cell in cells)]
    last = ["before"] if "before" in names else []
    rows = []
    for cell in cells:
        peer = best_peer(cell)
        row = [cell_label(next(iter(cell.values()))), *(bandwidth_percent(cell.get(name)) for name in names)]
        row += [NOTHING if peer is None else short(peer["provider"]), ratio(peer), *(ratio(cell.get(name)) for name in last)]
        rows.append(row)
    header = [
        "% of copy bandwidth",
        *map(short, names),
        "fastest other",
        "its time / ours",
        *(f"{name} / ours" for name in last),
    ]
    return aligned(header, rows)


def failures(records: Iterable[Record]) -> str:
    failed = [record for record in records if record.get("error")]
    return "\n".join(f"failed: {record['provider']}, {cell_label(record)}: {record['error']}" for record in failed)


def best_peer(providers: Mapping[str, Record]) -> Record | None:
    """The fastest library: not ours, and not the kernel that only moves the tensors."""
    peers = [r for name, r in providers.items() if name not in (*OURS, TRAFFIC) and r.get("us") is not None]
    return min(peers, key=lambda record: record["us"], default=None)


def ratio(record: Record | None) -> str:
    """A provider's time over ours, with the 95 % interval."""
    if record is None or record.get("times_ours") is None:
        return NOTHING
    interval = record.get("times_ours_95")
    return f"{record['times_ours']:.3f}" + (" ({:.3f} to {:.3f})".format(*interval) if interval else "")


def bandwidth_percent(record: Record | None) -> str:
    if record is None:
        return NOTHING
    return "failed" if record.get("error") else f"{100 * record['share']:.0f}"


def short(provider: str) -> str:
    return {"flash-attn": "flash", "liger-kernel": "liger", "quack-kernels": "quack"}.get(provider, provider)


# ---- for the pages ----------------------------------------------------------------------------------------------------------


def of_pages(file: File, stream: str = "fp32") -> list[Record]:
    """Its records; of those with a stream the ones with this dtype of it."""
    return [record for record in file["records"] if record.get("residual_dtype") in (None, stream)]


def shares_markdown(file: File) -> str:
    """Ours and the best peer: a table for each direction, a row for each size, a column for each case."""
    records, parts = of_pages(file), []
    for direction in (*DIRECTIONS, "both"):
        of = [record for record in records if record["direction"] == direction]
        cases = [name for name in LABELS if any(record["case"] == name for record in of)]
        sizes = sorted({size_of(record) for record in of})
        if sizes:
            words = {"both": "forward and backward"}.get(direction, direction)
            what = {1: "N", 2: "M × N", 3: "heads"}[len(sizes[0])]
            columns = {LABELS[name]: (name, direction) for name in cases}
            parts.append(_table(of, f"{words}, {what} =", columns, sizes))
    return "\n\n".join(parts)


def by_width(file: File, widths: Sequence[str]) -> str:
    """Add + norm in both directions, ours and the best peer: a row for each of these widths."""
    records = [record for record in of_pages(file) if record["case"] in ("add_ln", "add_rms")]
    measured = sorted({record["N"] for record in records})
    if missing := [width for width in widths if int(width) not in measured]:
        known = ", ".join(map(str, measured))
        raise ResultsError(f"no add + norm of width {', '.join(missing)} is recorded with a stream in fp32; there are {known}")
    columns = {f"{LABELS[case]} {direction}": (case, direction) for case in ("add_ln", "add_rms") for direction in DIRECTIONS}
    return _table(records, "hidden size", columns, [(int(width),) for width in widths])


def _table(records: Iterable[Record], corner: str, columns: Mapping[str, tuple[str, str]], sizes: Iterable[Size]) -> str:
    """columns: case and direction, by their heading."""
    found: dict[Any, dict[str, Record]] = defaultdict(dict)
    for record in records:
        found[record["case"], record["direction"], size_of(record)][record["provider"]] = record
    rows = [[size_label(size), *(_cell(found[(*column, size)]) for column in columns.values())] for size in sizes]
    return compact_markdown([corner, *columns], rows)


def _cell(providers: Mapping[str, Record]) -> str:
    """Ours first, bold where the best peer is slower by more than chance (95 %), italic where faster; then that peer."""
    text, peer = bandwidth_percent(providers.get("ours")), best_peer(providers)
    if peer is None:
        return text
    low, high = peer.get("times_ours_95") or (1.0, 1.0)  # none where not measured in one run, or in few rounds
    mark = "**" if low > 1.0 else "*" if high < 1.0 else ""
    return f"{mark}{text}{mark} / {bandwidth_percent(peer)} {short(peer['provider'])}"


# ---- pictures ---------------------------------------------------------------------------------------------------------------


LINES = {  # of the pictures: the arm of an ablation that a provider is, and its name
    "ours": ("fused", "fused (ours)"),
    "compile": ("compiled", "torch.compile"),
    "flash-attn": ("flash_attn", "flash-attn"),
    "liger-kernel": ("liger", "Liger"),
    "quack-kernels": ("quack", "quack"),
}
PICTURED = {  # by record: the case and the direction of its picture
    "norms_models": ("add_rms", "backward"),
    "sites": ("norm_add_norm", "backward"),
    "rotary": ("rms_rotary", "backward"),
    "losses": ("cross_entropy", "both"),
}


def plot_shares(file: File, path: Path) -> bool:
    """One panel of the sizes of a case, five names, % of copy bandwidth; whether there was any. The file's name says which."""
    case, direction = PICTURED[path.stem]
    records = [r for r in of_pages(file) if (r["case"], r["direction"]) == (case, direction) and r.get("us") is not None]
    if not records:
        return False
    figure, axes = pyplot.subplots(figsize=(7.4, 3.6), dpi=DPI, layout="constrained")
    sizes = sorted({size_of(r) for r in records})
    for name, (arm, title) in LINES.items():
        points = sorted((sizes.index(size_of(r)), 100 * r["share"]) for r in records if r["provider"] == name)
        if points:
            axes.plot(*zip(*points, strict=True), label=title, **{"linewidth": 1.5, "markersize": 5} | ARMS[arm])
    axes.axhline(100, color=GREY, linewidth=1.0)
    axes.set_ylim(0, 110)
    axes.set_xticks(range(len(sizes)), [size_label(n).replace(", ", "\n").replace(" ", "\n", 1) for n in sizes], fontsize=7)
    axes.set_ylabel("% of copy bandwidth")
    bare(axes, "y")
    what = f"{label(case)} {direction}".replace("both", "forward and backward")
    dtypes = "x bf16, stream and weights fp32" if "residual_dtype" in records[0] else "bf16"
    rows = " to ".join(map(str, dict.fromkeys(f([r["M"] for r in records]) for f in (min, max))))
    rows = {1: f", {rows} rows", 2: "", 3: f", {rows} tokens"}[len(sizes[0])]
    handles, labels = axes.get_legend_handles_labels()
    legend_below(figure, dict(zip(labels, handles, strict=True)))
    finish(figure, f"{what}: {dtypes}{rows}", machine(file["environment"]), path)
    return True
