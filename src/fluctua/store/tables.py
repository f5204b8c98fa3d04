"""Small tables as text: columns of numbers or words, and above them what they are, one `# name = value` a line."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fluctua.store.checkpoint import replace


class Table(NamedTuple):
    """columns: (R,) each. header: numbers, words and lists that belong to all rows."""

    columns: dict[str, np.ndarray]
    header: dict[str, Any]

    def where(self, **values: Any) -> dict[str, np.ndarray]:
        """The rows with these values."""
        rows = np.all([self.columns[name] == value for name, value in values.items()], axis=0)
        return {name: column[rows] for name, column in self.columns.items()}


def write(path: Path, columns: Mapping[str, Any], header: Mapping[str, Any]) -> None:
    """Write the file in one step; numbers read back exactly."""
    text = io.StringIO()
    for name, value in header.items():
        text.write(f"# {name} = {json.dumps(value, ensure_ascii=False)}\n")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*(np.asarray(column).tolist() for column in columns.values()), strict=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, text.getvalue().encode())


def read(path: Path) -> Table:
    """Read it back; a column is of numbers where all its cells are."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        pairs = (line[2:].split(" = ", 1) for line in lines if line.startswith("# "))
        header = {name: json.loads(value) for name, value in pairs}
        names, *rows = csv.reader(line for line in lines if not line.startswith("#"))
        columns = dict(zip(names, map(np.array, zip(*rows, strict=True)), strict=True))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no table of this program ({error}). Measure it again with --replace.") from None
    return Table({name: _numbers(column) for name, column in columns.items()}, header)


def _numbers(column: np.ndarray) -> np.ndarray:
    try:
        return column.astype(float)
    except ValueError:
        return column
