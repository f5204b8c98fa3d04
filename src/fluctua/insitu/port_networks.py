"""A resonator network with knobs that is read at its leads alone, for in-situ training."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fluctua import tcmt
from fluctua.core.objective import Objective
from fluctua.core.scores import local_linear
from fluctua.insitu import port_self_calibration as ports
from fluctua.insitu.model import Methods, Model
from fluctua.insitu.networks import (
    BOUNDS,
    SPREAD,
    NetworkHead,
    list_knobs,
    list_unknowns,
)
from fluctua.insitu.translation import translate_process
from fluctua.processes.observed import Observed


def port_network_model(
    network: tcmt.Network,
    *,
    interval: float,
    points: int = 601,
    s: float = 10.0,
    bounds: Mapping[str, tuple[float, float]] = BOUNDS,
    spread: Mapping[str, float] = SPREAD,
    readout: float = 0.0,
) -> Model:
    """Make the model of a resonator network with knobs for ω and κ that is read at its leads alone.

    A record holds the complex amplitudes at the resonators of the leads; the reward is that of
    `tcmt.transmission`. Such a network is trained with calibration="training" only.

    Args:
        network: by the data sheet; only its graph and lead couplings are used.
        interval: between two samples.
        points: samples per trajectory.
        s: amplitude of the drive.
        bounds: {"omega": (low, high), "kappa": …}.
        spread: see `network_model`.
        readout: standard deviation of the readout noise on each quadrature, where the plan gives
            none.

    Returns: the model that `run` takes.

    >>> model = insitu.port_network_model(tcmt.rectangular(3, 4), interval=0.01, readout=0.05)
    >>> plan = insitu.Plan(calibration="training", readout=0.05)
    """
    if set(bounds) != set(BOUNDS):
        raise ValueError(
            f"`bounds` of a network that is read at its ports has {' and '.join(BOUNDS)}; got "
            f"{', '.join(bounds)}."
        )
    task = tcmt.transmission(
        network,
        horizon=(points - 1) * interval,
        dt=interval,
        drive=tcmt.Drive(0, s, frequency=10.0),
    )
    sites = tuple(int(site) for site in network.lead_sites)
    reward = ports.PortReward(task.objective.running, sites, network.sites)
    unknowns = list_unknowns(network, spread)
    self_calibration = ports.make_port_self_calibration(
        task, unknowns, readout, ports.PortReturns(reward)
    )
    columns = ports.list_columns(sites, network.sites)
    return Model(
        process=Observed(
            translate_process(task.process, ports.KnobPoint(ports.make_effective(network))),
            observe=np.eye(2 * network.sites)[columns],
            noise=readout**2,
            start=np.zeros(2 * network.sites),
            transition=local_linear,
        ),
        objective=Objective(running=reward),
        knobs=list_knobs(network, bounds),
        unknowns=unknowns,
        methods=Methods(
            calibrate=ports.PortCalibration(self_calibration),
            self_calibration=self_calibration,
            head=NetworkHead(task, sites),
        ),
    )
