"""An estimator computed shard by shard, here or on a cluster, with the same result everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from types import TracebackType
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import check
from fluctua.core.arrays import Array, Params
from fluctua.core.estimate import Estimate
from fluctua.core.estimator import PPGT
from fluctua.core.protocols import EstimatorWrapper
from fluctua.core.simulate import planned_calls
from fluctua.core.twin.correction import TwinSamples
from fluctua.learn.shrunk_correction import ShrunkCorrection
from fluctua.scale import dispatch
from fluctua.scale import parts as sums
from fluctua.scale.cluster import Cluster
from fluctua.scale.ranges import Shared, make_ranged
from fluctua.tcmt import fused

SHARDS = 64


class Loss(NamedTuple):
    """A shard that was lost with its worker. Simulated ones are computed again.

    first, count: its trajectories.
    reason: of the loss.
    """

    first: int
    count: int  # type: ignore[assignment]
    reason: str


class Distributed(EstimatorWrapper):
    """The estimator made by `distributed`.

    `losses`: shards that were lost with their workers, over all calls. `event`: for the history of
        a run; empty unless the last call lost acquired trajectories, since simulated ones are
        repeated exactly.
    """

    def __init__(
        self, estimator: PPGT | fused.Fused | fused.Carried, pool: dispatch.Pool, shards: int
    ):
        self.estimator = estimator
        self.pool = pool
        self.shards = shards
        self.ranged = make_ranged(estimator)
        self.losses: list[Loss] = []
        self.event = ""
        self._lost = 0  # acquired trajectories of the last call

    def __call__(self, key: Array, theta: Params, count: int) -> Estimate:
        """Estimate ∇θJ from `count` trajectories."""
        check.key(key)
        check.count(count)
        theta = check.parameters(theta)
        carried = self.estimator if isinstance(self.estimator, fused.Carried) else None
        table = carried.table if carried else None
        if table is None and self.ranged.estimator.pilot:
            shared = self.pool.put(Shared(key, theta, None, planned_calls()))
            table = dispatch.gather_results(self.pool, [dispatch.WorkCall(0, "table", (shared,))])[
                0
            ]
        if carried:
            carried.pilot = carried.fused.pilot if carried.table is None else 0
        total = sums.sum_parts(self._gather_shards("part", key, theta, count, table))
        if carried:
            carried.table = total.table
        return sums.make_estimate(total, theta)

    def split(
        self, key: Array, theta: Params, count: int, table: Array | None = None
    ) -> TwinSamples:
        """Both parts of the twin correction, trajectory by trajectory, count·P numbers."""
        check.key(key)
        theta = check.parameters(theta)
        parts = self._gather_shards(
            "split", key, theta, count, None if table is None else np.asarray(table)
        )
        sizes = [len(part.returns) for part in parts]
        joined = jax.tree.map(
            lambda *leaves: jnp.concatenate(leaves), *(part[:3] for part in parts)
        )
        mean = sum(
            n * np.asarray(part.mean_lambda, np.float64)
            for n, part in zip(sizes, parts, strict=True)
        )
        return TwinSamples(joined[0], joined[1], joined[2], mean / sum(sizes))

    @property
    def pilot(self) -> int:
        """Additional trajectories of the last call, including acquired ones that were lost."""
        return self.estimator.pilot + self._lost

    def close(self) -> None:
        """Release the workers."""
        self.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _gather_shards(
        self, method: str, key: Array, theta: Params, count: int, table: np.ndarray | None
    ) -> list[Any]:
        """Results of all shards, in order."""
        edges = self.ranged.edges(count, self.shards)
        shared = self.pool.put(Shared(key, theta, table, planned_calls()))
        calls = [
            dispatch.WorkCall(low, method, (shared, low, high - low))
            for low, high in pairwise(edges)
        ]
        self._lost = 0
        self.event = ""
        physical = self.ranged.physical

        def replace_call(call: dispatch.WorkCall, reason: str) -> dispatch.WorkCall:
            _, first, size = call.arguments
            self.losses.append(Loss(first, size, reason))
            if not physical:
                return call
            fresh = count + self._lost
            self._lost += size
            self.event = f"lost {self._lost} acquired trajectories with their workers"
            return call._replace(arguments=(shared, fresh, size))

        # an instrument has one call in hand: of those that wait behind it nothing is acquired yet,
        # so nothing is lost
        return dispatch.gather_results(
            self.pool, calls, ahead=1 if physical else dispatch.AHEAD, replace_call=replace_call
        )


def distributed(
    estimator: Any,
    address: str | None = "auto",
    *,
    shards: int = SHARDS,
    each: Mapping[str, float] | None = None,
    workers: int | None = None,
) -> Any:
    """Compute the ensembles of an estimator in shards, on a Ray cluster or in this process.

    G = Σ_s Σ_{j∈s} G_j / n: a shard s is a range of trajectories, returns sums of the size of θ,
    and is added in the order of the ranges. Trajectory j is a function of (key, j) and θ, and the
    ranges are one of `count` and `shards`, so the estimate is the same to the bit with any number
    of workers, also if some are killed meanwhile.

    Args:
        estimator: made by `ppgt` or task.estimator(...), or a `ShrunkCorrection` of one. Its
            baseline may not compare all trajectories of an ensemble with each other ("mean",
            "optimal", "binned" without `group`).
        address: of the cluster: "auto" for a running one, "local" to start Ray on this machine,
            HOST:PORT; None computes the same shards in this process, without Ray.
        shards: maximum number of shards of an ensemble. Another number changes the rounding.
        each: resources of a worker, {"cpu": 4}, {"gpu": 1}, {"instrument": 1}; by default all cores
            of a machine, or a GPU where the estimator runs on the "cuda" backend.
        workers: maximum number; by default as many as fit.

    Returns: an estimator, for `train` and `run`. `close()` or `with` releases the workers.

    >>> here = fl.distributed(estimator, address=None, shards=4)  # no cluster: in this process
    >>> here(key, theta, 200).count
    200
    """
    if isinstance(shards, bool) or not isinstance(shards, int) or shards < 1:
        raise ValueError(f"`shards` must be a whole number, at least 1; got {shards!r}.")
    if isinstance(estimator, ShrunkCorrection):
        inner = distributed(estimator.estimator, address, shards=shards, each=each, workers=workers)
        wrapped = ShrunkCorrection(inner, estimator.forget_after, carry=estimator.carry)
        wrapped.restore(estimator.state)
        return wrapped
    ranged = make_ranged(estimator)
    if each is None and ranged.on_gpu:
        each = {"gpu": 1}
    pool: dispatch.Pool = (
        dispatch.LocalPool(ranged) if address is None else Cluster(ranged, address, each, workers)
    )
    return Distributed(estimator, pool, shards)


def close(estimator: Any) -> None:
    """Release the workers of an estimator, if it has any."""
    while not isinstance(estimator, Distributed) and hasattr(estimator, "estimator"):
        estimator = estimator.estimator
    if isinstance(estimator, Distributed):
        estimator.close()
