"""Fits of drift and noise, each with what the other needs, and the calibration of a recording."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fluctua.core import check, scores
from fluctua.core.arrays import Params
from fluctua.core.diffusion import diffusion_matrix
from fluctua.core.display.fields import show_fields
from fluctua.core.likelihood import drift as drift_fits
from fluctua.core.likelihood import guard as residual_guard
from fluctua.core.likelihood import interval, regression, sources
from fluctua.core.likelihood import noise as noise_fits
from fluctua.core.process import Process
from fluctua.insitu import continuing as long_records
from fluctua.insitu import estimating, hidden, splitting
from fluctua.insitu.calibrate.network import make_linear_model
from fluctua.insitu.recording import model as models
from fluctua.insitu.recording.reader import RecordingFile

ROUNDS = 4
ALIKE = 0.02
"""Relative change of the weights that ends the rounds: it changes the errors by half of that."""


class SystemFit(NamedTuple):
    """Fits of drift and noise.

    drift: its parameters with errors.
    noise: of the residuals of that drift.
    """

    drift: drift_fits.DriftFit
    noise: noise_fits.NoiseFit


def fit_system(
    source: sources.Source,
    process: Process,
    theta: Params,
    *,
    transition: residual_guard.Transition = scores.euler,
    usable: np.ndarray | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> SystemFit:
    """Fit drift and noise of a process to trajectories.

    A rough noise first, whose whole variance Q + s²/Δt is the weight of an increment, and which
    shows whether the states carry observation noise; then the drift; then the noise about that
    drift. If `theta` is far off, the error of its drift is part of the rough noise, makes weights
    and errors too large, and hides observation noise: both are then fitted again with the noise
    that was found.

    Args:
        source: trajectories or an open recording.
        process: drift and noise of the system.
        theta: parameters to start from.
        transition: law of one step, `fluctua.scores.euler` or `local_linear`.
        usable: (M,) components whose residual is known, if channels are hidden.
        progress: called with what is fitted next, "noise" or "drift".

    Returns: a `SystemFit`, with the fits of drift and noise.

    >>> trajectories = recording.trajectories(load=True)
    >>> fit = insitu.calibrate.fit_system(trajectories, model.process, model.theta)
    >>> fit.drift.stderr["omega"].shape, fit.noise.diffusion.shape
    ((6,), (12,))
    """
    progress("noise")
    noise = noise_fits.fit_noise(source, process, theta, transition=transition, usable=usable)
    for _ in range(ROUNDS):
        progress("drift")
        before = noise
        drift = drift_fits.fit_drift(
            source,
            process,
            theta,
            transition=transition,
            diffusion=before.quadratic_variation,
            usable=usable,
            noisy_states=before.observation_seen,
        )
        theta = drift.theta
        progress("noise")
        # a small sample may leave nothing of Q after s² is taken off; the scale is then the whole
        # variation
        scale = np.where(before.diffusion > 0, before.diffusion, before.quadratic_variation)
        noise = noise_fits.fit_noise(
            source, process, theta, transition=transition, diffusion=scale, usable=usable
        )
        if _are_alike(before, noise):
            break
    return SystemFit(drift, noise)


def _are_alike(a: noise_fits.NoiseFit, b: noise_fits.NoiseFit) -> bool:
    """Whether the drift would be fitted in the same way with either."""
    noisy = a.quadratic_variation > 0  # the others have no weight in either
    weights = b.quadratic_variation[noisy] / a.quadratic_variation[noisy]
    return a.observation_seen == b.observation_seen and bool(np.all(np.abs(weights - 1) < ALIKE))


# -------------------------------------------------------------------------------- a whole recording


@show_fields
class Calibration(NamedTuple):
    """Calibration of one recording.

    fit: of the drift.
    expected: parameters of the drift as they were set.
    noise: with the fitted drift.
    model_diffusion: Q of the model (M,).
    residuals: of the model as it was set; None where channels are hidden.
    estimate: the gradient, beside which its bias is to be read.
    transition: law of one step, "euler" or "local-linear".
    defect: whether Euler's interval explains the residuals; None for another transition or where
        channels are hidden.
    guard: whether the residuals are the noise of the model as it was set.
    stretches: the pieces of one long record; else None.
    """

    fit: drift_fits.DriftFit
    expected: Params
    noise: noise_fits.NoiseFit
    model_diffusion: np.ndarray
    residuals: regression.ResidualReport | None
    estimate: estimating.estimates.Estimate | None
    transition: str = "euler"
    defect: interval.EulerDefect | None = None
    guard: residual_guard.Residuals | None = None
    stretches: splitting.SplitRecord | None = None


def calibrate_recording(
    recording: RecordingFile,
    model: models.RecordingModel,
    *,
    transition: str = "euler",
    bias: bool = True,
    continuing: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Calibration:
    """Calibrate drift and noise from one recording, of a network or of any process.

    Args:
        recording: an open one.
        model: what `load_model(recording)` gives.
        transition: "euler", or "local-linear" for samples far apart.
        bias: whether to examine the residuals against the state and what they do to the gradient,
            which takes about as long as the gradient.
        continuing: one long record of a steady state, or a few, which is cut into stretches; its
            gradient is that of the long-run average. A recording of one trajectory is always cut.
        progress: (what is being done) -> None.

    Returns: drift, noise and residuals.

    >>> calibration = insitu.calibrate.calibrate_recording(recording, model, bias=False)
    >>> calibration.fit.theta["omega"].shape, calibration.noise.diffusion.shape
    ((6,), (12,))
    """
    show = progress or (lambda text: None)
    laws: dict[str, residual_guard.Transition] = {
        "euler": scores.euler,
        "local-linear": scores.local_linear,
    }
    if transition not in laws:
        raise ValueError(f"`transition` (--score) is one of {', '.join(laws)}; got {transition!r}.")
    if recording.count < 1:
        raise ValueError(
            f"{recording.path} has 0 complete trajectories: there is nothing to calibrate from."
        )
    require_diffusion(model.process, "a calibration measures drift and noise")
    assert isinstance(model.process, Process)
    law = laws[transition]
    record = recording
    pieces = None
    if continuing or recording.count == 1:
        pieces = splitting.split_record(recording, model)
        recording = pieces.recording
    theta = check.parameters(model.theta)
    process = (
        check.process(model.process)
        if model.hidden
        else sources.mark_noiseless(recording.trajectories(), model.process, theta)
    )
    fitted = process
    start = theta
    if record.description.network and model.observed is not None:
        linear = make_linear_model(models.build_task(record.description), theta)
        fitted = check.process(linear.process)
        start = check.parameters(linear.theta)
    usable = None
    if model.hidden:
        assert model.observed is not None
        assert model.size is not None
        if transition != "euler":
            raise ValueError(
                "with hidden channels only Euler's transition is known; sample faster, or "
                "observe them all."
            )
        context = _read_first_context(recording)
        view = hidden.visibility(fitted, None, start, model.observed, model.size, context=context)
        usable = view.usable[model.observed]
        fitted, _ = hidden.make_observed_model(
            fitted, None, tuple(map(int, model.observed)), model.size
        )
        fitted = check.process(fitted)
    fit, noise = fit_system(recording, fitted, start, transition=law, usable=usable, progress=show)
    expected_q = _compute_model_diffusion(recording, fitted, start)
    report = gradient = defect = None
    if (
        transition == "euler"
        and process.integrator == "euler"
        and not model.hidden
        and not noise.observation_seen
    ):
        defect = interval.measure_euler_defect(recording, process, theta, noise.quadratic_variation)
    guard = None
    blur = np.maximum(noise.observation_variance, 0) if noise.observation_seen else None
    if not model.hidden:
        # not every step: how far the settings are off is the result of the fit
        guard = residual_guard.examine_batch(
            process, theta, recording.trajectories(), transition=law, readout=blur
        ).residuals
    if bias and not model.hidden and pieces is not None:
        show("gradient and residuals")
        report, gradient = _examine_long_run(record, pieces, process, model, transition, law, blur)
    elif bias and not model.hidden:
        show("residuals")
        report = regression.examine_residuals(
            recording,
            process,
            model.objective,
            theta,
            components=recording.description.components,
            transition=law,
            usable=~np.isin(np.arange(recording.x.shape[2]), process.noiseless),
            noisy_states=noise.observation_seen,
        )
        show("gradient")
        with warnings.catch_warnings():  # the report says it in its own words
            warnings.filterwarnings("ignore", "the recording is not of this process")
            gradient = estimating.estimate(
                recording,
                process,
                model.objective,
                theta,
                score=estimating.SCORES[transition],
                observation_noise=blur,
            ).estimate
    return Calibration(
        fit, start, noise, expected_q, report, gradient, transition, defect, guard, pieces
    )


def _examine_long_run(
    record: RecordingFile,
    pieces: splitting.SplitRecord,
    process: Process,
    model: models.RecordingModel,
    transition: str,
    law: residual_guard.Transition,
    blur: np.ndarray | None,
) -> tuple[regression.ResidualReport, estimating.estimates.Estimate]:
    """Examine residuals and their bias of the gradient of the long-run average, over one window."""
    with warnings.catch_warnings():  # the report says it in its own words
        warnings.filterwarnings("ignore", "the trajectories are not those of the process")
        try:
            answer = long_records.estimate_continuing(
                record, model, score=transition, observation_noise=blur
            )
        except ValueError as error:
            raise ValueError(
                f"{error} Without the gradient and its bias: --set bias=false."
            ) from None
    assert answer.continuing is not None
    window = max(1, round(answer.continuing.window / float(np.mean(np.diff(record.t)))))
    longer = record.cut(max(len(pieces.recording.t) - 1, 4 * window))
    report = regression.examine_residuals(
        longer,
        process,
        long_records.make_long_run_reward(record, model),
        model.theta,
        window=window,
        components=record.description.components,
        transition=law,
        noisy_states=blur is not None,
    )
    return report, answer.estimate


def require_diffusion(process: Any, what: str) -> None:
    """Refuse a process that is not a diffusion."""
    if not isinstance(check.process(process), Process):
        raise ValueError(
            f"{what} of an Itô process; {type(process).__name__} has neither. `fluctua estimate` "
            "takes its events as they are, with the rates of the model."
        )


def _read_first_context(recording: RecordingFile) -> Any:
    rows = recording.trajectories(0, 1, load=True).context
    return None if rows is None else {name: leaf[0] for name, leaf in rows.items()}


def _compute_model_diffusion(
    recording: RecordingFile, process: Process, theta: Params
) -> np.ndarray:
    """Q of the model at the first sample that is not the start. (M,)"""
    x = np.asarray(recording.trajectories(0, 1, load=True).x)[0, 1]
    q = diffusion_matrix(process, theta, x, recording.t[1], _read_first_context(recording))
    return np.diag(np.asarray(q, float))
