"""A resonator network with knobs as an experiment for in-situ training."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from fluctua import tcmt
from fluctua.core.types import Params, Trajectories
from fluctua.insitu.calibration import knobs
from fluctua.insitu.calibration.knobs import KnobValues
from fluctua.insitu.instrument.protocol import Batch
from fluctua.insitu.model import DeviceFit, Model
from fluctua.insitu.recording.description import Description
from fluctua.insitu.recording.model import task_tables


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

    Args:
        network: by the data sheet; of it only the graph and the lead couplings are believed.
        interval: between two samples.
        points: samples of a trajectory.
        s: amplitude of the drive.
        rate: how fast the calibration follows; 0 leaves it.
        omega: bounds.
        kappa: bounds.

    Returns: the model that `begin` takes.

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
        values = {name: np.asarray(v, float) for name, v in settings.items()}
        tables: Any = task_tables(task)
        tables["network"]["observed"] = np.arange(sites)
        names = tuple(f"psi[{n}]" for n in range(sites))
        return Description(np.asarray(batch.t), names, "complex64", parameters=values, settings=values, **tables)

    def correct(theta: Params, values: KnobValues) -> Params:
        return knobs.settings(values, theta, {"omega": omega, "kappa": kappa})

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
        correct=correct,
    )
