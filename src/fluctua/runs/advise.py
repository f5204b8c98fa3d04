"""How much noise, how many trajectories, how long: measured with small ensembles, before a long
training is paid for.

For a network that can be simulated; a recording is asked by `fluctua.insitu.advise_file`. The
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
    fit_variance,
    optimum,
    signal,
    squared_norm,
)
from fluctua.tcmt.tasks import Task, with_noise

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Amplitudes that are measured, relative to the task's own."""

H200 = {False: 1.07e-9 / 143, True: 1.57e-9 / 143}
"""Seconds a trajectory, step and resonator, without and with modulation (results/bench/cuda.json,
time-only).
"""


class Family(NamedTuple):
    """One family of parameters. norm2: |∇J|². variance: V(σ) summed over it. bias: |∇c|, with
    J(σ) = J(0) + cσ².
    """

    name: str
    size: int
    norm2: Measured
    variance: VarianceLaw
    bias: float


class Advice(NamedTuple):
    """sigma_w: of the task. J_silent: without noise. bias: c in J(σ) = J(0) + cσ². spread: std of a
    return at sigma_w.

    signal: ``Σ |∇J|²/V`` at sigma_w. best: the recommended noise. at_own: the same at the task's
    own.
    seconds_per_trajectory: here, and on an H200 by the benchmark's table.
    """

    sigma_w: float
    J_silent: float
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
    """How amplitudes are measured.

    trajectories: at each amplitude. directions: random ones along which the bias of the gradient is
    differenced. done: called with the number of trajectories that were just run.
    """

    trajectories: int = 400
    baseline: Any = "time"
    directions: int = 16
    backend: str = "cpu"
    done: noise.Done = noise.ignore


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
    """Recommend σ_W and the number of trajectories for a relative error of the gradient, or for a
    budget.

    error: wanted ``|estimate − ∇J| / |∇J|``, 0.1 if neither it nor `trajectories`, the budget, is
    given.
    return_bias: most of J(0) that noise may add to the return. sigma_w: amplitudes to measure at;
    1/4 to 4 times the task's if not given. pilots: how they are measured.
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
    means, variances, seconds = _gradients(keys[2:], task, theta, grid, pilots)
    returns = noise.returns(
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
        by_slopes, slope = _slopes(k_slopes, task, theta, name, float(grid[-1]), pilots)
        by_pilots = squared_norm(means[name], v / pilots.trajectories)
        norm2 = min(by_slopes, by_pilots, key=lambda m: m.error)
        families.append(Family(name, v.shape[1], norm2, fit_variance(grid, v.sum(axis=1)), slope))
    ceiling = float(np.sqrt(return_bias * abs(returns.silent) / max(abs(float(c)), 1e-300)))
    lifted, tradeoff = weigh(families, own, ceiling, grid)
    best = optimum(tradeoff, error=error, trajectories=trajectories)
    needed = (
        float(tradeoff.trajectories(own, error)) if error is not None else float(trajectories or 0)
    )
    return Advice(
        own,
        returns.silent,
        Measured(float(c), float(c_error)),
        float(np.sqrt(returns.square[at_own].mean())),
        families,
        lifted,
        tradeoff,
        best,
        Optimum(own, needed, float(tradeoff.error(own, needed)), "own"),
        seconds,
        H200[bool(task.modulation and task.modulation.sigma_kappa)]
        * (len(task.t) - 1)
        * task.simulated.sites,
    )


def weigh(
    families: list[Family], sigma: float, ceiling: float, grid: np.ndarray
) -> tuple[Measured, Tradeoff]:
    """The signal, and the criterion: every family in units of its noise at σ."""
    noise_of = [float(f.variance(sigma)) for f in families]
    lifted = signal([f.norm2 for f in families], noise_of)
    if not lifted.value > 2 * lifted.error:
        raise ValueError(
            f"the gradient does not stand out: Σ|∇J|²/V = {lifted}. Take more trajectories "
            "(--pilot), or a point with a steeper return."
        )
    w = np.array([1 / v for v in noise_of]) / lifted.value
    law = VarianceLaw(*(w @ np.array([f.variance for f in families])).tolist())
    bias = float(w @ np.array([f.bias**2 for f in families]))
    return lifted, Tradeoff(law, bias, ceiling, float(grid[0]), float(grid[-1]))


def _gradients(
    keys: Array,
    task: Task,
    theta: Params,
    grid: np.ndarray,
    pilots: Pilots,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], float]:
    """Estimates and variances of one trajectory, {family: (S, P)}, at every σ; seconds a
    trajectory, the fastest.
    """
    estimates = []
    seconds = []
    pilot = pilots.trajectories
    for key, sigma in zip(keys, grid, strict=True):
        estimator: Any = with_noise(task, sigma_w=float(sigma)).estimator(
            pilots.backend, baseline=pilots.baseline
        )
        begun = time.perf_counter()
        estimates.append(estimator(key, theta, pilot))
        jax.block_until_ready(estimates[-1].gradient)
        seconds.append((time.perf_counter() - begun) / (pilot + estimator.pilot))
        pilots.done(pilot)

    def rows(of):
        return {n: np.array([np.asarray(of(e)[n], float) for e in estimates]) for n in theta}

    errors = rows(lambda e: e.stderr)
    return rows(lambda e: e.gradient), {n: pilot * v**2 for n, v in errors.items()}, min(seconds)


def _slopes(
    key: Array,
    task: Task,
    theta: Params,
    name: str,
    sigma: float,
    pilots: Pilots,
    count: int = 16,
) -> tuple[Measured, float]:
    """|∇J(0)|² and |∇c| of one family from slopes along K random unit vectors u: E(u·g)² = |g|²/P.

    Slopes are common-noise differences, with noise and without, of `count` trajectories. A square
    (u·g)² spreads by √2 of its mean, so |∇J|² is known to √(2/K); what the finite ensemble adds to
    a square is taken off its mean.
    """
    size = np.shape(theta[name])[0]
    k_noise, k_u = jax.random.split(key)
    u = np.asarray(jax.random.normal(k_u, (pilots.directions, size)), float)
    loud = with_noise(task, sigma_w=sigma)
    silent = []
    bias = []
    for one in u / np.linalg.norm(u, axis=1, keepdims=True):
        quiet, noisy = (
            noise.difference(
                k_noise, loud, theta, {name: one}, count=count, backend=pilots.backend, noise=on
            )
            for on in (False, True)
        )
        silent.append(quiet)
        bias.append((noisy - quiet) / sigma**2)

    def squares(each: list[np.ndarray]) -> tuple[float, float]:
        raw = np.array([e.mean() ** 2 for e in each])
        own = np.array([e.var(ddof=1) / len(e) for e in each])
        return float(size * np.mean(raw - own)), float(size * np.mean(raw) * np.sqrt(2 / len(raw)))

    return Measured(*squares(silent)), float(np.sqrt(max(0.0, squares(bias)[0])))
