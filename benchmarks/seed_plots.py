"""Plots of the seed figures, in the styles of `plots`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.plots import STYLES, finish, line, pyplot, width_axis

Record = dict[str, Any]
Value = Callable[[Record], float | None]


def _us(record: Record) -> float | None:
    return record["us"]


def _ms(record: Record) -> float | None:
    return record["us"] and record["us"] / 1000


def _gb_per_s(record: Record) -> float | None:
    return record.get("gb_per_s")


def _kept(record: Record) -> float | None:
    return None if record.get("kept") is None else record["kept"] / 2**20


# Figure → title, panels: (axis label, value, logarithmic).
PANELS: dict[str, tuple[str, list[tuple[str, Value, bool]]]] = {
    "a": ("LayerNorm forward, fp16", [("GB/s", _gb_per_s, False)]),
    "b": ("LayerNorm forward + backward, fp16", [("milliseconds", _ms, False)]),
    "c": ("LayerNorm forward, fp16", [("microseconds", _us, True), ("GB/s", _gb_per_s, False)]),
    "d": ("dropout forward + backward, bf16", [("microseconds", _us, True), ("MiB kept for backward", _kept, False)]),
}


LINEAR = ("a", "b")  # as they were published


def seed_figures(file: dict[str, Any], folder: Path) -> list[Path]:
    """seed_a.png to seed_d.png, those that have records; returns what it wrote."""
    written = []
    for figure, (title, panels) in PANELS.items():
        records = [r for r in file["records"] if r["figure"] == figure and r.get("us") is not None]
        shown = [panel for panel in panels if any(panel[1](record) is not None for record in records)]
        if records and shown:
            path = folder / f"seed_{figure}.png"
            _draw(figure, file["environment"], records, title, shown, path)
            written.append(path)
    return written


def _draw(
    figure_name: str,
    environment: dict[str, Any],
    records: Sequence[Record],
    title: str,
    panels: Sequence[tuple[str, Value, bool]],
    path: Path,
) -> None:
    figure, grid = pyplot.subplots(
        1, len(panels), figsize=(2.0 + 5.4 * len(panels), 4.8), dpi=110, layout="constrained", squeeze=False
    )
    present = {record["provider"] for record in records}
    for axes, (label, value, logarithmic) in zip(grid.flat, panels, strict=True):
        for name in (name for name in STYLES if name in present):
            points = sorted((r["N"], v) for r in records if r["provider"] == name and (v := value(r)) is not None)
            if points:
                line(axes, name, points)
        width_axis(axes, sorted({record["N"] for record in records}), linear=figure_name in LINEAR)
        axes.set_xlabel("N, features in a row")
        axes.set_ylabel(label)
        if logarithmic:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
    rows = max(record["M"] for record in records)
    finish(figure, list(grid.flat), f"{title}, {rows} rows, cold L2", environment, path)
