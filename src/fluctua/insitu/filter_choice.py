"""The choice of a filter for a recording whose channels are noisy, or fewer than the state."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core.likelihood.guard import Transition
from fluctua.core.objective import Objective
from fluctua.core.process import Process
from fluctua.insitu.hidden import make_observed_objective
from fluctua.insitu.recording.model import RecordingModel
from fluctua.insitu.recording.reader import RecordingFile
from fluctua.processes.observed import Normal, Observed

MAX_OPERATIONS = 2e12
"""Operations that a filter may take: some ten minutes of two cores."""
FIRST_SAMPLES = 10_000
"""Samples from which the law of the start is taken, where all components are measured."""


class FilterChoice(NamedTuple):
    """Filter for a recording, if there is one.

    process: an `Observed`, or None without a filter.
    objective: of the channels of the recording.
    why: reason for which there is no filter.
    """

    process: Observed | None
    objective: Objective
    why: str = ""


def choose_filter(
    recording: RecordingFile,
    model: RecordingModel,
    law: Transition,
    variance: np.ndarray | None,
) -> FilterChoice:
    """Choose the filter of a recording, if its start is known and the filter is affordable.

    model: with its parameters.
    law: of one step.
    variance: of the readout (D,), or None.
    """
    assert isinstance(model.process, Process)
    channels = recording.x.shape[2]
    rows = np.arange(channels)
    if model.observed is not None and model.size is not None:
        rows = np.asarray(model.observed, int)
    whole = channels if model.size is None else model.size
    seen = model.objective
    if whole != channels:
        seen = make_observed_objective(seen, rows.tolist(), whole)
    noise = np.zeros(channels) if variance is None else variance
    first = np.asarray(recording.x[: min(recording.count, FIRST_SAMPLES), 0], float)
    start: Any
    if whole > channels:
        # half as much again as the readout explains: its variance may be an estimate
        power = (first**2).mean(axis=0)
        known = 1.5 * (1 + 6 / np.sqrt(len(first))) * noise
        if np.any(power > known + 1e-12 * np.max(recording.x[0] ** 2)):
            return FilterChoice(
                None,
                seen,
                "the record does not begin with empty resonators, so hidden ones are not known",
            )
        start = np.zeros(whole)
    else:
        start = _fit_start(first, noise)
    filtered = Observed(
        model.process, observe=np.eye(whole)[rows], noise=noise, start=start, transition=law
    )
    dtype = jnp.result_type(*jax.tree.leaves(model.theta))
    one = jax.tree.map(lambda leaf: jnp.asarray(leaf)[0], recording.trajectories(0, 1).context)
    checked = filtered.check(
        model.theta, jnp.asarray(first[0], dtype), jnp.asarray(recording.t[0], dtype), one
    )
    operations = _count_operations(checked, recording, ravel_pytree(model.theta)[0].size, whole)
    if operations > MAX_OPERATIONS:
        return FilterChoice(
            None,
            seen,
            f"a filter for {whole} components that bend would take {operations:.0e} operations",
        )
    return FilterChoice(filtered, seen)


def _fit_start(first: np.ndarray, noise: np.ndarray) -> Normal:
    """N(mean, covariance) of the first states, from samples (E, M) with noise on them."""
    covariance = np.atleast_2d(np.cov(first, rowvar=False)) - np.diag(noise)
    scale, vectors = np.linalg.eigh(covariance)
    return Normal(first.mean(axis=0), (vectors * np.maximum(scale, 0)) @ vectors.T)


def _count_operations(
    process: Observed, recording: RecordingFile, parameters: int, size: int
) -> float:
    """Count the operations of the recursion, roughly: products of matrices for each tangent."""
    steps = len(recording.t) - 1
    count = recording.count
    if process.shared:
        return steps * (parameters + 1) * size**2 * (20.0 * size + 4 * count)
    return steps * count * (parameters + 1) * size**2 * (20.0 * size + 500)
