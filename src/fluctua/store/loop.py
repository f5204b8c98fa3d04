"""The training loop into a folder, for processes, lattices and instruments.

`begin` and `reopen` return a journal and the state to start from; `iterate` runs a `Loop` from
there, with each row in the history before it is yielded. Differences between systems are in the
functions of `Loop`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

from fluctua.core.arrays import Array
from fluctua.core.words import format_count
from fluctua.learn.training import Length, Record, Training, ascend
from fluctua.store import folder, journal, summary
from fluctua.store.checkpoint import RunState, add_record
from fluctua.store.history import Row
from fluctua.store.journal import Journal, RunFiles

Rows = Generator[tuple[Row, Record], None, RunState]


class Segment(NamedTuple):
    """The part of a training up to the next restart, and the key of its noise."""

    training: Training
    key: Array


class Advance(NamedTuple):
    """The result of a record.

    state: after the record.
    row: of the history.
    restart: whether the training continues from another place than where this record ended.
    """

    state: RunState
    row: Row
    restart: bool = False


@dataclass(frozen=True)
class Loop:
    """A training with its limits and what happens around an iteration.

    Args:
        training: what to train.
        length: how many iterations.
        segment: (state) -> the training from that state on; the whole training by default.
        advance: (state, record) -> state and row after a record.
        finished: (state) -> why the training is over, or an empty string.
        conclude: (state) -> state with what is measured once the training is over.
    """

    training: Training
    length: Length
    segment: Callable[[RunState], Segment] | None = None
    advance: Callable[[RunState, Record], Advance] | None = None
    finished: Callable[[RunState], str] | None = None
    conclude: Callable[[RunState], RunState] | None = None

    def select_segment(self, state: RunState) -> Segment:
        """The training from a state on."""
        if self.segment is None:
            return Segment(self.training, self.training.key)
        return self.segment(state)

    def add_record(self, state: RunState, record: Record) -> Advance:
        """State and row after a record. The given state is not modified."""
        if self.advance is not None:
            return self.advance(state, record)
        estimator: Any = self.training.estimator
        event = getattr(estimator, "event", "")
        row = journal.make_row(state.row, record, event)
        return Advance(add_record(state, record, estimator.state), row)

    def explain_end(self, state: RunState) -> str:
        """Why the training is over, or an empty string."""
        if self.finished is not None:
            return self.finished(state)
        return explain_iterations(state, self.length.iterations)


def explain_iterations(state: RunState, count: int | None) -> str:
    """State that a training has run its iterations; else empty. count: None for no limit."""
    if count is None or state.now.iteration < count:
        return ""
    return f"it has run its {format_count(count, 'iteration')}"


class Opened(NamedTuple):
    """An open run: its journal and its state."""

    journal: Journal
    state: RunState


def begin(files: RunFiles, *, replace: bool = False) -> Opened:
    """Open a new run. replace: remove an earlier run in that folder."""
    return Opened(journal.create(files, replace=replace), files.start)


def reopen(
    files: RunFiles, lock: IO[str], state: RunState, loop: Loop, report: Callable[[str], None]
) -> Opened:
    """Open an existing run at `state` and restore its estimator.

    Args:
        files: of the run.
        lock: of its folder.
        state: from `journal.read_state`.
        loop: the training.
        report: called with a line of text about each damaged file.
    """
    over = bool(loop.explain_end(state))
    book = journal.reopen(files, lock, state, report=report, over=over)
    restore_memory(loop.training, state)
    return Opened(book, state)


def read_summary(place: folder.RunFolder, state: RunState) -> dict[str, Any] | None:
    """The summary of a run that is complete; None if it is of an earlier end, or lacks a value."""
    path = place.path / summary.NUMBERS
    numbers = json.loads(path.read_text()) if path.exists() else {}
    is_complete = numbers.get("rows") == state.row and summary.FAILED not in numbers
    return numbers if is_complete else None


def restore_memory(training: Training, state: RunState) -> None:
    """Restore the estimator of a training to its state at `state`."""
    estimator: Any = training.estimator
    if state.memory:
        estimator.restore(state.memory, state.now.theta)


def iterate(opened: Opened, loop: Loop) -> Rows:
    """Train from the state of a run; each row is in the history before it is yielded.

    Stop iterating to stop the run. Returns: the state at the end.
    """
    book, state = opened
    try:
        while not loop.explain_end(state):
            training, key = loop.select_segment(state)
            now = state.now._replace(trajectories=state.spent)
            for record in ascend(training, key, now, loop.length):
                new, row, restart = loop.add_record(state, record)
                over = loop.explain_end(new)
                with folder.explain_failures(book.place):
                    comparison = getattr(training.estimator, "comparison", None)
                    book.add(row, record.theta, record.estimate, comparison)
                    state = new
                    # the last one is written by `close`, unless something is measured before
                    if (over and loop.conclude) or (not over and (restart or book.due)):
                        book.save(state)
                yield row, record
                if restart or over:
                    break
        if loop.conclude is not None:
            state = loop.conclude(state)
        return state
    finally:  # also when the caller stops iterating, and on Ctrl-C
        with folder.explain_failures(book.place):
            book.close(state)


def drive(
    opened: Opened, loop: Loop, on_row: Callable[[Row, Record], None] | None = None
) -> RunState:
    """Train to the end, and return the state there. on_row: called with each row and record."""
    rows = iterate(opened, loop)
    try:
        while True:
            try:
                row, record = next(rows)
            except StopIteration as end:
                return end.value
            if on_row is not None:
                on_row(row, record)
    finally:
        rows.close()
