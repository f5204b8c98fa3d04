"""Predictions of a calibrated model before each measurement, compared with the measurement.

Records at a few ports need not identify the unknowns of a device. A model is then judged by its
predictions of the next record and of J.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

COVERED = 2.0
"""Standard errors within which a prediction is right: 95 % are, if the errors are."""


class Prediction(NamedTuple):
    """A prediction and its measurement.

    value, stderr: J that the model expected, with the error of its calibration.
    measured, measured_stderr: the mean return of the measured trajectories.
    misfit: χ² of the records per sample against the noise of the model, 1 expected where the model
        is right; larger while unknowns are uncertain.
    """

    value: float
    stderr: float
    measured: float
    measured_stderr: float
    misfit: float

    @property
    def covers(self) -> bool:
        """Whether the measured J is within `COVERED` standard errors of the expected one."""
        return abs(self.measured - self.value) <= COVERED * np.hypot(
            self.stderr, self.measured_stderr
        )


class RecordComparison(NamedTuple):
    """A measured record beside the one that the model expected before it was used.

    t: times of the samples (K,).
    names: of the components (C,).
    expected, stderr: mean and standard deviation of a sample by the model, (K, C).
    measured: the record, (K, C).
    """

    t: np.ndarray
    names: tuple[str, ...]
    expected: np.ndarray
    stderr: np.ndarray
    measured: np.ndarray

    def to_columns(self) -> dict[str, np.ndarray]:
        """The columns of a table, by name."""
        columns = {"time": self.t}
        for k, name in enumerate(self.names):
            columns[f"{name} expected"] = self.expected[:, k]
            columns[f"{name} stderr"] = self.stderr[:, k]
            columns[f"{name} measured"] = self.measured[:, k]
        return columns


class MeasurementComparison(NamedTuple):
    """Prediction of a calibrated model for one call beside the measurement.

    expected, expected_error: J that the model expected, with the error of its calibration.
    record_chi2: χ² of the records per sample, 1 expected.
    score_chi2: χ² of the score of new trajectories per degree of freedom, 1 expected.
    record: the first record; None for a model that predicts none.

    Numbers are NaN where the call measured nothing or the model does not predict them.
    """

    expected: float = np.nan
    expected_error: float = np.nan
    record_chi2: float = np.nan
    score_chi2: float = np.nan
    record: RecordComparison | None = None


NUMBERS = MeasurementComparison._fields[:-1]
"""Names of the numbers of a `MeasurementComparison`."""


class PredictionScore(NamedTuple):
    """Accuracy of the later half of some predictions.

    number: of predictions.
    covered: share whose interval held the measured J.
    misfit: mean of the misfits.
    error: root mean square of expected less measured J.
    """

    number: int
    covered: float
    misfit: float
    error: float


def score_predictions(predictions: Sequence[Prediction]) -> PredictionScore:
    """Score the later half, when the model has learnt from the earlier one."""
    later = predictions[len(predictions) // 2 :]
    away = [p.value - p.measured for p in later]
    return PredictionScore(
        len(later),
        float(np.mean([p.covers for p in later])),
        float(np.mean([p.misfit for p in later])),
        float(np.sqrt(np.mean(np.square(away)))),
    )
