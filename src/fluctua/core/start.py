"""Where trajectories begin, and how the start's dependence on θ enters the gradient.

A fixed start is just an array (M,). It has no sensitivity, and most experiments are of this kind.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core.check import leading
from fluctua.core.types import Array, Params, PyTree


class Density(NamedTuple):
    """X₀ drawn from p₀(x; θ) with a known density: the term (λ̂₀ − λ̄ₛ) ∂θ ln p₀(X₀) (Eqs. 16 and 17).

    log_density: (theta, x0, context) -> ln p₀, up to a constant that does not depend on θ.
    sample: (key, theta, context) -> x0 (M,); only a simulator needs it.

    >>> Density(log_density=lambda th, x0: -jnp.sum((x0 - th["mean"]) ** 2) / 2,
    ...         sample=lambda key, th: th["mean"] + jax.random.normal(key, (3,)))
    """

    log_density: Callable[..., Array]
    sample: Callable[..., Array] | None = None


class Reparameterised(NamedTuple):
    """X₀ = f(θ, context), with any randomness of the start held in the context.

    x0: (theta, context) -> (M,). A prepared state that depends on θ and not on chance is the same thing
    with a function that ignores the context.

    The gradient needs no derivative of the return. Displace the whole path by h(t) = w(t)·dX₀ with a
    weight w that falls linearly from 1 to 0 within the time `fade`: the path that starts at the displaced
    point then ends where it did, at the price of a change in the probability of the steps in between,
    which the score of those steps measures. Any `fade` gives the same expectation; the variance falls as
    1/fade until the drift has had time to act. 0 uses the first step alone.
    """

    x0: Callable[..., Array]
    fade: float = 0.0

    def shift(self, theta: Params, context: PyTree) -> Callable[[Params], Array]:
        """dX₀: zero in value at `theta`, with the derivative of x0. (M,)"""
        here = jax.lax.stop_gradient(self.x0(theta, context))
        return lambda th: self.x0(th, context) - here

    def weight(self, t: Array, t0: Array, dt0: Array) -> Array:
        """w(t): 1 at the start, 0 after `fade` (one step at least)."""
        return jnp.clip(1 - (t - t0) / jnp.maximum(self.fade, dt0), 0.0, 1.0)


Start = Array | Density | Reparameterised


def checked_start(start: Any) -> tuple[Density | Reparameterised | None, Array | None]:
    """(a start that depends on θ or chance, None) or (None, a fixed state)."""
    if isinstance(start, Density):
        sample = None if start.sample is None else leading(start.sample, 3)
        return Density(leading(start.log_density, 3), sample), None
    if isinstance(start, Reparameterised):
        if not start.fade >= 0:
            raise ValueError(f"`Reparameterised.fade` is a time and must not be negative; got {start.fade}.")
        return Reparameterised(leading(start.x0, 2), start.fade), None
    if callable(start):
        raise TypeError(
            "a start that is a function of theta must say how its sensitivity is to be had: wrap it in "
            "fluctua.Reparameterised(x0) or give a fluctua.Density(log_density, sample)."
        )
    x0 = jnp.asarray(start)
    if x0.ndim != 1:
        raise ValueError(f"a fixed start must be one state (M,); got shape {x0.shape}.")
    if not jnp.issubdtype(x0.dtype, jnp.floating):
        x0 = x0.astype(jnp.result_type(float))
    if not bool(jnp.all(jnp.isfinite(x0))):
        raise ValueError(f"the start has non-finite components: {np.flatnonzero(~np.isfinite(x0)).tolist()}.")
    return None, x0


def check_score(score: Any, start: Any) -> None:
    """A start that moves with θ needs a score that can move the ends of a step."""
    if isinstance(start, Reparameterised) and "shift" not in inspect.signature(score).parameters:
        raise ValueError(
            "a `Reparameterised` start moves the states with θ, which this score does not differentiate; "
            "use score=full_score."
        )
