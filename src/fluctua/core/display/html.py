"""Tables and small curves as HTML, in the colours of the page that shows them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np

from fluctua.core.words import escape_controls

MAX_POINTS = 120
"""Points of a curve; of a longer one, so many at equal distances."""

CELL = "text-align:left;white-space:pre"


class Drawing(str):
    """HTML that is put into a table as it is; any other text is escaped."""


def make_table(rows: Iterable[Sequence[str]], header: Sequence[str] = (), caption: str = "") -> str:
    """A table of texts and drawings. The first cell of a row is its name."""
    parts = ['<table style="color:inherit">']
    if caption:
        parts.append(f'<caption style="{CELL}">{_show(caption)}</caption>')
    if header:
        cells = "".join(f'<th style="{CELL}">{_show(cell)}</th>' for cell in header)
        parts.append(f"<thead><tr>{cells}</tr></thead>")
    parts.append("<tbody>")
    for name, *values in rows:
        cells = "".join(f'<td style="{CELL}">{_show(value)}</td>' for value in values)
        parts.append(f'<tr><th style="{CELL}">{_show(name)}</th>{cells}</tr>')
    return "".join([*parts, "</tbody></table>"])


def make_notes(texts: Iterable[str]) -> str:
    """Texts as small paragraphs, one per line."""
    lines = [line.strip() for text in texts for line in text.splitlines()]
    return "".join(f"<p><small>{_show(line)}</small></p>" for line in lines)


def make_details(title: str, content: str) -> str:
    """HTML that is folded until its title is clicked."""
    return f"<details><summary>{_show(title)}</summary>{content}</details>"


def draw_curves(
    curves: Sequence[Any], *, error: Any = None, width: int = 160, height: int = 32, label: str = ""
) -> Drawing:
    """Draw curves over each other, in the colour of the text.

    Args:
        curves: each (N,), on one scale from the lowest to the highest of all finite values.
        error: of the first curve (N,), as a band of one of them to both sides; None for none.
        width: in pixels.
        height: in pixels.
        label: what they show, for readers that do not see them.
    """
    lines = [_thin(np.asarray(curve, float)) for curve in curves]
    band = None if error is None or not lines else _thin(np.nan_to_num(np.asarray(error, float)))
    values = [*lines, *([] if band is None else [lines[0] - band, lines[0] + band])]
    finite = np.concatenate([v[np.isfinite(v)] for v in values]) if values else np.zeros(0)
    if not finite.size:
        return Drawing("")
    low = float(finite.min())
    span = float(finite.max()) - low or 1.0

    def place(curve: np.ndarray) -> list[str]:
        x = np.linspace(1, width - 1, len(curve))
        y = height - 2 - (height - 4) * (curve - low) / span
        return [f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True) if np.isfinite(b)]

    parts = []
    if band is not None:
        outline = [*place(lines[0] + band), *reversed(place(lines[0] - band))]
        parts.append(f'<polygon points="{" ".join(outline)}" fill="currentColor" opacity="0.25"/>')
    opacity = 1.0 if len(lines) == 1 else 0.6
    parts += [
        f'<polyline points="{" ".join(place(line))}" fill="none" stroke="currentColor" '
        f'stroke-width="1" opacity="{opacity}"/>'
        for line in lines
    ]
    return Drawing(
        f'<svg role="img" aria-label="{_show(label)}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">{"".join(parts)}</svg>'
    )


def _thin(curve: np.ndarray) -> np.ndarray:
    """A curve with at most `MAX_POINTS` points, both ends among them."""
    if len(curve) <= MAX_POINTS:
        return curve
    return curve[np.linspace(0, len(curve) - 1, MAX_POINTS).round().astype(int)]


def _show(text: str) -> str:
    return text if isinstance(text, Drawing) else escape(escape_controls(str(text)))
