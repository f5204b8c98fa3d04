"""The drift's coefficients from increments: generalised least squares on residuals.

With m_θ(x) and C(x) the mean and covariance of the next state (Euler's, or local linearisation's
for samples far apart), minimise Σ rᵀC⁻¹r, r = x' − m_θ(x). Gauss–Newton, with A = ∂m/∂θ:

    δθ = N⁻¹ Σ AᵀC⁻¹r,     N = Σ AᵀC⁻¹A,     Cov(θ̂) = N⁻¹.

A component without noise of its own has no increment to weigh: C is the inverse on the others. Over
an interval that local linearisation bears, noise reaches it through the others, and its increments
count like any.

For Euler and a drift that is linear in θ one step is exact, and quick if the drift tells its
features (`feature_sums`). E[r | x] = 0 makes the estimate unbiased whatever C is; a wrong C costs
accuracy, and shows where `robust_stderr`, from the scatter of trajectories, departs from `stderr`.

States measured with noise ε sit in r and in A both, and least squares takes that for damping. With
A at the sample before in the place of Aᵀ (an instrument: it shares no ε with r) the estimate is
consistent whatever the noise is:

    δθ = N⁻¹ Σ A₋ᵀC⁻¹r,     N = Σ A₋ᵀC⁻¹A.

Where the drift is linear in known features of the state, μ = what θ is not in + Σ_k v_k θ_{p_k}
φ_{f_k} on component i_k, the same sums are

    N_{pq} = Σ_i (1/2Q_i) Σ_{k,l of i} v_k v_l Σ_n φ_{f_k} φ_{f_l} Δt,

as exact and faster by far: nothing of the size (components × parameters) is made at any step. The
products of features are summed over all steps first, one matrix product, and a row of the drift
picks its few from them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax.flatten_util import ravel_pytree
from jax.scipy.linalg import cho_factor, cho_solve

from fluctua.core import check
from fluctua.core.arrays import Array, Params, PyTree, jit, working_dtype
from fluctua.core.process import Process, Step
from fluctua.core.scores import Gaussian, euler
from fluctua.core.text import names
from fluctua.core.trajectories import Times, Trajectories
from fluctua.insitu.recording.reader import RecordingFile, pieces, with_silent_named

Transition = Callable[[Process, Params, Step], Gaussian]
BATCH = 32
FLOPS = 1e12
"""Work after which trajectories are left out of a fit: its errors are then far below those of a
gradient.
"""
NULL = 1e-9
"""Eigenvalues of N, scaled to a unit diagonal, below this say nothing about θ."""


class DriftFit(NamedTuple):
    """theta, stderr, robust_stderr: with the structure of θ; stderr is infinite for what the data
    do not determine.

    covariance: (P, P). unresolved: names of those parameters. transitions, trajectories: used.
    passes: over the data.
    """

    theta: Params
    stderr: Params
    robust_stderr: Params
    covariance: np.ndarray
    unresolved: tuple[str, ...]
    transitions: int
    trajectories: int
    passes: int


def fit_drift(
    source: RecordingFile | Trajectories,
    process: Process,
    theta: Params,
    *,
    transition: Transition = euler,
    diffusion: np.ndarray | None = None,
    usable: np.ndarray | None = None,
    noisy_states: bool = False,
    most_passes: int = 8,
) -> DriftFit:
    """θ̂ with errors. All of θ is fitted; put what is known into the process.

    Args:
        source: a recording or trajectories.
        process: its drift is fitted.
        theta: where the fit starts.
        transition: of the model between two samples.
        diffusion: Q (M,), for the weights, in place of the process's own.
        usable: (M,) components whose residual is known, if channels are hidden.
        noisy_states: the states carry observation noise; both errors are then those of the scatter.
        most_passes: over the data.

    Returns: the parameters with their errors.

    >>> fit_drift(recording, process, theta).stderr["omega"]
    """
    theta = check.parameters(theta)
    process = with_silent_named(source, process, theta)
    flat, unravel = ravel_pytree(theta)
    mask = jnp.ones(_width(source)) if usable is None else jnp.asarray(usable, float)
    drift = process.drift
    q = diffusion
    linear = process.step == "euler" and isinstance(drift, FeatureDrift)
    exact = transition is euler and q is not None and linear
    stop = source.x.shape[0] if exact else _enough(source, flat.size)

    def sums(x: Array, times: Times, context: PyTree) -> Any:
        if exact:
            assert isinstance(drift, FeatureDrift)
            assert q is not None
            return feature_sums(
                drift, unravel(flat), x, times, context, q, np.asarray(mask), noisy_states
            )
        return _sums(
            process,
            transition,
            noisy_states,
            theta,
            flat,
            x,
            times.t,
            times.dt,
            context,
            diffusion,
            mask,
        )

    passes = 0
    while passes < most_passes:
        passes += 1
        gram, normal, rows, transitions = _pass(source, flat, stop, int(noisy_states), sums)
        if not np.all(np.isfinite(normal)):
            raise FloatingPointError(
                "the sums over the states overflowed, or the diffusion of a component is zero: use "
                "units in which "
                "states are of order one, or double precision, and give every component its noise."
            )
        inverse, known = _inverse(gram, normal)
        step = inverse @ rows.sum(axis=0)
        few = student_factor(len(rows) - 1)
        scatter = few * np.sqrt(np.diag(inverse @ (rows.T @ rows) @ inverse.T))
        error = scatter if noisy_states else np.sqrt(np.diag(inverse))
        if not np.all(np.isfinite(step)):
            raise FloatingPointError(
                "the fit of the drift diverged; start it nearer to the truth, or use Euler first."
            )
        flat = flat + jnp.asarray(step, flat.dtype)
        rounding = 8 * np.finfo(flat.dtype).eps * np.abs(np.asarray(flat))
        if np.all(np.abs(step)[known] <= np.maximum(0.01 * error, rounding)[known]):
            break

    def infinite(v):
        return unravel(jnp.asarray(np.where(known, v, np.inf), flat.dtype))

    return DriftFit(
        unravel(flat),
        infinite(error),
        infinite(scatter),
        inverse @ (rows.T @ rows) @ inverse.T if noisy_states else inverse,
        tuple(name for name, ok in zip(names(theta), known, strict=True) if not ok),
        transitions,
        len(rows),
        passes,
    )


def _pass(
    source: Any, flat: Array, stop: int, lag: int, sums: Callable[[Array, Times, PyTree], Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """ΣA₋ᵀC⁻¹A₋ and N (P, P), ΣA₋ᵀC⁻¹r of every trajectory (E, P), and the number of
    transitions.
    """
    size = flat.size
    gram = np.zeros((size, size))
    normal = np.zeros((size, size))
    rows = []
    transitions = 0
    for piece in pieces(source, BATCH, stop):
        x = jnp.asarray(piece.x, working_dtype(flat, piece.x))
        g, n, u = sums(x, check.grid(piece.t), piece.context)
        gram += np.asarray(g, np.float64)
        normal += np.asarray(n, np.float64)
        rows.append(np.asarray(u, np.float64))
        transitions += x.shape[0] * (x.shape[1] - 1 - lag)
    return gram, normal, np.concatenate(rows), transitions


@partial(jit, static_argnums=(0, 1, 2))
def _sums(
    process: Process,
    transition: Transition,
    lagged: bool,
    like: Params,
    flat: Array,
    x: Array,
    t: Array,
    dt: Array,
    context: PyTree,
    q: Array | None,
    mask: Array,
) -> tuple[Array, Array, Array]:
    unravel = ravel_pytree(like)[1]
    process = with_diffusion(process, q)

    def slope(x: Array, context: PyTree, t: Array, dt: Array) -> Array:
        def mean(p):
            return transition(process, unravel(p), Step(x, x, t, dt, context)).mean

        return _jacobian(mean, flat, x.shape[0]) * mask[:, None]

    def one(
        before: Array, x: Array, x_next: Array, context: PyTree, t: Array, dt: Array
    ) -> tuple[Array, Array, Array]:
        mean, covariance = transition(process, unravel(flat), Step(x, x_next, t, dt, context))
        a = slope(x, context, t, dt)
        # in another sample's place but at this time: only its noise must be another one
        instrument = slope(before, context, t, dt) if lagged else a
        r = (x_next - mean) * mask
        if process.silent:  # a component that no noise reaches is left out
            still = (jnp.diagonal(covariance) <= 0).astype(covariance.dtype)
            a = a * (1 - still)[:, None]
            instrument = instrument * (1 - still)[:, None]
            r = r * (1 - still)
            covariance = covariance + jnp.diag(still)
        solved = cho_solve(cho_factor(covariance, lower=True), instrument) * mask[:, None]
        return instrument.T @ solved, solved.T @ a, solved.T @ r

    def body(sums: Any, step: Any) -> Any:
        before, x, after, t, dt = step
        g, n, u = jax.vmap(one, in_axes=(0, 0, 0, 0, None, None))(before, x, after, context, t, dt)
        return (sums[0] + g.sum(axis=0), sums[1] + n.sum(axis=0), sums[2] + u), None

    path = jnp.swapaxes(x, 0, 1)
    k = int(lagged)
    square = jnp.zeros((flat.size, flat.size), x.dtype)
    zero = (square, square, jnp.zeros((x.shape[0], flat.size), x.dtype))
    return jax.lax.scan(
        body, zero, (path[: len(path) - 1 - k], path[k:-1], path[1 + k :], t[k:-1], dt[k:])
    )[0]


def student_factor(freedom: int) -> float:
    """What an error from the scatter of `freedom` + 1 values is multiplied by, so that ±1.96 of
    it cover 95 %.
    """
    return (
        float(scipy.stats.t.isf(0.025, freedom) / scipy.stats.norm.isf(0.025))
        if freedom > 0
        else np.nan
    )


def with_diffusion(process: Process, q: Array | None) -> Process:
    """The process with Q (M,) as its noise, or as it is."""
    if q is None:
        return process

    def noise(theta, x, t, context):
        return jnp.sqrt(2 * jnp.asarray(q, x.dtype))

    return process._replace(noise=noise, diffusion=None)


def _jacobian(f: Any, at: Array, outputs: int) -> Array:
    """Forward or reverse, whichever is shorter."""
    return jax.jacrev(f)(at) if outputs <= at.size else jax.jacfwd(f)(at)


def _inverse(gram: np.ndarray, normal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """N⁻¹ in the directions that the data say something about, and which parameters lie in them."""
    scale = np.sqrt(np.diag(gram))
    unit = np.where(scale > 0, scale, 1.0)
    values, vectors = np.linalg.eigh(gram / unit / unit[:, None])
    good = values > NULL * max(values[-1], 0)
    known = (vectors[:, ~good] ** 2).sum(axis=1) < 1e-3
    v = vectors[:, good]
    inverse = (
        v @ np.linalg.solve(v.T @ (normal / unit / unit[:, None]) @ v, v.T) / unit / unit[:, None]
    )
    return inverse, known & (scale > 0)


def _width(source: Any) -> int:
    return source.x.shape[2]


def _enough(source: Any, size: int) -> int:
    """Trajectories within the budget of work, two at least."""
    count, times, width = source.x.shape
    return max(2, min(count, int(FLOPS / max(1, 2 * width * size * (size + 2 * width) * times))))


# ----------------------------------------------------------------------- drifts with known features

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
    """A drift that tells its features φ and which of them each θ_p multiplies;
    `network.LinearDrift` is one.
    """

    def __call__(self, theta: Params, x: Array, t: Array, context: PyTree) -> Array: ...
    def features(self, x: Array, t: Array, context: PyTree) -> Array: ...
    def entries(self, theta: Params) -> Entries: ...


class NormalEquations(NamedTuple):
    """Σ A₋ᵀC⁻¹A₋ and Σ A₋ᵀC⁻¹A (P, P), and Σ A₋ᵀC⁻¹r of every trajectory (E, P)."""

    gram: np.ndarray
    normal: np.ndarray
    rows: np.ndarray


def feature_sums(
    drift: FeatureDrift,
    theta: Params,
    x: Array,
    times: Times,
    context: PyTree,
    q: np.ndarray,
    mask: np.ndarray,
    lagged: bool,
) -> NormalEquations:
    """The sums of trajectories x (E, T+1, M) at θ. q: Q (M,). mask: 0 for components to leave out.

    (M,)
    """
    entry = drift.entries(theta)
    size = sum(np.size(leaf) for leaf in jax.tree.leaves(theta))
    noisy = np.asarray(q, float) > 0
    weight = np.where(noisy, mask / (2 * np.where(noisy, q, 1)), 0)
    pairs = tuple(entry.feature.tolist()), tuple(entry.row.tolist())
    k = int(lagged)
    steps = x.shape[1] - 1
    block = max(1, NUMBERS // (x.shape[0] * max(len(entry.row), 1)))
    total: Any = None
    for first in range(k, steps, block):
        at = slice(first, min(first + block, steps))
        parts = _block(
            drift,
            lagged,
            pairs,
            theta,
            x[:, first - k : at.stop + 1],
            times.t[at],
            times.dt[at],
            context,
        )
        doubled = [np.asarray(part, np.float64) for part in parts]
        total = doubled if total is None else [a + b for a, b in zip(total, doubled, strict=True)]
    own, cross, score = total
    gram = np.zeros((size, size))
    normal = np.zeros((size, size))
    rows = np.zeros((len(score), size))
    for i in range(x.shape[2]):
        of = np.flatnonzero(entry.row == i)
        p = entry.parameter[of]
        f = entry.feature[of]
        v = entry.value[of]
        scale = weight[i] * v[:, None] * v
        np.add.at(gram, np.ix_(p, p), scale * own[np.ix_(f, f)])
        np.add.at(normal, np.ix_(p, p), scale * cross[np.ix_(f, f)])
        np.add.at(rows.T, p, (weight[i] * v)[:, None] * score.T[of])
    return NormalEquations(gram, normal, rows)


@partial(jit, static_argnums=(0, 1, 2))
def _block(
    drift: FeatureDrift,
    lagged: bool,
    pairs: Any,
    theta: Params,
    x: Array,
    t: Array,
    dt: Array,
    context: PyTree,
) -> tuple[Array, Array, Array]:
    """Σ φ₋φ₋ᵀΔt and Σ φ₋φᵀΔt (F, F), and Σ_n φ₋_f r_i of every trajectory and pair (f, i) (E,
    K).
    """
    feature, row = (np.array(column) for column in pairs)

    def along(f):
        return jax.vmap(jax.vmap(f, in_axes=(0, 0, None)), in_axes=(0, None, 0))

    now = x[:, lagged:-1]
    after = x[:, 1 + lagged :]
    phi = along(drift.features)(now, t, context)
    # at this time in another sample's place: only its noise must be another one
    seen = along(drift.features)(x[:, : now.shape[1]], t, context) if lagged else phi
    rate = along(lambda x, t, context: drift(theta, x, t, context))(now, t, context)
    r = after - now - rate * dt[:, None]

    def flat(v):
        return v.reshape(-1, v.shape[-1])

    own = flat(seen * dt[:, None]).T @ flat(seen)
    cross = flat(seen * dt[:, None]).T @ flat(phi) if lagged else own
    return own, cross, jnp.einsum("enk,enk->ek", seen[..., feature], r[..., row])
