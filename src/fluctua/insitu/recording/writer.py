"""Write a recording while it is measured: trajectories that were appended survive a kill.

HDF5 keeps the index of the data in the memory of the process, so that a killed writer can leave a
file that cannot be opened. In single-writer mode (SWMR) metadata reach the file in an order that
keeps it readable at every moment, and `flush` hands everything to the operating system, which
outlives the process. A trajectory is therefore written and flushed first, and only then its number,
which counts it. This covers crashes and kills of the program; a power cut may lose what the system
had not yet written to disk.

`durable` covers power cuts. The states are on the disk itself (fsync) before their number is
written, and the number is when `append` returns. A power cut then leaves the file of one moment
with some pages of the next: every trajectory that is counted is complete (tested with such
mixtures).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np

from fluctua.insitu.recording import disk, event_rows, layout, ownership, texts
from fluctua.insitu.recording.description import GROUPS, Description, check_value
from fluctua.insitu.recording.ownership import Claim
from fluctua.insitu.recording.reader import open_hdf5, open_recording

FEWER = (
    "Record fewer trajectories, times or channels, in single precision (complex64, float32), or "
    "on another disk; or make room."
)
GROWTH = 64 * 2**10
"""Bytes beside a trajectory that HDF5 may take for its index at once."""

BLOCK = 16 * 2**20
"""Bytes of trajectories that are written in one call, where there are many."""


class Writer:
    """An open recording that grows. Made by `create` and `append_to`; use it in a `with`.

    >>> with create("measured.nc", Description(t, ("left", "right"))) as writer:
    ...     writer.append(x[0])
    """

    def __init__(
        self,
        path: Path,
        file: h5py.File,
        description: Description,
        claim: Claim,
        durable: bool | float = False,
    ):
        self.path = path
        self.description = description
        self.durable = durable
        self._file = file
        self._claim = claim
        self._synced = time.monotonic()
        self._reserved = 0
        # held: HDF5 writes what is left of a data set when the last handle goes, and a failure
        # there would not be reported
        self._data = {name: file[name] for name in ("x", "trajectory", "checksum") if name in file}
        self._data |= {
            f"context/{name}": file["context"][name] for name in description.context or {}
        }
        if description.events is not None:
            self._data |= {"events": file["events"]}
            self._data |= {f"events/{name}": file["events"][name] for name in file["events"]}
        self.count = layout.count_complete(file).trajectories
        if (self.count and file["trajectory"].shape[0] < self.count) or (
            self.count and file["trajectory"][self.count - 1] != self.count - 1
        ):
            layout.write_number(file, self.count - 1)  # its writer was killed before it could
            file.flush()
        self._event_count = (
            0 if description.events is None else event_rows.count_events(file["events"], self.count)
        )
        if durable:
            self._sync()
            disk.sync(path.parent)

    def append(self, x: Any, context: Mapping[str, Any] | None = None, events: Any = None) -> int:
        """Append one trajectory x (T+1, C) with its context, and return its number.

        It is safe when this returns.

        A complex recording also takes the state [Re, Im], (T+1, 2C) real. events: the `Events` of
        the trajectory, leaves (T, K, …), where the recording keeps them.
        """
        d = self.description
        n = self.count
        states = _convert_states(d, x)
        known = _convert_context(d, context)
        rows = _convert_events(d, states, events)
        if not self._file:
            raise ValueError(f"{self.path} is closed; append_to goes on with it.")
        self._reserve(event_rows.count_bytes(rows))
        try:
            due = self.durable is True or (
                self.durable and time.monotonic() - self._synced >= self.durable
            )
            _write_row(self._data["x"], n, states)
            for name, value in known.items():
                _write_row(self._data[f"context/{name}"], n, value)
            end = (
                self._event_count
                if rows is None
                else event_rows.write_rows(self._data["events"], n, self._event_count, rows)
            )
            if "checksum" in self._data:
                _write_row(
                    self._data["checksum"], n, np.uint64(layout.compute_checksum(n, known, states))
                )
            self._file.flush()
            if due:
                self._sync()
            _write_row(
                self._data["trajectory"], n, n
            )  # after the flush: what it counts is in the file
            self._file.flush()
            if due:
                self._sync()
        except (OSError, RuntimeError) as error:
            self._abandon()
            raise ValueError(
                f"{self.path} cannot grow: {_explain_error(error)}. The {n} trajectories before "
                "are in it; make room and go on with append_to (--append)."
            ) from None
        self.count = n + 1
        self._event_count = end
        return n

    def close(self) -> None:
        """Close the file, so that any HDF5 or netCDF program opens it."""
        if self._file:
            try:
                self._file.flush()  # what fails must fail while the file can still be given up
                self._data = {}
                self._file.close()
            except (OSError, RuntimeError) as error:
                self._abandon()
                raise ValueError(
                    f"{self.path} could not be closed: {_explain_error(error)}. Its {self.count} "
                    "trajectories are in it."
                ) from None
            if self.durable:
                disk.sync(self.path)
        self._claim.release()

    def _reserve(self, more: int) -> None:
        """Reserve room for one more trajectory, before HDF5 writes it.

        A write that fails in the middle leaves half an index in the file. A full disk or a limit
        of the file size is therefore reported here.
        """
        end = self._file.id.get_filesize()
        each = disk.trajectory_bytes(self.description) + more + GROWTH + end // 128
        if end + each > self._reserved:
            try:
                disk.check_limit(self.path, end + each)
                disk.reserve(self._file.id.get_vfd_handle(), end, each)
            except OSError as error:
                raise ValueError(
                    f"{self.path} cannot grow: {_explain_error(error)}. Its {self.count} "
                    "trajectories are safe; make room and go on with append_to (--append)."
                ) from None
            self._reserved = end + each

    def _abandon(self) -> None:
        """Give the file up as a kill would: what HDF5 has not written yet is lost."""
        if self._file:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, self._file.id.get_vfd_handle())
            os.close(nowhere)
        self._data = {}
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            self._file.close()
        ownership.clear_mark(self.path)
        self._claim.release()

    def _sync(self) -> None:
        os.fsync(self._file.id.get_vfd_handle())
        self._synced = time.monotonic()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def create(
    path: str | Path,
    description: Description,
    *,
    replace: bool = False,
    trajectories: int | None = None,
    durable: bool | float = False,
) -> Writer:
    """Create a recording without trajectories.

    Args:
        path: the file.
        description: times, channels, units and parameters.
        replace: an existing file, which is otherwise left alone.
        trajectories: their number in the end, if known: a recording that would not fit on the disk
            is then refused.
        durable: True waits for the disk at every trajectory, which then survives a power cut; a
            number of seconds waits no more often than that, and a cut may lose what was written
            since (see docs/recordings.md).

    Returns: the writer.

    >>> head = insitu.files.Description(np.linspace(0.0, 1.0, 21), ("left", "right"))
    >>> with insitu.files.create("measured.nc", head, trajectories=10) as writer:
    ...     for x in np.zeros((10, 21, 2)):  # one trajectory at a time, as it is measured
    ...         number = writer.append(x)
    """
    path = Path(path)
    _check_durable(durable)
    if path.is_dir():
        raise ValueError(
            f"{path} is a folder; give the name of a file for the recording, such as "
            f"{path / 'run.nc'}."
        )
    if path.exists() and not replace:
        raise ValueError(
            f"{path} exists. Append to it (append_to, --append), replace it (--replace), or choose "
            "another name."
        )
    if trajectories is not None:
        freed = path.stat().st_size if path.exists() else 0
        disk.check_room(
            path,
            disk.expected_bytes(description, trajectories),
            FEWER,
            freed=freed,
        )
    disk.make_folder(path)
    claim = _take_claim(path)
    try:
        _write_file(path, description, [], {})
        return _open_growing(path, description, durable, claim)
    except BaseException:
        claim.release()
        raise


def save(
    path: str | Path,
    description: Description,
    x: Any,
    context: Mapping[str, Any] | None = None,
    events: Any = None,
) -> None:
    """Save trajectories in memory as a recording.

    Args:
        path: the file, which must not exist.
        description: its head.
        x: states (E, T+1, C).
        context: leaves (E, …).
        events: `Events`, leaves (E, T, K, …), where the recording keeps them: the `events` of
            `Trajectories`.

    >>> x = np.zeros((10, 21, 2))  # (trajectories, times, channels)
    >>> t = np.linspace(0.0, 1.0, 21)
    >>> insitu.files.save("saved.nc", insitu.files.Description(t, ("left", "right")), x)
    """
    path = Path(path)
    if path.exists():
        raise ValueError(f"{path} exists; choose another name, or remove it.")
    disk.check_room(path, disk.expected_bytes(description, len(x)), FEWER)
    known = [
        _convert_context(description, {name: leaf[j] for name, leaf in (context or {}).items()})
        for j in range(len(x))
    ]
    rows = {
        name: np.array([one[name] for one in known])
        for name in (description.context or {} if known else {})
    }
    disk.make_folder(path)
    states = [_convert_states(description, one) for one in x]
    each = [
        None if events is None else [np.asarray(leaf)[j] for leaf in events] for j in range(len(x))
    ]
    _write_file(
        path,
        description,
        states,
        rows,
        [_convert_events(description, *pair) for pair in zip(states, each, strict=True)],
    )


def _write_file(
    path: Path,
    description: Description,
    states: list[np.ndarray],
    context: Mapping[str, np.ndarray],
    happened: Sequence[event_rows.Rows | None] = (),
) -> None:
    """Write a closed file with its head and data, under another name until it is complete."""
    draft = _name_draft(path)
    pairs = [
        ({name: leaf[j] for name, leaf in context.items()}, one) for j, one in enumerate(states)
    ]
    try:
        disk.check_limit(
            path,
            disk.expected_bytes(description, len(states))
            + sum(map(event_rows.count_bytes, happened)),
        )
        with h5py.File(draft, "w", **layout.WRITING) as file:
            layout.write_head(file, description)
            texts.write_attribute(file, "writer", ownership.name_process())
            layout.resize(file, len(states))  # which makes room as well
            # in blocks: one call of HDF5 per trajectory would take longer than all the rest
            block = max(1, BLOCK // max(1, states[0].nbytes)) if states else 1
            for j in range(0, len(states), block):
                file["x"][j : j + block] = np.stack(states[j : j + block])
            file["checksum"][:] = np.array(
                [layout.compute_checksum(j, *pair) for j, pair in enumerate(pairs)], np.uint64
            )
            for name, leaf in context.items():
                file["context"][name][:] = leaf
            end = 0
            for j, rows in enumerate(happened):
                if rows is not None:
                    end = event_rows.write_rows(file["events"], j, end, rows)
            file["trajectory"][:] = np.arange(len(states))
        os.replace(draft, path)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {_explain_error(error)}.") from None
    finally:
        draft.unlink(missing_ok=True)


def append_to(
    path: str | Path, *, trajectories: int | None = None, durable: bool | float = False
) -> Writer:
    """Open an existing recording to append to it. One whose writer was killed is repaired first.

    Args:
        path: the file.
        trajectories: how many it is to have in the end, if known; refused if the rest would not fit
            on the disk.
        durable: as for `create`.

    Returns: the writer.

    >>> recording.close()  # a file that grows has one owner
    >>> with insitu.files.append_to("run.nc") as writer:
    ...     number = writer.append(np.zeros((21, 6), np.complex64))
    >>> number
    40
    """
    path = Path(path)
    _check_durable(durable)
    claim = _take_claim(path)
    try:
        description, count = _trim(path)
        more = max(0, (trajectories or 0) - count)
        disk.check_room(
            path,
            disk.expected_bytes(description, more) if more else 0,
            FEWER,
        )
        return _open_growing(path, description, durable, claim)
    except BaseException:
        claim.release()
        raise


def repair(path: str | Path, *, force: bool = False) -> bool:
    """Make a recording whose writer was killed an ordinary file again.

    The trajectory that was being written is dropped. Refuses while the writer is still alive. A
    file that is damaged in another way is left as it is.

    Args:
        path: the recording.
        force: for a writer on another machine that is known to be dead.

    Returns: whether that was needed.

    >>> insitu.files.repair("run.nc")  # nothing was wrong
    False
    """
    path = Path(path)
    claim = _take_claim(path, force=force)
    try:
        needed = bool(ownership.read_mark(path))
        _trim(path)
    finally:
        claim.release()
    return needed


def _take_claim(path: Path, *, force: bool = False) -> Claim:
    """Take the right to write `path`, which need not exist.

    Refused while another writer is alive, unless `force`.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a file.")
    # with a lock file, the lock shows whether the writer is alive, and not the name in the file
    killed = ownership.has_lock_file(path)
    claim = Claim(path)
    try:
        if path.exists() and ownership.read_mark(path) and not killed and not force:
            texts.refuse_unreadable(texts.find_unreadable(path), path)
            file, _ = open_hdf5(path)
            with file:
                writer = texts.read_attribute(file, "writer")
            if ownership.is_alive(writer):
                raise ValueError(
                    f"{path} is being written by {writer}. Wait for it, or stop it first."
                )
    except BaseException as error:
        claim.release()
        if isinstance(error, OSError):
            raise ValueError(f"{path} cannot be read: {error.strerror or error}.") from None
        raise
    return claim


def _trim(path: Path) -> tuple[Description, int]:
    """Remove the mark of a killed writer and its unfinished trajectory; returns head and count.

    Where something else is wrong nothing is changed.
    """
    with open_recording(path) as recording:
        if recording.kind != "recording":
            raise ValueError(
                f"{path} is not a fluctua recording ({recording.kind}); only those can grow."
            )
        description = recording.description
        count = recording.count
        left = recording.incomplete
    if ownership.read_mark(path):
        ownership.clear_mark(path)
    with h5py.File(path, "r") as file:
        numbers = file["trajectory"][:]
    if left or len(numbers) != count or (count and numbers[-1] != count - 1):
        with h5py.File(path, "r+", **layout.WRITING) as file:
            layout.resize(file, count)
            if count:
                layout.write_number(file, count - 1)
    return description, count


def _name_draft(path: Path) -> Path:
    """Name of a file that is not complete yet."""
    return path.with_name(f".{path.name}.{os.getpid()}.new")


def _open_growing(
    path: Path, description: Description, durable: bool | float, claim: Claim
) -> Writer:
    try:
        file = h5py.File(path, "r+", **layout.WRITING)
    except OSError as error:
        here = "already open" in str(error)
        if not here and not isinstance(error, BlockingIOError):
            raise
        place = "this program" if here else "another program"
        raise ValueError(f"{path} is open in {place}. Close it there, or wait for it.") from None
    file.swmr_mode = True
    return Writer(path, file, description, claim, durable)


def _check_durable(durable: bool | float) -> None:
    if durable is not True and not durable >= 0:
        raise ValueError(
            f"`durable` is True, False or the seconds between two syncs; got {durable!r}."
        )


def _write_row(data: h5py.Dataset, n: int, value: Any) -> None:
    """Write row n of a data set that grows."""
    if data.shape[0] <= n:
        data.resize(n + 1, axis=0)
    data[n] = value


def _explain_error(error: BaseException) -> str:
    """Say why a write failed, by the number of the system error, also within HDF5's message."""
    number = getattr(error, "errno", None)
    if number is None and (match := re.search(r"errno = (\d+)", str(error))):
        number = int(match[1])
    words = {errno.EFBIG: "a file may not become larger here (ulimit -f, or the file system)"}
    return words.get(number or 0, os.strerror(number) if number else str(error).splitlines()[0])


def _convert_states(d: Description, states: Any) -> np.ndarray:
    x = np.asarray(states)
    want = (len(d.t), len(d.channels))
    if d.is_complex and x.dtype.kind == "f" and x.shape == (want[0], 2 * want[1]):
        x = x[:, : want[1]] + 1j * x[:, want[1] :]
    if x.shape != want:
        raise ValueError(
            f"a trajectory of this recording is {want} (times, channels); got {x.shape}."
        )
    if x.dtype.kind not in "fiuc" or (x.dtype.kind == "c" and not d.is_complex):
        raise TypeError(f"this recording holds {d.dtype}; got {x.dtype}.")
    return x.astype(d.dtype)


def _convert_events(d: Description, states: np.ndarray, events: Any) -> event_rows.Rows | None:
    """Convert the events of one trajectory to rows, and check them against its states."""
    rows = event_rows.make_rows(d, events)
    if rows is not None:
        x = np.concatenate([states.real, states.imag], axis=1) if d.is_complex else states
        wrong = event_rows.check_rows(d, rows, x)
        if wrong:
            raise ValueError(f"the events do not belong to these states: {wrong}.")
    return rows


def _convert_context(d: Description, context: Mapping[str, Any] | None) -> dict[str, np.ndarray]:
    shapes = dict(d.context or {})
    received = dict(context or {})
    if set(shapes) != set(received):
        raise ValueError(
            "the context of every trajectory of this recording is "
            f"{', '.join(shapes) or 'empty'}; got {', '.join(received) or 'nothing'}."
        )
    values = {name: np.asarray(value, np.float64) for name, value in received.items()}
    for name, value in values.items():
        if value.shape != shapes[name]:
            raise ValueError(
                f"`context[{name!r}]` of one trajectory has shape {shapes[name]}; got "
                f"{value.shape}."
            )
    return values


def put_table(path: str | Path, name: str, table: Mapping[str, Any]) -> None:
    """Write or replace one table of a recording: the noise calibration, most often.

    In a copy, which then takes the file's place in one step: HDF5 adds a table by rewriting parts
    of its index in the place where they are, and a kill in the middle would cost the trajectories.
    So the file is the old one or the new one at every moment, after a kill and after a power cut;
    it takes as much room again while it is done.

    Args:
        path: the recording.
        name: of the table.
        table: {name: number, text or array}.

    >>> insitu.files.put_table("run.nc", "noise", {"diffusion": np.full(12, 0.1)})
    """
    if name not in GROUPS:
        raise ValueError(f"a recording has the tables {', '.join(GROUPS)}; got {name!r}.")
    values = {k: check_value(k, v, name) for k, v in table.items()}
    path = Path(path).resolve()  # a link stays a link
    claim = _take_claim(path)
    draft = _name_draft(path)
    try:
        size = path.stat().st_size
        disk.check_room(
            path, size, "A table is written in a copy of the file; make room, or copy it elsewhere."
        )
        disk.check_limit(
            path, size + disk.HEAD + 2 * sum(np.asarray(v).nbytes for v in values.values())
        )
        shutil.copy2(path, draft)
        _trim(draft)
        with h5py.File(draft, "r+", **layout.WRITING) as file:
            if name in file:
                del file[name]
            layout.write_table(file.create_group(name), values)
        disk.sync(draft)
        os.replace(draft, path)
        disk.sync(path.parent)
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written: {_explain_error(error)}. It is as it was."
        ) from None
    finally:
        draft.unlink(missing_ok=True)
        claim.release()
