"""The file format: layout of a `Description` and of the states in HDF5, readable as netCDF-4.

    /x           (trajectory, time, channel)  states; complex as the compound {r, i} of h5py
    /time        (time)                       with attribute `units`
    /channel     (channel)                    names
    /trajectory  (trajectory)                 0, 1, 2, …: written last, counts the complete ones
    /context/*   (trajectory, …)              known of each trajectory
    /checksum    (trajectory)                 CRC-32 of states; upper half: of number and context
    /events/*    (event, …)                   of jump processes; see `event_rows`
    /parameters/*, /settings/*, /drive/*, /noise/*, /network/*, /simulation/*
                                              tables, each with an attribute `checksum`

See docs/recordings.md.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from fluctua.core.words import format_count
from fluctua.insitu.recording import event_rows, texts
from fluctua.insitu.recording.description import GROUPS, Description, EventKinds

FORMAT = "fluctua-recording"
VERSION = 2
"""2: texts of fixed length, checksums always. 1: texts of variable length, checksums later."""
PAGE = 4096
"""Bytes that the system copies, and a disk writes, whole."""
WRITING: dict[str, Any] = {
    "libver": ("v110", "v110"),
    "meta_block_size": PAGE,
    "alignment_threshold": PAGE,
    "alignment_interval": PAGE,
}
"""HDF5 1.10's format, the first that can be read during writing and after a kill, with no small
part of the index across two pages: a kill or a power cut between them would tear it.
"""
CHUNK_BYTES = 16 * PAGE - 4
"""Of a chunk of states, which its checksum makes whole pages."""
CHECKSUM = "checksum"
DEFLATE = 1032
SPARE = 64 * 2**20
"""Largest factor of compression, and bytes that may be declared and missing."""
UNWRITTEN = (-1, 0)
"""Values of a number that was not written: HDF5's fill value, and a page lost by a power cut."""
_DIMENSION = "This is a netCDF dimension but not a netCDF variable. {:10d}"


def write_head(file: h5py.File, description: Description) -> None:
    """Write everything but the trajectories, of which there are none yet."""
    d = description
    attributes = {"format": FORMAT, "software": d.software, "created": d.created}
    attributes |= {"provenance": d.provenance, "Conventions": "netCDF-4"}
    for name, value in attributes.items():
        texts.write_attribute(file, name, value)
    file.attrs["format_version"] = VERSION
    # No checksum where one chunk holds several trajectories: it is written again with each of them,
    # and a kill in the middle would leave a wrong one. Without, the bytes of earlier trajectories
    # are the same before and after. What such chunks hold is checked by `checksum`, one entry per
    # trajectory.
    trajectory = file.create_dataset(
        "trajectory", (0,), maxshape=(None,), chunks=(1024,), dtype="i8", fillvalue=-1
    )
    checksum = file.create_dataset("checksum", (0,), maxshape=(None,), chunks=(1024,), dtype="u8")
    time = file.create_dataset("time", data=d.t)
    channel = texts.write_texts(file, "channel", d.channels)
    for scale in (trajectory, time, channel):
        scale.make_scale(scale.name.strip("/"))
    texts.write_attribute(time, "units", d.time_units)
    checksum.dims[0].attach_scale(trajectory)
    for data in (time, channel):
        values = data.asstr()[:] if data is channel else data[:]
        texts.write_attribute(data, CHECKSUM, digest({data.name: values}))
    steps = len(d.t)
    width = len(d.channels)
    dtype = np.dtype(d.dtype)
    rows = count_chunk_rows(d)
    x = file.create_dataset(
        "x",
        (0, steps, width),
        maxshape=(None, steps, width),
        chunks=(1, rows, width),
        dtype=dtype,
        fletcher32=True,
    )
    texts.write_attribute(x, "units", d.units)
    for axis, scale in enumerate((trajectory, time, channel)):
        x.dims[axis].attach_scale(scale)
    if d.context is not None:
        group = file.create_group("context")
        for name, shape in d.context.items():
            each = max(1, int(np.prod(shape)))
            block = (max(1, min(1024, CHUNK_BYTES // (8 * each))), *shape)
            data = group.create_dataset(
                name, (0, *shape), maxshape=(None, *shape), chunks=block, dtype="f8"
            )
            data.dims[0].attach_scale(trajectory)
            _attach_dimensions(group, data, 1)
    if d.events is not None:
        event_rows.create_group(file, d, _attach_dimensions, _DIMENSION)
        texts.write_attribute(file["events"], CHECKSUM, digest(_read_kinds_table(file["events"])))
    for name in GROUPS:
        table = getattr(d, name)
        if table:
            write_table(file.create_group(name), table)


def count_chunk_rows(d: Description) -> int:
    """Count the times in one chunk of the states."""
    return max(1, min(len(d.t), CHUNK_BYTES // (len(d.channels) * np.dtype(d.dtype).itemsize)))


def write_table(group: h5py.Group, table: Any) -> None:
    """Write arrays and texts as variables with named dimensions."""
    for name, value in table.items():
        if isinstance(value, str):
            texts.write_texts(group, name, value)
        else:
            _attach_dimensions(group, group.create_dataset(name, data=value), 0)
    texts.write_attribute(group, CHECKSUM, digest(read_table(group)))


def _attach_dimensions(group: h5py.Group, data: h5py.Dataset, first: int) -> None:
    """Give every axis a netCDF dimension, `size-…` by its length: anonymous ones cannot be read."""
    for axis in range(first, data.ndim):
        length = data.shape[axis]
        name = f"size-{length}"  # no name that a table may have
        if name not in group:
            group.create_dataset(name, (length,), dtype="i1").make_scale(_DIMENSION.format(length))
        data.dims[axis].attach_scale(group[name])


def read_head(file: h5py.File, path: Path) -> Description:
    """Read the description in an open file, after checking its format."""
    if texts.read_attribute(file, "format") != FORMAT:
        raise ValueError(
            f"{path} is an HDF5 file, but not a recording (no attribute format = {FORMAT!r}). If "
            "it holds trajectories, give their place: --map x=PATH --map t=PATH (in Python, "
            "mapping={'x': ..., 't': ...})."
        )
    version = int(file.attrs["format_version"])
    if version > VERSION:
        raise ValueError(
            f"{path} has format version {version}; this fluctua reads up to {VERSION}. Update it."
        )
    needed = ("x", "time", "channel", "trajectory") + (("checksum",) if version > 1 else ())
    missing = [name for name in needed if name not in file]
    if missing:
        raise ValueError(
            f"{path} is damaged: {', '.join(missing)} missing. It is truncated, or its writer was "
            "killed at the start."
        )
    tables = {name: read_table(file[name]) if name in file else {} for name in GROUPS}
    context = None
    if "context" in file:
        context = {name: d.shape[1:] for name, d in _list_variables(file["context"]).items()}
    return Description(
        t=file["time"][:],
        channels=tuple(file["channel"].asstr()[:]),
        dtype=file["x"].dtype.name,
        units=texts.read_attribute(file["x"], "units"),
        time_units=texts.read_attribute(file["time"], "units"),
        context=context,
        provenance=texts.read_attribute(file, "provenance"),
        software=texts.read_attribute(file, "software"),
        created=texts.read_attribute(file, "created"),
        events=_read_kinds(file),
        **tables,
    )


def _read_kinds_table(group: h5py.Group) -> dict[str, Any]:
    """Read the kinds of events, which are known before any event."""
    table = {"name": group["name"].asstr()[:], "still": int(group.attrs["still"])}
    return {**table, **({"changes": group["changes"][()]} if "changes" in group else {})}


def _read_kinds(file: h5py.File) -> EventKinds | None:
    if "events" not in file:
        return None
    table = _read_kinds_table(file["events"])
    return EventKinds(tuple(table["name"]), table.get("changes"), bool(table["still"]))


def read_table(group: h5py.Group) -> dict[str, Any]:
    """Read the variables of a group."""
    return {
        name: data.asstr()[()] if h5py.check_string_dtype(data.dtype) else data[()]
        for name, data in _list_variables(group).items()
    }


def _list_variables(group: h5py.Group) -> dict[str, h5py.Dataset]:
    """List the data sets of a group, without those that are only a dimension."""
    return {
        name: d
        for name, d in group.items()
        if isinstance(d, h5py.Dataset) and not texts.is_dimension(d)
    }


class Completeness(NamedTuple):
    """Complete trajectories of a file.

    trajectories: number of complete ones, which lead.
    damage: what a kill cannot have caused, in words.
    """

    trajectories: int
    damage: tuple[str, ...] = ()


def count_complete(file: h5py.File) -> Completeness:
    """Count the complete trajectories, by the numbers in `trajectory`, which are written last.

    A kill leaves one unfinished at most, with -1 in place of its number. Any other wrong number is
    damage to the numbers alone: the trajectories may be whole.
    """
    index = file["trajectory"][:]
    right = index == np.arange(len(index))
    there = right | ~np.isin(index, UNWRITTEN)
    count = int(np.flatnonzero(there)[-1]) + 1 if there.any() else 0
    wrong = np.flatnonzero(~right[:count])
    damage = [f"entry {n} of /trajectory is {index[n]} and not {n}" for n in wrong[:3]]
    damage += [f"and {len(wrong) - 3} more of its entries"] if len(wrong) > 3 else []
    lengths = {
        data.name: data.shape[0]
        for data in _list_growing(file)
        if data.name not in ("/trajectory", "/checksum")
    }
    whole = min(lengths.values())
    started = max(len(index), *lengths.values())
    checks = file["checksum"].shape[0] if "checksum" in file else count
    if checks < count:
        damage.append(
            f"/trajectory counts {format_count(count, 'trajectory')} and /checksum has {checks}"
        )
    if count > whole:
        short = min(lengths, key=lambda name: lengths[name])
        damage.append(
            f"/trajectory counts {format_count(count, 'trajectory')} and {short} has {whole}"
        )
    elif count == whole - 1 and _has_whole_states(file, count):
        count += 1  # flushed with its checksum; only its number is missing
    if "events" in file:
        there = min(count, whole)
        group = file["events"]
        wanted = event_rows.count_events(group, there)
        damage += [
            f"/events/{name} has {group[name].shape[0]} entries, and {there} trajectories count "
            f"{wanted} events"
            for name in event_rows.list_flat_names(group)
            if name != "event" and group[name].shape[0] < wanted
        ]
    if started - count > 1:
        damage.append(
            f"{started - count} trajectories at the end have no number, where a kill leaves "
            "one at most"
        )
    return Completeness(min(count, whole), tuple(damage))


def _has_whole_states(file: h5py.File, n: int) -> bool:
    """Whether trajectory n agrees with its checksum, states and context."""
    if "checksum" not in file or file["checksum"].shape[0] <= n or not file["checksum"][n]:
        return False
    rows = (
        {name: data[n] for name, data in _list_variables(file["context"]).items()}
        if "context" in file
        else {}
    )
    try:
        if "events" in file and not event_rows.is_whole(file["events"], n):
            return False
        return bool(file["checksum"][n] == compute_checksum(n, rows, file["x"][n]))
    except OSError:  # a chunk whose own checksum differs
        return False


def read_checksums(file: h5py.File, count: int) -> np.ndarray | None:
    """Read the checksums of `count` trajectories (E,), 0 where missing; None of files without."""
    if "checksum" not in file:
        return None
    known = np.zeros(count, np.uint64)
    there = file["checksum"][:count]
    known[: len(there)] = there
    return known


def compute_checksum(number: int, context: Mapping[str, Any], x: np.ndarray) -> int:
    """CRC-32 of the states, plus 2³² times `compute_context_checksum`."""
    return compute_context_checksum(number, context) << 32 | zlib.crc32(
        np.ascontiguousarray(x).tobytes()
    )


def compute_context_checksum(number: int, context: Mapping[str, Any]) -> int:
    """CRC-32 of a trajectory's number and of its context, by name."""
    crc = zlib.crc32(number.to_bytes(8, "little"))
    for name in sorted(context):
        crc = zlib.crc32(np.asarray(context[name], "<f8").tobytes(), crc)
    return crc


def name_trajectories(numbers: Sequence[int]) -> str:
    """Name trajectories by number, the first ten: `trajectory 3`, `trajectories 0, 4, 5`."""
    shown = ", ".join(map(str, numbers[:10])) + (
        f" and {len(numbers) - 10:,} more" if len(numbers) > 10 else ""
    )
    return f"{'trajectory' if len(numbers) == 1 else 'trajectories'} {shown}"


def digest(table: Mapping[str, Any]) -> str:
    """SHA-256 of a table, its names, shapes and values."""
    total = hashlib.sha256()
    for name in sorted(table):
        value = table[name]
        array = np.asarray(value)
        text = array.dtype.kind in "OUS"
        raw = (
            "\0".join(map(str, array.ravel())).encode()
            if text
            else np.ascontiguousarray(array).tobytes()
        )
        total.update(
            f"{name} {array.shape} {'text' if text else array.dtype.str} {len(raw)} ".encode() + raw
        )
    return total.hexdigest()


def find_damaged_tables(file: h5py.File) -> list[str]:
    """Find tables and axes that differ from their checksums; files without are not checked."""
    values: dict[str, Any] = {name: read_table(file[name]) for name in GROUPS if name in file}
    values |= {
        name: {f"/{name}": file[name].asstr()[:] if name == "channel" else file[name][:]}
        for name in ("time", "channel")
    }
    values |= {"events": _read_kinds_table(file["events"])} if "events" in file else {}
    return [
        f"/{name} is not what was written (its checksum differs)"
        for name, table in values.items()
        if CHECKSUM in file[name].attrs
        and texts.read_attribute(file[name], CHECKSUM) != digest(table)
    ]


def describe_lost_names(unreadable: texts.UnreadableTexts) -> list[str]:
    """Describe axes that have lost their names, which only other programs use."""
    if not unreadable.dimensions:
        return []
    shown = ", ".join(unreadable.dimensions[:3]) + (", …" if len(unreadable.dimensions) > 3 else "")
    return [f"the axes of {shown} have lost their names, and netCDF programs may hang on them"]


def resize(file: h5py.File, count: int) -> None:
    """Make the file `count` trajectories long: drop the last ones, or make room."""
    for data in _list_growing(file):
        if data.shape[0] != count:
            data.resize(count, axis=0)
    if "events" in file:
        event_rows.trim(file["events"], count)


def write_number(file: h5py.File, n: int) -> None:
    """Mark trajectory n as complete. Its data must be in the file already."""
    index = file["trajectory"]
    if index.shape[0] <= n:
        index.resize(n + 1, axis=0)
    index[n] = n


def _list_growing(file: h5py.File) -> list[h5py.Dataset]:
    context = list(_list_variables(file["context"]).values()) if "context" in file else []
    checks = [file["checksum"]] if "checksum" in file else []
    happened = [file["events"][name] for name in ("count", "checksum")] if "events" in file else []
    return [file["x"], file["trajectory"], *checks, *context, *happened]


# ------------------------------------------------------------------------- what a file may point to


def refuse_external_data(file: h5py.File, path: Path) -> None:
    """Refuse data in other files, and shapes far larger than what the file holds.

    HDF5 follows external storage, virtual data sets and external links wherever they point. A shape
    is a mere number: one of terabytes costs a file nothing and its reader all memory.
    """
    groups = [file["/"]]
    seen = set()
    while groups:
        group = groups.pop()
        address = h5py.h5o.get_info(group.id).addr
        if address in seen:
            continue
        seen.add(address)
        for name in group:
            link = group.get(name, getlink=True)
            where = f"{group.name.rstrip('/')}/{name}"
            if not isinstance(link, h5py.HardLink):
                raise ValueError(
                    f"{path}: {where} is a link to {link.path!r}; a recording holds "
                    "its data itself."
                )
            item = group[name]
            if isinstance(item, h5py.Group):
                groups.append(item)
            elif isinstance(item, h5py.Dataset):
                _refuse_data(item, where, path)


def _refuse_data(data: h5py.Dataset, where: str, path: Path) -> None:
    if data.external or data.is_virtual:
        raise ValueError(
            f"{path}: {where} lies in another file; a recording holds its data itself. Copy them "
            "into it."
        )
    declared = math.prod(data.shape or ()) * data.dtype.itemsize
    held = data.id.get_storage_size()
    if declared > SPARE + DEFLATE * held:
        raise ValueError(
            f"{path}: {where} declares {data.shape} numbers, {declared:.3g} bytes, and holds "
            f"{held:,}: damaged, or made to exhaust the memory."
        )
