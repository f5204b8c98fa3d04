"""Responses in time as they are returned: means and errors from batches, bands, printing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from fluctua.core import estimate as estimates
from fluctua.core import text as texts
from fluctua.core.arrays import Params
from fluctua.core.likelihood.report import Residuals
from fluctua.processes import stationary

LEVEL = 0.95
"""Probability of intervals and bands."""
WELL_USED = 0.8
"""Share of a record in batches below which that share is printed."""
SHOWN_TIMES = 8
SHOWN_COMPONENTS = 6


class StepResponse(NamedTuple):
    """χ(t) of a long-run average to a small step of each parameter at time 0.

    Trees are like θ, with an axis of times in front.

    t: times since the step (L+1,), from 0.
    response: χ(t).
    stderr: its standard error, with that of the calibration.
    sampling_stderr: the error if the parameters were known.
    interval: (low, high), which contains χ at one time with a probability of 95 %.
    band: (low, high), which contains χ at all times together with 95 %, for each component.
    value: mean reward.
    value_stderr: its error.
    theta: the parameters of the score: as they were given, or fitted to the whole record.
    theta_stderr: errors of those that were fitted or have a covariance; 0 for the others.
    fitted: names of fitted parameters.
    fold_values: their values (folds, K).
    stride: samples per step of the score.
    batches: number of batches.
    used: share of the record that is in batches; pieces shorter than one are left out.
    memory: of the slowest state or of the reward, 1 + 2Σ|ρ| in units of time.
    residuals: test of the residuals against the noise of the process; None where there is none.
    """

    t: np.ndarray
    response: Params
    stderr: Params
    sampling_stderr: Params
    interval: tuple[Params, Params]
    band: tuple[Params, Params]
    value: float
    value_stderr: float
    theta: Params
    theta_stderr: Params
    fitted: tuple[str, ...]
    fold_values: np.ndarray
    stride: int
    batches: int
    used: float
    memory: float
    residuals: Residuals | None

    def tabulate(self) -> dict[str, np.ndarray]:
        """Columns by name: t, then χ, its errors, interval and band of every component."""
        trees = {
            "": self.response,
            " stderr": self.stderr,
            " sampling stderr": self.sampling_stderr,
            " low": self.interval[0],
            " high": self.interval[1],
            " band low": self.band[0],
            " band high": self.band[1],
        }
        rows = {ending: flatten_rows(tree) for ending, tree in trees.items()}
        columns = {"t": self.t}
        for i, name in enumerate(texts.names(self.theta)):
            columns |= {f"{name}{ending}": values[:, i] for ending, values in rows.items()}
        return columns

    def __repr__(self) -> str:
        return _describe_response(self)


class StrideComparison(NamedTuple):
    """Responses with scores over several strides: one per stride, in order.

    A response that depends on the stride by more than its errors has a model that does not hold
    from one sample to the next.
    """

    responses: tuple[StepResponse, ...]

    def __repr__(self) -> str:
        return _describe_strides(self.responses)


class BatchSummary(NamedTuple):
    """Mean of batches with errors, (L+1, P) each; see `StepResponse`."""

    mean: np.ndarray
    stderr: np.ndarray
    low: np.ndarray
    high: np.ndarray
    band_low: np.ndarray
    band_high: np.ndarray


def summarise_batches(samples: np.ndarray, columns: np.ndarray) -> BatchSummary:
    """Compute mean, errors, intervals and bands of the response from batches.

    samples: of batches (B, L+1, P), independent of each other.
    columns: (K, L+1, P), whose squares are added to the variance of the mean; K may be 0.
    """
    mean = samples.mean(axis=0)
    freedom = len(samples) - 1
    extra = np.sqrt((columns**2).sum(axis=0))
    stderr = np.hypot(stationary.compute_batch_error(samples), extra)
    leaf = jnp.asarray(samples)
    reduced = estimates.reduce_samples(estimates.Samples(leaf, leaf[:, 0, 0]))
    assert reduced.interval is not None
    reach = scipy.stats.norm.ppf((1 + LEVEL) / 2) * extra
    below, above = (
        np.hypot(np.where(np.isfinite(end), np.abs(mean - end), 0.0), reach)
        for end in (np.asarray(side, np.float64) for side in reduced.interval)
    )
    rows = np.concatenate([(samples - mean) / np.sqrt((freedom + 1) * freedom), columns])
    wider = [_find_joint_factor(rows[..., i], freedom) for i in range(rows.shape[-1])]
    return BatchSummary(
        mean, stderr, mean - below, mean + above, mean - wider * below, mean + wider * above
    )


def _find_joint_factor(rows: np.ndarray, freedom: int) -> float:
    """Width of a band over all times, in units of an interval at one time.

    The tube formula of Sun and Loader (1994): the largest |deviation|/error over a path of length κ
    on the sphere of standardised contributions exceeds c with a probability of

        κ/π (1 + c²/ν)^{−ν/2} + P(|t_ν| > c).

    rows: contributions (R, L+1) to the error, whose squares add up to the variance.
    """
    size = np.sqrt((rows**2).sum(axis=0))
    known = size > 0
    single = scipy.stats.t.ppf((1 + LEVEL) / 2, freedom)
    if known.sum() < 2:
        return 1.0
    unit = rows[:, known] / size[known]
    steps = np.clip((unit[:, 1:] * unit[:, :-1]).sum(axis=0), -1, 1)
    length = float(np.arccos(steps).sum())

    def exceed(c: float) -> float:
        tube = length / np.pi * (1 + c**2 / freedom) ** (-freedom / 2)
        return float(tube + 2 * scipy.stats.t.sf(c, freedom) - (1 - LEVEL))

    return float(scipy.optimize.brentq(exceed, single, 1e3 * single) / single)


def shape_rows(theta: Params, rows: np.ndarray) -> Params:
    """Arrange rows (N, P) as leaves (N, …) with the structure of θ, in float64."""
    leaves, tree = jax.tree.flatten(theta)
    edges = np.cumsum([np.size(leaf) for leaf in leaves])[:-1]
    parts = zip(np.split(rows, edges, axis=1), leaves, strict=True)
    return jax.tree.unflatten(tree, [v.reshape(len(rows), *np.shape(leaf)) for v, leaf in parts])


def flatten_rows(tree: Params) -> np.ndarray:
    """Arrange leaves (N, …) as rows (N, P)."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


def _flatten(tree: Params) -> np.ndarray:
    return np.concatenate([np.ravel(np.asarray(leaf)) for leaf in jax.tree.leaves(tree)])


def _describe_response(answer: StepResponse) -> str:
    """The response at a few times, of the components that stand out most from their errors."""
    chi = flatten_rows(answer.response)
    error = flatten_rows(answer.stderr)
    labels = texts.names(answer.theta)
    shown = choose_components(answer)
    value = texts.with_error(answer.value, answer.value_stderr)
    lines = [f"J = {value}   ({answer.batches} batches, memory {answer.memory:.3g})"]
    times = np.unique(np.linspace(0, len(answer.t) - 1, SHOWN_TIMES).round().astype(int))
    cells = [["t", *(f"∂J/∂{labels[i]}" for i in shown)]]
    for m in times:
        pairs = [texts.with_error(float(chi[m, i]), float(error[m, i])) for i in shown]
        cells.append([f"{answer.t[m]:.4g}", *pairs])
    lines += _align(cells)
    if len(labels) > len(shown):
        lines.append(f"  … {len(labels)} components in all")
    lines += _describe_fit(answer)
    if answer.used < WELL_USED:
        lines.append(
            f"  {answer.used:.0%} of the record is in batches; shorter pieces are left out"
        )
    if answer.t[-1] < answer.memory:
        lines.append("  → the window is shorter than the memory: χ has not settled at its end")
    if answer.residuals is not None and answer.residuals.cause:
        lines.append(f"  → {answer.residuals!r}")
    return "\n".join(lines)


def choose_components(answer: StepResponse) -> list[int]:
    """Choose components to print: those that were not fitted, then the furthest from zero."""
    labels = texts.names(answer.theta)
    chi = flatten_rows(answer.response)
    error = flatten_rows(answer.stderr)
    z = np.max(np.abs(chi) / np.where(error > 0, error, np.inf), axis=0)
    order = sorted(range(len(labels)), key=lambda i: (labels[i] in answer.fitted, -z[i]))
    return sorted(order[:SHOWN_COMPONENTS])


def _describe_fit(answer: StepResponse) -> list[str]:
    """One line with the fitted parameters and their errors."""
    if not answer.fitted:
        return []
    values = dict(zip(texts.names(answer.theta), _flatten(answer.theta), strict=True))
    errors = dict(zip(texts.names(answer.theta), _flatten(answer.theta_stderr), strict=True))
    several = [
        f"{name} = {texts.with_error(float(values[name]), float(errors[name]))}"
        for name in answer.fitted[: 2 * SHOWN_COMPONENTS]
    ]
    folds = len(answer.fold_values)
    return [f"  fitted in {folds} folds, stride {answer.stride}: " + ", ".join(several)]


def _describe_strides(responses: Sequence[StepResponse]) -> str:
    """The response at the last common time and the fitted parameters, per stride."""
    end = min(answer.t[-1] for answer in responses)
    first = responses[0]
    labels = texts.names(first.theta)
    shown = [i for i in choose_components(first) if labels[i] not in first.fitted]
    shown = shown or choose_components(first)
    titles = [f"∂J/∂{labels[i]}" for i in shown]
    cells = [["stride", "interval", "t", *titles, *first.fitted]]
    for answer in responses:
        m = int(np.argmin(np.abs(answer.t - end)))
        values = dict(zip(labels, _flatten(answer.theta), strict=True))
        errors = dict(zip(labels, _flatten(answer.theta_stderr), strict=True))
        fits = [texts.with_error(float(values[n]), float(errors[n])) for n in answer.fitted]
        chi = flatten_rows(answer.response)[m]
        error = flatten_rows(answer.stderr)[m]
        pairs = [texts.with_error(float(chi[i]), float(error[i])) for i in shown]
        interval = float(answer.t[1] - answer.t[0])
        row = [str(answer.stride), f"{interval:.4g}", f"{answer.t[m]:.4g}", *pairs, *fits]
        cells.append(row)
    return "\n".join(_align(cells))


def _align(cells: list[list[str]]) -> list[str]:
    """Lines of a table with columns of equal width."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return [
        "  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
