"""Writing a recording while it is measured: after a kill, every trajectory that `append` returned from is there.

What HDF5 promises. Without care a killed writer leaves a file that nobody can open: the index of the data is in
the memory of the process. In single-writer mode (SWMR) metadata reach the file in an order that keeps it readable at
every moment, and `flush` hands everything to the operating system, which outlives the process. So a
trajectory is written and flushed first, and only then its number, which is what counts it. A reader may look at any
moment. This covers crashes and kills of the program; a power cut may take what the system had not yet put on disk.

`durable` covers power cuts. The states are on the disk itself (fsync) before their number is written, and the number
is when `append` returns. What a cut then leaves is the file of one moment with some pages of the next: every trajectory
that counts is whole, which the tests try with such mixtures.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np

from fluctua.insitu.recording import layout
from fluctua.insitu.recording.description import GROUPS, Description, table_value
from fluctua.insitu.recording.disk import check_room, expected_bytes
from fluctua.insitu.recording.reader import open_recording

FEWER = (
    "Record fewer trajectories, times or channels, in single precision (complex64, float32), or on another disk; "
    "or make room."
)


class Writer:
    """An open recording that grows. Made by `create` and `append_to`; use it in a `with`.

    >>> with create("run.nc", description) as writer:
    ...     for x, phase in measurements:
    ...         writer.append(x, {"phase": phase})
    """

    def __init__(self, path: Path, file: h5py.File, description: Description, durable: bool | float = False):
        if durable is not True and not durable >= 0:
            raise ValueError(f"`durable` is True, False or the seconds between two syncs; got {durable!r}.")
        self.path, self.description, self.durable = path, description, durable
        self._file = file
        self._synced = time.monotonic()
        self.count = layout.complete(file)
        if durable:
            self._sync()
            sync(path.parent)

    def append(self, x: Any, context: Mapping[str, Any] | None = None) -> int:
        """One trajectory x (T+1, C), with its context; returns its number. It is safe when this returns.

        A complex recording also takes the state [Re, Im], (T+1, 2C) real.
        """
        d, n = self.description, self.count
        states, known = _states(d, x), _context(d, context)
        data = self._file["x"]
        data.resize(n + 1, axis=0)
        data[n] = states
        for name, value in known.items():
            rows = self._file["context"][name]
            rows.resize(n + 1, axis=0)
            rows[n] = value
        self._file.flush()
        due = self.durable is True or (self.durable and time.monotonic() - self._synced >= self.durable)
        if due:
            self._sync()
        index = self._file["trajectory"]  # after the flush: the number says that what it counts is in the file
        index.resize(n + 1, axis=0)
        index[n] = n
        self._file.flush()
        if due:
            self._sync()
        self.count = n + 1
        return n

    def close(self) -> None:
        """Leave a file that any HDF5 or netCDF program opens."""
        if self._file:
            self._file.close()
            if self.durable:
                sync(self.path)

    def _sync(self) -> None:
        os.fsync(self._file.id.get_vfd_handle())
        self._synced = time.monotonic()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
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
    """A new recording without trajectories. An existing file is left alone unless `replace`.

    trajectories: how many are to come, if that is known: a recording that would not fit on the disk is then refused.
    durable: True waits for the disk at every trajectory, which then survives a power cut; a number of seconds waits no
    more often than that, and a cut may take what came since (see docs/recordings.md).
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file for the recording, such as {path / 'run.nc'}.")
    if path.exists() and not replace:
        raise ValueError(f"{path} exists. Append to it (append_to, --append), choose another name, or replace it.")
    if trajectories is not None:
        freed = path.stat().st_size if path.exists() else 0
        check_room(path, expected_bytes(description, trajectories), FEWER, freed=freed)
    _begin(path, description, [], {})
    return _growing(path, description, durable)


def save(path: str | Path, description: Description, x: Any, context: Mapping[str, Any] | None = None) -> None:
    """A recording from arrays that are there already. x (E, T+1, C), context leaves (E, …).

    >>> save("run.nc", Description(t, ("left", "right")), x)
    """
    path = Path(path)
    if path.exists():
        raise ValueError(f"{path} exists; choose another name, or remove it.")
    check_room(path, expected_bytes(description, len(x)), FEWER)
    known = [_context(description, {name: leaf[j] for name, leaf in (context or {}).items()}) for j in range(len(x))]
    rows = {name: np.array([one[name] for one in known]) for name in (description.context or {} if known else {})}
    _begin(path, description, [_states(description, one) for one in x], rows)


def _begin(path: Path, description: Description, states: list[np.ndarray], context: Mapping[str, np.ndarray]) -> None:
    """A closed file with its head and what is given, under another name until it is whole."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"{path.parent} is a file, not a folder that could hold {path.name}.") from None
    draft = _draft(path)
    try:
        with h5py.File(draft, "w", libver=layout.LIBVER) as file:
            layout.write_head(file, description)
            file.attrs["writer"] = _me()
            layout.resize(file, len(states))  # which makes room as well
            for j, one in enumerate(states):
                file["x"][j] = one
            for name, rows in context.items():
                file["context"][name][:] = rows
            file["trajectory"][:] = np.arange(len(states))
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def append_to(path: str | Path, *, trajectories: int | None = None, durable: bool | float = False) -> Writer:
    """An existing recording, to go on with. One whose writer was killed is repaired first.

    trajectories: how many it is to have in the end, if that is known; refused if the rest would not fit on the disk.
    durable: as for `create`.
    """
    path = Path(path)
    repair(path)
    with open_recording(path) as recording:
        if recording.kind != "recording":
            raise ValueError(f"{path} is not a fluctua recording ({recording.kind}); only those can grow.")
        description, more = recording.description, max(0, (trajectories or 0) - recording.count)
    check_room(path, expected_bytes(description, more) if more else 0, FEWER)
    with h5py.File(path, "r+", libver=layout.LIBVER) as file:
        layout.resize(file, layout.complete(file))
        file.attrs["writer"] = _me()
    return _growing(path, description, durable)


def repair(path: str | Path, *, force: bool = False) -> bool:
    """Make a recording whose writer was killed an ordinary file again. Returns whether that was needed.

    The trajectory that was being written is dropped. Refuses while the writer is still alive on this machine;
    `force` is for a writer on another one that is known to be dead.
    """
    path = Path(path)
    if not _not_being_written(path, force=force):
        return False
    layout.unmark(path)
    with h5py.File(path, "r+", libver=layout.LIBVER) as file:
        layout.resize(file, layout.complete(file))
    return True


def _not_being_written(path: Path, *, force: bool) -> bool:
    """Whether the file has the mark of a writer. Refuses if that one is alive, unless `force`."""
    try:
        if not layout.marked(path):
            return False
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}.") from None
    with h5py.File(path, "r", swmr=True) as file:
        writer = str(file.attrs.get("writer", ""))
    if not force and _alive(writer):
        raise ValueError(f"{path} is being written by {writer}. Wait for it, or stop it first.")
    return True


def _draft(path: Path) -> Path:
    """The name of a file that is not whole yet."""
    return path.with_name(f".{path.name}.{os.getpid()}.new")


def _growing(path: Path, description: Description, durable: bool | float) -> Writer:
    file = h5py.File(path, "r+", libver=layout.LIBVER)
    file.swmr_mode = True
    return Writer(path, file, description, durable)


def _me() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _alive(writer: str) -> bool:
    """Whether the process that a file names still runs. One on another machine may."""
    words = writer.split()
    if len(words) != 4 or words[3] != socket.gethostname():
        return bool(words)
    if int(words[1]) == os.getpid():
        return False  # a writer of this process that was never closed: it is ours to take over
    try:
        os.kill(int(words[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _states(d: Description, given: Any) -> np.ndarray:
    x = np.asarray(given)
    want = (len(d.t), len(d.channels))
    if d.is_complex and x.dtype.kind == "f" and x.shape == (want[0], 2 * want[1]):
        x = x[:, : want[1]] + 1j * x[:, want[1] :]
    if x.shape != want:
        raise ValueError(f"a trajectory of this recording is {want} (times, channels); got {x.shape}.")
    if x.dtype.kind not in "fiuc" or (x.dtype.kind == "c" and not d.is_complex):
        raise TypeError(f"this recording holds {d.dtype}; got {x.dtype}.")
    return x.astype(d.dtype)


def _context(d: Description, given: Mapping[str, Any] | None) -> dict[str, np.ndarray]:
    known, came = dict(d.context or {}), dict(given or {})
    if set(known) != set(came):
        raise ValueError(
            f"the context of every trajectory of this recording is {', '.join(known) or 'empty'}; got "
            f"{', '.join(came) or 'nothing'}."
        )
    values = {name: np.asarray(value, np.float64) for name, value in came.items()}
    for name, value in values.items():
        if value.shape != known[name]:
            raise ValueError(f"`context[{name!r}]` of one trajectory has shape {known[name]}; got {value.shape}.")
    return values


def put_table(path: str | Path, name: str, table: Mapping[str, Any]) -> None:
    """Write or replace one table of a recording: the noise calibration, most often.

    In a copy, which then takes the file's place in one step: HDF5 adds a table by rewriting parts of its index in the
    place where they are, and a kill in the middle would cost the trajectories. So the file is the old one or the new
    one at every moment, after a kill and after a power cut; it takes as much room again while it is done.

    >>> put_table("run.nc", "noise", {"diffusion": np.array([0.1, 0.1])})
    """
    if name not in GROUPS:
        raise ValueError(f"a recording has the tables {', '.join(GROUPS)}; got {name!r}.")
    values = {k: table_value(k, v, name) for k, v in table.items()}
    path = Path(path).resolve()  # a link stays a link
    _not_being_written(path, force=False)
    check_room(path, path.stat().st_size, "A table is written in a copy of the file; make room, or copy it elsewhere.")
    draft = _draft(path)
    try:
        shutil.copy2(path, draft)
        repair(draft, force=True)
        with h5py.File(draft, "r+", libver=layout.LIBVER) as file:
            if name in file:
                del file[name]
            layout.write_table(file.create_group(name), values)
        sync(draft)
        os.replace(draft, path)
        sync(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk itself."""
    if path.is_dir() and os.name == "nt":  # folders cannot be opened there, and need not be
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
