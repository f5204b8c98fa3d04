"""What comes before the first step of a trajectory and after its last, by JAX."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import model as terms
from fluctua.core.arrays import Array, Params, PyTree, jit
from fluctua.core.draws import Density
from fluctua.core.streamed import Call


def start_rewards(call: Call, ensemble: Any, count: int, real: np.dtype) -> np.ndarray:
    """Return the rewards before the first step. (E,)"""
    if ensemble is None or call.model.objective.initial is None:
        return np.zeros(count, real)
    rewards = terms.initial_rewards(call.model.objective, call.theta, ensemble.x, ensemble.context)
    return np.array(rewards, real)


def add_ends(
    terminal_moves: bool,
    call: Call,
    ensemble: Any,
    returns: np.ndarray,
    last: np.ndarray,
    size: int,
) -> np.ndarray | None:
    """Return Σ (λ̂₀ − λ̄₋₁) ∂θ ln p₀ + ∂θ g_0 + ∂θ g_T of every batch (B, P); None if zero.

    terminal_moves: whether θ enters the terminal reward. size: trajectories per batch.
    """
    model = call.model
    start = isinstance(model.start, Density)
    if not start and model.objective.initial is None and not terminal_moves:
        return None
    bar = 0.0 if call.tables.initial is None else call.tables.initial[0]
    if ensemble is None:
        first = jnp.broadcast_to(jnp.asarray(call.substrate.x0), last.shape)
        context = None
    else:
        first = ensemble.x
        context = ensemble.context
    rows = (first, jnp.asarray(last), jnp.asarray(returns) - bar, context)
    return np.asarray(_sum_ends(model, size, call.theta, rows))


@partial(jit, static_argnums=(0, 1))
def _sum_ends(model: terms.EstimatorModel, size: int, theta: Params, rows: PyTree) -> Array:
    rewards = model.objective
    count = len(rows[0])
    batches = -(-count // size)

    def split(v: Array) -> Array:
        index = jnp.minimum(jnp.arange(batches * size), count - 1)
        return v[index].reshape(batches, size, *v.shape[1:])

    once = (jnp.arange(batches * size) < count).reshape(batches, size).astype(rows[0].dtype)

    def weigh(theta: Params, rows: PyTree, once: Array) -> Array:
        def one(first: Array, last: Array, weight: Array, context: PyTree) -> Array:
            total = rewards.terminal(theta, last, context)
            if rewards.initial is not None:
                total = total + rewards.initial(theta, first, context)
            if isinstance(model.start, Density):
                total = total + weight * model.start.log_density(theta, first, context)
            return total

        return jnp.sum(once * jax.vmap(one)(*rows))

    slopes = jax.vmap(jax.grad(weigh), in_axes=(None, 0, 0))(theta, jax.tree.map(split, rows), once)
    leaves = jax.tree.leaves(slopes)
    return jnp.concatenate([leaf.reshape(batches, -1) for leaf in leaves], axis=1)
