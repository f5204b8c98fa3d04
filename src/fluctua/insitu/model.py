"""What in-situ training has to know of an experiment: its knobs, its model, its reward, how to calibrate it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fluctua import tcmt
from fluctua.core.types import Array, Objective, Params, Process, Trajectories
from fluctua.insitu.calibration import knobs
from fluctua.insitu.calibration.knobs import KnobValues
from fluctua.insitu.instrument.archive import Head
from fluctua.insitu.instrument.protocol import Batch
from fluctua.insitu.recording.description import Description
from fluctua.insitu.recording.model import task_tables


class DeviceFit(NamedTuple):
    """values: a dictionary of arrays, the context of the process. report: for a reader; kept as calibration.txt."""

    values: dict[str, Array]
    report: str = ""


class Model(NamedTuple):
    """An experiment.

    process: drift and noise as functions of the settings; its context is one row of the calibration. start: settings to
    begin at. lower, upper: bounds of the settings. probe: rng -> settings for the calibration. calibrate: from
    [(settings, trajectories), …] to a `DeviceFit`. follow: (values, settings, trajectories) -> the values after those
    trajectories; None if they stay as they are. points: samples a trajectory. head: of the recordings, so that they can
    be estimated and calibrated by themselves; without one they hold states and settings.
    """

    process: Process
    objective: Objective
    start: Params
    lower: Params
    upper: Params
    probe: Callable[[np.random.Generator], Params]
    calibrate: Callable[[list[tuple[Params, Trajectories]]], DeviceFit]
    follow: Callable[[dict[str, Array], Params, Trajectories], dict[str, Array]] | None = None
    points: int | None = None
    head: Head | None = None


def network_model(
    network: tcmt.Network,
    *,
    interval: float,
    points: int = 601,
    s: float = 10.0,
    rate: float = 0.3,
    omega: tuple[float, float] = (-2.0, 2.0),
    kappa: tuple[float, float] = (0.0, 1.5),
) -> Model:
    """A resonator network with knobs for ω and κ, trained for the power that it transmits (`tcmt.transmission`).

    network: by the data sheet; of it only the graph and the lead couplings are believed. interval, points: of the
    samples. s: amplitude of the drive. rate: how fast the calibration follows; 0 leaves it. omega, kappa: bounds.

    >>> network_model(tcmt.rectangular(3, 4), interval=0.01)
    """
    task = tcmt.transmission(network, horizon=(points - 1) * interval, dt=interval, s=s)
    sites, bonds = network.sites, len(network.bonds)

    def probe(rng: np.random.Generator) -> Params:
        # half of the range about the start: wide enough for gains, and no bond is switched off
        return {"omega": rng.uniform(-1, 1, sites), "kappa": rng.uniform(0.5, 1.5, bonds)}

    def calibrate(runs: list[tuple[Params, Trajectories]]) -> DeviceFit:
        fits = knobs.fit_runs(task, runs)
        return DeviceFit(knobs.fit_knobs(task, runs, fits), knobs.describe(task, runs, fits))

    def follow(values: KnobValues, settings: Params, trajectories: Trajectories) -> KnobValues:
        return knobs.follow(values, task, settings, trajectories, rate=rate)

    def head(batch: Batch, settings: Params) -> Description:
        told = {name: np.asarray(v, float) for name, v in settings.items()}
        tables: Any = task_tables(task)
        tables["network"]["observed"] = np.arange(sites)
        names = tuple(f"psi[{n}]" for n in range(sites))
        return Description(np.asarray(batch.t), names, "complex64", parameters=told, settings=told, **tables)

    real = jnp.result_type(float)
    return Model(
        process=knobs.process(task),
        objective=task.objective,
        start={"omega": jnp.zeros(sites, real), "kappa": jnp.ones(bonds, real)},
        lower={"omega": omega[0], "kappa": kappa[0]},
        upper={"omega": omega[1], "kappa": kappa[1]},
        probe=probe,
        calibrate=calibrate,
        follow=follow if rate > 0 else None,
        points=points,
        head=head,
    )
