"""Style of all figures: printed sizes, colour-blind safe colours, reproducible files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

WIDTH = 7.0
"""Inches across two columns."""

LOOK: dict[Any, Any] = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.0,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "pdf.fonttype": 42,  # text stays text
    "savefig.dpi": 130,
}

COLOURS = 128
"""Number of colours of a PNG, which halves its size."""

FAMILY = {"omega": "#332288", "kappa": "#117733", "chi": "#882255"}
"""Colour of each family of parameters, dark enough to be drawn pale."""

SIGMA_TOP = 0.2
"""σ_κ at the end of the colour scale: the paper's largest."""


def sigma_colour(sigma_kappa: float) -> tuple[float, float, float, float]:
    """The colour of a modulation amplitude, the same in every figure; 0 is dark."""
    return mpl.colormaps["viridis"](0.85 * min(sigma_kappa / SIGMA_TOP, 1.0))


def letter(axes: Axes, text: str) -> None:
    """Write the letter of a panel above its upper left corner."""
    axes.set_title(text, loc="left", fontweight="bold", x=0.0)


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write stem.pdf and stem.png, and return their paths.

    Dates are left out, so the same data give the same file.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    written = [stem.with_name(stem.name + ending) for ending in (".pdf", ".png")]
    with mpl.rc_context(LOOK):
        figure.savefig(written[0], metadata={"CreationDate": None})
    save_png(figure, written[1])
    return written


def save_png(figure: Figure, path: Path) -> None:
    """Write a PNG for screens, with `COLOURS` colours."""
    raw = io.BytesIO()
    with mpl.rc_context(LOOK):
        figure.savefig(raw, format="png")
    picture = Image.open(raw).convert("RGB")
    picture = picture.quantize(
        COLOURS, Image.Quantize.MEDIANCUT, kmeans=2, dither=Image.Dither.NONE
    )
    picture.save(path, format="png", optimize=True)
