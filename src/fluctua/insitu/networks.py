"""A resonator network with knobs as an experiment for in-situ training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluctua import tcmt
from fluctua.core.arrays import Params
from fluctua.core.trajectories import Trajectories
from fluctua.insitu.calibrate import knobs
from fluctua.insitu.calibrate.knobs import KnobValues
from fluctua.insitu.calibrate.network import linear_model
from fluctua.insitu.instrument.protocol import Batch
from fluctua.insitu.instrument.substrate import shapes
from fluctua.insitu.model import DeviceFit, Model, Unknown
from fluctua.insitu.recording.description import Description
from fluctua.insitu.recording.model import task_tables
from fluctua.tcmt.coupled_modes import coefficients
from fluctua.tcmt.fused import Fused, OfLosses

LONGEST_STEP = 1e-3
"""Of the model that a training calibrates, in units of 1/κ: its Euler steps are closer than the
samples.
"""

EVERY = 20
"""Such steps of which one counts for the information: features change by 1e-3 of themselves in a
step.
"""

KERR_STEP = 0.01
"""Of a step of χ to one of ω: a Kerr coefficient of 0.01 detunes by as much as ω = 0.5."""

SPREAD = {
    "omega_offset": 0.5,
    "omega_gain": 0.3,
    "kappa_offset": 0.3,
    "kappa_gain": 0.3,
    "loss": 0.3,
}


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
    reach: Mapping[str, tuple[float, float]] | None = None,
    spread: Mapping[str, float] = SPREAD,
) -> Model:
    """A resonator network with knobs for ω, κ and perhaps χ, trained for transmitted power
    (`tcmt.transmission`).

    Args:
        network: by the data sheet; of it only the graph and the lead couplings are believed.
        interval: between two samples.
        points: samples of a trajectory.
        s: amplitude of the drive.
        rate: how fast the calibration follows; 0 leaves it.
        omega: bounds.
        kappa: bounds.
        chi: bounds; None for a network without knobs for the Kerr effect, which is then taken to be
            none.
        sigma_kappa: of the modulation of the couplings, which the instrument records with every
            trajectory.
        reach: what the knobs take, {"omega": (low, high), …}, for settings that are corrected
            device by device; the bounds if not given. Wider than the bounds, it lets devices that
            differ all do what the design asks.
        spread: how far the instrument may be from its data sheet, standard deviations, for a
            training that calibrates as it goes: of ω and κ where no knob is turned (offsets), of
                the knobs' gains, and of the losses, relative.

    Returns: the model that `begin` takes.

    >>> network_model(tcmt.rectangular(3, 4), interval=0.01)
    """
    task = tcmt.transmission(
        network, horizon=(points - 1) * interval, dt=interval, s=s, sigma_kappa=sigma_kappa
    )
    sites = network.sites
    bonds = len(network.bonds)
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
            np.asarray(batch.t),
            names,
            "complex64",
            parameters=values,
            settings=values,
            context=shapes(batch),
            **tables,
        )

    def correct(theta: Params, values: KnobValues) -> Params:
        return knobs.settings(values, theta, {**bounds, **(reach or {})})

    start = _start(sites, bonds)
    start |= {} if chi is None else {"chi": jnp.zeros(sites, jnp.result_type(float))}
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
        channels=2 * sites,
        head=head,
        correct=correct,
        steps=None if chi is None else {"omega": 1.0, "kappa": 1.0, "chi": KERR_STEP},
        unknown=None
        if chi is not None or sigma_kappa
        else _unknown(network, task, interval, spread),
    )


@dataclass(frozen=True)
class _Effective:
    """(settings, φ) -> ω, κ and γ: a line for each knob, and losses that are never negative."""

    gamma: tuple[float, ...]

    def __call__(self, theta: Params, phi: Params) -> Params:
        lines = {
            name: phi[f"{name}_offset"] + phi[f"{name}_gain"] * theta[name]
            for name in ("omega", "kappa")
        }
        return {**lines, "gamma": jnp.asarray(self.gamma, phi["loss"].dtype) * jnp.exp(phi["loss"])}


def _unknown(
    network: tcmt.Network, task: tcmt.Task, interval: float, spread: Mapping[str, float]
) -> Unknown:
    """Offset and gain of every knob and every loss, on a model whose steps divide the sampling
    interval.
    """
    wrong = sorted(set(spread) ^ set(SPREAD))
    if wrong:
        raise ValueError(
            f"`spread` has {', '.join(SPREAD)}; {', '.join(map(repr, wrong))} is amiss."
        )
    sites = network.sites
    bonds = len(network.bonds)
    steps = math.ceil(interval / LONGEST_STEP - 1e-9)
    horizon = float(task.t[-1] - task.t[0])
    fine = tcmt.transmission(
        network, horizon=horizon, dt=interval / steps, s=task.drives[0].amplitude
    )
    effective = _Effective(tuple(np.asarray(network.gamma, float).tolist()))

    def context(phi: Params) -> KnobValues:
        p = {
            name: np.asarray(v)
            for name, v in effective(_start(sites, bonds), jax.tree.map(jnp.asarray, phi)).items()
        }
        c = coefficients(network, p)
        drift = linear_model(task, p, kerr=False).theta
        own = {name: np.asarray(phi[name], float) for name in phi if name != "loss"}
        noise = {
            "diffusion": c.amplitude**2 / 2,
            "readout": np.zeros(sites),
            "readout_seen": np.array(0.0),
        }
        return own | {name: np.asarray(drift[name]) for name in knobs.REST} | noise

    start = {
        "omega_offset": jnp.zeros(sites),
        "omega_gain": jnp.ones(sites),
        "kappa_offset": jnp.zeros(bonds),
        "kappa_gain": jnp.ones(bonds),
        "loss": jnp.zeros(sites),
    }
    twin = fine.estimator("cpu", baseline="twin")
    assert isinstance(twin, Fused)
    return Unknown(OfLosses(twin), effective, start, dict(spread), context, EVERY)


def _start(sites: int, bonds: int) -> dict[str, Any]:
    real = jnp.result_type(float)
    return {"omega": jnp.zeros(sites, real), "kappa": jnp.ones(bonds, real)}
