"""Several records as one: pieces between gaps, and files, joined end to end.

A joined record has steps that did not happen, from the last sample of a piece to the first of the
next. Their scores are left out, no reward is multiplied with a kick of another piece, and no batch
has samples of two pieces: each piece counts as a record of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from fluctua.core import check
from fluctua.core.trajectories import Trajectories

UNEVEN = 0.01
"""Accepted relative differences of the sampling intervals, from rounded times."""

UNCUT = np.zeros(0, int)
"""Cuts of a record that is one piece."""
Records = Trajectories | Sequence[Trajectories]
"""One record, or several at one interval."""


class Pieces(NamedTuple):
    """Pieces of a joined record.

    starts: number of the first sample of each (K,).
    steps: number of steps of each (K,).
    """

    starts: np.ndarray
    steps: np.ndarray

    @property
    def cuts(self) -> np.ndarray:
        """First samples of the pieces after the first, where a series is cut. Shape (K−1,)."""
        return self.starts[1:]

    def count_batches(self, first: int, length: int) -> np.ndarray:
        """Number of batches of each piece, if its samples 0 … first−1 are in none. Shape (K,)."""
        return np.maximum((self.steps - first) // length, 0)

    def number_batches(self, samples: np.ndarray, first: int, length: int) -> np.ndarray:
        """Number of the batch of each sample, counted over all pieces; −1 for none."""
        counts = self.count_batches(first, length)
        piece = self._find(samples)
        batch = (samples - self.starts[piece] - first) // length
        inside = (batch >= 0) & (batch < counts[piece])
        return np.where(inside, (np.cumsum(counts) - counts)[piece] + batch, -1)

    def start_batches(self, first: int, length: int) -> np.ndarray:
        """First sample of every batch."""
        counts = self.count_batches(first, length)
        within = [length * np.arange(count) for count in counts]
        return np.concatenate(within) + np.repeat(self.starts + first, counts)

    def count_before(self, samples: np.ndarray) -> np.ndarray:
        """Number of samples of the same piece before each."""
        return samples - self.starts[self._find(samples)]

    def are_gaps(self, steps: np.ndarray) -> np.ndarray:
        """Whether a step leads from one piece into the next."""
        return np.isin(steps + 1, self.starts)

    def average_blocks(self, series: np.ndarray, length: int) -> np.ndarray:
        """Means of `length` samples of one piece each. series (E, T), returns (B,)."""
        blocks = [
            part[:, : part.shape[1] // length * length].reshape(-1, length).mean(axis=1)
            for part in np.split(series, self.cuts, axis=1)
        ]
        return np.concatenate(blocks)

    def _find(self, samples: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.starts, samples, side="right") - 1


class PieceReport(NamedTuple):
    """Pieces of a record, and those that are too short to be used.

    count: number of pieces.
    left_out: number of those that are shorter than a window and a batch.
    lost: time in these.
    used: share of the record that is in batches.
    """

    count: int  # type: ignore[assignment]
    left_out: int
    lost: float
    used: float

    def __repr__(self) -> str:
        text = f"{self.count:,} pieces, {self.used:.0%} of the record in batches"
        if self.left_out:
            text += (
                f"; {self.left_out:,} pieces, {self.lost:.4g} units of time, are shorter than a "
                "window and a batch and left out"
            )
        return text


def report_pieces(pieces: Pieces, first: int, length: int, dt: float) -> PieceReport:
    """Report how much of the pieces a window of `first` steps and batches of `length` use."""
    counts = pieces.count_batches(first, length)
    short = counts == 0
    whole = int(pieces.steps.sum())
    return PieceReport(
        len(counts),
        int(short.sum()),
        float(pieces.steps[short].sum() * dt),
        float(counts.sum() * length / whole),
    )


class JoinedRecord(NamedTuple):
    """Records as one trace, or one record as it is.

    record: the states.
    pieces: its pieces.
    """

    record: Trajectories
    pieces: Pieces


def join_records(record: Records) -> JoinedRecord:
    """Join several records to one trace on a uniform grid; one record is returned as it is.

    Args:
        record: one, or several of any lengths, at one interval and in one context. Every trace of
            each is a piece.

    Returns: a `JoinedRecord`. The times of several records are those of one that has no gaps: drift
    and reward must not depend on time.
    """
    if isinstance(record, Trajectories):
        samples = np.shape(record.x)[1] if np.ndim(record.x) == 3 else len(record.t)
        return JoinedRecord(record, Pieces(np.zeros(1, int), np.array([samples - 1])))
    records = list(record)
    if not records:
        raise ValueError("`record` must have one record or more; got none.")
    for one in records:
        if not isinstance(one, Trajectories):
            raise TypeError(f"a record is fluctua.Trajectories; got {type(one).__name__}.")
        if np.ndim(one.x) != 3 or np.shape(one.x)[1] != len(one.t):
            raise ValueError(
                f"`x` must be (traces, {len(one.t)}, state) to match `t`; got {np.shape(one.x)}."
            )
        if one.events is not None:
            raise ValueError(
                "records with events within their steps are not joined: give one record."
            )
    sizes = sorted({np.shape(one.x)[2] for one in records})
    if len(sizes) > 1:
        raise ValueError(f"records must have the same components; got {sizes} of them.")
    dt = check_intervals([np.diff(check.times(one.t).astype(np.float64)) for one in records])
    context = _find_common_context(records)
    samples = np.concatenate([np.full(len(one.x), len(one.t)) for one in records])
    x = np.concatenate([np.asarray(one.x[:]).reshape(-1, sizes[0]) for one in records])
    joined = Trajectories(dt * np.arange(len(x)), x[None], context)
    return JoinedRecord(joined, Pieces(np.cumsum(samples) - samples, samples - 1))


def check_intervals(intervals: Sequence[np.ndarray]) -> float:
    """The interval of the samples, which must be the same in all records."""
    every = np.concatenate(intervals)
    if np.ptp(every) > UNEVEN * every.mean():
        raise ValueError(
            "a continuing record needs a uniform time grid, because its correlations are taken by "
            f"lag; its intervals are {every.min():g} to {every.max():g}. Cut it where samples are "
            "missing and give the pieces as a list of records."
        )
    return float(every.mean())


def _find_common_context(records: Sequence[Trajectories]) -> object:
    """Context of all traces, with one row; contexts that differ are refused."""
    first = jax.tree.map(lambda leaf: np.asarray(leaf)[:1], records[0].context)
    for one in records:
        structures = {jax.tree.structure(one.context), jax.tree.structure(first)}
        same = len(structures) == 1 and all(
            np.array_equal(np.asarray(leaf), np.repeat(row, len(one.x), axis=0))
            for leaf, row in zip(jax.tree.leaves(one.context), jax.tree.leaves(first), strict=True)
        )
        if not same:
            raise ValueError(
                "joined records must have one context; these have several. Estimate the "
                "records of each context by themselves."
            )
    return first
