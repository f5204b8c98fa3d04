"""Events of a jump process in a recording: ragged, in order, checked when they are read.

    /events/count     (trajectory)        number of its events
    /events/checksum  (trajectory)        CRC-32 of them
    /events/step      (event)             the step of the time grid in which it happened
    /events/after     (event)             time since the beginning of that step
    /events/channel   (event)             kind of event, 0 … R−1
    /events/change    (event, component)  added to the state, where that is random
    /events/name      (kind)              names of the R kinds
    /events/changes   (kind, component)   added to the state, where that is fixed

Those of a trajectory follow those of the one before. An event happened at time[step] + after; that
sum is not stored, because it would be rounded, and the score with it.

/events/count     (trajectory)        how many events it has
/events/checksum  (trajectory)        CRC-32 of them
/events/step      (event)             the step of the time grid in which it happened
/events/after     (event)             time since the beginning of that step
/events/channel   (event)             which event, 0 … R−1
/events/change    (event, component)  what it added to the state, where that is random
/events/name      (kind)              what the R events are called
/events/changes   (kind, component)   what each adds to the state, where that is fixed

Those of a trajectory follow those of the one before. An event happened at time[step] + after; that
sum is not kept, because it would round, and the score with it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import h5py
import numpy as np

from fluctua.insitu.recording import texts
from fluctua.insitu.recording.description import Description
from fluctua.processes.jumps import Events

CHUNK = 1024
COLUMNS = {"step": "<i4", "after": "<f8", "channel": "<i4", "change": "<f8"}
ROUNDING = 8
"""Units in the last place per event by which states may differ from the sum of changes."""


class Rows(NamedTuple):
    """Events one after the other.

    step: of the time grid in which each happened (n,).
    after: time since the beginning of that step (n,).
    channel: kind of event (n,).
    change: of the state (n, M).
    """

    step: np.ndarray
    after: np.ndarray
    channel: np.ndarray
    change: np.ndarray


def make_rows(d: Description, events: Any) -> Rows | None:
    """Convert the events of one trajectory, leaves (T, K, …), to rows; refuse unsuitable ones."""
    if d.events is None:
        if events is not None:
            raise ValueError(
                "this recording keeps no events; declare them in its "
                "head, Description(..., events=...)."
            )
        return None
    if events is None:
        raise ValueError(
            "every trajectory of this recording needs its events: append(x, context, events)."
        )
    after, channel, change = (np.asarray(leaf) for leaf in Events(*events))
    steps = len(d.t) - 1
    width = len(d.components)
    if (
        after.ndim != 2
        or after.shape != channel.shape
        or change.shape != (*after.shape, width)
        or len(after) != steps
    ):
        raise ValueError(
            f"the events of one trajectory are `Events` with leaves ({steps}, K), ({steps}, K) "
            f"and ({steps}, K, {width}); got {after.shape}, {channel.shape} and {change.shape}."
        )
    step, place = np.nonzero(channel >= 0)
    return Rows(
        step,
        after[step, place].astype(float),
        channel[step, place],
        change[step, place].astype(float),
    )


def check_rows(d: Description, rows: Rows, x: np.ndarray) -> str:
    """Say what is wrong with the events of a trajectory x (T+1, M), in words; "" if nothing."""
    assert d.events is not None
    kinds = len(d.events.names)
    steps = len(d.t) - 1
    dt = np.diff(d.t)
    step, after, channel, change = rows
    outside = np.flatnonzero((step < 0) | (step >= steps))
    if outside.size:
        return f"event {outside[0]} is in step {step[outside[0]]}, and there are {steps}"
    # a time within a step is in the precision of the states
    late = np.flatnonzero(~((after >= 0) & (after <= dt[step] * (1 + 1e-6))))
    if late.size:
        n = step[late[0]]
        return (
            f"event {late[0]} is {after[late[0]]:g} after t = {d.t[n]:g}, outside its "
            f"step of {dt[n]:g}"
        )
    back = np.flatnonzero((np.diff(step) < 0) | ((np.diff(step) == 0) & (np.diff(after) < 0)))
    if back.size:
        return f"event {back[0] + 1} is before event {back[0]}"
    unknown = np.flatnonzero((channel < 0) | (channel >= kinds))
    if unknown.size:
        return f"event {unknown[0]} is of kind {channel[unknown[0]]}, and there are {kinds}"
    if d.events.changes is not None:
        other = np.flatnonzero(
            (change != d.events.changes[channel].astype(change.dtype)).any(axis=1)
        )
        if other.size:
            kind = channel[other[0]]
            return (
                f"event {other[0]}, {d.events.names[kind]}, adds {change[other[0]].tolist()} to "
                f"the state, and `changes` has {d.events.changes[kind].tolist()}"
            )
    if d.events.still:
        total = np.zeros((steps, x.shape[1]))
        np.add.at(total, step, change)
        moved = np.diff(x.astype(float), axis=0)
        unit = np.finfo(x.dtype).eps * (np.abs(x[1:]) + np.abs(x[:-1]) + np.abs(total)).astype(
            float
        )
        count = 1 + np.bincount(step, minlength=steps)[:, None]
        off = np.argwhere(~(np.abs(moved - total) <= ROUNDING * count * unit))
        if off.size:
            n, i = off[0]
            return (
                f"{d.components[i]} moves by {moved[n, i]:g} in step {n}, and its events there "
                f"add up to {total[n, i]:g}"
            )
    return ""


def compute_crc(rows: Rows, has_change: bool) -> int:
    """CRC-32 of the events of a trajectory as stored."""
    total = 0
    for name, kind in COLUMNS.items():
        if name != "change" or has_change:
            total = zlib.crc32(np.ascontiguousarray(getattr(rows, name), kind).tobytes(), total)
    return total


# -------------------------------------------------------------------------------------- in the file


def create_group(
    file: h5py.File, d: Description, attach: Callable[..., None], dimension: str
) -> None:
    """Create the group without events. attach: gives axes their netCDF dimensions."""
    assert d.events is not None
    group = file.create_group("events")
    group.attrs["still"] = int(d.events.still)
    attach(group, texts.write_texts(group, "name", d.events.names), 0)
    if d.events.changes is not None:
        attach(group, group.create_dataset("changes", data=d.events.changes), 0)
    for name, kind in (("count", "i8"), ("checksum", "u8")):
        data = group.create_dataset(name, (0,), maxshape=(None,), chunks=(CHUNK,), dtype=kind)
        data.dims[0].attach_scale(file["trajectory"])
    event = group.create_dataset("event", (0,), maxshape=(None,), chunks=(CHUNK,), dtype="i1")
    event.make_scale(dimension.format(0))
    for name, kind in COLUMNS.items():
        if name == "change" and d.events.changes is not None:
            continue
        width = (len(d.components),) if name == "change" else ()
        # no checksum of HDF5's own: a chunk is rewritten with every trajectory that it has part of
        data = group.create_dataset(
            name, (0, *width), maxshape=(None, *width), chunks=(CHUNK, *width), dtype=kind
        )
        data.dims[0].attach_scale(event)
        attach(group, data, 1)


def list_flat_names(group: h5py.Group) -> list[str]:
    """List the data sets with one row per event."""
    return [name for name in ("event", *COLUMNS) if name in group]


def write_rows(group: h5py.Group, n: int, begin: int, rows: Rows) -> int:
    """Write the events of trajectory n from row `begin` on; returns the row after the last."""
    end = begin + len(rows.step)
    for name in list_flat_names(group):
        data = group[name]
        if data.shape[0] < end:
            data.resize(end, axis=0)
        if name != "event" and end > begin:
            data[begin:end] = getattr(rows, name)
    for name, value in (
        ("count", end - begin),
        ("checksum", np.uint64(compute_crc(rows, "change" in group))),
    ):
        if group[name].shape[0] <= n:
            group[name].resize(n + 1, axis=0)
        group[name][n] = value
    return end


def trim(group: h5py.Group, count: int) -> None:
    """Keep the events of the first `count` trajectories in the data sets with one row per event."""
    end = count_events(group, count)
    for name in list_flat_names(group):
        if group[name].shape[0] > end:
            group[name].resize(end, axis=0)


def count_events(group: h5py.Group, count: int) -> int:
    """Count the events of the first `count` trajectories."""
    return int(group["count"][:count].sum())


def is_whole(group: h5py.Group, n: int) -> bool:
    """Whether the events of trajectory n agree with their checksum."""
    begin = count_events(group, n)
    end = count_events(group, n + 1)
    columns = {name: group[name][begin:end] for name in COLUMNS if name in group}
    rows = Rows(**{"change": np.zeros((0, 1)), **columns})
    return len(rows.step) == end - begin and compute_crc(rows, "change" in group) == int(
        group["checksum"][n]
    )


def count_bytes(rows: Rows | None) -> int:
    """Bytes that the rows take in the file at most, with one new chunk per data set."""
    return 0 if rows is None else (24 + 8 * rows.change.shape[1]) * (len(rows.step) + CHUNK)


class EventReader:
    """The events of an open recording. Trajectories are checked once, when they are first read."""

    def __init__(self, group: h5py.Group, d: Description, count: int, states: Any, path: Any):
        self._group = group
        self._d = d
        self._states = states
        self._path = path
        self.counts = np.asarray(group["count"][:count])
        self._ends = np.concatenate([[0], np.cumsum(self.counts)])
        self._checked = np.zeros(count, bool)
        self._held: tuple[tuple[int, int], list[Rows]] | None = None
        self._max_per_step: int | None = None

    @property
    def max_per_step(self) -> int:
        """K, the largest number of events in any step; 1 at least."""
        if self._max_per_step is None:
            largest = 1
            for j in range(len(self.counts)):
                step = self._group["step"][self._ends[j] : self._ends[j + 1]]
                if len(step):
                    largest = max(largest, int(np.bincount(step[step >= 0]).max(initial=0)))
            self._max_per_step = largest
        return self._max_per_step

    def rows(self, first: int, stop: int) -> list[Rows]:
        """Events of trajectories first … stop−1, as rows."""
        if self._held is None or self._held[0] != (first, stop):
            self._held = (first, stop), [self._read_rows(j) for j in range(first, stop)]
        return self._held[1]

    def count_kinds(self) -> np.ndarray:
        """Count the events of each kind. Shape (R,)."""
        assert self._d.events is not None
        channel = np.asarray(self._group["channel"][: self._ends[-1]])
        return np.bincount(channel[channel >= 0], minlength=len(self._d.events.names))

    def load_dense(self, first: int, stop: int, steps: slice) -> Events:
        """Load `Events` of some trajectories and steps, leaves (E, T, K, …)."""
        low, high, _ = steps.indices(len(self._d.t) - 1)
        shape = (stop - first, max(0, high - low), self.max_per_step)
        after = np.zeros(shape)
        channel = np.full(shape, -1)
        change = np.zeros((*shape, len(self._d.components)))
        for j, rows in enumerate(self.rows(first, stop)):
            here = slice(*np.searchsorted(rows.step, (low, high)))
            step = rows.step[here] - low
            rank = np.arange(len(step)) - np.searchsorted(step, step)  # within its step
            for leaf, values in (
                (after, rows.after),
                (channel, rows.channel),
                (change, rows.change),
            ):
                leaf[j, step, rank] = values[here]
        return Events(after, channel, change)

    def load_lazily(self) -> Events:
        """All `Events`, loaded when sliced."""
        return Events(*(_EventLeaf(self, name) for name in Events._fields))

    def _read_rows(self, j: int) -> Rows:
        d = self._d
        group = self._group
        part = slice(self._ends[j], self._ends[j + 1])
        assert d.events is not None
        columns = {name: np.asarray(group[name][part]) for name in COLUMNS if name in group}
        if "change" not in columns:
            channel = np.clip(columns["channel"], 0, len(d.events.names) - 1)
            known = d.events.changes[channel]  # type: ignore[index]
            columns["change"] = known.astype(float)
        rows = Rows(**columns)
        if not self._checked[j]:
            wrong = ""
            if len(rows.step) != self.counts[j]:
                wrong = f"{self.counts[j]} events are counted and {len(rows.step)} are present"
            elif compute_crc(rows, "change" in group) != int(group["checksum"][j]):
                wrong = "its events are not what was written (their checksum differs)"
            wrong = wrong or check_rows(d, rows, self._states[j])
            if wrong:
                raise ValueError(f"{self._path} is damaged: trajectory {j}: {wrong}.")
            self._checked[j] = True
        return rows


class _EventLeaf:
    """One leaf of the `Events` of a recording, (E, T, K, …), loaded when sliced."""

    def __init__(self, reader: EventReader, name: str):
        self._reader = reader
        self._name = name
        d = reader._d
        width = (len(d.components),) if name == "change" else ()
        self.shape = (len(reader.counts), len(d.t) - 1, reader.max_per_step, *width)
        self.dtype = np.dtype(int) if name == "channel" else np.dtype(float)
        self.ndim = len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self[:], dtype)

    def __getitem__(self, key: Any) -> np.ndarray:
        keys = key if isinstance(key, tuple) else (key,)
        if not all(isinstance(k, slice) and k.step in (None, 1) for k in keys) or len(keys) > 2:
            raise TypeError(
                "the events of a recording are sliced by trajectory and step: v[a:b], v[:, n:m]."
            )
        first, stop, _ = keys[0].indices(self.shape[0])
        steps = keys[1] if len(keys) > 1 else slice(None)
        return getattr(self._reader.load_dense(first, max(first, stop), steps), self._name)
