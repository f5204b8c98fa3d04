"""The gradient from a recording larger than memory: chunks of trajectories, each read twice, in
order.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core import baselines, check, estimator, scores
from fluctua.core import estimate as estimates
from fluctua.core import process as processes
from fluctua.core.arrays import Params
from fluctua.core.likelihood import guard
from fluctua.core.likelihood.pieces import mark_noiseless
from fluctua.core.objective import Objective
from fluctua.core.trajectories import Trajectories
from fluctua.insitu import hidden as hidden
from fluctua.insitu import readout as corrections
from fluctua.insitu.recording.model import RecordingModel
from fluctua.insitu.recording.reader import RecordingFile
from fluctua.learn.repetitions import PARTS
from fluctua.processes.stationary import Stationary
from fluctua.scale import parts as partial_sums

CHUNK_BYTES = 256 * 2**20
SCORES: dict[str, processes.Score] = {
    "euler": scores.full_score,
    "local-linear": scores.local_linear_score,
}
"""By the transition that they are of."""
AUTO = "auto"
"""In place of a name in `SCORES`: the transition with which the file was calibrated, or else
Euler's.
"""
BASELINES = ("none", "time", "mean", "optimal", "twin")
"""Those of `fluctua.core.baselines.TABLE` that a recording can serve."""


FILTER = "filter"


class RecordingEstimate(NamedTuple):
    """estimate: NaN where a parameter is not trainable. view: why, if channels are hidden; None
    where a filter helps.

    score: where the recording holds less than the state `FILTER`, or why there is none; else empty.
    part: what the recording adds to an estimate from several.
    parts: (PARTS, P), estimates from every tenth trajectory, with the baselines "time" and "none";
    else None.
    residuals: whether they are the noise of the process, where all channels are there; `cause` says
    what is wrong.
    continuing: of a long-run average (`insitu.continuing`), what the estimate rests on.
    """

    estimate: estimates.Estimate
    view: hidden.Visibility | None
    parts: np.ndarray | None = None
    residuals: guard.Residuals | None = None
    continuing: Stationary | None = None
    score: str = ""
    part: partial_sums.Part | None = None


LAWS: dict[processes.Score, guard.Transition] = {
    scores.full_score: scores.euler,
    scores.local_linear_score: scores.local_linear,
}


def estimate(
    recording: RecordingFile,
    process: processes.AnyProcess,
    objective: Objective,
    theta: Params | None = None,
    *,
    score: processes.Score = scores.full_score,
    baseline: str | baselines.Baseline | baselines.Twin | None = None,
    observed: np.ndarray | None = None,
    size: int | None = None,
    observation_noise: Any = None,
    chunk_bytes: int = CHUNK_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> RecordingEstimate:
    """∇θJ with errors from a recording.

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
        observed: the components of the state that the file holds, if some are hidden. Parameters
            that need those have the score of a filter (`fluctua.Observed`), if the record begins
            with empty resonators.
        size: how many components there are then.
        observation_noise: variance of the measurement, a number or (M,), to correct J and its
            gradient for.
        chunk_bytes: of states held at a time.
        progress: called with (trajectories read, to read).

    Returns: a `RecordingEstimate`. Warns with the likely cause where the residuals are not the
    noise of the process.

    >>> with open_recording("run.nc") as recording:
    ...     print(estimate(recording, process, objective).estimate)

    """
    theta = check.parameters(recording.description.theta if theta is None else theta)
    if recording.count < 2:
        raise ValueError(
            f"{recording.path} has {recording.count} complete trajectories; an error bar needs two "
            "at least. For one "
            "long record of a steady state use --continuing (in Python, "
            "insitu.estimate_continuing)."
        )
    law = LAWS.get(score)
    view = None
    residuals = None
    note = ""
    rewards = objective  # the reward of the states, and the variance of their measurement
    readout = None
    if not isinstance(process, processes.Process):
        law = None
        check_events(recording, process, observation_noise)
        if isinstance(process, processes.Counting):
            residuals = guard.examine(process, theta, recording.trajectories())
    else:
        if observation_noise is not None:
            observation_noise = readout = corrections.observation_variance(
                observation_noise, recording.x.shape[2]
            )
        partial = visible(recording, process, objective, theta, observed, size)
        if observation_noise is not None or (
            partial is not None and (score is not scores.full_score or partial[0].missing)
        ):
            if law is None:
                raise ValueError(
                    "a filter knows the transitions of `full_score` and `local_linear_score` only."
                )
            filtered = hidden.choose_filter(
                recording, process, objective, theta, law, observed, size, observation_noise
            )
            note = FILTER if filtered.process else filtered.why
            if filtered.process is not None:
                process = filtered.process
                rewards = filtered.objective
                objective = (
                    rewards if readout is None else corrections.correct_objective(rewards, readout)
                )
                score = scores.full_score
                partial = None
                observation_noise = None
        if partial is not None:
            if score is not scores.full_score or observation_noise is not None:
                raise ValueError(
                    f"channels are hidden, and {note}: sample faster for the Euler score, or "
                    "observe all."
                )
            view, process, objective, score = partial
    if observation_noise is not None:
        check.require_state_rewards(
            check.objective(objective), "the correction for observation noise"
        )
    if law is not None and view is None:
        residuals = guard.examine(
            process, theta, recording.trajectories(), transition=law, readout=observation_noise
        )
    plan = baselines.resolve_baseline(baseline, caller="a recording", serves=BASELINES)
    if isinstance(plan, baselines.Twin) or plan.needs_returns:
        if observation_noise is not None:
            raise ValueError(
                'correcting for observation noise works with baseline "time" or "none".'
            )
        parts = None
        result = estimator.gradient(
            process,
            objective,
            theta,
            recording.trajectories(),
            score=score,
            baseline=plan,
            block_bytes=chunk_bytes,
        )
        part = partial_sums.sum_estimate(result)
    else:
        if residuals is not None and residuals.cause:
            warnings.warn(
                f"the recording is not of this process: {residuals!r}", RuntimeWarning, stacklevel=2
            )
        reading = _Reading(plan, observation_noise, chunk_bytes, progress)
        sums = _sum_chunks(recording, process, objective, theta, score, reading)
        result = sums.estimate()
        parts = sums.by_parts()
        part = partial_sums.sum_recording(sums)
    if readout is not None:
        corrections.warn_about_remainder(
            corrections.measure_remainder(rewards, readout, theta, recording),
            float(result.value_stderr),
        )
    return RecordingEstimate(
        result if view is None else blank(result, view),
        view,
        parts,
        residuals,
        score=note,
        part=part,
    )


def visible(
    recording: RecordingFile,
    process: processes.Process,
    objective: Objective,
    theta: Params,
    observed: np.ndarray | None,
    size: int | None,
) -> tuple[hidden.Visibility, processes.Process, Objective, processes.Score] | None:
    """Process, reward and score of the channels that a file has, and what they leave out; None
    if it has all.
    """
    if observed is None or size is None or len(observed) == size:
        return None
    first = recording.trajectories(0, 1).context
    one = jax.tree.map(lambda leaf: leaf[0], first)
    view = hidden.visibility(
        process, objective, theta, observed, size, t=float(recording.t[0]), context=one
    )
    process, objective = hidden.observed_model(process, objective, tuple(map(int, observed)), size)
    return (
        view,
        process,
        objective,
        hidden.PartialScore(tuple(view.usable[np.asarray(observed)].tolist())),
    )


def check_events(recording: RecordingFile, process: Any, observation_noise: Any) -> None:
    """What a process with events needs of a recording."""
    kind = type(process).__name__
    if recording.events is None:
        raise ValueError(
            f"{recording.path} has no events, and the score of `{kind}` needs their times and "
            "marks, not only the "
            "states. Record them: Description(..., events=...) and append(x, context, events)."
        )
    if observation_noise is not None:
        raise ValueError(
            f"correcting for observation noise is for diffusions; the events of `{kind}` are "
            "counted."
        )
    kinds = recording.description.events
    assert kinds is not None
    changes = getattr(process, "changes", None)
    fixed = kinds.changes is not None and isinstance(changes, tuple)
    if fixed and not np.array_equal(np.asarray(changes, float), np.asarray(kinds.changes)):
        raise ValueError(
            f"the events of {recording.path} ({', '.join(kinds.names)}) change the state by "
            f"{np.asarray(kinds.changes).tolist()}, those of the model by "
            f"{np.asarray(changes).tolist()}: another "
            "order, or another system."
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
            f"{calibrated!r}. "
            "Calibrate again (fluctua calibrate --write), or give --score."
        )
    return calibrated


def estimate_model(
    recording: RecordingFile, model: RecordingModel, *, score: str = AUTO, **options: Any
) -> RecordingEstimate:
    """`estimate` with a recording's model, hidden channels and all. score: as for `resolve_score`.

    >>> estimate_model(recording, load_model(recording), score="local-linear").estimate
    """
    m = model
    score = resolve_score(recording, m.process, score)
    return estimate(
        recording,
        m.process,
        m.objective,
        m.theta,
        score=SCORES[score],
        observed=m.observed,
        size=m.size,
        **options,
    )


class _Reading(NamedTuple):
    """How a recording is read. noise: variance of the measurement (M,), or None."""

    baseline: baselines.Baseline
    noise: np.ndarray | None
    chunk_bytes: int
    progress: Callable[[int, int], None] | None


def _sum_chunks(
    recording: RecordingFile,
    process: processes.AnyProcess,
    objective: Objective,
    theta: Params,
    score: processes.Score,
    reading: _Reading,
) -> estimates.RunningSums:
    """Sums over all trajectories of a recording, chunk by chunk."""
    baseline, s, chunk_bytes, progress = reading
    rewards = check.objective(objective)
    checked = check.process(process)
    if s is not None and isinstance(checked, processes.Process):
        checked = mark_noiseless(recording.trajectories(), checked, theta)
    total = (2 if baseline.pilot else 1) * recording.count
    done = 0

    def read(count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress(done, total)

    used = score if s is None else scores.CorrectedScore(score, tuple(s.tolist()))
    sums = estimates.RunningSums(theta, PARTS)
    measured = objective if s is None else corrections.correct_objective(objective, s)
    for chunk, samples in estimator.chunked_samples(
        process,
        measured,
        theta,
        recording.trajectories(),
        recording.count,
        score=used,
        baseline=baseline,
        block_bytes=chunk_bytes,
        progress=read,
    ):
        if s is not None:
            off = corrections.reward_term(
                checked, rewards, score, jnp.asarray(s), theta, _as_working(chunk, theta)
            )
            samples = samples._replace(gradient=corrections.subtract(samples.gradient, off, theta))
        sums.add(samples)
    return sums


def _as_working(chunk: Trajectories, theta: Params) -> Trajectories:
    dtype = jnp.result_type(*jax.tree.leaves(theta), chunk.x.dtype)
    return Trajectories(
        jnp.asarray(chunk.t, dtype), jnp.asarray(chunk.x, dtype), chunk.context, chunk.events
    )


def blank(result: estimates.Estimate, view: hidden.Visibility) -> estimates.Estimate:
    """NaN in place of what means nothing."""
    names = ("gradient", "stderr", "second_moment")
    return result._replace(**{name: blanked(getattr(result, name), view) for name in names})


def blanked(tree: Params, view: hidden.Visibility) -> Params:
    """NaN in place of parameters that cannot be trained."""
    flat, unravel = ravel_pytree(tree)
    return unravel(jnp.where(jnp.asarray(view.trainable), flat, jnp.nan))
