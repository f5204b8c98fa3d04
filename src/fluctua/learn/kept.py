"""Trajectories that are kept until a Gaussian describes what they say.

Evidence that was taken at one point describes trajectories near that point. Where the model is not
linear in its unknowns, a Gaussian that was made of few trajectories stays where their noise put it,
and many such Gaussians add up to a wrong answer with a small error. Such trajectories are therefore
kept, and fitted again from every later point.
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

MOST_KEPT = 2**17
"""Numbers in trajectories that are kept: they are fitted in every call, and are in every
checkpoint.
"""

NAME = "kept_"
"""Begins the names of their arrays."""


class KeptBatch(NamedTuple):
    """Trajectories that were measured together.

    leaves: of (θ, trajectories), plain arrays. readout: standard deviation of the measurement.
    weight: 1, or less after some forgetting.
    """

    leaves: tuple[np.ndarray, ...]
    readout: float
    weight: float = 1.0

    def unpack(self, tree: Any) -> tuple[Params, Trajectories]:
        """θ and the trajectories. tree: the structure of both, that of every other batch."""
        if tree.num_leaves != len(self.leaves):
            raise ValueError(
                "the trajectories of a device must have the same arrays in every call: with those "
                f"of θ these have {tree.num_leaves}, and those before them had {len(self.leaves)}. "
                "Begin with another `SelfCalibrating`."
            )
        return jax.tree.unflatten(tree, self.leaves)


def pack(theta: Params, trajectories: Trajectories, readout: float) -> KeptBatch:
    """A batch of trajectories that were taken at θ."""
    leaves = jax.tree.leaves((theta, trajectories))
    return KeptBatch(tuple(np.asarray(leaf) for leaf in leaves), readout)


@dataclass(frozen=True, eq=False)
class Kept:
    """What was measured: a Gaussian belief of some trajectories, and the others as batches."""

    belief: Belief
    batches: tuple[KeptBatch, ...] = ()

    def faded(self, factor: float) -> Kept:
        """All of it counts for less."""
        batches = [batch._replace(weight=factor * batch.weight) for batch in self.batches]
        return Kept(self.belief.faded(factor), tuple(batch for batch in batches if batch.weight))

    def add(self, batch: KeptBatch) -> Kept:
        """Another batch is kept too."""
        return replace(self, batches=(*self.batches, batch))

    @property
    def is_full(self) -> bool:
        """Whether there are more trajectories than are kept."""
        return sum(leaf.size for batch in self.batches for leaf in batch.leaves) > MOST_KEPT

    def arrays(self) -> dict[str, np.ndarray]:
        """Named arrays for a state; none where no trajectories are kept."""
        if not self.batches:
            return {}
        numbers = [(batch.readout, batch.weight, len(batch.leaves)) for batch in self.batches]
        named = {"information": self.belief.information, "vector": self.belief.vector}
        named["batches"] = np.array(numbers)
        for i, batch in enumerate(self.batches):
            named |= {f"{i}_{j}": leaf for j, leaf in enumerate(batch.leaves)}
        return {f"{NAME}{name}": array for name, array in named.items()}


def restore_kept(belief: Belief, state: Mapping[str, np.ndarray]) -> Kept:
    """What `Kept.arrays` gave. belief: of everything that was measured."""
    mine = [name for name in state if name.startswith(NAME)]
    named = {name.removeprefix(NAME): np.array(state[name]) for name in mine}
    if not named:
        return Kept(belief)
    kept = Kept(replace(belief, information=named["information"], vector=named["vector"]))
    for i, (readout, weight, many) in enumerate(named["batches"]):
        leaves = tuple(named[f"{i}_{j}"] for j in range(int(many)))
        kept = kept.add(KeptBatch(leaves, float(readout), float(weight)))
    return kept
