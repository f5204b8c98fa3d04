"""A time-only baseline that costs nothing: the mean return-to-go of the iteration before (with a twin, that of Λ).

Its noise is independent of this iteration's, so the estimate stays unbiased however far θ has moved; a table that
is out of date costs variance only. What is saved is the pilot run.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fluctua.core.types import Array, Estimate, Params
from fluctua.tcmt.fused import Fused, next_table


class Carried:
    """An estimator that remembers: `table` (T+1,) is None before the first call, which runs a pilot instead.

    It has a state: put it back to go on where another left off.

    >>> Carried(task.estimator("cpu", baseline="time"))
    """

    def __init__(self, fused: Fused, table: np.ndarray | None = None):
        self.fused, self.table, self.pilot = fused, table, 0

    def __call__(self, key: Array, theta: Params, count: int) -> Estimate:
        """Estimate ∇θJ from `count` trajectories."""
        self.pilot = self.fused.pilot if self.table is None else 0
        estimate, result = self.fused.with_result(key, theta, count, self.table)
        self.table = next_table(result)
        return estimate

    @property
    def state(self) -> dict[str, np.ndarray]:
        """All that is remembered; empty before the first call."""
        return {} if self.table is None else {"table": self.table}

    def restore(self, state: Mapping[str, np.ndarray], theta: Params = None) -> None:
        """Put a `state` back. theta: not needed here."""
        self.table = state.get("table")
