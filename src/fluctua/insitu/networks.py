"""A resonator network with knobs as an experiment for in-situ training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from fluctua import tcmt
from fluctua.core.arrays import Params
from fluctua.core.trajectories import Trajectories
from fluctua.insitu.calibrate import knobs
from fluctua.insitu.instrument.archive import list_context_shapes
from fluctua.insitu.instrument.protocol import Batch
from fluctua.insitu.model import Knob, Methods, Model
from fluctua.insitu.network_self_calibration import make_self_calibration
from fluctua.insitu.recording.description import Description
from fluctua.insitu.recording.model import tabulate_task
from fluctua.insitu.unknowns import DeviceFit, Runs, Unknown

KERR_SCALE = 0.01
"""Learning rate of χ over that of ω: a Kerr coefficient of 0.01 detunes by as much as ω = 0.5."""

BOUNDS = {"omega": (-2.0, 2.0), "kappa": (0.0, 1.5)}

PROBES = {"omega": (-1.0, 1.0), "kappa": (0.5, 1.5)}
"""Settings of a calibration: wide enough for gains, and no bond is switched off."""

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
    bounds: Mapping[str, tuple[float, float]] = BOUNDS,
    sigma_kappa: float = 0.0,
    reach: Mapping[str, tuple[float, float]] | None = None,
    spread: Mapping[str, float] = SPREAD,
) -> Model:
    """Make the model of a resonator network with knobs for ω, κ and perhaps χ.

    It is trained for transmitted power, and read at every resonator.

    The reward is that of `tcmt.transmission`.

    Args:
        network: by the data sheet; only its graph and lead couplings are used.
        interval: between two samples.
        points: samples per trajectory.
        s: amplitude of the drive.
        rate: how fast the calibration follows the device; 0 leaves it as it is.
        bounds: {"omega": (low, high), "kappa": …}. With "chi" there are knobs for the Kerr effect,
            which is taken to be none without.
        sigma_kappa: of the modulation of the couplings, which the instrument records with every
            trajectory.
        reach: what the knobs take, {"omega": (low, high), …}, for settings that are corrected
            device by device; the bounds if not given. Wider than the bounds, it lets devices that
            differ all reach the parameters of the design.
        spread: how far the instrument may be from its data sheet, standard deviations, for a
            training that calibrates as it goes: of ω and κ where no knob is turned (offsets), of
            the knobs' gains, and of the losses, relative.

    Returns: the model that `run` takes.

    >>> model = insitu.network_model(tcmt.rectangular(3, 4), interval=0.01)
    >>> sorted(model.knobs)
    ['kappa', 'omega']
    """
    task = tcmt.transmission(
        network,
        horizon=(points - 1) * interval,
        dt=interval,
        drive=tcmt.Drive(0, s, frequency=10.0),
        sigma_kappa=sigma_kappa,
    )
    kerr = "chi" in bounds
    unknowns = list_unknowns(network, spread)
    self_calibration = None
    if not (kerr or sigma_kappa):
        self_calibration = make_self_calibration(
            network, task, interval, unknowns, list_starts(network)
        )
    laboratory = _Laboratory(task, dict(bounds), {**bounds, **(reach or {})}, rate)
    return Model(
        process=knobs.make_process(task),
        objective=task.objective,
        knobs=list_knobs(network, bounds),
        unknowns=unknowns,
        channels=2 * network.sites,
        methods=Methods(
            calibrate=laboratory.calibrate,
            follow=laboratory.follow if rate > 0 else None,
            correct=laboratory.correct,
            self_calibration=self_calibration,
            head=NetworkHead(task, tuple(range(network.sites))),
        ),
    )


def list_knobs(network: tcmt.Network, bounds: Mapping[str, tuple[float, float]]) -> dict[str, Knob]:
    """Knobs of a network, with bounds."""
    starts = list_starts(network)
    listed = {name: Knob(start, bounds[name], PROBES[name]) for name, start in starts.items()}
    if "chi" in bounds:
        none = np.zeros(network.sites)
        listed["chi"] = Knob(none, bounds["chi"], bounds["chi"], KERR_SCALE)
    return listed


def list_unknowns(network: tcmt.Network, spread: Mapping[str, float]) -> dict[str, Unknown]:
    """Offset and gain of every knob, and the logarithm of every loss over its data sheet."""
    wrong = sorted(set(spread) ^ set(SPREAD))
    if wrong:
        raise ValueError(
            f"`spread` must have {', '.join(SPREAD)}; missing or unknown: "
            f"{', '.join(map(repr, wrong))}."
        )
    sites = network.sites
    bonds = len(network.bonds)
    return {
        "omega_offset": Unknown(jnp.zeros(sites), spread["omega_offset"]),
        "omega_gain": Unknown(jnp.ones(sites), spread["omega_gain"]),
        "kappa_offset": Unknown(jnp.zeros(bonds), spread["kappa_offset"]),
        "kappa_gain": Unknown(jnp.ones(bonds), spread["kappa_gain"]),
        "loss": Unknown(jnp.zeros(sites), spread["loss"]),
    }


@dataclass(frozen=True)
class _Laboratory:
    """Ways of a network's own: its drift is linear in all that is unknown, and fitted at once."""

    task: tcmt.Task
    bounds: dict[str, tuple[float, float]]
    reach: dict[str, tuple[float, float]]
    rate: float

    def calibrate(self, runs: Runs) -> DeviceFit:
        """Fit knobs, losses, drive and noise to trajectories at several settings."""
        listed = list(runs)
        fits = knobs.fit_runs(self.task, listed, kerr="chi" in self.bounds)
        values = knobs.fit_knobs(self.task, listed, fits)
        return DeviceFit(values, knobs.describe(self.task, listed, fits))

    def follow(
        self, values: knobs.KnobValues, settings: Params, trajectories: Trajectories
    ) -> knobs.KnobValues:
        """Move the values towards the fit of new trajectories."""
        return knobs.follow(values, self.task, settings, trajectories, rate=self.rate)

    def correct(self, theta: Params, values: knobs.KnobValues) -> Params:
        """The settings at which a device does θ."""
        return knobs.compute_settings(values, theta, self.reach)


@dataclass(frozen=True)
class NetworkHead:
    """(batch, settings) -> the head of a recording.

    task: the network and its drive.
    sites: resonators that are read.
    """

    task: tcmt.Task
    sites: tuple[int, ...]

    def __call__(self, batch: Batch, settings: Params) -> Description:
        """The head of a recording."""
        values = {name: np.asarray(v, float) for name, v in settings.items()}
        tables: Any = tabulate_task(self.task)
        tables["network"]["observed"] = np.array(self.sites)
        names = tuple(f"psi[{n}]" for n in self.sites)
        return Description(
            np.asarray(batch.t),
            names,
            "complex64",
            parameters=values,
            settings=values,
            context=list_context_shapes(batch),
            **tables,
        )


def list_starts(network: tcmt.Network) -> dict[str, Any]:
    """Settings at which training begins."""
    real = jnp.result_type(float)
    bonds = len(network.bonds)
    return {"omega": jnp.zeros(network.sites, real), "kappa": jnp.ones(bonds, real)}
