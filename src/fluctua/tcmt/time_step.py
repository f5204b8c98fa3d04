"""Whether Euler–Maruyama is stable at these parameters, told before a run.

A mode that the network moves as e^{λt} is multiplied by 1 + λΔt a step. For |1 + λΔt| > 1 it grows though the
physical mode decays: Δt must stay below −2 Re λ/|λ|². Weakly damped, far detuned modes go first.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fluctua.core.types import Params
from fluctua.tcmt.coupled_modes import carrier
from fluctua.tcmt.experiment import Experiment
from fluctua.tcmt.network import Network, parameters

DENSE_LIMIT = 1024
"""Resonators up to which eigenvalues are computed; beyond, a bound takes their place."""


class Stability(NamedTuple):
    """radius: largest |1 + λΔt|. growth: of that mode over the horizon. largest_dt: that is stable.

    kerr: the largest detuning 2χ|ψ|² that the linear response to the drive gives. bound: whether `radius` and
    `growth` are upper bounds and `largest_dt` a lower one, and not the values themselves.
    """

    radius: float
    growth: float
    largest_dt: float
    dt: float
    kerr: float
    bound: bool

    @property
    def stable(self) -> bool:
        """Whether no mode grows."""
        return self.dt <= self.largest_dt

    def __str__(self) -> str:
        kerr = f" (with a Kerr detuning of up to {self.kerr:.2g})" if self.kerr > 0 else ""
        if self.stable:
            return f"Euler steps of {self.dt:g} are stable{kerr}; the largest such is {self.largest_dt:.2g}."
        most = "up to " if self.bound else ""
        return (
            f"Euler steps of {self.dt:g} are {'possibly ' if self.bound else ''}unstable at these "
            f"parameters{kerr}: a mode that should decay is multiplied by {most}{self.growth:.3g} over the "
            f"horizon. Use dt ≤ {self.largest_dt:.2g}, the rotating frame, smaller couplings and detunings, "
            "or more loss."
        )


def stability(task: Experiment, theta: Params) -> Stability:
    """Stability of a task's time step at θ.

    The modes are those of the linear network, and those with the Kerr detunings of its steady state; the
    worse count. Modulation is left out: it averages to zero.

    Above `DENSE_LIMIT` resonators the eigenvalues are bounded by Bendixson's and Gershgorin's theorems:
    |Im λ| by the largest row sum of |ω| + |κ|, −Re λ by the smallest loss.

    Args:
        task: its network, drive and time step.
        theta: {family: values}.

    Returns: growth of the modes and the time steps that are safe.
    """
    network = task.network
    p = {name: np.asarray(leaf, np.float64) for name, leaf in parameters(network, theta).items()}
    offset = carrier(task.drives) if task.frame == "lab" else 0.0
    dt, horizon = float(np.diff(task.t).max()), float(task.t[-1] - task.t[0])
    if network.sites > DENSE_LIMIT:
        kerr = 2 * np.abs(p["chi"]) * _energy_bound(task, p, horizon)
        decay, turning = _disc(network, p, offset, kerr)
        modes, bound = np.array([-decay + 1j * turning]), True
    else:
        kerr = 2 * p["chi"] * _steady_intensity(task, p)
        shifted = {**p, "omega": p["omega"] + kerr}
        modes = np.concatenate([np.linalg.eigvals(generator(network, q, offset)) for q in (p, shifted)])
        bound = False
    radius = float(np.abs(1 + dt * modes).max())
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        largest = np.where(np.abs(modes) > 0, -2 * modes.real / np.abs(modes) ** 2, np.inf).min()
        growth = float(np.exp(np.log(radius) * horizon / dt))
    # rounding of the eigenvalues of an undamped mode must not make its loss negative
    return Stability(radius, growth, max(float(largest), 0.0), dt, float(np.abs(kerr).max()), bound)


def warn_if_unstable(task: Experiment, theta: Params) -> Stability:
    """Say so before a run that would grow without reason."""
    verdict = stability(task, theta)
    if not verdict.stable:
        warnings.warn(str(verdict), RuntimeWarning, stacklevel=2)
    return verdict


@dataclass
class StabilityWatch:
    """`warn_if_unstable` for a training: looks again only when the spectrum may have grown by a tenth.

    The eigenvalues cost more than a run on a GPU; the largest row sum of |ω| + |κ|, which bounds them, does not.
    """

    seen: float = 0.0

    def __call__(self, task: Experiment, theta: Params) -> None:
        """Warn if unstable, and if it is worth looking."""
        p = {name: np.asarray(leaf, np.float64) for name, leaf in parameters(task.network, theta).items()}
        offset = carrier(task.drives) if task.frame == "lab" else 0.0
        reach = _disc(task.network, p, offset, 0 * p["chi"])[1]
        if reach > 1.1 * self.seen:
            self.seen = reach
            warn_if_unstable(task, theta)


def generator(network: Network, p: dict[str, np.ndarray], offset: float = 0.0) -> np.ndarray:
    """A = −i(ω + κ) − Γ as a matrix. (N, N) complex"""
    d = network.lead_weights * np.sqrt(2 * p["gamma_e"])
    h = np.diag(p["omega"] + offset)
    i, j = network.bonds.T
    h[i, j] = h[j, i] = p["kappa"]
    return -1j * h - (d @ d.T / 2 + np.diag(p["gamma"]))


def _steady_intensity(task: Experiment, p: dict[str, np.ndarray]) -> np.ndarray:
    """|ψ|² of the linear network in the steady state of the drives, the larger of all copies. (N,)"""
    a, leads = generator(task.network, p), task.network.leads
    d = task.network.lead_weights * np.sqrt(2 * p["gamma_e"])
    total = np.zeros((task.copies, task.network.sites))
    for drive in task.drives:
        turning = drive.frequency - carrier(task.drives)
        field = np.linalg.solve(a + 1j * turning * np.eye(len(a)), d[:, drive.lead % leads] * drive.amplitude)
        total[drive.lead // leads] += np.abs(field)
    return (total**2).max(axis=0)


def _energy_bound(task: Experiment, p: dict[str, np.ndarray], horizon: float) -> float:
    """The most energy the drives can put in: |s⁺|² comes per time, and at least 2γ_min of it goes."""
    power = sum(abs(drive.amplitude) for drive in task.drives) ** 2
    loss = 2 * p["gamma"].min()
    return power * (horizon if loss == 0 else -np.expm1(-loss * horizon) / loss)


def _disc(network: Network, p: dict[str, np.ndarray], offset: float, kerr: np.ndarray) -> tuple[float, float]:
    """Least −Re λ and greatest |Im λ| that the spectrum may have."""
    i, j = network.bonds.T
    row = np.abs(p["omega"] + offset) + np.abs(kerr)
    np.add.at(row, i, np.abs(p["kappa"]))
    np.add.at(row, j, np.abs(p["kappa"]))
    return float(p["gamma"].min()), float(row.max())
