"""The drift of a resonator network by least squares from measured increments, and what its knobs do.

    ψ' − ψ = Δt[−iωψ − iΣκψ_m − Γψ + f] + a√Δt z

The right-hand side is linear in ω, κ, Γ and f, so one weighted solve gives them all. Residuals give the noise: a sample
carries white readout noise ν of its own, which enters two increments in a row with opposite signs, so that their
variance is a²Δt + 2ν² and the covariance of neighbours is −ν².
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fluctua.tcmt.network import Network
from fluctua.types import Array, Trajectories


class Coefficients(NamedTuple):
    """Drift and noise at one setting. omega, damping, noise (a), readout: (N,). kappa: (B,). drive: (2,), Re and Im f.

    stderr: of omega, kappa, damping and drive, by name.
    """

    omega: np.ndarray
    kappa: np.ndarray
    damping: np.ndarray
    drive: np.ndarray
    noise: np.ndarray
    readout: np.ndarray
    stderr: dict[str, np.ndarray]


def fit(network: Network, trajectories: Trajectories, *, driven: int = 0, noise: Array | None = None) -> Coefficients:
    """Least squares over all trajectories and steps. driven: the site with the drive. noise: weights, if known.

    >>> fit(network, Trajectories(t, x)).omega
    """
    x = np.asarray(trajectories.x, np.float64)
    n, bonds = network.sites, network.bonds
    if x.ndim != 3 or x.shape[2] != 2 * n:
        raise ValueError(f"`x` must be (trajectories, times, {2 * n}), [Re ψ, Im ψ] of {n} resonators; got {x.shape}.")
    dt = float(np.diff(np.asarray(trajectories.t, np.float64)).mean())
    psi = x[..., :n] + 1j * x[..., n:]
    now, rate = psi[:, :-1].reshape(-1, n), (np.diff(psi, axis=1) / dt).reshape(-1, n)
    weight = np.ones(n) if noise is None else 1 / np.asarray(noise, np.float64) ** 2
    # Gram matrices of the states are all that the normal equations need: (N, N) complex, whatever the length
    gram, into, mean = now.conj().T @ now, now.conj().T @ rate, now.mean(axis=0) * len(now)
    b, width = len(bonds), 2 * n + len(bonds) + 2
    normal, right = np.zeros((width, width)), np.zeros(width)
    for site in range(n):
        touching = np.flatnonzero((bonds == site).any(axis=1))
        others = bonds[touching].sum(axis=1) - site
        sources = [site, *others, site]
        factor = [-1j] * (1 + len(touching)) + [-1.0 + 0j]
        columns = [site, *(n + touching), n + b + site]
        f = np.array(factor)
        block = (f.conj()[:, None] * gram[np.ix_(sources, sources)] * f[None]).real
        target = (f.conj() * into[sources, site]).real
        if site == driven:
            cross = f.conj() * mean[sources].conj()  # of each column with a constant
            extra = np.stack([cross.real, (1j * cross).real], axis=1)
            block = np.block([[block, extra], [extra.T, len(now) * np.eye(2)]])
            total = rate[:, site].sum()
            target = np.concatenate([target, [total.real, total.imag]])
            columns += [width - 2, width - 1]
        normal[np.ix_(columns, columns)] += weight[site] * block
        right[columns] += weight[site] * target
    solved = np.linalg.solve(normal, right)
    found = Coefficients(
        solved[:n], solved[n : n + b], solved[n + b : 2 * n + b], solved[-2:], np.zeros(n), np.zeros(n), {}
    )
    amplitude, readout = _noise(network, found, psi, dt, driven)
    if noise is None:  # once more, with the weights that the residuals tell
        return fit(network, trajectories, driven=driven, noise=amplitude)
    error = np.sqrt(np.diag(np.linalg.inv(normal)) / dt)
    stderr = {"omega": error[:n], "kappa": error[n : n + b], "damping": error[n + b : 2 * n + b], "drive": error[-2:]}
    return found._replace(noise=amplitude, readout=readout, stderr=stderr)


def _noise(network: Network, c: Coefficients, psi: np.ndarray, dt: float, driven: int) -> tuple[np.ndarray, np.ndarray]:
    """(a, ν), each (N,), from the variance of the residuals and the covariance of neighbours."""
    i, j = network.bonds.T
    hamiltonian = np.zeros((network.sites, network.sites), complex)
    hamiltonian[i, j] = hamiltonian[j, i] = c.kappa
    np.fill_diagonal(hamiltonian, c.omega)
    shape = psi[:, :-1].shape  # one product of matrices, not one a trajectory
    drift = (psi[:, :-1].reshape(-1, network.sites) @ (-1j * hamiltonian - np.diag(c.damping)).T).reshape(shape)
    drift[..., driven] += c.drive[0] + 1j * c.drive[1]
    residual = np.diff(psi, axis=1) - drift * dt
    variance = (np.abs(residual) ** 2).mean(axis=(0, 1)) / 2
    neighbours = (residual[:, 1:] * residual[:, :-1].conj()).real.mean(axis=(0, 1)) / 2
    kick = variance + 2 * np.minimum(neighbours, 0.0)  # a covariance above zero is chance, not readout
    if np.any(kick <= 0):
        site = int(np.argmin(kick))
        raise ValueError(
            f"resonator {site} shows readout noise and no noise of its own: the score would divide by nothing. Sample "
            "less often, lower the readout noise, or inject noise there."
        )
    return np.sqrt(kick / dt), np.sqrt(np.maximum(-neighbours, 0.0))


class Line(NamedTuple):
    """p = offset + gain · setting, for each knob of one family."""

    offset: np.ndarray
    gain: np.ndarray
    offset_stderr: np.ndarray
    gain_stderr: np.ndarray


def line(settings: Array, values: Array, errors: Array) -> Line:
    """Weighted straight lines through values (K, P) found at settings (K, P) with errors (K, P)."""
    u, p, w = np.asarray(settings, float), np.asarray(values, float), 1 / np.asarray(errors, float) ** 2
    if len(u) < 2 or np.any(np.ptp(u, axis=0) == 0):
        raise ValueError("the gain of a knob needs at least two different settings of it.")
    centre = (w * u).sum(0) / w.sum(0)
    spread = (w * (u - centre) ** 2).sum(0)
    gain = (w * (u - centre) * p).sum(0) / spread
    offset = (w * p).sum(0) / w.sum(0) - gain * centre
    return Line(offset, gain, np.sqrt(1 / w.sum(0) + centre**2 / spread), 1 / np.sqrt(spread))
