"""What in-situ training has to know of an experiment: its knobs, its process, its reward, how to calibrate it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fluctua.core.types import Array, Objective, Params, Process, Trajectories
from fluctua.insitu.instrument.substrate import Head


class DeviceFit(NamedTuple):
    """values: a dictionary of arrays, the context of the process. report: for a reader; kept as calibration.txt."""

    values: dict[str, Array]
    report: str = ""


class Model(NamedTuple):
    """An experiment.

    process: drift and noise as functions of the settings; its context is one row of the calibration. start: settings to
    begin at. lower, upper: bounds of the settings. probe: rng -> settings for the calibration. calibrate: from
    [(settings, trajectories), …] to a `DeviceFit`. follow: (values, settings, trajectories) -> the values after those
    trajectories; None if they stay as they are. points: samples a trajectory. head: of the recordings, so that they can
    be estimated and calibrated by themselves; without one they hold states and settings.
    """

    process: Process
    objective: Objective
    start: Params
    lower: Params
    upper: Params
    probe: Callable[[np.random.Generator], Params]
    calibrate: Callable[[list[tuple[Params, Trajectories]]], DeviceFit]
    follow: Callable[[dict[str, Array], Params, Trajectories], dict[str, Array]] | None = None
    points: int | None = None
    head: Head | None = None
