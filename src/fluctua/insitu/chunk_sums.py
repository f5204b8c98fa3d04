"""Sums over the trajectories of a recording, read in chunks and in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import baselines, check, estimator, scores
from fluctua.core import estimate as estimates
from fluctua.core import process as processes
from fluctua.core.arrays import Params
from fluctua.core.likelihood.sources import mark_noiseless
from fluctua.core.objective import Objective
from fluctua.core.trajectories import Trajectories
from fluctua.insitu import readout as corrections
from fluctua.insitu.recording.reader import RecordingFile
from fluctua.learn.repetitions import PARTS


class Reading(NamedTuple):
    """Options of reading a recording.

    noise: variance of the readout (M,) that the sums are corrected for, or None.
    chunk_bytes: of states held at a time.
    progress: called with (trajectories read, to read).
    """

    baseline: baselines.Baseline
    noise: np.ndarray | None
    chunk_bytes: int
    progress: Callable[[int, int], None] | None


def sum_chunks(
    recording: RecordingFile,
    process: processes.AnyProcess,
    objective: Objective,
    theta: Params,
    score: processes.Score,
    reading: Reading,
) -> estimates.RunningSums:
    """Sums over all trajectories of a recording, chunk by chunk."""
    baseline = reading.baseline
    s = reading.noise
    progress = reading.progress
    rewards = check.objective(objective, stops=s is None)
    checked = check.process(process)
    if s is not None and isinstance(checked, processes.Process):
        checked = mark_noiseless(recording.trajectories(), checked, theta)
    total = (2 if baseline.pilot else 1) * recording.count
    done = 0

    def read(count: int) -> None:
        nonlocal done
        done += count
        if progress:
            progress(done, total)

    used = score if s is None else scores.CorrectedScore(score, tuple(s.tolist()))
    sums = estimates.RunningSums(theta, PARTS)
    measured = objective if s is None else corrections.correct_objective(objective, s)
    for chunk, samples in estimator.chunked_samples(
        process,
        measured,
        theta,
        recording.trajectories(),
        recording.count,
        score=used,
        baseline=baseline,
        block_bytes=reading.chunk_bytes,
        progress=read,
    ):
        if s is not None:
            off = corrections.compute_reward_term(
                checked, rewards, score, jnp.asarray(s), theta, _as_working(chunk, theta)
            )
            samples = samples._replace(
                gradient=corrections.subtract_rows(samples.gradient, off, theta)
            )
        sums.add(samples)
    return sums


def _as_working(chunk: Trajectories, theta: Params) -> Trajectories:
    dtype = jnp.result_type(*jax.tree.leaves(theta), chunk.x.dtype)
    return Trajectories(
        jnp.asarray(chunk.t, dtype), jnp.asarray(chunk.x, dtype), chunk.context, chunk.events
    )
