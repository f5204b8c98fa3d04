"""The estimator behind `ppgt(..., baseline=Twin())`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fluctua.core import check, check_twin, twin_run
from fluctua.core.baselines import Baseline, optimal, time_only
from fluctua.core.estimate import Samples, reduce_samples, unflatten
from fluctua.core.recording import BLOCK_BYTES, Recording
from fluctua.core.simulate import Simulator
from fluctua.core.start import Density, Reparameterised
from fluctua.core.stream import run_and_pilot
from fluctua.core.sweep import Model
from fluctua.core.twin import Numbers, Twin, TwinModel, TwinSamples
from fluctua.core.types import Array, Estimate, Params, Process, Rewards, Score, Substrate, Trajectories


class TwinPPGT(NamedTuple):
    """The estimator made by `ppgt` with a `Twin`: (key, theta, count) -> Estimate, on the noise of `ppgt` without."""

    model: TwinModel
    twin: Twin
    initial_baseline: Baseline
    substrate: Substrate

    def cost(self, theta: Params) -> int:
        """Trajectories per sample. The twin's noise-free paths are not counted."""
        return 1

    def __call__(self, key: Array, theta: Params, count: int) -> Estimate:
        """Estimate ∇θJ from `count` trajectories."""
        return reduce_samples(self.samples(key, theta, count))

    def samples(self, key: Array, theta: Params, count: int) -> Samples:
        """The gradients of the single trajectories."""
        return total(self.split(key, theta, count))

    def split(self, key: Array, theta: Params, count: int, table: Array | None = None) -> TwinSamples:
        """The gradients in two parts, direct and correction.

        table: λ̄ as a function of time (T+1,), the `mean_lambda` of other trajectories, in place of `Twin.baseline`.

        >>> parts = ppgt(process, objective, simulator, baseline=Twin()).split(key, theta, 1000)
        """
        check.count(count)
        theta = check.parameters(theta)
        k_run, _ = run_and_pilot(key)
        if not isinstance(self.substrate, Simulator):
            return self.split_of(theta, self.substrate(k_run, theta, count), table)
        model, numbers = self._prepared(theta, table, count, self.substrate.t)
        parts = twin_run.streamed_parts(model, numbers, self.twin.batch, self.substrate, k_run, count)
        return _split(theta, parts)

    def samples_of(
        self,
        theta: Params,
        trajectories: Trajectories | Iterable[Trajectories],
        table: Array | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> Samples:
        """The gradients of given trajectories."""
        return total(self.split_of(theta, trajectories, table, block_bytes))

    def split_of(
        self,
        theta: Params,
        trajectories: Trajectories | Iterable[Trajectories],
        table: Array | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> TwinSamples:
        """The gradients of given trajectories in two parts. block_bytes: how much of them is held at a time."""
        theta = check.parameters(theta)
        recording = Recording(trajectories, theta)
        model, numbers = self._prepared(theta, table, recording.count, recording.t)
        return _split(theta, twin_run.recorded_parts(model, numbers, self.twin.batch, recording, block_bytes))

    def _prepared(self, theta: Params, table: Array | None, count: int, t: Array) -> tuple[TwinModel, Numbers]:
        baseline = self.twin.baseline if table is None else time_only(table)
        check_twin.enough(baseline, self.initial_baseline, self.model.model.start, count, self.twin.batch, t)
        model = self.model._replace(model=self.model.model._replace(baseline=baseline.of))
        return model, Numbers(theta, check_twin.parameters(self.twin, theta), baseline.values)


def twin_ppgt(
    process: Process,
    objective: Rewards,
    substrate: Substrate,
    start: Density | Reparameterised | None,
    score: Score,
    twin: Twin,
    initial_baseline: Baseline | None,
) -> TwinPPGT:
    """The estimator, from arguments that `ppgt` has checked."""
    own, order = check_twin.twin(twin, score, process)
    initial = optimal() if initial_baseline is None else check_twin.initial(initial_baseline)
    model = Model(process, objective, score, start, twin.baseline.of, initial.of)
    return TwinPPGT(TwinModel(model, own, order), twin, initial, substrate)


def total(parts: TwinSamples) -> Samples:
    """Direct + correction."""
    return Samples(jax.tree.map(jnp.add, parts.direct, parts.correction), parts.returns)


def _split(theta: Params, parts: twin_run.Parts) -> TwinSamples:
    direct, correction, returns, mean_lambda = parts
    return TwinSamples(unflatten(theta, direct), unflatten(theta, correction), returns, mean_lambda)
