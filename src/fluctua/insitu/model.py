"""An experiment for in-situ training: its process, its reward, its knobs and its unknowns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fluctua.core.arrays import Array, Params
from fluctua.core.display.fields import show_fields
from fluctua.core.objective import Objective, Rewards
from fluctua.core.process import Process
from fluctua.core.trajectories import Trajectories
from fluctua.insitu import translation
from fluctua.insitu.instrument.archive import Head
from fluctua.insitu.instrument.visit import ExpectedRecord
from fluctua.insitu.self_calibration import SelfCalibration, derive_self_calibration
from fluctua.insitu.unknowns import (
    DeviceFit,
    Runs,
    Unknown,
    Values,
    fit_unknowns,
)
from fluctua.processes.observed import Observed


class Range(NamedTuple):
    """Lowest and highest value of a setting."""

    low: float
    high: float

    def halve(self) -> Range:
        """Half of the range, about its middle."""
        quarter = (self.high - self.low) / 4
        return Range(self.low + quarter, self.high - quarter)


class Knob(NamedTuple):
    """One setting of an instrument, or an array of settings of one kind.

    start: where training begins, a number or an array.
    bounds: (low, high) of the training.
    probe: (low, high) between which settings of the calibration are drawn; half of the bounds about
        their middle if not given.
    learning_rate_scale: factor on the learning rate, for a setting of another size.

    >>> voltage = insitu.Knob(0.0, bounds=(0.0, 5.0))
    >>> phases = insitu.Knob(np.zeros(8), bounds=(-3.14, 3.14), learning_rate_scale=0.1)
    """

    start: Any
    bounds: tuple[float, float]
    probe: tuple[float, float] | None = None
    learning_rate_scale: float = 1.0


class Methods(NamedTuple):
    """Methods of a model that replace those that `Model` derives, to be faster or more accurate.

    calibrate: from [(settings, trajectories), …] to a `DeviceFit`.
    follow: (values, settings, trajectories) -> the values after those trajectories. Without one
        they stay as they were calibrated.
    correct: (θ, values of a device) -> the settings at which it does θ, for arrays of devices that
        share parameters; see `share_parameters`.
    self_calibration: for a training that calibrates as it goes.
    head: (batch, settings) -> the head of a recording. Without one a file holds states and
        settings.

    >>> def calibrate(runs):  # [(settings, trajectories), …]; force 1 moves the mean to the gain
    ...     gain = np.mean([r.x[:, -1].mean() / (s["force"] * 0.632) for s, r in runs])
    ...     return insitu.DeviceFit({"gain": gain}, report=f"gain {gain:.2f}")
    >>> fast = model._replace(methods=insitu.Methods(calibrate=calibrate))
    """

    calibrate: Callable[[Runs], DeviceFit] | None = None
    follow: Callable[[Values, Params, Trajectories], Values] | None = None
    correct: Callable[[Params, Values], Params] | None = None
    self_calibration: SelfCalibration | None = None
    head: Head | None = None


@show_fields
class Model(NamedTuple):
    """An experiment: what it does, what is rewarded, what can be set, and what is not known.

    Args:
        process: drift and noise as functions of the settings, {name of a knob: value}. Its context
            holds the unknowns, {name: value}, and what the instrument recorded with a trajectory.
            A `fluctua.Observed` if the instrument does not read the whole state.
        objective: rewards.
        knobs: settings by name, with bounds.
        unknowns: quantities of the process by name, with spreads: offsets, gains, losses.
        x0: state at which trajectories start, (M,). Needed by calibration="training"; else its
            size is that of a sample.
        t: times of the samples, (T+1,). Needed by calibration="training"; else records with other
            times are refused.
        channels: components of a sample; what is observed, the size of `x0`, or those of the first
            batch, if not given.
        methods: ways of the model's own.

    >>> def drift(settings, x, t, unknowns):
    ...     return settings["force"] * unknowns["gain"] - x
    >>> model = insitu.Model(
    ...     process=fl.Process(drift, lambda settings, x: 0.3 * jnp.ones_like(x)),
    ...     objective=fl.Objective(running=lambda settings, x: x[0]),
    ...     knobs={"force": insitu.Knob(0.0, bounds=(-1.0, 1.0))},
    ...     unknowns={"gain": insitu.Unknown(1.0, spread=0.2)},
    ... )
    """

    process: Process | Observed
    objective: Objective | Rewards
    knobs: Mapping[str, Knob]
    unknowns: Mapping[str, Unknown]
    x0: Array | None = None
    t: Array | None = None
    channels: int | None = None
    methods: Methods = Methods()

    @property
    def start(self) -> Params:
        """Settings at which training begins."""
        real = jnp.result_type(float)
        return {name: jnp.asarray(knob.start, real) for name, knob in self.knobs.items()}

    @property
    def lower(self) -> Params:
        """Lower bounds of the settings."""
        return {name: knob.bounds[0] for name, knob in self.knobs.items()}

    @property
    def upper(self) -> Params:
        """Upper bounds of the settings."""
        return {name: knob.bounds[1] for name, knob in self.knobs.items()}

    @property
    def learning_rate_scale(self) -> Params | None:
        """Factors on the learning rate; None where they are all one."""
        scales = {name: knob.learning_rate_scale for name, knob in self.knobs.items()}
        return None if all(scale == 1.0 for scale in scales.values()) else scales

    @property
    def expected(self) -> ExpectedRecord:
        """Channels and times that a record of the instrument must have."""
        channels = self.channels
        if channels is None and isinstance(self.process, Observed):
            channels = len(self.process.observe)
        elif channels is None and self.x0 is not None:
            channels = int(np.size(self.x0))
        return ExpectedRecord(channels, None if self.t is None else np.asarray(self.t, float))

    def probe(self, rng: np.random.Generator) -> Params:
        """Random settings for a calibration."""
        settings = {}
        for name, knob in self.knobs.items():
            low, high = knob.probe or Range(*knob.bounds).halve()
            settings[name] = rng.uniform(low, high, np.shape(knob.start))
        return settings

    def calibrate(self, runs: Runs) -> DeviceFit:
        """The unknowns, from trajectories at known settings."""
        if self.methods.calibrate is not None:
            return self.methods.calibrate(runs)
        return fit_unknowns(self.process, self.unknowns, runs)

    def find_self_calibration(self) -> SelfCalibration | None:
        """Derive the calibration of a training as it goes; None where `x0` and `t` are missing."""
        if self.methods.self_calibration is not None:
            return self.methods.self_calibration
        if self.x0 is None or self.t is None or not self.unknowns:
            return None
        return derive_self_calibration(self.process, self.objective, self.unknowns, self.x0, self.t)


def share_parameters(model: Model) -> Model:
    """The experiment as a function of what its devices are to do, from which settings follow.

    μ(θ, x) = μ(u(θ, calibration), x) with u = `Methods.correct`: the process of an array of devices
    that differ and share parameters. Start and bounds are taken for θ as they are; settings stay
    within them too, where `correct` sees to it.
    """
    if model.methods.correct is None:
        raise ValueError(
            "this model has no `correct` among its methods: (θ, calibration) -> the settings at "
            "which a device does θ. Give one, or let the devices share settings."
        )
    translate = translation.Corrected(model.methods.correct)
    return model._replace(
        process=translation.translate_process(model.process, translate),
        objective=translation.translate_rewards(model.objective, translate),
    )
