"""Read run folders into arrays.

A folder holds `history.csv`, `parameters.h5`, `config.toml` and, at the end, `final.npz`. Letters:
I iterations, R rows of the history, L records of the parameters, N resonators, B bonds.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from fluctua import tcmt
from fluctua.runs.build import FAMILIES
from fluctua.store import history
from fluctua.store.course import RUN
from fluctua.store.files import require_file

ORDER_OF_STEP = {"euler": 1.0, "heun": 2.0}
"""Order of each integrator: attributes of the file are numbers."""


class History(NamedTuple):
    """The columns of `history.csv`: one array per field of `fluctua.store.history.Row`."""

    row: np.ndarray
    iteration: np.ndarray
    J: np.ndarray
    J_stderr: np.ndarray
    ensemble: np.ndarray
    trajectories: np.ndarray
    gradient_norm: np.ndarray
    seconds: np.ndarray
    event: np.ndarray

    def select(self, rows: np.ndarray) -> History:
        """Some of the rows, by a mask or their indices."""
        return History(*(column[rows] for column in self))


class Course(NamedTuple):
    """The content of `parameters.h5`.

    row, iteration: (L,).
    omega, chi: (L, N).
    kappa: (L, B).
    bonds: (B, 2).
    positions: of the resonators (N, 2).
    lead_sites: of the leads.
    attributes: of the task.
    """

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


class SavedRun(NamedTuple):
    """A training, read from its folder.

    folder: where it is.
    sigma_kappa: amplitude of the modulation.
    history: one entry per iteration, rewound ones left out (I,).
    task: what was trained, on `task.network`.
    course: θ over the iterations.
    trained: θ of `final.npz`, or the last record while there is none.
    """

    folder: Path
    sigma_kappa: float
    history: History
    task: tcmt.Task
    course: Course
    trained: dict[str, np.ndarray]


def rolling_mean(values: np.ndarray, window: int = 25) -> np.ndarray:
    """Mean over `window` values about each one.

    The window shrinks symmetrically towards the ends, so that a trend is not shifted.
    """
    total = np.concatenate([[0.0], np.cumsum(values)])
    place = np.arange(len(values))
    reach = np.minimum(window // 2, np.minimum(place, place[::-1]))
    return (total[place + reach + 1] - total[place - reach]) / (2 * reach + 1)


def read_run(folder: Path | str) -> SavedRun:
    """Read and check everything in a run folder."""
    folder = Path(folder)
    columns = effective(read_history(folder))
    path = folder / "parameters.h5"
    course = effective_course(read_course(path))
    if not course.iteration.size:
        raise ValueError(f"{path} has no records yet; train for longer, or take the folder away.")
    task = _make_task(path, course)
    trained = _read_trained(folder, course)
    tcmt.parameters(task.network, trained)  # raises where they do not fit
    return SavedRun(folder, course.attributes["sigma_kappa"], columns, task, course, trained)


def find_runs(folder: Path | str) -> list[Path]:
    """The run folders directly in a folder, by name, or the folder itself if it is one."""
    folder = Path(folder)
    if (folder / "history.csv").is_file():
        return [folder]
    return sorted(path.parent for path in folder.glob("*/history.csv"))


def read_history(folder: Path | str) -> History:
    """All rows of `history.csv` as columns, rewound ones included. Shape (R,)."""
    path = Path(folder) / "history.csv"
    rows = history.read(path)
    if not rows:
        raise ValueError(
            f"{path} has no iterations yet; train for longer, or take the folder away."
        )
    return History(*map(np.array, zip(*rows, strict=True)))


def effective(columns: History) -> History:
    """The history without rewound rows: the last row of each iteration. Shape (I,)."""
    rows = history.find_kept(columns.iteration)
    return columns.select(rows)


def make_description(
    network: tcmt.Network, attributes: dict[str, float]
) -> Callable[[h5py.File], None]:
    """A function that writes the network and its task into `parameters.h5`."""

    def describe(file: h5py.File) -> None:
        file["bonds"] = network.bonds
        file["positions"] = network.positions
        file["lead_sites"] = network.lead_sites
        file.attrs.update(attributes)

    return describe


def read_course(path: Path) -> Course:
    """Read `parameters.h5`."""
    require_file(path, "an HDF5 file")
    datasets = [name for name in Course._fields if name != "attributes"]
    try:
        with h5py.File(path, "r") as file:
            missing = [name for name in datasets if name not in file]
            if missing:
                raise ValueError(f"{path} lacks {', '.join(missing)}.")
            arrays = {name: file[name][:] for name in datasets}
            attributes = {name: float(file.attrs[name]) for name in file.attrs if name != RUN}
            return Course(**arrays, attributes=attributes)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error}).") from None


def effective_course(course: Course) -> Course:
    """The records that led to the present state, one per iteration."""
    rows = history.find_kept(course.iteration)
    return course._replace(
        **{name: getattr(course, name)[rows] for name in ("row", "iteration", *FAMILIES)}
    )


def _make_task(path: Path, course: Course) -> tcmt.Task:
    """The task that was trained. Rates that the file does not hold are the paper's."""
    a = course.attributes
    missing = [
        name
        for name in ("sigma_kappa", "sigma_w", "horizon", "dt", "drive_amplitude")
        if name not in a
    ]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}.")
    network = _make_network(path, course)
    for name in FAMILIES:
        expected = (len(course.iteration), *network.shape(name))
        got = getattr(course, name).shape
        if got != expected:
            raise ValueError(f"{path}: `{name}` must be {expected}, one row per record; got {got}.")
    make = tcmt.isolation if a.get("isolation") else tcmt.transmission
    steps = {order: step for step, order in ORDER_OF_STEP.items()}
    return make(
        network,
        horizon=a["horizon"],
        dt=a["dt"],
        drive=tcmt.Drive(0, a["drive_amplitude"], frequency=10.0),
        sigma_kappa=a["sigma_kappa"],
        integrator=steps[a.get("step_order", 1.0)],
    )


def _make_network(path: Path, course: Course) -> tcmt.Network:
    a = course.attributes
    network = tcmt.from_edges(
        course.bonds,
        sites=len(course.positions),
        leads=[tcmt.Lead(int(site), a.get("gamma_e", 1.0)) for site in course.lead_sites],
        gamma=a.get("gamma", 0.02),
        sigma_w=a["sigma_w"],
        positions=course.positions,
    )
    if not np.array_equal(network.bonds, course.bonds):
        raise ValueError(
            f"{path}: `bonds` must be pairs i < j in lexicographic order, which is the order of "
            "`kappa`."
        )
    return network


def _read_trained(folder: Path, course: Course) -> dict[str, np.ndarray]:
    path = folder / "final.npz"
    if not path.exists():
        return course.theta(-1)
    require_file(path, "an .npz file")
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in FAMILIES}
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{path} must hold omega, kappa and chi as plain arrays ({error})."
        ) from None
