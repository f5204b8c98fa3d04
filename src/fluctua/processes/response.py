"""Response of a long-run average to a small step of a parameter, from an unperturbed record.

A parameter that moves by a small δ at time 0, in a steady state, moves the mean reward a time t
later by χ(t)δ. With the scores U of the transitions of the record, m steps after the change,

    χ(mΔt) = E[∂θ g] + Σ_{n=1}^{m} E[(g_{k+n} − J) U_k],        J = E[g],

since every one of the m transitions since the change has another law, and a score is what a change
of its law adds. The reward at a kick itself precedes it: n starts at 1. χ(0) is what g depends on θ
by itself, and χ(∞) the gradient of `fluctua.stationary`.

The mean reward ḡ of N samples responds to the kicks too, which lowers χ(m) by m[χ(w) − χ(0)]/N,
w being the last lag: it is added.

**Baseline.** In place of J any function of X_k may be subtracted from g_{k+n}. The best is
E[g_{k+n} | X_k]. Its regression on features φ(X_k), from other parts of the record, takes most of
the noise at short times. It also takes most of what an error of the drift does to χ: an error δμ
of the drift is an error δU of the score that depends on X_k alone, and a residual reward has no
mean given X_k.

**Errors** are the scatter of batches of kicks. Where parameters are fitted to the record, a batch
enters by its products and by what it does to the fits (`fluctua.processes.cross_fit`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core import check, scores
from fluctua.core import estimate as estimates
from fluctua.core import process as processes
from fluctua.core import text as texts
from fluctua.core.arrays import Array, Params
from fluctua.core.display.fields import show_fields
from fluctua.core.objective import Objective
from fluctua.core.trajectories import Trajectories
from fluctua.processes import cross_fit, response_record, stationary
from fluctua.processes import response_batches as batching
from fluctua.processes import response_report as report

__all__ = ["CrossFitted", "compare_strides", "fourier", "step_response"]

REGRESSION_FOLDS = 5
"""Parts of a record whose rewards are regressed on features of the others, without a fit."""


@show_fields
@dataclass(frozen=True)
class CrossFitted:
    """Parameters that are fitted to the record, so that score and fit never share data.

    parameters: names of entries of θ, such as "force" or "force[2]"; their values start the fit.
    folds: parts of the record; the score of one has the parameters of a fit to the others.

    >>> long = fl.simulator(process, jnp.zeros(1), t=jnp.arange(0.0, 200.0, 0.05))(key, theta, 4)
    >>> fit = fl.response.CrossFitted(("k", "s"), folds=3)
    >>> answer = fl.response.step_response(
    ...     process, objective, theta, long, window=5.0, calibration=fit
    ... )
    """

    parameters: Sequence[str]
    folds: int = 5

    def __post_init__(self) -> None:
        """Refuse parameters that are no names, and fewer than two folds."""
        if isinstance(self.parameters, str) or not self.parameters:
            raise ValueError(
                "`parameters` must be names of entries of θ, such as ('force', 'D'); got "
                f"{self.parameters!r}."
            )
        if self.folds < 2:
            raise ValueError(f"`folds` must be 2 or more; got {self.folds}.")


def fourier(harmonics: int, period: float = 2 * np.pi) -> Callable[[Array], Array]:
    """Basis functions of a periodic coordinate, for a drift or a baseline.

    φ(x) = (1, cos qx, sin qx, …, cos Hqx, sin Hqx), q = 2π/period, x the first component.

    Args:
        harmonics: H, their number.
        period: of the coordinate.

    Returns: a function x (M,) -> φ (1 + 2H,).

    >>> basis = fl.response.fourier(2)  # 1, cos x, sin x, cos 2x, sin 2x
    >>> basis(jnp.zeros(1))
    Array([1., 1., 0., 1., 0.], dtype=float32)
    """
    if harmonics < 1 or not 0 < period < np.inf:
        raise ValueError(
            f"a Fourier basis needs 1 harmonic or more and a positive period; got {harmonics} "
            f"and {period}."
        )
    return _FourierBasis(int(harmonics), float(period))


@dataclass(frozen=True)
class _FourierBasis:
    """Basis functions as a record: equal ones share a compilation."""

    harmonics: int
    period: float

    def __call__(self, x: Array) -> Array:
        order = jnp.arange(1, self.harmonics + 1)
        phase = 2 * jnp.pi / self.period * order * x[0]
        waves = jnp.stack([jnp.cos(phase), jnp.sin(phase)], axis=1).ravel()
        return jnp.concatenate([jnp.ones(1, waves.dtype), waves])


def step_response(
    process: processes.AnyProcess,
    reward: Callable[..., Array] | Objective,
    theta: Params,
    record: Trajectories | Sequence[Trajectories],
    *,
    window: float | str = "auto",
    stride: int = 1,
    score: processes.Score = scores.full_score,
    period: float | Sequence[float | None] | None = None,
    baseline: Callable[[Array], Array] | None = None,
    calibration: CrossFitted | np.ndarray | None = None,
) -> report.StepResponse:
    """Estimate the response χ(t) of a mean reward to a small step of each parameter at time 0.

    Use it on records of the steady state, in which nothing is changed.

    Args:
        process: drift and noise that the score uses, or another kind of process.
        reward: (theta, x, t, context) -> g, a number; or an `Objective` with `running`, `per_step`
            or both.
        theta: the parameters at which the record was taken, or where a fit of them starts.
        record: `Trajectories` in the steady state, x (E, T+1, M), on a uniform grid; or several,
            whose lengths may differ. They are held in memory.
        window: longest time of the response. "auto" takes several memory times of the slowest
            state, or what the record has room for.
        stride: samples per step of the score and of the fit. More than 1 skips noise between
            neighbouring samples that is not the process's own, such as that of a tracking filter.
        score: ∂θ ln p(x'|x) of one step.
        period: of a periodic component, such as 2π for an angle; one per component, None for those
            that are not. Increments are the shortest ones.
        baseline: None for the mean reward; or basis functions x (M,) -> φ (F,), on which rewards
            are regressed: smaller errors, those of the calibration included.
        calibration: None for known parameters; a `CrossFitted` fits them to the record; a
            covariance (P, P) of the flattened θ is that of parameters fitted to other data.

    Returns: a `StepResponse`.

    >>> long = fl.simulator(process, jnp.zeros(1), t=jnp.arange(0.0, 200.0, 0.05))(key, theta, 4)
    >>> answer = fl.response.step_response(process, objective, theta, long, window=5.0)
    >>> answer.t.shape, answer.response["k"].shape
    ((101,), (101,))
    """
    theta = check.parameters(theta)
    options = response_record.RecordOptions(stride, score, period, baseline)
    source = response_record.open_records(process, reward, theta, record, options)
    fitted = _find_unknowns(theta, calibration)
    rewards = batching.evaluate_traces(source, theta)
    memory = response_record.measure_memory(source, rewards)
    source = response_record.cut_batches(source, window, memory)
    fit = _fit(source, theta, fitted, calibration)
    residuals = response_record.warn_about_residuals(source, fit.theta)
    rewards = batching.evaluate_traces(source, fit.theta)
    mean = float(np.concatenate(rewards).mean())
    products = batching.compute_responses(source, fit.thetas, fit.folds, mean)
    response_record.require_finite(products, source, fit.theta)
    samples = products
    columns = np.zeros((0, *products.shape[1:]))
    if fitted.which.size:
        slope = batching.differentiate(source, fit.theta, fit.folds, mean, fitted.which)
        samples = products + np.einsum("mpk,bk->bmp", slope, fit.shifts)
        columns = batching.propagate(slope, fit.covariance)
    summary = report.summarise_batches(samples, columns)
    grid = source.grid

    def shape(rows: np.ndarray) -> Params:
        return report.shape_rows(theta, rows)

    levels = response_record.average_blocks(rewards, grid.length)
    return report.StepResponse(
        t=grid.dt * grid.stride * np.arange(grid.lags + 1),
        # the mean of the products: shifts have none, but for the rounding of the fits
        response=shape(products.mean(axis=0)),
        stderr=shape(summary.stderr),
        sampling_stderr=shape(stationary.compute_batch_error(products)),
        interval=(shape(summary.low), shape(summary.high)),
        band=(shape(summary.band_low), shape(summary.band_high)),
        value=mean,
        value_stderr=float(stationary.compute_batch_error(levels)),
        theta=fit.theta,
        theta_stderr=_collect_errors(theta, fitted, fit),
        fitted=fitted.names if len(fit.values) else (),
        fold_values=fit.values,
        stride=stride,
        batches=len(source.batches),
        used=len(source.batches) * grid.length / sum(len(trace.t) for trace in source.traces),
        memory=memory.slowest * grid.dt,
        residuals=residuals,
    )


def compare_strides(
    strides: Sequence[int], *arguments: Any, **options: Any
) -> report.StrideComparison:
    """Estimate responses with scores over several strides, to see what depends on the interval.

    Where neighbouring samples share noise that is not the process's own, fitted diffusion and
    response change with the stride until it exceeds the correlation of that noise; where the stride
    is too long for the score, they change again.

    Args:
        strides: samples per step of the score, such as (1, 2, 4).
        arguments: of `step_response`.
        options: of `step_response`, but for `stride`.

    Returns: a `StrideComparison`, with one `StepResponse` per stride; it prints as a table.

    >>> long = fl.simulator(process, jnp.zeros(1), t=jnp.arange(0.0, 200.0, 0.05))(key, theta, 4)
    >>> table = fl.response.compare_strides((1, 2), process, objective, theta, long, window=5.0)
    >>> len(table.responses)
    2
    """
    if not strides:
        raise ValueError("`strides` must have one stride or more, such as (1, 2, 4); got none.")
    return report.StrideComparison(
        tuple(step_response(*arguments, stride=stride, **options) for stride in strides)
    )


class _Fit(NamedTuple):
    """Parameters of the scores.

    theta: of the whole record. thetas: of each fold. folds: number of the fold of each batch (B,).
    values: of the unknowns per fold (folds, K). shifts: of the unknowns by each batch (B, K).
    covariance: of unknowns that were fitted to other data (K, K).
    """

    theta: Params
    thetas: Sequence[Params]
    folds: np.ndarray
    values: np.ndarray
    shifts: np.ndarray
    covariance: np.ndarray


def _fit(
    source: batching.BatchedRecord,
    theta: Params,
    fitted: batching.Unknowns,
    calibration: CrossFitted | np.ndarray | None,
) -> _Fit:
    """Parameters of each fold: fitted to the others, or those that were given."""
    size = len(source.batches)
    unknown = len(fitted.which)
    none = np.zeros((unknown, unknown))
    if isinstance(calibration, CrossFitted):
        response_record.require_fittable(source, theta, fitted)
        fits = batching.fit_folds(source, theta, fitted, calibration.folds)
        thetas = [batching.insert_values(theta, fitted.which, u) for u in fits.unknowns]
        pooled = batching.insert_values(theta, fitted.which, fits.pooled)
        return _Fit(pooled, thetas, fits.folds, fits.unknowns, fits.shifts, none)
    folds = np.zeros(size, int)
    if source.law.basis is not None:
        folds = cross_fit.assign_folds(source.batches, REGRESSION_FOLDS)
    thetas = [theta] * (int(folds.max()) + 1)
    covariance = none if calibration is None else np.asarray(calibration, np.float64)
    return _Fit(theta, thetas, folds, np.zeros((0, unknown)), np.zeros((size, unknown)), covariance)


def _find_unknowns(
    theta: Params, calibration: CrossFitted | np.ndarray | None
) -> batching.Unknowns:
    """Parameters whose error counts: those that are fitted, or all that have a covariance."""
    every = texts.names(theta)
    if calibration is None:
        return batching.Unknowns(np.zeros(0, int), ())
    if not isinstance(calibration, CrossFitted):
        shape = np.shape(calibration)
        if shape != (len(every), len(every)):
            raise ValueError(
                "`calibration` must be a CrossFitted or a covariance of all parameters, "
                f"({len(every)}, {len(every)}); got {shape}."
            )
        return batching.Unknowns(np.arange(len(every)), tuple(every))
    which: list[int] = []
    for name in calibration.parameters:
        match = [i for i, n in enumerate(every) if name in (n, n.split("[")[0])]
        if not match:
            raise ValueError(
                f"`calibration` names {name!r}; parameters are {', '.join(every)}. Name an entry "
                "of θ or one of its components."
            )
        which += match
    chosen = np.unique(which)
    return batching.Unknowns(chosen, tuple(every[i] for i in chosen))


def _collect_errors(theta: Params, fitted: batching.Unknowns, fit: _Fit) -> Params:
    """Standard errors of the parameters, 0 of those that are known; like θ."""
    flat, unravel = ravel_pytree(theta)
    errors = np.zeros(flat.size)
    errors[fitted.which] = np.hypot(
        estimates.sample_error(fit.shifts), np.sqrt(np.diag(fit.covariance))
    )
    return unravel(jnp.asarray(errors, flat.dtype))
