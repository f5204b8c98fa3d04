"""An instrument as a `Substrate`: (key, settings, count) -> good trajectories, despite failures.

A failed acquisition is repeated after a pause that doubles, on a new connection, with the settings
sent afresh. Trajectories with missing or clipped samples, repetitions, trajectories without the
noise of the calibration, and whole batches at other settings than requested are counted, kept on
disk, and never averaged. If nothing else is received, the run ends.

A batch that the calibrated process does not explain is in doubt: it is marked, and the run stops
or continues with it (`on_doubt`). Nothing is left out on account of its values without an incident.

The `Archive` keeps every acquisition on disk, also the bad ones: one recording per batch, numbered,
never overwritten. They are recordings like any other (docs/recordings.md): `fluctua inspect`,
xarray and h5py read them, and for a network `fluctua calibrate` and `estimate` too. Trajectories
that must not be averaged are in files of their own, batch-000007-left-out.nc, with the reason in
their provenance.
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
from fluctua.core.words import format_count
from fluctua.insitu.instrument import connection as connections
from fluctua.insitu.instrument import protocol
from fluctua.insitu.instrument import visit as visits
from fluctua.insitu.instrument.archive import Archive
from fluctua.insitu.instrument.guard import ResidualGuard, find_dead
from fluctua.insitu.instrument.repeats import Repeats

SELECTION_WARNING = 0.01
"""Share of clipped or odd trajectories above which leaving them out biases the estimate."""
CLIPPED = "clipped"
REPEATED = "repeated"
UNLIKE = "unlike the calibration"
DOUBT = "doubt"
DEAD = "dead"
ON_DOUBT = ("stop", "continue")
EXAMINED = ("start", "scale", "readout", "steps")
"""Attributes of the guard that a checkpoint holds besides its noise."""
HANGS = 2
"""Acquisitions in a row that may run into the time limit before an instrument is given up."""
IDENTITY = "instrument/identity"
REPEATS = "instrument/repeats"
NOISE = "instrument/noise"
ADVICE = {
    CLIPPED: (
        "Leaving them out prefers runs with small amplitudes, which biases J and its gradient: "
        "raise the range of the digitiser."
    ),
    UNLIKE: (
        "Leaving them out biases J and its gradient if they belong to the physics: look at them, "
        "calibrate anew."
    ),
}


class Doubt(protocol.CommandRejected, DoubtError):
    """A batch that the calibrated process does not explain: kept, not averaged, not retried."""


class Incident(NamedTuple):
    """A failure that was handled.

    kind: a word.
    trajectories: number that it cost.
    message: what happened.
    """

    kind: str
    trajectories: int
    message: str


class Retry(NamedTuple):
    """Options of repeating failed acquisitions.

    attempts: failures in a row before giving up.
    first, longest: pauses in seconds; each is twice the one before.
    limit: seconds that one acquisition may take, from setting to reading back, opening included.
        A driver that has not returned by then is opened anew; after `HANGS` such in a row it is
        given up.

    >>> patient = insitu.instrument.Retry(attempts=20, longest=60.0)
    >>> substrate = insitu.instrument_substrate(connect, retry=patient)
    """

    attempts: int = 8
    first: float = 0.1
    longest: float = 30.0
    limit: float = 300.0

    def pause(self, failures: int) -> float:
        """Pause in seconds after so many failures in a row."""
        return min(self.longest, self.first * 2 ** (failures - 1))


class InstrumentSubstrate:
    """The substrate returned by `instrument_substrate`.

    counts: trajectories by verdict, and failures.
    identity: of the instrument, once it is known; another one is refused.
    last: settings and trajectories of the last call.
    expected: channels and times that a record must have, where they are known.
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
        self.expected = visits.ExpectedRecord()
        self.advice = ""  # what to do after a failure
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
        self.connection: connections.Connection | None = None
        self.identity = ""
        self.repeats = Repeats()
        self.warned: set[str] = set()
        self.last: tuple[Params, Trajectories] | None = None
        self.reason = ""
        # visit: setting, arming and reading back; run: running and fetching
        self.seconds = {"visit": 0.0, "run": 0.0}
        self.visits = self.ran = 0

    def __call__(self, key: Array, theta: Params, count: int) -> Trajectories:
        """Acquire `count` good trajectories at settings θ. `key` is not used."""
        trajectories, failure = self.gather(jax.tree.map(np.asarray, theta), count)
        if failure is not None:
            raise failure
        assert trajectories is not None
        return trajectories

    def gather(
        self, settings: Params, count: int
    ) -> tuple[Trajectories | None, protocol.InstrumentError | None]:
        """Acquire up to `count` good trajectories; with the failure that ended it, if any."""
        t = None
        good = []
        contexts = []
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
            contexts.append({name: v[usable] for name, v in (taken.context or {}).items()})
            have += int(usable.sum())
            wasted = 0 if usable.any() else wasted + 1
            if wasted >= self.retry.attempts:
                where = (
                    f" in {self.archive.folder}." if self.archive else "; `archive=` keeps them."
                )
                failure = protocol.InstrumentError(
                    f"{wasted} acquisitions in a row held no usable trajectory "
                    f"({self.describe()}). Of the last one {self.reason}. Look at them{where}"
                )
        if not have:
            return None, failure
        x = np.concatenate(good)
        recorded = {name: np.concatenate([c[name] for c in contexts]) for name in contexts[0]}
        result = Trajectories(t, x, self._join_context(len(x), recorded))
        self.last = settings, result
        return result, failure

    def _join_context(self, count: int, recorded: Mapping[str, np.ndarray]) -> Any:
        """Join the calibration with what was recorded with the trajectories, one row each."""
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
        """Summarise the counts: `1,200 trajectories averaged; discarded: 3 clipped; 2 failures`."""
        lost = {k: n for k, n in self.counts.items() if k not in ("good", "failures")}
        text = f"{format_count(self.counts['good'], 'trajectory')} averaged; discarded: "
        text += ", ".join(f"{n:,} {k}" for k, n in lost.items()) or "none"
        failures = self.counts["failures"]
        return text + (f"; {format_count(failures, 'failure')} retried" if failures else "")

    @property
    def examines(self) -> bool:
        """Whether the guard examines the residuals, so that an estimator need not do so again."""
        return self.guard is not None and self.guard.noise is not None and self.on_doubt is not None

    def close(self) -> None:
        """Close the instrument."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def use(self, act: Callable[[protocol.Instrument], Any]) -> Any:
        """Return act(instrument), opening it if it is not open; failures are not retried."""
        if self.connection is None:
            self.connection = connections.Connection(self.connect)
        return self.connection.use(act, self.retry.limit)

    def _acquire(self, settings: Params, size: int) -> tuple[protocol.Batch, np.ndarray]:
        """Acquire one batch, retrying failures; with the usable ones of its trajectories (E,)."""
        return self._retry_failures(partial(self._visit, settings, size))

    def _visit(self, settings: Params, size: int) -> tuple[protocol.Batch, np.ndarray]:
        visit = self.use(partial(visits.visit_instrument, settings, size))
        self.seconds["run"] += visit.ran
        self.seconds["visit"] += visit.took - visit.ran
        self.visits += 1
        self.ran += size
        return visit.batch, self._judge(visit.batch, settings, size, visit.health)

    def _retry_failures(self, attempt: Callable[[], Any]) -> Any:
        """Return attempt(), retrying failures."""
        failures = hangs = 0
        while True:
            try:
                return attempt()
            except protocol.CommandRejected:
                self.close()
                raise
            except (protocol.InstrumentError, OSError) as error:
                self.close()
                failures += 1
                hangs = hangs + 1 if isinstance(error, connections.DriverTimeout) else 0
                self.counts["failures"] += 1
                self.report(Incident("failure", 0, str(error)))
                if failures >= self.retry.attempts or hangs >= HANGS:
                    reason = str(error).rstrip(".")
                    wait = "If an acquisition may take that long, raise the time limit."
                    sentences = [
                        f"the instrument failed {failures} times in a row, at last with: {reason}.",
                        self.advice,
                        wait if hangs else "",
                    ]
                    raise protocol.InstrumentError(" ".join(filter(None, sentences))) from error
                self.sleep(self.retry.pause(failures))

    def _judge(
        self, batch: protocol.Batch, settings: Params, size: int, health: protocol.Health
    ) -> np.ndarray:
        """Decide which trajectories may be averaged. Shape (E,)."""
        if isinstance(batch, protocol.Batch) and isinstance(health, protocol.Health):
            visits.check_expected(batch, self.expected)
            visits.check_knobs(settings, health.settings)
        visits.check_answers(batch, health, size, self.channels)
        x = batch.x
        self.channels = x.shape[2]
        self._check_identity(health.identity)
        good = np.ones(size, bool)
        reasons = []
        for kind, bad, detail in self._iterate_verdicts(batch, x, settings, health):
            lost = int((bad & good).sum())
            good &= ~bad
            if lost:
                self.counts[kind] += lost
                self.reason = f"{lost} of {format_count(size, 'trajectory')} {kind}" + (
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
        self._warn_about_selection()
        if stops:
            where = f" in {self.archive.folder}" if self.archive else ""
            raise Doubt(
                f"{doubt} The batch is kept{where} and not averaged. Mend the instrument or its "
                "model and go on with the run (--resume), or use such batches too: "
                'on_doubt="continue" (--set on_doubt=continue).'
            )
        return good

    def _examine(
        self, batch: protocol.Batch, x: np.ndarray, settings: Params, good: np.ndarray
    ) -> str:
        """Say what is wrong with the good trajectories taken together; "" if nothing."""
        if self.guard is None or not good.any():
            return ""
        if self.is_fresh:
            self._refuse_dead(x[good])
            self.is_fresh = False
        if self.on_doubt is None:
            return ""
        recorded = {name: v[good] for name, v in (batch.context or {}).items()}
        context = self._join_context(int(good.sum()), recorded)
        cause = self.guard.examine(settings, Trajectories(np.asarray(batch.t), x[good], context))
        return f"The trajectories are not those of the calibrated model. {cause}" if cause else ""

    def _refuse_dead(self, x: np.ndarray) -> None:
        """Refuse an instrument with a channel that measures nothing, before it is calibrated."""
        dead = find_dead(x)
        if dead:
            text = (
                f"component{'s' * (len(dead) > 1)} {check.list_indices(dead)} of the samples "
                f"measure{'s' * (len(dead) == 1)} nothing: constant, or noise without memory "
                "about a constant"
            )
            self.report(Incident(DEAD, len(x), text))
            raise protocol.CommandRejected(f"{text}. Look at the channel, and begin again.")

    def _iterate_verdicts(
        self, batch: protocol.Batch, x: np.ndarray, settings: Params, health: protocol.Health
    ) -> Iterator[tuple[str, np.ndarray, str]]:
        """Yield what may be wrong, the trajectories that it is wrong with (E,), and a detail."""
        size = len(x)
        if health.rebooted or not visits.are_same(settings, health.settings):
            detail = "" if health.rebooted else visits.compare_settings(settings, health.settings)
            yield "at other settings", np.ones(size, bool), detail
            return
        invalid = ~np.isfinite(x).all(axis=(1, 2))
        clipped = (np.abs(x) >= batch.full_scale * (1 - 1e-6)).any(axis=(1, 2))
        yield "invalid", invalid, ""
        yield CLIPPED, clipped, ""
        complete = ~(invalid | clipped)
        repeated = self.repeats(x) & complete
        yield REPEATED, repeated, ""
        fresh = np.flatnonzero(complete & ~repeated)
        if self.guard is not None and fresh.size:
            recorded = {name: v[fresh] for name, v in (batch.context or {}).items()}
            context = self._join_context(fresh.size, recorded)
            verdict = self.guard(settings, Trajectories(np.asarray(batch.t), x[fresh], context))
            unlike = np.zeros(size, bool)
            unlike[fresh] = verdict.bad
            yield UNLIKE, unlike, verdict.reason

    def _check_identity(self, identity: str) -> None:
        """Refuse another instrument than the first one."""
        if self.identity and identity and identity != self.identity:
            raise protocol.CommandRejected(
                f"this is the instrument {identity!r}, and the run belongs to {self.identity!r}, "
                "which was calibrated. Connect that one, or begin another run."
            )
        self.identity = self.identity or identity

    def _warn_about_selection(self) -> None:
        for kind, advice in ADVICE.items():
            seen = self.counts["good"] + self.counts[kind]
            is_selection = seen >= 200 and self.counts[kind] > SELECTION_WARNING * seen
            if is_selection and kind not in self.warned:
                self.warned.add(kind)
                warnings.warn(
                    f"{self.counts[kind]:,} of {seen:,} trajectories were {kind}. {advice}",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def arrays(self) -> dict[str, np.ndarray]:
        """Arrays for a checkpoint: identity, noise at calibration, marks of trajectories."""
        arrays = {IDENTITY: np.array(self.identity), REPEATS: self.repeats.marks()}
        if self.guard is not None and self.guard.noise is not None:
            arrays[NOISE] = self.guard.noise
            known = {f"instrument/{name}": getattr(self.guard, name) for name in EXAMINED}
            arrays |= {name: value for name, value in known.items() if value is not None}
        return arrays

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Continue from the `arrays` of a checkpoint; an entry that is missing is not known."""
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
    """Make a substrate of an instrument, for `ppgt`.

    Args:
        connect: opens it; called again after every failure.
        batch: trajectories per acquisition, the most that a failure can cost.
        retry: how often and after which pauses a failed acquisition is repeated, and how long one
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

    >>> substrate = insitu.instrument_substrate(connect, batch=10)
    >>> substrate(None, {"force": 0.5}, 20).x.shape  # two acquisitions
    (20, 51, 1)
    >>> substrate.close()
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
