"""The gradient of a long-run average, from one long record or a few.

A trace of the steady state has no start that was prepared, and its gradient is that of the average
reward (`fluctua.processes.stationary`).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core import baselines, check, recorded, scores
from fluctua.core import process as processes
from fluctua.core.arrays import Array, Params
from fluctua.core.integrators import reward_rate
from fluctua.core.likelihood import guard
from fluctua.core.objective import Objective
from fluctua.core.scores import CorrectedScore
from fluctua.core.trajectories import Trajectories
from fluctua.insitu import estimating, hidden, readout, splitting
from fluctua.insitu.long_record import LongRecord, prepare_record
from fluctua.insitu.recording.model import RecordingModel
from fluctua.insitu.recording.reader import RecordingFile
from fluctua.learn.repetitions import PARTS
from fluctua.processes import control_variates, record_passes
from fluctua.processes import stationary as stationary_record
from fluctua.processes.pieces import join_records

CONTRADICTION = 4.0
"""Standard errors of J by which a record may differ from its twin."""


def estimate_continuing(
    recording: RecordingFile | LongRecord,
    model: RecordingModel,
    *,
    window: float | str = "auto",
    score: str = estimating.AUTO,
    baseline: str | baselines.Twin | None = None,
    observation_noise: Any = None,
) -> estimating.RecordingEstimate:
    """Estimate ∇θ of the long-run average of the reward, from a record of the steady state.

    Args:
        recording: an open one; it need not have a prepared start. With gaps it is cut there; of
            several files, or with a drift to subtract, give a `LongRecord` of `prepare_record`.
        model: of `load_model(recording)`. Of a network J is the return of a steady record of that
            length.
        window: time over which a kick is remembered, or "auto".
        score: as for `resolve_score`.
        baseline: "time" or "twin". With observation noise the twin is a control variate
            (`fluctua.processes.control_variates`) made from the model of the score.
        observation_noise: variance of the measurement, a number or (M,), to correct J and its
            gradient for.

    Returns: a `RecordingEstimate`, whose `continuing` has the window and what it leaves out.
    """
    given = recording.recording if isinstance(recording, LongRecord) else recording
    score = estimating.resolve_score(given, model.process, score)
    if not given.count:
        raise ValueError(
            f"{given.path} has 0 complete trajectories: there is nothing to estimate from."
        )
    record = recording if isinstance(recording, LongRecord) else prepare_record([recording])
    recording = record.recording
    if record.pieces is not None and isinstance(model.process, processes.Process):
        splitting.check_autonomous(recording, model)
    theta = check.parameters(model.theta)
    used = estimating.SCORES[score]
    process = model.process
    reward = make_long_run_reward(recording, model)
    partial = residuals = None
    if isinstance(process, processes.Process):
        partial = hidden.select_visible(recording, model._replace(objective=reward, theta=theta))
        if partial is not None and score != "euler":
            raise ValueError(
                "local linearisation moves hidden resonators into observed ones within an "
                "interval, so it needs every channel. Sample faster and use the Euler score, or "
                "observe all channels."
            )
    else:
        estimating.check_events(recording, process, observation_noise)
    view = None
    if partial is not None:
        view = partial.view
        process = partial.process
        reward = partial.objective._replace(terminal=None)  # a zero that was filled in
        used = _TrainableScore(partial.score, tuple(view.trainable.tolist()))
    noise = None
    control = None
    if observation_noise is not None:
        noise = readout.check_observation_variance(observation_noise, recording.x.shape[2])
        check.require_state_rewards(check.objective(reward), "the correction for observation noise")
        plan = baselines.resolve_baseline(
            baseline, caller="a long-run average", serves=("time", "twin")
        )
        if isinstance(plan, baselines.Twin):
            if view is not None:
                raise ValueError(
                    "a twin of noisy states needs every channel, and some are hidden. Use baseline "
                    '"time".'
                )
            control = _fit_control(plan, record, process, reward, used, noise, theta)
            baseline = None
    measured = reward
    if control is not None:
        reward = control.objective
    if view is None and isinstance(process, processes.Process):
        residuals = guard.examine(
            process,
            theta,
            select_beginning(record),
            transition=estimating.TRANSITIONS[used],
            readout=noise,
        )
    answer = stationary_record.stationary(
        process,
        reward if noise is None else readout.correct_objective(reward, noise),
        theta,
        record.list_records(),
        window=window,
        score=used if noise is None else CorrectedScore(used, tuple(noise.tolist())),
        baseline=baseline,
    )
    if noise is not None and isinstance(process, processes.Process):
        answer = _subtract_shared_noise(answer, recording, process, reward, used, noise, theta)
        if control is not None:
            answer = _restore_value(answer, record, process, measured, noise, theta)
        remainder = readout.measure_remainder(measured, noise, theta, recording, average=True)
        readout.warn_about_remainder(remainder, float(answer.estimate.value_stderr))
    if view is not None:
        missing, error = (
            hidden.blank_tree(tree, view) for tree in (answer.missing, answer.missing_stderr)
        )
        answer = answer._replace(
            estimate=hidden.blank_estimate(answer.estimate, view),
            missing=missing,
            missing_stderr=error,
        )
    many = len(answer.batches) >= 2 * PARTS
    parts = (
        np.array([answer.batches[k::PARTS].mean(axis=0) for k in range(PARTS)]) if many else None
    )
    return estimating.RecordingEstimate(
        answer.estimate, view, parts, residuals, answer, control=control
    )


def _fit_control(
    twin: baselines.Twin,
    record: LongRecord,
    process: processes.AnyProcess,
    objective: Objective,
    score: processes.Score,
    noise: np.ndarray,
    theta: Params,
) -> control_variates.FittedControl:
    """The reward with control variates, in place of a twin whose path would restart at noise."""
    if twin.process is not None or twin.theta is not None:
        raise ValueError(
            "with observation noise the twin is the model of the score: leave `process` and "
            "`theta` of the Twin off."
        )
    if not isinstance(process, processes.Process):
        raise ValueError(f"a twin of noisy states is for diffusions; got {type(process).__name__}.")
    whole = record.recording.trajectories(load=True)
    cuts = np.zeros(0, int) if record.pieces is None else record.pieces.cuts
    x = np.asarray(whole.x, np.float64)
    memories = [
        stationary_record.memory_time(x[:, :, i], cuts)
        for i in range(x.shape[2])
        if np.ptp(x[:, :, i]) > 0
    ]
    independent = x.shape[0] * x.shape[1] / max(memories, default=1.0)
    return control_variates.fit_control(
        process,
        estimating.TRANSITIONS[score],
        objective,
        theta,
        whole,
        independent,
        readout=noise,
    )


def _restore_value(
    answer: stationary_record.Stationary,
    record: LongRecord,
    process: processes.Process,
    objective: Objective,
    noise: np.ndarray,
    theta: Params,
) -> stationary_record.Stationary:
    """J and its error from the measured reward: with control variates it is that of the model.

    Warns where the two differ, since the gradient is then not that of the record either.
    """
    joined, pieces = join_records(record.list_records())
    rewards = check.objective(readout.correct_objective(objective, noise))
    source = record_passes.Source(
        check.process(process),
        rewards,
        scores.full_score,
        theta,
        recorded.Recording(joined, theta),
        None,
        pieces,
    )
    g = record_passes.read_rewards(source).rewards
    own = stationary_record.autocorrelation_time(g, pieces.cuts)
    dt = float(np.mean(np.diff(record.recording.t)))
    blocks = pieces.average_blocks(g, max(round(answer.length / dt), int(np.ceil(10 * own))))
    value = stationary_record.average_batches(theta, answer.batches, blocks)
    error = float(value.value_stderr)
    model = float(answer.estimate.value)
    if abs(float(g.mean()) - model) > CONTRADICTION * error:
        warnings.warn(
            f"the record is not that of the twin: its mean reward is {g.mean():.4g} ± {error:.2g} "
            f"and that of the model {model:.4g}. The gradient is biased likewise: calibrate, or "
            'use baseline "time".',
            RuntimeWarning,
            stacklevel=3,
        )
    estimate = answer.estimate._replace(
        value=jnp.asarray(g.mean()),
        value_stderr=value.value_stderr,
        value_interval=value.value_interval,
    )
    return answer._replace(estimate=estimate, autocorrelation_time=own * dt)


def select_beginning(record: RecordingFile | LongRecord) -> Trajectories:
    """Select as many samples as the residual guard examines, of the longest piece."""
    recording = record.recording if isinstance(record, LongRecord) else record
    whole = recording.trajectories()
    if isinstance(record, LongRecord) and record.pieces is not None:
        pieces = record.list_records()
        assert isinstance(pieces, list)
        whole = pieces[int(np.argmax(record.pieces.steps))]
        few = min(len(whole.t), guard.TRANSITIONS + 1)
        return Trajectories(whole.t[:few], whole.x[:, :few], whole.context)
    few = max(2, min(len(recording.t), guard.TRANSITIONS // recording.count + 1))
    return Trajectories(recording.t[:few], whole.x[:, :few], whole.context)


def make_long_run_reward(recording: RecordingFile, model: RecordingModel) -> Objective:
    """Reward whose long-run average is J: a network's is per recording, others' are rates."""
    if model.observed is None:
        return model.objective
    return Objective(
        running=_ScaledReward(
            reward_rate(check.objective(model.objective)), float(np.ptp(recording.t))
        )
    )


@dataclass(frozen=True)
class _ScaledReward:
    """A reward times a number."""

    reward: Any
    factor: float

    def __call__(self, theta: Params, x: Array, t: Array, context: Any) -> Array:
        return self.factor * self.reward(theta, x, t, context)


@dataclass(frozen=True)
class _TrainableScore:
    """A score with zero for parameters that cannot be trained: no window is chosen for them."""

    score: processes.Score
    keep: tuple[bool, ...]

    def __call__(self, process: processes.Process, theta: Params, step: processes.Step) -> Params:
        flat, unravel = ravel_pytree(self.score(process, theta, step))
        return unravel(jnp.where(jnp.asarray(self.keep), flat, 0))


def _subtract_shared_noise(
    answer: stationary_record.Stationary,
    recording: RecordingFile,
    process: processes.Process,
    objective: Objective,
    score: processes.Score,
    noise: np.ndarray,
    theta: Params,
) -> stationary_record.Stationary:
    """Subtract what a kick and the next reward share through the noise of one sample.

    See `insitu.readout`, term (b).
    """
    dt = float(np.mean(np.diff(recording.t)))
    length = round(answer.length / dt)
    assert answer.starts is not None
    many = len(answer.starts)
    rewards = check.objective(objective)
    checked = check.process(process)
    off = []
    t = dt * np.arange(length + 2)
    for j in range(recording.count):
        one = recording.trajectories(j, j + 1, load=True)
        x = jnp.asarray(one.x[0], jnp.result_type(*jax.tree.leaves(theta), one.x.dtype))
        # from the kick before the batch to one sample after it, whose reward is terminal in
        # `compute_reward_term`: zero
        rows = answer.starts[:, None] - 1 + np.arange(length + 2)
        context = jax.tree.map(lambda leaf: jnp.repeat(leaf, many, axis=0), one.context)
        data = Trajectories(jnp.asarray(t, x.dtype), x[rows], context)
        off.append(
            np.asarray(
                readout.compute_reward_term(
                    checked, rewards, score, jnp.asarray(noise), theta, data
                ),
                np.float64,
            )
        )
    batches = answer.batches - np.concatenate(off) / (length * dt)
    before = answer.estimate
    estimate = stationary_record.average_batches(theta, batches, batches[:, 0])._replace(
        value=before.value, value_stderr=before.value_stderr, value_interval=before.value_interval
    )
    return stationary_record.include_bias(answer._replace(estimate=estimate, batches=batches))
