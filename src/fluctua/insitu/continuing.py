"""One long record in place of many trajectories: its stretches, and the gradient of its long-run
average.

A trace of the steady state has no start that was prepared. Its steps are as good as any for a
calibration, so it is cut into stretches that hardly know of each other, whose scatter is an error.
Its gradient is that of the average reward (`fluctua.processes.stationary`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core import baselines, check
from fluctua.core import process as processes
from fluctua.core.arrays import Array, Params, jit
from fluctua.core.integrators import reward_rate
from fluctua.core.likelihood import guard
from fluctua.core.objective import Objective
from fluctua.core.scores import CorrectedScore
from fluctua.core.trajectories import Trajectories
from fluctua.insitu import estimating, readout
from fluctua.insitu.recording.model import RecordingModel
from fluctua.insitu.recording.reader import RecordingFile
from fluctua.insitu.recording.trend import describe_trend, find_trend
from fluctua.learn.repetitions import PARTS
from fluctua.processes import stationary as stationary_record

APART = 10
"""Correlation times that a stretch is long, where the record has room for `FEWEST` of them."""
FEWEST = 20
MOST = 200
"""SplitRecord of a record."""
SHORTEST = 2
"""Correlation times that a stretch is long at the least."""
POINTS = 2**17
"""Samples of a trace that correlations are taken from; longer traces are averaged in groups."""
TIMES = 7
"""Times at which it is looked whether a drift depends on them."""


class SplitRecord(NamedTuple):
    """A record in pieces. recording: the pieces as trajectories. length: of one, in units of time.

    slowest: the number of the component that is correlated for longest. memory: how long, 1 +
    2Σ|ρ|.
    autocorrelation_time: integrated, 1 + 2Σρ, which is shorter where it oscillates. effective:
    independent samples of that component that the record is worth. trend: a drift of the record, in
    words; empty if there is none.
    """

    recording: RecordingFile
    length: float
    slowest: int
    memory: float
    autocorrelation_time: float
    effective: float
    trend: str = ""

    @property
    def numbers(self) -> dict[str, Any]:
        """For machines."""
        fields = ("length", "memory", "autocorrelation_time", "effective", "trend")
        named = {name: getattr(self, name) for name in fields}
        return {
            "count": self.recording.count,
            **named,
            "slowest": self.recording.description.components[self.slowest],
        }

    def __repr__(self) -> str:
        name = self.recording.description.components[self.slowest]
        return (
            f"{self.recording.count:,} stretches of {self.length:.4g}; {name}, the slowest, is "
            "correlated over "
            f"{self.memory:.3g}: integrated autocorrelation time {self.autocorrelation_time:.3g}, "
            f"{self.effective:,.0f} independent samples"
            + (f"\n→ not steady: {self.trend}" if self.trend else "")
        )


def split_record(recording: RecordingFile, model: RecordingModel) -> SplitRecord:
    """Cut the traces of a steady state into stretches that hardly know of each other.

    A stretch is ten times as long as the slowest component is correlated, or shorter down to twice,
    if that leaves twenty of them; a record that has no room for those is refused.

    Args:
        recording: of one long trace or a few.
        model: its drift must not depend on time, because every stretch begins at the same one.

    Returns: the `SplitRecord`.

    """
    _check_autonomous(recording, model)
    steps = len(recording.t) - 1
    dt = float(np.mean(np.diff(recording.t)))
    group = max(1, steps // POINTS)
    slowest = 0
    memory = 0.0
    own = 0.0
    means = _grouped(recording, group)
    for i in range(means.shape[2]):
        series = means[:, :, i] - means[:, :, i].mean()
        if np.any(series):  # a channel that never moves is named elsewhere
            long = stationary_record.memory_time(series) * group
            if long > memory:
                slowest = i
                memory = long
                own = max(stationary_record.autocorrelation_time(series) * group, 1.0)
    trend = _find_drift(recording)
    length = max(int(np.ceil(APART * memory)), steps // MOST, 2)
    if recording.count * (steps // length) < FEWEST:
        length = int(steps // np.ceil(FEWEST / recording.count))
    if length < max(SHORTEST * memory, 2):
        raise ValueError(
            f"{recording.path} is too short: {recording.count} × {steps * dt:.4g} units of time, "
            "of which "
            f"{recording.description.components[slowest]} is correlated over {memory * dt:.3g}. "
            f"{FEWEST} stretches of "
            f"{SHORTEST} such times take {FEWEST * SHORTEST * memory * dt:.4g}. "
            + (f"That is because of a drift: {trend}" if trend else "Record for longer.")
        )
    whole = recording.count * steps
    return SplitRecord(
        recording.cut(length), length * dt, slowest, memory * dt, own * dt, whole / own, trend
    )


def _find_drift(recording: RecordingFile) -> str:
    """The drift of a trace that stands out most, with what to do; empty if there is none."""
    names = recording.description.components
    searches = [
        find_trend(np.asarray(recording.x[j]), records=recording.count)
        for j in range(recording.count)
    ]
    trends = [search.trend for search in searches if search.trend is not None]
    if not trends:
        return ""
    worst = min(trends, key=lambda trend: trend.probability)
    return (
        f"{describe_trend(worst, names)}. If the detector drifts and the system does not, take the "
        "trend away "
        "(fluctua convert IN OUT.nc --detrend TIME); a longer record does not help."
    )


def estimate_continuing(
    recording: RecordingFile,
    model: RecordingModel,
    *,
    window: float | str = "auto",
    score: str = estimating.AUTO,
    baseline: str | baselines.Twin | None = None,
    observation_noise: Any = None,
) -> estimating.RecordingEstimate:
    """∇θ of the long-run average of the reward, from a record of the steady state: one trace or a
    few.

    Args:
        recording: an open one; it need not have a prepared start.
        model: of `load_model(recording)`. Of a network J is the return of a steady record of that
            length.
        window: time over which a kick is remembered, or "auto".
        score: as for `resolve_score`.
        baseline: "time" or "twin".
        observation_noise: variance of the measurement, a number or (M,), to correct J and its
            gradient for.

    Returns: a `RecordingEstimate`, whose `continuing` has the window and what it leaves out.

    """
    score = estimating.resolve_score(recording, model.process, score)
    if not recording.count:
        raise ValueError(
            f"{recording.path} has 0 complete trajectories: there is nothing to estimate from."
        )
    theta = check.parameters(model.theta)
    used = estimating.SCORES[score]
    process = model.process
    reward = long_run(recording, model)
    view = residuals = None
    if isinstance(process, processes.Process):
        view = estimating.visible(recording, process, reward, theta, model.observed, model.size)
        if view is not None and score != "euler":
            raise ValueError(
                "local linearisation moves hidden resonators into observed ones within an "
                "interval, so it needs every "
                "channel. Sample faster and use the Euler score, or observe all channels."
            )
    else:
        estimating.check_events(recording, process, observation_noise)
    if view is not None:
        process, reward, partial = view[1:]
        reward = reward._replace(terminal=None)  # a zero that was filled in
        used = _Kept(partial, tuple(view[0].trainable.tolist()))
    noise = None
    if observation_noise is not None:
        noise = readout.observation_variance(observation_noise, recording.x.shape[2])
        check.require_state_rewards(check.objective(reward), "the correction for observation noise")
        if isinstance(
            baselines.resolve_baseline(
                baseline, caller="a long-run average", serves=("time", "twin")
            ),
            baselines.Twin,
        ):
            raise ValueError('correcting for observation noise works with baseline "time".')
    if view is None and isinstance(process, processes.Process):
        residuals = guard.examine(
            process, theta, beginning(recording), transition=estimating.LAWS[used], readout=noise
        )
    answer = stationary_record.stationary(
        process,
        reward if noise is None else readout.correct_objective(reward, noise),
        theta,
        recording.trajectories(),
        window=window,
        score=used if noise is None else CorrectedScore(used, tuple(noise.tolist())),
        baseline=baseline,
    )
    if noise is not None and isinstance(process, processes.Process):
        answer = _without_shared_noise(answer, recording, process, reward, used, noise, theta)
        remainder = readout.measure_remainder(reward, noise, theta, recording, average=True)
        readout.warn_about_remainder(remainder, float(answer.estimate.value_stderr))
    if view is not None:
        missing, error = (
            estimating.blanked(tree, view[0]) for tree in (answer.missing, answer.missing_stderr)
        )
        answer = answer._replace(
            estimate=estimating.blank(answer.estimate, view[0]),
            missing=missing,
            missing_stderr=error,
        )
    many = len(answer.batches) >= 2 * PARTS
    parts = (
        np.array([answer.batches[k::PARTS].mean(axis=0) for k in range(PARTS)]) if many else None
    )
    return estimating.RecordingEstimate(
        answer.estimate, None if view is None else view[0], parts, residuals, answer
    )


def beginning(recording: RecordingFile) -> Trajectories:
    """As many samples as the residual guard looks at."""
    few = max(2, min(len(recording.t), guard.TRANSITIONS // recording.count + 1))
    whole = recording.trajectories()
    return Trajectories(recording.t[:few], whole.x[:, :few], whole.context)


def long_run(recording: RecordingFile, model: RecordingModel) -> Objective:
    """The reward whose long-run average is J: a network's is by the length of its recording,
    others' is a rate.
    """
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
class _Kept:
    """A score without the entries that mean nothing: no window is chosen for them."""

    score: processes.Score
    keep: tuple[bool, ...]

    def __call__(self, process: processes.Process, theta: Params, step: processes.Step) -> Params:
        flat, unravel = ravel_pytree(self.score(process, theta, step))
        return unravel(jnp.where(jnp.asarray(self.keep), flat, 0))


def _without_shared_noise(
    answer: stationary_record.Stationary,
    recording: RecordingFile,
    process: processes.Process,
    objective: Objective,
    score: processes.Score,
    noise: np.ndarray,
    theta: Params,
) -> stationary_record.Stationary:
    """Take off what a kick and the reward right after it share through the noise of one sample
    (`insitu.readout`).
    """
    dt = answer.duration / recording.count / (len(recording.t) - 1)
    lags = round(answer.window / dt)
    length = round(answer.length / dt)
    rewards = check.objective(objective)
    checked = check.process(process)
    off = []
    t = dt * np.arange(length + 2)
    for j in range(recording.count):
        one = recording.trajectories(j, j + 1, load=True)
        x = jnp.asarray(one.x[0], jnp.result_type(*jax.tree.leaves(theta), one.x.dtype))
        many = len(answer.batches) // recording.count
        # from the kick before the batch to one sample after it, whose reward `reward_term` counts
        # as terminal: zero
        rows = lags - 1 + length * np.arange(many)[:, None] + np.arange(length + 2)
        context = jax.tree.map(lambda leaf, many=many: jnp.repeat(leaf, many, axis=0), one.context)
        data = Trajectories(jnp.asarray(t, x.dtype), x[rows], context)
        off.append(
            np.asarray(
                readout.reward_term(checked, rewards, score, jnp.asarray(noise), theta, data),
                np.float64,
            )
        )
    batches = answer.batches - np.concatenate(off) / (length * dt)
    before = answer.estimate
    estimate = stationary_record.average_batches(theta, batches, batches[:, 0])._replace(
        value=before.value, value_stderr=before.value_stderr, value_interval=before.value_interval
    )
    return stationary_record.include_bias(answer._replace(estimate=estimate, batches=batches))


def _grouped(recording: RecordingFile, group: int) -> np.ndarray:
    """Means of consecutive samples, so many together. (E, T // group, M)"""
    groups = []
    for j in range(recording.count):
        x = np.asarray(recording.x[j], np.float64)
        whole = len(x) // group * group
        groups.append(x[:whole].reshape(-1, group, x.shape[1]).mean(axis=1))
    return np.stack(groups)


def _check_autonomous(recording: RecordingFile, model: RecordingModel) -> None:
    process = check.process(model.process)
    theta = check.parameters(model.theta)
    rows = recording.context
    context = None if rows is None else {name: values[0] for name, values in rows.items()}
    x = np.zeros(model.size or recording.x.shape[2], recording.x.dtype)
    x[slice(None) if model.observed is None else model.observed] = recording.x[0, 0]
    drift = jit(lambda t: process.drift(theta, jnp.asarray(x), t, context))
    at = [np.asarray(drift(t)) for t in np.linspace(recording.t[0], recording.t[-1], TIMES)]
    if np.abs(np.diff(at, axis=0)).max() > 1e-4 * np.abs(at).max():
        raise ValueError(
            "the drift depends on time, so that stretches of a record are not alike. Only records "
            "of a drift that "
            "stays the same are cut; of a network, one in the frame of its drive and without "
            "modulation."
        )
