"""The model of an instrument as a `Process` of its settings, with the calibration as context.

    ω = offset + gain · ω_set,    κ = offset + gain · κ_set,    dψ = [−i(ω + κ)ψ − Γψ + f] dt + a dW

The calibration travels with the trajectories that it belongs to (`context`), so a drifting instrument can be
calibrated anew between two iterations and nothing is compiled again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.insitu import fit
from fluctua.tcmt.network import Network
from fluctua.tcmt.process import coupled, to_psi, to_x
from fluctua.types import Array, Params, Process, Trajectories

KNOBS = ("omega", "kappa")


Calibration = dict[str, Array]
"""omega_offset, omega_gain (N,), kappa_offset, kappa_gain (B,), damping: Γ (N,), drive: [Re f, Im f], noise: a (N,)."""


def parameters(calibration: Calibration, settings: Mapping[str, Array]) -> dict[str, Array]:
    """ω and κ at these settings."""
    return {name: calibration[f"{name}_offset"] + calibration[f"{name}_gain"] * settings[name] for name in KNOBS}


@dataclass(frozen=True)
class Drift:
    """μ of a calibrated network: (settings, x, t, calibration) -> (2N,)."""

    network: Network
    driven: int = 0

    def __call__(self, theta: Params, x: Array, t: Array, context: Calibration) -> Array:
        """dψ/dt as quadratures. (2N,)"""
        p, psi = parameters(context, theta), to_psi(x)
        source = jnp.zeros_like(psi).at[self.driven].set(jax.lax.complex(*context["drive"].astype(x.dtype)))
        return to_x(
            -1j * (p["omega"] * psi + coupled(self.network, p["kappa"], psi)) - context["damping"] * psi + source
        )


def _noise(theta: Params, x: Array, t: Array, context: Calibration) -> Array:
    """The measured amplitude on both quadratures. (2N,)"""
    return jnp.concatenate([context["noise"], context["noise"]])


def process(network: Network, driven: int = 0) -> Process:
    """A network with knobs. θ: settings, {"omega": (N,), "kappa": (B,)}. context: a `Calibration`."""
    return Process(Drift(network, driven), _noise)


def calibrate(network: Network, runs: list[tuple[Params, Trajectories]], *, driven: int = 0) -> Calibration:
    """A calibration from trajectories at several settings, at least two different ones of every knob.

    >>> calibrate(network, [(settings, substrate(key, settings, 50)) for settings in plan])
    """
    found = [fit.fit(network, trajectories, driven=driven) for _, trajectories in runs]
    lines = {
        name: fit.line(
            np.stack([np.asarray(settings[name]) for settings, _ in runs]),
            np.stack([getattr(c, name) for c in found]),
            np.stack([c.stderr[name] for c in found]),
        )
        for name in KNOBS
    }
    mean = {name: np.mean([getattr(c, name) for c in found], axis=0) for name in ("damping", "drive", "noise")}
    return {f"{name}_{part}": getattr(lines[name], part) for name in KNOBS for part in ("offset", "gain")} | mean


def follow(
    calibration: Calibration,
    network: Network,
    settings: Params,
    trajectories: Trajectories,
    *,
    rate: float = 0.3,
    driven: int = 0,
) -> Calibration:
    """Offsets moved towards what a new batch says, gains kept: a slow drift is followed.

    To be used for the batches after this one. A batch that its own calibration has looked at is no longer
    independent of it.
    """
    found = fit.fit(network, trajectories, driven=driven, noise=calibration["noise"])
    expected = parameters(calibration, {name: np.asarray(settings[name]) for name in KNOBS})
    moved = {
        f"{name}_offset": calibration[f"{name}_offset"] + rate * (getattr(found, name) - expected[name])
        for name in KNOBS
    }
    moved |= {
        name: (1 - rate) * calibration[name] + rate * getattr(found, name) for name in ("damping", "drive", "noise")
    }
    return {**calibration, **moved}
