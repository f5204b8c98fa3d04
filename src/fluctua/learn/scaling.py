"""Power laws through measured points, with errors that know that the points share their noise.

Every measurement is kept as B batch means. A statistic of the means gets its error from leaving one batch out at a
time (the jackknife), so points that were measured under the same noise, and hence err together, need no covariance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fluctua.core.text import with_error


class Measured(NamedTuple):
    """A number and its standard error."""

    value: float
    error: float

    def __str__(self) -> str:
        return with_error(self.value, self.error)


class PowerLaw(NamedTuple):
    """y = factor · x^exponent."""

    exponent: Measured
    factor: Measured

    def __call__(self, x: Any) -> np.ndarray:
        """Y. Any shape."""
        return self.factor.value * np.asarray(x, float) ** self.exponent.value


def jackknife(statistic: Callable[[np.ndarray], np.ndarray], batches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """statistic(mean over batches) and its standard error. batches: (..., B), each a mean over as many samples.

    error² = (B−1)/B Σ_b (f_b − f̄)², f_b the statistic without batch b.

    >>> jackknife(np.sqrt, np.array([1.0, 4.0]))
    """
    count = batches.shape[-1]
    if count < 2:
        raise ValueError(f"an error needs two batches at least; got {count}.")
    total = batches.sum(axis=-1)
    left = np.array([statistic((total - batches[..., b]) / (count - 1)) for b in range(count)])
    error = np.sqrt((count - 1) * np.mean((left - left.mean(axis=0)) ** 2, axis=0))
    return np.asarray(statistic(total / count)), error


def power_law(x: np.ndarray, batches: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray] = np.abs) -> PowerLaw:
    """The straight line through (ln x, ln statistic(y)), least squares. x: (S,). batches of y: (S, B).

    >>> round(power_law(np.array([1.0, 2.0]), np.array([[3.0, 3.0], [12.0, 12.0]])).exponent.value, 9)
    2.0
    """
    x = np.asarray(x, float)
    if x.size < 2 or batches.shape[0] != x.size:
        raise ValueError(f"a power law needs two points at least and a row of batches for each; got {x.size} points "
                         f"and batches of shape {batches.shape}.")  # fmt: skip
    value, error = jackknife(lambda y: np.polyfit(np.log(x), np.log(statistic(y)), 1), batches)
    factor = float(np.exp(value[1]))
    return PowerLaw(Measured(float(value[0]), float(error[0])), Measured(factor, factor * float(error[1])))


def into_batches(samples: np.ndarray, count: int) -> np.ndarray:
    """Means of `count` equal stretches of the samples. (E,) -> (B,); a remainder at the end is left out."""
    size = len(samples) // count
    if size < 1:
        raise ValueError(f"{count} batches need as many samples at least; got {len(samples)}.")
    return np.asarray(samples[: size * count], float).reshape(count, size).mean(axis=1)
