"""Read run folders for the page; they are never written and never locked.

No text of a request reaches the file system: a run has a number, assigned when its folder was found
below one of the watched folders. Links that lead out of these (symbolic, or within HDF5) are not
followed.

Memory is bounded: at most `POINTS` rows of a history are sent, and the histories of the last `HELD`
runs that were requested are kept.
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

from fluctua.store import history, tables
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
MAX_DEPTH = 3
"""Levels below a watched folder at which runs are searched."""
MAX_RUNS = 200
COMPONENTS = 64
"""Parameters of a user's own process whose course is drawn."""
MIN_PROFILE = 9
"""Numbers of an array from which on it is drawn as a profile, not each over the iterations."""
CHANNELS = 32
"""Components of a record that are shown."""
MAX_NUMBERS = 2**20
"""Numbers per record of the parameters, and records per file, that are shown at most."""
DEVICES = 32
"""Instruments of a run that are shown."""
KINDS = {"config.toml": "lattice", "plan.json": "instrument", "run.json": "process"}
BESIDE = ("signal.csv", "predictions.csv")
"""Tables with a row per row of the history."""
TREE = ("row", "iteration", "bonds", "positions", "lead_sites")
"""Data sets of `parameters.h5` that are not parameters."""

Columns = dict[str, np.ndarray]


class UnreadableRun(ValueError):
    """A file of a run that cannot be shown, and why."""


class Watched(NamedTuple):
    """A run folder.

    number: by which requests name it.
    name: its path below the watched folder.
    path: of the folder.
    root: the watched folder.
    """

    number: str
    name: str
    path: Path
    root: Path

    def file(self, name: str) -> Path | None:
        """A file of the run, if it exists, lies in the watched folder and is not too large."""
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
    """The runs below some folders, with what was read last of each."""

    def __init__(self, roots: list[Path]):
        for root in roots:
            if not root.is_dir():
                raise ValueError(f"there is no folder {root}.")
        self.roots = [root.resolve() for root in roots]
        self.runs: dict[str, Watched] = {}
        self._held: OrderedDict[str, Cached] = OrderedDict()
        self._lock = threading.Lock()

    def find(self) -> dict[str, Watched]:
        """Find run folders; at most `MAX_RUNS`, the last changed ones."""
        runs = {
            run.number: run for root in self.roots for run in _find_runs(root, len(self.roots) > 1)
        }
        newest = sorted(runs.values(), key=lambda run: -_read_change_time(run))[:MAX_RUNS]
        self.runs = {run.number: run for run in sorted(newest, key=lambda run: run.name)}
        return self.runs

    def overview(self) -> list[dict[str, Any]]:
        """One entry per run, from the end of its history."""
        held = _list_held_locks()
        return [_summarise_run(run, held) for run in self.find().values()]

    def run(self, number: str) -> Watched:
        """The run of a request."""
        try:
            return self.runs[number]
        except KeyError:
            raise UnreadableRun(
                "there is no such run; its folder may have been moved or removed."
            ) from None

    def history(self, number: str, low: float = -np.inf, high: float = np.inf) -> dict[str, Any]:
        """J and other columns over a range of iterations, thinned, with events."""
        run = self.run(number)
        columns = self._columns(run)
        shown = history.find_kept(columns["iteration"])
        iteration = columns["iteration"][shown]
        shown = shown[(iteration >= low) & (iteration <= high)]
        picked = shown[thin(columns["J"][shown], POINTS)] if shown.size else shown
        names = [name for name in columns if name != "event"]
        return {
            "columns": {name: _to_json_numbers(columns[name][picked]) for name in names},
            "rows": int(columns["row"].size),
            "iterations": int(shown.size),
            "events": _list_events(columns),
        }

    def parameters(self, number: str) -> dict[str, Any]:
        """Records of `parameters.h5`, the arrays of θ, and the network if there is one."""
        with _open_parameters(self.run(number)) as file:
            iteration = _get_dataset(file, "iteration")[:]
            kept = history.find_kept(iteration)
            arrays = {
                name: list(_get_dataset(file, name).shape[1:]) for name in _list_families(file)
            }
            few = {name: v for name, v in arrays.items() if math.prod(v) < MIN_PROFILE}
            network = (
                {name: _get_dataset(file, name)[:].tolist() for name in TREE[2:]}
                if "bonds" in file
                else None
            )
            return {
                "records": kept.tolist(),
                "iterations": iteration[kept].tolist(),
                "arrays": arrays,
                "network": network,
                "courses": None if network else _read_courses(file, kept, few),
                "profiles": {
                    name: _read_profile(file, name)
                    for name in arrays
                    if not network and name not in few
                },
                "ranges": {name: _find_range(_get_dataset(file, name)) for name in arrays},
            }

    def theta(self, number: str, record: int) -> dict[str, Any]:
        """θ of one record, its arrays flat."""
        with _open_parameters(self.run(number)) as file:
            records = len(_get_dataset(file, "iteration"))
            if not 0 <= record < records:
                raise UnreadableRun(f"record {record} does not exist; there are {records}.")
            return {
                name: _to_json_numbers(np.ravel(_get_dataset(file, name)[record]))
                for name in _list_families(file)
            }

    def devices(self, number: str) -> dict[str, Any]:
        """Health, guard and calibration drift of each instrument over the iterations.

        See `insitu.device_training.device_table`.
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
                each.setdefault(device, {})[column] = _to_json_numbers(values[at, k])
        iterations = [iteration[int(row)] for row in values[at, 0]]
        return {
            "iterations": iterations,
            "devices": [{"name": n, "columns": c} for n, c in each.items()],
        }

    def record(self, number: str) -> dict[str, Any]:
        """The last record of a calibrated model: expected, its standard deviation, measured.

        See `store.expectations`.
        """
        path = self.run(number).file("records.csv")
        if path is None:
            return {"iteration": None, "times": [], "components": []}
        try:
            table = tables.read(path)
            times = table.columns.pop("time")
            iteration = int(table.header["iteration"])
        except (ValueError, KeyError, TypeError) as error:
            raise UnreadableRun(
                f"records.csv cannot be read ({error}).".replace(f"{path.parent}/", "")
            ) from None
        shown = slice(None, None, max(1, len(times) // POINTS))
        each: dict[str, dict[str, Any]] = {}
        for name, column in table.columns.items():
            component, _, kind = name.rpartition(" ")
            if component in each or len(each) < CHANNELS:
                each.setdefault(component, {})[kind] = _to_json_numbers(column[shown])
        return {
            "iteration": iteration,
            "times": _to_json_numbers(times[shown]),
            "components": [{"name": n, **c} for n, c in each.items()],
        }

    def details(self, number: str) -> dict[str, Any]:
        """Texts and tables beside the history: settings, summary, incidents, calibration."""
        run = self.run(number)
        several = (f"calibration-{k + 1}.txt" for k in range(DEVICES))
        texts = {
            name: _read_text(run.file(name))
            for name in (*SETTINGS, "summary.txt", "devices.txt", "calibration.txt", *several)
        }
        return {
            "texts": {k: v for k, v in texts.items() if v},
            "incidents": _read_incidents(run.file("incidents.csv")),
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
        beside = [file for file in map(run.file, BESIDE) if file]
        stamp = tuple(number for file in (path, *beside) for number in _read_stamp(file))
        with self._lock:
            cached = self._held.get(run.number)
            if cached is None or cached.stamp != stamp:
                cached = Cached(stamp, _read_columns(path, beside))
                self._held[run.number] = cached
            self._held.move_to_end(run.number)
            while len(self._held) > HELD:
                self._held.popitem(last=False)
        return cached.columns


def thin(values: np.ndarray, maximum: int) -> np.ndarray:
    """Places of at most `maximum` values: lowest and highest of each stretch, and both ends.

    Peaks stay.
    """
    if len(values) <= maximum:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), maximum // 2, dtype=int)
    finite = np.where(np.isfinite(values), values, 0.0)
    places = {0, len(values) - 1}
    for low, high in pairwise(edges):
        places |= {low + int(np.argmin(finite[low:high])), low + int(np.argmax(finite[low:high]))}
    return np.array(sorted(places))


# ------------------------------------------------------------------------------------------ folders


def _find_runs(root: Path, several: bool) -> Iterator[Watched]:
    """Find run folders in a folder, itself included, that do not lie outside it."""
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
        elif depth < MAX_DEPTH:
            folders = [
                e for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")
            ]
            waiting += [(Path(entry.path), depth + 1) for entry in folders]


def _read_change_time(run: Watched) -> float:
    path = run.file("history.csv")
    return path.stat().st_mtime if path else 0.0


def _read_stamp(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _summarise_run(run: Watched, held: set[tuple[int, int, int]] | None) -> dict[str, Any]:
    kinds = [kind for name, kind in KINDS.items() if run.file(name)]
    line: dict[str, Any] = {
        "number": run.number,
        "name": run.name,
        "kind": (kinds or ["process"])[0],
    }
    path = run.file("history.csv")
    if path is None:
        return line | {"state": "unreadable", "version": ""}
    beside = ("parameters.h5", "records.csv", "incidents.csv", "devices.csv", "summary.txt")
    others = [run.file(name) for name in (*BESIDE, *beside)]
    stamps = [_read_stamp(file) for file in (path, *others) if file]
    row = _read_last_row(path)
    line |= {
        "state": _find_state(run, path, row, held),
        "version": hashlib.sha256(repr(stamps).encode()).hexdigest()[:16],
    }
    if row is not None:
        line |= {
            "iteration": row.iteration,
            "J": _to_json_number(row.J),
            "J_stderr": _to_json_number(row.J_stderr),
        }
        line |= {"trajectories": row.trajectories}
    return line


def _find_state(
    run: Watched, path: Path, row: Row | None, held: set[tuple[int, int, int]] | None
) -> str:
    """Find whether a run is running, ended or killed.

    A run that ends, or is stopped with Ctrl-C, leaves final.npz after its last row, and a summary
    with the number of its rows; the second holds for copies too.
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
        summary = json.loads(_read_text(run.file("summary.json")) or "{}")
        counted = summary.get("rows") if isinstance(summary, dict) else None
    except (ValueError, RecursionError):
        counted = None
    if row is not None and counted == row.row + 1:
        return "ended"
    return "killed" if held is not None else "unfinished"


def _list_held_locks() -> set[tuple[int, int, int]] | None:
    """List (major, minor, inode) of every locked file on this machine; None if unknown.

    Trying a lock would do as well, and could disturb a training at the moment it begins.
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


def _read_last_row(path: Path) -> Row | None:
    """Read the last complete row of a history, from its end alone."""
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


def _read_columns(path: Path, beside: list[Path]) -> Columns:
    """Read the columns of a history, and of the tables beside it at the same rows."""
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
    for table in beside:
        try:
            names, values = history.read_numbers(table)
        except (ValueError, OSError):
            continue
        place = {int(row): k for k, row in enumerate(values[:, 0])}
        at = np.array([place.get(int(row), -1) for row in columns["row"]], int)
        padded = np.vstack([values, np.full((1, values.shape[1]), np.nan)])
        columns |= {name: padded[at, k] for k, name in enumerate(names) if k}
    return columns


def _list_events(columns: Columns) -> list[dict[str, Any]]:
    """List the last events, in the order of the rows."""
    places = [k for k, event in enumerate(columns["event"]) if event][-EVENTS:]
    return [
        {"iteration": int(columns["iteration"][k]), "event": str(columns["event"][k])[:500]}
        for k in places
    ]


def _open_parameters(run: Watched) -> h5py.File:
    path = run.file("parameters.h5")
    if path is None:
        raise UnreadableRun("the run has no parameters.h5, or one too large to show.")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise UnreadableRun(f"parameters.h5 cannot be read ({error}).") from None


def _get_dataset(file: h5py.File, name: str) -> h5py.Dataset:
    """Get a data set that is in this file and not behind a link."""
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
        raise UnreadableRun(f"{name!r} in parameters.h5 is not a plain array of numbers.")
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
    """Bytes that HDF5 unpacks to read a single number."""
    return 0 if dataset.chunks is None else math.prod(dataset.chunks) * dataset.dtype.itemsize


def _list_families(file: h5py.File) -> list[str]:
    """List the arrays of θ, including those within groups."""
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
    sizes = (_get_dataset(file, name).shape[1:] for name in names)
    if sum(map(math.prod, sizes)) > MAX_NUMBERS:
        raise UnreadableRun(
            f"parameters.h5 has more than {MAX_NUMBERS:,} parameters: too many to show."
        )
    return names


def _read_courses(
    file: h5py.File, kept: np.ndarray, arrays: Mapping[str, list[int]]
) -> dict[str, Any]:
    """Read every parameter over the records, where there are few."""
    picked = (
        kept[np.unique(np.linspace(0, len(kept) - 1, min(len(kept), POINTS // 4)).astype(int))]
        if kept.size
        else kept
    )
    courses: dict[str, Any] = {"iterations": _get_dataset(file, "iteration")[:][picked].tolist()}
    for name, shape in arrays.items():
        size = int(np.prod(shape)) if shape else 1
        if len(courses) - 1 + size > COMPONENTS:
            continue
        values = _get_dataset(file, name)[picked].reshape(len(picked), size)
        labels = (
            [name]
            if not shape
            else [f"{name}{list(map(int, np.unravel_index(k, shape)))}" for k in range(size)]
        )
        courses |= {label: _to_json_numbers(values[:, k]) for k, label in enumerate(labels)}
    return courses


def _read_profile(file: h5py.File, name: str) -> dict[str, Any]:
    """Read what is known of the knots of an array: bounds, one or of each, and times."""
    attributes = _get_dataset(file, name).attrs
    values = {key: _read_attribute(attributes, key) for key in ("low", "high", "times")}
    return {
        key: None if value is None else _to_json_numbers(np.ravel(value))
        for key, value in values.items()
    }


def _read_attribute(attributes: h5py.AttributeManager, key: str) -> np.ndarray | None:
    """Read an attribute of numbers; None where it is missing or of another kind."""
    try:
        known = attributes.get_id(key)
        if known.dtype.kind not in "fiu" or math.prod(known.shape) > MAX_NUMBERS:
            return None
        return np.asarray(attributes[key])
    except (KeyError, TypeError, OSError):
        return None


def _find_range(dataset: h5py.Dataset) -> list[float | None]:
    """Find the range of the first, middle and last record: scales that do not change."""
    if not dataset.shape[0] or not dataset.size:
        return [None, None]
    ends = np.concatenate(
        [np.ravel(dataset[0]), np.ravel(dataset[-1]), np.ravel(dataset[dataset.shape[0] // 2])]
    )
    return [_to_json_number(float(np.nanmin(ends))), _to_json_number(float(np.nanmax(ends)))]


def _read_text(path: Path | None) -> str:
    if path is None:
        return ""
    with open(path, "rb") as file:
        return file.read(TEXT).decode("utf-8", "replace")


def _read_incidents(path: Path | None) -> list[dict[str, str]]:
    """Read the last incidents of an instrument."""
    if path is None:
        return []
    with open(path, newline="", encoding="utf-8", errors="replace") as file:
        rows = list(csv.DictReader(file))[-EVENTS:]
    return [{str(k): str(v)[:500] for k, v in row.items() if k is not None} for row in rows]


def _to_json_number(value: float) -> float | None:
    """A number for JSON: None for what is not finite."""
    return float(value) if np.isfinite(value) else None


def _to_json_numbers(values: np.ndarray) -> list[float | int | None]:
    if values.dtype.kind in "iu":
        return values.tolist()
    return [v if np.isfinite(v) else None for v in np.asarray(values, float).tolist()]


def encode(tree: Any) -> bytes:
    """Encode a tree as JSON."""
    return json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()
