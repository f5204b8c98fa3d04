"""A resonator network whose knobs and losses are calibrated while it is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from fluctua import tcmt
from fluctua.core.arrays import Params
from fluctua.insitu.calibrate import knobs
from fluctua.insitu.calibrate.network import make_linear_model
from fluctua.insitu.self_calibration import SelfCalibration
from fluctua.insitu.unknowns import Unknown
from fluctua.learn.effective import read_knob
from fluctua.tcmt.coupled_modes import coefficients
from fluctua.tcmt.fused import Fused
from fluctua.tcmt.losses import DriftCalibratedTwin

MAX_STEP = 1e-3
"""Longest Euler step of the model that a training calibrates, in units of 1/κ."""

EVERY = 20
"""Steps of which one counts for the information: features change by 1e-3 per step."""


@dataclass(frozen=True)
class EffectiveKnobs:
    """(settings, φ) -> ω, κ and γ: a line for each knob, and losses that are never negative.

    gamma: losses by the data sheet.
    """

    gamma: tuple[float, ...]

    def __call__(self, theta: Params, phi: Params) -> Params:
        """The parameters of the network at settings and unknowns φ."""
        lines = {name: read_knob(phi, name).set(theta[name]) for name in ("omega", "kappa")}
        return {**lines, "gamma": jnp.asarray(self.gamma, phi["loss"].dtype) * jnp.exp(phi["loss"])}


def make_self_calibration(
    network: tcmt.Network,
    task: tcmt.Task,
    interval: float,
    unknowns: Mapping[str, Unknown],
    settings: Params,
) -> SelfCalibration:
    """A model with offset and gain of each knob and each loss, whose steps divide the interval.

    settings: at which the training begins.
    """
    steps = int(np.ceil(interval / MAX_STEP - 1e-9))
    horizon = float(task.t[-1] - task.t[0])
    fine = tcmt.transmission(
        network,
        horizon=horizon,
        dt=interval / steps,
        drive=tcmt.Drive(0, task.drives[0].amplitude, frequency=10.0),
    )
    effective = EffectiveKnobs(tuple(np.asarray(network.gamma, float).tolist()))

    def context(phi: Params) -> knobs.KnobValues:
        effective_values = effective(settings, {name: jnp.asarray(v) for name, v in phi.items()})
        p = {name: np.asarray(v) for name, v in effective_values.items()}
        drift = make_linear_model(task, p, kerr=False).theta
        own = {name: np.asarray(phi[name], float) for name in phi if name != "loss"}
        noise = {
            "diffusion": coefficients(network, p).amplitude ** 2 / 2,
            "readout": np.zeros(network.sites),
            "readout_seen": np.array(0.0),
        }
        return own | {name: np.asarray(drift[name]) for name in knobs.REST} | noise

    twin = fine.estimator("cpu", baseline="twin")
    assert isinstance(twin, Fused)
    start = {name: unknown.start for name, unknown in unknowns.items()}
    spread = {name: unknown.spread for name, unknown in unknowns.items()}
    return SelfCalibration(DriftCalibratedTwin(twin), effective, start, spread, context, EVERY)
