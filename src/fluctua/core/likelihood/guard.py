"""The residual guard: whether trajectories are those of the process, before a gradient is used.

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
from typing import Any, NamedTuple

import jax
import numpy as np

from fluctua.core import check, text
from fluctua.core import scores as transitions
from fluctua.core.arrays import Array, Params
from fluctua.core.likelihood import alternatives, other_laws
from fluctua.core.likelihood import sample as sampling
from fluctua.core.likelihood.causes import describe_finding
from fluctua.core.likelihood.kicks import Standardised, Transition
from fluctua.core.likelihood.mistakes import explain_residuals
from fluctua.core.likelihood.report import Residuals
from fluctua.core.likelihood.start import compare_start
from fluctua.core.process import AnyProcess, Process, Score
from fluctua.core.trajectories import Trajectories

TRANSITIONS = 20_000
"""Looked at: they know v to one per cent."""

UNKNOWN = 10.0
"""Factor in v that passes where the noise is not known."""

MAX_FINDINGS = 5

MIN_SCORED = 30
"""Trajectories that make up Σs² of their scores, from which the mean of s is tested.

Counted as (Σs²)²/Σs⁴, a third of all if s is normal, or the number of rare events.
"""

LAWS: dict[Score, Transition] = {
    transitions.full_score: transitions.euler,
    transitions.drift_score: transitions.euler,
    transitions.local_linear_score: transitions.local_linear,
}
"""The law of a step that goes with a score.

A score of one's own may know another one: it is not examined.
"""


def examine(
    process: AnyProcess,
    theta: Params,
    trajectories: Trajectories | Iterable[Trajectories],
    *,
    transition: Transition = transitions.euler,
    readout: Any = None,
    max_transitions: int = TRANSITIONS,
    every: Trajectories | Iterable[Trajectories] | None = None,
) -> Residuals:
    """Compare residuals with the noise of the process, component by component.

    Args:
        process: drift and noise.
        theta: the parameters at which the trajectories were taken.
        trajectories: one record or chunks, of which the first is looked at; arrays may load when
            sliced.
        transition: the law of one step, `euler` or `local_linear`.
        readout: variance of the measurement, a number or (M,), which a residual has twice.
        max_transitions: transitions to look at, spread over the trajectories.
        every: the trajectories of which every step enters the sums of the drift; those that are
            looked at if not given.

    Returns: a `Residuals`, whose `cause` is empty if nothing is wrong.

    """
    process = check.process(process)
    theta = check.parameters(theta)
    data = trajectories if isinstance(trajectories, Trajectories) else next(iter(trajectories))
    if not isinstance(process, Process):
        return other_laws.examine_other(process, theta, data, max_transitions)
    sample = sampling.take_sample(process, theta, data, transition, readout, max_transitions)
    examined = _examine_sample(sample, data, _Expected())
    residuals = examined.examination.residuals
    if residuals.cause:
        return residuals
    every = trajectories if every is None else every
    chunks = [every] if isinstance(every, Trajectories) else every
    is_whole = every is data and len(data.x) * (len(data.t) - 1) == residuals.steps
    return _examine_every_step(sample, examined.made, None if is_whole else chunks, residuals)


class DoubtError(RuntimeError):
    """Raised where the trajectories of a run contradict its model.

    Raised by `SelfCalibrating` and by substrates of instruments with on_doubt="stop", their
    default. Mend the model or the instrument; what was measured is kept.

    >>> shaken = lambda key, theta, count: simulator(key, {**theta, "s": 0.8}, count)
    >>> offset = lambda theta, phi: {**theta, "k": theta["k"] + phi}
    >>> twin = fl.ppgt(simulator, objective, baseline="twin")
    >>> learning = fl.SelfCalibrating(twin, shaken, offset, jnp.zeros(()), spread=0.2)
    >>> estimate = learning(key, theta, 4)  # warns: twice the noise of the model
    >>> learning(key, theta, 4)
    Traceback (most recent call last):
    fluctua.core.likelihood.guard.DoubtError: the model is in doubt: ...
    """


class Examination(NamedTuple):
    """The result of one batch.

    residuals: v, and what is wrong.
    sums: of its tests with those of the batches before, for the next; None where there are none.
    findings: deviations of the residuals that neither chance nor the interval explains, the most
        likely first.
    """

    residuals: Residuals
    sums: alternatives.Table | None = None
    findings: tuple[alternatives.Finding, ...] = ()


def examine_batch(
    process: AnyProcess,
    theta: Params,
    trajectories: Trajectories | Iterable[Trajectories],
    *,
    transition: Transition = transitions.euler,
    readout: Any = None,
    max_transitions: int = TRANSITIONS,
    limits: alternatives.Limits = alternatives.KNOWN,
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
        max_transitions: transitions to look at.
        limits: deviations that pass however certain they are.
        earlier: `Examination.sums` of the batches before.
        start: the state (M,) from which every trajectory begins, where there is one.
        known_noise: whether the amplitude of the noise is that of `process`; else it is that of
            the trajectories, up to a factor of ten in v.

    Returns: an `Examination`.

    """
    process = check.process(process)
    theta = check.parameters(theta)
    data = trajectories if isinstance(trajectories, Trajectories) else next(iter(trajectories))
    if not isinstance(process, Process):
        other = other_laws.examine_other(process, theta, data, max_transitions)
        return Examination(other, earlier)
    sample = sampling.take_sample(process, theta, data, transition, readout, max_transitions)
    expected = _Expected(limits, earlier, start, known_noise)
    return _examine_sample(sample, data, expected).examination


class _Expected(NamedTuple):
    """What is known beside the law of a step; the fields are arguments of `examine_batch`."""

    limits: alternatives.Limits = alternatives.KNOWN
    earlier: alternatives.Table | None = None
    start: Array | None = None
    known_noise: bool = True


class _Examined(NamedTuple):
    """The result of a sample, and its residuals in units of their noise."""

    examination: Examination
    made: Standardised


def _examine_sample(sample: sampling.Sample, data: Trajectories, expected: _Expected) -> _Examined:
    """Compare the residuals of a sample with what is expected. data: where it was taken from."""
    limits, earlier, start, known_noise = expected
    # numbers beyond the precision are wrong, and named
    with np.errstate(over="ignore", invalid="ignore"):
        made = sampling.standardise_states(sample, sample.law, sample.x, sample.t)
        scale = (
            np.ones(sample.x.shape[2])
            if known_noise
            else np.clip(made.v.mean(axis=0), 1 / UNKNOWN, UNKNOWN)
        )
        made = sampling.divide_noise(made, scale)
        v, stderr = sampling.reduce_squares(sample, made, sample.x, sample.t)
        residuals = Residuals(v, stderr, len(made.v), noiseless=sample.noiseless)
        table = sampling.collect_sums(sample, made, mean=bool(np.isfinite(limits.mean)))
        sums = alternatives.add_tables(earlier, table) if earlier else table
        findings = _find_deviations(sample, made, table, sums, limits, scale)
        if residuals.wrong.size:
            residuals = explain_residuals(residuals, sample, data, findings)
        elif findings:
            residuals = residuals._replace(cause=describe_finding(findings[0], sample.components))
        elif start is not None:
            residuals = residuals._replace(cause=compare_start(sample, start, scale))
    return _Examined(Examination(residuals, sums, tuple(findings[:MAX_FINDINGS])), made)


def _examine_every_step(
    sample: sampling.Sample,
    made: Standardised,
    source: Iterable[Trajectories] | None,
    residuals: Residuals,
) -> Residuals:
    """The residuals with what is wrong with the drift, by sums over every step of a source.

    source: None for the steps of the sample.

    A sample has the power of a sample. A drift that is wrong by b biases the gradient by at most
    √Λ of its standard errors, where Λ = Σ bᵀQ⁻¹b Δt/2 over the steps of the estimate is the square
    of what a test along b shows (Cauchy and Schwarz): what matters to an estimate is seen in as
    many steps as it has.
    """
    is_served = len(made.z) >= alternatives.MIN_STEPS and bool(made.z.any())
    if sample.blurred or sample.law.mixed or not is_served:
        return residuals
    drift = np.sqrt(np.mean(made.drift[:, sample.components] ** 2, axis=0))

    def find(table: alternatives.Table) -> list[alternatives.Finding]:
        return alternatives.judge(table, drift, alternatives.EVERY_STEP)

    table = sampling.sum_every_step(sample, sample.law, source)
    findings = find(table)
    if not findings:
        return residuals
    crossed = findings[0].family == "linear" and table["linear"].total.shape[1] > 1
    columns = np.arange(len(residuals.v)) if crossed else None
    cause = describe_finding(findings[0], sample.components, columns)
    law = sampling.choose_finer_law(sample)
    if law is not None:
        finer = sampling.sum_every_step(sample, law, source)
        if not find(alternatives.leave_unexplained(table, table, finer)):
            of_drift = [one for one in findings if not one.family.startswith("v")]
            if not of_drift:  # a variance says nothing of the error bar, and a tenth passes
                return residuals
            cause = (
                "The samples are too far apart for Euler's step at the precision of so many: "
                f"{abs(of_drift[0].statistic):.1f} standard errors that the interval explains. Use "
                "score=fl.scores.local_linear_score."
            )
    v = residuals.v.copy()
    v[sample.components] = 1 + np.sqrt(2) * (table["v"].total / table["v"].terms)[:, 0]
    steps = int(table["v"].terms)
    return residuals._replace(v=v, stderr=np.sqrt(2 / steps) * v, steps=steps, cause=cause)


def _find_deviations(
    sample: sampling.Sample,
    made: Standardised,
    table: alternatives.Table,
    sums: alternatives.Table,
    limits: alternatives.Limits,
    scale: np.ndarray,
) -> list[alternatives.Finding]:
    """Deviations that the interval does not explain, of a batch and of all batches so far.

    table: sums of the batch. sums: with those of the batches before.
    """
    drift = np.sqrt(np.mean(made.drift[:, sample.components] ** 2, axis=0))

    def find(tables):
        return [one for each in tables for one in alternatives.judge(each, drift, limits)]

    tables = (table,) if sums is table else (table, sums)
    deviations = find(tables)
    law = sampling.choose_finer_law(sample)
    if deviations and law is not None:
        other = sampling.collect_sums(
            sample,
            sampling.divide_noise(
                sampling.standardise_states(sample, law, sample.x, sample.t), scale
            ),
        )
        deviations = find([alternatives.leave_unexplained(each, table, other) for each in tables])
    return sorted(deviations, key=lambda one: -abs(one.statistic))


def warn_about_residuals(
    process: AnyProcess,
    theta: Params,
    trajectories: Trajectories | Iterable[Trajectories],
    *,
    transition: Transition = transitions.euler,
    every: Trajectories | Iterable[Trajectories] | None = None,
    stacklevel: int = 2,
) -> Residuals:
    """`examine`, and a `RuntimeWarning` with the likely cause where something is wrong.

    The arguments are those of `examine`.
    """
    residuals = examine(process, theta, trajectories, transition=transition, every=every)
    if residuals.cause:
        warnings.warn(
            f"the trajectories are not those of the process: {residuals!r}",
            RuntimeWarning,
            stacklevel + 1,
        )
    return residuals


def find_wrong_score(scores: np.ndarray) -> alternatives.Finding | None:
    """The parameter whose scores (E, P), ΣU of each trajectory, do not average to zero, if any.

    T = Σs/√Σs² is nearly normal where the law of a step is right, whatever the process. With s of
    skewness γ it has −2γ/√E. A step δ of the parameter adds δ Σs² to Σs: `effect` is δ.
    """
    s = np.asarray(scores, np.float64)
    squares = s * s
    square, third, fourth = (
        np.einsum("ep,ep->p", squares, factor)[None] for factor in (np.ones_like(s), s, squares)
    )
    known = np.where(square**2 >= MIN_SCORED * fourth, square, 0)
    sums = alternatives.FamilySums(s.sum(axis=0)[None], known, 2 * np.abs(third), len(s))
    findings = alternatives.judge({"drift": sums}, np.ones(1), alternatives.EVERY_STEP)
    return findings[0] if findings else None


def warn_about_scores(theta: Params, scores: np.ndarray, *, stacklevel: int = 2) -> None:
    """Warn if the scores of trajectories do not average to zero, as those of the process do.

    The estimate adds them up anyway, over every step, in the directions of its parameters, for any
    process: nothing is computed again.

    Args:
        theta: the parameters.
        scores: ΣU of each trajectory, (E, P).
        stacklevel: of the warning.
    """
    finding = find_wrong_score(scores)
    if finding is None:
        return
    name = text.names(theta)[finding.column]
    value = float(np.concatenate([np.ravel(v) for v in jax.tree.leaves(theta)])[finding.column])
    better = value + np.sign(finding.statistic) * finding.effect
    warnings.warn(
        "the trajectories are not those of the process: their scores of parameter "
        f"{name} average to {abs(finding.statistic):.1f} standard errors from zero, and the "
        f"gradient may be off by as many of its own. {better:.4g} in place of {value:.4g} would "
        "fit them better, if all else is right. Calibrate first; or the samples are too far apart "
        "for Euler's step (score=fl.scores.local_linear_score).",
        RuntimeWarning,
        stacklevel + 1,
    )
