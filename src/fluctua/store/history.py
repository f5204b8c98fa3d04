"""`history.csv`: one row an iteration, only ever appended to, readable with pandas and by eye.

`row` counts up. After a rewind `iteration` goes back and iterations repeat: what counts is then the last row of
each, up to the iteration of the last row of all (`effective`). The last column, `run`, is the fingerprint of the run
that a row belongs to; histories without it are read as well.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from fluctua.store.checkpoint import replace


class Row(NamedTuple):
    """One iteration. trajectories: spent so far. seconds: of this iteration.

    event: empty, or `escalate 2000` (the ensemble size from the next row on), or `escalate 2000; rewind 412` (the
    next row is iteration 412), or what the estimator says of its last call, such as `renewed χ² 812 of 3`.
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


PLAIN = ",".join(Row._fields) + "\n"
HEADER = PLAIN.strip() + ",run\n"
_KINDS = (int, int, float, float, int, int, float, float, str)


def line(row: Row, run: str) -> str:
    """As text; numbers read back exactly."""
    cells = [f"{v:.4f}" if name == "seconds" else str(v) for name, v in row._asdict().items()]
    return ",".join([*cells, run]) + "\n"


def append(file: IO[str], row: Row, run: str) -> None:
    """One more row, visible to readers at once. run: the fingerprint of the run."""
    file.write(line(row, run))
    file.flush()


def read(path: Path) -> list[Row]:
    """All complete rows; a last line that a kill cut short, or that is being written, is left out."""
    return [row for row, _ in read_owned(path)]


def read_owned(path: Path) -> list[tuple[Row, str]]:
    """All complete rows, each with the fingerprint of its run, empty where the file has none."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); a run folder is made by `fluctua train`."
        ) from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text: it is damaged, or no history of a run.") from None
    header = next((known for known in (HEADER, PLAIN) if text.startswith(known)), None)
    if header is None:
        raise ValueError(f"{path} must open with the columns {HEADER.strip()}; got {text.partition(chr(10))[0]!r}.")
    whole, owned = text[len(header) : text.rfind("\n") + 1], header is HEADER
    try:
        return [(parsed(cells), _owner(cells, owned)) for cells in csv.reader(whole.splitlines())]
    except ValueError as error:
        raise ValueError(f"{path} has a row that is cut short, or a value that is no number ({error}).") from None


def parsed(cells: Sequence[str]) -> Row:
    """A line's cells as a row; further ones are left out."""
    return Row(*(kind(cell) for kind, cell in zip(_KINDS, cells[: len(_KINDS)], strict=True)))


def _owner(cells: list[str], owned: bool) -> str:
    if len(cells) != len(_KINDS) + owned:
        raise ValueError(f"{len(cells)} cells")
    return cells[-1] if owned else ""


def truncate(path: Path, last: int, run: str) -> list[Row]:
    """Leave rows 0 … last, as rows of the run with fingerprint `run`, and return them."""
    kept = [row for row in read(path) if row.row <= last]
    if len(kept) != last + 1:
        raise ValueError(f"{path} has {len(kept)} rows where the checkpoint has {last + 1}: somebody cut it short.")
    replace(path, (HEADER + "".join(line(row, run) for row in kept)).encode())
    return kept


def kept(iteration: np.ndarray) -> np.ndarray:
    """Which rows were not undone: one that goes back to iteration i undoes every earlier row of i and beyond.

    >>> kept(np.array([0, 1, 2, 3, 1, 2]))
    array([0, 4, 5])
    """
    later = np.minimum.accumulate(iteration[::-1])[::-1]  # the smallest iteration from each row on
    return np.flatnonzero(iteration < np.append(later[1:], np.iinfo(np.int64).max))


def effective(rows: Sequence[Row]) -> list[Row]:
    """The rows that led to where the run is now: one for each iteration, in order."""
    return [rows[i] for i in kept(np.array([row.iteration for row in rows], np.int64))]
