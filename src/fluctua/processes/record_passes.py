"""Passes over a long record: rewards, scores and their products, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core import objective as objectives
from fluctua.core import process as processes
from fluctua.core import recorded
from fluctua.core.arrays import Array, Params, PyTree, jit
from fluctua.processes.lookahead import Lookahead
from fluctua.processes.pieces import Pieces

STATES = 2**24
"""Maximum number of values from which the memory of the states is estimated."""
BLOCK = 4096
"""Steps whose scores are computed together."""
PARTS = 20
"""Maximum number of parts of either half of a record whose means are compared."""


class Source(NamedTuple):
    """A record and the functions that are evaluated along it."""

    process: processes.AnyProcess
    rewards: objectives.Rewards
    score: processes.Score
    theta: Params
    recording: recorded.Recording
    ahead: Lookahead | None
    pieces: Pieces


class FirstPass(NamedTuple):
    """Results of the first pass over a record.

    rewards: gₙ (E, T).
    parts: sums of (1, g, x, x²) over 2·PARTS parts of each trace (E, parts, 2M+2).
    states: evenly spaced states.
    """

    rewards: np.ndarray
    parts: np.ndarray
    states: SpacedStates


class SpacedStates(NamedTuple):
    """States x (E, N, M) every `stride` steps."""

    x: np.ndarray
    stride: int


def read_rewards(source: Source) -> FirstPass:
    """First pass over a record: all rewards, sums over parts of the record, spaced states."""
    recording = source.recording
    steps = len(source.recording.t) - 1
    rewards = []
    parts = np.zeros((recording.count, 2 * PARTS, 2 * recording.first_states.shape[1] + 2))
    stride = max(1, -(-steps * recording.first_states.size // STATES))
    sampled = []
    for n in range(0, steps, BLOCK):
        times, x = recording.read_block(n, min(n + BLOCK, steps))
        g = np.asarray(
            _evaluate_rewards(source.rewards, source.theta, times, x, recording.context), np.float64
        )
        if source.rewards.per_step is not None:
            g = g + _arrival_rewards(source, n, n + g.shape[1])[0]
        states = np.asarray(x[:, :-1], np.float64)
        rows = np.concatenate([np.ones_like(g)[..., None], g[..., None], states, states**2], axis=2)
        _add_by_index(parts, rows, (n + np.arange(g.shape[1])) * 2 * PARTS // steps)
        rewards.append(g)
        sampled.append(states[:, -n % stride :: stride])
    g = np.concatenate(rewards, axis=1)
    if source.rewards.per_step is not None:
        first = source.pieces.starts  # no step led to it: the next one stands for it
        g[:, first] = g[:, first + 1]
    return FirstPass(
        g,
        parts,
        SpacedStates(np.concatenate(sampled, axis=1), stride),
    )


def _add_by_index(sums: np.ndarray, rows: np.ndarray, index: np.ndarray) -> None:
    """Add rows (E, b, …) to sums (E, B, …) by index (b,); indices outside 0 … B−1 are skipped."""
    for k in np.unique(index[(index >= 0) & (index < sums.shape[1])]):
        sums[:, k] += rows[:, index == k].sum(axis=1)


def average_products(
    source: Source, g: np.ndarray, lags: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Mean products of rewards and scores per batch, within the window and within the next one.

    (gₙ − ḡ)(Uₙ₋₁ + … + Uₙ₋w) + ∂θ g and (gₙ − ḡ)(Uₙ₋w₋₁ + … + Uₙ₋₂w). Shape (B, P) each.
    """
    traces = len(g)
    mean = g.mean()
    unbiased = 1 / (1 - lags / g.size)
    size = ravel_pytree(source.theta)[0].size
    pieces = source.pieces
    firsts = (lags, 2 * lags)
    sums = [np.zeros((traces, pieces.count_batches(w, length).sum(), size)) for w in firsts]
    # Σz, where a look ahead begins and elsewhere
    kicks = [[np.zeros_like(part) for part in sums] for _ in range(2)]
    levels = np.zeros((2, 2))  # count and sum of g̃ − ḡ in either place
    before = np.zeros((traces, 2 * lags + 1, size))  # Σ_{k<m} U_k up to a constant, m = n − 2w … n
    for n, begins, level, explicit, u in _iterate_blocks(source, g, mean, lags):
        b = u.shape[1]
        level = unbiased * level
        total = np.concatenate([before, before[:, -1:] + np.cumsum(u, axis=1)], axis=1)
        ends = [total[:, first : first + b] for first in (2 * lags, lags, 0)]
        before = total[:, b:] - total[:, b : b + 1]
        samples = n + np.arange(b)
        inside = pieces.count_before(samples) >= lags
        levels += [[np.sum(at), level[:, at].sum()] for at in (inside & ~begins, inside & begins)]
        for k in range(2):
            trace = ends[k] - ends[k + 1]
            index = pieces.number_batches(samples, firsts[k], length)
            _add_by_index(sums[k], level[..., None] * trace + (explicit if k == 0 else 0.0), index)
            if source.ahead is not None:
                for which, at in enumerate((~begins, begins)):
                    _add_by_index(kicks[which][k], trace[:, at], index[at])
    # the level that a twin gets wrong in the same way everywhere is no reward of a kick
    if source.ahead is not None:
        for which in range(2):
            offset = levels[which, 1] / max(levels[which, 0] * traces, 1)
            sums = [part - offset * z for part, z in zip(sums, kicks[which], strict=True)]
    recording = source.recording
    recorded.check_scores(
        sums[0].sum(axis=1), source.process, source.theta, recording.read_trajectory, recording.t
    )
    near, far = (part.reshape(-1, size) / length for part in sums)
    return near, far


def _iterate_blocks(
    source: Source, g: np.ndarray, mean: float, lags: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Iterate over a record: first step n, restarts (b,), gₙ − ḡ (E, b), ∂θ gₙ and Uₙ (E, b, P)."""
    recording = source.recording
    ahead = source.ahead
    steps = g.shape[1]
    block = max(BLOCK, 2 * lags)
    path = None if ahead is None else ahead.make_path(lags, mean)
    if path is not None:
        block = max(1, block // path.stride) * path.stride
        steps = steps // path.stride * path.stride
    for n in range(0, steps, block):
        stop = min(n + block, steps)
        first = max(0, stop - block)  # a last block as long as the others is not compiled anew
        times, x = recording.read_block(first, stop)
        events = recording.read_events(first, stop)
        law = _Law(source.process, source.rewards, source.score)
        read = _Block(times, x, recording.context, events)
        u, explicit = (part[:, n - first :] for part in _evaluate_block(law, source.theta, read))
        gaps = source.pieces.are_gaps(np.arange(n, stop))
        u = np.where(gaps[:, None], 0, np.asarray(u, np.float64))
        if source.rewards.per_step is not None:
            explicit = explicit + _arrival_rewards(source, n, stop)[1]
        level = g[:, n:stop] - mean
        begins = np.zeros(stop - n, bool)
        if path is not None:
            level, explicit = path.block(*recording.read_block(n, stop))
            begins[:: path.stride] = True
        yield n, begins, level, np.asarray(explicit, np.float64), u


@partial(jit, static_argnums=0)
def _evaluate_rewards(
    rewards: objectives.Rewards, theta: Params, times: Any, x: Array, context: PyTree
) -> Array:
    along = jax.vmap(
        lambda x, t, context: rewards.running(theta, x, t, context), in_axes=(0, 0, None)
    )
    return jax.vmap(along, in_axes=(0, None, 0))(x[:, :-1], times.t[:-1], context)


def _arrival_rewards(source: Source, n: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """r(X_{k−1}, X_k)/Δt (E, b) and its ∂θ (E, b, P), k = n … stop−1."""
    recording = source.recording
    times, x = recording.read_block(max(n - 1, 0), max(stop - 1, 1))
    rows = _evaluate_step_rewards(source.rewards, source.theta, times, x, recording.context)
    reward, slopes = (np.asarray(v, np.float64) for v in rows)
    if (
        n == 0
        # the step that led to X₀ is not in the record; it meets no score, and the next one stands
        # for it
    ):
        reward, slopes = (np.concatenate([v[:, :1], v], axis=1)[:, :stop] for v in (reward, slopes))
    return reward, slopes


@partial(jit, static_argnums=0)
def _evaluate_step_rewards(
    rewards: objectives.Rewards, theta: Params, times: Any, x: Array, context: PyTree
) -> tuple[Array, Array]:
    def one(x: Array, x_next: Array, t: Array, dt: Array, context: PyTree) -> tuple[Array, Array]:
        reward = rewards.per_step
        assert reward is not None
        r, slope = jax.value_and_grad(
            lambda th: (reward(th, x, x_next, t, dt, context) / dt).astype(x.dtype)
        )(theta)
        return r, ravel_pytree(slope)[0]

    along = jax.vmap(one, in_axes=(0, 0, 0, 0, None))
    return jax.vmap(along, in_axes=(0, 0, None, None, 0))(
        x[:, :-1], x[:, 1:], times.t[:-1], times.dt, context
    )


class _Law(NamedTuple):
    """The functions that are evaluated along a record."""

    process: processes.AnyProcess
    rewards: objectives.Rewards
    score: processes.Score


class _Block(NamedTuple):
    """A block of b steps of a record. x: (E, b+1, M)."""

    times: Any
    x: Array
    context: PyTree
    events: Any


@partial(jit, static_argnums=0)
def _evaluate_block(law: _Law, theta: Params, block: _Block) -> tuple[Array, Array]:
    """Uₙ and ∂θ gₙ of a block. Shape (E, b, P) each."""
    process, rewards, score = law
    times, x, context, events = block

    def one(
        x: Array, x_next: Array, t: Array, dt: Array, events: PyTree, context: PyTree
    ) -> tuple[Array, Array]:
        explicit = jax.grad(lambda th: rewards.running(th, x, t, context).astype(x.dtype))(theta)
        u = score(process, theta, processes.Step(x, x_next, t, dt, context, events))
        return ravel_pytree(u)[0], ravel_pytree(explicit)[0]

    along = jax.vmap(one, in_axes=(0, 0, 0, 0, 0, None))
    return jax.vmap(along, in_axes=(0, 0, None, None, 0, 0))(
        x[:, :-1], x[:, 1:], times.t[:-1], times.dt, events, context
    )
