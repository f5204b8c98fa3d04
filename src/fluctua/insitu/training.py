"""Training an instrument into a folder: calibrate, train, and lose nothing to a kill but the iteration at hand.

plan.json       what was asked for            history.csv    a row an iteration (fluctua.store.history)
recordings/     every batch, bad ones too     incidents.csv  what went wrong, and what it cost
checkpoints/    what resuming goes on from    final.npz      the settings after the last step
calibration.txt what the probes said of the instrument, before the training

>>> for row, record in begin(connect, model, Plan(iterations=60), "runs/bench"):
...     print(row.iteration, row.J)
>>> for row, record in resume(connect, model, "runs/bench"):
...     ...
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np
import optax

from fluctua.core.ppgt import ppgt
from fluctua.core.twin import Twin
from fluctua.core.types import Estimator, PyTree
from fluctua.insitu.instrument.archive import Archive
from fluctua.insitu.instrument.protocol import Instrument
from fluctua.insitu.instrument.substrate import Incident, Measured, Retry, measured
from fluctua.insitu.model import Model
from fluctua.learn.train import Record, box, train
from fluctua.store import checkpoint, history
from fluctua.store.folder import RunFolder, acquire, explained
from fluctua.store.history import Row
from fluctua.store.saver import as_row
from fluctua.store.state import Iterate, State, from_arrays, to_arrays
from fluctua.store.state import begin as beginning

Rows = Iterator[tuple[Row, Record]]
Connect = Callable[[], Instrument]
MakeEstimator = Callable[..., Estimator]
"""(process, objective, substrate) -> Estimator: `ppgt`, or `functools.partial(ppgt, baseline=...)`."""

ESTIMATORS: dict[str, MakeEstimator] = {"twin": partial(ppgt, baseline=Twin()), "optimal": ppgt}
"""By name, for a plan: the calibrated drift as a twin of the instrument, or no model beyond the score's."""


CALIBRATION = "calibration/"
CUT_OFF = "cut off"
COMMAND = "fluctua insitu train"


@dataclass(frozen=True)
class Plan:
    """What in-situ training does.

    trajectories: an iteration. probes, probe_trajectories: settings at which to calibrate, and trajectories at each.
    batch: trajectories an acquisition. learning_rate: of Adam, falling to a twentieth by a cosine. seed: of the probes.
    baseline: one of `ESTIMATORS`. attempts, first_pause, longest_pause: see `Retry`. record: whether every batch is
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
        if self.baseline not in ESTIMATORS:
            raise ValueError(f"`baseline` must be {' or '.join(map(repr, ESTIMATORS))}; got {self.baseline!r}.")
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
    """Calibrate and train into a new folder. Yields each row of the history with its `Record`; stop to stop.

    estimator: in place of the plan's `baseline`.
    """
    place = RunFolder(Path(folder))
    try:
        place.path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"{folder} cannot be a folder: there is a file of that name on its way.") from None
    lock = acquire(place)
    if any(p.name != ".lock" for p in place.path.iterdir()):
        lock.close()
        ours = (place.path / "plan.json").is_file()
        raise ValueError(
            f"the folder {folder} is not empty. "
            + (f"Go on with the run in it: fluctua insitu train --resume {folder}; or choose" if ours else "Choose")
            + " another --out."
        )
    with explained(place, COMMAND):
        place.checkpoints.mkdir()
        _write_plan(place, plan)
        checkpoint.replace(place.history, history.HEADER.encode())
    return _rows(_Session(connect, model, plan, place, lock, report, estimator), None)


def resume(
    connect: Connect,
    model: Model,
    folder: str | Path,
    *,
    iterations: int | None = None,
    estimator: MakeEstimator | None = None,
    report: Callable[[Incident], None] = lambda incident: None,
) -> Rows:
    """Go on after a stop, a kill or a failure. iterations: how many in all, if not as planned.

    The iteration that was cut off is measured again; what it had recorded stays in recordings/. With another number of
    iterations the learning rate follows the cosine of that number from here on.
    """
    plan, place = read_plan(folder), RunFolder(Path(folder))
    lock = acquire(place)
    if iterations is not None:
        plan = dataclasses.replace(plan, iterations=iterations)
        _write_plan(place, plan)
    session = _Session(connect, model, plan, place, lock, report, estimator)
    found = checkpoint.newest(place.checkpoints, lambda text: report(Incident("checkpoint", 0, text)))
    return _rows(session, None if found is None else found[1])


def read_plan(folder: str | Path) -> Plan:
    """The plan of a run."""
    path = Path(folder) / "plan.json"
    if not path.exists():
        raise ValueError(f"{folder} is not the folder of an in-situ run: it has no plan.json.")
    return Plan(**json.loads(path.read_text()))


def _write_plan(place: RunFolder, plan: Plan) -> None:
    checkpoint.replace(place.path / "plan.json", json.dumps(dataclasses.asdict(plan), indent=1).encode())


class _Session:
    """What one process holds while it trains."""

    def __init__(
        self, connect: Connect, model: Model, plan: Plan, place: RunFolder, lock: IO[str],
        report: Callable[[Incident], None], estimator: MakeEstimator | None,
    ):  # fmt: skip
        self.model, self.plan, self.place, self.lock, self.told = model, plan, place, lock, report
        self.calibration: dict[str, Any] = {}
        self.iteration = "calibration"
        self.incidents: list[Incident] = []
        self.substrate: Measured = measured(
            connect,
            batch=plan.batch,
            retry=Retry(plan.attempts, plan.first_pause, plan.longest_pause),
            archive=Archive(place.path / "recordings", model.head) if plan.record else None,
            report=self.note,
        )
        make = ESTIMATORS[plan.baseline] if estimator is None else estimator
        self.estimator = make(model.process, model.objective, self.substrate)
        decay = optax.cosine_decay_schedule(plan.learning_rate, max(plan.iterations, 1), alpha=0.05)
        self.rule = optax.with_extra_args_support(optax.adam(decay))
        self.project = box(model.lower, model.upper)

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
        self.told(incident)

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
        found = self.model.calibrate(runs)
        self.calibration = found.values
        if found.report:
            checkpoint.replace(self.place.path / "calibration.txt", found.report.encode())

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

    def save(self, state: State) -> None:
        """A checkpoint: state, calibration, counts."""
        arrays = to_arrays(state) | {CALIBRATION + name: np.asarray(v) for name, v in self.calibration.items()}
        arrays["counts"] = np.array(json.dumps(self.substrate.counts))
        arrays["batches"] = np.array(self.substrate.archive.number if self.substrate.archive else 0)
        checkpoint.write(self.place.checkpoints, state.row, arrays, 3)

    def load(self, arrays: dict[str, np.ndarray], fresh: State) -> State:
        """The state of a checkpoint."""
        self.substrate.counts = Counter(json.loads(str(arrays["counts"])))
        self.count_cut_off(int(arrays["batches"]))
        of = {name.removeprefix(CALIBRATION): v for name, v in arrays.items() if name.startswith(CALIBRATION)}
        self.calibration = of
        try:
            return from_arrays(arrays, fresh.now)
        except ValueError as error:
            raise ValueError(
                f"{self.place.path} is of an instrument with other knobs than this one, or JAX is in another precision "
                f"(JAX_ENABLE_X64): {error}"
            ) from error

    def count_cut_off(self, batches: int) -> None:
        """Batches that came after a checkpoint, which knew of so many, were spent and are measured again."""
        archive = self.substrate.archive
        lost = archive.trajectories_since(batches) if archive else 0
        if lost:
            self.substrate.counts[CUT_OFF] += lost
            self.note(Incident(CUT_OFF, lost, f"{lost} trajectories of what was cut off are kept and not used"))

    def close(self, state: State | None) -> None:
        """Let go of instrument and folder; leave the settings as plain arrays."""
        self.substrate.close()
        if state is not None:
            memory = io.BytesIO()
            np.savez(memory, **{name: np.asarray(v) for name, v in state.now.theta.items()})  # type: ignore[arg-type]
            checkpoint.replace(self.place.final, memory.getvalue())
        self.lock.close()


def _rows(session: _Session, found: dict[str, np.ndarray] | None) -> Rows:
    place, theta = session.place, session.project(session.model.start)
    state: State | None = None
    try:
        fresh = beginning(theta, session.rule.init(theta))
        if found is None:
            session.count_cut_off(0)
            session.calibrate()
            state = fresh
            with explained(place, COMMAND):
                session.save(state)
        else:
            state = session.load(found, fresh)
        with explained(place, COMMAND):
            history.truncate(place.history, state.row - 1)
        session.substrate.context = session.context
        with open(place.history, "a", encoding="utf-8") as file:
            for record in _records(session, state):
                session.follow()
                row = as_row(state.row, record, session.event())._replace(trajectories=session.spent())
                now = Iterate(record.iteration + 1, record.next_theta, record.optimiser_state)
                state = dataclasses.replace(
                    state, row=state.row + 1, now=now, spent=record.trajectories,
                    seconds=state.seconds + record.seconds, values=[*state.values, row.J],
                )  # fmt: skip
                with explained(place, COMMAND):
                    history.append(file, row)
                    session.save(state)
                session.iteration = str(now.iteration)
                yield row, record
    finally:  # also when whoever iterates stops, and when the instrument is beyond help
        with explained(place, COMMAND):
            session.close(state)


def _records(session: _Session, state: State) -> Iterator[Record]:
    plan, now = session.plan, state.now
    session.iteration = str(now.iteration)
    before = Record(now.iteration - 1, None, None, state.spent, 0.0, now.theta, now.optimiser_state)  # type: ignore[arg-type]
    return train(
        jax.random.key(plan.seed), now.theta, session.estimator, session.rule, count=plan.trajectories,
        iterations=plan.iterations, project=session.project, resume=before,
    )  # fmt: skip
