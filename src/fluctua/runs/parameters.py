"""`parameters.h5`: θ over the iterations, with the network it belongs to; readable with h5py and xarray alone.

HDF5 is not safe against a kill while it writes, so the file is never written in place: new records go to a copy,
which takes the name when it is complete. At 548 parameters and a record every 10 iterations that is a megabyte
for every 5,000 iterations.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from fluctua.store.checkpoint import settle
from fluctua.store.history import kept

FAMILIES = ("omega", "kappa", "chi")


class Point(NamedTuple):
    """θ at which the estimate of one row was made."""

    row: int
    iteration: int
    theta: dict[str, np.ndarray]


class Course(NamedTuple):
    """What the file holds. row, iteration: (L,). omega, chi: (L, N). kappa: (L, B). attributes: of the task."""

    row: np.ndarray
    iteration: np.ndarray
    omega: np.ndarray
    kappa: np.ndarray
    chi: np.ndarray
    bonds: np.ndarray
    positions: np.ndarray
    lead_sites: np.ndarray
    attributes: dict[str, float]

    def theta(self, record: int) -> dict[str, np.ndarray]:
        """θ of one record."""
        return {name: getattr(self, name)[record] for name in FAMILIES}


def create(path: Path, network: Any, theta: dict[str, np.ndarray], attributes: dict[str, float]) -> None:
    """An empty file: the network, and no record yet."""

    def fill(file: h5py.File) -> None:
        for name in ("row", "iteration"):
            file.create_dataset(name, (0,), np.int64, maxshape=(None,), chunks=(1024,))
        for name in FAMILIES:
            width = network.shape(name)[0]
            chunks = (max(1, 2**16 // max(width, 1)), max(width, 1))
            file.create_dataset(name, (0, width), theta[name].dtype, maxshape=(None, width), chunks=chunks)
        file["bonds"], file["positions"], file["lead_sites"] = network.bonds, network.positions, network.lead_sites
        file.attrs.update(attributes)

    _rewrite(path, fill, fresh=True)


def append(path: Path, points: Sequence[Point]) -> None:
    """Add records at the end."""
    if not points:
        return

    def fill(file: h5py.File) -> None:
        old, new = len(file["iteration"]), len(file["iteration"]) + len(points)
        for name in ("row", "iteration", *FAMILIES):
            file[name].resize(new, axis=0)
            file[name][old:new] = [p.theta[name] if name in FAMILIES else getattr(p, name) for p in points]

    _rewrite(path, fill)


def truncate(path: Path, last_row: int, every: int) -> None:
    """Leave the records up to `last_row` that lie on the grid of iterations.

    The last record of a run that ended between two grid points is dropped: a run that was left alone has none.
    """
    with h5py.File(path, "r") as file:
        stays = (file["row"][:] <= last_row) & (file["iteration"][:] % every == 0)
    if stays.all():
        return

    def fill(file: h5py.File) -> None:
        for name in ("row", "iteration", *FAMILIES):
            kept = file[name][:][stays]
            file[name].resize(len(kept), axis=0)
            file[name][:] = kept

    _rewrite(path, fill)


def read(path: Path) -> Course:
    """Everything."""
    datasets = [name for name in Course._fields if name != "attributes"]
    try:
        with h5py.File(path, "r") as file:
            lacking = [name for name in datasets if name not in file]
            if lacking:
                raise ValueError(f"{path} lacks {', '.join(lacking)}.")
            arrays = {name: file[name][:] for name in datasets}
            return Course(**arrays, attributes={name: float(value) for name, value in file.attrs.items()})
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error}).") from None


def effective(course: Course) -> Course:
    """Only the records that led to where the run is now, one for each iteration."""
    rows = kept(course.iteration)
    return course._replace(**{name: getattr(course, name)[rows] for name in ("row", "iteration", *FAMILIES)})


def _rewrite(path: Path, fill: Callable[[h5py.File], None], fresh: bool = False) -> None:
    partial = path.with_name(path.name + ".partial")
    if not fresh:
        shutil.copyfile(path, partial)
    with h5py.File(partial, "w" if fresh else "r+") as file:
        fill(file)
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    settle(partial, path)
