"""Derive what a training needs to calibrate the unknowns of a process as it goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fluctua.core.arrays import Array, Params
from fluctua.core.estimator import ppgt
from fluctua.core.objective import Objective, Rewards
from fluctua.core.process import Process
from fluctua.core.simulate import simulator
from fluctua.core.trajectories import Trajectories
from fluctua.core.twin.correction import Twin
from fluctua.insitu.translation import translate_process, translate_rewards
from fluctua.insitu.unknowns import Unknown, Values, join, list_starts, separate
from fluctua.learn.observed_twin import make_observed_twin
from fluctua.processes.observed import Observed


class SelfCalibration(NamedTuple):
    """Parts of a `fluctua.SelfCalibrating` whose training calibrates as it goes.

    model: an estimator with a twin in the parameters p.
    effective: (settings, φ) -> p.
    start: φ by the data sheet.
    spread: standard deviations of φ about that.
    context: φ -> the context of the process.
    every: steps of which one counts for the information.
    refit: see `fluctua.SelfCalibrating`.
    readout: standard deviation of the readout on each component, where a plan gives none.
    returns: (settings, trajectories) -> returns (E,), where they do not follow from the states.
    required: whether there is no other way to train, as records do not hold the states.
    """

    model: Any
    effective: Callable[[Params, Params], Params]
    start: Params
    spread: Params
    context: Callable[[Params], Values]
    every: int = 1
    refit: float = 1.0
    readout: float = 0.0
    returns: Callable[[Params, Trajectories], Any] | None = None
    required: bool = False


def derive_self_calibration(
    process: Process | Observed,
    objective: Objective | Rewards,
    unknowns: Mapping[str, Unknown],
    x0: Array,
    t: Array,
) -> SelfCalibration:
    """Derive what a training needs to calibrate the unknowns of a process as it goes.

    Args:
        process: drift and noise as functions of settings, its context being the unknowns; with
            what is read of it, if that is not the whole state.
        objective: rewards, of what is read.
        unknowns: by name, with spreads.
        x0: state at which trajectories start, (M,).
        t: times of the samples, (T+1,).

    Returns: an estimator in settings and unknowns, with start and spreads.
    """
    rewards: Any = translate_rewards(objective, separate)
    joined = translate_process(process, separate)
    twin: Any
    if isinstance(process, Observed):
        twin = make_observed_twin(joined, rewards, x0, t)
    else:
        twin = ppgt(simulator(joined, x0, t), rewards, baseline=Twin())
    spread = {name: unknown.spread for name, unknown in unknowns.items()}
    return SelfCalibration(twin, join, list_starts(unknowns), spread, as_context)


def as_context(values: Params) -> Values:
    """Unknowns as the context of a process."""
    return {name: np.asarray(value) for name, value in values.items()}
