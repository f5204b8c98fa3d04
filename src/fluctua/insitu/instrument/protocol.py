"""The protocol of an instrument: it takes settings, runs, and returns a batch of trajectories.

A driver is a class with five short methods; docs/laboratory.md shows one. Nothing here retries or
judges data: a method either does what it says or raises, and `instrument_substrate` decides what
happens next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from fluctua.core.arrays import Array, Params


class InstrumentError(RuntimeError):
    """Something that may pass: a dropped line, a time-out, a short answer.

    The request is made again.
    """


class InvalidReply(InstrumentError):
    """An answer that makes no sense where one came. The request is made again on a new line."""


class CommandRejected(InstrumentError):
    """The instrument understood and said no (a setting out of range).

    Asking again would not help.
    """


class Batch(NamedTuple):
    """One acquisition as it came, before it is checked.

    t: (T+1,) sampling times. samples: (E, T+1, M), codes of an analogue-to-digital converter or
    floating point.
    scale: units per code; x = scale · samples. full_scale: the largest magnitude that fits; a
    sample that reaches it was clipped. Samples that the instrument marks as invalid are NaN in x:
    `invalid` is their code. context: what was recorded besides once a trajectory, {name: (E, ...)},
    such as a modulation that was played; else None.

    >>> Batch(t, np.zeros((4, 3, 2), np.int16), scale=5e-4, full_scale=16.0, invalid=-32768).x.dtype
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
        """In units, at least float32. (E, T+1, M)"""
        samples = np.asarray(self.samples)
        if np.issubdtype(samples.dtype, np.floating):
            return samples * samples.dtype.type(self.scale)
        x = samples.astype(np.float32) * np.float32(self.scale)
        if self.invalid is not None:
            x[samples == self.invalid] = np.nan
        return x


class Health(NamedTuple):
    """What an instrument says of itself.

    settings: as it holds them now, read back, or None if it does not know. rebooted: since it was
    last asked.
    errors: what it complains about, in its own words; asking clears them. identity: maker, model
    and serial number, or "" if unknown. A training holds on to one instrument: another
    identity ends it.
    """

    settings: Params | None = None
    rebooted: bool = False
    errors: tuple[str, ...] = ()
    identity: str = ""

    @property
    def ok(self) -> bool:
        """No reboot and no complaints."""
        return not self.rebooted and not self.errors


@runtime_checkable
class Instrument(Protocol):
    """A physical system with knobs and a digitiser.

    Any method may raise `InstrumentError` (or OSError) when the line or the box fails; the caller
    then closes the instrument, opens a new one, and sets, arms and acquires again.
    """

    def set(self, settings: Params) -> None:
        """Turn the knobs. settings: a pytree of arrays, the θ of the training."""

    def arm(self, count: int) -> None:
        """Prepare for `count` trajectories at the present settings."""

    def acquire(self) -> Batch:
        """Run them, and return what was sampled."""

    def health(self) -> Health:
        """Settings read back, and complaints."""

    def close(self) -> None:
        """Let go of the line; must not raise."""
