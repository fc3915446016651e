"""Tables of recorded results: aligned text for a terminal, Markdown for README.md."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.cases import CASES, DIRECTIONS
from benchmarks.providers import OURS, PROVIDERS, TRAFFIC
from benchmarks.selection import MODEL_WIDTHS

Record = dict[str, Any]


def aligned(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns padded to their widest cell, the first one to the left and all others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def label(case: str, residual: str | None) -> str:
    name = CASES[case].label
    return f"{name}, {residual} stream" if residual else name


def rows_label(rows: set[int]) -> str:
    """Wide rows are fewer: 32768 rows, 8192 of the widest."""
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


def share(record: Record | None) -> str:
    if record is None:
        return "–"
    return "failed" if record.get("error") else f"{record['share']:.2f}"


def best_peer(providers: dict[str, Record]) -> Record | None:
    """The fastest of the libraries: neither ours nor the kernel that only moves the tensors."""
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
    """Its time over ours, with the 95 % interval."""
    if record is None or record.get("times_ours") is None:
        return "–"
    interval = record.get("times_ours_95")
    return f"{record['times_ours']:.3f}" + (f" ({interval[0]:.3f} to {interval[1]:.3f})" if interval else "")


def norms_text(records: Sequence[Record]) -> str:
    """A line for each cell: shares of copy bandwidth, then how many times as long as ours the fastest other takes."""
    cells = by_cell(records)
    names = [name for name in (TRAFFIC, *PROVIDERS) if any(name in cell for cell in cells)]
    rows, before = [], "before" in names
    for cell in cells:
        peer = best_peer(cell)
        row = [cell_label(next(iter(cell.values()))), *(share(cell.get(name)) for name in names)]
        row += ["–" if peer is None else short(peer["provider"]), ratio(peer), *([ratio(cell.get("before"))] if before else [])]
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
                cells = [norms_cell(found[n]) if n in found else "–" for n in columns]
                lines.append([label(case, residual), *cells])
            if lines:
                parts.append(markdown([f"{direction}, N =", *map(str, columns)], lines))
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
            parts.append(markdown([f"{direction}, N =", *(CASES[case].label for case, *_ in cases)], rows))
    return "\n\n".join(parts)


def norms_cell(providers: dict[str, Record]) -> str:
    """Ours first, bold where the best peer is slower by more than chance (95 %), italic where faster; then that peer."""
    ours, peer = providers.get("ours"), best_peer(providers)
    text = share(ours)
    if peer is None:
        return text
    low, high = peer.get("times_ours_95") or (1.0, 1.0)  # none where not measured in one run, or in few rounds
    if low > 1.0:
        text = f"**{text}**"
    elif high < 1.0:
        text = f"*{text}*"
    return f"{text} / {share(peer)} {short(peer['provider'])}"


def short(provider: str) -> str:
    return {"flash-attn": "flash", "liger-kernel": "liger", "quack-kernels": "quack"}.get(provider, provider)


def host_rows(records: Sequence[Record]) -> list[list[str]]:
    """Provider, forward, forward+backward: median CPU microseconds a call and, in brackets, 10th to 90th percentile."""
    found = {(record["provider"], record["direction"]): record for record in records}
    order = dict.fromkeys((*OURS, "ours-compiled", *PROVIDERS))
    names = [name for name in order if any(provider == name for provider, _ in found)]
    return [[name, *(_host_cell(found.get((name, d))) for d in ("forward", "forward+backward"))] for name in names]


def _host_cell(record: Record | None) -> str:
    if record is None:
        return "–"
    return "failed" if record.get("error") else f"{record['us']:.0f} ({record['p10']:.0f} to {record['p90']:.0f})"


HOST_HEADER = ("CPU µs a call", "forward", "forward + backward")


def memory_rows(records: Sequence[Record]) -> list[list[str]]:
    """Case, stream, shape, provider: MiB at the peak, and kept between forward and backward, a block."""
    return [
        [
            CASES[record["case"]].label,
            record["residual_dtype"],
            f"{record['M']} × {record['N']}",
            record["provider"],
            _mib_a_block(record, "kept"),
            _mib_a_block(record, "peak"),
        ]
        for record in records
    ]


def _mib_a_block(record: Record, field: str) -> str:
    if record.get("error"):
        return "failed"
    return "–" if record[field] is None else f"{record[field] / record['blocks'] / 2**20:.0f}"


MEMORY_HEADER = ("block", "stream", "rows × width", "provider", "MiB kept for backward, a block", "MiB at the peak, a block")


SEED_TITLES = {
    "a": "LayerNorm forward, fp16, GB/s",
    "b": "LayerNorm forward + backward, fp16, µs",
    "c": "LayerNorm forward, fp16, µs",
    "d": "dropout forward + backward, bf16, µs",
}


def seed_tables(records: Sequence[Record]) -> dict[str, tuple[str, list[str], list[list[str]]]]:
    """Figure → title, header, rows: a line for each width, a column for each provider."""
    found = {}
    for figure, title in SEED_TITLES.items():
        chosen = [record for record in records if record["figure"] == figure]
        if not chosen:
            continue
        names = list(dict.fromkeys(record["provider"] for record in chosen))
        cells = {(record["N"], record["provider"]): record for record in chosen}
        field = "gb_per_s" if figure == "a" else "us"

        def cell(record: Record | None, field: str = field) -> str:
            if record is None:
                return "–"
            return (
                "failed" if record.get("error") else f"{record[field]:.0f}" if record[field] >= 100 else f"{record[field]:.1f}"
            )

        widths = sorted({record["N"] for record in chosen})
        rows = [[str(n), *(cell(cells.get((n, name))) for name in names)] for n in widths]
        found[figure] = (f"{title}, {rows_label({r['M'] for r in chosen})}", ["N", *names], rows)
    return found
