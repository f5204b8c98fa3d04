"""What in-situ training has to know of an experiment: its knobs, its process, its reward, how to
calibrate it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fluctua.core import check
from fluctua.core.arrays import Array, Params
from fluctua.core.integrators import step_at
from fluctua.core.objective import Objective, Rewards
from fluctua.core.process import NoiseProduct, Process
from fluctua.core.trajectories import Trajectories
from fluctua.insitu.instrument.substrate import Head


class DeviceFit(NamedTuple):
    """values: a dictionary of arrays, the context of the process. report: for a reader; kept as
    calibration.txt.
    """

    values: dict[str, Array]
    report: str = ""


class Unknown(NamedTuple):
    """What `fluctua.SelfCalibrating` is made from, where the trajectories of a training calibrate
    too.

    model: an estimator with a twin in the parameters p. effective: (settings, φ) -> p. start,
    spread: φ by the data sheet, and how far the instrument may be from it, standard deviations.
    context: φ -> the context of the process.
    every: steps of which one counts for the information.
    """

    model: Any
    effective: Callable[[Params, Params], Params]
    start: Params
    spread: Params
    context: Callable[[Params], dict[str, Array]]
    every: int = 1


class Model(NamedTuple):
    """An experiment.

    process: drift and noise as functions of the settings; its context is one row of the
    calibration. start: settings to begin at. lower, upper: bounds of the settings. probe: rng ->
    settings for the calibration. calibrate: from [(settings, trajectories), …] to a `DeviceFit`.
    follow: (values, settings, trajectories) -> the values after those trajectories; None if they
    stay as they are. points: samples a trajectory. head: of the recordings, so that they can be
    estimated and calibrated by themselves; without one they hold states and settings. correct: (θ,
    values of a device) -> the settings at which it does θ, for arrays of devices that share
    parameters; see `corrected`.
    unknown: for a training that calibrates as it goes; None if there is only the calibration at
    probes. steps: factors on the learning rate, a prefix of the settings, where some are of another
    size; None for one rate. channels: components of a sample; None takes those of the first batch.
    """

    process: Process
    objective: Objective | Rewards
    start: Params
    lower: Params
    upper: Params
    probe: Callable[[np.random.Generator], Params]
    calibrate: Callable[[list[tuple[Params, Trajectories]]], DeviceFit]
    follow: Callable[[dict[str, Array], Params, Trajectories], dict[str, Array]] | None = None
    points: int | None = None
    head: Head | None = None
    correct: Callable[[Params, dict[str, Array]], Params] | None = None
    unknown: Unknown | None = None
    steps: Params | None = None
    channels: int | None = None


@dataclass(frozen=True)
class _AtSettings:
    """A function of the settings as one of θ; equal ones share a compilation. place: of the
    calibration after θ.
    """

    function: Callable[..., Any]
    correct: Callable[..., Params]
    place: int

    def __call__(self, theta: Params, *state: Any) -> Any:
        return self.function(self.correct(theta, state[self.place]), *state)


def corrected(model: Model) -> Model:
    """The experiment as a function of what its devices are to do, not of their settings, which
    follow from it.

    μ(θ, x) = μ(u(θ, calibration), x) with u = `model.correct`: the process of an array of devices
    that differ and share parameters. Start and bounds are taken for θ as they are; settings stay
    within them too, where `correct` sees to it.
    """
    if model.correct is None:
        raise ValueError(
            "this model does not say how a device is set to do given parameters: it has no "
            "`correct`. Give one, or let "
            "the devices share settings."
        )
    process = check.process(model.process)
    rewards = check.objective(model.objective)
    correct = model.correct

    def at(function: Any, place: int) -> Any:
        return None if function is None else _AtSettings(function, correct, place)

    noise = process.noise
    noise = (
        noise._replace(product=at(noise.product, 2))
        if isinstance(noise, NoiseProduct)
        else at(noise, 2)
    )
    step = step_at(process.step, correct)
    return model._replace(
        process=process._replace(
            drift=at(process.drift, 2), noise=noise, diffusion=at(process.diffusion, 2), step=step
        ),
        objective=Rewards(*(at(reward, -1) for reward in rewards)),
    )
