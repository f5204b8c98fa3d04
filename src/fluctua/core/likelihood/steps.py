"""One step of a model: its residual, its slope in the unknowns, and the weight C⁻¹ of its noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_factor, cho_solve

from fluctua.core.arrays import Array, Params, PyTree
from fluctua.core.diffusion import diffusion_at
from fluctua.core.integrators import mean_rate
from fluctua.core.process import Process, Step
from fluctua.core.scores import Gaussian, euler
from fluctua.core.trajectories import Times

Transition = Callable[[Process, Params, Step], Gaussian]
"""(process, θ, step) -> the law of the next state: `euler` or `local_linear`."""


class Slope(Protocol):
    """Parameters of the process as a function of unknowns: u (K,) -> p."""

    def __call__(self, u: Array, /) -> Params: ...


def measure_slope(
    process: Process, transition: Transition, at: Slope, u: Array, step: Step
) -> Array:
    """Slope ∂m/∂u of the expected next state. Shape (M, K)."""
    if transition is euler:

        def mean(v: Array) -> Array:
            rate = mean_rate(process, at(v), step.x, step.t, step.dt, step.context)
            return rate * step.dt

    else:

        def mean(v: Array) -> Array:
            return transition(process, at(v), step).mean

    return _jacobian(mean, u, step.x.shape[0])


def _jacobian(f: Callable[[Array], Array], at: Array, outputs: int) -> Array:
    """∂f/∂u, forward or in reverse, whichever is shorter."""
    return jax.jacrev(f)(at) if outputs <= at.size else jax.jacfwd(f)(at)


def weigh(
    process: Process, transition: Transition, theta: Params, step: Step, columns: Array
) -> Array:
    """C⁻¹ times columns (M, K), C the covariance of the step; zero where no noise reaches."""
    if transition is euler:
        q = diffusion_at(process, theta, step.x, step.t, step.context)
        return jax.vmap(q.solve, in_axes=1, out_axes=1)(columns) / (2 * step.dt)
    covariance = transition(process, theta, step).covariance
    if not process.noiseless:
        return cho_solve(cho_factor(covariance, lower=True), columns)
    still = (jnp.diagonal(covariance) <= 0).astype(covariance.dtype)
    noisy = (1 - still)[:, None]
    factor = cho_factor(covariance + jnp.diag(still), lower=True)
    return cho_solve(factor, columns * noisy) * noisy


def map_steps(f: Callable[[Step], Any], x: Array, times: Times, context: PyTree) -> Any:
    """`f(step)` of every step of trajectories x (E, T+1, M). Leaves (E, T, …)."""
    return map_ends(f, x[:, :-1], x[:, 1:], times._replace(t=times.t[:-1]), context)


def map_ends(
    f: Callable[[Step], Any], now: Array, following: Array, times: Times, context: PyTree
) -> Any:
    """`f(step)` of steps with both ends given, (E, S, M) each. Leaves (E, S, …).

    times: beginnings and lengths of the steps, (S,) each.
    """

    def one(x: Array, x_next: Array, t: Array, dt: Array, context: PyTree) -> Any:
        return f(Step(x, x_next, t, dt, context))

    along = jax.vmap(one, in_axes=(0, 0, 0, 0, None))
    return jax.vmap(along, in_axes=(0, 0, None, None, 0))(
        now, following, times.t, times.dt, context
    )


def with_diffusion(process: Process, q: Array | None) -> Process:
    """The process with Q (M,) as its noise; as it is where q is None."""
    if q is None:
        return process

    def noise(theta: Params, x: Array, t: Array, context: PyTree) -> Array:
        return jnp.sqrt(2 * jnp.asarray(q, x.dtype))

    return process._replace(noise=noise, diffusion=None)
