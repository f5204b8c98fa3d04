"""One gradient per trajectory, and what is averaged from them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core.types import Array, Estimate, Params


class Samples(NamedTuple):
    """One gradient and one return per trajectory: leaves (E, ...), and (E,)."""

    gradient: Params
    returns: Array


def reduce_samples(samples: Samples) -> Estimate:
    """Mean, standard error and second moment over trajectories."""
    gradient, stderr, second_moment, value, value_stderr = _reduce(samples)
    return Estimate(gradient, stderr, second_moment, value, value_stderr, samples.returns.shape[0])


def unflatten(theta: Params, flat: Array) -> Params:
    """Rows (E, P) as leaves (E, ...) of the structure and precision of θ."""
    like, unravel = ravel_pytree(theta)
    return jax.vmap(unravel)(flat.astype(like.dtype))


@jax.jit
def _reduce(samples: Samples) -> tuple[Params, Params, Params, Array, Array]:
    count = samples.returns.shape[0]
    error = lambda v: v.std(axis=0, ddof=1) / np.sqrt(count)
    each = samples.gradient
    return (
        jax.tree.map(lambda v: v.mean(axis=0), each),
        jax.tree.map(error, each),
        jax.tree.map(lambda v: jnp.mean(v**2, axis=0), each),
        samples.returns.mean(),
        error(samples.returns),
    )
