"""A driver from two functions: one that turns the knobs, and one that takes a record."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import jax
import numpy as np

from fluctua.core import check
from fluctua.core.arrays import Array, Params
from fluctua.insitu.instrument.protocol import Batch, CommandRejected, Health, InstrumentError
from fluctua.insitu.instrument.record_forms import (
    RecordShape,
    join_batches,
    read_record,
)

Limits = Mapping[str, tuple[Any, Any]]
"""Lowest and highest value of each knob."""


class FunctionDriver:
    """The driver that `make_driver` returns.

    limits: lowest and highest value of each knob, {name: (low, high)}.
    units: of knobs and channels, {name: unit}.
    channels: names of the components of a sample; empty where they were not given.
    """

    def __init__(
        self,
        set: Callable[[Params], Any],
        acquire: Callable[..., Any],
        shape: RecordShape,
        *,
        limits: Limits,
        units: Mapping[str, str],
        channels: tuple[str, ...],
        health: Callable[[], Any] | None,
        transient: tuple[type[Exception], ...],
        close: Callable[[], Any] | None,
    ):
        self.channels = channels
        self.limits = limits
        self.units = units
        self._set = set
        self._acquire = acquire
        self._takes_count = _takes_argument(acquire)
        self._shape = shape
        self._health = health
        self._transient = transient
        self._close = close

    def set(self, settings: Params) -> None:
        """Turn the knobs, after a check against the limits."""
        values = jax.tree.map(_as_number, settings)
        _check_limits(values, self.limits)
        self._call("set", self._set, values)

    def arm(self, count: int) -> None:
        """Remember how many trajectories `acquire` has to take."""
        self._shape = self._shape._replace(trajectories=count)

    def acquire(self) -> Batch:
        """Take the trajectories, and read them as a `Batch`."""
        if self._takes_count:
            record = self._call("acquire", self._acquire, self._shape.trajectories)
            batch = read_record(record, self._shape)
        else:
            one = self._shape._replace(trajectories=1)
            calls = range(self._shape.trajectories)
            batch = join_batches(
                [read_record(self._call("acquire", self._acquire), one) for _ in calls]
            )
        samples = np.shape(batch.samples)
        if len(samples) == 3:  # later records must be as long and as wide as the first
            self._shape = self._shape._replace(points=samples[1], channels=samples[2])
        return batch

    def health(self) -> Health:
        """The settings as read back, where there is a function that reads them."""
        if self._health is None:
            return Health()
        answer = self._call("health", self._health)
        return answer if isinstance(answer, Health) else Health(settings=answer)

    def close(self) -> None:
        """Close the instrument; a failure to do so is ignored."""
        if self._close is not None:
            with suppress(Exception):
                self._close()

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except self._transient as error:
            kind = type(error).__name__
            raise InstrumentError(f"`{name}` failed: {kind}: {error}") from error


def make_driver(
    set: Callable[[Params], Any],
    acquire: Callable[..., Any],
    *,
    t: Array | None = None,
    interval: float | None = None,
    channels: int | Sequence[str] | None = None,
    limits: Limits | None = None,
    units: Mapping[str, str] | None = None,
    health: Callable[[], Any] | None = None,
    transient: tuple[type[Exception], ...] = (),
    close: Callable[[], Any] | None = None,
) -> FunctionDriver:
    """Make a driver from a function that turns the knobs and one that takes a record.

    A record may be an array (trajectories, times, channels), a list of trajectories, one trajectory
    (times, channels) or (times,), a pair (t, x), the path of a .npy file, a
    `Batch` or `Trajectories`. Complex channels become the state [Re, Im]. A shape with two meanings
    is refused.

    Args:
        set: turns the knobs. Called with {name: value}, floats and arrays.
        acquire: count -> the record of so many trajectories; or a function without arguments that
            returns one trajectory, which is called for each.
        t: sampling times (T+1,). Not needed if records have them.
        interval: time between two samples, in place of `t`.
        channels: names of the components of a real sample, or their number. Needed where a shape
            alone is not clear.
        limits: lowest and highest value of each knob, {name: (low, high)}. Settings beyond them are
            refused before `set` is called.
        units: of knobs and channels, {name: unit}.
        health: returns the settings as read back, {name: value}, or a `Health`.
        transient: exceptions after which the acquisition is repeated, beside OSError and
            `InstrumentError`. Others end the run.
        close: closes the instrument.

    Returns: a driver. `insitu.run` takes a function without arguments that returns one, so that
    the instrument is opened again after a failure.

    >>> knobs = {}
    >>> driver = insitu.instrument.make_driver(
    ...     set=knobs.update, acquire=lambda: np.zeros((301, 2)), interval=0.02
    ... )
    >>> driver.set({"drive": 0.5})
    >>> driver.arm(4)
    >>> driver.acquire().x.shape
    (4, 301, 2)
    """
    functions = {"set": set, "acquire": acquire, "health": health, "close": close}
    for name, function in functions.items():
        if not callable(function) and (function is not None or name in ("set", "acquire")):
            raise TypeError(f"`{name}` must be a function; got {function!r}.")
    times = None if t is None else check.times(t)
    if times is not None and interval is not None:
        raise ValueError("`t` and `interval` exclude each other: give one of them.")
    if interval is not None and not (np.ndim(interval) == 0 and 0 < interval < np.inf):
        raise ValueError(f"`interval` must be a positive, finite time; got {interval!r}.")
    names = () if channels is None or isinstance(channels, int) else tuple(channels)
    number = channels if isinstance(channels, int) else len(names) or None
    if isinstance(channels, str) or (channels is not None and (number or 0) < 1):
        raise ValueError(
            f"`channels` must be names of components, or their number, at least 1; got "
            f"{channels!r}."
        )
    limits = dict(limits or {})
    for name, pair in limits.items():
        _check_limit(name, pair)
    points = None if times is None else len(times)
    return FunctionDriver(
        set,
        acquire,
        RecordShape(1, times, interval, points, number),
        limits=limits,
        units=dict(units or {}),
        channels=names,
        health=health,
        transient=tuple(transient),
        close=close,
    )


def _check_limit(name: str, pair: Any) -> None:
    try:
        low, high = pair
        is_ordered = bool(np.all(np.asarray(low) < np.asarray(high)))
    except (TypeError, ValueError):
        is_ordered = False
    if not is_ordered:
        raise ValueError(
            f"`limits[{name!r}]` must be (low, high) with low below high; got {pair!r}."
        )


def _takes_argument(function: Callable[..., Any]) -> bool:
    """Whether a function takes an argument; assumed where its signature is unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    places = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    )
    return any(parameter.kind in places for parameter in parameters)


def _as_number(value: Any) -> Any:
    """A float for one number, else an array."""
    value = np.asarray(value, float)
    return float(value) if value.ndim == 0 else value


def _check_limits(settings: Params, limits: Limits) -> None:
    for name, (low, high) in limits.items():
        if name not in settings:
            raise CommandRejected(
                f"the driver has limits of a knob {name!r}; the settings are "
                f"{', '.join(map(repr, settings))}. Give model and driver the same names."
            )
        value = np.asarray(settings[name])
        outside = ~((value >= low) & (value <= high))
        if outside.any():
            worst = np.atleast_1d(value)[np.atleast_1d(outside)][0]
            raise CommandRejected(
                f"the knob {name!r} must be from {_show(low)} to {_show(high)}; got {worst:g}. "
                f"Narrow its bounds in the model."
            )


def _show(limit: Any) -> str:
    return f"{limit:g}" if np.ndim(limit) == 0 else str(np.asarray(limit).tolist())
