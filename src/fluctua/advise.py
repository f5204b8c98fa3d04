"""How much noise, how many trajectories, how long: measured with small ensembles, before a long training is paid for.

`advise` is for a network that can be simulated, `advise_recording` for trajectories that are there. The criterion is in
`fluctua.tradeoff`, its derivation in docs/noise.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua import noise
from fluctua.baseline import Baseline
from fluctua.gradient import Samples, ppgt
from fluctua.scaling import Measured, jackknife
from fluctua.tcmt.tasks import Task, with_noise
from fluctua.tradeoff import Optimum, Tradeoff, VarianceLaw, fit_variance, optimum, squared_norm
from fluctua.types import Array, Objective, Params, Process, Trajectories

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Amplitudes that are measured, relative to the task's own."""

H200 = {False: 1.07e-9 / 143, True: 1.57e-9 / 143}
"""Seconds a trajectory, step and resonator, without and with modulation (results/bench/cuda.json, time-only)."""

SPLIT = 10
"""Parts of a recording whose estimates are compared."""


class Family(NamedTuple):
    """One family of parameters. norm2: |∇J|². variance: V(σ) summed over it. bias: |∇c|, with J(σ) = J(0) + cσ²."""

    name: str
    size: int
    norm2: Measured
    variance: VarianceLaw
    bias: float

    @property
    def resolved(self) -> bool:
        """Whether the gradient stands out from the noise of the pilot."""
        return self.norm2.value > 2 * self.norm2.error


class Advice(NamedTuple):
    """sigma_w, J, J_silent: of the task, and without noise. bias: c in J(σ) = J(0) + cσ². spread: std of the return.

    best: the recommended noise. at_own: the same at the task's own. seconds_per_trajectory: here, and on an H200 by the
    benchmark's table. left_out: families whose gradient the pilot did not resolve, which do not enter.
    """

    sigma_w: float
    J_silent: float
    bias: Measured
    spread: float
    families: list[Family]
    left_out: list[str]
    tradeoff: Tradeoff
    best: Optimum
    at_own: Optimum
    seconds_per_trajectory: float
    h200_seconds_per_trajectory: float


def advise(
    key: Array,
    task: Task,
    theta: Params,
    *,
    error: float | None = None,
    trajectories: int | None = None,
    return_bias: float = 0.02,
    sigma_w: Sequence[float] | None = None,
    pilot: int = 400,
    baseline: Any = "time",
    directions: int = 4,
    backend: str = "cpu",
    done: noise.Done = noise.ignore,
) -> Advice:
    """Recommend σ_W and the number of trajectories for a relative error of the gradient, or for a budget.

    error: wanted ``|estimate − ∇J| / |∇J|``, 0.1 if neither it nor `trajectories`, the budget, is given.
    return_bias: most of J(0) that noise may add to the return. sigma_w: amplitudes to measure at; 1/4 to 4 times the
    task's if not given. pilot: trajectories at each. directions: random ones along which the bias of the gradient is
    differenced.

    >>> advise(jax.random.key(0), transmission(paper()), theta, error=0.3).best
    """
    own = float(task.network.sigma_r[0])
    grid = np.array(sorted(sigma_w if sigma_w else [own * f for f in FACTORS]))
    if len(grid) < 2 or grid[0] <= 0:
        raise ValueError(f"noise is advised from two amplitudes at least, all positive; got {grid.tolist()}.")
    if error is None and trajectories is None:
        error = 0.1
    keys = jax.random.split(key, len(grid) + 2)
    means, variances, seconds = _gradients(keys[2:], task, theta, grid, pilot, baseline, backend, done)
    returns = noise.returns(keys[0], task, theta, grid.tolist(), count=pilot, backend=backend, batches=10, done=done)
    small = grid <= max(own, grid[0])
    c, c_error = jackknife(lambda b: np.mean(b / grid[small] ** 2), returns.bias[small])
    at_own = int(np.argmin(np.abs(grid - own)))
    families = [
        Family(
            name, v.shape[1], squared_norm(means[name], v / pilot), fit_variance(grid, v.sum(axis=1)),
            _bias_slope(jax.random.fold_in(keys[1], k), task, theta, name, float(grid[-1]), directions, backend),
        )
        for k, (name, v) in enumerate(variances.items())
    ]  # fmt: skip
    tradeoff = weigh(families, float(np.sqrt(return_bias * abs(returns.silent) / max(abs(float(c)), 1e-300))), grid)
    best = optimum(tradeoff, error=error, trajectories=trajectories)
    needed = float(tradeoff.trajectories(own, error)) if error is not None else float(trajectories or 0)
    return Advice(
        own,
        returns.silent,
        Measured(float(c), float(c_error)),
        float(np.sqrt(returns.square[at_own].mean())),
        families,
        [f.name for f in families if not f.resolved],
        tradeoff,
        best,
        Optimum(own, needed, float(tradeoff.error(own, needed)), "own"),
        seconds,
        H200[bool(task.modulation and task.modulation.sigma_kappa)] * (len(task.t) - 1) * task.simulated.sites,
    )


def weigh(families: list[Family], ceiling: float, grid: np.ndarray) -> Tradeoff:
    """The criterion of the families whose gradient is resolved, each relative to its own."""
    seen = [f for f in families if f.resolved]
    if not seen:
        raise ValueError(
            "the gradient of no family stands out from the noise of the pilot ("
            + ", ".join(f"{f.name}: |∇J|² = {f.norm2}" for f in families)
            + "). Take more trajectories (--pilot), or a point with a steeper return."
        )
    laws = np.array([f.variance for f in seen]) / np.array([[f.norm2.value] for f in seen])
    bias = float(np.mean([f.bias**2 / f.norm2.value for f in seen]))
    return Tradeoff(VarianceLaw(*laws.mean(axis=0).tolist()), bias, ceiling, float(grid[0]), float(grid[-1]))


def _gradients(
    keys: Array, task: Task, theta: Params, grid: np.ndarray, pilot: int, baseline: Any, backend: str, done: noise.Done
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], float]:
    """Estimates and variances of one trajectory, {family: (S, P)}, at every σ; seconds a trajectory, the fastest."""
    found, seconds = [], []
    for key, sigma in zip(keys, grid, strict=True):
        estimator: Any = with_noise(task, sigma_w=float(sigma)).estimator(backend, baseline=baseline)
        begun = time.perf_counter()
        found.append(estimator(key, theta, pilot))
        jax.block_until_ready(found[-1].gradient)
        seconds.append((time.perf_counter() - begun) / (pilot + estimator.pilot))
        done(pilot)
    rows = lambda of: {n: np.array([np.asarray(of(e)[n], float) for e in found]) for n in theta}
    errors = rows(lambda e: e.stderr)
    return rows(lambda e: e.gradient), {n: pilot * v**2 for n, v in errors.items()}, min(seconds)


def _bias_slope(
    key: Array, task: Task, theta: Params, name: str, sigma: float, directions: int, backend: str, count: int = 32
) -> float:
    """|∇c| of one family: differences with and without noise along random directions u, E(u·∇c)² = |∇c|²/P."""
    size = np.shape(theta[name])[0]
    k_noise, k_u = jax.random.split(key)
    u = np.asarray(jax.random.normal(k_u, (directions, size)), float)
    u = u / np.linalg.norm(u, axis=1, keepdims=True)
    loud = with_noise(task, sigma_w=sigma)
    squares = []
    for one in u:
        slope = lambda noisy, one=one: noise.difference(
            k_noise, loud, theta, {name: one}, count=count, backend=backend, noise=noisy
        )
        each = (slope(True) - slope(False)) / sigma**2
        squares.append(each.mean() ** 2 - each.var(ddof=1) / len(each))  # the square of a mean has its error in it
    return float(np.sqrt(max(0.0, size * np.mean(squares))))


# ------------------------------------------------------------------------------------------ recordings


class RecordingAdvice(NamedTuple):
    """What a recording can tell at its own noise. trajectories: needed in all for `error`. families: see `Family`.

    reached: the relative error of what was recorded. norm2, variance: {name: |∇J|², V of one trajectory}.
    """

    recorded: int
    error: float
    trajectories: float
    reached: float
    norm2: dict[str, Measured]
    variance: dict[str, float]
    left_out: list[str]


def advise_recording(
    process: Process,
    objective: Objective,
    theta: Params,
    trajectories: Trajectories | Iterable[Trajectories],
    *,
    error: float = 0.1,
    baseline: Baseline | None = None,
) -> RecordingAdvice:
    """How many trajectories a relative error of the gradient takes, from some that were recorded.

    The noise of a recording is what it is: σ is not advised. Leaves of θ are its families.

    >>> advise_recording(process, objective, theta, Trajectories(t, x), error=0.2).trajectories
    """
    estimator = ppgt(process, objective, _nothing, baseline=baseline)
    return advise_samples(estimator.samples_of(theta, trajectories), error=error)


def advise_samples(samples: Samples, *, error: float = 0.1) -> RecordingAdvice:
    """The same from gradients of single trajectories that are at hand."""
    count = len(samples.returns)
    size = count // SPLIT
    if size < 2:
        raise ValueError(f"a recording is compared in {SPLIT} parts of two trajectories at least; got {count}.")
    norm2, variance = {}, {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(samples.gradient):
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "theta"
        each = np.asarray(leaf, float).reshape(count, -1)
        v = each.var(axis=0, ddof=1)
        parts = each[: size * SPLIT].reshape(SPLIT, size, -1).mean(axis=1)
        norm2[name], variance[name] = squared_norm(parts, np.tile(v / size, (SPLIT, 1))), float(v.sum())
    seen = [name for name, m in norm2.items() if m.value > 2 * m.error]
    if not seen:
        raise ValueError(
            f"no gradient stands out from the noise of {count:,} trajectories: record more, or use a better baseline."
        )
    ratio = float(np.mean([variance[name] / norm2[name].value for name in seen]))
    left = [name for name in norm2 if name not in seen]
    return RecordingAdvice(count, error, ratio / error**2, float(np.sqrt(ratio / count)), norm2, variance, left)


def _nothing(key: Array, theta: Params, count: int) -> Trajectories:
    return Trajectories(jnp.zeros(0), jnp.zeros(0))
