"""Lagged products of rewards and scores along long traces, per batch of kicks.

A kick at sample k is the score of the transition from there to sample k + s, s being the stride.
Its products with the rewards at samples k + s, k + 2s, …, k + Ls are averaged over all kicks of a
batch, at every sample: every s-th sample is one of s interleaved records, and all are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core import objective as objectives
from fluctua.core import process as processes
from fluctua.core import scores
from fluctua.core.arrays import Array, Params, PyTree, jit
from fluctua.core.likelihood import steps, unknowns
from fluctua.core.trajectories import Trajectories, open_array


class Trace(NamedTuple):
    """One trace in memory.

    path: (T+1, M) in float64; a periodic component is unwrapped.
    t: (T+1,).
    context: of the trace, or None.
    events: within its steps, leaves (T, …), or None.
    """

    path: np.ndarray
    t: np.ndarray
    context: PyTree
    events: PyTree


class LagGrid(NamedTuple):
    """Lags of the products.

    lags: L, in strides.
    stride: s, in samples.
    length: kicks per batch.
    dt: interval between two samples.
    """

    lags: int
    stride: int
    length: int
    dt: float

    @property
    def reach(self) -> int:
        """Samples from a kick to the last reward that it is multiplied with."""
        return self.lags * self.stride

    def count_batches(self, steps: int) -> int:
        """Number of batches of a trace of so many steps; every kick has rewards at all lags."""
        return max(steps + 1 - self.reach, 0) // self.length


class KickBatch(NamedTuple):
    """Consecutive kicks of one trace.

    trace: number of the trace.
    number: of the batch along the trace.
    """

    trace: int
    number: int


class KickStretch(NamedTuple):
    """Arrays of a batch of B kicks.

    x: states (B + Ls, M), periodic components between 0 and their period.
    x_next: the states one sample later (B + Ls, M), continued from x; the last is x itself.
    ends: the states one stride later (B, M), continued from x.
    t: (B + Ls,).
    dt: interval between two samples.
    """

    x: Array
    x_next: Array
    ends: Array
    t: Array
    dt: Array
    context: PyTree
    events: PyTree


class ResponseLaw(NamedTuple):
    """The functions that are evaluated along a record. basis: x -> φ (F,), or None."""

    process: processes.AnyProcess
    rewards: objectives.Rewards
    score: processes.Score
    basis: Callable[[Array], Array] | None


class Products(NamedTuple):
    """Means over the kicks of a batch.

    lagged: (g_{k+ns} − ḡ) U_k, n = 1 … L. Shape (L, P).
    explicit: ∂θ of the running reward (P,).
    explicit_step: ∂θ of the reward of a step, per unit of time (P,).
    features: φ_k U_k (F, P).
    """

    lagged: Array
    explicit: Array
    explicit_step: Array
    features: Array


class Regression(NamedTuple):
    """Means for the regression of rewards on features. gram: φφᵀ (F, F). targets: (L, F)."""

    gram: Array
    targets: Array


class ScoreSum(NamedTuple):
    """Sums over the kicks of a batch: the score of the unknowns (K,), the information (K, K)."""

    score: Array
    information: Array


def load_traces(records: Iterable[Trajectories], periods: np.ndarray) -> list[Trace]:
    """All traces, with periodic components unwrapped. periods: (M,), infinite if not periodic."""
    traces = []
    for record in records:
        t = np.asarray(record.t, np.float64)
        for j in range(len(record.x)):

            def take(leaf: Any, j: int = j) -> Any:
                return np.asarray(open_array(leaf)[j])

            path = unwrap(np.asarray(take(record.x), np.float64), periods)
            context = jax.tree.map(take, record.context)
            traces.append(Trace(path, t, context, jax.tree.map(take, record.events)))
    return traces


def unwrap(x: np.ndarray, periods: np.ndarray) -> np.ndarray:
    """Join states (T+1, M) by their shortest increments, |Δx| ≤ period/2."""
    path = x.copy()
    for i in np.flatnonzero(np.isfinite(periods)):
        path[:, i] = np.unwrap(x[:, i], period=periods[i])
    return path


def cut_stretch(
    trace: Trace, number: int, grid: LagGrid, periods: np.ndarray, dtype: np.dtype
) -> KickStretch:
    """Arrays of one batch of a trace."""
    first = number * grid.length
    stop = first + grid.length
    last = stop + grid.reach
    path = trace.path[first:last]
    turns = np.zeros_like(path)
    around = np.isfinite(periods)
    turns[:, around] = np.floor(path[:, around] / periods[around]) * periods[around]
    following = np.append(trace.path[first + 1 : last], path[-1:], axis=0)
    ends = trace.path[first + grid.stride : stop + grid.stride] - turns[: grid.length]
    return KickStretch(
        (path - turns).astype(dtype),
        (following - turns).astype(dtype),
        ends.astype(dtype),
        trace.t[first:last].astype(dtype),
        np.asarray(grid.dt, dtype),
        trace.context,
        jax.tree.map(lambda leaf: leaf[first:stop], trace.events),
    )


def map_kicks(one: Callable[[processes.Step], Any], grid: LagGrid, stretch: KickStretch) -> Any:
    """Apply `one` to the step of every kick of a batch. Leaves (B, …)."""

    def evaluate(x: Array, x_next: Array, t: Array, events: PyTree) -> Any:
        dt = stretch.dt * grid.stride
        return one(processes.Step(x, x_next, t, dt, stretch.context, events))

    n = grid.length
    return jax.vmap(evaluate)(stretch.x[:n], stretch.ends, stretch.t[:n], stretch.events)


def evaluate_rewards(law: ResponseLaw, theta: Params, stretch: KickStretch) -> Array:
    """Rewards gₙ of all samples of a stretch: the running one, and that of the step that led there.

    The first sample has no such step, and is not used.
    """
    g = _evaluate_running_rewards(law.rewards, theta, stretch)
    if law.rewards.per_step is None:
        return g
    return g.at[1:].add(_evaluate_step_rewards(law.rewards, theta, stretch)[:-1])


@partial(jit, static_argnums=0)
def compute_rewards(law: ResponseLaw, theta: Params, stretch: KickStretch) -> Array:
    """Evaluate the rewards of a stretch as a compiled function; see `evaluate_rewards`."""
    return evaluate_rewards(law, theta, stretch)


def _evaluate_running_rewards(
    rewards: objectives.Rewards, theta: Params, stretch: KickStretch
) -> Array:
    """g(X_k) of all samples of a stretch."""
    along = jax.vmap(lambda x, t: rewards.running(theta, x, t, stretch.context))
    return along(stretch.x, stretch.t)


def _evaluate_step_rewards(
    rewards: objectives.Rewards, theta: Params, stretch: KickStretch
) -> Array:
    """r(X_k, X_{k+1})/Δt of all samples of a stretch; the last one has no successor."""
    reward = rewards.per_step
    assert reward is not None
    dt = stretch.dt
    along = jax.vmap(lambda x, x_next, t: reward(theta, x, x_next, t, dt, stretch.context) / dt)
    return along(stretch.x, stretch.x_next, stretch.t)


def _average_slope(
    rewards_along: Callable[..., Array], law: ResponseLaw, theta: Params, kicked: KickStretch
) -> Array:
    """∂θ of rewards, averaged over the kicks of a batch. Shape (P,)."""
    slope = jax.grad(lambda th: rewards_along(law.rewards, th, kicked).mean())(theta)
    return ravel_pytree(slope)[0]


def correlate(kicks: Array, g: Array, grid: LagGrid) -> Array:
    """Means of g_{k+ns} times kicks_k over k < B, n = 1 … L. kicks (B, Q), g (B+Ls,) -> (L, Q)."""
    size = 2 ** int(np.ceil(np.log2(len(g))))  # k + Ls stays below: nothing wraps around
    product = jnp.conj(jnp.fft.rfft(kicks, size, axis=0)) * jnp.fft.rfft(g, size)[:, None]
    lagged = jnp.fft.irfft(product, size, axis=0)
    # n+1, not n: the reward at the kick itself precedes it
    return lagged[grid.stride : grid.reach + 1 : grid.stride] / len(kicks)


def _form_products(
    law: ResponseLaw, grid: LagGrid, theta: Params, stretch: KickStretch, mean: Array
) -> Products:
    u = map_kicks(lambda step: ravel_pytree(law.score(law.process, theta, step))[0], grid, stretch)
    g = evaluate_rewards(law, theta, stretch) - mean
    n = grid.length
    kicked = stretch._replace(x=stretch.x[:n], x_next=stretch.x_next[:n], t=stretch.t[:n])
    explicit = _average_slope(_evaluate_running_rewards, law, theta, kicked)
    explicit_step = jnp.zeros_like(explicit)
    if law.rewards.per_step is not None:
        explicit_step = _average_slope(_evaluate_step_rewards, law, theta, kicked)
    features = jnp.zeros((0, u.shape[1]), u.dtype)
    if law.basis is not None:
        features = jax.vmap(law.basis)(kicked.x).T @ u / n
    return Products(correlate(u, g, grid), explicit, explicit_step, features)


@partial(jit, static_argnums=(0, 1))
def form_products(
    law: ResponseLaw, grid: LagGrid, theta: Params, stretches: KickStretch, mean: Array
) -> Products:
    """Products of several batches, leaves (n, …). mean: ḡ."""
    return jax.vmap(lambda one: _form_products(law, grid, theta, one, mean))(stretches)


@partial(jit, static_argnums=(0, 1))
def differentiate_products(
    law: ResponseLaw,
    grid: LagGrid,
    theta: Params,
    stretches: KickStretch,
    mean: Array,
    which: Array,
) -> Products:
    """Derivatives of the products of several batches in the unknowns. Leaves (n, …, P, K).

    which: numbers of the unknowns among the flattened parameters (K,).
    """
    flat, unravel = ravel_pytree(theta)

    def at(u: Array, one: KickStretch) -> Products:
        return _form_products(law, grid, unravel(flat.at[which].set(u)), one, mean)

    return jax.vmap(lambda one: jax.jacfwd(at)(flat[which], one))(stretches)


@partial(jit, static_argnums=(0, 1))
def form_regression(
    law: ResponseLaw, grid: LagGrid, theta: Params, stretches: KickStretch, mean: Array
) -> Regression:
    """Means for the regression of the rewards of several batches on features. Leaves (n, …)."""
    basis = law.basis
    assert basis is not None

    def one_batch(stretch: KickStretch) -> Regression:
        phi = jax.vmap(basis)(stretch.x[: grid.length])
        g = evaluate_rewards(law, theta, stretch) - mean
        return Regression(phi.T @ phi / grid.length, correlate(phi, g, grid))

    return jax.vmap(one_batch)(stretches)


@partial(jit, static_argnums=(0, 1))
def form_score(
    law: ResponseLaw, grid: LagGrid, theta: Params, stretches: KickStretch, which: Array
) -> ScoreSum:
    """Score of the unknowns and F = Σ ∂mᵀC⁻¹∂m + ½ ∂ln Qᵀ ∂ln Q of several batches. (n, …)"""
    process = law.process
    assert isinstance(process, processes.Process)
    transition = scores.local_linear if law.score is scores.local_linear_score else scores.euler
    flat, unravel = ravel_pytree(theta)
    u = flat[which]

    def at(v: Array) -> Params:
        return unravel(flat.at[which].set(v))

    def one_kick(step: processes.Step) -> ScoreSum:
        score = ravel_pytree(law.score(process, theta, step))[0][which]
        slope = steps.measure_slope(process, transition, at, u, step)
        information = slope.T @ steps.weigh(process, transition, theta, step, slope)
        if unknowns.has_independent_noise(process, theta, step.x, step.t, step.context):
            by_noise = jax.jacfwd(
                lambda v: unknowns.log_diffusion(process, at(v), step.x, step.t, step.context)
            )(u)
            information += by_noise.T @ by_noise / 2
        return ScoreSum(score, information)

    def one_batch(stretch: KickStretch) -> ScoreSum:
        each = map_kicks(one_kick, grid, stretch)
        return ScoreSum(each.score.sum(axis=0), each.information.sum(axis=0))

    return jax.vmap(one_batch)(stretches)
