"""Estimators that can be computed range by range: where an ensemble may be cut, and what a worker
does with a range.

Trajectory j is a function of (key, j) and θ alone, so trajectories first … first + count − 1 can be
computed anywhere, and again. An ensemble is cut where trajectories are not compared with each
other: anywhere, between antithetic pairs, between the batches of a `Twin`, between the groups of a
binned baseline. A baseline that compares all of them cannot be cut, and is refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from fluctua.core import check
from fluctua.core.arrays import Array, Params
from fluctua.core.estimator import PPGT
from fluctua.core.model import has_random_start
from fluctua.core.simulate import Simulator, plan_calls
from fluctua.core.twin.correction import TwinSamples
from fluctua.scale.parts import Part, sum_samples
from fluctua.tcmt import conversion, fused
from fluctua.tcmt.kernel.options import LANES, Binned
from fluctua.tcmt.kernel.run import Families, KernelResult
from fluctua.tcmt.kernel.twin import TwinResult
from fluctua.tcmt.kernel_choice import EVERYONE

LEAST = LANES
"""Trajectories that a shard has at least, if there are so many: a vector of the CPU kernels."""


class Shared(NamedTuple):
    """What all shards of an ensemble have in common. table: λ̄ (T+1,) where it is known. calls: of
    `planned_calls`.

    A worker is another process: what it does not get from here, it does not know.
    """

    key: Array
    theta: Params
    table: np.ndarray | None
    calls: int


class Ranged(NamedTuple):
    """An estimator as a worker holds it. All that it computes is of trajectories first … first +
    count − 1.

    carries: whether the mean return-to-go is sent back for the next estimate: T+1 numbers, where θ
    has few.
    """

    estimator: PPGT | fused.Fused
    carries: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether a worker needs a GPU."""
        e = self.estimator
        if isinstance(e, fused.Fused):
            return e.options.backend == "cuda"
        return (
            isinstance(e.substrate, Simulator)
            and getattr(e.substrate.backend, "choice", "") == "cuda"
        )

    @property
    def physical(self) -> bool:
        """Whether trajectories are acquired, so that none can be had again."""
        return isinstance(self.estimator, PPGT) and not isinstance(
            self.estimator.substrate, Simulator
        )

    def edges(self, count: int, shards: int) -> list[int]:
        """Where an ensemble is cut into at most `shards` shards: a function of these two
        numbers alone.
        """
        e = self.estimator
        if isinstance(e, PPGT):
            return (
                cut_evenly(count, shards)
                if e.method.twin is None
                else cut_groups(count, shards, e.method.twin.batch)
            )
        if isinstance(e.baseline, Binned):
            return cut_groups(count, shards, e.baseline.group)
        return cut_evenly(count, shards, 2 if e.options.antithetic else 1)

    def table(self, shared: Shared) -> np.ndarray | None:
        """λ̄ (T+1,) that all shards share, from the pilot of a time-only baseline; None
        without one.
        """
        table = self.estimator.pilot_table(shared.key, shared.theta)
        return None if table is None else np.asarray(table)

    def part(self, shared: Shared, first: int, count: int) -> Part:
        """What these trajectories add to the estimate."""
        e = self.estimator
        (key, theta, table, calls) = shared
        if isinstance(e, PPGT):
            with plan_calls(calls):
                return sum_samples(
                    e.samples(
                        key, theta, count, first=first, table=None if e.method.twin else table
                    )
                )
        theta = check.parameters(theta)
        result = e.run(
            key, theta, count, table, first=first, samples=conversion.chain_rule(e.task, theta)
        )
        if result.samples is not None:
            part = sum_samples(conversion.collect_samples(e.task, theta, result))
        else:
            part = sum_result(theta, result, e.options.antithetic)
        return part._replace(table=fused.next_table(result)) if self.carries else part

    def split(self, shared: Shared, first: int, count: int) -> TwinSamples:
        """Both parts of the twin correction, trajectory by trajectory."""
        key, theta, table, calls = shared
        with plan_calls(calls):
            return self.estimator.split(key, theta, count, table, first=first)


def sum_result(theta: Params, result: KernelResult | TwinResult, antithetic: bool = False) -> Part:
    """The part of trajectories that a fused kernel has summed up already."""
    n = len(result.returns)
    units = n // 2 if antithetic else n

    def flat(families: Families | None, of_return: float) -> np.ndarray:
        leaves = jax.tree.leaves(
            {name: np.asarray(getattr(families, name), np.float64) for name in theta}
        )
        return np.append(np.concatenate([leaf.ravel() for leaf in leaves]), of_return)

    second = flat(result.second_moment, np.mean(np.square(result.returns)))
    error = flat(result.stderr, result.value_stderr) if units > 1 else np.zeros_like(second)
    spread = error**2 * (units * (units - 1))
    return Part(n, units, flat(result.gradient, result.value), n * second, spread)


def make_ranged(estimator: Any) -> Ranged:
    """An estimator whose ranges can be computed apart, or an error that says what can be."""
    if isinstance(estimator, fused.Carried):
        return make_ranged(estimator.fused)._replace(carries=True)
    if isinstance(estimator, PPGT):
        method = estimator.method
        if method.means is not None:
            raise ValueError(
                "a function of means weighs every trajectory with the mean of all others, so they "
                "cannot be computed apart: estimate it in one process."
            )
        plans = [
            method.baseline,
            *([method.initial_baseline] if has_random_start(method.model) else []),
        ]
        compared = (
            [plan.name for plan in plans if plan.needs_returns] if method.twin is None else []
        )
        if compared:
            _refuse(compared[0])
        return Ranged(estimator)
    if isinstance(estimator, fused.Fused):
        if isinstance(estimator.baseline, Binned) and estimator.baseline.group >= EVERYONE:
            _refuse("optimal" if estimator.baseline.bins == 1 else "binned")
        return Ranged(estimator)
    raise TypeError(
        "`distributed` takes estimators made by `ppgt` or by a task (task.estimator(...)), also "
        f"within `ShrunkCorrection`; got {type(estimator).__name__}."
    )


def _refuse(name: str) -> None:
    what = f"the baseline {name!r}" if name != "own" else "a baseline of one's own"
    raise ValueError(
        f"{what} compares all trajectories of an ensemble with each other, so they cannot be "
        'computed apart. Use baseline="time" or "twin", or on the kernels binned(group=4096), '
        "whose groups are."
    )


def cut_evenly(count: int, shards: int, unit: int = 1) -> list[int]:
    """Edges of shards of equal size up to one unit."""
    units = count // unit
    many = max(1, min(shards, count // LEAST, units))
    return [unit * (units * i // many) for i in range(many)] + [count]


def cut_groups(count: int, shards: int, group: int) -> list[int]:
    """Edges of shards that are made of whole groups of at most `group` trajectories."""
    groups = -(-count // group)
    many = max(1, min(shards, groups))
    return [count * (groups * i // many) // groups for i in range(many)] + [count]
