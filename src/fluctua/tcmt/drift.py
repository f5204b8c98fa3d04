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
from typing import Any

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
    """Return κψ: Σ_m κ_nm ψ_m over the bonds of n. (N,)"""
    i, j = bonds.T
    return jnp.zeros_like(psi).at[i].add(kappa * psi[j]).at[j].add(kappa * psi[i])


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
