"""Convert any file of trajectories to a recording, and copy what is sound of a damaged one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fluctua.core.words import format_count
from fluctua.insitu.recording.description import format_now, software_name
from fluctua.insitu.recording.reader import RecordingFile
from fluctua.insitu.recording.trend import remove_trend
from fluctua.insitu.recording.writer import Writer, create


class Converted(NamedTuple):
    """Trajectories of a copy.

    kept: their number.
    dropped: numbers of those with states that are not finite.
    lost: numbers of those that could not be read.
    """

    kept: int
    dropped: tuple[int, ...]
    lost: tuple[int, ...]


def convert(
    recording: RecordingFile,
    path: str | Path,
    *,
    drop: bool = False,
    parameters: Mapping[str, Any] | None = None,
    detrend: float | None = None,
    channels: Sequence[str] | None = None,
    units: str | None = None,
    time_units: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Converted:
    """Copy trajectories, one at a time, into a new recording.

    Args:
        recording: as `open_recording` gives it, with `damaged=True` to save what is whole of a
            damaged one.
        path: the recording to write; it must not exist.
        drop: leave out trajectories with states that are not finite, which are refused otherwise.
        parameters: θ as it was set, added to that of the file.
        detrend: take away what varies more slowly than this time, an offset of the detector that
            drifts; for long records of a steady state (see `trend.remove_trend`). It is noted in
            the copy's `provenance`.
        channels: names in place of those of the file.
        units: of the states, in place of those of the file; the numbers stay as they are.
        time_units: of the times, likewise.
        progress: called with (done, total).
    Returns: a `Converted`, how many were kept and which were not.

    >>> np.save("scope.npy", np.zeros((4, 20, 2), np.int16))  # codes of a converter
    >>> with insitu.files.open("scope.npy", dt=1e-6, scale=3.05e-4) as scope:
    ...     insitu.files.convert(scope, "scope.nc", channels=("x", "y"), units="V").kept
    4
    """
    d = recording.description
    origin = f"converted from {recording.path.name} ({recording.kind})"
    samples = None
    if detrend is not None:
        samples = _convert_to_samples(recording, detrend)
        origin += f", detrended: what varies more slowly than {detrend:g} was subtracted"
    if channels is not None and len(channels) != len(d.channels):
        raise ValueError(
            f"`channels` must name {format_count(len(d.channels), 'channel')} of {recording.path}; "
            f"got {len(channels)}: {', '.join(channels)}."
        )
    head = dataclasses.replace(
        d,
        channels=d.channels if channels is None else tuple(channels),
        units=d.units if units is None else units,
        time_units=d.time_units if time_units is None else time_units,
        parameters={**d.parameters, **(parameters or {})},
        provenance=f"{d.provenance}; {origin}" if d.provenance else origin,
        software=software_name(),
        created=format_now(),
    )
    path = Path(path)
    writer = create(path, head, trajectories=recording.count)
    try:
        with writer:
            dropped, lost = _copy(
                recording, writer, drop, samples, progress or (lambda done, total: None)
            )
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return Converted(writer.count, dropped, lost)


def _convert_to_samples(recording: RecordingFile, detrend: float) -> float:
    """The time of `detrend` in samples; refused where a trend has no meaning."""
    if not (np.isfinite(detrend) and detrend > 0):
        raise ValueError(f"`detrend` (--detrend) is a time, above 0; got {detrend:g}.")
    if recording.description.events is not None:
        raise ValueError(
            f"{recording.path} has events, whose changes add up to its states: no trend is taken "
            "from it."
        )
    return detrend / float(np.median(np.diff(recording.t)))


def _copy(
    recording: RecordingFile,
    writer: Writer,
    drop: bool,
    samples: float | None,
    progress: Callable[[int, int], None],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Copy trajectories; returns the numbers of those that were dropped and of those lost."""
    d = recording.description
    dropped = []
    lost = []
    for n in range(recording.count):
        progress(n, recording.count)
        try:
            one = recording.trajectories(n, n + 1, load=True)
        except (OSError, ValueError):  # a checksum that differs
            if recording.kind != "recording":
                raise
            lost.append(n)
            continue
        x = np.asarray(one.x[0])
        if not np.isfinite(x).all():
            if not drop:
                raise ValueError(
                    f"trajectory {n} of {recording.path} has states that are not finite; --drop "
                    "leaves it out."
                )
            dropped.append(n)
            continue
        if samples is not None:
            x = remove_trend(x, samples, f"trajectory {n} of {recording.path}")
        if d.is_complex:
            x = x[:, : len(d.channels)] + 1j * x[:, len(d.channels) :]
        known = (
            None if one.context is None else {name: leaf[0] for name, leaf in one.context.items()}
        )
        events = None if one.events is None else [leaf[0] for leaf in one.events]
        writer.append(x, known, events)
    return tuple(dropped), tuple(lost)
