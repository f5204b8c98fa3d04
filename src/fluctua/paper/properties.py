"""The properties of the estimator (Fig. 2), from the tables that `fluctua.paper.panels` measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fluctua.learn.scaling import Measured, PowerLaw, jackknife, power_law
from fluctua.paper import convergence
from fluctua.store import tables
from fluctua.store.tables import Table


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
    """Points (S,) with standard errors, and the power law through those up to fit_to; None where there is none."""

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
