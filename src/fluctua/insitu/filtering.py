"""The process as a recording shows it that holds less than the state: channels are missing, or there is noise on them.

Parameters whose residuals can all be formed have the score of full observation (`fluctua.insitu.hidden`), exact and
cheap. Where one cannot be formed, or where the samples carry noise of their own, the score is that of a Kalman filter's
prediction (`fluctua.Observed`): exact for linear drifts, with hidden resonators and readout noise alike.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core.guard import Transition
from fluctua.core.types import Objective, Params, Process
from fluctua.insitu.hidden import observed_objective
from fluctua.insitu.recording.reader import RecordingFile
from fluctua.processes.observed import Normal, Observed

MOST_OPERATIONS = 2e12
"""That a filter may take: some ten minutes of two cores."""
FIRST_SAMPLES = 10_000
"""From which the law of the start is taken, where all components are measured."""


class Filter(NamedTuple):
    """process: an `Observed`, or None where there is no filter, for the reason in `why`. objective: of its channels."""

    process: Observed | None
    objective: Objective
    why: str = ""


def filter_of(
    recording: RecordingFile,
    process: Process,
    objective: Objective,
    theta: Params,
    law: Transition,
    observed: np.ndarray | None,
    size: int | None,
    variance: np.ndarray | None,
) -> Filter:
    """The process as the recording shows it, if its start is known and the filter is affordable.

    law: of one step. observed, size: as in `estimate`. variance: of the readout (D,), or None.
    """
    channels = recording.x.shape[2]
    rows = np.arange(channels) if observed is None or size is None else np.asarray(observed, int)
    whole = channels if size is None else size
    seen = objective if whole == channels else observed_objective(objective, rows.tolist(), whole)
    noise = np.zeros(channels) if variance is None else variance
    first = np.asarray(recording.x[: min(recording.count, FIRST_SAMPLES), 0], float)
    start: Any
    if whole > channels:
        # half as much again as the readout explains: its variance may be an estimate
        power, known = (first**2).mean(axis=0), 1.5 * (1 + 6 / np.sqrt(len(first))) * noise
        if np.any(power > known + 1e-12 * np.max(recording.x[0] ** 2)):
            return Filter(None, seen, "the record does not begin with empty resonators, so hidden ones are not known")
        start = np.zeros(whole)
    else:
        start = _law_of(first, noise)
    filtered = Observed(process, observe=np.eye(whole)[rows], noise=noise, start=start, transition=law)
    dtype = jnp.result_type(*jax.tree.leaves(theta))
    one = jax.tree.map(lambda leaf: jnp.asarray(leaf)[0], recording.trajectories(0, 1).context)
    checked = filtered.check(theta, jnp.asarray(first[0], dtype), jnp.asarray(recording.t[0], dtype), one)
    operations = _operations(checked, recording, ravel_pytree(theta)[0].size, whole)
    if operations > MOST_OPERATIONS:
        return Filter(None, seen, f"a filter for {whole} components that bend would take {operations:.0e} operations")
    return Filter(filtered, seen)


def _law_of(first: np.ndarray, noise: np.ndarray) -> Normal:
    """N(mean, covariance) of the first states, from samples (E, M) with noise on them."""
    covariance = np.atleast_2d(np.cov(first, rowvar=False)) - np.diag(noise)
    scale, vectors = np.linalg.eigh(covariance)
    return Normal(first.mean(axis=0), (vectors * np.maximum(scale, 0)) @ vectors.T)


def _operations(process: Observed, recording: RecordingFile, parameters: int, size: int) -> float:
    """Of the recursion, roughly: products of matrices for each tangent, for all trajectories or for each."""
    steps, count = len(recording.t) - 1, recording.count
    if process.shared:
        return steps * (parameters + 1) * size**2 * (20.0 * size + 4 * count)
    return steps * count * (parameters + 1) * size**2 * (20.0 * size + 500)
