"""Result of a check of an instrument."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fluctua.core.display.fields import show_fields
from fluctua.core.trajectories import Trajectories
from fluctua.insitu.instrument_check.knobs import DriverSheet, KnobReport
from fluctua.insitu.instrument_check.repeatability import Repeatability
from fluctua.insitu.instrument_check.residuals import ModelComparison

REGULAR = 0.01
"""Relative difference of intervals that are equal."""


class RecordReport(NamedTuple):
    """Shape and rate of a record.

    times: samples per trajectory.
    interval: mean time between two samples.
    regular: whether all intervals are equal.
    channels: names of the components of a sample; numbers where the driver has no names.
    """

    times: int
    interval: float
    regular: bool
    channels: tuple[str, ...]


class PredictedTime(NamedTuple):
    """Seconds that a training takes on the instrument, at least and at most."""

    least: float
    most: float


class Latency(NamedTuple):
    """Seconds that an instrument takes.

    connect: to open it.
    visit: to set, arm and read back, per acquisition.
    trajectory: to run and fetch, per trajectory.
    size: trajectories per acquisition with which the two were measured.
    """

    connect: float
    visit: float
    trajectory: float
    size: float = 1.0

    def predict_seconds(self, acquisitions: int, trajectories: int) -> PredictedTime:
        """Seconds on the instrument for so many acquisitions and trajectories.

        One size does not separate the time per trajectory from that per acquisition. The limits
        are those of an acquisition that takes equally long for any number of trajectories, and of
        one that takes as long as its trajectories together.
        """
        other = self.connect + acquisitions * self.visit
        equal = acquisitions * self.size * self.trajectory
        each = trajectories * self.trajectory
        return PredictedTime(other + min(equal, each), other + max(equal, each))


@show_fields
class InstrumentCheck(NamedTuple):
    """The result of `check_instrument`; parts that were not reached are None.

    problems: why the instrument does not fit its model; empty if it does.
    trajectories: number that were run, discarded ones included.
    identity: of the instrument, as `health` gives it.
    knobs: with bounds and limits.
    record: shape and rate.
    repeatability: of the same setting twice.
    residuals: against the model.
    latency: in seconds.
    notes: remarks that are no problems.
    """

    problems: tuple[str, ...] = ()
    trajectories: int = 0
    identity: str = ""
    knobs: tuple[KnobReport, ...] = ()
    record: RecordReport | None = None
    repeatability: Repeatability | None = None
    residuals: ModelComparison | None = None
    latency: Latency | None = None
    notes: tuple[str, ...] = ()

    @property
    def connected(self) -> bool:
        """Whether the instrument answered."""
        return self.latency is not None

    @property
    def ok(self) -> bool:
        """Whether a training may begin."""
        return not self.problems

    def refuse_problems(self) -> None:
        """Raise `ValueError` with all problems."""
        if self.problems:
            raise ValueError(" ".join(self.problems))


def describe_record(trajectories: Trajectories, sheet: DriverSheet) -> RecordReport:
    """Shape and rate of a record, with names and units of its channels."""
    t = np.asarray(trajectories.t, float)
    steps = np.diff(t)
    size = trajectories.x.shape[2]
    names = sheet.channels if len(sheet.channels) == size else tuple(map(str, range(size)))
    units = [sheet.units.get(name, "") for name in names]
    labels = (
        f"{name} in {unit}" if unit else name for name, unit in zip(names, units, strict=True)
    )
    interval = float(steps.mean())
    regular = bool(np.all(np.abs(steps - interval) <= REGULAR * interval))
    return RecordReport(len(t), interval, regular, tuple(labels))
