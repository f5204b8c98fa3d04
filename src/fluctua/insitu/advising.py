"""Advice from a recording: how many repetitions, how far apart the samples, and whether the readout is in the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fluctua.core import check
from fluctua.core.local_linear import euler, local_linear
from fluctua.insitu.calibration.applied import apply_calibration
from fluctua.insitu.calibration.hidden import observed_model, visibility
from fluctua.insitu.calibration.noise import fit_noise
from fluctua.insitu.calibration.sampling import Sampling, sampling
from fluctua.insitu.calibration.table import read_noise
from fluctua.insitu.estimating import CHUNK_BYTES, SCORES, estimate_model
from fluctua.insitu.recording.model import RecordingModel
from fluctua.insitu.recording.reader import RecordingFile
from fluctua.learn.repetitions import PARTS, Repetitions, repetitions

ENOUGH = 200
"""Trajectories from which the noise is measured where the file has no calibration."""


class FileAdvice(NamedTuple):
    """repetitions: of the gradient. sampling: of the interval. observation: s² (M,), None if none was seen.

    observation_bound: standard deviation that would have been seen, where it was measured here. said: what was used.
    """

    repetitions: Repetitions
    sampling: Sampling
    observation: np.ndarray | None
    observation_bound: float | None
    said: tuple[str, ...]


def advise_file(
    recording: RecordingFile,
    model: RecordingModel,
    *,
    error: float = 0.1,
    share: float = 0.9,
    score: str = "euler",
    baseline: str = "time",
    noise: str = "auto",
    theta: str = "set",
    chunk_bytes: int = CHUNK_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> FileAdvice:
    """What the recording says about the next one. The noise is that of its calibration, or else is measured here.

    error: wanted of the gradient, relative. share: of the components, each to that error. score: "euler" or
    "local-linear". noise, theta: as for `apply_calibration`.

    >>> with open_recording("run.nc") as recording:
    ...     advise_file(recording, model_of(recording), error=0.2).repetitions.whole
    """
    if score not in SCORES:
        raise ValueError(f"`score` must be one of {', '.join(SCORES)}; got {score!r}.")
    if baseline not in ("time", "none"):
        raise ValueError(f'advice from a recording needs the baseline "time" or "none"; got {baseline!r}.')
    if recording.count < 2 * PARTS:
        raise ValueError(
            f"{recording.path} has {recording.count} complete trajectories; advice compares {PARTS} parts of "
            "a recording, of two at least. Record more."
        )
    applied = apply_calibration(recording, model, noise=noise, theta=theta)
    m, said, bound = applied.model, list(applied.said), None
    process, objective = check.process(m.process), m.objective
    usable = None
    if m.hidden:
        assert m.observed is not None
        assert m.size is not None
        rows = recording.trajectories(0, 1, load=True).context
        one = None if rows is None else {name: leaf[0] for name, leaf in rows.items()}
        usable = visibility(process, None, m.theta, m.observed, m.size, context=one).usable[m.observed]
        process, objective = observed_model(process, objective, tuple(map(int, m.observed)), m.size)
    some = recording.trajectories(0, min(ENOUGH, recording.count), load=True)
    if applied.ratio is None:
        law = euler if score == "euler" else local_linear
        fit = fit_noise(some, process, m.theta, transition=law, usable=usable)
        # a small sample may leave nothing of Q after s² is taken off; the scale is then the whole variation
        q = np.where(fit.diffusion > 0, fit.diffusion, fit.quadratic_variation)
        s2 = np.maximum(fit.observation_variance, 0) if fit.observation_seen else None
        bound = float(np.sqrt(max(np.max(fit.observation_variance + 2 * fit.observation_stderr), 0)))
        said.append(f"readout and diffusion for the interval: measured here, from {len(some.x):,} trajectories")
    else:
        table = read_noise(recording.description)
        assert table is not None
        q, s2 = table.diffusion, table.observation_variance
    result = estimate_model(
        recording, m, score=score, baseline=baseline, observation_noise=s2, chunk_bytes=chunk_bytes, progress=progress
    )
    interval = sampling(process, m.theta, some, q, s2, error=error, local_linear=score == "local-linear")
    needed = repetitions(result.estimate, result.parts, error=error, share=share)
    return FileAdvice(needed, interval, s2, bound, tuple(said))
