"""Assembly of an `Experiment` from a network, its drives and a reward."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fluctua.core.arrays import Array, PyTree
from fluctua.core.check import drop_extra_arguments
from fluctua.core.process import NoiseProduct, Process
from fluctua.tcmt.coupled_modes import (
    Drive,
    Frame,
    Modulation,
    check_modulation,
    condition,
    process,
)
from fluctua.tcmt.experiment import (
    Experiment,
    Tied,
    TiedCondition,
    WeightedPower,
    make_objective,
    outputs,
)
from fluctua.tcmt.network import Network, repeat_network


class Dynamics(NamedTuple):
    """Simulation of a network.

    t: the time grid (T+1,).
    modulation: of the couplings; None for none.
    frame: "rotating" or "lab".
    integrator: "euler", "heun" or "rk4".
    """

    t: np.ndarray
    modulation: Modulation | None = None
    frame: Frame = "rotating"
    integrator: str = "euler"


def assemble(
    network: Network,
    count: int,
    drives: tuple[Drive, ...],
    reward: Callable[..., Array],
    dynamics: Dynamics,
    weights: tuple[float, ...] | None = None,
) -> Experiment:
    """Make an experiment on `count` copies of a network that share θ.

    reward: (theta of all copies, x, t) -> rate. weights: of the output powers, if the reward is
    their weighted sum.
    """
    simulated = network if count == 1 else repeat_network(network, count)
    modulation = check_modulation(dynamics.modulation)
    full_process = process(
        simulated,
        drives,
        frame=dynamics.frame,
        modulation=modulation,
        integrator=dynamics.integrator,
    )
    drift = full_process.drift
    noise = full_process.noise
    intensity: Callable[..., PyTree] = condition(network)
    if count > 1:
        drift = Tied(drift, count)
        reward = Tied(drop_extra_arguments(reward, 4), count)
        intensity = TiedCondition(intensity, count)
        assert noise is not None
        if isinstance(noise, NoiseProduct):
            noise = NoiseProduct(Tied(noise.product, count), noise.width)
        else:
            noise = Tied(noise, count)
    return Experiment(
        network=network,
        process=Process(drift, noise, integrator=dynamics.integrator),
        objective=make_objective(reward, dynamics.integrator),
        t=dynamics.t,
        condition=intensity,
        simulated=simulated,
        drives=drives,
        frame=dynamics.frame,
        modulation=modulation,
        weights=weights,
        copies=count,
    )


def assemble_power(
    network: Network,
    count: int,
    drives: tuple[Drive, ...],
    weights: np.ndarray,
    dynamics: Dynamics,
) -> Experiment:
    """Make an experiment whose reward is a weighted sum of output powers."""
    simulated = network if count == 1 else repeat_network(network, count)
    power_weights = tuple(np.asarray(weights, float).tolist())
    reward = WeightedPower(outputs(simulated, drives, frame=dynamics.frame), power_weights)
    return assemble(network, count, drives, reward, dynamics, power_weights)
