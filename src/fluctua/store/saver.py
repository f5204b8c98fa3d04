"""The files of a run while it goes on: rows at once, parameters and state together at checkpoints."""

from __future__ import annotations

import io
import os
import time
from typing import Any

import jax
import numpy as np

from fluctua.learn.train import Record
from fluctua.runs import parameters
from fluctua.runs.build import FAMILIES
from fluctua.runs.config import Config
from fluctua.store import checkpoint, history
from fluctua.store.folder import RunFolder
from fluctua.store.history import Row
from fluctua.store.state import State, to_arrays


class Saver:
    """Writes a run."""

    def __init__(self, config: Config, place: RunFolder):
        self.config, self.place = config, place
        self.file = open(place.history, "a", encoding="utf-8")  # noqa: SIM115, open as long as the run
        self.points: list[parameters.Point] = []
        self.last: parameters.Point | None = None
        self.written, self.saved = -1, time.monotonic()

    @property
    def due(self) -> bool:
        """Whether it is time for a checkpoint."""
        return time.monotonic() - self.saved >= self.config.keep.checkpoint_seconds

    def add(self, row: Row, record: Record) -> None:
        """One more row."""
        history.append(self.file, row)
        theta = {name: np.asarray(record.theta[name]) for name in FAMILIES}
        self.last = parameters.Point(row.row, row.iteration, theta)
        if row.iteration % self.config.keep.parameters_every == 0:
            self.points.append(self.last)

    def save(self, state: State) -> None:
        """A checkpoint: the history first, then the parameters, then the state that vouches for both."""
        os.fsync(self.file.fileno())
        parameters.append(self.place.parameters, self.points)
        self.points = []
        checkpoint.write(self.place.checkpoints, state.row, to_arrays(state), self.config.keep.checkpoints)
        self.written, self.saved = state.row, time.monotonic()

    def close(self, state: State) -> None:
        """A last checkpoint, with the last parameters even off the grid; and `final.npz`."""
        if self.last is None:
            self.file.close()
            return
        self.points = [p for p in self.points if p.row < state.row]
        if self.last.row < state.row and self.last.iteration % self.config.keep.parameters_every:
            self.points.append(self.last)
        self.save(state)
        self.file.close()
        save_final(self.place, state.now.theta)


def save_final(place: RunFolder, theta: Any) -> None:
    """θ after the last step, as plain arrays."""
    memory = io.BytesIO()
    np.savez(memory, **{name: np.asarray(theta[name]) for name in FAMILIES})  # type: ignore[arg-type]
    checkpoint.replace(place.final, memory.getvalue())


def as_row(number: int, record: Record, event: str) -> Row:
    """A record as a row of the history."""
    estimate = record.estimate
    norm = np.sqrt(sum(float(np.sum(np.square(np.asarray(g, float)))) for g in jax.tree.leaves(estimate.gradient)))
    value, stderr = float(estimate.value), float(estimate.value_stderr)
    return Row(
        number, record.iteration, value, stderr, estimate.count, record.trajectories, float(norm), record.seconds, event
    )
