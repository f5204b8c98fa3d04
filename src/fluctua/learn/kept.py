"""Trajectories that are kept until a Gaussian describes their evidence.

Evidence taken at one point describes trajectories near that point. Where the model is not linear in
its unknowns, a Gaussian made from few trajectories stays where their noise put it, and many such
Gaussians add up to a wrong answer with a small error. Such trajectories are therefore kept, and
fitted again from every later point.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from fluctua.core.arrays import Params
from fluctua.core.trajectories import Trajectories
from fluctua.learn.belief import Belief

MAX_KEPT = 2**17
"""Maximum number of values in kept trajectories that are fitted in every call and checkpointed."""

MAX_KEPT_APART = 2**20
"""Maximum where they are fitted again only after their number has grown by a factor."""

NAME = "kept_"
"""Prefix of the names of their arrays."""


class KeptBatch(NamedTuple):
    """Trajectories that were measured together.

    leaves: of (θ, trajectories), plain arrays.
    readout: standard deviation of the measurement.
    weight: 1, or less after some forgetting.
    """

    leaves: tuple[np.ndarray, ...]
    readout: float
    weight: float = 1.0

    def unpack(self, tree: Any) -> tuple[Params, Trajectories]:
        """θ and the trajectories. tree: the structure of both, the same for every batch."""
        if tree.num_leaves != len(self.leaves):
            raise ValueError(
                "the trajectories of a device must have the same arrays in every call: with those "
                f"of θ these have {tree.num_leaves}, and those before them had {len(self.leaves)}. "
                "Make another `SelfCalibrating`."
            )
        return jax.tree.unflatten(tree, self.leaves)


def pack(theta: Params, trajectories: Trajectories, readout: float) -> KeptBatch:
    """A batch of trajectories that were taken at θ."""
    leaves = jax.tree.leaves((theta, trajectories))
    return KeptBatch(tuple(np.asarray(leaf) for leaf in leaves), readout)


@dataclass(frozen=True, eq=False)
class Kept:
    """All measurements: a Gaussian belief for some trajectories, and the others as batches.

    fitted: number of batches when they were last fitted together.
    """

    belief: Belief
    batches: tuple[KeptBatch, ...] = ()
    fitted: int = 0

    def fade(self, factor: float) -> Kept:
        """The measurements with all weights multiplied by `factor`."""
        batches = [batch._replace(weight=factor * batch.weight) for batch in self.batches]
        weighty = tuple(batch for batch in batches if batch.weight)
        return Kept(self.belief.fade(factor), weighty, self.fitted)

    def add(self, batch: KeptBatch) -> Kept:
        """The measurements with another batch."""
        return replace(self, batches=(*self.batches, batch))

    def is_due(self, growth: float) -> bool:
        """Whether the next batch is fitted together with all of these."""
        return len(self.batches) + 1 >= growth * self.fitted

    def is_full(self, growth: float) -> bool:
        """Whether the batches exceed the maximum."""
        limit = MAX_KEPT if growth == 1 else MAX_KEPT_APART
        return sum(leaf.size for batch in self.batches for leaf in batch.leaves) > limit

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Named arrays for a state; empty where no trajectories are kept."""
        if not self.batches:
            return {}
        numbers = [(batch.readout, batch.weight, len(batch.leaves)) for batch in self.batches]
        arrays = {"information": self.belief.information, "vector": self.belief.vector}
        arrays["batches"] = np.array(numbers)
        arrays["fitted"] = np.array(self.fitted)
        for i, batch in enumerate(self.batches):
            arrays |= {f"{i}_{j}": leaf for j, leaf in enumerate(batch.leaves)}
        return {f"{NAME}{name}": array for name, array in arrays.items()}


def restore_kept(belief: Belief, state: Mapping[str, np.ndarray]) -> Kept:
    """Restore the measurements from `Kept.to_arrays`. belief: of everything that was measured."""
    stored = [name for name in state if name.startswith(NAME)]
    arrays = {name.removeprefix(NAME): np.array(state[name]) for name in stored}
    if not arrays:
        return Kept(belief)
    kept = Kept(replace(belief, information=arrays["information"], vector=arrays["vector"]))
    for i, (readout, weight, leaf_count) in enumerate(arrays["batches"]):
        leaves = tuple(arrays[f"{i}_{j}"] for j in range(int(leaf_count)))
        kept = kept.add(KeptBatch(leaves, float(readout), float(weight)))
    return replace(kept, fitted=int(arrays.get("fitted", 0)))
