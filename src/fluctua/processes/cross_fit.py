"""Cross-fitting: unknown parameters for one part of a record, fitted to the others.

Batches of kicks are divided into K folds of consecutive ones. For the scores of a fold the unknowns
u solve Σ U(u) = 0 over the batches of the other folds, without the two that are next to the fold:
a guard that is longer than a correlation time and the lags of the response. Score and fit then
share no data, so that a product of rewards and scores has no bias from a fit to its own noise.

What a fit adds to the error is linear in the scores S_j of its batches,

    û_k − u = F_k⁻¹ Σ_{j fitted for k} S_j,      F_k = Σ_{j fitted for k} F_j,

so that batch j moves a mean over all batches with slope ∂/∂u by that slope times

    a_j = Σ_{k that j is fitted for} n_k F_k⁻¹ S_j,

with n_k batches in fold k. The a_j are added to the products of the same batch before the scatter
is computed, so that the error includes both and their correlation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fluctua.processes.response_sums import KickBatch, ScoreSum

MAX_STEPS = 30
"""Maximum number of Fisher-scoring steps per fit; a drift linear in the unknowns takes 2."""
SETTLED = 1e-2
"""Step below which a fit has converged, in standard errors of each unknown."""
SINGULAR = 1e-10
"""Eigenvalue of F, scaled to a unit diagonal, below which unknowns are not determined."""

Evaluate = Callable[[np.ndarray, Sequence[int]], ScoreSum]
"""(u (K,), batches) -> scores (n, K) and information (n, K, K) of these batches."""


class FoldFits(NamedTuple):
    """Unknowns per fold, and the shift of them by each batch.

    folds: number of the fold of each batch (B,).
    unknowns: of each fold (folds, K).
    pooled: fitted to all batches (K,).
    shifts: a_j of the text above (B, K), so that their mean over batches is the shift of û.
    """

    folds: np.ndarray
    unknowns: np.ndarray
    pooled: np.ndarray
    shifts: np.ndarray


def assign_folds(batches: Sequence[KickBatch], folds: int) -> np.ndarray:
    """Assign consecutive batches to folds of equal size. Returns the fold of each batch (B,)."""
    return np.arange(len(batches)) * folds // len(batches)


def select_others(batches: Sequence[KickBatch], folds: np.ndarray, fold: int) -> list[int]:
    """Select the batches for the fit of a fold: those of others, not next to a batch of its own."""
    own = {batches[j] for j in np.flatnonzero(folds == fold).tolist()}
    near = {batch._replace(number=batch.number + d) for batch in own for d in (-1, 0, 1)}
    return [j for j, batch in enumerate(batches) if batch not in near]


def cross_fit(
    evaluate: Evaluate,
    start: np.ndarray,
    batches: Sequence[KickBatch],
    folds: int,
    names: Sequence[str],
) -> FoldFits:
    """Fit the unknowns for each fold to the batches of the others.

    Args:
        evaluate: scores and information of batches.
        start: u (K,) where the fits begin.
        batches: of the record.
        folds: their number.
        names: of the unknowns, for errors.

    Returns: a `FoldFits`.
    """
    number = assign_folds(batches, folds)
    everything = range(len(batches))
    pooled = _solve(evaluate, start, list(everything), names)
    shifts = np.zeros((len(batches), len(start)))
    fitted = []
    for fold in range(folds):
        others = select_others(batches, number, fold)
        if len(others) < 2:
            raise ValueError(
                f"fold {fold} of {folds} leaves {len(others)} of {len(batches)} batches to fit "
                "to. Record for longer, give a shorter `window`, or take more folds."
            )
        u = _solve(evaluate, pooled, others, names)
        sums = evaluate(u, others)
        size = int(np.sum(number == fold))
        total = sums.information.sum(axis=0)
        shifts[others] += size * np.linalg.solve(total, sums.score.T).T
        fitted.append(u)
    return FoldFits(number, np.array(fitted), pooled, shifts)


def _solve(
    evaluate: Evaluate, start: np.ndarray, batches: Sequence[int], names: Sequence[str]
) -> np.ndarray:
    """u where the score of some batches vanishes, by Fisher scoring."""
    u = np.asarray(start, np.float64)
    for _ in range(MAX_STEPS):
        sums = evaluate(u, batches)
        information = sums.information.sum(axis=0)
        _require_determined(information, names)
        step = np.linalg.solve(information, sums.score.sum(axis=0))
        u = u + step
        error = np.sqrt(np.diag(np.linalg.inv(information)))
        rounding = 1e-5 * np.abs(u)
        if np.all(np.abs(step) <= np.maximum(SETTLED * error, rounding)):
            return u
    raise FloatingPointError(
        f"the fit of {', '.join(names)} did not converge in {MAX_STEPS} steps; it is at "
        f"{np.array2string(u, precision=4)}. Start nearer to the truth, or fit fewer parameters."
    )


def _require_determined(information: np.ndarray, names: Sequence[str]) -> None:
    """Refuse unknowns that the record does not determine, by name."""
    if not np.all(np.isfinite(information)):
        raise FloatingPointError(
            f"the information about {', '.join(names)} is not finite: the drift or the noise is "
            "not, at a state of the record."
        )
    scale = np.sqrt(np.diag(information))
    unit = np.where(scale > 0, scale, 1.0)
    values, vectors = np.linalg.eigh(information / unit / unit[:, None])
    lost = values < SINGULAR * max(values[-1], 1.0)
    if not lost.any():
        return
    share = (vectors[:, lost] ** 2).sum(axis=1)
    which = [name for name, s in zip(names, share, strict=True) if s > 1e-3]
    raise ValueError(
        f"the record does not determine {', '.join(which)}: `fit` has parameters that act alike "
        "or not at all. Leave one of them as it is."
    )
