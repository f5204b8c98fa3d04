"""Runs: a configuration trained into a folder, row by row, so that a kill at any moment loses nothing but time.

>>> for row, record in run(PRESETS["demo"], "runs/first"):
...     print(row.iteration, row.J)
>>> summary = complete(PRESETS["demo"], "runs/second", callback=lambda row, record: ...)
>>> for row, record in resume("runs/first", {"iterations": 200}):
...     ...

Row r depends on the configuration and the rows before it alone. Going on from any checkpoint therefore repeats
what the kill cut off, to the bit.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np

from fluctua.learn import schedule
from fluctua.learn.train import Record, train
from fluctua.runs import parameters
from fluctua.runs.build import FAMILIES, Parts, build, resolve_backend
from fluctua.runs.config import Config, changed, dump, load
from fluctua.runs.summary import conclude
from fluctua.store import checkpoint, history
from fluctua.store import folder as runfolder
from fluctua.store.folder import RunFolder
from fluctua.store.history import Row
from fluctua.store.saver import Saver, as_row
from fluctua.store.state import Iterate, State, begin, copy, from_arrays, remember, rewind, to_arrays

Rows = Iterator[tuple[Row, Record]]
ADJUSTABLE = ("iterations", "stop.max_trajectories", "stop.max_minutes")
"""What may change when a run goes on: how far it goes, and nothing of what it computes."""


def run(config: Config, folder: str | Path, *, replace: bool = False) -> Rows:
    """Train into a new folder. Yields each row of the history with its `Record`; stop iterating to stop.

    Everything that can be wrong with the configuration or the folder is raised here, before the first iteration.
    replace: an earlier run in that folder is removed.
    """
    config = dataclasses.replace(config, backend=resolve_backend(config.backend))
    parts = build(config)
    place, lock = runfolder.prepare(folder, config, _size(parts), replace=replace)
    with runfolder.explained(place):
        checkpoint.replace(place.config, dump(config).encode())
        _create(place, config, parts)
    return _rows(config, parts, place, lock, _beginning(parts))


def resume(
    folder: str | Path, changes: Mapping[str, Any] | None = None, *, report: Callable[[str], None] = print
) -> Rows:
    """Go on with a run from its newest good checkpoint. changes: of `ADJUSTABLE` keys.

    The rows after that checkpoint are computed again, and come out the same.
    """
    place = runfolder.existing(folder)
    lock = runfolder.acquire(place)
    fixed = sorted(set(changes or {}) - set(ADJUSTABLE))
    if fixed:
        raise ValueError(
            f"a run goes on as it began: `{fixed[0]}` cannot change, only {', '.join(ADJUSTABLE)} can. For another "
            "training begin another run."
        )
    config = changed(load(place.config), changes or {})
    parts = build(config)
    runfolder.room(place, config, _size(parts))
    found = checkpoint.newest(place.checkpoints, report)
    state = _start(place, parts) if found is None else from_arrays(found[1], _beginning(parts).now)
    over = finished(config, state)
    if over and (place.path / "summary.json").exists():
        raise ValueError(f"nothing is left to do in {folder}: {over}. To go on: --iterations, --max-trajectories or "
                         "--max-minutes with a larger number.")  # fmt: skip
    with runfolder.explained(place):
        checkpoint.replace(place.config, dump(config).encode())
        if found is None:
            _create(place, config, parts)
        else:
            history.truncate(place.history, state.row - 1)
            parameters.truncate(place.parameters, state.row - 1, 1 if over else config.keep.parameters_every)
    _hand_over(state, parts)
    return _rows(config, parts, place, lock, state)


def branch(
    source: str | Path,
    folder: str | Path,
    changes: Mapping[str, Any] | None = None,
    *,
    replace: bool = False,
    report: Callable[[str], None] = print,
) -> Rows:
    """Begin another run where `source` stands: its parameters, its optimiser and its iteration, in a new folder.

    What is learnt with other trajectories an iteration, say, from one breakpoint on. changes: any keys that leave
    the lattice and the optimiser's rule as they are.
    """
    origin = runfolder.existing(source)
    config = changed(load(origin.config), changes or {})
    config = dataclasses.replace(config, backend=resolve_backend(config.backend))
    parts = build(config)
    found = checkpoint.newest(origin.checkpoints, report)
    if found is None:
        raise ValueError(f"{source} has no checkpoint to begin from: train it for longer.")
    there = from_arrays(found[1], _beginning(parts).now)
    remembered = there.memory if _alike(load(origin.config), config) else {}
    state = dataclasses.replace(
        there, row=0, seconds=0.0, tier=0, tier_start=there.now.iteration, past=[], memory=remembered
    )
    over = finished(config, state)
    if over:
        raise ValueError(f"nothing would be left to do: {over}, those of {source} included. Give more.")
    place, lock = runfolder.prepare(folder, config, _size(parts), replace=replace)
    with runfolder.explained(place):
        checkpoint.replace(place.start, checkpoint.packed(to_arrays(state)))
        checkpoint.replace(place.config, dump(config).encode())
        _create(place, config, parts)
    _hand_over(state, parts)
    return _rows(config, parts, place, lock, state)


def complete(
    config: Config, folder: str | Path, *, callback: Callable[[Row, Record], None] | None = None, **options: Any
) -> dict[str, Any]:
    """`run` to its end. Returns the summary."""
    for row, record in run(config, folder, **options):
        if callback is not None:
            callback(row, record)
    return json.loads((Path(folder) / "summary.json").read_text())


def finished(config: Config, state: State) -> str:
    """Why a run is over, or nothing."""
    if state.now.iteration >= config.iterations:
        return f"it has run its {config.iterations:,} iterations"
    most, minutes = config.stop.max_trajectories, config.stop.max_minutes
    if most and state.spent + ensemble_size(config, state.tier, state.now.iteration) > most:
        return f"it has used {state.spent:,} of at most {most:,} trajectories"
    if minutes and state.seconds >= 60 * minutes:
        return f"it has trained for {minutes:g} minutes"
    return ""


def ensemble_size(config: Config, tier: int, iteration: int) -> int:
    """Trajectories of an iteration."""
    e = config.ensemble
    if e.schedule == "escalation":
        return e.budgets[tier]
    if e.schedule == "steps" and e.steps:
        return next(size for begins, size in reversed(e.steps) if begins <= iteration)
    return e.trajectories


def advance(config: Config, state: State, record: Record, memory: dict[str, np.ndarray]) -> tuple[State, str]:
    """The state after a record, and the event if the schedule made one. The given state is left alone."""
    new, e = copy(state), config.ensemble
    escalates = e.schedule == "escalation" and state.tier < len(e.budgets) - 1
    if escalates:
        remember(new, e.window)
    new.values.append(float(record.estimate.value))
    new.now = Iterate(record.iteration + 1, record.next_theta, record.optimiser_state)
    new.row, new.spent, new.seconds = state.row + 1, record.trajectories, state.seconds + record.seconds
    new.memory = memory
    if not escalates:
        return new, ""
    back_to = schedule.escalation(new.values, new.tier_start, window=e.window, confidence=e.confidence)
    if back_to is None:
        return new, ""
    event = f"escalate {e.budgets[new.tier + 1]}" + (f"; rewind {back_to}" if back_to < new.now.iteration else "")
    rewind(new, back_to)
    new.tier, new.tier_start = new.tier + 1, back_to
    return new, event


def _rows(config: Config, parts: Parts, place: RunFolder, lock: IO[str], state: State) -> Rows:
    saver = Saver(config, place)
    try:
        while not finished(config, state):
            for record in _segment(config, parts, state):
                new, event = advance(config, state, record, parts.estimator.state)
                row = as_row(state.row, record, event)
                with runfolder.explained(place):
                    saver.add(row, record)
                    state = new
                    over = finished(config, state)
                    if event or (saver.due and not over):  # the last one is written below
                        saver.save(state)
                yield row, record
                if event or over:
                    break
    finally:  # also when whoever iterates stops, and on Ctrl-C
        with runfolder.explained(place):
            saver.close(state)
        lock.close()
    conclude(place)


def _segment(config: Config, parts: Parts, state: State) -> Iterator[Record]:
    """`train` from the present state, with the noise of the present tier."""
    now = state.now
    before = Record(now.iteration - 1, None, None, state.spent, 0.0, now.theta, now.optimiser_state)  # type: ignore[arg-type]
    return train(
        jax.random.fold_in(parts.key, state.tier),
        now.theta,
        parts.estimator,
        parts.rule,
        count=lambda iteration: ensemble_size(config, state.tier, iteration),
        project=parts.project,
        resume=before,
    )


def _create(place: RunFolder, config: Config, parts: Parts) -> None:
    task, theta = config.task, {name: np.asarray(parts.theta[name]) for name in FAMILIES}
    attributes = {
        "sigma_kappa": task.sigma_kappa,
        "sigma_w": task.sigma_w,
        "horizon": task.horizon,
        "dt": task.dt,
        "drive_amplitude": task.amplitude,
        "gamma_e": config.lattice.gamma_e,
        "gamma": config.lattice.gamma,
    }
    checkpoint.replace(place.history, history.HEADER.encode())
    parameters.create(place.parameters, parts.task.network, theta, attributes)


def _beginning(parts: Parts) -> State:
    return begin(parts.theta, parts.rule.init(parts.theta))


def _start(place: RunFolder, parts: Parts) -> State:
    """Before row 0: the initial conditions, or those that a branch was given."""
    if not place.start.exists():
        return _beginning(parts)
    return from_arrays(checkpoint.read(place.start), _beginning(parts).now)


def _alike(a: Config, b: Config) -> bool:
    """Whether what one's estimator remembers is of use to the other's."""
    return (a.baseline, a.task.horizon, a.task.dt) == (b.baseline, b.task.horizon, b.task.dt)


def _hand_over(state: State, parts: Parts) -> None:
    if state.memory:
        parts.estimator.restore(state.memory, parts.theta)


def _size(parts: Parts) -> int:
    return sum(np.size(leaf) for leaf in jax.tree.leaves(parts.theta))
