"""How the estimate of one component converges (Fig. 2a, b): its running mean against a finite difference."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from fluctua.core.types import Array, Params
from fluctua.core.wiener import silent
from fluctua.core.yardsticks import pathwise
from fluctua.runs.noise import Done, difference, ignore
from fluctua.tcmt.kernel import run as kernel
from fluctua.tcmt.tasks import Task


class Running(NamedTuple):
    """Means of G and of G² over blocks of as many trajectories, in the order in which they were run. (K,)"""

    block: int
    mean: np.ndarray
    square: np.ndarray

    @property
    def trajectories(self) -> np.ndarray:
        """How many are in the running mean after each block."""
        return self.block * np.arange(1, len(self.mean) + 1)

    @property
    def estimate(self) -> np.ndarray:
        """The running mean."""
        return np.cumsum(self.mean) / np.arange(1, len(self.mean) + 1)

    @property
    def stderr(self) -> np.ndarray:
        """Its standard error."""
        second = np.cumsum(self.square) / np.arange(1, len(self.mean) + 1)
        return np.sqrt((second - self.estimate**2) / (self.trajectories - 1))


def clearest_site(
    key: Array, task: Task, theta: Params, *, count: int = 1000, modulations: int = 16, backend: str = "cpu"
) -> int:
    """The resonator whose ∂J/∂ω should be resolved best: largest |slope| / stderr, leads left out.

    The paper chose its sites "to favor the resolvability of systematic bias". The slope is that of the return without
    Wiener noise, by one reverse sweep in JAX; the error is that of a pilot of `count` trajectories. Choosing by the
    pilot's own estimate would choose its luckiest noise.
    """
    k_slope, k_pilot = jax.random.split(key)
    modulated = task.modulation is not None and task.modulation.sigma_kappa > 0
    slopes = pathwise(task.objective, task.simulator(silent))(k_slope, theta, modulations if modulated else 1)
    pilot = task.estimator(backend)(k_pilot, theta, count)
    z = np.abs(np.asarray(slopes.gradient["omega"])) / np.asarray(pilot.stderr["omega"])
    if len(z) > len(set(task.network.lead_sites.tolist())):
        z[task.network.lead_sites] = 0
    return int(np.argmax(z))


def running(
    key: Array,
    task: Task,
    theta: Params,
    site: int,
    count: int,
    *,
    group: int = 2000,
    block: int = 100,
    every: int = 100,
    backend: str = "cpu",
    done: Done = ignore,
) -> Running:
    """∂J/∂ω of one site from `count` trajectories with the paper's baseline, a group of them at a time.

    group: trajectories that share a baseline; a multiple of `block`. every: steps between two sortings into bins.
    Only the one column is kept, so the memory is that of one group.
    """
    if group % block or count % group:
        raise ValueError(f"`count` must be whole groups and a group whole blocks; got {count}, {group}, {block}.")
    baseline: Any = kernel.Binned(every=every, group=group)
    estimator: Any = task.estimator(backend, baseline=baseline)
    means, squares = [], []
    for first in range(0, count, group):
        samples = estimator.run(key, theta, group, samples=True, first_trajectory=first).samples
        column = np.asarray(samples.omega[:, site], float).reshape(-1, block)
        means.append(column.mean(axis=1))
        squares.append((column**2).mean(axis=1))
        done(group)
    return Running(block, np.concatenate(means), np.concatenate(squares))


def finite_difference(
    key: Array, task: Task, theta: Params, site: int, *, count: int = 10_000, step: float = 1e-3, backend: str = "cpu"
) -> tuple[float, float]:
    """∂J/∂ω of one site by common-noise differences, and its standard error. Truncation: J'''h²/6, 10⁻⁶ J'''/6."""
    unit = np.zeros(task.network.sites)
    unit[site] = 1.0
    each = difference(key, task, theta, {"omega": unit}, step=step, count=count, backend=backend)
    return float(each.mean()), float(each.std(ddof=1) / np.sqrt(len(each)))
