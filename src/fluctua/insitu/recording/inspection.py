"""Inspect a recording for faults: one pass over the file, in chunks.

Serious is what makes a gradient wrong: numbers that are not finite, samples that are missing,
repeated or clipped, channels that never move, a mean that wanders while the measurement runs. The
rest are cautions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import scipy

from fluctua.core.display.fields import show_fields
from fluctua.core.words import format_count
from fluctua.insitu.recording import layout
from fluctua.insitu.recording.description import Description
from fluctua.insitu.recording.digitisation import Judgement, TieCounter, find_steps
from fluctua.insitu.recording.reader import RecordingFile
from fluctua.insitu.recording.trend import LOST, describe_trend, find_trend

CHUNK_BYTES = 64 * 2**20
ALARM = 1e-4
"""Probability of a false alarm, of all components together."""
CLIPPED = 5
"""Samples at one extreme value that are too many for a continuous quantity."""


class RecordingFinding(NamedTuple):
    """A fault or a peculiarity of a recording.

    what: a word.
    serious: whether a gradient would be wrong.
    text: a description, with what to do.
    """

    what: str
    serious: bool
    text: str


@show_fields
class Inspection(NamedTuple):
    """Summary and findings of a recording.

    summary: of the file and its head, by name.
    findings: what was found.
    mean, spread, lowest, highest: (M,), over all samples but the first of each trajectory.
    """

    summary: dict[str, Any]
    findings: list[RecordingFinding]
    mean: np.ndarray
    spread: np.ndarray
    lowest: np.ndarray
    highest: np.ndarray

    @property
    def serious(self) -> bool:
        """Whether any finding is serious."""
        return any(f.serious for f in self.findings)


def inspect(recording: RecordingFile, *, chunk_bytes: int = CHUNK_BYTES) -> Inspection:
    """Inspect every number of a recording once: dropped samples, clipping, drift.

    Args:
        recording: an open one.
        chunk_bytes: memory of a chunk.

    Returns: what was found, with the serious findings marked.

    >>> inspection = insitu.files.inspect(recording)
    >>> [finding.text for finding in inspection.findings]
    []
    """
    d = recording.description
    findings = _check_completeness(recording) + _check_grid(d.t)
    seen = _Statistics(recording.x.shape[2], recording.rails)
    lost: dict[int, str] = {}
    for first, x in _read_sound(recording, chunk_bytes, lost):
        seen.add(x, first)
        if recording.count == 1 and np.isfinite(x).all():
            findings += _check_trend(x[0], d)
    if lost:
        text = (
            f"{format_count(len(lost), 'trajectory')} of {recording.count:,} cannot be used, and "
            f"what follows is of the others: {layout.name_trajectories(list(lost))} "
            f"({next(iter(lost.values()))})"
        )
        findings.append(RecordingFinding("damaged", True, text))
    if seen.count:
        findings += [*_check_finite(seen), *_check_stuck(seen, d.components)]
        if d.events is None or not d.events.still:  # else a state repeats itself, and its extremes
            findings += [*_check_clipping(seen, d.components), *_check_repeats(seen, d)]
        findings += [*_check_drift(seen, d.components), *_check_identical(seen, d.components)]
    summary = {
        "file": str(recording.path),
        "kind": recording.kind,
        "trajectories": recording.count,
        "incomplete": recording.incomplete,
        "times": len(d.t),
        "interval": float(np.median(np.diff(d.t))),
        "duration": float(d.t[-1] - d.t[0]),
        "time_units": d.time_units,
        "channels": list(d.channels),
        "complex": d.is_complex,
        "dtype": d.dtype,
        "units": d.units,
        "parameters": {name: list(np.shape(v)) for name, v in d.parameters.items()},
        "settings": sorted(d.settings),
        "context": sorted(d.context or {}),
        "events": _summarise_events(recording),
        "tables": [
            name for name in ("drive", "noise", "network", "simulation") if getattr(d, name)
        ],
        "software": d.software,
        "created": d.created,
        "provenance": d.provenance,
    }
    return Inspection(summary, findings, *seen.moments())


def _read_sound(
    recording: RecordingFile, chunk_bytes: int, lost: dict[int, str]
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield chunks of states with the number of their first trajectory.

    A chunk that cannot be read is tried trajectory by trajectory; those that cannot be read are
    added to `lost`, with the reason.
    """
    size = recording.chunk_size(chunk_bytes)
    for first in range(0, recording.count, size):
        try:
            yield first, np.asarray(recording.trajectories(first, first + size, load=True).x)
        except (OSError, ValueError):
            for n in range(first, min(first + size, recording.count)):
                try:
                    one = np.asarray(recording.trajectories(n, n + 1, load=True).x)
                except (OSError, ValueError) as error:
                    lost[n] = str(error)
                    continue
                yield n, one


def _summarise_events(recording: RecordingFile) -> dict[str, Any] | None:
    """Count the events of each kind."""
    kinds = recording.description.events
    reader = recording.events
    if kinds is None or reader is None:
        return None
    each = dict(zip(kinds.names, reader.count_kinds().tolist(), strict=False))
    return {"kinds": each, "random_sizes": kinds.changes is None, "still": kinds.still}


class _Statistics:
    """Statistics gathered chunk by chunk, per component (M,) or per trajectory (E, …)."""

    def __init__(self, size: int, rails: np.ndarray | None = None):
        self.count = 0
        self.samples = 0
        self.rails = rails
        self.railed = np.zeros((2, size), int)
        self.hashes = [hashlib.blake2b(digest_size=16) for _ in range(size)]
        self.sum = np.zeros(size)
        self.square = np.zeros(size)
        self.shift: np.ndarray | None = None
        self.bad: list[tuple[int, int, int]] = []  # trajectory, time, component
        self.bad_count = 0
        self.repeats: list[tuple[int, int]] = []  # trajectory, how many
        self.means: list[np.ndarray] = []
        self.top = _Extreme(size)
        self.bottom = _Extreme(size)
        self.counter: TieCounter | None = None

    def add(self, x: np.ndarray, first: int) -> None:
        bad = ~np.isfinite(x)
        for j in np.flatnonzero(bad.any(axis=(1, 2))):
            n, i = np.argwhere(bad[j])[0]
            self.bad.append((first + int(j), int(n), int(i)))
        self.bad_count += int(bad.sum())
        same = (x[:, 1:] == x[:, :-1]).all(axis=2)
        moving = (x[:, 1:] != 0).any(axis=2)  # all zero is a system at rest, not a sample held
        ties = same & moving
        held = ties.sum(axis=1)
        if self.count == 0:
            steps = find_steps(x[:, 1:].reshape(-1, x.shape[2]))
            self.counter = None if steps is None else TieCounter(steps)
        if self.counter is not None:
            self.counter.add(x, ties)
        self.repeats += [(first + int(j), int(held[j])) for j in np.flatnonzero(held)]
        # without the first samples: a prepared start is one value on purpose
        later = np.where(bad, np.nan, x)[:, 1:].astype(np.float64)
        each = later.reshape(-1, x.shape[2])
        if self.shift is None:
            self.shift = np.nan_to_num(_nanmean(each))
        self.sum += np.nansum(each - self.shift, axis=0)
        self.square += np.nansum((each - self.shift) ** 2, axis=0)
        self.samples += int(np.isfinite(each).all(axis=1).sum())
        self.means.append(np.stack([_nanmean(one) for one in later]))
        self.top.add(each)
        self.bottom.add(-each)
        for k, hashed in enumerate(self.hashes):
            hashed.update(np.ascontiguousarray(x[:, :, k]).tobytes())
        if self.rails is not None:
            self.railed += [(x == end).sum(axis=(0, 1)) for end in self.rails]
        self.count += len(x)

    def moments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        n = max(1, self.samples)
        shift = 0.0 if self.shift is None else self.shift
        spread = np.sqrt(np.maximum(self.square / n - (self.sum / n) ** 2, 0))
        return shift + self.sum / n, spread, -self.bottom.value, self.top.value


class _Extreme:
    """The largest value of each component and the next one, with their numbers of samples."""

    def __init__(self, size: int):
        self.value = np.full(size, -np.inf)
        self.times = np.zeros(size, int)
        self.second = np.full(size, -np.inf)
        self.second_times = np.zeros(size, int)

    def add(self, x: np.ndarray) -> None:
        x = np.where(np.isnan(x), -np.inf, x)
        value = x.max(axis=0)
        below = np.where(x < value, x, -np.inf)
        second = below.max(axis=0)
        mine = [(self.value, self.times), (self.second, self.second_times)]
        theirs = [(value, (x == value).sum(axis=0)), (second, (below == second).sum(axis=0))]
        levels = mine + theirs
        first = np.max([v for v, _ in levels], axis=0)
        next_one = np.max([np.where(v < first, v, -np.inf) for v, _ in levels], axis=0)

        def count(level):
            return np.sum(
                [np.where((v == level) & np.isfinite(v), n, 0) for v, n in levels], axis=0
            )

        self.value = first
        self.times = count(first)
        self.second = next_one
        self.second_times = count(next_one)


def _nanmean(x: np.ndarray) -> np.ndarray:
    n = np.isfinite(x).sum(axis=0)
    return np.where(n > 0, np.nansum(x, axis=0) / np.maximum(n, 1), np.nan)


# --------------------------------------------------------------------------------------- the checks


def _check_completeness(recording: RecordingFile) -> list[RecordingFinding]:
    """Find damage and incomplete or missing parts of the file."""
    findings = [
        RecordingFinding("damaged", True, f"{text}. `fluctua convert` copies what is whole.")
        for text in recording.damage
    ]
    if recording.count == 0:
        findings.append(
            RecordingFinding(
                "empty", True, "no trajectory is complete: there is nothing to estimate from."
            )
        )
    if recording.interrupted:
        text = (
            "the file is being written, or its writer was killed: other programs will not open "
            "it. Go on with --append, or make it an ordinary file with "
            "fluctua.insitu.files.repair."
        )
        findings.append(RecordingFinding("interrupted", False, text))
    if recording.incomplete:
        text = (
            f"{format_count(recording.incomplete, 'trajectory')} at the end, cut short, left out; "
            "the others are whole."
        )
        findings.append(RecordingFinding("incomplete", False, text))
    if recording.kind == "recording" and not recording.has_checksums:
        text = (
            "the file was written before trajectories had checksums: its states are taken as "
            "they are, and damage to them may pass. `fluctua convert` makes a "
            "copy with checksums."
        )
        findings.append(RecordingFinding("no checksums", False, text))
    if not recording.description.parameters:
        text = (
            "the parameters that were set are not in the file: pass them to `estimate` (--params)."
        )
        findings.append(RecordingFinding("no parameters", False, text))
    return findings


def _check_grid(t: np.ndarray) -> list[RecordingFinding]:
    """Find dropped samples, gaps of two intervals or more, and irregular grids."""
    dt = np.diff(t)
    usual = np.median(dt)
    gaps = np.flatnonzero(dt > 1.5 * usual)
    lost = int(np.sum(np.rint(dt[gaps] / usual) - 1))
    if gaps.size and gaps.size <= len(dt) // 10:
        n = int(gaps[0])
        text = (
            f"about {lost} sample{'s are' if lost > 1 else ' is'} missing from the time grid: "
            f"{gaps.size} gap{'s' if gaps.size > 1 else ''}, the first after t = {t[n]:g} (index "
            f"{n}), {dt[n] / usual:.1f} intervals long. The score takes each gap for one long "
            "step; use --score local-linear, or record again."
        )
        return [RecordingFinding("dropped samples", True, text)]
    uneven = np.abs(dt - usual).max() / usual
    if uneven > 1e-3:
        text = (
            f"the time grid is irregular: intervals from {dt.min():g} to {dt.max():g}. That is "
            "allowed, if the times are those of the samples and not of their arrival."
        )
        return [RecordingFinding("irregular grid", False, text)]
    return []


def _check_finite(seen: _Statistics) -> list[RecordingFinding]:
    if not seen.bad:
        return []
    j, n, i = seen.bad[0]
    text = (
        f"{seen.bad_count:,} numbers in {len(seen.bad)} of {seen.count} trajectories are not "
        f"finite (the first in trajectory {j} at time index {n}, component {i}). They are never "
        "averaged: `fluctua convert --drop` leaves such trajectories out."
    )
    return [RecordingFinding("not finite", True, text)]


def _check_stuck(seen: _Statistics, components: tuple[str, ...]) -> list[RecordingFinding]:
    still = np.flatnonzero(seen.moments()[1] == 0)
    if not still.size:
        return []
    verb = "changes" if still.size == 1 else "change"
    text = f"{_join_names(still, components)} never {verb}: disconnected, or not part of the state."
    return [RecordingFinding("dead channel", True, text)]


def _check_clipping(seen: _Statistics, components: tuple[str, ...]) -> list[RecordingFinding]:
    """Find clipped channels, in which samples pile up on one value.

    A continuous quantity takes its extreme once, and one rounded to steps takes its last step less
    often than the last but one. A finding needs at least `CLIPPED` samples, and three times the
    next.
    """
    moving = seen.moments()[1] > 0
    findings = []
    for side, railed in zip(("below", "above"), seen.railed, strict=True):
        which = np.flatnonzero(railed)
        if which.size:
            worst = which[np.argmax(railed[which])]
            text = (
                f"clipped {side}: {_join_names(which, components)}; worst is {components[worst]}, "
                f"{format_count(int(railed[worst]), 'sample')} at the end of the counter's range. "
                "Lower the gain and record again."
            )
            findings.append(RecordingFinding("clipping", True, text))
    if findings:
        return findings
    for side, end, sign in (("above", seen.top, 1), ("below", seen.bottom, -1)):
        piled = (end.times >= CLIPPED) & (end.times > 3 * end.second_times) & moving
        which = np.flatnonzero(piled)
        if which.size:
            worst = which[np.argmax(end.times[which])]
            share = end.times[worst] / max(1, seen.samples)
            text = (
                f"clipped {side}: {_join_names(which, components)}; worst is {components[worst]}, "
                f"{end.times[worst]:,} samples ({share:.2%}) at exactly "
                f"{sign * end.value[worst]:g}. Lower the gain and record again."
            )
            findings.append(RecordingFinding("clipping", True, text))
    return findings


def _check_repeats(seen: _Statistics, d: Description) -> list[RecordingFinding]:
    if not seen.repeats:
        return []
    total = sum(n for _, n in seen.repeats)
    where = f"{format_count(total, 'sample')} in {len(seen.repeats)} of {seen.count} trajectories"
    chance = None if seen.counter is None else seen.counter.judge(total, ALARM)
    predicted = (
        ""
        if chance is None or seen.counter is None
        else _describe_prediction(chance, seen.counter.steps, d)
    )
    if chance is not None and not chance.held:
        return [
            RecordingFinding(
                "ties",
                False,
                f"{where} repeat{'s' * (total == 1)} the one before, as chance has it{predicted}.",
            )
        ]
    text = (
        f"{where} repeat{'s' * (total == 1)} the one before in every channel (first in trajectory "
        f"{seen.repeats[0][0]}){predicted}: an instrument that holds its last value when it "
        "misses one. A repeated sample is a kick that never was; record again, or "
        "drop those trajectories."
    )
    return [RecordingFinding("dropped samples", True, text)]


def _describe_prediction(chance: Judgement, steps: np.ndarray, d: Description) -> str:
    """Describe the ties that digitisation in steps predicts."""
    widths = ", ".join(f"{step:.3g}" for step in np.unique(np.round(steps, 12))[:4])
    unit = f" {d.units}" if d.units else ""
    if not np.isfinite(chance.expected):
        return (
            f"; samples are {widths}{unit} apart, which is as much as they change: use "
            "a finer range"
        )
    return (
        f"; steps of {widths}{unit} predict {chance.expected:,.0f} ± "
        f"{np.hypot(chance.error, chance.expected**0.5):.0f}"
    )


def _check_trend(x: np.ndarray, d: Description) -> list[RecordingFinding]:
    """Find a drift of one long record (T+1, M), or that it is too short for one to be seen."""
    search = find_trend(x)
    time = search.memory * float(np.median(np.diff(d.t)))
    if search.trend is not None:
        text = (
            f"the record is not in a steady state: {describe_trend(search.trend, d.components)}. "
            "If the detector drifts and the system does not, `fluctua convert IN OUT.nc "
            f"--detrend TIME` takes away what varies more slowly than TIME ({2 * time / LOST:.2g} "
            "or more). If the system drifts, or began elsewhere, use a part of the record in "
            "which it does not."
        )
        return [RecordingFinding("drift", True, text)]
    if not search.resolved:
        text = (
            f"{d.components[search.slowest]} is correlated over {time:.3g}, a "
            f"{len(x) / search.memory:.0f}th of the record: a drift looks like "
            "its own fluctuations."
        )
        return [RecordingFinding("slow", False, text)]
    return []


def _check_drift(seen: _Statistics, components: tuple[str, ...]) -> list[RecordingFinding]:
    """Compare time averages of the first and the last quarter of the trajectories."""
    means = np.concatenate(seen.means)
    quarter = len(means) // 4
    if quarter < 5:
        return []
    first = means[:quarter]
    last = means[-quarter:]
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.sqrt(first.var(axis=0, ddof=1) / quarter + last.var(axis=0, ddof=1) / quarter)
        z = np.nan_to_num((last.mean(axis=0) - first.mean(axis=0)) / error)
    limit = float(scipy.stats.t.isf(ALARM / (2 * len(z)), 2 * (quarter - 1)))
    which = np.flatnonzero(np.abs(z) > limit)
    if not which.size:
        return []
    worst = which[np.argmax(np.abs(z[which]))]
    change = last[:, worst].mean() - first[:, worst].mean()
    text = (
        f"the mean drifts while the measurement runs: {_join_names(which, components)}; worst is "
        f"{components[worst]}, by {change:.3g} between the first and the last {quarter} "
        f"trajectories ({abs(z[worst]):.1f} standard errors). The system, or its parameters, were "
        "not the same throughout."
    )
    return [RecordingFinding("drift", True, text)]


def _check_identical(seen: _Statistics, components: tuple[str, ...]) -> list[RecordingFinding]:
    """Find channels with the same numbers throughout: the score would count their noise twice."""
    groups: dict[bytes, list[int]] = {}
    for k in np.flatnonzero(seen.moments()[1] > 0):
        groups.setdefault(seen.hashes[k].digest(), []).append(int(k))
    return [
        RecordingFinding(
            "identical channels",
            True,
            f"{' and '.join(components[k] for k in same)} are the same numbers in every sample: "
            "one cable on two inputs? Two components with one noise have no score. "
            "Leave one out.",
        )
        for same in groups.values()
        if len(same) > 1
    ]


def _join_names(which: np.ndarray, components: tuple[str, ...]) -> str:
    shown = ", ".join(components[i] for i in which[:4])
    return shown + (f" and {len(which) - 4} more" if len(which) > 4 else "")
