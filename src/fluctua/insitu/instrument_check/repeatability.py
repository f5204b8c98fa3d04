"""Comparison of two ensembles at the same setting: means and variances within their errors.

A trajectory is averaged over a few stretches of time, in each channel. For the means of these
averages in two ensembles a and b of n trajectories each, and for those of their squared deviations,

    z = (⟨a⟩ − ⟨b⟩) / √(s_a²/n + s_b²/n)

follows Student's t with 2n − 2 degrees of freedom if nothing changed. The largest |z| is compared
with the value that a repeatable instrument exceeds once in 1/`CHANCE` checks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy

STRETCHES = 8
"""Stretches of time over which a trajectory is averaged."""
CHANCE = 1e-4
"""Probability that a repeatable instrument is refused."""
MIN_TRAJECTORIES = 8
"""Per ensemble; the test has little power with fewer."""


class Repeatability(NamedTuple):
    """Two ensembles at the same setting.

    mean: largest difference of means, in standard errors.
    variance: largest difference of variances, in standard errors.
    limit: the largest that passes.
    channel: in which the largest of both was seen.
    """

    mean: float
    variance: float
    limit: float
    channel: int

    @property
    def ok(self) -> bool:
        """Whether both differences are chance."""
        return max(self.mean, self.variance) <= self.limit


def compare_ensembles(a: np.ndarray, b: np.ndarray, chance: float = CHANCE) -> Repeatability:
    """Compare two ensembles of one setting. Shapes (E, T+1, M).

    Args:
        a: trajectories.
        b: as many trajectories, taken later.
        chance: probability that equal ensembles are found to differ.

    Returns: the largest differences, with the limit.
    """
    first = _average_stretches(a)
    second = _average_stretches(b)
    means = _measure_differences(first, second)
    variances = _measure_differences(
        _compute_square_deviations(first), _compute_square_deviations(second)
    )
    tests = 2 * means.size
    degrees = len(a) + len(b) - 2
    limit = float(scipy.stats.t.isf(chance / (2 * tests), degrees))
    worst = int(np.argmax(np.maximum(means, variances)))
    channel = worst % a.shape[2]
    return Repeatability(float(means.max()), float(variances.max()), limit, channel)


def _average_stretches(x: np.ndarray) -> np.ndarray:
    """Averages over stretches of time; channels vary fastest. Shape (E, stretches · M)."""
    count = len(x)
    parts = np.array_split(np.asarray(x, float), min(STRETCHES, x.shape[1]), axis=1)
    return np.stack([part.mean(axis=1) for part in parts], axis=1).reshape(count, -1)


def _compute_square_deviations(values: np.ndarray) -> np.ndarray:
    count = len(values)
    return (values - values.mean(axis=0)) ** 2 * count / (count - 1)


def _measure_differences(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Differences of means in standard errors; 0 where both are constant and equal."""
    difference = np.abs(a.mean(axis=0) - b.mean(axis=0))
    error = np.sqrt(a.var(axis=0, ddof=1) / len(a) + b.var(axis=0, ddof=1) / len(b))
    rounding = 1e-12 * np.maximum(np.abs(a).max(axis=0), np.abs(b).max(axis=0))
    return np.where(difference <= rounding, 0.0, difference / np.maximum(error, 1e-300))
