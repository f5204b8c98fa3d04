"""Trajectories from outside, in one piece or in chunks, presented block of steps by block of steps.

The estimator moves all trajectories through time together. Chunks of trajectories are therefore read
again for every block of steps that fits in memory, which is what makes them give the same result as one
piece for any baseline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import check
from fluctua.core.types import Array, Params, PyTree, Times, Trajectories, working_dtype

BLOCK_BYTES = 256 * 2**20
"""How much of a recording is held at a time, all trajectories together."""


class Recording:
    """A checked, re-readable source of trajectories on one time grid."""

    def __init__(self, source: Trajectories | Iterable[Trajectories], theta: Params):
        self._chunks: Iterable[Trajectories] = [source] if isinstance(source, Trajectories) else source
        if isinstance(self._chunks, Iterator):
            raise TypeError(
                "chunks of trajectories are gone through more than once, and a generator can be only once. Pass "
                "a list, or an object whose __iter__ starts afresh."
            )
        self.sizes: list[int] = []
        first, contexts, largest = [], [], []
        whole: np.ndarray | None = None
        bad: list[tuple[int, int, int]] = []
        for chunk in self._chunks:
            t, x = _checked(chunk)
            if whole is None:
                whole, shape = t, x.shape[1:]
            elif not np.array_equal(t, whole) or x.shape[1:] != shape:
                raise ValueError(
                    f"all chunks must share one time grid and state: chunk 0 has {shape[0]} times and "
                    f"{shape[1]} components, chunk {len(self.sizes)} has {x.shape[1]} and {x.shape[2]}"
                    + ("." if x.shape[1:] != shape else ", at other times.")
                )
            for offset, rows in _rows(x):
                rows = np.asarray(rows)
                bad += check.first_bad(rows, sum(self.sizes) + offset)
                largest.append(np.abs(rows).max(axis=(0, 1)))
            self.sizes.append(x.shape[0])
            first.append(np.asarray(x[:, 0]))
            contexts.append(chunk.context)
        if whole is None:
            raise ValueError("there are no trajectories: the source of chunks is empty.")
        check.finite_trajectories(bad, self.count)
        self.times = check.grid(whole)
        self.dtype = working_dtype(theta, np.concatenate(first))
        self.first = jnp.asarray(np.concatenate(first), self.dtype)
        coarsest = max(np.finfo(dtype).eps for dtype in {part.dtype for part in first} | {self.first.dtype})
        self.rounding = coarsest * np.max(largest, axis=0)  # (M,), of the largest states
        self.context: PyTree = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *contexts)

    @property
    def count(self) -> int:
        """E, over all chunks."""
        return sum(self.sizes)

    @property
    def t(self) -> Array:
        """The time grid. (T+1,)"""
        return self.times.t

    def blocks(self, block_bytes: int) -> Iterator[tuple[int, Times, Array]]:
        """(n, times of the block, x (E, b+1, M)) for consecutive blocks of b steps, ends shared."""
        steps = len(self.t) - 1
        b = max(1, min(steps, block_bytes // max(1, self.first.nbytes)))
        for n in range(0, steps, b):
            yield n, *self.block(n, min(n + b, steps))

    def block(self, n: int, stop: int) -> tuple[Times, Array]:
        """Times and states x (E, b+1, M) of the b steps from n to `stop`, ends included."""
        parts = [np.asarray(chunk.x[:, n : stop + 1]) for chunk in self._chunks]
        if [len(part) for part in parts] != self.sizes:
            raise ValueError(
                f"the chunks changed while they were read: {self.sizes} trajectories at first, "
                f"{[len(part) for part in parts]} later."
            )
        return Times(self.t[n : stop + 1], self.times.dt[n:stop]), jnp.asarray(np.concatenate(parts), self.dtype)

    def trajectory(self, j: int) -> Trajectories:
        """Trajectory j alone."""
        for chunk in self._chunks:
            if j < len(chunk.x):
                one = jax.tree.map(lambda leaf: leaf[j : j + 1], chunk.context)  # noqa: B023
                return Trajectories(self.t, np.asarray(chunk.x[j : j + 1]), one)
            j -= len(chunk.x)
        raise IndexError(j)


def _checked(given: Trajectories) -> tuple[np.ndarray, Array]:
    """Shapes that fit together."""
    if not isinstance(given, Trajectories):
        raise TypeError(f"expected fluctua.Trajectories(t, x, context); got {type(given).__name__}.")
    t, x = check.times(given.t), given.x
    shape = np.shape(x)
    if len(shape) != 3 or shape[1] != len(t):
        hint = " For one trajectory pass x[None]." if shape[:1] == (len(t),) else ""
        raise ValueError(f"`x` must be (trajectories, {len(t)}, state) to match `t`; got {shape}.{hint}")
    if shape[0] == 0 or shape[2] == 0:
        raise ValueError(f"`x` holds no trajectories or no state: shape {shape}.")
    if not np.issubdtype(x.dtype, np.floating):
        raise TypeError(
            f"`x` must be real floating point; it is {x.dtype}."
            + (" Stack real and imaginary parts as components." if np.issubdtype(x.dtype, np.complexfloating) else "")
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(given.context):
        if np.shape(leaf)[:1] != shape[:1]:
            raise ValueError(
                f"`context{jax.tree_util.keystr(path)}` must have one row per trajectory, ({shape[0]}, ...); got "
                f"{np.shape(leaf)}."
            )
    return t, x


def _rows(x: Array, bytes_at_once: int = 64 * 2**20) -> Iterator[tuple[int, Array]]:
    """A few trajectories at a time, so that a chunk that loads when sliced is never held whole."""
    size = max(1, bytes_at_once // max(1, x.shape[1] * x.shape[2] * x.dtype.itemsize))
    for j in range(0, x.shape[0], size):
        yield j, x[j : j + size]
