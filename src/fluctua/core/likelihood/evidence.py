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

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core import check, diffusion, recorded, scores
from fluctua.core.arrays import Array, Params, PyTree, jit, working_dtype
from fluctua.core.likelihood import steps, unknowns
from fluctua.core.process import Process, Score, Step
from fluctua.core.trajectories import Times, Trajectories, select_trajectories

MIN_INCREMENTS = 10
"""Of a trajectory, to separate noise of the readout from what moves the state."""


class Evidence(NamedTuple):
    """The sum of scores and the information of some trajectories, in float64.

    score: s (K,).
    information: F (K, K).
    linear: whether F is the same at any u, so that one step is exact.
    log_likelihood: ℓ up to a constant; not a number where it is not computed.
    """

    score: np.ndarray
    information: np.ndarray
    linear: bool
    log_likelihood: float = np.nan

    def scale(self, weight: float) -> Evidence:
        """Multiply the evidence by a weight."""
        return Evidence(
            weight * self.score,
            weight * self.information,
            self.linear,
            weight * self.log_likelihood,
        )

    @property
    def is_finite(self) -> bool:
        """Whether score and information are finite."""
        return bool(np.isfinite(self.score).all() and np.isfinite(self.information).all())


def collect_evidence(
    process: Process,
    score: Score,
    at: unknowns.At,
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
    case = _prepare(process, score, at, theta, u, trajectories, readout)
    s = _sum_scores(case.law, theta, case.point, case.path, case.readout)
    information = _sum_information(case.law, every, theta, case.point, case.path, case.readout)
    if not check.all_finite(s):
        p = at(theta, case.point)
        for j in range(min(len(trajectories.x), recorded.MAX_SEARCHED)):
            one = select_trajectories(trajectories, np.s_[j : j + 1])
            diffusion.check_along(case.law.process, p, one, j)
    return Evidence(np.asarray(s, np.float64), np.asarray(information, np.float64), case.linear)


def collect_score(
    process: Process,
    score: Score,
    at: unknowns.At,
    theta: Params,
    u: np.ndarray,
    trajectories: Trajectories,
    *,
    readout: float = 0.0,
) -> np.ndarray:
    """The score of `collect_evidence` without the information, which takes most of its time.

    Shape (K,).
    """
    case = _prepare(process, score, at, theta, u, trajectories, readout)
    s = _sum_scores(case.law, theta, case.point, case.path, case.readout)
    return np.asarray(s, np.float64)


def _prepare(
    process: Process,
    score: Score,
    at: unknowns.At,
    theta: Params,
    u: np.ndarray,
    trajectories: Trajectories,
    readout: float,
) -> _Case:
    """Check process and unknowns, and make the arrays of the trajectories."""
    point = jnp.asarray(u, jnp.result_type(float))
    p = at(theta, point)
    x = jnp.asarray(trajectories.x, working_dtype((p, point), trajectories.x))
    times = check.grid(trajectories.t)
    context = jax.tree.map(jnp.asarray, trajectories.context)
    one = jax.tree.map(lambda leaf: leaf[0], context)
    known = diffusion.find_noiseless(check.process(process), p, x[0, 0], times.t[0], one)
    assert isinstance(known, Process)
    signature = check.tree_signature((theta, x[0, 0], times.t[0], times.dt[0], one))
    noisy, linear = unknowns.examine_roles(known, at, point.size, signature)
    if noisy and not unknowns.has_independent_noise(known, p, x[0, 0], times.t[0], one):
        raise ValueError(
            "unknowns of the noise are calibrated where it is independent on every component; "
            "this process has a matrix, a product or components without noise. Calibrate its "
            "amplitude beforehand."
        )
    if noisy and score is scores.drift_score:
        raise ValueError(
            "unknowns of the noise are calibrated by the score of drift and noise; `drift_score` "
            "is that of the drift alone. Make the model with score=fluctua.scores.full_score, "
            "the default."
        )
    if noisy and readout:
        raise ValueError(
            "unknowns of the noise and noise of the readout cannot be separated in one pass; "
            "calibrate its amplitude beforehand, or leave `readout` at 0."
        )
    variance = jnp.full(x.shape[-1], readout**2, x.dtype) if readout else None
    linear = linear and not noisy and score is not scores.local_linear_score
    law = _EvidenceLaw(known, score, at, noisy)
    return _Case(law, point, _Path(jnp.swapaxes(x, 0, 1), times, context), variance, linear)


class _EvidenceLaw(NamedTuple):
    """Static part of the compiled sums. noisy: whether unknowns enter the noise."""

    process: Process
    score: Score
    at: unknowns.At
    noisy: bool


class _Path(NamedTuple):
    """Trajectories with time first: x (T+1, E, M)."""

    x: Array
    times: Times
    context: PyTree


class _Case(NamedTuple):
    """Trajectories and a law, ready to be summed.

    law: what is compiled.
    point: u (K,).
    path: the trajectories.
    readout: variance of the measurement (M,), or None.
    linear: whether the information is the same at any u.
    """

    law: _EvidenceLaw
    point: Array
    path: _Path
    readout: Array | None
    linear: bool


@partial(jit, static_argnums=0)
def _sum_scores(
    law: _EvidenceLaw, theta: Params, u: Array, path: _Path, readout: Array | None
) -> Array:
    """s (K,). readout: variance of the measurement (M,), or None."""
    score = law.score if readout is None else scores.CorrectedScore(law.score, readout)
    p, pull = jax.vjp(lambda v: law.at(theta, v), u)
    flat, unravel = ravel_pytree(p)

    def add(total: Array, at: Any) -> tuple[Array, None]:
        x, x_next, t, dt = at

        def one(x: Array, x_next: Array, context: PyTree) -> Array:
            return ravel_pytree(score(law.process, p, Step(x, x_next, t, dt, context)))[0]

        return total + jax.vmap(one)(x, x_next, path.context).sum(axis=0), None

    ends = (path.x[:-1], path.x[1:], path.times.t[:-1], path.times.dt)
    return pull(unravel(jax.lax.scan(add, jnp.zeros_like(flat), ends)[0]))[0]


@partial(jit, static_argnums=(0, 1))
def _sum_information(
    law: _EvidenceLaw, every: int, theta: Params, u: Array, path: _Path, readout: Array | None
) -> Array:
    """F (K, K), summed over every so many steps, which stand for those between."""
    process = law.process
    transition = scores.local_linear if law.score is scores.local_linear_score else scores.euler
    at = partial(law.at, theta)

    def measure(x: Array, t: Array, dt: Array, context: PyTree) -> tuple[Array, Array]:
        """Rows a and b of the information aᵀb of one step, (·, K) each."""
        step = Step(x, x, t, dt, context)
        slope = steps.measure_slope(process, transition, at, u, step)
        weighted = steps.weigh(process, transition, at(u), step, slope)
        if not law.noisy:
            return slope, weighted
        by_noise = jax.jacfwd(lambda v: unknowns.log_diffusion(process, at(v), x, t, context))(u)
        return jnp.concatenate([slope, by_noise]), jnp.concatenate([weighted, by_noise / 2])

    def sum_all(x: Array, t: Array, dt: Array) -> Array:
        each = jax.vmap(measure, in_axes=(0, None, None, 0))(x, t, dt, path.context)
        slope, weighted = (rows.reshape(-1, u.size) for rows in each)
        # one product for all trajectories: K² numbers of each of them would not fit in memory
        return slope.T @ weighted

    def sum_corrected(x: Array, t: Array, dt: Array, variance: Array) -> Array:
        def one(z: Array, context: PyTree) -> Array:
            slope, weighted = measure(z, t, dt, context)
            return slope.T @ weighted

        def corrected(x: Array, context: PyTree) -> Array:
            return scores.remove_readout_bias(lambda z: one(z, context), variance)(x)

        return jax.vmap(corrected)(x, path.context).sum(axis=0)

    dt = path.times.dt
    begins = np.arange(0, len(dt), every)
    shares = jax.ops.segment_sum(dt, np.arange(len(dt)) // every, len(begins))

    def add(total: Array, at: Any) -> tuple[Array, None]:
        x, t, dt, share = at
        information = sum_all(x, t, dt) if readout is None else sum_corrected(x, t, dt, readout)
        return total + information * share / dt, None

    some = (path.x[:-1][begins], path.times.t[:-1][begins], dt[begins], shares)
    return jax.lax.scan(add, jnp.zeros((u.size, u.size), u.dtype), some)[0]


def measure_readout(trajectories: Trajectories) -> float:
    """Standard deviation of the measurement on each component, from how samples scatter.

    One number for all components. ε of a sample is in the increments on both of its sides, and what
    moves the state is in one, or in all alike: S = ⟨Δy_n Δy_{n+2}⟩ − ⟨Δy_n Δy_{n+1}⟩. Zero where
    that is negative by chance.
    """
    total = 0.0
    many = 0
    for x in trajectories.x:
        d = np.diff(np.asarray(x, np.float64), axis=0)
        if len(d) < MIN_INCREMENTS:
            raise ValueError(
                f"noise of the readout is measured from {MIN_INCREMENTS} intervals or more; these "
                f"trajectories have {len(d)}. Give `readout` as a number."
            )
        total += float(np.sum(d[:-2] * (d[2:] - d[1:-1])))
        many += d[2:].size
    return float(np.sqrt(max(total / many, 0.0)))
