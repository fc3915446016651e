"""The style of all pictures: no display, few lines, the same fill for the same kind of work."""

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

# Needs and opens no display. matplotlib reads this at its import, and refuses the backend of a notebook outside of one: import
# it here alone.
os.environ["MPLBACKEND"] = "Agg"
logging.getLogger("matplotlib").setLevel(logging.ERROR)  # without a home it uses a temporary folder, and warns at each start
from matplotlib import pyplot, ticker  # noqa: E402

__all__ = ["GREY", "GROUP_FILLS", "bare", "pyplot", "save", "ticker"]

GREY = "#6b7280"
GROUP_FILLS: dict[str, tuple[str, str]] = {  # colour and hatch; norms stand out, because only they differ between arms
    "norm": ("#c2410c", ""),
    "gemm": ("#d1d5db", ""),
    "attention": ("#f3f4f6", "////"),
    "loss": ("#9db8d2", "...."),
    "optimizer": ("#ffffff", "xxxx"),
    "other": (GREY, ""),
}


def bare(axes: Any, grid: str = "both") -> None:
    """A faint grid ("x", "y", "both" or none) behind the data, and no frame at the top and the right."""
    axes.set_axisbelow(True)
    if grid:
        axes.grid(axis=grid, color=GREY, alpha=0.2, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Any, path: Path) -> None:
    """Writes the picture as a PNG and closes it. 64 colours are enough for lines and fills, and take a third of the bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.canvas.draw()
    picture = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")
    picture.quantize(64, dither=Image.Dither.NONE).save(path, format="PNG", optimize=True)
    pyplot.close(figure)
