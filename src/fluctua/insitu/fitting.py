"""Noise and drift of one set of trajectories, in the order in which they need each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fluctua.insitu.drift_fit import Fit, Transition, fit_drift
from fluctua.insitu.noise_fit import NoiseFit, fit_noise
from fluctua.insitu.reader import RecordingFile
from fluctua.local_linear import euler
from fluctua.types import Params, Process, Trajectories


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
    states carry observation noise; then the drift; then the noise about that drift.

    >>> fit_both(Trajectories(t, x), model.process, model.theta).drift.theta["omega"]
    """
    progress("noise")
    rough = fit_noise(source, process, theta, transition=transition)
    progress("drift")
    drift = fit_drift(
        source, process, theta, transition=transition, diffusion=rough.quadratic_variation, usable=usable,
        noisy_states=rough.observation_seen,
    )  # fmt: skip
    progress("noise")
    # a small sample may leave nothing of Q after s² is taken off; the scale is then the whole variation
    scale = np.where(rough.diffusion > 0, rough.diffusion, rough.quadratic_variation)
    return Fitted(drift, fit_noise(source, process, drift.theta, transition=transition, diffusion=scale))
