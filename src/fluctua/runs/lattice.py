"""Train a lattice into a folder, from a configuration.

`run(config, folder)` yields a row and a record per iteration, `complete` runs to the end, and
`resume(folder, {"iterations": 200})` continues. A kill loses only time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fluctua.core.arrays import Params
from fluctua.learn import optimisers
from fluctua.learn.training import Length, Record
from fluctua.runs import build as building
from fluctua.runs import config as configuration
from fluctua.runs import reading
from fluctua.runs.conditions import refuse_ignored
from fluctua.runs.summary import conclude
from fluctua.store import checkpoint, journal, loop
from fluctua.store import folder as runfolder
from fluctua.store.history import Row

Rows = Generator[tuple[Row, Record], None, dict[str, Any]]
"""Rows with their records; the generator returns the summary."""


def run(
    config: configuration.Config,
    folder: str | Path,
    *,
    replace: bool = False,
    cluster: str | None = None,
) -> Rows:
    """Train into a new folder.

    Everything that can be wrong with the configuration or the folder is raised here, before the
    first iteration.

    Args:
        config: what to train.
        folder: where; created if it does not exist.
        replace: remove an earlier run in that folder.
        cluster: address of a Ray cluster that computes the `ensemble.shards`; by default this
            process.

    Returns: a generator of each row of the history with its `Record`; stop iterating to stop.
    """
    refuse_ignored(config, configuration.PRESETS[config.preset])
    config = dataclasses.replace(config, backend=building.resolve_backend(config.backend))
    run = _LatticeRun(config, building.build(config, cluster), runfolder.RunFolder(Path(folder)))
    identity = configuration.digest(configuration.dump(config))
    opened = loop.begin(run.list_files(identity, run.start), replace=replace)
    return _iterate(run, opened)


def resume(
    folder: str | Path,
    changes: Mapping[str, Any] | None = None,
    *,
    report: Callable[[str], None] = print,
    cluster: str | None = None,
) -> Rows:
    """Continue a run from its newest good checkpoint; later rows are computed again, to the bit.

    Args:
        folder: of the run.
        changes: of `ADJUSTABLE` keys.
        report: called with a line of text about each damaged file.
        cluster: address of a Ray cluster; it may differ from that of the earlier rows.

    Returns: a generator of the further rows.
    """
    place = runfolder.find_run(folder, runfolder.RunFolder(Path(folder)))
    with runfolder.hold(place) as lock:
        fixed = sorted(set(changes or {}) - set(configuration.ADJUSTABLE))
        if fixed:
            raise ValueError(
                f"a run continues as it started: `{fixed[0]}` cannot change, only "
                f"{', '.join(configuration.ADJUSTABLE)} can. For another training start "
                "another run."
            )
        config = configuration.apply_changes(configuration.load(place.settings), changes or {})
        identity = _read_identity(place, config)
        run = _LatticeRun(config, building.build(config, cluster), place)
        files = run.list_files(identity, run.start)
        runfolder.require_room(place, files.need, files.advice)
        state = journal.read_state(files, report)
        over = explain_end(config, state)
        if over and loop.read_summary(place, state) is not None:
            raise ValueError(
                f"nothing is left to do in {folder}: {over}. To go on: --iterations, or --set "
                "stop.max_trajectories and stop.max_minutes, with a larger number."
            )
        return _iterate(run, loop.reopen(files, lock, state, run.training_loop, report))


def branch(
    source: str | Path,
    folder: str | Path,
    changes: Mapping[str, Any] | None = None,
    *,
    replace: bool = False,
    report: Callable[[str], None] = print,
    cluster: str | None = None,
) -> Rows:
    """Start another run from the state of `source`: its parameters, optimiser and iteration.

    Use it to compare, say, ensemble sizes from one breakpoint on.

    Args:
        source: the run to start from.
        folder: of the new run.
        changes: any keys that keep the lattice and the optimiser's rule.
        replace: remove an earlier run in that folder.
        report: called with a line of text about each damaged file.
        cluster: address of a Ray cluster that computes the `ensemble.shards`.

    Returns: a generator of the rows of the new run.
    """
    origin = runfolder.find_run(source, runfolder.RunFolder(Path(source)))
    before = configuration.load(origin.settings)
    config = configuration.apply_changes(before, changes or {})
    refuse_ignored(config, before)
    config = dataclasses.replace(config, backend=building.resolve_backend(config.backend))
    run = _LatticeRun(config, building.build(config, cluster), runfolder.RunFolder(Path(folder)))
    source_state = _read_source(run, origin, before, report)
    state = dataclasses.replace(
        source_state,
        row=0,
        seconds=0.0,
        tier=0,
        tier_start=source_state.now.iteration,
        past=[],
        memory=source_state.memory if _share_memory(before, config) else {},
    )
    over = explain_end(config, state)
    if over:
        raise ValueError(
            f"nothing would be left to do: {over}, those of {source} included. Give more."
        )
    digest = configuration.digest(configuration.dump(config))
    arrays = checkpoint.to_arrays(state)
    identity = runfolder.fingerprint(digest.encode(), checkpoint.checksum(arrays))
    opened = loop.begin(run.list_files(identity, state), replace=replace)
    loop.restore_memory(run.training_loop.training, state)
    return _iterate(run, opened)


def complete(config: configuration.Config, folder: str | Path) -> dict[str, Any]:
    """`run` to its end and return the summary."""
    rows = run(config, folder)
    while True:
        try:
            next(rows)
        except StopIteration as end:
            return end.value


def explain_end(config: configuration.Config, state: checkpoint.RunState) -> str:
    """Why a run is over, or an empty string."""
    if over := loop.explain_iterations(state, config.iterations):
        return over
    maximum = config.stop.max_trajectories
    minutes = config.stop.max_minutes
    if maximum and state.spent + ensemble_size(config, state.tier, state.now.iteration) > maximum:
        return f"it has used {state.spent:,} of at most {maximum:,} trajectories"
    if minutes and state.seconds >= 60 * minutes:
        return f"it has trained for {minutes:g} minutes"
    return ""


def ensemble_size(config: configuration.Config, tier: int, iteration: int) -> int:
    """Number of trajectories of an iteration."""
    e = config.ensemble
    if e.schedule == "escalation":
        return e.budgets[tier]
    if e.schedule == "steps" and e.steps:
        return next(size for begins, size in reversed(e.steps) if begins <= iteration)
    return e.trajectories


class Escalated(NamedTuple):
    """The state after a record, and the event of the schedule, if any."""

    state: checkpoint.RunState
    event: str


def escalate(
    config: configuration.Config,
    state: checkpoint.RunState,
    record: Record,
    memory: dict[str, np.ndarray],
) -> Escalated:
    """Add a record to the state, and escalate the ensemble where the schedule requires it.

    The given state is not modified.
    """
    new = checkpoint.add_record(state, record, memory)
    e = config.ensemble
    if e.schedule != "escalation" or state.tier == len(e.budgets) - 1:
        return Escalated(new, "")
    checkpoint.keep_iterate(new, state.now, e.window)
    back_to = optimisers.find_escalation(
        new.values, new.tier_start, window=e.window, confidence=e.confidence
    )
    if back_to is None:
        return Escalated(new, "")
    event = f"escalate {e.budgets[new.tier + 1]}"
    if back_to < new.now.iteration:
        event += f"; rewind {back_to}"
    checkpoint.rewind(new, back_to)
    new.tier += 1
    new.tier_start = back_to
    return Escalated(new, event)


def estimate_space(config: configuration.Config, parameters: int) -> int:
    """Bytes that a run may take: records twice (one copy while writing), checkpoints, rewinds."""
    records = 2 * 8 * parameters * (config.iterations // config.keep.parameters_every + 2)
    rewinds = 12 * config.ensemble.window if config.ensemble.schedule == "escalation" else 0
    steps = round(config.task.horizon / config.task.dt)
    checkpoint = 8 * (3 * parameters * (rewinds + 2) + steps + config.iterations)
    return records + (config.keep.checkpoints + 1) * checkpoint + 170 * config.iterations + 2**22


class _LatticeRun(NamedTuple):
    """A configuration, the parts built from it, and its folder."""

    config: configuration.Config
    parts: building.LatticeParts
    place: runfolder.RunFolder

    @property
    def start(self) -> checkpoint.RunState:
        """The state before the first row."""
        return checkpoint.start_state(self.parts.theta, self.parts.rule.init(self.parts.theta))

    @property
    def training_loop(self) -> loop.Loop:
        """The training with the schedule of its configuration."""
        training = self.parts.describe(self.config.ensemble.trajectories)
        return loop.Loop(
            training, Length(None), self._select_segment, self._advance, self._explain_end
        )

    def _select_segment(self, state: checkpoint.RunState) -> loop.Segment:
        """The training from the present state, with the noise of the present tier."""
        training = self.parts.describe(
            lambda iteration: ensemble_size(self.config, state.tier, iteration)
        )
        return loop.Segment(training, jax.random.fold_in(self.parts.key, state.tier))

    def _advance(self, state: checkpoint.RunState, record: Record) -> loop.Advance:
        estimator: Any = self.parts.estimator
        new, escalation = escalate(self.config, state, record, estimator.state)
        event = "; ".join(filter(None, (escalation, getattr(estimator, "event", ""))))
        return loop.Advance(new, journal.make_row(state.row, record, event), bool(escalation))

    def _explain_end(self, state: checkpoint.RunState) -> str:
        return explain_end(self.config, state)

    def list_files(self, identity: str, start: checkpoint.RunState) -> journal.RunFiles:
        """Common data of the files of the run."""
        size = sum(np.size(leaf) for leaf in jax.tree.leaves(self.parts.theta))
        return journal.RunFiles(
            self.place,
            configuration.stamp(self.config, identity).encode(),
            identity,
            start,
            _make_options(self.config, self.parts),
            need=estimate_space(self.config, size),
            advice="record less often (keep.parameters_every)",
        )


def _iterate(run: _LatticeRun, opened: loop.Opened) -> Rows:
    try:
        yield from loop.iterate(opened, run.training_loop)
    finally:
        if run.config.ensemble.shards:
            from fluctua.scale.distributed import close

            close(run.parts.estimator)
    return conclude(run.place, run.config)


def _read_source(
    run: _LatticeRun,
    origin: runfolder.RunFolder,
    config: configuration.Config,
    report: Callable[[str], None],
) -> checkpoint.RunState:
    """The state of the run that another one starts from."""
    files = run._replace(place=origin).list_files(_read_identity(origin, config), run.start)
    state = journal.read_state(files, report)
    if not checkpoint.list_checkpoints(origin.checkpoints):
        raise ValueError(f"{origin.path} has no checkpoint to begin from: train it for longer.")
    return state


def _make_options(
    config: configuration.Config, parts: building.LatticeParts
) -> journal.JournalOptions:
    """Make the options of writing, with the lattice's description for parameters.h5."""
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
    if task.integrator != "euler":
        attributes["step_order"] = reading.ORDER_OF_STEP[task.integrator]
    return journal.JournalOptions(
        keep.checkpoints,
        keep.checkpoint_seconds,
        keep.parameters_every,
        describe=reading.make_description(parts.task.network, attributes),
        names=_name_families,
    )


def _read_identity(place: runfolder.RunFolder, config: configuration.Config) -> str:
    """The fingerprint of a run.

    A settings file without one is of an earlier version, unless other files have theirs.
    """
    stated = configuration.read_stamp(place.settings)
    if stated:
        return stated
    if journal.read_owners(place):
        raise ValueError(
            f"{place.settings} is truncated: its last line, with the fingerprint of the run, is "
            "missing. Put the whole file back."
        )
    return configuration.digest(configuration.dump(config))


def _name_families(theta: Params) -> dict[str, np.ndarray]:
    return {name: np.asarray(theta[name]) for name in building.FAMILIES}


def _share_memory(a: configuration.Config, b: configuration.Config) -> bool:
    """Whether the estimator of one configuration can use the state of the other's."""
    return _select_memory_settings(a) == _select_memory_settings(b)


def _select_memory_settings(config: configuration.Config) -> tuple[Any, ...]:
    """The settings on which the state of an estimator depends."""
    task = config.task
    return (
        config.baseline,
        config.device,
        config.calibration,
        task.horizon,
        task.dt,
        task.integrator,
    )
