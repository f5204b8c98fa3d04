"""Gradients of recorded trajectories, all at once or piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import arrays, baselines, check, recorded
from fluctua.core import estimate as estimates
from fluctua.core import process as processes
from fluctua.core.arrays import Array, Params
from fluctua.core.diffusion import check_model
from fluctua.core.estimation import method as methods
from fluctua.core.objective import Rewards
from fluctua.core.scores import local_linear
from fluctua.core.trajectories import Trajectories
from fluctua.core.twin import sweep as twin_sweep
from fluctua.core.twin.correction import TwinSamples


def sample_recorded(
    method: methods.Method,
    theta: Params,
    trajectories: Trajectories | Iterable[Trajectories],
    block_bytes: int,
    taken_at: Params | None = None,
    examined: bool = False,
) -> estimates.Samples:
    """The gradients of the single recorded trajectories.

    taken_at: the parameters at which they were recorded, if not `theta`. examined: whether the
    residual guard has seen the trajectories already.
    """
    if method.means:
        samples = methods.combine_parts(
            method,
            lambda part: sample_recorded(
                part, theta, trajectories, block_bytes, taken_at, examined
            ),
        )
        return estimates.label_groups(samples, trajectories)
    if method.twin:
        split = split_recorded(method, theta, trajectories, None, block_bytes, taken_at, examined)
        return estimates.label_groups(methods.sum_parts(split), trajectories)
    theta = check.parameters(theta)
    recording = recorded.Recording(trajectories, theta)
    doubted = _warn(
        method, theta if taken_at is None else taken_at, trajectories, recording, examined
    )
    for plan in method.used_baselines:
        baselines.check_baseline(plan, recording.count, recording.t)
    scores: list[Any] | None = None if doubted or examined or taken_at is not None else []

    def start():
        return (recording.first_states, recording.context)

    methods.check_baselines(method, baselines.Setting(theta, recording.t, recording.count, start))
    if not any(plan.needs_returns for plan in method.used_baselines):
        sampled = sample_pieces(
            method, theta, trajectories, recording.count, block_bytes, None, scores
        )
        parts = [samples for _, samples in sampled]
        if scores:
            _warn_about_scores(method, theta, scores)
        every = parts[0]
        if len(parts) > 1:
            every = jax.tree.map(lambda *leaves: arrays.concatenate_rows(leaves), *parts)
        return estimates.label_groups(every, trajectories)
    model = method.use_halves()
    halves = None
    if method.needs_pilot:  # beside a baseline that looks across all trajectories
        halves = _average_halves(method, theta, trajectories, recording.count, block_bytes, None)
    tables = method.fill_tables(halves)
    flat = recorded.recorded_samples(model, tables, recording, theta, block_bytes)
    if scores is not None:
        _warn_about_scores(method, theta, [flat.scores])
    return estimates.label_groups(shape_samples(theta, flat), trajectories)


def shape_samples(theta: Params, flat: recorded.FlatSamples) -> estimates.Samples:
    """The samples with the structure of θ."""
    gradients = estimates.unflatten(theta, flat.gradients)
    return estimates.Samples(gradients, flat.returns, survival=flat.survival)


def sample_pieces(
    method: methods.Method,
    theta: Params,
    trajectories: Trajectories | Iterable[Trajectories],
    count: int,
    block_bytes: int,
    progress: Callable[[int], None] | None,
    scores: list[Any] | None = None,
) -> Iterator[tuple[Trajectories, estimates.Samples]]:
    """Pieces of the trajectories with their gradients, in order.

    scores: takes up ΣU (E, P) of each piece.
    """
    model = method.use_halves()
    halves = None
    if method.needs_pilot:
        halves = _average_halves(method, theta, trajectories, count, block_bytes, progress)
    for first, piece in recorded.iterate_pieces(trajectories, block_bytes):
        rows = np.s_[first : first + len(piece.x)]
        tables = method.fill_tables(
            halves and halves._replace(in_second=arrays.part(halves.in_second, rows))
        )
        recording = recorded.Recording(piece, theta, first)
        flat = recorded.recorded_samples(model, tables, recording, theta, block_bytes)
        if scores is not None:
            scores.append(flat.scores)
        yield piece, shape_samples(theta, flat)
        if progress:
            progress(len(piece.x))


def _average_halves(
    method: methods.Method,
    theta: Params,
    trajectories: Trajectories | Iterable[Trajectories],
    count: int,
    block_bytes: int,
    progress: Callable[[int], None] | None,
) -> baselines.Halves:
    """The mean return-to-go of either half, which is independent of the other's trajectories."""
    if count < 2:
        raise ValueError(
            "a time-only baseline takes the mean return-to-go of other trajectories, and there is "
            "1 trajectory. Take "
            'more, or give time_only(values), or baseline="none".'
        )
    in_second = baselines.split_halves(count, estimates.find_groups(trajectories, count))
    share = np.stack([~in_second, in_second], axis=1)
    sums: Any = 0.0
    for first, piece in recorded.iterate_pieces(trajectories, block_bytes):
        part = share[first : first + len(piece.x)]
        means = average_returns(method.model.objective, theta, piece, first, arrays.put(part))
        sums = sums + part.sum(axis=0) * np.asarray(means, np.float64)
        if progress:
            progress(len(piece.x))
    means = (sums / share.sum(axis=0)).astype(means.dtype)
    return baselines.Halves(arrays.put(means), arrays.put(in_second))


def average_returns(
    rewards: Rewards,
    theta: Params,
    trajectories: Trajectories,
    first: int = 0,
    share: Array | None = None,
) -> Array:
    """E[λ̂ₙ] of recorded trajectories, numbered from `first`. Shape (T+1,).

    share: weights of the trajectories in H means (E, H). The result is then (T+1, H).
    """
    recording = recorded.Recording(trajectories, theta, first)
    x = jnp.asarray(trajectories.x, recording.dtype)
    return recorded.mean_return_to_go(rewards, theta, recording.times, x, recording.context, share)


def split_recorded(
    method: methods.Method,
    theta: Params,
    trajectories: Trajectories | Iterable[Trajectories],
    table: Array | None,
    block_bytes: int,
    taken_at: Params | None = None,
    examined: bool = False,
) -> TwinSamples:
    """The two parts of the gradients of recorded trajectories, of a method with a twin."""
    theta = check.parameters(theta)
    recording = recorded.Recording(trajectories, theta)
    _warn(method, theta if taken_at is None else taken_at, trajectories, recording, examined)
    model, numbers, batch = methods.prepare_twin(method, theta, table, recording.count, recording.t)

    def start():
        return (recording.first_states, recording.context)

    methods.check_baselines(method, baselines.Setting(theta, recording.t, recording.count, start))
    parts = twin_sweep.recorded_parts(model, numbers, batch, recording, block_bytes)
    return methods.shape_parts(theta, parts)


def _warn(
    method: methods.Method,
    theta: Params,
    trajectories: Trajectories | Iterable[Trajectories],
    recording: recorded.Recording,
    examined: bool = False,
) -> bool:
    """Warn if the residuals are not the noise of the process, and return whether they are not.

    A score of one's own may know another law, and is not examined.
    """
    from fluctua.core.likelihood import guard
    from fluctua.core.likelihood.linearisation import check_linearisation

    process = method.model.process
    recorded.check_independence(process, recording)
    trajectories = recorded.cut_before_stops(method.model.objective, theta, trajectories)
    check_model(
        process,
        method.model.objective,
        theta,
        recording.first_states,
        recording.t,
        recording.context,
    )
    # without events the score says so
    counted = isinstance(process, processes.Counting) and jax.tree.leaves(
        recording.read_events(0, 1)
    )
    other_law = isinstance(process, processes.HistoryDependent | processes.StepLaw)
    doubted = False
    if other_law or counted:
        doubted = bool(guard.warn_about_residuals(process, theta, trajectories, stacklevel=4).cause)
    law = guard.LAWS.get(method.model.score)
    if law is local_linear and isinstance(process, processes.Process):
        check_linearisation(process, theta, trajectories)
    if law is not None and isinstance(process, processes.Process) and not examined:
        residuals = guard.warn_about_residuals(
            process, theta, trajectories, transition=law, stacklevel=4
        )
        doubted = bool(residuals.cause)
    return doubted


def _warn_about_scores(method: methods.Method, theta: Params, scores: list[Any]) -> None:
    """Warn if the scores of the trajectories do not average to zero."""
    from fluctua.core.likelihood import guard

    rule = method.model.objective.stop
    if rule is None or not rule.bridge:  # a slope of the survival has another mean
        guard.warn_about_scores(theta, np.concatenate(scores), stacklevel=4)
