"""θ of a lattice over the iterations, with the network it belongs to, as `parameters.h5` has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from fluctua.store.course import RUN
from fluctua.store.history import kept
from fluctua.tcmt.network import Network

FAMILIES = ("omega", "kappa", "chi")


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


def describing(network: Network, attributes: dict[str, float]) -> Callable[[h5py.File], None]:
    """What the file says of the network and its task."""

    def describe(file: h5py.File) -> None:
        file["bonds"], file["positions"], file["lead_sites"] = network.bonds, network.positions, network.lead_sites
        file.attrs.update(attributes)

    return describe


def read(path: Path) -> Course:
    """Everything."""
    datasets = [name for name in Course._fields if name != "attributes"]
    try:
        with h5py.File(path, "r") as file:
            lacking = [name for name in datasets if name not in file]
            if lacking:
                raise ValueError(f"{path} lacks {', '.join(lacking)}.")
            arrays = {name: file[name][:] for name in datasets}
            attributes = {name: float(value) for name, value in file.attrs.items() if name != RUN}
            return Course(**arrays, attributes=attributes)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error}).") from None


def effective(course: Course) -> Course:
    """Only the records that led to where the run is now, one for each iteration."""
    rows = kept(course.iteration)
    return course._replace(**{name: getattr(course, name)[rows] for name in ("row", "iteration", *FAMILIES)})
