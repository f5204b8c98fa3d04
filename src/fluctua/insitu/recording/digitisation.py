"""Samples that repeat the one before: by chance, by rounding, or held by the instrument.

A tie is a sample that equals the one before in every channel. Two things tell chance from holding.

How many: let Nₘ be the ties if the steps were m times as wide, which the differences k of samples,
counted in steps, give: N_m = N₁ + S_m with S_m = Σ_{k≠0} Πᵢ max(0, 1 − |kᵢ|/m). Chance grows with
the width as a power, N_m = N₁ m^d, so that S₂ and S₄ predict N₁ = S₂² / (S₄ − 2S₂), whatever the
correlation of the channels. Where differences are a few steps the growth is slower, and the
prediction too large: an alarm is missed, not false. Ties of held samples are in N₁ and not in S_m.

What follows: the sample after a held one makes up for two intervals. Its difference has twice the
variance of the others, after a chance tie it has the same.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy

SAMPLES = 20_000
"""Samples of a channel in which steps are searched."""
INEXACT = 0.05
"""Part of a step by which differences may miss a multiple of it."""
ENOUGH = 20
"""Ties from which the differences after them are judged; near misses for a prediction."""

COARSE = 0.2
"""Share of ties above which the differences after them, of a step or less, are not judged."""


def find_steps(x: np.ndarray) -> np.ndarray | None:
    """Find the steps that samples (n, M) were rounded to, (M,); None if a channel has none."""
    steps = [_find_step(np.asarray(x[:SAMPLES, i], np.float64), x.dtype) for i in range(x.shape[1])]
    return np.array(steps) if all(steps) else None


def _find_step(values: np.ndarray, dtype: np.dtype) -> float:
    """Find the step of one channel; 0 if there is none.

    Neighbouring values of a rounded quantity are a few steps apart.
    """
    unique = np.unique(values[np.isfinite(values)])
    gaps = np.diff(unique)
    rounding = 4 * float(np.finfo(dtype).eps) * float(np.abs(unique).max(initial=0.0))
    if not gaps.size:
        return 0.0
    for part in (1, 2, 3, 4):  # the smallest gap may be of several steps
        step = float(gaps.min()) / part
        if rounding > INEXACT * step:
            return 0.0
        single = gaps[gaps < 1.5 * step]
        step = float(single.mean()) if single.size else step
        multiples = gaps[gaps < 16 * step] / step
        if np.abs(multiples - np.rint(multiples)).max() < INEXACT:
            return step
    return 0.0


class Judgement(NamedTuple):
    """Whether ties are chance.

    expected: number of ties by chance.
    error: of the expected number.
    held: whether there are more, or the differences after them are too large.
    """

    expected: float
    error: float
    held: bool


class TieCounter:
    """Statistics of ties, gathered chunk by chunk. steps: (M,), of `find_steps`."""

    def __init__(self, steps: np.ndarray):
        self.steps = steps
        self._near = np.zeros(2)  # S₂, S₄
        self._spread = np.zeros((2, 2))
        self._products = np.zeros((len(steps), len(steps)))  # of the differences of channels
        self._scale: np.ndarray | None = None
        self._after = np.zeros(3)  # count, Σv, Σv² of the differences after ties
        self._other = np.zeros(2)  # count, Σv of all differences that are no ties

    def add(self, x: np.ndarray, ties: np.ndarray) -> None:
        """Add trajectories x (E, T+1, M) with their ties (E, T)."""
        change = np.rint(np.diff(x, axis=1).astype(np.float64) / self.steps)
        moved = (change != 0).any(axis=2)
        close = change[moved & (np.abs(change) < 4).all(axis=2)]
        weights = np.stack([np.clip(1 - np.abs(close) / m, 0, None).prod(axis=1) for m in (2, 4)])
        self._near += weights.sum(axis=1)
        self._spread += weights @ weights.T
        if not moved.any():
            return
        self._products += change[moved].T @ change[moved]
        if self._scale is None:
            self._scale = np.maximum((change[moved] ** 2).mean(axis=0), 1.0)
        size = (change**2 / self._scale).mean(axis=2)
        follows = ties[:, :-1] & moved[:, 1:]
        after = size[:, 1:][follows]
        self._after += [after.size, after.sum(), (after**2).sum()]
        self._other += [moved.sum(), size[moved].sum()]

    def judge(self, ties: int, alarm: float) -> Judgement:
        """Judge whether ties may be chance. alarm: probability of a false alarm."""
        limit = float(scipy.stats.norm.isf(alarm / 3))
        expected, error = self._predict()
        excess = _measure_excess(ties, expected, error)
        count, total, squares = self._after
        if count < ENOUGH or not self._other[1] > 0 or ties > COARSE * (ties + self._other[0]):
            return Judgement(expected, error, bool(excess > limit))
        usual = self._other[1] / self._other[0]
        uncertain = np.sqrt(max(squares / count - (total / count) ** 2, 0) / count)
        larger = (total / count - usual) / max(uncertain, np.finfo(float).tiny)
        # much smaller ones follow where a system hardly moves at times, which makes ties too
        held = (
            larger > limit
            or (excess + larger) / np.sqrt(2) > limit
            or (excess > limit and larger > -limit)
        )
        return Judgement(expected, error, bool(held))

    def _dimension(self) -> float:
        """Effective number of independent channels: (Σλ)² / Σλ² of their correlations."""
        scale = np.sqrt(np.maximum(np.diag(self._products), np.finfo(float).tiny))
        correlations = self._products / np.outer(scale, scale)
        return max(1.0, float(np.trace(correlations) ** 2 / np.sum(correlations**2)))

    def _predict(self) -> tuple[float, float]:
        """Predict ties by chance, with the error; infinite where the steps are too wide."""
        two, four = self._near
        rest = four - 2 * two
        if two < ENOUGH:  # too few for the power d: as many as channels move by themselves
            growth = 4 ** self._dimension() - 1
            return four / growth, (float(np.sqrt(self._spread[1, 1])) + 0.5) / growth
        if not rest > 0:
            return np.inf, np.inf
        slope = np.array([2 * two / rest + 2 * (two / rest) ** 2, -((two / rest) ** 2)])
        return two**2 / rest, float(np.sqrt(slope @ self._spread @ slope))


def _measure_excess(ties: int, expected: float, error: float) -> float:
    """Standard deviations by which a count exceeds a prediction; Poisson's where it is small."""
    if not np.isfinite(expected):
        return 0.0
    if expected > ENOUGH:
        return float((ties - expected) / np.sqrt(expected + error**2))
    return float(scipy.stats.norm.isf(scipy.stats.poisson.sf(ties - 1, expected + 2 * error)))
