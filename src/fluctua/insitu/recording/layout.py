"""The file format: how a `Description` and the states lie in HDF5, as netCDF-4 reads it. See docs/recordings.md.

/x           (trajectory, time, channel)   the states; complex as the compound {r, i} that h5py writes
/time        (time)                        with attribute `units`
/channel     (channel)                     names
/trajectory  (trajectory)                  0, 1, 2, …: written last, so it says which trajectories are complete
/context/*   (trajectory, …)               what is known of each trajectory
/parameters/*, /settings/*, /drive/*, /noise/*, /network/*     tables

A file that is being written is marked in its superblock, and HDF5 refuses to open it in the plain way until the writer
closes it. A killed writer never does. The mark is one byte; the superblock ends with a checksum (Bob Jenkins' lookup3)
and holds the length of the file, so both are brought up to date. This is what HDF5's own `h5clear --status
--increment=0` does, without asking anyone to install it.

    offset  0  signature, 8 bytes        offset 12  base address            offset 28  end of file
    offset  8  version, 3                offset 20  extension               offset 36  root group
    offset  9  sizes, 8 and 8            offset 11  marks                   offset 44  checksum
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from fluctua.insitu.recording.description import GROUPS, Description

FORMAT, VERSION = "fluctua-recording", 1
LIBVER = ("v110", "v110")
"""HDF5 1.10's format: the first that can be read while it is written, and after its writer was killed."""
CHUNK_BYTES = 64 * 2**10
_TEXT = h5py.string_dtype("utf-8")
_DIMENSION = "This is a netCDF dimension but not a netCDF variable. {:10d}"


def write_head(file: h5py.File, description: Description) -> None:
    """Everything but the trajectories, of which there are none yet."""
    d = description
    attributes = {"format": FORMAT, "format_version": VERSION, "software": d.software, "created": d.created}
    attributes |= {"provenance": d.provenance, "Conventions": "netCDF-4"}
    for name, value in attributes.items():
        file.attrs[name] = value
    # No checksum where one chunk holds several trajectories: it is written again with each of them, and a kill in the
    # middle would leave a wrong one. Without, the bytes of earlier trajectories are the same before and after.
    trajectory = file.create_dataset("trajectory", (0,), maxshape=(None,), chunks=(1024,), dtype="i8", fillvalue=-1)
    time = file.create_dataset("time", data=d.t)
    channel = file.create_dataset("channel", data=np.array(d.channels, dtype=object), dtype=_TEXT)
    for scale in (trajectory, time, channel):
        scale.make_scale(scale.name.strip("/"))
    time.attrs["units"] = d.time_units
    steps, width = len(d.t), len(d.channels)
    dtype, rows = np.dtype(d.dtype), chunk_rows(d)
    x = file.create_dataset(
        "x", (0, steps, width), maxshape=(None, steps, width), chunks=(1, rows, width), dtype=dtype, fletcher32=True
    )
    x.attrs["units"] = d.units
    for axis, scale in enumerate((trajectory, time, channel)):
        x.dims[axis].attach_scale(scale)
    if d.context is not None:
        group = file.create_group("context")
        for name, shape in d.context.items():
            each = max(1, int(np.prod(shape)))
            block = (max(1, min(1024, CHUNK_BYTES // (8 * each))), *shape)
            data = group.create_dataset(name, (0, *shape), maxshape=(None, *shape), chunks=block, dtype="f8")
            data.dims[0].attach_scale(trajectory)
            _attach(group, data, 1)
    for name in GROUPS:
        table = getattr(d, name)
        if table:
            write_table(file.create_group(name), table)


def chunk_rows(d: Description) -> int:
    """Times in one chunk of the states."""
    return max(1, min(len(d.t), CHUNK_BYTES // (len(d.channels) * np.dtype(d.dtype).itemsize)))


def write_table(group: h5py.Group, table: Any) -> None:
    """Arrays and texts as variables with named dimensions."""
    for name, value in table.items():
        if isinstance(value, str):
            group.create_dataset(name, data=value, dtype=_TEXT)
        else:
            _attach(group, group.create_dataset(name, data=value), 0)


def _attach(group: h5py.Group, data: h5py.Dataset, first: int) -> None:
    """Give every axis a netCDF dimension, `size-…` by its length: readers know no anonymous ones."""
    for axis in range(first, data.ndim):
        length = data.shape[axis]
        name = f"size-{length}"  # no name that a table may have
        if name not in group:
            group.create_dataset(name, (length,), dtype="i1").make_scale(_DIMENSION.format(length))
        data.dims[axis].attach_scale(group[name])


def read_head(file: h5py.File, path: Path) -> Description:
    """The description in an open file, whose format is checked first."""
    said = file.attrs.get("format")
    if said != FORMAT:
        raise ValueError(
            f"{path} is an HDF5 file, but not a recording (no attribute format = {FORMAT!r}). If it holds "
            "trajectories, say where: --map x=PATH --map t=PATH (in Python, mapping={'x': ..., 't': ...})."
        )
    if int(file.attrs["format_version"]) > VERSION:
        raise ValueError(
            f"{path} has format version {file.attrs['format_version']}; this fluctua reads up to {VERSION}. Update it."
        )
    missing = [name for name in ("x", "time", "channel", "trajectory") if name not in file]
    if missing:
        raise ValueError(f"{path} is damaged: {', '.join(missing)} missing. It was cut short while it was created.")
    tables = {name: read_table(file[name]) if name in file else {} for name in GROUPS}
    context = None
    if "context" in file:
        context = {name: d.shape[1:] for name, d in _variables(file["context"]).items()}
    text = lambda where, name: str(where.attrs.get(name, ""))
    return Description(
        t=file["time"][:],
        channels=tuple(file["channel"].asstr()[:]),
        dtype=file["x"].dtype.name,
        units=text(file["x"], "units"),
        time_units=text(file["time"], "units"),
        context=context,
        provenance=text(file, "provenance"),
        software=text(file, "software"),
        created=text(file, "created"),
        **tables,
    )


def read_table(group: h5py.Group) -> dict[str, Any]:
    """The variables of a group."""
    return {
        name: data.asstr()[()] if h5py.check_string_dtype(data.dtype) else data[()]
        for name, data in _variables(group).items()
    }


def _variables(group: h5py.Group) -> dict[str, h5py.Dataset]:
    """Its data sets, without those that are nothing but a dimension."""
    only = lambda d: d.is_scale and bytes(d.attrs.get("NAME", b"")).startswith(b"This is a netCDF dimension")
    return {name: d for name, d in group.items() if isinstance(d, h5py.Dataset) and not only(d)}


def complete(file: h5py.File) -> int:
    """How many trajectories are whole: the leading entries of `trajectory` that hold their own number."""
    index = file["trajectory"][:]
    wrong = np.flatnonzero(index != np.arange(len(index)))
    whole = int(wrong[0]) if wrong.size else len(index)
    lengths = [file["x"].shape[0], *(d.shape[0] for d in _growing(file))]
    return min(whole, *lengths)


def resize(file: h5py.File, count: int) -> None:
    """Make it `count` trajectories long: leave the first ones, or make room."""
    for data in _growing(file):
        data.resize(count, axis=0)


def _growing(file: h5py.File) -> list[h5py.Dataset]:
    context = list(_variables(file["context"]).values()) if "context" in file else []
    return [file["x"], file["trajectory"], *context]


# ------------------------------------------------------------------------------------ the mark of a writer

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
