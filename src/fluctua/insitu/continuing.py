"""The gradient of a long-run average, from one long record or a few.

A trace of the steady state has no start that was prepared, and its gradient is that of the average
reward (`fluctua.processes.stationary`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core import baselines, check
from fluctua.core import process as processes
from fluctua.core.arrays import Array, Params
from fluctua.core.integrators import reward_rate
from fluctua.core.likelihood import guard
from fluctua.core.objective import Objective
from fluctua.core.scores import CorrectedScore
from fluctua.core.trajectories import Trajectories
from fluctua.insitu import estimating, hidden, long_record, noisy_record, readout
from fluctua.insitu.recording.model import RecordingModel
from fluctua.insitu.recording.reader import RecordingFile
from fluctua.learn.repetitions import PARTS
from fluctua.processes import stationary as stationary_record


def estimate_continuing(
    recording: RecordingFile | long_record.LongRecord,
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

    >>> trap = fl.Process(lambda theta, x: -theta["k"] * x, lambda theta, x: 0.4 * jnp.ones(1))
    >>> k, t = {"k": jnp.array(0.8)}, np.arange(0.0, 200.0, 0.05)
    >>> x = fl.simulator(trap, jnp.zeros(1), t)(key, k, 4).x
    >>> insitu.files.save("long.nc", insitu.files.Description(t, ("x",), parameters=k), x)
    >>> model = insitu.files.RecordingModel(trap, fl.Objective(lambda theta, x: x[0] ** 2), k)
    >>> with insitu.files.open("long.nc") as long:
    ...     estimate = insitu.estimate_continuing(long, model, window=10.0).estimate
    >>> exact = -(0.4**2) / (2 * 0.8**2)  # the mean reward is s²/2k
    >>> bool(abs(estimate.gradient["k"] - exact) < 4 * estimate.stderr["k"])
    True
    """
    file = recording.recording if isinstance(recording, long_record.LongRecord) else recording
    score = estimating.resolve_score(file, model.process, score)
    if not file.count:
        raise ValueError(
            f"{file.path} has 0 complete trajectories: there is nothing to estimate from."
        )
    record = (
        recording
        if isinstance(recording, long_record.LongRecord)
        else long_record.prepare_record([recording])
    )
    recording = record.recording
    record.check_model(model)
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
            control = noisy_record.fit_record_control(
                plan, record, process, reward, used, noise, theta
            )
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
        answer = noisy_record.subtract_shared_noise(
            answer, recording, process, reward, used, noise, theta
        )
        if control is not None:
            answer = noisy_record.restore_value(answer, record, process, measured, noise, theta)
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


def select_beginning(record: RecordingFile | long_record.LongRecord) -> Trajectories:
    """Select as many samples as the residual guard examines, of the longest piece."""
    recording = record.recording if isinstance(record, long_record.LongRecord) else record
    whole = recording.trajectories()
    if isinstance(record, long_record.LongRecord) and record.pieces is not None:
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
