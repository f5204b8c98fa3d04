"""What comes before the first step of a trajectory and after its last, by JAX."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import model as terms
from fluctua.core.arrays import Array, Params, jit
from fluctua.core.draws import Density
from fluctua.core.estimation.batches import BatchEnds, sum_ends
from fluctua.core.streamed import Call


def start_rewards(call: Call, ensemble: Any, count: int, real: np.dtype) -> np.ndarray:
    """Return the rewards before the first step. (E,)"""
    if ensemble is None or call.model.objective.initial is None:
        return np.zeros(count, real)
    rewards = terms.initial_rewards(call.model.objective, call.theta, ensemble.x, ensemble.context)
    return np.array(rewards, real)


def has_ends(terminal_moves: bool, call: Call) -> bool:
    """Whether gradients have terms of the start or of rewards at the ends.

    terminal_moves: whether θ enters the terminal reward.
    """
    model = call.model
    start = isinstance(model.start, Density)
    return start or model.objective.initial is not None or terminal_moves


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
    if not has_ends(terminal_moves, call):
        return None
    model = call.model
    bar = 0.0 if call.tables.initial is None else call.tables.initial[0]
    if ensemble is None:
        first = jnp.broadcast_to(jnp.asarray(call.substrate.x0), last.shape)
        context = None
    else:
        first = ensemble.x
        context = ensemble.context
    weight = jnp.asarray(returns) - bar
    ends = BatchEnds(first, jnp.asarray(last), weight, jnp.ones_like(weight), context)
    return np.asarray(_sum_ends(model, size, call.theta, ends))


@partial(jit, static_argnums=(0, 1))
def _sum_ends(model: terms.EstimatorModel, size: int, theta: Params, ends: BatchEnds) -> Array:
    count = len(ends.weight)
    batches = -(-count // size)
    index = jnp.arange(batches * size)

    def split(v: Array) -> Array:
        return v[jnp.minimum(index, count - 1)].reshape(batches, size, *v.shape[1:])

    here = (index < count).reshape(batches, size)
    rows: BatchEnds = jax.tree.map(split, ends)
    rows = rows._replace(weight=here * rows.weight, counts=here * rows.counts)
    leaves = jax.tree.leaves(sum_ends(model, theta, rows))
    return jnp.concatenate([leaf.reshape(batches, -1) for leaf in leaves], axis=1)
