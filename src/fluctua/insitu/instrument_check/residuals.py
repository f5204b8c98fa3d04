"""Residuals of the trajectories of a check, after a calibration by the same trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import check
from fluctua.core.likelihood.guard import examine_batch
from fluctua.core.likelihood.report import Residuals
from fluctua.core.trajectories import Trajectories
from fluctua.insitu.instrument.guard import DOUBTFUL, ResidualGuard
from fluctua.insitu.model import Model
from fluctua.insitu.self_calibration import SelfCalibration
from fluctua.insitu.unknowns import DeviceFit, Runs, list_starts


class ModelComparison(NamedTuple):
    """Residuals of trajectories whose unknowns were fitted to them.

    residuals: of the setting that agrees least: v, 1 where the noise is the model's.
    readout: standard deviation of the readout noise of each channel that was found (M,).
    calibration: the unknowns, as text.
    """

    residuals: Residuals
    readout: np.ndarray
    calibration: str


def compare_drift(model: Model, trajectories: Trajectories) -> str:
    """Describe why the drift of the model does not take a sample; "" if it does.

    A model with `methods.calibrate` is not examined: its context may have another form.
    """
    if model.methods.calibrate is not None:
        return ""
    process = check.process(model.process)
    drift = getattr(process, "drift", None)
    if drift is None:
        return ""
    size = trajectories.x.shape[2]
    recorded = {name: v[0] for name, v in (trajectories.context or {}).items()}
    context = {**list_starts(model.unknowns), **recorded}
    try:
        state = jax.ShapeDtypeStruct((size,), np.float32)
        rate = jax.eval_shape(drift, model.start, state, float(trajectories.t[0]), context)
        shape = np.shape(rate)
    except KeyError as error:
        return f"the drift of the model uses {_describe_missing(error, model, context)}."
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"the drift of the model does not take a sample of {size} channels: {reason}."
    if shape != (size,):
        return (
            f"the drift of the model has shape {shape}, and a sample of the instrument has {size} "
            "channels. Record the state of the model, or change its drift."
        )
    return ""


def _describe_missing(error: KeyError, model: Model, context: Mapping[str, Any]) -> str:
    """Describe a name that the drift uses and the model does not have."""
    name = error.args[0] if error.args else ""
    no_knob = f"is no knob of the model ({', '.join(model.knobs) or 'it has none'})"
    no_unknown = f"no unknown ({', '.join(context) or 'it has none'})"
    if name in context:
        return f"{name!r} as a setting: it {no_knob}"
    if name in model.knobs:
        return f"{name!r} as an unknown: it is {no_unknown}"
    return f"{name!r}, which {no_knob} and {no_unknown}"


def examine_runs(model: Model, runs: Runs) -> ModelComparison:
    """Calibrate the model by trajectories, and examine their residuals.

    Args:
        model: of the instrument.
        runs: settings with the trajectories that were measured there.

    Returns: residuals of the setting with the largest deviation, or with a cause of doubt.
    """
    fit = model.calibrate(runs)
    own = model.methods.self_calibration
    if own is not None and own.required:
        return _examine_innovations(own, fit, runs)
    guard = ResidualGuard(model.process)
    guard.calibrate(list(runs), fit.values)
    readout = np.zeros(runs[0][1].x.shape[2]) if guard.readout is None else guard.readout
    each = []
    for settings, (t, x, recorded, *_) in runs:
        context: Any = jax.tree.map(partial(_repeat, len(x)), fit.values)
        batch = Trajectories(t, x, {**context, **(recorded or {})})
        judged = examine_batch(model.process, settings, batch, limits=DOUBTFUL, readout=readout)
        each.append(judged.residuals)
    return ModelComparison(_find_worst(each), np.sqrt(readout), fit.report)


def _examine_innovations(own: SelfCalibration, fit: DeviceFit, runs: Runs) -> ModelComparison:
    """Examine the innovations of records that do not hold the states."""
    phi = jax.tree.map(jnp.asarray, fit.values)
    each = [
        own.model.examine(own.effective(at, phi), batch, own.readout, None).residuals
        for at, batch in runs
    ]
    readout = np.full(runs[0][1].x.shape[2], own.readout)
    return ModelComparison(_find_worst(each), readout, fit.report)


def _find_worst(each: Sequence[Residuals]) -> Residuals:
    """Residuals with a cause of doubt, or with the largest deviation."""
    return max(each, key=lambda one: (bool(one.cause), float(np.abs(one.v - 1).max())))


def _repeat(count: int, value: Any) -> np.ndarray:
    return np.broadcast_to(np.asarray(value), (count, *np.shape(value)))
