"""Actuator gains dθ/d(setting), from fits at several settings, weighted by the fits' errors.

    θ = θ₀ + K(s − s̄)        every actuator may move every parameter (`actuator_gains`)
    θ_p = θ₀_p + k_p s_p      one knob per parameter, which moves no other (`fit_own_gains`)

With one knob per parameter two settings are enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import scipy

from fluctua.core.arrays import Array
from fluctua.core.likelihood.drift import DriftFit
from fluctua.core.text import names


class Gains(NamedTuple):
    """Gains of S settings on P parameters.

    gain, stderr: dθ_p/ds, (P, S).
    parameters: P names.
    settings: S names.
    center: s̄ (S,).
    offset: θ at s̄ (P,).
    p_values: of the test that θ is linear in the settings (P,); NaN where no recording is to spare.
    """

    gain: np.ndarray
    stderr: np.ndarray
    parameters: tuple[str, ...]
    settings: tuple[str, ...]
    center: np.ndarray
    offset: np.ndarray
    p_values: np.ndarray


def actuator_gains(settings: Sequence[Mapping[str, float]], fits: Sequence[DriftFit]) -> Gains:
    """Fit the gains of all actuators on all parameters.

    Args:
        settings: of R recordings, {name: value} each.
        fits: of their drifts, in the same order.

    Returns: gains, with errors, from every setting to every parameter.

    >>> bead = fl.Process(lambda theta, x: theta["force"] - x, lambda theta, x: 0.4 * jnp.ones(1))
    >>> simulator = fl.simulator(bead, jnp.zeros(1), t=jnp.linspace(0.0, 1.0, 51))
    >>> volts = [0.0, 1.0, 2.0]  # the force is half of the voltage
    >>> runs = [simulator(key, {"force": jnp.array(0.5 * v)}, 200) for v in volts]
    >>> fits = [insitu.calibrate.fit_drift(run, bead, {"force": jnp.array(0.0)}) for run in runs]
    >>> gains = insitu.calibrate.actuator_gains([{"volts": v} for v in volts], fits)
    >>> gains.gain.round(2), gains.stderr.round(2)
    (array([[0.5]]), array([[0.02]]))
    """
    if len(settings) != len(fits):
        raise ValueError(
            f"{len(settings)} settings for {len(fits)} fits; each recording has one of both."
        )
    known = tuple(sorted(set().union(*settings)))
    for k, setting in enumerate(settings):
        missing = [name for name in known if name not in setting]
        if missing:
            raise ValueError(f"recording {k} has no setting of {', '.join(missing)}.")
    s = np.array(
        [[float(np.asarray(setting[name])) for name in known] for setting in settings]
    ).reshape(len(fits), -1)
    moved = s - s.mean(axis=0)
    rank = np.linalg.matrix_rank(moved) if known else 0
    if not known or rank < len(known):
        raise ValueError(
            f"gains of {len(known)} actuators need recordings at {len(known) + 1} settings or "
            f"more that do not lie on one line or plane; these {len(fits)} "
            f"span {rank} dimensions."
        )

    def flat(tree):
        return np.concatenate([np.ravel(np.asarray(leaf, float)) for leaf in jax.tree.leaves(tree)])

    values = np.stack([flat(f.theta) for f in fits])
    errors = np.stack([flat(f.stderr) for f in fits])
    design = np.column_stack([np.ones(len(fits)), moved])
    lines = [_fit_line(design, y, e) for y, e in zip(values.T, errors.T, strict=True)]
    return Gains(
        np.array([line.solution[1:] for line in lines]),
        np.array([line.stderr[1:] for line in lines]),
        tuple(names(fits[0].theta)),
        known,
        s.mean(axis=0),
        np.array([line.solution[0] for line in lines]),
        np.array([line.p_value for line in lines]),
    )


class OwnGains(NamedTuple):
    """Lines θ_p = offset + gain · setting_p of one family. Shape (P,) each.

    offset, offset_stderr: θ where the setting is zero, with its error.
    gain, gain_stderr: slope, with its error.
    p_values: of the test that it is a line; NaN where untested.
    """

    offset: np.ndarray
    offset_stderr: np.ndarray
    gain: np.ndarray
    gain_stderr: np.ndarray
    p_values: np.ndarray


def fit_own_gains(settings: Array, values: Array, errors: Array) -> OwnGains:
    """Fit a line to each parameter: values and errors (R, P) at settings (R, P) of its own knob.

    >>> fit_own_gains([[0.0], [1.0], [2.0]], [[0.1], [1.3], [2.5]], [[0.1], [0.1], [0.1]]).gain
    """
    s, values, errors = (np.asarray(v, float) for v in (settings, values, errors))
    if len(s) < 2 or np.any(np.ptp(s, axis=0) == 0):
        raise ValueError("the gain of a knob needs at least two different settings of it.")
    lines = [
        _fit_line(np.column_stack([np.ones(len(s)), k]), y, e)
        for k, y, e in zip(s.T, values.T, errors.T, strict=True)
    ]
    offset, gain = np.array([line.solution for line in lines]).T
    offset_error, gain_error = np.array([line.stderr for line in lines]).T
    return OwnGains(
        offset, offset_error, gain, gain_error, np.array([line.p_value for line in lines])
    )


def fit_knob_gains(
    settings: Sequence[Mapping[str, Any]], fits: Sequence[DriftFit]
) -> dict[str, OwnGains]:
    """Fit offset and gain of every knob, family by family; knobs are named as their parameters."""

    def stack(rows):
        return np.stack([np.asarray(row, float) for row in rows])

    return {
        name: fit_own_gains(
            stack(s[name] for s in settings),
            stack(f.theta[name] for f in fits),
            stack(f.stderr[name] for f in fits),
        )
        for name in settings[0]
    }


def are_knobs(settings: Sequence[Mapping[str, Any]], fits: Sequence[DriftFit]) -> bool:
    """Whether every setting is an array with the name and the shape of a fitted parameter."""

    def matches(s: Mapping[str, Any], fit: DriftFit) -> bool:
        shapes = {name: np.shape(value) for name, value in fit.theta.items()}
        return bool(s) and all(
            np.ndim(v) > 0 and shapes.get(name) == np.shape(v) for name, v in s.items()
        )

    return all(map(matches, settings, fits)) and all(set(s) == set(settings[0]) for s in settings)


class _Line(NamedTuple):
    solution: np.ndarray
    stderr: np.ndarray
    p_value: float


def _fit_line(design: np.ndarray, y: np.ndarray, e: np.ndarray) -> _Line:
    """Weighted least squares of y (R,) with errors e on design (R, K), with p of χ² if R > K."""
    if not np.all(np.isfinite(e)):  # not determined by the data of some recording
        unknown = np.full(design.shape[1], np.nan)
        return _Line(unknown, unknown, np.nan)
    weighted = design / e[:, None]
    covariance = np.linalg.inv(weighted.T @ weighted)
    solution = covariance @ weighted.T @ (y / e)
    spare = len(y) - design.shape[1]
    misfit = float(np.sum(((y - design @ solution) / e) ** 2))
    return _Line(
        solution,
        np.sqrt(np.diag(covariance)),
        float(scipy.stats.chi2.sf(misfit, spare)) if spare > 0 else np.nan,
    )
