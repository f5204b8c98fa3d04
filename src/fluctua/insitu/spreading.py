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

from fluctua.types import Params, Process, Trajectories

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
    count, times = len(data.x), len(data.t)
    rng = np.random.default_rng(0)
    found = []
    for j, n in zip(rng.integers(count, size=STATES), rng.integers(times - 1, size=STATES), strict=True):
        context = jax.tree.map(lambda leaf: leaf[j], data.context)  # noqa: B023
        x, t = jnp.asarray(data.x[j, n], jnp.result_type(float)), jnp.asarray(data.t[n], jnp.result_type(float))
        jacobian = np.asarray(jax.jacfwd(lambda x: process.drift(theta, x, t, context))(x), np.float64)  # noqa: B023
        found.append(_over(jacobian, float(data.t[n + 1] - data.t[n])))
    return Spreading(*(np.mean(part, axis=0) for part in zip(*found, strict=True)))


def _over(jacobian: np.ndarray, dt: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    at = [expm(jacobian * (dt * (1 + node) / 2)) ** 2 for node in NODES]
    f = expm(jacobian * dt)
    return sum(w * part for w, part in zip(WEIGHTS / 2, at, strict=True)), f**2, np.diagonal(f)
