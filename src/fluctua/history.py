"""`history.csv`: one row an iteration, only ever appended to, readable with pandas and by eye.

`row` counts up. After a rewind `iteration` goes back and iterations repeat: what counts is then the last row of
each, up to the iteration of the last row of all (`effective`).
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import IO, NamedTuple

from fluctua.checkpoint import replace


class Row(NamedTuple):
    """One iteration. trajectories: spent so far. seconds: of this iteration.

    event: empty, or `escalate 2000` (the ensemble size from the next row on), or `escalate 2000; rewind 412` (the
    next row is iteration 412).
    """

    row: int
    iteration: int
    J: float
    J_stderr: float
    ensemble: int
    trajectories: int
    gradient_norm: float
    seconds: float
    event: str = ""


HEADER = ",".join(Row._fields) + "\n"
_KINDS = (int, int, float, float, int, int, float, float, str)


def line(row: Row) -> str:
    """As text; numbers read back exactly."""
    return ",".join(f"{v:.4f}" if name == "seconds" else str(v) for name, v in row._asdict().items()) + "\n"


def append(file: IO[str], row: Row) -> None:
    """One more row, visible to readers at once."""
    file.write(line(row))
    file.flush()


def read(path: Path) -> list[Row]:
    """All complete rows; a last line that a kill cut short is left out."""
    with open(path, newline="", encoding="utf-8") as file:
        text = file.read()
    if not text.startswith(HEADER):
        raise ValueError(f"{path} must begin with the line {HEADER.strip()!r}; it is not a history of this version.")
    whole = text[: text.rfind("\n") + 1]
    return [
        Row(*(kind(cell) for kind, cell in zip(_KINDS, cells, strict=True)))
        for cells in csv.reader(whole[len(HEADER) :].splitlines())
    ]


def truncate(path: Path, last: int) -> list[Row]:
    """Leave rows 0 … last, and return them."""
    kept = [row for row in read(path) if row.row <= last]
    if len(kept) != last + 1:
        raise ValueError(f"{path} has {len(kept)} rows where the checkpoint has {last + 1}: somebody cut it short.")
    replace(path, (HEADER + "".join(map(line, kept))).encode())
    return kept


def effective(rows: list[Row]) -> list[Row]:
    """The rows that led to where the run is now: one for each iteration, in order."""
    path: list[Row] = []
    for row in rows:
        while path and path[-1].iteration >= row.iteration:
            path.pop()
        path.append(row)
    return path
