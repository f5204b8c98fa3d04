"""The protocol of an instrument: it takes settings, runs, and returns a batch of trajectories.

A driver is a class with five short methods; docs/laboratory.md shows one. Nothing here retries or
examines data: a method either does its task or raises, and `instrument_substrate` decides what
happens next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from fluctua.core.arrays import Array, Params


class InstrumentError(RuntimeError):
    """A failure that may pass: a dropped line, a time-out, a short answer. It is retried.

    Raise it in a driver; other exceptions but OSError end a run.

    >>> def acquire(count):
    ...     raise insitu.instrument.InstrumentError("no trigger within 5 s")
    """


class InvalidReply(InstrumentError):
    """An answer that cannot be parsed. The request is repeated on a new line.

    >>> class Line:
    ...     def query(self, message): return "1.25,oops"
    >>> insitu.instrument.query_numbers(Line(), "SOUR:OMEG?")
    Traceback (most recent call last):
    fluctua.insitu.instrument.protocol.InvalidReply: SOUR:OMEG? was answered by '1.25,oops', ...
    """


class CommandRejected(InstrumentError):
    """A command that the instrument refused (a setting out of range). It is not repeated.

    >>> class Line:
    ...     def query(self, message): return "9.91e37"  # SCPI's NaN
    >>> insitu.instrument.query_number(Line(), "SENS:POW?")
    Traceback (most recent call last):
    fluctua.insitu.instrument.protocol.CommandRejected: SENS:POW? was answered by '9.91e37': ...
    """


class Batch(NamedTuple):
    """One acquisition as it was received, before it is checked.

    t: sampling times (T+1,).
    samples: (E, T+1, M), codes of an analogue-to-digital converter or floating point.
    scale: units per code; x = scale · samples.
    full_scale: the largest magnitude that fits; a sample that reaches it was clipped.
    invalid: the code of a sample that the instrument marks as invalid; it is NaN in x.
    context: what else was recorded once per trajectory, {name: (E, ...)}, such as a modulation.

    >>> codes = np.zeros((4, 3, 2), np.int16)  # (trajectories, times, channels)
    >>> batch = insitu.instrument.Batch(np.arange(3.0), codes, scale=5e-4, invalid=-32768)
    >>> batch.x.dtype
    dtype('float32')
    """

    t: Array
    samples: np.ndarray
    scale: float = 1.0
    full_scale: float = np.inf
    invalid: int | None = None
    context: Mapping[str, np.ndarray] | None = None

    @property
    def x(self) -> np.ndarray:
        """Samples in units, at least float32. Shape (E, T+1, M)."""
        samples = np.asarray(self.samples)
        if np.issubdtype(samples.dtype, np.floating):
            return samples * samples.dtype.type(self.scale)
        x = samples.astype(np.float32) * np.float32(self.scale)
        if self.invalid is not None:
            x[samples == self.invalid] = np.nan
        return x


class Health(NamedTuple):
    """State of an instrument after an acquisition.

    settings: as read back, or None if the instrument cannot be read back.
    rebooted: whether it restarted since the last query.
    errors: entries of its error queue; reading clears them.
    identity: maker, model and serial number, or "" if unknown. A training belongs to one
        instrument: another identity ends it.

    >>> health = insitu.instrument.Health({"force": 0.5}, errors=('-222,"Data out of range"',))
    >>> health.ok
    False
    """

    settings: Params | None = None
    rebooted: bool = False
    errors: tuple[str, ...] = ()
    identity: str = ""

    @property
    def ok(self) -> bool:
        """Whether there was no reboot and no error."""
        return not self.rebooted and not self.errors


@runtime_checkable
class Instrument(Protocol):
    """A physical system with knobs and a digitiser.

    A driver may also have attributes that a check reads (`fluctua.insitu.check_instrument`):

    limits: lowest and highest value of each knob, {name: (low, high)}.
    units: of knobs and channels, {name: unit}.
    channels: names of the components of a sample.

    Any method may raise `InstrumentError` (or OSError) when the line or the box fails; the caller
    then closes the instrument, opens a new one, and sets, arms and acquires again.

    >>> class Bead:  # nothing is inherited
    ...     def set(self, settings): self.settings = settings
    ...     def arm(self, count): self.count = count
    ...     def acquire(self):
    ...         return insitu.instrument.Batch(np.arange(3.0), np.zeros((self.count, 3, 1)))
    ...     def health(self): return insitu.instrument.Health(self.settings)
    ...     def close(self): pass
    >>> isinstance(Bead(), insitu.instrument.Instrument)
    True
    """

    def set(self, settings: Params) -> None:
        """Turn the knobs. settings: a pytree of arrays, the θ of the training."""

    def arm(self, count: int) -> None:
        """Prepare for `count` trajectories at the present settings."""

    def acquire(self) -> Batch:
        """Run them, and return the samples."""

    def health(self) -> Health:
        """Read back settings and errors."""

    def close(self) -> None:
        """Close the line; must not raise."""
