"""Trajectories that other programs saved: .npz and MATLAB v7.3, by a naming convention or by a mapping.

Names: `x` (trajectory, time, channel), real or complex; `t` (time); and, if there, `channels`, `units`, `time_units`,
`provenance`, and tables `parameters.NAME`, `settings.NAME`, `context.NAME`, `drive.NAME`, `noise.NAME`. In an .npz the
dot is part of the name. In MATLAB a table is a struct, and size(x) is [trajectory, time, channel]. A mapping
{"x": "psi", "parameters.omega": "w0"} says where things are instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from fluctua.core.text import close_match
from fluctua.insitu.recording.description import Description

TABLES = ("parameters", "settings", "drive", "noise", "context")
TEXTS = ("units", "time_units", "provenance")
KNOWN = ("x", "t", "channels", *TEXTS)


class Contents(NamedTuple):
    """What a file of another program holds. x: states (E, T+1, C), loaded when sliced. context: {name: (E, …)}."""

    kind: str
    description: Description
    x: Any
    context: dict[str, np.ndarray] | None


def read_npz(path: Path, mapping: Mapping[str, str]) -> Contents:
    """An .npz of plain arrays. Its states are loaded whole: a zip cannot be sliced."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path} cannot be read as an .npz of plain arrays ({error}).") from None
    found = _find(path, list(arrays), mapping)
    values = {name: arrays[where] for name, where in found.items()}
    return _contents(path, "npz", values, values["x"])


def read_hdf5(path: Path, file: h5py.File, mapping: Mapping[str, str]) -> Contents:
    """MATLAB v7.3, whose arrays have their axes in reverse, or any HDF5 file through a mapping."""
    matlab = file.userblock_size >= 128 and _userblock(path).startswith(b"MATLAB 7.3")
    places: list[str] = []
    file.visititems(lambda name, item: places.append(name) if isinstance(item, h5py.Dataset) else None)
    shown = [name for name in places if not name.startswith("#")]
    found = _find(path, shown, mapping, separator="/")
    text: Callable[[Any], Any] = (lambda d: _matlab_text(file, d)) if matlab else (lambda d: d[()])
    values: dict[str, Any] = {}
    for name, where in found.items():
        data = file[where]
        if name == "x":
            continue
        if name in ("channels", *TEXTS):
            values[name] = text(data)
        else:
            values[name] = _squeezed(name, data[()].T if matlab else data[()])
    x = file[found["x"]]
    if (x.dtype.names and set(x.dtype.names) >= {"real", "imag"}) or matlab:
        x = _Reversed(x) if matlab else _Compound(x)
    return _contents(path, "MATLAB v7.3" if matlab else "HDF5", values, x)


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


def _find(path: Path, places: list[str], mapping: Mapping[str, str], separator: str = ".") -> dict[str, str]:
    """{our name: place in the file}."""
    for name, where in mapping.items():
        if name not in KNOWN and name.split(".")[0] not in TABLES:
            raise ValueError(
                f"a mapping names {', '.join(KNOWN)} or TABLE.NAME with TABLE one of {', '.join(TABLES)}; got {name!r}."
                f"{close_match(name, KNOWN)}"
            )
        if where.strip("/") not in places:
            raise ValueError(f"{path} has no {where!r} for {name}; it has {_few(places)}.{close_match(where, places)}")
    found = {name: where.strip("/") for name, where in mapping.items()}
    for place in places:
        name = place.replace(separator, ".") if separator != "." else place
        if name not in found and (name in KNOWN or (name.count(".") == 1 and name.split(".")[0] in TABLES)):
            found[name] = place
    for name, told in (("x", "the states (trajectory, time, channel)"), ("t", "the times")):
        if name not in found:
            raise ValueError(
                f"{path} has no `{name}`, {told}; it has {_few(places)}. Say where they are: --map {name}=PLACE "
                f"(in Python, mapping={{{name!r}: ...}})."
            )
    return found


def _contents(path: Path, kind: str, values: dict[str, Any], x: Any) -> Contents:
    t = np.ravel(values["t"])
    if len(x.shape) != 3 or x.shape[1] != len(t):
        hint = " One trajectory is x[None]." if tuple(x.shape[:1]) == (len(t),) else ""
        raise ValueError(f"{path}: `x` must be (trajectories, {len(t)}, channels) to match `t`; got {x.shape}.{hint}")
    if x.dtype.kind not in "fc":
        raise ValueError(f"{path}: `x` must be real or complex floating point; it is {x.dtype}. Scale it to its units.")
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
                f"{path}: `context.{name}` must be ({x.shape[0]}, ...), a row a trajectory; got {value.shape}."
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
    return Contents(kind, description, x, context)


def _squeezed(name: str, value: np.ndarray) -> np.ndarray:
    """MATLAB has no vectors and no scalars: a 1×N or N×1 matrix is a vector, 1×1 a number."""
    if name.startswith("context."):
        return value.reshape(value.shape[0] if value.shape[0] > 1 else -1, *(n for n in value.shape[1:] if n > 1))
    return value.squeeze()


def _matlab_text(file: h5py.File, data: h5py.Dataset) -> Any:
    """A char array, or a cell array of them."""
    char = lambda d: "".join(map(chr, np.ravel(np.asarray(d).T)))
    if h5py.check_ref_dtype(data.dtype):
        return [char(file[ref]) for ref in np.ravel(np.asarray(data).T)]
    return char(data)


def _userblock(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(128)


def _few(places: list[str]) -> str:
    return ", ".join(places[:12]) + (", …" if len(places) > 12 else "") if places else "nothing"
