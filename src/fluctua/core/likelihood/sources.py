"""Where the trajectories of a fit come from, and their pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import jax
import jax.numpy as jnp
import scipy

from fluctua.core import check
from fluctua.core.arrays import Params, working_dtype
from fluctua.core.diffusion import find_noiseless
from fluctua.core.process import Process
from fluctua.core.trajectories import Piece, Trajectories, split_pieces


class Recorded(Protocol):
    """A file or another store of trajectories, whose states may load when sliced."""

    def trajectories(self) -> Trajectories: ...


Source = Trajectories | Recorded
"""Where the trajectories of a fit come from."""


def open_source(source: Source) -> Trajectories:
    """The trajectories of a source; states of a file still load when sliced."""
    return source if isinstance(source, Trajectories) else source.trajectories()


def load_pieces(data: Trajectories, size: int, stop: int | None = None) -> Iterator[Piece]:
    """Pieces of `size` trajectories with their contexts; refused if a state is not finite.

    stop: number of a trajectory at or beyond which no piece begins.
    """
    count = len(data.x)
    if count == 0:
        raise ValueError("there is no complete trajectory to calibrate from.")
    for piece in split_pieces(Trajectories(data.t, data.x, data.context), size):
        if stop is not None and piece.first >= stop:
            return
        x = piece.trajectories.x
        check.finite_trajectories(check.find_not_finite(x, piece.first), count)
        yield piece


def mark_noiseless(data: Trajectories, process: Process, theta: Params) -> Process:
    """The process, checked, with its components without noise marked, as at the first state."""
    process = check.process(process)
    if process.noiseless and process.integrator == "euler":
        return process
    first = next(load_pieces(data, 1)).trajectories
    context = jax.tree.map(lambda leaf: jnp.asarray(leaf)[0], first.context)
    x = jnp.asarray(first.x[0, 0], working_dtype(theta, first.x))
    marked = find_noiseless(process, theta, x, jnp.asarray(data.t)[0], context)
    assert isinstance(marked, Process)
    return marked


def student_factor(freedom: int) -> float:
    """Factor on errors from the scatter of `freedom` + 1 values: ±1.96 then cover 95 %."""
    if freedom <= 0:
        return float("nan")
    return float(scipy.stats.t.isf(0.025, freedom) / scipy.stats.norm.isf(0.025))
