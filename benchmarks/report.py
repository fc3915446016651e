"""Tables of records with shares of copy bandwidth, and the picture of the norms."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.cases import BOTH, CASES, DIRECTIONS, MODEL_WIDTHS, SITES
from benchmarks.command import Record
from benchmarks.providers import PROVIDERS
from measure.comparison import TORCH
from measure.plots import ARMS, DASHES, GREY, MARKERS, bare, finish, legend_below, pyplot
from measure.statistics import Interval
from measure.tables import NOTHING, aligned, compact_markdown, interval_text, machine

LABELS = {name: case.label for name, case in (CASES | SITES).items()} | {
    "rotary": "rotary", "rms_rotary": "RMS+rotary", "softmax": "softmax", "cross_entropy": "cross-entropy",
    "swiglu": "SwiGLU", "geglu": "GEGLU",
    "norm_gate": "norm, then gate", "gate_norm": "gate, then norm", "gate_norm_8": "gate, then norm in 8 groups",
    "adaln": "adaLN", "adaln_zero": "adaLN-zero", "adaln_zero_fp32": "adaLN-zero, fp32 stream",
    "rms_adaln_zero": "RMS adaLN-zero",
}  # fmt: skip
UNTOLD = ("bytes", "copy_gb_per_s", "p10", "p90", "gb_per_s", "sets")  # on a terminal
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
            cases = [name for name in LABELS if name in {record["case"] for record in of}]
            rows = []
            for size in sizes:
                own = [record for record in of if size_of(record) == size]
                cells = [_cell([record for record in own if record["case"] == case]) for case in cases]
                rows.append([size_label(size), *cells])
            parts.append(compact_markdown([f"{words}, {what} =", *(LABELS[case] for case in cases)], rows))
    return "\n\n".join(parts)


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


ADOPTIONS = {  # a row of a model: plain, ours, and what ours is compared with beside plain, the first that is there
    "": (TORCH, "adopted", ("Liger", "by hand")),
    ", compiled": ("compiled", "adopted, compiled", ("by hand, compiled",)),
}


def adoption(file: File) -> str:
    """A row for each model, eager and compiled: a step plain, adopted and with Liger's kernels or by hand, and what adoption
    gains."""
    rows = []
    for kind in dict.fromkeys(record["model"] for record in file["records"]):
        of = {r["arm"]: r for r in file["records"] if r["model"] == kind and not r.get("error")}
        for what, (plain, ours, others) in ADOPTIONS.items():
            if plain not in of:
                continue
            other = next((name for name in others if name in of), "")
            arms = [of.get(name, {}) for name in (plain, ours, other)]
            gains = [arms[1].get(f"over {base}") for base in (plain, other)]
            words = [interval_text(Interval(*gain) if gain else None) for gain in gains]
            cells = [f"{arm[name]:.1f}" if arm.get(name) else NOTHING for name in ("ms", "peak_gb") for arm in arms]
            rows.append([f"{kind}, {of[plain]['parameters'] / 1e6:.0f}M{what}", *cells[:3], *words, *cells[3:]])
    other = "Liger, DiT by hand" if any(record["arm"] == "by hand" for record in file["records"]) else "Liger"
    header = ["a step, ms", "plain", "adopted", f"with {other}", "adopted over plain (95 %)", f"adopted over {other}"]
    return compact_markdown([*header, "GiB plain", "adopted", other], rows)


# ---- the picture ------------------------------------------------------------------------------------------------------------


DRAWN = ("add_ln", "add_rms")  # cases
LINES = {  # the arm of an ablation that a provider is, and its name
    "ours": ("fused", "fused (ours)"),
    "compile": ("compiled", "torch.compile"),
    "flash-attn": ("flash_attn", "flash-attn"),
    "liger-kernel": ("liger", "Liger"),
    "quack-kernels": ("quack", "quack"),
}


def plot(file: File, path: Path) -> None:
    """Add + norm: a panel for each norm and direction, a point for each width of a model and library, % of copy bandwidth with
    the 10th to 90th percentile of the rounds."""
    known = [r for r in of_pages(file) if r["case"] in DRAWN and r["direction"] in DIRECTIONS and r["us"] is not None]
    widths = sorted({r["N"] for r in known})
    figure, grid = pyplot.subplots(len(DRAWN), 2, figsize=(8.4, 5.6), sharex=True, sharey=True, squeeze=False)
    entries = dict[str, Any]()
    for (case, direction), axes in zip(product(DRAWN, DIRECTIONS), grid.flat, strict=True):
        for (name, (arm, title)), marker, dash in zip(LINES.items(), MARKERS, DASHES, strict=False):
            of = [r for r in known if (r["provider"], r["case"], r["direction"]) == (name, case, direction)]
            if points := sorted((widths.index(r["N"]), 100 * r["share"], r) for r in of):
                x, share, records = zip(*points, strict=True)
                ends = [[100 * r["share"] * abs(1 - r["us"] / r[end]) for r in records] for end in ("p90", "p10")]
                style = {"color": ARMS[arm], "marker": marker, "linestyle": dash, "markersize": 5}
                style |= {"linewidth": 2.6, "zorder": 5} if name == "ours" else {"linewidth": 1.5}
                entries[title] = axes.errorbar(x, share, yerr=ends, label=title, elinewidth=1.0, **style)
        axes.axhline(100, color=GREY, linewidth=1.0)
        axes.set_ylim(0, 110)
        axes.set_title(f"{LABELS[case]} {direction}", fontsize=9, loc="left")
        ticks = [size_label((n,)).replace(", ", "\n").replace(" ", "\n", 1) for n in widths]
        axes.set_xticks(range(len(widths)), ticks, fontsize=6)
        bare(axes, "y")
    figure.supylabel("% of copy bandwidth", fontsize=9)
    legend_below(figure, entries)
    title = "Add + norm: x bf16, stream and weights fp32, 32768 rows"
    finish(figure, title, machine(file["environment"]), path)
