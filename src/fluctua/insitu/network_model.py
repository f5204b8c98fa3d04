"""A resonator network whose drift is linear in everything that a calibration can find.

    dψ_n/dt = −i ω_n ψ_n − i χ_n |ψ_n|²ψ_n − i Σ_m (κ_nm + δκ_nm) ψ_m − Γ_n ψ_n + Σ_drives d_k f_k(t) [n is its site]

θ = {omega (N,), kappa (B,), chi (N,), decay: Γ_n = γ_n + γ_e (N,), drive_re, drive_im: d_k = D s⁺ e^{iφ} (drives,)}.
γ and γ_e are not told apart by the drift of one site, and D not from s⁺: what enters is their sum and their product.

Where a task runs several experiments side by side (isolation: forward and backward), they are copies of one device: ω,
κ, χ and Γ are shared, and every copy tells about them; the drives are each their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fluctua import tcmt
from fluctua.tcmt.modulation import Modulation, delta_kappa
from fluctua.tcmt.process import Frame, abs2, carrier, coefficients, coupled, to_psi, to_x
from fluctua.tcmt.tasks import Task
from fluctua.types import Array, Params, Process, PyTree


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
        omega, kappa, chi, decay = (jnp.tile(theta[k], self.copies) for k in ("omega", "kappa", "chi", "decay"))
        kappa = kappa + (delta_kappa(self.modulation, context, t) if self.modulation else 0.0)
        frequency = omega + (origin if self.frame == "lab" else 0.0) + chi * abs2(psi)
        rate = -1j * (frequency * psi + coupled(self.network, kappa, psi)) - decay * psi
        for k, drive in enumerate(self.drives):
            turning = drive.frequency - (origin if self.frame == "rotating" else 0.0)
            shape = (1.0 if drive.envelope is None else drive.envelope(t)) * jnp.exp(-1j * turning * t)
            source = (theta["drive_re"][k] + 1j * theta["drive_im"][k]) * shape
            rate = rate.at[int(self.network.lead_sites[drive.lead])].add(source)
        return to_x(rate)


@dataclass(frozen=True)
class FixedNoise:
    """σ_i = √(2Q_i), known numbers. (M,)"""

    diffusion: tuple[float, ...]

    def __call__(self, theta: Params, x: Array, *rest: object) -> Array:
        """σ. (M,)"""
        return jnp.sqrt(2 * jnp.asarray(self.diffusion, x.dtype))


class LinearModel(NamedTuple):
    """process, and theta as the network and its parameters say it should be."""

    process: Process
    theta: dict[str, np.ndarray]


def linear_model(task: Task, theta: Params) -> LinearModel:
    """The calibration's model of a task at θ."""
    c = coefficients(task.network, theta)  # refuses leads on several resonators
    coupling = np.tile(c.lead_coupling, task.copies)
    amplitude = [coupling[d.lead] * d.amplitude * np.exp(1j * d.phase) for d in task.drives]
    values = {"omega": c.omega, "kappa": c.kappa, "chi": c.chi, "decay": c.decay}
    values |= {"drive_re": np.real(amplitude), "drive_im": np.imag(amplitude)}
    drift = LinearDrift(task.simulated, task.drives, task.frame, task.modulation, task.copies)
    noise = FixedNoise(tuple(np.tile(c.amplitude**2 / 2, 2 * task.copies).tolist()))
    return LinearModel(Process(drift, noise), {name: np.asarray(v, float) for name, v in values.items()})
