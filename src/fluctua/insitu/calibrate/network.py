"""A resonator network whose drift is linear in everything that a calibration can find.

    dψ_n/dt = −i ω_n ψ_n − i χ_n |ψ_n|²ψ_n − i Σ_m (κ_nm + δκ_nm) ψ_m − Γ_n ψ_n
              + Σ_k d_k f_k(t) [n is the site of drive k]

θ = {omega (N,), kappa (B,), chi (N,), decay: Γ_n = γ_n + γ_e (N,), drive_re, drive_im: d_k = D s⁺
e^{iφ} (drives,)}. γ and γ_e are not separable by the drift of one site, nor D and s⁺: what
enters is their sum and their product. A θ without chi is of a network without Kerr effect, whose ω
is then found several times better.

Where a task runs several experiments side by side (isolation: forward and backward), they are
copies of one device: ω, κ, χ and Γ are shared and fitted to all of them; each copy has
drives of its own.

The drift is linear in features of the state too, so a fit is quick (`core.likelihood.features`):

    ∂μ_i/∂θ_p = Σ_k [i_k = i, p_k = p] v_k φ_{f_k}(x, t),
    φ = (Re ψ, Im ψ, |ψ|²Re ψ, |ψ|²Im ψ, Re f, Im f).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fluctua import tcmt
from fluctua.core.arrays import Array, Params, PyTree
from fluctua.core.likelihood.features import Entries
from fluctua.core.process import Process
from fluctua.tcmt.coupled_modes import (
    Frame,
    Modulation,
    carrier,
    coefficients,
    delta_kappa,
    to_psi,
    to_x,
)
from fluctua.tcmt.drift import abs2, couple_bonds, lattice_drift
from fluctua.tcmt.tasks import Task


@dataclass(frozen=True)
class LinearDrift:
    """μ as above: (theta, x, t, context) -> (2CN,), for C copies of a network, all in `network`."""

    network: tcmt.Network
    drives: tuple[tcmt.Drive, ...]
    frame: Frame
    modulation: Modulation | None
    copies: int = 1

    def __call__(self, theta: Params, x: Array, t: Array, context: PyTree) -> Array:
        """dψ/dt as quadratures. (2CN,)"""
        psi = to_psi(x)
        origin = carrier(self.drives)
        shared = {
            name: jnp.tile(theta[name], self.copies)
            for name in theta
            if not name.startswith("drive")
        }
        kappa = shared["kappa"] + (
            delta_kappa(self.modulation, context, t) if self.modulation else 0.0
        )
        rate = lattice_drift(
            shared["omega"] + (origin if self.frame == "lab" else 0.0),
            shared.get("chi", 0.0),
            psi,
            couple=partial(couple_bonds, self.network.bonds, kappa),
            damp=lambda state: shared["decay"] * state,
        )
        for k, shape in enumerate(self._shapes(t)):
            source = (theta["drive_re"][k] + 1j * theta["drive_im"][k]) * shape
            rate = rate.at[int(self.network.lead_sites[self.drives[k].lead])].add(source)
        return to_x(rate)

    def features(self, x: Array, t: Array, context: PyTree) -> Array:
        """Features φ. Shape (4CN + 2 drives,)."""
        shapes = (
            jnp.stack([jnp.asarray(s) for s in self._shapes(t)])
            if self.drives
            else jnp.zeros(0, complex)
        )
        bright = jnp.tile(abs2(to_psi(x)), 2) * x
        return jnp.concatenate(
            [x, bright, shapes.real.astype(x.dtype), shapes.imag.astype(x.dtype)]
        )

    def entries(self, theta: Params) -> Entries:
        """The terms of μ that are linear in θ, p counted as `ravel_pytree` does."""
        n = self.network.sites
        (i, j) = self.network.bonds.T
        re = np.arange(n)  # rows of the drift, and the features Re ψ, Im ψ
        im = np.arange(n) + n
        bright = 2 * n
        shape = 4 * n
        lead = np.array([int(self.network.lead_sites[d.lead]) for d in self.drives], int)
        d = np.arange(len(lead))

        # −iψ has the real part Im ψ and the imaginary part −Re ψ
        def turn(site, other, offset=0):
            return [(site, other + n + offset, 1.0), (site + n, other + offset, -1.0)]

        parts = {
            "omega": turn(re, re),
            "chi": turn(re, re, bright),
            "kappa": turn(i, j) + turn(j, i),
            "decay": [(re, re, -1.0), (im, im, -1.0)],
            "drive_re": [(lead, shape + d, 1.0), (lead + n, shape + len(d) + d, 1.0)],
            "drive_im": [(lead, shape + len(d) + d, -1.0), (lead + n, shape + d, 1.0)],
        }
        first = 0
        rows = []
        for name in sorted(theta):
            size = np.size(theta[name])  # of one device; the copies follow one another
            rows += [
                (row, first + np.arange(len(row)) % size, f, np.full(len(row), v))
                for row, f, v in parts[name]
            ]
            first += size
        return Entries(*(np.concatenate(column) for column in zip(*rows, strict=True)))

    def _shapes(self, t: Array) -> list[Array]:
        """f_k(t), complex, in the frame of the drift."""
        origin = carrier(self.drives) if self.frame == "rotating" else 0.0

        def envelope(drive):
            return 1.0 if drive.envelope is None else drive.envelope(t)

        return [
            envelope(drive) * jnp.exp(-1j * (drive.frequency - origin) * t) for drive in self.drives
        ]


@dataclass(frozen=True)
class FixedNoise:
    """σ_i = √(2Q_i), known numbers. (M,)"""

    diffusion: tuple[float, ...]

    def __call__(self, theta: Params, x: Array, *rest: object) -> Array:
        """σ. (M,)"""
        return jnp.sqrt(2 * jnp.asarray(self.diffusion, x.dtype))


class LinearModel(NamedTuple):
    """Model of a network that a calibration fits.

    process: drift and noise.
    theta: coefficients by the network and its parameters.
    """

    process: Process
    theta: dict[str, np.ndarray]


def make_linear_model(task: Task, theta: Params, *, kerr: bool = True) -> LinearModel:
    """Make the model of a task at θ for a calibration; without `kerr` χ is zero and not fitted."""
    c = coefficients(task.network, theta)  # refuses leads on several resonators
    coupling = np.tile(c.lead_coupling, task.copies)
    amplitude = [coupling[d.lead] * d.amplitude * np.exp(1j * d.phase) for d in task.drives]
    values = {"omega": c.omega, "kappa": c.kappa, "decay": c.decay} | (
        {"chi": c.chi} if kerr else {}
    )
    values |= {"drive_re": np.real(amplitude), "drive_im": np.imag(amplitude)}
    drift = LinearDrift(task.simulated, task.drives, task.frame, task.modulation, task.copies)
    noise = FixedNoise(tuple(np.tile(c.amplitude**2 / 2, 2 * task.copies).tolist()))
    return LinearModel(
        Process(drift, noise), {name: np.asarray(v, float) for name, v in values.items()}
    )
