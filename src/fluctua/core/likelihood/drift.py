"""Fit of a drift's parameters to increments: generalised least squares on residuals.

With m_θ(x) and C(x) the mean and covariance of the next state (Euler's, or local linearisation's
for samples far apart), minimise Σ rᵀC⁻¹r, r = x' − m_θ(x). Gauss–Newton, with A = ∂m/∂θ:

    δθ = N⁻¹ Σ AᵀC⁻¹r,     N = Σ AᵀC⁻¹A,     Cov(θ̂) = N⁻¹.

A component without noise of its own has no increment to weigh: C is the inverse on the others. Over
an interval that local linearisation bears, noise reaches it through the others, and its increments
count like any.

For Euler and a drift that is linear in θ one step is exact, and quick if the drift has known
features (`features.py`). E[r | x] = 0 makes the estimate unbiased whatever C is; a wrong C costs
accuracy, and shows where `robust_stderr`, from the scatter of trajectories, departs from `stderr`.

States measured with noise ε sit in r and in A both, and least squares takes that for damping. With
A at the sample before in the place of Aᵀ (an instrument: it shares no ε with r) the estimate is
consistent whatever the noise is:

    δθ = N⁻¹ Σ A₋ᵀC⁻¹r,     N = Σ A₋ᵀC⁻¹A.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core import check
from fluctua.core.arrays import Array, Params, PyTree, jit, working_dtype
from fluctua.core.likelihood import features, sources, steps
from fluctua.core.process import Process, Step
from fluctua.core.scores import euler
from fluctua.core.text import names
from fluctua.core.trajectories import Times, Trajectories

BATCH = 32
FLOPS = 1e12
"""Work after which trajectories are left out of a fit: its errors are then far below those of a
gradient.
"""
NULL = 1e-9
"""Eigenvalues of N, scaled to a unit diagonal, below this leave θ undetermined."""


class DriftFit(NamedTuple):
    """Parameters of a drift with errors.

    theta, stderr, robust_stderr: with the structure of θ; stderr is infinite for what the data do
        not determine.
    covariance: (P, P).
    unresolved: names of the parameters that the data do not determine.
    transitions, trajectories: number of them that were used.
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
    source: sources.Source,
    process: Process,
    theta: Params,
    *,
    transition: steps.Transition = euler,
    diffusion: np.ndarray | None = None,
    usable: np.ndarray | None = None,
    noisy_states: bool = False,
    most_passes: int = 8,
) -> DriftFit:
    """Fit all of θ to trajectories; put what is known into the process.

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

    >>> trap = fl.Process(lambda theta, x: -theta["k"] * x, lambda theta, x: 0.4 * jnp.ones(1))
    >>> simulator = fl.simulator(trap, jnp.ones(1), t=jnp.linspace(0.0, 1.0, 101))
    >>> measured = simulator(key, {"k": jnp.array(0.8)}, 200)
    >>> fit = insitu.calibrate.fit_drift(measured, trap, {"k": jnp.array(0.5)})
    >>> print(f"k = {fit.theta['k']:.2f} ± {fit.stderr['k']:.2f}")
    k = 0.79 ± 0.04
    """
    data = sources.open_source(source)
    theta = check.parameters(theta)
    process = sources.mark_noiseless(data, process, theta)
    flat, unravel = ravel_pytree(theta)
    add_up = _choose_sums(data, process, theta, transition, diffusion, usable, noisy_states)
    passes = 0
    while passes < most_passes:
        passes += 1
        sums = add_up(flat)
        if not np.all(np.isfinite(sums.normal)):
            raise FloatingPointError(
                "the sums over the states overflowed, or the diffusion of a component is zero: "
                "use units in which states are of order one, or double precision, and give every "
                "component its noise."
            )
        inverse, known = _invert(sums.gram, sums.normal)
        step = inverse @ sums.rows.sum(axis=0)
        scattered = inverse @ (sums.rows.T @ sums.rows) @ inverse.T
        scatter = sources.student_factor(len(sums.rows) - 1) * np.sqrt(np.diag(scattered))
        error = scatter if noisy_states else np.sqrt(np.diag(inverse))
        if not np.all(np.isfinite(step)):
            raise FloatingPointError(
                "the fit of the drift diverged; start it nearer to the truth, or use Euler first."
            )
        flat = flat + jnp.asarray(step, flat.dtype)
        rounding = 8 * np.finfo(flat.dtype).eps * np.abs(np.asarray(flat))
        if np.all(np.abs(step)[known] <= np.maximum(0.01 * error, rounding)[known]):
            break
    moved = float(np.max(np.abs(step[known]) / error[known], initial=0))
    if most_passes > 1 and moved > 1:
        warnings.warn(
            f"the fit of the drift has not converged: its last pass, {passes}, moved a parameter "
            f"by {moved:.2g} standard errors. Start nearer to the truth, or raise `most_passes`.",
            RuntimeWarning,
            stacklevel=2,
        )

    def like_theta(v: np.ndarray) -> Params:
        return unravel(jnp.asarray(np.where(known, v, np.inf), flat.dtype))

    return DriftFit(
        theta=unravel(flat),
        stderr=like_theta(error),
        robust_stderr=like_theta(scatter),
        covariance=scattered if noisy_states else inverse,
        unresolved=tuple(name for name, ok in zip(names(theta), known, strict=True) if not ok),
        transitions=len(sums.rows) * (data.x.shape[1] - 1 - int(noisy_states)),
        trajectories=len(sums.rows),
        passes=passes,
    )


def _choose_sums(
    data: Trajectories,
    process: Process,
    theta: Params,
    transition: steps.Transition,
    diffusion: np.ndarray | None,
    usable: np.ndarray | None,
    noisy_states: bool,
) -> Callable[[Array], features.NormalEquations]:
    """The sums over all data as a function of θ (P,): by features where the drift has them."""
    mask = np.ones(data.x.shape[2]) if usable is None else np.asarray(usable, float)
    unravel = ravel_pytree(theta)[1]
    drift = process.drift
    has_features = process.integrator == "euler" and isinstance(drift, features.FeatureDrift)
    if transition is euler and diffusion is not None and has_features:
        assert isinstance(drift, features.FeatureDrift)
        stop = len(data.x)

        def sum_piece(
            flat: Array, x: Array, times: Times, context: PyTree
        ) -> features.NormalEquations:
            weight = _weigh_components(mask, diffusion)
            return features.sum_features(
                drift, unravel(flat), x, times, context, weight, noisy_states
            )

    else:
        stop = _limit_work(data, ravel_pytree(theta)[0].size)
        law = _DriftLaw(process, transition, noisy_states)
        q = None if diffusion is None else jnp.asarray(diffusion)
        weights = _Weights(q, jnp.asarray(mask))

        def sum_piece(
            flat: Array, x: Array, times: Times, context: PyTree
        ) -> features.NormalEquations:
            return _sum_steps(law, theta, flat, x, times, context, weights)

    def add_up(flat: Array) -> features.NormalEquations:
        total = None
        for _, piece in sources.load_pieces(data, BATCH, stop):
            x = jnp.asarray(piece.x, working_dtype(flat, piece.x))
            part = sum_piece(flat, x, check.grid(piece.t), piece.context)
            held = features.NormalEquations(*(np.asarray(v, np.float64) for v in part))
            total = held if total is None else total.add(held)
        assert total is not None
        return total

    return add_up


def _weigh_components(mask: np.ndarray, q: np.ndarray) -> np.ndarray:
    """1/2Q of every component; zero for those to leave out, and those without noise. (M,)"""
    noisy = np.asarray(q, float) > 0
    return np.where(noisy, mask / (2 * np.where(noisy, q, 1)), 0)


class _DriftLaw(NamedTuple):
    """Static part of the sums. lagged: the slope at the sample before is the instrument."""

    process: Process
    transition: steps.Transition
    lagged: bool


class _Weights(NamedTuple):
    """q: Q (M,) in place of the process's own, or None. mask: 0 for components to leave out."""

    q: Array | None
    mask: Array


@partial(jit, static_argnums=0)
def _sum_steps(
    law: _DriftLaw,
    like: Params,
    flat: Array,
    x: Array,
    times: Times,
    context: PyTree,
    weights: _Weights,
) -> features.NormalEquations:
    """The sums of trajectories x (E, T+1, M) at θ = `flat`, step by step."""
    unravel = ravel_pytree(like)[1]
    process = steps.with_diffusion(law.process, weights.q)
    mask = weights.mask[:, None]

    def one(before: Array, step: Step) -> features.NormalEquations:
        slope = steps.measure_slope(process, law.transition, unravel, flat, step) * mask
        instrument = slope
        if law.lagged:
            # in another sample's place but at this time: only its noise must be another one
            earlier = step._replace(x=before)
            instrument = steps.measure_slope(process, law.transition, unravel, flat, earlier) * mask
        r = (step.x_next - law.transition(process, unravel(flat), step).mean) * weights.mask
        solved = steps.weigh(process, law.transition, unravel(flat), step, instrument) * mask
        return features.NormalEquations(instrument.T @ solved, solved.T @ slope, solved.T @ r)

    def body(total: features.NormalEquations, at: Any) -> tuple[features.NormalEquations, None]:
        before, x, x_next, t, dt = at

        def one_trajectory(
            before: Array, x: Array, x_next: Array, context: PyTree
        ) -> features.NormalEquations:
            return one(before, Step(x, x_next, t, dt, context))

        each = jax.vmap(one_trajectory)(before, x, x_next, context)
        gram = total.gram + each.gram.sum(axis=0)
        normal = total.normal + each.normal.sum(axis=0)
        return features.NormalEquations(gram, normal, total.rows + each.rows), None

    path = jnp.swapaxes(x, 0, 1)
    k = int(law.lagged)
    square = jnp.zeros((flat.size, flat.size), x.dtype)
    zero = features.NormalEquations(square, square, jnp.zeros((x.shape[0], flat.size), x.dtype))
    at_steps = (
        path[: len(path) - 1 - k],
        path[k:-1],
        path[1 + k :],
        times.t[k:-1],
        times.dt[k:],
    )
    return jax.lax.scan(body, zero, at_steps)[0]


class _Inverse(NamedTuple):
    """inverse: N⁻¹ on what the data determine (P, P). known: which parameters these are (P,)."""

    inverse: np.ndarray
    known: np.ndarray


def _invert(gram: np.ndarray, normal: np.ndarray) -> _Inverse:
    """N⁻¹ in the directions that the data determine, and which parameters lie in them."""
    scale = np.sqrt(np.diag(gram))
    unit = np.where(scale > 0, scale, 1.0)
    values, vectors = np.linalg.eigh(gram / unit / unit[:, None])
    good = values > NULL * max(values[-1], 0)
    known = (vectors[:, ~good] ** 2).sum(axis=1) < 1e-3
    v = vectors[:, good]
    inner = v.T @ (normal / unit / unit[:, None]) @ v
    inverse = v @ np.linalg.solve(inner, v.T) / unit / unit[:, None]
    return _Inverse(inverse, known & (scale > 0))


def _limit_work(data: Trajectories, size: int) -> int:
    """Trajectories within the budget of work, two at least."""
    count, times, width = data.x.shape
    return max(2, min(count, int(FLOPS / max(1, 2 * width * size * (size + 2 * width) * times))))
