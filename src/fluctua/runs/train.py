"""Lattice trainings: a configuration trained into a folder, row by row, so that a kill loses
nothing but time.

`run(config, folder)` yields a row and a record an iteration, `complete` runs to the end, and
`resume(folder, {"iterations": 200})` goes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fluctua.core.types import Params
from fluctua.learn import optimisers
from fluctua.learn.train import Record, train
from fluctua.runs.build import FAMILIES, Parts, build, resolve_backend
from fluctua.runs.config import (
    ADJUSTABLE,
    PRESETS,
    Config,
    changed,
    digest,
    dump,
    load,
    read_stamp,
    stamped,
)
from fluctua.runs.heeded import refuse_ignored
from fluctua.runs.reading import ORDER_OF_STEP, describing
from fluctua.runs.summary import conclude
from fluctua.scale.distributed import close
from fluctua.store import checkpoint, journal
from fluctua.store import folder as runfolder
from fluctua.store.checkpoint import State, after, begin, remember, rewind, to_arrays
from fluctua.store.folder import RunFolder
from fluctua.store.history import Row
from fluctua.store.journal import Journal, Keep, Step

Rows = Generator[tuple[Row, Record], None, dict[str, Any]]
"""Rows with their records; what the generator returns is the summary."""
ADVICE = "record less often (keep.parameters_every)"


def run(
    config: Config, folder: str | Path, *, replace: bool = False, cluster: str | None = None
) -> Rows:
    """Train into a new folder.

    Everything that can be wrong with the configuration or the folder is raised here, before the
    first iteration.

    Args:
        config: what to train.
        folder: where; made if it does not exist.
        replace: remove an earlier run in that folder.
        cluster: the address of a Ray cluster that computes the `ensemble.shards`; in this process
            if not given.
    Returns: a generator of each row of the history with its `Record`; stop iterating to stop.

    """
    refuse_ignored(config, PRESETS[config.preset])
    config = dataclasses.replace(config, backend=resolve_backend(config.backend))
    parts = build(config, cluster)
    start = _beginning(parts)
    identity = digest(dump(config))
    book = _create(RunFolder(Path(folder)), config, parts, identity, start, replace)
    return _rows(config, parts, book, start)


def resume(
    folder: str | Path,
    changes: Mapping[str, Any] | None = None,
    *,
    report: Callable[[str], None] = print,
    cluster: str | None = None,
) -> Rows:
    """Go on with a run from its newest good checkpoint; the rows after it are computed again, and
    come out the same.

    Args:
        folder: of the run.
        changes: of `ADJUSTABLE` keys.
        report: is told of damaged files.
        cluster: the address of a Ray cluster, another one or none if that is so now.
    Returns: a generator of the rows to come.

    """
    place = runfolder.existing(folder, RunFolder(Path(folder)))
    with runfolder.holding(place) as lock:
        fixed = sorted(set(changes or {}) - set(ADJUSTABLE))
        if fixed:
            raise ValueError(
                f"a run goes on as it began: `{fixed[0]}` cannot change, only "
                f"{', '.join(ADJUSTABLE)} can. For another "
                "training begin another run."
            )
        config = changed(load(place.settings), changes or {})
        identity = _identity(place, config)
        parts = build(config, cluster)
        runfolder.room(place, space(config, _size(parts.theta)), ADVICE)
        state = journal.standing(place, identity, _beginning(parts), report)
        over = finished(config, state)
        if over and (place.path / "summary.json").exists():
            raise ValueError(
                f"nothing is left to do in {folder}: {over}. To go on: --iterations, "
                "--max-trajectories "
                "or --max-minutes with a larger number."
            )
        book = journal.reopen(
            place,
            lock,
            stamped(config, identity).encode(),
            identity,
            state,
            _families,
            keep=_keep(config, parts),
            report=report,
            over=bool(over),
        )
        _hand_over(state, parts)
        return _rows(config, parts, book, state)


def branch(
    source: str | Path,
    folder: str | Path,
    changes: Mapping[str, Any] | None = None,
    *,
    replace: bool = False,
    report: Callable[[str], None] = print,
    cluster: str | None = None,
) -> Rows:
    """Begin another run where `source` stands: its parameters, its optimiser and its iteration, in
    a new folder.

    What is learnt with other trajectories an iteration, say, from one breakpoint on.

    Args:
        source: the run to begin from.
        folder: of the new run.
        changes: any keys that leave the lattice and the optimiser's rule as they are.
        replace: remove an earlier run in that folder.
        report: is told of damaged files.
        cluster: the address of a Ray cluster that computes the `ensemble.shards`.
    Returns: a generator of the rows of the new run.

    """
    origin = runfolder.existing(source, RunFolder(Path(source)))
    before = load(origin.settings)
    config = changed(before, changes or {})
    refuse_ignored(config, before)
    config = dataclasses.replace(config, backend=resolve_backend(config.backend))
    parts = build(config, cluster)
    there = journal.standing(origin, _identity(origin, before), _beginning(parts), report)
    if not checkpoint.listed(origin.checkpoints):
        raise ValueError(f"{source} has no checkpoint to begin from: train it for longer.")
    remembered = there.memory if _alike(before, config) else {}
    state = dataclasses.replace(
        there,
        row=0,
        seconds=0.0,
        tier=0,
        tier_start=there.now.iteration,
        past=[],
        memory=remembered,
    )
    over = finished(config, state)
    if over:
        raise ValueError(
            f"nothing would be left to do: {over}, those of {source} included. Give more."
        )
    identity = runfolder.fingerprint(
        digest(dump(config)).encode(), checkpoint.checksum(to_arrays(state))
    )
    book = _create(RunFolder(Path(folder)), config, parts, identity, state, replace)
    _hand_over(state, parts)
    return _rows(config, parts, book, state)


def complete(config: Config, folder: str | Path) -> dict[str, Any]:
    """`run` to its end; the summary."""
    rows = run(config, folder)
    while True:
        try:
            next(rows)
        except StopIteration as end:
            return end.value


def finished(config: Config, state: State) -> str:
    """Why a run is over, or nothing."""
    if state.now.iteration >= config.iterations:
        return f"it has run its {config.iterations:,} iterations"
    most = config.stop.max_trajectories
    minutes = config.stop.max_minutes
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


def advance(
    config: Config, state: State, record: Record, memory: dict[str, np.ndarray]
) -> tuple[State, str]:
    """The state after a record, and the event if the schedule made one.

    The given state is left alone.
    """
    new = after(state, record, memory)
    e = config.ensemble
    if e.schedule != "escalation" or state.tier == len(e.budgets) - 1:
        return new, ""
    remember(new, state.now, e.window)
    back_to = optimisers.escalation(
        new.values, new.tier_start, window=e.window, confidence=e.confidence
    )
    if back_to is None:
        return new, ""
    event = f"escalate {e.budgets[new.tier + 1]}" + (
        f"; rewind {back_to}" if back_to < new.now.iteration else ""
    )
    rewind(new, back_to)
    new.tier, new.tier_start = new.tier + 1, back_to
    return new, event


def space(config: Config, parameters: int) -> int:
    """Bytes that a run may take: records twice (one copy while writing), checkpoints and rewind
    history.
    """
    records = 2 * 8 * parameters * (config.iterations // config.keep.parameters_every + 2)
    rewinds = 12 * config.ensemble.window if config.ensemble.schedule == "escalation" else 0
    steps = round(config.task.horizon / config.task.dt)
    checkpoint = 8 * (3 * parameters * (rewinds + 2) + steps + config.iterations)
    return records + (config.keep.checkpoints + 1) * checkpoint + 170 * config.iterations + 2**22


def _rows(config: Config, parts: Parts, book: Journal, state: State) -> Rows:
    def step(state: State, record: Record) -> Step:
        new, event = advance(config, state, record, parts.estimator.state)
        return Step(new, journal.row_of(state.row, record, event), bool(event))

    try:
        yield from book.rows(
            state,
            lambda state: _segment(config, parts, state),
            step,
            lambda state: finished(config, state),
        )
    finally:
        close(parts.estimator)
    return conclude(book.place, config)


def _segment(config: Config, parts: Parts, state: State) -> Iterator[Record]:
    """`train` from the present state, with the noise of the present tier."""
    return train(
        jax.random.fold_in(parts.key, state.tier),
        state.now.theta,
        parts.estimator,
        parts.rule,
        count=lambda iteration: ensemble_size(config, state.tier, iteration),
        project=parts.project,
        resume=state.now._replace(trajectories=state.spent),
    )


def _create(
    place: RunFolder, config: Config, parts: Parts, identity: str, start: State, replace: bool
) -> Journal:
    return journal.create(
        place,
        stamped(config, identity).encode(),
        identity,
        start,
        _families,
        need=space(config, _size(parts.theta)),
        keep=_keep(config, parts),
        replace=replace,
        advice=ADVICE,
    )


def _keep(config: Config, parts: Parts) -> Keep:
    task = config.task
    keep = config.keep
    attributes = {
        "sigma_kappa": task.sigma_kappa,
        "sigma_w": task.sigma_w,
        "horizon": task.horizon,
        "dt": task.dt,
        "drive_amplitude": task.amplitude,
        "gamma_e": config.lattice.gamma_e,
        "gamma": config.lattice.gamma,
    }
    if task.reward == "isolation":
        attributes["isolation"] = 1.0
    if task.step != "euler":
        attributes["step_order"] = ORDER_OF_STEP[task.step]
    describe = describing(parts.task.network, attributes)
    return Keep(keep.checkpoints, keep.checkpoint_seconds, keep.parameters_every, describe=describe)


def _identity(place: RunFolder, config: Config) -> str:
    """The fingerprint of a run.

    A file without one is of an earlier version, unless other files have theirs.
    """
    stated = read_stamp(place.settings)
    if stated:
        return stated
    if journal.owners(place):
        raise ValueError(
            f"{place.settings} is cut short: its last line, with the fingerprint of the run, is "
            "missing. Put the whole "
            "file back."
        )
    return digest(dump(config))


def _beginning(parts: Parts) -> State:
    return begin(parts.theta, parts.rule.init(parts.theta))


def _families(theta: Params) -> dict[str, np.ndarray]:
    return {name: np.asarray(theta[name]) for name in FAMILIES}


def _alike(a: Config, b: Config) -> bool:
    """Whether what one's estimator remembers is of use to the other's."""

    def of(c):
        return (c.baseline, c.device, c.calibration, c.task.horizon, c.task.dt, c.task.step)

    return of(a) == of(b)


def _hand_over(state: State, parts: Parts) -> None:
    if state.memory:
        parts.estimator.restore(state.memory, parts.theta)


def _size(theta: Params) -> int:
    return sum(np.size(leaf) for leaf in jax.tree.leaves(theta))
