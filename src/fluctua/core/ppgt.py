"""The physical policy gradient theorem (Eqs. 12 and 13) as two functions: from given trajectories, and as an
estimator that runs a substrate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import check, sources, twin_sweep
from fluctua.core.baselines import Baseline, check_baseline, optimal, time_only
from fluctua.core.estimate import Samples, reduce_samples, unflatten
from fluctua.core.scores import full_score
from fluctua.core.simulate import Simulator
from fluctua.core.sources import BLOCK_BYTES, Recording, run_and_pilot
from fluctua.core.start import Density, Reparameterised, check_score, checked_start
from fluctua.core.sweep import Model, Tables
from fluctua.core.twin import (
    Numbers,
    Twin,
    TwinModel,
    TwinSamples,
    check_batches,
    checked_initial,
    checked_twin,
    twin_parameters,
)
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

    Args:
        process: drift and noise that the score uses, of the system or a calibrated model of it.
        objective: what is maximised.
        theta: the parameters at which the trajectories were taken, any pytree of floats.
        trajectories: one record, or an iterable of them (chunks of a data set larger than memory, on one time grid;
            arrays that load when sliced, such as memory maps and h5py data sets, are read block by block). Chunks give
            the same result as one piece. An iterable is gone through more than once, so it must start afresh each
            time: a list, or an object with `__iter__`, not a generator.
        start: None for a start that does not depend on θ.
        score: ∂θ ln p(x'|x) of one step; `local_linear_score` for samples that are far apart.
        baseline: what is taken off the return-to-go, or a `Twin`.
        initial_baseline: for the draw of X₀; `baseline` if not given (`optimal()` with a `Twin`).
        block_bytes: how much of the trajectories is held at a time.

    Returns: an `Estimate`.

    """
    method = _method(process, objective, start, score, baseline, initial_baseline)
    return reduce_samples(_recorded(method, theta, trajectories, None, block_bytes))


def samples_of(
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
) -> Samples:
    """The gradients of the single trajectories, whose mean is `gradient(...)`; its arguments."""
    method = _method(process, objective, start, score, baseline, initial_baseline)
    return _recorded(method, theta, trajectories, None, block_bytes)


def split_of(
    process: Process,
    objective: Objective,
    theta: Params,
    trajectories: Trajectories | Iterable[Trajectories],
    *,
    baseline: Twin,
    start: Density | Reparameterised | None = None,
    score: Score = full_score,
    initial_baseline: Baseline | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> TwinSamples:
    """The gradients of given trajectories in two parts, direct and correction; the arguments of `gradient`."""
    method = _method(process, objective, start, score, baseline, initial_baseline)
    return _recorded_split(method, theta, trajectories, None, block_bytes)


def ppgt(
    process: Process,
    objective: Objective,
    substrate: Substrate,
    *,
    start: Density | Reparameterised | None = None,
    score: Score = full_score,
    baseline: Baseline | Twin | None = None,
    initial_baseline: Baseline | None = None,
) -> PPGT:
    """An estimator of ∇θJ that runs a substrate: (key, theta, count) -> `Estimate`.

    A simulator is streamed: the trajectories are never stored, and are replayed when the baseline needs the returns
    first.

    Args:
        process: drift and noise that the score uses; it may be a calibrated model of the substrate.
        objective: what is maximised.
        substrate: a `simulator`, or any (key, theta, count) -> Trajectories.
        start: the simulator's own if not given.
        score: ∂θ ln p(x'|x) of one step.
        baseline: what is taken off the return-to-go. A `Twin` is a model that explains most of the return.
        initial_baseline: for the draw of X₀; `baseline` if not given (`optimal()` with a `Twin`).

    Returns: the estimator, a `PPGT`.

    """
    if start is None and isinstance(substrate, Simulator):
        start = substrate.recipe.start
    return PPGT(_method(process, objective, start, score, baseline, initial_baseline), substrate)


class Method(NamedTuple):
    """The theorem with all its choices made. twin: checked, with a process of its own; None without one.

    baseline: λ̄ of the return-to-go, or with a twin that of Λ.
    """

    model: Model
    baseline: Baseline
    initial_baseline: Baseline
    twin: Twin | None


class PPGT(NamedTuple):
    """The estimator made by `ppgt`: (key, theta, count) -> Estimate."""

    method: Method
    substrate: Substrate

    def cost(self, theta: Params) -> int:
        """Trajectories per sample. The noise-free paths of a twin are not counted."""
        return 1

    @property
    def pilot(self) -> int:
        """Trajectories that a call runs besides, for its baseline."""
        return 0 if self.method.twin else max(self.method.baseline.pilot, self.method.initial_baseline.pilot)

    @property
    def state(self) -> dict[str, np.ndarray]:
        """Nothing is remembered between calls."""
        return {}

    def restore(self, state: Mapping[str, np.ndarray], theta: Params) -> None:
        """Nothing to put back."""

    def __call__(self, key: Array, theta: Params, count: int) -> Estimate:
        """Estimate ∇θJ from `count` trajectories."""
        return reduce_samples(self.samples(key, theta, count))

    def samples(self, key: Array, theta: Params, count: int) -> Samples:
        """The gradients of the single trajectories."""
        if self.method.twin:
            return total(self.split(key, theta, count))
        check.count(count)
        theta = check.parameters(theta)
        model, plans = self.method.model, self.method[1:3]
        if isinstance(self.substrate, Simulator):
            flat, returns = sources.streamed_samples(model, _tables(plans), plans, self.substrate, key, theta, count)
            return Samples(unflatten(theta, flat), returns)
        k_run, k_pilot = run_and_pilot(key)
        table = None
        if self.pilot:
            table = mean_return_to_go(model.objective, theta, self.substrate(k_pilot, theta, self.pilot))
        return _recorded(self.method, theta, self.substrate(k_run, theta, count), table, BLOCK_BYTES)

    def split(self, key: Array, theta: Params, count: int, table: Array | None = None) -> TwinSamples:
        """The gradients in two parts, direct and correction, of an estimator with a `Twin`.

        table: λ̄ as a function of time (T+1,), the `mean_lambda` of other trajectories, in place of `Twin.baseline`.
        """
        if self.method.twin is None:
            raise ValueError("`split` is of the twin correction: make the estimator with ppgt(..., baseline=Twin()).")
        check.count(count)
        theta = check.parameters(theta)
        k_run, _ = run_and_pilot(key)
        if not isinstance(self.substrate, Simulator):
            return _recorded_split(self.method, theta, self.substrate(k_run, theta, count), table, BLOCK_BYTES)
        model, numbers, batch = _with_twin(self.method, theta, table, count, self.substrate.t)
        return _parts(theta, twin_sweep.streamed_parts(model, numbers, batch, self.substrate, k_run, count))


def total(parts: TwinSamples) -> Samples:
    """Direct + correction."""
    return Samples(jax.tree.map(jnp.add, parts.direct, parts.correction), parts.returns)


def mean_return_to_go(objective: Objective | Rewards, theta: Params, trajectories: Trajectories) -> Array:
    """E[λ̂ₙ] at every time (T+1,): the `values` of a time-only baseline, from other trajectories."""
    recording = Recording(trajectories, theta)
    x = jnp.asarray(trajectories.x, recording.dtype)
    return sources.mean_return_to_go(check.objective(objective), theta, recording.times, x, recording.context)


# ------------------------------------------------------------------------------------- what is behind


def _method(
    process: Process,
    objective: Objective,
    start: Density | Reparameterised | None,
    score: Score,
    baseline: Baseline | Twin | None,
    initial_baseline: Baseline | None,
) -> Method:
    moving = None if start is None else checked_start(start)[0]
    check_score(score, moving)
    process, rewards = check.process(process), check.objective(objective)
    if baseline is Twin:
        raise TypeError("`baseline` is the class `Twin`; a twin is an instance of it: baseline=Twin().")
    if isinstance(baseline, Twin):
        twin = checked_twin(baseline, score, process)
        step, initial = twin.baseline, optimal() if initial_baseline is None else checked_initial(initial_baseline)
    else:
        twin, step = None, optimal() if baseline is None else baseline
        initial = step if initial_baseline is None else initial_baseline
    return Method(Model(process, rewards, score, moving, step.of, initial.of), step, initial, twin)


def _recorded(
    method: Method,
    theta: Params,
    trajectories: Trajectories | Iterable[Trajectories],
    table: Array | None,
    block_bytes: int,
) -> Samples:
    """table: what a pilot measured, if one was run."""
    if method.twin:
        return total(_recorded_split(method, theta, trajectories, table, block_bytes))
    theta = check.parameters(theta)
    recording = Recording(trajectories, theta)
    plans = method[1:3]
    for plan in plans:
        check_baseline(plan, recording.count, recording.t)
        if plan.pilot and table is None:
            raise ValueError(
                "a time-only baseline of recorded trajectories needs its `values` (T+1,), the mean "
                "return-to-go of other trajectories (`mean_return_to_go`): nothing can be run here."
            )
    tables = Tables(*(table if values is None else values for values in _tables(plans)))
    flat, returns = sources.recorded_samples(method.model, tables, recording, theta, block_bytes)
    return Samples(unflatten(theta, flat), returns)


def _recorded_split(
    method: Method,
    theta: Params,
    trajectories: Trajectories | Iterable[Trajectories],
    table: Array | None,
    block_bytes: int,
) -> TwinSamples:
    theta = check.parameters(theta)
    recording = Recording(trajectories, theta)
    model, numbers, batch = _with_twin(method, theta, table, recording.count, recording.t)
    return _parts(theta, twin_sweep.recorded_parts(model, numbers, batch, recording, block_bytes))


def _with_twin(
    method: Method, theta: Params, table: Array | None, count: int, t: Array
) -> tuple[TwinModel, Numbers, int]:
    twin = method.twin
    assert twin is not None
    assert twin.process is not None  # `checked_twin` fills it in
    baseline = method.baseline if table is None else time_only(table)
    check_batches(baseline, method.initial_baseline, method.model.start, count, twin.batch, t)
    model = TwinModel(method.model._replace(baseline=baseline.of), twin.process, twin.order)
    return model, Numbers(theta, twin_parameters(twin, theta), baseline.values), twin.batch


def _tables(plans: tuple[Baseline, Baseline]) -> Tables:
    return Tables(*(plan.values for plan in plans))


def _parts(theta: Params, parts: twin_sweep.Parts) -> TwinSamples:
    direct, correction, returns, mean_lambda = parts
    return TwinSamples(unflatten(theta, direct), unflatten(theta, correction), returns, mean_lambda)
