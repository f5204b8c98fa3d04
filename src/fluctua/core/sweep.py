"""One sweep through time (Eq. 13): what every trajectory accumulates, step by step.

    G = Σ_{n=−1}^{T−1} (λ̂ₙ₊₁ − λ̄ₙ) Uₙ + ∂θ g_T(X_T) + Σ_n ∂θ g(X_n, t_n) Δtₙ,      U₋₁ = ∂θ ln p₀(X₀)

All trajectories move together, so memory is O(E·(M + P)) and a baseline may look across the ensemble at
every step. λ̂ₙ₊₁ = R − Cₙ₊₁, with R the whole return and C the reward so far.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fluctua.core.baselines import Kick
from fluctua.core.start import Density, Reparameterised
from fluctua.core.types import AnyProcess, Array, Params, Process, PyTree, Rewards, Score, Step


class Model(NamedTuple):
    """What the estimator knows about the substrate: code, not numbers; hashable."""

    process: AnyProcess
    objective: Rewards
    score: Score
    start: Density | Reparameterised | None
    baseline: Callable[[Kick], Array]
    initial_baseline: Callable[[Kick], Array]


def silenced(model: Model, process: AnyProcess) -> Model:
    """The model with a process whose silent components are named."""
    if isinstance(process, Process) and process.silent and isinstance(model.start, Reparameterised):
        raise ValueError(
            f"a `Reparameterised` start displaces the path, and state component {process.silent[0]}, which has no "
            "noise, cannot be displaced. Give the start a `Density` in the components with noise, or instrument noise."
        )
    return model._replace(process=process)


class Tables(NamedTuple):
    """The numbers that baselines bring along."""

    step: Array | None
    initial: Array | None


class Sums(NamedTuple):
    """What a trajectory carries through time."""

    reward: Array  # C (E,)
    gradient: Array  # Σ (λ̂ − λ̄)U and the explicit terms (E, P)
    score: Array  # ΣU (E, P)


def running(model: Model, theta: Params, x: Array, t: Array, context: PyTree) -> Array:
    """g(X_n, t_n) for every trajectory. (E,)"""
    return jax.vmap(model.objective.running, in_axes=(None, 0, None, 0))(theta, x, t, context).astype(x.dtype)


def terminal(model: Model, theta: Params, x: Array, context: PyTree) -> Array:
    """g_T(X_T) for every trajectory. (E,)"""
    return jax.vmap(model.objective.terminal, in_axes=(None, 0, 0))(theta, x, context).astype(x.dtype)


@partial(jax.jit, static_argnums=0)
def initial_sums(
    model: Model, theta: Params, x: Array, t: Array, context: PyTree, returns: Array, tables: Tables
) -> Sums:
    """The initial term: the draw of X₀ is the step n = −1, whose score is ∂θ ln p₀."""
    flat, _ = ravel_pytree(theta)
    empty = jnp.zeros((x.shape[0], flat.size), flat.dtype)
    reward = jnp.zeros(x.shape[0], returns.dtype)
    if not isinstance(model.start, Density):
        return Sums(reward, empty, empty)
    one = lambda x, c: ravel_pytree(jax.grad(model.start.log_density)(theta, x, c))[0]
    score = jax.vmap(one)(x, context)
    bar = model.initial_baseline(Kick(jnp.array(-1), theta, None, t, context, returns, score, tables.initial))
    return Sums(reward, ((returns[:, None] - bar) * score).astype(score.dtype), score)


def sweep_step(
    model: Model,
    theta: Params,
    sums: Sums,
    returns: Array,
    tables: Tables,
    ensemble: tuple[Array, Array, PyTree, PyTree],
    when: tuple[Array, Array, Array],
    origin: Array,
) -> Sums:
    """Add step n of the whole ensemble, (x, x_next, context, events): (λ̂ₙ₊₁ − λ̄ₙ)Uₙ and ∂θ g Δt.

    origin: the first two times.
    """
    x, _, context, _ = ensemble
    n, t, dt = when
    reward = sums.reward + running(model, theta, x, t, context) * dt.astype(x.dtype)
    score, explicit = scores(model, theta, ensemble, when, origin)
    to_go = returns - reward  # λ̂ₙ₊₁: the reward at n precedes the kick
    bar = model.baseline(Kick(n, theta, x, t, context, to_go, score, tables.step))
    term = (to_go[:, None] - bar) * score + explicit
    return Sums(reward, sums.gradient + term.astype(score.dtype), sums.score + score)


def scores(
    model: Model, theta: Params, ensemble: tuple[Array, Array, PyTree, PyTree], when: tuple[Array, ...], origin: Array
) -> tuple[Array, Array]:
    """Uₙ and ∂θ g Δt of every trajectory, each (E, P)."""
    _, t, dt = when

    def fixed(x: Array, x_next: Array, context: PyTree, events: PyTree) -> tuple[Array, Array]:
        score = model.score(model.process, theta, Step(x, x_next, t, dt, context, events))
        explicit = jax.grad(lambda th: model.objective.running(th, x, t, context) * dt)(theta)
        return ravel_pytree(score)[0], ravel_pytree(explicit)[0]

    def moving(x: Array, x_next: Array, context: PyTree, events: PyTree) -> tuple[Array, Array]:
        assert isinstance(model.start, Reparameterised)
        d = model.start.shift(theta, context)
        w = [model.start.weight(s, origin[0], origin[1] - origin[0]) for s in (t, t + dt)]
        score = model.score(
            model.process,
            theta,
            Step(x, x_next, t, dt, context, events),
            shift=lambda th: (w[0] * d(th), w[1] * d(th)),
        )  # type: ignore[call-arg]
        explicit = jax.grad(lambda th: model.objective.running(th, x + w[0] * d(th), t, context) * dt)(theta)
        return ravel_pytree(score)[0], ravel_pytree(explicit)[0]

    return jax.vmap(moving if isinstance(model.start, Reparameterised) else fixed)(*ensemble)


@partial(jax.jit, static_argnums=0)
def finish(model: Model, theta: Params, sums: Sums, x: Array, t: Array, context: PyTree) -> Array:
    """Add ∂θ g_T(X_T). (E, P)"""

    def one(x: Array, context: PyTree) -> Array:
        end = lambda th: x
        if isinstance(model.start, Reparameterised):
            w, d = model.start.weight(t[-1], t[0], t[1] - t[0]), model.start.shift(theta, context)
            end = lambda th: x + w * d(th)
        return ravel_pytree(jax.grad(lambda th: model.objective.terminal(th, end(th), context))(theta))[0]

    return sums.gradient + jax.vmap(one)(x, context)


def returns_to_go(rewards: Array, terminal: Array, dt: Array) -> Array:
    """Reward still to come at each time, λ̂ₙ = g_T(X_T) + Σ_{k≥n} g(X_k, t_k)Δt_k (Eq. 6).

    The reward of step k is taken at X_k, so λ̂ₙ includes g(X_n) and the score of step n meets λ̂ₙ₊₁.

    Args:
        rewards: (E, T).
        terminal: (E,).
        dt: (T,).

    Returns: (E, T+1).

    >>> returns_to_go(jnp.array([[1.0, 2.0]]), jnp.array([10.0]), jnp.array([0.5, 0.25]))
    Array([[11. , 10.5, 10. ]], dtype=float32)
    """
    steps = jnp.concatenate([rewards * dt, terminal[:, None]], axis=1)
    return jnp.flip(jnp.cumsum(jnp.flip(steps, 1), axis=1), 1)
