"""Data of figure 1: read from run folders, stored in two small files, and read back.

`curves.csv.gz` has J and the ensemble of every iteration of every run, `trained.npz` the parameters
of one run over its iterations, its network, and the light that each parameter sees. Missing parts
leave a note.

Also lattices in mid-training, on which the paper measures its estimator (Fig. 2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from fluctua import tcmt
from fluctua.core.arrays import Params
from fluctua.learn.training import Length, Training, ascend
from fluctua.runs import config as configs
from fluctua.runs import reading
from fluctua.runs.build import FAMILIES, make_network, make_task
from fluctua.runs.evaluate import load_parameters
from fluctua.runs.reading import SavedRun
from fluctua.store import tables
from fluctua.tcmt.conversion import kernel_spec
from fluctua.tcmt.experiment import Experiment
from fluctua.tcmt.kernel.run import run as run_kernel

CURVES = "curves.csv.gz"
TRAINED = "trained.npz"

DIGITS = 5
"""Digits of J in the table: a tenth of its standard error with the largest ensembles."""
RECORDS = 500
"""Number of times at which the field is recorded, evenly spread over the horizon."""


class TrainingCurve(NamedTuple):
    """The learning curve of one run.

    name, sigma_kappa: of the run.
    iteration, J, ensemble: (I,), rewound rows left out.
    J_stderr, trajectories: at the end.
    """

    name: str
    sigma_kappa: float
    iteration: np.ndarray
    J: np.ndarray
    ensemble: np.ndarray
    J_stderr: float
    trajectories: int


class Exposure(NamedTuple):
    """Light seen by each parameter, ∫dt ⟨f⟩.

    omega: f = |ψ_n|² (N,).
    kappa: f = |ψ_n ψ_m| (B,).
    chi: f = |ψ_n|⁴ (N,).
    """

    omega: np.ndarray
    kappa: np.ndarray
    chi: np.ndarray


class Trained(NamedTuple):
    """The parameters of one run over its iterations.

    sigma_kappa, network: of the run.
    iteration: (L,).
    omega, chi: (L, N).
    kappa: (L, B).
    theta: at the end.
    exposure: of every parameter at the end.
    """

    sigma_kappa: float
    network: tcmt.Network
    iteration: np.ndarray
    omega: np.ndarray
    kappa: np.ndarray
    chi: np.ndarray
    theta: dict[str, np.ndarray]
    exposure: Exposure


def compute_exposure(seed: int, task: Experiment, theta: Params, *, count: int = 32) -> Exposure:
    """Time-integrated exposure of every parameter at θ, without Wiener noise (text on Fig. 1c–e).

    count: trajectories of the average; without modulation all are equal, and one is run.

    >>> task = tcmt.transmission(network, sigma_kappa=0.2, horizon=0.2)
    >>> compute_exposure(0, task, theta).kappa.shape
    (7,)
    """
    if task.copies > 1:
        raise ValueError(
            f"exposure is of one experiment; this task runs {task.copies} copies of its network at "
            "once."
        )
    modulated = task.modulation is not None and task.modulation.sigma_kappa > 0
    spec = kernel_spec(task, theta)
    every = math.ceil(spec.steps / RECORDS)
    done = run_kernel(
        spec, seed, count if modulated else 1, noise=False, scores=False, record_every=every
    )
    assert done.trajectories is not None
    # (E, R, N); left ends, so the last is not counted
    size = np.abs(done.trajectories[:, :-1].astype(np.complex128))

    def integrate(f):
        return f.mean(axis=0).sum(axis=0) * every * spec.dt

    first, second = task.network.bonds.T
    return Exposure(
        integrate(size**2), integrate(size[..., first] * size[..., second]), integrate(size**4)
    )


class Results(NamedTuple):
    """The data of figure 1.

    runs: by σ_κ, for a and b.
    inset: continuations of the run without modulation.
    trained: the run of c–f; None where there is no such run.
    notes: what is missing, and how to produce it.
    """

    runs: list[TrainingCurve]
    inset: list[TrainingCurve]
    trained: Trained | None
    notes: list[str]


def gather(
    folder: Path, *, inset: Path | None = None, sigma_kappa: float = 0.2, count: int = 32
) -> Results:
    """Read a folder of run folders.

    Curves whose run folder is missing come from the table of `write` in it, if there is one: run
    folders are large, and tables can be kept.

    Args:
        folder: of run folders, one for each σ_κ.
        inset: of the continuations; `folder`/inset by default.
        sigma_kappa: of the run that c–f show.
        count: trajectories for their opacities.
    """
    notes: list[str] = []
    runs = _read_runs(reading.find_runs(folder), notes)
    stored = (
        read(folder) if tables.find_table(folder / CURVES).exists() else Results([], [], None, [])
    )
    known = {run.folder.name for run in runs}
    curves = [_make_curve(run) for run in runs]
    curves += [curve for curve in stored.runs if curve.name not in known]
    if not curves:
        why = " ".join(notes) or "A run folder holds history.csv and parameters.h5."
        raise ValueError(
            f"no runs in {folder}. {why} Make one: fluctua train paper-quick --out "
            f"{folder / 'sigma-0'}"
        )
    inset = folder / "inset" if inset is None else inset
    continued = [_make_curve(run) for run in _read_runs(reading.find_runs(inset), notes)]
    continued = continued or stored.inset
    if len(continued) < 2:
        notes.append(
            f"panel b has no inset: it takes run folders of the continuations in {inset}; found "
            f"{len(continued)}."
        )
        continued = []
    elif find_breakpoint(continued) is None:
        notes.append(
            f"panel b has no inset: the continuations in {inset} never differ in their ensembles."
        )
        continued = []
    selected = [run for run in runs if np.isclose(run.sigma_kappa, sigma_kappa)]
    if not selected:
        have = ", ".join(f"{run.sigma_kappa:g}" for run in runs)
        notes.append(
            f"panels c–f are not drawn: no run has σ_κ = {sigma_kappa:g}; there are {have}."
        )
    trained = _read_trained_run(selected[-1], count) if selected else None
    return Results(sorted(curves, key=_read_modulation), continued, trained, notes)


def _read_modulation(curve: TrainingCurve) -> float:
    return curve.sigma_kappa


def find_breakpoint(curves: Sequence[TrainingCurve]) -> int | None:
    """The first iteration at which continuations differ in their ensembles, or None."""
    shared = sorted(set.intersection(*(set(curve.iteration.tolist()) for curve in curves)))
    for iteration in shared:
        if len({int(curve.ensemble[curve.iteration == iteration][0]) for curve in curves}) > 1:
            return int(iteration)
    return None


def write(results: Results, folder: Path) -> list[Path]:
    """Write `curves.csv.gz` and `trained.npz`, and return their paths."""
    curves = [*results.runs, *results.inset]
    runs = [
        {
            "name": c.name,
            "sigma_kappa": c.sigma_kappa,
            "inset": k >= len(results.runs),
            "J_stderr": c.J_stderr,
            "trajectories": c.trajectories,
        }
        for k, c in enumerate(curves)
    ]
    columns = {
        "run": np.repeat(np.arange(len(curves)), [len(c.J) for c in curves]),
        "iteration": np.concatenate([c.iteration for c in curves]),
        "J": np.concatenate([c.J for c in curves]).round(DIGITS),
        "ensemble": np.concatenate([c.ensemble for c in curves]),
    }
    written = [folder / CURVES]
    tables.write(folder / CURVES, columns, {"runs": runs, "notes": results.notes})
    (folder / TRAINED).unlink(missing_ok=True)
    if (t := results.trained) is not None:
        network = t.network
        arrays: dict[str, Any] = {
            "sigma_kappa": t.sigma_kappa,
            "iteration": t.iteration,
            "bonds": network.bonds,
            "positions": network.positions,
            "lead_sites": network.lead_sites,
        }
        for name in FAMILIES:
            arrays[name] = np.asarray(getattr(t, name), np.float16)  # only drawn, as lines
            arrays[f"{name}_end"] = np.asarray(t.theta[name], np.float32)
            arrays[f"{name}_exposure"] = np.asarray(getattr(t.exposure, name), np.float32)
        np.savez_compressed(folder / TRAINED, **arrays)
        written.append(folder / TRAINED)
    return written


def read(folder: Path) -> Results:
    """Read the results that `write` stored in a folder."""
    path = folder / CURVES
    if not tables.find_table(path).exists():
        raise ValueError(f"{folder} has no {CURVES}: make it from run folders with --runs RUNS.")
    table = tables.read(path)
    curves = []
    for k, run in enumerate(table.header["runs"]):
        rows = table.where(run=k)
        iteration = rows["iteration"].astype(int)
        ensemble = rows["ensemble"].astype(int)
        curves.append(
            (
                run["inset"],
                TrainingCurve(
                    run["name"],
                    run["sigma_kappa"],
                    iteration,
                    rows["J"],
                    ensemble,
                    run["J_stderr"],
                    run["trajectories"],
                ),
            )
        )
    runs, inset = ([curve for inset, curve in curves if inset is kind] for kind in (False, True))
    trained = _read_trained(folder / TRAINED) if (folder / TRAINED).exists() else None
    return Results(runs, inset, trained, table.header["notes"])


def _read_trained(path: Path) -> Trained:
    with np.load(path, allow_pickle=False) as file:
        a = {name: file[name] for name in file.files}
    network = tcmt.from_edges(
        a["bonds"],
        sites=len(a["positions"]),
        leads=[tcmt.Lead(int(site)) for site in a["lead_sites"]],
        positions=a["positions"],
    )
    end = {name: a[f"{name}_end"] for name in FAMILIES}
    seen = Exposure(a["omega_exposure"], a["kappa_exposure"], a["chi_exposure"])
    return Trained(
        float(a["sigma_kappa"]),
        network,
        a["iteration"],
        a["omega"],
        a["kappa"],
        a["chi"],
        end,
        seen,
    )


def _read_runs(folders: list[Path], notes: list[str]) -> list[SavedRun]:
    runs = []
    for folder in folders:
        try:
            runs.append(reading.read_run(folder))
        except ValueError as error:
            notes.append(f"{folder.name} is left out: {error}")
    return runs


def _make_curve(run: SavedRun) -> TrainingCurve:
    h = run.history
    return TrainingCurve(
        run.folder.name,
        run.sigma_kappa,
        h.iteration,
        h.J,
        h.ensemble,
        float(h.J_stderr[-1]),
        int(h.trajectories[-1]),
    )


def _read_trained_run(run: SavedRun, count: int) -> Trained:
    c = run.course
    seen = compute_exposure(0, run.task, run.trained, count=count)
    return Trained(
        run.sigma_kappa, run.task.network, c.iteration, c.omega, c.kappa, c.chi, run.trained, seen
    )


# ------------------------------------------------------------------------- lattices in mid-training


class TrainedLattice(NamedTuple):
    """A lattice in mid-training.

    task: what it was trained for.
    theta: its parameters.
    sigma_kappa: of the training.
    iteration: of the parameters; −1 if unknown.
    source: name of the run or file.
    """

    task: tcmt.Task
    theta: Params
    sigma_kappa: float
    iteration: int
    source: str


def select_midway(run: SavedRun, iteration: int | None = None) -> TrainedLattice:
    """The first record at or after `iteration`, by default after half of the run's gain in J.

    J is smoothed over 25 iterations to find where it passes the half.
    """
    if iteration is None:
        J = reading.rolling_mean(run.history.J)
        half = (J[0] + J.max()) / 2
        iteration = int(run.history.iteration[np.argmax(half <= J)])
    records = np.flatnonzero(run.course.iteration >= iteration)
    if not records.size:
        last = run.course.iteration[-1]
        raise ValueError(
            f"{run.folder} has records up to iteration {last}; got iteration {iteration}. Take an "
            "earlier one."
        )
    record = int(records[0])
    return TrainedLattice(
        run.task,
        run.course.theta(record),
        run.sigma_kappa,
        int(run.course.iteration[record]),
        run.folder.name,
    )


def from_runs(folder: Path, iteration: int | None = None) -> list[TrainedLattice]:
    """One lattice of every run folder in a folder, by σ_κ."""
    folders = reading.find_runs(folder)
    if not folders:
        raise ValueError(
            f"no runs in {folder}: --runs takes a folder of run folders, one for each σ_κ, as "
            f"`fluctua train paper --out {folder / 'sigma_kappa_0'}` makes."
        )
    return sorted(
        (select_midway(reading.read_run(path), iteration) for path in folders),
        key=lambda lattice: lattice.sigma_kappa,
    )


def from_file(path: Path, config: str = "paper") -> list[TrainedLattice]:
    """The parameters of an .npz on the lattice of its run, or of a preset or configuration file."""
    beside = path.parent / "config.toml"
    settings = configs.load_unedited(beside) if beside.exists() else configs.find_config(config)
    theta = load_parameters(path, make_network(settings))
    return [TrainedLattice(make_task(settings), theta, settings.task.sigma_kappa, -1, path.name)]


def train_small_lattice(seed: int, sigma_kappa: float) -> TrainedLattice:
    """Train a small lattice for a second, for a quick look without any run.

    3 × 4 resonators, T = 8, steps of 0.005.
    """
    task = tcmt.transmission(tcmt.rectangular(3, 4), horizon=8.0, dt=5e-3, sigma_kappa=sigma_kappa)
    k_start, k_run = jax.random.split(jax.random.key(seed))
    theta = tcmt.initial_parameters(k_start, task.network)
    # a gradient that few trajectories resolve
    theta["omega"] = 0.5 * jax.random.normal(k_start, theta["omega"].shape)
    rule = optax.multi_transform(
        {"one": optax.adam(0.02), "chi": optax.adam(2e-4)},
        {"omega": "one", "kappa": "one", "chi": "chi"},
    )
    low = {"omega": -5.0, "kappa": 0.0, "chi": -0.05}
    high = {"omega": 5.0, "kappa": 2.0, "chi": 0.05}
    training = Training(task.estimator("cpu"), theta, rule, trajectories=256, bounds=(low, high))
    *_, last = ascend(training, k_run, training.start, Length(10))
    return TrainedLattice(task, last.next_theta, sigma_kappa, 10, f"trained here, seed {seed}")


def find_nearest(lattices: list[TrainedLattice], sigma_kappa: float) -> TrainedLattice:
    """The lattice trained closest to a modulation, with exactly this modulation."""
    best = min(lattices, key=lambda lattice: abs(lattice.sigma_kappa - sigma_kappa))
    return best._replace(task=tcmt.with_noise(best.task, sigma_kappa=sigma_kappa))
