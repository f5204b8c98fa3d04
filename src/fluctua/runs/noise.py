"""Effect of the noise amplitude on an estimate: variance of the gradient and bias of the return.

Everything is measured at several σ_W under the same random numbers (Fig. 2c, d), and kept as batch
means (`learn.repetitions`). Letters: S amplitudes, B batches, E trajectories.

Noise lowers the variance of the gradient and raises the bias of the return. With E trajectories at
amplitude σ the estimate of ∇J(0) has the relative error

    ε²(σ, E) = Σ_f w_f (|∇c|²σ⁴ + V(σ)/E) / Σ_f w_f |∇J|²,
    V(σ) = A/σ² + B + Cσ²,     J(σ) = J(0) + cσ²,

summed over families f of parameters, each in units of its own noise, w_f = 1/V_f at the present σ:
the metric in which the paper's rule steps, insensitive to families without a gradient. V is the
variance of one trajectory's gradient, summed over the family: A is the variance of the return
without noise (modulation, or no baseline) times a score ∝ 1/σ; B is noise times score; C noise on
noise. See docs/noise.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fluctua.core.arrays import Array, Params
from fluctua.learn.repetitions import Measured, average_in_batches
from fluctua.tcmt.tasks import Task, with_noise

BATCHES = 20
Done = Callable[[int], None]
"""Called with the number of trajectories that were just run."""


def ignore_progress(count: int) -> None:
    """Report nothing."""


def measure_variances(
    key: Array,
    task: Task,
    theta: Params,
    sigma_w: Sequence[float],
    *,
    baseline: Any = "binned",
    count: int = 1000,
    backend: str = "cpu",
    done: Done = ignore_progress,
) -> np.ndarray:
    """Variance of one trajectory's gradient, averaged over all ω_n, at each σ_W. Shape (S, B).

    baseline: a name or a record, as in `Task.estimator`.

    >>> measure_variances(key, task, theta, [0.1, 0.5]).mean(axis=1)
    """
    rows = []
    for sigma in sigma_w:
        estimator: Any = with_noise(task, sigma_w=sigma).estimator(backend, baseline=baseline)
        samples = np.asarray(estimator.samples(key, theta, count).gradient["omega"], float)
        spread = (samples - samples.mean(axis=0)) ** 2
        rows.append(average_in_batches(spread.mean(axis=1) * count / (count - 1), BATCHES))
        done(count)
    return np.array(rows)


class Returns(NamedTuple):
    """Bias and spread of the return at each σ_W.

    bias: J(σ_W) − J(0) (S, B).
    square: mean square of a return about J(σ_W), whose root is the spread (S, B).
    noiseless: J(0).
    noiseless_square: mean square without Wiener noise, due to the modulation alone (B,).
    """

    bias: np.ndarray
    square: np.ndarray
    noiseless: float
    noiseless_square: np.ndarray


def measure_returns(
    key: Array,
    task: Task,
    theta: Params,
    sigma_w: Sequence[float],
    *,
    count: int = 10_000,
    backend: str = "cpu",
    batches: int = BATCHES,
    done: Done = ignore_progress,
) -> Returns:
    """Bias and spread of the return, paired with noiseless runs under the same modulation.

    The noise comes in pairs ±w that share their modulation. Terms linear in the noise cancel within
    a pair, so the bias, which is of second order, is resolved at any σ_W; the error ∝ σ_W of a
    plain paired difference would hide it at small ones. Float64, because at σ_W = 10⁻³ the bias is
    10⁻⁷ of the return.
    """
    count -= count % 2
    noiseless = _simulate_returns(key, task, theta, count, backend, noise=False)
    done(count)

    def pairs(r):
        return r.reshape(-1, 2).mean(axis=1)

    def squares(r):
        return average_in_batches(pairs((r - r.mean()) ** 2), batches)

    bias = []
    square = []
    for sigma in sigma_w:
        r = _simulate_returns(key, with_noise(task, sigma_w=sigma), theta, count, backend)
        bias.append(average_in_batches(pairs(r - noiseless), batches))
        square.append(squares(r))
        done(count)
    return Returns(np.array(bias), np.array(square), float(noiseless.mean()), squares(noiseless))


def difference_returns(
    key: Array,
    task: Task,
    theta: Params,
    direction: Params,
    *,
    step: float = 1e-3,
    count: int = 1000,
    backend: str = "cpu",
    noise: bool = True,
) -> np.ndarray:
    """[R(θ + hu) − R(θ − hu)] / 2h of antithetic pairs under the same noise: u·∇J. Shape (E/2,).

    direction: u, with the structure of θ; families that are left out stay. In float64, so that h
        can be small.
    """
    count += count % 2
    legs = []
    for side in (step, -step):
        moved = {
            n: np.asarray(v, float) + side * np.asarray(direction.get(n, 0.0))
            for n, v in theta.items()
        }
        legs.append(_simulate_returns(key, task, moved, count, backend, noise=noise))
    return ((legs[0] - legs[1]) / (2 * step)).reshape(-1, 2).mean(axis=1)


def _simulate_returns(
    key: Array, task: Task, theta: Params, count: int, backend: str, *, noise: bool = True
) -> np.ndarray:
    """Returns of antithetic pairs. Shape (E,)."""
    estimator: Any = task.estimator(backend, baseline="none", dtype="float64")
    deterministic = not noise and (task.modulation is None or task.modulation.sigma_kappa == 0)
    run = estimator.run(
        key, theta, 2 if deterministic else count, scores=False, antithetic=True, noise=noise
    )
    return np.full(count, run.returns[0]) if deterministic else run.returns


# -------------------------------------------------------------------------- variance against bias


class VarianceLaw(NamedTuple):
    """The law V(σ) = A/σ² + B + Cσ², with A, B, C ≥ 0."""

    A: float
    B: float
    C: float

    def __call__(self, sigma: np.ndarray | float) -> np.ndarray:
        """V, the variance of one trajectory's gradient."""
        square = np.asarray(sigma, float) ** 2
        return self.A / square + self.B + self.C * square


def fit_variance(sigma: np.ndarray, variance: np.ndarray) -> VarianceLaw:
    """Fit A, B, C ≥ 0 by least squares of relative errors. sigma, variance: (S,).

    With three unknowns the constrained minimum is the best of all subsets with a non-negative
    solution.

    >>> round(float(fit_variance(np.array([0.1, 1.0]), np.array([200.0, 2.0])).A), 9)
    2.0
    """
    sigma = np.asarray(sigma, float)
    variance = np.asarray(variance, float)
    terms = np.stack([sigma**-2, np.ones_like(sigma), sigma**2], axis=1) / variance[:, None]
    best = np.zeros(3)
    least = np.inf
    for size in range(1, min(3, len(sigma)) + 1):
        for chosen in itertools.combinations(range(3), size):
            coefficients = np.linalg.lstsq(terms[:, chosen], np.ones(len(sigma)), rcond=None)[0]
            rest = float(np.sum((terms[:, chosen] @ coefficients - 1) ** 2))
            if (coefficients >= 0).all() and rest < least * (1 - 1e-9):
                best = np.zeros(3)
                least = rest
                best[list(chosen)] = coefficients
    return VarianceLaw(*best.tolist())


def squared_norm(gradients: np.ndarray, variances: np.ndarray) -> Measured:
    """|∇J|² from S independent estimates of ∇J. gradients, variances (of these means): (S, P).

    Products of *different* estimates have no noise in their mean: Σ_{a≠b} w_a w_b g_a·g_b / Σ_{a≠b}
    w_a w_b, with w the inverse of each one's summed variance. Its error: 2Σ(w_a w_b)²Σ_i v_ai v_bi
    from the noise and at most 4|∇J|² max_i v̄_i from its product with the signal, v̄ the variance
    of the pooled estimate.
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


def sum_signal(norm2: list[Measured], variance: list[float]) -> Measured:
    """S = Σ_f |∇J|²_f / V_f, the squared signal-to-noise ratio of one trajectory, and its error."""
    each = np.array(norm2) / np.array(variance)[:, None]
    return Measured(float(each[:, 0].sum()), float(np.sqrt((each[:, 1] ** 2).sum())))


class Tradeoff(NamedTuple):
    """Variance and bias as functions of σ, relative to the gradient `S = Σ w|∇J|²`.

    variance: `Σ wV(σ)/S`.
    bias: `Σ w|∇c|²/S`.
    ceiling: largest σ that the bias of the return allows.
    low, high: the amplitudes between which V was measured.
    """

    variance: VarianceLaw
    bias: float
    ceiling: float
    low: float
    high: float

    def error(self, sigma: float | np.ndarray, trajectories: float) -> np.ndarray:
        """ε, the relative error of the gradient."""
        return np.sqrt(
            self.bias * np.asarray(sigma, float) ** 4 + self.variance(sigma) / trajectories
        )

    def trajectories(self, sigma: float | np.ndarray, error: float) -> np.ndarray:
        """E needed for a relative error; infinite where the bias alone exceeds it."""
        left = error**2 - self.bias * np.asarray(sigma, float) ** 4
        return np.where(left > 0, self.variance(sigma) / np.where(left > 0, left, 1.0), np.inf)


class Optimum(NamedTuple):
    """A choice of noise.

    sigma_w: the amplitude.
    trajectories, error: number of trajectories and relative error of the gradient.
    limited_by: "gradient" (its variance against its bias), "return bias", or the "range" measured.
    """

    sigma_w: float
    trajectories: float
    error: float
    limited_by: str


def find_optimum(
    tradeoff: Tradeoff, *, error: float | None = None, trajectories: float | None = None
) -> Optimum:
    """The σ with the fewest trajectories for an error, or the smallest error for a budget.

    Where V = A/σ² alone, the second is `σ⁶ = A/(2E·bias)`.
    """
    if (error is None) == (trajectories is None):
        raise ValueError("give either the wanted `error` or the number of `trajectories`.")
    top = min(tradeoff.high, max(tradeoff.ceiling, tradeoff.low))
    sigma = np.geomspace(tradeoff.low, top, 2001)
    if error is not None:
        cost = tradeoff.trajectories(sigma, error)
        if not np.isfinite(cost).any():
            raise ValueError(
                f"a relative error of {error:g} is below the bias that the noise puts into the "
                f"gradient at every σ_W from {tradeoff.low:g} on. Measure at smaller amplitudes, "
                "or accept a larger error."
            )
    else:
        assert trajectories is not None
        cost = tradeoff.error(sigma, trajectories)
    index = int(np.argmin(cost))
    best = float(sigma[index])
    needed = float(trajectories or 0)
    if error is not None:
        needed = float(tradeoff.trajectories(best, error))
    edge = index in (0, len(sigma) - 1)
    limit = "gradient"
    if edge:
        limit = "return bias" if index and tradeoff.ceiling < tradeoff.high else "range"
    return Optimum(best, needed, float(tradeoff.error(best, needed)), limit)
