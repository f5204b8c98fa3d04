"""Training an instrument into a folder: calibrate, train, and lose nothing to a kill but the iteration at hand.

plan.json       what was asked for            history.csv    a row an iteration (fluctua.store.history)
parameters.h5   the settings over time        (fluctua.store.course)
recordings/     every batch, bad ones too     incidents.csv  what went wrong, and what it cost
checkpoints/    what resuming goes on from    final.npz      the settings after the last step
calibration.txt what the probes said of the instrument, before the training

`begin(connect, model, Plan(iterations=60), folder)` yields a row and a record an iteration; `resume(connect, model,
folder)` goes on after a stop.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from fluctua.core.baselines import chosen
from fluctua.core.estimate import as_estimator
from fluctua.core.ppgt import ppgt
from fluctua.core.types import Estimator, PyTree
from fluctua.insitu.instrument.guard import ResidualGuard
from fluctua.insitu.instrument.protocol import Instrument
from fluctua.insitu.instrument.substrate import Archive, Incident, Measured, Retry, measured
from fluctua.insitu.model import Model
from fluctua.learn.train import Record, box, train
from fluctua.store import checkpoint, history, journal
from fluctua.store import folder as runfolder
from fluctua.store.checkpoint import State, after
from fluctua.store.checkpoint import begin as begin_state
from fluctua.store.folder import RunFolder
from fluctua.store.history import Row
from fluctua.store.journal import Journal, Keep, Step

Rows = Iterator[tuple[Row, Record]]
Connect = Callable[[], Instrument]
MakeEstimator = Callable[..., Estimator]
"""(process, objective, substrate) -> Estimator: `ppgt`, or `functools.partial(ppgt, baseline=...)`."""

BASELINES = ("none", "time", "mean", "optimal", "twin")
"""Those of `fluctua.core.baselines.TABLE` that a plan can ask for; "twin" is the calibrated drift."""

CALIBRATION = "calibration/"
CUT_OFF = "cut off"
KEEP = Keep(checkpoints=3, seconds=0.0, every=1)
"""A checkpoint after every row: what an instrument measured cannot be had again."""


@dataclass(frozen=True)
class Plan:
    """What in-situ training does.

    trajectories: an iteration. probes, probe_trajectories: settings at which to calibrate, and trajectories at each.
    batch: trajectories an acquisition. learning_rate: of Adam, falling to a twentieth by a cosine. seed: of the probes.
    baseline: one of `BASELINES`. attempts, first_pause, longest_pause: see `Retry`. record: whether every batch is
    kept on disk. points, address: of the instrument, for resuming.
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

    def __post_init__(self) -> None:
        for name, least in (("iterations", 0), ("trajectories", 2), ("probes", 2), ("probe_trajectories", 2),
                            ("batch", 1), ("attempts", 1)):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"`{name}` must be a whole number, at least {least}; got {value!r}.")
        chosen(self.baseline, door="in-situ training", serves=BASELINES)
        if not self.learning_rate > 0:
            raise ValueError(f"`learning_rate` must be positive; got {self.learning_rate!r}.")


def begin(
    connect: Connect,
    model: Model,
    plan: Plan,
    folder: str | Path,
    *,
    estimator: MakeEstimator | None = None,
    report: Callable[[Incident], None] = lambda incident: None,
) -> Rows:
    """Calibrate and train into a new folder.

    Args:
        connect: opens the instrument; called again after every failure.
        model: of the instrument: process, objective, bounds, and how to calibrate.
        plan: what to do.
        folder: where; it must be empty or not exist.
        estimator: in place of the plan's `baseline`.
        report: is told of every incident.
    Returns: a generator of each row of the history with its `Record`; stop to stop.

    """
    place, run = _place(folder), secrets.token_hex(8)
    session = _Session(model, plan, estimator, place, report)
    book = journal.create(
        place, _settings(plan, run), run, session.beginning(), journal.named_leaves, need=_space(plan), keep=KEEP
    )
    session.open(connect)
    return _rows(session, book, session.beginning())


def resume(
    connect: Connect,
    model: Model,
    folder: str | Path,
    *,
    iterations: int | None = None,
    estimator: MakeEstimator | None = None,
    report: Callable[[Incident], None] = lambda incident: None,
) -> Rows:
    """Go on after a stop, a kill or a failure.

    The iteration that was cut off is measured again; what it had recorded stays in recordings/. With another number of
    iterations the learning rate follows the cosine of that number from here on.

    Args:
        connect: opens the instrument.
        model: of the instrument.
        folder: of the run.
        iterations: how many in all, if not as planned.
        estimator: in place of the plan's `baseline`.
        report: is told of every incident.
    Returns: a generator of each row of the history with its `Record`.

    """
    place = runfolder.existing(folder, _place(folder))
    with runfolder.holding(place) as lock:
        plan, run = _read(place)
        if iterations is not None:
            plan = dataclasses.replace(plan, iterations=iterations)
        session = _Session(model, plan, estimator, place, report)
        warn = lambda text: session.note(Incident("checkpoint", 0, text))
        run = run or secrets.token_hex(8)
        state = journal.standing(place, run, session.beginning(), warn)
        if state.row == 0 and place.history.exists() and len(history.read(place.history)) > 1:
            name = checkpoint.set_aside(place.history)  # an instrument does not repeat itself
            warn(f"no checkpoint is left: calibrated and trained anew; the rows so far are kept as {name}")
        book = journal.reopen(
            place, lock, _settings(plan, run), run, state, journal.named_leaves, keep=KEEP, report=warn
        )
        session.open(connect)
        return _rows(session, book, state)


def read_plan(folder: str | Path) -> Plan:
    """The plan of a run."""
    return _read(runfolder.existing(folder, _place(folder)))[0]


def _place(folder: str | Path) -> RunFolder:
    return RunFolder(Path(folder), "plan.json", "fluctua insitu train --resume {folder}")


def _read(place: RunFolder) -> tuple[Plan, str]:
    """The plan and the fingerprint of a run; runs of earlier versions have none."""
    try:
        tree = json.loads(place.settings.read_text())
        return Plan(**{name: value for name, value in tree.items() if name != "run"}), tree.get("run", "")
    except (TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{place.settings} is no plan of an in-situ run, or damaged ({error}).") from None


def _settings(plan: Plan, run: str) -> bytes:
    return json.dumps({**dataclasses.asdict(plan), "run": run}, indent=1).encode()


def _space(plan: Plan) -> int:
    """Bytes that a run takes, without its recordings, which ask for their own room."""
    return 2**22 + 200 * plan.iterations


class _Session:
    """What one process holds while it trains. The instrument comes with `open`, once the folder is ours."""

    substrate: Measured
    estimator: Estimator

    def __init__(
        self,
        model: Model,
        plan: Plan,
        make: MakeEstimator | None,
        place: RunFolder,
        report: Callable[[Incident], None],
    ):
        self.model, self.plan, self.place, self.report = model, plan, place, report
        self.make = partial(ppgt, baseline=plan.baseline) if make is None else make
        self.calibration: dict[str, Any] = {}
        self.iteration = "calibration"
        self.incidents: list[Incident] = []
        self.guard = ResidualGuard(model.process)
        decay = optax.cosine_decay_schedule(plan.learning_rate, max(plan.iterations, 1), alpha=0.05)
        self.rule = optax.with_extra_args_support(optax.adam(decay))
        self.project = box(model.lower, model.upper)

    def beginning(self) -> State:
        """Before the first row."""
        theta = self.project(self.model.start)
        return begin_state(theta, self.rule.init(theta))

    def open(self, connect: Connect) -> None:
        """The instrument as a substrate, and the estimator that uses it."""
        plan = self.plan
        self.substrate = measured(
            connect,
            batch=plan.batch,
            retry=Retry(plan.attempts, plan.first_pause, plan.longest_pause),
            archive=Archive(self.place.path / "recordings", self.model.head) if plan.record else None,
            guard=self.guard,
            report=self.note,
        )
        self.estimator = as_estimator(self.make(self.model.process, self.model.objective, self.substrate))

    def note(self, incident: Incident) -> None:
        """To the file, and to whoever wants to know."""
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
        """Trajectories at random settings, and what they say of the instrument."""
        rng, runs = np.random.default_rng(self.plan.seed), []
        for _ in range(self.plan.probes):
            settings = self.model.probe(rng)
            runs.append((settings, self.substrate(None, settings, self.plan.probe_trajectories)))
        fit = self.model.calibrate(runs)
        self.calibration = fit.values
        self.guard.calibrate(runs, fit.values)
        if fit.report:
            checkpoint.replace(self.place.path / "calibration.txt", fit.report.encode())

    def follow(self) -> None:
        """The calibration of the iterations to come, from the trajectories of this one."""
        if self.model.follow is not None and self.substrate.last is not None:
            self.calibration = self.model.follow(self.calibration, *self.substrate.last)

    def context(self, count: int) -> PyTree:
        """The calibration, a row a trajectory."""
        return jax.tree.map(lambda v: np.broadcast_to(np.asarray(v), (count, *np.shape(v))), self.calibration)

    def spent(self) -> int:
        """Trajectories that the instrument ran, discarded ones included."""
        return sum(n for kind, n in self.substrate.counts.items() if kind != "failures")

    def arrays(self) -> dict[str, np.ndarray]:
        """Calibration, counts and what is known of the instrument, for a checkpoint."""
        archive = self.substrate.archive
        calibration = {CALIBRATION + name: np.asarray(v) for name, v in self.calibration.items()}
        return (
            calibration
            | self.substrate.memory()
            | {
                "counts": np.array(json.dumps(self.substrate.counts)),
                "batches": np.array(archive.number if archive else 0),
            }
        )

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        """Put the `arrays` of a checkpoint back."""
        self.substrate.counts = Counter(json.loads(str(arrays["counts"])))
        self.substrate.remember(arrays)
        self.count_cut_off(int(arrays["batches"]))
        self.calibration = {n.removeprefix(CALIBRATION): v for n, v in arrays.items() if n.startswith(CALIBRATION)}

    def count_cut_off(self, batches: int) -> None:
        """Batches that came after a checkpoint, which knew of so many, were spent and are measured again."""
        archive = self.substrate.archive
        lost = archive.trajectories_since(batches) if archive else 0
        if lost:
            self.substrate.counts[CUT_OFF] += lost
            self.note(Incident(CUT_OFF, lost, f"{lost} trajectories of what was cut off are kept and not used"))

    def step(self, state: State, record: Record) -> Step:
        """A record as a row, and the calibration that follows from it."""
        self.follow()
        row = journal.row_of(state.row, record, self.event())._replace(trajectories=self.spent())
        self.iteration = str(record.iteration + 1)
        further = self.arrays()
        return Step(dataclasses.replace(after(state, record, self.estimator.state), further=further), row)

    def records(self, state: State) -> Iterator[Record]:
        """The training from a state on."""
        self.iteration = str(state.now.iteration)
        return train(
            jax.random.key(self.plan.seed), state.now.theta, self.estimator, self.rule, count=self.plan.trajectories,
            iterations=self.plan.iterations, project=self.project,
            resume=state.now._replace(trajectories=state.spent),
        )  # fmt: skip


def _rows(session: _Session, book: Journal, state: State) -> Rows:
    try:
        try:
            if "counts" in state.further:
                session.load(state.further)
            else:
                session.count_cut_off(0)
                session.calibrate()
                state = dataclasses.replace(state, further=session.arrays())
                with runfolder.explained(book.place):
                    book.save(state)
            if state.memory:
                session.estimator.restore(state.memory, state.now.theta)
            session.substrate.context = session.context
        except BaseException:
            book.close(None)
            raise
        over = lambda state: "planned" if state.now.iteration >= session.plan.iterations else ""
        yield from book.rows(state, session.records, session.step, over)
    finally:
        session.substrate.close()
