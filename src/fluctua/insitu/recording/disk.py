"""Size of a recording on disk, and room for it.

A measurement that would fill the disk is refused before it begins. The size is known beforehand,
because the states are not compressed:

    bytes ≈ E · (chunks · (rows · C · itemsize + 40) + context + 64) + head

with the last chunk of a trajectory stored whole, and a checksum and an entry in the index for each
chunk.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
from pathlib import Path

import numpy as np

from fluctua.insitu.recording.description import GROUPS, Description
from fluctua.insitu.recording.layout import PAGE, count_chunk_rows

if sys.platform != "win32":
    import resource

HEAD = 44 * 2**10
"""Bytes of an empty recording (measured: 10 to 20 kB) and of its first chunks (8 kB each)."""
KEPT = 0.01
"""Share of the disk's free space that is left to others."""


def expected_bytes(description: Description, count: int) -> int:
    """Bytes of a recording of `count` trajectories, from above by a few per cent.

    >>> expected_bytes(Description(np.arange(1001.0), ("a", "b"), "complex64"), 1000)
    """
    d = description
    tables = sum(
        np.asarray(v).nbytes
        for group in GROUPS
        for v in getattr(d, group).values()
        if not isinstance(v, str)
    )
    return count * trajectory_bytes(d) + HEAD + 2 * tables + d.t.nbytes


def trajectory_bytes(description: Description) -> int:
    """Bytes of one trajectory, with its share of the index."""
    d = description
    rows = count_chunk_rows(d)
    chunks = -(-len(d.t) // rows)
    chunk = rows * len(d.channels) * np.dtype(d.dtype).itemsize + 4
    if chunk >= PAGE:
        chunk = -(-chunk // PAGE) * PAGE
    states = chunks * (chunk + 36)
    context = sum(8 * max(1, int(np.prod(shape))) for shape in (d.context or {}).values())
    return states + context + 72


def free_bytes(path: str | Path) -> int:
    """Free bytes on the disk of a file, which need not exist yet."""
    folder = Path(path).absolute().parent
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_room(path: str | Path, needed: int, advice: str, *, freed: int = 0) -> None:
    """Raise if `needed` more bytes do not fit on the disk.

    advice: what to do, for the message.
    freed: bytes that writing will set free.

    >>> check_room("run.nc", expected_bytes(description, 500), "Record fewer trajectories.")
    """
    free = free_bytes(path) + freed
    if needed > (1 - KEPT) * free:
        raise ValueError(
            f"{path} would not fit: {_format_size(needed)} are needed and {_format_size(free)} "
            f"are free on its disk. {advice}"
        )


def check_limit(path: str | Path, size: int) -> None:
    """Raise if a file of `size` bytes is larger than this process may write (ulimit -f)."""
    if sys.platform == "win32":  # no such limit
        return
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and size > limit:
        raise ValueError(
            f"{path} cannot become {_format_size(size)} large: files are limited to "
            f"{_format_size(limit)} here (ulimit -f). Raise that, or record less."
        )


def reserve(descriptor: int, start: int, size: int) -> None:
    """Reserve room on the disk without making the file longer; OSError if there is none.

    Where the system or the file system cannot do that, nothing is done.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None:
        return
    keep_size = 1
    if fallocate(descriptor, keep_size, ctypes.c_longlong(start), ctypes.c_longlong(size)) == 0:
        return
    number = ctypes.get_errno()
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise OSError(number, os.strerror(number))


def make_folder(path: Path) -> None:
    """Make the folder of a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(
            f"{path.parent} is a file, not a folder that could hold {path.name}."
        ) from None
    except OSError as error:
        raise ValueError(f"{path.parent} cannot be made: {error.strerror}.") from None


def _format_size(count: float) -> str:
    """Format a number of bytes as `1.5 GB`, decimal as disks are sold."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk itself."""
    if path.is_dir() and os.name == "nt":  # folders cannot be opened there, and need not be
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
