"""Sums for `fit_drift` where the drift is linear in known features of the state: as exact, and faster by far.

    μ = what θ is not in + Σ_k v_k θ_{p_k} φ_{f_k} on component i_k,

    N_{pq} = Σ_i (1/2Q_i) Σ_{k,l of i} v_k v_l Σ_n φ_{f_k} φ_{f_l} Δt.

Nothing of the size (components × parameters) is made at any step: the products of features are summed over all steps
first, one matrix product, and a row of the drift picks its few from them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core.types import Array, Params, PyTree, Times

NUMBERS = 2**24
"""Features held at a time."""


class Entries(NamedTuple):
    """Terms v θ_p φ_f of component `row` of the drift. (K,) each"""

    row: np.ndarray
    parameter: np.ndarray
    feature: np.ndarray
    value: np.ndarray


@runtime_checkable
class FeatureDrift(Protocol):
    """A drift that tells its features φ and which of them each θ_p multiplies; `network_model.LinearDrift` is one."""

    def __call__(self, theta: Params, x: Array, t: Array, context: PyTree) -> Array: ...
    def features(self, x: Array, t: Array, context: PyTree) -> Array: ...
    def entries(self, theta: Params) -> Entries: ...


class Sums(NamedTuple):
    """Σ A₋ᵀC⁻¹A₋ and Σ A₋ᵀC⁻¹A (P, P), and Σ A₋ᵀC⁻¹r of every trajectory (E, P)."""

    gram: np.ndarray
    normal: np.ndarray
    rows: np.ndarray


def feature_sums(
    drift: FeatureDrift, theta: Params, x: Array, times: Times, context: PyTree, q: np.ndarray, mask: np.ndarray,
    lagged: bool,
) -> Sums:  # fmt: skip
    """The sums of trajectories x (E, T+1, M) at θ. q: Q (M,). mask: 0 for components to leave out. (M,)"""
    entry, size = drift.entries(theta), sum(np.size(leaf) for leaf in jax.tree.leaves(theta))
    weight = mask / (2 * np.asarray(q, float))
    pairs = tuple(entry.feature.tolist()), tuple(entry.row.tolist())
    k, steps = int(lagged), x.shape[1] - 1
    block = max(1, NUMBERS // (x.shape[0] * max(len(entry.row), 1)))
    total: Any = None
    for first in range(k, steps, block):
        at = slice(first, min(first + block, steps))
        parts = _block(drift, lagged, pairs, theta, x[:, first - k : at.stop + 1], times.t[at], times.dt[at], context)
        doubled = [np.asarray(part, np.float64) for part in parts]
        total = doubled if total is None else [a + b for a, b in zip(total, doubled, strict=True)]
    own, cross, score = total
    gram, normal, rows = np.zeros((size, size)), np.zeros((size, size)), np.zeros((len(score), size))
    for i in range(x.shape[2]):
        of = np.flatnonzero(entry.row == i)
        p, f, v = entry.parameter[of], entry.feature[of], entry.value[of]
        scale = weight[i] * v[:, None] * v
        np.add.at(gram, np.ix_(p, p), scale * own[np.ix_(f, f)])
        np.add.at(normal, np.ix_(p, p), scale * cross[np.ix_(f, f)])
        np.add.at(rows.T, p, (weight[i] * v)[:, None] * score.T[of])
    return Sums(gram, normal, rows)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _block(
    drift: FeatureDrift, lagged: bool, pairs: Any, theta: Params, x: Array, t: Array, dt: Array, context: PyTree
) -> tuple[Array, Array, Array]:
    """Σ φ₋φ₋ᵀΔt and Σ φ₋φᵀΔt (F, F), and Σ_n φ₋_f r_i of every trajectory and pair (f, i) (E, K)."""
    feature, row = (np.array(column) for column in pairs)
    along = lambda f: jax.vmap(jax.vmap(f, in_axes=(0, 0, None)), in_axes=(0, None, 0))
    now, after = x[:, lagged:-1], x[:, 1 + lagged :]
    phi = along(drift.features)(now, t, context)
    # at this time in another sample's place: only its noise must be another one
    seen = along(drift.features)(x[:, : now.shape[1]], t, context) if lagged else phi
    rate = along(lambda x, t, context: drift(theta, x, t, context))(now, t, context)
    r = after - now - rate * dt[:, None]
    flat = lambda v: v.reshape(-1, v.shape[-1])
    own = flat(seen * dt[:, None]).T @ flat(seen)
    cross = flat(seen * dt[:, None]).T @ flat(phi) if lagged else own
    return own, cross, jnp.einsum("enk,enk->ek", seen[..., feature], r[..., row])
