"""Run folders as a page shows them: read, never written, never locked.

Nothing of a request reaches the file system: a run is known by a number that was given to it when
its folder was found below one of the folders to be watched. What leads out of these (symbolic
links, links within HDF5) is not followed.

Memory is bounded: of a long history at most `POINTS` rows leave, and of the histories of many runs
the last few that were asked for are kept.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from fluctua.store import history
from fluctua.store.folder import LOCK, SETTINGS
from fluctua.store.history import Row

POINTS = 2000
"""Rows of a history that are shown at once."""
EVENTS = 200
"""Events and incidents that are shown, the last ones."""
HELD = 8
"""Histories that are kept in memory."""
MAX_FILE_BYTES = 256 * 2**20
"""Bytes of a file above which it is not read."""
TEXT = 2**16
"""Bytes of a text that are shown."""
DEEPEST = 3
"""Levels below a watched folder at which runs are looked for."""
MAX_RUNS = 200
COMPONENTS = 64
"""Parameters of a process of one's own whose course is drawn."""
MAX_NUMBERS = 2**20
"""Numbers of one record of the parameters, and records of a file, that are shown.

A small file can declare any.
"""
DEVICES = 32
"""Instruments of a run that are shown."""
KINDS = {"config.toml": "lattice", "plan.json": "instrument", "run.json": "process"}
TREE = ("row", "iteration", "bonds", "positions", "lead_sites")
"""Data sets of `parameters.h5` that are no parameters."""

Columns = dict[str, np.ndarray]


class UnreadableRun(ValueError):
    """A file of a run that cannot be shown, and why."""


class Watched(NamedTuple):
    """A run folder. name: its path below the folder that is watched. number: what requests call
    it.
    """

    number: str
    name: str
    path: Path
    root: Path

    def file(self, name: str) -> Path | None:
        """A file of the run, if it is there, is plain, lies in the watched folder and is
        not too large.
        """
        path = self.path / name
        try:
            real = path.resolve(strict=True)
            if (
                not real.is_file()
                or not real.is_relative_to(self.root)
                or real.stat().st_size > MAX_FILE_BYTES
            ):
                return None
        except OSError:
            return None
        return real


class Cached(NamedTuple):
    """Columns of a history, and which state of the file they are of."""

    stamp: tuple[int, ...]
    columns: Columns


class RunLibrary:
    """The runs below some folders, and what was read of them last."""

    def __init__(self, roots: list[Path]):
        for root in roots:
            if not root.is_dir():
                raise ValueError(f"there is no folder {root}.")
        self.roots = [root.resolve() for root in roots]
        self.runs: dict[str, Watched] = {}
        self._held: OrderedDict[str, Cached] = OrderedDict()
        self._lock = threading.Lock()

    def find(self) -> dict[str, Watched]:
        """Look for run folders; at most `MAX_RUNS`, the last changed ones."""
        runs = {run.number: run for root in self.roots for run in _below(root, len(self.roots) > 1)}
        newest = sorted(runs.values(), key=lambda run: -_changed(run))[:MAX_RUNS]
        self.runs = {run.number: run for run in sorted(newest, key=lambda run: run.name)}
        return self.runs

    def overview(self) -> list[dict[str, Any]]:
        """One line a run, from the end of its history."""
        held = _held_locks()
        return [_headline(run, held) for run in self.find().values()]

    def run(self, number: str) -> Watched:
        """The run of a request."""
        try:
            return self.runs[number]
        except KeyError:
            raise UnreadableRun(
                "there is no such run; its folder may have been moved or removed."
            ) from None

    def history(self, number: str, low: float = -np.inf, high: float = np.inf) -> dict[str, Any]:
        """J and the rest over the iterations between two, thinned, with events and the
        signal of each family.
        """
        run = self.run(number)
        columns = self._columns(run)
        shown = history.find_kept(columns["iteration"])
        iteration = columns["iteration"][shown]
        shown = shown[(iteration >= low) & (iteration <= high)]
        picked = shown[thinned(columns["J"][shown], POINTS)] if shown.size else shown
        names = [name for name in columns if name != "event"]
        return {
            "columns": {name: _numbers(columns[name][picked]) for name in names},
            "rows": int(columns["row"].size),
            "iterations": int(shown.size),
            "events": _events(columns),
        }

    def parameters(self, number: str) -> dict[str, Any]:
        """What `parameters.h5` holds: its records, the arrays of θ, and the network if
        there is one.
        """
        with _opened(self.run(number)) as file:
            iteration = _dataset(file, "iteration")[:]
            kept = history.find_kept(iteration)
            arrays = {name: list(_dataset(file, name).shape[1:]) for name in _families(file)}
            network = (
                {name: _dataset(file, name)[:].tolist() for name in TREE[2:]}
                if "bonds" in file
                else None
            )
            return {
                "records": kept.tolist(),
                "iterations": iteration[kept].tolist(),
                "arrays": arrays,
                "network": network,
                "courses": None if network else _courses(file, kept, arrays),
                "ranges": {name: _range(_dataset(file, name)) for name in arrays},
            }

    def theta(self, number: str, record: int) -> dict[str, Any]:
        """θ of one record, its arrays flat."""
        with _opened(self.run(number)) as file:
            records = len(_dataset(file, "iteration"))
            if not 0 <= record < records:
                raise UnreadableRun(f"there are {records} records; {record} is none of them.")
            return {
                name: _numbers(np.ravel(_dataset(file, name)[record])) for name in _families(file)
            }

    def devices(self, number: str) -> dict[str, Any]:
        """How each instrument was over the iterations: health, guard, drift of the
        calibration (`insitu.device_training.device_table`).
        """
        run = self.run(number)
        path = run.file("devices.csv")
        if path is None:
            return {"iterations": [], "devices": []}
        try:
            names, values = history.read_numbers(path)
        except (ValueError, OSError) as error:
            raise UnreadableRun(
                f"devices.csv cannot be read ({error}).".replace(f"{path.parent}/", "")
            ) from None
        columns = self._columns(run)
        place = {int(row): k for k, row in enumerate(values[:, 0])}
        at = np.array(
            [
                place.get(int(row), -1)
                for row in columns["row"][history.find_kept(columns["iteration"])]
            ],
            int,
        )
        at = at[at >= 0]
        at = (
            at[np.unique(np.linspace(0, len(at) - 1, min(len(at), POINTS // 4)).astype(int))]
            if at.size
            else at
        )
        iteration = dict(zip(columns["row"].tolist(), columns["iteration"].tolist(), strict=True))
        each: dict[str, dict[str, Any]] = {}
        for k, name in enumerate(names):
            device, space, column = name.partition(" ")
            if k and space and (device in each or len(each) < DEVICES):
                each.setdefault(device, {})[column] = _numbers(values[at, k])
        iterations = [iteration[int(row)] for row in values[at, 0]]
        return {
            "iterations": iterations,
            "devices": [{"name": n, "columns": c} for n, c in each.items()],
        }

    def details(self, number: str) -> dict[str, Any]:
        """Texts and tables beside the history: what was asked for, what came out,
        incidents, calibration.
        """
        run = self.run(number)
        several = (f"calibration-{k + 1}.txt" for k in range(DEVICES))
        texts = {
            name: _text(run.file(name))
            for name in (*SETTINGS, "summary.txt", "devices.txt", "calibration.txt", *several)
        }
        return {
            "texts": {k: v for k, v in texts.items() if v},
            "incidents": _incidents(run.file("incidents.csv")),
        }

    def table(self, number: str) -> Iterator[str]:
        """The history as text, written from its numbers."""
        path = self.run(number).file("history.csv")
        if path is None:
            raise UnreadableRun("the run has no history.csv.")
        yield history.PLAIN
        for row in history.read(path):
            yield history.format_row(row, "").rstrip(",\n") + "\n"

    def _columns(self, run: Watched) -> Columns:
        path = run.file("history.csv")
        if path is None:
            raise UnreadableRun("the run has no history.csv, or one too large to show.")
        beside = run.file("signal.csv")
        stamp = (*_stamp(path), *(_stamp(beside) if beside else ()))
        with self._lock:
            cached = self._held.get(run.number)
            if cached is None or cached.stamp != stamp:
                cached = Cached(stamp, _read_columns(path, beside))
                self._held[run.number] = cached
            self._held.move_to_end(run.number)
            while len(self._held) > HELD:
                self._held.popitem(last=False)
        return cached.columns


def thinned(values: np.ndarray, most: int) -> np.ndarray:
    """Places of at most `most` values: of each stretch the lowest and the highest, and both ends.

    Peaks stay.
    """
    if len(values) <= most:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), most // 2, dtype=int)
    finite = np.where(np.isfinite(values), values, 0.0)
    places = {0, len(values) - 1}
    for low, high in pairwise(edges):
        places |= {low + int(np.argmin(finite[low:high])), low + int(np.argmax(finite[low:high]))}
    return np.array(sorted(places))


# ------------------------------------------------------------------------------------------ folders


def _below(root: Path, several: bool) -> Iterator[Watched]:
    """Run folders in a folder, itself included, that do not lie outside it."""
    waiting = [(root, 0)]
    while waiting:
        folder, depth = waiting.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        if any(entry.name == "history.csv" for entry in entries):
            inside = folder.relative_to(root).as_posix()
            name = root.name if inside == "." else f"{root.name}/{inside}" if several else inside
            yield Watched(hashlib.sha256(os.fsencode(folder)).hexdigest()[:16], name, folder, root)
        elif depth < DEEPEST:
            folders = [
                e for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")
            ]
            waiting += [(Path(entry.path), depth + 1) for entry in folders]


def _changed(run: Watched) -> float:
    path = run.file("history.csv")
    return path.stat().st_mtime if path else 0.0


def _stamp(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _headline(run: Watched, held: set[tuple[int, int, int]] | None) -> dict[str, Any]:
    kinds = [kind for name, kind in KINDS.items() if run.file(name)]
    line: dict[str, Any] = {
        "number": run.number,
        "name": run.name,
        "kind": (kinds or ["process"])[0],
    }
    path = run.file("history.csv")
    if path is None:
        return line | {"state": "unreadable", "version": ""}
    beside = ("parameters.h5", "signal.csv", "incidents.csv", "devices.csv", "summary.txt")
    others = [run.file(name) for name in beside]
    stamps = [_stamp(file) for file in (path, *others) if file]
    row = _last_row(path)
    line |= {
        "state": _state(run, path, row, held),
        "version": hashlib.sha256(repr(stamps).encode()).hexdigest()[:16],
    }
    if row is not None:
        line |= {"iteration": row.iteration, "J": _plain(row.J), "J_stderr": _plain(row.J_stderr)}
        line |= {"trajectories": row.trajectories}
    return line


def _state(
    run: Watched, path: Path, row: Row | None, held: set[tuple[int, int, int]] | None
) -> str:
    """Running, ended or killed.

    A run that ends, or is stopped with Ctrl-C, leaves final.npz after its last row, and a summary
    that counts its rows; the second is true of copies too.
    """
    final = run.file("final.npz")
    lock = run.file(LOCK)
    if held is not None and lock is not None:
        status = lock.stat()
        if (os.major(status.st_dev), os.minor(status.st_dev), status.st_ino) in held:
            return "running"
    if final is not None and final.stat().st_mtime >= path.stat().st_mtime:
        return "ended"
    try:
        summary = json.loads(_text(run.file("summary.json")) or "{}")
        counted = summary.get("rows") if isinstance(summary, dict) else None
    except (ValueError, RecursionError):
        counted = None
    if row is not None and counted == row.row + 1:
        return "ended"
    return "killed" if held is not None else "unfinished"


def _held_locks() -> set[tuple[int, int, int]] | None:
    """(major, minor, inode) of every file that some process of this machine holds a lock on; None
    if unknown.

    Trying a lock would tell as well, and could meet a training at the moment it begins.
    """
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    places = set()
    for line in lines:
        for word in line.split():
            parts = word.split(":")
            if len(parts) == 3 and all(parts):
                places.add((int(parts[0], 16), int(parts[1], 16), int(parts[2])))
    return places


def _last_row(path: Path) -> Row | None:
    """The last complete row of a history, from its end alone."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 4096))
        tail = file.read().decode("utf-8", "replace")
    lines = tail[: tail.rfind("\n") + 1].splitlines()
    if len(lines) < 2:
        return None
    cells = next(csv.reader([lines[-1]]))
    try:
        return history.parse_row(cells)
    except ValueError:
        return None


# -------------------------------------------------------------------------------------------- files


def _read_columns(path: Path, beside: Path | None) -> Columns:
    try:
        rows = history.read(path)
    except (ValueError, OSError) as error:
        raise UnreadableRun(str(error).replace(f"{path.parent}/", "")) from None
    kinds = {
        name: object if name == "event" else np.int64 if name in ("row", "iteration") else float
        for name in Row._fields
    }
    try:
        columns: Columns = {
            name: np.array([row[k] for row in rows], kinds[name])
            for k, name in enumerate(Row._fields)
        }
    except OverflowError as error:
        raise UnreadableRun(f"{path.name} has a number that is too large ({error}).") from None
    if beside is not None:
        try:
            names, values = history.read_numbers(beside)
        except (ValueError, OSError):
            return columns
        place = {int(row): k for k, row in enumerate(values[:, 0])}
        at = np.array([place.get(int(row), -1) for row in columns["row"]], int)
        padded = np.vstack([values, np.full((1, values.shape[1]), np.nan)])
        columns |= {name: padded[at, k] for k, name in enumerate(names) if k}
    return columns


def _events(columns: Columns) -> list[dict[str, Any]]:
    """What happened besides, in the order of the rows; the last ones."""
    places = [k for k, event in enumerate(columns["event"]) if event][-EVENTS:]
    return [
        {"iteration": int(columns["iteration"][k]), "event": str(columns["event"][k])[:200]}
        for k in places
    ]


def _opened(run: Watched) -> h5py.File:
    path = run.file("parameters.h5")
    if path is None:
        raise UnreadableRun("the run has no parameters.h5, or one too large to show.")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise UnreadableRun(f"parameters.h5 cannot be read ({error}).") from None


def _dataset(file: h5py.File, name: str) -> h5py.Dataset:
    """A data set that is in this file and nowhere else."""
    if not isinstance(file.get(name, getlink=True), h5py.HardLink):
        raise UnreadableRun(f"parameters.h5 has no data set {name!r} of its own.")
    dataset = file[name]
    if (
        not isinstance(dataset, h5py.Dataset)
        or dataset.external
        or dataset.is_virtual
        or dataset.dtype.kind not in "fiu"
        or not dataset.shape
    ):
        raise UnreadableRun(f"{name!r} in parameters.h5 is no plain array of numbers.")
    if (
        max(len(dataset), dataset.size // max(len(dataset), 1)) > MAX_NUMBERS
        or _chunk_bytes(dataset) > MAX_FILE_BYTES
    ):
        raise UnreadableRun(
            f"{name!r} in parameters.h5 is declared as {dataset.shape}, in chunks of "
            f"{dataset.chunks}: too large to show."
        )
    return dataset


def _chunk_bytes(dataset: h5py.Dataset) -> int:
    """What HDF5 unpacks to read a single number."""
    return 0 if dataset.chunks is None else math.prod(dataset.chunks) * dataset.dtype.itemsize


def _families(file: h5py.File) -> list[str]:
    """The arrays of θ, those within groups too."""
    names: list[str] = []
    for name in file:
        if name in TREE:
            continue
        if isinstance(file.get(name, getlink=True), h5py.HardLink) and isinstance(
            file[name], h5py.Group
        ):
            names += [f"{name}/{inner}" for inner in file[name]]
        else:
            names.append(name)
    sizes = (_dataset(file, name).shape[1:] for name in names)
    if sum(map(math.prod, sizes)) > MAX_NUMBERS:
        raise UnreadableRun(
            f"parameters.h5 has more than {MAX_NUMBERS:,} parameters: too many to show."
        )
    return names


def _courses(file: h5py.File, kept: np.ndarray, arrays: Mapping[str, list[int]]) -> dict[str, Any]:
    """Every parameter over the records, of those that are few."""
    picked = (
        kept[np.unique(np.linspace(0, len(kept) - 1, min(len(kept), POINTS // 4)).astype(int))]
        if kept.size
        else kept
    )
    courses: dict[str, Any] = {"iterations": _dataset(file, "iteration")[:][picked].tolist()}
    for name, shape in arrays.items():
        size = int(np.prod(shape)) if shape else 1
        if len(courses) - 1 + size > COMPONENTS:
            continue
        values = _dataset(file, name)[picked].reshape(len(picked), size)
        labels = (
            [name]
            if not shape
            else [f"{name}{list(map(int, np.unravel_index(k, shape)))}" for k in range(size)]
        )
        courses |= {label: _numbers(values[:, k]) for k, label in enumerate(labels)}
    return courses


def _range(dataset: h5py.Dataset) -> list[float | None]:
    """Least and greatest of the first, middle and last record: scales that a slider does not
    change.
    """
    if not dataset.shape[0] or not dataset.size:
        return [None, None]
    ends = np.concatenate(
        [np.ravel(dataset[0]), np.ravel(dataset[-1]), np.ravel(dataset[dataset.shape[0] // 2])]
    )
    return [_plain(float(np.nanmin(ends))), _plain(float(np.nanmax(ends)))]


def _text(path: Path | None) -> str:
    if path is None:
        return ""
    with open(path, "rb") as file:
        return file.read(TEXT).decode("utf-8", "replace")


def _incidents(path: Path | None) -> list[dict[str, str]]:
    """The last incidents of an instrument."""
    if path is None:
        return []
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        rows = list(csv.DictReader(file))[-EVENTS:]
    return [{str(k): str(v)[:500] for k, v in row.items() if k is not None} for row in rows]


def _plain(value: float) -> float | None:
    """A number as JSON has it: none for what is not finite."""
    return float(value) if np.isfinite(value) else None


def _numbers(values: np.ndarray) -> list[float | int | None]:
    if values.dtype.kind in "iu":
        return values.tolist()
    return [v if np.isfinite(v) else None for v in np.asarray(values, float).tolist()]


def encoded(tree: Any) -> bytes:
    """As JSON."""
    return json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()
