"""Number of repetitions for a given error of the gradient, and power laws with jackknife errors.

With E trajectories the relative error of the gradient, each component in units of its own noise, is

    ε² = Σ_i V_i/E / V_i / Σ_i (∂_iJ)²/V_i = P/(E S),     S = Σ_i (∂_iJ)²/V_i,

over the P components, V the variance of one trajectory's gradient, so that E = P/(S ε²), whatever
units the parameters are in. (`runs.noise` has one such unit per family of a lattice's parameters.)
Noise raises ĝ², but not products of different trajectories: S is taken from ten parts of the
recording, and its error by leaving each out. V is estimated from n trajectories, with E[1/V̂] = (n
− 1)/(n − 3)/V for normal ones, which is divided out.

A component of z standard errors is known to ε with E/(ε²(z² − 1)) trajectories, the 1 being what
noise adds to z². A component below two standard errors has only a bound: the truth is below |z| +
2.

Power laws are fitted through measured points that may share their noise. Every measurement is kept
as B batch means. The error of a statistic comes from leaving one batch out at a time (the
jackknife), so correlated points need no covariance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from fluctua.core.display.fields import show_fields
from fluctua.core.estimate import Estimate
from fluctua.core.text import names, with_error

CLEAR = 2.0
PARTS = 10
"""Independent parts of a recording whose estimates are compared."""


class Needed(NamedTuple):
    """A required number of trajectories.

    trajectories: in total.
    at_least: whether it is only a bound, because the gradient is not resolved yet.
    """

    trajectories: float
    at_least: bool


class Weakest(NamedTuple):
    """A component of the gradient, and its distance from zero in standard errors."""

    name: str
    z: float


@show_fields
class Repetitions(NamedTuple):
    """Required numbers of trajectories, made by `repetitions`.

    recorded: E.
    signal: S.
    error: the requested relative error.
    whole: required for the gradient as a whole.
    reached: relative error of the recording; None if the gradient is not resolved.
    training: required for a relative error of 1, at which a step points within 45° of the gradient.
    share: requested share of the components.
    components: required for `share` of the components.
    clear, trainable: number of resolved components, of those that can be estimated.
    weakest: the least resolved component.
    """

    recorded: int
    signal: Measured
    error: float
    whole: Needed
    reached: float | None
    training: Needed
    share: float
    components: Needed
    clear: int
    trainable: int
    weakest: Weakest


def repetitions(
    estimate: Estimate, parts: np.ndarray | None, *, error: float = 0.1, share: float = 0.9
) -> Repetitions:
    """Number of trajectories that know the gradient to a relative `error`.

    Args:
        estimate: of `fluctua.insitu.estimate(recording, process, objective)`.
        parts: (PARTS, P), estimates from every tenth trajectory, of the same function.
        error: requested relative error.
        share: of the components that are to be known to that error.

    Returns: a `Repetitions`.
    """
    if not error > 0 or not 0 < share <= 1:
        raise ValueError(
            f"`error` must be positive and `share` in (0, 1]; got {error:g} and {share:g}."
        )
    count = estimate.count
    if parts is None:
        raise ValueError(
            "advice compares ten parts of a recording, of two trajectories at least, with the "
            f"baseline time or none; this one has {count} trajectories."
        )
    known = _select_components(estimate)
    spread = np.sqrt(count * (count - 1) / (count - 3)) * known.stderr
    signal = _estimate_signal(parts[:, known.which] / spread)
    size = len(known.names)

    def required(wanted):
        return _require_for_gradient(signal, size, wanted)

    z2 = (known.gradient / known.stderr) ** 2
    weakest = int(np.argmin(z2))
    stands = signal.value > CLEAR * signal.error
    return Repetitions(
        count,
        signal,
        error,
        required(error),
        float(np.sqrt(size / signal.value / count)) if stands else None,
        required(1.0),
        share,
        _require_for_components(z2, count, error, share),
        int(np.sum(z2 > CLEAR**2)),
        size,
        Weakest(known.names[weakest], float(np.sqrt(z2[weakest]))),
    )


def _estimate_signal(parts: np.ndarray) -> Measured:
    """S and its jackknife error. parts: (K, P), in units of one trajectory's noise."""
    count = len(parts)
    left = np.array([_cross_products(parts[np.arange(count) != k]) for k in range(count)])
    error = float(np.sqrt((count - 1) * np.mean((left - left.mean()) ** 2)))
    return Measured(_cross_products(parts), error)


def _cross_products(parts: np.ndarray) -> float:
    """Mean product of different parts, summed over components; free of the bias of squares."""
    count = len(parts)
    return float(np.sum(parts.sum(axis=0) ** 2) - np.sum(parts**2)) / (count * (count - 1))


def _require_for_gradient(signal: Measured, size: int, error: float) -> Needed:
    if signal.value > CLEAR * signal.error:
        return Needed(size / (signal.value * error**2), False)
    return Needed(size / ((max(signal.value, 0.0) + CLEAR * signal.error) * error**2), True)


def _require_for_components(z2: np.ndarray, count: int, error: float, share: float) -> Needed:
    # the least of those asked for
    last = float(np.sort(z2)[::-1][max(0, int(np.ceil(share * z2.size)) - 1)])
    if last > CLEAR**2:
        return Needed(count / (error**2 * (last - 1)), False)
    return Needed(count / (error**2 * (np.sqrt(last) + CLEAR) ** 2), True)


class Components(NamedTuple):
    """The components of a gradient that can be estimated.

    names: one per component.
    gradient, stderr: of these components.
    which: (P,) bool, of all components.
    """

    names: list[str]
    gradient: np.ndarray
    stderr: np.ndarray
    which: np.ndarray


def _select_components(estimate: Estimate) -> Components:
    def join(tree):
        return np.concatenate(
            [np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)]
        )

    g = join(estimate.gradient)
    stderr = join(estimate.stderr)
    known = np.isfinite(g) & (stderr > 0)
    if not known.any():
        raise ValueError("no component of the gradient could be estimated from this recording.")
    labels = [name for name, ok in zip(names(estimate.gradient), known, strict=True) if ok]
    return Components(labels, g[known], stderr[known], known)


# ------------------------------------------------------------------------------------- power laws


class Measured(NamedTuple):
    """A number and its standard error."""

    value: float
    error: float

    def __str__(self) -> str:
        return with_error(self.value, self.error)


class PowerLaw(NamedTuple):
    """The law y = factor · x^exponent."""

    exponent: Measured
    factor: Measured

    def __call__(self, x: Any) -> np.ndarray:
        """Evaluate y at x, of any shape."""
        return self.factor.value * np.asarray(x, float) ** self.exponent.value


def jackknife(
    statistic: Callable[[np.ndarray], np.ndarray], batches: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """statistic(mean over batches) and its standard error. batches: (..., B), of equal size.

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


def power_law(
    x: np.ndarray, batches: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray] = np.abs
) -> PowerLaw:
    """Least-squares line through (ln x, ln statistic(y)). x: (S,), batches of y: (S, B).

    >>> values = np.array([[3.0, 3.0], [12.0, 12.0]])
    >>> round(power_law(np.array([1.0, 2.0]), values).exponent.value, 9)
    2.0
    """
    x = np.asarray(x, float)
    if x.size < 2 or batches.shape[0] != x.size:
        raise ValueError(
            f"a power law needs two points at least and a row of batches for each; got {x.size} "
            f"points and batches of shape {batches.shape}."
        )
    value, error = jackknife(lambda y: np.polyfit(np.log(x), np.log(statistic(y)), 1), batches)
    factor = float(np.exp(value[1]))
    return PowerLaw(
        Measured(float(value[0]), float(error[0])), Measured(factor, factor * float(error[1]))
    )


def average_in_batches(samples: np.ndarray, count: int) -> np.ndarray:
    """Means over `count` equal stretches of samples, (E,) -> (count,); a remainder is left out."""
    size = len(samples) // count
    if size < 1:
        raise ValueError(f"{count} batches need as many samples at least; got {len(samples)}.")
    return np.asarray(samples[: size * count], float).reshape(count, size).mean(axis=1)
