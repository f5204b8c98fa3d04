"""Several instruments as one substrate: (key, theta, count) -> Trajectories of all of them, each
with its device.

All are set and run at once, a thread each. The wanted trajectories are split by how fast each
device is; what a device that fails leaves undone goes to the others, and it is asked again after 1,
2, 4, … 16 calls until it answers. Nothing that came from it before it failed is lost, and nothing
is acquired twice.

Trajectories carry the number of their device (`Trajectories.group`), so that whatever averages them
counts every device the same and has errors between devices: those of the expected return of all
devices of which these are a sample.
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
"""Shares are kept until rates differ from them by this factor: clocks are noisy, and equal shares
are best.
"""
FORGET = 0.3
"""Weight of the last call in the mean rate of a device."""
LONGEST_WAIT = 16
"""Calls after which a silent device is asked again, at most."""
DOWN = "device down"
BACK = "device back"

Share = Callable[[Params, Any], Params]
"""(θ, calibration of a device) -> its settings, written in JAX."""
Prepare = Callable[[int], None]
"""Called with the number of a device before it is used; raises `InstrumentError` where it cannot
be.
"""


class DeviceHealth(NamedTuple):
    """How one device of an array is. up: whether it answered the last time that it was asked. rate:
    trajectories a second, relative to the median of all. good, lost: trajectories so far. failures:
    so far, retried ones included.
    """

    identity: str
    up: bool
    rate: float
    good: int
    lost: int
    failures: int


class DeviceArray:
    """The substrate made by `array`.

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
                f"`rates` must be {len(devices)} positive numbers, one a device; got "
                f"{list(rates)!r}."
            )
        self.devices = devices
        self.share = share
        self.prepare = prepare
        self.report = report
        self.clock = clock
        self.known = rates is not None
        self.weights = np.ones(len(devices)) if rates is None else np.asarray(rates, float)
        self.wait = np.zeros(len(devices), int)  # calls until a silent device is asked again
        self.silent = np.zeros(len(devices), int)  # failures in a row
        self.refused = np.zeros(len(devices), bool)  # asking again would not help
        self.rates: dict[int, float] = {}  # trajectories a second, as last measured
        self.failure: InstrumentError | None = None  # the last
        self.retry = devices[0].retry

    def __call__(self, key: Array, theta: Params, count: int) -> Trajectories:
        """`count` good trajectories, `group` being the number of the device. `key` is not used."""
        if count < len(self.devices):
            raise ValueError(
                f"{len(self.devices)} devices were asked for {count} trajectories together: ask "
                "for as many as there are devices at least, better for several each."
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

        asked = self._asked()
        missing = count
        later = [int(k) for k in np.flatnonzero(~self.refused) if k not in asked]
        while missing:
            if not asked:
                asked = later  # sooner than planned: the others are gone
                later = []
            if not asked:
                raise self._none_left(f"{missing:,} of {count:,} trajectories are missing")
            shares = dict(zip(asked, split(missing, self.weights[asked]), strict=True))
            results = self._each({k: n for k, n in shares.items() if n}, gather)
            for k, (came, failure, seconds) in results.items():
                missing -= came
                self._mark(k, failure)
                if failure is None:
                    rate = came / max(seconds, 1e-9)
                    self.rates[k] = self.rates.get(k, rate) ** (1 - FORGET) * rate**FORGET
            self._weigh()
            asked = [k for k in asked if not self.silent[k]]
        self._all_different()
        for k, parts in pieces.items():
            self.devices[k].last = (settings[k], _joined(parts)) if parts else None
        return _interleaved({k: _joined(parts) for k, parts in pieces.items() if parts})

    def settings(self, theta: Params, k: int) -> Params:
        """What device k is set to at θ."""
        if self.share is None:
            return jax.tree.map(np.asarray, theta)
        context = self.devices[k].context
        if context is None:
            raise ValueError(
                "settings corrected device by device need the calibration of each: give `contexts`."
            )
        return jax.tree.map(
            np.asarray, self.share(theta, jax.tree.map(lambda v: np.asarray(v)[0], context(1)))
        )

    def prepared(self) -> None:
        """Every device made ready, all at once; one that fails is left out until it answers."""

        def ready(k: int, _: int) -> tuple[int, InstrumentError | None]:
            self.prepare(k)
            return 0, None

        for k, (_, failure, _) in self._each(dict.fromkeys(self._asked(), 0), ready).items():
            self._mark(k, failure)
        self._all_different()
        if np.all(self.silent > 0):
            raise self._none_left("none could be made ready")

    def health(self) -> list[DeviceHealth]:
        """How each device is."""

        def lost(counts):
            return sum(n for kind, n in counts.items() if kind not in ("good", "failures"))

        return [
            DeviceHealth(
                d.identity,
                not self.silent[k],
                float(self.weights[k]),
                d.counts["good"],
                lost(d.counts),
                d.counts["failures"],
            )
            for k, d in enumerate(self.devices)
        ]

    def costs(self) -> tuple[float, float]:
        """Seconds of a visit to a device (set, arm, read back), and of one trajectory
        there, as measured so far.
        """
        visits, ran = (
            max(sum(getattr(d, name) for d in self.devices), 1) for name in ("visits", "ran")
        )
        spent = {name: sum(d.seconds[name] for d in self.devices) for name in ("visit", "run")}
        return max(spent["visit"] / visits, 1e-9), max(spent["run"] / ran, 1e-9)

    def describe(self, groups: Groups | None = None) -> str:
        """A line a device; with what the last estimate says of groups, how many
        trajectories are worth while.
        """

        def up(k):
            return "" if not self.silent[k] else " (does not answer)"

        lines = [f"device {k + 1}{up(k)}: {d.describe()}" for k, d in enumerate(self.devices)]
        if groups is None or len(groups.group) < 2:
            return "\n".join(lines)
        visit, run = self.costs()

        def many(v):
            return (
                f"{v:,.0f}"
                if np.isfinite(v)
                else "as many as there is time for: no difference was seen"
            )

        lines += [describe_groups(groups).strip()]
        lines += [
            f"a visit to a device took {visit:.2g} s, a trajectory {run:.2g} s; worth while, a "
            "device and iteration:",
            f"  for J         {many(max(1.0, groups.returns.optimal_size(visit, run)))}",
            f"  its gradient  {many(max(1.0, groups.gradient.optimal_size(visit, run)))}",
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
        """Whether the residuals of what all devices return have been looked at."""
        return all(device.examines for device in self.devices)

    def memory(self) -> dict[str, np.ndarray]:
        """What has to outlive the process besides the devices' own: who is silent, and the
        shares.
        """
        return {"array/weights": self.weights, "array/wait": self.wait, "array/silent": self.silent}

    def remember(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Go on where `memory` left off."""
        if len(arrays["array/wait"]) != len(self.devices):
            raise ValueError(
                f"the run is of {len(arrays['array/wait'])} devices, and {len(self.devices)} were "
                "given. A device that is broken keeps its place; for another array "
                "begin another run."
            )
        self.weights = self.weights if self.known else np.array(arrays["array/weights"], float)
        self.wait, self.silent = (
            np.array(arrays[f"array/{name}"], int) for name in ("wait", "silent")
        )

    def close(self) -> None:
        """Let go of all devices."""
        for device in self.devices:
            device.close()

    def _asked(self) -> list[int]:
        """The devices of this call: those that answer, and silent ones whose turn it is;
        all if none is left.
        """
        there = np.flatnonzero(~self.refused)
        self.wait[there] = np.maximum(self.wait[there] - 1, 0)
        asked = [int(k) for k in there if not self.wait[k]]
        return asked or [int(k) for k in there]

    def _each(
        self,
        shares: Mapping[int, int],
        act: Callable[[int, int], tuple[int, InstrumentError | None]],
    ) -> dict[int, tuple[int, InstrumentError | None, float]]:
        """An act on several devices at once, in threads; what came of it, and after how
        many seconds.
        """

        def one(k: int) -> tuple[int, InstrumentError | None, float]:
            begun = self.clock()
            # the others wait for a device that was silent: it is given one chance
            self.devices[k].retry = (
                self.retry._replace(attempts=1) if self.silent[k] else self.retry
            )
            try:
                came, failure = act(k, shares[k])
            except (InstrumentError, OSError) as error:
                came = 0
                failure = (
                    error if isinstance(error, InstrumentError) else InstrumentError(str(error))
                )
            return came, failure, self.clock() - begun

        with ThreadPoolExecutor(max(len(shares), 1)) as threads:
            return dict(zip(shares, threads.map(one, shares), strict=True))

    def _mark(self, k: int, failure: InstrumentError | None) -> None:
        """Note that a device answered, or did not."""
        name = f"device {k + 1}" + (
            f" ({self.devices[k].identity})" if self.devices[k].identity else ""
        )
        if failure is None:
            if self.silent[k]:
                self.report(Incident(BACK, 0, f"{name} answers again"))
            self.silent[k] = self.wait[k] = 0
            return
        if not self.silent[k]:
            self.report(
                Incident(DOWN, 0, f"{name} is left out, its share goes to the others: {failure}")
            )
        self.failure = failure
        self.wait[k] = min(2 ** self.silent[k], LONGEST_WAIT)
        self.silent[k] += 1
        self.refused[k] = isinstance(failure, CommandRejected)

    def _none_left(self, what: str) -> InstrumentError:
        kind = CommandRejected if self.refused.all() else InstrumentError
        return kind(
            f"none of {len(self.devices)} devices answers: {what}. The last said: {self.failure} "
            "What was acquired is kept; mend one and go on with the run."
        )

    def _weigh(self) -> None:
        """Shares by the rates, once one of them has changed by more than a clock's noise."""
        if self.known or len(self.rates) < 2:
            return
        known = np.array([*self.rates])
        relative = np.array([*self.rates.values()]) / np.median([*self.rates.values()])
        change = relative / self.weights[known]
        if change.max() / change.min() > STEADY:
            self.weights[known] = relative

    def _all_different(self) -> None:
        """One box under two addresses would pass for two devices that agree."""
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
    """Several instruments as one substrate, for `ppgt` and everything on top of it.

    Args:
        connects: opens each; called again after every failure.
        share: "settings" for the same settings on all (a robust design), or (θ, calibration) ->
            settings, which makes devices that differ do the same θ; `corrected` then makes the
            process of θ.
        batch: trajectories an acquisition.
        retry: how often and after which pauses a device is tried before it is left out.
        contexts: E -> the context of E trajectories, of each device: its calibration.
        rates: how fast each is, in any unit; measured if not given.
        report: called with every incident, from any thread.
        sleep: waits for so many seconds.
    Returns: the substrate, which is closed with its `close`.

    >>> connects = [lambda: VirtualBench("tcp://10.0.0.1"), lambda: VirtualBench("tcp://10.0.0.2")]
    >>> substrate = array(connects)

    """
    if isinstance(share, str) and share != "settings":
        raise ValueError(
            f'`share` is "settings" or a function (theta, calibration) -> settings; got {share!r}.'
        )
    if contexts is not None and len(contexts) != len(connects):
        raise ValueError(f"`contexts` must be one a device, {len(connects)}; got {len(contexts)}.")
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


def split(count: int, weights: np.ndarray) -> list[int]:
    """`count` in proportion to weights, as whole numbers that add up; what is left over goes to the
    largest rests.

    >>> split(10, np.array([1.0, 1.0, 2.0]))
    [3, 2, 5]
    """
    exact = count * np.asarray(weights, float) / np.sum(weights)
    shares = np.floor(exact).astype(int)
    order = np.argsort(-(exact - shares), kind="stable")
    shares[order[: count - int(shares.sum())]] += 1
    return shares.tolist()


def _joined(parts: list[Trajectories]) -> Trajectories:
    if len(parts) == 1:
        return parts[0]
    context = jax.tree.map(
        lambda *leaves: np.concatenate(leaves), *(part.context for part in parts)
    )
    return Trajectories(parts[0].t, np.concatenate([part.x for part in parts]), context)


def _interleaved(parts: Mapping[int, Trajectories]) -> Trajectories:
    """All trajectories, devices mixed evenly: baselines that compare halves or batches meet
    every device in each.
    """
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

    def mixed(*leaves):
        return np.concatenate([np.asarray(leaf) for leaf in leaves])[order]

    context = jax.tree.map(mixed, *(part.context for part in parts.values()))
    return Trajectories(first.t, mixed(*(part.x for part in parts.values())), context, None, group)
