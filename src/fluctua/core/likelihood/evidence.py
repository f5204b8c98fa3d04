"""Evidence of trajectories about the unknowns of a model: the sum of scores, and the information.

The score that trains also calibrates. With u the unknowns and p(θ, u) the parameters of the
process, ΣU over a trajectory is the gradient of its log-likelihood,

    s = Σ_n (∂p/∂u)ᵀ U_n,     F = Σ_n ∂_um ᵀ C⁻¹ ∂_um  [+ ½ Σ_n ∂_u ln Qᵀ ∂_u ln Q],

with m and C the mean and covariance of a step, E[s] = 0 and Cov[s] = F where the model is right.
For a drift linear in u, s(u') = s(u) − F(u' − u), so that one Gauss–Newton step is least squares of
the increments on their features, and sums of F and of Fu + s over trajectories taken at any θ are
all that there is to remember.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core import check
from fluctua.core.arrays import Array, Params, PyTree, jit, working_dtype
from fluctua.core.dependence import depends, varies_in_slope
from fluctua.core.diffusion import check_along, with_silent
from fluctua.core.integrators import mean_rate
from fluctua.core.likelihood.steps import measure_slope, weigh
from fluctua.core.process import NoiseProduct, Process, Score, Step
from fluctua.core.recorded import MOST_SEARCHED, only
from fluctua.core.scores import (
    CorrectedScore,
    drift_score,
    euler,
    local_linear,
    local_linear_score,
    without_readout,
)
from fluctua.core.trajectories import Times, Trajectories

FEWEST_INCREMENTS = 10
"""Of a trajectory, to separate noise of the readout from what moves the state."""

At = Callable[[Params, Array], Params]
"""(θ, u (K,)) -> p, the parameters of the process."""


class Evidence(NamedTuple):
    """s (K,) and F (K, K) of some trajectories, float64. linear: F is the same at any u, one
    step is exact.
    """

    score: np.ndarray
    information: np.ndarray
    linear: bool

    @property
    def is_finite(self) -> bool:
        """Whether all of it is."""
        return bool(np.isfinite(self.score).all() and np.isfinite(self.information).all())


def collect_evidence(
    process: Process,
    score: Score,
    at: At,
    theta: Params,
    u: np.ndarray,
    trajectories: Trajectories,
    *,
    every: int = 1,
    readout: float = 0.0,
) -> Evidence:
    """The sum of scores and the information of trajectories about u, for any Itô process.

    Args:
        process: drift and noise in p.
        score: that of the estimator, of p.
        at: (θ, u) -> p.
        theta: the settings at which the trajectories were taken.
        u: where the derivatives are taken, (K,).
        trajectories: simulated or measured.
        every: F is summed over every so many steps, which stand for those between: features change
            slowly.
        readout: standard deviation of the measurement on each component of a sample. It sits in the
            residual and in the features at once, which biases s and F; both are corrected to first
            order in its variance, which is all there is where they are quadratic in the states.
    Returns: an `Evidence`.

    """
    point = jnp.asarray(u, jnp.result_type(float))
    p = at(theta, point)
    x = jnp.asarray(trajectories.x, working_dtype((p, point), trajectories.x))
    times = check.grid(trajectories.t)
    context = jax.tree.map(jnp.asarray, trajectories.context)
    one = jax.tree.map(lambda leaf: leaf[0], context)
    known = with_silent(check.process(process), p, x[0, 0], times.t[0], one)
    assert isinstance(known, Process)
    kind = _describe((theta, x[0, 0], times.t[0], times.dt[0], one))
    noisy, linear = _examine(known, at, point.size, kind)
    if noisy and not _independent(known, p, x[0, 0], times.t[0], one):
        raise ValueError(
            "unknowns of the noise are calibrated where it is independent on every component; this "
            "process has a matrix, a product or components without noise. Calibrate its amplitude "
            "beforehand."
        )
    if noisy and score is drift_score:
        raise ValueError(
            "unknowns of the noise are calibrated by the score of drift and noise; `drift_score` "
            "is that of the drift alone. Make the model with score=fluctua.scores.full_score, the "
            "default."
        )
    if noisy and readout:
        raise ValueError(
            "unknowns of the noise and noise of the readout cannot be separated in one pass; "
            "calibrate its amplitude beforehand, or leave `readout` at 0."
        )
    variance = jnp.full(x.shape[-1], readout**2, x.dtype) if readout else None
    rows = jnp.swapaxes(x, 0, 1)
    law = _Law(known, score, at, noisy)
    steps = _Steps(rows, times, context)
    s = _sum_scores(law, theta, point, steps, variance)
    information = _sum_information(law, every, theta, point, steps, variance)
    if not check.all_finite(s):
        for j in range(min(len(x), MOST_SEARCHED)):
            check_along(known, p, only(trajectories, j), j)
    linear = linear and not noisy and score is not local_linear_score
    return Evidence(np.asarray(s, np.float64), np.asarray(information, np.float64), linear)


class Kind(NamedTuple):
    """Structure, shapes and types of some values."""

    tree: Any
    leaves: tuple[tuple[tuple[int, ...], Any], ...]


def _describe(values: PyTree) -> Kind:
    leaves, tree = jax.tree.flatten(values)
    return Kind(tree, tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves))


class Roles(NamedTuple):
    """How unknowns enter a process: in its noise; in its drift, linearly or not."""

    noisy: bool
    linear: bool


@lru_cache(maxsize=64)
def _examine(process: Process, at: At, size: int, kind: Kind) -> Roles:
    """Read the operations of drift and noise, the same at every state.

    kind: of (θ, x, t, Δt, context).
    """
    values = [jnp.ones(shape, dtype) for shape, dtype in kind.leaves]
    theta, x, t, dt, context = jax.tree.unflatten(kind.tree, values)

    def log_q(u: Array, theta: Params, x: Array, t: Array, context: PyTree) -> Array:
        return _log_q(process, at(theta, u), x, t, context)

    def rate(u: Array, theta: Params, x: Array, t: Array, dt: Array, context: PyTree) -> Array:
        return mean_rate(process, at(theta, u), x, t, dt, context)

    anywhere = jnp.ones(size)
    noisy = depends(log_q, anywhere, theta, x, t, context, on=0)
    return Roles(noisy, linear=not varies_in_slope(rate, anywhere, theta, x, t, dt, context, on=0))


def _independent(process: Process, p: Params, *state: Any) -> bool:
    """Whether every component has noise of its own, as one amplitude."""
    noise: Any = process.noise
    if process.noiseless or process.diffusion is not None or isinstance(noise, NoiseProduct):
        return False
    return jax.eval_shape(noise, p, *state).ndim == 1


def _log_q(process: Process, p: Params, x: Array, t: Array, context: PyTree) -> Array:
    """ln Q of independent noise; another form of it as it is, to see what it depends on."""
    if process.diffusion is not None:
        return process.diffusion(p, x, t, context, jnp.ones_like(x))
    if isinstance(process.noise, NoiseProduct):
        return process.noise.product(p, x, t, context, jnp.ones(process.noise.width, x.dtype))
    assert process.noise is not None  # checked at the boundary
    sigma = process.noise(p, x, t, context)
    return 2 * jnp.log(jnp.abs(sigma)) if sigma.ndim == 1 and not process.noiseless else sigma


class _Law(NamedTuple):
    """What is compiled. noisy: whether unknowns enter the noise."""

    process: Process
    score: Score
    at: At
    noisy: bool


class _Steps(NamedTuple):
    """Trajectories with time first: x (T+1, E, M)."""

    x: Array
    times: Times
    context: PyTree


@partial(jit, static_argnums=0)
def _sum_scores(law: _Law, theta: Params, u: Array, steps: _Steps, readout: Array | None) -> Array:
    """s (K,). readout: variance of the measurement (M,), or None."""
    score = law.score if readout is None else CorrectedScore(law.score, readout)
    p, pull = jax.vjp(lambda v: law.at(theta, v), u)
    flat, unravel = ravel_pytree(p)

    def add(total: Array, at: Any) -> tuple[Array, None]:
        x, x_next, t, dt = at

        def one(x: Array, x_next: Array, context: PyTree) -> Array:
            return ravel_pytree(score(law.process, p, Step(x, x_next, t, dt, context)))[0]

        return total + jax.vmap(one)(x, x_next, steps.context).sum(axis=0), None

    ends = (steps.x[:-1], steps.x[1:], steps.times.t[:-1], steps.times.dt)
    return pull(unravel(jax.lax.scan(add, jnp.zeros_like(flat), ends)[0]))[0]


@partial(jit, static_argnums=(0, 1))
def _sum_information(
    law: _Law, every: int, theta: Params, u: Array, steps: _Steps, readout: Array | None
) -> Array:
    """F (K, K), summed over every so many steps, which stand for those between."""
    process = law.process
    transition = local_linear if law.score is local_linear_score else euler
    at = partial(law.at, theta)

    def one(x: Array, t: Array, dt: Array, share: Array, context: PyTree) -> Array:
        step = Step(x, x, t, dt, context)
        slope = measure_slope(process, transition, at, u, step)
        information = slope.T @ weigh(process, transition, at(u), step, slope)
        if law.noisy:
            by_noise = jax.jacfwd(lambda v: _log_q(process, at(v), x, t, context))(u)
            information += by_noise.T @ by_noise / 2
        return information * share / dt

    def corrected(x: Array, *rest: Any) -> Array:
        if readout is None:
            return one(x, *rest)
        return without_readout(lambda z: one(z, *rest), readout)(x)

    dt = steps.times.dt
    begins = np.arange(0, len(dt), every)
    shares = jax.ops.segment_sum(dt, np.arange(len(dt)) // every, len(begins))

    def add(total: Array, at: Any) -> tuple[Array, None]:
        x, t, dt, share = at
        each = jax.vmap(corrected, in_axes=(0, None, None, None, 0))
        return total + each(x, t, dt, share, steps.context).sum(axis=0), None

    some = (steps.x[:-1][begins], steps.times.t[:-1][begins], dt[begins], shares)
    return jax.lax.scan(add, jnp.zeros((u.size, u.size), u.dtype), some)[0]


def measure_readout(trajectories: Trajectories) -> float:
    """Standard deviation of the measurement on each component of a sample, all alike, from how
    samples scatter.

    ε of a sample is in the increments on both of its sides, and what moves the state is in one, or
    in all alike: S = ⟨Δy_n Δy_{n+2}⟩ − ⟨Δy_n Δy_{n+1}⟩. Zero where that is negative by chance.
    """
    total = 0.0
    many = 0
    for x in trajectories.x:
        d = np.diff(np.asarray(x, np.float64), axis=0)
        if len(d) < FEWEST_INCREMENTS:
            raise ValueError(
                f"noise of the readout is measured from {FEWEST_INCREMENTS} intervals or more; "
                "these trajectories have "
                f"{len(d)}. Give `readout` as a number."
            )
        total += float(np.sum(d[:-2] * (d[2:] - d[1:-1])))
        many += d[2:].size
    return float(np.sqrt(max(total / many, 0.0)))
