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

from collections.abc import Iterator
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
from fluctua.core.likelihood.steps import (
    Source,
    Transition,
    load_pieces,
    map_ends,
    mark_noiseless,
    open_source,
)
from fluctua.core.model import returns_to_go
from fluctua.core.objective import Objective, Rewards
from fluctua.core.process import Process, Step
from fluctua.core.scores import euler
from fluctua.core.trajectories import Times, Trajectories

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
    source: Source,
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
    data = open_source(source)
    rewards = check.objective(objective)
    theta = check.parameters(theta)
    process = mark_noiseless(data, process, theta)
    count, _, width = data.x.shape
    if count < 4:
        raise ValueError(f"the residuals are examined on four trajectories or more; got {count}.")
    groups = min(GROUPS, count // 2)
    named = components or tuple(f"x[{i}]" for i in range(width))
    units = _measure_units(data, usable)
    sums = _sum_regression(data, _Law(process, transition, noisy_states), theta, units, groups)
    whole = sums.gram.sum(axis=0)
    variance = np.maximum(sums.square / sums.steps, 1e-300)
    inverse = np.linalg.pinv(whole, rcond=1e-10, hermitian=True)
    beta = inverse @ sums.right.sum(axis=0)
    explained = np.einsum("km,kl,lm->m", beta, whole, beta)
    rank = np.linalg.matrix_rank(whole, rtol=1e-10, hermitian=True)
    # what the noise alone puts into b̂ is taken off before the spread of b is quoted
    spread = np.maximum(explained - rank * variance, 0) / sums.steps
    each = [
        np.linalg.pinv(gram, rcond=1e-10, hermitian=True) @ right
        for gram, right in zip(sums.gram, sums.right, strict=True)
    ]
    model = _Model(process, rewards, window)
    bias = _measure_bias(data, model, theta, np.stack(each), units)
    slopes = _find_slopes(data, process, theta)
    in_noise = np.any(np.asarray(slopes.noise) != 0, axis=0)
    # a bias is seen along all trajectories, a slope along the first
    in_drift = np.any(np.asarray(slopes.drift) != 0, axis=0) | np.any(bias != 0, axis=0)
    unknown = in_noise & ~in_drift
    mean = np.where(unknown, np.nan, bias.mean(axis=0))
    error = np.where(unknown, np.nan, bias.std(axis=0, ddof=1) / np.sqrt(groups))
    unravel = ravel_pytree(theta)[1]
    real = jnp.result_type(float)
    return ResidualReport(
        p_values=scipy.stats.chi2.sf(explained / variance, rank),
        coefficients=beta,
        stderr=np.sqrt(np.outer(np.diag(inverse), variance)),
        features=("1", *named, *(f"({name})³" for name in named)),
        relative=np.sqrt(spread / np.maximum(sums.drift / sums.steps, 1e-300)),
        bias=unravel(jnp.asarray(mean, real)),
        bias_stderr=unravel(jnp.asarray(error, real)),
        groups=groups,
        in_drift=in_drift,
        in_noise=in_noise,
    )


class _Law(NamedTuple):
    """What is compiled. lagged: features are taken at the sample before."""

    process: Process
    transition: Transition
    lagged: bool


class _Model(NamedTuple):
    """What a bias is of. window: steps over which a kick is remembered, or None."""

    process: Process
    rewards: Rewards
    window: int | None


class _States(NamedTuple):
    """Some trajectories in working precision: x (E, T+1, M)."""

    x: Array
    times: Times
    context: PyTree


class _Units(NamedTuple):
    """Mean and spread of every component, units for φ. mask: 0 for components to leave out."""

    center: Array
    scale: Array
    mask: Array


def _measure_units(data: Trajectories, usable: np.ndarray | None) -> _Units:
    """Units from the first trajectories."""
    some = np.asarray(next(load_pieces(data, BATCH)).x, np.float64)[:, 1:]
    spread = some.std(axis=(0, 1))
    mask = np.ones(data.x.shape[2]) if usable is None else np.asarray(usable, float)
    scale = np.where(spread > 0, spread, 1.0)
    return _Units(some.mean(axis=(0, 1)), scale, jnp.asarray(mask))


class _Regression(NamedTuple):
    """Σφφᵀ (G, K, K) and Σφrᵀ/Δt (G, K, M) of every group; Σ(r/Δt)² and Σμ² (M,) of all steps."""

    gram: np.ndarray
    right: np.ndarray
    square: np.ndarray
    drift: np.ndarray
    steps: int


def _sum_regression(
    data: Trajectories, law: _Law, theta: Params, units: _Units, groups: int
) -> _Regression:
    width = data.x.shape[2]
    size = 1 + 2 * width
    gram = np.zeros((groups, size, size))
    right = np.zeros((groups, size, width))
    square = np.zeros(width)
    drift = np.zeros(width)
    for first, piece in _number_pieces(data):
        x, times = _prepare(piece, theta)
        sums = _regress(law, theta, x, times, piece.context, units)
        a, b, s, d = (np.asarray(v, np.float64) for v in sums)
        group = (first + np.arange(len(x))) % groups
        np.add.at(gram, group, a)
        np.add.at(right, group, b)
        square = square + s.sum(axis=0)
        drift = drift + d.sum(axis=0)
    steps = len(data.x) * (data.x.shape[1] - 1 - int(law.lagged))
    return _Regression(gram, right, square, drift, steps)


class Slopes(NamedTuple):
    """Derivatives by each parameter of the drift and of the noise, along a trajectory. (P,) each"""

    drift: Array
    noise: Array


def _find_slopes(data: Trajectories, process: Process, theta: Params) -> Slopes:
    """`Slopes` of the first trajectories. (E, P) each"""
    piece = next(load_pieces(data, BATCH))
    x, times = _prepare(piece, theta)
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


def _number_pieces(data: Trajectories) -> Iterator[tuple[int, Trajectories]]:
    """Pieces of the data, each with the number of its first trajectory."""
    first = 0
    for piece in load_pieces(data, BATCH):
        yield first, piece
        first += len(piece.x)


def _prepare(piece: Trajectories, theta: Params) -> tuple[Array, Times]:
    """States in working precision, and their times."""
    return jnp.asarray(piece.x, working_dtype(theta, piece.x)), check.grid(piece.t)


def _features(x: Array, units: _Units) -> Array:
    """φ(x). (M,) -> (2M+1,)"""
    z = ((x - units.center) / units.scale).astype(x.dtype)
    return jnp.concatenate([jnp.ones(1, x.dtype), z, z**3])


@partial(jit, static_argnums=0)
def _regress(
    law: _Law, theta: Params, x: Array, times: Times, context: PyTree, units: _Units
) -> tuple[Array, Array, Array, Array]:
    """Σφφᵀ (E, K, K), Σφ rᵀ/Δt (E, K, M), Σ(r/Δt)² (E, M) and Σμ² (E, M) of each trajectory."""

    def one(step: Step) -> tuple[Array, Array]:
        mean = law.transition(law.process, theta, step).mean
        drift = law.process.drift(theta, step.x, step.t, step.context)
        return (step.x_next - mean) / step.dt * units.mask, drift

    k = int(law.lagged)
    steps = x.shape[1] - 1
    some = Times(times.t[k:-1], times.dt[k:])
    r, mu = map_ends(one, x[:, k:-1], x[:, k + 1 :], some, context)
    phi = jax.vmap(jax.vmap(lambda x: _features(x, units)))(x[:, : steps - k])
    gram = jnp.einsum("enk,enl->ekl", phi, phi)
    return gram, jnp.einsum("enk,enm->ekm", phi, r), (r**2).sum(axis=1), (mu**2).sum(axis=1)


def _measure_bias(
    data: Trajectories, model: _Model, theta: Params, beta: np.ndarray, units: _Units
) -> np.ndarray:
    """B of every group, with the coefficients (G, K, M) of the one before. (G, P)"""
    groups = len(beta)
    table: Any = 0.0
    for piece in load_pieces(data, BATCH):
        x, times = _prepare(piece, theta)
        ahead = _to_go(model.rewards, theta, times, x, piece.context)
        table = table + np.asarray(ahead, np.float64).sum(axis=0)
    table = jnp.asarray(table / len(data.x))
    total = np.zeros((groups, ravel_pytree(theta)[0].size))
    members = np.zeros(groups)
    for first, piece in _number_pieces(data):
        x, times = _prepare(piece, theta)
        group = (first + np.arange(len(x))) % groups
        used = jnp.asarray(beta[group - 1], x.dtype)
        states = _States(x, times, piece.context)
        rows = _sum_biases(model, theta, states, used, units, table)
        np.add.at(total, group, np.asarray(rows, np.float64))
        np.add.at(members, group, 1)
    return total / members[:, None]


_to_go = partial(jit, static_argnums=0)(returns_to_go)


def _sum_window(returns: Array, table: Array, times: Times, window: int) -> Array:
    """Σ_{k=1}^w (gₙ₊ₖ − ḡ), over the number of kicks with so many rewards after them; zero for
    the others. (E, T)
    """
    steps = times.dt.shape[0]
    level = table[0] - table[-1]  # Σ g Δt of a trajectory on average
    centred = returns - level * jnp.flip(jnp.arange(steps + 1)) / steps
    inside = (centred[:, 1 : steps - window + 1] - centred[:, window + 1 :]) / times.dt[0]
    return jnp.pad(inside, ((0, 0), (0, window))) / (steps - window)


@partial(jit, static_argnums=0)
def _sum_biases(
    model: _Model, theta: Params, states: _States, beta: Array, units: _Units, table: Array
) -> Array:
    """Σ_n (λ̂ₙ₊₁ − λ̄ₙ₊₁) ½ bᵀQ⁻¹ ∂μ Δt of each trajectory, or its mean over n with rewards of
    a window. (E, P)
    """
    process = model.process
    x, times, context = states
    ahead = _to_go(model.rewards, theta, times, x, context)
    weight = (
        (ahead - table)[:, 1:]
        if model.window is None
        else _sum_window(ahead, table, times, model.window)
    )

    def one(x: Array, context: PyTree, beta: Array, weight: Array) -> Array:
        def push(x: Array, t: Array, dt: Array, w: Array) -> Array:
            b = (_features(x, units) @ beta) * units.mask
            return w * dt * diffusion_at(process, theta, x, t, context).solve(b.astype(x.dtype)) / 2

        cotangent = jax.vmap(push)(x[:-1], times.t[:-1], times.dt, weight)

        def pull(th: Params) -> Array:
            def rate(x: Array, t: Array, dt: Array) -> Array:
                return mean_rate(process, th, x, t, dt, context)

            return jnp.sum(cotangent * jax.vmap(rate)(x[:-1], times.t[:-1], times.dt))

        return ravel_pytree(jax.grad(pull)(theta))[0]

    return jax.vmap(one)(x, context, beta, weight)
