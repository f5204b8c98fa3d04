"""The file `parameters.h5`: θ over the iterations, readable with h5py and xarray alone.

/row, /iteration (L,), and for every array of θ a data set (L, ...); further data sets and
attributes describe the system. Of an array with bounds the attributes `low` and `high` are these,
one number or (...); `times` (T,) are those of its knots.

HDF5 is not safe against a kill during a write, and a failed write can end the process. So the file
is never written in place: it is made in memory, and its bytes take the name when they are complete
and on the disk. With 548 parameters and a record every 10 iterations that is a megabyte per 5,000
iterations.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from fluctua.store.checkpoint import Damaged, replace

RUN = "run"
"""Attribute with the fingerprint of the run."""

MAX_ATTRIBUTE = 4096
"""Numbers of an attribute; HDF5 takes 64 kB."""

MIN_KNOTS = 9
"""Numbers of an array from which on it may be a protocol in time."""


class Point(NamedTuple):
    """θ of one row, where its estimate was made.

    row, iteration: as in the history.
    theta: its arrays by name.
    """

    row: int
    iteration: int
    theta: Mapping[str, np.ndarray]


def create(
    path: Path,
    theta: Mapping[str, np.ndarray],
    run: str,
    describe: Callable[[h5py.File], None] | None = None,
) -> None:
    """Write a file without records.

    Args:
        path: where.
        theta: arrays like those to come, for names, shapes and types.
        run: the fingerprint of the run.
        describe: puts further data sets and attributes into the file.

    """
    memory = io.BytesIO()
    with h5py.File(memory, "w") as file:
        for name in ("row", "iteration"):
            file.create_dataset(name, (0,), np.int64, maxshape=(None,), chunks=(1024,))
        for name, array in theta.items():
            width = max(int(array.size), 1)
            chunks = (max(1, 2**16 // width), *(max(n, 1) for n in array.shape))
            file.create_dataset(
                name, (0, *array.shape), array.dtype, maxshape=(None, *array.shape), chunks=chunks
            )
        # of fixed length: a damaged heap of variable ones hangs HDF5
        file.attrs[RUN] = np.bytes_(run)
        if describe is not None:
            describe(file)
    replace(path, memory.getvalue())


def describe_arrays(
    low: Mapping[str, np.ndarray], high: Mapping[str, np.ndarray], t: np.ndarray | None = None
) -> Callable[[h5py.File], None]:
    """Return a function `describe` for `create` that adds bounds, and times of knots.

    Args:
        low: lower bounds of the arrays of θ by name; empty without bounds.
        high: upper bounds.
        t: times of the trajectories (T+1,). An array with a number per step, or per time, has
            knots at these.
    """

    def describe(file: h5py.File) -> None:
        for name in low:
            for key, bound in (("low", low[name]), ("high", high[name])):
                _add_attribute(file[name], key, np.asarray(bound))
        if t is None:
            return
        for dataset in _list_arrays(file):
            knots = max(dataset.shape[1:], default=0)
            if MIN_KNOTS <= knots <= len(t) <= knots + 1:
                _add_attribute(dataset, "times", np.asarray(t)[:knots])

    return describe


def _list_arrays(file: h5py.File) -> list[h5py.Dataset]:
    items: list[h5py.Dataset] = []
    file.visititems(lambda _, item: items.append(item) if isinstance(item, h5py.Dataset) else None)
    return [item for item in items if item.name not in ("/row", "/iteration")]


def _add_attribute(dataset: h5py.Dataset, name: str, array: np.ndarray) -> None:
    """Add an array, as one number where all are the same; none if infinite or too large."""
    if array.size and np.all(array == array.flat[0]):
        array = array.flat[0]
    if np.size(array) <= MAX_ATTRIBUTE and np.isfinite(array).all():
        dataset.attrs[name] = array


def append(path: Path, points: Sequence[Point]) -> None:
    """Append records."""
    if not points:
        return

    def fill(file: h5py.File) -> None:
        old = len(file["iteration"])
        new = len(file["iteration"]) + len(points)
        for name in ("row", "iteration", *points[0].theta):
            file[name].resize(new, axis=0)
            file[name][old:new] = [
                getattr(p, name) if name in ("row", "iteration") else p.theta[name] for p in points
            ]

    _rewrite(path, fill)


def truncate(path: Path, names: Sequence[str], last_row: int, every: int) -> None:
    """Keep the records up to `last_row` that lie on the grid of iterations.

    The last record of a run that ended between two grid points is dropped: an uninterrupted run has
    none.
    """
    with _open(path) as file:
        missing = [name for name in ("row", "iteration", *names) if name not in file]
        if missing:
            raise Damaged(f"it lacks {', '.join(missing)}")
        kept_rows = (file["row"][:] <= last_row) & (file["iteration"][:] % every == 0)
    if kept_rows.all():
        return

    def fill(file: h5py.File) -> None:
        for name in ("row", "iteration", *names):
            kept = file[name][:][kept_rows]
            file[name].resize(len(kept), axis=0)
            file[name][...] = kept

    _rewrite(path, fill)


def read_owner(path: Path) -> str:
    """The fingerprint of the run that a file belongs to; empty if it has none."""
    with _open(path) as file:
        run = file.attrs.get(RUN, "")
        return run.decode() if isinstance(run, bytes) else str(run)


def _open(path: Path, memory: io.BytesIO | None = None) -> h5py.File:
    try:
        return h5py.File(path, "r") if memory is None else h5py.File(memory, "r+")
    except OSError as error:
        raise Damaged(f"it is not a complete HDF5 file ({error})") from None


def _rewrite(path: Path, fill: Callable[[h5py.File], None]) -> None:
    memory = io.BytesIO(path.read_bytes())
    with _open(path, memory) as file:
        fill(file)
    replace(path, memory.getvalue())
