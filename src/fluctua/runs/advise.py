"""Recommend noise amplitude, number of trajectories and time, from small ensembles of a network.

For a network that can be simulated; recordings are analysed by `fluctua.insitu.advise_file`. The
criterion is in `fluctua.runs.noise`, its derivation in docs/noise.md.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fluctua.core.arrays import Array, Params
from fluctua.learn.repetitions import Measured, jackknife
from fluctua.runs import noise
from fluctua.runs.noise import (
    Optimum,
    Tradeoff,
    VarianceLaw,
    find_optimum,
    fit_variance,
    squared_norm,
    sum_signal,
)
from fluctua.tcmt.tasks import Task, with_noise

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Amplitudes that are measured, relative to the task's own."""

H200 = {False: 1.07e-9 / 143, True: 1.57e-9 / 143}
"""Seconds per trajectory, step and resonator, without and with modulation.

From results/bench/cuda.json, time-only baseline.
"""


class Family(NamedTuple):
    """One family of parameters.

    name, size: of the family.
    norm2: |∇J|².
    variance: V(σ) summed over the family.
    bias: |∇c|, with J(σ) = J(0) + cσ².
    """

    name: str
    size: int
    norm2: Measured
    variance: VarianceLaw
    bias: float


class Advice(NamedTuple):
    """Recommended noise and number of trajectories, with the measurements they rest on.

    sigma_w: of the task.
    J_noiseless: J without noise.
    bias: c in J(σ) = J(0) + cσ².
    spread: standard deviation of a return at sigma_w.
    families: measurements of each family of parameters.
    signal: ``Σ |∇J|²/V`` at sigma_w.
    tradeoff: variance against bias, as functions of σ.
    best: the recommended noise.
    at_own: the same at the task's own noise.
    seconds_per_trajectory: on this machine.
    h200_seconds_per_trajectory: on an H200, from the benchmark's table.
    """

    sigma_w: float
    J_noiseless: float
    bias: Measured
    spread: float
    families: list[Family]
    signal: Measured
    tradeoff: Tradeoff
    best: Optimum
    at_own: Optimum
    seconds_per_trajectory: float
    h200_seconds_per_trajectory: float


class Pilots(NamedTuple):
    """Options of measuring at several amplitudes.

    trajectories: at each amplitude.
    baseline: of the pilot estimates.
    directions: number of random directions for the bias of the gradient.
    backend: of the kernels.
    done: called with the number of trajectories that were just run.
    """

    trajectories: int = 400
    baseline: Any = "time"
    directions: int = 16
    backend: str = "cpu"
    done: noise.Done = noise.ignore_progress


def advise(
    key: Array,
    task: Task,
    theta: Params,
    *,
    error: float | None = None,
    trajectories: int | None = None,
    return_bias: float = 0.02,
    sigma_w: Sequence[float] | None = None,
    pilots: Pilots | None = None,
) -> Advice:
    """Recommend σ_W and the number of trajectories for an error of the gradient or for a budget.

    Args:
        key: of all noise.
        task: the network task.
        theta: parameters.
        error: wanted `|estimate − ∇J| / |∇J|`; 0.1 if neither it nor `trajectories` is given.
        trajectories: the budget.
        return_bias: maximum share of J(0) that noise may add to the return.
        sigma_w: amplitudes to measure at; by default 1/4 to 4 times the task's.
        pilots: how they are measured.

    Returns: an `Advice`.
    """
    pilots = Pilots() if pilots is None else pilots
    own = float(task.network.sigma_r[0])
    grid = np.array(sorted(sigma_w if sigma_w else [own * f for f in FACTORS]))
    if len(grid) < 2 or grid[0] <= 0:
        raise ValueError(
            f"noise is advised from two amplitudes at least, all positive; got {grid.tolist()}."
        )
    if error is None and trajectories is None:
        error = 0.1
    keys = jax.random.split(key, len(grid) + 2)
    means, variances, seconds = _measure_gradients(keys[2:], task, theta, grid, pilots)
    returns = noise.measure_returns(
        keys[0],
        task,
        theta,
        grid.tolist(),
        count=pilots.trajectories,
        backend=pilots.backend,
        batches=10,
        done=pilots.done,
    )
    small = grid <= max(own, grid[0])
    c, c_error = jackknife(lambda b: np.mean(b / grid[small] ** 2), returns.bias[small])
    at_own = int(np.argmin(np.abs(grid - own)))
    families = []
    for k, (name, v) in enumerate(variances.items()):
        k_slopes = jax.random.fold_in(keys[1], k)
        by_slopes, slope = _measure_slopes(k_slopes, task, theta, name, float(grid[-1]), pilots)
        by_pilots = squared_norm(means[name], v / pilots.trajectories)
        norm2 = min(by_slopes, by_pilots, key=lambda m: m.error)
        families.append(Family(name, v.shape[1], norm2, fit_variance(grid, v.sum(axis=1)), slope))
    ceiling = float(np.sqrt(return_bias * abs(returns.noiseless) / max(abs(float(c)), 1e-300)))
    resolved, tradeoff = weigh_families(families, own, ceiling, grid)
    best = find_optimum(tradeoff, error=error, trajectories=trajectories)
    needed = float(trajectories or 0)
    if error is not None:
        needed = float(tradeoff.trajectories(own, error))
    return Advice(
        own,
        returns.noiseless,
        Measured(float(c), float(c_error)),
        float(np.sqrt(returns.square[at_own].mean())),
        families,
        resolved,
        tradeoff,
        best,
        Optimum(own, needed, float(tradeoff.error(own, needed)), "own"),
        seconds,
        _estimate_h200_seconds(task),
    )


def _estimate_h200_seconds(task: Task) -> float:
    """Seconds per trajectory on an H200."""
    modulated = bool(task.modulation and task.modulation.sigma_kappa)
    return H200[modulated] * (len(task.t) - 1) * task.simulated.sites


def weigh_families(
    families: list[Family], sigma: float, ceiling: float, grid: np.ndarray
) -> tuple[Measured, Tradeoff]:
    """The signal and the criterion, with every family in units of its noise at σ."""
    variances = [float(f.variance(sigma)) for f in families]
    resolved = sum_signal([f.norm2 for f in families], variances)
    if not resolved.value > 2 * resolved.error:
        raise ValueError(
            f"the gradient does not stand out: Σ|∇J|²/V = {resolved}. Take more trajectories "
            "(--set pilot=), or a point with a steeper return."
        )
    w = np.array([1 / v for v in variances]) / resolved.value
    law = VarianceLaw(*(w @ np.array([f.variance for f in families])).tolist())
    bias = float(w @ np.array([f.bias**2 for f in families]))
    return resolved, Tradeoff(law, bias, ceiling, float(grid[0]), float(grid[-1]))


def _measure_gradients(
    keys: Array,
    task: Task,
    theta: Params,
    grid: np.ndarray,
    pilots: Pilots,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], float]:
    """Estimates and single-trajectory variances, {family: (S, P)}, and seconds per trajectory.

    The seconds are those of the fastest amplitude.
    """
    estimates = []
    seconds = []
    pilot = pilots.trajectories
    for key, sigma in zip(keys, grid, strict=True):
        estimator: Any = with_noise(task, sigma_w=float(sigma)).estimator(
            pilots.backend, baseline=pilots.baseline
        )
        start = time.perf_counter()
        estimates.append(estimator(key, theta, pilot))
        jax.block_until_ready(estimates[-1].gradient)
        seconds.append((time.perf_counter() - start) / (pilot + estimator.pilot))
        pilots.done(pilot)

    def rows(of):
        return {n: np.array([np.asarray(of(e)[n], float) for e in estimates]) for n in theta}

    errors = rows(lambda e: e.stderr)
    return rows(lambda e: e.gradient), {n: pilot * v**2 for n, v in errors.items()}, min(seconds)


def _measure_slopes(
    key: Array,
    task: Task,
    theta: Params,
    name: str,
    sigma: float,
    pilots: Pilots,
    count: int = 16,
) -> tuple[Measured, float]:
    """∇J(0)|² and |∇c| of one family from slopes along K random unit vectors u: E(u·g)² = |g|²/P.

    Slopes are common-noise differences, with noise and without, of `count` trajectories. A square
    (u·g)² spreads by √2 of its mean, so |∇J|² is known to √(2/K); what the finite ensemble adds to
    a square is subtracted from its mean.
    """
    size = np.shape(theta[name])[0]
    k_noise, k_u = jax.random.split(key)
    u = np.asarray(jax.random.normal(k_u, (pilots.directions, size)), float)
    noisy_task = with_noise(task, sigma_w=sigma)
    noiseless = []
    bias = []
    for unit in u / np.linalg.norm(u, axis=1, keepdims=True):
        quiet, noisy = (
            noise.difference_returns(
                k_noise,
                noisy_task,
                theta,
                {name: unit},
                count=count,
                backend=pilots.backend,
                noise=on,
            )
            for on in (False, True)
        )
        noiseless.append(quiet)
        bias.append((noisy - quiet) / sigma**2)

    def squares(each: list[np.ndarray]) -> tuple[float, float]:
        raw = np.array([e.mean() ** 2 for e in each])
        own = np.array([e.var(ddof=1) / len(e) for e in each])
        return float(size * np.mean(raw - own)), float(size * np.mean(raw) * np.sqrt(2 / len(raw)))

    return Measured(*squares(noiseless)), float(np.sqrt(max(0.0, squares(bias)[0])))
