"""Responses in time from files of the steady state, each with a model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from fluctua.core import check
from fluctua.core.arrays import Params
from fluctua.core.text import names
from fluctua.core.trajectories import Trajectories
from fluctua.insitu import continuing, estimating, long_record
from fluctua.insitu.calibrate.table import apply_calibration, read_noise
from fluctua.insitu.pooling import DOUBLE, EstimateOptions, find_components
from fluctua.insitu.recording import model as models
from fluctua.insitu.recording.reader import RecordingFile, open_recording
from fluctua.processes import response
from fluctua.processes.response_report import StrideComparison


class ResponseOptions(NamedTuple):
    """Options of a response from files.

    strides: samples per step of the score; the response of the first is the result.
    periods: one for all components or one per component; 0 for one that is not periodic.
    fitted: names of parameters that are fitted to the record.
    folds: of that fit.
    """

    strides: tuple[int, ...] = (1,)
    periods: tuple[float, ...] = ()
    fitted: tuple[str, ...] = ()
    folds: int = 5


class FileResponse(NamedTuple):
    """The response from files, and how it was made.

    comparison: one response per stride.
    transition: name of the transition whose score was used.
    notes: noise and parameters that were used, one line each.
    """

    comparison: StrideComparison
    transition: str
    notes: tuple[str, ...]


def estimate_file_response(
    paths: Sequence[Path], reading: EstimateOptions, options: ResponseOptions
) -> FileResponse:
    """Estimate the response of a long-run average to a step of each parameter, from files.

    Args:
        paths: of the files, taken at the same settings; each is cut where samples are missing.
        reading: model, score and window.
        options: stride, periods and fit.

    Returns: a `FileResponse`.
    """
    with ExitStack() as stack:
        recordings = [
            stack.enter_context(
                open_recording(path, dict(reading.places or {}), dt=reading.dt, scale=reading.scale)
            )
            for path in paths
        ]
        double = any(one.description.dtype in DOUBLE for one in recordings)
        return jax.enable_x64(double)(_estimate)(recordings, reading, options)


def _estimate(
    recordings: Sequence[RecordingFile], reading: EstimateOptions, options: ResponseOptions
) -> FileResponse:
    first = recordings[0]
    params = None if reading.params is None else dict(reading.params)
    applied = [
        apply_calibration(
            one,
            models.load_model(one, reading.model, params),
            noise=reading.noise,
            theta=reading.theta,
        )
        for one in recordings
    ]
    model = applied[0].model
    if model.hidden:
        raise ValueError(
            f"{first.path} does not hold all channels of its model, and a response needs all of "
            "them."
        )
    for one, other in zip(recordings[1:], applied[1:], strict=True):
        _refuse_other_parameters(first, model.theta, one, other.model.theta)
    _refuse_readout_noise(reading, applied[0].observation_variance)
    find_components(reading.required, model.theta)
    transition = estimating.resolve_score(first, model.process, reading.score)
    theta = check.parameters(model.theta)
    calibration: response.CrossFitted | np.ndarray | None = None
    if options.fitted:
        calibration = response.CrossFitted(options.fitted, options.folds)
    elif reading.theta == "calibrated":
        calibration = _read_covariance(first, theta)
    prepared = [long_record.prepare_record([one]) for one in recordings]
    comparison = response.compare_strides(
        options.strides,
        model.process,
        continuing.make_long_run_reward(first, model),
        theta,
        [piece for one in prepared for piece in _list_pieces(one)],
        window="auto" if reading.window is None else reading.window,
        score=estimating.SCORES[transition],
        period=_resolve_periods(options.periods),
        calibration=calibration,
    )
    cuts = [line for one in prepared for line in one.notes]
    return FileResponse(comparison, transition, (*cuts, *applied[0].notes))


def _list_pieces(record: long_record.LongRecord) -> list[Trajectories]:
    """The record, or its pieces between gaps."""
    pieces = record.list_records()
    return [pieces] if isinstance(pieces, Trajectories) else pieces


def _resolve_periods(periods: tuple[float, ...]) -> float | list[float | None] | None:
    """One period for all components, or one per component; None where there is none."""
    each = [period or None for period in periods]
    return each if len(each) > 1 else (each or [None])[0]


def _refuse_readout_noise(reading: EstimateOptions, variance: np.ndarray | None) -> None:
    """Refuse readout noise, which the score and the reward of one sample share."""
    noise = reading.observation_noise
    if noise == 0 or (noise is None and variance is None):
        return
    raise ValueError(
        "--response does not correct for readout noise, which scores and rewards of one sample "
        "share. Give --set readout_noise=0 to neglect it, and compare several strides: "
        "--set stride=[1,2,4]."
    )


def _refuse_other_parameters(
    first: RecordingFile, theta: Params, other: RecordingFile, another: Params
) -> None:
    """Refuse a file at other parameters, which has another response."""
    left = models.name_leaves(theta)
    right = models.name_leaves(another)
    if set(left) != set(right):
        raise ValueError(
            f"{other.path} has the parameters {', '.join(right)}, {first.path} has "
            f"{', '.join(left)}: only records of one system are pooled."
        )
    for name in left:
        difference = models.find_difference(name, left[name], right[name])
        if difference is not None:
            raise ValueError(
                f"`{difference.component}` is {difference.first} in {first.path} and "
                f"{difference.second} in {other.path}: only records at the same parameters have "
                "one response."
            )


def _read_covariance(recording: RecordingFile, theta: Params) -> np.ndarray:
    """Covariance of calibrated parameters, from the errors in the file; zero where there is none.

    Their correlations are not in the file.
    """
    table = read_noise(recording.description)
    errors = dict.fromkeys(names(theta), 0.0)
    for name, values in (table.drift_stderr if table is not None else {}).items():
        for label, value in zip(names({name: values}), np.ravel(values), strict=True):
            if label in errors and np.isfinite(value):
                errors[label] = float(value)
    return np.diag(np.square(list(errors.values())))
