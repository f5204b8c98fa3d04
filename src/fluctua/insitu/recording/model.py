"""The model that a recording is read with: the network it carries, or a Python file of the user's."""

from __future__ import annotations

import importlib.util
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fluctua.core import check
from fluctua.core.types import Objective, Params, Process
from fluctua.insitu.recording import system
from fluctua.insitu.recording.reader import RecordingFile


class RecordingModel(NamedTuple):
    """What an estimate or a calibration needs. observed, size: the components in the file, and of the state."""

    process: Process
    objective: Objective
    theta: Params
    observed: np.ndarray | None = None
    size: int | None = None

    @property
    def hidden(self) -> bool:
        """Whether components of the state are missing from the file."""
        return self.observed is not None and self.size is not None and len(self.observed) < self.size


def model_of(recording: RecordingFile, source: Path | None = None, given: Params | None = None) -> RecordingModel:
    """The model of a recording.

    source: a Python file with `process`, `objective` and, if the recording has no parameters, `theta`. Without one,
    the recording's own `network`. given: parameters that take the place of the recording's.
    """
    d = recording.description
    theta = dict(d.theta) if given is None else {**d.theta, **given}
    if source is not None:
        module = _loaded(source)
        if given is None and hasattr(module, "theta"):
            theta = module.theta
        model = RecordingModel(module.process, module.objective, theta)
    else:
        task = system.task_of(d)
        sites = task.simulated.sites
        seen = system.observed_sites(d, sites)
        model = RecordingModel(task.process, task.objective, theta, np.concatenate([seen, seen + sites]), 2 * sites)
    if not theta:
        raise ValueError(
            f"{recording.path} does not hold the parameters that were set; give them with --params FILE.npz."
        )
    if source is not None and recording.count:
        _try(recording, model, source)
    return model


def _try(recording: RecordingFile, model: RecordingModel, source: Path) -> None:
    """A parameter that the model looks up and nobody gave is named here, not where the drift is differentiated."""
    context = recording.trajectories(0, 1, load=True).context
    one = None if context is None else {name: leaf[0] for name, leaf in context.items()}
    state = jax.ShapeDtypeStruct((len(recording.description.components),), np.float32)
    try:
        jax.eval_shape(check.process(model.process).drift, model.theta, state, float(recording.t[0]), one)
    except KeyError as error:
        there = ", ".join([*model.theta, *(f"context {name}" for name in one or {})])
        raise ValueError(
            f"the drift of {source} looks for {error}; there is {there}. Parameters come from the recording and from "
            "--params FILE.npz."
        ) from error


def _loaded(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"there is no model file {path}. It is a Python file that defines `process` and `objective`.")
    spec = importlib.util.spec_from_file_location(f"model_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file: a model is a .py that defines `process` and `objective`.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        lines = [error.lineno] if isinstance(error, SyntaxError) else [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path.resolve())
        ]  # fmt: skip
        where = f", line {lines[-1]}" if lines else ""
        what = error.msg if isinstance(error, SyntaxError) else error
        raise ValueError(f"the model {path} does not run: {type(error).__name__}{where}: {what}.") from error
    for name, kind in (("process", Process), ("objective", Objective)):
        if not isinstance(getattr(module, name, None), kind):
            raise ValueError(
                f"{path} must define `{name}`, a fluctua.{kind.__name__}; it has "
                f"{type(getattr(module, name, None)).__name__}."
            )
    return module
