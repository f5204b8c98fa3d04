"""An instrument as a `Substrate`: (key, settings, count) -> Trajectories, whatever the instrument
does meanwhile.

Lines fail, boxes restart, samples are missing, data lie. A failed acquisition is made again after a
pause that doubles, on a new connection, with the settings sent afresh. Trajectories with missing or
clipped samples, that came before, or that are not the calibrated noise, and whole batches that were
not run at the settings that were asked for, are counted, kept on disk, and never averaged. If
nothing else comes, the run ends.

A batch that is not what the calibrated process does is in doubt: it is marked, and the run stops or
goes on with it, as was asked for. Nothing is left out on account of its values without an incident.

The `Archive` keeps every acquisition on disk, the bad ones too: one recording a batch, numbered,
never overwritten.

They are recordings like any other (docs/recordings.md): `fluctua inspect`, xarray and h5py read
them, and those of a network `fluctua calibrate` and `estimate` too. Trajectories that must not be
averaged are in files of their own, batch-000007-left-out.nc, with the reason in their provenance.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from fluctua.core import check
from fluctua.core.arrays import Array, Params
from fluctua.core.likelihood.guard import DoubtError
from fluctua.core.trajectories import Trajectories
from fluctua.insitu.instrument import protocol
from fluctua.insitu.instrument import visit as visits
from fluctua.insitu.instrument.archive import Archive
from fluctua.insitu.instrument.connection import Connection, Hung
from fluctua.insitu.instrument.guard import ResidualGuard, find_dead
from fluctua.insitu.instrument.repeats import Repeats

SELECTION_WARNING = 0.01
"""Share of clipped or odd trajectories above which their removal is a selection that biases the
estimate.
"""
CLIPPED = "clipped"
REPEATED = "repeated"
UNLIKE = "unlike the calibration"
DOUBT = "doubt"
DEAD = "dead"
ON_DOUBT = ("stop", "continue")
EXAMINED = ("start", "scale", "readout", "steps")
"""What the guard remembers of the calibration besides its noise."""
HANGS = 2
"""Acquisitions in a row that may hang before an instrument is given up: each has cost the whole
time limit.
"""
IDENTITY = "instrument/identity"
REPEATS = "instrument/repeats"
NOISE = "instrument/noise"
ADVICE = {
    CLIPPED: "Leaving them out prefers runs with small amplitudes, which biases J and its "
    "gradient: raise the range of "
    "the digitiser.",
    UNLIKE: "Leaving them out biases J and its gradient if they belong to the physics: look at "
    "them, calibrate anew.",
}


class Doubt(protocol.CommandRejected, DoubtError):
    """A batch that is not what the calibrated process does.

    It is kept and not averaged; asking again does not help.
    """


class Incident(NamedTuple):
    """Something that went wrong and was dealt with. kind: a word. trajectories: lost to it."""

    kind: str
    trajectories: int
    message: str


class Retry(NamedTuple):
    """attempts: failures in a row before giving up. first, longest: pauses in seconds; each doubles
    the last.

    limit: seconds that one acquisition may take, from setting to reading back, opening included. A
    driver that has not returned by then is left behind and opened anew; after `HANGS` such in a row
    it is given up.
    """

    attempts: int = 8
    first: float = 0.1
    longest: float = 30.0
    limit: float = 300.0

    def pause(self, failures: int) -> float:
        """After so many failures in a row."""
        return min(self.longest, self.first * 2 ** (failures - 1))


class InstrumentSubstrate:
    """The substrate made by `measured`.

    `counts`: trajectories by verdict, and failures by kind. `identity`: of the instrument, once it
    is known; another one is refused. `last`: settings and trajectories of the last call.
    """

    def __init__(
        self,
        connect: Callable[[], protocol.Instrument],
        *,
        batch: int,
        retry: Retry,
        archive: Archive | None,
        context: Callable[[int], Any] | None,
        guard: ResidualGuard | None,
        channels: int | None,
        on_doubt: str | None,
        report: Callable[[Incident], None],
        sleep: Callable[[float], None],
    ):
        self.channels = channels
        self.on_doubt = on_doubt
        self.is_fresh = True  # nothing was acquired yet
        self.connect = connect
        self.batch = batch
        self.retry = retry
        self.archive = archive
        self.context = context
        self.guard = guard
        self.report = report
        self.sleep = sleep
        self.counts: Counter[str] = Counter()
        self.connection: Connection | None = None
        self.identity = ""
        self.repeats = Repeats()
        self.warned: set[str] = set()
        self.last: tuple[Params, Trajectories] | None = None
        self.reason = ""
        self.seconds = {
            "visit": 0.0,
            "run": 0.0,
        }  # setting, arming and reading back; running and fetching
        self.visits = self.ran = 0

    def __call__(self, key: Array, theta: Params, count: int) -> Trajectories:
        """`count` good trajectories at settings θ. `key` is not used: the noise is nature's."""
        trajectories, failure = self.gather(jax.tree.map(np.asarray, theta), count)
        if failure is not None:
            raise failure
        assert trajectories is not None
        return trajectories

    def gather(
        self, settings: Params, count: int
    ) -> tuple[Trajectories | None, protocol.InstrumentError | None]:
        """As many good trajectories as came, up to `count`, and what kept the others from
        coming.
        """
        t = None
        good = []
        beside = []
        have = 0
        wasted = 0
        failure: protocol.InstrumentError | None = None
        while have < count and failure is None:
            size = min(self.batch, count - have)
            try:
                taken, usable = self._acquire(settings, size)
                if t is not None and not np.array_equal(t, taken.t):
                    raise protocol.CommandRejected(
                        f"the sampling times changed within one ensemble: {len(t)} times at "
                        f"first, {len(taken.t)} now. Set the number of points and the interval "
                        "when the driver connects."
                    )
            except protocol.InstrumentError as error:
                failure = error
                break
            t = np.asarray(taken.t)
            good.append(taken.x[usable])
            beside.append({name: v[usable] for name, v in (taken.context or {}).items()})
            have += int(usable.sum())
            wasted = 0 if usable.any() else wasted + 1
            if wasted >= self.retry.attempts:
                failure = protocol.InstrumentError(
                    f"{wasted} acquisitions in a row held no usable trajectory "
                    f"({self.describe()}). Of the last one {self.reason}. Look at them"
                    + (
                        f" in {self.archive.folder}."
                        if self.archive
                        else "; `archive=` keeps them."
                    )
                )
        if not have:
            return None, failure
        x = np.concatenate(good)
        recorded = {name: np.concatenate([part[name] for part in beside]) for name in beside[0]}
        result = Trajectories(t, x, self._context(len(x), recorded))
        self.last = settings, result
        return result, failure

    def _context(self, count: int, recorded: Mapping[str, np.ndarray]) -> Any:
        """The calibration and what was recorded with the trajectories, a row each."""
        known = None if self.context is None else self.context(count)
        if not recorded:
            return known
        if known is not None and not isinstance(known, Mapping):
            raise TypeError(
                f"`context` must be a dictionary beside {', '.join(recorded)}; got "
                f"{type(known).__name__}."
            )
        return {**(known or {}), **recorded}

    def describe(self) -> str:
        """`1,200 trajectories averaged; discarded: 3 clipped; 2 failures`."""
        lost = {k: n for k, n in self.counts.items() if k not in ("good", "failures")}
        text = f"{self.counts['good']:,} trajectories averaged; discarded: "
        text += ", ".join(f"{n:,} {k}" for k, n in lost.items()) or "none"
        failures = self.counts["failures"]
        return text + (
            f"; {failures} failure{'s' if failures > 1 else ''} retried" if failures else ""
        )

    @property
    def examines(self) -> bool:
        """Whether the residuals of what it returns have been looked at: an estimator need
        not do so again.
        """
        return self.guard is not None and self.guard.noise is not None and self.on_doubt is not None

    def close(self) -> None:
        """Let go of the instrument."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def _acquire(self, settings: Params, size: int) -> tuple[protocol.Batch, np.ndarray]:
        """One batch and which of its trajectories are usable (E,), after as many attempts
        as it takes.
        """
        failures = hangs = 0
        while True:
            try:
                if self.connection is None:
                    self.connection = Connection(self.connect)
                visit = self.connection.use(
                    partial(visits.visit_instrument, settings, size), self.retry.limit
                )
                self.seconds["run"] += visit.ran
                self.seconds["visit"] += visit.took - visit.ran
                self.visits = self.visits + 1
                self.ran = self.ran + size
                return visit.batch, self._judge(visit.batch, settings, size, visit.health)
            except protocol.CommandRejected:
                self.close()
                raise
            except (protocol.InstrumentError, OSError) as error:
                self.close()
                failures += 1
                hangs = hangs + 1 if isinstance(error, Hung) else 0
                self.counts["failures"] += 1
                self.report(Incident("failure", 0, str(error)))
                if failures >= self.retry.attempts or hangs >= HANGS:
                    raise protocol.InstrumentError(
                        f"the instrument failed {failures} times in a row, at last with: {error}. "
                        "Everything acquired so far is kept; mend it and go on with the run."
                        + (
                            " If an acquisition may take that long, raise the time limit."
                            if hangs
                            else ""
                        )
                    ) from error
                self.sleep(self.retry.pause(failures))

    def _judge(
        self, batch: protocol.Batch, settings: Params, size: int, health: protocol.Health
    ) -> np.ndarray:
        """Which trajectories may be averaged. (E,)"""
        visits.check_answers(batch, health, size, self.channels)
        x = batch.x
        self.channels = x.shape[2]
        self._recognise(health.identity)
        good = np.ones(size, bool)
        reasons = []
        for kind, bad, detail in self._verdicts(batch, x, settings, health):
            lost = int((bad & good).sum())
            good &= ~bad
            if lost:
                self.counts[kind] += lost
                self.reason = f"{lost} of {size} trajectories {kind}" + (
                    f": {detail}" if detail else ""
                )
                self.report(Incident(kind, lost, self.reason))
                reasons.append(f"{kind} ({detail})" if detail else kind)
        doubt = self._examine(batch, x, settings, good)
        stops = bool(doubt) and self.on_doubt == "stop"
        if doubt:
            kept = int(good.sum())
            self.report(Incident(DOUBT, kept if stops else 0, doubt))
            self.counts[DOUBT] += kept if stops else 0
            reasons.append(f"{DOUBT}: {doubt}")
            good &= not stops
        for complaint in health.errors:
            self.report(Incident("complaint", 0, complaint))
        self.counts["good"] += int(good.sum())
        if self.archive is not None:
            self.archive.add(batch, settings, good, ", ".join(reasons), doubt)
        self._watch_selection()
        if stops:
            where = f" in {self.archive.folder}" if self.archive else ""
            raise Doubt(
                f"{doubt} The batch is kept{where} and not averaged. Mend the instrument or its "
                "model and go on with "
                'the run (--resume), or use such batches too: on_doubt="continue" (--set on_doubt='
                "continue)."
            )
        return good

    def _examine(
        self, batch: protocol.Batch, x: np.ndarray, settings: Params, good: np.ndarray
    ) -> str:
        """What is wrong with the trajectories that may be averaged, taken together; empty
        if nothing.
        """
        if self.guard is None or not good.any():
            return ""
        if self.is_fresh:
            self._refuse_dead(x[good])
            self.is_fresh = False
        if self.on_doubt is None:
            return ""
        recorded = {name: v[good] for name, v in (batch.context or {}).items()}
        context = self._context(int(good.sum()), recorded)
        cause = self.guard.examine(settings, Trajectories(np.asarray(batch.t), x[good], context))
        return f"The trajectories are not those of the calibrated model. {cause}" if cause else ""

    def _refuse_dead(self, x: np.ndarray) -> None:
        """Refuse an instrument of which a channel measures nothing: it would be calibrated
        as if it did.
        """
        dead = find_dead(x)
        if dead:
            text = (
                f"component{'s' * (len(dead) > 1)} {check.few(dead)} of the samples "
                f"measure{'s' * (len(dead) == 1)} nothing: constant, or noise without memory "
                "about a constant"
            )
            self.report(Incident(DEAD, len(x), text))
            raise protocol.CommandRejected(f"{text}. Look at the channel, and begin again.")

    def _verdicts(
        self, batch: protocol.Batch, x: np.ndarray, settings: Params, health: protocol.Health
    ) -> Iterator[tuple[str, np.ndarray, str]]:
        """What may be wrong, which trajectories it is wrong with (E,), and what exactly."""
        size = len(x)
        if health.rebooted or not visits.are_same(settings, health.settings):
            yield "at other settings", np.ones(size, bool), ""
            return
        invalid = ~np.isfinite(x).all(axis=(1, 2))
        clipped = (np.abs(x) >= batch.full_scale * (1 - 1e-6)).any(axis=(1, 2))
        yield "invalid", invalid, ""
        yield CLIPPED, clipped, ""
        whole = ~(invalid | clipped)
        repeated = self.repeats(x) & whole
        yield REPEATED, repeated, ""
        fresh = np.flatnonzero(whole & ~repeated)
        if self.guard is not None and fresh.size:
            recorded = {name: v[fresh] for name, v in (batch.context or {}).items()}
            context = self._context(fresh.size, recorded)
            verdict = self.guard(settings, Trajectories(np.asarray(batch.t), x[fresh], context))
            unlike = np.zeros(size, bool)
            unlike[fresh] = verdict.bad
            yield UNLIKE, unlike, verdict.reason

    def _recognise(self, identity: str) -> None:
        """Hold on to the instrument that was met first."""
        if self.identity and identity and identity != self.identity:
            raise protocol.CommandRejected(
                f"this is the instrument {identity!r}, and the run belongs to {self.identity!r}, "
                "which was calibrated. Connect that one, or begin another run."
            )
        self.identity = self.identity or identity

    def _watch_selection(self) -> None:
        for kind, advice in ADVICE.items():
            seen = self.counts["good"] + self.counts[kind]
            if (
                kind not in self.warned
                and seen >= 200
                and self.counts[kind] > SELECTION_WARNING * seen
            ):
                self.warned.add(kind)
                warnings.warn(
                    f"{self.counts[kind]:,} of {seen:,} trajectories were {kind}. {advice}",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def memory(self) -> dict[str, np.ndarray]:
        """What has to outlive the process: the instrument's identity, its noise at
        calibration, what came already.
        """
        arrays = {IDENTITY: np.array(self.identity), REPEATS: self.repeats.marks()}
        if self.guard is not None and self.guard.noise is not None:
            arrays[NOISE] = self.guard.noise
            known = {f"instrument/{name}": getattr(self.guard, name) for name in EXAMINED}
            arrays |= {name: value for name, value in known.items() if value is not None}
        return arrays

    def remember(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Go on where `memory` left off; an entry that is not there is not known."""
        self.identity = str(arrays.get(IDENTITY, ""))
        self.repeats = Repeats(arrays.get(REPEATS, ()))
        if self.guard is not None:
            self.guard.noise = arrays.get(NOISE)
            for name in EXAMINED:
                setattr(self.guard, name, arrays.get(f"instrument/{name}"))
        if NOISE in arrays:
            self.channels = len(arrays[NOISE])


def instrument_substrate(
    connect: Callable[[], protocol.Instrument],
    *,
    batch: int = 100,
    retry: Retry | None = None,
    archive: Archive | None = None,
    context: Callable[[int], Any] | None = None,
    guard: ResidualGuard | None = None,
    channels: int | None = None,
    on_doubt: str | None = "stop",
    report: Callable[[Incident], None] = lambda incident: None,
    sleep: Callable[[float], None] = time.sleep,
) -> InstrumentSubstrate:
    """An instrument as a substrate, for `ppgt`.

    Args:
        connect: opens it; called again after every failure.
        batch: trajectories an acquisition, all that a failure can cost.
        retry: how often and after which pauses a failed acquisition is made again, and how long one
            may take.
        archive: where everything acquired is kept.
        context: E -> the context of E trajectories, such as the calibration of the day.
        guard: sets aside what is not the calibrated noise, and examines the rest.
        channels: components of a sample; those of the first batch if not given.
        on_doubt: "stop" raises `Doubt` at a batch that is not what the calibrated process does,
            "continue" uses it and reports it; None does not examine.
        report: called with every incident.
        sleep: waits for so many seconds.
    Returns: the substrate, which is closed with its `close`.

    >>> with background(Bench()) as port:
    ...     connect = lambda: VirtualBench(f"tcp://127.0.0.1:{port}", points=11)
    ...     substrate = instrument_substrate(connect)
    ...     substrate(None, settings, 20).x.shape

    """
    if batch < 1:
        raise ValueError(
            f"`batch` must be a whole number of trajectories, at least 1; got {batch}."
        )
    retry = retry or Retry()
    if not retry.limit > 0:
        raise ValueError(
            f"`limit` of a `Retry` must be a positive number of seconds; got {retry.limit!r}."
        )
    if on_doubt not in (*ON_DOUBT, None):
        raise ValueError(
            f"`on_doubt` is one of {', '.join(map(repr, ON_DOUBT))}, or None; got {on_doubt!r}."
        )
    return InstrumentSubstrate(
        connect,
        batch=batch,
        retry=retry,
        archive=archive,
        context=context,
        guard=guard,
        channels=channels,
        on_doubt=on_doubt,
        report=report,
        sleep=sleep,
    )
