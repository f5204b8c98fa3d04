"""Response of each batch of kicks of a record, and the derivatives that errors of fits need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core.arrays import Array, Params
from fluctua.processes import cross_fit
from fluctua.processes import response_sums as sums

KICKS = 2**15
"""Maximum number of kicks whose scores are computed together."""


class BatchedRecord(NamedTuple):
    """Traces cut into batches of kicks, with the functions that are evaluated along them.

    periods: (M,), infinite for components that are not periodic.
    dtype: working precision.
    batches: all batches, trace by trace.
    """

    law: sums.ResponseLaw
    grid: sums.LagGrid
    traces: Sequence[sums.Trace]
    periods: np.ndarray
    dtype: np.dtype
    batches: Sequence[sums.KickBatch]

    def cut(self, j: int) -> sums.KickStretch:
        """Arrays of batch j."""
        batch = self.batches[j]
        trace = self.traces[batch.trace]
        return sums.cut_stretch(trace, batch.number, self.grid, self.periods, self.dtype)

    def map_batches(
        self, evaluate: Callable[[sums.KickStretch], Any], batches: Sequence[int]
    ) -> Iterator[Any]:
        """Apply `evaluate` to batches, a few at a time; one result per batch, in float64."""
        few = max(1, min(len(batches), KICKS // self.grid.length))
        for begin in range(0, len(batches), few):
            some = list(batches[begin : begin + few])
            # always as many, so that nothing is compiled for the last ones
            cuts = [self.cut(j) for j in some + some[-1:] * (few - len(some))]
            together = jax.tree.map(lambda *leaves: np.stack(leaves), *cuts)
            result = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), evaluate(together))
            for i in range(len(some)):
                yield jax.tree.map(lambda leaf, i=i: leaf[i], result)


class Unknowns(NamedTuple):
    """Parameters that are fitted.

    which: their indices (K,) in the flattened θ.
    names: their names.
    """

    which: np.ndarray
    names: tuple[str, ...]


def list_batches(traces: Sequence[sums.Trace], grid: sums.LagGrid) -> list[sums.KickBatch]:
    """All batches, trace by trace."""
    counts = [grid.count_batches(len(trace.t) - 1) for trace in traces]
    return [sums.KickBatch(j, n) for j, count in enumerate(counts) for n in range(count)]


def fit_folds(
    record: BatchedRecord, theta: Params, fitted: Unknowns, folds: int
) -> cross_fit.FoldFits:
    """Fit parameters for each fold of the record to the others."""
    which = jnp.asarray(fitted.which)

    def evaluate(u: np.ndarray, batches: Sequence[int]) -> sums.ScoreSum:
        here = insert_values(theta, fitted.which, u)

        def evaluate_some(stretches: sums.KickStretch) -> sums.ScoreSum:
            return sums.form_score(record.law, record.grid, here, stretches, which)

        each = list(record.map_batches(evaluate_some, batches))
        return sums.ScoreSum(
            np.array([one.score for one in each]), np.array([one.information for one in each])
        )

    start = np.asarray(ravel_pytree(theta)[0], np.float64)[fitted.which]
    return cross_fit.cross_fit(evaluate, start, record.batches, folds, fitted.names)


def insert_values(theta: Params, which: np.ndarray, u: np.ndarray) -> Params:
    """Replace some components of θ."""
    flat, unravel = ravel_pytree(theta)
    return unravel(flat.at[which].set(jnp.asarray(u, flat.dtype)))


def compute_responses(
    record: BatchedRecord, thetas: Sequence[Params], folds: np.ndarray, mean: float
) -> np.ndarray:
    """χ of each batch, with the parameters of its fold. Shape (B, L+1, P).

    thetas: of each fold. folds: number of the fold of each batch (B,).
    """
    weights = _regress(record, thetas, folds, mean)
    level = jnp.asarray(mean, record.dtype)
    rows = []
    for fold, theta in enumerate(thetas):

        def evaluate(stretches: sums.KickStretch, theta: Params = theta) -> sums.Products:
            return sums.form_products(record.law, record.grid, theta, stretches, level)

        own = np.flatnonzero(folds == fold).tolist()
        rows += [_sum_products(made, weights[fold]) for made in record.map_batches(evaluate, own)]
    products = np.array(rows)
    return products if record.law.basis is not None else _restore_mean(products, record)


def differentiate(
    record: BatchedRecord, theta: Params, folds: np.ndarray, mean: float, which: np.ndarray
) -> np.ndarray:
    """Derivative of χ in some components of θ, at one θ for all batches. Shape (L+1, P, K)."""
    count = int(folds.max()) + 1
    weights = _regress(record, [theta] * count, folds, mean)
    level = jnp.asarray(mean, record.dtype)
    chosen = jnp.asarray(which)

    def evaluate(stretches: sums.KickStretch) -> sums.Products:
        return sums.differentiate_products(record.law, record.grid, theta, stretches, level, chosen)

    every = record.map_batches(evaluate, range(len(folds)))
    total = sum(_sum_products(made, weights[fold]) for made, fold in zip(every, folds, strict=True))
    slope = np.asarray(total) / len(folds)
    return slope if record.law.basis is not None else _restore_mean(slope[None], record)[0]


def _sum_products(made: sums.Products, weights: np.ndarray) -> np.ndarray:
    """χ(mΔt) of a batch, m = 0 … L, from its products. Shape (L+1, P, …).

    weights: β (L, F) of the regression of rewards on features.
    """
    lagged, explicit, explicit_step, features = made
    lagged = lagged - np.tensordot(weights, features, axes=1)
    grown = explicit + explicit_step + np.cumsum(lagged, axis=0)
    return np.concatenate([explicit[None], grown])


def _restore_mean(products: np.ndarray, record: BatchedRecord) -> np.ndarray:
    """Add m[χ(w) − χ(0)]/N to χ(m): the response of the mean reward. products: (B, L+1, P, …)."""
    samples = sum(len(trace.t) for trace in record.traces)
    share = np.arange(products.shape[1]) * record.grid.stride / samples
    part = (products[:, -1:] - products[:, :1]) / (1 - share[-1])
    return products + share.reshape(1, -1, *(1,) * (products.ndim - 2)) * part


def _regress(
    record: BatchedRecord, thetas: Sequence[Params], folds: np.ndarray, mean: float
) -> list[np.ndarray]:
    """β (L, F) of the regression of rewards on features, for each fold from the others."""
    count = len(thetas)
    if record.law.basis is None:
        return [np.zeros((record.grid.lags, 0))] * count
    level = jnp.asarray(mean, record.dtype)
    each: list[sums.Regression] = []
    for fold, theta in enumerate(thetas):

        def evaluate(stretches: sums.KickStretch, theta: Params = theta) -> sums.Regression:
            return sums.form_regression(record.law, record.grid, theta, stretches, level)

        each += record.map_batches(evaluate, np.flatnonzero(folds == fold).tolist())
    weights = []
    for fold in range(count):
        others = cross_fit.select_others(record.batches, folds, fold)
        gram = sum(each[j].gram for j in others)
        targets = sum(each[j].targets for j in others)
        weights.append(np.linalg.lstsq(np.asarray(gram), np.asarray(targets).T, rcond=None)[0].T)
    return weights


def evaluate_traces(record: BatchedRecord, theta: Params) -> list[np.ndarray]:
    """Evaluate the rewards of all samples of each trace; not of the first if steps have rewards."""
    rewards = []
    begin = int(record.law.rewards.per_step is not None)
    for trace in record.traces:
        whole = record.grid._replace(lags=0, length=len(trace.t), stride=0)
        stretch = sums.cut_stretch(trace, 0, whole, record.periods, record.dtype)
        # events belong to kicks, which are not evaluated here
        g = sums.compute_rewards(record.law, theta, stretch._replace(events=None))
        rewards.append(np.asarray(g, np.float64)[begin:])
    return rewards


def propagate(slope: np.ndarray, covariance: Array) -> np.ndarray:
    """Columns whose squares add up to the variance from the covariance of unknowns.

    slope (L+1, P, K) and (K, K) -> (K, L+1, P).
    """
    values, vectors = np.linalg.eigh(np.asarray(covariance, np.float64))
    root = vectors * np.sqrt(np.maximum(values, 0))
    return np.moveaxis(slope @ root, -1, 0)
