"""Properties of the estimator (Fig. 2) from the measured tables, beside the paper's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fluctua.learn.repetitions import Measured, PowerLaw, jackknife, power_law
from fluctua.paper.panels import Running, panel_file
from fluctua.store import tables
from fluctua.store.tables import Table


class Convergence(NamedTuple):
    """Panel a or b.

    sigma_kappa, site, lattice: what was measured.
    running: the running estimate.
    difference: the finite difference.
    budget: largest ensemble of the training.
    estimate: at the end.
    z: (estimate − difference) over their common standard error.
    """

    sigma_kappa: float
    site: int
    lattice: str
    running: Running
    difference: Measured
    budget: int
    estimate: Measured
    z: float


class Curve(NamedTuple):
    """Points (S,) with standard errors against σ_W.

    sigma_kappa: of the curve.
    sigma_w, value, error: the points.
    law: power law through the points up to fit_to; None where there is none.
    """

    sigma_kappa: float
    sigma_w: np.ndarray
    value: np.ndarray
    error: np.ndarray
    law: PowerLaw | None


class Properties(NamedTuple):
    """Everything that figure 2 shows.

    convergence: panels a and b.
    variance: by (σ_κ, baseline).
    bias, spread: by σ_κ.
    crossover: σ_W at which Wiener noise and modulation contribute equally to the return's variance,
        by σ_κ > 0.
    operating: σ_W of the training.
    headers: of the four tables.
    """

    convergence: list[Convergence]
    variance: dict[tuple[float, str], Curve]
    bias: dict[float, Curve]
    spread: dict[float, Curve]
    crossover: dict[float, Measured]
    operating: float
    headers: dict[str, dict[str, Any]]


def read(folder: Path) -> Properties:
    """Read the four tables of a folder and derive the properties."""
    paths = {name: folder / panel_file(name) for name in "abcd"}
    missing = [name for name, path in paths.items() if not tables.find_table(path).exists()]
    if missing:
        raise ValueError(
            f"{folder} has no table of panel {', '.join(missing)}: measure it with --runs RUNS."
        )
    a, b, c, d = map(tables.read, paths.values())
    fit_to = c.header["fit_to"]
    variance = {
        (sigma, name): _make_curve(
            c.where(sigma_kappa=sigma, baseline=name), "variance", sigma, fit_to / 10
        )
        for sigma in c.header["sigma_kappa"]
        for name in ("none", "binned")
    }
    bias = {}
    spread = {}
    crossover = {}
    for sigma in d.header["sigma_kappa"]:
        rows = d.where(sigma_kappa=sigma)
        noisy = {name: column[rows["sigma_w"] > 0] for name, column in rows.items()}
        bias[sigma] = _make_curve(noisy, "bias", sigma, fit_to)
        spread[sigma] = _make_curve(noisy, "square", sigma, fit_to, np.sqrt)
        if sigma > 0:
            spread[sigma] = spread[sigma]._replace(law=None)  # not a power law: it levels off
            crossover[sigma] = _find_crossover(rows, fit_to)
    return Properties(
        [_read_convergence(a), _read_convergence(b)],
        variance,
        bias,
        spread,
        crossover,
        c.header["trained_sigma_w"],
        {name: table.header for name, table in zip("abcd", (a, b, c, d), strict=True)},
    )


def _read_convergence(table: Table) -> Convergence:
    header = table.header
    run = Running(header["block"], table.columns["block_mean"], table.columns["block_mean_square"])
    estimate = Measured(float(run.estimate[-1]), float(run.stderr[-1]))
    other = Measured(header["finite_difference"], header["finite_difference_stderr"])
    z = (estimate.value - other.value) / np.hypot(estimate.error, other.error)
    return Convergence(
        header["sigma_kappa"],
        header["chosen_site"],
        header["lattices"][0],
        run,
        other,
        header["budget"],
        estimate,
        float(z),
    )


def _read_grid(rows: dict[str, np.ndarray], name: str) -> tuple[np.ndarray, np.ndarray]:
    """σ_W (S,) and the batches of one column (S, B)."""
    sigma_w = np.unique(rows["sigma_w"])
    return sigma_w, np.array([rows[name][rows["sigma_w"] == w] for w in sigma_w])


def _make_curve(
    rows: dict[str, np.ndarray], name: str, sigma: float, fit_to: float, of: Any = np.abs
) -> Curve:
    sigma_w, batches = _read_grid(rows, name)
    value, error = jackknife(of, batches)
    small = sigma_w <= fit_to
    law = power_law(sigma_w[small], batches[small], of) if small.sum() > 1 else None
    return Curve(sigma, sigma_w, value, error, law)


def _find_crossover(rows: dict[str, np.ndarray], fit_to: float) -> Measured:
    """σ_W = s_κ/a in std² = s_κ² + a²σ_W².

    s_κ² is the variance without Wiener noise; a² comes from the point at fit_to.
    """
    sigma_w, squares = _read_grid(rows, "square")
    last = int(np.argmax(sigma_w[sigma_w <= fit_to]))

    def where(square: np.ndarray) -> np.ndarray:
        return sigma_w[last] * np.sqrt(square[0] / np.maximum(square[last] - square[0], 1e-300))

    value, error = jackknife(where, squares)
    return Measured(float(value), float(error))


def select_point(curve: Curve, sigma_w: float) -> Measured:
    """The point of a curve closest to σ_W."""
    i = int(np.argmin(np.abs(curve.sigma_w - sigma_w)))
    return Measured(float(curve.value[i]), float(curve.error[i]))


def tabulate(properties: Properties) -> list[tuple[str, str, str, str]]:
    """Rows (panel, quantity, here, paper)."""
    table: list[tuple[str, str, str, str]] = []
    for name, one in zip("ab", properties.convergence, strict=True):
        what = f"∂J/∂ω_{one.site}, σ_κ = {one.sigma_kappa:g}"
        table += [
            (name, f"{what}: {one.running.trajectories[-1]:,} trajectories", str(one.estimate), ""),
            (name, f"{what}: common-noise difference", str(one.difference), ""),
            (name, f"{what}: z, in standard errors of both", f"{one.z:+.2f}", "converges"),
        ]
    for (sigma, name), curve in properties.variance.items():
        plain = "with baseline" if name == "binned" else "without"
        paper = "0" if name == "binned" and sigma == 0 else "−2"
        exponent = str(curve.law.exponent) if curve.law else "–"
        table.append(("c", f"exponent of Var(G), σ_κ = {sigma:g}, {plain}", exponent, paper))
    for sigma in properties.bias:
        gain = select_point(properties.variance[sigma, "none"], properties.operating).value
        gain /= select_point(properties.variance[sigma, "binned"], properties.operating).value
        what = f"variance, without over with, σ_κ = {sigma:g}, σ_W = {properties.operating:g}"
        table.append(("c", what, f"{gain:.3g}", "several orders" if sigma == 0 else ""))
    for sigma, curve in properties.bias.items():
        here = f"σ_κ = {sigma:g}"
        exponent = str(curve.law.exponent) if curve.law else "–"
        table.append(("d", f"exponent of ΔJ, {here}", exponent, "2"))
        value = str(select_point(curve, properties.operating))
        table.append(
            (
                "d",
                f"ΔJ at σ_W = {properties.operating:g}, {here}",
                value,
                "0.01" if sigma == 0 else "",
            )
        )
    for sigma, curve in properties.spread.items():
        if curve.law is not None:
            table.append(
                (
                    "d",
                    f"exponent of std of the return, σ_κ = {sigma:g}",
                    str(curve.law.exponent),
                    "1",
                )
            )
    for sigma, where in properties.crossover.items():
        table.append(
            ("d", f"σ_W where noise overtakes modulation, σ_κ = {sigma:g}", str(where), "crossover")
        )
    return table


def format_summary(properties: Properties) -> str:
    """The summary as text: the measured lattices and settings, and the table."""
    headers = properties.headers
    lines = [
        f"panel {name}: " + "; ".join(dict.fromkeys(headers[name]["lattices"])) for name in "abcd"
    ]
    a = headers["a"]
    c = headers["c"]
    d = headers["d"]
    lines += [
        f"{a['sites']} resonators, T = {a['horizon']:g}, Δt = {a['dt']:g}, seed {a['seed']}; bins "
        f"sorted every {a['every']} steps, in groups of {a['group']:,} (a, b) and "
        f"{c['variance']:,} (c)",
        f"difference of {a['difference']:,} trajectories per side; c {c['variance']:,} and d "
        f"{d['bias']:,} (in pairs of opposite noise) per point; exponents: σ_W ≤ "
        f"{c['fit_to'] / 10:g} in c, ≤ {d['fit_to']:g} in d",
        "",
    ]
    body = [("", "", "here", "paper"), *tabulate(properties)]
    width = [max(len(row[k]) for row in body) for k in range(4)]
    lines += [
        f"{p:<{width[0]}}  {what:<{width[1]}}  {here:>{width[2]}}  {paper}".rstrip()
        for p, what, here, paper in body
    ]
    return "\n".join(lines) + "\n"
