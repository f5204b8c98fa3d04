"""What a linear twin knows about its own noise: how a kick spreads to the output, and how much power it adds there.

    h_s = (F†)^s e_port,     F = 1 − Δt(iω + iκ + Γ),     P_s = Σ_ports w·gain²Δt h_s† 4QΔt h_s

A kick d at step k leaves the output h_s†d at step k + s, so that the twin's return-to-go is quadratic in d with
½d†S_k d, S_k = 2Σ_ports w·gain²Δt Σ_{s<T−k} h_s h_s†, of which a few directions B carry almost all. Modulation and Kerr
effect are left out: whatever stands in for S and for the mean of Λ costs variance at worst.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fluctua.tcmt.kernel.options import KernelSpec
from fluctua.tcmt.kernel.run import run

RECORDS = 2048
"""Times at which responses are looked at, evenly spread over the horizon."""
DENSE = 256
"""Resonators up to which the leading directions are found exactly."""


class Responses(NamedTuple):
    """h (M, R, N) complex at every `every`-th step s < T, and w·gain²Δt of each port (M,)."""

    h: np.ndarray
    weight: np.ndarray
    every: int
    steps: int
    dt: float


class Quadratic(NamedTuple):
    """S_k ≈ B C_k B†. basis: B (N, r), orthonormal. curvature: C at the end of each segment (segments, r, r)."""

    basis: np.ndarray
    curvature: np.ndarray


def responses(twin: KernelSpec, *, dtype: str = "float32", backend: str = "cpu") -> Responses:
    """h of every port, by noise-free runs of the network with its frequencies reversed: F† = 1 + Δt(iω + iκ − Γ)."""
    every = -(-twin.steps // RECORDS)
    kept = np.flatnonzero(twin.port_weight * twin.port_gain)
    h = np.zeros((kept.size, -(-twin.steps // every), twin.sites), complex)
    for row, port in enumerate(kept):
        reversed_ = twin.replace(
            omega=-twin.omega,
            kappa=-twin.kappa,
            chi=np.zeros_like(twin.chi),
            drive=np.zeros((1, twin.drive_sites.size), complex),
            sigma_kappa=0.0,
            start=(np.arange(twin.sites) == twin.port_sites[port]).astype(complex),
        )
        done = run(reversed_, 0, 1, noise=False, record_every=every, dtype=dtype, backend=backend)
        assert done.trajectories is not None
        h[row] = done.trajectories[0, : h.shape[1]]
    return Responses(h, (twin.port_weight * twin.port_gain**2)[kept] * twin.dt, every, twin.steps, twin.dt)


def quadratic(response: Responses, rank: int, ends: np.ndarray) -> Quadratic:
    """B: the directions of the largest Σ_s h_s h_s†. C at the steps `ends`, ascending."""
    h, weight, every, steps, dt = response
    basis = _leading((h * np.sqrt(np.abs(weight))[:, None, None]).reshape(-1, h.shape[-1]).T, rank)
    y = h @ basis.conj()  # B†h (M, R, r)
    projected = np.zeros((len(ends), rank, rank), complex)
    total, reached = np.zeros((rank, rank), complex), 0

    def summed(i: int, j: int, share: int) -> np.ndarray:
        part = y[:, i:j].reshape(-1, rank)
        return 2 * share * (part.T * np.repeat(weight, j - i)) @ part.conj()

    for place in range(len(ends) - 1, -1, -1):
        whole, part = divmod(steps - int(ends[place]), every)
        total, reached = total + summed(reached, whole, every), whole
        projected[place] = total + (summed(whole, whole + 1, part) if part else 0.0)
    return Quadratic(basis, projected)


def _leading(columns: np.ndarray, rank: int) -> np.ndarray:
    """The leading left singular vectors of a matrix (N, R), nearly so if N is large: (N, rank)."""
    n = len(columns)
    if n <= DENSE:
        return np.linalg.eigh(columns @ columns.conj().T)[1][:, : -rank - 1 : -1]
    width = min(n, rank + 8)  # a few more than are wanted, and two rounds of subspace iteration
    directions = np.random.default_rng(0).standard_normal((n, width)) + 0j
    for _ in range(3):
        directions = np.linalg.qr(columns @ (columns.conj().T @ directions))[0]
    inside = directions.conj().T @ columns
    return directions @ np.linalg.eigh(inside @ inside.conj().T)[1][:, : -rank - 1 : -1]


def arriving(response: Responses, noise: np.ndarray, basis: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """P_s at every step, (T,) each: all of it, and what goes through the directions of `basis`."""
    h, weight, every, steps, dt = response
    power = lambda v: np.einsum("m,mrn,n->r", weight, np.abs(v) ** 2, 2 * noise**2 * dt, optimize=True)
    at = np.arange(h.shape[1]) * every
    on_grid = lambda p: np.interp(np.arange(steps), at, p)
    caught = np.zeros(steps) if basis is None else on_grid(power((h @ basis.conj()) @ basis.T))
    return on_grid(power(h)), caught


def mean_lambda(every: np.ndarray, caught: np.ndarray, segment: int) -> np.ndarray:
    """E[Λ_n] of an exact linear twin, (T+1,): Σ_{k≥n} Σ_{s<k} P_s without a quadratic term.

    With one, a path that starts from X at step n_j leaves to Λ_n the noise since n_j and that which is to come:
    the same double sum over steps k − n_j ≥ n − n_j. every, caught: P_s, and what of it the quadratic term sees.
    """
    steps = len(every)
    twice = lambda p: np.concatenate([[0.0, 0.0], np.cumsum(np.cumsum(p))])  # Σ_{k<j} Σ_{s<k} P_s
    n = np.arange(steps + 1)
    since = np.maximum(n - 1, 0) // segment * segment
    rest, seen = twice(every - caught), twice(caught)
    return rest[steps] - rest[n] + seen[steps - since] - seen[n - since]
