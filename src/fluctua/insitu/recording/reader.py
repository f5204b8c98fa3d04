"""Read recordings: states load when sliced, so a file may be larger than memory."""

from __future__ import annotations

import dataclasses
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import h5py
import numpy as np

from fluctua.core.trajectories import Trajectories, count_within
from fluctua.core.words import format_count
from fluctua.insitu.recording import foreign, layout, ownership, texts
from fluctua.insitu.recording.checked import CheckedStates
from fluctua.insitu.recording.description import Description
from fluctua.insitu.recording.event_rows import EventReader
from fluctua.store.files import require_file


class RecordedStates:
    """States x (E, T+1, M), real, loaded when sliced; complex channels as [Re, Im]."""

    def __init__(self, data: Any, count: int):
        self._data = data
        width = data.shape[2] * (2 if data.dtype.kind == "c" else 1)
        self.shape = (count, data.shape[1], width)
        self.dtype = np.empty(0, data.dtype).real.dtype
        self.ndim = 3

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> np.ndarray:
        """Load x[trajectories] or x[trajectories, times]; further keys apply to the result."""
        keys = key if isinstance(key, tuple) else (key,)
        if not all(isinstance(k, slice | int | np.integer) for k in keys[:2]):
            raise TypeError(
                "the states of a recording are sliced by trajectory and time: x[a:b], "
                "x[:, n:m], x[j]."
            )
        first = [_bound_key(k, size) for k, size in zip(keys[:2], self.shape, strict=False)]
        raw = self._data[tuple(first)]
        x = np.concatenate([raw.real, raw.imag], axis=-1) if raw.dtype.kind == "c" else raw
        if len(keys) < 3:
            return x
        kept = sum(isinstance(k, slice) for k in first)
        return x[(slice(None),) * kept + keys[2:]]


class _Stretches:
    """Data (E, T+1, C) as (E·S, length+1, C): S stretches of each trajectory, ends shared.

    Loaded when sliced.
    """

    def __init__(self, data: Any, count: int, length: int):
        self._data = data
        self._length = length
        self._each = (data.shape[1] - 1) // length
        self.shape = (count * self._each, length + 1, data.shape[2])
        self.dtype = data.dtype

    def __getitem__(self, key: Any) -> np.ndarray:
        rows, times = (*key, slice(0, self.shape[1], 1))[:2]
        if not isinstance(rows, slice):
            trajectory, stretch = divmod(rows, self._each)
            first = stretch * self._length
            return self._data[trajectory, first : first + self.shape[1]][times]
        numbers = range(*rows.indices(self.shape[0]))
        empty = np.empty((0, *np.empty(self.shape[1])[times].shape, self.shape[2]), self.dtype)
        return np.stack([self[n, times] for n in numbers]) if numbers else empty


def _bound_key(key: Any, size: int) -> Any:
    if isinstance(key, slice):
        return slice(*key.indices(size))
    if not -size <= key < size:
        raise IndexError(f"index {key} is outside 0…{size - 1}.")
    return int(key) % size


class FileCondition(NamedTuple):
    """Whether a file is as its writer left it.

    incomplete: trajectories that were started and not finished.
    interrupted: whether its writer was killed, or is writing now.
    damage: what is not as it was written, in words.
    """

    incomplete: int = 0
    interrupted: bool = False
    damage: tuple[str, ...] = ()


SOUND = FileCondition()


class RecordingFile:
    """An open recording. Made by `open_recording`; use it in a `with`.

    description: the head.
    count: E, complete trajectories.
    incomplete: trajectories that were started and not finished, never shown.
    kind: "recording", "npz", "MATLAB v7.3" or "HDF5".
    x: `RecordedStates`.
    interrupted: whether its writer was killed, or is writing now.
    damage: what is not as it was written, in words.
    events: an `EventReader`, or None.
    rails: ends of the range of integer samples (2, C), in units; None if unknown.
    """

    def __init__(
        self,
        path: Path,
        kind: str,
        description: Description,
        data: Any,
        count: int,
        context: Mapping[str, Any] | None,
        *,
        condition: FileCondition = SOUND,
        checksums: np.ndarray | None = None,
        rails: np.ndarray | None = None,
        file: Any = None,
    ):
        self.path = path
        self.kind = kind
        self.description = description
        self.count = count
        self.condition = condition
        self.incomplete = condition.incomplete
        self.interrupted = condition.interrupted
        self.damage = condition.damage
        self.rails = rails
        self._checksums = checksums
        self.x = RecordedStates(data, count)
        self._context = context
        self._file = file
        self.events: EventReader | None = None
        if description.events is not None:
            self.events = EventReader(file["events"], description, count, self.x, path)

    @property
    def has_checksums(self) -> bool:
        """Whether trajectories are compared with their checksums when they are read."""
        return self._checksums is not None

    @property
    def t(self) -> np.ndarray:
        """Times of the samples. Shape (T+1,)."""
        return self.description.t

    @property
    def context(self) -> dict[str, np.ndarray] | None:
        """Context of all trajectories, {name: (E, ...)}, loaded."""
        return self._read_context(0, self.count)

    def trajectories(
        self, first: int = 0, last: int | None = None, *, load: bool = False
    ) -> Trajectories:
        """Trajectories first … last−1 as the library takes them; `load` reads the states now."""
        stop = self.count if last is None else min(last, self.count)
        whole = (first, stop) == (0, self.count) and not load
        events = None
        if self.events is not None:
            events = (
                self.events.load_lazily()
                if whole
                else self.events.load_dense(first, stop, slice(None))
            )
        return Trajectories(
            self.t, self.x if whole else self.x[first:stop], self._read_context(first, stop), events
        )

    def chunks(self, size: int) -> Iterator[Trajectories]:
        """Consecutive pieces of `size` trajectories, loaded one at a time."""
        for first in range(0, self.count, size):
            yield self.trajectories(first, first + size, load=True)

    def chunk_size(self, chunk_bytes: int) -> int:
        """Number of trajectories that fit into so many bytes, one at least."""
        return max(1, min(self.count, count_within(self.x, chunk_bytes)))

    def _read_context(self, first: int, stop: int) -> dict[str, np.ndarray] | None:
        if self._context is None:
            return None
        rows = {name: np.asarray(data[first:stop]) for name, data in self._context.items()}
        checksums: Any = [] if self._checksums is None else self._checksums[first:stop]
        for n, known in enumerate(checksums, first):
            context = {name: values[n - first] for name, values in rows.items()}
            if layout.compute_context_checksum(n, context) != int(known) >> 32:
                raise ValueError(
                    f"{self.path} is damaged: the context of trajectory {n} is not "
                    "what was written."
                )
        return rows

    def cut(self, length: int) -> RecordingFile:
        """Cut the file into stretches of `length` steps, so that a long trace is many trajectories.

        A stretch begins with the last sample of the one before, so that no step is lost but those
        after the last whole stretch. Times begin anew in each. The file stays open and is closed by
        its first owner.
        """
        steps = len(self.t) - 1
        if not 1 <= length <= steps:
            raise ValueError(f"a stretch is 1 to {steps} steps of {self.path} long; got {length}.")
        each = steps // length
        rows = self.context
        if self.events is not None:
            raise ValueError(
                f"{self.path} has events within its steps: such a recording is not cut."
            )
        head = dataclasses.replace(self.description, t=self.t[: length + 1])
        return RecordingFile(
            self.path,
            self.kind,
            head,
            _Stretches(self.x._data, self.count, length),
            self.count * each,
            None
            if rows is None
            else {name: np.repeat(values, each, axis=0) for name, values in rows.items()},
            condition=self.condition._replace(incomplete=0),
            rails=self.rails,
        )

    def close(self) -> None:
        """Close the file; states that were not loaded are gone."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> RecordingFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        e, t, m = self.x.shape
        count = format_count(e, "trajectory")
        return (
            f"RecordingFile({str(self.path)!r}: {count} × {t} times × {m} components, {self.kind})"
        )


def open_recording(
    path: str | Path,
    mapping: Mapping[str, str] | None = None,
    *,
    dt: float | None = None,
    scale: Any = None,
    axes: str | None = None,
    damaged: bool = False,
) -> RecordingFile:
    """Open a recording, or a file of another program (.npz, .npy, MATLAB v7.3, .csv, .txt).

    Args:
        path: the file.
        mapping: where a foreign file keeps things, {"x": "Data/psi", "t": "time",
            "parameters.omega": "w0"}; not needed if it follows the naming of docs/recordings.md.
        dt: interval of the samples of a file that has no times.
        scale: units per count, for samples that are integers; a number, or one per channel.
        axes: of states with two of them, "time,channel" for one trajectory or "trajectory,time"
            for one channel; not needed if the number of times shows which.
        damaged: open a damaged file too, which is refused otherwise; `damage` lists what is wrong.
    Returns: a `RecordingFile`, to be used in a `with`.

    >>> with insitu.files.open("run.nc") as recording:
    ...     trajectories = recording.trajectories()  # read when they are sliced
    ...     estimate = fl.gradient(model.process, model.objective, model.theta, trajectories)
    >>> estimate.count
    40
    """
    path = Path(path)
    require_file(path, "a recording")
    if not path.exists():
        raise ValueError(f"there is no file {path}.")
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty.")
    if dt is not None and not (np.isfinite(dt) and dt > 0):
        raise ValueError(f"`dt`, the interval of the samples, must be positive; got {dt}.")
    units = foreign.Units(dt, scale, axes)
    if zipfile.is_zipfile(path):
        return _make_foreign(path, foreign.read_npz(path, mapping or {}, units))
    if not _is_hdf5(path):
        return _make_foreign(path, _read_plain_file(path, mapping or {}, units))
    unreadable = texts.find_unreadable(path)
    if not mapping:
        texts.refuse_unreadable(unreadable, path)
    file, marked = open_hdf5(path)
    try:
        layout.refuse_external_data(file, path)
        if mapping or texts.read_attribute(file, "format") != layout.FORMAT:
            return _make_foreign(
                path, foreign.read_hdf5(path, file, mapping or {}, units, unreadable.texts), file
            )
        if units != foreign.Units():
            raise ValueError(
                f"{path} is a recording, with its own times and units; leave out dt, scale "
                "and axes."
            )
        description = layout.read_head(file, path)
        (count, damage) = layout.count_complete(file)
        started = file["x"].shape[0]
        damage = (
            *damage,
            *layout.find_damaged_tables(file),
            *layout.describe_lost_names(unreadable),
        )
        if damage and not damaged:
            raise ValueError(
                f"{path} is damaged: {'; '.join(damage)}. Nothing was changed. `fluctua inspect` "
                f"lists what is whole, and `fluctua convert {path} OUT.nc` copies it."
            )
        context = (
            {name: file["context"][name] for name in description.context}
            if description.context
            else None
        )
        checksums = layout.read_checksums(file, count)
        return RecordingFile(
            path,
            "recording",
            description,
            CheckedStates(file["x"], checksums, path, numbers=context is None),
            count,
            context,
            condition=FileCondition(started - count, marked, damage),
            checksums=checksums,
            file=file,
        )
    except (KeyError, OSError, RuntimeError) as error:
        file.close()
        raise ValueError(f"{path} is damaged: {_first_line(error)}") from None
    except BaseException:
        file.close()
        raise


def open_hdf5(path: Path) -> tuple[h5py.File, bool]:
    """Open a file for reading, also one whose writer was killed; with whether it is marked."""
    deadline = time.monotonic() + 1.0
    while True:
        mark = ownership.read_mark(path)
        # HDF5 retries a torn page for minutes, and without a writer it stays torn
        alone = mark and not (mark & ownership.SINGLE_WRITER and ownership.is_being_written(path))
        try:
            if alone:
                return h5py.File(ownership.Unmarked(path), "r"), True
            return h5py.File(path, "r", swmr=bool(mark)), bool(mark)
        except OSError as error:
            if mark != ownership.read_mark(path) or (
                time.monotonic() < deadline and ownership.has_lock_file(path)
            ):
                time.sleep(0.02)  # a writer is beginning or ending, which takes milliseconds
                continue
            raise ValueError(
                f"{path} cannot be opened: {_first_line(error)} It is damaged or truncated."
            ) from None


def _make_foreign(path: Path, contents: foreign.Contents, file: Any = None) -> RecordingFile:
    kind, description, x, context, rails = contents
    return RecordingFile(path, kind, description, x, x.shape[0], context, rails=rails, file=file)


def _read_plain_file(
    path: Path, mapping: Mapping[str, str], units: foreign.Units
) -> foreign.Contents:
    """Read a file that is neither HDF5 nor a complete zip."""
    beginning = _read_beginning(path)
    if beginning.startswith(b"\x93NUMPY"):
        return foreign.read_npy(path, units)
    if beginning.startswith(b"PK\x03\x04"):
        raise ValueError(
            f"{path} is a truncated .npz: its end, with the list of its contents, is missing. "
            "Copy or save it again."
        )
    if path.suffix.lower() in foreign.TEXT_FILES:
        return foreign.read_text(path, mapping, units)
    raise ValueError(
        f"{path} is neither HDF5 (netCDF-4, MATLAB v7.3) nor .npz: it begins with {beginning!r}. "
        "MATLAB files of older versions are saved again with save(..., '-v7.3'); tables of "
        "numbers end in .csv, .tsv, .txt or .dat."
    )


def _is_hdf5(path: Path) -> bool:
    """Whether a file has HDF5's signature, which may follow a user block (512 bytes in MATLAB)."""
    with open(path, "rb") as file:
        for offset in (0, 512, 1024, 2048):
            file.seek(offset)
            if file.read(8) == ownership.SIGNATURE:
                return True
    return False


def _read_beginning(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(16)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__).strip("'\"").rstrip(".") + "."
