"""A resonator network that is read at a few resonators and calibrated while it is trained.

A record holds the complex amplitudes at the input and the output, y = [Re ψ, Im ψ] of `sites`. It
has no score of the hidden states, so that there is no training without the calibrated model; its
unknowns follow from the innovations of the records (`fluctua.tcmt.port_records`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluctua import tcmt
from fluctua.core.arrays import Array, Params, PyTree
from fluctua.core.trajectories import Trajectories
from fluctua.insitu.network_self_calibration import EffectiveKnobs
from fluctua.insitu.self_calibration import SelfCalibration, as_context
from fluctua.insitu.translation import OperatingPoint
from fluctua.insitu.unknowns import DeviceFit, Runs, Unknown
from fluctua.learn.self_calibrating import SelfCalibrating
from fluctua.tcmt.fused import Fused
from fluctua.tcmt.port_twin import REFIT, PortTwin
from fluctua.tcmt.sampled_twin import SampledTwin

MAX_STEP = 0.0125
"""Longest step of Heun's method, in units of 1/κ."""

MIN_INTERVAL = 0.05
"""Samples nearer than this are left out of the fit, in units of 1/κ: they add little, and the time
of a fit grows with their cube."""


@dataclass(frozen=True)
class PortReward:
    """Reward rate of a record: that of the network with all other resonators empty.

    rate: (theta, x, t) -> number, which depends on the resonators that are read only.
    sites: resonators that are read.
    resonators: N.
    """

    rate: Any
    sites: tuple[int, ...]
    resonators: int

    def __call__(self, theta: Params, y: Array, t: Array) -> Array:
        """Return the rate at a sample y (2D,)."""
        columns = jnp.array(list_columns(self.sites, self.resonators))
        x = jnp.zeros(2 * self.resonators, y.dtype).at[columns].set(y)
        return self.rate(theta, x, t)


@dataclass(frozen=True)
class PortReturns:
    """(settings, records) -> returns (E,), as measured."""

    reward: PortReward

    def __call__(self, theta: Params, trajectories: Trajectories) -> np.ndarray:
        """Integrate the rate by trapezoids, as Heun's steps of the model do."""
        y = jnp.asarray(trajectories.x)
        rate = jax.vmap(jax.vmap(lambda sample: self.reward(theta, sample, 0.0)))(y)
        t = np.asarray(trajectories.t, np.float64)
        return np.asarray(np.trapezoid(np.asarray(rate, np.float64), t, axis=1))


def list_columns(sites: tuple[int, ...], resonators: int) -> list[int]:
    """Components of the state [Re ψ, Im ψ] that are read."""
    return [*sites, *(resonators + site for site in sites)]


def make_effective(network: tcmt.Network) -> EffectiveKnobs:
    """(settings, φ) -> ω, κ and γ of a network."""
    return EffectiveKnobs(tuple(np.asarray(network.gamma, float).tolist()))


@dataclass(frozen=True)
class KnobPoint:
    """Settings and the unknowns in the context, as the parameters of the network."""

    effective: EffectiveKnobs

    def __call__(self, settings: Params, context: PyTree) -> OperatingPoint:
        """The operating point."""
        return OperatingPoint(self.effective(settings, context), None)


def make_port_self_calibration(
    task: tcmt.Task,
    unknowns: Mapping[str, Unknown],
    readout: float,
    returns: PortReturns,
) -> SelfCalibration:
    """A model with offset and gain of each knob and each loss, from records at the ports.

    Args:
        task: of the network, on the times of the samples.
        unknowns: with spreads.
        readout: standard deviation of the readout on each quadrature, by the data sheet.
        returns: of records.

    Returns: what the training needs, which is required: there is no other way to train.
    """
    network = task.network
    interval = float(task.t[1] - task.t[0])
    fine = tcmt.transmission(
        network,
        horizon=float(task.t[-1] - task.t[0]),
        dt=interval / int(np.ceil(interval / MAX_STEP - 1e-9)),
        drive=tcmt.Drive(0, task.drives[0].amplitude, frequency=10.0),
        integrator="heun",
    )
    fused = fine.estimator("cpu", baseline="twin")
    assert isinstance(fused, Fused)
    thin = max(int(MIN_INTERVAL / interval + 1e-9), 1)
    return SelfCalibration(
        PortTwin(SampledTwin(fused), returns.reward.sites, thin),
        make_effective(network),
        {name: unknown.start for name, unknown in unknowns.items()},
        {name: unknown.spread for name, unknown in unknowns.items()},
        as_context,
        refit=REFIT,
        readout=readout,
        returns=returns,
        required=True,
    )


@dataclass(frozen=True)
class PortCalibration:
    """From records at known settings to the values of the process: `Methods.calibrate`."""

    own: SelfCalibration

    def __call__(self, runs: Runs) -> DeviceFit:
        """The most probable unknowns."""
        own = self.own
        device: Any = None  # records are given, and none are taken
        estimator = SelfCalibrating(
            own.model,
            device,
            own.effective,
            own.start,
            own.spread,
            refit=own.refit,
            readout=own.readout,
            on_doubt="continue",
        )
        for settings, trajectories in runs:
            estimator.learn(settings, trajectories)
        return DeviceFit(own.context(estimator.phi), f"{estimator.calibration!r}\n")
