"""Train any process into a folder: history, checkpoints and a summary; a kill loses only time.

>>> training = Training(estimator, theta, optax.adam(0.05), trajectories=50)
>>> result = run(training, iterations=3, folder="runs/trap")
>>> result = run(training, iterations=5, folder="runs/trap")  # continues

`fluctua plot runs/trap` draws the learning curve.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fluctua.core.arrays import Params
from fluctua.learn.training import Length, Record, Training, check_training, check_whole_number
from fluctua.store import checkpoint, conclusion, course, history, journal, loop
from fluctua.store import folder as runfolder
from fluctua.store import parts as partlist
from fluctua.store import progress as displays
from fluctua.store.fingerprint import describe

OnRow = Callable[[history.Row, Record], None]

COMPARED = {
    "seed": "`seed`",
    "count": "`trajectories`",
    "parameters": "`parameters`",
    "start": "`theta`, the start",
}
"""Entries of run.json that may not change, and their names in messages."""


class RunResult(NamedTuple):
    """A finished run. Prints as summary.txt.

    folder: of the run.
    theta: after the last step.
    summary: as in summary.json.
    """

    folder: Path
    theta: Params
    summary: dict[str, Any]

    def __repr__(self) -> str:
        return (
            conclusion.format_summary(self.summary)
            + f"run        {self.folder}   draw it: fluctua plot {self.folder}"
        )


@dataclasses.dataclass(frozen=True)
class _Task:
    """The checked arguments of `run`.

    planned: iterations that were first requested.
    progress: whether a line is shown; None where it can be drawn anew.
    """

    training: Training
    place: runfolder.RunFolder
    iterations: int
    planned: int
    options: journal.JournalOptions
    final_trajectories: int | None
    progress: bool | None

    @property
    def evaluation(self) -> conclusion.FinalEvaluation:
        return conclusion.FinalEvaluation(self.training, self.final_trajectories, self.planned)

    @property
    def loop(self) -> loop.Loop:
        length = Length(self.iterations, self.planned)
        return loop.Loop(self.training, length, conclude=self.evaluation.measure)


def run(
    training: Training,
    iterations: int,
    folder: str | Path,
    *,
    on_row: OnRow | None = None,
    replace: bool = False,
    report: Callable[[str], None] = print,
    checkpoint_seconds: float = 20.0,
    parameters_every: int = 1,
    final_trajectories: int | None = None,
    progress: bool | None = None,
) -> RunResult:
    """Train as `train` does, into a folder that survives a kill.

    A folder that holds a run is continued from its newest good checkpoint, to the bit as if it had
    not been interrupted; a complete run is read and returned. The folder holds fingerprints of the
    training, and another drift, reward, noise, time grid, baseline, learning rate or seed is
    refused by name. Where JAX, optax or Python has another version, a function that looks different
    may be the same; that is reported and not refused.

    At the end J is evaluated afresh: by the simulator, with its steps and with half of them, or on
    the device of the estimator (`SelfCalibrating`, any substrate that is no simulator), whose
    trajectories are counted. Where a device fails then, the run is complete without it; the same
    call measures again.

    Whether backend="auto" runs kernels is decided by the iterations that were first requested, and
    beyond those by the iterations so far.

    Args:
        training: what to train; the same one to continue.
        iterations: how many in total, earlier ones included.
        folder: where; created if it does not exist.
        on_row: called with every row of the history and its `Record`, once it is written.
        replace: remove an earlier run in that folder and start again.
        report: called with a line of text about damaged files and parts that cannot be compared.
        checkpoint_seconds: between two checkpoints; 0 is every iteration.
        parameters_every: iterations between two records of θ in parameters.h5; 0 is none.
        final_trajectories: of the evaluation at the end; 0 is none. By default a simulator takes
            256 to 2,000, and a device as many as an iteration, 20 at least.
        progress: show J, iterations, trajectories and the time left. By default in a terminal and
            in a notebook; True prints a few lines elsewhere too, False shows nothing.

    Returns: a `RunResult`: θ after the last step, and the summary.

    >>> training = fl.Training(estimator, theta, optax.adam(0.05), trajectories=200, bounds=(0, 2))
    >>> result = fl.run(training, iterations=2, folder="runs/trap")
    >>> result = fl.run(training, iterations=3, folder="runs/trap")  # continues
    >>> sorted(result.theta)
    ['k', 's']
    """
    check_training(training)
    check_whole_number("iterations", iterations, 1)
    check_whole_number("parameters_every", parameters_every, 0)
    place = runfolder.RunFolder(
        Path(folder),
        "run.json",
        'fluctua.run(…, folder="{folder}") with the same training',
        "replace=True",
    )
    options = journal.JournalOptions(3, checkpoint_seconds, parameters_every, "theta/")
    task = _Task(training, place, iterations, iterations, options, final_trajectories, progress)
    if place.settings.is_file() and not replace:
        return _continue(task, on_row, report)
    opened = loop.begin(_list_files(task, _describe(task)), replace=replace)
    return _complete(task, opened, on_row)


def _continue(task: _Task, on_row: OnRow | None, report: Callable[[str], None]) -> RunResult:
    place = runfolder.find_run(task.place.path, task.place)
    with runfolder.hold(place) as lock:
        stored = _read_settings(place)
        planned = int(stored.get("planned", stored["iterations"]))
        task = dataclasses.replace(task, place=place, planned=planned)
        settings = _describe(task)
        _refuse_changes(place, stored, settings, report)
        files = _list_files(task, settings)
        runfolder.require_room(place, files.need)
        state = journal.read_state(files, report)
        summary = loop.read_summary(place, state)
        if task.final_trajectories and summary is not None and "final" not in summary:
            summary = None  # the evaluation was switched off, and is asked for now
        if task.loop.explain_end(state) and summary is not None:
            lock.close()
            return RunResult(place.path, state.now.theta, summary)
        opened = loop.reopen(files, lock, state, task.loop, report)
    return _complete(task, opened, on_row)


def _list_files(task: _Task, settings: dict[str, Any]) -> journal.RunFiles:
    """Common data of the files of a run. settings: from `_describe`."""
    training: Any = task.training
    options = task.options
    low: dict[str, np.ndarray] = {}
    high: dict[str, np.ndarray] = {}
    if training.bounds is not None:
        low, high = map(options.group_arrays, training.bounds.spread(training.theta))
    t = getattr(getattr(training.estimator, "substrate", None), "t", None)
    return journal.RunFiles(
        task.place,
        (json.dumps(settings, indent=1) + "\n").encode(),
        settings["run"],
        checkpoint.start_state(training.theta, training.optimiser.init(training.theta)),
        options._replace(describe=course.describe_arrays(low, high, t)),
        need=_estimate_space(task),
        advice="record less often (parameters_every)",
    )


def _describe(task: _Task) -> dict[str, Any]:
    """The content of run.json, with the fingerprint of what may not change as `run`."""
    training = task.training
    size = training.trajectories
    leaves = journal.name_leaves(training.theta)
    fixed: dict[str, Any] = {
        "seed": int(training.seed),
        "count": "a function of the iteration" if callable(size) else int(size),
        "parameters": {name: f"{v.dtype} {list(v.shape)}" for name, v in leaves.items()},
        "start": checkpoint.checksum(leaves).hex()[:16],
    }
    identity = runfolder.fingerprint(json.dumps(fixed).encode())
    extent = {"iterations": int(task.iterations), "planned": task.planned}
    return {"run": identity, **extent, **fixed, **partlist.stamp_parts(_describe_parts(task))}


def _describe_parts(task: _Task) -> partlist.Parts:
    """Fingerprints of the code of a run."""
    training = task.training
    parts = partlist.describe_training(
        training.estimator, training.theta, training.optimiser, training.project
    )
    if callable(training.trajectories):
        sizes = [int(training.ensemble_size(iteration)) for iteration in range(task.planned)]
        parts["trajectories"] = describe(sizes)
    return parts


def _read_settings(place: runfolder.RunFolder) -> dict[str, Any]:
    """The content of run.json."""
    try:
        stored = json.loads(place.settings.read_text())
        missing = {*COMPARED, "iterations"} - set(stored)
        if missing:
            raise ValueError(f"`{min(missing)}` is missing")
        return stored
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{place.settings} is damaged ({error}); it is written by `fluctua.run`."
        ) from None


def _refuse_changes(
    place: runfolder.RunFolder,
    stored: dict[str, Any],
    settings: dict[str, Any],
    report: Callable[[str], None],
) -> None:
    """Raise if numbers or code of a run are not those that it began with."""
    for name, words in COMPARED.items():
        if stored[name] != settings[name]:
            raise ValueError(
                f"a run continues as it started: {words} was {stored[name]} and is "
                f"{settings[name]}. Only `iterations` can change; for another training start "
                "another run."
            )
    partlist.refuse_other_parts(place.settings, stored, settings, report)


def _estimate_space(task: _Task) -> int:
    """Bytes that the run may take: records twice (one copy while writing), checkpoints, history."""
    start = task.training.start
    size = sum(np.size(leaf) for leaf in jax.tree.leaves((start.theta, start.optimiser_state)))
    options = task.options
    records = 2 * 8 * size * (task.iterations // options.every + 2) if options.every else 0
    state = 8 * (2 * size + task.iterations)
    return records + (options.checkpoints + 1) * state + 170 * task.iterations + 2**22


def _complete(task: _Task, opened: loop.Opened, on_row: OnRow | None) -> RunResult:
    earlier = history.read(task.place.history) if opened.state.row else []
    limits = displays.RunLimits(task.iterations)
    try:
        with displays.show_progress(limits, show=task.progress, earlier=earlier) as progress:

            def follow(row: history.Row, record: Record) -> None:
                progress.add(row)
                if on_row is not None:
                    on_row(row, record)

            state = loop.drive(opened, task.loop, follow)
            summary = conclusion.conclude(task.place, task.evaluation, state)
    except KeyboardInterrupt as stop:
        stop.add_note(f"The run is saved. It continues with {task.place.go_on}.")
        raise
    result = RunResult(task.place.path, state.now.theta, summary)
    estimator = task.training.estimator
    if hasattr(estimator, "check_doubt"):  # of the last iteration: the next call would have refused
        estimator.check_doubt()
    return result
