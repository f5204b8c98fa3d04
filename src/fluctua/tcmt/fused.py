"""Estimators on the fused kernels, with the protocol and the noise of the JAX estimators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core import baselines, check
from fluctua.core import estimate as estimates
from fluctua.core.arrays import Array, Params
from fluctua.core.streamed import estimate_seeds
from fluctua.core.twin.correction import TwinSamples
from fluctua.learn.fisher_information import count_blocks
from fluctua.tcmt import conversion
from fluctua.tcmt.kernel import options as kernel_options
from fluctua.tcmt.kernel import run as kernel_run
from fluctua.tcmt.kernel import twin as kernel_twin
from fluctua.tcmt.measured_network import MeasuredNetwork
from fluctua.tcmt.time_step import StabilityWatch


class PreparedCall(NamedTuple):
    """Key and parameters as the kernels take them: what all parts of an ensemble share.

    spec: the kernels' arrays at θ.
    seed: of the noise.
    pilot_seed: of the pilot's noise.
    """

    spec: kernel_options.KernelSpec
    seed: int
    pilot_seed: int


@dataclass(frozen=True)
class Fused(MeasuredNetwork):
    """Estimator on the fused kernels: (key, theta, count) -> Estimate. Made by `make_fused`.

    task: the model, and what is simulated.
    baseline: "none", "time", a table (T+1,), a `Binned` or a `KernelTwin`.
    options: of the kernels.
    pilot_count: trajectories of the pilot of baseline "time".
    watch: warns before a run with an unstable time step.
    """

    baseline: str | np.ndarray | kernel_options.Binned | kernel_twin.KernelTwin
    options: kernel_options.KernelOptions
    pilot_count: int = baselines.PILOT
    watch: StabilityWatch = field(default_factory=StabilityWatch)

    @cached_property
    def _base_spec(self) -> kernel_options.KernelSpec:
        """The kernels' arrays at the network's own parameters."""
        return conversion.kernel_spec(self.task, {}, self.s_plus)

    def _make_spec(self, theta: dict[str, np.ndarray]) -> kernel_options.KernelSpec:
        """Return the kernels' arrays at θ. For ω, κ and χ alone the other arrays are reused."""
        if not theta.keys() <= {"omega", "kappa", "chi"}:
            return conversion.kernel_spec(self.task, theta, self.s_plus)
        changed = conversion.repeat_parameters(self.task, theta)
        if "omega" in changed:
            changed["omega"] = changed["omega"] + conversion.find_offset(self.task)
        return self._base_spec.replace(**changed)

    def cost(self, theta: Params) -> int:
        """Return the trajectories per sample, without the pilot."""
        return 1

    @property
    def pilot(self) -> int:
        """Trajectories of the pilot, which a call runs besides."""
        return self.pilot_count if isinstance(self.baseline, str) and self.baseline == "time" else 0

    @property
    def leaves_processor(self) -> bool:
        """Whether the processor is free while trajectories are simulated."""
        return self.options.backend == "cuda"

    @property
    def state(self) -> dict[str, np.ndarray]:
        """Empty: nothing is kept between calls."""
        return {}

    def restore(self, state: Mapping[str, np.ndarray], theta: Params) -> None:
        """Do nothing: there is no state."""

    def __call__(self, key: Array, theta: Params, count: int) -> estimates.Estimate:
        """Estimate ∇θJ from `count` trajectories."""
        return self.with_result(key, theta, count)[0]

    def with_result(
        self, key: Array, theta: Params, count: int, table: np.ndarray | None = None
    ) -> tuple[estimates.Estimate, kernel_run.KernelResult | kernel_twin.TwinResult]:
        """Return the estimate and the kernel's result, from which `next_table` is read."""
        theta = check.parameters(theta, numbers=False)
        combined = conversion.needs_chain_rule(self.task, theta)
        result = self.run(key, theta, count, table, samples=combined)
        if combined:
            return estimates.reduce_samples(
                conversion.collect_samples(self.task, theta, result)
            ), result
        return conversion.to_estimate(theta, result), result

    def samples(self, key: Array, theta: Params, count: int) -> estimates.Samples:
        """Return gradients per trajectory."""
        theta = check.parameters(theta, numbers=False)
        return conversion.collect_samples(
            self.task, theta, self.run(key, theta, count, samples=True)
        )

    def split(
        self,
        key: Array,
        theta: Params,
        count: int,
        table: np.ndarray | None = None,
        *,
        first: int = 0,
        prepared: PreparedCall | None = None,
    ) -> TwinSamples:
        """Return the two parts of the twin correction; `count` may be 1.

        first: number of the first trajectory.
        prepared: `prepare(key, theta)`, where several parts of an ensemble share it.

        >>> parts = task.estimator("cpu", baseline="twin").split(key, theta, 64)
        >>> parts.correction["kappa"].mean(axis=0)  # how wrong the twin is
        """
        if not isinstance(self.baseline, kernel_twin.KernelTwin):
            raise ValueError('`split` needs a twin: make the estimator with baseline="twin".')
        theta = check.parameters(theta, numbers=False)
        result = self.run(key, theta, count, table, first=first, prepared=prepared, samples=True)
        assert isinstance(result, kernel_twin.TwinResult)
        assert result.direct_samples is not None
        assert result.correction_samples is not None
        direct = conversion.convert_columns(self.task, theta, result.direct_samples)
        correction = conversion.convert_columns(self.task, theta, result.correction_samples)
        return TwinSamples(direct, correction, jnp.asarray(result.returns), result.mean_lambda)

    def scores(self, key: Array, theta: Params, count: int, blocks: int | None = None) -> Array:
        """Return ΣU over blocks of steps for every trajectory, for `fluctua.natural`. (B·E, P)

        λ̄ multiplies U and nothing else: runs of the same noise with λ̄ = 0 and with λ̄ = 1 on a
        block differ by ΣU of the block. Takes one run more than blocks.
        """
        theta = check.parameters(theta, numbers=False)
        steps = len(self.task.t) - 1
        block_count = count_blocks(count, ravel_pytree(theta)[0].size, steps, blocks)
        block = np.arange(steps) * block_count // steps

        def gradients(is_one: np.ndarray) -> np.ndarray:
            table = np.append(0.0, is_one.astype(float))
            result = self.run(key, theta, count, table, samples=True)
            leaves = jax.tree.leaves(conversion.collect_samples(self.task, theta, result).gradient)
            return np.concatenate([np.asarray(leaf).reshape(count, -1) for leaf in leaves], axis=1)

        base = gradients(block < 0)
        rows = [base - gradients(block == b) for b in range(block_count)]
        return jnp.asarray(np.concatenate(rows))

    def run(
        self,
        key: Array,
        theta: Params,
        count: int,
        table: np.ndarray | None = None,
        *,
        first: int | None = None,
        prepared: PreparedCall | None = None,
        **options: Any,
    ) -> kernel_run.KernelResult | kernel_twin.TwinResult:
        """Return the kernel's own result, with trajectories if `record_every` is given.

        table: (T+1,), replaces the baseline of this estimator; with a twin, its λ̄.
        first: number of the first trajectory of a part of an ensemble, of one or more.
        prepared: `prepare(key, theta)`, where several parts of an ensemble share it.
        """
        twin = self.baseline if isinstance(self.baseline, kernel_twin.KernelTwin) else None
        check.count(
            count, minimum=1 if first is not None or (twin and options.get("samples")) else 2
        )
        spec, seed, pilot_seed = prepared or self.prepare(key, theta)
        if options.get("samples"):
            options["rates"] = not {"gamma_e", "gamma"}.isdisjoint(theta)
        chosen = dict(**vars(self.options) | options, first_trajectory=first or 0)
        if twin:
            return self._run_twin(twin, spec, seed, theta, count, table, chosen)
        baseline = self._make_baseline(spec, pilot_seed) if table is None else table
        return kernel_run.run(spec, seed, count, baseline=baseline, **chosen)

    def prepare(self, key: Array, theta: Params) -> PreparedCall:
        """Convert key and parameters for the kernels; warn if the time step is unstable."""
        values = check.host_parameters(theta)
        self.watch(self.task, values)
        return PreparedCall(self._make_spec(values), *estimate_seeds(key))

    def pilot_table(self, key: Array, theta: Params) -> np.ndarray | None:
        """Return λ̄ (T+1,) from the pilot of a time-only baseline; None if it has no pilot."""
        if not self.pilot:
            return None
        prepared = self.prepare(key, check.parameters(theta, numbers=False))
        table = self._make_baseline(prepared.spec, prepared.pilot_seed)
        assert isinstance(table, np.ndarray)
        return table

    def _run_twin(
        self,
        twin: kernel_twin.KernelTwin,
        spec: kernel_options.KernelSpec,
        seed: int,
        theta: Params,
        count: int,
        table: np.ndarray | None,
        options: dict[str, Any],
    ) -> kernel_twin.TwinResult:
        model = None
        if twin.theta is not None:
            twin_theta = check.parameters(twin.theta(theta), numbers=False)
            model = self._make_spec(check.host_parameters(twin_theta))
        return kernel_twin.run_twin(
            spec,
            seed,
            count,
            twin=model,
            rank=twin.rank,
            knows_modulation=twin.knows_modulation,
            table=twin.table if table is None else table,
            segment=twin.segment,
            **options,
        )

    def _make_baseline(
        self, spec: kernel_options.KernelSpec, seed: int
    ) -> np.ndarray | kernel_options.Binned | None:
        if not isinstance(self.baseline, str):
            assert not isinstance(self.baseline, kernel_twin.KernelTwin)
            return self.baseline
        if self.baseline == "time":
            o = self.options
            pilot = kernel_options.KernelOptions(
                o.backend, o.dtype, o.threads, scores=False, engine=o.engine
            )
            return kernel_run.run(spec, seed, self.pilot_count, **vars(pilot)).mean_return_to_go
        return None


def next_table(result: kernel_run.KernelResult | kernel_twin.TwinResult) -> np.ndarray:
    """Return the mean return-to-go of a run, with a twin the mean of Λ: the next table. (T+1,)"""
    if isinstance(result, kernel_twin.TwinResult):
        return result.mean_lambda
    return result.mean_return_to_go


class Carried:
    """Estimator whose time-only baseline is the mean return-to-go of the previous call.

    With a twin it is the mean of Λ. The noise of the previous call is independent, so the estimate
    stays unbiased however far θ has moved; an outdated table only costs variance. `table` (T+1,) is
    None before the first call, which runs a pilot instead. `state` and `restore` continue an
    earlier run.

    >>> Carried(task.estimator("cpu", baseline="time"))
    """

    def __init__(self, fused: Fused, table: np.ndarray | None = None):
        self.fused = fused
        self.table = table
        self.pilot = 0

    def __call__(self, key: Array, theta: Params, count: int) -> estimates.Estimate:
        """Estimate ∇θJ from `count` trajectories."""
        self.pilot = self.fused.pilot if self.table is None else 0
        estimate, result = self.fused.with_result(key, theta, count, self.table)
        self.table = next_table(result)
        return estimate

    def scores(self, key: Array, theta: Params, count: int, blocks: int | None = None) -> Array:
        """Return ΣU over blocks of steps for every trajectory. (B·E, P)"""
        return self.fused.scores(key, theta, count, blocks)

    def cost(self, theta: Params) -> int:
        """Return the trajectories per sample."""
        return self.fused.cost(theta)

    @property
    def state(self) -> dict[str, np.ndarray]:
        """The table of the previous call; empty before the first."""
        return {} if self.table is None else {"table": self.table}

    def restore(self, state: Mapping[str, np.ndarray], theta: Params = None) -> None:
        """Restore a `state`. theta: not needed here."""
        self.table = state.get("table")
