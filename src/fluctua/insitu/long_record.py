"""Records with gaps, in several files or with a slow drift, as one long record.

Samples that are missing (a jump of the times) or not finite (NaN) end a piece, and the next sample
begins another. Pieces and files follow each other in one trace; no estimate uses samples on both
sides of an end (`fluctua.processes.pieces`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fluctua.core.process import Process
from fluctua.core.trajectories import Trajectories
from fluctua.core.words import format_count
from fluctua.insitu.recording.model import RecordingModel
from fluctua.insitu.recording.reader import RecordingFile
from fluctua.insitu.recording.trend import TrendRemoval, subtract_trend
from fluctua.insitu.splitting import check_autonomous
from fluctua.processes.pieces import UNEVEN, Pieces, join_records


class LongRecord(NamedTuple):
    """One record, ready for an estimate.

    recording: one trace without gaps, or the recording as it is.
    pieces: of the trace; None where nothing was cut or joined.
    notes: what was cut, joined and subtracted, in words.
    """

    recording: RecordingFile
    pieces: Pieces | None = None
    notes: tuple[str, ...] = ()

    def list_records(self) -> Trajectories | list[Trajectories]:
        """The record, or the list of its pieces, as `fluctua.stationary` takes it."""
        whole = self.recording.trajectories()
        if self.pieces is None:
            return whole
        ends = self.pieces.starts + self.pieces.steps + 1
        t = self.recording.t
        return [
            Trajectories(t[first:last], whole.x[:, first:last], whole.context)
            for first, last in zip(self.pieces.starts, ends, strict=True)
        ]

    def check_model(self, model: RecordingModel) -> None:
        """Refuse a drift that depends on time where the record was cut or joined."""
        if self.pieces is not None and isinstance(model.process, Process):
            check_autonomous(self.recording, model)


class GapCount(NamedTuple):
    """Gaps of a trace: jumps of its times, and runs of samples that are not finite."""

    jumps: int
    not_finite: int


def prepare_record(recordings: Sequence[RecordingFile], detrend: float | None = None) -> LongRecord:
    """Cut recordings at their gaps and join what is left to one long record.

    Args:
        recordings: open ones of one system at the same settings, of one trace or a few each. Their
            states are loaded, unless there is one without gaps.
        detrend: subtract what varies more slowly than this time in a trace, an offset of the
            detector; the mean of the trace stays.

    Returns: a `LongRecord`. Its description is that of the first recording.
    """
    first = recordings[0]
    components = first.description.components
    for other in recordings[1:]:
        if other.description.components != components:
            raise ValueError(
                f"{other.path} has the components {', '.join(other.description.components)}, "
                f"{first.path} has {', '.join(components)}: only recordings of one system are "
                "joined."
            )
    if len(recordings) == 1 and detrend is None and not _find_any_gap(first):
        return LongRecord(first)
    if any(one.events is not None for one in recordings):
        raise ValueError(
            f"{first.path} has events within its steps, and cannot be cut or joined. Give one "
            "file without gaps."
        )
    dt = float(np.median(np.diff(first.t)))
    pieces: list[Trajectories] = []
    gaps: list[GapCount] = []
    removals: list[TrendRemoval] = []
    for recording in recordings:
        for j in range(recording.count):
            trace = recording.trajectories(j, j + 1, load=True)
            x = np.array(trace.x[0])
            place = f"trace {j} of {recording.path}"
            position, starts, count = _find_pieces(x, recording.t, dt, place)
            gaps.append(count)
            good = position >= 0
            if detrend is not None:
                cuts = np.searchsorted(np.flatnonzero(good), starts[1:])
                removal = subtract_trend(x[good], position[good], detrend / dt, cuts, place)
                x[good] = removal.x
                removals.append(removal)
            pieces += _cut_pieces(trace._replace(x=x), starts, good, dt)
    if not pieces:
        raise ValueError(
            f"{first.path} has no two finite samples in sequence: there is nothing to estimate "
            "from."
        )
    joined, where = join_records(pieces)
    record = _make_recording(first, joined)
    return LongRecord(record, where, _describe(recordings, gaps, removals, detrend, components))


def _find_any_gap(recording: RecordingFile) -> bool:
    """Whether samples are missing or not finite."""
    intervals = np.diff(recording.t)
    if np.ptp(intervals) > UNEVEN * np.median(intervals):
        return True
    return not all(np.isfinite(recording.x[j]).all() for j in range(recording.count))


class _TracePieces(NamedTuple):
    """Pieces of a trace.

    position: of every sample in units of the interval, −1 for one that is not finite.
    starts: first sample of every piece.
    gaps: number of gaps.
    """

    position: np.ndarray
    starts: np.ndarray
    gaps: GapCount


def _find_pieces(x: np.ndarray, t: np.ndarray, dt: float, place: str) -> _TracePieces:
    """Find the pieces of a trace between gaps."""
    intervals = np.diff(t) / dt
    jumps = intervals > 1 + UNEVEN
    if np.any(intervals < 1 - UNEVEN):
        n = int(np.argmax(intervals < 1 - UNEVEN))
        raise ValueError(
            f"{place} is sampled every {dt:.4g}, and samples {n} and {n + 1} are only "
            f"{t[n + 1] - t[n]:.4g} apart: a continuing record needs one interval. Leave out the "
            "samples between."
        )
    good = np.isfinite(x).all(axis=1)
    begins = good & ~np.concatenate([[False], good[:-1] & ~jumps])
    position = np.round((np.asarray(t, float) - t[0]) / dt).astype(int)
    runs = int(np.sum(~good & np.concatenate([[True], good[:-1]])))
    return _TracePieces(
        np.where(good, position, -1), np.flatnonzero(begins), GapCount(int(jumps.sum()), runs)
    )


def _cut_pieces(
    trace: Trajectories, starts: np.ndarray, good: np.ndarray, dt: float
) -> list[Trajectories]:
    """Cut a trace into pieces of at least two samples."""
    ends = np.append(starts[1:], len(good))
    pieces = []
    for first, last in zip(starts, ends, strict=True):
        stop = first + int(good[first:last].sum())  # what is not finite ends a piece
        if stop - first >= 2:
            t = dt * np.arange(stop - first)
            pieces.append(Trajectories(t, trace.x[None, first:stop], trace.context))
    return pieces


def _make_recording(first: RecordingFile, joined: Trajectories) -> RecordingFile:
    """Make a recording in memory, with the head of a file and the states of the joined trace."""
    x = np.asarray(joined.x)
    channels = len(first.description.channels)
    if first.description.is_complex:
        x = x[..., :channels] + 1j * x[..., channels:]
    head = dataclasses.replace(first.description, t=np.asarray(joined.t))
    return RecordingFile(first.path, first.kind, head, x, 1, joined.context)


def _describe(
    recordings: Sequence[RecordingFile],
    gaps: Sequence[GapCount],
    removals: Sequence[TrendRemoval],
    detrend: float | None,
    components: tuple[str, ...],
) -> tuple[str, ...]:
    """Describe what was joined, cut and subtracted, one line each."""
    notes = []
    if len(recordings) > 1:
        names = ", ".join(recording.path.name for recording in recordings)
        notes.append(f"one record of {len(recordings)} files: {names}")
    jumps = sum(gap.jumps for gap in gaps)
    runs = sum(gap.not_finite for gap in gaps)
    if jumps or runs:
        notes.append(
            f"cut at {format_count(jumps, 'jump')} of the times and "
            f"{format_count(runs, 'run')} of samples that are not finite"
        )
    if detrend is not None:
        moved = np.max([removal.moved for removal in removals], axis=0)
        lost = max(removal.lost for removal in removals)
        worst = int(np.argmax(moved))
        notes.append(
            f"detrended: variations slower than {detrend:g} were subtracted, as an offset of the "
            f"detector that drifts; of {components[worst]} {moved[worst]:.2g} standard deviations "
            f"(rms). Fluctuations, J − its value at the mean state, and gradient lose about "
            f"{lost:.2%} with them"
        )
    return tuple(notes)
