"""A calibration as the `noise` table of its recording, and back.

`fluctua calibrate --write` writes the table and `fluctua estimate` reads it, so that a file holds
the calibration of its noise and drift. A table from another measurement does as well; only
`diffusion` is needed.

The score divides by Q, so a Q that is off by a factor c puts the whole gradient off by 1/c: the
calibrated one is used wherever a file has it. It enters as a factor on each component's noise,

    σ_i(θ, x, t) → σ_i(θ, x, t) √(Q̂_i / Q_i),

with Q_i the model's own, averaged over recorded states, so that the dependence of σ on θ and on
the state stays that of the model.

The score also needs the drift at the parameters that the system really had. `theta="calibrated"`
puts the fitted ones in the place of those that were set, and adds to a network's drift what was
fitted and is not in θ, the total decay and the drive: μ → μ − (Γ̂ − Γ)ψ + (d̂ − d) f(t).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import check
from fluctua.core.arrays import Array, Params
from fluctua.core.diffusion import diffusion_matrix
from fluctua.core.likelihood.noise import is_observation_seen
from fluctua.core.process import NoiseProduct, Process
from fluctua.core.text import names
from fluctua.core.words import format_count
from fluctua.insitu.calibrate import network, report
from fluctua.insitu.calibrate.fit import Calibration, require_diffusion
from fluctua.insitu.recording import description as heads
from fluctua.insitu.recording import model as models
from fluctua.insitu.recording.reader import RecordingFile
from fluctua.tcmt.coupled_modes import carrier

DRIFT = "drift_"
ERROR = "_stderr"


class NoiseTable(NamedTuple):
    """The `noise` table of a recording.

    diffusion, diffusion_stderr: Q (M,); the error is NaN if it is not known.
    observation_variance: s² (M,), None where none was seen.
    drift, drift_stderr: {name: fitted coefficients}; errors are infinite where undetermined.
    origin: date, transition and trajectories, in words.
    """

    diffusion: np.ndarray
    diffusion_stderr: np.ndarray
    observation_variance: np.ndarray | None
    drift: dict[str, np.ndarray]
    drift_stderr: dict[str, np.ndarray]
    origin: str


def tabulate_calibration(calibration: Calibration, trajectories: int) -> dict[str, Any]:
    """Make the table of a calibration for `put_table(path, "noise", …)`.

    Args:
        calibration: of `calibrate`.
        trajectories: that it was made from.

    Returns: the table.

    >>> calibration = insitu.calibrate.calibrate_recording(recording, model, bias=False)
    >>> table = insitu.calibrate.tabulate_calibration(calibration, recording.count)
    >>> insitu.files.put_table("run.nc", "noise", table)  # `fluctua estimate run.nc` uses it
    """
    names = ("diffusion", "diffusion_stderr", "observation_variance", "observation_stderr")
    table: dict[str, Any] = {name: getattr(calibration.noise, name) for name in names}
    table["observation_seen"] = int(calibration.noise.observation_seen)
    for name, value, error in _list_entries(calibration.fit.theta, calibration.fit.stderr):
        table |= {f"{DRIFT}{name}": value, f"{DRIFT}{name}{ERROR}": error}
    how = {"transition": calibration.transition, "trajectories": trajectories}
    return {**table, **how, "created": heads.format_now(), "software": heads.software_name()}


def read_noise(description: heads.Description) -> NoiseTable | None:
    """Read the calibration in a recording's head; None if there is none.

    Args:
        description: head of a recording, its `description`.

    Returns: the table, with diffusion and readout noise.

    >>> insitu.files.put_table("run.nc", "noise", {"diffusion": np.full(12, 0.1)})
    >>> with insitu.files.open("run.nc") as calibrated:
    ...     insitu.calibrate.read_noise(calibrated.description).diffusion.shape
    (12,)
    """
    table = description.noise
    size = len(description.components)
    if "diffusion" not in table:
        return None
    q = _read_vector(table, "diffusion", size)
    if not np.all(q >= 0):
        _refuse_diffusion(q, description.components)
    s2 = (
        _read_vector(table, "observation_variance", size)
        if "observation_variance" in table
        else None
    )
    if s2 is not None and "observation_seen" in table:
        s2 = s2 if int(table["observation_seen"]) else None
    elif s2 is not None and "observation_stderr" in table:
        s2 = (
            s2 if is_observation_seen(s2, _read_vector(table, "observation_stderr", size)) else None
        )
    error = (
        _read_vector(table, f"diffusion{ERROR}", size)
        if f"diffusion{ERROR}" in table
        else np.full(size, np.nan)
    )
    fitted = [n.removeprefix(DRIFT) for n in table if n.startswith(DRIFT) and not n.endswith(ERROR)]
    drift = {n: np.asarray(table[DRIFT + n], float) for n in fitted}
    errors = {
        n: np.asarray(table.get(DRIFT + n + ERROR, np.zeros_like(v)), float)
        for n, v in drift.items()
    }
    return NoiseTable(
        q, error, None if s2 is None else np.maximum(s2, 0), drift, errors, _describe_origin(table)
    )


def _refuse_diffusion(q: np.ndarray, components: tuple[str, ...]) -> None:
    bad = int(np.argmin(q))
    raise ValueError(
        f"the file's noise table has a diffusion of {q[bad]:.3g} for {components[bad]}; it must "
        "be positive. Calibrate with more trajectories (fluctua calibrate --write), or "
        "use --set noise=nominal."
    )


def _read_vector(table: Any, name: str, size: int) -> np.ndarray:
    """Read one number per component; a single one stands for all."""
    value = np.asarray(table[name], float)
    if value.shape not in ((), (1,), (size,)) or not np.all(np.isfinite(value)):
        raise ValueError(
            f"`noise.{name}` must be a finite number for each of the {size} components, or one "
            f"for all; got shape {value.shape}. Calibrate again (fluctua calibrate --write), or "
            "use --set noise=nominal."
        )
    return np.broadcast_to(value, (size,)).copy()


def _describe_origin(table: Any) -> str:
    parts = [str(table["created"])[:10]] if "created" in table else []
    if "trajectories" in table:
        parts.append(format_count(int(table["trajectories"]), "trajectory"))
    parts += [f"{table['transition']} transition"] if "transition" in table else []
    return ", ".join(parts) or "of unknown origin"


def _list_entries(theta: Any, stderr: Any) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Entries of θ that a table can hold, with errors; none unless θ is a flat dictionary."""
    if not isinstance(theta, dict) or not all(
        str(n).isidentifier() and np.ndim(v) >= 0 for n, v in theta.items()
    ):
        return []
    if any(isinstance(v, dict | list | tuple) for v in theta.values()):
        return []
    return [(str(n), np.asarray(v, float), np.asarray(stderr[n], float)) for n, v in theta.items()]


# ------------------------------------------------------------------------------- applied to a model

NOISES = ("auto", "file", "nominal")
THETAS = ("set", "calibrated")
SAMPLES = 256
"""Recorded states over which a model's Q is averaged; where it is constant, one would do."""


class CalibratedModel(NamedTuple):
    """A model with the calibration of its recording.

    model: with the calibrated noise, and drift where requested.
    observation_variance: s² (M,) to correct for, or None.
    ratio: Q̂/Q (M,) of the file's calibration; None if the model's noise is used.
    notes: what was used, one line each.
    """

    model: models.RecordingModel
    observation_variance: np.ndarray | None
    ratio: np.ndarray | None
    notes: tuple[str, ...]


def apply_calibration(
    recording: RecordingFile,
    model: models.RecordingModel,
    *,
    noise: str = "auto",
    theta: str = "set",
) -> CalibratedModel:
    """Apply the `noise` table of a recording to its model.

    Args:
        recording: an open one.
        model: what `load_model(recording)` gives.
        noise: "file" takes the table's Q and observation noise, "nominal" the model's, "auto" the
            table's if there is one.
        theta: "set" for the recorded parameters, "calibrated" for the fitted ones.

    Returns: the model, and what was used of the table.

    >>> insitu.files.put_table("run.nc", "noise", {"diffusion": np.full(12, 0.1)})
    >>> with insitu.files.open("run.nc") as calibrated:
    ...     applied = insitu.calibrate.apply_calibration(calibrated, model)
    >>> better = applied.model  # for `insitu.estimate`, with the measured noise
    """
    for name, choice, known in (("noise", noise, NOISES), ("theta", theta, THETAS)):
        if choice not in known:
            raise ValueError(f"`{name}` must be one of {', '.join(known)}; got {choice!r}.")
    if not isinstance(check.process(model.process), Process):
        if noise == "file" or theta == "calibrated":
            require_diffusion(model.process, "a calibration in the file is")
        return CalibratedModel(model, None, None, ("rates: the model's own",))
    table = (
        read_noise(recording.description) if noise != "nominal" or theta == "calibrated" else None
    )
    if table is None and (noise == "file" or theta == "calibrated"):
        raise ValueError(
            f"{recording.path} has no calibration in it. Make one: fluctua calibrate "
            f"{recording.path} --write"
        )
    notes = []
    ratio = variance = None
    if theta == "calibrated":
        assert table is not None
        model, line = _apply_drift(recording, model, table)
        notes.append(line)
    if table is None or noise == "nominal":
        notes.insert(
            0,
            "noise: the model's own Q"
            + ("" if noise == "nominal" else "; the file has no calibration"),
        )
    else:
        model, ratio = _apply_noise(recording, model, table.diffusion)
        variance = table.observation_variance
        notes.insert(0, _describe_noise(table, ratio, variance))
        notes += _describe_changes(recording, model, table) if theta == "set" else []
    return CalibratedModel(model, variance, ratio, tuple(notes))


# ---------------------------------------------------------------------------------------- the noise


@dataclass(frozen=True)
class ScaledNoise:
    """Σ with each component's row times a number. scale: (M,)"""

    f: Callable[..., Array]
    scale: tuple[float, ...]

    def __call__(self, theta: Params, x: Array, *rest: Any) -> Array:
        """σ. (M,) or (M, W)"""
        sigma = self.f(theta, x, *rest)
        scale = jnp.asarray(self.scale, sigma.dtype)
        return sigma * (scale if jnp.ndim(sigma) == 1 else scale[:, None])


@dataclass(frozen=True)
class ScaledDiffusion:
    """v -> S Q S v, S diagonal. scale: (M,)"""

    f: Callable[..., Array]
    scale: tuple[float, ...]

    def __call__(self, theta: Params, x: Array, t: Array, context: Any, v: Array) -> Array:
        """Q v. (M,)"""
        scale = jnp.asarray(self.scale, v.dtype)
        return scale * self.f(theta, x, t, context, scale * v)


def scale_process_noise(process: Process, scale: np.ndarray) -> Process:
    """Multiply the noise of component i by scale_i, in whichever form it is given. scale: (M,)"""
    by = tuple(np.asarray(scale, float).tolist())
    noise: Any = process.noise
    if isinstance(noise, NoiseProduct):
        noise = NoiseProduct(ScaledNoise(noise.product, by), noise.width)
    elif noise is not None:
        noise = ScaledNoise(noise, by)
    diffusion = None if process.diffusion is None else ScaledDiffusion(process.diffusion, by)
    return process._replace(noise=noise, diffusion=diffusion)


def _apply_noise(
    recording: RecordingFile, model: models.RecordingModel, diffusion: np.ndarray
) -> tuple[models.RecordingModel, np.ndarray]:
    """The model with Q of the observed components (C,) replaced, and Q̂/Q (C,)."""
    process = check.process(model.process)
    seen = np.arange(len(diffusion)) if model.observed is None else model.observed
    size = len(diffusion) if model.size is None else model.size
    own = _average_diffusion(recording, process, model.theta, seen, size)[seen]
    components = recording.description.components
    if np.any((own > 0) & (diffusion <= 0)):
        _refuse_diffusion(np.where(own > 0, diffusion, np.inf), components)
    if np.any((own <= 0) & (diffusion > 0)):
        bad = components[int(np.argmax((own <= 0) & (diffusion > 0)))]
        raise ValueError(
            f"the model has no noise on {bad}, so its calibrated diffusion has nothing to scale."
        )
    # a component without noise in both stays so
    ratio = np.where(own > 0, diffusion / np.where(own > 0, own, 1), 1.0)
    scale = np.ones(size)
    scale[seen] = np.sqrt(ratio)
    return model._replace(process=scale_process_noise(process, scale)), ratio


def _average_diffusion(
    recording: RecordingFile, process: Process, theta: Params, seen: np.ndarray, size: int
) -> np.ndarray:
    """Diagonal of the model's Q, averaged over recorded states; hidden components at zero. (M,)"""
    theta = check.parameters(theta)
    count = min(recording.count, 16)
    data = recording.trajectories(0, count, load=True)
    every = max(1, (len(data.t) - 1) * count // SAMPLES)
    n = np.arange(1, len(data.t), every)  # not the start, which is often a state without noise
    x = np.zeros((count, len(n), size))
    x[:, :, seen] = np.asarray(data.x)[:, n]
    dtype = jnp.result_type(float)
    times = jnp.asarray(data.t[n], dtype)

    def average_trajectory(x: Array, context: Any) -> Array:
        def diagonal(pair):
            return jnp.diagonal(diffusion_matrix(process, theta, pair[0], pair[1], context))

        return jax.lax.map(diagonal, (x, times)).mean(axis=0)

    each = [
        average_trajectory(
            jnp.asarray(x[j], dtype), jax.tree.map(lambda leaf, j=j: leaf[j], data.context)
        )
        for j in range(count)
    ]
    return np.mean(np.asarray(each, np.float64), axis=0)


# ---------------------------------------------------------------------------------------- the drift


@dataclass(frozen=True)
class CorrectedDrift:
    """μ plus what a calibration found besides θ: a linear model at differences of coefficients.

    f: the drift of the model.
    linear: the linear model.
    rest: pairs of name and difference.
    """

    f: Callable[..., Array]
    linear: network.LinearDrift
    rest: tuple[tuple[str, tuple[float, ...]], ...]

    def __call__(self, theta: Params, x: Array, t: Array, context: Any) -> Array:
        """μ. (M,)"""
        known = {name: jnp.asarray(value, x.dtype) for name, value in self.rest}
        return self.f(theta, x, t, context) + self.linear(known, x, t, None)


def _apply_drift(
    recording: RecordingFile, model: models.RecordingModel, table: NoiseTable
) -> tuple[models.RecordingModel, str]:
    """The model with the fitted parameters, decay and drive, and a note about it."""
    if not table.drift:
        raise ValueError(
            f"the calibration in {recording.path} has no fitted drift. Calibrate again: fluctua "
            f"calibrate {recording.path} --write"
        )
    if not isinstance(model.theta, dict) or not set(model.theta) & set(table.drift):
        raise ValueError(
            f"the calibration in {recording.path} is of {', '.join(table.drift)}, and this model "
            "has other parameters."
        )
    theta = {
        name: _take_known(table, name, np.asarray(value, float))
        for name, value in model.theta.items()
    }
    furthest = _describe_furthest(table, model.theta, theta)
    line = f"parameters: as calibrated ({table.origin}); {furthest}"
    if model.observed is None:  # the user's own process: all of its drift is in θ
        return model._replace(theta=theta), line
    task = models.build_task(recording.description)
    nominal = network.make_linear_model(task, theta).theta
    rest = {name: 0 * nominal[name] for name in ("omega", "kappa", "chi")}
    if task.frame == "lab":  # where a linear model adds the carrier to ω
        rest["omega"] = rest["omega"] - carrier(task.drives)
    for name in ("decay", "drive_re", "drive_im"):
        rest[name] = _take_known(table, name, nominal[name]) - nominal[name]
    linear = network.LinearDrift(task.simulated, task.drives, task.frame, None, task.copies)
    fixed = tuple((name, tuple(np.asarray(v, float).tolist())) for name, v in rest.items())
    process = check.process(model.process)
    drift = CorrectedDrift(process.drift, linear, fixed)
    return model._replace(
        process=process._replace(drift=drift), theta=theta
    ), f"{line}; decay and drive too"


def _describe_furthest(table: NoiseTable, before: Params, theta: Params) -> str:
    """Name the parameter that the calibration moved by most of its errors, and by how much."""
    moved = np.abs(report.flatten(theta) - report.flatten(before))
    stderr = {name: table.drift_stderr.get(name, np.zeros_like(v)) for name, v in theta.items()}
    errors = report.flatten(stderr)
    z = moved / np.where(errors > 0, errors, np.inf)
    worst = int(np.argmax(z))
    return (
        f"{names(theta)[worst]} is furthest from where it was set, by {moved[worst]:.3g} or "
        f"{z[worst]:.1f} errors"
    )


def _take_known(table: NoiseTable, name: str, otherwise: np.ndarray) -> np.ndarray:
    """Fitted values where the data determined them, else others."""
    if name not in table.drift:
        return otherwise
    if table.drift[name].shape != otherwise.shape:
        raise ValueError(
            f"`noise.drift_{name}` has shape {table.drift[name].shape}, the model's {name} "
            f"{otherwise.shape}: the calibration is of another system."
        )
    return np.where(np.isfinite(table.drift_stderr[name]), table.drift[name], otherwise)


# ----------------------------------------------------------------------------------------- in words


def _describe_noise(table: NoiseTable, ratio: np.ndarray, variance: np.ndarray | None) -> str:
    known = (
        np.nanmedian(
            table.diffusion_stderr / np.where(table.diffusion > 0, table.diffusion, np.nan)
        )
        if np.isfinite(table.diffusion_stderr).any()
        else None
    )
    ratio = ratio[table.diffusion > 0]
    spread = (
        f"{np.median(ratio):.3g} times the model's (median; {ratio.min():.3g} to {ratio.max():.3g})"
    )
    line = f"noise: Q as calibrated in the file ({table.origin}), {spread}"
    line += f", each known to {known:.1%}" if known is not None else ""
    if variance is None:
        return line + "; no observation noise"
    deviation = np.sqrt(variance)
    size = f"{deviation.min():.3g}" + (
        f" to {deviation.max():.3g}" if np.ptp(deviation) > 0 else ""
    )
    return f"{line}; observation noise of {size} (standard deviation), corrected in J and gradient"


def _describe_changes(
    recording: RecordingFile, model: models.RecordingModel, table: NoiseTable
) -> list[str]:
    """Warn in words where the fit found other parameters than were set."""
    if not isinstance(model.theta, dict):
        return []
    z = [
        np.ravel((table.drift[n] - np.asarray(v, float)) / table.drift_stderr[n])
        for n, v in model.theta.items()
        if n in table.drift and table.drift[n].shape == np.shape(v)
    ]
    every = np.nan_to_num(np.abs(np.concatenate(z))) if z else np.zeros(0)
    off = int(np.sum(every > report.alarm_limit(every.size)))
    if not off:
        return []
    return [
        f"parameters: as set, but the calibration found {off} of {every.size} elsewhere, by "
        f"{every.max():.0f} standard errors at most. A gradient with a wrong drift is biased: "
        "--set theta=calibrated uses the measured ones."
    ]
