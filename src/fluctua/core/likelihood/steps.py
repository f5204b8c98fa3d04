"""One step of a model: its residual, its slope in the unknowns, and the weight C⁻¹ of its noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax.scipy.linalg import cho_factor, cho_solve

from fluctua.core import check
from fluctua.core.arrays import Array, Params, PyTree, jit, working_dtype
from fluctua.core.diffusion import diffusion_at, diffusion_matrix, with_silent
from fluctua.core.integrators import mean_rate
from fluctua.core.process import NoiseProduct, Process, Step
from fluctua.core.scores import Gaussian, euler, residual
from fluctua.core.trajectories import Times, Trajectories

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
    loud = (1 - still)[:, None]
    factor = cho_factor(covariance + jnp.diag(still), lower=True)
    return cho_solve(factor, columns * loud) * loud


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


class Kick(NamedTuple):
    """Residual r of a step, and its variance 2QᵢᵢΔt by the model. (M,) each."""

    residual: Array
    variance: Array


@partial(jit, static_argnums=0)
def measure_kicks(
    process: Process, theta: Params, now: Array, following: Array, times: Times, context: PyTree
) -> Kick:
    """Euler residuals and their variances, of steps as in `map_ends`. (E, S, M) each."""

    def one(step: Step) -> Kick:
        state = (step.x, step.t, step.context)
        if process.diffusion is None and not isinstance(process.noise, NoiseProduct):
            assert process.noise is not None  # checked at the boundary
            sigma = process.noise(theta, *state)
            variance = sigma**2 if jnp.ndim(sigma) == 1 else jnp.sum(sigma**2, axis=1)
        else:
            variance = 2 * jnp.diag(diffusion_matrix(process, theta, *state))
        return Kick(residual(process, theta, step), variance * step.dt)

    return map_ends(one, now, following, times, context)


def with_diffusion(process: Process, q: Array | None) -> Process:
    """The process with Q (M,) as its noise; as it is where q is None."""
    if q is None:
        return process

    def noise(theta: Params, x: Array, t: Array, context: PyTree) -> Array:
        return jnp.sqrt(2 * jnp.asarray(q, x.dtype))

    return process._replace(noise=noise, diffusion=None)


# ------------------------------------------------------------------------------------------ sources


class Recorded(Protocol):
    """A file or another store of trajectories, whose states may load when sliced."""

    def trajectories(self) -> Trajectories: ...


Source = Trajectories | Recorded
"""Where the trajectories of a fit come from."""


def open_source(source: Source) -> Trajectories:
    """The trajectories of a source; states of a file still load when sliced."""
    return source if isinstance(source, Trajectories) else source.trajectories()


def load_pieces(data: Trajectories, size: int, stop: int | None = None) -> Iterator[Trajectories]:
    """Consecutive pieces of `size` trajectories, loaded; refused if a state is not finite."""
    count = len(data.x)
    if count == 0:
        raise ValueError("there is no complete trajectory to calibrate from.")
    for first in range(0, count if stop is None else min(stop, count), size):
        rows = slice(first, min(first + size, count))
        x = np.asarray(data.x[rows])
        check.finite_trajectories(check.first_bad(x, first), count)
        yield Trajectories(
            data.t, x, jax.tree.map(lambda leaf, rows=rows: leaf[rows], data.context)
        )


def mark_noiseless(data: Trajectories, process: Process, theta: Params) -> Process:
    """The process, checked, with its components without noise marked, as at the first state."""
    process = check.process(process)
    if process.noiseless and process.integrator == "euler":
        return process
    first = next(load_pieces(data, 1))
    context = jax.tree.map(lambda leaf: jnp.asarray(leaf)[0], first.context)
    x = jnp.asarray(first.x[0, 0], working_dtype(theta, first.x))
    marked = with_silent(process, theta, x, jnp.asarray(data.t)[0], context)
    assert isinstance(marked, Process)
    return marked


def student_factor(freedom: int) -> float:
    """Factor on errors from the scatter of `freedom` + 1 values: ±1.96 then cover 95 %."""
    if freedom <= 0:
        return float("nan")
    return float(scipy.stats.t.isf(0.025, freedom) / scipy.stats.norm.isf(0.025))
