"""The files `predictions.csv` and `records.csv`: what a calibrated model expected, and what came.

`predictions.csv` has a row per row of the history and the numbers of a `MeasurementComparison` as
columns (`fluctua.learn.predictions`), NaN where nothing was measured. `records.csv` has the last
measured record beside the expected one, a row per sample; its header names row and iteration. Runs
whose estimator calibrates no model have neither.
"""

from __future__ import annotations

from typing import IO

from fluctua.learn.predictions import NUMBERS, MeasurementComparison
from fluctua.store import history, tables
from fluctua.store.folder import RunFolder
from fluctua.store.history import Row

COLUMNS = ["row", *NUMBERS]


class ExpectationFiles:
    """Both files of an open run, which begin with the first comparison."""

    def __init__(self, place: RunFolder):
        self.place = place
        self.file: IO[str] | None = None
        self.last: tuple[Row, MeasurementComparison] | None = None

    def add(self, row: Row, comparison: MeasurementComparison) -> None:
        """Append a row to predictions.csv, visible to readers at once."""
        if self.file is None:
            self.file = open(self.place.predictions, "a", encoding="utf-8")  # noqa: SIM115
            if not self.file.tell():
                self.file.write(history.csv_line(COLUMNS))
        numbers = (getattr(comparison, name) for name in NUMBERS)
        cells = [str(row.row), *(f"{number:.5g}" for number in numbers)]
        self.file.write(history.csv_line(cells))
        self.file.flush()
        if comparison.record is not None:
            self.last = (row, comparison)

    def save(self) -> None:
        """Write records.csv, where a record was measured since it was last written."""
        if self.last is None:
            return
        row, comparison = self.last
        assert comparison.record is not None
        header = {"row": row.row, "iteration": row.iteration}
        tables.write(self.place.records, comparison.record.to_columns(), header, digits=6)
        self.last = None

    def close(self) -> None:
        """Close predictions.csv."""
        if self.file is not None:
            self.file.close()


def truncate(place: RunFolder, last: int) -> None:
    """Keep rows 0 … last of predictions.csv, if there is one."""
    if place.predictions.exists():
        history.truncate_numbers(place.predictions, COLUMNS, last)


def remove(place: RunFolder) -> None:
    """Remove both files."""
    place.predictions.unlink(missing_ok=True)
    place.records.unlink(missing_ok=True)
