"""The exact steady state of a linear process on its Euler grid, by the discrete Lyapunov
equation.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fluctua as fl
from fluctua.core import check
from fluctua.core.diffusion import diffusion_matrix
from kept import keep_per_precision


class Steady(NamedTuple):
    """mean: m = Fm + bΔ (M,). covariance: C = FCFᵀ + 2QΔ (M, M)."""

    mean: jax.Array
    covariance: jax.Array


def steady_state(process, theta, dt, size):
    """Of a process whose drift is affine and whose noise is the same everywhere; differentiable
    in θ.
    """
    process, zero = check.process(process), jnp.zeros(size)
    drift = lambda x: process.drift(theta, x, jnp.zeros(()), None)
    step = jnp.eye(size) + dt * jax.jacfwd(drift)(zero)
    q = diffusion_matrix(process, theta, zero, jnp.zeros(()), None)
    mean = jnp.linalg.solve(jnp.eye(size) - step, dt * drift(zero))
    square = jnp.eye(size**2) - jnp.kron(step, step)
    return Steady(mean, jnp.linalg.solve(square, 2 * dt * q.ravel()).reshape(size, size))


@partial(jax.jit, static_argnums=(0, 1, 4))
def steady_average(process, reward, theta, dt, size):
    """E[g] for a quadratic reward (theta, x) -> g."""
    mean, covariance = steady_state(process, theta, dt, size)
    bend = jax.hessian(lambda x: reward(theta, x))(mean)
    return reward(theta, mean) + jnp.trace(bend @ covariance) / 2


def steady_record(process, theta, dt, size, key, steps, traces=1):
    """Traces that begin in the steady state."""
    numbers = tuple((name, float(value)) for name, value in theta.items())
    return make_steady_simulator(process, numbers, dt, size, steps)(key, theta, traces)


@keep_per_precision
def make_steady_simulator(process, numbers, dt, size, steps):
    """The simulator of `steady_record`. numbers: parameters with their names."""
    theta = {name: jnp.asarray(value) for name, value in numbers}
    mean, covariance = jax.jit(steady_state, static_argnums=(0, 3))(process, theta, dt, size)
    factor = np.linalg.cholesky(np.asarray(covariance))
    start = fl.Density(
        log_density=lambda th, x: jnp.zeros(()),
        sample=lambda key, th: mean + factor @ jax.random.normal(key, (size,)),
    )
    return fl.simulator(process, start, dt * np.arange(steps + 1))
