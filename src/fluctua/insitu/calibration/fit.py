"""Noise and drift of one set of trajectories, in the order in which they need each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fluctua.core.local_linear import euler
from fluctua.core.types import Params, Process, Trajectories
from fluctua.insitu.calibration.drift import Fit, Transition, fit_drift
from fluctua.insitu.calibration.noise import NoiseFit, fit_noise
from fluctua.insitu.recording.reader import RecordingFile

ROUNDS = 4
ALIKE = 0.02
"""Relative change of the weights that is let pass: it changes the errors by half of that."""


class Fitted(NamedTuple):
    """drift: its parameters with errors. noise: what the residuals of that drift say."""

    drift: Fit
    noise: NoiseFit


def fit_both(
    source: RecordingFile | Trajectories,
    process: Process,
    theta: Params,
    *,
    transition: Transition = euler,
    usable: np.ndarray | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Fitted:
    """Drift and noise, starting from `theta`. usable: (M,) components whose residual is known, if channels are hidden.

    A rough noise first, whose whole variance Q + s²/Δt is the weight of an increment, and which tells whether the
    states carry observation noise; then the drift; then the noise about that drift. Where `theta` was far off, what
    its drift lacked sat in the rough noise, made weights and errors too large, and hid observation noise: both are then
    fitted again with the noise that was found.

    >>> fit_both(Trajectories(t, x), model.process, model.theta).drift.theta["omega"]
    """
    progress("noise")
    noise = fit_noise(source, process, theta, transition=transition, usable=usable)
    for _ in range(ROUNDS):
        progress("drift")
        before = noise
        drift = fit_drift(
            source, process, theta, transition=transition, diffusion=before.quadratic_variation, usable=usable,
            noisy_states=before.observation_seen,
        )  # fmt: skip
        theta = drift.theta
        progress("noise")
        # a small sample may leave nothing of Q after s² is taken off; the scale is then the whole variation
        scale = np.where(before.diffusion > 0, before.diffusion, before.quadratic_variation)
        noise = fit_noise(source, process, theta, transition=transition, diffusion=scale, usable=usable)
        if _alike(before, noise):
            break
    return Fitted(drift, noise)


def _alike(a: NoiseFit, b: NoiseFit) -> bool:
    """Whether the drift would be fitted in the same way with either."""
    weights = b.quadratic_variation / a.quadratic_variation
    return a.observation_seen == b.observation_seen and bool(np.all(np.abs(weights - 1) < ALIKE))
