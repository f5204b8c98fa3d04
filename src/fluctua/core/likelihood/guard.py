"""The residual guard: whether trajectories are what the process says, before a gradient is
believed.

Given x, the residual r = x' − x − μΔt is Gaussian with covariance 2QΔt, so

    vᵢ = E[rᵢ (Q⁻¹r)ᵢ] / 2Δt = 1

for every component i if drift, noise, units, axes and interval are what they are thought to be; the
sum over components is E[rᵀQ⁻¹r]/2Δt. The score divides by Q, so that v = 100 is a gradient that is
wrong by about as much, with an error bar that does not show it.

A component without noise of its own, ẋ = v, has an identity in the place of a law. Its residual is
what an Euler step leaves out, with m and C the mean and covariance of the locally linear transition
and S the variance of the readout,

    d² = (m − x − μΔt)² + C + S + (1 + Δt∂μ)² S,     vᵢ = E[rᵢ²] / E[dᵢ²] ≤ 1,

and less where the states were simulated in coarser steps: nothing, if the steps were the samples.
What is below `SLACK` counts as 1. With the locally linear transition r = x' − m, and d² has no
first term.

Beside v, residuals are tested against common faults (`fluctua.core.likelihood.alternatives`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from fluctua.core import check
from fluctua.core.arrays import Array, Params, PyTree, jit, put, working_dtype
from fluctua.core.dependence import depends
from fluctua.core.diffusion import diffusion_matrix, q_matrix
from fluctua.core.likelihood import alternatives
from fluctua.core.likelihood.alternatives import KNOWN, Finding, Limits
from fluctua.core.likelihood.causes import describe
from fluctua.core.likelihood.kicks import Standardised, Transition
from fluctua.core.likelihood.mistakes import UNITS, explain
from fluctua.core.likelihood.report import Residuals, is_wrong
from fluctua.core.likelihood.sample import (
    FEWEST,
    Sample,
    choose_finer_law,
    choose_rows,
    collect_sums,
    divide_noise,
    load_rows,
    reduce_squares,
    standardise_states,
    take_sample,
)
from fluctua.core.process import AnyProcess, Counting, Process, Remembering, Score, Step
from fluctua.core.scores import drift_score, euler, full_score, local_linear, local_linear_score
from fluctua.core.trajectories import Trajectories

TRANSITIONS = 20_000
"""Looked at: they know v to one per cent."""

UNKNOWN = 10.0
"""Factor in v that passes where the noise is not known."""

MOST_FINDINGS = 5

LAWS: dict[Score, Transition] = {
    full_score: euler,
    drift_score: euler,
    local_linear_score: local_linear,
}
"""The law of a step that goes with a score.

A score of one's own may know another one: it is not examined.
"""

MOST_BEND = 0.01


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
        trajectories: one record or chunks, of which the first is looked at; arrays may load when
            sliced.
        transition: the law of one step, `euler` or `local_linear`.
        readout: variance of the measurement, a number or (M,), which a residual has twice.
        most: transitions to look at, spread over the trajectories.

    Returns: a `Residuals`, whose `cause` is empty if nothing is wrong.

    """
    return examine_batch(
        process, theta, trajectories, transition=transition, readout=readout, most=most
    ).residuals


class DoubtError(RuntimeError):
    """A run that stops because its trajectories are not those of its model, or its model is not
    what is measured.
    """


class Examination(NamedTuple):
    """What a batch says. sums: of its tests with those of the batches before, for the next; None
    where there are none.

    findings: deviations of the residuals that neither chance nor the interval explains, the most
    likely first.
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
) -> Examination:
    """`examine` for a run of batches, whose small deviations add up.

    Args:
        process: drift and noise.
        theta: the parameters at which the trajectories were taken.
        trajectories: one record or chunks, of which the first is looked at.
        transition: the law of one step.
        readout: variance of the measurement.
        most: transitions to look at.
        limits: deviations that pass however certain they are.
        earlier: `Examination.sums` of the batches before.
        start: the state (M,) from which every trajectory begins, where there is one.
        known_noise: whether the amplitude of the noise is what `process` says; else it is that of
            the trajectories, up to a factor of ten in v.

    Returns: an `Examination`.

    """
    process = check.process(process)
    theta = check.parameters(theta)
    data = trajectories if isinstance(trajectories, Trajectories) else next(iter(trajectories))
    if isinstance(process, Remembering):
        return Examination(_examine_samples(process, theta, data, most), earlier)
    if isinstance(process, Counting):
        return Examination(_examine_counts(process, theta, data, most), earlier)
    assert isinstance(process, Process)
    sample = take_sample(process, theta, data, transition, readout, most)
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # numbers beyond the precision are wrong, and named
        made = standardise_states(sample, sample.law, sample.x, sample.t)
        scale = (
            np.ones(sample.x.shape[2])
            if known_noise
            else np.clip(made.v.mean(axis=0), 1 / UNKNOWN, UNKNOWN)
        )
        made = divide_noise(made, scale)
        v, stderr = reduce_squares(sample, made, sample.x, sample.t)
        residuals = Residuals(v, stderr, len(made.v), silent=sample.silent)
        table = collect_sums(sample, made)
        sums = alternatives.add(earlier, table) if earlier else table
        findings = _find(sample, made, table, sums, limits, scale)
        if residuals.wrong.size:
            residuals = explain(residuals, sample, data, findings)
        elif findings:
            residuals = residuals._replace(cause=describe(findings[0], sample.components))
        elif start is not None:
            residuals = residuals._replace(cause=_compare_start(sample, start, scale))
    return Examination(residuals, sums, tuple(findings[:MOST_FINDINGS]))


def _find(
    sample: Sample,
    made: Standardised,
    table: alternatives.Table,
    sums: alternatives.Table,
    limits: Limits,
    scale: np.ndarray,
) -> list[Finding]:
    """Deviations of a batch (`table`) and of it with those before (`sums`) that the interval
    does not explain.
    """
    drift = np.sqrt(np.mean(made.drift[:, sample.components] ** 2, axis=0))

    def find(tables):
        return [one for each in tables for one in alternatives.judge(each, drift, limits)]

    tables = (table,) if sums is table else (table, sums)
    deviations = find(tables)
    law = choose_finer_law(sample)
    if deviations and law is not None:
        other = collect_sums(
            sample, divide_noise(standardise_states(sample, law, sample.x, sample.t), scale)
        )
        deviations = find([alternatives.leave_unexplained(each, table, other) for each in tables])
    return sorted(deviations, key=lambda one: -abs(one.statistic))


def _compare_start(sample: Sample, start: Array, scale: np.ndarray) -> str:
    """What is wrong where the first samples are further from the start than the kicks of one step;
    empty if nothing.

    A record of an autonomous process that begins some samples late is one of the same process:
    nothing else shows it.
    """
    one = jax.tree.map(lambda leaf: leaf[0], sample.context)
    q = np.asarray(
        q_matrix(
            sample.law.process,
            sample.theta,
            put(np.asarray(start, sample.x.dtype)),
            sample.t[0],
            one,
        )
    )
    q = (q if q.ndim == 1 else np.diagonal(q))[sample.components]
    readout = np.asarray(sample.readout, np.float64)[sample.components]
    expected = (2 * q * (sample.t[1] - sample.t[0]) + 2 * readout) * scale[sample.components]
    away = (sample.x[:, 0] - np.asarray(start))[:, sample.components].astype(np.float64)
    square = away[:, expected > 0] ** 2 / expected[expected > 0]
    if not square.size:
        return ""
    # noise of the readout is half of what is expected at most: one sample has it once
    chance = (
        scipy.special.chdtri(square.size, alternatives.CHANCE) / square.size / 2
        if readout.any()
        else 0.0
    )
    if not square.mean() > max(1.0, chance):
        return ""
    i = int(sample.components[expected > 0][np.argmax(square.mean(axis=0))])
    return (
        f"The trajectories do not begin where the process does: component {i} starts "
        f"{np.sqrt(square.mean(axis=0).max()):.3g} kicks of one step away. The record begins late "
        "or early (a shift of "
        "the time axis), or the start is another."
    )


def _examine_samples(
    process: Remembering, theta: Params, data: Trajectories, most: int
) -> Residuals:
    rows = choose_rows(data, most)
    samples = load_rows(data.x, rows)
    x = jnp.asarray(samples, working_dtype(theta, samples))
    context = jax.tree.map(lambda leaf: jnp.asarray(load_rows(leaf, rows)), data.context)
    checked: Any = process.check(
        theta, x[0, 0], jnp.asarray(data.t)[0], jax.tree.map(lambda leaf: leaf[0], context)
    )
    each = np.asarray(checked.residuals(theta, check.grid(data.t), x, context), float)
    v = each.mean(axis=(0, 1))
    count = each.shape[0] * each.shape[1]
    residuals = Residuals(v, each.std(axis=(0, 1)) / np.sqrt(count), count)
    if not residuals.wrong.size:
        return residuals
    return residuals._replace(
        cause=f"The innovations of channel{'s' * (len(residuals.wrong) > 1)} "
        f"{check.few(residuals.wrong)} have not the "
        "variance that the filter predicts: the process, its start, what is observed, the readout "
        "noise or a unit is "
        "another one, or the drift bends too much within the uncertainty of the hidden state for "
        "an extended filter."
    )


def _examine_counts(process: Counting, theta: Params, data: Trajectories, most: int) -> Residuals:
    """Events of each kind over what their rates expect, v = N/∫a dt, which is Poissonian: ±
    1/√∫a dt.
    """
    rows = choose_rows(data, most)
    x, context, events = (
        jax.tree.map(lambda leaf: jnp.asarray(load_rows(leaf, rows)), tree)
        for tree in (data.x, data.context, data.events)
    )
    times = check.grid(data.t)
    happened, expected = (
        np.asarray(part, float)
        for part in _counts(
            process,
            theta,
            x.astype(working_dtype(theta, x)),
            times.t[:-1],
            times.dt,
            context,
            events,
        )
    )
    there = expected > 0
    v = np.where(there, happened / np.where(there, expected, 1), np.where(happened > 0, np.inf, 1))
    stderr = np.where(
        there, np.sqrt(np.maximum(happened, expected)) / np.where(there, expected, 1), 1
    )
    residuals = Residuals(v, stderr, x.shape[0] * (x.shape[1] - 1), law="events / ∫ rate dt")
    if not residuals.wrong.size:
        return residuals
    fits = [
        factor
        for factor in (*UNITS, 60.0, 1 / 60)
        if not is_wrong(v / factor, stderr / factor).any()
    ]
    i = int(residuals.wrong[0])
    cause = (
        f"Event {i} happens {v[i]:.3g} times as often as its rate says: a rate, a parameter or a "
        "unit is another."
    )
    return residuals._replace(
        cause=f"They fit if the times are multiplied by {fits[0]:g} (another unit)."
        if fits
        else cause
    )


@partial(jit, static_argnums=0)
def _counts(
    process: Counting, theta: Params, x: Array, t: Array, dt: Array, context: PyTree, events: PyTree
) -> tuple[Array, Array]:
    """Sums over trajectories x (E, T+1, M) and steps. (R,) each"""

    def one(
        x: Array, x_next: Array, t: Array, dt: Array, context: PyTree, events: PyTree
    ) -> tuple[Array, Array]:
        return process.counts(theta, Step(x, x_next, t, dt, context, events))

    along = jax.vmap(jax.vmap(one, in_axes=(0, 0, 0, 0, None, 0)), in_axes=(0, 0, None, None, 0, 0))
    happened, expected = along(x[:, :-1], x[:, 1:], t, dt, context, events)
    return happened.sum(axis=(0, 1)), expected.sum(axis=(0, 1))


def warn_about_residuals(
    process: AnyProcess,
    theta: Params,
    trajectories: Trajectories | Iterable[Trajectories],
    *,
    transition: Transition = euler,
    readout: Any = None,
    stacklevel: int = 2,
) -> Residuals:
    """`examine`, and a `RuntimeWarning` with the likely cause where something is wrong.

    Its arguments.
    """
    residuals = examine(process, theta, trajectories, transition=transition, readout=readout)
    if residuals.cause:
        warnings.warn(
            f"the trajectories are not those of the process: {residuals!r}",
            RuntimeWarning,
            stacklevel + 1,
        )
    return residuals


def check_linearisation(
    process: Process, theta: Params, trajectories: Trajectories | Iterable[Trajectories]
) -> None:
    """Refuse `local_linear_score` for parameters of the noise where the drift bends within a kick.

    Its law is Gaussian. A drift that is not linear skews the law by about |J(x + k) − J(x)| Δ, with
    J = ∂μ/∂x and k a kick of one interval, which parameters of the drift bear and those of the
    noise do not: their gradient is wrong by a tenth at 0.04 in a double well, and has the wrong
    sign at 1.
    """
    data = trajectories if isinstance(trajectories, Trajectories) else next(iter(trajectories))
    one = jax.tree.map(lambda leaf: jnp.asarray(leaf)[0], data.context)
    x = jnp.asarray(np.asarray(data.x[0]), working_dtype(theta, data.x))
    leaves, tree = jax.tree.flatten_with_path(theta)
    in_noise = []
    for i, (path, leaf) in enumerate(leaves):

        def noise(v: Array, theta: Params, *state: Any, i: int = i) -> Array:
            others = jax.tree.leaves(theta)
            return diffusion_matrix(
                process, jax.tree.unflatten(tree, [*others[:i], v, *others[i + 1 :]]), *state
            )

        if depends(noise, leaf, theta, x[0], jnp.asarray(data.t)[0], one, on=0):
            in_noise.append("theta" + jax.tree_util.keystr(path))
    if not in_noise:
        return
    rows = choose_rows(data, FEWEST)[:FEWEST]
    some = jnp.asarray(load_rows(data.x, rows), x.dtype)
    steps = np.unique(np.linspace(0, len(data.t) - 2, 20).astype(int))
    context = jax.tree.map(lambda leaf: jnp.asarray(load_rows(leaf, rows)), data.context)
    times = check.grid(data.t)
    bend = float(_bend(process, theta, some[:, steps], times.t[steps], times.dt[steps], context))
    if bend > MOST_BEND:
        raise ValueError(
            f"local linearisation is not for {', '.join(in_noise)} here: the parameters enter the "
            "noise, and the drift "
            f"bends within a kick (|J(x + kick) − J(x)| Δ = {bend:.2g}, {MOST_BEND} at most). "
            "Sample faster, or keep "
            "them fixed: leave them out of theta."
        )


@partial(jit, static_argnums=0)
def _bend(process: Process, theta: Params, x: Array, t: Array, dt: Array, context: PyTree) -> Array:
    """Root mean square of |J(x + k) − J(x)| Δ over states x (E, n, M), k of one standard
    deviation along each axis.
    """

    def one(x: Array, t: Array, dt: Array, context: PyTree) -> Array:
        slope = jax.jacfwd(lambda x: process.drift(theta, x, t, context))
        kick = jnp.sqrt(2 * dt * jnp.diagonal(diffusion_matrix(process, theta, x, t, context)))
        return jnp.max(jnp.abs(slope(x + kick) - slope(x))) * dt

    each = jax.vmap(jax.vmap(one, in_axes=(0, 0, 0, None)), in_axes=(0, None, None, 0))(
        x, t, dt, context
    )
    return jnp.sqrt(jnp.mean(each**2))
