"""What trajectories say about the unknowns of a model: the sum of their scores, their information,
and a belief.

The score that trains also calibrates. With u the unknowns and p(θ, u) the parameters of the
process, ΣU over a trajectory is the gradient of its log-likelihood,

    s = Σ_n (∂p/∂u)ᵀ U_n,     F = Σ_n ∂_uμᵀ (2Q)⁻¹ ∂_uμ Δt  [+ ½ Σ_n ∂_u ln Qᵀ ∂_u ln Q],

with E[s] = 0 and Cov[s] = F where the model is right. For a drift linear in u, s(u') = s(u) − F(u'
− u), so that one Gauss–Newton step is least squares of the increments on their features, and sums
of F and of Fu + s over trajectories taken at any θ are all that there is to remember.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core import check
from fluctua.core.arrays import Array, Params, PyTree, jit, working_dtype
from fluctua.core.dependence import depends, varies_in_slope
from fluctua.core.diffusion import check_along, diffusion_at, with_silent
from fluctua.core.estimator import PPGT
from fluctua.core.integrators import mean_rate
from fluctua.core.likelihood.alternatives import FITTED, Table
from fluctua.core.likelihood.guard import LAWS, TRANSITIONS, Examination, Residuals, examine_batch
from fluctua.core.process import NoiseProduct, Process, Score, Step
from fluctua.core.recorded import MOST_SEARCHED, evaluate_returns, only
from fluctua.core.scores import (
    CorrectedScore,
    drift_score,
    local_linear,
    local_linear_score,
    without_readout,
)
from fluctua.core.simulate import Simulator
from fluctua.core.trajectories import Times, Trajectories
from fluctua.core.twin import TwinSamples

FEWEST_INCREMENTS = 10
"""Of a trajectory, to tell noise of the readout from what moves the state."""

MOST_KICKS = 1_000_000
"""Components of residuals that are examined in a call: as many as calibrate, where that is no
burden.
"""

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


def evidence(
    process: Process,
    score: Score,
    at: At,
    theta: Params,
    u: np.ndarray,
    trajectories: Trajectories,
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
            "process has a "
            "matrix, a product or components without noise. Calibrate its amplitude beforehand."
        )
    if noisy and score is drift_score:
        raise ValueError(
            "unknowns of the noise are calibrated by the score of drift and noise; `drift_score` "
            "is that of the drift "
            "alone. Make the model with score=fluctua.scores.full_score, the default."
        )
    if noisy and readout:
        raise ValueError(
            "unknowns of the noise are not told from noise of the readout in one pass; calibrate "
            "its amplitude "
            "beforehand, or leave `readout` at 0."
        )
    variance = jnp.full(x.shape[-1], readout**2, x.dtype) if readout else None
    rows = jnp.swapaxes(x, 0, 1)
    s, information = _sums(
        known, score, at, noisy, every, variance, theta, point, times, rows, context
    )
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
    if process.silent or process.diffusion is not None or isinstance(noise, NoiseProduct):
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
    return 2 * jnp.log(jnp.abs(sigma)) if sigma.ndim == 1 and not process.silent else sigma


@partial(jit, static_argnums=(0, 1, 2, 3, 4))
def _sums(
    process: Process,
    score: Score,
    at: At,
    noisy: bool,
    every: int,
    readout: Array | None,
    theta: Params,
    u: Array,
    times: Times,
    x: Array,
    context: PyTree,
) -> tuple[Array, Array]:
    """x: (T+1, E, M). readout: its variance (M,)."""
    used = score if readout is None else CorrectedScore(score, readout)
    p, pull = jax.vjp(lambda v: at(theta, v), u)
    t = times.t[:-1]
    dt = times.dt
    flat, unravel = ravel_pytree(p)

    def scores(total: Array, step: Any) -> tuple[Array, None]:
        x, x_next, t, dt = step
        each = jax.vmap(lambda a, b, c: ravel_pytree(used(process, p, Step(a, b, t, dt, c)))[0])(
            x, x_next, context
        )
        return total + each.sum(axis=0), None

    s, _ = jax.lax.scan(scores, jnp.zeros_like(flat), (x[:-1], x[1:], t, dt))

    def one(x: Array, t: Array, dt: Array, share: Array, context: PyTree) -> Array:
        if score is local_linear_score:

            def law(v):
                return local_linear(process, at(theta, v), Step(x, x, t, dt, context))

            slope = jax.jacfwd(lambda v: law(v).mean)(u)
            return slope.T @ jnp.linalg.solve(law(u).covariance, slope) * share / dt
        slope = jax.jacfwd(lambda v: mean_rate(process, at(theta, v), x, t, dt, context))(u)
        q = diffusion_at(process, p, x, t, context)
        information = slope.T @ jax.vmap(q.solve, in_axes=1, out_axes=1)(slope) * share / 2
        if noisy:
            of_noise = jax.jacfwd(lambda v: _log_q(process, at(theta, v), x, t, context))(u)
            information += of_noise.T @ of_noise / 2 * share / dt
        return information

    def seen(x: Array, *rest: Any) -> Array:
        return (
            one(x, *rest)
            if readout is None
            else without_readout(lambda z: one(z, *rest), readout)(x)
        )

    begins = np.arange(0, len(dt), every)
    shares = jax.ops.segment_sum(dt, np.arange(len(dt)) // every, len(begins))

    def informations(total: Array, step: Any) -> tuple[Array, None]:
        x, t, dt, share = step
        return total + jax.vmap(seen, in_axes=(0, None, None, None, 0))(
            x, t, dt, share, context
        ).sum(axis=0), None

    empty = jnp.zeros((u.size, u.size), u.dtype)
    steps = (x[:-1][begins], t[begins], dt[begins], shares)
    return pull(unravel(s))[0], jax.lax.scan(informations, empty, steps)[0]


def measured_readout(trajectories: Trajectories) -> float:
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


# ------------------------------------------------------------------------------------------ models

NOT_EXAMINED = Examination(Residuals(np.ones(0), np.zeros(0), 0))


class CalibratableModel(Protocol):
    """What `SelfCalibrating` asks of a model in the parameters p: an estimator with a twin, such as
    that of `ppgt`.
    """

    def split(self, key: Array, theta: Params, count: int) -> TwinSamples:
        """The gradients of simulated trajectories in two parts, direct and correction."""

    def recorded(self, theta: Params, trajectories: Trajectories) -> TwinSamples:
        """The same of measured trajectories."""

    def returns(self, theta: Params, trajectories: Trajectories) -> Array:
        """Their returns. (E,)"""

    def evidence(
        self,
        at: At,
        theta: Params,
        u: np.ndarray,
        trajectories: Trajectories,
        every: int,
        readout: float,
    ) -> Evidence:
        """What they say about the unknowns. readout: standard deviation of the measurement."""

    def examine(
        self, theta: Params, trajectories: Trajectories, readout: float, earlier: Table | None
    ) -> Examination:
        """Whether they are those of the process at p, with what batches before them left
        (`Examination.sums`).
        """


@dataclass(frozen=True)
class CalibratableProcess:
    """Any Itô process with a twin as a `CalibratableModel`."""

    estimator: PPGT

    def split(self, key: Array, theta: Params, count: int) -> TwinSamples:
        """The two parts of simulated trajectories."""
        return self.estimator.split(key, theta, count)

    def recorded(self, theta: Params, trajectories: Trajectories) -> TwinSamples:
        """The two parts of measured trajectories."""
        return self.estimator.recorded(theta, trajectories, examined=True)

    def returns(self, theta: Params, trajectories: Trajectories) -> Array:
        """Their returns. (E,)"""
        return evaluate_returns(self.estimator.method.model.objective, theta, trajectories)

    def evidence(
        self,
        at: At,
        theta: Params,
        u: np.ndarray,
        trajectories: Trajectories,
        every: int,
        readout: float,
    ) -> Evidence:
        """What they say about the unknowns."""
        model = self.estimator.method.model
        assert isinstance(model.process, Process)  # it has a twin
        return evidence(model.process, model.score, at, theta, u, trajectories, every, readout)

    def examine(
        self, theta: Params, trajectories: Trajectories, readout: float, earlier: Table | None
    ) -> Examination:
        """Whether they are those of the process at p; a score of one's own may know another
        law: not asked.
        """
        model = self.estimator.method.model
        simulator = self.estimator.substrate
        law = LAWS.get(model.score)
        if law is None:
            return NOT_EXAMINED
        start = (
            simulator.x0 if isinstance(simulator, Simulator) and simulator.recipe.fixed else None
        )
        return examine_batch(
            model.process,
            theta,
            trajectories,
            transition=law,
            readout=readout**2,
            limits=FITTED,
            earlier=earlier,
            start=start,
            most=max(TRANSITIONS, MOST_KICKS // np.shape(trajectories.x)[2]),
        )
