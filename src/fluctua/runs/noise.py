"""What the noise amplitude does to an estimate (Fig. 2c, d): the variance of the gradient, the bias of the return.

Everything is measured at several σ_W under the same random numbers, and kept as batch means (`fluctua.learn.scaling`).
Letters: S amplitudes, B batches, E trajectories.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fluctua.core.types import Array, Params
from fluctua.learn.scaling import into_batches
from fluctua.tcmt.tasks import Task, with_noise

BATCHES = 20
Done = Callable[[int], None]
"""Told the trajectories that were just run."""


def ignore(count: int) -> None:
    """Tell nobody."""


def variances(
    key: Array,
    task: Task,
    theta: Params,
    sigma_w: Sequence[float],
    *,
    baseline: Any = "binned",
    count: int = 1000,
    backend: str = "cpu",
    family: str = "omega",
    batches: int = BATCHES,
    done: Done = ignore,
) -> np.ndarray:
    """Variance of one trajectory's gradient, averaged over a family of parameters, at each σ_W. (S, B)

    baseline: a name or a record, as `Task.estimator` takes it.

    >>> variances(key, task, theta, [0.1, 0.5]).mean(axis=1)
    """
    rows = []
    for sigma in sigma_w:
        estimator: Any = with_noise(task, sigma_w=sigma).estimator(backend, baseline=baseline)
        samples = np.asarray(estimator.samples(key, theta, count).gradient[family], float)
        spread = (samples - samples.mean(axis=0)) ** 2
        rows.append(into_batches(spread.mean(axis=1) * count / (count - 1), batches))
        done(count)
    return np.array(rows)


class Returns(NamedTuple):
    """At each σ_W. bias: J(σ_W) − J(0). square: mean square of a return about J(σ_W), whose root is the spread. (S, B)

    silent: J(0). silent_square: the same without Wiener noise (B,), all that the modulation makes.
    """

    bias: np.ndarray
    square: np.ndarray
    silent: float
    silent_square: np.ndarray


def returns(
    key: Array,
    task: Task,
    theta: Params,
    sigma_w: Sequence[float],
    *,
    count: int = 10_000,
    backend: str = "cpu",
    batches: int = BATCHES,
    done: Done = ignore,
) -> Returns:
    """Bias and spread of the return, paired with runs without Wiener noise under the same modulation.

    The noise comes in pairs ±w that share their modulation. What is linear in the noise cancels within a pair, so the
    bias, which is of second order, is resolved at any σ_W; a plain paired difference has an error ∝ σ_W that buries it
    at small ones. Float64, because at σ_W = 10⁻³ the bias is 10⁻⁷ of the return.
    """
    count -= count % 2
    silent = _returns(key, task, theta, count, backend, noise=False)
    done(count)
    pairs = lambda r: r.reshape(-1, 2).mean(axis=1)
    squares = lambda r: into_batches(pairs((r - r.mean()) ** 2), batches)
    bias, square = [], []
    for sigma in sigma_w:
        r = _returns(key, with_noise(task, sigma_w=sigma), theta, count, backend)
        bias.append(into_batches(pairs(r - silent), batches))
        square.append(squares(r))
        done(count)
    return Returns(np.array(bias), np.array(square), float(silent.mean()), squares(silent))


def difference(
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
    """[R(θ + hu) − R(θ − hu)] / 2h of pairs of opposite noise, the same on both legs: d·∇J. (E/2,)

    direction: u, with the structure of θ; families that are left out stay. In float64, so that h can be small.
    """
    count += count % 2
    legs = []
    for side in (step, -step):
        moved = {n: np.asarray(v, float) + side * np.asarray(direction.get(n, 0.0)) for n, v in theta.items()}
        legs.append(_returns(key, task, moved, count, backend, noise=noise))
    return ((legs[0] - legs[1]) / (2 * step)).reshape(-1, 2).mean(axis=1)


def _returns(key: Array, task: Task, theta: Params, count: int, backend: str, *, noise: bool = True) -> np.ndarray:
    """R of antithetic pairs (E,)."""
    estimator: Any = task.estimator(backend, baseline="none", dtype="float64")
    alike = not noise and (task.modulation is None or task.modulation.sigma_kappa == 0)
    run = estimator.run(key, theta, 2 if alike else count, scores=False, antithetic=True, noise=noise)
    return np.full(count, run.returns[0]) if alike else run.returns
