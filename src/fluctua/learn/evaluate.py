"""Evaluate J of given parameters on fresh trajectories, also on a finer time grid.

A training can exploit discretisation errors. J at half the time step, with everything else
unchanged, shows it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import check, simulate, stopping, streamed
from fluctua.core import objective as objectives
from fluctua.core.arrays import Array, Params
from fluctua.core.estimate import MINIMUM_OF_MEANS, value_samples
from fluctua.core.estimator import PPGT
from fluctua.core.integrators import match_quadrature
from fluctua.core.process import StepLaw
from fluctua.core.protocols import Estimator
from fluctua.core.recorded import evaluate_returns
from fluctua.core.text import with_error
from fluctua.core.trajectories import Substrate

FRESH = 0x4A
"""Sets the noise of an evaluation apart from that of a training with the same seed."""


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
            f"J = {with_error(self.J, self.J_stderr)}   {self.trajectories:,} trajectories, Δt = "
            f"{self.dt:g}"
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
            steps.
        theta: parameters, any pytree of floats.
        count: number of trajectories.
        seed: of the noise, which differs from that of a training with this seed.
        refine: number of steps into which each step is split; 2 evaluates at Δt/2.
        objective: what is rewarded; by default that of the estimator.

    Returns: an `Evaluation`.

    >>> evaluate(estimator, theta), evaluate(estimator, theta, refine=2)
    """
    check.count(count, 2)
    if not isinstance(refine, int) or isinstance(refine, bool) or refine < 1:
        raise ValueError(f"`refine` must be a whole number, at least 1; got {refine!r}.")
    substrate, own = split_system(system)
    if objective is None and own is None:
        raise ValueError(
            "a simulator alone does not know what is rewarded: give `objective=`, or the estimator."
        )
    rewards = check.objective_or_means(objective if objective is not None else own)
    if isinstance(substrate, simulate.Simulator):
        rewards = match_quadrature(rewards, substrate.recipe.process)
        rewards = stopping.bind_process(rewards, substrate.recipe.process)
    theta = check.parameters(theta)
    finer = refine_grid(substrate, refine)
    key = jax.random.fold_in(jax.random.key(seed), FRESH)
    if isinstance(finer, simulate.Simulator):
        t = finer.t

        def compute_returns(part):
            run = streamed.Run(key, theta, finer.times, finer.x0)
            return streamed.collect_returns(part, finer.recipe, count, run)
    else:
        trajectories = finer(key, theta, count)
        t = trajectories.t

        def compute_returns(part):
            return evaluate_returns(part, theta, trajectories)

    if isinstance(rewards, objectives.FunctionOfMeans):
        check.count(count, MINIMUM_OF_MEANS)
        returns = value_samples(
            rewards.function, jnp.stack([compute_returns(part) for part in rewards.parts], axis=1)
        )
    else:
        returns = compute_returns(rewards)
    values = np.asarray(returns, np.float64)
    if not np.isfinite(values).all():
        raise FloatingPointError(
            f"{int((~np.isfinite(values)).sum())} of {count} returns are not finite at steps of "
            f"{_mean_step(t):g}."
        )
    spread = float(values.std(ddof=1))
    return Evaluation(float(values.mean()), spread / np.sqrt(count), spread, count, _mean_step(t))


def split_system(system: Any) -> tuple[Any, Any]:
    """The substrate and the objective of an estimator; for a substrate, itself and None."""
    inner = system
    # `ShrunkCorrection`, `Natural` and `Distributed` are of another one
    while hasattr(inner, "estimator"):
        inner = inner.estimator
    if isinstance(inner, PPGT):
        return inner.substrate, inner.method.objective
    return inner, None


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
    """The same substrate with every step split into `factor` equal ones."""
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


def _mean_step(t: Array) -> float:
    return float((np.asarray(t[-1], float) - np.asarray(t[0], float)) / (len(t) - 1))
