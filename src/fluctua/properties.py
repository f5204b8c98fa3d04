"""The properties of the estimator, measured (Fig. 2): four panels, each a table on disk that is measured once.

`plan` says what there is to do, `measure` does it and writes the tables, `read` reads them back for the figure and the
summary. A panel whose table exists is not measured again; a table that was measured otherwise is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fluctua import convergence, noise, tables
from fluctua.lattices import Lattice, nearest
from fluctua.noise import Done, ignore
from fluctua.scaling import Measured, PowerLaw, jackknife, power_law
from fluctua.tables import Table
from fluctua.tcmt.kernel import Binned

SIGMA_W = tuple(float(f"{0.5 * 10 ** (k / 3):.4g}") for k in range(-8, 3))
"""Noise amplitudes of c and d: three a decade, the paper's 0.5 among them."""


class Settings(NamedTuple):
    """How much is measured. The defaults are the paper's ensembles, and 80 s of an H200.

    running: trajectories of a and b. difference: of either leg of the finite difference. variance: of each point of
    c. bias: of each point of d. every: steps between two sortings into bins (1 is the paper's). site: of a and b, −1
    for `clearest_site`. fit_to: largest σ_W in the exponents of d; those of c, which are of the limit σ_W → 0, end a
    decade below.
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


QUICK = Settings(
    running=20_000, difference=2000, variance=400, bias=2000, every=50, pilot=500, sigma_w=SIGMA_W[::2], budget=10_000
)
"""A look in some seconds, on a small lattice."""


class Panel(NamedTuple):
    """One table to measure. work: trajectories. make: told of those done, returns columns and what goes above them."""

    name: str
    path: Path
    work: int
    settings: dict[str, Any]
    make: Callable[[Done], tuple[dict[str, Any], dict[str, Any]]]


def plan(folder: Path, lattices: list[Lattice], settings: Settings, backend: str) -> list[Panel]:
    """The panels a–d on lattices in the middle of their training; each σ_κ on the one trained closest to it."""
    s = settings
    key = jax.random.key(s.seed)
    calm, rough = s.sigma_kappa[0], s.sigma_kappa[-1]
    panels = []
    for name, sigma in (("a", calm), ("b", rough)):
        lattice = nearest(lattices, sigma)
        told = _told([lattice], s, "running", "group", "difference", "pilot", "site", "every", "seed", "budget")
        work = s.running + s.pilot + 2 * s.difference
        k = jax.random.fold_in(key, ord(name))
        panels.append(Panel(name, folder / f"panel_{name}.csv", work, {**told, "sigma_kappa": sigma},
                            _convergence(k, lattice, s, backend)))  # fmt: skip
    each = [nearest(lattices, sigma) for sigma in s.sigma_kappa]
    points = len(s.sigma_w) * len(each)
    told = _told(each, s, "variance", "every", "sigma_w", "sigma_kappa", "fit_to", "seed")
    k = jax.random.fold_in(key, ord("c"))
    panels.append(Panel("c", folder / "panel_c.csv", 2 * s.variance * points, told, _variances(k, each, s, backend)))
    told = _told(each, s, "bias", "sigma_w", "sigma_kappa", "fit_to", "seed")
    work = s.bias * (points + len(each))
    k = jax.random.fold_in(key, ord("d"))
    panels.append(Panel("d", folder / "panel_d.csv", work, told, _returns(k, each, s, backend)))
    return panels


def measure(panels: list[Panel], *, replace: bool = False) -> Iterator[tuple[Panel, Callable[[Done], None]]]:
    """The panels that are not there yet, each with what measures it; tables of other settings are refused first."""
    missing = []
    for panel in panels:
        if panel.path.exists() and not replace:
            _same(panel)
        else:
            missing.append(panel)
    for panel in missing:
        yield panel, lambda done, panel=panel: tables.write(  # type: ignore[misc]
            panel.path, *(lambda columns, told: (columns, {**panel.settings, **told}))(*panel.make(done))
        )


def _same(panel: Panel) -> None:
    told = tables.read(panel.path).told
    for name, value in panel.settings.items():
        if told.get(name) != _plain(value):
            raise ValueError(
                f"{panel.path} was measured with {name} = {told.get(name)}, not {_plain(value)}. Pass --replace to "
                "measure it again, or --from-tables to draw it as it is."
            )


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, tuple | list) else value


def _told(lattices: list[Lattice], settings: Settings, *names: str) -> dict[str, Any]:
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


# ------------------------------------------------------------------------------------------ measuring


def _convergence(key: Any, lattice: Lattice, s: Settings, backend: str) -> Any:
    def make(done: Done) -> tuple[dict[str, Any], dict[str, Any]]:
        k_pilot, k_run, k_difference = jax.random.split(key, 3)
        task, theta = lattice.task, lattice.theta
        site = s.site
        if site < 0:
            site = convergence.clearest_site(k_pilot, task, theta, count=s.pilot, backend=backend)
        done(s.pilot)
        value, error = convergence.finite_difference(
            k_difference, task, theta, site, count=s.difference, backend=backend
        )
        done(2 * s.difference)
        run = convergence.running(
            k_run, task, theta, site, s.running, group=s.group, block=s.block, every=s.every, backend=backend, done=done
        )
        columns = {"trajectories": run.trajectories, "block_mean": run.mean, "block_mean_square": run.square}
        told = {"block": s.block, "chosen_site": site, "finite_difference": value, "finite_difference_stderr": error}
        return columns, told

    return make


def _variances(key: Any, lattices: list[Lattice], s: Settings, backend: str) -> Any:
    def make(done: Done) -> tuple[dict[str, Any], dict[str, Any]]:
        rows = []
        for lattice, sigma in zip(lattices, s.sigma_kappa, strict=True):
            for name, baseline in (("none", "none"), ("binned", Binned(every=s.every, group=max(s.variance, 2)))):
                found = noise.variances(
                    key, lattice.task, lattice.theta, s.sigma_w, baseline=baseline, count=s.variance, backend=backend,
                    done=done,
                )  # fmt: skip
                rows += [
                    (sigma, name, w, b, found[i, b])
                    for i, w in enumerate(s.sigma_w)
                    for b in range(found.shape[1])
                ]  # fmt: skip
        return dict(zip(("sigma_kappa", "baseline", "sigma_w", "batch", "variance"), zip(*rows, strict=True),
                        strict=True)), {}  # fmt: skip

    return make


def _returns(key: Any, lattices: list[Lattice], s: Settings, backend: str) -> Any:
    def make(done: Done) -> tuple[dict[str, Any], dict[str, Any]]:
        rows, silent = [], []
        for lattice, sigma in zip(lattices, s.sigma_kappa, strict=True):
            found = noise.returns(
                key, lattice.task, lattice.theta, s.sigma_w, count=s.bias, backend=backend, done=done
            )  # fmt: skip
            silent.append(found.silent)
            for b, square in enumerate(found.silent_square):
                rows.append((sigma, 0.0, b, 0.0, square))
            rows += [
                (sigma, w, b, found.bias[i, b], found.square[i, b])
                for i, w in enumerate(s.sigma_w)
                for b in range(found.bias.shape[1])
            ]
        names = ("sigma_kappa", "sigma_w", "batch", "bias", "square")
        return dict(zip(names, zip(*rows, strict=True), strict=True)), {"J_silent": silent}

    return make


# ------------------------------------------------------------------------------------------ what came out


class Convergence(NamedTuple):
    """Panel a or b. z: (estimate − difference) over their common standard error."""

    sigma_kappa: float
    site: int
    lattice: str
    running: convergence.Running
    difference: Measured
    budget: int
    estimate: Measured
    z: float


class Curve(NamedTuple):
    """Points (S,) with standard errors, and the power law through those with σ_W ≤ fit_to; None if that has no sense."""

    sigma_kappa: float
    sigma_w: np.ndarray
    value: np.ndarray
    error: np.ndarray
    law: PowerLaw | None


class Properties(NamedTuple):
    """Everything that the figure shows. variance: by (σ_κ, baseline). crossover: σ_W at which the Wiener noise makes
    as much of the return's variance as the modulation does, by σ_κ > 0. operating: σ_W of the training.
    """

    convergence: list[Convergence]
    variance: dict[tuple[float, str], Curve]
    bias: dict[float, Curve]
    spread: dict[float, Curve]
    crossover: dict[float, Measured]
    operating: float
    told: dict[str, dict[str, Any]]


def read(folder: Path) -> Properties:
    """The four tables of a folder, and what is derived from them."""
    missing = [name for name in "abcd" if not (folder / f"panel_{name}.csv").exists()]
    if missing:
        raise ValueError(f"{folder} has no table of panel {', '.join(missing)}: measure it with --runs RUNS.")
    a, b, c, d = (tables.read(folder / f"panel_{name}.csv") for name in "abcd")
    fit_to = c.told["fit_to"]
    variance = {
        (sigma, name): _curve(c.where(sigma_kappa=sigma, baseline=name), "variance", sigma, fit_to / 10)
        for sigma in c.told["sigma_kappa"]
        for name in ("none", "binned")
    }
    bias, spread, crossover = {}, {}, {}
    for sigma in d.told["sigma_kappa"]:
        rows = d.where(sigma_kappa=sigma)
        noisy = {name: column[rows["sigma_w"] > 0] for name, column in rows.items()}
        bias[sigma] = _curve(noisy, "bias", sigma, fit_to)
        spread[sigma] = _curve(noisy, "square", sigma, fit_to, np.sqrt)
        if sigma > 0:
            spread[sigma] = spread[sigma]._replace(law=None)  # not a power law: it levels off
            crossover[sigma] = _crossover(rows, fit_to)
    return Properties([_converged(a), _converged(b)], variance, bias, spread, crossover, c.told["trained_sigma_w"],
                      {name: table.told for name, table in zip("abcd", (a, b, c, d), strict=True)})  # fmt: skip


def _converged(table: Table) -> Convergence:
    told = table.told
    run = convergence.Running(told["block"], table.columns["block_mean"], table.columns["block_mean_square"])
    estimate = Measured(float(run.estimate[-1]), float(run.stderr[-1]))
    other = Measured(told["finite_difference"], told["finite_difference_stderr"])
    z = (estimate.value - other.value) / np.hypot(estimate.error, other.error)
    return Convergence(
        told["sigma_kappa"], told["chosen_site"], told["lattices"][0], run, other, told["budget"], estimate, float(z)
    )


def _grid(rows: dict[str, np.ndarray], name: str) -> tuple[np.ndarray, np.ndarray]:
    """σ_W (S,) and the batches of one column (S, B)."""
    sigma_w = np.unique(rows["sigma_w"])
    return sigma_w, np.array([rows[name][rows["sigma_w"] == w] for w in sigma_w])


def _curve(rows: dict[str, np.ndarray], name: str, sigma: float, fit_to: float, of: Any = np.abs) -> Curve:
    sigma_w, batches = _grid(rows, name)
    value, error = jackknife(of, batches)
    small = sigma_w <= fit_to
    law = power_law(sigma_w[small], batches[small], of) if small.sum() > 1 else None
    return Curve(sigma, sigma_w, value, error, law)


def _crossover(rows: dict[str, np.ndarray], fit_to: float) -> Measured:
    """σ_W = s_κ/a in std² = s_κ² + a²σ_W²: s_κ² is the variance without Wiener noise, a² from the point at fit_to."""
    sigma_w, squares = _grid(rows, "square")
    at = int(np.argmax(sigma_w[sigma_w <= fit_to]))

    def where(square: np.ndarray) -> np.ndarray:
        return sigma_w[at] * np.sqrt(square[0] / np.maximum(square[at] - square[0], 1e-300))

    value, error = jackknife(where, squares)
    return Measured(float(value), float(error))


def at(curve: Curve, sigma_w: float) -> Measured:
    """The point of a curve closest to σ_W."""
    i = int(np.argmin(np.abs(curve.sigma_w - sigma_w)))
    return Measured(float(curve.value[i]), float(curve.error[i]))
