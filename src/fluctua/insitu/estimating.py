"""The gradient from a recording, which may be larger than memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fluctua.core import baselines, check, estimator, scores
from fluctua.core import estimate as estimates
from fluctua.core import process as processes
from fluctua.core.arrays import Params
from fluctua.core.likelihood import guard
from fluctua.core.objective import Objective
from fluctua.core.recorded import cut_before_stops
from fluctua.insitu import chunk_sums, hidden
from fluctua.insitu import readout as corrections
from fluctua.insitu.filter_choice import choose_filter
from fluctua.insitu.recording.model import RecordingModel
from fluctua.insitu.recording.reader import RecordingFile
from fluctua.processes.control_variates import FittedControl
from fluctua.processes.stationary import Stationary
from fluctua.scale import parts as partial_sums

CHUNK_BYTES = 256 * 2**20
SCORES: dict[str, processes.Score] = {
    "euler": scores.full_score,
    "local-linear": scores.local_linear_score,
}
"""Scores by the name of their transition."""
TRANSITIONS: dict[processes.Score, guard.Transition] = {
    scores.full_score: scores.euler,
    scores.local_linear_score: scores.local_linear,
}
AUTO = "auto"
"""Instead of a name in `SCORES`: the transition of the file's calibration, else Euler's."""
BASELINES = ("none", "time", "mean", "optimal", "twin")
"""Those of `fluctua.core.baselines.TABLE` that a recording can serve."""
FILTER = "filter"


class RecordingEstimate(NamedTuple):
    """The gradient from a recording, and what it rests on.

    estimate: NaN where a parameter is not trainable.
    view: what the observed channels allow, if some are hidden; None where a filter helps.
    parts: (PARTS, P), estimates from every tenth trajectory, with the baselines "time" and "none";
        else None.
    residuals: whether they are the noise of the process, where all channels are there; `cause` is
        what is wrong.
    continuing: of a long-run average (`insitu.estimate_continuing`), what the estimate rests on.
    score: where the recording holds less than the state, `FILTER` or why there is none; else empty.
    part: what the recording adds to an estimate from several.
    control: control variates that took the place of a twin, of a long-run average with readout
        noise.
    """

    estimate: estimates.Estimate
    view: hidden.Visibility | None
    parts: np.ndarray | None = None
    residuals: guard.Residuals | None = None
    continuing: Stationary | None = None
    score: str = ""
    part: partial_sums.Part | None = None
    control: FittedControl | None = None

    def __repr__(self) -> str:
        parts = (self.continuing or self.estimate, self.residuals, self.view)
        return "\n".join(repr(part) for part in parts if part is not None)


def estimate(
    recording: RecordingFile,
    process: processes.AnyProcess,
    objective: Objective,
    theta: Params | None = None,
    *,
    score: processes.Score = scores.full_score,
    baseline: str | baselines.Baseline | baselines.Twin | None = None,
    observation_noise: Any = None,
    chunk_bytes: int = CHUNK_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> RecordingEstimate:
    """Estimate ∇θJ with errors from an open recording of the whole state.

    Where the file has a model of its own, or holds some channels only, use `estimate_files`.

    Args:
        recording: an open one, with two trajectories or more.
        process: drift and noise of the system.
        objective: the reward.
        theta: parameters at which it was recorded; the recording's own if not given.
        score: `full_score`, or `local_linear_score` for samples far apart.
        baseline: a name of `BASELINES` or its record. "time", the default, takes the mean
            return-to-go of one half of the trajectories for the other, so it is independent of the
            trajectories it is used on, and reads the file twice from beginning to end. "none" reads
            it once. The others look across trajectories or at a model, and read the file in blocks
            of steps.
        observation_noise: variance of the measurement, a number or (M,), to correct J and its
            gradient for.
        chunk_bytes: of states held at a time.
        progress: called with (trajectories read, to read).

    Returns: a `RecordingEstimate`. Warns with the likely cause where the residuals are not the
    noise of the process.

    >>> result = insitu.estimate(recording, model.process, model.objective)
    >>> result.estimate.gradient["omega"].shape
    (6,)
    """
    model = RecordingModel(process, objective, theta)
    return _estimate(recording, model, score, baseline, observation_noise, chunk_bytes, progress)


def estimate_model(
    recording: RecordingFile,
    model: RecordingModel,
    *,
    score: str = AUTO,
    baseline: str | baselines.Baseline | baselines.Twin | None = None,
    observation_noise: Any = None,
    chunk_bytes: int = CHUNK_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> RecordingEstimate:
    """`estimate` with a recording's model, whose channels may be hidden in part.

    Parameters that need hidden channels have the score of a filter (`fluctua.Observed`), if the
    record begins with empty resonators. score: as for `resolve_score`.

    >>> estimate_model(recording, load_model(recording), score="local-linear").estimate
    """
    used = SCORES[resolve_score(recording, model.process, score)]
    return _estimate(recording, model, used, baseline, observation_noise, chunk_bytes, progress)


def _estimate(
    recording: RecordingFile,
    model: RecordingModel,
    score: processes.Score,
    baseline: str | baselines.Baseline | baselines.Twin | None,
    observation_noise: Any,
    chunk_bytes: int,
    progress: Callable[[int, int], None] | None,
) -> RecordingEstimate:
    """Choose what the channels allow, examine the residuals, and sum over the trajectories."""
    theta = recording.description.theta if model.theta is None else model.theta
    model = model._replace(theta=check.parameters(theta))
    if recording.count < 2:
        raise ValueError(
            f"{recording.path} has {recording.count} complete trajectories; an error bar needs "
            "two at least. For one long record of a steady state use --continuing (in Python, "
            "insitu.estimate_continuing)."
        )
    readout = None
    if isinstance(model.process, processes.Process):
        if observation_noise is not None:
            readout = corrections.check_observation_variance(
                observation_noise, recording.x.shape[2]
            )
        subject = _choose_subject(recording, model, score, readout)
    else:
        check_events(recording, model.process, observation_noise)
        subject = _Subject(model.process, model.objective, model.objective, score)
    residuals = _examine_residuals(recording, model, subject, TRANSITIONS.get(score))
    plan = baselines.resolve_baseline(baseline, caller="a recording", serves=BASELINES)
    if isinstance(plan, baselines.Twin) or plan.needs_returns:
        if subject.noise is not None:
            raise ValueError(
                'correcting for observation noise works with baseline "time" or "none".'
            )
        parts = None
        result = estimator.gradient(
            subject.process,
            subject.objective,
            model.theta,
            recording.trajectories(),
            score=subject.score,
            baseline=plan,
            block_bytes=chunk_bytes,
        )
        part = partial_sums.sum_estimate(result)
    else:
        if residuals is not None and residuals.cause:
            warnings.warn(
                f"the recording is not of this process: {residuals!r}", RuntimeWarning, stacklevel=3
            )
        reading = chunk_sums.Reading(plan, subject.noise, chunk_bytes, progress)
        sums = chunk_sums.sum_chunks(
            recording, subject.process, subject.objective, model.theta, subject.score, reading
        )
        result = sums.estimate()
        parts = sums.mean_by_part()
        part = partial_sums.sum_recording(sums)
    if readout is not None:
        corrections.warn_about_remainder(
            corrections.measure_remainder(subject.rewards, readout, model.theta, recording),
            float(result.value_stderr),
        )
    if subject.view is not None:
        result = hidden.blank_estimate(result, subject.view)
    return RecordingEstimate(
        result, subject.view, parts, residuals, score=subject.filter, part=part
    )


class _Subject(NamedTuple):
    """What is summed over the trajectories of a recording.

    process, objective, score: of the channels that the file has, or of a filter.
    rewards: the reward of the states themselves, without a correction for their readout.
    noise: variance of the readout (M,) that the sums are corrected for; None where a filter
        corrects for it, or there is none.
    view, filter: `view` and `score` of the `RecordingEstimate`.
    """

    process: processes.AnyProcess
    objective: Objective
    rewards: Objective
    score: processes.Score
    noise: np.ndarray | None = None
    view: hidden.Visibility | None = None
    filter: str = ""


def _choose_subject(
    recording: RecordingFile,
    model: RecordingModel,
    score: processes.Score,
    readout: np.ndarray | None,
) -> _Subject:
    """A filter where channels are noisy or parameters need hidden ones; else what is visible."""
    why = ""
    partial = hidden.select_visible(recording, model)
    needs_hidden = partial is not None and (
        score is not scores.full_score or bool(partial.view.missing)
    )
    if readout is not None or needs_hidden:
        law = TRANSITIONS.get(score)
        if law is None:
            raise ValueError(
                "a filter has the transitions of `full_score` and `local_linear_score` only: give "
                "one of these as `score`."
            )
        filtered = choose_filter(recording, model, law, readout)
        if filtered.process is not None:
            rewards = filtered.objective
            measured = (
                rewards if readout is None else corrections.correct_objective(rewards, readout)
            )
            return _Subject(filtered.process, measured, rewards, scores.full_score, filter=FILTER)
        why = filtered.why
    if partial is not None:
        if score is not scores.full_score or readout is not None:
            raise ValueError(
                f"channels are hidden, and {why}: sample faster for the Euler score, "
                "or observe all."
            )
        return _Subject(
            partial.process,
            partial.objective,
            model.objective,
            partial.score,
            view=partial.view,
            filter=why,
        )
    if readout is not None:
        check.require_state_rewards(
            check.objective(model.objective), "the correction for observation noise"
        )
    return _Subject(model.process, model.objective, model.objective, score, readout, filter=why)


def _examine_residuals(
    recording: RecordingFile,
    model: RecordingModel,
    subject: _Subject,
    law: guard.Transition | None,
) -> guard.Residuals | None:
    """Whether the residuals are the noise of the process; None where that cannot be seen."""
    rewards = check.objective(model.objective, stops=True)
    trajectories = cut_before_stops(rewards, model.theta, recording.trajectories())
    if isinstance(model.process, processes.Counting):
        return guard.examine(model.process, model.theta, trajectories)
    diffusion = isinstance(model.process, processes.Process)
    if not diffusion or law is None or subject.view is not None:
        return None
    return guard.examine(
        subject.process,
        model.theta,
        trajectories,
        transition=law,
        readout=subject.noise,
    )


def check_events(recording: RecordingFile, process: Any, observation_noise: Any) -> None:
    """Refuse a recording without the events that the score of the process needs."""
    kind = type(process).__name__
    if recording.events is None:
        raise ValueError(
            f"{recording.path} has no events, and the score of `{kind}` needs their times and "
            "marks, not only the states. Record them: Description(..., events=...) and append(x, "
            "context, events)."
        )
    if observation_noise is not None:
        raise ValueError(
            "correcting for observation noise is for diffusions; the events of "
            f"`{kind}` are counted."
        )
    kinds = recording.description.events
    assert kinds is not None
    changes = getattr(process, "changes", None)
    fixed = kinds.changes is not None and isinstance(changes, tuple)
    if fixed and not np.array_equal(np.asarray(changes, float), np.asarray(kinds.changes)):
        raise ValueError(
            f"the events of {recording.path} ({', '.join(kinds.names)}) change the state by "
            f"{np.asarray(kinds.changes).tolist()}, those of the model by "
            f"{np.asarray(changes).tolist()}: another order, or another system."
        )


def resolve_score(
    recording: RecordingFile, process: processes.AnyProcess, score: str = AUTO
) -> str:
    """Name of the transition whose score is used, in `SCORES`.

    Args:
        recording: an open one; its `noise` table has the transition of its calibration.
        process: of the model.
        score: a name, or "auto" for the transition of the calibration, and Euler's where there is
            none.

    Returns: the name.

    """
    if score in SCORES:
        return score
    if score != AUTO:
        raise ValueError(f"`score` must be one of {', '.join([AUTO, *SCORES])}; got {score!r}.")
    if not isinstance(process, processes.Process):
        return "euler"  # it has a score of its own
    calibrated = str(recording.description.noise.get("transition", "euler"))
    if calibrated not in SCORES:
        raise ValueError(
            f"`noise.transition` of {recording.path} must be one of {', '.join(SCORES)}; it is "
            f"{calibrated!r}. Calibrate again (fluctua calibrate --write), or give --score."
        )
    return calibrated
