"""Sums of a drift fit where the drift is linear in known features of the state.

With μ = what θ is not in + Σ_k v_k θ_{p_k} φ_{f_k} on component i_k, the sums of `drift.py` are

    N_{pq} = Σ_i (1/2Q_i) Σ_{k,l of i} v_k v_l Σ_n φ_{f_k} φ_{f_l} Δt,

as exact and faster by far: nothing of the size (components × parameters) is made at any step. The
products of features are summed over all steps first, one matrix product, and a row of the drift
picks its few from them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core.arrays import Array, Params, PyTree, jit
from fluctua.core.trajectories import Times

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
    """A drift with known features φ, and which of them each θ_p multiplies.

    `LinearDrift` of a resonator network is one.
    """

    def __call__(self, theta: Params, x: Array, t: Array, context: PyTree) -> Array: ...
    def features(self, x: Array, t: Array, context: PyTree) -> Array: ...
    def entries(self, theta: Params) -> Entries: ...


class NormalEquations(NamedTuple):
    """Σ A₋ᵀC⁻¹A₋ and Σ A₋ᵀC⁻¹A (P, P), and Σ A₋ᵀC⁻¹r of every trajectory (E, P)."""

    gram: Array
    normal: Array
    rows: Array

    def add(self, other: NormalEquations) -> NormalEquations:
        """The sums with those of other trajectories."""
        rows = np.concatenate([self.rows, other.rows])
        return NormalEquations(self.gram + other.gram, self.normal + other.normal, rows)


def sum_features(
    drift: FeatureDrift,
    theta: Params,
    x: Array,
    times: Times,
    context: PyTree,
    weight: np.ndarray,
    lagged: bool,
) -> NormalEquations:
    """The sums of trajectories x (E, T+1, M) at θ. weight: 1/2Q, 0 for components to leave out."""
    entry = drift.entries(theta)
    size = sum(np.size(leaf) for leaf in jax.tree.leaves(theta))
    kernel = _Kernel(drift, lagged, tuple(entry.feature.tolist()), tuple(entry.row.tolist()))
    k = int(lagged)
    steps = x.shape[1] - 1
    block = max(1, NUMBERS // (x.shape[0] * max(len(entry.row), 1)))
    total: _Products | None = None
    for first in range(k, steps, block):
        at = slice(first, min(first + block, steps))
        some = Times(times.t[at], times.dt[at])
        parts = _sum_products(kernel, theta, x[:, first - k : at.stop + 1], some, context)
        held = _Products(*(np.asarray(part, np.float64) for part in parts))
        if total is None:
            total = held
        else:
            total = _Products(*(a + b for a, b in zip(total, held, strict=True)))
    assert total is not None
    gram = np.zeros((size, size))
    normal = np.zeros((size, size))
    rows = np.zeros((len(total.score), size))
    for i in range(x.shape[2]):
        mine = np.flatnonzero(entry.row == i)
        p = entry.parameter[mine]
        f = entry.feature[mine]
        v = entry.value[mine]
        scale = weight[i] * v[:, None] * v
        np.add.at(gram, np.ix_(p, p), scale * total.own[np.ix_(f, f)])
        np.add.at(normal, np.ix_(p, p), scale * total.cross[np.ix_(f, f)])
        np.add.at(rows.T, p, (weight[i] * v)[:, None] * total.score.T[mine])
    return NormalEquations(gram, normal, rows)


class _Kernel(NamedTuple):
    """Static part of the compiled sums. feature, row: pairs (f, i) of which Σ φ_f r_i is needed."""

    drift: FeatureDrift
    lagged: bool
    feature: tuple[int, ...]
    row: tuple[int, ...]


class _Products(NamedTuple):
    """Σ φ₋φ₋ᵀΔt and Σ φ₋φᵀΔt (F, F), and Σ_n φ₋_f r_i of every trajectory and pair (E, K)."""

    own: Array
    cross: Array
    score: Array


@partial(jit, static_argnums=0)
def _sum_products(
    kernel: _Kernel, theta: Params, x: Array, times: Times, context: PyTree
) -> _Products:
    drift = kernel.drift
    k = int(kernel.lagged)

    def along(f: Callable[..., Array], states: Array) -> Array:
        each = jax.vmap(jax.vmap(f, in_axes=(0, 0, None)), in_axes=(0, None, 0))
        return each(states, times.t, context)

    def flatten(v: Array) -> Array:
        return v.reshape(-1, v.shape[-1])

    now = x[:, k:-1]
    after = x[:, 1 + k :]
    phi = along(drift.features, now)
    # at this time in another sample's place: only its noise must be another one
    seen = along(drift.features, x[:, : now.shape[1]]) if kernel.lagged else phi
    r = after - now - along(partial(drift, theta), now) * times.dt[:, None]
    weighted = flatten(seen * times.dt[:, None]).T
    own = weighted @ flatten(seen)
    cross = weighted @ flatten(phi) if kernel.lagged else own
    feature = np.array(kernel.feature)
    row = np.array(kernel.row)
    return _Products(own, cross, jnp.einsum("enk,enk->ek", seen[..., feature], r[..., row]))
