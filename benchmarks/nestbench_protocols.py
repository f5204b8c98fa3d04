"""Protocols of NESTbench25: knots, rows, files, and trainings that count what they spend."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import fluctua as fl
from fluctua.core.arrays import Array, Params

ROWS = 1000
"""Rows of every protocol file but that of the Ising problem."""


def interpolate_knots(knots: Array, row: Array) -> Array:
    """Value at a row of the piecewise linear function through equidistant knots (K,).

    The first knot is row 0 and the last one is the last row, so that jumps at both ends are free.
    """
    place = row * ((len(knots) - 1) / (ROWS - 1))
    weights = jnp.maximum(1 - jnp.abs(place - jnp.arange(len(knots))), 0)
    return jnp.sum(knots * weights)


def find_row(t: Array, dt: float, row_time: float) -> Array:
    """Row that the engine reads in the step that begins at t.

    The offset, a fiftieth of a step, keeps rounding of t from mattering: the engine adds up its
    time in double precision, and may be one step late at a row that begins with a step.
    """
    return jnp.clip(jnp.floor((t + 0.02 * dt) / row_time), 0, ROWS - 1)


def follow_engine(dt: float, end: float, row_time: float) -> np.ndarray:
    """Row of every step as the engine's loop finds it, in double precision. Shape (T,)."""
    rows = []
    tau = 0.0
    last = -1
    while tau < end:
        last = max(last, int(tau / row_time))
        rows.append(min(last, ROWS - 1))
        tau += dt
    return np.array(rows)


def write_protocol(path: Path, protocol: np.ndarray) -> None:
    """Write a protocol file, one row per line and one column per control parameter."""
    protocol = np.atleast_2d(np.asarray(protocol, float))
    if not np.isfinite(protocol).all():
        raise ValueError(f"a protocol must be finite; got {protocol[~np.isfinite(protocol)][0]}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (" ".join(f"{value:.9g}" for value in row) for row in protocol)
    path.write_text("\n".join(lines) + "\n")


def read_protocol(path: Path) -> np.ndarray:
    """Read a protocol file. Shape (rows, columns)."""
    return np.loadtxt(path, ndmin=2)


class Log:
    """Trajectories, minutes and values of a training with several stages."""

    def __init__(self) -> None:
        self.trajectories = 0
        self.history: list[float] = []
        self._began = time.perf_counter()

    @property
    def minutes(self) -> float:
        """Minutes since the beginning."""
        return (time.perf_counter() - self._began) / 60

    def train(self, training: fl.Training, iterations: int) -> Params:
        """Parameters after a training, which is added to the log."""
        theta = training.theta
        spent = 0
        for record in fl.train(training, iterations=iterations):
            theta = record.next_theta
            spent = record.trajectories
            self.history.append(float(record.estimate.value))
        self.trajectories += spent
        return theta

    def result(self, protocol: np.ndarray) -> dict[str, Any]:
        """Result of the training for the benchmark."""
        return {
            "protocol": np.asarray(protocol, float),
            "trajectories": self.trajectories,
            "minutes": self.minutes,
            "history": self.history,
        }
