"""Train any process into a folder: history, checkpoints and a summary; a kill loses only time.

>>> training = Training(estimator, theta, optax.adam(0.05), trajectories=50)
>>> result = run(training, iterations=3, folder="runs/trap")
>>> result = run(training, iterations=5, folder="runs/trap")  # continues

`fluctua plot runs/trap` draws the learning curve.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fluctua.core.arrays import Params
from fluctua.core.simulate import plan_calls
from fluctua.learn.evaluate import can_refine, evaluate
from fluctua.learn.training import Length, Record, Training, check_whole_number
from fluctua.store import checkpoint, course, final, history, journal, loop
from fluctua.store import folder as runfolder
from fluctua.store import parts as partlist
from fluctua.store import summary as summaries
from fluctua.store.fingerprint import describe
from fluctua.store.history import Row

OnRow = Callable[[Row, Record], None]

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
            format_summary(self.summary)
            + f"run        {self.folder}   draw it: fluctua plot {self.folder}"
        )


@dataclass(frozen=True)
class _Task:
    """The checked arguments of `run`. planned: iterations that were first requested."""

    training: Training
    place: runfolder.RunFolder
    iterations: int
    planned: int
    options: journal.JournalOptions
    final_trajectories: int | None

    @property
    def loop(self) -> loop.Loop:
        length = Length(self.iterations, self.planned)
        return loop.Loop(self.training, length, conclude=self.measure)

    def measure(self, state: checkpoint.RunState) -> checkpoint.RunState:
        """Measure the final parameters where no simulator evaluates them, and count it."""
        source = final.find_source(self.training.estimator)
        if source == final.SIMULATOR or self.final_trajectories == 0 or final.is_measured(state):
            return state
        size = self.training.ensemble_size(max(state.now.iteration - 1, 0))
        minimum = final.MIN_MEASURED if source == final.DEVICE else 1
        count = final.choose_number(self.final_trajectories, size, minimum)
        with plan_calls(Length(None, self.planned).calls(state.now.iteration - 1)):
            value = final.measure(
                self.training.estimator, state.now.theta, count, self.training.seed
            )
        spent = state.spent + value.get("trajectories", 0)
        return final.hold(dataclasses.replace(state, spent=spent), value)


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

    Returns: a `RunResult`: θ after the last step, and the summary.

    >>> training = fl.Training(estimator, theta, optax.adam(0.05), trajectories=200, bounds=(0, 2))
    >>> result = fl.run(training, iterations=2, folder="runs/trap")
    >>> result = fl.run(training, iterations=3, folder="runs/trap")  # continues
    >>> sorted(result.theta)
    ['k', 's']
    """
    check_whole_number("iterations", iterations, 1)
    check_whole_number("parameters_every", parameters_every, 0)
    final.check_number(final_trajectories)
    place = runfolder.RunFolder(
        Path(folder),
        "run.json",
        'fluctua.run(…, folder="{folder}") with the same training',
        "replace=True",
    )
    options = journal.JournalOptions(3, checkpoint_seconds, parameters_every, "theta/")
    task = _Task(training, place, iterations, iterations, options, final_trajectories)
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
        summary = _read_summary(place, state)
        if task.loop.explain_end(state) and summary is not None:
            lock.close()
            return RunResult(place.path, state.now.theta, summary)
        opened = loop.reopen(files, lock, state, task.loop, report)
    return _complete(task, opened, on_row)


def _read_summary(place: runfolder.RunFolder, state: checkpoint.RunState) -> dict[str, Any] | None:
    """The summary of a run that is complete; None if it is of an earlier end, or lacks a value."""
    path = place.path / "summary.json"
    summary = json.loads(path.read_text()) if path.exists() else {}
    is_complete = summary.get("rows") == state.row and summaries.FAILED not in summary
    return summary if is_complete else None


def format_summary(summary: dict[str, Any]) -> str:
    """A summary as text."""
    lines = [
        *summaries.format_values(summary),
        f"training   {summary['iterations']:,} iterations, {summary['trajectories']:,} "
        f"trajectories, {summary['seconds']:.1f} s",
        *summaries.format_peak(summary),
    ]
    return "\n".join([*lines, ""])


def _list_files(task: _Task, settings: dict[str, Any]) -> journal.RunFiles:
    """Common data of the files of a run. settings: from `_describe`."""
    training: Any = task.training
    options = task.options
    empty: dict[str, np.ndarray] = {}
    low, high = empty, empty
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
                f"a run goes on as it began: {words} was {stored[name]} and is {settings[name]}. "
                "Only `iterations` can change; for another training begin another run."
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
    rows = loop.iterate(opened, task.loop)
    try:
        while True:
            row, record = next(rows)
            if on_row is not None:
                on_row(row, record)
    except StopIteration as end:
        state = end.value
    finally:
        rows.close()
    result = RunResult(task.place.path, state.now.theta, _conclude(task, state))
    estimator = task.training.estimator
    if hasattr(estimator, "check_doubt"):  # of the last iteration: the next call would have refused
        estimator.check_doubt()
    return result


def _conclude(task: _Task, state: checkpoint.RunState) -> dict[str, Any]:
    """Evaluate the final parameters where there is a simulator, and write the summary."""
    rows = history.read(task.place.history)
    last = rows[-1]
    summary: dict[str, Any] = {
        **summaries.summarise_rows(rows),
        "last": {"J": last.J, "J_stderr": last.J_stderr},
        "trajectories": state.spent,
    }
    value = final.read(state)
    source = final.find_source(task.training.estimator)
    if value is not None:
        failed = value.get(final.FAILED)
        summary |= {"final": value} if failed is None else {summaries.FAILED: failed}
    elif source == final.SIMULATOR and task.final_trajectories != 0:
        summary |= _simulate_value(task, state.now.theta, last.ensemble)
    summary |= summaries.find_fall(history.effective(rows), summary.get("final", summary["last"]))
    path = task.place.path
    if summaries.FAILED in summary:
        warnings.warn(
            f"the final evaluation failed: {summary[summaries.FAILED]}. The training is complete "
            "and kept; the same call of `run` measures again.",
            RuntimeWarning,
            stacklevel=4,
        )
    with runfolder.explain_failures(task.place):
        checkpoint.replace(path / "summary.txt", format_summary(summary).encode())
        # last: it marks the run as complete
        checkpoint.replace(path / "summary.json", (json.dumps(summary, indent=1) + "\n").encode())
    return summary


def _simulate_value(task: _Task, theta: Params, size: int) -> dict[str, Any]:
    """Entries of a summary: J of new trajectories of the simulator, also with half its steps."""
    estimator: Any = task.training.estimator
    seed = task.training.seed
    count = task.final_trajectories or min(max(size, 256), 2000)
    value = evaluate(estimator, theta, count=count, seed=seed)._asdict()
    if not can_refine(estimator):  # a process in discrete time
        return {"final": value}
    finer = evaluate(estimator, theta, count=count, seed=seed, refine=2)._asdict()
    return {"final": value, "finer": finer, **summaries.compare_steps(value, finer)}
