"""The plan of a training on an instrument."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fluctua.core.baselines import resolve_baseline
from fluctua.core.display.fields import show_fields
from fluctua.core.words import close_match
from fluctua.insitu.instrument.substrate import ON_DOUBT, Retry
from fluctua.store import final

BASELINES = ("none", "time", "mean", "optimal", "twin")
"""Those of `fluctua.core.baselines.TABLE` that a plan can ask for; "twin" is the calibrated drift.
"""

CALIBRATIONS = ("probes", "training")
"""When an instrument is calibrated: at probes before the training, or by the trajectories of the
training itself.
"""

SHARES = ("settings", "parameters")

MEASURED = "measured"
"""The readout's noise as every batch has it."""

MINIMUM = {
    "iterations": 0,
    "trajectories": 2,
    "probes": 2,
    "probe_trajectories": 2,
    "batch": 1,
    "seed": 0,
    "attempts": 1,
    "measure_every": 1,
}
"""Of whole numbers."""

POSITIVE = ("learning_rate", "time_limit")
NOT_NEGATIVE = ("first_pause", "longest_pause", "forget_after")
TYPES = {"record": bool, "renew": bool, "model": str}


@show_fields
@dataclass(frozen=True)
class Plan:
    """Plan of a training on an instrument: iterations, trajectories, calibration, retries.

    Args:
        iterations: steps of the optimiser.
        trajectories: per iteration.
        learning_rate: of Adam, falling to a twentieth by a cosine.
        probes: settings at which to calibrate.
        probe_trajectories: trajectories at each of them.
        batch: trajectories per acquisition.
        seed: of the probes.
        baseline: one of `BASELINES`.
        attempts: see `Retry`, as for the pauses and the time limit.
        first_pause: seconds before the second attempt.
        longest_pause: seconds between two attempts at most.
        record: whether every batch is kept on disk.
        instruments: names of the instruments, for resuming from the command line: addresses, or
            drivers as FILE.py:NAME. They and the two that follow are not used by `run`.
        model: name of the model, for resuming.
        options: arguments of drivers and model, for resuming.
        share: of several devices. "settings" sets all to the same (a robust design), "parameters"
            corrects the settings of each by its calibration, so that all do the same.
        rates: how fast each of several devices is; measured if not given.
        calibration: one of `CALIBRATIONS`. With "training" there are no probes and no baseline:
            every measured batch refines one model, whose gradient is used
            (`fluctua.SelfCalibrating`). The four options that follow count in that case only.
        forget_after: measured batches over which what was measured fades; 0 keeps everything.
        renew: forget everything before a batch that was not expected.
        measure_every: iterations of which one measures.
        readout: standard deviation of the measurement, or "measured", to be taken off that
            calibration.
        time_limit: seconds that one acquisition may take.
        on_doubt: "stop" ends the run at a batch that is not what the calibrated model does, without
            a step; "continue" uses it, with an incident.
        final_trajectories: measured at the end with the settings reached, to evaluate J; 0 for
            none. By default as many as an iteration, 20 at least.

    >>> plan = insitu.Plan(iterations=50, trajectories=100, learning_rate=0.05)
    >>> frugal = insitu.Plan(iterations=50, trajectories=4, calibration="training")  # no probes
    """

    iterations: int = 100
    trajectories: int = 300
    learning_rate: float = 0.1
    probes: int = 6
    probe_trajectories: int = 50
    batch: int = 100
    seed: int = 0
    baseline: str = "twin"
    attempts: int = 8
    first_pause: float = 0.1
    longest_pause: float = 30.0
    record: bool = True
    instruments: tuple[str, ...] = ()
    model: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    share: str = "settings"
    rates: tuple[float, ...] = ()
    calibration: str = "probes"
    forget_after: float = 0.0
    renew: bool = False
    measure_every: int = 1
    readout: float | str = 0.0
    time_limit: float = 300.0
    on_doubt: str = "stop"
    final_trajectories: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates", tuple(self.rates))
        object.__setattr__(self, "instruments", tuple(self.instruments))
        object.__setattr__(self, "options", dict(self.options))
        resolve_baseline(self.baseline, caller="in-situ training", serves=BASELINES)
        self._check_words()
        self._check_numbers()
        for name, kind in TYPES.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise ValueError(f"`{name}` must be a {kind.__name__}; got {value!r}.")

    def _check_words(self) -> None:
        if not all(isinstance(text, str) for text in self.instruments):
            raise ValueError(f"`instruments` must be texts; got {list(self.instruments)!r}.")
        if self.share not in SHARES:
            raise ValueError(
                f"`share` must be {' or '.join(map(repr, SHARES))}; got {self.share!r}."
            )
        if self.calibration not in CALIBRATIONS:
            raise ValueError(
                f"`calibration` is one of {', '.join(map(repr, CALIBRATIONS))}; got "
                f"{self.calibration!r}." + close_match(self.calibration, CALIBRATIONS)
            )
        if self.on_doubt not in ON_DOUBT:
            raise ValueError(
                f"`on_doubt` is one of {', '.join(map(repr, ON_DOUBT))}; got {self.on_doubt!r}."
            )

    def _check_numbers(self) -> None:
        for name, least in MINIMUM.items():
            _check_whole(name, getattr(self, name), least)
        final.check_number(self.final_trajectories)
        for name in POSITIVE:
            value = getattr(self, name)
            if not _is_number(value) or not value > 0:
                raise ValueError(f"`{name}` must be positive and finite; got {value!r}.")
        for name in NOT_NEGATIVE:
            value = getattr(self, name)
            if not _is_number(value) or not value >= 0:
                raise ValueError(f"`{name}` must be finite and not negative; got {value!r}.")
        if self.forget_after and not self.forget_after >= 1:
            raise ValueError(
                "`forget_after` is a number of batches, at least 1, or 0 for all; got "
                f"{self.forget_after!r}."
            )
        readout = self.readout
        if readout != MEASURED and not (_is_number(readout) and float(readout) >= 0):
            raise ValueError(
                f"`readout` must be finite and not negative, or 'measured'; got {readout!r}."
            )
        if not all(_is_number(rate) and rate > 0 for rate in self.rates):
            raise ValueError(f"`rates` must be positive and finite; got {list(self.rates)!r}.")

    @property
    def final_count(self) -> int:
        """Trajectories of the evaluation at the end; none without a training."""
        if not self.iterations:
            return 0
        return final.choose_number(self.final_trajectories, self.trajectories)

    @property
    def retry(self) -> Retry:
        """Options of repeating failed acquisitions."""
        return Retry(self.attempts, self.first_pause, self.longest_pause, self.time_limit)


class Workload(NamedTuple):
    """Acquisitions and trajectories of one device in a training."""

    acquisitions: int
    trajectories: int


def count_work(plan: Plan, devices: int = 1) -> Workload:
    """Acquisitions and trajectories of each of several devices, without failures."""
    share = math.ceil(plan.trajectories / devices)
    last = math.ceil(plan.final_count / devices)
    measured = math.ceil(plan.iterations / plan.measure_every)
    visits = measured * math.ceil(share / plan.batch) + math.ceil(last / plan.batch)
    total = measured * share + last
    if plan.calibration == "probes":
        visits += plan.probes * math.ceil(plan.probe_trajectories / plan.batch)
        total += plan.probes * plan.probe_trajectories
    return Workload(visits, total)


def _check_whole(name: str, value: Any, least: int) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not least <= value < 2**63:
        raise ValueError(
            f"`{name}` must be a whole number, at least {least} and below 2⁶³; got {value!r}."
        )


def _is_number(value: object) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
