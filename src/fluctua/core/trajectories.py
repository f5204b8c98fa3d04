"""Trajectories on a time grid, what provides them, and their pieces.

The states of a file load when they are sliced. Everything that goes through more trajectories than
memory holds takes them in the pieces of `split_pieces`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from fluctua.core.arrays import Array, Params, PyTree, is_key
from fluctua.core.display import records


class Trajectories(NamedTuple):
    """E trajectories on one time grid, simulated or measured.

    t: (T+1,) increasing, not necessarily uniform.
    x: (E, T+1, M).
    context: pytree with leaves (E, ...), drawn or set once per trajectory, or None.
    events: what happened within each step, a pytree with leaves (E, T, ...), for processes whose
        score needs more than the states (`Jumps`); else None.
    group: whole numbers (E,), the device, the sample or the day of each trajectory, where the
        expected return is that of all devices there could be. Every group then counts the same, and
        errors are those between groups; else None.

    >>> x = np.asarray(recorded.x)  # or np.load, h5py: (trajectories, times, state)
    >>> measured = fl.Trajectories(t, x)
    >>> fl.gradient(process, objective, theta, measured).count
    200
    """

    t: Array
    x: Array
    context: PyTree = None
    events: PyTree = None
    group: Array | None = None

    def __repr__(self) -> str:
        if records.is_shown(self):
            return records.describe_trajectories(self)
        return f"Trajectories({', '.join(f'{k}={v!r}' for k, v in self._asdict().items())})"

    def _repr_html_(self) -> str | None:
        return records.render_trajectories(self) if records.is_shown(self) else None


class Times(NamedTuple):
    """A time grid t (T+1,) and its steps dt (T,).

    The steps are formed before t is rounded to working precision.
    """

    t: Array
    dt: Array


class Substrate(Protocol):
    """A simulator or an instrument: sets θ and returns `count` trajectories."""

    def __call__(self, key: Array, theta: Params, count: int) -> Trajectories: ...


class Piece(NamedTuple):
    """Consecutive trajectories in memory. first: number of the first one."""

    first: int
    trajectories: Trajectories


def open_array(x: Array) -> Array:
    """An array to slice: in memory as NumPy, whose slices are not compiled; else as it is."""
    return np.asarray(x) if isinstance(x, jax.Array) and not is_key(x) else x


def select_trajectories(source: Trajectories, rows: slice | np.ndarray) -> Trajectories:
    """Some of the trajectories in memory, with their contexts and events. rows: their numbers."""

    def select_rows(leaf: Any) -> Any:
        return open_array(leaf)[rows]

    others = (jax.tree.map(select_rows, tree) for tree in source[2:])
    return Trajectories(source.t, np.asarray(select_rows(source.x)), *others)


def count_within(x: Array, memory: int) -> int:
    """Trajectories of x (E, T+1, M) that fit into so many bytes, one at least."""
    return max(1, memory // max(1, x.shape[1] * x.shape[2] * x.dtype.itemsize))


def split_pieces(source: Trajectories, size: int) -> Iterator[Piece]:
    """Pieces of at most `size` trajectories."""
    for first in range(0, len(source.x), size):
        yield Piece(first, select_trajectories(source, np.s_[first : first + size]))
