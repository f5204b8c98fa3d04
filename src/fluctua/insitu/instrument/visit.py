"""One visit to an instrument: set, arm, acquire, read back, and check the answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fluctua.core.arrays import Params
from fluctua.core.words import close_match
from fluctua.insitu.instrument.protocol import (
    Batch,
    CommandRejected,
    Health,
    Instrument,
    InstrumentError,
    InvalidReply,
)
from fluctua.store.code import locate_error

SAME_TIME = 0.01
"""Largest difference between two equal times, in steps: float32 rounds a long time axis."""


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
    _call("set", instrument.set, settings)
    _call("arm", instrument.arm, size)
    armed = time.perf_counter()
    batch = _call("acquire", instrument.acquire)
    acquired = time.perf_counter()
    health = _call("health", instrument.health)
    return Visit(batch, health, time.perf_counter() - start, acquired - armed)


def _call(name: str, method: Callable[..., Any], *arguments: Any) -> Any:
    """Call a method of a driver; an error in its code is raised with its line."""
    try:
        return method(*arguments)
    except (InstrumentError, OSError):
        raise
    except Exception as error:
        raise CommandRejected(f"`{name}` of the driver raised {locate_error(error)}") from error


class ExpectedRecord(NamedTuple):
    """Shape that a record must have; None for what is not known.

    channels: components of a sample.
    t: times of the samples (T+1,).
    """

    channels: int | None = None
    t: np.ndarray | None = None


def check_expected(batch: Batch, expected: ExpectedRecord) -> None:
    """Refuse a record of another length, rate or number of channels than the model's."""
    samples = np.shape(batch.samples)
    times = np.asarray(batch.t)
    if expected.channels is not None and len(samples) == 3 and samples[2] != expected.channels:
        raise CommandRejected(
            f"the model has {expected.channels} channels, and a sample of the instrument has "
            f"{samples[2]}. Record those of the model, or change its state"
        )
    if expected.t is None or times.ndim != 1:
        return
    t = np.asarray(expected.t, float)
    if len(times) != len(t):
        raise CommandRejected(
            f"the model has {len(t)} times, and a record of the instrument has {len(times)}. Set "
            "the number of samples when the driver connects, or `t` of the model"
        )
    step = (t[-1] - t[0]) / max(len(t) - 1, 1)
    if not np.all(np.abs(times - t) <= SAME_TIME * step):
        raise CommandRejected(
            f"the model has {_describe_times(t)}, and the instrument {_describe_times(times)}. Set "
            "the sampling rate when the driver connects, or `t` of the model, in the same unit"
        )


def _describe_times(t: np.ndarray) -> str:
    interval = (t[-1] - t[0]) / max(len(t) - 1, 1)
    return f"samples from {t[0]:.4g} to {t[-1]:.4g}, {interval:.4g} apart"


def check_knobs(wanted: Params, reported: Params | None) -> None:
    """Refuse an instrument that reads back other knobs than those of the model."""
    if not isinstance(wanted, Mapping) or not isinstance(reported, Mapping):
        return
    missing = [name for name in wanted if name not in reported]
    unknown = [name for name in reported if name not in wanted]
    if missing or unknown:
        hint = close_match(missing[0], unknown) if missing and unknown else ""
        raise CommandRejected(
            f"the model has the knobs {_join(wanted)}, and `health` of the driver reads back "
            f"{_join(reported)}. Give both the same names.{hint}"
        )


def _join(names: Mapping[str, Any]) -> str:
    return ", ".join(names) or "none"


def compare_settings(wanted: Params, reported: Params | None) -> str:
    """Describe a setting that was read back differently: `force was set to 1 and reads back 0`."""
    if not isinstance(wanted, Mapping) or not isinstance(reported, Mapping):
        return ""
    for name, value in wanted.items():
        sent = np.asarray(value, float)
        read = np.asarray(reported[name], float)
        if sent.shape != read.shape:
            return f"{name} has shape {sent.shape} and reads back with shape {read.shape}"
        off = np.abs(sent - read)
        if not are_same(sent, read):
            place = np.unravel_index(int(np.argmax(off)), off.shape)
            index = str(list(map(int, place))) if place else ""
            return f"{name}{index} was set to {sent[place]:g} and reads back {read[place]:g}"
    return ""


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


def are_same(wanted: Params, reported: Params | None) -> bool:
    """Whether settings read back equal those that were sent, to the rounding of decimals."""
    if reported is None:
        return True
    sent = jax.tree.leaves(wanted)
    read = jax.tree.leaves(reported)
    pairs = zip(sent, read, strict=False)
    return len(sent) == len(read) and all(
        np.shape(a) == np.shape(b) and np.allclose(a, b, rtol=1e-6, atol=1e-9) for a, b in pairs
    )
