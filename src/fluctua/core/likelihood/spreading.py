"""How kicks reach other components within one interval, by the slope of the drift.

Over an interval Δ a kick spreads by F(s) = e^{Js}, J = ∂μ/∂x:

    W_ij = ∫₀^Δ F_ij(s)² ds/Δ,     F_ij = F_ij(Δ).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.linalg import expm

from fluctua.core.arrays import Array, Params, PyTree, jit
from fluctua.core.diffusion import diffusion_matrix
from fluctua.core.process import Process
from fluctua.core.trajectories import Trajectories

STATES = 12
NODES, WEIGHTS = np.polynomial.legendre.leggauss(8)


class Spreading(NamedTuple):
    """Averages over recorded states. weights: W (M, M). squares: F_ij² (M, M). own: F_ii (M,)."""

    weights: np.ndarray
    squares: np.ndarray
    own: np.ndarray


def measure_spreading(process: Process, theta: Params, data: Trajectories) -> Spreading:
    """Spreading of kicks within an interval, from the drift's slope at some states of `data`.

    >>> measure_spreading(process, theta, recording.trajectories(0, 1, load=True)).weights
    """
    parts = [_integrate(s.jacobian, s.interval) for s in measure_jacobians(process, theta, data)]
    return Spreading(*(np.mean(part, axis=0) for part in zip(*parts, strict=True)))


class RecordedState(NamedTuple):
    """A recorded state (M,), its time, the interval after it, and the context of its trajectory."""

    x: Array
    t: Array
    interval: float
    context: PyTree


def draw_states(data: Trajectories) -> list[RecordedState]:
    """`STATES` states of `data`, the same ones at every call."""
    rng = np.random.default_rng(0)
    dtype = jnp.result_type(float)
    rows = rng.integers(len(data.x), size=STATES)
    steps = rng.integers(len(data.t) - 1, size=STATES)
    states = []
    for j, n in zip(rows, steps, strict=True):
        context = jax.tree.map(lambda leaf, j=j: leaf[j], data.context)
        x = jnp.asarray(data.x[j, n], dtype)
        interval = float(data.t[n + 1] - data.t[n])
        states.append(RecordedState(x, jnp.asarray(data.t[n], dtype), interval, context))
    return states


class LocalSlope(NamedTuple):
    """∂μ/∂x (M, M) at a recorded state, and the interval after it."""

    jacobian: np.ndarray
    interval: float


def measure_jacobians(process: Process, theta: Params, data: Trajectories) -> list[LocalSlope]:
    """Slopes of the drift at `STATES` states drawn from `data`."""
    return [
        LocalSlope(
            np.asarray(_compute_slope(process, theta, s.x, s.t, s.context), np.float64), s.interval
        )
        for s in draw_states(data)
    ]


@partial(jit, static_argnums=0)
def _compute_slope(process: Process, theta: Params, x: Array, t: Array, context: PyTree) -> Array:
    return jax.jacfwd(lambda x: process.drift(theta, x, t, context))(x)


def average_diffusion(process: Process, theta: Params, data: Trajectories) -> np.ndarray:
    """Diagonal of the model's Q, averaged over `STATES` states drawn from `data`. (M,)"""
    each = [_compute_diagonal(process, theta, s.x, s.t, s.context) for s in draw_states(data)]
    return np.mean(np.asarray(each, np.float64), axis=0)


@partial(jit, static_argnums=0)
def _compute_diagonal(
    process: Process, theta: Params, x: Array, t: Array, context: PyTree
) -> Array:
    return jnp.diagonal(diffusion_matrix(process, theta, x, t, context))


def _integrate(jacobian: np.ndarray, dt: float) -> Spreading:
    at = [expm(jacobian * (dt * (1 + node) / 2)) ** 2 for node in NODES]
    f = expm(jacobian * dt)
    weights = sum(w * part for w, part in zip(WEIGHTS / 2, at, strict=True))
    return Spreading(np.asarray(weights), f**2, np.diagonal(f))
