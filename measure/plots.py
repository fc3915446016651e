"""The style of all pictures: no display, few lines, and one colour for one thing, whatever picture it is in."""

import logging
import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Needs and opens no display. matplotlib reads this at its import, and refuses the backend of a notebook outside of one: import
# it here alone.
os.environ["MPLBACKEND"] = "Agg"
logging.getLogger("matplotlib").setLevel(logging.ERROR)  # without a home it uses a temporary folder, and warns at each start
from matplotlib import font_manager, pyplot, ticker  # noqa: E402

from measure.files import as_storage_errors, replacing  # noqa: E402
from measure.statistics import Interval  # noqa: E402

__all__ = ["pyplot", "ticker"]  # beside what is defined here

OURS = {"Software": "prenorm"}  # in the metadata of a PNG
INK, GREY, EDGE = "#111827", "#6b7280", "#374151"
DPI = 130
pyplot.rcParams |= {
    "figure.dpi": DPI, "figure.constrained_layout.use": True, "axes.spines.top": False, "axes.spines.right": False,
    "axes.axisbelow": True, "grid.color": GREY, "grid.alpha": 0.2, "xtick.labelsize": 8, "ytick.labelsize": 8,
    "legend.frameon": False, "legend.fontsize": 8,
    "text.parse_math": False,  # a $ in the name of a corpus is no formula
}  # fmt: skip
_GLYPHS = font_manager.get_font(font_manager.findfont(font_manager.FontProperties())).get_charmap()
# Lines that have no colour of their own. Colours differ in lightness too.
COLOURS = (INK, "#c2410c", "#2563eb", "#0f8a6d", "#b58900", "#7c3aed", "#8b8b8b", "#db2777")
MARKERS = "os^DvPX*"
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)))
# Implementations of a norm. Colours differ in lightness too.
ARMS = {
    "fused": INK, "torch": "#9ca3af", "compiled": "#3b82f6", "flash_attn": "#0f8a6d", "liger": "#b58900", "quack": "#7c3aed",
    "nanogpt": "#78716c",
}  # fmt: skip
NAMES = {"compiled": "compiled norm", "flash_attn": "flash-attn", "liger": "Liger", "nanogpt": "nanoGPT's step"}
# Kinds of work in a step: colour and hatch. Norms stand out, because only they differ between arms.
GROUP_FILLS: dict[str, tuple[str, str]] = {
    "norm": ("#c2410c", ""),
    "gemm": ("#d1d5db", ""),
    "attention": ("#f3f4f6", "////"),
    "loss": ("#9db8d2", "...."),
    "optimizer": ("#ffffff", "xxxx"),
    "other": (GREY, ""),
    "idle": ("#ffffff", ""),
}


def look(number: int) -> dict[str, Any]:
    """The style of a line by its number. The dash is another one after the last colour."""
    turn, at = divmod(number, len(COLOURS))
    return {"color": COLOURS[at], "marker": MARKERS[at], "linestyle": DASHES[turn % len(DASHES)], "markersize": 4}


def bare(axes: Any, grid: str = "both") -> None:
    """A faint grid ("x", "y", "both" or none) behind the data, and plain numbers on a logarithmic axis, whatever it spans."""
    if grid:
        axes.grid(axis=grid)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(ticker.NullFormatter())
        if isinstance(axis.get_major_locator(), ticker.LogLocator):
            axis.set_major_locator(_Logarithmic())
            axis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:g}"))


class _Logarithmic(ticker.LogLocator):
    """Two to six numbers, whatever the axis spans. LogLocator has none for less than a decade, or for many on a low panel."""

    def tick_values(self, vmin: float, vmax: float) -> Any:
        if vmax < 100 * vmin:
            return ticker.MaxNLocator(4).tick_values(vmin, vmax)
        first, last = math.floor(math.log10(vmin)), math.ceil(math.log10(vmax))
        return [10.0**power for power in range(first, last + 1, (last - first) // 5 + 1)]


def rows(groups: Sequence[tuple[str, Sequence[str]]], panels: int = 1) -> tuple[Any, list[Any], list[float]]:
    """A figure with a named row for each member of each group, beneath the group's title if it has one.

    Returns:
        The figure, its panels side by side, and the heights of the rows.
    """
    heights, titles, y = list[float](), dict[float, str](), 0.0
    for title, members in groups:
        if title:
            titles[y] = title
            y += 1
        heights += [y + at for at in range(len(members))]
        y += len(members) + 0.3
    figure, (grid,) = pyplot.subplots(1, panels, figsize=(8.4, 1.2 + 0.21 * y), sharey=True, squeeze=False)
    grid[0].set_yticks(heights, [NAMES.get(member, member) for _, members in groups for member in members])
    grid[0].set_ylim(y - 0.6, -0.6)
    for height, title in titles.items():
        grid[0].text(0.005, height, title, transform=grid[0].get_yaxis_transform(), va="center", fontsize=8, fontweight="bold")
    for axes in grid:
        bare(axes, "x")
    return figure, list(grid), heights


def dot(axes: Any, y: float, found: Interval, colour: Any = INK, filled: bool = True) -> None:
    """A value with its interval, as far as the axis goes. A value beyond it is an arrowhead at its edge."""
    left, right = axes.get_xlim()
    if not left <= found.median <= right:
        axes.plot(min(max(found.median, left), right), y, ">" if found.median > right else "<", color=colour, clip_on=False)
        return
    whiskers = [[found.median - max(found.low, left)], [min(found.high, right) - found.median]]
    style = {"fmt": "o", "markersize": 5, "capsize": 2.5, "markerfacecolor": colour if filled else "white"}
    axes.errorbar(found.median, y, xerr=whiskers, color=colour, **style)


def band(axes: Any, low: float, high: float, bottom: float, top: float) -> None:
    """What no difference looks like, behind the rows between two heights."""
    axes.fill_betweenx([bottom - 0.5, top + 0.5], low, high, color=GREY, alpha=0.2, linewidth=0)


def beside(axes: Any, y: float, words: str) -> None:
    """Words right of the panel, in the row."""
    axes.text(1.03, y, words, transform=axes.get_yaxis_transform(), va="center", fontsize=7.5, color=INK)


def legend_below(figure: Any, entries: Mapping[str, Any]) -> None:
    """One legend for all panels, in as few lines as the picture is wide enough for."""
    for columns in range(len(entries), 0, -1):
        legend = figure.legend(entries.values(), map(drawable, entries), loc="outside lower center", ncols=columns)
        if columns == 1 or legend.get_window_extent().width < figure.bbox.width:
            return
        legend.remove()


def finish(figure: Any, title: str, footer: str, path: Path) -> None:
    """Writes a picture in the format of the file's suffix, with its title, and the footer small beneath it; closes it.

    Raises:
        StorageError: it can't be written.
    """
    letters = int(13 * figure.get_figwidth())  # thirteen of the title's to an inch
    figure.suptitle(textwrap.fill(title, letters), x=0.01, ha="left", fontsize=10, fontweight="bold")
    if footer:
        strip = 0.2 / figure.get_figheight()  # beneath the layout
        figure.get_layout_engine().set(rect=(0, strip, 1, 1 - strip))
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        for legend in figure.legends:  # the layout has left them room, and put them on the lower edge of the whole picture
            legend.set_bbox_to_anchor((0, strip, 1, 1 - strip), transform=figure.transFigure)
        figure.text(0.01, 0.2 * strip, footer, fontsize=6, color=GREY)
    save_figure(figure, path)


def save_figure(figure: Any, path: Path) -> None:
    for text in figure.findobj(pyplot.Text):
        text.set_text(drawable(text.get_text()))
    try:
        with as_storage_errors(path), replacing(path) as temporary:
            kind = path.suffix.lstrip(".") or "png"
            figure.savefig(temporary, format=kind, metadata=OURS if kind == "png" else None)
    finally:
        pyplot.close(figure)


def may_replace(path: Path) -> bool:
    """Whether nothing is there, or a PNG that `save_figure` has written."""
    return not path.exists() or (path.is_file() and b"Software\0prenorm" in path.read_bytes())


def drawable(text: str) -> str:
    """The text with an escape (\\u65e5) for each character that the font lacks: matplotlib draws one box for all of them."""
    return "".join(c if c == "\n" or ord(c) in _GLYPHS else c.encode("ascii", "backslashreplace").decode() for c in text)
