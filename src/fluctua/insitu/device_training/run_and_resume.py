"""Training an instrument into a folder: calibrate, train, and lose one iteration to a kill.

plan.json        the plan
history.csv      one row per iteration (fluctua.store.history)
parameters.h5    the settings over time (fluctua.store.course)
recordings/      every batch, bad ones too
incidents.csv    what went wrong, and what it cost
checkpoints/     what a resumed run starts from
final.npz        the settings after the last step
summary.txt      J before and after, the settings reached; numbers in summary.json
calibration.txt  the instrument by its probes, or by a training that calibrates as it goes
devices.csv      each device in each iteration (fluctua.insitu.device_training.device_table)
devices.txt      of several: how much they differ, how many trajectories are worth while

With several devices recordings are in recordings/device-1/, … and calibrations are
calibration-1.txt, …

`run(connect, model, Plan(iterations=60), folder)` yields a row and a record per iteration;
`resume(connect, model, folder)` goes on after a stop.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fluctua.insitu.device_training import choice, incidents, instruments, plan_file
from fluctua.insitu.device_training.model_parts import describe_model
from fluctua.insitu.device_training.optimiser import make_optimiser
from fluctua.insitu.device_training.plan import Plan
from fluctua.insitu.device_training.result import write_result
from fluctua.insitu.device_training.session import TrainingSession
from fluctua.insitu.model import Model
from fluctua.learn.training import Record, check_bounds
from fluctua.store import checkpoint, course, history, journal, loop, parts
from fluctua.store import folder as runfolder

Rows = Iterator[tuple[history.Row, Record]]

JOURNAL = journal.JournalOptions(checkpoints=3, seconds=0.0, every=1)
"""A checkpoint after every row: what an instrument measured cannot be had again."""


def run(
    connect: instruments.Connects,
    model: Model,
    plan: Plan,
    folder: str | Path,
    *,
    estimator: choice.MakeEstimator | None = None,
    checked: tuple[int, ...] = (),
    report: incidents.Report = lambda incident: None,
) -> Rows:
    """Calibrate and train an instrument into a new folder.

    Args:
        connect: opens the instrument; called again after every failure. A list of such trains
            several devices together (`fluctua.insitu.instrument.array`).
        model: of the instrument: process, rewards, knobs and unknowns.
        plan: what to do.
        folder: where; it must be empty or not exist.
        estimator: in place of the plan's `baseline`.
        checked: trajectories that a check ran on each device before (`check_instrument`), to be
            counted too.
        report: called with every incident.
    Returns: a generator of each row of the history with its `Record`; stop iterating to stop.

    >>> plan = insitu.Plan(iterations=2, trajectories=20, probes=3, probe_trajectories=20)
    >>> for row, record in insitu.run(connect, model, plan, "runs/bead"):
    ...     print(row.iteration, sorted(record.theta))
    0 ['force']
    1 ['force']
    """
    prepared = _Preparation(connect, model, plan, _locate(folder), estimator, report)
    opened = loop.begin(prepared.list_files(secrets.token_hex(8)))
    session = prepared.open()
    session.instruments.count_checked(checked)
    return _iterate(session, opened)


def resume(
    connect: instruments.Connects,
    model: Model,
    folder: str | Path,
    *,
    iterations: int | None = None,
    time_limit: float | None = None,
    on_doubt: str | None = None,
    final_trajectories: int | None = None,
    estimator: choice.MakeEstimator | None = None,
    report: incidents.Report = lambda incident: None,
) -> Rows:
    """Continue the training of an instrument after a stop, a kill or a failure.

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
        final_trajectories: of the evaluation at the end, if not as planned.
        estimator: in place of the plan's `baseline`.
        report: called with every incident.
    Returns: a generator of each row of the history with its `Record`.

    >>> plan = insitu.Plan(iterations=2, trajectories=20, probes=3, probe_trajectories=20)
    >>> rows = list(insitu.run(connect, model, plan, "runs/bead"))
    >>> rows = list(insitu.resume(connect, model, "runs/bead", iterations=3))
    >>> [row.iteration for row, record in rows]
    [2]
    """
    place = _find(folder)
    with runfolder.hold(place) as lock:
        entries = plan_file.read_entries(place)
        changes: dict[str, Any] = {
            "iterations": iterations,
            "time_limit": time_limit,
            "on_doubt": on_doubt,
            "final_trajectories": final_trajectories,
        }
        wanted = {name: value for name, value in changes.items() if value is not None}
        plan = dataclasses.replace(_make_plan(place, entries), **wanted)
        prepared = _Preparation(connect, model, plan, place, estimator, report)
        prepared.refuse_changes(entries)
        files = prepared.list_files(entries.get("run") or secrets.token_hex(8))
        state = prepared.read_state(files)
        book = journal.reopen(files, lock, state, report=prepared.warn)
        return _iterate(prepared.open(), loop.Opened(book, state))


def refuse_folder(folder: str | Path) -> None:
    """Raise for a folder that cannot take a new run, before anything is measured."""
    runfolder.refuse_full(_locate(folder))


def read_plan(folder: str | Path) -> Plan:
    """Read the plan of a run.

    Args:
        folder: of the run.

    Returns: the `Plan`, as it was given to `run` or changed by `resume`.

    >>> plan = insitu.Plan(iterations=1, trajectories=20, probes=3, probe_trajectories=20)
    >>> rows = list(insitu.run(connect, model, plan, "runs/bead"))
    >>> insitu.read_plan("runs/bead").trajectories
    20
    """
    place = _find(folder)
    return _make_plan(place, plan_file.read_entries(place))


def _locate(folder: str | Path) -> runfolder.RunFolder:
    # records of an instrument cannot be had again: no option replaces them
    resume = "fluctua insitu train --resume {folder}"
    return runfolder.RunFolder(Path(folder), "plan.json", resume, again="")


def _find(folder: str | Path) -> runfolder.RunFolder:
    """The folder of a run, which must exist."""
    return runfolder.find_run(folder, _locate(folder))


def _make_plan(place: runfolder.RunFolder, entries: dict[str, Any]) -> Plan:
    try:
        return Plan(**plan_file.get_fields(entries))
    except TypeError as error:
        raise ValueError(
            f"{place.settings} is no plan of an in-situ run, or damaged ({error})."
        ) from None


class _Preparation:
    """A training before the instruments are opened: checked, with the files that it will have.

    Args:
        connect: opens the instruments.
        model: of the instruments.
        plan: what to do.
        place: folder of the run.
        make: makes the estimator; None for the plan's.
        report: called with every incident.

    """

    def __init__(
        self,
        connect: instruments.Connects,
        model: Model,
        plan: Plan,
        place: runfolder.RunFolder,
        make: choice.MakeEstimator | None,
        report: incidents.Report,
    ):
        self.model = model
        self.plan = plan
        self.place = place
        self.make = make
        self.connects = instruments.list_connects(connect)
        choice.check_plan(plan, model, make, len(self.connects))
        self.log = incidents.IncidentLog(place.path / "incidents.csv", report)
        described = describe_model(model, choice.resolve_estimator(plan, make))
        self.stamp = parts.stamp_parts(described)

    def list_files(self, run: str) -> journal.RunFiles:
        """The files of the run, whose fingerprint is `run`."""
        model = self.model
        bounds = check_bounds((model.lower, model.upper))
        theta = bounds.project(model.start)
        low, high = map(JOURNAL.group_arrays, bounds.spread(theta))
        optimiser = make_optimiser(self.plan, model.learning_rate_scale)
        return journal.RunFiles(
            self.place,
            plan_file.write_plan(dataclasses.asdict(self.plan), run, self.stamp),
            run,
            checkpoint.start_state(theta, optimiser.init(theta)),
            JOURNAL._replace(describe=course.describe_arrays(low, high)),
            # recordings ask for their own room
            need=2**22 + 200 * self.plan.iterations,
        )

    def warn(self, text: str) -> None:
        """Log something about a checkpoint."""
        self.log.note("checkpoint", text)

    def refuse_changes(self, entries: dict[str, Any]) -> None:
        """Refuse another model or estimator than that in plan.json."""

        def report(text: str) -> None:
            self.log.note("plan", text)

        parts.refuse_other_parts(self.place.settings, entries, self.stamp, report)

    def read_state(self, files: journal.RunFiles) -> checkpoint.RunState:
        """The state of the newest good checkpoint, or the start."""
        state = journal.read_state(files, self.warn)
        path = self.place.history
        if state.row == 0 and path.exists() and len(history.read(path)) > 1:
            name = checkpoint.set_aside(path)  # an instrument does not repeat itself
            self.warn(
                "no checkpoint is left: calibrated and trained from the start; the rows so far are "
                f"kept as {name}"
            )
        return state

    def open(self) -> TrainingSession:
        """Open the instruments, once the folder is ours."""
        opened = instruments.Instruments(
            self.connects, self.model, self.plan, self.place.path, self.log
        )
        return TrainingSession(self.model, self.plan, opened, self.log, self.make)


def _iterate(session: TrainingSession, opened: loop.Opened) -> Rows:
    """Calibrate or put back what a checkpoint holds, then train."""
    book, state = opened
    try:
        try:
            if "counts" in state.further:
                session.instruments.load(state.further)
            else:
                session.calibrate()
                state = dataclasses.replace(state, further=session.arrays())
                with runfolder.explain_failures(book.place):
                    book.save(state)
            training = session.make_loop()
            loop.restore_memory(training.training, state)
            session.table.open(state.row)
        except BaseException:
            book.close(None)
            raise
        session.log.iteration = str(state.now.iteration)
        state = yield from loop.iterate(loop.Opened(book, state), training)
        session.report_calibration()
        write_result(book.place, session.model, state, len(session.instruments.devices))
    finally:
        session.close()
