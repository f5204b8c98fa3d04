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
from fluctua.insitu.instrument.substrate import shapes
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
    chi: tuple[float, float] | None = None,
    sigma_kappa: float = 0.0,
) -> Model:
    """A resonator network with knobs for ω, κ and perhaps χ, trained for transmitted power (`tcmt.transmission`).

    Args:
        network: by the data sheet; of it only the graph and the lead couplings are believed.
        interval: between two samples.
        points: samples of a trajectory.
        s: amplitude of the drive.
        rate: how fast the calibration follows; 0 leaves it.
        omega: bounds.
        kappa: bounds.
        chi: bounds; None for a network without knobs for the Kerr effect, which is then taken to be none.
        sigma_kappa: of the modulation of the couplings, which the instrument records with every trajectory.

    Returns: the model that `begin` takes.

    >>> network_model(tcmt.rectangular(3, 4), interval=0.01)
    """
    task = tcmt.transmission(network, horizon=(points - 1) * interval, dt=interval, s=s, sigma_kappa=sigma_kappa)
    sites, bonds = network.sites, len(network.bonds)
    bounds = {"omega": omega, "kappa": kappa} | ({} if chi is None else {"chi": chi})

    def probe(rng: np.random.Generator) -> Params:
        # half of the range about the start: wide enough for gains, and no bond is switched off
        linear = {"omega": rng.uniform(-1, 1, sites), "kappa": rng.uniform(0.5, 1.5, bonds)}
        return linear | ({} if chi is None else {"chi": rng.uniform(*chi, sites)})

    def calibrate(runs: list[tuple[Params, Trajectories]]) -> DeviceFit:
        fits = knobs.fit_runs(task, runs, kerr=chi is not None)
        return DeviceFit(knobs.fit_knobs(task, runs, fits), knobs.describe(task, runs, fits))

    def follow(values: KnobValues, settings: Params, trajectories: Trajectories) -> KnobValues:
        return knobs.follow(values, task, settings, trajectories, rate=rate)

    def head(batch: Batch, settings: Params) -> Description:
        values = {name: np.asarray(v, float) for name, v in settings.items()}
        tables: Any = task_tables(task)
        tables["network"]["observed"] = np.arange(sites)
        names = tuple(f"psi[{n}]" for n in range(sites))
        return Description(
            np.asarray(batch.t), names, "complex64", parameters=values, settings=values, context=shapes(batch), **tables
        )

    def correct(theta: Params, values: KnobValues) -> Params:
        return knobs.settings(values, theta, bounds)

    real = jnp.result_type(float)
    start = {"omega": jnp.zeros(sites, real), "kappa": jnp.ones(bonds, real)}
    start |= {} if chi is None else {"chi": jnp.zeros(sites, real)}
    return Model(
        process=knobs.process(task),
        objective=task.objective,
        start=start,
        lower={name: low for name, (low, _) in bounds.items()},
        upper={name: high for name, (_, high) in bounds.items()},
        probe=probe,
        calibrate=calibrate,
        follow=follow if rate > 0 else None,
        points=points,
        head=head,
        correct=correct,
    )
