"""Evaluate J of given parameters on fresh trajectories, also on a finer time grid.

A training can exploit discretisation errors. J at half the time step, with everything else
unchanged, shows it. `evaluate_many` evaluates many parameters at once, without gradients: for
scans, finite differences and optimisers that need values alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import check, simulate, streamed
from fluctua.core import estimate as estimates
from fluctua.core import objective as objectives
from fluctua.core.arrays import Array, Params, jit
from fluctua.core.estimation import many
from fluctua.core.estimation import method as methods
from fluctua.core.estimator import PPGT
from fluctua.core.process import StepLaw
from fluctua.core.protocols import Estimator
from fluctua.core.recorded import evaluate_returns
from fluctua.core.text import with_error
from fluctua.core.trajectories import Substrate
from fluctua.core.words import format_count

FRESH = 2**31
"""Sets the noise of an evaluation apart from that of a training with the same seed, whose iteration
l has the key fold_in(key(seed), l): no training is as long."""


class Evaluation(NamedTuple):
    """J of given parameters, made by `evaluate`.

    J, J_stderr: value and standard error.
    spread: standard deviation of single returns.
    trajectories: how many were simulated or measured.
    dt: mean time step.
    """

    J: float
    J_stderr: float
    spread: float
    trajectories: int
    dt: float

    def __repr__(self) -> str:
        return (
            f"J = {with_error(self.J, self.J_stderr)}   "
            f"{format_count(self.trajectories, 'trajectory')}, Δt = {self.dt:g}"
        )


def evaluate(
    system: Estimator | Substrate,
    theta: Params,
    *,
    count: int = 1000,
    seed: int = 0,
    refine: int = 1,
    objective: objectives.Objective | objectives.FunctionOfMeans | None = None,
) -> Evaluation:
    """Evaluate J = E[g_T(X_T) + ∫ g dt] (Eq. 2) at θ from fresh trajectories.

    Args:
        system: an estimator made by `ppgt`, or a `simulator`; other substrates if `refine` is 1, or
            if they have a method `refined(factor)` that returns the same substrate with smaller
            steps. A `SelfCalibrating` measures on its device.
        theta: parameters, any pytree of floats.
        count: number of trajectories.
        seed: of the noise, which differs from that of a training with this seed.
        refine: number of steps into which each step is split; 2 evaluates at Δt/2.
        objective: what is rewarded; by default that of the estimator.

    Returns: an `Evaluation`.

    >>> fl.evaluate(estimator, theta, count=200)
    J = -0.542 ± 0.016   200 trajectories, Δt = 0.01
    >>> finer = fl.evaluate(estimator, theta, count=200, refine=2)  # half the time step
    >>> round(finer.dt, 6)
    0.005
    """
    check.count(count, 2)
    inner, _ = split_system(system)
    if hasattr(inner, "measure_returns") and objective is None and refine == 1:
        return _evaluate_device(inner, fresh_key(seed), check.parameters(theta), count)
    problem = _prepare_problem(system, objective, refine)
    collected = problem.collect(fresh_key(seed), check.parameters(theta), count)
    dt = _compute_mean_step(collected.t)
    values = problem.combine(collected.parts, f"steps of {dt:g}")
    mean, error = _average(values, collected.group)
    return Evaluation(mean, error, float(values.std(ddof=1)), len(values), dt)


def _evaluate_device(estimator: Any, key: Array, theta: Params, count: int) -> Evaluation:
    """J of an estimator with a device of its own, such as `SelfCalibrating`."""
    estimator.check_doubt()
    k_device, k_model = jax.random.split(key)
    measured = estimator.device(k_device, theta, count)
    returns, conversion = estimator.measure_returns(k_model, theta, measured)
    mean, error = _average(returns, measured.group)
    spread = float(returns.std(ddof=1))
    total = float(np.hypot(error, conversion))
    return Evaluation(mean, total, spread, len(returns), _compute_mean_step(measured.t))


def _average(values: np.ndarray, group: Array | None) -> tuple[float, float]:
    """Mean and standard error of values (E,); every device counts the same."""
    if group is not None:
        grouped = estimates.reduce_samples(estimates.Samples(values, values, group))
        return float(grouped.value), float(grouped.value_stderr)
    error = estimates.sample_error(values) if len(values) > 1 else np.nan
    return float(values.mean()), float(error)


class Evaluations(NamedTuple):
    """J of each of K parameters, made by `evaluate_many`.

    J, J_stderr: values and standard errors (K,).
    returns: of single trajectories (K, E); of a function of means, samples whose mean is J. With
        common noise, `returns[a] - returns[b]` has the error of the difference of two J.
    trajectories: of all θ together.
    dt: mean time step.
    """

    J: np.ndarray
    J_stderr: np.ndarray
    returns: np.ndarray
    trajectories: int
    dt: float

    def __repr__(self) -> str:
        size, count = self.returns.shape
        each = format_count(count, "trajectory")
        head = f"{format_count(size, 'parameter')}, {each} each, Δt = {self.dt:g}"
        rows = [
            f"  {k}: J = {with_error(float(self.J[k]), float(self.J_stderr[k]))}"
            for k in range(min(size, MAX_SHOWN))
        ]
        rest = [f"  … {size - MAX_SHOWN:,} more"] if size > MAX_SHOWN else []
        return "\n".join([head, *rows, *rest])


def evaluate_many(
    system: Estimator | Substrate,
    thetas: Params,
    *,
    count: int = 1000,
    seed: int | Sequence[int] | Array = 0,
    refine: int = 1,
    objective: objectives.Objective | objectives.FunctionOfMeans | None = None,
) -> Evaluations:
    """Evaluate J (Eq. 2) at each of K parameters; JAX runs all of them in one compiled program.

    No gradient is computed. Row k is what `evaluate` finds with θ k and its seed, to rounding.

    Args:
        system: an estimator or a substrate, as for `evaluate`. Kernels, and substrates that are not
            simulators, take one θ after the other.
        thetas: a stack of θ: the pytree of θ with one more axis in front of every leaf, (K, ...).
        count: trajectories per θ; 1 gives no error.
        seed: one, for noise that is common to all θ, or K of them for independent noise. Common
            noise makes differences between θ more precise, and is drawn once.
        refine: as for `evaluate`.
        objective: as for `evaluate`.

    Returns: `Evaluations`.

    >>> stack = jax.tree.map(lambda leaf: leaf + jnp.linspace(-0.1, 0.1, 3), theta)
    >>> several = fl.evaluate_many(estimator, stack, count=200)  # common noise
    >>> several.J.shape, several.trajectories
    ((3,), 600)
    >>> difference = several.returns[2] - several.returns[0]
    >>> bool(difference.std() < several.returns[0].std())
    True
    """
    check.count(count)
    problem = _prepare_problem(system, objective, refine)
    seeds = np.asarray(seed)
    keys = fresh_key(seed) if seeds.ndim == 0 else _fresh_keys(seeds)
    stack = many.check_stack(keys, thetas)
    collected = problem.collect_many(stack, count)
    dt = _compute_mean_step(collected.t)
    parts = [np.asarray(part) for part in collected.parts]
    rows = [
        problem.combine([part[k] for part in parts], f"thetas[{k}] with steps of {dt:g}")
        for k in range(stack.size)
    ]
    J, errors = np.transpose([_average(row, collected.group) for row in rows])
    returns = np.stack(rows)
    return Evaluations(J, errors, returns, returns.size, dt)


MAX_SHOWN = 12
"""Parameters of `Evaluations` that are printed."""


def fresh_key(seed: Any) -> Array:
    """The key of an evaluation."""
    return jax.random.fold_in(jax.random.key(seed), FRESH)


def _fresh_keys(seeds: np.ndarray) -> Array:
    """The key of every seed. Shape (K,)."""
    whole = np.issubdtype(seeds.dtype, np.integer)
    if seeds.ndim != 1 or not whole or seeds.min(initial=0) < 0 or seeds.max(initial=0) >= 2**32:
        raise ValueError(
            "`seed` must be a whole number, or one per θ, each from 0 to 2³² − 1; got "
            f"{seeds.dtype} {seeds.shape}: {seeds.ravel()[:5].tolist()}."
        )
    return _make_keys(seeds.astype(np.uint32))


_make_keys = jit(jax.vmap(fresh_key))


class _Returns(NamedTuple):
    """Returns of each part of an objective, (E,) or (K, E), and the time grid (T+1,).

    group: device of each trajectory (E,), where there are several.
    """

    parts: list[Array]
    t: Array
    group: Array | None = None


class _Problem(NamedTuple):
    """A substrate and what is rewarded on it, checked.

    function: F of a function of means, of the parts of the rewards; else None.
    """

    substrate: Any
    parts: tuple[objectives.Rewards, ...]
    function: Any = None

    def collect(self, key: Array, theta: Params, count: int) -> _Returns:
        """Returns of one θ, (E,) of each part."""
        substrate = self.substrate
        if not isinstance(substrate, simulate.Simulator):
            trajectories = substrate(key, theta, count)
            parts = [evaluate_returns(part, theta, trajectories) for part in self.parts]
            return _Returns(parts, trajectories.t, trajectories.group)
        run = streamed.Run(key, theta, substrate.times, substrate.x0)
        recipe = substrate.recipe
        parts = [streamed.collect_returns(part, recipe, count, run) for part in self.parts]
        return _Returns(parts, substrate.t)

    def collect_many(self, stack: many.ThetaStack, count: int) -> _Returns:
        """Returns of K θ, (K, E) of each part."""
        substrate = self.substrate
        if not isinstance(substrate, simulate.Simulator):
            rows = [self.collect(*row, count) for row in stack.rows()]
            columns = zip(*(row.parts for row in rows), strict=True)
            stacked = [jnp.stack(column) for column in columns]
            return _Returns(stacked, rows[0].t, rows[0].group)
        ((key, theta),) = stack.rows(1)
        first, context = simulate.first_state(substrate, key, theta)
        one = check.take_first((first, substrate.t, context))
        run = streamed.Run(stack.keys, stack.thetas, substrate.times, substrate.x0)
        names = ("theta",) if stack.common else ("theta", "key")
        parts = []
        for part in self.parts:
            check.model(substrate.recipe.process, part, theta, *one)
            values = None
            if substrate.backend is not None:
                values = _run_kernels(substrate, part, stack, count)
            if values is None:
                values = many.collect_returns(part, substrate.recipe, count, names, run)
            parts.append(values)
        return _Returns(parts, substrate.t)

    def combine(self, parts: list[Array], place: str) -> np.ndarray:
        """One number per trajectory of one θ, whose mean is J. Shape (E,).

        place: parameters and steps, for the message if a number is not finite.
        """
        returns = parts[0]
        if self.function is not None:
            check.count(len(returns), estimates.MINIMUM_OF_MEANS)
            returns = estimates.value_samples(self.function, jnp.stack(parts, axis=1))
        values = np.asarray(returns, np.float64)
        if not np.isfinite(values).all():
            raise FloatingPointError(
                f"{int((~np.isfinite(values)).sum())} of {len(values)} returns are not finite at "
                f"{place}."
            )
        return values


def _run_kernels(
    substrate: simulate.Simulator, rewards: Any, stack: many.ThetaStack, count: int
) -> np.ndarray | None:
    """Returns (K, E) by a kernel, one θ after the other; None where JAX is to run them."""
    assert substrate.backend is not None
    recipe = substrate.recipe
    method = methods.resolve_method(recipe.process, rewards, recipe.start, baseline="none")
    rows: list[np.ndarray] = []
    with simulate.plan_calls(simulate.planned_calls() * stack.size):
        for key, theta in stack.rows():
            try:
                model = streamed.prepare_model(method.model, substrate, key, theta)
            except (ValueError, FloatingPointError):  # no score, which JAX does not need
                return None
            plans = method.used_baselines
            call = streamed.Call(model, plans, method.tables, substrate, key, theta, count)
            values = substrate.backend.returns(call)
            if values is None:
                return None
            rows.append(values)
    return np.stack(rows)


def _prepare_problem(system: Any, objective: Any, refine: int) -> _Problem:
    """The substrate, with finer steps, and the rewards of an evaluation."""
    if not isinstance(refine, int) or isinstance(refine, bool) or refine < 1:
        raise ValueError(f"`refine` must be a whole number, at least 1; got {refine!r}.")
    substrate, own = split_system(system)
    if hasattr(substrate, "restore"):  # its call is an `Estimate`, and may learn from the device
        raise TypeError(
            f"a {type(substrate).__name__} is an estimator, and J is the mean return of a "
            "substrate: give the simulator and `objective=`, for a task of resonators "
            "evaluate(task.simulator(), theta, objective=task.objective). Of a `SelfCalibrating`, "
            "`evaluate` measures J on its device, of one θ, with the steps and rewards it has."
        )
    if objective is None and own is None:
        raise ValueError("a simulator has no reward: give `objective=`, or the estimator.")
    rewards = check.objective_or_means(objective if objective is not None else own)
    process = _find_process(system)
    if process is not None:
        rewards = methods.match_process(rewards, process)
    finer = refine_grid(substrate, refine)
    if isinstance(rewards, objectives.FunctionOfMeans):
        return _Problem(finer, rewards.parts, rewards.function)
    return _Problem(finer, (rewards,))


def split_system(system: Any) -> tuple[Any, Any]:
    """The substrate and the objective of an estimator; for a substrate, itself and None."""
    inner = _unwrap(system)
    if isinstance(inner, PPGT):
        return inner.substrate, inner.method.objective
    return inner, None


def _unwrap(system: Any) -> Any:
    """The innermost estimator: `ShrunkCorrection`, `Natural`, `Distributed` are of another one."""
    while hasattr(system, "estimator"):
        system = system.estimator
    return system


def _find_process(system: Any) -> Any:
    """The process whose steps collect the rewards: the simulator's, or that of the score."""
    inner = _unwrap(system)
    substrate = inner.substrate if isinstance(inner, PPGT) else inner
    if isinstance(substrate, simulate.Simulator):
        return substrate.recipe.process
    return inner.method.model.process if isinstance(inner, PPGT) else None


def can_refine(system: Any) -> bool:
    """Whether J can be evaluated with smaller steps."""
    substrate, objective = split_system(system)
    return objective is not None and (
        _has_divisible_steps(substrate) or hasattr(substrate, "refined")
    )


def _has_divisible_steps(substrate: Any) -> bool:
    """Whether a substrate is a simulator of a process in continuous time."""
    return isinstance(substrate, simulate.Simulator) and not isinstance(
        substrate.recipe.process, StepLaw
    )


def refine_grid(substrate: Any, factor: int) -> Any:
    """Split every step of a substrate into `factor` equal ones."""
    if factor == 1:
        return substrate
    if _has_divisible_steps(substrate):
        t = np.asarray(substrate.t, np.float64)
        parts = np.linspace(t[:-1], t[1:], factor, endpoint=False, axis=1).ravel()
        return substrate._replace(times=check.grid(np.append(parts, t[-1])))
    if hasattr(substrate, "refined"):
        return substrate.refined(factor)
    name = type(
        substrate.recipe.process if isinstance(substrate, simulate.Simulator) else substrate
    ).__name__
    raise ValueError(
        f"the steps of a {name} cannot be split: `refine` is for a `simulator` in continuous time, "
        "or for a substrate with a method `refined(factor)`."
    )


def _compute_mean_step(t: Array) -> float:
    return float((np.asarray(t[-1], float) - np.asarray(t[0], float)) / (len(t) - 1))
