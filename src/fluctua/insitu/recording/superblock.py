"""The open-for-writing mark that a killed writer leaves in an HDF5 file, and how it is taken away.

A file that is being written is marked in its superblock, and HDF5 refuses to open it in the plain way until
the writer closes it. A killed writer never does. The mark is one byte; the superblock ends with a checksum
(Bob Jenkins' lookup3) and holds the length of the file, so both are brought up to date. This is what HDF5's own
`h5clear --status --increment=0` does, without asking anyone to install it.

    offset  0  signature, 8 bytes        offset 12  base address            offset 28  end of file
    offset  8  version, 3                offset 20  extension               offset 36  root group
    offset  9  sizes, 8 and 8            offset 11  marks                   offset 44  checksum
"""

from __future__ import annotations

import os
from pathlib import Path

SIGNATURE = b"\x89HDF\r\n\x1a\n"
LENGTH = 48


def marked(path: Path) -> bool:
    """Whether the file says that somebody is writing it."""
    head = _head(path)
    return head is not None and head[11] != 0


def unmark(path: Path) -> None:
    """Take the mark away. Only for a file whose writer is gone."""
    head = _head(path)
    if head is None:
        raise ValueError(f"{path} has no HDF5 superblock of version 3: it was not written by fluctua.")
    length = os.path.getsize(path)
    fresh = head[:11] + b"\0" + head[12:28] + length.to_bytes(8, "little") + head[36:44]
    with open(path, "r+b") as file:
        file.write(fresh + lookup3(fresh).to_bytes(4, "little"))


def _head(path: Path) -> bytes | None:
    with open(path, "rb") as file:
        head = file.read(LENGTH)
    if len(head) < LENGTH or head[:8] != SIGNATURE or head[8] != 3 or head[9:11] != b"\x08\x08":
        return None
    return head


def lookup3(data: bytes) -> int:
    """hashlittle(data, 0), the checksum of HDF5's metadata. 32 bits."""
    mask = 0xFFFFFFFF
    rotated = lambda v, k: ((v << k) | (v >> (32 - k))) & mask
    a = b = c = (0xDEADBEEF + len(data)) & mask
    words = lambda part: [int.from_bytes(part[k : k + 4], "little") for k in (0, 4, 8)]
    while len(data) > 12:
        x, y, z = words(data[:12])
        a, b, c = (a + x) & mask, (b + y) & mask, (c + z) & mask
        for turn in (4, 6, 8, 16, 19, 4):  # the three words take turns in the same three operations
            a = ((a - c) & mask) ^ rotated(c, turn)
            c = (c + b) & mask
            a, b, c = b, c, a
        data = data[12:]
    if not data:
        return c
    x, y, z = words(data.ljust(12, b"\0"))
    a, b, c = (a + x) & mask, (b + y) & mask, (c + z) & mask
    for turn in (14, 11, 25, 16, 4, 14, 24):
        c = ((c ^ b) - rotated(b, turn)) & mask
        a, b, c = b, c, a
    return b
