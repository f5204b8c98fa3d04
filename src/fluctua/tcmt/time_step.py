"""Whether a time step is stable at these parameters, checked before a run.

A mode that the network moves as e^{λt} is multiplied a step by P(λΔt), with P(z) = 1 + z for
Euler–Maruyama, 1 + z + z²/2 for Heun, and two terms more of e^z for RK4. For |P| > 1 it grows
though the physical mode decays. Euler's Δt must stay below −2 Re λ/|λ|²: weakly damped, far detuned
modes go first. Heun's may be about (8|Re λ|/|λ|⁴)^⅓, RK4's 2.8/|λ|.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fluctua.core.arrays import Params
from fluctua.tcmt.coupled_modes import carrier
from fluctua.tcmt.drift import coupling_matrix, linear_operator
from fluctua.tcmt.experiment import Experiment
from fluctua.tcmt.network import Network, parameters

DENSE_LIMIT = 1024
"""Resonators up to which eigenvalues are computed; beyond, a bound takes their place."""

SERIES = {"euler": (1, 1), "heun": (1, 1, 1 / 2), "rk4": (1, 1, 1 / 2, 1 / 6, 1 / 24)}
"""Coefficients of P."""
NAMES = {"euler": "Euler", "heun": "Heun", "rk4": "RK4"}
REACH = 4.0
"""|λΔt| beyond which none of them is stable."""


class Stability(NamedTuple):
    """radius: largest |P(λΔt)|. growth: of that mode over the horizon. largest_dt: that is stable.

    kerr: the largest detuning 2χ|ψ|² that the linear response to the drive gives. bound: whether
    `radius` and `growth` are upper bounds and `largest_dt` a lower one, and not the values
    themselves. integrator: "euler", "heun", "rk4".
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
                f"{name} steps of {self.dt:g} are stable{kerr}; the largest such is "
                f"{self.largest_dt:.2g}."
            )
        most = "up to " if self.bound else ""
        better = 'integrator="heun", ' if self.integrator == "euler" else ""
        return (
            f"{name} steps of {self.dt:g} are {'possibly ' if self.bound else ''}unstable at these "
            f"parameters{kerr}: a mode that should decay is multiplied by {most}{self.growth:.3g} "
            "over the "
            f"horizon. Use dt ≤ {self.largest_dt:.2g}, {better}the rotating frame, smaller "
            "couplings and "
            "detunings, or more loss."
        )


def stability(task: Experiment, theta: Params) -> Stability:
    """Stability of a task's time step at θ.

    The modes are those of the linear network, and those with the Kerr detunings of its steady
    state; the worse count. Modulation is left out: it averages to zero.

    Above `DENSE_LIMIT` resonators the eigenvalues are bounded by Bendixson's and Gershgorin's
    theorems: |Im λ| by the largest row sum of |ω| + |κ|, −Re λ by the smallest loss.

    Args:
        task: its network, drive and time step.
        theta: {family: values}.

    Returns: growth of the modes and the time steps that are safe.
    """
    network = task.network
    p = {name: np.asarray(leaf, np.float64) for name, leaf in parameters(network, theta).items()}
    offset = carrier(task.drives) if task.frame == "lab" else 0.0
    dt = float(np.diff(task.t).max())
    horizon = float(task.t[-1] - task.t[0])
    if network.sites > DENSE_LIMIT:
        kerr = 2 * np.abs(p["chi"]) * _energy_bound(task, p, horizon)
        decay, turning = _disc(network, p, offset, kerr)
        modes = np.array([-decay + 1j * turning])
        bound = True
    else:
        kerr = 2 * p["chi"] * _steady_intensity(task, p)
        shifted = {**p, "omega": p["omega"] + kerr}
        modes = np.concatenate(
            [np.linalg.eigvals(generator(network, q, offset)) for q in (p, shifted)]
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
    """The largest Δt at which |P(λΔt)| ≤ 1; 0 for a mode that grows by itself, ∞ for one that does
    not move.

    For Heun and RK4 by bisection of (|P|² − 1)/Δt, which is free of cancellation as a polynomial in
    Δt: a ray from the origin leaves their regions of stability once.
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
    """Say so before a run that would grow without reason."""
    verdict = stability(task, theta)
    if not verdict.stable:
        warnings.warn(str(verdict), RuntimeWarning, stacklevel=2)
    return verdict


@dataclass
class StabilityWatch:
    """`warn_if_unstable` for a training: looks again only when the spectrum may have grown by a
    tenth.

    The eigenvalues cost more than a run on a GPU; the largest row sum of |ω| + |κ|, which bounds
    them, does not.
    """

    seen: float = 0.0

    def __call__(self, task: Experiment, theta: Params) -> None:
        """Warn if unstable, and if it is worth looking."""
        all_ = parameters(task.network, theta)
        offset = carrier(task.drives) if task.frame == "lab" else 0.0
        omega, kappa = (np.asarray(all_[name], np.float64) for name in ("omega", "kappa"))
        if (
            np.abs(omega + offset).max() + task.network.degree * np.abs(kappa).max(initial=0.0)
            <= 1.1 * self.seen
        ):
            return  # no row sum is larger
        p = {name: np.asarray(leaf, np.float64) for name, leaf in all_.items()}
        reach = _disc(task.network, p, offset, 0 * p["chi"])[1]
        if reach > 1.1 * self.seen:
            self.seen = reach
            warn_if_unstable(task, theta)


def generator(network: Network, p: dict[str, np.ndarray], offset: float = 0.0) -> np.ndarray:
    """A = −i(ω + κ) − Γ of the linear network as a matrix. (N, N) complex"""
    d = network.lead_weights * np.sqrt(2 * p["gamma_e"])
    coupling = coupling_matrix(network.bonds, p["kappa"], network.sites)
    return linear_operator(p["omega"] + offset, coupling, d @ d.T / 2 + np.diag(p["gamma"]))


def _steady_intensity(task: Experiment, p: dict[str, np.ndarray]) -> np.ndarray:
    """|ψ|² of the linear network in the steady state of the drives, the larger of all copies.

    (N,)
    """
    a = generator(task.network, p)
    leads = task.network.leads
    d = task.network.lead_weights * np.sqrt(2 * p["gamma_e"])
    total = np.zeros((task.copies, task.network.sites))
    for drive in task.drives:
        turning = drive.frequency - carrier(task.drives)
        field = np.linalg.solve(
            a + 1j * turning * np.eye(len(a)), d[:, drive.lead % leads] * drive.amplitude
        )
        total[drive.lead // leads] += np.abs(field)
    return (total**2).max(axis=0)


def _energy_bound(task: Experiment, p: dict[str, np.ndarray], horizon: float) -> float:
    """The most energy the drives can put in: |s⁺|² comes per time, and at least 2γ_min of it
    goes.
    """
    power = sum(abs(drive.amplitude) for drive in task.drives) ** 2
    loss = 2 * p["gamma"].min()
    return power * (horizon if loss == 0 else -np.expm1(-loss * horizon) / loss)


def _disc(
    network: Network, p: dict[str, np.ndarray], offset: float, kerr: np.ndarray
) -> tuple[float, float]:
    """Least −Re λ and greatest |Im λ| that the spectrum may have."""
    i, j = network.bonds.T
    row = np.abs(p["omega"] + offset) + np.abs(kerr)
    np.add.at(row, i, np.abs(p["kappa"]))
    np.add.at(row, j, np.abs(p["kappa"]))
    return float(p["gamma"].min()), float(row.max())
