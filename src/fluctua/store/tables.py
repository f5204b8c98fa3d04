"""Small tables as text: a header of `# name = value` lines, and columns of numbers or words.

A file whose name ends in .gz is compressed.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fluctua.store.checkpoint import replace


class Table(NamedTuple):
    """A table.

    columns: (R,) each, by name.
    header: numbers, words and lists that belong to all rows.
    """

    columns: dict[str, np.ndarray]
    header: dict[str, Any]

    def where(self, **values: Any) -> dict[str, np.ndarray]:
        """The rows with these values."""
        rows = np.all([self.columns[name] == value for name, value in values.items()], axis=0)
        return {name: column[rows] for name, column in self.columns.items()}


def write(
    path: Path, columns: Mapping[str, Any], header: Mapping[str, Any], *, digits: int | None = None
) -> None:
    """Write a table atomically; numbers read back exactly, or with `digits` significant digits."""
    text = io.StringIO()
    for name, value in header.items():
        text.write(f"# {name} = {json.dumps(value, ensure_ascii=False)}\n")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(
        zip(
            *(_format_cells(np.asarray(column), digits) for column in columns.values()), strict=True
        )
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    content = text.getvalue().encode()
    replace(path, gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def find_table(path: Path) -> Path:
    """The file of a table: NAME.csv where there is no NAME.csv.gz."""
    plain = path.with_suffix("")
    return plain if path.suffix == ".gz" and not path.exists() and plain.exists() else path


def read(path: Path) -> Table:
    """Read a table; a column is numeric where all its cells are."""
    path = find_table(path)
    try:
        content = path.read_bytes()
        lines = (
            (gzip.decompress(content) if path.suffix == ".gz" else content).decode().splitlines()
        )
        pairs = (line[2:].split(" = ", 1) for line in lines if line.startswith("# "))
        header = {name: json.loads(value) for name, value in pairs}
        names, *rows = csv.reader(line for line in lines if not line.startswith("#"))
        columns = dict(zip(names, map(np.array, zip(*rows, strict=True)), strict=True))
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ValueError(
            f"{path} is no table of this program ({error}). Measure it again with --replace."
        ) from None
    return Table({name: _parse_numbers(column) for name, column in columns.items()}, header)


def _format_cells(column: np.ndarray, digits: int | None) -> list[Any]:
    if digits is None or not np.issubdtype(column.dtype, np.floating):
        return column.tolist()
    return [float(f"{cell:.{digits}g}") for cell in column.tolist()]


def _parse_numbers(column: np.ndarray) -> np.ndarray:
    try:
        return column.astype(float)
    except ValueError:
        return column
