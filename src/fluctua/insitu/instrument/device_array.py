"""Several instruments as one substrate: (key, theta, count) -> trajectories of all of them.

All are set and run at once, in one thread each. The wanted trajectories are split by the speed of
the devices. The share of a device that fails goes to the others, and it is tried again after 1,
2, 4, … 16 calls until it answers. Nothing that was received before the failure is lost, and nothing
is acquired twice.

Trajectories carry the number of their device (`Trajectories.group`), so that averages count every
device the same and have errors between devices: those of the expected return of all devices of
which these are a sample.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from fluctua.core.arrays import Array, Params
from fluctua.core.estimate import Groups
from fluctua.core.text import describe_groups
from fluctua.core.trajectories import Trajectories
from fluctua.insitu.instrument.protocol import CommandRejected, Instrument, InstrumentError
from fluctua.insitu.instrument.substrate import (
    Incident,
    InstrumentSubstrate,
    Retry,
    instrument_substrate,
)

STEADY = 2.0
"""Factor between rates and shares above which the shares change: equal shares are best."""
FORGET = 0.3
"""Weight of the last call in the mean rate of a device."""
MAX_WAIT = 16
"""Calls after which a device that failed is tried again, at most."""
DOWN = "device down"
BACK = "device back"

Share = Callable[[Params, Any], Params]
"""(θ, calibration of a device) -> its settings, written in JAX."""
Prepare = Callable[[int], None]
"""Called with the number of a device before it is used; raises `InstrumentError` if it fails."""


class DeviceHealth(NamedTuple):
    """Health of one device of an array.

    identity: maker, model and serial number.
    up: whether it answered the last request.
    rate: trajectories per second, relative to the median of all devices.
    good, lost: trajectories so far.
    failures: so far, including retried ones.
    """

    identity: str
    up: bool
    rate: float
    good: int
    lost: int
    failures: int


class DeviceArray:
    """The substrate returned by `array`.

    `devices`: the substrate of each; its `context` is its calibration.
    """

    def __init__(
        self,
        devices: Sequence[InstrumentSubstrate],
        *,
        share: Share | None = None,
        rates: Sequence[float] | None = None,
        prepare: Prepare = lambda k: None,
        report: Callable[[Incident], None] = lambda incident: None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        if not devices:
            raise ValueError("an array needs one device at least; got none.")
        if rates is not None and (len(rates) != len(devices) or not all(r > 0 for r in rates)):
            raise ValueError(
                f"`rates` must be {len(devices)} positive numbers, one per device; got "
                f"{list(rates)!r}."
            )
        self.devices = devices
        self.share = share
        self.prepare = prepare
        self.report = report
        self.clock = clock
        self.rates_given = rates is not None
        self.weights = np.ones(len(devices)) if rates is None else np.asarray(rates, float)
        self.wait = np.zeros(len(devices), int)  # calls until a failed device is tried again
        self.failures_in_a_row = np.zeros(len(devices), int)
        self.refused = np.zeros(len(devices), bool)  # asking again would not help
        self.rates: dict[int, float] = {}  # trajectories per second, as last measured
        self.failure: InstrumentError | None = None  # the last
        self.retry = devices[0].retry

    def __call__(self, key: Array, theta: Params, count: int) -> Trajectories:
        """Acquire `count` good trajectories; `group` numbers the devices. `key` is not used."""
        if count < len(self.devices):
            raise ValueError(
                f"{count} trajectories are fewer than the {len(self.devices)} devices. Take "
                "at least one per device, better several."
            )
        pieces: dict[int, list[Trajectories]] = {k: [] for k in range(len(self.devices))}
        settings: dict[int, Params] = {}

        def gather(k: int, share: int) -> tuple[int, InstrumentError | None]:
            self.prepare(k)
            settings[k] = self.settings(theta, k)
            taken, failure = self.devices[k].gather(settings[k], share)
            if taken is not None:
                pieces[k].append(taken)
            return (0 if taken is None else len(taken.x)), failure

        active = self._choose_devices()
        missing = count
        later = [int(k) for k in np.flatnonzero(~self.refused) if k not in active]
        while missing:
            if not active:
                active = later  # sooner than planned: the others are gone
                later = []
            if not active:
                raise self._make_failure(f"{missing:,} of {count:,} trajectories are missing")
            shares = dict(zip(active, split_count(missing, self.weights[active]), strict=True))
            results = self._run_on_each({k: n for k, n in shares.items() if n}, gather)
            for k, (received, failure, seconds) in results.items():
                missing -= received
                self._record_answer(k, failure)
                if failure is None:
                    rate = received / max(seconds, 1e-9)
                    self.rates[k] = self.rates.get(k, rate) ** (1 - FORGET) * rate**FORGET
            self._update_weights()
            active = [k for k in active if not self.failures_in_a_row[k]]
        self._refuse_duplicates()
        for k, parts in pieces.items():
            self.devices[k].last = (settings[k], _concatenate(parts)) if parts else None
        return _interleave({k: _concatenate(parts) for k, parts in pieces.items() if parts})

    def settings(self, theta: Params, k: int) -> Params:
        """Settings of device k at θ."""
        if self.share is None:
            return jax.tree.map(np.asarray, theta)
        context = self.devices[k].context
        if context is None:
            raise ValueError(
                "settings corrected device by device need the calibration of each: give `contexts`."
            )
        calibration = jax.tree.map(lambda v: np.asarray(v)[0], context(1))
        return jax.tree.map(np.asarray, self.share(theta, calibration))

    def prepare_all(self) -> None:
        """Prepare all devices at once; one that fails is left out until it answers."""

        def prepare(k: int, _: int) -> tuple[int, InstrumentError | None]:
            self.prepare(k)
            return 0, None

        shares = dict.fromkeys(self._choose_devices(), 0)
        for k, (_, failure, _) in self._run_on_each(shares, prepare).items():
            self._record_answer(k, failure)
        self._refuse_duplicates()
        if np.all(self.failures_in_a_row > 0):
            raise self._make_failure("none could be prepared")

    def health(self) -> list[DeviceHealth]:
        """Health of each device."""

        def lost(counts):
            return sum(n for kind, n in counts.items() if kind not in ("good", "failures"))

        return [
            DeviceHealth(
                d.identity,
                not self.failures_in_a_row[k],
                float(self.weights[k]),
                d.counts["good"],
                lost(d.counts),
                d.counts["failures"],
            )
            for k, d in enumerate(self.devices)
        ]

    def costs(self) -> tuple[float, float]:
        """Seconds per visit to a device (set, arm, read back) and per trajectory, as measured."""
        visits, ran = (
            max(sum(getattr(d, name) for d in self.devices), 1) for name in ("visits", "ran")
        )
        spent = {name: sum(d.seconds[name] for d in self.devices) for name in ("visit", "run")}
        return max(spent["visit"] / visits, 1e-9), max(spent["run"] / ran, 1e-9)

    def describe(self, groups: Groups | None = None) -> str:
        """One line per device; with `groups`, also how many trajectories are worth while."""
        lines = []
        for k, device in enumerate(self.devices):
            note = " (does not answer)" if self.failures_in_a_row[k] else ""
            lines.append(f"device {k + 1}{note}: {device.describe()}")
        if groups is None or len(groups.group) < 2:
            return "\n".join(lines)
        visit, run = self.costs()

        def format_size(v):
            return (
                f"{v:,.0f}"
                if np.isfinite(v)
                else "as many as there is time for: no difference was seen"
            )

        lines += [describe_groups(groups).strip()]
        lines += [
            f"a visit to a device took {visit:.2g} s, a trajectory {run:.2g} s; worth while, per "
            "device and iteration:",
            f"  for J         {format_size(max(1.0, groups.returns.optimal_size(visit, run)))}",
            f"  its gradient  {format_size(max(1.0, groups.gradient.optimal_size(visit, run)))}",
            "more are better spent on more devices (least variance for the "
            "time, two-stage sampling)",
        ]
        return "\n".join(lines)

    @property
    def counts(self) -> Counter[str]:
        """Trajectories by verdict and failures, of all devices together."""
        return sum((device.counts for device in self.devices), Counter())

    @property
    def examines(self) -> bool:
        """Whether the guards of all devices examine the residuals."""
        return all(device.examines for device in self.devices)

    def arrays(self) -> dict[str, np.ndarray]:
        """Arrays for a checkpoint, besides those of the devices: shares, failed devices."""
        return {
            "array/weights": self.weights,
            "array/wait": self.wait,
            "array/silent": self.failures_in_a_row,
        }

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Continue from the `arrays` of a checkpoint."""
        if len(arrays["array/wait"]) != len(self.devices):
            raise ValueError(
                f"the run is of {len(arrays['array/wait'])} devices, and {len(self.devices)} were "
                "given. A device that is broken keeps its place; for another array "
                "begin another run."
            )
        if not self.rates_given:
            self.weights = np.array(arrays["array/weights"], float)
        self.wait = np.array(arrays["array/wait"], int)
        self.failures_in_a_row = np.array(arrays["array/silent"], int)

    def close(self) -> None:
        """Close all devices."""
        for device in self.devices:
            device.close()

    def _choose_devices(self) -> list[int]:
        """Devices of this call: those that answer, and failed ones that are due; else all."""
        usable = np.flatnonzero(~self.refused)
        self.wait[usable] = np.maximum(self.wait[usable] - 1, 0)
        due = [int(k) for k in usable if not self.wait[k]]
        return due or [int(k) for k in usable]

    def _run_on_each(
        self,
        shares: Mapping[int, int],
        act: Callable[[int, int], tuple[int, InstrumentError | None]],
    ) -> dict[int, tuple[int, InstrumentError | None, float]]:
        """Run an act on several devices at once, in threads: result, failure, seconds."""

        def run(k: int) -> tuple[int, InstrumentError | None, float]:
            start = self.clock()
            # the others wait for a device that failed before: it has one attempt
            self.devices[k].retry = (
                self.retry._replace(attempts=1) if self.failures_in_a_row[k] else self.retry
            )
            try:
                received, failure = act(k, shares[k])
            except (InstrumentError, OSError) as error:
                received = 0
                failure = (
                    error if isinstance(error, InstrumentError) else InstrumentError(str(error))
                )
            return received, failure, self.clock() - start

        with ThreadPoolExecutor(max(len(shares), 1)) as threads:
            return dict(zip(shares, threads.map(run, shares), strict=True))

    def _record_answer(self, k: int, failure: InstrumentError | None) -> None:
        """Record that a device answered, or failed."""
        name = f"device {k + 1}" + (
            f" ({self.devices[k].identity})" if self.devices[k].identity else ""
        )
        if failure is None:
            if self.failures_in_a_row[k]:
                self.report(Incident(BACK, 0, f"{name} answers again"))
            self.failures_in_a_row[k] = self.wait[k] = 0
            return
        if not self.failures_in_a_row[k]:
            self.report(
                Incident(DOWN, 0, f"{name} is left out, its share goes to the others: {failure}")
            )
        self.failure = failure
        self.wait[k] = min(2 ** self.failures_in_a_row[k], MAX_WAIT)
        self.failures_in_a_row[k] += 1
        self.refused[k] = isinstance(failure, CommandRejected)

    def _make_failure(self, what: str) -> InstrumentError:
        """Make the error for an array of which no device answers."""
        kind = CommandRejected if self.refused.all() else InstrumentError
        return kind(
            f"none of {len(self.devices)} devices answers: {what}. The last failure: "
            f"{self.failure} What was acquired is kept; mend one and go on with the run."
        )

    def _update_weights(self) -> None:
        """Set the shares by the rates, once one has changed by more than a clock's noise."""
        if self.rates_given or len(self.rates) < 2:
            return
        known = np.array([*self.rates])
        relative = np.array([*self.rates.values()]) / np.median([*self.rates.values()])
        change = relative / self.weights[known]
        if change.max() / change.min() > STEADY:
            self.weights[known] = relative

    def _refuse_duplicates(self) -> None:
        """Refuse one instrument under two addresses: it would pass for two devices that agree."""
        seen: dict[str, int] = {}
        for k, device in enumerate(self.devices):
            first = seen.setdefault(device.identity, k)
            if device.identity and first != k:
                raise CommandRejected(
                    f"devices {first + 1} and {k + 1} are the same instrument, "
                    f"{device.identity!r}: it would be counted twice. Give every device once."
                )


def array(
    connects: Sequence[Callable[[], Instrument]],
    *,
    share: Share | str = "settings",
    batch: int = 100,
    retry: Retry | None = None,
    contexts: Sequence[Callable[[int], Any]] | None = None,
    rates: Sequence[float] | None = None,
    report: Callable[[Incident], None] = lambda incident: None,
    sleep: Callable[[float], None] = time.sleep,
) -> DeviceArray:
    """Make one substrate of several instruments, for `ppgt` and everything on top of it.

    Args:
        connects: opens each; called again after every failure.
        share: "settings" for the same settings on all (a robust design), or (θ, calibration) ->
            settings, which makes devices that differ do the same θ; `corrected` then makes the
            process of θ.
        batch: trajectories per acquisition.
        retry: how often and after which pauses a device is tried before it is left out.
        contexts: E -> the context of E trajectories, of each device: its calibration.
        rates: how fast each is, in any unit; measured if not given.
        report: called with every incident, from any thread.
        sleep: waits for so many seconds.
    Returns: the substrate, which is closed with its `close`.

    >>> pair = insitu.instrument.array([connect, connect], batch=10)
    >>> trajectories = pair(None, {"force": 0.5}, 20)
    >>> trajectories.x.shape, trajectories.group.tolist().count(1)  # half of them from each
    ((20, 51, 1), 10)
    >>> pair.close()
    """
    if isinstance(share, str) and share != "settings":
        raise ValueError(
            f'`share` is "settings" or a function (theta, calibration) -> settings; got {share!r}.'
        )
    if contexts is not None and len(contexts) != len(connects):
        raise ValueError(
            f"`contexts` must be one per device, {len(connects)}; got {len(contexts)}."
        )
    devices = [
        instrument_substrate(
            connect,
            batch=batch,
            retry=retry or Retry(attempts=3),
            report=report,
            sleep=sleep,
            context=contexts[k] if contexts else None,
        )
        for k, connect in enumerate(connects)
    ]
    return DeviceArray(
        devices, share=None if isinstance(share, str) else share, rates=rates, report=report
    )


def split_count(count: int, weights: np.ndarray) -> list[int]:
    """Split `count` in proportion to weights, into whole numbers that add up (largest remainders).

    >>> split_count(10, np.array([1.0, 1.0, 2.0]))
    [3, 2, 5]
    """
    exact = count * np.asarray(weights, float) / np.sum(weights)
    shares = np.floor(exact).astype(int)
    order = np.argsort(-(exact - shares), kind="stable")
    shares[order[: count - int(shares.sum())]] += 1
    return shares.tolist()


def _concatenate(parts: list[Trajectories]) -> Trajectories:
    if len(parts) == 1:
        return parts[0]
    context = jax.tree.map(
        lambda *leaves: np.concatenate(leaves), *(part.context for part in parts)
    )
    return Trajectories(parts[0].t, np.concatenate([part.x for part in parts]), context)


def _interleave(parts: Mapping[int, Trajectories]) -> Trajectories:
    """Concatenate the trajectories, devices mixed evenly, so that every half has all of them."""
    first, *others = parts.values()
    for other in others:
        if not np.array_equal(first.t, other.t) or first.x.shape[1:] != other.x.shape[1:]:
            raise CommandRejected(
                f"the devices sample differently: {first.x.shape[1:]} times and components, and "
                f"{other.x.shape[1:]}, or at other times. Set the same number of points and "
                "interval on all."
            )
    place = np.concatenate(
        [(np.arange(len(part.x)) + 0.5) / len(part.x) for part in parts.values()]
    )
    order = np.argsort(place, kind="stable")
    group = np.concatenate([np.full(len(part.x), k) for k, part in parts.items()])[order]

    def mix(*leaves):
        return np.concatenate([np.asarray(leaf) for leaf in leaves])[order]

    context = jax.tree.map(mix, *(part.context for part in parts.values()))
    x = mix(*(part.x for part in parts.values()))
    return Trajectories(first.t, x, context, None, group)
