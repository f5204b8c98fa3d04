"""`signal.csv`: how large the gradient of each array of θ was, and its standard error; one row an iteration.

Columns: `row`, as in `history.csv`, and for every array of θ `NAME norm`, |∇J| over its components, and `NAME error`,
the same of their standard errors. Their ratio is the signal-to-noise ratio of that family.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np

from fluctua.store.checkpoint import replace

MOST = 32
"""Arrays of θ that are written; the first of more."""


def columns(theta: Mapping[str, np.ndarray]) -> list[str]:
    """The names of the columns."""
    return ["row", *(f"{name} {kind}" for name in [*theta][:MOST] for kind in ("norm", "error"))]


def header(theta: Mapping[str, np.ndarray]) -> str:
    """The first line."""
    return line(columns(theta))


def append(file: IO[str], row: int, gradient: Mapping[str, np.ndarray], stderr: Mapping[str, np.ndarray]) -> None:
    """One more row, visible to readers at once."""
    norm = lambda array: f"{np.sqrt(np.sum(np.square(np.asarray(array, np.float64)))):.5g}"
    pairs = [(norm(gradient[name]), norm(stderr[name])) for name in [*gradient][:MOST]]
    file.write(line([str(row), *(cell for pair in pairs for cell in pair)]))
    file.flush()


def truncate(path: Path, theta: Mapping[str, np.ndarray], last: int) -> None:
    """Leave rows 0 … last; begin anew where the file is missing or of other columns."""
    truncate_rows(path, columns(theta), last)


def truncate_rows(path: Path, names: list[str], last: int) -> None:
    """The same of any table of numbers whose first column is `row`."""
    known, rows = read(path) if path.is_file() else ([], np.zeros((0, 0)))
    kept = line(names)
    if known == names:
        kept += "".join(
            line([f"{v:.5g}" if k else str(int(v)) for k, v in enumerate(row)]) for row in rows if row[0] <= last
        )
    replace(path, kept.encode())


def read(path: Path) -> tuple[list[str], np.ndarray]:
    """The names of the columns, and all complete rows (R, columns)."""
    with open(path, newline="", encoding="utf-8") as file:
        text = file.read()
    lines = list(csv.reader(text[: text.rfind("\n") + 1].splitlines()))
    if not lines or lines[0][:1] != ["row"]:
        raise ValueError(f"{path} must open with the column row; got {text[:40]!r}.")
    names = lines[0]
    try:
        rows = np.array([[float(cell) for cell in cells] for cells in lines[1:]], float).reshape(-1, len(names))
    except ValueError as error:
        raise ValueError(f"{path} has a row that is cut short, or a value that is no number ({error}).") from None
    return names, rows


def line(cells: list[str]) -> str:
    """Cells as a line of a table."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(cells)
    return out.getvalue()
