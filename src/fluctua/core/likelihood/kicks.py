"""Residuals of every step in units of their noise, along trajectories.

With C = LLᵀ the covariance of a step, z = L⁻¹r is N(0, 1) in each component where the process is
right, and r(C⁻¹r) has the mean 1. The r² of a component without noise of its own is compared with
what an Euler step leaves out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from fluctua.core.arrays import Array, Params, PyTree, jit
from fluctua.core.diffusion import diffusion_at, diffusion_matrix, has_fewer_noises
from fluctua.core.integrators import mean_rate
from fluctua.core.likelihood.alternatives import MAX_CROSSED
from fluctua.core.process import Process, Step
from fluctua.core.scores import Gaussian, euler, local_linear
from fluctua.core.trajectories import Times

Transition = Callable[[Process, Params, Step], Gaussian]


BATCH = 256
"""Steps that are computed at once."""

GROUP = 2048
"""Steps that are added up at once, if trajectories are shorter."""


class Standardised(NamedTuple):
    """Residuals of every step in units of their noise. (E·S, M) each

    v: r(C⁻¹r), of mean 1. z: L⁻¹r. drift: L⁻¹ times the mean step.
    """

    v: Array
    z: Array
    drift: Array


@partial(jit, static_argnums=(0, 1, 2))
def standardise(
    process: Process,
    transition: Transition | None,
    noiseless: tuple[int, ...],
    theta: Params,
    now: Array,
    following: Array,
    t: Array,
    dt: Array,
    context: PyTree,
    readout: Array,
) -> Standardised:
    """Residuals of steps in units of their noise.

    transition: None for Euler steps with independent noise.
    noiseless: components without noise, which are left to `measure_omitted`: v is 1, z is 0, and
        the law of the others is that without them.
    now, following: both ends of each step (E, S, M).
    t, dt: their times (S,).
    readout: variance of the measurement (M,).
    """
    one = partial(_standardise_one, process, transition, noiseless, theta, readout)
    return map_in_batches(one, now, following, t, dt, context)


def _standardise_one(
    process: Process,
    transition: Transition | None,
    noiseless: tuple[int, ...],
    theta: Params,
    readout: Array,
    *ends: Array,
) -> Standardised:
    """Residual of one step in units of its noise. ends: x, x', t, Δt and context."""
    step = Step(*ends)
    x, x_next, t, dt, context, _ = step
    if transition is None:
        q = diffusion_at(process, theta, x, t, context)
        expected = 2 * dt * q.apply(theta, jnp.ones_like(x)) + 2 * readout
        noisy = expected > 0
        root = jnp.sqrt(jnp.where(noisy, expected, 1))
        move = mean_rate(process, theta, x, t, dt, context) * dt
        z = jnp.where(noisy, (x_next - x - move) / root, 0)
        return Standardised(jnp.where(noisy, z**2, 1), z, jnp.where(noisy, move / root, 0))
    mean, covariance = transition(process, theta, step)
    r = x_next - mean
    whole = covariance + 2 * jnp.diag(readout)
    if transition is euler and has_fewer_noises(process, theta, x, t, context):
        return Standardised(_square_on_range(whole, r), jnp.zeros_like(x), jnp.zeros_like(x))
    others = np.setdiff1d(np.arange(x.size), noiseless)
    if noiseless:
        slope = jax.jacfwd(lambda x: transition(process, theta, step._replace(x=x)).mean)(x)
        whole = covariance + jnp.diag(readout) + (slope * readout) @ slope.T
    whole = whole[np.ix_(others, others)]
    still = jnp.diagonal(whole) <= 0
    r = jnp.where(still, 0, r[others])
    whole = whole + jnp.diag(still.astype(whole.dtype))
    both = jnp.stack([r, jnp.where(still, 0, (mean - x)[others])], axis=1)
    lower = jnp.linalg.cholesky(whole)
    z, move = solve_triangular(lower, both, lower=True).T
    v = jnp.where(still, 1, r * solve_triangular(lower, z, lower=True, trans="T"))

    def put(values, rest):
        return jnp.full_like(x, rest).at[others].set(values)

    return Standardised(put(v, 1), put(z, 0), put(move, 0))


class StepSums(NamedTuple):
    """Sums over steps of residuals z with functions of the state, for components (M,) each.

    steps: their number. kick: Σz. own: Σ z d, with d the mean step in units of the noise.
    drift: Σd². square: Σz². state: Σf² of f = (x − centre)/scale.
    product: Σ zᵢfⱼ (M, M); of large states Σ zᵢfᵢ (M, 1).
    """

    steps: Array | float
    kick: Array
    own: Array
    drift: Array
    square: Array
    state: Array
    product: Array


def sum_steps(made: Standardised, f: Array) -> StepSums:
    """`StepSums` of rows (n, M)."""
    v, z, drift = made
    product = z.T @ f if z.shape[1] <= MAX_CROSSED else (z * f).sum(axis=0)[:, None]
    # a component that is held has z = v = 0, one without noise v = 1
    square = z**2 + ((z == 0) & (v != 0))
    kick, own, size, squares, state = (
        values.sum(axis=0) for values in (z, z * drift, drift**2, square, f**2)
    )
    return StepSums(float(len(z)), kick, own, size, squares, state, product)


@partial(jit, static_argnums=(0, 1, 2))
def sum_trajectories(
    process: Process,
    transition: Transition | None,
    noiseless: tuple[int, ...],
    theta: Params,
    x: Array,
    times: Times,
    context: PyTree,
    centre: Array,
    scale: Array,
) -> StepSums:
    """`StepSums` of every step of trajectories x (E, T+1, M), in groups of `GROUP` steps.

    A last group that is not full is left out. centre, scale: (M,), of the states.
    """
    one = partial(_standardise_one, process, transition, noiseless, theta, jnp.zeros_like(centre))
    count, samples, size = x.shape
    group = min(count, max(1, GROUP // (samples - 1)))

    def split(leaf: Array) -> Array:
        return leaf[: count // group * group].reshape(-1, group, *leaf.shape[1:])

    def add(total: StepSums, rows: Any) -> tuple[StepSums, None]:
        states, context = rows
        along = jax.vmap(one, in_axes=(0, 0, 0, 0, None))
        made = jax.vmap(along, in_axes=(0, 0, None, None, 0))(
            states[:, :-1], states[:, 1:], times.t[:-1], times.dt, context
        )
        f = (states[:, :-1] - centre) / scale
        made, f = jax.tree.map(lambda leaf: leaf.reshape(-1, size), (made, f))
        return jax.tree.map(jnp.add, total, sum_steps(made, f)), None

    zero = jnp.zeros(size, x.dtype)
    product = jnp.zeros((size, size if size <= MAX_CROSSED else 1), x.dtype)
    start = StepSums(0.0, zero, zero, zero, zero, zero, product)
    return jax.lax.scan(add, start, jax.tree.map(split, (x, context)))[0]


@partial(jit, static_argnums=(0, 1))
def measure_omitted(
    process: Process,
    transition: Transition,
    theta: Params,
    now: Array,
    following: Array,
    t: Array,
    dt: Array,
    context: PyTree,
    readout: Array,
) -> tuple[Array, Array]:
    """r² by the transition that is used, and d² that an Euler step leaves out. (E·S, M) each

    now, following: both ends of each step (E, S, M).
    """

    def one(x: Array, x_next: Array, t: Array, dt: Array, context: PyTree) -> tuple[Array, Array]:
        step = Step(x, x_next, t, dt, context)
        mean, covariance = local_linear(process, theta, step)

        def used(x):
            return transition(process, theta, step._replace(x=x)).mean

        blur = readout + jax.jacfwd(used)(x) ** 2 @ readout
        return (x_next - used(x)) ** 2, (used(x) - mean) ** 2 + jnp.diagonal(covariance) + blur

    return map_in_batches(one, now, following, t, dt, context)


@partial(jit, static_argnums=0)
def spread_noise(process: Process, theta: Params, step: Step, readout: Array) -> Array:
    """L of the correlations LLᵀ that independent noise has after an interval. (M, M)

    By the locally linear law, in units of its amplitudes at the start of the interval, those of the
    readout included.
    """
    covariance = local_linear(process, theta, step).covariance + 2 * jnp.diag(readout)
    q = diffusion_at(process, theta, step.x, step.t, step.context)
    amplitude = jnp.sqrt(2 * step.dt * q.apply(theta, jnp.ones_like(step.x)) + 2 * readout)
    return jnp.linalg.cholesky(covariance / jnp.outer(amplitude, amplitude))


@partial(jit, static_argnums=0)
def find_noisy(
    process: Process, theta: Params, x: Array, t: Array, dt: Array, context: PyTree
) -> Array:
    """Whether a component has noise at some state of x (E, T+1, M). (M,)"""

    def one(x: Array, x_next: Array, t: Array, dt: Array, context: PyTree) -> Array:
        return jnp.diagonal(diffusion_matrix(process, theta, x, t, context)) > 0

    return jnp.any(map_in_batches(one, x[:, :-1], x[:, 1:], t, dt, context), axis=0)


def map_in_batches(
    one: Callable[..., Any], now: Array, following: Array, t: Array, dt: Array, context: PyTree
) -> Any:
    """`one(x, x', t, Δt, context)` of every step (E, S, M), a few at a time; leaves (E·S, …).

    In full batches, the last one filled up with copies of the last step: a remainder would be
    computed at the same time, and batches of LAPACK at once can block each other for ever.
    """
    count, steps, size = now.shape
    rows = count * steps
    batch = min(BATCH, rows)
    each = jax.tree.map(lambda leaf: jnp.repeat(leaf, steps, axis=0), context)
    ends = (now.reshape(-1, size), following.reshape(-1, size))
    inputs = (*ends, jnp.tile(t, count), jnp.tile(dt, count), each)

    def fill_batches(leaf: Array) -> Array:
        filled = jnp.concatenate([leaf, jnp.repeat(leaf[-1:], -rows % batch, axis=0)])
        return filled.reshape(-1, batch, *leaf.shape[1:])

    outputs = jax.lax.map(lambda step: jax.vmap(one)(*step), jax.tree.map(fill_batches, inputs))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:rows], outputs)


def _square_on_range(covariance: Array, r: Array) -> Array:
    """rᵢ (C⁺r)ᵢ over its expectation (CC⁺)ᵢᵢ. (M,)

    The expectation is the share of component i in the directions that have noise.
    """
    scale, vectors = jnp.linalg.eigh(covariance)
    there = scale > r.size * jnp.finfo(r.dtype).eps * scale[-1]
    share = jnp.sum(jnp.where(there, vectors**2, 0), axis=1)
    solved = vectors @ jnp.where(there, vectors.T @ r / jnp.where(there, scale, 1), 0)
    seen = share > r.size * jnp.finfo(r.dtype).eps
    return jnp.where(seen, r * solved / jnp.where(seen, share, 1), 1)
