"""How unknowns enter a process: in its noise, and in its drift linearly or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fluctua.core import check
from fluctua.core.arrays import Array, Params, PyTree
from fluctua.core.dependence import depends, varies_in_slope
from fluctua.core.integrators import mean_rate
from fluctua.core.process import NoiseProduct, Process

At = Callable[[Params, Array], Params]
"""(θ, u (K,)) -> p, the parameters of the process."""


class Roles(NamedTuple):
    """Roles of unknowns in a process: in its noise; in its drift, linearly or not."""

    noisy: bool
    linear: bool


@lru_cache(maxsize=64)
def examine_roles(process: Process, at: At, size: int, signature: Any) -> Roles:
    """Find how unknowns enter a process, from the operations of its drift and noise.

    signature: `check.tree_signature` of (θ, x, t, Δt, context).
    """
    theta, x, t, dt, context = check.abstract_tree(signature)

    def log_noise(u: Array, theta: Params, x: Array, t: Array, context: PyTree) -> Array:
        return log_diffusion(process, at(theta, u), x, t, context)

    def rate(u: Array, theta: Params, x: Array, t: Array, dt: Array, context: PyTree) -> Array:
        return mean_rate(process, at(theta, u), x, t, dt, context)

    anywhere = jnp.ones(size)
    noisy = depends(log_noise, anywhere, theta, x, t, context, on=0)
    return Roles(noisy, linear=not varies_in_slope(rate, anywhere, theta, x, t, dt, context, on=0))


def has_independent_noise(process: Process, p: Params, *state: Any) -> bool:
    """Whether every component has noise of its own, as one amplitude."""
    noise: Any = process.noise
    if process.noiseless or process.diffusion is not None or isinstance(noise, NoiseProduct):
        return False
    return jax.eval_shape(noise, p, *state).ndim == 1


def log_diffusion(process: Process, p: Params, x: Array, t: Array, context: PyTree) -> Array:
    """ln Q of independent noise; another form of it as it is, to see what it depends on."""
    if process.diffusion is not None:
        return process.diffusion(p, x, t, context, jnp.ones_like(x))
    if isinstance(process.noise, NoiseProduct):
        return process.noise.product(p, x, t, context, jnp.ones(process.noise.width, x.dtype))
    assert process.noise is not None  # checked at the boundary
    sigma = process.noise(p, x, t, context)
    return 2 * jnp.log(jnp.abs(sigma)) if sigma.ndim == 1 and not process.noiseless else sigma
