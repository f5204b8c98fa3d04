"""A resonator network's task as tables of a recording, and back: so that a file alone is enough for its gradient."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from fluctua import tcmt
from fluctua.core.types import Array
from fluctua.insitu.recording.description import Description
from fluctua.tcmt.network import copies
from fluctua.tcmt.tasks import Task, WeightedPower, assembled, outputs


def tables(task: Task) -> dict[str, dict[str, Any]]:
    """`network` and `drive` of a task whose reward is a weighted sum of output powers.

    drive: lead, amplitude, phase, frequency (drives,), and envelope (drives, T+1) where one has an envelope.
    """
    if task.weights is None:
        raise ValueError("a recording keeps rewards that are weighted output powers; this task has another one.")
    m = task.modulation or tcmt.Modulation(0.0)
    network: dict[str, Any] = {f.name: getattr(task.network, f.name) for f in dataclasses.fields(task.network)}
    network |= {"weights": np.asarray(task.weights), "frame": task.frame, "copies": task.copies}
    network |= {"sigma_kappa": m.sigma_kappa, "harmonics": m.harmonics, "omega_max": m.omega_max}
    drive = {name: np.array([getattr(d, name) for d in task.drives]) for name in ("lead", "amplitude", "phase")}
    drive["frequency"] = np.array([d.frequency for d in task.drives])
    if any(d.envelope for d in task.drives):
        t = jnp.asarray(task.t)
        values = [np.ones(len(t)) if d.envelope is None else [float(d.envelope(s)) for s in t] for d in task.drives]
        drive["envelope"] = np.array(values)
    return {"network": network, "drive": drive}


@dataclass(frozen=True)
class SampledEnvelope:
    """An envelope known at the times of a recording, linear in between."""

    t: tuple[float, ...]
    values: tuple[float, ...]

    def __call__(self, t: Array) -> Array:
        """The envelope at t."""
        return jnp.interp(t, jnp.asarray(self.t), jnp.asarray(self.values))


def network_of(description: Description) -> tcmt.Network:
    """The network in a recording's table."""
    table = description.network
    names = [f.name for f in dataclasses.fields(tcmt.Network)]
    missing = [name for name in names if name not in table]
    if missing:
        raise ValueError(f"this recording's `network` has no {', '.join(missing)}, so its network cannot be rebuilt.")
    return tcmt.Network(**{name: np.asarray(table[name]) for name in names})


def task_of(description: Description) -> Task:
    """The task that a recording was made with, on the recording's own time grid."""
    d, table = description, description.network
    if not table:
        raise ValueError(
            "this recording does not say what system it is of (no `network`). Give a model: --model FILE.py, with "
            "`process` and `objective` (in Python, call fluctua.gradient with yours)."
        )
    network, count = network_of(d), int(table["copies"])
    simulated = network if count == 1 else copies(network, count)
    drives = _drives(d)
    modulation = tcmt.Modulation(float(table["sigma_kappa"]), int(table["harmonics"]), float(table["omega_max"]))
    frame: Any = str(table["frame"])
    weights = tuple(np.asarray(table["weights"], float).tolist())
    reward = WeightedPower(outputs(simulated, drives, frame=frame), weights)
    return assembled(network, count, drives, reward, weights, d.t, modulation, frame)


def observed_sites(description: Description, sites: int) -> np.ndarray:
    """Which resonators the channels are of: the table's `observed`, or all in order. (C,)"""
    if "observed" in description.network:
        return np.asarray(description.network["observed"], int)
    if len(description.channels) != sites:
        raise ValueError(
            f"the recording has {len(description.channels)} channels and its network {sites} resonators; `observed` in "
            "its network table must say which ones they are."
        )
    return np.arange(sites)


def _drives(d: Description) -> tuple[tcmt.Drive, ...]:
    table, found = d.drive, []
    for k in range(len(np.atleast_1d(table["lead"]))):
        at = lambda name: float(np.atleast_1d(table[name])[k])  # noqa: B023
        envelope = None
        if "envelope" in table:
            envelope = SampledEnvelope(tuple(d.t.tolist()), tuple(np.atleast_2d(table["envelope"])[k].tolist()))
        found.append(tcmt.Drive(int(at("lead")), at("amplitude"), at("phase"), at("frequency"), envelope))
    return tuple(found)
