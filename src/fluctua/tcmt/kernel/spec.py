"""What a fused kernel runs: a resonator network with diagonal diffusion, as flat arrays.

    ψ' = ψ + Δt[−i(ω + χ|ψ|²)ψ − iΣ_m(κ + δκ)ψ_m − Γψ + f] + a√Δt z,          a = √(2Q)
    g = Σ_p w_p |−s⁺_p + √(2γ_e,p) ψ_p|²

N sites, B bonds, T steps. The frame is in the numbers: in the frame of the drive `omega` is the detuning
and `drive` is constant; in the lab frame `drive` is a table of T rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class KernelSpec(NamedTuple):
    """A network, its drive and its reward.

    omega, chi, damping (Γ), noise (a): (N,). kappa: (B,). bonds: (B, 2) site indices, each pair once.
    drive_sites (D,), drive: complex (D,) or (T, D), f = √(2γ_e) s⁺ on those sites.
    port_sites, port_gain (√(2γ_e)), port_weight (w): (M,). incoming: s⁺, complex (M,) or (T, M).
    Modulation: δκ_b = σ_κ Σ_k ã_k sin(kΩt + φ_k), k = 1 … harmonics. start: ψ at t = 0, complex (N,).
    """

    omega: np.ndarray
    kappa: np.ndarray
    chi: np.ndarray
    bonds: np.ndarray
    damping: np.ndarray
    noise: np.ndarray
    dt: float
    steps: int
    drive_sites: np.ndarray
    drive: np.ndarray
    port_sites: np.ndarray
    port_gain: np.ndarray
    port_weight: np.ndarray
    incoming: np.ndarray
    sigma_kappa: float = 0.0
    Omega: float = 0.1
    harmonics: int = 10
    start: np.ndarray | None = None


class Graph(NamedTuple):
    """Neighbours of each site, below and above it. order: the given bond at each place of the upper lists."""

    lower_start: np.ndarray
    lower_site: np.ndarray
    lower_bond: np.ndarray
    upper_start: np.ndarray
    upper_site: np.ndarray
    order: np.ndarray


def checked(spec: KernelSpec) -> KernelSpec:
    """The same specification as contiguous float64/complex128 arrays, or an error that says what is wrong."""
    omega = _array("omega", spec.omega, (-1,))
    n = omega.size
    if n == 0:
        raise ValueError("`omega` is empty: a network needs at least one resonator.")
    bonds = _indices("bonds", np.asarray(spec.bonds).reshape(-1, 2), n)
    if bonds.size and (bonds[:, 0] == bonds[:, 1]).any():
        raise ValueError(f"bond {int(np.argmax(bonds[:, 0] == bonds[:, 1]))} connects a site with itself.")
    pairs = np.sort(bonds, axis=1)
    if len(np.unique(pairs, axis=0)) != len(pairs):
        raise ValueError("`bonds` names a pair of sites twice. Couplings are symmetric: give each pair once.")
    steps, dt = int(spec.steps), float(spec.dt)
    if steps < 1 or not (dt > 0 and np.isfinite(dt)):
        raise ValueError(f"`steps` must be at least 1 and `dt` positive; got {spec.steps} and {spec.dt}.")
    noise = _array("noise", spec.noise, (n,))
    if (noise < 0).any():
        raise ValueError("`noise` is an amplitude, √(2Q) per site: it must not be negative.")
    drive_sites = _indices("drive_sites", spec.drive_sites, n)
    port_sites = _indices("port_sites", spec.port_sites, n)
    harmonics = int(spec.harmonics) if spec.sigma_kappa else 0
    if spec.sigma_kappa and harmonics < 1:
        raise ValueError(f"modulation needs at least one harmonic; got {spec.harmonics}.")
    return KernelSpec(
        omega=omega,
        kappa=_array("kappa", spec.kappa, (len(bonds),)),
        chi=_array("chi", spec.chi, (n,)),
        bonds=bonds,
        damping=_array("damping", spec.damping, (n,)),
        noise=noise,
        dt=dt,
        steps=steps,
        drive_sites=drive_sites,
        drive=_table("drive", spec.drive, steps, drive_sites.size),
        port_sites=port_sites,
        port_gain=_array("port_gain", spec.port_gain, (port_sites.size,)),
        port_weight=_array("port_weight", spec.port_weight, (port_sites.size,)),
        incoming=_table("incoming", spec.incoming, steps, port_sites.size),
        sigma_kappa=float(spec.sigma_kappa),
        Omega=float(spec.Omega),
        harmonics=harmonics,
        start=_array("start", np.zeros(n) if spec.start is None else spec.start, (n,), complex),
    )


def neighbours(sites: int, bonds: np.ndarray) -> Graph:
    """Bonds sorted by lower, then upper site; and the same bonds seen from their upper site."""
    low, high = np.sort(bonds, axis=1).T if len(bonds) else (np.zeros(0, int), np.zeros(0, int))
    order = np.lexsort((high, low))
    low, high = low[order], high[order]
    seen_from_above = np.lexsort((low, high))
    count = lambda of: np.concatenate([[0], np.cumsum(np.bincount(of, minlength=sites))])
    arrays = (count(high), low[seen_from_above], seen_from_above, count(low), high, order)
    return Graph(*(np.ascontiguousarray(a, np.int32) for a in arrays))


def modulation_pieces(spec: KernelSpec, tolerance: float) -> tuple[int, np.ndarray]:
    """δκ as quadratics in time: (steps a piece, coefficients (pieces, 3, 2·harmonics)).

    The polynomial in τ ∈ [−1, 1] interpolates sin(kΩt) and cos(kΩt) at the three Chebyshev nodes of each
    piece of duration h. Its error is at most (ωh/2)³/(3!·2²) for an angular frequency ω = kΩ, so that of
    δκ/σ_κ is at most √N_dyn (N_dyn Ω h/2)³/24 (Cauchy–Schwarz with Σã² = 1). The longest h that keeps this
    below `tolerance` is taken, up to 32 steps, and an even number, since noise comes in pairs of steps.
    Pieces of two steps have their nodes on the steps and no error: a tolerance of 0 gives those.
    """
    fastest = abs(spec.Omega) * spec.harmonics * spec.dt
    half = (24 * tolerance / np.sqrt(spec.harmonics)) ** (1 / 3)
    steps = 2 * int(np.clip(half / fastest if fastest else 16, 1, 16))
    pieces = -(-spec.steps // steps)
    centre = (np.arange(pieces) * steps + (steps - 1) / 2) * spec.dt
    nodes = np.cos((2 * np.arange(3) + 1) * np.pi / 6) if steps > 2 else np.array([0.5, 0.0, -0.5])
    k = np.arange(1, spec.harmonics + 1)
    angle = spec.Omega * k * (centre[:, None] + nodes * (steps * spec.dt / 2))[..., None]
    values = np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(pieces, 3, -1)
    return steps, np.linalg.inv(np.vander(nodes, 3, increasing=True)) @ values


def _array(name: str, value: np.ndarray, shape: tuple[int, ...], dtype: type = float) -> np.ndarray:
    array: np.ndarray = np.ascontiguousarray(value, dtype)
    if array.ndim != len(shape) or any(want not in (-1, have) for want, have in zip(shape, array.shape, strict=True)):
        raise ValueError(f"`{name}` must have shape {shape}; got {array.shape}.")
    if not np.isfinite(array).all():
        raise ValueError(f"`{name}` holds a value that is not finite, first at index {_first_bad(array)}.")
    return array


def _first_bad(array: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])


def _table(name: str, value: np.ndarray, steps: int, width: int) -> np.ndarray:
    """(width,) or (steps, width) as (1 or steps, width)."""
    array = np.asarray(value, complex)
    if array.ndim == 1:
        array = array[None]
    if array.shape not in ((1, width), (steps, width)):
        raise ValueError(f"`{name}` must have shape ({width},) or ({steps}, {width}); got {np.shape(value)}.")
    return _array(name, array, array.shape, complex)


def _indices(name: str, value: np.ndarray, sites: int) -> np.ndarray:
    array = np.ascontiguousarray(value)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"`{name}` must hold site indices (integers); got {array.dtype}.")
    if array.size and (array.min() < 0 or array.max() >= sites):
        raise ValueError(f"`{name}` must hold site indices from 0 to {sites - 1}; got {array.min()} to {array.max()}.")
    return np.ascontiguousarray(array, np.int32)
