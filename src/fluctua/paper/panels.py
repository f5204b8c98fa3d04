"""The measurements of Fig. 2: four panels, each a table on disk that is measured once.

`plan` says what there is to do and `measure` does it. A panel whose table exists is not measured
again; a table that was measured otherwise is refused. `fluctua.paper.properties` reads the tables.
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
from fluctua.paper.training import TrainedLattice, nearest
from fluctua.runs import noise
from fluctua.runs.noise import Done, difference_returns, ignore_progress
from fluctua.store import tables
from fluctua.tcmt.kernel.options import Binned
from fluctua.tcmt.tasks import Task

SIGMA_W = tuple(float(f"{0.5 * 10 ** (k / 3):.4g}") for k in range(-8, 3))
"""Noise amplitudes of c and d: three a decade, the paper's 0.5 among them."""


DIGITS = 6
"""Of the numbers in the tables: a thousandth of the least standard error of a batch, or better."""


class PanelSettings(NamedTuple):
    """How much is measured. The defaults are the paper's ensembles; some 80 s of H200 kernels, by
    results/bench.

    running: trajectories of a and b. difference: of either leg of the finite difference. variance:
    of each point of c. bias: of each point of d. every: steps between two sortings into bins (1 is
    the paper's). site: of a and b, −1 for `clearest_site`. fit_to: largest σ_W in the exponents of
    d; those of c, which are of the limit σ_W → 0, end a decade below.
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
"""A look in some seconds, on a small lattice."""


class Panel(NamedTuple):
    """One table to measure. work: trajectories. make: calls back with those done, returns
    columns, header.
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
    """The panels a–d on lattices in the middle of their training; each σ_κ on the one trained
    closest to it.
    """
    s = settings
    key = jax.random.key(s.seed)
    calm = s.sigma_kappa[0]
    rough = s.sigma_kappa[-1]
    panels = []
    for name, sigma in (("a", calm), ("b", rough)):
        lattice = nearest(lattices, sigma)
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
                _convergence(k, lattice, s, backend),
            )
        )
    each = [nearest(lattices, sigma) for sigma in s.sigma_kappa]
    points = len(s.sigma_w) * len(each)
    header = _header(each, s, "variance", "every", "sigma_w", "sigma_kappa", "fit_to", "seed")
    k = jax.random.fold_in(key, ord("c"))
    panels.append(
        Panel(
            "c",
            folder / panel_file("c"),
            2 * s.variance * points,
            header,
            _variances(k, each, s, backend),
        )
    )
    header = _header(each, s, "bias", "sigma_w", "sigma_kappa", "fit_to", "seed")
    work = s.bias * (points + len(each))
    k = jax.random.fold_in(key, ord("d"))
    panels.append(Panel("d", folder / panel_file("d"), work, header, _returns(k, each, s, backend)))
    return panels


def measure(
    panels: list[Panel], *, replace: bool = False
) -> Iterator[tuple[Panel, Callable[[Done], None]]]:
    """The panels that are not there yet, each with what measures it; tables of other settings
    are refused first.
    """
    missing = []
    for panel in panels:
        if tables.find_table(panel.path).exists() and not replace:
            _same(panel)
        else:
            missing.append(panel)
    for panel in missing:
        yield panel, partial(_write, panel)


def _write(panel: Panel, done: Done) -> None:
    columns, results = panel.make(done)
    tables.write(panel.path, columns, {**panel.settings, **results}, digits=DIGITS)


def _same(panel: Panel) -> None:
    header = tables.read(panel.path).header
    for name, value in panel.settings.items():
        if header.get(name) != _plain(value):
            raise ValueError(
                f"{panel.path} was measured with {name} = {header.get(name)}, not {_plain(value)}. "
                "Pass --replace to measure it again, or --from-tables to draw it as it is."
            )


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, tuple | list) else value


def _header(lattices: list[TrainedLattice], settings: PanelSettings, *names: str) -> dict[str, Any]:
    """What a table says of itself."""
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
    """Means of G and of G² over blocks of as many trajectories, in the order in which they were
    run. (K,)
    """

    block: int
    mean: np.ndarray
    square: np.ndarray

    @property
    def trajectories(self) -> np.ndarray:
        """How many are in the running mean after each block."""
        return self.block * np.arange(1, len(self.mean) + 1)

    @property
    def estimate(self) -> np.ndarray:
        """The running mean."""
        return np.cumsum(self.mean) / np.arange(1, len(self.mean) + 1)

    @property
    def stderr(self) -> np.ndarray:
        """Its standard error."""
        second = np.cumsum(self.square) / np.arange(1, len(self.mean) + 1)
        return np.sqrt((second - self.estimate**2) / (self.trajectories - 1))


def clearest_site(
    key: Array, task: Task, theta: Params, *, count: int = 1000, backend: str = "cpu"
) -> int:
    """The resonator whose ∂J/∂ω should be resolved best: largest |slope| / stderr, leads left out.

    The paper chose its sites "to favor the resolvability of systematic bias". The slope is that of
    the return without Wiener noise, by one reverse sweep in JAX; the error is that of a pilot of
    `count` trajectories. Choosing by the pilot's own estimate would choose its luckiest noise.
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


def running(
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
    """∂J/∂ω of one site from `count` trajectories with the paper's baseline, a group of them at a
    time.

    group: trajectories that share a baseline; a multiple of `block`. every: steps between two
    sortings into bins. Only the one column is kept, so the memory is that of one group.
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

    Truncation: J'''h²/6, 10⁻⁶ J'''/6.
    """
    unit = np.zeros(task.network.sites)
    unit[site] = 1.0
    each = difference_returns(key, task, theta, {"omega": unit}, count=count, backend=backend)
    return float(each.mean()), float(sample_error(each))


def _convergence(key: Any, lattice: TrainedLattice, s: PanelSettings, backend: str) -> Any:
    def make(done: Done) -> tuple[dict[str, Any], dict[str, Any]]:
        k_pilot, k_run, k_difference = jax.random.split(key, 3)
        task = lattice.task
        theta = lattice.theta
        site = s.site
        if site < 0:
            site = clearest_site(k_pilot, task, theta, count=s.pilot, backend=backend)
        done(s.pilot)
        value, error = finite_difference(
            k_difference, task, theta, site, count=s.difference, backend=backend
        )
        done(2 * s.difference)
        run = running(
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


def _variances(key: Any, lattices: list[TrainedLattice], s: PanelSettings, backend: str) -> Any:
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


def _returns(key: Any, lattices: list[TrainedLattice], s: PanelSettings, backend: str) -> Any:
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
