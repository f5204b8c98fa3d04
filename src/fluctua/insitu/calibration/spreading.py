"""How noise spreads between components within one interval, so that samples far apart still tell Q and s².

Over an interval Δ the kicks of all components reach each other through F(s) = e^{Js}, J = ∂μ/∂x, and so does the
observation noise of the sample before. For a diagonal Q and s²,

    E[r_i²] = 2Δ Σ_j W_ij Q_j + s_i² + Σ_j F_ij² s_j²,     W_ij = ∫₀^Δ F_ij(s)² ds/Δ,     E[r_i r_i'] = −F_ii s_i².

For Euler's transition W = F = 1, and a residual tells of its own component alone.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.linalg import expm

from fluctua.core.types import Params, Process, Trajectories

STATES = 12
NODES, WEIGHTS = np.polynomial.legendre.leggauss(8)


class Spreading(NamedTuple):
    """Averages over recorded states. weights: W (M, M). squares: F_ij² (M, M). own: F_ii (M,)."""

    weights: np.ndarray
    squares: np.ndarray
    own: np.ndarray


def spreading(process: Process, theta: Params, data: Trajectories) -> Spreading:
    """From the drift's Jacobian at some of the states of `data`.

    >>> spreading(process, theta, recording.trajectories(0, 1, load=True)).weights
    """
    found = [_over(jacobian, dt) for jacobian, dt in jacobians(process, theta, data)]
    return Spreading(*(np.mean(part, axis=0) for part in zip(*found, strict=True)))


def jacobians(process: Process, theta: Params, data: Trajectories) -> list[tuple[np.ndarray, float]]:
    """∂μ/∂x (M, M) at `STATES` states drawn from `data`, and the interval after each."""
    rng, dtype = np.random.default_rng(0), jnp.result_type(float)
    slope = jax.jit(jax.jacfwd(lambda x, t, context: process.drift(theta, x, t, context)))
    found = []
    for j, n in zip(rng.integers(len(data.x), size=STATES), rng.integers(len(data.t) - 1, size=STATES), strict=True):
        context = jax.tree.map(lambda leaf: leaf[j], data.context)  # noqa: B023
        at = slope(jnp.asarray(data.x[j, n], dtype), jnp.asarray(data.t[n], dtype), context)
        found.append((np.asarray(at, np.float64), float(data.t[n + 1] - data.t[n])))
    return found


def _over(jacobian: np.ndarray, dt: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    at = [expm(jacobian * (dt * (1 + node) / 2)) ** 2 for node in NODES]
    f = expm(jacobian * dt)
    return sum(w * part for w, part in zip(WEIGHTS / 2, at, strict=True)), f**2, np.diagonal(f)
