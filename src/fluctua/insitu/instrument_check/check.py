"""Check an instrument against its model: connect, set, acquire a few trajectories, compare."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from fluctua.core.arrays import Params
from fluctua.core.trajectories import Trajectories
from fluctua.core.words import format_count
from fluctua.insitu.instrument import protocol
from fluctua.insitu.instrument.guard import find_dead
from fluctua.insitu.instrument.substrate import (
    REPEATED,
    Incident,
    InstrumentSubstrate,
    Retry,
    instrument_substrate,
)
from fluctua.insitu.instrument_check import knobs, repeatability, residuals
from fluctua.insitu.instrument_check.report import InstrumentCheck, Latency, describe_record
from fluctua.insitu.model import Model

FIRST = 2
"""Trajectories of the first record."""
REPEATS = (
    "trajectories are the same as earlier ones: the instrument is dead, repeats a record, or has "
    "no noise. Look at trigger, buffer and cables."
)


def check_instrument(
    connect: Callable[[], protocol.Instrument],
    model: Model,
    *,
    trajectories: int = 20,
    seed: int = 0,
    retry: Retry | None = None,
    report: Callable[[Incident], None] = lambda incident: None,
) -> InstrumentCheck:
    """Check an instrument against its model with a few trajectories, before a training.

    A first record of two trajectories shows shape and rate. With `trajectories` ≥ 8 the start is
    then measured twice and another setting once; means and variances of the two are compared,
    the unknowns are fitted and residuals examined. With fewer the start is measured once more.

    Args:
        connect: opens the instrument; a `TypeError` or `ValueError` of it is raised.
        model: of the instrument.
        trajectories: per acquisition after the first; 0 ends before it, with the knobs.
        seed: of the other setting.
        retry: how failed acquisitions are repeated.
        report: called with every incident.

    Returns: what was found, with `problems`.

    >>> check = insitu.check_instrument(connect, model)
    >>> check.problems  # none: it fits its model
    ()
    >>> check.trajectories
    62
    """
    substrate = instrument_substrate(connect, batch=max(trajectories, FIRST), retry=retry)
    substrate.report = report
    substrate.expected = model.expected
    check = _RunningCheck(substrate, model, trajectories, seed)
    try:
        check.run()
    except (protocol.InstrumentError, OSError) as error:
        check.explain(error)
    finally:
        substrate.close()
    return check.summarise()


class _RunningCheck:
    """State of a check while it runs."""

    def __init__(self, substrate: InstrumentSubstrate, model: Model, trajectories: int, seed: int):
        self.substrate = substrate
        self.model = model
        self.trajectories = trajectories
        self.seed = seed
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.parts: dict[str, Any] = {}

    def run(self) -> None:
        """Run the checks; the first problem that invalidates the others ends them."""
        sheet = self._connect()
        if self.problems or not self.trajectories:
            return
        first = self.substrate(None, self.model.start, FIRST)
        self.parts["record"] = describe_record(first, sheet)
        mismatch = residuals.compare_drift(self.model, first)
        if mismatch:
            self.problems.append(mismatch)
            return
        before = self._count_seconds()
        runs = self._measure()
        self._find_dead([first, *(trajectories for _, trajectories in runs)])
        self._measure_latency(before)
        if self.problems or self.trajectories < repeatability.MIN_TRAJECTORIES:
            return
        self._examine(runs)

    def explain(self, error: Exception) -> None:
        """Add the problem behind an error that ended the check."""
        repeated = self.substrate.counts[REPEATED]
        text = str(error).rstrip(".")
        self.problems.append(f"{repeated} {REPEATS}" if repeated else f"{text}.")

    def summarise(self) -> InstrumentCheck:
        """The result."""
        counts = dict(self.substrate.counts)
        failures = counts.pop("failures", 0)
        lost = {kind: n for kind, n in counts.items() if kind != "good" and n}
        self.notes += [
            f"{format_count(n, 'trajectory')} {'was' if n == 1 else 'were'} {kind}"
            for kind, n in lost.items()
        ]
        if failures:
            self.notes.append(f"{format_count(failures, 'failure')} retried")
        return InstrumentCheck(
            tuple(self.problems),
            self.substrate.ran,
            self.substrate.identity,
            notes=tuple(self.notes),
            **self.parts,
        )

    def _connect(self) -> knobs.DriverSheet:
        start = time.perf_counter()
        sheet = self._open()
        self.parts["latency"] = Latency(time.perf_counter() - start, np.nan, np.nan)
        self.problems += knobs.find_knob_problems(self.model, sheet)
        if not self.problems:
            self.parts["knobs"] = tuple(
                knobs.describe_knob(name, knob, sheet) for name, knob in self.model.knobs.items()
            )
            others = [name for name in sheet.limits if name not in self.model.knobs]
            if others:
                self.notes.append(f"knobs that the model does not have: {', '.join(others)}")
        return sheet

    def _open(self) -> knobs.DriverSheet:
        """Open the instrument. An invalid reply is retried, a lost connection is not."""
        for _ in range(self.substrate.retry.attempts - 1):
            try:
                return self.substrate.use(knobs.read_sheet)
            except protocol.InvalidReply as error:
                self.substrate.close()
                self.substrate.report(Incident("failure", 0, str(error)))
        return self.substrate.use(knobs.read_sheet)

    def _measure(self) -> list[tuple[Any, Trajectories]]:
        """Acquire at the start once more, or twice there and once at another setting."""
        settings = [self.model.start]
        if self.trajectories >= repeatability.MIN_TRAJECTORIES:
            rng = np.random.default_rng(self.seed)
            settings += [self.model.start, self.model.probe(rng)]
        runs = [
            (jax.tree.map(np.asarray, at), self.substrate(None, at, self.trajectories))
            for at in settings
        ]
        self.substrate.use(partial(_set, runs[0][0]))  # leave it at the start
        return runs

    def _find_dead(self, ensembles: list[Trajectories]) -> None:
        repeated = self.substrate.counts[REPEATED]
        distinct = {one.tobytes() for each in ensembles for one in np.asarray(each.x)}
        total = sum(len(each.x) for each in ensembles)
        if repeated or len(distinct) == 1 < total:
            self.problems.append(f"{repeated or total} {REPEATS}")
            return
        dead = find_dead(np.concatenate([each.x for each in ensembles]))
        if dead:
            names = self.parts["record"].channels
            listed = ", ".join(names[k] for k in dead[:8])
            self.problems.append(
                f"channels that measure nothing: {listed}, constant or noise without memory about "
                "a constant. Look at their cables."
            )

    def _count_seconds(self) -> Latency:
        """Seconds so far, in visits and in runs."""
        seconds = self.substrate.seconds
        return Latency(0.0, seconds["visit"], seconds["run"])

    def _measure_latency(self, before: Latency) -> None:
        """Time of all acquisitions but the first, which may prepare something."""
        now = self._count_seconds()
        visits = max(self.substrate.visits - 1, 1)
        ran = max(self.substrate.ran - FIRST, 1)
        self.parts["latency"] = Latency(
            self.parts["latency"].connect,
            (now.visit - before.visit) / visits,
            (now.trajectory - before.trajectory) / ran,
            ran / visits,
        )

    def _examine(self, runs: list[tuple[Any, Trajectories]]) -> None:
        start, again, other = runs
        settings, first = start
        second = again[1]
        self.parts["repeatability"] = compared = repeatability.compare_ensembles(first.x, second.x)
        if not compared.ok:
            name = self.parts["record"].channels[compared.channel]
            self.problems.append(
                f"the same setting gave different records: means differ by {compared.mean:.1f} and "
                f"variances by {compared.variance:.1f} standard errors, most in channel {name}; "
                f"up to {compared.limit:.1f} is chance. Let it settle, or look for a drift."
            )
        both = Trajectories(first.t, np.concatenate([first.x, second.x]), _join(first, second))
        try:
            comparison = residuals.examine_runs(self.model, [(settings, both), other])
        except (ValueError, FloatingPointError, np.linalg.LinAlgError) as error:
            self.notes.append(f"not compared with the model, which needs more records: {error}")
            return
        self.parts["residuals"] = comparison
        cause = comparison.residuals.cause
        if cause:
            self.problems.append(f"the records are not those of the model. {cause}")


def _set(settings: Params, instrument: protocol.Instrument) -> None:
    instrument.set(settings)


def _join(first: Trajectories, second: Trajectories) -> Any:
    """Join the contexts of two ensembles."""
    if not first.context:
        return None
    return jax.tree.map(lambda a, b: np.concatenate([a, b]), first.context, second.context)
