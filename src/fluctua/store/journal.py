"""The journal of a run: rows at once, parameters and state together at checkpoints; lost to a kill
is time alone.

A row depends on what was asked for and on the rows before it. Going on from any checkpoint
therefore repeats what a kill cut off, to the bit, where the estimator repeats itself; on resuming,
history and parameters are cut back to it.

Every file carries the fingerprint of its run, so that one which belongs to another run is not taken
for its own.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from typing import IO, NamedTuple

import h5py
import jax
import numpy as np

from fluctua.core.types import Estimate, Params
from fluctua.learn.train import Record
from fluctua.store import checkpoint, course, folder, history
from fluctua.store.checkpoint import Damaged, State, from_arrays, to_arrays
from fluctua.store.files import describe_kind
from fluctua.store.folder import RunFolder
from fluctua.store.history import Row

Rows = Generator[tuple[Row, Record], None, None]
Names = Callable[[Params], Mapping[str, np.ndarray]]
RUN = "run"
"""Entry of a checkpoint with the fingerprint of its run."""


class Keep(NamedTuple):
    """What is written, and how often.

    Args:
        checkpoints: how many are kept; two at least, should the newest be damaged.
        seconds: between two checkpoints; 0 is every row.
        every: iterations between two records of the parameters; 0 is none.
        group: where in `parameters.h5` the arrays of θ are.
        describe: puts what belongs to the system into `parameters.h5`.

    """

    checkpoints: int = 3
    seconds: float = 20.0
    every: int = 10
    group: str = ""
    describe: Callable[[h5py.File], None] | None = None


class Step(NamedTuple):
    """What a record leads to. restart: whether the records go on from another place than where
    this one ended.
    """

    state: State
    row: Row
    restart: bool = False


class Journal:
    """The open folder of a run. Made by `create` and `reopen`.

    Args:
        place: the folder, prepared.
        lock: of the folder, held until `close`.
        run: the fingerprint.
        keep: what is written, and how often.
        names: θ -> its arrays by name.

    """

    def __init__(self, place: RunFolder, lock: IO[str], run: str, keep: Keep, names: Names):
        self.place = place
        self.lock = lock
        self.run = run
        self.keep = keep
        self.names = names
        self.file = open(place.history, "a", encoding="utf-8")  # noqa: SIM115
        self.signal = open(place.signal, "a", encoding="utf-8")  # noqa: SIM115
        self.points: list[course.Point] = []
        self.last: course.Point | None = None
        self.saved = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return time.monotonic() - self.saved >= self.keep.seconds

    def add(self, row: Row, theta: Params, estimate: Estimate) -> None:
        """One more row."""
        history.append(self.file, row, self.run)
        history.append_signal(
            self.signal, row.row, self.names(estimate.gradient), self.names(estimate.stderr)
        )
        if self.keep.every:
            self.last = course.Point(row.row, row.iteration, _grouped(self.keep, self.names(theta)))
            if row.iteration % self.keep.every == 0:
                self.points.append(self.last)

    def save(self, state: State) -> None:
        """A checkpoint: the history first, then the parameters, then the state that vouches
        for both.
        """
        self.file.flush()
        os.fsync(self.file.fileno())
        course.append(self.place.parameters, self.points)
        self.points = []
        arrays = to_arrays(state) | {RUN: np.array(self.run)}
        checkpoint.write(self.place.checkpoints, state.row, arrays, self.keep.checkpoints)
        self.saved = time.monotonic()

    def close(self, state: State | None) -> None:
        """A last checkpoint, with the last parameters even off the grid; `final.npz`; and the lock
        is let go.

        state: None where a run ended before it had one.
        """
        try:
            if state is None:
                return
            self.points = [p for p in self.points if p.row < state.row]
            if (
                self.last is not None
                and self.last.row < state.row
                and self.last.iteration % self.keep.every
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
            self.lock.close()

    def rows(
        self,
        state: State,
        records: Callable[[State], Iterator[Record]],
        step: Callable[[State, Record], Step],
        finished: Callable[[State], str],
    ) -> Rows:
        """Records as rows, each in the history before it is yielded; whoever stops iterating stops
        the run.

        Args:
            state: where the run stands.
            records: of the training from a state on.
            step: a record made into a row and the state after it.
            finished: why a run is over, or nothing.

        """
        try:
            while not finished(state):
                for record in records(state):
                    after, row, restart = step(state, record)
                    over = finished(after)
                    with folder.explained(self.place):
                        self.add(row, record.theta, record.estimate)
                        state = after
                        if (restart or self.due) and not over:  # the last one is written by `close`
                            self.save(state)
                    yield row, record
                    if restart or over:
                        break
        finally:  # also when whoever iterates stops, and on Ctrl-C
            with folder.explained(self.place):
                self.close(state)


def create(
    place: RunFolder,
    settings: bytes,
    run: str,
    start: State,
    names: Names,
    *,
    need: int,
    keep: Keep,
    replace: bool = False,
    advice: str = "",
) -> Journal:
    """The journal of a new run, in a folder of its own.

    Args:
        place: the folder.
        settings: the content of its settings file.
        run: the fingerprint.
        start: the state before the first row; kept in start.npz where that is not the beginning of
            a training.
        names: θ -> its arrays by name.
        need: bytes that the run will take.
        keep: what is written, and how often.
        replace: remove an earlier run there.
        advice: how a run takes less room.

    """
    lock = folder.prepare(place, need, replace=replace, advice=advice)
    try:
        with folder.explained(place):
            if start.now.iteration:
                checkpoint.replace(
                    place.start, checkpoint.packed(to_arrays(start) | {RUN: np.array(run)})
                )
            checkpoint.replace(place.settings, settings)
            _fresh_files(place, run, names(start.now.theta), keep)
            return Journal(place, lock, run, keep, names)
    except BaseException:
        lock.close()
        raise


def reopen(
    place: RunFolder,
    lock: IO[str],
    settings: bytes,
    run: str,
    state: State,
    names: Names,
    *,
    keep: Keep,
    report: Callable[[str], None],
    over: bool = False,
) -> Journal:
    """The journal of a run that goes on; its files are cut back to where it stands.

    Args:
        place: the folder.
        lock: of the folder.
        settings: the content of its settings file from now on.
        run: the fingerprint; a file of another run is refused.
        state: where the run stands, from `standing`.
        names: θ -> its arrays by name.
        keep: what is written, and how often.
        report: is told of damaged files.
        over: whether nothing is left to train.

    """
    known = _grouped(keep, names(state.now.theta))
    with folder.explained(place):
        for path in (place.signal, place.parameters):
            if kind := describe_kind(path):
                report(
                    f"{path.name} is {kind}. It is kept as {checkpoint.set_aside(path)}; a file "
                    "takes its place."
                )
        for name, owner in owners(place).items():
            refuse_other(place, name, owner, run)
        checkpoint.replace(place.settings, settings)
        if state.row == 0:
            _fresh_files(place, run, names(state.now.theta), keep)
            return Journal(place, lock, run, keep, names)
        history.truncate(place.history, state.row - 1, run)
        _truncate_signal(place, names(state.now.theta), state.row - 1, report)
        if keep.every:
            try:
                course.truncate(
                    place.parameters, list(known), state.row - 1, 1 if over else keep.every
                )
            except Damaged as error:
                if place.parameters.exists():
                    name = checkpoint.set_aside(place.parameters)
                    report(
                        f"parameters.h5 is damaged: {error}. It is kept as {name}; records go on "
                        "in a new one."
                    )
                course.create(place.parameters, known, run, keep.describe)
        return Journal(place, lock, run, keep, names)


def _truncate_signal(
    place: RunFolder, theta: Mapping[str, np.ndarray], last: int, report: Callable[[str], None]
) -> None:
    """Cut signal.csv back to row `last`; a damaged one is set aside."""
    try:
        history.truncate_signal(place.signal, theta, last)
    except ValueError as error:
        name = checkpoint.set_aside(place.signal)
        report(f"signal.csv is damaged: {error} It is kept as {name}; rows go on in a new one.")
        history.truncate_signal(place.signal, theta, last)


def standing(place: RunFolder, run: str, start: State, report: Callable[[str], None]) -> State:
    """Where a run stands: at its newest good checkpoint, where it was branched off, or at its
    start.

    Args:
        place: the folder.
        run: the fingerprint; a checkpoint of another run is refused.
        start: the state before the first row.
        report: is told of damaged checkpoints.

    """
    readable = checkpoint.newest(place.checkpoints, report)
    if readable is None and not place.start.exists():
        return start
    try:
        path, arrays = readable or (place.start, checkpoint.read(place.start))
    except Damaged as error:
        raise ValueError(
            f"{place.start} is damaged: {error}. Branch again from the run it came from."
        ) from None
    refuse_other(place, str(path.relative_to(place.path)), str(arrays.pop(RUN, "")), run)
    return from_arrays(arrays, start.now)


def owners(place: RunFolder) -> dict[str, str]:
    """The fingerprints that history and parameters carry, by file; those without are left out."""
    marks = {}
    if place.history.is_file():
        for _, owner in history.read_owned(place.history):
            marks[place.history.name] = owner
    if place.parameters.is_file():
        with suppress(Damaged):
            marks[place.parameters.name] = course.owner(place.parameters)
    return {name: owner for name, owner in marks.items() if owner}


def refuse_other(place: RunFolder, name: str, owner: str, run: str) -> None:
    """Raise if a file says that it belongs to another run. Files that say nothing are taken."""
    if owner and owner != run:
        raise ValueError(
            f"{place.path / name} is of another run: its fingerprint is {owner}, and "
            f"{place.settings_name} is of "
            f"{run}. Put the file back that belongs here, or go on with a copy of this folder that "
            "is whole."
        )


def row_of(number: int, record: Record, event: str = "") -> Row:
    """A record as a row of the history."""
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


def named_leaves(theta: Params) -> dict[str, np.ndarray]:
    """The arrays of any pytree by name: {"a": [x, y]} has "a.0" and "a.1"; a bare array is
    "theta".
    """
    leaves = jax.tree_util.tree_leaves_with_path(theta)
    return {
        jax.tree_util.keystr(path, simple=True, separator=".") or "theta": np.asarray(v)
        for path, v in leaves
    }


def _grouped(keep: Keep, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {keep.group + name: array for name, array in arrays.items()}


def _fresh_files(place: RunFolder, run: str, theta: Mapping[str, np.ndarray], keep: Keep) -> None:
    checkpoint.replace(place.history, history.HEADER.encode())
    checkpoint.replace(place.signal, history.signal_header(theta).encode())
    if keep.every:
        course.create(place.parameters, _grouped(keep, theta), run, keep.describe)
