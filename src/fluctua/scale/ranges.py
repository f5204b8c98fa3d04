"""Estimators that can be computed range by range, and where an ensemble may be cut.

Trajectory j is a function of (key, j) and θ alone, so trajectories first … first + count − 1 can be
computed anywhere, and again. An ensemble is cut where trajectories are not compared with each
other: anywhere, between antithetic pairs, between the batches of a `Twin`, between the groups of a
binned baseline. A baseline that compares all of them cannot be cut, and is refused.
"""

from __future__ import annotations

import dataclasses
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
from fluctua.tcmt.kernel_choice import UNGROUPED

MIN_SHARD = LANES
"""Minimum number of trajectories per shard, if there are so many: a vector of the CPU kernels."""


class Shared(NamedTuple):
    """Common data of all shards of an ensemble; a worker is another process and has nothing else.

    key: of the noise.
    theta: parameters.
    table: λ̄ (T+1,) where it is known.
    calls: of `planned_calls`.
    """

    key: Array
    theta: Params
    table: np.ndarray | None
    calls: int


class _Prepared(NamedTuple):
    """An ensemble of the kernels as its shards use it.

    shared: what it was made from.
    theta: checked parameters.
    call: for the kernels.
    """

    shared: Shared
    theta: Params
    call: fused.PreparedCall


@dataclasses.dataclass(eq=False)
class Ranged:
    """An estimator as a worker holds it, for trajectories first … first + count − 1.

    estimator: made by `ppgt` or a task.
    carries: whether the mean return-to-go, T+1 numbers, is returned for the next estimate.
    """

    estimator: PPGT | fused.Fused
    carries: bool = False
    _last: _Prepared | None = dataclasses.field(default=None, init=False, repr=False)

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
        """Whether trajectories are acquired, so that none can be repeated."""
        return isinstance(self.estimator, PPGT) and not isinstance(
            self.estimator.substrate, Simulator
        )

    def edges(self, count: int, shards: int) -> list[int]:
        """Edges of at most `shards` shards: a function of these two numbers alone."""
        e = self.estimator
        if isinstance(e, PPGT):
            if e.method.twin is None:
                return cut_evenly(count, shards)
            return cut_groups(count, shards, e.method.twin.batch)
        if isinstance(e.baseline, Binned):
            return cut_groups(count, shards, e.baseline.group)
        return cut_evenly(count, shards, 2 if e.options.antithetic else 1)

    def table(self, shared: Shared) -> np.ndarray | None:
        """λ̄ (T+1,) of all shards, from the pilot of a time-only baseline; None without one."""
        table = self.estimator.pilot_table(shared.key, shared.theta)
        return None if table is None else np.asarray(table)

    def part(self, shared: Shared, first: int, count: int) -> Part:
        """The part of these trajectories."""
        e = self.estimator
        key, theta, table, calls = shared
        if isinstance(e, PPGT):
            used = None if e.method.twin else table
            with plan_calls(calls):
                return sum_samples(e.samples(key, theta, count, first=first, table=used))
        prepared = self._prepare(e, shared)
        theta = prepared.theta
        result = e.run(
            key,
            theta,
            count,
            table,
            first=first,
            prepared=prepared.call,
            samples=conversion.needs_chain_rule(e.task, theta),
        )
        if result.samples is not None:
            part = sum_samples(conversion.collect_samples(e.task, theta, result))
        else:
            part = sum_result(theta, result, e.options.antithetic)
        return part._replace(table=fused.next_table(result)) if self.carries else part

    def split(self, shared: Shared, first: int, count: int) -> TwinSamples:
        """Both parts of the twin correction, trajectory by trajectory."""
        e = self.estimator
        key, theta, table, calls = shared
        if isinstance(e, PPGT):
            with plan_calls(calls):
                return e.split(key, theta, count, table, first=first)
        prepared = self._prepare(e, shared)
        return e.split(key, prepared.theta, count, table, first=first, prepared=prepared.call)

    def _prepare(self, estimator: fused.Fused, shared: Shared) -> _Prepared:
        """Convert key and parameters once per ensemble: all its shards have the same `shared`."""
        if self._last is None or self._last.shared is not shared:
            theta = check.parameters(shared.theta)
            self._last = _Prepared(shared, theta, estimator.prepare(shared.key, theta))
        return self._last


def sum_result(theta: Params, result: KernelResult | TwinResult, antithetic: bool = False) -> Part:
    """The part of trajectories that a fused kernel has summed."""
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
    """An estimator whose ranges can be computed apart; others are refused."""
    if isinstance(estimator, fused.Carried):
        return dataclasses.replace(make_ranged(estimator.fused), carries=True)
    if isinstance(estimator, PPGT):
        method = estimator.method
        if method.means is not None:
            raise ValueError(
                "a function of means weighs every trajectory with the mean of all others, so they "
                "cannot be computed apart: estimate it in one process."
            )
        plans = [method.baseline]
        if has_random_start(method.model):
            plans.append(method.initial_baseline)
        compared = [plan.name for plan in plans if plan.needs_returns]
        if compared and method.twin is None:
            _refuse_baseline(compared[0])
        return Ranged(estimator)
    if isinstance(estimator, fused.Fused):
        if isinstance(estimator.baseline, Binned) and estimator.baseline.group >= UNGROUPED:
            _refuse_baseline("optimal" if estimator.baseline.bins == 1 else "binned")
        return Ranged(estimator)
    raise TypeError(
        "`distributed` takes estimators made by `ppgt` or by a task (task.estimator(...)), also "
        f"within `ShrunkCorrection`; got {type(estimator).__name__}."
    )


def _refuse_baseline(name: str) -> None:
    subject = f"the baseline {name!r}" if name != "own" else "a baseline of one's own"
    raise ValueError(
        f"{subject} compares all trajectories of an ensemble with each other, so they cannot be "
        'computed apart. Use baseline="time" or "twin", or on the kernels binned(group=4096), '
        "whose groups are."
    )


def cut_evenly(count: int, shards: int, unit: int = 1) -> list[int]:
    """Edges of shards of equal size up to one unit."""
    units = count // unit
    shard_count = max(1, min(shards, count // MIN_SHARD, units))
    return [unit * (units * i // shard_count) for i in range(shard_count)] + [count]


def cut_groups(count: int, shards: int, group: int) -> list[int]:
    """Edges of shards made of whole groups of at most `group` trajectories."""
    groups = -(-count // group)
    shard_count = max(1, min(shards, groups))
    return [count * (groups * i // shard_count) // groups for i in range(shard_count)] + [count]
