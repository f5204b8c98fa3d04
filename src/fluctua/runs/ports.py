"""A lattice with hidden errors, read at its ports alone, and the parts of its estimator.

The device is that of `fluctua.runs.unknown`. Of its states only the complex amplitudes at the input
and the output are read, and the power at the output, which is rewarded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core.arrays import Array, Params
from fluctua.core.trajectories import Trajectories
from fluctua.learn.effective import EffectiveParameters
from fluctua.runs.config import Config
from fluctua.tcmt.network import Network
from fluctua.tcmt.port_twin import PortTwin
from fluctua.tcmt.sampled_twin import SampledTwin

POWER = "power"
"""Name of the measured returns in the context of records."""


@dataclass(frozen=True)
class PortDevice:
    """A device that is read at some resonators: (key, theta, count) -> Trajectories.

    Args:
        device: (key, theta, count) -> its states without noise of the readout; its method
            `returns` measures the power at the output.
        sites: resonators that are read.
        readout: standard deviation of the measurement, on each quadrature of each sample.
    """

    device: Any
    sites: tuple[int, ...]
    readout: float

    def __call__(self, key: Array, theta: Params, count: int) -> Trajectories:
        """Set θ and measure records and returns."""
        states = self.device(key, theta, count)
        columns = [*self.sites, *(states.x.shape[-1] // 2 + site for site in self.sites)]
        x = np.asarray(states.x)[..., columns]
        noise = jax.random.normal(jax.random.fold_in(key, 1), x.shape)
        returns = np.asarray(self.device.returns(theta, states))
        return Trajectories(
            states.t, x + self.readout * np.asarray(noise, x.dtype), {POWER: returns}
        )

    def returns(self, theta: Params, trajectories: Trajectories) -> np.ndarray:
        """Power at the output, as measured. Shape (E,)."""
        assert isinstance(trajectories.context, dict)
        return np.asarray(trajectories.context[POWER])


@dataclass(frozen=True)
class PortSettings:
    """Parameters of the model, with one noise amplitude per lead and one for all other resonators.

    Records at the ports do not determine the noise of each resonator.

    settings: with a noise amplitude per resonator.
    lead_sites: resonators with a lead.
    sites: number of resonators.
    """

    settings: EffectiveParameters
    lead_sites: tuple[int, ...]
    sites: int

    def __call__(self, theta: Params, phi: Params) -> Params:
        """The parameters of the model at settings θ and unknowns φ."""
        if "noise" not in phi:
            return self.settings(theta, phi)
        noise = phi["noise"]
        each = jnp.full(self.sites, noise[-1]).at[jnp.array(self.lead_sites)].set(noise[:-1])
        return self.settings(theta, {**phi, "noise": each})


def group_noise(noise: np.ndarray, network: Network) -> np.ndarray:
    """Logarithms of noise amplitudes (N,) as those of the leads and the mean of the others."""
    others = np.delete(noise, network.lead_sites)
    return np.append(noise[network.lead_sites], others.mean())


def list_read_sites(config: Config, network: Network) -> tuple[int, ...]:
    """List the resonators that are read: those of all leads, or that of the output."""
    sites = tuple(int(site) for site in network.lead_sites)
    return sites if config.device.read == "ports" else sites[-1:]


class EstimatorParts(NamedTuple):
    """Parts of a self-calibrating estimator: model, device, (θ, φ) -> p, and φ."""

    model: Any
    device: Any
    effective: EffectiveParameters
    unknown: dict[str, Any]


def read_at_ports(config: Config, network: Network, parts: EstimatorParts) -> EstimatorParts:
    """The parts of an estimator of a device that is read at its ports alone.

    parts: of a device that is read at every resonator.
    """
    c = config.calibration
    if (
        c.kerr != "ignore"
        or c.second_neighbours != "ignore"
        or not isinstance(parts.model, SampledTwin)
    ):
        raise ValueError(
            "`device.read` needs a device with time steps of its own, whose unknowns are without "
            "Kerr effect and second neighbours: set `device.integrator` or `device.finer`, and "
            '`calibration.kerr` and `calibration.second_neighbours` = "ignore".'
        )
    sites = list_read_sites(config, network)
    unknown = dict(parts.unknown)
    if "noise" in unknown:
        unknown["noise"] = jnp.zeros(network.leads + 1)
    lead_sites = tuple(int(site) for site in network.lead_sites)
    return EstimatorParts(
        PortTwin(parts.model, sites),
        PortDevice(replace(parts.device, readout=0.0), sites, parts.device.readout),
        PortSettings(parts.effective, lead_sites, network.sites),
        unknown,
    )
