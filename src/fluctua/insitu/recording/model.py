"""Models of recordings: the network in the tables of a file, or the user's code."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua import tcmt
from fluctua.core import check
from fluctua.core.arrays import Array, Params
from fluctua.core.display.fields import show_fields
from fluctua.core.objective import Objective
from fluctua.core.process import AnyProcess, Process
from fluctua.insitu.recording.description import Description
from fluctua.insitu.recording.reader import RecordingFile
from fluctua.processes.jumps import Jumps
from fluctua.store.code import load_code
from fluctua.tcmt.assembly import Dynamics, assemble_power
from fluctua.tcmt.tasks import Task


def tabulate_task(task: Task) -> dict[str, dict[str, Any]]:
    """Make the tables `network` and `drive` of a task that rewards weighted output powers.

    drive: lead, amplitude, phase, frequency (drives,), and envelope (drives, T+1) where one has an
    envelope.
    """
    if task.weights is None:
        raise ValueError(
            "a recording keeps rewards that are weighted output powers; this task has another one."
        )
    m = task.modulation or tcmt.Modulation(0.0)
    network: dict[str, Any] = {
        f.name: getattr(task.network, f.name) for f in dataclasses.fields(task.network)
    }
    network |= {"weights": np.asarray(task.weights), "frame": task.frame, "copies": task.copies}
    if task.integrator != "euler":
        network["step"] = task.integrator
    network |= {"sigma_kappa": m.sigma_kappa, "harmonics": m.harmonics, "omega_max": m.omega_max}
    drive = {
        name: np.array([getattr(d, name) for d in task.drives])
        for name in ("lead", "amplitude", "phase")
    }
    drive["frequency"] = np.array([d.frequency for d in task.drives])
    if any(d.envelope for d in task.drives):
        t = jnp.asarray(task.t)
        values = [
            np.ones(len(t)) if d.envelope is None else [float(d.envelope(s)) for s in t]
            for d in task.drives
        ]
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


def build_network(description: Description) -> tcmt.Network:
    """Build the network in a recording's table."""
    table = description.network
    names = [f.name for f in dataclasses.fields(tcmt.Network)]
    missing = [name for name in names if name not in table]
    if missing:
        raise ValueError(
            f"this recording's `network` has no {', '.join(missing)}, so its network "
            "cannot be rebuilt."
        )
    return tcmt.Network(**{name: np.asarray(table[name]) for name in names})


def build_task(description: Description) -> Task:
    """Build the task of a recording, on its own time grid."""
    d = description
    table = description.network
    if not table:
        raise ValueError(
            "this recording has no `network`, so its system is unknown. Give a model: --model "
            "FILE.py:NAME, an object with `process` and `objective` (in Python, call "
            "fluctua.gradient with yours)."
        )
    network = build_network(d)
    count = int(table["copies"])
    drives = _build_drives(d)
    modulation = tcmt.Modulation(
        float(table["sigma_kappa"]), int(table["harmonics"]), float(table["omega_max"])
    )
    frame: Any = str(table["frame"])
    weights = np.asarray(table["weights"], float)
    integrator = str(table.get("step", "euler"))
    dynamics = Dynamics(np.asarray(d.t), modulation, frame, integrator)
    return Task(*assemble_power(network, count, drives, weights, dynamics))


def find_observed_sites(description: Description, sites: int) -> np.ndarray:
    """Find the resonators of the channels: the table's `observed`, or all in order. (C,)"""
    if "observed" in description.network:
        return np.asarray(description.network["observed"], int)
    if len(description.channels) != sites:
        raise ValueError(
            f"the recording has {len(description.channels)} channels and its network {sites} "
            "resonators; list those of the channels as `observed` in its network table."
        )
    return np.arange(sites)


def _build_drives(d: Description) -> tuple[tcmt.Drive, ...]:
    table = d.drive
    drives = []
    for k in range(len(np.atleast_1d(table["lead"]))):
        lead, amplitude, phase, frequency = (
            float(np.atleast_1d(table[name])[k])
            for name in ("lead", "amplitude", "phase", "frequency")
        )
        envelope = None
        if "envelope" in table:
            envelope = SampledEnvelope(
                tuple(d.t.tolist()), tuple(np.atleast_2d(table["envelope"])[k].tolist())
            )
        drives.append(tcmt.Drive(int(lead), amplitude, phase, frequency, envelope))
    return tuple(drives)


# --------------------------------------------------------------------------------- any other system


@show_fields
class RecordingModel(NamedTuple):
    """The model of a recording, for estimates and calibrations.

    process: drift and noise, or rates.
    objective: the reward.
    theta: parameters at which it was recorded; None in a file of code, where `load_model` takes
        those of the recording.
    observed: components of the state that are in the file; None for all.
    size: of the state.

    >>> trap = fl.Process(lambda theta, x: -theta["k"] * x, lambda theta, x: 0.4 * jnp.ones(1))
    >>> mean_square = fl.Objective(running=lambda theta, x: x[0] ** 2)
    >>> model = insitu.files.RecordingModel(trap, mean_square, {"k": jnp.array(0.8)})
    """

    process: AnyProcess
    objective: Objective
    theta: Params = None
    observed: np.ndarray | None = None
    size: int | None = None

    @property
    def hidden(self) -> bool:
        """Whether components of the state are missing from the file."""
        return (
            self.observed is not None and self.size is not None and len(self.observed) < self.size
        )


def load_model(
    recording: RecordingFile, source: str | None = None, changes: Params | None = None
) -> RecordingModel:
    """Load the model of a recording.

    Args:
        recording: an open one.
        source: `FILE.py:NAME` of an object with `process`, `objective` and, if the recording has
            no parameters, `theta`; where both have a parameter, they must agree. None for the
            recording's own `network`.
        changes: parameters that take the place of the recording's.

    Returns: process, objective and θ.

    >>> model = insitu.files.load_model(recording)
    >>> sorted(model.theta)
    ['chi', 'kappa', 'omega']
    """
    d = recording.description
    theta = dict(d.theta) if changes is None else {**d.theta, **changes}
    if source is not None:
        code = _load_code(source)
        if recording.count:
            _refuse_unknowns(recording, code, source)
        if changes is None and getattr(code, "theta", None) is not None:
            theta = _merge_recorded(recording, code.theta, source)
        model = RecordingModel(code.process, code.objective, theta)
    else:
        task = build_task(d)
        sites = task.simulated.sites
        seen = find_observed_sites(d, sites)
        model = RecordingModel(
            task.process, task.objective, theta, np.concatenate([seen, seen + sites]), 2 * sites
        )
    if not theta:
        raise ValueError(
            f"{recording.path} does not hold the parameters that were set; give them with "
            "--params FILE.npz."
        )
    if source is not None and recording.count:
        _check_parameters(recording, model, source)
    return model


class Difference(NamedTuple):
    """The first difference of two values of one parameter.

    component: its name.
    first, second: both values as text.
    """

    component: str
    first: str
    second: str


def find_difference(name: str, first: Any, second: Any) -> Difference | None:
    """Compare two values of a parameter in the lower precision of the two. None if they agree.

    >>> find_difference("k", 0.8, np.array([0.8, 0.9])).second
    'shape (2,)'
    """
    if isinstance(first, str) or isinstance(second, str):
        return None if first == second else Difference(name, repr(first), repr(second))
    a = np.asarray(first)
    b = np.asarray(second)
    if a.shape != b.shape:
        return Difference(name, f"shape {a.shape}", f"shape {b.shape}")
    # an integer is as exact as float64
    precisions = [v.dtype if v.dtype.kind == "f" else np.dtype(np.float64) for v in (a, b)]
    lower = min(precisions, key=lambda precision: precision.itemsize)
    a = a.astype(lower)
    b = b.astype(lower)
    differing = np.argwhere(~((a == b) | (np.isnan(a) & np.isnan(b))))
    if not len(differing):
        return None
    index = tuple(differing[0].tolist())
    component = f"{name}{list(index)}" if index else name
    return Difference(component, str(a[index]), str(b[index]))


def name_leaves(theta: Params) -> dict[str, Any]:
    """List the leaves of θ by name; those of nested tables as `drift.k`."""
    leaves = jax.tree_util.tree_leaves_with_path(theta)
    return {_name_path(path): leaf for path, leaf in leaves}


def _name_path(path: Any) -> str:
    return str(jax.tree_util.keystr(path, simple=True, separator="."))


def _merge_recorded(recording: RecordingFile, theta: Params, source: str) -> Params:
    """Replace θ of a model file by the values in the recording, where it has them.

    A difference is refused.
    """
    recorded = recording.description.parameters
    for name, value in name_leaves(theta).items():
        difference = find_difference(name, recorded[name], value) if name in recorded else None
        if difference is not None:
            raise ValueError(
                f"`{difference.component}` is {difference.first} in {recording.path} and "
                f"{difference.second} in the `theta` of {source}. The score needs the parameters "
                "at which the file was recorded: remove `theta` from the model, or, if the file "
                "is wrong, give the right ones with --params FILE.npz."
            )
    known = recording.description.theta
    return jax.tree_util.tree_map_with_path(
        lambda path, value: known.get(_name_path(path), value), theta
    )


def _read_context(recording: RecordingFile) -> dict[str, Any] | None:
    """The context of the first trajectory; None where the recording has none."""
    context = recording.trajectories(0, 1, load=True).context
    return None if context is None else {name: leaf[0] for name, leaf in context.items()}


def _refuse_unknowns(recording: RecordingFile, code: Any, source: str) -> None:
    """Refuse the model of an instrument, whose drift needs values that a recording does not hold.

    They are in the context of a training, which calibrates them.
    """
    unknowns = getattr(code, "unknowns", None)
    missing = [name for name in unknowns or {} if name not in (_read_context(recording) or {})]
    if not missing:
        return
    settings = recording.description.settings
    values = ", ".join(f"{name} = {_format_value(value)}" for name, value in settings.items())
    recorded = (
        f" {recording.path} was recorded at {values}: `theta` has to be this." if values else ""
    )
    raise ValueError(
        f"{source} has unknowns ({', '.join(missing)}), whose values are not in {recording.path}. "
        "Give a model with `process`, `objective` and `theta`, in whose drift they are fixed, such "
        f"as to the values in calibration.txt of the run.{recorded}"
    )


def _format_value(value: Any) -> str:
    """A value, or the shape of an array."""
    array = np.asarray(value)
    return f"{array.item():.6g}" if array.size == 1 else f"an array {array.shape}"


def _check_parameters(recording: RecordingFile, model: RecordingModel, source: str) -> None:
    """Refuse a model that needs a parameter which is missing, before any gradient."""
    one = _read_context(recording)
    state = jax.ShapeDtypeStruct((len(recording.description.components),), np.float32)
    process = check.process(model.process)
    name = "drift" if isinstance(process, Process) else "rates"
    rule = getattr(process, name, None)
    if rule is None:
        return
    try:
        jax.eval_shape(rule, model.theta, state, float(recording.t[0]), one)
    except KeyError as error:
        there = ", ".join([*model.theta, *(f"context {entry}" for entry in one or {})])
        raise ValueError(
            f"the {name} of {source} needs {error}; available are {there}. Parameters come from "
            "the recording and from --params FILE.npz."
        ) from error


def _load_code(text: str) -> Any:
    """Load the object with `process`, `objective` and perhaps `theta` at `FILE.py:NAME`."""
    expected = "a model, an object with `process` and `objective`"
    model = load_code(text, expected)
    if callable(model) and not isinstance(model, type):
        model = model()
    for name, kinds in (("process", (Process, Jumps)), ("objective", (Objective,))):
        part = getattr(model, name, None)
        if not isinstance(part, kinds):
            wanted = " or ".join(f"fluctua.{kind.__name__}" for kind in kinds)
            raise ValueError(
                f"{text} must have `{name}`, a {wanted}; it has {type(part).__name__}."
            )
    return model
