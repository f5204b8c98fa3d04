"""Stability of a time step at given parameters, checked before a run.

A step multiplies a mode e^{λt} of the network by P(λΔt), with P(z) = 1 + z for Euler–Maruyama,
1 + z + z²/2 for Heun, and two terms more of e^z for RK4. For |P| > 1 it grows although the physical
mode decays. Euler's Δt must stay below −2 Re λ/|λ|², which is smallest for weakly damped, far
detuned modes; Heun's below about (8|Re λ|/|λ|⁴)^⅓, RK4's below 2.8/|λ|.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fluctua.core.arrays import Params
from fluctua.core.host.threads import limit_blas
from fluctua.tcmt.coupled_modes import carrier
from fluctua.tcmt.drift import coupling_matrix, linear_operator
from fluctua.tcmt.experiment import Experiment
from fluctua.tcmt.network import Network, parameters

DENSE_LIMIT = 1024
"""Largest network whose eigenvalues are computed; beyond, they are bounded."""

SERIES = {"euler": (1, 1), "heun": (1, 1, 1 / 2), "rk4": (1, 1, 1 / 2, 1 / 6, 1 / 24)}
"""Coefficients of P."""
NAMES = {"euler": "Euler", "heun": "Heun", "rk4": "RK4"}
REACH = 4.0
"""|λΔt| beyond which no integrator is stable."""


class Stability(NamedTuple):
    """Stability of a time step.

    radius: largest |P(λΔt)|.
    growth: of that mode over the horizon.
    largest_dt: largest stable time step.
    dt: time step.
    kerr: largest Kerr detuning 2χ|ψ|² of the linear response to the drive.
    bound: `radius` and `growth` are upper bounds and `largest_dt` a lower one, not exact values.
    integrator: "euler", "heun" or "rk4".
    """

    radius: float
    growth: float
    largest_dt: float
    dt: float
    kerr: float
    bound: bool
    integrator: str = "euler"

    @property
    def stable(self) -> bool:
        """Whether no mode grows."""
        return self.dt <= self.largest_dt

    def __str__(self) -> str:
        kerr = f" (with a Kerr detuning of up to {self.kerr:.2g})" if self.kerr > 0 else ""
        name = NAMES[self.integrator]
        if self.stable:
            return (
                f"{name} steps of {self.dt:g} are stable{kerr}; the largest stable step is "
                f"{self.largest_dt:.2g}."
            )
        up_to = "up to " if self.bound else ""
        better = 'integrator="heun", ' if self.integrator == "euler" else ""
        return (
            f"{name} steps of {self.dt:g} are {'possibly ' if self.bound else ''}unstable at these "
            f"parameters{kerr}: a mode that should decay is multiplied by {up_to}{self.growth:.3g} "
            f"over the horizon. Use dt ≤ {self.largest_dt:.2g}, {better}the rotating frame, "
            "smaller couplings and detunings, or more loss."
        )


def stability(task: Experiment, theta: Params) -> Stability:
    """Return the stability of a task's time step at θ.

    The modes are those of the linear network, and those with the Kerr detunings of its steady
    state; the worse count. Modulation is left out: it averages to zero.

    Above `DENSE_LIMIT` resonators the eigenvalues are bounded by Bendixson's and Gershgorin's
    theorems: |Im λ| by the largest row sum of |ω| + |κ|, −Re λ by the smallest loss.

    Args:
        task: its network, drive and time step.
        theta: {family: values}.

    Returns: growth of the modes and the time steps that are safe.

    >>> report = tcmt.stability(task, theta)
    >>> report.dt < report.largest_dt
    True
    """
    network = task.network
    p = {name: np.asarray(leaf, np.float64) for name, leaf in parameters(network, theta).items()}
    offset = carrier(task.drives) if task.frame == "lab" else 0.0
    dt = float(np.diff(task.t).max())
    horizon = float(task.t[-1] - task.t[0])
    if network.sites > DENSE_LIMIT:
        kerr = 2 * np.abs(p["chi"]) * _energy_bound(task, p, horizon)
        decay, turning = _bound_spectrum(network, p, offset, kerr)
        modes = np.array([-decay + 1j * turning])
        bound = True
    else:
        kerr = 2 * p["chi"] * _steady_intensity(task, p)
        shifted = {**p, "omega": p["omega"] + kerr}
        modes = np.concatenate(
            [np.linalg.eigvals(linear_generator(network, q, offset)) for q in (p, shifted)]
        )
        bound = False
    radius = float(np.abs(np.polyval(SERIES[task.integrator][::-1], dt * modes)).max())
    largest = largest_step(task.integrator, modes).min()
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        growth = float(np.exp(np.log(radius) * horizon / dt))
    # rounding of the eigenvalues of an undamped mode must not make its loss negative
    return Stability(
        radius,
        growth,
        max(float(largest), 0.0),
        dt,
        float(np.abs(kerr).max()),
        bound,
        task.integrator,
    )


def largest_step(integrator: str, modes: np.ndarray) -> np.ndarray:
    """Return the largest Δt at which |P(λΔt)| ≤ 1, for each mode λ.

    0 for a mode that grows by itself, ∞ for λ = 0. For Heun and RK4 by bisection of (|P|² − 1)/Δt,
    which as a polynomial in Δt has no cancellation: a ray from the origin leaves their regions of
    stability once.
    """
    size = np.abs(modes)
    with np.errstate(divide="ignore", invalid="ignore"):
        if integrator == "euler":
            return np.where(size > 0, -2 * modes.real / size**2, np.inf)
        unit = np.where(size > 0, modes / size, 0.0)
    c = SERIES[integrator]
    products = [
        (j + k, c[j] * c[k] * (unit**j * unit.conj() ** k).real)
        for j in range(len(c))
        for k in range(len(c))
    ]
    powers = np.zeros((2 * len(c) - 2, len(modes)))
    for n, value in products:
        if n:
            powers[n - 1] += value
    # below the rounding of eigenvalues: terms that cancel for an undamped mode, and its loss
    powers[np.abs(powers) < 64 * np.finfo(float).eps] = 0
    low = np.zeros(len(modes))
    high = np.full(len(modes), REACH)
    for _ in range(60):
        middle = (low + high) / 2
        stable = np.polynomial.polynomial.polyval(middle, powers, tensor=False) <= 0
        low = np.where(stable, middle, low)
        high = np.where(stable, high, middle)
    with np.errstate(divide="ignore"):
        return np.where(size > 0, np.where(powers[0] > 0, 0.0, low) / size, np.inf)


def warn_if_unstable(task: Experiment, theta: Params) -> Stability:
    """Warn if the time step is unstable, and return its `Stability`."""
    verdict = stability(task, theta)
    if not verdict.stable:
        warnings.warn(str(verdict), RuntimeWarning, stacklevel=2)
    return verdict


@dataclass
class StabilityWatch:
    """`warn_if_unstable` during a training, only if the spectrum may have grown by a tenth.

    The eigenvalues take longer than a run of few trajectories; the largest row sum of |ω| + |κ|,
    which bounds them, does not. They are left out where `is_stable_by_bounds`.

    seen: largest row sum at which stability was checked.
    """

    seen: float = 0.0

    def __call__(self, task: Experiment, theta: Params) -> None:
        """Warn if the time step is unstable; check only if the spectrum may have grown."""
        families = parameters(task.network, theta)
        offset = carrier(task.drives) if task.frame == "lab" else 0.0
        omega, kappa = (np.asarray(families[name], np.float64) for name in ("omega", "kappa"))
        row_bound = np.abs(omega + offset).max()
        row_bound += task.network.degree * np.abs(kappa).max(initial=0.0)
        if row_bound <= 1.1 * self.seen:
            return
        p = {name: np.asarray(leaf, np.float64) for name, leaf in families.items()}
        reach = _bound_spectrum(task.network, p, offset, 0 * p["chi"])[1]
        if reach > 1.1 * self.seen:
            self.seen = reach
            with limit_blas(task.network.sites):
                if not is_stable_by_bounds(task, p):
                    warn_if_unstable(task, theta)


def is_stable_by_bounds(task: Experiment, p: dict[str, np.ndarray]) -> bool:
    """Whether bounds of the eigenvalues prove that no mode grows, for Euler's and Heun's steps.

    By Bendixson's theorem the eigenvalues lie in a rectangle: −Re λ between the extreme eigenvalues
    of Γ, |Im λ| below the largest row sum. Both regions of stability are convex: Euler's is a disc,
    Heun's |(z + 1)² + 1| ≤ 2 a Cassini oval without a waist. So it is enough that the corners are
    stable. False proves nothing: the eigenvalues decide.
    """
    if task.integrator not in ("euler", "heun") or task.network.sites > DENSE_LIMIT:
        return False
    offset = carrier(task.drives) if task.frame == "lab" else 0.0
    kerr = 2 * p["chi"] * _steady_intensity(task, p) if p["chi"].any() else 0 * p["chi"]
    slowest, turning = _bound_spectrum(task.network, p, offset, kerr)
    damping = np.abs(_damping_matrix(task.network, p))
    fastest = float(damping.sum(axis=1).max())
    corners = np.array([-slowest + 1j * turning, -fastest + 1j * turning])
    dt = float(np.diff(task.t).max())
    return bool((largest_step(task.integrator, corners) >= dt).all())


def linear_generator(network: Network, p: dict[str, np.ndarray], offset: float = 0.0) -> np.ndarray:
    """Return A = −i(ω + κ) − Γ of the linear network as a matrix. (N, N) complex"""
    coupling = coupling_matrix(network.bonds, p["kappa"], network.sites)
    return linear_operator(p["omega"] + offset, coupling, _damping_matrix(network, p))


def _damping_matrix(network: Network, p: dict[str, np.ndarray]) -> np.ndarray:
    """Return Γ of leads and losses as a symmetric matrix. (N, N)"""
    d = network.lead_weights * np.sqrt(2 * p["gamma_e"])
    return d @ d.T / 2 + np.diag(p["gamma"])


def _steady_intensity(task: Experiment, p: dict[str, np.ndarray]) -> np.ndarray:
    """Return |ψ|² of the linear network in its steady state, the maximum over copies. (N,)"""
    a = linear_generator(task.network, p)
    leads = task.network.leads
    d = task.network.lead_weights * np.sqrt(2 * p["gamma_e"])
    total = np.zeros((task.copies, task.network.sites))
    for drive in task.drives:
        detuning = drive.frequency - carrier(task.drives)
        field = np.linalg.solve(
            a + 1j * detuning * np.eye(len(a)), d[:, drive.lead % leads] * drive.amplitude
        )
        total[drive.lead // leads] += np.abs(field)
    return (total**2).max(axis=0)


def _energy_bound(task: Experiment, p: dict[str, np.ndarray], horizon: float) -> float:
    """Return an upper bound of the energy: power |s⁺|² in, at least the rate 2γ_min out."""
    power = sum(abs(drive.amplitude) for drive in task.drives) ** 2
    loss = 2 * p["gamma"].min()
    return power * (horizon if loss == 0 else -np.expm1(-loss * horizon) / loss)


def _bound_spectrum(
    network: Network, p: dict[str, np.ndarray], offset: float, kerr: np.ndarray
) -> tuple[float, float]:
    """Return a lower bound of −Re λ and an upper bound of |Im λ| of the spectrum."""
    i, j = network.bonds.T
    row = np.abs(p["omega"] + offset) + np.abs(kerr)
    np.add.at(row, i, np.abs(p["kappa"]))
    np.add.at(row, j, np.abs(p["kappa"]))
    return float(p["gamma"].min()), float(row.max())
