"""A whole calibration: noise, drift and residuals of one recording, in the order in which they need each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fluctua.core import check
from fluctua.core.diffusion import diffusion_matrix
from fluctua.core.local_linear import euler, local_linear
from fluctua.core.types import Estimate, Params, Process
from fluctua.insitu.calibration.drift import Fit, Transition
from fluctua.insitu.calibration.fit import fit_both
from fluctua.insitu.calibration.hidden import observed_model, visibility
from fluctua.insitu.calibration.network_model import linear_model
from fluctua.insitu.calibration.noise import NoiseFit
from fluctua.insitu.calibration.residuals import ResidualReport, examine_residuals
from fluctua.insitu.estimating import SCORES, estimate
from fluctua.insitu.recording import system
from fluctua.insitu.recording.model import RecordingModel
from fluctua.insitu.recording.reader import RecordingFile


class Calibration(NamedTuple):
    """fit: the drift. expected: its parameters as they were set. noise: with the fitted drift. model_diffusion: Q that
    the model has (M,). residuals: of the model as it was set, None where channels are hidden. estimate: the gradient,
    beside which its bias is to be read.
    """

    fit: Fit
    expected: Params
    noise: NoiseFit
    model_diffusion: np.ndarray
    residuals: ResidualReport | None
    estimate: Estimate | None
    transition: str = "euler"


def calibrate(
    recording: RecordingFile,
    model: RecordingModel,
    *,
    transition: str = "euler",
    bias: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Calibration:
    """Calibrate from one recording of a network, or of any process of `model_of(recording, source)`.

    transition: "euler", or "local-linear" for samples far apart. bias: whether to examine the residuals against the
    state and what they do to the gradient, which takes about as long as the gradient.

    >>> with open_recording("run.nc") as recording:
    ...     calibration = calibrate(recording, model_of(recording))
    """
    say = progress or (lambda text: None)
    laws: dict[str, Transition] = {"euler": euler, "local-linear": local_linear}
    if transition not in laws:
        raise ValueError(f"`transition` must be one of {', '.join(laws)}; got {transition!r}.")
    if recording.count < 2:
        raise ValueError(
            f"{recording.path} has {recording.count} complete trajectories; a calibration needs two at least."
        )
    law = laws[transition]
    process, theta = check.process(model.process), check.parameters(model.theta)
    fitted, start = process, theta
    if recording.description.network and model.observed is not None:
        linear = linear_model(system.task_of(recording.description), theta)
        fitted, start = check.process(linear.process), check.parameters(linear.theta)
    usable = None
    if model.hidden:
        assert model.observed is not None
        assert model.size is not None
        if transition != "euler":
            raise ValueError(
                "with hidden channels only Euler's transition is known; sample faster, or observe them all."
            )
        one = _first_context(recording)
        view = visibility(fitted, None, start, model.observed, model.size, context=one)
        usable = view.usable[model.observed]
        fitted, _ = observed_model(fitted, None, tuple(map(int, model.observed)), model.size)
        fitted = check.process(fitted)
    fit, noise = fit_both(recording, fitted, start, transition=law, usable=usable, progress=say)
    expected_q = _model_diffusion(recording, fitted, start)
    report = found = None
    if bias and not model.hidden:
        say("residuals")
        report = examine_residuals(
            recording, process, model.objective, theta, components=recording.description.components, transition=law,
            noisy_states=noise.observation_seen,
        )  # fmt: skip
        say("gradient")
        blur = np.maximum(noise.observation_variance, 0) if noise.observation_seen else None
        found = estimate(
            recording, process, model.objective, theta, score=SCORES[transition], observation_noise=blur
        ).estimate
    return Calibration(fit, start, noise, expected_q, report, found, transition)


def _first_context(recording: RecordingFile) -> Any:
    rows = recording.trajectories(0, 1, load=True).context
    return None if rows is None else {name: leaf[0] for name, leaf in rows.items()}


def _model_diffusion(recording: RecordingFile, process: Process, theta: Params) -> np.ndarray:
    """Q of the model at the first sample that is not the start. (M,)"""
    x = np.asarray(recording.trajectories(0, 1, load=True).x)[0, 1]
    q = diffusion_matrix(process, theta, x, recording.t[1], _first_context(recording))
    return np.diag(np.asarray(q, float))
