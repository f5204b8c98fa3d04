"""Actuator gains dθ/d(setting), from fits at several settings: θ = θ₀ + K(s − s̄), weighted by the fits' errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from scipy.stats import chi2

from fluctua.insitu.drift_fit import Fit
from fluctua.report import names


class Gains(NamedTuple):
    """gain, stderr: (P, S), dθ_p/ds. parameters: P names. settings: S names. center: s̄ (S,). offset: θ at s̄ (P,).

    p_values: (P,), that θ is linear in the settings; NaN where there are no recordings to spare for the test.
    """

    gain: np.ndarray
    stderr: np.ndarray
    parameters: tuple[str, ...]
    settings: tuple[str, ...]
    center: np.ndarray
    offset: np.ndarray
    p_values: np.ndarray


def actuator_gains(settings: Sequence[Mapping[str, float]], fits: Sequence[Fit]) -> Gains:
    """Gains from R recordings, each with its settings and its fit of the drift.

    >>> actuator_gains([{"heater": 1.0}, {"heater": 2.0}, {"heater": 3.0}], fits).gain
    """
    if len(settings) != len(fits):
        raise ValueError(f"{len(settings)} settings for {len(fits)} fits; each recording has one of both.")
    known = tuple(sorted(set().union(*settings)))
    for k, given in enumerate(settings):
        missing = [name for name in known if name not in given]
        if missing:
            raise ValueError(f"recording {k} does not say what {', '.join(missing)} was set to.")
    s = np.array([[float(np.asarray(given[name])) for name in known] for given in settings]).reshape(len(fits), -1)
    moved = s - s.mean(axis=0)
    rank = np.linalg.matrix_rank(moved) if known else 0
    if not known or rank < len(known):
        raise ValueError(
            f"gains of {len(known)} actuators need recordings at {len(known) + 1} settings or more that do not lie on "
            f"one line or plane; these {len(fits)} span {rank} dimensions."
        )
    flat = lambda tree: np.concatenate([np.ravel(np.asarray(leaf, float)) for leaf in jax.tree.leaves(tree)])
    values = np.stack([flat(f.theta) for f in fits])
    errors = np.stack([flat(f.stderr) for f in fits])
    design = np.column_stack([np.ones(len(fits)), moved])
    spare = len(fits) - design.shape[1]
    gain, stderr, offset, p = [], [], [], []
    for y, e in zip(values.T, errors.T, strict=True):
        weighted = design / e[:, None]
        if not np.all(np.isfinite(e)):  # not determined by the data of some recording
            solution, covariance, misfit = np.full(design.shape[1], np.nan), np.full((2, 2), np.nan), np.nan
            covariance = np.full((design.shape[1],) * 2, np.nan)
        else:
            covariance = np.linalg.inv(weighted.T @ weighted)
            solution = covariance @ weighted.T @ (y / e)
            misfit = float(np.sum(((y - design @ solution) / e) ** 2))
        offset.append(solution[0])
        gain.append(solution[1:])
        stderr.append(np.sqrt(np.diag(covariance))[1:])
        p.append(chi2.sf(misfit, spare) if spare > 0 else np.nan)
    return Gains(
        np.array(gain),
        np.array(stderr),
        tuple(names(fits[0].theta)),
        known,
        s.mean(axis=0),
        np.array(offset),
        np.array(p),
    )
