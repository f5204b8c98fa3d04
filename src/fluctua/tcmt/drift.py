"""Drift of a lattice of resonators, for JAX and NumPy.

    dψ/dt = −i(ω + χ|ψ|²)ψ − iκψ − Γψ + f

Every Python caller uses `lattice_drift`: the process (`coupled_modes`), its exact moments
(`exact`), its stability (`time_step`), the scores of measured states (`state_scores`) and the
calibration (`fluctua.insitu`). They differ in how they form κψ and Γψ: bond by bond, or as
products with a matrix. On the CPU the kernels have it in native/cpu/drift.hpp, on a GPU in
native/cuda/drift.cuh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core.arrays import Array


def lattice_drift(
    omega: Any,
    chi: Any,
    psi: Any,
    *,
    couple: Callable[[Any], Any],
    damp: Callable[[Any], Any],
    source: Any = 0.0,
) -> Any:
    """Return dψ/dt at the state ψ, complex. (..., N)

    Args:
        omega: detunings ω (N,).
        chi: Kerr coefficients χ (N,); 0 for a linear lattice.
        psi: ψ (..., N).
        couple: ψ -> κψ (..., N), such as `couple_bonds`.
        damp: ψ -> Γψ (..., N).
        source: f (..., N), of the drives.

    """
    frequency = omega + chi * abs2(psi)
    return -1j * (frequency * psi + couple(psi)) - damp(psi) + source


def abs2(psi: Any) -> Any:
    """Return |ψ|², differentiable at zero."""
    return psi.real**2 + psi.imag**2


def couple_bonds(bonds: np.ndarray, kappa: Array, psi: Array) -> Array:
    """Return κψ: Σ_m κ_nm ψ_m over the bonds of n. (N,)

    Bond by bond, or by products with matrices where the bonds are dense blocks (`find_blocks`).
    """
    blocks = find_blocks(bonds)
    if len(bonds) < MIN_BLOCK * len(blocks) or not len(bonds):
        i, j = bonds.T
        return jnp.zeros_like(psi).at[i].add(kappa * psi[j]).at[j].add(kappa * psi[i])
    quadratures = jnp.stack([psi.real, psi.imag])  # κ is real: half of a complex product is zero
    coupled = jnp.zeros_like(quadratures)
    for block in blocks:
        matrix = kappa[block.first : block.first + block.bonds].reshape(block.shape)
        left = slice(block.left, block.left + block.shape[0])
        right = slice(block.right, block.right + block.shape[1])
        coupled = coupled.at[:, left].add(quadratures[:, right] @ matrix.T)
        coupled = coupled.at[:, right].add(quadratures[:, left] @ matrix)
    return jax.lax.complex(coupled[0], coupled[1])


MIN_BLOCK = 16
"""Mean number of bonds per block from which products with matrices pay."""


class BondBlock(NamedTuple):
    """Consecutive bonds that join each of some neighbouring sites to each of some others.

    first: index of the first of its bonds.
    left, right: first site on either side.
    shape: number of sites on either side.
    """

    first: int
    left: int
    right: int
    shape: tuple[int, int]

    @property
    def bonds(self) -> int:
        """Number of its bonds."""
        return self.shape[0] * self.shape[1]


def find_blocks(bonds: np.ndarray) -> list[BondBlock]:
    """Return the bonds as dense blocks, as few as they have in their order.

    bonds: (B, 2), i < j, lexicographic. A row of a block is a site i with the bonds to consecutive
    sites j; consecutive sites with the same j make one block.
    """
    starts = np.ones(len(bonds), bool)
    starts[1:] = (np.diff(bonds[:, 0]) != 0) | (np.diff(bonds[:, 1]) != 1)
    rows = np.flatnonzero(starts)
    widths = np.diff(np.append(rows, len(bonds)))
    blocks: list[BondBlock] = []
    for first, width in zip(rows.tolist(), widths.tolist(), strict=True):
        site, right = bonds[first].tolist()
        last = blocks[-1] if blocks else None
        if last and (last.left + last.shape[0], last.right, last.shape[1]) == (site, right, width):
            blocks[-1] = last._replace(shape=(last.shape[0] + 1, width))
        else:
            blocks.append(BondBlock(first, site, right, (1, width)))
    return blocks


def coupling_matrix(bonds: np.ndarray, kappa: np.ndarray, sites: int) -> np.ndarray:
    """Return κ as a symmetric matrix. (N, N)"""
    i, j = bonds.T
    matrix = np.zeros((sites, sites))
    matrix[i, j] = matrix[j, i] = kappa
    return matrix


def linear_operator(omega: np.ndarray, coupling: np.ndarray, damping: np.ndarray) -> np.ndarray:
    """Return A of the linear lattice, dψ/dt = Aψ: its drift at the N unit states. (N, N) complex

    coupling, damping: κ and Γ as matrices (N, N).
    """
    return lattice_drift(
        omega[:, None],
        0.0,
        np.eye(len(omega)),
        couple=lambda states: coupling @ states,
        damp=lambda states: damping @ states,
    )
