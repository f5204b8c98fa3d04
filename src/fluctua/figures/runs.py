"""Run folders, read. What training writes is enough to draw it: nothing of the trainer is needed here.

A folder holds `history.csv`, `parameters.h5`, `config.toml` and, at the end, `final.npz`. Letters: I iterations,
R rows of the history, L records of the parameters, N resonators, B bonds.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np

from fluctua import tcmt


class History(NamedTuple):
    """The columns of `history.csv`. ensemble: trajectories of this iteration; trajectories: spent so far."""

    row: np.ndarray
    iteration: np.ndarray
    J: np.ndarray
    J_stderr: np.ndarray
    ensemble: np.ndarray
    trajectories: np.ndarray
    gradient_norm: np.ndarray
    seconds: np.ndarray
    event: np.ndarray


class Course(NamedTuple):
    """θ as training went on: iteration (L,), omega (L, N), kappa (L, B), chi (L, N)."""

    iteration: np.ndarray
    omega: np.ndarray
    kappa: np.ndarray
    chi: np.ndarray

    def theta(self, record: int) -> dict[str, np.ndarray]:
        """θ of one record."""
        return {"omega": self.omega[record], "kappa": self.kappa[record], "chi": self.chi[record]}


class Run(NamedTuple):
    """A training, as its folder tells it.

    history: one entry an iteration, rewound ones left out (I,). task: what was trained, on `task.network`.
    trained: θ of `final.npz`, or the last record while there is none.
    """

    folder: Path
    sigma_kappa: float
    history: History
    task: tcmt.Task
    course: Course
    trained: dict[str, np.ndarray]


def read_run(folder: Path | str) -> Run:
    """Everything in a run folder, checked.

    >>> run = read_run("runs/demo")
    >>> run.history.J[-1], run.task.network
    """
    folder = Path(folder)
    task, course, sigma_kappa = _parameters(folder / "parameters.h5")
    trained = _trained(folder, course)
    tcmt.parameters(task.network, trained)  # raises where they do not fit
    return Run(folder, sigma_kappa, effective(read_history(folder)), task, course, trained)


def find_runs(folder: Path | str) -> list[Path]:
    """The run folders directly in a folder, by name, or the folder itself if it is one."""
    folder = Path(folder)
    if (folder / "history.csv").is_file():
        return [folder]
    return sorted(path.parent for path in folder.glob("*/history.csv"))


# -------------------------------------------------------------------------------------------- history


def read_history(folder: Path | str) -> History:
    """All rows of `history.csv`, rewound ones too. (R,)"""
    path = Path(folder) / "history.csv"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); a run folder is made by `fluctua train`."
        ) from None
    whole = text[: text.rfind("\n") + 1]  # a running training may be in the middle of a line
    rows = list(csv.reader(whole.splitlines()))
    if not rows or tuple(rows[0]) != History._fields:
        got = ",".join(rows[0]) if rows else "nothing"
        raise ValueError(f"{path} must open with the columns {','.join(History._fields)}; got {got}.")
    if len(rows) == 1:
        raise ValueError(f"{path} has no iterations yet; train for longer, or take the folder away.")
    whole_numbers = ("row", "iteration", "ensemble", "trajectories")
    kind = lambda name: str if name == "event" else np.int64 if name in whole_numbers else np.float64
    try:
        columns = zip(History._fields, zip(*rows[1:], strict=True), strict=True)
        return History(*(np.array(column).astype(kind(name)) for name, column in columns))
    except ValueError as error:
        raise ValueError(f"{path} has a row that is cut short, or a value that is no number ({error}).") from None


def kept(iteration: np.ndarray) -> np.ndarray:
    """Which rows were not undone: one that goes back to iteration i undoes every earlier row of i and beyond.

    >>> kept(np.array([0, 1, 2, 3, 1, 2]))
    array([0, 4, 5])
    """
    later = np.minimum.accumulate(iteration[::-1])[::-1]  # the smallest iteration from each row on
    return np.flatnonzero(iteration < np.append(later[1:], np.iinfo(np.int64).max))


def effective(history: History) -> History:
    """The history without what rewinds undid: the last row of each iteration. (I,)"""
    rows = kept(history.iteration)
    return History(*(column[rows] for column in history))


# ----------------------------------------------------------------------------------------- parameters


def _parameters(path: Path) -> tuple[tcmt.Task, Course, float]:
    """The task and the course of θ from `parameters.h5`. Rates that the file does not tell are the paper's."""
    data, attributes = _contents(path)
    network = _network(path, data, attributes)
    for name in ("omega", "kappa", "chi"):
        expected = (len(data["iteration"]), *network.shape(name))
        if data[name].shape != expected:
            raise ValueError(f"{path}: `{name}` must be {expected}, one row a record; got {data[name].shape}.")
    task = tcmt.transmission(
        network,
        horizon=attributes["horizon"],
        dt=attributes["dt"],
        s=attributes["drive_amplitude"],
        sigma_kappa=attributes["sigma_kappa"],
    )
    rows = kept(data["iteration"])
    if not rows.size:
        raise ValueError(f"{path} has no records yet; train for longer, or take the folder away.")
    return task, Course(*(data[name][rows] for name in Course._fields)), attributes["sigma_kappa"]


def _contents(path: Path) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    datasets = (*Course._fields, "bonds", "positions", "lead_sites")
    numbers = ("sigma_kappa", "sigma_w", "horizon", "dt", "drive_amplitude")
    try:
        with h5py.File(path, "r") as file:
            data = {name: file[name][()] for name in datasets if name in file}
            attributes = {
                name: float(file.attrs[name]) for name in (*numbers, "gamma_e", "gamma") if name in file.attrs
            }
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error}).") from None
    lacking = [name for name in datasets if name not in data] + [name for name in numbers if name not in attributes]
    if lacking:
        raise ValueError(f"{path} lacks {', '.join(lacking)}.")
    return data, attributes


def _network(path: Path, data: dict[str, np.ndarray], attributes: dict[str, float]) -> tcmt.Network:
    network = tcmt.from_edges(
        data["bonds"],
        sites=len(data["positions"]),
        leads=[tcmt.Lead(int(site), attributes.get("gamma_e", 1.0)) for site in data["lead_sites"]],
        gamma=attributes.get("gamma", 0.02),
        sigma_w=attributes["sigma_w"],
        positions=data["positions"],
    )
    if not np.array_equal(network.bonds, data["bonds"]):
        raise ValueError(f"{path}: `bonds` must be pairs i < j in lexicographic order, which is the order of `kappa`.")
    return network


def _trained(folder: Path, course: Course) -> dict[str, np.ndarray]:
    path = folder / "final.npz"
    if not path.exists():
        return course.theta(-1)
    try:
        with np.load(path, allow_pickle=False) as file:
            theta = {name: file[name] for name in ("omega", "kappa", "chi")}
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path} must hold omega, kappa and chi as plain arrays ({error}).") from None
    return theta
