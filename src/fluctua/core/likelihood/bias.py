"""The bias of a gradient where E[r | x] is not zero.

If the drift is wrong by b(x), so that E[r | x] = bΔt, the gradient is biased by

    B = E[Σ_n (λ̂ₙ₊₁ − λ̄ₙ) ½ b(X_n)ᵀ Q⁻¹ ∂μ/∂θ Δt],     b = β·φ(x),  φ = (1, x, x³).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core import check
from fluctua.core.arrays import Array, Params, PyTree, jit, working_dtype
from fluctua.core.diffusion import diffusion_at
from fluctua.core.integrators import mean_rate
from fluctua.core.likelihood.sources import load_pieces
from fluctua.core.model import returns_to_go
from fluctua.core.objective import Rewards
from fluctua.core.process import Process
from fluctua.core.trajectories import Times, Trajectories

BATCH = 64


class BiasModel(NamedTuple):
    """Model whose bias is estimated. window: steps over which a kick is followed, or None."""

    process: Process
    rewards: Rewards
    window: int | None


class _WorkingStates(NamedTuple):
    """Some trajectories in working precision: x (E, T+1, M)."""

    x: Array
    times: Times
    context: PyTree


class FeatureUnits(NamedTuple):
    """Mean and spread of every component, units for φ. mask: 0 for components to leave out."""

    center: Array
    scale: Array
    mask: Array


def measure_units(data: Trajectories, usable: np.ndarray | None) -> FeatureUnits:
    """Units from the first trajectories."""
    some = np.asarray(next(load_pieces(data, BATCH)).trajectories.x, np.float64)[:, 1:]
    spread = some.std(axis=(0, 1))
    mask = np.ones(data.x.shape[2]) if usable is None else np.asarray(usable, float)
    scale = np.where(spread > 0, spread, 1.0)
    return FeatureUnits(some.mean(axis=(0, 1)), scale, jnp.asarray(mask))


def prepare(piece: Trajectories, theta: Params) -> tuple[Array, Times]:
    """States in working precision, and their times."""
    return jnp.asarray(piece.x, working_dtype(theta, piece.x)), check.grid(piece.t)


def form_features(x: Array, units: FeatureUnits) -> Array:
    """φ(x). (M,) -> (2M+1,)"""
    z = ((x - units.center) / units.scale).astype(x.dtype)
    return jnp.concatenate([jnp.ones(1, x.dtype), z, z**3])


class Slopes(NamedTuple):
    """Derivatives by each parameter of the drift and of the noise, along a trajectory. (P,) each"""

    drift: Array
    noise: Array


def find_slopes(data: Trajectories, process: Process, theta: Params) -> Slopes:
    """`Slopes` of the first trajectories. (E, P) each"""
    piece = next(load_pieces(data, BATCH)).trajectories
    x, times = prepare(piece, theta)
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


def measure_bias(
    data: Trajectories, model: BiasModel, theta: Params, beta: np.ndarray, units: FeatureUnits
) -> np.ndarray:
    """B of every group, with the coefficients (G, K, M) of the one before. (G, P)"""
    groups = len(beta)
    table: Any = 0.0
    for _, piece in load_pieces(data, BATCH):
        x, times = prepare(piece, theta)
        ahead = _to_go(model.rewards, theta, times, x, piece.context)
        table = table + np.asarray(ahead, np.float64).sum(axis=0)
    table = jnp.asarray(table / len(data.x))
    total = np.zeros((groups, ravel_pytree(theta)[0].size))
    members = np.zeros(groups)
    for first, piece in load_pieces(data, BATCH):
        x, times = prepare(piece, theta)
        group = (first + np.arange(len(x))) % groups
        used = jnp.asarray(beta[group - 1], x.dtype)
        states = _WorkingStates(x, times, piece.context)
        rows = _sum_biases(model, theta, states, used, units, table)
        np.add.at(total, group, np.asarray(rows, np.float64))
        np.add.at(members, group, 1)
    return total / members[:, None]


_to_go = partial(jit, static_argnums=0)(returns_to_go)


def _sum_window(returns: Array, table: Array, times: Times, window: int) -> Array:
    """Σ_{k=1}^w (gₙ₊ₖ − ḡ) over the number of kicks with so many rewards after them. (E, T)

    Zero for the other kicks.
    """
    steps = times.dt.shape[0]
    level = table[0] - table[-1]  # Σ g Δt of a trajectory on average
    centred = returns - level * jnp.flip(jnp.arange(steps + 1)) / steps
    inside = (centred[:, 1 : steps - window + 1] - centred[:, window + 1 :]) / times.dt[0]
    return jnp.pad(inside, ((0, 0), (0, window))) / (steps - window)


@partial(jit, static_argnums=0)
def _sum_biases(
    model: BiasModel,
    theta: Params,
    states: _WorkingStates,
    beta: Array,
    units: FeatureUnits,
    table: Array,
) -> Array:
    """Σ_n (λ̂ₙ₊₁ − λ̄ₙ₊₁) ½ bᵀQ⁻¹ ∂μ Δt of each trajectory. (E, P)

    With a window, the mean over n with the rewards of the window.
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
            b = (form_features(x, units) @ beta) * units.mask
            return w * dt * diffusion_at(process, theta, x, t, context).solve(b.astype(x.dtype)) / 2

        cotangent = jax.vmap(push)(x[:-1], times.t[:-1], times.dt, weight)

        def pull(th: Params) -> Array:
            def rate(x: Array, t: Array, dt: Array) -> Array:
                return mean_rate(process, th, x, t, dt, context)

            return jnp.sum(cotangent * jax.vmap(rate)(x[:-1], times.t[:-1], times.dt))

        return ravel_pytree(jax.grad(pull)(theta))[0]

    return jax.vmap(one)(x, context, beta, weight)
