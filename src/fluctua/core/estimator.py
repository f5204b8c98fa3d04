"""The physical policy gradient theorem (Eqs. 12 and 13): `gradient` and `ppgt`.

`gradient` takes recorded trajectories. `ppgt` makes an estimator that runs a substrate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Unpack

import jax

from fluctua.core import arrays, baselines, check, recorded, scores, simulate, streamed
from fluctua.core import estimate as estimates
from fluctua.core import objective as objectives
from fluctua.core import process as processes
from fluctua.core import trajectories as records
from fluctua.core.estimation import batches, many, recorded_samples
from fluctua.core.estimation import method as methods
from fluctua.core.protocols import PlainEstimator
from fluctua.core.twin import sweep as twin_sweep
from fluctua.core.twin.correction import TwinSamples


def gradient(
    process: processes.AnyProcess,
    objective: objectives.Objective | objectives.FunctionOfMeans,
    theta: arrays.Params,
    trajectories: records.Trajectories | Iterable[records.Trajectories],
    *,
    start: methods.StartLaw = None,
    score: processes.Score = scores.full_score,
    baseline: baselines.Baseline | baselines.Twin | str | None = None,
    initial_baseline: baselines.Baseline | str | None = None,
    block_bytes: int = recorded.BLOCK_BYTES,
) -> estimates.Estimate:
    """Estimate ∇θJ from trajectories that were recorded; no simulator is needed.

    Args:
        process: drift and noise that the score uses, of the system or a calibrated model of it.
        objective: what is maximised, or a function of means (`function_of_means`).
        theta: the parameters at which the trajectories were taken, any pytree of floats.
        trajectories: one record, or an iterable of them (chunks of a data set larger than memory,
            on one time grid; arrays that load when sliced, such as memory maps and h5py data sets,
            are read block by block). Chunks give the same result as one piece. An iterable is gone
            through more than once, so it must start afresh each
            time: a list, or an object with `__iter__`, not a generator.
        start: None for a start that does not depend on θ.
        score: ∂θ ln p(x'|x) of one step; `local_linear_score` for samples that are far apart.
        baseline: what is taken off the return-to-go, a name ("time" if not given: each half of the
            trajectories takes the mean return-to-go of the other; "none", "mean", "optimal",
            "twin") or a record.
        initial_baseline: for the draw of X₀; `baseline` if not given ("optimal" with a `Twin`).
        block_bytes: how much of the trajectories is held at a time.

    Returns: an `Estimate`.

    >>> estimate = fl.gradient(process, objective, theta, fl.Trajectories(t, recorded.x))
    >>> estimate.count
    200
    >>> parts = [fl.Trajectories(t, recorded.x[:80]), fl.Trajectories(t, recorded.x[80:])]
    >>> chunks = fl.gradient(process, objective, theta, parts)
    >>> bool(jnp.allclose(chunks.gradient["k"], estimate.gradient["k"], rtol=1e-4))
    True
    """
    choices: methods.Choices = {
        "start": start,
        "score": score,
        "baseline": baseline,
        "initial_baseline": initial_baseline,
    }
    # not through `gradient_samples`: a warning of the guard points at the caller, so many frames
    # above
    return estimates.reduce_samples(
        recorded_samples.sample_recorded(
            methods.resolve_method(process, objective, **choices), theta, trajectories, block_bytes
        )
    )


def gradient_samples(
    process: processes.AnyProcess,
    objective: objectives.Objective | objectives.FunctionOfMeans,
    theta: arrays.Params,
    trajectories: records.Trajectories | Iterable[records.Trajectories],
    *,
    block_bytes: int = recorded.BLOCK_BYTES,
    taken_at: arrays.Params | None = None,
    **choices: Unpack[methods.Choices],
) -> estimates.Samples:
    """Estimate the gradient of each single trajectory; their mean is `gradient(...)`.

    Args:
        process: drift and noise that the score uses.
        objective: what is maximised.
        theta: the parameters of the gradient.
        trajectories: one record, or an iterable of them.
        block_bytes: how much of the trajectories is held at a time.
        taken_at: the parameters at which the trajectories were taken, if not `theta`: the guard
            compares residuals at those. Gradients are not weighted by how likely a trajectory is at
            `theta`; `fluctua.reweighted` does that.
        **choices: `start`, `score`, `baseline` and `initial_baseline` as for `gradient`.

    Returns: `Samples`.

    >>> samples = fl.gradient_samples(process, objective, theta, recorded)
    >>> samples.gradient["k"].shape, samples.returns.shape
    ((200,), (200,))
    >>> fl.reduce_samples(samples).count
    200
    """
    return recorded_samples.sample_recorded(
        methods.resolve_method(process, objective, **choices),
        theta,
        trajectories,
        block_bytes,
        taken_at,
    )


def chunked_samples(
    process: processes.AnyProcess,
    objective: objectives.Objective,
    theta: arrays.Params,
    trajectories: records.Trajectories | Iterable[records.Trajectories],
    count: int,
    *,
    start: methods.StartLaw = None,
    score: processes.Score = scores.full_score,
    baseline: baselines.Baseline | str | None = None,
    block_bytes: int = recorded.BLOCK_BYTES,
    progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[records.Trajectories, estimates.Samples]]:
    """Trajectories with their gradients, a few at a time and in order.

    For sums over recordings of any length. The other arguments are those of `gradient`.

    Args:
        process: drift and noise that the score uses.
        objective: what is maximised.
        theta: the parameters at which the trajectories were taken.
        trajectories: one record, or an iterable of them.
        count: trajectories in all.
        start: as for `gradient`.
        score: as for `gradient`.
        baseline: one that does not compare trajectories; "time" reads everything twice, "none"
            once.
        block_bytes: how much is held at a time.
        progress: called with the number of trajectories that were just read.

    Returns: an iterator over (trajectories, `Samples`).
    """
    check.objective(objective, stops=True)
    plan = baselines.resolve_baseline(
        baseline, caller="an estimate chunk by chunk", serves=("none", "time")
    )
    method = methods.resolve_method(process, objective, start, score, plan, None)
    return recorded_samples.sample_pieces(
        method, check.parameters(theta), trajectories, count, block_bytes, progress
    )


def ppgt(
    substrate: records.Substrate,
    objective: objectives.Objective | objectives.FunctionOfMeans,
    *,
    process: processes.AnyProcess | None = None,
    start: methods.StartLaw = None,
    score: processes.Score = scores.full_score,
    baseline: baselines.Baseline | baselines.Twin | str | None = None,
    initial_baseline: baselines.Baseline | str | None = None,
) -> PPGT:
    """Make an estimator of ∇θJ that runs a simulator or an instrument.

    The estimator is a function (key, theta, count) -> `Estimate`.

    A simulator is streamed: the trajectories are never stored, and are replayed when the baseline
    needs the returns first.

    Args:
        substrate: a `simulator`, or any (key, theta, count) -> Trajectories.
        objective: what is maximised, or a function of means (`function_of_means`).
        process: drift and noise that the score uses. That of the simulator if not given; any other
            substrate needs one, and a calibrated model of it will do.
        start: the simulator's own if not given.
        score: ∂θ ln p(x'|x) of one step.
        baseline: what is taken off the return-to-go, a name ("time" if not given: from an
            independent pilot on a simulator, from the other half of the trajectories elsewhere;
            "none", "mean", "optimal", "twin") or a record. A `Twin` is a model that explains most
            of the return.
        initial_baseline: for the draw of X₀; `baseline` if not given ("optimal" with a `Twin`).

    Returns: the estimator, a `PPGT`.

    >>> estimator = fl.ppgt(simulator, objective)
    >>> estimate = estimator(key, theta, 2000)
    >>> print(estimate)
    J = -0.5536 ± 0.0050   [-0.5636, -0.5438]   (2,000 trajectories)
      ∂J/∂k = 0.396 ± 0.013   [0.371, 0.425]
      ∂J/∂s = -0.10 ± 0.12   [-0.36, 0.14]
      ±: standard error; ...
    >>> with_twin = fl.ppgt(simulator, objective, baseline="twin")
    """
    if not callable(substrate):
        raise TypeError(
            "the first argument of `ppgt` is a substrate: a simulator, or any function (key, "
            f"theta, count) -> Trajectories; got {type(substrate).__name__}. Write "
            "ppgt(simulator(process, start, t), objective)."
        )
    if isinstance(substrate, simulate.Simulator):
        start = substrate.recipe.start if start is None else start
        own = substrate.recipe.process
        process = own if process is None else simulate.match_integrator(process, substrate)
    elif process is None:
        raise TypeError(
            "`ppgt` needs `process=`, the drift and noise of the score, for a substrate that is "
            f"not a simulator; got {type(substrate).__name__} without one."
        )
    return PPGT(
        methods.resolve_method(process, objective, start, score, baseline, initial_baseline),
        substrate,
    )


@dataclass(frozen=True)
class PPGT(PlainEstimator):
    """The estimator made by `ppgt`: (key, theta, count) -> Estimate.

    It costs one trajectory per sample; the noise-free paths of a twin are not counted.
    """

    method: methods.Method
    substrate: records.Substrate

    @property
    def pilot(self) -> int:
        """Trajectories that a call runs for its baseline, in addition to those of the samples."""
        if self.method.twin or not isinstance(self.substrate, simulate.Simulator):
            return 0
        return max(plan.pilot for plan in self.method.used_baselines)

    def __call__(self, key: arrays.Array, theta: arrays.Params, count: int) -> estimates.Estimate:
        """Estimate ∇θJ from `count` trajectories."""
        estimate = self._estimate_by_batches(key, theta, count)
        if estimate is None:
            estimate = self._estimate_by_backend(key, theta, count)
        if estimate is not None:
            return estimate
        return estimates.reduce_samples(self.samples(key, theta, count))

    def estimate_many(
        self, key: arrays.Array, thetas: arrays.Params, count: int
    ) -> list[estimates.Estimate]:
        """Estimate ∇θJ at each of K parameters, from `count` trajectories each.

        Estimate k is that of a call with key k and θ k, to rounding. JAX runs all of them in one
        compiled program. Kernels, twins, functions of means, sums over batches and substrates that
        are not simulators take one θ after the other.

        Args:
            key: one, for noise that is common to all θ, or K of them.
            thetas: a stack of θ, leaves (K, ...).
            count: trajectories per θ.

        Returns: K estimates.

        >>> stack = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), theta)
        >>> len(estimator.estimate_many(key, stack, 100))
        2
        """
        check.count(count)
        stack = many.check_stack(key, thetas)
        rows = stack.rows()
        with simulate.plan_calls(simulate.planned_calls() * stack.size):
            call = self._call_rows(rows, count)
            if call is None:
                return [self(*row, count) for row in rows]
        swept = many.sweep_stack(call, stack)
        finite = many.are_finite(swept)
        every = []
        for k, (row_key, theta) in enumerate(rows):
            if not finite[k]:
                every.append(self(row_key, theta, count))  # raises, and names the cause
                continue
            flat = estimates.unflatten(theta, arrays.part(swept.gradients, k))
            returns = arrays.part(swept.returns, k)
            survival = None if swept.survival is None else arrays.part(swept.survival, k)
            samples = estimates.Samples(flat, returns, survival=survival)
            every.append(estimates.reduce_samples(samples))
        return every

    def _call_rows(
        self, rows: list[tuple[arrays.Array, arrays.Params]], count: int
    ) -> streamed.Call | None:
        """The request of each θ, checked, if one program of JAX serves all of them; else None."""
        simulator = self.substrate
        if not isinstance(simulator, simulate.Simulator) or self.method.twin or self.method.means:
            return None
        calls = [self._call(key, theta, count) for key, theta in rows]
        first = calls[0]
        if batches.is_large(first.theta, count) and batches.is_summable(first):
            return None
        if simulator.backend is not None and not simulator.backend.is_too_small(first):
            return None
        for plan in first.plans:
            baselines.check_baseline(plan, count, simulator.t)
        self._check_baselines(first.key, first.theta, count)
        models = {
            streamed.prepare_model(
                self.method.model, simulator, streamed.split_key(call.key).run, call.theta
            )
            for call in calls
        }
        return first._replace(model=models.pop()) if len(models) == 1 else None

    def _estimate_by_backend(
        self, key: arrays.Array, theta: arrays.Params, count: int
    ) -> estimates.Estimate | None:
        """The estimate of a backend that keeps single gradients on its device, or None."""
        simulator = self.substrate
        if not isinstance(simulator, simulate.Simulator) or simulator.backend is None:
            return None
        if self.method.twin or self.method.means:
            return None
        check.key(key)
        check.count(count)
        theta = check.parameters(theta, numbers=False)
        call = self._call(key, theta, count)
        for plan in call.plans:
            baselines.check_baseline(plan, count, simulator.t)
        self._check_baselines(key, theta, count)
        return simulator.backend.estimate(call)

    def _check_baselines(self, key: arrays.Array, theta: arrays.Params, count: int) -> None:
        """Refuse baselines that depend on the return or the score of their own trajectory."""
        simulator = self.substrate
        assert isinstance(simulator, simulate.Simulator)

        def start():
            return simulate.first_state(simulator, streamed.split_key(key)[0], theta)

        methods.check_baselines(self.method, baselines.Setting(theta, simulator.t, count, start))

    def _estimate_by_batches(
        self, key: arrays.Array, theta: arrays.Params, count: int
    ) -> estimates.Estimate | None:
        """The estimate from sums over batches; None where single gradients are needed."""
        if not isinstance(self.substrate, simulate.Simulator) or self.method.twin:
            return None
        check.key(key)
        check.count(count)
        if self.method.means or not batches.is_large(theta, count):
            return None
        theta = check.parameters(theta, numbers=False)
        call = self._call(key, theta, count)
        if not batches.is_summable(call):
            return None
        swept = batches.sum_batches(call)
        if swept is None:  # single trajectories show which is not finite, and why
            return None
        size = batches.batch_size(count)
        moments = swept.compare(size)
        return estimates.reduce_batches(theta, moments, -(-count // size), size, swept.returns)

    def samples(
        self,
        key: arrays.Array,
        theta: arrays.Params,
        count: int,
        *,
        first: int | None = None,
        table: arrays.Array | None = None,
    ) -> estimates.Samples:
        """The gradients of the single trajectories.

        first: number of the first one, of a simulator; 0 if not given.
        table: λ̄ of `pilot_table`, if it is known already.
        """
        if self.method.means and not isinstance(self.substrate, simulate.Simulator):
            check.count(count)
            theta = check.parameters(theta)
            # the parts are of the same trajectories: measured once
            k_run, _ = streamed.split_key(key)
            measured = self.substrate(k_run, theta, count)
            return recorded_samples.sample_recorded(
                self.method,
                theta,
                measured,
                recorded.BLOCK_BYTES,
                examined=is_examined(self.substrate),
            )
        return methods.combine_parts(
            self.method,
            lambda method: PPGT(method, self.substrate)._samples(key, theta, count, first, table),
        )

    def pilot_table(self, key: arrays.Array, theta: arrays.Params) -> arrays.Array | None:
        """λ̄ (T+1,) from the pilot of a time-only baseline; None where no pilot is run."""
        if (
            not self.pilot
            or self.method.means
            or not isinstance(self.substrate, simulate.Simulator)
        ):
            return None
        plans = self.method.used_baselines
        return streamed.pilot_table(
            self.method.model, plans, self.substrate, key, check.parameters(theta)
        )

    def _samples(
        self,
        key: arrays.Array,
        theta: arrays.Params,
        count: int,
        first: int | None = None,
        table: arrays.Array | None = None,
    ) -> estimates.Samples:
        check.count(count)
        theta = check.parameters(theta, numbers=not isinstance(self.substrate, simulate.Simulator))
        if not isinstance(self.substrate, simulate.Simulator):
            k_run, _ = streamed.split_key(key)
            measured = self.substrate(k_run, theta, count)
            return recorded_samples.sample_recorded(
                self.method,
                theta,
                measured,
                recorded.BLOCK_BYTES,
                examined=is_examined(self.substrate),
            )
        if self.method.twin:
            return methods.sum_parts(self.split(key, theta, count, first=first or 0))
        self._check_baselines(key, theta, count)
        call = self._call(key, theta, count)._replace(first=first)
        if table is not None:
            call = call._replace(tables=call.tables.fill_missing(table))
        flat = streamed.streamed_samples(call)
        return recorded_samples.shape_samples(theta, flat)

    def _call(self, key: arrays.Array, theta: arrays.Params, count: int) -> streamed.Call:
        """The request to the simulator."""
        assert isinstance(self.substrate, simulate.Simulator)
        plans = self.method.used_baselines
        tables = self.method.tables
        return streamed.Call(self.method.model, plans, tables, self.substrate, key, theta, count)

    def split(
        self,
        key: arrays.Array,
        theta: arrays.Params,
        count: int,
        table: arrays.Array | None = None,
        *,
        first: int = 0,
    ) -> TwinSamples:
        """The gradients in two parts, direct and correction, of an estimator with a `Twin`.

        table: λ̄ as a function of time (T+1,), the `mean_lambda` of other trajectories, in place of
        `Twin.baseline`.
        first: number of the first trajectory, of a simulator.
        """
        if self.method.twin is None:
            raise ValueError(
                "`split` needs a twin: make the estimator with ppgt(..., baseline=Twin())."
            )
        check.objective(self.method.objective)
        check.count(count)
        theta = check.parameters(theta)
        k_run, _ = streamed.split_key(key)
        if not isinstance(self.substrate, simulate.Simulator):
            measured = self.substrate(k_run, theta, count)
            return self.recorded(theta, measured, table, examined=is_examined(self.substrate))
        model, numbers, batch = methods.prepare_twin(
            self.method, theta, table, count, self.substrate.t
        )

        simulator = self.substrate

        def start():
            return simulate.first_state(simulator, k_run, theta)

        methods.check_baselines(
            self.method, baselines.Setting(theta, self.substrate.t, count, start)
        )
        return methods.shape_parts(
            theta,
            twin_sweep.streamed_parts(model, numbers, batch, self.substrate, k_run, count, first),
        )

    def source(self, theta: arrays.Params) -> str:
        """The program that a compiled backend generates, with the names of the parameters."""
        substrate = self.substrate
        backend = substrate.backend if isinstance(substrate, simulate.Simulator) else None
        if not isinstance(substrate, simulate.Simulator) or backend is None:
            raise ValueError(
                'nothing is generated for this substrate: use simulator(..., backend="auto") or '
                '"cpu".'
            )
        theta = check.parameters(theta)
        key = jax.random.key(0)
        model = streamed.prepare_model(self.method.model, substrate, key, theta)
        if self.method.twin:
            twin, numbers, batch = methods.prepare_twin(self.method, theta, None, 2, substrate.t)
            twin = twin._replace(model=twin.model._replace(process=model.process))
            return backend.source(twin_sweep.TwinCall(twin, numbers, batch, substrate, key, 2))
        return backend.source(self._call(key, theta, 1)._replace(model=model))

    def recorded(
        self,
        theta: arrays.Params,
        trajectories: records.Trajectories,
        table: arrays.Array | None = None,
        *,
        examined: bool = False,
    ) -> TwinSamples:
        """The two parts of measured trajectories, of an estimator with a `Twin`.

        table: λ̄ as in `split`. examined: whether the residual guard has already tested the
            trajectories.
        """
        if trajectories.group is not None:
            several = len(set(map(int, trajectories.group)))
            raise ValueError(
                f"trajectories of {several} devices have errors between devices, which the two "
                "parts of a twin do not keep apart: call the estimator itself."
            )
        return recorded_samples.split_recorded(
            self.method, theta, trajectories, table, recorded.BLOCK_BYTES, examined=examined
        )


def mean_return_to_go(
    objective: objectives.Objective | objectives.Rewards,
    theta: arrays.Params,
    trajectories: records.Trajectories,
) -> arrays.Array:
    """Mean reward still to come at each time, E[λ̂ₙ]: a table for `baselines.time_only`.

    The trajectories must not be those whose gradient is estimated with it.

    With a `stop`, the mean at tₙ is over the trajectories that still ran one step before.

    Args:
        objective: what is maximised.
        theta: θ, a pytree of floats.
        trajectories: recorded or simulated at θ.

    Returns: (T+1,).

    >>> values = fl.mean_return_to_go(objective, theta, recorded)
    >>> values.shape
    (101,)
    >>> baseline = fl.baselines.time_only(values)
    >>> estimate = fl.ppgt(simulator, objective, baseline=baseline)(jax.random.key(1), theta, 50)
    """
    rewards = check.objective(objective, stops=True)
    return recorded_samples.average_returns(rewards, theta, trajectories)


def is_examined(substrate: records.Substrate) -> bool:
    """Whether an instrument compares residuals with its calibration itself (`examines`)."""
    return bool(getattr(substrate, "examines", False))
