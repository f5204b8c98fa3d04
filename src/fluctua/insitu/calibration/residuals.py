"""Is E[r | x] zero? Where not, and how much bias that puts on the gradient.

The score takes r for noise. If the drift is wrong by b(x), so that E[r | x] = bΔt, the gradient is
biased by

    B = E[Σ_n (λ̂ₙ₊₁ − λ̄ₙ) ½ b(X_n)ᵀ Q⁻¹ ∂μ/∂θ Δt].

b is regressed on features of the state, r_i/Δt = β_i·φ(x), φ = (1, x, x³) in units of their spread.
For B the trajectories are dealt into groups; β from one group is put into B on the next, so that
the noise in β is independent of what it multiplies, and the scatter over the groups is its error:
of β and of the average together. A regression of increments on the states that they lead to is
itself biased by 1/(trajectories of a group), which leaves up to about one such error in B with ten
trajectories a group, and less with more.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax.flatten_util import ravel_pytree

from fluctua.core import check
from fluctua.core.arrays import Array, Params, PyTree, jit, working_dtype
from fluctua.core.diffusion import diffusion_at
from fluctua.core.integrators import mean_rate
from fluctua.core.model import returns_to_go
from fluctua.core.objective import Objective, Rewards
from fluctua.core.process import Process, Step
from fluctua.core.scores import euler
from fluctua.core.trajectories import Times, Trajectories
from fluctua.insitu.calibration.drift import Transition
from fluctua.insitu.recording.reader import RecordingFile, pieces, with_silent_named

GROUPS = 10
BATCH = 64


class ResidualReport(NamedTuple):
    """p_values: (M,), of E[r_i | x] = 0. coefficients, stderr: β (K, M) in units of drift per
    spread of φ, and errors.

    features: K names. relative: (M,), the spread of b_i over the spread of μ_i. bias, bias_stderr:
    B with the structure of θ, NaN where it was not examined: B is of the drift, and says nothing of
    a parameter of the noise alone.
    groups: how many B was averaged over. in_drift, in_noise: (P,), whether a parameter was seen to
    act on μ and on Q.
    """

    p_values: np.ndarray
    coefficients: np.ndarray
    stderr: np.ndarray
    features: tuple[str, ...]
    relative: np.ndarray
    bias: Params
    bias_stderr: Params
    groups: int
    in_drift: np.ndarray
    in_noise: np.ndarray


def examine_residuals(
    source: RecordingFile | Trajectories,
    process: Process,
    objective: Objective,
    theta: Params,
    *,
    components: tuple[str, ...] | None = None,
    transition: Transition = euler,
    usable: np.ndarray | None = None,
    noisy_states: bool = False,
    window: int | None = None,
) -> ResidualReport:
    """The test and the bias. Needs four trajectories at least; the more, the finer.

    Args:
        source: a recording or trajectories.
        process: the model under test.
        objective: what is maximised, for the bias.
        theta: θ at which it was recorded.
        components: their names, for the report.
        transition: of the model between two samples.
        usable: (M,) components whose residual is known, if channels are hidden.
        noisy_states: the states carry observation noise, which sits in r and in φ(x) both; φ is
            then taken at the sample before, which shares no noise with r. The p-values are too
            large then, never too small.
        window: steps over which a kick is remembered, for the bias of a long-run average; the
            return of a trajectory if not given.

    Returns: p-values of the components, and the bias of the gradient with its error.

    >>> report = examine_residuals(recording, process, objective, theta)
    >>> report.p_values.min(), report.bias["omega"], report.bias_stderr["omega"]
    """
    rewards = check.objective(objective)
    theta = check.parameters(theta)
    process = with_silent_named(source, process, theta)
    count, _, width = source.x.shape
    if count < 4:
        raise ValueError(f"the residuals are examined on four trajectories or more; got {count}.")
    groups = min(GROUPS, count // 2)
    mask = jnp.ones(width) if usable is None else jnp.asarray(usable, float)
    named = components or tuple(f"x[{i}]" for i in range(width))
    features = ("1", *named, *(f"({name})³" for name in named))
    center, scale = _scales(source)
    size = 1 + 2 * width
    gram = np.zeros((groups, size, size))
    right = np.zeros((groups, size, width))
    square = np.zeros(width)
    drift2 = np.zeros(width)
    steps = 0
    for first, piece in _numbered(source):
        x, times = _working(piece, theta)
        sums = _regression(
            process, transition, noisy_states, theta, x, times, piece.context, center, scale, mask
        )
        a, b, s, d = (np.asarray(v, np.float64) for v in sums)
        np.add.at(gram, (first + np.arange(len(x))) % groups, a)
        np.add.at(right, (first + np.arange(len(x))) % groups, b)
        square = square + s.sum(axis=0)
        drift2 = drift2 + d.sum(axis=0)
        steps = steps + x.shape[0] * (x.shape[1] - 1 - noisy_states)
    whole = gram.sum(axis=0)
    variance = np.maximum(square / steps, 1e-300)
    inverse = np.linalg.pinv(whole, rcond=1e-10, hermitian=True)
    beta = inverse @ right.sum(axis=0)
    wald = np.einsum("km,kl,lm->m", beta, whole, beta) / variance
    rank = np.linalg.matrix_rank(whole, rtol=1e-10, hermitian=True)
    # what the noise alone puts into b̂ is taken off before the spread of b is quoted
    spread = np.maximum(np.einsum("km,kl,lm->m", beta, whole, beta) - rank * variance, 0) / steps
    each = np.stack(
        [np.linalg.pinv(gram[g], rcond=1e-10, hermitian=True) @ right[g] for g in range(groups)]
    )
    bias = _bias(source, process, rewards, theta, each, center, scale, mask, groups, window)
    unravel = ravel_pytree(theta)[1]

    def put(v):
        return unravel(jnp.asarray(v, jnp.result_type(float)))

    error = bias.std(axis=0, ddof=1) / np.sqrt(groups)
    slopes = _find_slopes(source, process, theta)
    in_noise = np.any(np.asarray(slopes.noise) != 0, axis=0)
    # a bias is seen along all trajectories, a slope along the first
    in_drift = np.any(np.asarray(slopes.drift) != 0, axis=0) | np.any(bias != 0, axis=0)
    unknown = in_noise & ~in_drift
    mean = np.where(unknown, np.nan, bias.mean(axis=0))
    error = np.where(unknown, np.nan, error)
    return ResidualReport(
        scipy.stats.chi2.sf(wald, rank),
        beta,
        np.sqrt(np.outer(np.diag(inverse), variance)),
        features,
        np.sqrt(spread / np.maximum(drift2 / steps, 1e-300)),
        put(mean),
        put(error),
        groups,
        in_drift,
        in_noise,
    )


class Slopes(NamedTuple):
    """Derivatives by each parameter of the drift and of the noise, along a trajectory. (P,) each"""

    drift: Array
    noise: Array


def _find_slopes(source: Any, process: Process, theta: Params) -> Slopes:
    """`Slopes` of the first trajectories. (E, P) each"""
    _, piece = next(_numbered(source))
    x, times = _working(piece, theta)
    probes = np.random.default_rng(0).normal(size=(len(times.dt), x.shape[2]))
    return _probe(process, theta, x, times, piece.context, jnp.asarray(probes, x.dtype))


@partial(jit, static_argnums=0)
def _probe(
    process: Process, theta: Params, x: Array, times: Times, context: PyTree, probes: Array
) -> Slopes:
    """∂θ Σₙ vₙ·μ and ∂θ Σₙ vₙ·Qvₙ of each trajectory, v random: zero only if every term is.

    (E, P) each
    """

    def one(x: Array, context: PyTree) -> Slopes:
        def drift(th: Params) -> Array:
            def along(v, x, t, dt):
                return v @ mean_rate(process, th, x, t, dt, context)

            return jax.vmap(along)(probes, x[:-1], times.t[:-1], times.dt).sum()

        def noise(th: Params) -> Array:
            def along(v, x, t):
                return v @ diffusion_at(process, theta, x, t, context).apply(th, v)

            return jax.vmap(along)(probes, x[:-1], times.t[:-1]).sum()

        return Slopes(
            ravel_pytree(jax.grad(drift)(theta))[0], ravel_pytree(jax.grad(noise)(theta))[0]
        )

    return jax.vmap(one)(x, context)


class EulerDefect(NamedTuple):
    """slope, stderr: of the residuals on what Euler's step leaves out; 1 if that is all that is
    wrong with them.
    """

    slope: float
    stderr: float

    @property
    def is_cause(self) -> bool:
        """Whether the interval explains residuals that are not zero on average."""
        return self.slope > 5 * self.stderr and abs(self.slope - 1) < max(0.3, 3 * self.stderr)

    @property
    def is_not(self) -> bool:
        """Whether something else does."""
        return self.stderr < 0.2 and not self.is_cause


def euler_defect(
    source: RecordingFile | Trajectories, process: Process, theta: Params, diffusion: np.ndarray
) -> EulerDefect:
    """Regress r on d = ½Δ²(∂ₓμ μ + ∂ₜμ), the next term of E[x' | x] after Euler's μΔ, weighted by
    1/2QΔ.

    Args:
        source: trajectories.
        process: its drift is taken for right, and its step for Euler's.
        theta: parameters as they were set.
        diffusion: Q (M,), for the weights.

    Returns: an `EulerDefect`.

    """
    process = check.process(process)
    theta = check.parameters(theta)
    total = 0.0
    square = 0.0
    for _, piece in _numbered(source):
        x, times = _working(piece, theta)
        dr, dd = _defects(process, theta, x, times, piece.context, jnp.asarray(diffusion, x.dtype))
        total = total + float(dr)
        square = square + float(dd)
    return EulerDefect(total / square, square**-0.5) if square > 0 else EulerDefect(0.0, np.inf)


@partial(jit, static_argnums=0)
def _defects(
    process: Process, theta: Params, x: Array, times: Times, context: PyTree, q: Array
) -> tuple[Array, Array]:
    """Σ dᵀr/2QΔ and Σ dᵀd/2QΔ."""

    def one(x: Array, x_next: Array, t: Array, dt: Array, context: PyTree) -> tuple[Array, Array]:
        def drift(x, t):
            return process.drift(theta, x, t, context)

        mu = drift(x, t)
        d = jax.jvp(drift, (x, t), (mu, jnp.ones_like(t)))[1] * dt**2 / 2
        weighted = jnp.where(
            q > 0, d / (2 * jnp.where(q > 0, q, 1) * dt), 0
        )  # nothing is weighed without noise
        return weighted @ (x_next - x - mu * dt), weighted @ d

    along = jax.vmap(jax.vmap(one, in_axes=(0, 0, 0, 0, None)), in_axes=(0, 0, None, None, 0))
    dr, dd = along(x[:, :-1], x[:, 1:], times.t[:-1], times.dt, context)
    return dr.sum(), dd.sum()


def _numbered(source: Any) -> Any:
    first = 0
    for piece in pieces(source, BATCH):
        yield first, piece
        first += len(piece.x)


def _working(piece: Trajectories, theta: Params) -> tuple[Array, Times]:
    return jnp.asarray(piece.x, working_dtype(theta, piece.x)), check.grid(piece.t)


def _scales(source: Any) -> tuple[np.ndarray, np.ndarray]:
    """Mean and spread of every component, from the first trajectories: units for φ, nothing
    else.
    """
    some = np.asarray(next(pieces(source, BATCH)).x, np.float64)[:, 1:]
    spread = some.std(axis=(0, 1))
    return some.mean(axis=(0, 1)), np.where(spread > 0, spread, 1.0)


def _features(x: Array, center: Array, scale: Array) -> Array:
    """φ(x). (M,) -> (2M+1,)"""
    z = ((x - center) / scale).astype(x.dtype)
    return jnp.concatenate([jnp.ones(1, x.dtype), z, z**3])


@partial(jit, static_argnums=(0, 1, 2))
def _regression(
    process: Process,
    transition: Transition,
    lagged: bool,
    theta: Params,
    x: Array,
    times: Times,
    context: PyTree,
    center: Array,
    scale: Array,
    mask: Array,
) -> tuple[Array, Array, Array, Array]:
    """Σφφᵀ (E, K, K), Σφ rᵀ/Δt (E, K, M), Σ(r/Δt)² (E, M) and Σμ² (E, M) of each trajectory."""

    def one(
        seen: Array, x: Array, x_next: Array, t: Array, dt: Array, context: PyTree
    ) -> tuple[Array, Array, Array]:
        mean = transition(process, theta, Step(x, x_next, t, dt, context)).mean
        return (
            _features(seen, center, scale),
            (x_next - mean) / dt * mask,
            process.drift(theta, x, t, context),
        )

    k = int(lagged)
    steps = x.shape[1] - 1
    along = jax.vmap(jax.vmap(one, in_axes=(0, 0, 0, 0, 0, None)), in_axes=(0, 0, 0, None, None, 0))
    phi, r, mu = along(
        x[:, : steps - k], x[:, k:-1], x[:, k + 1 :], times.t[k:-1], times.dt[k:], context
    )
    gram = jnp.einsum("enk,enl->ekl", phi, phi)
    return gram, jnp.einsum("enk,enm->ekm", phi, r), (r**2).sum(axis=1), (mu**2).sum(axis=1)


def _bias(
    source: Any,
    process: Process,
    rewards: Rewards,
    theta: Params,
    beta: np.ndarray,
    center: np.ndarray,
    scale: np.ndarray,
    mask: Array,
    groups: int,
    window: int | None,
) -> np.ndarray:
    """B of every group, with the coefficients of the one before. (groups, P)"""
    table: Any = 0.0
    count = 0
    for _, piece in _numbered(source):
        x, times = _working(piece, theta)
        table = table + np.asarray(_to_go(rewards, theta, times, x, piece.context), np.float64).sum(
            axis=0
        )
        count += len(x)
    table = jnp.asarray(table / count)
    total = np.zeros((groups, ravel_pytree(theta)[0].size))
    members = np.zeros(groups)
    for first, piece in _numbered(source):
        x, times = _working(piece, theta)
        group = (first + np.arange(len(x))) % groups
        used = jnp.asarray(beta[group - 1], x.dtype)
        rows = _biases(
            process,
            rewards,
            window,
            theta,
            x,
            times,
            piece.context,
            used,
            center,
            scale,
            mask,
            table,
        )
        np.add.at(total, group, np.asarray(rows, np.float64))
        np.add.at(members, group, 1)
    return total / members[:, None]


_to_go = partial(jit, static_argnums=0)(returns_to_go)


def _windowed(returns: Array, table: Array, times: Times, window: int) -> Array:
    """Σ_{k=1}^w (gₙ₊ₖ − ḡ), over the number of kicks with so many rewards after them; zero for
    the others. (E, T)
    """
    steps = times.dt.shape[0]
    level = table[0] - table[-1]  # Σ g Δt of a trajectory on average
    centred = returns - level * jnp.flip(jnp.arange(steps + 1)) / steps
    inside = (centred[:, 1 : steps - window + 1] - centred[:, window + 1 :]) / times.dt[0]
    return jnp.pad(inside, ((0, 0), (0, window))) / (steps - window)


@partial(jit, static_argnums=(0, 1, 2))
def _biases(
    process: Process,
    rewards: Rewards,
    window: int | None,
    theta: Params,
    x: Array,
    times: Times,
    context: PyTree,
    beta: Array,
    center: Array,
    scale: Array,
    mask: Array,
    table: Array,
) -> Array:
    """Σ_n (λ̂ₙ₊₁ − λ̄ₙ₊₁) ½ bᵀQ⁻¹ ∂μ Δt of each trajectory, or its mean over n with rewards of
    a window. (E, P)
    """
    ahead = _to_go(rewards, theta, times, x, context)
    weight = (ahead - table)[:, 1:] if window is None else _windowed(ahead, table, times, window)

    def one(x: Array, context: PyTree, beta: Array, weight: Array) -> Array:
        def push(x: Array, t: Array, dt: Array, w: Array) -> Array:
            b = (_features(x, center, scale) @ beta) * mask
            return w * dt * diffusion_at(process, theta, x, t, context).solve(b.astype(x.dtype)) / 2

        cotangent = jax.vmap(push)(x[:-1], times.t[:-1], times.dt, weight)

        def rate(th):
            return lambda x, t, dt: mean_rate(process, th, x, t, dt, context)

        def mu(th):
            return jax.vmap(rate(th))(x[:-1], times.t[:-1], times.dt)

        return ravel_pytree(jax.grad(lambda th: jnp.sum(cotangent * mu(th)))(theta))[0]

    return jax.vmap(one)(x, context, beta, weight)
