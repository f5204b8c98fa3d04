"""The theorem with all its choices made: process, reward, score, baselines, twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypedDict

import jax
import jax.numpy as jnp

from fluctua.core import arrays, baselines, check, draws, scores, stopping
from fluctua.core import estimate as estimates
from fluctua.core import model as terms
from fluctua.core import process as processes
from fluctua.core.baselines import Baseline, Twin
from fluctua.core.integrators import match_quadrature
from fluctua.core.objective import FunctionOfMeans, Objective, Rewards
from fluctua.core.simulate import refuse_start
from fluctua.core.twin import correction, own_twins
from fluctua.core.twin.sweep import Parts

StartLaw = draws.Density | draws.Reparameterised | None
"""A start that depends on θ by its density or by its place; None for one that does not."""


class Choices(TypedDict, total=False):
    """Options that the entry points of the theorem share; `gradient` explains them."""

    start: StartLaw
    score: processes.Score
    baseline: Baseline | Twin | str | None
    initial_baseline: Baseline | str | None


class Method(NamedTuple):
    """The theorem with all its choices made.

    model: process, rewards, score and baselines as functions.
    baseline: λ̄ of the return-to-go, or with a twin that of Λ.
    initial_baseline: λ̄ of the draw of X₀.
    twin: checked, with a process of its own; None without one.
    means: the objective, where it is a function of means; that of `model` is then its first part.
    """

    model: terms.EstimatorModel
    baseline: Baseline
    initial_baseline: Baseline
    twin: Twin | None
    means: FunctionOfMeans | None = None

    @property
    def objective(self) -> Rewards | FunctionOfMeans:
        """Objective that is maximised."""
        return self.means or self.model.objective

    @property
    def used_baselines(self) -> tuple[Baseline, ...]:
        """The baselines that are used: the initial one only if the start has a density."""
        if terms.has_random_start(self.model):
            return (self.baseline, self.initial_baseline)
        return (self.baseline,)

    @property
    def tables(self) -> terms.Tables:
        """The tables of these baselines, as far as they are known."""
        used = self.used_baselines
        return terms.Tables(used[0].values, used[-1].values)

    def fill_tables(self, pilot: arrays.Array | None) -> terms.Tables:
        """The tables of both baselines, with that of a pilot for those that need one."""
        both = (self.baseline, self.initial_baseline)
        return terms.Tables(*(pilot if plan.pilot else plan.values for plan in both))

    def use_halves(self) -> terms.EstimatorModel:
        """The model whose baselines come from the other half of trajectories, not from a pilot."""

        def choose(plan: Baseline) -> Callable[[baselines.Inputs], arrays.Array]:
            return baselines.use_other_half if plan.pilot else plan.function

        return self.model._replace(
            baseline=choose(self.baseline), initial_baseline=choose(self.initial_baseline)
        )

    @property
    def stops(self) -> bool:
        """Whether trajectories may stop before the horizon."""
        parts = self.means.parts if self.means else (self.model.objective,)
        return any(part.stop is not None for part in parts)

    @property
    def needs_pilot(self) -> bool:
        """Whether a mean return-to-go of other trajectories is subtracted."""
        return any(plan.pilot for plan in self.used_baselines)


def resolve_method(
    process: processes.AnyProcess,
    objective: Objective | FunctionOfMeans,
    start: StartLaw = None,
    score: processes.Score = scores.full_score,
    baseline: Baseline | Twin | str | None = None,
    initial_baseline: Baseline | str | None = None,
) -> Method:
    """The method of these choices, checked; `gradient` explains them."""
    refuse_start(process, start)
    moving = None if start is None else draws.check_start(start)[0]
    process = check.process(process)
    checked = match_process(check.objective_or_means(objective), process)
    means = checked if isinstance(checked, FunctionOfMeans) else None
    rewards = checked.parts[0] if isinstance(checked, FunctionOfMeans) else checked
    score = scores.select_score(process, score)
    draws.check_score(score, moving)
    plan = baselines.resolve_baseline(baseline, caller="an estimator of any process")
    baselines.refuse_kernel_options(plan, "an estimator of any process")
    initial: Baseline | Twin
    if isinstance(plan, Twin):
        twin = own_twins.check_twin(plan, score, process)
        step = twin.baseline
        initial = correction.check_initial_baseline(
            "optimal" if initial_baseline is None else initial_baseline
        )
    else:
        twin = None
        step = plan
        initial = plan
        if initial_baseline is not None:
            initial = baselines.resolve_baseline(
                initial_baseline,
                caller="the draw of X₀",
                serves=("none", "time", "mean", "optimal", "own"),
            )
    assert isinstance(step, Baseline)
    assert isinstance(initial, Baseline)
    _check_stop(means.parts if means else (rewards,), moving, twin)
    return Method(
        terms.EstimatorModel(process, rewards, score, moving, step.function, initial.function),
        step,
        initial,
        twin,
        means,
    )


def match_process(
    rewards: Rewards | FunctionOfMeans, process: processes.AnyProcess
) -> Rewards | FunctionOfMeans:
    """The rewards as steps of the process collect them: its quadrature, its bridge of a stop."""
    return stopping.bind_process(match_quadrature(rewards, process), process)


def _check_stop(parts: tuple[Rewards, ...], start: StartLaw, twin: Twin | None) -> None:
    """Refuse a stop with a twin or a reparameterised start."""
    if all(part.stop is None for part in parts):
        return
    if twin is not None:
        raise ValueError(
            "a twin does not support `stop`: it predicts the return of a path that goes on. "
            'Use another baseline: "time", "mean", "optimal" or "binned".'
        )
    if isinstance(start, draws.Reparameterised):
        raise ValueError(
            "a `Reparameterised` start displaces the path, and the time of its `stop` with it, "
            "which no derivative shows. Give the start a `Density`, or keep it fixed."
        )


def combine_parts(
    method: Method, samples: Callable[[Method], estimates.Samples]
) -> estimates.Samples:
    """Samples of a method, from those of its parts if the objective is a function of means."""
    if method.means is None:
        return samples(method)

    def alone(part):
        return samples(method._replace(model=method.model._replace(objective=part), means=None))

    return estimates.combine_samples(
        method.means.function, [alone(part) for part in method.means.parts]
    )


def check_baselines(method: Method, setting: baselines.Setting) -> None:
    """Refuse a baseline that depends on the return or the score of its own trajectory."""
    baselines.check_admissible(method.baseline, setting)
    if terms.has_random_start(method.model):
        baselines.check_admissible(method.initial_baseline, setting, of_start=True)


class PreparedTwin(NamedTuple):
    """A twin that is ready for its sweep.

    model: code. numbers: parameters. batch: trajectories that go together.
    """

    model: correction.TwinModel
    numbers: correction.Numbers
    batch: int


def prepare_twin(
    method: Method, theta: arrays.Params, table: arrays.Array | None, count: int, t: arrays.Array
) -> PreparedTwin:
    """The twin of a method at θ, for `count` trajectories on the grid t.

    table: λ̄ as a function of time, in place of the twin's own baseline.
    """
    twin = method.twin
    assert twin is not None
    assert twin.process is not None  # `check_twin` fills it in
    baseline = method.baseline if table is None else baselines.time_only(table)
    correction.check_batches(
        baseline, method.initial_baseline, method.model.start, count, twin.batch, t
    )
    model = correction.TwinModel(
        method.model._replace(baseline=baseline.function), twin.process, twin.order
    )
    numbers = correction.Numbers(theta, correction.twin_parameters(twin, theta), baseline.values)
    return PreparedTwin(model, numbers, twin.batch)


def shape_parts(theta: arrays.Params, parts: Parts) -> correction.TwinSamples:
    """The parts of the gradients with the structure of θ."""
    return correction.TwinSamples(
        estimates.unflatten(theta, parts.direct),
        estimates.unflatten(theta, parts.correction),
        parts.returns,
        parts.mean_lambda,
    )


def sum_parts(parts: correction.TwinSamples) -> estimates.Samples:
    """The gradients of single trajectories: direct + correction."""
    return estimates.Samples(jax.tree.map(jnp.add, parts.direct, parts.correction), parts.returns)
