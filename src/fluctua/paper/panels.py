"""The measurements of Fig. 2: four panels, each a table on disk that is measured once.

`plan` lists the panels and `measure` measures them. A panel whose table exists is not measured
again; a table with other settings is refused. `fluctua.paper.properties` reads the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fluctua.core.arrays import Array, Params
from fluctua.core.draws import no_noise
from fluctua.core.estimate import sample_error
from fluctua.learn.reference import pathwise
from fluctua.paper.training import TrainedLattice, find_nearest
from fluctua.runs import noise
from fluctua.runs.noise import Done, difference_returns, ignore_progress
from fluctua.store import tables
from fluctua.tcmt.kernel.options import Binned
from fluctua.tcmt.tasks import Task

SIGMA_W = tuple(float(f"{0.5 * 10 ** (k / 3):.4g}") for k in range(-8, 3))
"""Noise amplitudes of c and d: three per decade, the paper's 0.5 among them."""


DIGITS = 6
"""Digits in the tables: a thousandth of the smallest standard error of a batch, or better."""


class PanelSettings(NamedTuple):
    """Sizes of measurements. The defaults are the paper's ensembles, about 80 s of H200 kernels.

    running: trajectories of a and b.
    group: trajectories that share a baseline.
    block: trajectories per block mean.
    difference: trajectories of either side of the finite difference.
    variance: trajectories of each point of c.
    bias: trajectories of each point of d.
    every: steps between two sortings into bins (1 is the paper's).
    pilot: trajectories that select the site.
    site: of a and b; −1 for `find_clearest_site`.
    sigma_w, sigma_kappa: amplitudes.
    fit_to: largest σ_W in the exponents of d; those of c, for the limit σ_W → 0, end a decade
        below.
    budget: largest ensemble of the training.
    seed: of all noise.
    """

    running: int = 200_000
    group: int = 2000
    block: int = 100
    difference: int = 10_000
    variance: int = 1000
    bias: int = 10_000
    every: int = 100
    pilot: int = 1000
    site: int = -1
    sigma_w: tuple[float, ...] = SIGMA_W
    sigma_kappa: tuple[float, ...] = (0.0, 0.05, 0.2)
    fit_to: float = 0.5
    budget: int = 30_000
    seed: int = 0


QUICK = PanelSettings(
    running=8000,
    difference=1000,
    variance=300,
    bias=1000,
    every=100,
    pilot=300,
    sigma_w=SIGMA_W[::2],
    budget=4000,
)
"""Settings for a quick look on a small lattice, a few seconds."""


class Panel(NamedTuple):
    """One table to measure.

    name, path: of the table.
    work: number of trajectories.
    settings: header of the table.
    make: measures it; calls back with the number of trajectories done, returns columns and header.
    """

    name: str
    path: Path
    work: int
    settings: dict[str, Any]
    make: Callable[[Done], tuple[dict[str, Any], dict[str, Any]]]


def panel_file(name: str) -> str:
    """The name of a panel's table."""
    return f"panel_{name}.csv.gz"


def plan(
    folder: Path, lattices: list[TrainedLattice], settings: PanelSettings, backend: str
) -> list[Panel]:
    """List the panels a–d on lattices in mid-training.

    Each σ_κ uses the lattice trained closest to it.
    """
    s = settings
    key = jax.random.key(s.seed)
    unmodulated = s.sigma_kappa[0]
    modulated = s.sigma_kappa[-1]
    panels = []
    for name, sigma in (("a", unmodulated), ("b", modulated)):
        lattice = find_nearest(lattices, sigma)
        header = _header(
            [lattice],
            s,
            "running",
            "group",
            "difference",
            "pilot",
            "site",
            "every",
            "seed",
            "budget",
        )
        work = s.running + s.pilot + 2 * s.difference
        k = jax.random.fold_in(key, ord(name))
        panels.append(
            Panel(
                name,
                folder / panel_file(name),
                work,
                {**header, "sigma_kappa": sigma},
                _plan_convergence(k, lattice, s, backend),
            )
        )
    selected = [find_nearest(lattices, sigma) for sigma in s.sigma_kappa]
    points = len(s.sigma_w) * len(selected)
    header = _header(selected, s, "variance", "every", "sigma_w", "sigma_kappa", "fit_to", "seed")
    k = jax.random.fold_in(key, ord("c"))
    panels.append(
        Panel(
            "c",
            folder / panel_file("c"),
            2 * s.variance * points,
            header,
            _plan_variances(k, selected, s, backend),
        )
    )
    header = _header(selected, s, "bias", "sigma_w", "sigma_kappa", "fit_to", "seed")
    work = s.bias * (points + len(selected))
    k = jax.random.fold_in(key, ord("d"))
    panels.append(
        Panel("d", folder / panel_file("d"), work, header, _plan_returns(k, selected, s, backend))
    )
    return panels


def measure(
    panels: list[Panel], *, replace: bool = False
) -> Iterator[tuple[Panel, Callable[[Done], None]]]:
    """Yield the missing panels, each with the function that measures it.

    Tables with other settings are refused first.
    """
    missing = []
    for panel in panels:
        if tables.find_table(panel.path).exists() and not replace:
            _refuse_other_settings(panel)
        else:
            missing.append(panel)
    for panel in missing:
        yield panel, partial(_write, panel)


def _write(panel: Panel, done: Done) -> None:
    columns, results = panel.make(done)
    tables.write(panel.path, columns, {**panel.settings, **results}, digits=DIGITS)


def _refuse_other_settings(panel: Panel) -> None:
    header = tables.read(panel.path).header
    for name, value in panel.settings.items():
        stored = header.get(name)
        wanted = _as_lists(value)
        if stored != wanted:
            raise ValueError(
                f"{panel.path} was measured with {name} = {stored}, not {wanted}. "
                "Pass --replace to measure it again, or --from-tables to draw it as it is."
            )


def _as_lists(value: Any) -> Any:
    return [_as_lists(v) for v in value] if isinstance(value, tuple | list) else value


def _header(lattices: list[TrainedLattice], settings: PanelSettings, *names: str) -> dict[str, Any]:
    """The header of a table: lattice, grid, noise and the named settings."""
    first = lattices[0].task
    return {
        "lattices": [f"{lattice.source}, iteration {lattice.iteration}" for lattice in lattices],
        "sites": first.network.sites,
        "horizon": float(first.t[-1]),
        "dt": float(first.t[-1]) / (len(first.t) - 1),
        "trained_sigma_w": float(first.network.sigma_r[0]),
        **{name: getattr(settings, name) for name in names},
    }


# ---------------------------------------------------------------------------------------- measuring


class Running(NamedTuple):
    """Means of G and of G² over blocks of equal size, in order. Shape (K,)."""

    block: int
    mean: np.ndarray
    square: np.ndarray

    @property
    def trajectories(self) -> np.ndarray:
        """Number of trajectories in the running mean after each block."""
        return self.block * np.arange(1, len(self.mean) + 1)

    @property
    def estimate(self) -> np.ndarray:
        """The running mean."""
        return np.cumsum(self.mean) / np.arange(1, len(self.mean) + 1)

    @property
    def stderr(self) -> np.ndarray:
        """Standard error of the running mean."""
        second = np.cumsum(self.square) / np.arange(1, len(self.mean) + 1)
        return np.sqrt((second - self.estimate**2) / (self.trajectories - 1))


def find_clearest_site(
    key: Array, task: Task, theta: Params, *, count: int = 1000, backend: str = "cpu"
) -> int:
    """The resonator whose ∂J/∂ω should be resolved best: largest |slope| / stderr, leads left out.

    The paper chose its sites "to favor the resolvability of systematic bias". The slope is that of
    the return without Wiener noise, by one reverse sweep in JAX; the error is that of a pilot of
    `count` trajectories. Selecting by the pilot's own estimate would select its luckiest noise.
    """
    k_slope, k_pilot = jax.random.split(key)
    modulated = task.modulation is not None and task.modulation.sigma_kappa > 0
    slopes = pathwise(task.objective, task.simulator(no_noise))(
        k_slope, theta, 16 if modulated else 1
    )
    pilot = task.estimator(backend)(k_pilot, theta, count)
    z = np.abs(np.asarray(slopes.gradient["omega"])) / np.asarray(pilot.stderr["omega"])
    if len(z) > len(set(task.network.lead_sites.tolist())):
        z[task.network.lead_sites] = 0
    return int(np.argmax(z))


def estimate_running(
    key: Array,
    task: Task,
    theta: Params,
    site: int,
    count: int,
    *,
    group: int = 2000,
    block: int = 100,
    every: int = 100,
    backend: str = "cpu",
    done: Done = ignore_progress,
) -> Running:
    """Running estimate of ∂J/∂ω of one site with the paper's baseline, group by group.

    Only one column is kept, so that the memory is that of one group.

    group: trajectories that share a baseline; a multiple of `block`.
    every: steps between two sortings into bins.
    """
    if group % block or count % group:
        raise ValueError(
            f"`count` must be whole groups and a group whole blocks; got {count}, {group}, {block}."
        )
    baseline: Any = Binned(every=every, group=group)
    estimator: Any = task.estimator(backend, baseline=baseline)
    means = []
    squares = []
    for first in range(0, count, group):
        samples = estimator.run(key, theta, group, samples=True, first=first).samples
        column = np.asarray(samples.omega[:, site], float).reshape(-1, block)
        means.append(column.mean(axis=1))
        squares.append((column**2).mean(axis=1))
        done(group)
    return Running(block, np.concatenate(means), np.concatenate(squares))


def finite_difference(
    key: Array, task: Task, theta: Params, site: int, *, count: int = 10_000, backend: str = "cpu"
) -> tuple[float, float]:
    """∂J/∂ω of one site by common-noise differences, and its standard error.

    The truncation error is J'''h²/6 = 10⁻⁶ J'''/6.
    """
    unit = np.zeros(task.network.sites)
    unit[site] = 1.0
    selected = difference_returns(key, task, theta, {"omega": unit}, count=count, backend=backend)
    return float(selected.mean()), float(sample_error(selected))


def _plan_convergence(key: Any, lattice: TrainedLattice, s: PanelSettings, backend: str) -> Any:
    def make(done: Done) -> tuple[dict[str, Any], dict[str, Any]]:
        k_pilot, k_run, k_difference = jax.random.split(key, 3)
        task = lattice.task
        theta = lattice.theta
        site = s.site
        if site < 0:
            site = find_clearest_site(k_pilot, task, theta, count=s.pilot, backend=backend)
        done(s.pilot)
        value, error = finite_difference(
            k_difference, task, theta, site, count=s.difference, backend=backend
        )
        done(2 * s.difference)
        run = estimate_running(
            k_run,
            task,
            theta,
            site,
            s.running,
            group=s.group,
            block=s.block,
            every=s.every,
            backend=backend,
            done=done,
        )
        columns = {
            "trajectories": run.trajectories,
            "block_mean": run.mean,
            "block_mean_square": run.square,
        }
        results = {
            "block": s.block,
            "chosen_site": site,
            "finite_difference": value,
            "finite_difference_stderr": error,
        }
        return columns, results

    return make


def _plan_variances(
    key: Any, lattices: list[TrainedLattice], s: PanelSettings, backend: str
) -> Any:
    def make(done: Done) -> tuple[dict[str, Any], dict[str, Any]]:
        rows = []
        for lattice, sigma in zip(lattices, s.sigma_kappa, strict=True):
            for name, baseline in (
                ("none", "none"),
                ("binned", Binned(every=s.every, group=max(s.variance, 2))),
            ):
                variance = noise.measure_variances(
                    key,
                    lattice.task,
                    lattice.theta,
                    s.sigma_w,
                    baseline=baseline,
                    count=s.variance,
                    backend=backend,
                    done=done,
                )
                rows += [
                    (sigma, name, w, b, variance[i, b])
                    for i, w in enumerate(s.sigma_w)
                    for b in range(variance.shape[1])
                ]
        return dict(
            zip(
                ("sigma_kappa", "baseline", "sigma_w", "batch", "variance"),
                zip(*rows, strict=True),
                strict=True,
            )
        ), {}

    return make


def _plan_returns(key: Any, lattices: list[TrainedLattice], s: PanelSettings, backend: str) -> Any:
    def make(done: Done) -> tuple[dict[str, Any], dict[str, Any]]:
        rows = []
        noiseless = []
        for lattice, sigma in zip(lattices, s.sigma_kappa, strict=True):
            measured = noise.measure_returns(
                key,
                lattice.task,
                lattice.theta,
                s.sigma_w,
                count=s.bias,
                backend=backend,
                done=done,
            )
            noiseless.append(measured.noiseless)
            for b, square in enumerate(measured.noiseless_square):
                rows.append((sigma, 0.0, b, 0.0, square))
            rows += [
                (sigma, w, b, measured.bias[i, b], measured.square[i, b])
                for i, w in enumerate(s.sigma_w)
                for b in range(measured.bias.shape[1])
            ]
        names = ("sigma_kappa", "sigma_w", "batch", "bias", "square")
        return dict(zip(names, zip(*rows, strict=True), strict=True)), {"J_silent": noiseless}

    return make
