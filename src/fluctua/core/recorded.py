"""The sweep over recorded trajectories: first the returns, then the scores, in blocks of steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fluctua.core import check, sweep
from fluctua.core.recording import Recording
from fluctua.core.returns import returns_to_go
from fluctua.core.simulate import grid
from fluctua.core.sweep import Model, Sums, Tables
from fluctua.core.types import Array, Params, PyTree, Rewards, Times


def recorded_samples(
    model: Model, tables: Tables, recording: Recording, theta: Params, block_bytes: int
) -> tuple[Array, Array]:
    """Gradients (E, P) and returns (E,) of the trajectories of a recording."""
    context = recording.context
    check.model(model.process, model.objective, theta, recording.first, recording.t, context)
    check.rounding(model.process, theta, recording)

    reward = jnp.zeros(recording.count, recording.dtype)
    for _, times, x in recording.blocks(block_bytes):
        reward = _reward_of_block(model, theta, reward, times, x, context)
        last = x[:, -1]
    returns = reward + sweep.terminal(model, theta, last, context)

    sums = sweep.initial_sums(model, theta, recording.first, recording.t[0], context, returns, tables)
    for n, times, x in recording.blocks(block_bytes):
        sums = _sweep_block(model, theta, sums, n, times, x, context, returns, tables, recording.t[:2])
    flat = sweep.finish(model, theta, sums, last, recording.t, context)
    check.finite_scores(flat, model.process, theta, recording.trajectory, recording.t)
    return flat, returns


@partial(jax.jit, static_argnums=0)
def _reward_of_block(model: Model, theta: Params, reward: Array, times: Times, x: Array, context: PyTree) -> Array:
    """C at the end of a block of steps. x (E, b+1, M)."""

    def body(reward: Array, step: Any) -> tuple[Array, None]:
        x, (_, t, dt) = step
        return reward + sweep.running(model, theta, x, t, context) * dt.astype(x.dtype), None

    return jax.lax.scan(body, reward, (jnp.swapaxes(x, 0, 1)[:-1], grid(times)))[0]


@partial(jax.jit, static_argnums=0)
def _sweep_block(
    model: Model,
    theta: Params,
    sums: Sums,
    n: Array,
    times: Times,
    x: Array,
    context: PyTree,
    returns: Array,
    tables: Tables,
    origin: Array,
) -> Sums:
    path = jnp.swapaxes(x, 0, 1)
    index, t, dt = grid(times)

    def body(sums: Sums, step: Any) -> tuple[Sums, None]:
        x, x_next, when = step
        return sweep.sweep_step(model, theta, sums, returns, tables, (x, x_next, context), when, origin), None

    return jax.lax.scan(body, sums, (path[:-1], path[1:], (n + index, t, dt)))[0]


@partial(jax.jit, static_argnums=0)
def mean_return_to_go(objective: Rewards, theta: Params, times: Times, x: Array, context: PyTree) -> Array:
    """E[λ̂ₙ] (T+1,) of trajectories x (E, T+1, M) held in memory."""

    def one(x: Array, context: PyTree) -> tuple[Array, Array]:
        rewards = jax.vmap(lambda x, t: objective.running(theta, x, t, context))(x[:-1], times.t[:-1])
        return rewards, objective.terminal(theta, x[-1], context)

    rewards, terminal = jax.vmap(one)(x, context)
    return returns_to_go(rewards, terminal, times.dt).mean(axis=0)
