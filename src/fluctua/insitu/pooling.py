"""One estimate from several recordings at the same settings, read here or by the workers of a
cluster.

Every file is estimated by itself, baseline and all, and what it adds is summed in the order in
which the files were
named: the result has the same bits wherever they were read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core.arrays import Params
from fluctua.core.likelihood.guard import Residuals
from fluctua.insitu import advice, estimating
from fluctua.insitu.calibrate.table import apply_calibration
from fluctua.insitu.hidden import Visibility
from fluctua.insitu.recording import model as models
from fluctua.insitu.recording.reader import RecordingFile, open_recording
from fluctua.scale import dispatch, parts
from fluctua.scale.cluster import Cluster

DOUBLE = ("float64", "complex128")


class FileEstimate(NamedTuple):
    """The estimate of one file, with the fields of `RecordingEstimate` and `CalibratedModel`.

    theta: its parameters.

    transition: whose score was used. sampling: of Euler's score, whether it suits; else None.
    parameters, settings: as they are stored in the file.
    """

    path: Path
    part: parts.Part
    theta: Params
    view: Visibility | None
    residuals: Residuals | None
    score: str
    transition: str
    sampling: advice.Sampling | None
    notes: tuple[str, ...]
    parameters: Mapping[str, Any]
    settings: Mapping[str, Any]


class Pooled(NamedTuple):
    """result: of all files together. files: of each."""

    result: estimating.RecordingEstimate
    files: tuple[FileEstimate, ...]


class EstimateOptions(NamedTuple):
    """How every file is read and estimated: what a worker holds.

    Options are those of `fluctua estimate`.
    """

    model: str | None = None
    params: Mapping[str, np.ndarray] | None = None
    score: str = estimating.AUTO
    baseline: str = "time"
    noise: str = "auto"
    theta: str = "set"
    observation_noise: float | None = None
    chunk_bytes: int = estimating.CHUNK_BYTES
    places: Mapping[str, str] | None = None
    dt: float | None = None
    scale: Any = None

    def estimate(self, path: Path) -> FileEstimate:
        """The part of one file, in the precision that it was recorded in."""
        with open_recording(
            path, dict(self.places or {}), dt=self.dt, scale=self.scale
        ) as recording:
            double = recording.description.dtype in DOUBLE
            return jax.enable_x64(double)(self._estimate)(path, recording)

    def _estimate(self, path: Path, recording: RecordingFile) -> FileEstimate:
        params = None if self.params is None else dict(self.params)
        applied = apply_calibration(
            recording,
            models.load_model(recording, self.model, params),
            noise=self.noise,
            theta=self.theta,
        )
        variance = applied.observation_variance
        if self.observation_noise is not None:
            variance = np.array(self.observation_noise**2) if self.observation_noise else None
        transition = estimating.resolve_score(recording, applied.model.process, self.score)
        result = estimating.estimate_model(
            recording,
            applied.model,
            score=transition,
            baseline=self.baseline,
            observation_noise=variance,
            chunk_bytes=self.chunk_bytes,
        )
        assert result.part is not None
        judged = (
            advice.judge_euler(recording, applied.model, variance)
            if transition == "euler"
            else None
        )
        theta = jax.tree.map(np.asarray, applied.model.theta)
        head = recording.description
        return FileEstimate(
            path,
            result.part,
            theta,
            result.view,
            result.residuals,
            result.score,
            transition,
            judged,
            tuple(applied.notes),
            dict(head.parameters),
            dict(head.settings),
        )


def estimate_files(
    paths: Sequence[str | Path],
    reading: EstimateOptions | None = None,
    *,
    cluster: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Pooled:
    """∇θJ with errors from several recordings of one system at the same θ.

    Args:
        paths: of the files; the workers of a cluster must find them there too.
        reading: model, score, baseline and the rest.
        cluster: the address of a Ray cluster (`fluctua.distributed`); None reads them here.
        progress: called with (files read, of how many).

    Returns: a `Pooled`.

    >>> estimate_files(["run.nc", "run.nc"]).result.estimate.count
    80

    """
    if not paths:
        raise ValueError("there are no files to estimate from.")
    subject = EstimateOptions() if reading is None else reading
    pool: dispatch.Pool = (
        dispatch.Here(subject) if cluster is None else Cluster(subject, cluster, {"cpu": 1})
    )
    calls = [
        dispatch.WorkCall(number, "estimate", (Path(path).resolve(),))
        for number, path in enumerate(paths)
    ]
    try:
        files: list[FileEstimate] = dispatch.gather_results(pool, calls, progress=progress)
    finally:
        pool.close()
    first = files[0]
    for other in files[1:]:
        _refuse_others(first, other)
    with jax.enable_x64(
        any(np.asarray(leaf).dtype == np.float64 for leaf in jax.tree.leaves(first.theta))
    ):
        result = parts.make_estimate(
            parts.total([file.part for file in files]), jax.tree.map(jnp.asarray, first.theta)
        )
        for file in files:
            result = result if file.view is None else estimating.blank(result, file.view)
    views = [file.view for file in files if file.view is not None]
    return Pooled(
        estimating.RecordingEstimate(result, views[0] if views else None, score=first.score),
        tuple(files),
    )


def _refuse_others(first: FileEstimate, other: FileEstimate) -> None:
    """Trajectories at other settings are of another gradient."""
    one = models.name_leaves(first.theta)
    another = models.name_leaves(other.theta)
    if set(one) != set(another):
        raise ValueError(
            f"{other.path} has the parameters {', '.join(another)}, {first.path} has "
            f"{', '.join(one)}: "
            "only recordings of one system are pooled."
        )
    # what the files hold counts even where --params takes its place
    pairs = ((first.parameters, other.parameters), (first.settings, other.settings), (one, another))
    for left, right in pairs:
        for name in left:
            difference = (
                models.find_difference(name, left[name], right[name]) if name in right else None
            )
            if difference is not None:
                raise ValueError(
                    f"`{difference.component}` is {difference.first} in {first.path} and "
                    f"{difference.second} in "
                    f"{other.path}: they are of different gradients. Only recordings at the same "
                    "settings are pooled; "
                    "estimate each by itself."
                )
