"""How much noise: the variance of a gradient, which noise lowers, against the bias of the return, which it raises.

With E trajectories at amplitude σ the estimate of ∇J(0) is off by

    ε²(σ, E) = Σ_f w_f (|∇c|²σ⁴ + V(σ)/E) / Σ_f w_f |∇J|²,     V(σ) = A/σ² + B + Cσ²,     J(σ) = J(0) + cσ²,

summed over families f of parameters, each in units of its own noise, w_f = 1/V_f at the present σ: the metric in which
the paper's rule steps, and one that a family without any gradient does not upset. V is the variance of one trajectory's
gradient, summed over the family: A is what the return varies by without noise (modulation, or no baseline) times a
score ∝ 1/σ; B is noise times score; C noise on noise. See docs/noise.md.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from fluctua.learn.scaling import Measured


class VarianceLaw(NamedTuple):
    """V(σ) = A/σ² + B + Cσ², none of them negative."""

    A: float
    B: float
    C: float

    def __call__(self, sigma: np.ndarray | float) -> np.ndarray:
        """V, the variance of one trajectory's gradient."""
        square = np.asarray(sigma, float) ** 2
        return self.A / square + self.B + self.C * square


def fit_variance(sigma: np.ndarray, variance: np.ndarray) -> VarianceLaw:
    """Least squares of relative errors over A, B, C ≥ 0. sigma, variance: (S,).

    Three unknowns: the best of all subsets whose solution is not negative is the constrained minimum.

    >>> round(float(fit_variance(np.array([0.1, 1.0]), np.array([200.0, 2.0])).A), 9)
    2.0
    """
    sigma, variance = np.asarray(sigma, float), np.asarray(variance, float)
    terms = np.stack([sigma**-2, np.ones_like(sigma), sigma**2], axis=1) / variance[:, None]
    best, least = np.zeros(3), np.inf
    for size in range(1, min(3, len(sigma)) + 1):
        for chosen in itertools.combinations(range(3), size):
            coefficients = np.linalg.lstsq(terms[:, chosen], np.ones(len(sigma)), rcond=None)[0]
            rest = float(np.sum((terms[:, chosen] @ coefficients - 1) ** 2))
            if (coefficients >= 0).all() and rest < least * (1 - 1e-9):
                best, least = np.zeros(3), rest
                best[list(chosen)] = coefficients
    return VarianceLaw(*best.tolist())


def squared_norm(gradients: np.ndarray, variances: np.ndarray) -> Measured:
    """|∇J|² from S independent estimates of ∇J. gradients, variances (of these means): (S, P).

    Products of *different* estimates have no noise in their mean: Σ_{a≠b} w_a w_b g_a·g_b / Σ_{a≠b} w_a w_b, with
    w the inverse of each one's summed variance. Its error: 2Σ(w_a w_b)²Σ_i v_ai v_bi from the noise and at most
    4|∇J|² max_i v̄_i from its product with the signal, v̄ the variance of the pooled estimate.
    """
    if len(gradients) < 2:
        raise ValueError(f"two independent estimates at least are compared; got {len(gradients)}.")
    w = 1 / variances.sum(axis=1)
    off = ~np.eye(len(w), dtype=bool)
    pairs = np.outer(w, w)
    total = pairs[off].sum()
    value = float((pairs * (gradients @ gradients.T))[off].sum() / total)
    noise = 2 * float((pairs**2 * (variances @ variances.T))[off].sum()) / total**2
    pooled = (w[:, None] ** 2 * variances).sum(axis=0) / w.sum() ** 2
    return Measured(value, float(np.sqrt(noise + 4 * max(value, 0.0) * pooled.max())))


def signal(norm2: list[Measured], variance: list[float]) -> Measured:
    """S = Σ_f |∇J|²_f / V_f: how far one trajectory lifts the gradient out of its noise, and the error of that."""
    each = np.array(norm2) / np.array(variance)[:, None]
    return Measured(float(each[:, 0].sum()), float(np.sqrt((each[:, 1] ** 2).sum())))


class Tradeoff(NamedTuple):
    """What the choice depends on: sums over families, relative to the gradient ``S = Σ w|∇J|²``.

    variance: ``Σ wV(σ)/S``. bias: ``Σ w|∇c|²/S``. ceiling: largest σ that the bias of the return
    allows. low, high: the amplitudes between which V was measured.
    """

    variance: VarianceLaw
    bias: float
    ceiling: float
    low: float
    high: float

    def error(self, sigma: float | np.ndarray, trajectories: float) -> np.ndarray:
        """ε, the relative error of the gradient."""
        return np.sqrt(self.bias * np.asarray(sigma, float) ** 4 + self.variance(sigma) / trajectories)

    def trajectories(self, sigma: float | np.ndarray, error: float) -> np.ndarray:
        """E needed for a relative error; infinite where the bias alone is more."""
        left = error**2 - self.bias * np.asarray(sigma, float) ** 4
        return np.where(left > 0, self.variance(sigma) / np.where(left > 0, left, 1.0), np.inf)


class Optimum(NamedTuple):
    """A choice. limited_by: "gradient" (its variance against its bias), "return bias", or the "range" measured."""

    sigma_w: float
    trajectories: float
    error: float
    limited_by: str


def optimum(tradeoff: Tradeoff, *, error: float | None = None, trajectories: float | None = None) -> Optimum:
    """The σ that needs the fewest trajectories for an error, or that has the least error for a number of them.

    Where V = A/σ² alone, the second is ``σ⁶ = A/(2E·bias)``.
    """
    if (error is None) == (trajectories is None):
        raise ValueError("give either the wanted `error` or the number of `trajectories`.")
    top = min(tradeoff.high, max(tradeoff.ceiling, tradeoff.low))
    sigma = np.geomspace(tradeoff.low, top, 2001)
    if error is not None:
        cost = tradeoff.trajectories(sigma, error)
        if not np.isfinite(cost).any():
            raise ValueError(
                f"a relative error of {error:g} is below the bias that the noise puts into the gradient at every "
                f"σ_W from {tradeoff.low:g} on. Measure at smaller amplitudes, or accept a larger error."
            )
    else:
        assert trajectories is not None
        cost = tradeoff.error(sigma, trajectories)
    at = int(np.argmin(cost))
    best = float(sigma[at])
    needed = float(tradeoff.trajectories(best, error)) if error is not None else float(trajectories or 0)
    edge = at in (0, len(sigma) - 1)
    limit = "gradient" if not edge else "return bias" if at and tradeoff.ceiling < tradeoff.high else "range"
    return Optimum(best, needed, float(tradeoff.error(best, needed)), limit)
