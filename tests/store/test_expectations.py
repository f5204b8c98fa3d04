"""What a calibrated model expected, beside the history: begun late, cut back, damaged, replaced."""

import numpy as np
import pytest

from fluctua.learn.predictions import MeasurementComparison, RecordComparison
from fluctua.store import expectations, history, tables
from fluctua.store.folder import RunFolder
from fluctua.store.history import Row


def make_row(number):
    return Row(number, number, 0.1, 0.01, 2, 2 * number, 1.0, 0.1)


def make_record(value):
    samples = np.full((3, 2), value)
    return RecordComparison(np.arange(3.0), ("a", "b"), samples, samples + 1, samples + 2)


def write(place, rows, record=None):
    files = expectations.ExpectationFiles(place)
    for number in rows:
        files.add(
            make_row(number), MeasurementComparison(0.1 * number, score_chi2=1.0, record=record)
        )
    files.save()
    files.close()


def test_rows_of_a_folder_without_earlier_ones_begin_where_it_goes_on(tmp_path):
    place = RunFolder(tmp_path)
    expectations.truncate(place, 6)
    assert not place.predictions.exists()
    write(place, (7, 8, 9))
    names, numbers = history.read_numbers(place.predictions)
    assert names == ["row", "expected", "expected_error", "record_chi2", "score_chi2"]
    assert numbers[:, 0].tolist() == [7, 8, 9]
    assert numbers[:, 1] == pytest.approx([0.7, 0.8, 0.9])
    assert np.isnan(numbers[:, 2:4]).all()
    assert not place.records.exists()
    expectations.truncate(place, 8)
    write(place, (9,))
    assert history.read_numbers(place.predictions)[1][:, 0].tolist() == [7, 8, 9]


def test_the_last_record_is_kept(tmp_path):
    place = RunFolder(tmp_path)
    write(place, (0, 1), make_record(0.5))
    table = tables.read(place.records)
    assert table.header == {"row": 1, "iteration": 1}
    names = ("expected", "stderr", "measured")
    assert list(table.columns) == ["time", *(f"{port} {name}" for port in "ab" for name in names)]
    assert table.columns["b measured"].tolist() == [2.5, 2.5, 2.5]
    write(place, (2,))  # nothing measured: the record stays
    assert tables.read(place.records).header["row"] == 1
    expectations.remove(place)
    assert not place.records.exists()
    assert not place.predictions.exists()
