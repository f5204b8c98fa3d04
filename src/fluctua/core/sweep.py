"""One sweep through time (Eq. 13): what every trajectory accumulates, step by step.

    G = Σ_{n=−1}^{T−1} (λ̂ₙ₊₁ − λ̄ₙ) Uₙ + ∂θ g_T(X_T) + Σ_n ∂θ g(X_n, t_n) Δtₙ,      U₋₁ = ∂θ ln
    p₀(X₀)

All trajectories move together, so memory is O(E·(M + P)) and a baseline may look across the
ensemble at every step. λ̂ₙ₊₁ = R − Cₙ₊₁, with R the whole return and C the reward so far.

A reward r(X_n, X_{n+1}) of a step is paid on arrival at X_{n+1}, and one of the start on arrival at
X₀: λ̂ₙ begins with what is paid on arrival at X_n, and the formula stays as it is. The kick of a
step decides where the step arrives, so U_n meets the reward of its own step and U₋₁ that of the
start; the running reward at X_n precedes the kick.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fluctua.core.arrays import Array, Params, PyTree, jit
from fluctua.core.baselines import Inputs
from fluctua.core.draws import Density, Reparameterised
from fluctua.core.objective import Rewards
from fluctua.core.process import AnyProcess, Memory, Process, Remembering, Score, Step
from fluctua.core.trajectories import Times


class Model(NamedTuple):
    """What the estimator knows about the substrate: code, not numbers; hashable."""

    process: AnyProcess
    objective: Rewards
    score: Score
    start: Density | Reparameterised | None
    baseline: Callable[[Inputs], Array]
    initial_baseline: Callable[[Inputs], Array]


def silenced(model: Model, process: AnyProcess) -> Model:
    """The model with a process whose silent components are named."""
    if isinstance(process, Process) and process.silent and isinstance(model.start, Reparameterised):
        raise ValueError(
            "a `Reparameterised` start displaces the path, and state component "
            f"{process.silent[0]}, which has no "
            "noise, cannot be displaced. Give the start a `Density` in the components with noise, "
            "or instrument noise."
        )
    return model._replace(process=process)


class Tables(NamedTuple):
    """The numbers that baselines bring along."""

    step: Array | None
    initial: Array | None

    def filled(self, values: Array) -> Tables:
        """With these values where there are none."""
        return Tables(*(values if table is None else table for table in self))


class Sums(NamedTuple):
    """What a trajectory carries through time."""

    reward: Array  # C (E,)
    gradient: Array  # Σ (λ̂ − λ̄)U and the explicit terms (E, P)
    score: Array  # ΣU (E, P)
    memory: Memory | None = None  # of a score that depends on the past


OF_ENSEMBLE = Memory(None, 0)
"""The axes of a `Memory` over which trajectories run."""


def random_start(model: Model) -> bool:
    """Whether the draw of X₀ has a score."""
    return isinstance(model.start, Density) or isinstance(model.process, Remembering)


def running(model: Model, theta: Params, x: Array, t: Array, context: PyTree) -> Array:
    """g(X_n, t_n) for every trajectory. (E,)"""
    return jax.vmap(model.objective.running, in_axes=(None, 0, None, 0))(
        theta, x, t, context
    ).astype(x.dtype)


def terminal(model: Model, theta: Params, x: Array, context: PyTree) -> Array:
    """g_T(X_T) for every trajectory. (E,)"""
    return jax.vmap(model.objective.terminal, in_axes=(None, 0, 0))(theta, x, context).astype(
        x.dtype
    )


def at_start(rewards: Rewards, theta: Params, x: Array, context: PyTree) -> Array:
    """C on arrival at X₀: the initial reward of every trajectory. (E,)"""
    if rewards.initial is None:
        return jnp.zeros(x.shape[0], x.dtype)
    return jax.vmap(rewards.initial, in_axes=(None, 0, 0))(theta, x, context).astype(x.dtype)


def after_step(
    rewards: Rewards,
    theta: Params,
    reward: Array,
    x: Array,
    x_next: Array,
    when: tuple[Array, ...],
    context: PyTree,
) -> Array:
    """C on arrival at X_{n+1}: the reward so far of every trajectory with that of the step. (E,)"""
    if rewards.step is None:
        return reward
    _, t, dt = when
    of_step = jax.vmap(rewards.step, in_axes=(None, 0, 0, None, None, 0))
    return reward + of_step(theta, x, x_next, t, dt, context).astype(x.dtype)


@partial(jit, static_argnums=0)
def initial_sums(
    model: Model, theta: Params, x: Array, t: Array, context: PyTree, returns: Array, tables: Tables
) -> Sums:
    """The initial terms: the draw of X₀ is the step n = −1, whose score is ∂θ ln p₀; and ∂θ g_0."""
    flat, _ = ravel_pytree(theta)
    empty = jnp.zeros((x.shape[0], flat.size), flat.dtype)
    reward = at_start(model.objective, theta, x, context).astype(returns.dtype)
    explicit = initial_slopes(model, theta, x, context)
    memory = None
    if isinstance(model.process, Remembering):
        start = partial(model.process.begin, theta)
        u, memory = jax.vmap(start, in_axes=(0, None, 0), out_axes=(0, OF_ENSEMBLE))(x, t, context)
        score = jax.vmap(lambda u: ravel_pytree(u)[0])(u)
    elif isinstance(model.start, Density):
        log_density = model.start.log_density

        def one(x, c):
            return ravel_pytree(jax.grad(log_density)(theta, x, c))[0]

        score = jax.vmap(one)(x, context)
    else:
        return Sums(reward, empty if explicit is None else explicit, empty)
    bar = model.initial_baseline(
        Inputs(jnp.array(-1), theta, None, t, context, returns, score, tables.initial)
    )
    term = ((returns[:, None] - bar) * score).astype(score.dtype)
    return Sums(reward, term if explicit is None else term + explicit, score, memory)


def initial_slopes(model: Model, theta: Params, x: Array, context: PyTree) -> Array | None:
    """∂θ g_0(X₀) of every trajectory (E, P); None without such a reward."""
    reward = model.objective.initial
    if reward is None:
        return None

    def one(x: Array, context: PyTree) -> Array:
        def here(th):
            return x

        if isinstance(model.start, Reparameterised):
            d = model.start.shift(theta, context)

            def here(th):
                return x + d(th)

        return ravel_pytree(jax.grad(lambda th: reward(th, here(th), context))(theta))[0]

    return jax.vmap(one)(x, context)


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
    """Add step n of the whole ensemble, (x, x_next, context, events): (λ̂ₙ₊₁ − λ̄ₙ)Uₙ, ∂θ g Δt and
    ∂θ r.

    origin: the first two times.
    """
    x, x_next, context, _ = ensemble
    n, t, dt = when
    reward = sums.reward + running(model, theta, x, t, context) * dt.astype(x.dtype)
    if sums.memory is None:
        (score, explicit) = scores(model, theta, ensemble, when, origin)
        memory = None
    else:
        score, explicit, memory = remembering_scores(model, theta, sums.memory, ensemble, when)
    # λ̂ₙ₊₁: the reward at n precedes the kick, that of the step follows it
    to_go = returns - reward
    bar = model.baseline(Inputs(n, theta, x, t, context, to_go, score, tables.step))
    term = (to_go[:, None] - bar) * score + explicit
    reward = after_step(model.objective, theta, reward, x, x_next, when, context)
    return Sums(reward, sums.gradient + term.astype(score.dtype), sums.score + score, memory)


def remembering_scores(
    model: Model,
    theta: Params,
    memory: Memory,
    ensemble: tuple[Array, Array, PyTree, PyTree],
    when: tuple[Array, ...],
) -> tuple[Array, Array, Memory]:
    """`scores` of a process that is not seen whole, and what they remember after the step."""
    _, t, dt = when

    def one(
        x: Array, x_next: Array, context: PyTree, _: PyTree, memory: Memory
    ) -> tuple[Array, Array, Memory]:
        assert isinstance(model.process, Remembering)
        score, memory = model.process.update(theta, Step(x, x_next, t, dt, context), memory)
        explicit = jax.grad(lambda th: paid(model.objective, th, x, x_next, (t, dt), context))(
            theta
        )
        return ravel_pytree(score)[0], ravel_pytree(explicit)[0], memory

    along = jax.vmap(one, in_axes=(0, 0, 0, 0, OF_ENSEMBLE), out_axes=(0, 0, OF_ENSEMBLE))
    return along(*ensemble, memory)


def paid(
    rewards: Rewards,
    theta: Params,
    x: Array,
    x_next: Array,
    when: tuple[Array, Array],
    context: PyTree,
) -> Array:
    """g Δt + r of one step."""
    t, dt = when
    running = rewards.running(theta, x, t, context) * dt
    return (
        running
        if rewards.step is None
        else running + rewards.step(theta, x, x_next, t, dt, context)
    )


def scores(
    model: Model,
    theta: Params,
    ensemble: tuple[Array, Array, PyTree, PyTree],
    when: tuple[Array, ...],
    origin: Array,
) -> tuple[Array, Array]:
    """Uₙ and ∂θ{g Δt + r} of every trajectory, each (E, P)."""
    _, t, dt = when

    def fixed(x: Array, x_next: Array, context: PyTree, events: PyTree) -> tuple[Array, Array]:
        score = model.score(model.process, theta, Step(x, x_next, t, dt, context, events))
        explicit = jax.grad(lambda th: paid(model.objective, th, x, x_next, (t, dt), context))(
            theta
        )
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
        explicit = jax.grad(
            lambda th: paid(
                model.objective, th, x + w[0] * d(th), x_next + w[1] * d(th), (t, dt), context
            )
        )(theta)
        return ravel_pytree(score)[0], ravel_pytree(explicit)[0]

    return jax.vmap(moving if isinstance(model.start, Reparameterised) else fixed)(*ensemble)


@partial(jit, static_argnums=0)
def finish(model: Model, theta: Params, sums: Sums, x: Array, t: Array, context: PyTree) -> Array:
    """Add ∂θ g_T(X_T). (E, P)"""

    def one(x: Array, context: PyTree) -> Array:
        def end(th):
            return x

        if isinstance(model.start, Reparameterised):
            w = model.start.weight(t[-1], t[0], t[1] - t[0])
            d = model.start.shift(theta, context)

            def end(th):
                return x + w * d(th)

        return ravel_pytree(
            jax.grad(lambda th: model.objective.terminal(th, end(th), context))(theta)
        )[0]

    return sums.gradient + jax.vmap(one)(x, context)


def to_go(rewards: Rewards, theta: Params, times: Times, x: Array, context: PyTree) -> Array:
    """λ̂ₙ at every time (E, T+1) of trajectories x (E, T+1, M) held in memory."""

    def one(x: Array, context: PyTree) -> tuple[Array, Array, Array | None]:
        rates = jax.vmap(lambda x, t: rewards.running(theta, x, t, context))(x[:-1], times.t[:-1])
        paid = None
        if rewards.step is not None:
            of_step = jax.vmap(rewards.step, in_axes=(None, 0, 0, 0, 0, None))
            paid = of_step(theta, x[:-1], x[1:], times.t[:-1], times.dt, context)
        return rates, rewards.terminal(theta, x[-1], context), paid

    rates, terminal, paid = jax.vmap(one)(x, context)
    arrival = None
    if paid is not None or rewards.initial is not None:
        first = at_start(rewards, theta, x[:, 0], context)[:, None]
        arrival = jnp.concatenate([first, jnp.zeros_like(rates) if paid is None else paid], axis=1)
    return returns_to_go(rates, terminal, times.dt, arrival)


def returns_to_go(
    rewards: Array, terminal: Array, dt: Array, arrival: Array | None = None
) -> Array:
    """Reward still to come at each time, λ̂ₙ = g_T(X_T) + Σ_{k≥n} {g(X_k, t_k)Δt_k + aₖ} (Eq. 6).

    The reward of step k is taken at X_k, so λ̂ₙ includes g(X_n) and the score of step n meets
    λ̂ₙ₊₁.

    Args:
        rewards: (E, T).
        terminal: (E,).
        dt: (T,).
        arrival: (E, T+1), aₙ, what is paid on arrival at X_n: the initial reward, then r(X_{n−1},
            X_n).

    Returns: (E, T+1).

    >>> returns_to_go(jnp.array([[1.0, 2.0]]), jnp.array([10.0]), jnp.array([0.5, 0.25]))
    Array([[11. , 10.5, 10. ]], dtype=float32)
    """
    steps = jnp.concatenate([rewards * dt, terminal[:, None]], axis=1)
    steps = steps if arrival is None else steps + arrival
    return jnp.flip(jnp.cumsum(jnp.flip(steps, 1), axis=1), 1)
