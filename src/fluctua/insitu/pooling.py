"""One estimate from recordings at the same settings, read here or by the workers of a cluster.

Every file is estimated by itself, baseline and all. The estimate of one file is the result; what
several add is summed in the order in which they were named, so that the bits do not depend on
where they were read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core.arrays import Params
from fluctua.core.text import names
from fluctua.insitu import advice, continuing, estimating, hidden, long_record
from fluctua.insitu.calibrate.table import apply_calibration
from fluctua.insitu.recording import model as models
from fluctua.insitu.recording.reader import RecordingFile, open_recording
from fluctua.scale import dispatch, parts
from fluctua.scale.cluster import Cluster

DOUBLE = ("float64", "complex128")


class FileEstimate(NamedTuple):
    """The estimate of one file, and how it was made.

    result: with NumPy arrays, so that a worker can send it in any precision.
    theta: the parameters at which it is.
    transition: whose score was used.
    sampling: whether the interval suits Euler's score; None of another.
    ratio, observation_variance, notes: of the calibration, as in `CalibratedModel`.
    parameters, settings: as they are stored in the file.
    """

    path: Path
    result: estimating.RecordingEstimate
    theta: Params
    transition: str
    sampling: advice.Sampling | None
    ratio: np.ndarray | None
    observation_variance: np.ndarray | None
    notes: tuple[str, ...]
    parameters: Mapping[str, Any]
    settings: Mapping[str, Any]

    @property
    def precision(self) -> str:
        """Type of the parameters, "float64" or "float32"."""
        return str(np.result_type(*jax.tree.leaves(self.theta)))


class Pooled(NamedTuple):
    """Estimate from several files, made by `estimate_files`.

    result: of all files together.
    files: of each.

    >>> pooled = insitu.estimate_files(["run.nc"])
    >>> len(pooled.files), pooled.result.estimate.count
    (1, 40)
    """

    result: estimating.RecordingEstimate
    files: tuple[FileEstimate, ...]

    def __repr__(self) -> str:
        return "\n".join([repr(self.result), *(f"  from {file.path}" for file in self.files)])


class EstimateOptions(NamedTuple):
    """Options of `estimate_files` for every file.

    model: `FILE.py:NAME`; None for the model in the file.
    params: in place of the parameters in the file.
    score: "euler", "local-linear", or "auto": as the file was calibrated.
    baseline: a name of `estimating.BASELINES`.
    noise, theta: as for `apply_calibration`.
    observation_noise: standard deviation of the readout, in place of the file's.
    window: of a long-run average, the time over which a kick is remembered, or "auto"; None for
        trajectories.
    detrend: of a long-run average, subtract variations slower than this time.
    required: names of parameters that must be estimated; "omega" stands for all its entries.
    chunk_bytes: of states held at a time.
    places, dt, scale: as for `insitu.files.open`.

    >>> options = insitu.EstimateOptions(baseline="none", required=("omega",))
    >>> insitu.estimate_files(["run.nc"], options).result.estimate.count
    40
    """

    model: str | None = None
    params: Mapping[str, np.ndarray] | None = None
    score: str = estimating.AUTO
    baseline: str = "time"
    noise: str = "auto"
    theta: str = "set"
    observation_noise: float | None = None
    window: float | str | None = None
    detrend: float | None = None
    required: tuple[str, ...] = ()
    chunk_bytes: int = estimating.CHUNK_BYTES
    places: Mapping[str, str] | None = None
    dt: float | None = None
    scale: Any = None

    def estimate(
        self, path: Path, progress: Callable[[int, int], None] | None = None
    ) -> FileEstimate:
        """The estimate of one file, in the precision that it was recorded in.

        progress: called with (trajectories read, to read).
        """
        with open_recording(
            path, dict(self.places or {}), dt=self.dt, scale=self.scale
        ) as recording:
            double = recording.description.dtype in DOUBLE
            record = long_record.LongRecord(recording)
            return jax.enable_x64(double)(self._estimate)(path, record, progress)

    def estimate_record(self, paths: Sequence[str | Path]) -> FileEstimate:
        """The long-run average of files that are one record, with the model of the first."""
        with ExitStack() as stack:
            recordings = [
                stack.enter_context(
                    open_recording(path, dict(self.places or {}), dt=self.dt, scale=self.scale)
                )
                for path in map(Path, paths)
            ]
            first = recordings[0]
            for other in recordings[1:]:
                _refuse_other_settings(_read_head(first), _read_head(other))
            record = long_record.prepare_record(recordings, self.detrend)
            double = first.description.dtype in DOUBLE
            made = jax.enable_x64(double)(self._estimate)(first.path, record, None)
            return made._replace(notes=(*record.notes, *made.notes))

    def _estimate(
        self,
        path: Path,
        record: long_record.LongRecord,
        progress: Callable[[int, int], None] | None,
    ) -> FileEstimate:
        recording = record.recording
        params = None if self.params is None else dict(self.params)
        applied = apply_calibration(
            recording,
            models.load_model(recording, self.model, params),
            noise=self.noise,
            theta=self.theta,
        )
        model = applied.model
        required = find_components(self.required, model.theta)
        variance = applied.observation_variance
        if self.observation_noise is not None:
            variance = np.array(self.observation_noise**2) if self.observation_noise else None
        transition = estimating.resolve_score(recording, model.process, self.score)
        if self.window is None:
            result = estimating.estimate_model(
                recording,
                model,
                score=transition,
                baseline=self.baseline,
                observation_noise=variance,
                chunk_bytes=self.chunk_bytes,
                progress=progress,
            )
        else:
            result = continuing.estimate_continuing(
                record,
                model,
                window=self.window,
                score=transition,
                baseline=self.baseline,
                observation_noise=variance,
            )
        if result.view is not None:
            hidden.refuse_untrainable(result.view, required, name_resonator(result.view))
        judged = None
        if transition == "euler":
            judged = advice.judge_euler(recording, model, variance)
        return FileEstimate(
            path,
            result._replace(estimate=jax.tree.map(_copy_array, result.estimate)),
            jax.tree.map(np.asarray, model.theta),
            transition,
            judged,
            applied.ratio,
            variance,
            tuple(applied.notes),
            dict(recording.description.parameters),
            dict(recording.description.settings),
        )


def _copy_array(leaf: Any) -> Any:
    """A NumPy array in place of one of JAX, whose precision depends on where it is unpickled."""
    return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf


def find_components(required: Sequence[str], theta: Params) -> list[str]:
    """Names of the components that must be estimated; `omega` stands for all of its entries."""
    every = names(theta)
    components = []
    for name in required:
        match = [n for n in every if n == name or n.split("[")[0] == name]
        if not match:
            raise ValueError(
                f"--set parameter: there is no {name!r}; parameters are {', '.join(theta)} and "
                "their entries."
            )
        components += match
    return components


def name_resonator(view: hidden.Visibility) -> Callable[[int], str]:
    """A function from a component of the state to the name of its resonator."""
    sites = len(view.usable) // 2
    return lambda component: f"psi[{component % sites}]"


def estimate_files(
    paths: Sequence[str | Path],
    reading: EstimateOptions | None = None,
    *,
    cluster: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Pooled:
    """Estimate ∇θJ with errors from one or several recordings of one system at the same θ.

    Args:
        paths: of the files; the workers of a cluster must find them there too.
        reading: model, score, baseline and the rest.
        cluster: the address of a Ray cluster (`fluctua.distributed`); None reads them here.
        progress: called with (files read, of how many); of one file that is read here, with
            (trajectories read, to read).

    Returns: a `Pooled`.

    >>> pooled = insitu.estimate_files(["run.nc", "run.nc"])  # several files of one system
    >>> pooled.result.estimate.count
    80
    """
    subject = EstimateOptions() if reading is None else reading
    if not paths:
        raise ValueError("there are no files to estimate from.")
    if subject.window is not None:
        if cluster is not None:
            raise ValueError(
                "--continuing joins its files to one record on this machine; got --cluster "
                f"{cluster}. Leave it off."
            )
        files = [subject.estimate_record(paths)]
    elif len(paths) == 1 and cluster is None:
        files = [subject.estimate(Path(paths[0]), progress)]
    else:
        files = _gather_files(paths, subject, cluster, progress)
    return Pooled(_combine(files), tuple(files))


def _gather_files(
    paths: Sequence[str | Path],
    subject: EstimateOptions,
    cluster: str | None,
    progress: Callable[[int, int], None] | None,
) -> list[FileEstimate]:
    """The estimates of the files, in their order, made here or on a cluster."""
    pool: dispatch.Pool = (
        dispatch.LocalPool(subject) if cluster is None else Cluster(subject, cluster, {"cpu": 1})
    )
    calls = [
        dispatch.WorkCall(number, "estimate", (Path(path).resolve(),))
        for number, path in enumerate(paths)
    ]
    try:
        return dispatch.gather_results(pool, calls, progress=progress)
    finally:
        pool.close()


def _combine(files: Sequence[FileEstimate]) -> estimating.RecordingEstimate:
    """The estimate of all files together: that of the file, if there is one."""
    first = files[0]
    if len(files) == 1:
        return first.result
    for other in files[1:]:
        _refuse_other_settings(first, other)
    added = []
    for file in files:
        assert file.result.part is not None
        added.append(file.result.part)
    views = [file.result.view for file in files if file.result.view is not None]
    with jax.enable_x64(first.precision in DOUBLE):
        result = parts.make_estimate(parts.sum_parts(added), jax.tree.map(jnp.asarray, first.theta))
        for view in views:
            result = hidden.blank_estimate(result, view)
    return estimating.RecordingEstimate(
        result, views[0] if views else None, score=first.result.score
    )


class _FileHead(NamedTuple):
    """Parameters and settings, which must agree in the files of one record."""

    path: Path
    theta: Mapping[str, Any]
    parameters: Mapping[str, Any]
    settings: Mapping[str, Any]


def _read_head(recording: RecordingFile) -> _FileHead:
    parameters = dict(recording.description.parameters)
    return _FileHead(recording.path, parameters, parameters, dict(recording.description.settings))


def _refuse_other_settings(
    first: FileEstimate | _FileHead, other: FileEstimate | _FileHead
) -> None:
    """Refuse a file at other settings: its trajectories are of another gradient."""
    one = models.name_leaves(first.theta)
    another = models.name_leaves(other.theta)
    if set(one) != set(another):
        raise ValueError(
            f"{other.path} has the parameters {', '.join(another)}, {first.path} has "
            f"{', '.join(one)}: only recordings of one system are pooled."
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
                    f"{difference.second} in {other.path}: they are of different gradients. Only "
                    "recordings at the same settings are pooled; estimate each by itself."
                )
