"""Read trajectories of other programs: .npz, .npy, CSV and MATLAB v7.3, by names or a mapping.

Names: `x` (trajectory, time, channel), real or complex; `t` (time); and, if there, `channels`,
`units`, `time_units`, `provenance`, and tables `parameters.NAME`, `settings.NAME`, `context.NAME`,
`drive.NAME`, `noise.NAME`. In an .npz the dot is part of the name. In MATLAB a table is a struct,
and size(x) is [trajectory, time, channel]. A mapping {"x": "psi", "parameters.omega": "w0"} gives
other places. A CSV file has one row per sample: a column `t` or `time`, a column `trajectory` or
`run` if there are several, and one column per channel.

A file without times needs `dt`. Integer samples need `scale`, units per count. An `x` with fewer
axes is one trajectory (time, channel) or one channel (trajectory, time), by the length of `t` where
that tells them apart, else by `axes`.
"""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from fluctua.core.words import close_match
from fluctua.insitu.recording import texts
from fluctua.insitu.recording.description import Description

TABLES = ("parameters", "settings", "drive", "noise", "context")
TEXTS = ("units", "time_units", "provenance")
KNOWN = ("x", "t", "channels", *TEXTS)


TEXT_FILES = (".csv", ".tsv", ".txt", ".dat")
TIMES = ("t", "time")
NUMBERS = ("trajectory", "run")
ONE_TRAJECTORY = "time,channel"
ONE_CHANNEL = "trajectory,time"


class Units(NamedTuple):
    """Units that a file does not hold.

    dt: interval of its samples.
    scale: units per count, one or (C,).
    axes: of an array with two of them, `ONE_TRAJECTORY` or `ONE_CHANNEL`.
    """

    dt: float | None = None
    scale: Any = None
    axes: str | None = None


class Contents(NamedTuple):
    """Contents of a file of another program.

    kind: of file.
    description: the head.
    x: states (E, T+1, C), loaded when sliced.
    context: {name: (E, …)}.
    rails: ends of the range of integer samples (2, C); None for others.
    """

    kind: str
    description: Description
    x: Any
    context: dict[str, np.ndarray] | None
    rails: np.ndarray | None = None


def read_npz(path: Path, mapping: Mapping[str, str], units: Units) -> Contents:
    """Read an .npz of plain arrays. Its states are loaded completely: a zip cannot be sliced."""
    try:
        _check_members(path)
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} cannot be read as an .npz of plain arrays ({error}).") from None
    places = _find_places(path, list(arrays), mapping, needs_times=units.dt is None)
    values = {name: arrays[where] for name, where in places.items()}
    return _make_contents(path, "npz", values, values["x"], units)


def _check_members(path: Path) -> None:
    """Compare the shapes that an .npz declares with its bytes, before memory is taken."""
    whole = 0
    with zipfile.ZipFile(path) as file:
        for member in file.infolist():
            with file.open(member) as stream:
                version = np.lib.format.read_magic(stream)
                read = (
                    np.lib.format.read_array_header_1_0
                    if version == (1, 0)
                    else np.lib.format.read_array_header_2_0
                )
                shape, _, dtype = read(stream)
            declared = math.prod(shape) * dtype.itemsize
            if declared > member.file_size:
                raise ValueError(
                    f"{member.filename} declares {shape} numbers, {declared:.3g} bytes, and has "
                    f"{member.file_size:,}"
                )
            whole += declared
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if whole > memory:
        raise ValueError(
            f"it is loaded whole, and {whole:.3g} bytes are more than the memory, {memory:.3g}"
        )


def read_npy(path: Path, units: Units) -> Contents:
    """Read one array, the states."""
    try:
        x = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be read as an .npy of numbers ({error}).") from None
    if units.dt is None:
        raise ValueError(
            f"{path} is an array without times: give the interval of its samples, --set dt=0.01."
        )
    return _make_contents(path, "npy", {}, x, units)


def read_text(path: Path, mapping: Mapping[str, str], units: Units) -> Contents:
    """Read a table of numbers, one row per sample, with or without a first line of names."""
    with open(path, encoding="utf-8", errors="replace") as file:
        first = file.readline().strip()
    delimiter = next((mark for mark in "\t;," if mark in first), None)
    words = [word.strip().strip('"') for word in first.lstrip("#").split(delimiter)]
    headed = not all(map(_is_number, words))
    try:
        rows = np.loadtxt(
            path, delimiter=delimiter, skiprows=int(headed and not first.startswith("#")), ndmin=2
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read as a table of numbers, one row per sample ({error})."
        ) from None
    names = words if headed else [f"x[{k}]" for k in range(rows.shape[1])]
    if len(names) != rows.shape[1]:
        raise ValueError(f"{path} names {len(names)} columns and has {rows.shape[1]}.")
    columns = dict(zip(names, rows.T, strict=True))
    for name, where in mapping.items():
        if name not in ("t", "trajectory") or where not in columns:
            raise ValueError(
                f"--map takes t=COLUMN and trajectory=COLUMN for a table; got {name}={where}, and "
                f"it has {_join_few(names)}."
            )

    def pick(name, usual):
        return mapping.get(name) or next((n for n in names if n.lower() in usual), None)

    time = pick("t", TIMES)
    number = pick("trajectory", NUMBERS)
    channels = [name for name in names if name not in (time, number)]
    if time is None and units.dt is None:
        raise ValueError(
            f"{path} has no column of times; it has {_join_few(names)}. Give the interval, --set "
            "dt=0.01, or the column, --map t=COLUMN."
        )
    if number is not None:
        new = np.flatnonzero(np.diff(columns[number])) + 1
    else:  # times that begin again are another trajectory
        new = np.zeros(0, int) if time is None else np.flatnonzero(np.diff(columns[time]) <= 0) + 1
    lengths = np.diff([0, *new, len(rows)])
    if not np.all(lengths == lengths[0]):
        odd = int(np.argmax(lengths != lengths[0]))
        raise ValueError(
            f"{path}: trajectory {odd} has {lengths[odd]} rows and the first {lengths[0]}; all "
            "must be of one length."
        )
    shape = (len(lengths), lengths[0])
    values: dict[str, Any] = {"channels": channels}
    if time is not None:
        times = columns[time].reshape(shape)
        if not np.allclose(times, times[0], rtol=0, atol=1e-6 * np.ptp(times[0])):
            raise ValueError(f"{path}: all trajectories must have the times of the first.")
        values["t"] = times[0]
    x = np.stack([columns[name] for name in channels], axis=-1).reshape(*shape, len(channels))
    return _make_contents(path, "text", values, x, units)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def read_hdf5(
    path: Path,
    file: h5py.File,
    mapping: Mapping[str, str],
    units: Units,
    unreadable: Sequence[str] = (),
) -> Contents:
    """Read MATLAB v7.3, whose arrays have their axes in reverse, or any HDF5 file by a mapping.

    unreadable: data sets of texts that are left out, because HDF5 would hang on them.
    """
    matlab = file.userblock_size >= 128 and _read_userblock(path).startswith(b"MATLAB 7.3")
    places: list[str] = []

    def collect(name: str, item: Any) -> None:
        if (
            isinstance(item, h5py.Dataset)
            and f"/{name}" not in unreadable
            and not texts.is_dimension(item)
        ):
            places.append(name)

    file.visititems(collect)
    shown = [name for name in places if not name.startswith("#")]
    mapped = _find_places(path, shown, mapping, separator="/", needs_times=units.dt is None)
    text: Callable[[Any], Any] = (
        (lambda d: _read_matlab_text(file, d)) if matlab else (lambda d: d[()])
    )
    values: dict[str, Any] = {}
    for name, where in mapped.items():
        data = file[where]
        if name == "x":
            continue
        if name in ("channels", *TEXTS):
            values[name] = text(data)
        else:
            values[name] = _squeeze(name, data[()].T if matlab else data[()])
    x = file[mapped["x"]]
    if (x.dtype.names and set(x.dtype.names) >= {"real", "imag"}) or matlab:
        x = _Reversed(x) if matlab else _Compound(x)
    return _make_contents(path, "MATLAB v7.3" if matlab else "HDF5", values, x, units)


class _Compound:
    """A data set of {real, imag} pairs, complex when sliced."""

    def __init__(self, data: h5py.Dataset):
        self._data = data
        pair = data.dtype.names is not None
        self.dtype = np.result_type(data.dtype["real"], np.complex64) if pair else data.dtype
        self.shape = data.shape

    def __getitem__(self, key: Any) -> np.ndarray:
        return self._values(self._data[key])

    def _values(self, raw: np.ndarray) -> np.ndarray:
        return (raw["real"] + 1j * raw["imag"]).astype(self.dtype) if raw.dtype.names else raw


class _Reversed(_Compound):
    """The same with its axes in reverse: MATLAB writes columns first."""

    def __init__(self, data: h5py.Dataset):
        super().__init__(data)
        self.shape = data.shape[::-1]

    def __getitem__(self, key: Any) -> np.ndarray:
        keys = key if isinstance(key, tuple) else (key,)
        full = keys + (slice(None),) * (len(self.shape) - len(keys))
        return self._values(self._data[full[::-1]]).T


class _MissingAxis:
    """Data with one more axis of length one. Loaded when sliced."""

    def __init__(self, data: Any, axis: int):
        self._data = data
        self._axis = axis
        self.dtype = data.dtype
        self.shape = (*data.shape[:axis], 1, *data.shape[axis:])

    def __getitem__(self, key: Any) -> np.ndarray:
        keys = list(key) if isinstance(key, tuple) else [key]
        keys += [slice(None)] * (len(self.shape) - len(keys))
        own = keys.pop(self._axis)
        place = sum(isinstance(one, slice) for one in keys[: self._axis])
        values = np.expand_dims(np.asarray(self._data[tuple(keys)]), place)
        return values[(slice(None),) * place + (own,)]


class _ScaledSamples:
    """Counts in their units when sliced. scale: a number or (C,)"""

    def __init__(self, data: Any, scale: np.ndarray):
        self._data = data
        self._scale = scale
        self.dtype = np.result_type(data.dtype, np.float32)
        self.shape = data.shape

    def __getitem__(self, key: Any) -> np.ndarray:
        return np.asarray(self._data[key]).astype(self.dtype) * self._scale.astype(self.dtype)


def _find_places(
    path: Path,
    places: list[str],
    mapping: Mapping[str, str],
    separator: str = ".",
    *,
    needs_times: bool = True,
) -> dict[str, str]:
    """Find places in the file by our names."""
    for name, where in mapping.items():
        if name not in KNOWN and name.split(".")[0] not in TABLES:
            raise ValueError(
                f"a mapping names {', '.join(KNOWN)} or TABLE.NAME with TABLE one of "
                f"{', '.join(TABLES)}; got {name!r}.{close_match(name, KNOWN)}"
            )
        if where.strip("/") not in places:
            raise ValueError(
                f"{path} has no {where!r} for {name}; it has "
                f"{_join_few(places)}.{close_match(where, places)}"
            )
    mapped = {name: where.strip("/") for name, where in mapping.items()}
    for place in places:
        name = place.replace(separator, ".") if separator != "." else place
        if name not in mapped and (
            name in KNOWN or (name.count(".") == 1 and name.split(".")[0] in TABLES)
        ):
            mapped[name] = place
    wanted = [("x", "the states (trajectory, time, channel)")] + [("t", "the times")] * needs_times
    for name, meaning in wanted:
        if name not in mapped:
            interval = ", or give the interval of the samples, --set dt=0.01" if name == "t" else ""
            raise ValueError(
                f"{path} has no `{name}`, {meaning}; it has {_join_few(places)}. Give the "
                f"place: --map {name}=PLACE (in Python, mapping={{{name!r}: ...}}){interval}."
            )
    return mapped


def _make_contents(path: Path, kind: str, values: dict[str, Any], x: Any, units: Units) -> Contents:
    if units.dt is not None and "t" in values:
        raise ValueError(f"{path} has times of its own; leave out dt.")
    length = np.size(values["t"]) if units.dt is None else None
    shape = x.shape
    x = _add_axes(path, x, length, units)
    if len(x.shape) != 3 or length not in (None, x.shape[1]):
        times = "times" if length is None else length
        raise ValueError(
            f"{path}: `x` must be (trajectories, {times}, channels) to match `t`; got {shape}."
        )
    t = np.ravel(values["t"]) if units.dt is None else np.arange(x.shape[1]) * units.dt
    x, rails = _scale_samples(path, x, units.scale)
    names = values.get("channels")
    if names is None:
        names = [f"x[{k}]" for k in range(x.shape[2])]
    names = [str(v) for v in np.atleast_1d(names)]
    if len(names) != x.shape[2]:
        raise ValueError(f"{path}: `channels` names {len(names)} channels, `x` has {x.shape[2]}.")
    tables: dict[str, Any] = {table: {} for table in TABLES}
    for name, value in values.items():
        table, dot, rest = name.partition(".")
        if dot:
            tables[table][rest] = value
    context = tables.pop("context") or None
    for name, value in (context or {}).items():
        if value.shape[:1] != (x.shape[0],):
            raise ValueError(
                f"{path}: `context.{name}` must be ({x.shape[0]}, ...), one row per trajectory; "
                f"got {value.shape}."
            )
    dtype = np.result_type(x.dtype, np.float32).name
    texts: dict[str, Any] = {name: str(values[name]) for name in TEXTS if name in values}
    description = Description(
        t,
        tuple(names),
        dtype,
        context={name: value.shape[1:] for name, value in context.items()} if context else None,
        software=kind,
        created="unknown",
        **texts,
        **tables,
    )
    if len(shape) < 3:
        what = "one trajectory" if x.shape[0] == 1 else "one channel"
        kind += f", `x` {shape} taken as {what}"
    return Contents(kind, description, x, context, rails)


def _add_axes(path: Path, x: Any, length: int | None, units: Units) -> Any:
    """States with their three axes, where one or two of length one were left out.

    length: of the times; None where the file has none.
    """
    axes = units.axes
    if axes not in (None, ONE_TRAJECTORY, ONE_CHANNEL):
        raise ValueError(f"`axes` must be {ONE_TRAJECTORY} or {ONE_CHANNEL}; got {axes!r}.")
    if axes is not None and len(x.shape) != 2:
        raise ValueError(f"{path}: `axes` is for an `x` with two axes; got {x.shape}.")
    if len(x.shape) == 1:
        return _MissingAxis(_MissingAxis(x, 0), 2)
    if len(x.shape) != 2:
        return x
    rows, columns = x.shape
    if axes is None and length is not None and rows != columns:
        axes = {rows: ONE_TRAJECTORY, columns: ONE_CHANNEL}.get(length)
        if axes is None:
            return x
    if axes is None:
        line = f"fluctua convert {path} OUT.nc" + (f" --set dt={units.dt:g}" if units.dt else "")
        raise ValueError(
            f"{path}: `x` must be (trajectories, times, channels); got {x.shape}. For one "
            f"trajectory of {rows:,} times and {columns:,} channels: {line} --set "
            f"axes={ONE_TRAJECTORY}. For {rows:,} trajectories of {columns:,} times and one "
            f"channel: {line} --set axes={ONE_CHANNEL}. In Python: x[None] or x[..., None]."
        )
    return _MissingAxis(x, 0 if axes == ONE_TRAJECTORY else 2)


def _scale_samples(path: Path, x: Any, scale: Any) -> tuple[Any, np.ndarray | None]:
    """States in their units, and the ends of the range of integer samples."""
    if x.dtype.kind not in "fciu":
        raise ValueError(f"{path}: `x` must be numbers; it is {x.dtype}.")
    if scale is None:
        if x.dtype.kind in "iu":
            raise ValueError(
                f"{path}: `x` are counts ({x.dtype}); give the units per count: --set scale=0.01, "
                "or one per channel."
            )
        return x, None
    each = np.asarray(scale, float)
    if each.shape not in ((), (1,), (x.shape[2],)) or not np.all(np.isfinite(each) & (each != 0)):
        raise ValueError(
            f"{path}: `scale` is a number that is not 0, or one for each of {x.shape[2]} "
            f"channels; got {scale}."
        )
    each = np.broadcast_to(each, (x.shape[2],))
    scaled = _ScaledSamples(x, each)
    if x.dtype.kind not in "iu":
        return scaled, None
    ends = np.array([np.iinfo(x.dtype).min, np.iinfo(x.dtype).max]).astype(scaled.dtype)
    return scaled, np.sort(ends[:, None] * each.astype(scaled.dtype), axis=0)


def _squeeze(name: str, value: np.ndarray) -> np.ndarray:
    """Squeeze MATLAB's matrices: 1×N or N×1 is a vector, 1×1 a number."""
    if name.startswith("context."):
        return value.reshape(
            value.shape[0] if value.shape[0] > 1 else -1, *(n for n in value.shape[1:] if n > 1)
        )
    return value.squeeze()


def _read_matlab_text(file: h5py.File, data: h5py.Dataset) -> Any:
    """Read a char array, or a cell array of them."""

    def char(d):
        return "".join(map(chr, np.ravel(np.asarray(d).T)))

    if h5py.check_ref_dtype(data.dtype):
        return [char(file[ref]) for ref in np.ravel(np.asarray(data).T)]
    return char(data)


def _read_userblock(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(128)


def _join_few(places: list[str]) -> str:
    return ", ".join(places[:12]) + (", …" if len(places) > 12 else "") if places else "nothing"
