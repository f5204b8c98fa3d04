"""Any process trained into a folder: history, checkpoints, a summary, and nothing but time lost to
a kill.

>>> result = run("runs/trap", estimator, theta, optax.adam(0.05), count=50, iterations=3)
>>> result = resume("runs/trap", estimator, theta, optax.adam(0.05), count=50, iterations=5)

`fluctua plot runs/trap` draws the learning curve.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Required, TypedDict, Unpack

import jax
import numpy as np
import optax

from fluctua.core import check
from fluctua.core.protocols import as_estimator
from fluctua.core.types import Estimates, Estimator, Params
from fluctua.learn.evaluate import can_refine, evaluate
from fluctua.learn.train import Record, train
from fluctua.store import folder as runfolder
from fluctua.store import history, journal
from fluctua.store.checkpoint import State, after, begin, checksum, replace
from fluctua.store.fingerprint import describe
from fluctua.store.folder import RunFolder
from fluctua.store.history import Row
from fluctua.store.journal import Journal, Keep, Step
from fluctua.store.parts import Parts, describe_training, refuse_other_parts, stamp_parts
from fluctua.store.summary import course_of, fallen, line_of_peak, lines_of_J, on_the_grid

OnRow = Callable[[Row, Record], None]


class Result(NamedTuple):
    """A finished run. theta: after the last step. summary: as in summary.json.

    Prints as summary.txt.
    """

    folder: Path
    theta: Params
    summary: dict[str, Any]

    def __repr__(self) -> str:
        return (
            as_text(self.summary)
            + f"run        {self.folder}   draw it: fluctua plot {self.folder}"
        )


@dataclass(frozen=True)
class Task:
    """What `run` and `resume` are asked to do, checked."""

    place: RunFolder
    estimator: Estimator
    theta: Params
    rule: optax.GradientTransformationExtraArgs
    count: int | Callable[[int], int]
    iterations: int
    seed: int
    project: Callable[[Params], Params] | None
    keep: Keep
    planned: int

    @property
    def start(self) -> State:
        """Before the first row."""
        return begin(self.theta, self.rule.init(self.theta))

    def finished(self, state: State) -> str:
        """Why the run is over, or nothing."""
        done = state.now.iteration >= self.iterations
        return f"it has run its {self.iterations:,} iterations" if done else ""


def run(
    folder: str | Path,
    estimator: Estimator | Estimates,
    theta: Params,
    optimiser: optax.GradientTransformation,
    *,
    count: int | Callable[[int], int],
    iterations: int,
    seed: int = 0,
    project: Callable[[Params], Params] | None = None,
    on_row: OnRow | None = None,
    replace: bool = False,
    checkpoint_seconds: float = 20.0,
    parameters_every: int = 1,
) -> Result:
    """Ascend the expected return as `train` does, into a folder that survives a kill.

    Args:
        folder: where; made if it does not exist.
        estimator: of ∇θJ, as made by `ppgt`.
        theta: parameters to start from, any pytree of floats.
        optimiser: of optax, or `rms_ascent`.
        count: trajectories an iteration, or a function of the iteration.
        iterations: how many.
        seed: of the noise; iteration l uses fold_in(key(seed), l).
        project: Π, e.g. `box(0, 2)`.
        on_row: is given every row of the history with its `Record`, once it is written.
        replace: remove an earlier run in that folder.
        checkpoint_seconds: between two checkpoints; 0 is every iteration.
        parameters_every: iterations between two records of θ in parameters.h5; 0 is none.
    Returns: a `Result`: θ after the last step, and the summary.

    """
    task = _task(
        folder,
        estimator,
        theta,
        optimiser,
        count=count,
        iterations=iterations,
        seed=seed,
        project=project,
        checkpoint_seconds=checkpoint_seconds,
        parameters_every=parameters_every,
    )
    settings, identity = _settings(task)
    book = journal.create(
        task.place,
        _written(settings),
        identity,
        task.start,
        journal.named_leaves,
        need=_space(task),
        keep=task.keep,
        replace=replace,
        advice="record less often (parameters_every)",
    )
    return _complete(task, book, task.start, on_row)


class Options(TypedDict, total=False):
    """Keyword arguments that `run` and `resume` share; `run` explains them."""

    count: Required[int | Callable[[int], int]]
    iterations: Required[int]
    seed: int
    project: Callable[[Params], Params] | None
    checkpoint_seconds: float
    parameters_every: int


def resume(
    folder: str | Path,
    estimator: Estimator | Estimates,
    theta: Params,
    optimiser: optax.GradientTransformation,
    *,
    on_row: OnRow | None = None,
    report: Callable[[str], None] = print,
    **options: Unpack[Options],
) -> Result:
    """Go on with a `run` from its newest good checkpoint, to the bit as if it had not been cut off.

    The folder holds fingerprints of estimator, optimiser and `project`: another drift, reward,
    noise, time grid, baseline or learning rate is refused by name. Where JAX, optax or Python has
    another version, a function that looks different may be the same: that is reported and not
    refused. A run that is complete is read and returned.

    Whether "auto" runs kernels is decided by the iterations that `run` was given, and beyond those
    by the iterations so far.

    Args:
        folder: of the run.
        estimator: of ∇θJ, as it was.
        theta: parameters that the run started from.
        optimiser: as it was.
        on_row: is given every row of the history with its `Record`, once it is written.
        report: called with a line of text about damaged files and about what cannot be compared.
        **options: those of `run`, as they were; `iterations`, those before included, may be more.

    Returns: a `Result`: θ after the last step, and the summary.
    """
    task = _task(folder, estimator, theta, optimiser, **options)
    place = runfolder.existing(folder, task.place)
    with runfolder.holding(place) as lock:
        began = _read(place)
        task = dataclasses.replace(task, planned=int(began.get("planned", began["iterations"])))
        settings, identity = _settings(task)
        _refuse_changes(place, began, settings, report)
        runfolder.room(place, _space(task))
        state = journal.standing(place, identity, task.start, report)
        over = task.finished(state)
        done = place.path / "summary.json"
        if over and done.exists():
            lock.close()
            return Result(place.path, state.now.theta, json.loads(done.read_text()))
        book = journal.reopen(
            place,
            lock,
            _written(settings),
            identity,
            state,
            journal.named_leaves,
            keep=task.keep,
            report=report,
            over=bool(over),
        )
        if state.memory:
            task.estimator.restore(state.memory, state.now.theta)
    return _complete(task, book, state, on_row)


def as_text(summary: dict[str, Any]) -> str:
    """A summary for people."""
    lines = [
        *lines_of_J(summary),
        f"training   {summary['iterations']:,} iterations, {summary['trajectories']:,} "
        "trajectories, "
        f"{summary['seconds']:.1f} s",
        *line_of_peak(summary),
    ]
    return "\n".join([*lines, ""])


def _task(
    folder: str | Path,
    estimator: Estimator | Estimates,
    theta: Params,
    optimiser: optax.GradientTransformation,
    *,
    count: int | Callable[[int], int],
    iterations: int,
    seed: int = 0,
    project: Callable[[Params], Params] | None = None,
    checkpoint_seconds: float = 20.0,
    parameters_every: int = 1,
) -> Task:
    keep = Keep(3, checkpoint_seconds, parameters_every, "theta/")
    if not callable(count):
        check.count(count)
    for name, value, least in (
        ("iterations", iterations, 1),
        ("seed", seed, 0),
        ("parameters_every", keep.every, 0),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
            raise ValueError(
                f"`{name}` must be a whole number, at least {least} and below 2⁶³; got {value!r}."
            )
    theta = check.parameters(theta)
    theta = theta if project is None else project(theta)
    place = RunFolder(
        Path(folder),
        "run.json",
        'fluctua.resume("{folder}", …) with the same arguments',
        "replace=True",
    )
    rule = optax.with_extra_args_support(optimiser)
    return Task(
        place,
        as_estimator(estimator),
        theta,
        rule,
        count,
        iterations,
        seed,
        project,
        keep,
        iterations,
    )


def _settings(task: Task) -> tuple[dict[str, Any], str]:
    """What run.json says, and the fingerprint of that, the number of iterations left out."""
    leaves = journal.named_leaves(task.theta)
    asked: dict[str, Any] = {
        "seed": task.seed,
        "count": "a function of the iteration" if callable(task.count) else int(task.count),
        "parameters": {name: f"{v.dtype} {list(v.shape)}" for name, v in leaves.items()},
        "start": checksum(leaves).hex()[:16],
    }
    identity = runfolder.fingerprint(json.dumps(asked).encode())
    extent = {"iterations": task.iterations, "planned": task.planned}
    return {"run": identity, **extent, **asked, **stamp_parts(_parts(task))}, identity


def _parts(task: Task) -> Parts:
    """Fingerprints of the code of a run."""
    parts = describe_training(task.estimator, task.theta, task.rule, task.project)
    if callable(task.count):
        parts["count"] = describe([int(task.count(iteration)) for iteration in range(task.planned)])
    return parts


def _written(settings: dict[str, Any]) -> bytes:
    return (json.dumps(settings, indent=1) + "\n").encode()


def _read(place: RunFolder) -> dict[str, Any]:
    """What run.json says."""
    try:
        began = json.loads(place.settings.read_text())
        missing = {"seed", "count", "parameters", "start", "iterations"} - set(began)
        if missing:
            raise ValueError(f"`{min(missing)}` is missing")
        return began
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{place.settings} is damaged ({error}); it is written by `fluctua.run`."
        ) from None


def _refuse_changes(
    place: RunFolder, began: dict[str, Any], settings: dict[str, Any], report: Callable[[str], None]
) -> None:
    """Raise if numbers or code of a run are not those that it began with."""
    for name in ("seed", "count", "parameters", "start"):
        if began[name] != settings[name]:
            which = "`theta`, the start" if name == "start" else f"`{name}`"
            raise ValueError(
                f"a run goes on as it began: {which} was {began[name]} and is {settings[name]}. "
                "Only `iterations` can "
                "change; for another training begin another run."
            )
    refuse_other_parts(place.settings, began, settings, report)


def _space(task: Task) -> int:
    """Bytes that the run may take: records twice (one copy while writing), checkpoints, history."""
    size = sum(
        np.size(leaf) for leaf in jax.tree.leaves((task.theta, task.start.now.optimiser_state))
    )
    records = 2 * 8 * size * (task.iterations // task.keep.every + 2) if task.keep.every else 0
    checkpoint = 8 * (2 * size + task.iterations)
    return records + (task.keep.checkpoints + 1) * checkpoint + 170 * task.iterations + 2**22


def _complete(task: Task, book: Journal, state: State, on_row: OnRow | None) -> Result:
    key = jax.random.key(task.seed)
    estimator = task.estimator

    def records(state):
        return train(
            key,
            state.now.theta,
            estimator,
            task.rule,
            count=task.count,
            iterations=task.iterations,
            project=task.project,
            resume=state.now._replace(trajectories=state.spent),
            planned=task.planned,
        )

    stands = [state]

    def step(state: State, record: Record) -> Step:
        stands[0] = after(state, record, estimator.state)
        return Step(stands[0], journal.row_of(state.row, record, getattr(estimator, "event", "")))

    rows = book.rows(state, records, step, task.finished)
    try:
        for row, record in rows:
            if on_row is not None:
                on_row(row, record)
    finally:
        rows.close()
    theta = stands[0].now.theta
    result = Result(task.place.path, theta, _conclude(task, theta))
    if hasattr(estimator, "check_doubt"):  # of the last iteration: the next call would have refused
        estimator.check_doubt()
    return result


def _conclude(task: Task, theta: Params) -> dict[str, Any]:
    """Measure the final parameters where that costs nothing but time, and write summary.txt and
    summary.json.
    """
    rows = history.read(task.place.history)
    last = rows[-1]
    summary: dict[str, Any] = {**course_of(rows), "last": {"J": last.J, "J_stderr": last.J_stderr}}
    if can_refine(task.estimator):
        count = min(max(last.ensemble, 256), 2000)
        final, finer = (
            evaluate(task.estimator, theta, count=count, seed=task.seed, refine=refine)._asdict()
            for refine in (1, 2)
        )
        summary |= {"final": final, "finer": finer, **on_the_grid(final, finer)}
    summary |= fallen(history.effective(rows), summary.get("final", summary["last"]))
    with runfolder.explained(task.place):
        replace(task.place.path / "summary.txt", as_text(summary).encode())
        replace(
            task.place.path / "summary.json", (json.dumps(summary, indent=1) + "\n").encode()
        )  # last: complete
    return summary
