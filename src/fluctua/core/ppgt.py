"""The physical policy gradient theorem (Eqs. 12 and 13) as two functions: from given trajectories, and as an
estimator that runs a substrate.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, overload

import jax.numpy as jnp

from fluctua.core import check, recorded
from fluctua.core.baselines import Baseline, optimal
from fluctua.core.estimate import Samples, reduce_samples, unflatten
from fluctua.core.recording import BLOCK_BYTES, Recording
from fluctua.core.scores import full_score
from fluctua.core.simulate import Simulator
from fluctua.core.start import Density, Reparameterised
from fluctua.core.stream import run_and_pilot, streamed_samples
from fluctua.core.sweep import Model, Tables
from fluctua.core.twin import Twin
from fluctua.core.twin_estimator import TwinPPGT, twin_ppgt
from fluctua.core.types import Array, Estimate, Objective, Params, Process, Rewards, Score, Substrate, Trajectories


def gradient(
    process: Process,
    objective: Objective,
    theta: Params,
    trajectories: Trajectories | Iterable[Trajectories],
    *,
    start: Density | Reparameterised | None = None,
    score: Score = full_score,
    baseline: Baseline | Twin | None = None,
    initial_baseline: Baseline | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Estimate:
    """∇θJ from trajectories that came from somewhere: no simulator is needed.

    `trajectories` is one record, or an iterable of them (chunks of a data set larger than memory, on one
    time grid; arrays that load when sliced, such as memory maps and h5py data sets, are read block by
    block). Chunks give the same result as one piece. An iterable is gone through more than once, so it
    must start afresh each time: a list, or an object with `__iter__`, not a generator.

    start: None for a start that does not depend on θ. baseline: `optimal()` if not given, or a `Twin`;
    initial_baseline, for the draw of X₀, the same as `baseline` if not given (`optimal()` with a `Twin`).

    >>> gradient(process, objective, theta, Trajectories(t, x)).stderr
    """
    estimator = ppgt(
        process,
        objective,
        _NoSubstrate(),
        start=start,
        score=score,
        baseline=baseline,
        initial_baseline=initial_baseline,
    )
    return reduce_samples(estimator.samples_of(theta, trajectories, block_bytes=block_bytes))


class PPGT(NamedTuple):
    """The estimator made by `ppgt`: (key, theta, count) -> Estimate."""

    model: Model
    baseline: Baseline
    initial_baseline: Baseline
    substrate: Substrate

    def cost(self, theta: Params) -> int:
        """Trajectories per sample; a pilot comes on top."""
        return 1

    def __call__(self, key: Array, theta: Params, count: int) -> Estimate:
        """Estimate ∇θJ from `count` trajectories."""
        return reduce_samples(self.samples(key, theta, count))

    def samples(self, key: Array, theta: Params, count: int) -> Samples:
        """The gradients of the single trajectories."""
        check.count(count)
        theta = check.parameters(theta)
        if isinstance(self.substrate, Simulator):
            plans = (self.baseline, self.initial_baseline)
            flat, returns = streamed_samples(self.model, self._tables(), plans, self.substrate, key, theta, count)
            return Samples(unflatten(theta, flat), returns)
        k_run, k_pilot = run_and_pilot(key)
        pilot = max(self.baseline.pilot, self.initial_baseline.pilot)
        table = None
        if pilot:
            table = mean_return_to_go(self.model.objective, theta, self.substrate(k_pilot, theta, pilot))
        return self.samples_of(theta, self.substrate(k_run, theta, count), table)

    def samples_of(
        self,
        theta: Params,
        trajectories: Trajectories | Iterable[Trajectories],
        table: Array | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> Samples:
        """The gradients of given trajectories. `table`: what a pilot found, if one was run."""
        theta = check.parameters(theta)
        recording = Recording(trajectories, theta)
        for plan in (self.baseline, self.initial_baseline):
            check.baseline(plan, recording.count, recording.t)
            if plan.pilot and table is None:
                raise ValueError(
                    "a time-only baseline of recorded trajectories needs its `values` (T+1,), the mean "
                    "return-to-go of other trajectories (`mean_return_to_go`): nothing can be run here."
                )
        tables = Tables(*(table if values is None else values for values in self._tables()))
        flat, returns = recorded.recorded_samples(self.model, tables, recording, theta, block_bytes)
        return Samples(unflatten(theta, flat), returns)

    def _tables(self) -> Tables:
        return Tables(self.baseline.values, self.initial_baseline.values)


@overload
def ppgt(
    process: Process,
    objective: Objective,
    substrate: Substrate,
    *,
    start: Density | Reparameterised | None = None,
    score: Score = full_score,
    baseline: Twin,
    initial_baseline: Baseline | None = None,
) -> TwinPPGT: ...


@overload
def ppgt(
    process: Process,
    objective: Objective,
    substrate: Substrate,
    *,
    start: Density | Reparameterised | None = None,
    score: Score = full_score,
    baseline: Baseline | None = None,
    initial_baseline: Baseline | None = None,
) -> PPGT: ...


@overload
def ppgt(
    process: Process,
    objective: Objective,
    substrate: Substrate,
    *,
    start: Density | Reparameterised | None = None,
    score: Score = full_score,
    baseline: Baseline | Twin | None,
    initial_baseline: Baseline | None = None,
) -> PPGT | TwinPPGT: ...


def ppgt(
    process: Process,
    objective: Objective,
    substrate: Substrate,
    *,
    start: Density | Reparameterised | None = None,
    score: Score = full_score,
    baseline: Baseline | Twin | None = None,
    initial_baseline: Baseline | None = None,
) -> PPGT | TwinPPGT:
    """An estimator of ∇θJ that runs a substrate: a `simulator`, or any (key, theta, count) -> Trajectories.

    A simulator is streamed: the trajectories are never stored, and are replayed when the baseline needs
    the returns first. `process` is what the score uses; it may be a calibrated model of the substrate.
    `start` defaults to the simulator's own, `baseline` to `optimal()`, and `initial_baseline`, for the
    draw of X₀, to `baseline`. A `Twin` for a baseline is a model that explains most of the return.

    >>> estimator = ppgt(process, objective, simulator(process, x0, t), baseline=optimal())
    >>> estimate = estimator(jax.random.key(0), theta, 1000)
    """
    if start is None and isinstance(substrate, Simulator):
        start = substrate.recipe.start
    moving = None if start is None else check.start(start)[0]
    check.score_for_start(score, moving)
    if baseline is Twin:
        raise TypeError("`baseline` is the class `Twin`; a twin is an instance of it: baseline=Twin().")
    if isinstance(baseline, Twin):
        given = (check.process(process), check.objective(objective), substrate, moving, score)
        return twin_ppgt(*given, baseline, initial_baseline)
    step = optimal() if baseline is None else baseline
    initial = step if initial_baseline is None else initial_baseline
    model = Model(check.process(process), check.objective(objective), score, moving, step.of, initial.of)
    return PPGT(model, step, initial, substrate)


class _NoSubstrate(NamedTuple):
    def __call__(self, key: Array, theta: Params, count: int) -> Trajectories:
        raise NotImplementedError


def mean_return_to_go(objective: Objective | Rewards, theta: Params, trajectories: Trajectories) -> Array:
    """E[λ̂ₙ] at every time (T+1,): the `values` of a time-only baseline, from other trajectories."""
    recording = Recording(trajectories, theta)
    x = jnp.asarray(trajectories.x, recording.dtype)
    return recorded.mean_return_to_go(check.objective(objective), theta, recording.times, x, recording.context)
