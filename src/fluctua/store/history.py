"""The files `history.csv` and `signal.csv`: one row per iteration, append-only plain text.

`row` counts up. After a rewind `iteration` goes back and iterations repeat: the last row of each
counts, up to the iteration of the very last row (`effective`). The last column of a history, `run`,
is the fingerprint of the run that a row belongs to; histories without it can be read as well.

`signal.csv` has the size of the gradient of each array of θ: `row`, as in the history, and for
every array `NAME norm`, |∇J| over its components, and `NAME error`, the same of their standard
errors. Their ratio is the signal-to-noise ratio of that family.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from fluctua.store.checkpoint import replace
from fluctua.store.files import require_file

MAX_ARRAYS = 32
"""Maximum number of arrays of θ in signal.csv; the first ones are written."""


class Row(NamedTuple):
    """One iteration.

    row: index of the row, which never repeats.
    iteration: index of the iteration, which repeats after a rewind.
    J, J_stderr: value and standard error.
    ensemble: trajectories of this iteration.
    trajectories: spent so far.
    gradient_norm: |∇J|.
    seconds: of this iteration.
    event: empty, or `escalate 2000` (the ensemble size from the next row on), or `escalate 2000;
        rewind 412` (the next row is iteration 412), or the event of the estimator's last call, such
        as `renewed χ² 812 of 3`.
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


def format_row(row: Row, run: str) -> str:
    """A row as a line of text; numbers read back exactly."""
    cells = [f"{v:.4f}" if name == "seconds" else str(v) for name, v in row._asdict().items()]
    return ",".join([*cells, run]) + "\n"


def append(file: IO[str], row: Row, run: str) -> None:
    """Append a row, visible to readers at once. run: the fingerprint of the run."""
    file.write(format_row(row, run))
    file.flush()


def read(path: Path) -> list[Row]:
    """All complete rows; an incomplete last line is left out."""
    return [row for row, _ in read_with_owners(path)]


def read_with_owners(path: Path) -> list[tuple[Row, str]]:
    """All complete rows, each with the fingerprint of its run; empty where the file has none."""
    require_file(path, "the history of a run")
    try:
        with open(path, newline="", encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); a run folder is made by `fluctua train`."
        ) from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text: it is damaged, or no history of a run.") from None
    header = next((line for line in (HEADER, PLAIN) if text.startswith(line)), None)
    if header is None:
        raise ValueError(
            f"{path} must open with the columns {HEADER.strip()}; got "
            f"{text.partition(chr(10))[0]!r}."
        )
    complete = text[len(header) : text.rfind("\n") + 1]
    owned = header is HEADER
    try:
        rows = [
            (parse_row(cells), _read_owner(cells, owned))
            for cells in csv.reader(complete.splitlines())
        ]
    except (ValueError, csv.Error) as error:
        raise ValueError(
            f"{path} has a truncated row, or a value that is no number ({error})."
        ) from None
    _check_order(path, [row.row for row, _ in rows], 0)
    return rows


def _check_order(path: Path, rows: Sequence[float], first: int) -> None:
    """Refuse lines that are swapped, missing or repeated: rows count up by one."""
    for expected, row in enumerate(rows, first):
        if row != expected:
            raise ValueError(
                f"{path} has row {row} where row {expected} was expected: its lines are swapped, "
                "missing or repeated. Put back the file as the run wrote it."
            )


def parse_row(cells: Sequence[str]) -> Row:
    """The row of a line's cells; further cells are ignored."""
    return Row(*(kind(cell) for kind, cell in zip(_KINDS, cells[: len(_KINDS)], strict=True)))


def _read_owner(cells: list[str], owned: bool) -> str:
    if len(cells) != len(_KINDS) + owned:
        raise ValueError(f"{len(cells)} cells")
    return cells[-1] if owned else ""


def truncate(path: Path, last: int, run: str) -> list[Row]:
    """Keep rows 0 … last, as rows of the run with fingerprint `run`, and return them."""
    kept = [row for row in read(path) if row.row <= last]
    if len(kept) != last + 1:
        raise ValueError(
            f"{path} has {len(kept)} rows where the checkpoint has {last + 1}: it is truncated."
        )
    replace(path, (HEADER + "".join(format_row(row, run) for row in kept)).encode())
    return kept


def find_kept(iteration: np.ndarray) -> np.ndarray:
    """Indices of the rows that were not undone by a rewind.

    A row of iteration i undoes every earlier row of iteration i and beyond.

    >>> find_kept(np.array([0, 1, 2, 3, 1, 2]))
    array([0, 4, 5])
    """
    later = np.minimum.accumulate(iteration[::-1])[::-1]  # the smallest iteration from each row on
    return np.flatnonzero(iteration < np.append(later[1:], np.iinfo(np.int64).max))


def effective(rows: Sequence[Row]) -> list[Row]:
    """The rows that led to the present state: one per iteration, in order."""
    return [rows[i] for i in find_kept(np.array([row.iteration for row in rows], np.int64))]


# --------------------------------------------------------------------------------------- signal.csv


def signal_columns(theta: Mapping[str, np.ndarray]) -> list[str]:
    """Names of the columns of signal.csv."""
    return [
        "row",
        *(f"{name} {kind}" for name in [*theta][:MAX_ARRAYS] for kind in ("norm", "error")),
    ]


def signal_header(theta: Mapping[str, np.ndarray]) -> str:
    """First line of signal.csv."""
    return csv_line(signal_columns(theta))


def append_signal(
    file: IO[str], row: int, gradient: Mapping[str, np.ndarray], stderr: Mapping[str, np.ndarray]
) -> None:
    """Append a row to signal.csv, visible to readers at once."""

    def norm(array):
        return f"{np.sqrt(np.sum(np.square(np.asarray(array, np.float64)))):.5g}"

    pairs = [(norm(gradient[name]), norm(stderr[name])) for name in [*gradient][:MAX_ARRAYS]]
    file.write(csv_line([str(row), *(cell for pair in pairs for cell in pair)]))
    file.flush()


def truncate_signal(path: Path, theta: Mapping[str, np.ndarray], last: int) -> None:
    """Keep rows 0 … last of signal.csv; start anew where it is missing or has other columns."""
    truncate_numbers(path, signal_columns(theta), last)


def truncate_numbers(path: Path, names: list[str], last: int) -> None:
    """Keep rows 0 … last of a table of numbers whose first column is `row`."""
    header, rows = read_numbers(path) if path.exists() else ([], np.zeros((0, 0)))
    kept = csv_line(names)
    if header == names:
        kept += "".join(
            csv_line([f"{v:.5g}" if k else str(int(v)) for k, v in enumerate(row)])
            for row in rows
            if row[0] <= last
        )
    replace(path, kept.encode())


def read_numbers(path: Path) -> tuple[list[str], np.ndarray]:
    """The names of the columns, and all complete rows (R, columns)."""
    require_file(path, "a table of a run")
    with open(path, newline="", encoding="utf-8") as file:
        text = file.read()
    try:
        lines = list(csv.reader(text[: text.rfind("\n") + 1].splitlines()))
    except csv.Error as error:
        raise ValueError(f"{path} is no table ({error}).") from None
    if not lines or lines[0][:1] != ["row"]:
        raise ValueError(f"{path} must open with the column row; got {text[:40]!r}.")
    names = lines[0]
    try:
        rows = np.array([[float(cell) for cell in cells] for cells in lines[1:]], float).reshape(
            -1, len(names)
        )
    except ValueError as error:
        raise ValueError(
            f"{path} has a truncated row, or a value that is no number ({error})."
        ) from None
    if len(rows):
        numbers = [int(v) if v.is_integer() else v for v in rows[:, 0].tolist()]
        _check_order(path, numbers, numbers[0] if isinstance(numbers[0], int) else 0)
    return names, rows


def csv_line(cells: list[str]) -> str:
    """Cells as a line of a table."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(cells)
    return out.getvalue()
