"""Texts in HDF5: of fixed length in new files; the heaps of variable-length ones are checked first.

HDF5 keeps everything of variable length in heaps, blocks of 4 KiB without a checksum:

    "GCOL", version 1, 3 zeros, size (8 bytes), then objects until the size is reached
    an object: number (2), references (2), zeros (4), length (8), contents up to a multiple of 8
    object 0 is free space, its length that of the rest

A zeroed object header is free space of length 0, which HDF5 steps over for ever, by 0 bytes.
Recordings of format 1 have their texts there, and all recordings the dimensions that netCDF gives
to data sets.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from fluctua.insitu.recording import ownership

DIMENSIONS = "DIMENSION_LIST"
"""Attribute with which netCDF names the axes of a data set, for other programs."""
HEAP = b"GCOL\x01\0\0\0"
HEADER = 16
"""Bytes before the first object of a heap, and before the contents of each object."""


def write_attribute(where: Any, name: str, text: str) -> None:
    """Write a text as an attribute of a data set, a group or a file; headers have checksums."""
    raw = text.encode()
    where.attrs.create(name, np.array(raw, h5py.string_dtype("utf-8", max(1, len(raw)))))


def read_attribute(where: Any, name: str) -> str:
    """Read the text of an attribute of any length; "" where there is none."""
    value = where.attrs.get(name, "")
    return value.decode() if isinstance(value, bytes) else str(value)


def write_texts(group: h5py.Group, name: str, texts: str | Sequence[str]) -> h5py.Dataset:
    """Write a data set of one text or several, all of the length of the longest."""
    raw = np.char.encode(np.asarray(texts, dtype=np.str_), "utf-8")
    length = max(2, raw.dtype.itemsize)  # xarray joins texts of one byte to one text
    data = group.create_dataset(name, data=raw.astype(h5py.string_dtype("utf-8", length)))
    write_attribute(data, "_Encoding", "utf-8")
    return data


def is_dimension(data: h5py.Dataset) -> bool:
    """Whether a data set is only the name of an axis for netCDF."""
    name = data.attrs.get("NAME", b"") if data.is_scale else b""
    return isinstance(name, bytes) and name.startswith(b"This is a netCDF dimension")


class UnreadableTexts(NamedTuple):
    """Contents of damaged heaps.

    texts: names of attributes and data sets.
    dimensions: data sets whose axes have lost their names.
    """

    texts: tuple[str, ...]
    dimensions: tuple[str, ...]


def find_unreadable(path: Path) -> UnreadableTexts:
    """Find what an HDF5 file holds in damaged heaps, by reading everything of variable length.

    Of a file that cannot be opened for another reason nothing is named: its reader finds that one.
    """
    texts: list[str] = []
    dimensions: list[str] = []

    def look(name: str, item: Any) -> None:
        if (
            isinstance(item, h5py.Dataset)
            and _is_variable(item.id.get_type())
            and not _can_read(item, ())
        ):
            texts.append(f"/{name}")
        for attribute in item.attrs:
            kind = h5py.h5a.open(item.id, attribute.encode()).get_type()
            if _is_variable(kind) and not _can_read(item.attrs, attribute):
                if attribute == DIMENSIONS:
                    dimensions.append(f"/{name}")
                else:
                    texts.append(f"attribute {attribute} of /{name}")

    try:
        with HeapGuard(path) as guard, h5py.File(guard, "r") as file:
            look("", file["/"])
            file.visititems(look)
    except (OSError, RuntimeError, KeyError):
        pass
    return UnreadableTexts(tuple(texts), tuple(dimensions))


def refuse_unreadable(unreadable: UnreadableTexts, path: Path) -> None:
    """Raise if texts of a file cannot be read."""
    if unreadable.texts:
        shown = ", ".join(unreadable.texts[:3]) + (", …" if len(unreadable.texts) > 3 else "")
        raise ValueError(
            f"{path} is damaged: {len(unreadable.texts)} of its texts cannot be read ({shown}), "
            "because the block of the file that holds them was overwritten. Nothing was changed. "
            "Take a copy of the file, or save its numbers without names and checks: `fluctua "
            f"convert {path} OUT.nc --map x=x --map t=time`."
        )


def _is_variable(kind: Any) -> bool:
    """Whether values of an HDF5 type lie in a heap."""
    if isinstance(kind, h5py.h5t.TypeStringID):
        return bool(kind.is_variable_str())
    return bool(kind.detect_class(h5py.h5t.VLEN))


def _can_read(where: Any, key: Any) -> bool:
    try:
        where[key]
    except (OSError, RuntimeError):
        return False
    return True


class HeapGuard(ownership.Unmarked):
    """A file for reading in which a damaged heap has no signature: HDF5 then refuses it at once."""

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        view = memoryview(buffer)[:count]
        if bytes(view[: len(HEAP)]) == HEAP and not _is_sound(view):
            view[: len(HEAP)] = bytes(len(HEAP))
        return count


def _is_sound(heap: memoryview) -> bool:
    """Whether the objects of a heap reach its end. A heap that is read in part passes for now."""
    if len(heap) < HEADER:
        return True
    (size,) = struct.unpack_from("<Q", heap, 8)
    if size > len(heap):
        return True
    place = HEADER
    while place + HEADER <= size:
        number, _, _, length = struct.unpack_from("<HHIQ", heap, place)
        step = length if number == 0 else HEADER + -(-length // 8) * 8
        if step < HEADER or place + step > size:
            return False
        place += step
    return True
