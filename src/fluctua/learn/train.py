"""Training: a generator of records. Whoever iterates decides about progress, files and stopping."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fluctua.core import check
from fluctua.core.protocols import as_estimator
from fluctua.core.simulate import plan_calls
from fluctua.core.types import Array, Estimate, Estimates, Estimator, Params


class Iterate(NamedTuple):
    """Where a training stands: θ and the optimiser's state before iteration `iteration`;
    trajectories spent so far.
    """

    iteration: int
    theta: Params
    optimiser_state: Any
    trajectories: int = 0


class Record(NamedTuple):
    """One iteration, and all that is needed to go on from it."""

    iteration: int
    theta: Params  # where the estimate was made
    estimate: Estimate
    trajectories: int  # spent so far, this iteration included
    seconds: float  # of this iteration
    next_theta: Params
    optimiser_state: Any

    @property
    def after(self) -> Iterate:
        """Where the training stands after this iteration."""
        return Iterate(self.iteration + 1, self.next_theta, self.optimiser_state, self.trajectories)


def train(
    key: Array,
    theta: Params,
    estimator: Estimator | Estimates,
    optimiser: optax.GradientTransformation,
    *,
    count: int | Callable[[int], int],
    iterations: int | None = None,
    project: Callable[[Params], Params] | None = None,
    resume: Record | Iterate | None = None,
    planned: int | None = None,
) -> Iterator[Record]:
    """Ascend the expected return: θ ← Π[θ + update(∇θJ)] with any optax optimiser and any
    estimator.

    Iteration l uses fold_in(key, l), so a training resumed from any of its records repeats itself
    exactly. To have it in a folder that survives a kill: `run`.

    Args:
        key: of the noise.
        theta: parameters to start from, any pytree of floats.
        estimator: (key, theta, count) -> `Estimate`.
        optimiser: of optax, or `rms_ascent`, or `kl_ascent`; one that asks for extra arguments gets
            `second_moment`, `value` and `natural`.
        count: trajectories an iteration, or a function of the iteration.
        iterations: how many; None goes on until the caller stops iterating.
        project: Π, e.g. `box(0, 2)`.
        resume: the record to go on from.
        planned: iterations whose work decides whether a simulator with backend="auto" runs a
            kernel; `iterations` if not given. Beyond it, and without either, the iterations so far
            decide.
    Returns: an iterator of `Record`s.

    >>> for record in train(key, theta, estimator, optax.adam(0.05), count=200, iterations=50):
    ...     print(record.iteration, record.estimate.value)

    """
    check.key(key)
    theta = check.parameters(theta)
    if iterations is not None and iterations < 0:
        raise ValueError(f"`iterations` must not be negative; got {iterations}.")
    if not callable(count):
        check.count(count)
    rule = optax.with_extra_args_support(optimiser)
    if resume is not None:
        now = resume.after if isinstance(resume, Record) else resume
    else:
        theta = theta if project is None else project(theta)
        now = Iterate(0, theta, rule.init(theta))
    length = _Length(iterations, (iterations or 0) if planned is None else planned)
    return _iterate(key, now, as_estimator(estimator), rule, count, project, length)


class _Length(NamedTuple):
    """How far a training goes. iterations: None for no end. planned: those whose work decides
    about kernels.
    """

    iterations: int | None
    planned: int

    def ends_at(self, iteration: int) -> bool:
        """Whether `iteration` is not run any more."""
        return self.iterations is not None and iteration >= self.iterations

    def calls(self, iteration: int) -> int:
        """Calls of the estimator that `iteration` is one of: a function of the plan,
        wherever the training began.
        """
        return max(self.planned, iteration + 1)


def _iterate(
    key: Array,
    now: Iterate,
    estimator: Estimator,
    rule: optax.GradientTransformationExtraArgs,
    count: int | Callable[[int], int],
    project: Callable[[Params], Params] | None,
    length: _Length,
) -> Iterator[Record]:
    iteration, theta, state, spent = now
    while not length.ends_at(iteration):
        begun = time.perf_counter()
        size = count(iteration) if callable(count) else count
        with plan_calls(length.calls(iteration)):
            estimate = estimator(jax.random.fold_in(key, iteration), theta, size)
        if not all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(estimate.gradient)):
            raise FloatingPointError(
                f"the gradient of iteration {iteration} is not finite. The record before it is "
                "intact: lower the "
                "learning rate or bound θ with `project`, and go on with `resume=record`."
            )
        descent = jax.tree.map(jnp.negative, estimate.gradient)  # optax minimises
        extra = {
            "second_moment": estimate.second_moment,
            "value": -estimate.value,
            "natural": estimate.natural,
        }
        updates, state = rule.update(descent, state, theta, **extra)
        next_theta = optax.apply_updates(theta, updates)
        if project is not None:
            next_theta = project(next_theta)
        spent += size * estimator.cost(theta) + estimator.pilot
        yield Record(
            iteration, theta, estimate, spent, time.perf_counter() - begun, next_theta, state
        )
        theta = next_theta
        iteration = iteration + 1


def box(lower: Params, upper: Params) -> Callable[[Params], Params]:
    """Π onto lower ≤ θ ≤ upper.

    Args:
        lower: a pytree like θ, or a prefix of it down to one number.
        upper: the same.

    Returns: the function θ -> Πθ.

    >>> project = box({"kappa": 0.0, "omega": -2.0}, {"kappa": 2.0, "omega": 2.0})
    """
    for low, high in zip(jax.tree.leaves(lower), jax.tree.leaves(upper), strict=True):
        if not np.all(np.asarray(low) <= np.asarray(high)):
            raise ValueError(
                f"every lower bound must be at most its upper bound; got {low} and {high}."
            )

    def project(theta: Params) -> Params:
        low = _like(lower, theta)
        high = _like(upper, theta)
        return jax.tree.map(lambda v, a, b: jnp.clip(v, a, b).astype(v.dtype), theta, low, high)

    return project


def _like(bound: Params, theta: Params) -> Params:
    """Spread a prefix over the parameters below it."""
    try:
        return jax.tree.map(
            lambda b, sub: jax.tree.map(lambda leaf: jnp.broadcast_to(b, leaf.shape), sub),
            bound,
            theta,
        )
    except ValueError as error:
        raise ValueError(
            f"the bounds must have the structure of theta, {jax.tree.structure(theta)}, or be a "
            f"prefix of it: {error}"
        ) from None
