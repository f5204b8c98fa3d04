"""Estimators: what one must offer, and defaults for those that need little of it.

An estimator is called as (key, theta, count) -> `Estimate`. A training also uses its cost in
trajectories and the state that continues it after a restart. `PlainEstimator` has both
for an estimator without state, `EstimatorWrapper` for one that changes what another
returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fluctua.core.arrays import Array, Params
from fluctua.core.estimate import Estimate
from fluctua.core.estimation import many


class Estimates(Protocol):
    """The minimal estimator: a function (key, theta, count) -> `Estimate`."""

    def __call__(self, key: Array, theta: Params, count: int) -> Estimate: ...


class Estimator(Protocol):
    """Anything that turns θ and a number of samples into an `Estimate`.

    `fluctua.core.protocols.as_estimator` makes one of a bare function (key, theta, count) ->
    Estimate.
    """

    def __call__(self, key: Array, theta: Params, count: int) -> Estimate: ...

    def cost(self, theta: Params) -> int:
        """Trajectories per sample."""

    @property
    def pilot(self) -> int:
        """Trajectories per call in addition to those of the samples.

        Of an estimator with state, those of its last call.
        """

    @property
    def state(self) -> dict[str, np.ndarray]:
        """Everything kept between calls, as plain arrays; empty without state."""

    def restore(self, state: Mapping[str, np.ndarray], theta: Params) -> None:
        """Set the state, to continue from another call. theta: parameters that it belongs to."""


class PlainEstimator:
    """Base of estimators that keep nothing between calls: one trajectory per sample, no pilot.

    A subclass defines `__call__`, and overrides what is different for it.
    """

    def __call__(self, key: Array, theta: Params, count: int) -> Estimate:
        """Estimate ∇θJ from `count` samples."""
        raise NotImplementedError

    def estimate_many(self, key: Array, thetas: Params, count: int) -> list[Estimate]:
        """Estimate ∇θJ at each of K parameters, from `count` samples each.

        Estimate k is that of a call with key k and θ k.

        Args:
            key: one, for noise that is common to all θ, or K of them.
            thetas: a stack of θ, leaves (K, ...).
            count: samples per θ.

        Returns: K estimates.
        """
        return [self(*row, count) for row in many.check_stack(key, thetas).rows()]

    def cost(self, theta: Params) -> int:
        """Trajectories per sample."""
        return 1

    @property
    def pilot(self) -> int:
        """Trajectories per call in addition to those of the samples."""
        return 0

    @property
    def state(self) -> dict[str, np.ndarray]:
        """Everything kept between calls, as plain arrays; empty without state."""
        return {}

    def restore(self, state: Mapping[str, np.ndarray], theta: Params) -> None:
        """Set the state, to continue from another call. theta: parameters that it belongs to."""


class EstimatorWrapper(PlainEstimator):
    """Base of estimators that change what another one returns.

    Cost, pilot and state are those of `estimator`. A subclass has that attribute and defines
    `__call__`.
    """

    estimator: Any

    def cost(self, theta: Params) -> int:
        """Trajectories per sample."""
        return self.estimator.cost(theta)

    @property
    def pilot(self) -> int:
        """Trajectories per call in addition to those of the samples."""
        return self.estimator.pilot

    @property
    def state(self) -> dict[str, np.ndarray]:
        """Everything kept between calls, as plain arrays; empty without state."""
        return self.estimator.state

    def restore(self, state: Mapping[str, np.ndarray], theta: Params) -> None:
        """Set the state, to continue from another call. theta: parameters that it belongs to."""
        self.estimator.restore(state, theta)


@dataclass(frozen=True)
class FunctionEstimator(PlainEstimator):
    """A function (key, theta, count) -> Estimate as an estimator."""

    function: Estimates

    def __call__(self, key: Array, theta: Params, count: int) -> Estimate:
        """Estimate ∇θJ from `count` samples."""
        return self.function(key, theta, count)


def as_estimator(candidate: Estimator | Estimates) -> Estimator:
    """An `Estimator` as it is; a bare function (key, theta, count) -> Estimate wrapped as one."""
    if not callable(candidate):
        raise TypeError(
            "an estimator is called as (key, theta, count) -> Estimate; got "
            f"{type(candidate).__name__}."
        )
    required = ("cost", "pilot", "state", "restore")
    present = [name for name in required if hasattr(candidate, name)]
    if not present:
        return FunctionEstimator(candidate)
    missing = sorted(set(required) - set(present))
    if missing:
        raise TypeError(
            f"{type(candidate).__name__} has {', '.join(map(repr, present))} and lacks "
            f"{', '.join(map(repr, missing))}: an `Estimator` has all four, a bare function none "
            "of them."
        )
    estimator: Any = candidate
    return estimator
