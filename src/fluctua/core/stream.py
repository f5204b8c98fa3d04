"""Streaming a simulator: gradients of trajectories that are never stored.

A baseline that needs the returns first has the same noise replayed. Where it does not, a guess R' stands
for the return R during the sweep and (R − R') ΣU is added at the end: exact, and one pass instead of two.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import check, sweep
from fluctua.core.baselines import Baseline
from fluctua.core.simulate import Recipe, Simulator, advance, begin, first_state, grid, noise_key
from fluctua.core.sweep import Model, Sums, Tables
from fluctua.core.types import Array, Params, Times, Trajectories
from fluctua.core.wiener import philox_key_words


def run_and_pilot(key: Array) -> tuple[Array, Array]:
    """The keys of the run and of the pilot of one estimate: each is the key of a simulator."""
    k_run, k_pilot = jax.random.split(key)
    return k_run, k_pilot


def estimate_seeds(key: Array) -> tuple[int, int]:
    """The 64-bit Philox seeds of the run and of the pilot of an estimate with this key.

    A fused estimator that draws with them has the noise of `ppgt(..., simulator(..., wiener=philox))(key, ...)`.
    """
    run, pilot = np.asarray(_seed_words(key)).tolist()  # one compiled call: a dozen small ones take a millisecond
    return run[1] << 32 | run[0], pilot[1] << 32 | pilot[0]


@jax.jit
def _seed_words(key: Array) -> Array:
    return jnp.stack([philox_key_words(noise_key(k)) for k in run_and_pilot(key)])


def streamed_samples(
    model: Model,
    tables: Tables,
    plans: tuple[Baseline, Baseline],
    substrate: Simulator,
    key: Array,
    theta: Params,
    count: int,
) -> tuple[Array, Array]:
    """Gradients (E, P) and returns (E,) of `count` simulated trajectories. `plans`: step and initial baseline."""
    k_run, k_pilot = run_and_pilot(key)
    for plan in plans:
        check.baseline(plan, count, substrate.t)
    first, context = first_state(substrate, k_run, theta)
    check.model(model.process, model.objective, theta, first, substrate.t, context)
    run = (substrate.recipe, count, k_run, theta, substrate.times, substrate.x0)

    pilot = max(plan.pilot for plan in plans)
    if pilot:
        table = _mean_return_to_go(model, substrate.recipe, pilot, k_pilot, theta, substrate.times, substrate.x0)
        tables = Tables(*(table if values is None else values for values in tables))
    if any(plan.needs_returns for plan in plans):
        guess = _returns(model, *run)
    else:  # near the mean return the correction (R − R')ΣU is small, and so is its rounding
        guess = jnp.zeros(()) if tables.step is None else tables.step[0]
    returns, flat, last = _sweep(model, *run, guess, tables)

    check.finite_simulation(last, substrate.t)
    check.finite_scores(flat, model.process, theta, lambda j: only(substrate(k_run, theta, j + 1), j), substrate.t)
    return flat, returns


def only(trajectories: Trajectories, j: int) -> Trajectories:
    """Trajectory j alone."""
    t, x, context = trajectories
    return Trajectories(t, x[j : j + 1], jax.tree.map(lambda leaf: leaf[j : j + 1], context))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _returns(
    model: Model, recipe: Recipe, count: int, key: Array, theta: Params, times: Times, x0: Array | None
) -> Array:
    """R of every trajectory: the first pass. (E,)"""
    ensemble = begin(recipe, count, key, theta, x0)

    def body(carry: tuple[Array, Array], step: Any) -> tuple[tuple[Array, Array], None]:
        x, reward = carry
        n, t, dt = step
        reward = reward + sweep.running(model, theta, x, t, ensemble.context) * dt.astype(x.dtype)
        return (advance(recipe, theta, ensemble._replace(x=x), n, t, dt), reward), None

    (x, reward), _ = jax.lax.scan(body, (ensemble.x, jnp.zeros(count, ensemble.x.dtype)), grid(times))
    return reward + sweep.terminal(model, theta, x, ensemble.context)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _mean_return_to_go(
    model: Model, recipe: Recipe, count: int, key: Array, theta: Params, times: Times, x0: Array | None
) -> Array:
    """E[λ̂ₙ] (T+1,) of a pilot, from the mean reward of each step; nothing of size E·T."""
    ensemble = begin(recipe, count, key, theta, x0)

    def body(x: Array, step: Any) -> tuple[Array, Array]:
        n, t, dt = step
        reward = sweep.running(model, theta, x, t, ensemble.context).mean() * dt
        return advance(recipe, theta, ensemble._replace(x=x), n, t, dt), reward

    x, rewards = jax.lax.scan(body, ensemble.x, grid(times))
    last = sweep.terminal(model, theta, x, ensemble.context).mean()
    return jnp.flip(jnp.cumsum(jnp.flip(jnp.append(rewards, last))))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _sweep(
    model: Model,
    recipe: Recipe,
    count: int,
    key: Array,
    theta: Params,
    times: Times,
    x0: Array | None,
    guess: Array,
    tables: Tables,
) -> tuple[Array, Array, Array]:
    """Returns (E,), gradients (E, P), final states (E, M). `guess`: R where it is known, near it otherwise."""
    ensemble = begin(recipe, count, key, theta, x0)
    guess = jnp.broadcast_to(guess, (count,)).astype(ensemble.x.dtype)
    sums = sweep.initial_sums(model, theta, ensemble.x, times.t[0], ensemble.context, guess, tables)

    def body(carry: tuple[Array, Sums], step: Any) -> tuple[tuple[Array, Sums], None]:
        x, sums = carry
        x_next = advance(recipe, theta, ensemble._replace(x=x), *step)
        states = (x, x_next, ensemble.context)
        return (x_next, sweep.sweep_step(model, theta, sums, guess, tables, states, step, times.t[:2])), None

    (x, sums), _ = jax.lax.scan(body, (ensemble.x, sums), grid(times))
    returns = sums.reward + sweep.terminal(model, theta, x, ensemble.context)
    flat = sweep.finish(model, theta, sums, x, times.t, ensemble.context)
    return returns, flat + (returns - guess)[:, None] * sums.score, x
