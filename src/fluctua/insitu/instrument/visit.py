"""One visit to an instrument: set, arm, acquire, read back, and check the answers."""

from __future__ import annotations

import time
from typing import NamedTuple

import jax
import numpy as np

from fluctua.core.arrays import Params
from fluctua.insitu.instrument.protocol import (
    Batch,
    CommandRejected,
    Health,
    Instrument,
    InvalidReply,
)


class Visit(NamedTuple):
    """Batch and health of one visit.

    took: seconds in all.
    ran: seconds of these for running and fetching.
    """

    batch: Batch
    health: Health
    took: float
    ran: float


def visit_instrument(settings: Params, size: int, instrument: Instrument) -> Visit:
    """Set, arm, acquire, and read back."""
    start = time.perf_counter()
    instrument.set(settings)
    instrument.arm(size)
    armed = time.perf_counter()
    batch = instrument.acquire()
    acquired = time.perf_counter()
    health = instrument.health()
    return Visit(batch, health, time.perf_counter() - start, acquired - armed)


def check_answers(batch: Batch, health: Health, size: int, channels: int | None) -> None:
    """Refuse answers that are not `size` trajectories of so many channels."""
    for method, expected, answer in (("acquire", Batch, batch), ("health", Health, health)):
        if not isinstance(answer, expected):
            returned = "None" if answer is None else f"a {type(answer).__name__}"
            raise InvalidReply(
                f"`{method}` of the driver returned {returned}, where a "
                f"`{expected.__name__}` was expected"
            )
    samples = np.asarray(batch.samples)
    if samples.dtype.kind not in "fiu":
        raise InvalidReply(
            f"the samples of a batch must be real numbers; their type is {samples.dtype}"
        )
    times = np.shape(batch.t)
    if len(times) != 1 or samples.ndim != 3 or samples.shape[:2] != (size, *times):
        raise InvalidReply(
            f"samples must be ({size} trajectories, times, channels); samples of shape "
            f"{samples.shape} came, and times of shape {times}"
        )
    if samples.shape[2] != (channels or samples.shape[2]):
        raise InvalidReply(f"a sample must have {channels} channels; got {samples.shape[2]}")
    for name, values in (batch.context or {}).items():
        if np.shape(values)[:1] != (size,):
            raise InvalidReply(
                f"the context {name!r} must have {size} rows, one per trajectory; got "
                f"{np.shape(values)}"
            )
    if not batch.full_scale > 0:
        raise CommandRejected(
            "`full_scale` of a batch must be positive (np.inf if unknown); got "
            f"{batch.full_scale!r}"
        )


def are_same(asked: Params, answered: Params | None) -> bool:
    """Whether settings read back equal those that were sent, to the rounding of decimals."""
    if answered is None:
        return True
    sent = jax.tree.leaves(asked)
    read = jax.tree.leaves(answered)
    pairs = zip(sent, read, strict=False)
    return len(sent) == len(read) and all(
        np.shape(a) == np.shape(b) and np.allclose(a, b, rtol=1e-6, atol=1e-9) for a, b in pairs
    )
