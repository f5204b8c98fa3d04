"""Lattices in the middle of their training: what the paper measures its estimator on (Fig. 2)."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax

from fluctua import tcmt
from fluctua.core.types import Params
from fluctua.learn.train import box, train
from fluctua.runs.build import make_network, make_task
from fluctua.runs.config import load, named
from fluctua.runs.evaluate import load_parameters
from fluctua.runs.reading import Run, find_runs, read_run, rolling_mean


class Lattice(NamedTuple):
    """θ on the way. task: what it was trained for. iteration: where it is from, −1 if that is not known."""

    task: tcmt.Task
    theta: Params
    sigma_kappa: float
    iteration: int
    source: str


def midway(run: Run, iteration: int | None = None) -> Lattice:
    """The first record at or after `iteration`; if not given, after half of the run's gain in J is reached.

    J is smoothed over 25 iterations before it is asked where it passes the half.
    """
    if iteration is None:
        J = rolling_mean(run.history.J)
        half = (J[0] + J.max()) / 2
        iteration = int(run.history.iteration[np.argmax(half <= J)])
    records = np.flatnonzero(run.course.iteration >= iteration)
    if not records.size:
        last = run.course.iteration[-1]
        raise ValueError(
            f"{run.folder} has records up to iteration {last}; asked for {iteration}. Take an earlier one."
        )
    at = int(records[0])
    return Lattice(run.task, run.course.theta(at), run.sigma_kappa, int(run.course.iteration[at]), run.folder.name)


def from_runs(folder: Path, iteration: int | None = None) -> list[Lattice]:
    """One lattice of every run folder in a folder, by σ_κ."""
    folders = find_runs(folder)
    if not folders:
        raise ValueError(f"no runs in {folder}: --runs takes a folder of run folders, one for each σ_κ, as "
                         f"`fluctua train paper --out {folder / 'sigma_kappa_0'}` makes.")  # fmt: skip
    return sorted((midway(read_run(path), iteration) for path in folders), key=lambda lattice: lattice.sigma_kappa)


def from_file(path: Path, config: str = "paper") -> list[Lattice]:
    """The parameters of an .npz on the lattice of a preset or configuration file; the run's own if it lies in one."""
    beside = path.parent / "config.toml"
    settings = load(beside) if beside.exists() else named(config)
    theta = load_parameters(path, make_network(settings))
    return [Lattice(make_task(settings), theta, settings.task.sigma_kappa, -1, path.name)]


def trained_here(seed: int, sigma_kappa: float, *, iterations: int = 10, count: int = 256) -> Lattice:
    """A small lattice, trained for a second: for a quick look without any run. 3 × 4, T = 8, steps of 0.005."""
    task = tcmt.transmission(tcmt.rectangular(3, 4), horizon=8.0, dt=5e-3, sigma_kappa=sigma_kappa)
    k_start, k_run = jax.random.split(jax.random.key(seed))
    theta = tcmt.initial_parameters(k_start, task.network)
    theta["omega"] = 0.5 * jax.random.normal(k_start, theta["omega"].shape)  # a gradient that few trajectories resolve
    rule = optax.multi_transform(
        {"one": optax.adam(0.02), "chi": optax.adam(2e-4)}, {"omega": "one", "kappa": "one", "chi": "chi"}
    )
    bounds = box({"omega": -5.0, "kappa": 0.0, "chi": -0.05}, {"omega": 5.0, "kappa": 2.0, "chi": 0.05})
    *_, last = train(k_run, theta, task.estimator("cpu"), rule, count=count, iterations=iterations, project=bounds)
    return Lattice(task, last.next_theta, sigma_kappa, iterations, f"trained here, seed {seed}")


def nearest(lattices: list[Lattice], sigma_kappa: float) -> Lattice:
    """The lattice that was trained at the modulation closest to this, put under exactly this."""
    best = min(lattices, key=lambda lattice: abs(lattice.sigma_kappa - sigma_kappa))
    return best._replace(task=tcmt.with_noise(best.task, sigma_kappa=sigma_kappa))
