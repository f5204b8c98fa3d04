"""States of a recording that are compared with their checksums before they are used.

HDF5's own checksums are per chunk, and do not detect a chunk that was zeroed, swapped with another
or copied over one, because its checksum goes with it. `/checksum` has one per trajectory, in the
lower half that of the states, in the upper half that of the trajectory's number and context.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fluctua.insitu.recording import layout

BLOCK = 16 * 2**20
"""Bytes that are read at a time where trajectories are checked and read in part."""


class CheckedStates:
    """States (E, T+1, C) in a file, loaded when sliced by trajectory and time.

    A trajectory is checked when any of it is first read. If it is read completely, that costs a
    CRC-32; if in part, it is read once from beginning to end.

    numbers: compare the upper half too, which is that of the number where there is no context.
    """

    def __init__(self, data: Any, checksums: np.ndarray | None, path: Path, *, numbers: bool):
        self.shape = data.shape
        self.dtype = data.dtype
        self._data = data
        self._checksums = checksums
        self._path = path
        self._numbers = numbers
        self._passed = np.zeros(0 if checksums is None else len(checksums), bool)

    def __getitem__(self, key: Any) -> np.ndarray:
        keys = key if isinstance(key, tuple) else (key,)
        rows = _list_rows(keys[0], self.shape[0])
        if self._checksums is None:
            return self._read(key, rows)
        whole = len(keys) == 1 or _covers(keys[1], self.shape[1])
        if not whole:
            self._check_from_file([n for n in rows if not self._passed[n]])
            return self._read(key, rows)
        raw = self._read(key, rows)
        each = raw if raw.ndim == 3 else raw[None]
        self._compare(
            {n: _compute_crc(one) for n, one in zip(rows, each, strict=True) if not self._passed[n]}
        )
        return raw

    def _check_from_file(self, rows: Sequence[int]) -> None:
        """Read trajectories from beginning to end for their checksums."""
        step = max(1, BLOCK // max(1, self.shape[2] * self.dtype.itemsize))
        crcs = {}
        for n in rows:
            crc = 0
            for first in range(0, self.shape[1], step):
                crc = _compute_crc(self._read((n, slice(first, first + step)), [n]), crc)
            crcs[n] = crc
        self._compare(crcs)

    def _read(self, key: Any, rows: Sequence[int]) -> np.ndarray:
        try:
            return self._data[key]
        except OSError:  # a chunk that differs from its own checksum; HDF5 does not name it
            broken = [n for n in rows if not self._can_read(n)]
            raise ValueError(self._describe(broken)) from None

    def _can_read(self, n: int) -> bool:
        try:
            self._data[n]
        except OSError:
            return False
        return True

    def _compare(self, crcs: dict[int, int]) -> None:
        """Mark trajectories {number: CRC-32} as passed; raise if one differs."""
        assert self._checksums is not None
        wrong = []
        for n, crc in crcs.items():
            known = int(self._checksums[n])
            differs = known & 0xFFFFFFFF != crc
            differs |= self._numbers and known >> 32 != layout.compute_context_checksum(n, {})
            if differs:
                wrong.append(n)
            else:
                self._passed[n] = True
        if wrong:
            raise ValueError(self._describe(wrong))

    def _describe(self, wrong: Sequence[int]) -> str:
        return (
            f"{self._path} is damaged: the states of {layout.name_trajectories(wrong)} are not "
            f"what was written (their checksum differs). `fluctua inspect {self._path}` lists all "
            f"of them, and `fluctua convert {self._path} OUT.nc` copies the others."
        )


def _list_rows(key: Any, size: int) -> Sequence[int]:
    """List the trajectories that a slice or a number selects."""
    return range(*key.indices(size)) if isinstance(key, slice) else [int(key)]


def _covers(key: Any, size: int) -> bool:
    return isinstance(key, slice) and key.indices(size) == (0, size, 1)


def _compute_crc(x: np.ndarray, before: int = 0) -> int:
    return zlib.crc32(np.ascontiguousarray(x).view(np.uint8).data, before)
