"""The residual guard: whether trajectories are what the process says, before a gradient is believed.

Given x, the residual r = x' − x − μΔt is Gaussian with covariance 2QΔt, so

    vᵢ = E[rᵢ (Q⁻¹r)ᵢ] / 2Δt = 1

for every component i if drift, noise, units, axes and interval are what they are thought to be; the sum over
components is E[rᵀQ⁻¹r]/2Δt. The score divides by Q, so that v = 100 is a gradient that is wrong by about as much, with
an error bar that does not show it.

A component without noise of its own, ẋ = v, has an identity in the place of a law. Its residual is what an Euler step
leaves out, with m and C the mean and covariance of the locally linear transition and S the variance of the readout,

    d² = (m − x − μΔt)² + C + S + (1 + Δt∂μ)² S,     vᵢ = E[rᵢ²] / E[dᵢ²] ≤ 1,

and less where the states were simulated in coarser steps: nothing, if the steps were the samples. What is below
`SLACK` counts as 1. With the locally linear transition r = x' − m, and d² has no first term.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import check
from fluctua.core.diffusion import depends, diffusion_at, diffusion_matrix, has_fewer_noises, q_matrix
from fluctua.core.scores import Gaussian, euler, local_linear, residual
from fluctua.core.types import (
    AnyProcess,
    Array,
    Counting,
    NoiseProduct,
    Params,
    Process,
    PyTree,
    Remembering,
    Step,
    Trajectories,
    put,
    working_dtype,
)

TRANSITIONS = 20_000
"""Looked at: they know v to one per cent."""

TOLERANCE = 0.1
"""Deviations of v from 1 that pass: a gradient wrong by a tenth."""

FEWEST = 200

CERTAIN = 5.0
"""Standard errors that a deviation must have."""

SLACK = 2.0
"""v of a component without noise up to which its residual is what an Euler step leaves out."""

ROUNDING = 4
"""Units in the last place by which a state that follows its drift exactly may be off."""

UNITS = (1e-9, 1e-6, 1e-3, 1e3, 1e6, 1e9)
MOST_BEND = 0.01
MOST_SWAPS = 6  # components of which every pair is tried

Transition = Callable[[Process, Params, Step], Gaussian]


class Residuals(NamedTuple):
    """v (M,) with its standard error. doubled: v at twice the interval, where v is not 1 and there are two steps.

    steps: transitions looked at. cause: what is probably wrong, in words; empty where v is 1. silent: components
    without noise of their own, whose v is 1 where they move as their drift says. law: what v is, for people.
    """

    v: np.ndarray
    stderr: np.ndarray
    steps: int
    doubled: np.ndarray | None = None
    cause: str = ""
    silent: tuple[int, ...] = ()
    law: str = "E[r Q⁻¹r]/2Δt"

    @property
    def wrong(self) -> np.ndarray:
        """Components whose v is not 1, beyond doubt and by more than a tenth."""
        return np.flatnonzero(_wrong(self.v, self.stderr))

    def __repr__(self) -> str:
        each = ", ".join(f"{v:.3g}" for v in self.v[:8]) + (", …" if len(self.v) > 8 else "")
        return f"{self.law} = {each} (1 expected) from {self.steps:,} steps" + (f". {self.cause}" * bool(self.cause))


def examine(
    process: AnyProcess,
    theta: Params,
    trajectories: Trajectories | Iterable[Trajectories],
    *,
    transition: Transition = euler,
    readout: Any = None,
    most: int = TRANSITIONS,
) -> Residuals:
    """Compare residuals with the noise that the process says, component by component.

    Args:
        process: drift and noise.
        theta: the parameters at which the trajectories were taken.
        trajectories: one record or chunks, of which the first is looked at; arrays may load when sliced.
        transition: the law of one step, `euler` or `local_linear`.
        readout: variance of the measurement, a number or (M,), which a residual has twice.
        most: transitions to look at, spread over the trajectories.

    Returns: a `Residuals`, whose `cause` is empty if nothing is wrong.

    """
    process, theta = check.process(process), check.parameters(theta)
    data = trajectories if isinstance(trajectories, Trajectories) else next(iter(trajectories))
    if isinstance(process, Remembering):
        return _examine_samples(process, theta, data, most)
    if isinstance(process, Counting):
        return _examine_counts(process, theta, data, most)
    assert isinstance(process, Process)
    plain = transition is euler and _is_diagonal(process, theta, data)
    silent = _silent(process, theta, data)
    if not plain or silent:  # a few solves of M × M matrices a transition
        most = min(most, max(FEWEST, int(2e11 / (50 * data.x.shape[2] ** 3))))
    rows = _spread(data, most)
    x = _only(data.x, rows)
    x, t = np.asarray(x, working_dtype(theta, x)), np.asarray(data.t, np.float64)
    context = jax.tree.map(lambda leaf: put(_only(leaf, rows)), data.context)
    variance = np.asarray(0.0 if readout is None else readout, float)
    if variance.shape not in ((), x.shape[2:]) or not np.all(variance >= 0):
        raise ValueError(f"the variance of the readout is one number ≥ 0, or ({x.shape[2]},); got {readout!r}.")
    s = put(np.full(x.shape[2:], variance, x.dtype))
    last_place = ROUNDING * float(np.finfo(_only(data.x, rows[:1]).dtype).eps) * np.abs(x).max(axis=(0, 1))

    def measure(x: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        times = check.grid(t)
        kind, states, begins = None if plain else transition, put(x), put(np.asarray(times.t)[:-1])
        v, stderr = _moments(process, kind, silent, theta, states, begins, times.dt, context, s)
        v, stderr = np.asarray(v, float), np.asarray(stderr, float)
        if silent:
            left = _left_out(process, transition, theta, states, begins, times.dt, context, s)
            square, spread, expected = (np.asarray(part, float) for part in left)
            expected = np.maximum(expected + last_place**2, np.finfo(float).tiny)
            is_silent = np.isin(np.arange(len(v)), silent)
            with np.errstate(over="ignore"):  # where another unit is tried
                v = np.where(is_silent, np.where(square <= SLACK * expected, 1, square / expected), v)
                stderr = np.where(is_silent, spread / expected, stderr)
        return v, stderr

    residuals = Residuals(*measure(x, t), x.shape[0] * (x.shape[1] - 1), silent=silent)
    if (
        not residuals.wrong.size or not np.isfinite(residuals.v).all()
    ):  # singular noise is located by the estimate itself
        return residuals
    residuals = residuals._replace(doubled=measure(x[:, ::2], t[::2])[0] if x.shape[1] > 2 else None)
    whole = np.shape(data.x)[0] == len(t) and not jax.tree.leaves(context)
    turned = np.asarray(data.x).swapaxes(0, 1)[rows].astype(x.dtype) if whole else None
    return residuals._replace(cause=_cause(residuals, x, t, turned, measure))


def _examine_samples(process: Remembering, theta: Params, data: Trajectories, most: int) -> Residuals:
    rows = _spread(data, most)
    samples = _only(data.x, rows)
    x = jnp.asarray(samples, working_dtype(theta, samples))
    context = jax.tree.map(lambda leaf: jnp.asarray(_only(leaf, rows)), data.context)
    checked: Any = process.check(theta, x[0, 0], jnp.asarray(data.t)[0], jax.tree.map(lambda leaf: leaf[0], context))
    each = np.asarray(checked.residuals(theta, check.grid(data.t), x, context), float)
    v, count = each.mean(axis=(0, 1)), each.shape[0] * each.shape[1]
    residuals = Residuals(v, each.std(axis=(0, 1)) / np.sqrt(count), count)
    if not residuals.wrong.size or not np.isfinite(v).all():
        return residuals
    return residuals._replace(
        cause=f"The innovations of channel{'s' * (len(residuals.wrong) > 1)} {check.few(residuals.wrong)} have not the "
        "variance that the filter predicts: the process, its start, what is observed, the readout noise or a unit is "
        "another one, or the drift bends too much within the uncertainty of the hidden state for an extended filter."
    )


def _examine_counts(process: Counting, theta: Params, data: Trajectories, most: int) -> Residuals:
    """Events of each kind over what their rates expect, v = N/∫a dt, which is Poissonian: ± 1/√∫a dt."""
    rows = _spread(data, most)
    x, context, events = (
        jax.tree.map(lambda leaf: jnp.asarray(_only(leaf, rows)), tree) for tree in (data.x, data.context, data.events)
    )
    times = check.grid(data.t)
    happened, expected = (
        np.asarray(part, float)
        for part in _counts(process, theta, x.astype(working_dtype(theta, x)), times.t[:-1], times.dt, context, events)
    )
    there = expected > 0
    v = np.where(there, happened / np.where(there, expected, 1), np.where(happened > 0, np.inf, 1))
    stderr = np.where(there, np.sqrt(np.maximum(happened, expected)) / np.where(there, expected, 1), 1)
    residuals = Residuals(v, stderr, x.shape[0] * (x.shape[1] - 1), law="events / ∫ rate dt")
    if not residuals.wrong.size:
        return residuals
    fits = [factor for factor in (*UNITS, 60.0, 1 / 60) if not _wrong(v / factor, stderr / factor).any()]
    i = int(residuals.wrong[0])
    cause = f"Event {i} happens {v[i]:.3g} times as often as its rate says: a rate, a parameter or a unit is another."
    return residuals._replace(
        cause=f"They fit if the times are multiplied by {fits[0]:g} (another unit)." if fits else cause
    )


@partial(jax.jit, static_argnums=0)
def _counts(
    process: Counting, theta: Params, x: Array, t: Array, dt: Array, context: PyTree, events: PyTree
) -> tuple[Array, Array]:
    """Sums over trajectories x (E, T+1, M) and steps. (R,) each"""

    def one(x: Array, x_next: Array, t: Array, dt: Array, context: PyTree, events: PyTree) -> tuple[Array, Array]:
        return process.counts(theta, Step(x, x_next, t, dt, context, events))

    along = jax.vmap(jax.vmap(one, in_axes=(0, 0, 0, 0, None, 0)), in_axes=(0, 0, None, None, 0, 0))
    happened, expected = along(x[:, :-1], x[:, 1:], t, dt, context, events)
    return happened.sum(axis=(0, 1)), expected.sum(axis=(0, 1))


def warn_of_residuals(
    process: AnyProcess,
    theta: Params,
    trajectories: Trajectories | Iterable[Trajectories],
    *,
    transition: Transition = euler,
    readout: Any = None,
    stacklevel: int = 2,
) -> Residuals:
    """`examine`, and a `RuntimeWarning` with the likely cause where something is wrong. Its arguments."""
    residuals = examine(process, theta, trajectories, transition=transition, readout=readout)
    if residuals.cause:
        warnings.warn(f"the trajectories are not those of the process: {residuals!r}", RuntimeWarning, stacklevel + 1)
    return residuals


def check_linearisation(process: Process, theta: Params, trajectories: Trajectories | Iterable[Trajectories]) -> None:
    """Refuse `local_linear_score` for parameters of the noise where the drift bends within a kick.

    Its law is Gaussian. A drift that is not linear skews the law by about |J(x + k) − J(x)| Δ, with J = ∂μ/∂x and k a
    kick of one interval, which parameters of the drift bear and those of the noise do not: their gradient is wrong by
    a tenth at 0.04 in a double well, and has the wrong sign at 1.
    """
    data = trajectories if isinstance(trajectories, Trajectories) else next(iter(trajectories))
    one = jax.tree.map(lambda leaf: jnp.asarray(leaf)[0], data.context)
    x = jnp.asarray(np.asarray(data.x[0]), working_dtype(theta, data.x))
    leaves, tree = jax.tree.flatten_with_path(theta)
    in_noise = []
    for i, (path, leaf) in enumerate(leaves):
        at = lambda v, i=i: jax.tree.unflatten(tree, [v if k == i else other for k, (_, other) in enumerate(leaves)])
        if depends(lambda v, at=at: diffusion_matrix(process, at(v), x[0], jnp.asarray(data.t)[0], one), leaf):
            in_noise.append("theta" + jax.tree_util.keystr(path))
    if not in_noise:
        return
    rows = _spread(data, FEWEST)[:FEWEST]
    some = jnp.asarray(_only(data.x, rows), x.dtype)
    steps = np.unique(np.linspace(0, len(data.t) - 2, 20).astype(int))
    context = jax.tree.map(lambda leaf: jnp.asarray(_only(leaf, rows)), data.context)
    times = check.grid(data.t)
    bend = float(_bend(process, theta, some[:, steps], times.t[steps], times.dt[steps], context))
    if bend > MOST_BEND:
        raise ValueError(
            f"local linearisation is not for {', '.join(in_noise)} here: the parameters enter the noise, and the drift "
            f"bends within a kick (|J(x + kick) − J(x)| Δ = {bend:.2g}, {MOST_BEND} at most). Sample faster, or keep "
            "them fixed: leave them out of theta."
        )


@partial(jax.jit, static_argnums=0)
def _bend(process: Process, theta: Params, x: Array, t: Array, dt: Array, context: PyTree) -> Array:
    """Root mean square of |J(x + k) − J(x)| Δ over states x (E, n, M), k of one standard deviation along each axis."""

    def one(x: Array, t: Array, dt: Array, context: PyTree) -> Array:
        slope = jax.jacfwd(lambda x: process.drift(theta, x, t, context))
        kick = jnp.sqrt(2 * dt * jnp.diagonal(diffusion_matrix(process, theta, x, t, context)))
        return jnp.max(jnp.abs(slope(x + kick) - slope(x))) * dt

    each = jax.vmap(jax.vmap(one, in_axes=(0, 0, 0, None)), in_axes=(0, None, None, 0))(x, t, dt, context)
    return jnp.sqrt(jnp.mean(each**2))


# ------------------------------------------------------------------------------------- what is behind


def _spread(data: Trajectories, most: int) -> np.ndarray:
    """Some trajectories, evenly spread, of as many steps as are to be looked at."""
    count, times = np.shape(data.x)[:2]
    return np.unique(np.linspace(0, count - 1, min(count, max(2, most // (times - 1)))).astype(int))


def _only(x: Array, rows: np.ndarray) -> np.ndarray:
    """Some rows of an array, which may load when sliced: one at a time then."""
    if isinstance(x, np.ndarray | jax.Array):
        return np.asarray(x)[rows]
    return np.concatenate([np.asarray(x[j : j + 1]) for j in map(int, rows)])


def _is_diagonal(process: Process, theta: Params, data: Trajectories) -> bool:
    if process.diffusion is not None or process.noise is None or isinstance(process.noise, NoiseProduct):
        return False
    t, one = check.first((data.t, data.context))
    state = jax.ShapeDtypeStruct(np.shape(data.x)[2:], working_dtype(theta, data.x))
    return jax.eval_shape(process.noise, theta, state, t, one).ndim == 1


def _silent(process: Process, theta: Params, data: Trajectories) -> tuple[int, ...]:
    """Components without noise at the first two states."""
    t, one = check.first((data.t, data.context))
    states = np.asarray(_only(data.x, np.zeros(1, int))[0, :2], working_dtype(theta, data.x))
    rows = [np.abs(np.asarray(q_matrix(process, theta, x, t, one))) for x in states]
    return tuple(np.flatnonzero(~np.any([q.reshape(len(q), -1).max(axis=1) > 0 for q in rows], axis=0)).tolist())


@partial(jax.jit, static_argnums=(0, 1))
def _left_out(
    process: Process,
    transition: Transition,
    theta: Params,
    x: Array,
    t: Array,
    dt: Array,
    context: PyTree,
    readout: Array,
) -> tuple[Array, Array, Array]:
    """E[r²] with its standard error, and E[d²], along x (E, T+1, M), r by the transition that is used. (M,) each"""

    def one(x: Array, x_next: Array, t: Array, dt: Array, context: PyTree) -> tuple[Array, Array]:
        step = Step(x, x_next, t, dt, context)
        mean, covariance = local_linear(process, theta, step)
        used = lambda x: transition(process, theta, step._replace(x=x)).mean
        blur = readout + jax.jacfwd(used)(x) ** 2 @ readout
        return (x_next - used(x)) ** 2, (used(x) - mean) ** 2 + jnp.diagonal(covariance) + blur

    square, expected = _along(one, x, t, dt, context)
    return square.mean(axis=0), square.std(axis=0) / np.sqrt(square.shape[0]), expected.mean(axis=0)


def _along(one: Callable[..., Any], x: Array, t: Array, dt: Array, context: PyTree) -> Any:
    """`one(x, x', t, Δt, context)` of every step of x (E, T+1, M), a few at a time; leaves (E·T, …)."""
    count, steps = x.shape[0], t.shape[0]
    each = jax.tree.map(lambda leaf: jnp.repeat(leaf, steps, axis=0), context)
    ends = (x[:, :-1].reshape(-1, x.shape[2]), x[:, 1:].reshape(-1, x.shape[2]))
    return jax.lax.map(lambda row: one(*row), (*ends, jnp.tile(t, count), jnp.tile(dt, count), each), batch_size=256)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _moments(
    process: Process,
    transition: Transition | None,
    silent: tuple[int, ...],
    theta: Params,
    x: Array,
    t: Array,
    dt: Array,
    context: PyTree,
    readout: Array,
) -> tuple[Array, Array]:
    """Mean and standard error of r (C⁻¹r) over all steps. transition: None for Euler steps with diagonal noise.

    silent: components without noise, which are left to `_left_out`; the law of the others is that without them.
    """

    def one(x: Array, x_next: Array, t: Array, dt: Array, context: PyTree) -> Array:
        step = Step(x, x_next, t, dt, context)
        if transition is None:
            q = diffusion_at(process, theta, x, t, context)
            expected = 2 * dt * q.apply(theta, jnp.ones_like(x)) + 2 * readout
            # a component without noise has an identity instead: `_left_out`
            return jnp.where(
                expected > 0, residual(process, theta, step) ** 2 / jnp.where(expected > 0, expected, 1), 1
            )
        mean, covariance = transition(process, theta, step)
        whole = covariance + 2 * jnp.diag(readout)
        if transition is euler and has_fewer_noises(process, theta, x, t, context):
            return _on_range(whole, x_next - mean)
        if silent:
            slope = jax.jacfwd(lambda x: transition(process, theta, step._replace(x=x)).mean)(x)
            whole = covariance + jnp.diag(readout) + (slope * readout) @ slope.T
            others = np.setdiff1d(np.arange(x.size), silent)
            r = (x_next - mean)[others]
            return jnp.ones_like(x).at[others].set(r * jnp.linalg.solve(whole[np.ix_(others, others)], r))
        still = jnp.diagonal(whole) <= 0
        r = jnp.where(still, 0, x_next - mean)
        return jnp.where(still, 1, r * jnp.linalg.solve(whole + jnp.diag(still.astype(whole.dtype)), r))

    values = _along(one, x, t, dt, context)
    return values.mean(axis=0), values.std(axis=0) / np.sqrt(values.shape[0])


def _on_range(covariance: Array, r: Array) -> Array:
    """rᵢ (C⁺r)ᵢ over its expectation (CC⁺)ᵢᵢ, the share of component i in the directions that have noise. (M,)"""
    scale, vectors = jnp.linalg.eigh(covariance)
    there = scale > r.size * jnp.finfo(r.dtype).eps * scale[-1]
    share = jnp.sum(jnp.where(there, vectors**2, 0), axis=1)
    solved = vectors @ jnp.where(there, vectors.T @ r / jnp.where(there, scale, 1), 0)
    seen = share > r.size * jnp.finfo(r.dtype).eps
    return jnp.where(seen, r * solved / jnp.where(seen, share, 1), 1)


def _wrong(v: np.ndarray, stderr: np.ndarray) -> np.ndarray:
    return ~(np.abs(v - 1) <= np.maximum(TOLERANCE, CERTAIN * stderr))  # a NaN is wrong


def _cause(
    residuals: Residuals, x: np.ndarray, t: np.ndarray, turned: np.ndarray | None, measure: Callable[..., Any]
) -> str:
    """What makes the residuals fit when it is changed; else how they deviate."""
    fits = [what for what, (other, times) in _changes(x, t, turned) if not _wrong(*measure(other, times)).any()]
    if fits:
        return f"They fit {' or '.join(fits)}."
    parts, v = residuals.wrong, residuals.v
    unmoved = [i for i in parts if i in residuals.silent]
    if unmoved:
        i = unmoved[0]
        readout = (
            residuals.doubled is not None and residuals.doubled[i] < v[i] / 4
        )  # what an Euler step leaves out grows as Δ³
        return (
            f"Component {i} has no noise of its own and does not move as its drift says: its residual is "
            f"{np.sqrt(v[i]):.3g} times what the interval explains. "
            + ("It looks like noise of the readout." if readout else "Its drift, or a unit, is another.")
        )
    which = "every component" if len(parts) == len(v) else f"component{'s' * (len(parts) > 1)} {check.few(parts)}"
    growth = np.nan
    if residuals.doubled is not None:
        growth = float(np.median((residuals.doubled[parts] - 1) / (v[parts] - 1)))
    factor = ", ".join(f"{np.sqrt(v[i]):.3g}" for i in parts[:5])
    if 1.25 < growth < 3:
        return (
            f"The deviation of {which} doubles with the interval: the sampling is too coarse for Euler steps (use "
            "score=local_linear_score, or sample faster), or the drift is wrong."
        )
    if 0.3 < growth < 0.7:
        return (
            f"The deviation of {which} halves when the interval doubles: noise of the readout, which is no part of the "
            "process (correct for it, or sample more slowly with score=local_linear_score)."
        )
    return (
        f"The noise amplitude of {which} is {factor} times what `noise` says, or the state or the time is in another "
        "unit than the process."
    )


def _changes(
    x: np.ndarray, t: np.ndarray, turned: np.ndarray | None
) -> Iterator[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    """Mistakes undone: units, and axes or components that were swapped."""
    if turned is not None:
        yield "as (time, trajectory, state): pass x.swapaxes(0, 1)", (turned, t)
    for factor in UNITS:
        yield f"if the state is multiplied by {factor:g} (another unit)", (x * factor, t)
    for factor in (*UNITS, 60.0, 1 / 60):
        yield f"if the times are multiplied by {factor:g} (another unit)", (x, t * factor)
    size = x.shape[2]
    if size <= MOST_SWAPS:
        for i, j in combinations(range(size), 2):
            order = np.arange(size)
            order[[i, j]] = j, i
            yield f"if components {i} and {j} are swapped", (x[..., order], t)
