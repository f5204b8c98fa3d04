"""Antagonistic modulation of the couplings (End Matter), drawn once per bond and trajectory.

    δκ_b(t) = σ_κ Σ_{k=1}^{K} ã_k sin(kΩt + φ_k),   ã = a/|a|,  a_k ~ N(0, 1),  φ_k ~ U(0, 2π),  Ω = Ω_max/K

The draws are counters of the same generator as the noise, so that a kernel can make them in place. For bond
b and harmonic k = 1…K the four words w of Philox at (seed, trajectory, site 2³¹ + bK + k − 1, pair 2³² − 1)
give a_k as the first Box–Muller normal of (w₀, w₁) and φ_k = 2π(w₂ + ½)2⁻³². The noise never reaches these
counters: its sites and pairs of steps stay below 2³¹.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fluctua.core.types import Array, PyTree
from fluctua.core.wiener import box_muller, philox_key_words, philox_words

FIRST_SITE = 0x8000_0000
PAIR = 0xFFFF_FFFF


class Modulation(NamedTuple):
    """How strong and how fast. sigma_kappa: σ_κ. harmonics: K, N_dyn in the paper. omega_max: Ω_max."""

    sigma_kappa: float
    harmonics: int = 10
    omega_max: float = 1.0

    def frequencies(self) -> np.ndarray:
        """kΩ for k = 1…K. (K,)"""
        return np.arange(1, self.harmonics + 1) * self.omega_max / self.harmonics


def checked(modulation: Modulation | None) -> Modulation | None:
    """A modulation that does something, or None."""
    if modulation is None:
        return None
    if not isinstance(modulation, Modulation):
        raise TypeError(f"`modulation` must be a Modulation(sigma_kappa) or None; got {type(modulation).__name__}.")
    if not modulation.sigma_kappa >= 0:
        raise ValueError(f"`sigma_kappa` must not be negative; got {modulation.sigma_kappa}.")
    if int(modulation.harmonics) != modulation.harmonics or modulation.harmonics < 1:
        raise ValueError(f"`harmonics` must be a whole number, at least 1; got {modulation.harmonics}.")
    return modulation if modulation.sigma_kappa > 0 else None


@dataclass(frozen=True)
class Draw:
    """The law above: (key of the noise, trajectory) -> {"sine": ã cos φ (B, K), "cosine": ã sin φ (B, K)}.

    Quadratures and not amplitudes and phases: δκ is then linear in sin kΩt and cos kΩt, which are the same
    for every bond and trajectory, and a step takes 2K of them instead of BK each.
    """

    bonds: int
    harmonics: int

    def __call__(self, key: Array, trajectory: Array) -> PyTree:
        """One trajectory's draw."""
        a, phase = self.amplitude_and_phase(key, trajectory)
        return {"sine": a * jnp.cos(phase), "cosine": a * jnp.sin(phase)}

    def amplitude_and_phase(self, key: Array, trajectory: Array) -> tuple[Array, Array]:
        """ã and φ, each (B, K)."""
        site = jnp.arange(self.bonds * self.harmonics, dtype=jnp.uint32) + jnp.uint32(FIRST_SITE)
        same = lambda v: jnp.broadcast_to(jnp.asarray(v, jnp.uint32), site.shape)
        words = philox_words(philox_key_words(key), same(trajectory), site, same(PAIR))
        a = box_muller(words[0], words[1])[0].reshape(self.bonds, self.harmonics)
        phase = 2 * jnp.pi * (words[2].astype(a.dtype) + 0.5) * 2.0**-32
        return a / jnp.linalg.norm(a, axis=1, keepdims=True), phase.reshape(a.shape)


def delta_kappa(modulation: Modulation, context: PyTree, t: Array) -> Array:
    """δκ_b(t) of one trajectory. (B,)"""
    angle = jnp.asarray(modulation.frequencies(), context["sine"].dtype) * t
    return modulation.sigma_kappa * (context["sine"] @ jnp.sin(angle) + context["cosine"] @ jnp.cos(angle))
