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
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from fluctua.core import check
from fluctua.core.diffusion import depends, diffusion_matrix, q_matrix
from fluctua.core.residuals import alternatives
from fluctua.core.residuals.alternatives import KNOWN, Finding, Limits
from fluctua.core.residuals.causes import describe
from fluctua.core.residuals.kicks import Standardised, Transition, leave_out, spread_noise, standardise
from fluctua.core.scores import drift_score, euler, full_score, local_linear, local_linear_score
from fluctua.core.steps import Substeps
from fluctua.core.types import (
    AnyProcess,
    Array,
    Counting,
    NoiseProduct,
    Params,
    Process,
    PyTree,
    Remembering,
    Score,
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

UNKNOWN = 10.0
"""Factor in v that passes where the noise is not known."""

MOST_LINEARISED = 16
"""Components up to which a deviation is compared with the locally linear law too."""

MOST_FINDINGS = 5

LAWS: dict[Score, Transition] = {full_score: euler, drift_score: euler, local_linear_score: local_linear}
"""The law of a step that goes with a score. A score of one's own may know another one: it is not examined."""

UNITS = (1e-9, 1e-6, 1e-3, 1e3, 1e6, 1e9)
MOST_BEND = 0.01
MOST_SWAPS = 6  # components of which every pair is tried


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
    return examine_batch(process, theta, trajectories, transition=transition, readout=readout, most=most).residuals


class DoubtError(RuntimeError):
    """A run that stops because its trajectories are not those of its model, or its model is not what is measured."""


class Batch(NamedTuple):
    """What a batch says. sums: of its tests with those of the batches before, for the next; None where there are none.

    findings: deviations of the residuals that neither chance nor the interval explains, the most likely first.
    """

    residuals: Residuals
    sums: alternatives.Table | None = None
    findings: tuple[Finding, ...] = ()


def examine_batch(
    process: AnyProcess,
    theta: Params,
    trajectories: Trajectories | Iterable[Trajectories],
    *,
    transition: Transition = euler,
    readout: Any = None,
    most: int = TRANSITIONS,
    limits: Limits = KNOWN,
    earlier: alternatives.Table | None = None,
    start: Array | None = None,
    known_noise: bool = True,
) -> Batch:
    """`examine` for a run of batches, whose small deviations add up.

    Args:
        process: drift and noise.
        theta: the parameters at which the trajectories were taken.
        trajectories: one record or chunks, of which the first is looked at.
        transition: the law of one step.
        readout: variance of the measurement.
        most: transitions to look at.
        limits: deviations that pass however certain they are.
        earlier: `Batch.sums` of the batches before.
        start: the state (M,) from which every trajectory begins, where there is one.
        known_noise: whether the amplitude of the noise is what `process` says; else it is that of the trajectories, up
            to a factor of ten in v.

    Returns: a `Batch`.

    """
    process, theta = check.process(process), check.parameters(theta)
    data = trajectories if isinstance(trajectories, Trajectories) else next(iter(trajectories))
    if isinstance(process, Remembering):
        return Batch(_examine_samples(process, theta, data, most), earlier)
    if isinstance(process, Counting):
        return Batch(_examine_counts(process, theta, data, most), earlier)
    assert isinstance(process, Process)
    sample = _take(process, theta, data, transition, readout, most)
    with np.errstate(over="ignore", invalid="ignore"):  # numbers beyond the precision are wrong, and named
        made = _standardise(sample, sample.law, sample.x, sample.t)
        scale = np.ones(sample.x.shape[2]) if known_noise else np.clip(made.v.mean(axis=0), 1 / UNKNOWN, UNKNOWN)
        made = _divide(made, scale)
        v, stderr = _variances(sample, made, sample.x, sample.t)
        residuals = Residuals(v, stderr, sample.x.shape[0] * (sample.x.shape[1] - 1), silent=sample.silent)
        table = _collect(sample, made)
        sums = alternatives.add(earlier, table)
        findings = _find(sample, made, table, sums, limits, scale)
        if residuals.wrong.size:
            residuals = _explain(residuals, sample, data, findings)
        elif findings:
            residuals = residuals._replace(cause=describe(findings[0], sample.components))
        elif start is not None:
            residuals = residuals._replace(cause=_compare_start(sample, start, scale))
    return Batch(residuals, sums, tuple(findings[:MOST_FINDINGS]))


class _Law(NamedTuple):
    """Of one step. transition: None for Euler steps with independent noise.

    mixed: whether that noise spreads over the components within an interval; its correlations are taken from the
    locally linear law at the mean state.
    """

    process: Process
    transition: Transition | None
    mixed: bool = False


class _Sample(NamedTuple):
    """Trajectories that are looked at: rows of the data, states (E, T+1, M), times, and by what law.

    components: those with noise of their own; the others are silent. last_place: rounding of a state (M,).
    """

    law: _Law
    theta: Params
    rows: np.ndarray
    x: np.ndarray
    t: np.ndarray
    context: PyTree
    readout: Array
    silent: tuple[int, ...]
    last_place: np.ndarray

    @property
    def components(self) -> np.ndarray:
        """With noise of their own."""
        return np.setdiff1d(np.arange(self.x.shape[2]), self.silent)

    @property
    def blurred(self) -> bool:
        """Whether samples have noise of a readout."""
        return bool(np.any(np.asarray(self.readout) > 0))


def _take(
    process: Process, theta: Params, data: Trajectories, transition: Transition, readout: Any, most: int
) -> _Sample:
    plain = transition is euler and _is_diagonal(process, theta, data)
    silent = _silent(process, theta, data)
    if not plain or silent:  # a few solves of M × M matrices a transition
        most = min(most, max(FEWEST, int(2e11 / (50 * data.x.shape[2] ** 3))))
    rows = _spread(data, most)
    raw = _only(data.x, rows)
    x = np.asarray(raw, working_dtype(theta, raw))
    variance = np.asarray(0.0 if readout is None else readout, float)
    if variance.shape not in ((), x.shape[2:]) or not np.all(variance >= 0):
        raise ValueError(f"the variance of the readout is one number ≥ 0, or ({x.shape[2]},); got {readout!r}.")
    return _Sample(
        law=_Law(process, None if plain else transition, plain and isinstance(process.step, Substeps)),
        theta=theta,
        rows=rows,
        x=x,
        t=np.asarray(data.t, np.float64),
        context=jax.tree.map(lambda leaf: put(_only(leaf, rows)), data.context),
        readout=put(np.full(x.shape[2:], variance, x.dtype)),
        silent=silent,
        last_place=ROUNDING * float(np.finfo(raw.dtype).eps) * np.abs(x).max(axis=(0, 1)).astype(float),
    )


def _standardise(sample: _Sample, law: _Law, x: np.ndarray, t: np.ndarray) -> Standardised:
    """Residuals of every step in units of their noise, in double precision. (n, M) each"""
    times = check.grid(t)
    begins = put(np.asarray(times.t)[:-1])
    made = standardise(
        *law[:2], sample.silent, sample.theta, put(x), begins, times.dt, sample.context, sample.readout
    )  # fmt: skip
    v, z, drift = (np.asarray(part, np.float64) for part in made)
    if law.mixed and not sample.silent:
        middle = put(x.mean(axis=(0, 1)))
        context = jax.tree.map(lambda leaf: leaf[0], sample.context)
        step = Step(middle, middle, begins[0], times.dt[0], context)
        root = np.asarray(spread_noise(law.process, sample.theta, step, sample.readout), np.float64)
        z, drift = (scipy.linalg.solve_triangular(root, each.T, lower=True).T for each in (z, drift))
        v = z**2
    # squared here: a residual beyond 1e19 of its noise has no square in single precision
    return Standardised(v if law.transition else np.where(z == 0, v, z**2), z, drift)


def _variances(sample: _Sample, made: Standardised, x: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """v and its standard error; of components without noise by what an Euler step leaves out. (M,) each"""
    v, stderr = _mean(made.v)
    if not sample.silent:
        return v, stderr
    times = check.grid(t)
    begins = put(np.asarray(times.t)[:-1])
    transition = sample.law.transition or euler
    left = leave_out(
        sample.law.process, transition, sample.theta, put(x), begins, times.dt, sample.context, sample.readout
    )
    square, expected = (np.asarray(part, np.float64) for part in left)
    mean, spread = _mean(square)
    allowed = np.maximum(expected.mean(axis=0) + sample.last_place**2, np.finfo(float).tiny)
    is_silent = np.isin(np.arange(len(v)), sample.silent)
    quiet = np.where(mean <= SLACK * allowed, 1, mean / allowed)
    return np.where(is_silent, quiet, v), np.where(is_silent, spread / allowed, stderr)


def _divide(made: Standardised, variance: np.ndarray) -> Standardised:
    """Residuals in units of a noise whose variance is so many times as large. variance: (M,)"""
    root = np.sqrt(variance)
    return Standardised(made.v / variance, made.z / root, made.drift / root)


def _mean(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard error over the first axis."""
    return values.mean(axis=0), values.std(axis=0) / np.sqrt(len(values))


def _collect(sample: _Sample, made: Standardised) -> alternatives.Table:
    """The sums of a batch; empty where it is too small, or where nothing has noise."""
    there = sample.components
    z = made.z[:, there]
    if len(z) < alternatives.FEWEST_STEPS or not there.size or not np.isfinite(z).all() or not z.any():
        return {}
    count, times = sample.x.shape[:2]
    states = np.asarray(sample.x[:, :-1, there], np.float64)
    return alternatives.collect(z.reshape(count, times - 1, -1), states, sample.blurred)


def _find(
    sample: _Sample,
    made: Standardised,
    table: alternatives.Table,
    sums: alternatives.Table,
    limits: Limits,
    scale: np.ndarray,
) -> list[Finding]:
    """Deviations of a batch (`table`) and of it with those before (`sums`) that the interval does not explain."""
    drift = np.sqrt(np.mean(made.drift[:, sample.components] ** 2, axis=0))
    find = lambda tables: [one for each in tables for one in alternatives.judge(each, drift, limits)]
    found = find((table, sums))
    law = _finer(sample)
    if found and law is not None:
        other = _collect(sample, _divide(_standardise(sample, law, sample.x, sample.t), scale))
        found = find([alternatives.leave_unexplained(each, table, other) for each in (table, sums)])
    return sorted(found, key=lambda one: -abs(one.statistic))


def _finer(sample: _Sample) -> _Law | None:
    """The law of a process that moves on within an interval, where the one at hand is of a single Euler step.

    A device does, and its residuals against Euler's step deviate by what that leaves out. Locally linear, or for large
    states the noise-free path with one covariance for all steps.
    """
    process, transition, _ = sample.law
    if transition not in (None, euler) or process.step != "euler":
        return None
    if sample.x.shape[2] <= MOST_LINEARISED:
        return _Law(process, local_linear)
    return None if sample.silent else _Law(process._replace(step="rk4"), transition, transition is None)


def _compare_start(sample: _Sample, start: Array, scale: np.ndarray) -> str:
    """What is wrong where the first samples are further from the start than the kicks of one step; empty if nothing.

    A record of an autonomous process that begins some samples late is one of the same process: nothing else shows it.
    """
    one = jax.tree.map(lambda leaf: leaf[0], sample.context)
    q = np.asarray(q_matrix(sample.law.process, sample.theta, put(np.asarray(start, sample.x.dtype)), sample.t[0], one))
    q = (q if q.ndim == 1 else np.diagonal(q))[sample.components]
    readout = np.asarray(sample.readout, np.float64)[sample.components]
    expected = (2 * q * (sample.t[1] - sample.t[0]) + 2 * readout) * scale[sample.components]
    away = (sample.x[:, 0] - np.asarray(start))[:, sample.components].astype(np.float64)
    square = away[:, expected > 0] ** 2 / expected[expected > 0]
    if not square.size:
        return ""
    # noise of the readout is half of what is expected at most: one sample has it once
    chance = scipy.stats.chi2.isf(alternatives.CHANCE, square.size) / square.size / 2 if readout.any() else 0.0
    if not square.mean() > max(1.0, chance):
        return ""
    i = int(sample.components[expected > 0][np.argmax(square.mean(axis=0))])
    return (
        f"The trajectories do not begin where the process does: component {i} starts "
        f"{np.sqrt(square.mean(axis=0).max()):.3g} kicks of one step away. The record begins late or early (a shift of "
        "the time axis), or the start is another."
    )


def _explain(residuals: Residuals, sample: _Sample, data: Trajectories, findings: list[Finding]) -> Residuals:
    """The cause of a v that is not 1."""
    if not (np.isfinite(residuals.v).all() and np.isfinite(residuals.stderr).all()):
        which = np.flatnonzero(~(np.isfinite(residuals.v) & np.isfinite(residuals.stderr)))
        return residuals._replace(
            cause=f"The residuals of component{'s' * (len(which) > 1)} {check.few(which)} are not finite: the drift or "
            f"the noise is not, or they exceed what {sample.x.dtype} can hold (a unit)."
        )

    def measure(x: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return _variances(sample, _standardise(sample, sample.law, x, t), x, t)

    x, t = sample.x, sample.t
    residuals = residuals._replace(doubled=measure(x[:, ::2], t[::2])[0] if x.shape[1] > 2 else None)
    whole = np.shape(data.x)[0] == len(t) and not jax.tree.leaves(sample.context)
    turned = np.asarray(data.x).swapaxes(0, 1)[sample.rows].astype(x.dtype) if whole else None
    fits = [what for what, (other, times) in _changes(x, t, turned) if not _wrong(*measure(other, times)).any()]
    if fits:
        return residuals._replace(cause=f"They fit {' or '.join(fits)}.")
    named = [one for one in findings if _accounts(one, residuals.v[sample.components], residuals.steps)]
    return residuals._replace(cause=describe(named[0], sample.components) if named else _cause(residuals))


def _accounts(finding: Finding, v: np.ndarray, steps: int) -> bool:
    """Whether a term that the drift lacks is most of what makes v too large: T²/V of n(v − 1)."""
    if finding.family not in alternatives.OF_MEAN:
        return False
    excess = v[finding.row] - 1
    # T²/V is in units of the residuals' own variance v
    return excess > 0 and finding.statistic**2 * v[finding.row] > steps * excess / 2


def _examine_samples(process: Remembering, theta: Params, data: Trajectories, most: int) -> Residuals:
    rows = _spread(data, most)
    samples = _only(data.x, rows)
    x = jnp.asarray(samples, working_dtype(theta, samples))
    context = jax.tree.map(lambda leaf: jnp.asarray(_only(leaf, rows)), data.context)
    checked: Any = process.check(theta, x[0, 0], jnp.asarray(data.t)[0], jax.tree.map(lambda leaf: leaf[0], context))
    each = np.asarray(checked.residuals(theta, check.grid(data.t), x, context), float)
    v, count = each.mean(axis=(0, 1)), each.shape[0] * each.shape[1]
    residuals = Residuals(v, each.std(axis=(0, 1)) / np.sqrt(count), count)
    if not residuals.wrong.size:
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


def _wrong(v: np.ndarray, stderr: np.ndarray) -> np.ndarray:
    """Components whose v is not 1. What is not finite is wrong, an error too: it excuses nothing."""
    known = np.isfinite(v) & np.isfinite(stderr)
    return ~(known & (np.abs(v - 1) <= np.maximum(TOLERANCE, CERTAIN * np.where(known, stderr, 0))))


def _cause(residuals: Residuals) -> str:
    """How v deviates."""
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
