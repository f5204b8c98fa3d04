"""Training an instrument into a folder: calibrate, train, and lose nothing to a kill but the
iteration at hand.

plan.json       what was asked for            history.csv    a row an iteration
(fluctua.store.history) parameters.h5   the settings over time        (fluctua.store.course)
recordings/     every batch, bad ones too     incidents.csv  what went wrong, and what it cost
checkpoints/    what resuming goes on from    final.npz      the settings after the last step
calibration.txt what the probes said of the instrument, or the latest of a training that calibrates
as it goes devices.csv     how each device was           (fluctua.insitu.devices)
devices.txt     of several: how much they differ, how many trajectories are worth while

With several devices recordings are in recordings/device-1/, … and calibrations are
calibration-1.txt, …

`begin(connect, model, Plan(iterations=60), folder)` yields a row and a record an iteration;
`resume(connect, model, folder)` goes on after a stop.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from fluctua.core.arrays import Params
from fluctua.core.baselines import chosen
from fluctua.core.estimate import Groups
from fluctua.core.estimator import ppgt
from fluctua.core.objective import Objective, Rewards
from fluctua.core.process import Process
from fluctua.core.protocols import Estimator, as_estimator
from fluctua.core.words import close_match
from fluctua.insitu.devices import CalibratedDevice, DeviceTable
from fluctua.insitu.instrument.device_array import DeviceArray, DeviceHealth
from fluctua.insitu.instrument.guard import ResidualGuard
from fluctua.insitu.instrument.protocol import CommandRejected, Instrument
from fluctua.insitu.instrument.substrate import (
    DOUBT,
    ON_DOUBT,
    Incident,
    InstrumentSubstrate,
    Retry,
)
from fluctua.insitu.model import Model, Unknown, corrected
from fluctua.insitu.plan_file import (
    get_fields,
    hold_plan,
    read_entries,
    rename_fields,
    write_plan,
)
from fluctua.learn.self_calibrating import SelfCalibrating
from fluctua.learn.training import Length, Record, Training, check_bounds
from fluctua.store import checkpoint, history, journal, loop
from fluctua.store import folder as runfolder
from fluctua.store.checkpoint import RunState
from fluctua.store.fingerprint import describe
from fluctua.store.folder import RunFolder
from fluctua.store.history import Row
from fluctua.store.journal import JournalOptions, RunFiles
from fluctua.store.loop import Advance, Loop, Opened
from fluctua.store.parts import Parts, describe_record, refuse_other_parts, stamp_parts

Rows = Iterator[tuple[Row, Record]]
Connect = Callable[[], Instrument]
Connects = Connect | Sequence[Connect]
"""One instrument, or several that are trained together."""
MakeEstimator = Callable[..., Estimator]
"""(substrate, objective, process=...) -> Estimator: `ppgt`, or `functools.partial(ppgt, ...)`."""

BASELINES = ("none", "time", "mean", "optimal", "twin")
"""Those of `fluctua.core.baselines.TABLE` that a plan can ask for; "twin" is the calibrated drift.
"""

CALIBRATIONS = ("probes", "training")
"""When an instrument is calibrated: at probes before the training, or by the trajectories of the
training itself.
"""

SHARES = ("settings", "parameters")
KEEP = JournalOptions(checkpoints=3, seconds=0.0, every=1)
"""A checkpoint after every row: what an instrument measured cannot be had again."""


@dataclass(frozen=True)
class Plan:
    """What in-situ training does.

    trajectories: an iteration. probes, probe_trajectories: settings at which to calibrate, and
    trajectories at each.
    batch: trajectories an acquisition. learning_rate: of Adam, falling to a twentieth by a cosine.
    seed: of the probes.
    baseline: one of `BASELINES`. attempts, first_pause, longest_pause, time_limit: see `Retry`.
    record: whether every batch is kept on disk. points, address: of the instrument, for resuming;
    addresses of several are separated by spaces. noise, sigma_kappa, kerr: injected noise,
    modulation of the couplings, and whether χ has knobs, for the same purpose. on_doubt: "stop"
    ends the run at a batch that is not what the calibrated model does, without a step; "continue"
    uses it, with an incident.

    Of several devices: share "settings" sets all to the same (a robust design), "parameters"
    corrects the settings of each by its calibration, so that all do the same. rates: how fast each
    is; measured if not given.

    calibration: one of `CALIBRATIONS`. With "training" there are no probes and no baseline: every
    measured batch refines one model, of which the gradient is (`fluctua.SelfCalibrating`), and
    these count. forget_after: batches over which measurements fade; 0 keeps everything.
    renew: forget everything before a batch that was not expected.
    measure_every: iterations of which one measures. readout: standard deviation of the measurement,
    or "measured", to be taken off that calibration. most_omega, most_kappa: bounds of the knobs,
    which `network_model` is made with.
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
    points: int = 601
    address: str = ""
    share: str = "settings"
    rates: tuple[float, ...] = ()
    noise: float = 0.0
    sigma_kappa: float = 0.0
    kerr: bool = False
    calibration: str = "probes"
    forget_after: float = 0.0
    renew: bool = False
    measure_every: int = 1
    readout: float | str = 0.0
    most_omega: float = 2.0
    most_kappa: float = 1.5
    time_limit: float = 300.0
    on_doubt: str = "stop"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates", tuple(self.rates))
        if self.share not in SHARES:
            raise ValueError(
                f"`share` must be {' or '.join(map(repr, SHARES))}; got {self.share!r}."
            )
        for name, least in (
            ("iterations", 0),
            ("trajectories", 2),
            ("probes", 2),
            ("probe_trajectories", 2),
            ("batch", 1),
            ("seed", 0),
            ("attempts", 1),
            ("points", 2),
            ("measure_every", 1),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
                raise ValueError(
                    f"`{name}` must be a whole number, at least {least} and below 2⁶³; got "
                    f"{value!r}."
                )
        chosen(self.baseline, door="in-situ training", serves=BASELINES)
        if self.calibration not in CALIBRATIONS:
            raise ValueError(
                f"`calibration` is one of {', '.join(map(repr, CALIBRATIONS))}; got "
                f"{self.calibration!r}." + close_match(self.calibration, CALIBRATIONS)
            )
        for name in ("learning_rate", "most_omega", "most_kappa", "time_limit"):
            if not _is_number(getattr(self, name)) or not getattr(self, name) > 0:
                raise ValueError(
                    f"`{name}` must be positive and finite; got {getattr(self, name)!r}."
                )
        for name in ("first_pause", "longest_pause", "noise", "sigma_kappa", "forget_after"):
            if not _is_number(getattr(self, name)) or not getattr(self, name) >= 0:
                raise ValueError(
                    f"`{name}` must be finite and not negative; got {getattr(self, name)!r}."
                )
        if self.on_doubt not in ON_DOUBT:
            raise ValueError(
                f"`on_doubt` is one of {', '.join(map(repr, ON_DOUBT))}; got {self.on_doubt!r}."
            )
        if self.forget_after and not self.forget_after >= 1:
            raise ValueError(
                f"`forget_after` is a number of batches, at least 1, or 0 for all; got "
                f"{self.forget_after!r}."
            )
        if self.readout != "measured" and not (
            _is_number(self.readout) and float(self.readout) >= 0
        ):
            raise ValueError(
                f"`readout` must be finite and not negative, or 'measured'; got {self.readout!r}."
            )
        if not all(_is_number(rate) and rate > 0 for rate in self.rates):
            raise ValueError(f"`rates` must be positive and finite; got {list(self.rates)!r}.")
        for name, kind in (("record", bool), ("kerr", bool), ("renew", bool), ("address", str)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(
                    f"`{name}` must be a {kind.__name__}; got {getattr(self, name)!r}."
                )


def _is_number(value: object) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def run(
    connect: Connects,
    model: Model,
    plan: Plan,
    folder: str | Path,
    *,
    estimator: MakeEstimator | None = None,
    report: Callable[[Incident], None] = lambda incident: None,
) -> Rows:
    """Calibrate and train into a new folder.

    Args:
        connect: opens the instrument; called again after every failure. A list of such trains
            several devices together (`fluctua.insitu.instrument.array`).
        model: of the instrument: process, objective, bounds, and how to calibrate.
        plan: what to do.
        folder: where; it must be empty or not exist.
        estimator: in place of the plan's `baseline`.
        report: is told of every incident.
    Returns: a generator of each row of the history with its `Record`; stop to stop.

    """
    place = _place(folder)
    run = secrets.token_hex(8)
    session = _Session(connect, model, plan, estimator, place, report)
    opened = loop.begin(session.list_files(run))
    session.open()
    return _iterate(session, opened)


def resume(
    connect: Connects,
    model: Model,
    folder: str | Path,
    *,
    iterations: int | None = None,
    time_limit: float | None = None,
    on_doubt: str | None = None,
    estimator: MakeEstimator | None = None,
    report: Callable[[Incident], None] = lambda incident: None,
) -> Rows:
    """Go on after a stop, a kill or a failure.

    The iteration that was cut off is measured again; what it had recorded stays in recordings/.
    With another number of iterations the learning rate follows the cosine of that number from here
    on. A plan.json that was edited by hand, and another process, objective, start, bound or
    estimator than the run began with, are refused by name.

    Args:
        connect: opens the instrument, or each of several, in the same order.
        model: of the instrument.
        folder: of the run.
        iterations: how many in all, if not as planned.
        time_limit: of one acquisition in seconds, if not as planned.
        on_doubt: "stop" or "continue", if not as planned.
        estimator: in place of the plan's `baseline`.
        report: is told of every incident.
    Returns: a generator of each row of the history with its `Record`.

    """
    place = runfolder.find_run(folder, _place(folder))
    with runfolder.hold(place) as lock:
        entries = read_entries(place)
        plan = _plan_of(place, entries)
        run = entries.get("run", "")
        changes: dict[str, Any] = {
            "iterations": iterations,
            "time_limit": time_limit,
            "on_doubt": on_doubt,
        }
        plan = dataclasses.replace(
            plan, **{name: value for name, value in changes.items() if value is not None}
        )
        session = _Session(connect, model, plan, estimator, place, report)

        def warn(text):
            return session.note(Incident("checkpoint", 0, text))

        run = run or secrets.token_hex(8)
        refuse_other_parts(
            place.settings,
            entries,
            session.stamp,
            lambda text: session.note(Incident("plan", 0, text)),
        )
        files = session.list_files(run)
        state = journal.read_state(files, warn)
        if state.row == 0 and place.history.exists() and len(history.read(place.history)) > 1:
            name = checkpoint.set_aside(place.history)  # an instrument does not repeat itself
            warn(
                "no checkpoint is left: calibrated and trained anew; the rows so far are kept as "
                f"{name}"
            )
        book = journal.reopen(files, lock, state, report=warn)
        session.open()
        return _iterate(session, Opened(book, state))


def read_plan(folder: str | Path) -> Plan:
    """The plan of a run."""
    place = runfolder.find_run(folder, _place(folder))
    return _plan_of(place, read_entries(place))


def _place(folder: str | Path) -> RunFolder:
    return RunFolder(Path(folder), "plan.json", "fluctua insitu train --resume {folder}")


def _plan_of(place: RunFolder, entries: dict[str, Any]) -> Plan:
    try:
        return Plan(**rename_fields(get_fields(entries)))
    except TypeError as error:
        raise ValueError(
            f"{place.settings} is no plan of an in-situ run, or damaged ({error})."
        ) from None


def _retry(plan: Plan) -> Retry:
    return Retry(plan.attempts, plan.first_pause, plan.longest_pause, plan.time_limit)


def _space(plan: Plan) -> int:
    """Bytes that a run takes, without its recordings, which ask for their own room."""
    return 2**22 + 200 * plan.iterations


def _by_family(steps: Params, updates: Params, theta: Params | None) -> Params:
    """Updates with the factor of each family."""
    return jax.tree.map(
        lambda factor, family: jax.tree.map(lambda v: factor * v, family), steps, updates
    )


COMPUTED = (
    "process",
    "objective",
    "start",
    "lower",
    "upper",
    "follow",
    "correct",
    "unknown",
    "steps",
)
"""Fields of a model that what a run computes depends on; the others serve its first calibration and
its files.
"""


def _describe(model: Model, make: MakeEstimator) -> Parts:
    """Fingerprints of what a run computes with beside its plan."""
    parts = {"estimator": describe(make)}
    for name in COMPUTED:
        value = getattr(model, name)
        named = isinstance(value, Process | Objective | Rewards | Unknown)
        # no shapes to trace at: the size of the state is known once it is measured
        parts |= describe_record(name, value, None) if named else {name: describe(value)}
    return parts


def _check_share(plan: Plan, model: Model, devices: int) -> None:
    """Refuse a plan that does not fit the number of devices, before there is a folder."""
    if devices < 1:
        raise ValueError("`connect` must open one instrument at least; got an empty list.")
    if plan.rates and len(plan.rates) != devices:
        raise ValueError(f"`rates` must be one a device, {devices}; got {len(plan.rates)}.")
    if plan.share == "parameters":
        if devices == 1:
            raise ValueError("`share` = 'parameters' is of several devices; one was given.")
        corrected(model)
    if devices > 1 and plan.trajectories < 2 * devices:
        raise ValueError(
            f"`trajectories` must be {2 * devices} at least, two for each of {devices} devices; "
            "got "
            f"{plan.trajectories}."
        )


def _check_unknown(model: Model, make: MakeEstimator | None, devices: int) -> None:
    """Whether a training can calibrate as it goes."""
    obstacle = ""
    if devices > 1:
        obstacle = f"is of one device, and there are {devices}"
    elif make is not None:
        obstacle = "makes its own estimator, and one was given"
    elif model.unknown is None:
        obstacle = "needs `Model.unknown`, and this model has none"
    if obstacle:
        raise ValueError(
            f'a training that calibrates as it goes {obstacle}. Use calibration="probes".'
        )


class _Session:
    """What one process holds while it trains.

    The instrument comes with `open`, once the folder is ours.
    """

    substrate: InstrumentSubstrate | DeviceArray
    estimator: Estimator
    devices: list[CalibratedDevice]
    table: DeviceTable
    groups: Groups | None = None

    def __init__(
        self,
        connect: Connects,
        model: Model,
        plan: Plan,
        make: MakeEstimator | None,
        place: RunFolder,
        report: Callable[[Incident], None],
    ):
        self.model = model
        self.plan = plan
        self.place = place
        self.report = report
        self.connects = list(connect) if isinstance(connect, Sequence) else [connect]
        _check_share(plan, model, len(self.connects))
        self.as_it_goes = plan.calibration == "training"
        if self.as_it_goes:
            _check_unknown(model, make, len(self.connects))
        self.make = partial(ppgt, baseline=plan.baseline) if make is None else make
        self.iteration = "calibration"
        self.incidents: list[Incident] = []
        self.lock = threading.Lock()  # devices of an array report from threads of their own
        decay = optax.cosine_decay_schedule(plan.learning_rate, max(plan.iterations, 1), alpha=0.05)
        rule = optax.adam(decay)
        if model.steps is not None:
            rule = optax.chain(rule, optax.stateless(partial(_by_family, model.steps)))
        self.rule = optax.with_extra_args_support(rule)
        self.bounds = check_bounds((model.lower, model.upper))
        self.stamp = stamp_parts(_describe(model, self.make))

    def list_files(self, run: str) -> RunFiles:
        """What the files of the run have in common, `run` being its fingerprint."""
        theta = self.bounds.project(self.model.start)
        return RunFiles(
            self.place,
            write_plan(dataclasses.asdict(self.plan), run, self.stamp),
            run,
            checkpoint.start_state(theta, self.rule.init(theta)),
            KEEP,
            need=_space(self.plan),
        )

    @property
    def loop(self) -> Loop:
        """The training, with what happens after an iteration."""
        plan = self.plan
        training = Training(
            self.estimator,
            self.model.start,
            self.rule,
            trajectories=plan.trajectories,
            bounds=self.bounds,
            seed=plan.seed,
        )
        return Loop(training, Length(plan.iterations), advance=self.advance)

    def open(self) -> None:
        """The instruments as a substrate, and the estimator that uses it."""
        plan = self.plan
        model = self.model
        several = len(self.connects) > 1
        guard = ResidualGuard(model.process)
        self.devices = [
            CalibratedDevice(
                one,
                model,
                guard.another(),
                probes=(plan.probes, plan.probe_trajectories, plan.seed),
                folder=self.place.path,
                recordings="recordings" if plan.record else None,
                place=several and k + 1,
                batch=plan.batch,
                retry=_retry(plan),
                report=self.note,
                on_doubt=None if self.as_it_goes else plan.on_doubt,
            )
            for k, one in enumerate(self.connects)
        ]
        self.table = DeviceTable(self.place.path, self.devices)
        self.substrate = self.devices[0].substrate
        if several:
            correct = model.correct if plan.share == "parameters" else None
            model = corrected(model) if correct else model
            self.substrate = DeviceArray(
                [device.substrate for device in self.devices],
                share=correct,
                rates=plan.rates or None,
                prepare=self.prepare,
                report=self.note,
            )
        if self.as_it_goes:
            self.estimator = self._calibrated()
        else:
            self.estimator = as_estimator(
                self.make(self.substrate, model.objective, process=model.process)
            )

    def _calibrated(self) -> SelfCalibrating:
        """The estimator whose model every measured batch refines."""
        plan = self.plan
        of = self.model.unknown
        assert of is not None  # refused when the session was made

        # what is known of the instrument is in the estimator; the calibration in the context is the
        # guard's
        def states(key, theta, count):
            return self.devices[0].as_recorded(self.substrate(key, theta, count))

        return SelfCalibrating(
            of.model,
            states,
            of.effective,
            of.start,
            of.spread,
            forget_after=plan.forget_after or np.inf,
            renew=plan.renew,
            samples=0,
            measure_every=plan.measure_every,
            every=of.every,
            readout=plan.readout,
            on_doubt=plan.on_doubt,
        )

    def prepare(self, k: int) -> None:
        """Calibrate a device of several that is not yet: it may have been silent before."""
        if not self.devices[k].calibration:
            try:
                self.devices[k].calibrate()
            # one device that cannot be calibrated does not end the training of the others
            except ValueError as error:
                raise CommandRejected(f"it cannot be calibrated: {error}") from error

    def note(self, incident: Incident) -> None:
        """To the file, and to whoever wants to know."""
        with self.lock:
            self._note(incident)

    def _note(self, incident: Incident) -> None:
        self.incidents.append(incident)
        path = self.place.path / "incidents.csv"
        fresh = not path.exists()
        with open(path, "a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            if fresh:
                writer.writerow(("time", "iteration", *Incident._fields))
            writer.writerow((time.strftime("%Y-%m-%dT%H:%M:%S"), self.iteration, *incident))
        self.report(incident)

    def event(self) -> str:
        """The incidents since the last call, in a few words without commas."""
        count: Counter[str] = Counter()
        for incident in self.incidents:
            count[incident.kind] += incident.trajectories or 1
        self.incidents = []
        return "; ".join(f"{n} {kind}" for kind, n in count.items())

    def calibrate(self) -> None:
        """Trajectories at random settings, and what they say of each instrument; none if
        the training calibrates.
        """
        for device in self.devices:
            device.count_cut_off(0)
        if self.as_it_goes:
            self.follow()
        elif isinstance(self.substrate, DeviceArray):
            self.substrate.prepared()
        else:
            self.devices[0].calibrate()

    def follow(self) -> None:
        """The calibration of the iterations to come, from the trajectories of this one."""
        if isinstance(self.estimator, SelfCalibrating):
            assert self.model.unknown is not None  # refused when the session was made
            self.devices[0].take(self.model.unknown.context(self.estimator.phi))
        else:
            for device in self.devices:
                device.follow()

    def report_calibration(self) -> None:
        """What the trajectories of the training said of the instrument, for a reader."""
        if isinstance(self.estimator, SelfCalibrating) and self.estimator.calibration.trajectories:
            checkpoint.replace(self.devices[0].text, f"{self.estimator.calibration!r}\n".encode())

    def spent(self) -> int:
        """Trajectories that the instruments ran, discarded ones included."""
        return sum(n for kind, n in self.substrate.counts.items() if kind != "failures")

    def health(self) -> list[DeviceHealth]:
        """How each device is."""
        if isinstance(self.substrate, DeviceArray):
            return self.substrate.health()
        return DeviceArray([self.substrate]).health()

    def arrays(self) -> dict[str, np.ndarray]:
        """Calibrations, counts and what is known of the instruments, for a checkpoint."""
        kept = {name: array for device in self.devices for name, array in device.arrays().items()}
        kept |= hold_plan(dataclasses.asdict(self.plan))
        if isinstance(self.substrate, DeviceArray):
            kept |= self.substrate.memory() | {
                "counts": np.array(json.dumps(self.substrate.counts))
            }
        return kept

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        """Put the `arrays` of a checkpoint back."""
        several = isinstance(self.substrate, DeviceArray)
        if several != ("array/wait" in arrays):
            was, now = ("one device", "several") if several else ("several devices", "one")
            raise ValueError(
                f"the run is of {was}, and {now} was given. Go on with the same, or begin another "
                "run."
            )
        if isinstance(self.substrate, DeviceArray):
            self.substrate.remember(arrays)
        for device in self.devices:
            device.load(arrays)

    def advance(self, state: RunState, record: Record) -> Advance:
        """A record as a row, and the calibration that follows from it."""
        self._check_doubt()
        self.follow()
        self.groups = record.estimate.groups
        self.table.add(state.row, self.health(), self.groups)
        events = (self.event(), getattr(self.estimator, "event", ""))
        row = journal.make_row(state.row, record, "; ".join(filter(None, events)))._replace(
            trajectories=self.spent()
        )
        self.iteration = str(record.iteration + 1)
        new = checkpoint.add_record(state, record, self.estimator.state)
        return Advance(dataclasses.replace(new, further=self.arrays()), row)

    def _check_doubt(self) -> None:
        """Note that a model that is calibrated as it goes is in doubt, and stop before its
        step is taken.
        """
        if isinstance(self.estimator, SelfCalibrating) and DOUBT in self.estimator.event:
            stops = self.plan.on_doubt == "stop"
            self.note(Incident(DOUBT, self.plan.trajectories if stops else 0, self.estimator.doubt))
            self.estimator.check_doubt()

    def conclude(self) -> None:
        """`devices.txt`: how the devices of an array were and how they differ; what
        trajectories are worth while.
        """
        if isinstance(self.substrate, DeviceArray) and self.groups is not None:
            text = self.substrate.describe(self.groups) + "\n"
            checkpoint.replace(self.place.path / "devices.txt", text.encode())


def _iterate(session: _Session, opened: Opened) -> Rows:
    """Calibrate or put back what a checkpoint holds, then train."""
    book, state = opened
    try:
        try:
            if "counts" in state.further:
                session.load(state.further)
            else:
                session.calibrate()
                state = dataclasses.replace(state, further=session.arrays())
                with runfolder.explain_failures(book.place):
                    book.save(state)
            training = session.loop
            loop.restore_memory(training.training, state)
            session.table.open(state.row)
        except BaseException:
            book.close(None)
            raise
        session.iteration = str(state.now.iteration)
        yield from loop.iterate(Opened(book, state), training)
        session.report_calibration()
    finally:
        session.conclude()
        session.table.close()
        session.substrate.close()
