"""Ownership of a file: HDF5's mark of a writer in the superblock, and the lock of a living writer.

A file that is being written is marked in its superblock, and HDF5 refuses to open it in the plain
way until the writer closes it. A killed writer never does. The mark is one byte, 1 for plain
writing and 5 for single-writer mode, of which HDF5 reads only the second; the superblock ends with
a checksum (Bob Jenkins' lookup3) and holds the length of the file, so both are brought up to date.
HDF5's own `h5clear --status --increment=0` does the same.

    offset  0  signature, 8 bytes        offset 12  base address            offset 28  end of file
    offset  8  version, 3                offset 20  extension               offset 36  root group
    offset  9  sizes, 8 and 8            offset 11  marks                   offset 44  checksum

A living writer holds a lock on a file beside the recording, `.NAME.writer`, which contains its
name. The lock ends with the process.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
from pathlib import Path
from typing import IO, Any

from fluctua.store import locks

SIGNATURE = b"\x89HDF\r\n\x1a\n"
LENGTH = 48
SINGLE_WRITER = 4
"""Bit of the mark of a file that can be read while it is written."""


def read_mark(path: Path) -> int:
    """Read the mark of a writer, running or killed; 0 for none."""
    head = _read_head(path)
    return 0 if head is None else head[11]


def clear_mark(path: Path) -> None:
    """Clear the mark, of a file whose writer is gone."""
    head = _read_head(path)
    if head is None:
        raise ValueError(
            f"{path} has no HDF5 superblock of version 3: it was not written by fluctua."
        )
    with open(path, "r+b") as file:
        file.write(_make_unmarked_head(head, os.path.getsize(path)))


class Unmarked(io.RawIOBase):
    """A file for reading with its mark cleared; nothing is changed on the disk."""

    def __init__(self, path: Path):
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115, closed by `close`
        self._size = os.fstat(self._file.fileno()).st_size
        head = _read_head(path)
        self._head = _make_unmarked_head(head, self._size) if head is not None and head[11] else b""
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._at)
        count = self._file.readinto(buffer) or 0
        patched = max(0, min(len(self._head) - self._at, count))
        memoryview(buffer)[:patched] = self._head[self._at : self._at + patched]
        self._at += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class Claim:
    """The right to write a file, held until `release` or the end of the process."""

    def __init__(self, path: Path):
        self._lock = path.with_name(f".{path.name}.writer")
        self._file: IO[str] | None = self._take(path)

    def _take(self, path: Path) -> IO[str]:
        while True:
            try:
                file = open(self._lock, "a+", encoding="utf-8")  # noqa: SIM115
            except OSError as error:
                raise ValueError(
                    f"{path} cannot be written: {error.strerror} ({self._lock.parent})."
                ) from None
            if not locks.try_lock(file):
                file.seek(0)
                holder = file.read().strip() or "another process"
                file.close()
                raise ValueError(
                    f"{path} is being written by {holder}. Wait for it, or stop it first."
                )
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(file.fileno()).st_ino == os.stat(self._lock).st_ino:
                    break
            file.close()  # the one before released it, and took the name away, while we waited
        file.truncate(0)
        file.write(name_process())
        file.flush()
        return file

    def release(self) -> None:
        """Release the claim, so that others can write."""
        if self._file is not None:
            self._lock.unlink(missing_ok=True)
            self._file.close()
            self._file = None


def is_being_written(path: Path) -> bool:
    """Whether a writer of the file is alive, as far as known from the lock file."""
    try:
        file = open(path.with_name(f".{path.name}.writer"), encoding="utf-8")  # noqa: SIM115
    except OSError:
        return False
    with file:
        try:
            if not locks.try_lock(file, shared=True):
                return True
        except OSError:  # a file system without locks: the file may be written
            return True
        return is_alive(file.read().strip())


def has_lock_file(path: Path) -> bool:
    """Whether the lock file of a writer is still there, as after a kill."""
    return path.with_name(f".{path.name}.writer").exists()


def name_process() -> str:
    """Name of this process as a writer."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def is_alive(writer: str) -> bool:
    """Whether the process that a file names still runs; one on another machine may."""
    words = writer.split()
    if len(words) != 4 or words[3] != socket.gethostname():
        return bool(words)
    if int(words[1]) == os.getpid():
        return False  # it holds no claim
    try:
        os.kill(int(words[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _make_unmarked_head(head: bytes, length: int) -> bytes:
    fresh = head[:11] + b"\0" + head[12:28] + length.to_bytes(8, "little") + head[36:44]
    return fresh + lookup3(fresh).to_bytes(4, "little")


def _read_head(path: Path) -> bytes | None:
    with open(path, "rb") as file:
        head = file.read(LENGTH)
    if len(head) < LENGTH or head[:8] != SIGNATURE or head[8] != 3 or head[9:11] != b"\x08\x08":
        return None
    return head


def lookup3(data: bytes) -> int:
    """hashlittle(data, 0), the checksum of HDF5's metadata. 32 bits."""
    mask = 0xFFFFFFFF

    def rotate(v, k):
        return ((v << k) | (v >> (32 - k))) & mask

    a = b = c = (0xDEADBEEF + len(data)) & mask

    def split_words(part):
        return [int.from_bytes(part[k : k + 4], "little") for k in (0, 4, 8)]

    while len(data) > 12:
        x, y, z = split_words(data[:12])
        a = (a + x) & mask
        b = (b + y) & mask
        c = (c + z) & mask
        for turn in (4, 6, 8, 16, 19, 4):  # the same operations on the three words in turn
            mixed = ((a - c) & mask) ^ rotate(c, turn)
            a = b
            b = (c + b) & mask
            c = mixed
        data = data[12:]
    if not data:
        return c
    x, y, z = split_words(data.ljust(12, b"\0"))
    a = (a + x) & mask
    b = (b + y) & mask
    c = (c + z) & mask
    for turn in (14, 11, 25, 16, 4, 14, 24):
        mixed = ((c ^ b) - rotate(b, turn)) & mask
        c = a
        a = b
        b = mixed
    return b
