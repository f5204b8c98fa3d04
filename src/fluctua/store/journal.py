"""The journal of a run: rows at once, parameters and state at checkpoints.

A row depends on the settings and on the rows before it. Continuing from any checkpoint therefore
repeats what a kill cut off, to the bit, where the estimator is deterministic; on resuming, history
and parameters are cut back to the checkpoint. A kill loses only time.

Every file carries the fingerprint of its run, so that a file of another run is refused.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

import h5py
import jax
import numpy as np

from fluctua.core.arrays import Params
from fluctua.core.estimate import Estimate
from fluctua.learn.predictions import MeasurementComparison
from fluctua.learn.training import Record
from fluctua.store import checkpoint, course, expectations, folder, history, summary
from fluctua.store.files import describe_kind
from fluctua.store.history import Row

Names = Callable[[Params], Mapping[str, np.ndarray]]
RUN = "run"
"""Entry of a checkpoint with the fingerprint of its run."""


def name_leaves(theta: Params) -> dict[str, np.ndarray]:
    """The arrays of any pytree by name.

    {"a": [x, y]} has "a.0" and "a.1"; a bare array is "theta".
    """
    leaves = jax.tree_util.tree_leaves_with_path(theta)
    return {
        jax.tree_util.keystr(path, simple=True, separator=".") or "theta": np.asarray(v)
        for path, v in leaves
    }


class JournalOptions(NamedTuple):
    """Files that are written, and how often.

    Args:
        checkpoints: how many are kept; at least two, in case the newest is damaged.
        seconds: between two checkpoints; 0 is every row.
        every: iterations between two records of the parameters; 0 is none.
        group: group of `parameters.h5` with the arrays of θ.
        describe: writes the description of the system into `parameters.h5`.
        names: θ -> its arrays by name.
    """

    checkpoints: int = 3
    seconds: float = 20.0
    every: int = 10
    group: str = ""
    describe: Callable[[h5py.File], None] | None = None
    names: Names = name_leaves

    def group_arrays(self, theta: Params) -> dict[str, np.ndarray]:
        """The arrays of θ by their names in `parameters.h5`."""
        return {self.group + name: array for name, array in self.names(theta).items()}


class RunFiles(NamedTuple):
    """Common data of the files of a run.

    Args:
        place: the folder.
        settings: the content of its settings file.
        run: the fingerprint; a file of another run is refused.
        start: the state before the first row.
        options: what is written, and how often.
        need: bytes that the run will take.
        advice: how a run takes less space.
    """

    place: folder.RunFolder
    settings: bytes
    run: str
    start: checkpoint.RunState
    options: JournalOptions
    need: int = 0
    advice: str = ""


class Journal:
    """The open folder of a run. Made by `create` and `reopen`.

    Args:
        files: the folder, prepared, and what is written into it.
        lock: of the folder, held until `close`.

    """

    def __init__(self, files: RunFiles, lock: IO[str]):
        place = files.place
        self.place = place
        self.lock = lock
        self.run = files.run
        self.options = files.options
        self.names = files.options.names
        self.file = open(place.history, "a", encoding="utf-8")  # noqa: SIM115
        self.signal = open(place.signal, "a", encoding="utf-8")  # noqa: SIM115
        self.expectations = expectations.ExpectationFiles(place)
        self.points: list[course.Point] = []
        self.last: course.Point | None = None
        self.saved = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return time.monotonic() - self.saved >= self.options.seconds

    def add(
        self,
        row: Row,
        theta: Params,
        estimate: Estimate,
        comparison: MeasurementComparison | None = None,
    ) -> None:
        """Append a row to history and signal, and record the parameters if they are due.

        comparison: what a calibrated model expected of this row.
        """
        summary.remove(self.place)
        history.append(self.file, row, self.run)
        history.append_signal(
            self.signal, row.row, self.names(estimate.gradient), self.names(estimate.stderr)
        )
        if comparison is not None:
            self.expectations.add(row, comparison)
        if self.options.every:
            self.last = course.Point(row.row, row.iteration, self.options.group_arrays(theta))
            if row.iteration % self.options.every == 0:
                self.points.append(self.last)

    def save(self, state: checkpoint.RunState) -> None:
        """Write a checkpoint: first the history, then the parameters, then the state."""
        self.file.flush()
        os.fsync(self.file.fileno())
        course.append(self.place.parameters, self.points)
        self.points = []
        self.expectations.save()
        arrays = checkpoint.to_arrays(state) | {RUN: np.array(self.run)}
        checkpoint.write(self.place.checkpoints, state.row, arrays, self.options.checkpoints)
        self.saved = time.monotonic()

    def close(self, state: checkpoint.RunState | None) -> None:
        """Write the last checkpoint, the last parameters and `final.npz`, and release the lock.

        The last parameters are written even off the grid.

        state: None where a run ended before it had one.
        """
        try:
            if state is None:
                return
            self.points = [p for p in self.points if p.row < state.row]
            if (
                self.last is not None
                and self.last.row < state.row
                and self.last.iteration % self.options.every
            ):
                self.points.append(self.last)
            self.save(state)
            memory = io.BytesIO()
            np.savez(memory, **self.names(state.now.theta))  # type: ignore[arg-type]
            checkpoint.replace(self.place.final, memory.getvalue())
        finally:
            with suppress(OSError):  # what could not be written has raised above
                self.file.close()
            with suppress(OSError):
                self.signal.close()
            with suppress(OSError):
                self.expectations.close()
            self.lock.close()


def create(files: RunFiles, *, replace: bool = False) -> Journal:
    """Create the journal of a new run, in a folder of its own.

    A start that is not the beginning of a training is kept in start.npz.

    Args:
        files: of the run.
        replace: remove an earlier run there.
    """
    place = files.place
    start = files.start
    lock = folder.prepare(place, files.need, replace=replace, advice=files.advice)
    try:
        with folder.explain_failures(place):
            if start.now.iteration:
                arrays = checkpoint.to_arrays(start) | {RUN: np.array(files.run)}
                checkpoint.replace(place.start, checkpoint.pack(arrays))
            checkpoint.replace(place.settings, files.settings)
            _write_fresh_files(files, start.now.theta)
            return Journal(files, lock)
    except BaseException:
        lock.close()
        raise


def reopen(
    files: RunFiles,
    lock: IO[str],
    state: checkpoint.RunState,
    *,
    report: Callable[[str], None],
    over: bool = False,
) -> Journal:
    """Reopen the journal of a run; its files are cut back to its state.

    Args:
        files: of the run; its settings file is written anew.
        lock: of the folder.
        state: from `read_state`.
        report: called with a line of text about each damaged file.
        over: whether nothing is left to train.
    """
    place = files.place
    theta = state.now.theta
    with folder.explain_failures(place):
        for path in (place.signal, place.predictions, place.records, place.parameters):
            if kind := describe_kind(path):
                report(
                    f"{path.name} is {kind}. It is kept as {checkpoint.set_aside(path)}; a file "
                    "takes its place."
                )
        for name, owner in read_owners(place).items():
            refuse_other(place, name, owner, files.run)
        checkpoint.replace(place.settings, files.settings)
        if state.row == 0:
            _write_fresh_files(files, theta)
            return Journal(files, lock)
        history.truncate(place.history, state.row - 1, files.run)
        last = state.row - 1
        arrays = files.options.names(theta)
        _truncate_table(
            place.signal, report, lambda: history.truncate_signal(place.signal, arrays, last)
        )
        _truncate_table(place.predictions, report, lambda: expectations.truncate(place, last))
        if files.options.every:
            _truncate_parameters(files, state, 1 if over else files.options.every, report)
        return Journal(files, lock)


def _truncate_parameters(
    files: RunFiles, state: checkpoint.RunState, every: int, report: Callable[[str], None]
) -> None:
    """Cut parameters.h5 back to the last row; a damaged one is set aside."""
    path = files.place.parameters
    known = files.options.group_arrays(state.now.theta)
    try:
        course.truncate(path, list(known), state.row - 1, every)
    except checkpoint.Damaged as error:
        if path.exists():
            name = checkpoint.set_aside(path)
            report(
                f"parameters.h5 is damaged: {error}. It is kept as {name}; records go on in a new "
                "one."
            )
        course.create(path, known, files.run, files.options.describe)


def _truncate_table(
    path: Path, report: Callable[[str], None], truncate: Callable[[], None]
) -> None:
    """Cut a table back by `truncate`; a damaged one is set aside."""
    try:
        truncate()
    except ValueError as error:
        name = checkpoint.set_aside(path)
        report(f"{path.name} is damaged: {error} It is kept as {name}; rows go on in a new one.")
        truncate()


def read_state(files: RunFiles, report: Callable[[str], None]) -> checkpoint.RunState:
    """The state of a run: its newest good checkpoint, its branching point, or its start.

    Args:
        files: of the run; a checkpoint of another run is refused.
        report: called with a line of text about each damaged checkpoint.
    """
    place = files.place
    readable = checkpoint.read_newest(place.checkpoints, report)
    if readable is None and not place.start.exists():
        return files.start
    try:
        path, arrays = readable or (place.start, checkpoint.read(place.start))
    except checkpoint.Damaged as error:
        raise ValueError(
            f"{place.start} is damaged: {error}. Branch again from the run it came from."
        ) from None
    refuse_other(place, str(path.relative_to(place.path)), str(arrays.pop(RUN, "")), files.run)
    return checkpoint.from_arrays(arrays, files.start.now)


def read_owners(place: folder.RunFolder) -> dict[str, str]:
    """The fingerprints that history and parameters carry, by file; those without are left out."""
    marks = {}
    if place.history.is_file():
        for _, owner in history.read_with_owners(place.history):
            marks[place.history.name] = owner
    if place.parameters.is_file():
        with suppress(checkpoint.Damaged):
            marks[place.parameters.name] = course.read_owner(place.parameters)
    return {name: owner for name, owner in marks.items() if owner}


def refuse_other(place: folder.RunFolder, name: str, owner: str, run: str) -> None:
    """Raise if a file carries the fingerprint of another run; files without one are accepted."""
    if owner and owner != run:
        raise ValueError(
            f"{place.path / name} is of another run: its fingerprint is {owner}, and "
            f"{place.settings_name} is of {run}. Put the file back that belongs here, or go on "
            "with a copy of this folder that is whole."
        )


def make_row(number: int, record: Record, event: str = "") -> Row:
    """The row of the history for a record."""
    e = record.estimate
    norm = np.sqrt(
        sum(float(np.sum(np.square(np.asarray(g, float)))) for g in jax.tree.leaves(e.gradient))
    )
    return Row(
        number,
        record.iteration,
        float(e.value),
        float(e.value_stderr),
        e.count,
        record.trajectories,
        float(norm),
        record.seconds,
        event,
    )


def _write_fresh_files(files: RunFiles, theta: Params) -> None:
    """Write history, signal and parameters without rows."""
    place = files.place
    checkpoint.replace(place.history, history.HEADER.encode())
    expectations.remove(place)
    checkpoint.replace(place.signal, history.signal_header(files.options.names(theta)).encode())
    if files.options.every:
        arrays = files.options.group_arrays(theta)
        course.create(place.parameters, arrays, files.run, files.options.describe)
