"""Will it fit? How large a recording becomes, and how much room there is for it.

A measurement that fills the disk after a night has lost the night; it is better refused before it begins. The size is
known beforehand, because the states are not compressed:

    bytes ≈ E · (chunks · (rows · C · itemsize + 40) + context + 64) + head

with the last chunk of a trajectory stored whole, and a checksum and an entry in the index for each chunk.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from fluctua.insitu.recording.description import GROUPS, Description
from fluctua.insitu.recording.layout import chunk_rows

HEAD = 32 * 2**10
"""Bytes of an empty recording; measured 10 to 20 kB."""
KEPT = 0.01
"""Share of the disk's free space that is left to others."""


def expected_bytes(description: Description, count: int) -> int:
    """The size of a recording of `count` trajectories, from above by a few per cent.

    >>> expected_bytes(Description(np.arange(1001.0), ("a", "b"), "complex64"), 1000)
    """
    d = description
    rows = chunk_rows(d)
    chunks = -(-len(d.t) // rows)
    states = chunks * (rows * len(d.channels) * np.dtype(d.dtype).itemsize + 40)
    context = sum(8 * max(1, int(np.prod(shape))) for shape in (d.context or {}).values())
    tables = sum(np.asarray(v).nbytes for group in GROUPS for v in getattr(d, group).values() if not isinstance(v, str))
    return count * (states + context + 64) + HEAD + 2 * tables + d.t.nbytes


def free_bytes(path: str | Path) -> int:
    """Room on the disk of a file, which need not exist yet."""
    folder = Path(path).absolute().parent
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_room(path: str | Path, needed: int, advice: str, *, freed: int = 0) -> None:
    """Raise if `needed` more bytes do not fit. freed: bytes that writing will set free. advice: what to do.

    >>> check_room("run.nc", expected_bytes(description, 500), "Record fewer trajectories.")
    """
    free = free_bytes(path) + freed
    if needed > (1 - KEPT) * free:
        raise ValueError(
            f"{path} would not fit: {_size(needed)} are needed and {_size(free)} are free on its disk. {advice}"
        )


def _size(count: float) -> str:
    """1.5 GB and the like, decimal as disks are sold."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
