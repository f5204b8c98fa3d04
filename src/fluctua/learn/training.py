"""Training by stochastic gradient ascent: θ ← Π[θ + update(∇θJ)].

`Training` describes a training once. `train` yields one record per iteration and keeps nothing on
disk; `fluctua.run` does the same into a folder that survives a kill.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fluctua.core import check, text
from fluctua.core.arrays import Array, Params
from fluctua.core.display.fields import show_fields
from fluctua.core.estimate import Estimate
from fluctua.core.host import keys
from fluctua.core.protocols import Estimates, Estimator, as_estimator
from fluctua.core.simulate import plan_calls
from fluctua.learn.step import OptimiserStep


class Bounds(NamedTuple):
    """Lowest and highest parameters: each a pytree like θ, or a prefix of it down to one number."""

    low: Params
    high: Params

    def project(self, theta: Params) -> Params:
        """The parameters, clipped to low ≤ θ ≤ high."""
        low, high = self.spread(theta)
        return jax.tree.map(_clip, theta, low, high)

    def spread(self, theta: Params) -> Bounds:
        """The bounds of every parameter, as pytrees like θ."""
        return Bounds(_spread(self.low, theta), _spread(self.high, theta))


@show_fields
@dataclass(frozen=True, eq=False)
class Training:
    """Description of a training, checked when built.

    Args:
        estimator: of ∇θJ, as made by `ppgt`, or any function (key, theta, count) -> `Estimate`.
        theta: parameters to start from, any pytree of floats.
        optimiser: of optax or `fluctua.optimisers`, a pure function that is traced; extra
            arguments are `second_moment`, `value` and `natural`.
        trajectories: samples of the estimator per iteration, or a function of the iteration. The
            pilot of a default baseline adds 128 simulated ones (`fluctua.baselines.time_only`).
        bounds: (low, high), each a pytree like θ or a prefix of it down to one number. θ starts
            within them and is clipped to them after every step. None for no bounds.
        seed: of all random numbers; iteration l uses fold_in(key(seed), l).

    >>> training = fl.Training(
    ...     estimator, theta, optax.adam(0.05), trajectories=200, bounds=(0.1, 2.0)
    ... )
    >>> growing = fl.Training(estimator, theta, optax.adam(0.05), lambda i: 200 + 10 * i)
    """

    estimator: Estimator | Estimates
    theta: Params
    optimiser: optax.GradientTransformation
    trajectories: int | Callable[[int], int]
    bounds: Bounds | Any = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not callable(self.trajectories):
            check_whole_number("trajectories", self.trajectories, 1)
        check_whole_number("seed", self.seed, 0)
        if not hasattr(self.optimiser, "init") or not hasattr(self.optimiser, "update"):
            raise TypeError(
                "`optimiser` must be one of optax, with `init` and `update`; got "
                f"{type(self.optimiser).__name__}."
            )
        theta = check.parameters(self.theta)
        bounds = None if self.bounds is None else check_bounds(self.bounds)
        object.__setattr__(self, "estimator", as_estimator(self.estimator))
        object.__setattr__(self, "optimiser", optax.with_extra_args_support(self.optimiser))
        object.__setattr__(self, "bounds", bounds)
        if bounds is not None:
            _refuse_outside(theta, bounds)
        object.__setattr__(self, "theta", theta)

    @property
    def key(self) -> Array:
        """The key that all noise follows from."""
        return jax.random.key(self.seed)

    @property
    def project(self) -> Callable[[Params], Params] | None:
        """Π, the projection onto the bounds; None without bounds."""
        return None if self.bounds is None else self.bounds.project

    @property
    def start(self) -> Iterate:
        """The state of the training before its first iteration."""
        return Iterate(0, self.theta, self.optimiser.init(self.theta))

    def ensemble_size(self, iteration: int) -> int:
        """Trajectories of one iteration, as they are given to the estimator."""
        size = self.trajectories
        return size(iteration) if callable(size) else size


class Iterate(NamedTuple):
    """State of a training before iteration `iteration`.

    iteration: index of the next iteration.
    theta: parameters.
    optimiser_state: of optax.
    trajectories: spent so far.
    """

    iteration: int
    theta: Params
    optimiser_state: Any
    trajectories: int = 0


class Record(NamedTuple):
    """One iteration, and all that is needed to go on from it.

    iteration: its number, from 0 on.
    theta: the parameters at which the estimate was made.
    estimate: the gradient and J there.
    trajectories: spent so far, this iteration included.
    seconds: of this iteration.
    next_theta: the parameters after the step.
    optimiser_state: after the step.
    """

    iteration: int
    theta: Params  # where the estimate was made
    estimate: Estimate
    trajectories: int  # spent so far, this iteration included
    seconds: float  # of this iteration
    next_theta: Params
    optimiser_state: Any

    @property
    def after(self) -> Iterate:
        """The state of the training after this iteration."""
        return Iterate(self.iteration + 1, self.next_theta, self.optimiser_state, self.trajectories)


def train(
    training: Training,
    iterations: int | None = None,
    *,
    start_from: Record | Iterate | None = None,
) -> Iterator[Record]:
    """Train with one record per iteration: θ ← Π[θ + update(∇θJ)].

    A training continued from any of its records repeats itself exactly. To keep it in a folder that
    survives a kill, use `run`.

    Args:
        training: what to train.
        iterations: how many; None continues until the caller stops iterating.
        start_from: a record to continue from.

    Returns: an iterator of `Record`s.

    >>> training = fl.Training(estimator, theta, optax.adam(0.05), trajectories=200)
    >>> for record in fl.train(training, iterations=3):
    ...     print(record.iteration, record.trajectories)  # the pilots of the baseline included
    0 328
    1 656
    2 984
    """
    check_training(training)
    if iterations is not None and iterations < 0:
        raise ValueError(f"`iterations` must not be negative; got {iterations}.")
    now = start_from.after if isinstance(start_from, Record) else start_from
    return ascend(training, training.key, now or training.start, Length(iterations))


class Length(NamedTuple):
    """Length of a training.

    iterations: how many; None for no end.
    planned: iterations whose work decides whether a simulator with backend="auto" runs a kernel;
        `iterations` if None. Beyond it, and without either, the iterations so far decide.
    """

    iterations: int | None
    planned: int | None = None

    def ends_at(self, iteration: int) -> bool:
        """Whether the training ends before `iteration`."""
        return self.iterations is not None and iteration >= self.iterations

    def calls(self, iteration: int) -> int:
        """Planned number of calls of the estimator at `iteration`, wherever the training began."""
        planned = self.iterations if self.planned is None else self.planned
        return max(planned or 0, iteration + 1)


def ascend(training: Training, key: Array, now: Iterate, length: Length) -> Iterator[Record]:
    """The loop of every training, from `now` on: estimate, update, project, yield a record.

    Args:
        training: what to train.
        key: of the noise; iteration l uses fold_in(key, l).
        now: where to go on.
        length: how far.

    """
    estimator: Any = training.estimator
    step = OptimiserStep(training.optimiser, training.project)
    key = keys.move_to_host(key)
    theta = now.theta
    state = now.optimiser_state
    spent = now.trajectories
    iteration = now.iteration
    while not length.ends_at(iteration):
        start = time.perf_counter()
        size = training.ensemble_size(iteration)
        with plan_calls(length.calls(iteration)):
            estimate = estimator(keys.fold_in(key, iteration), theta, size)
        _refuse_infinite(estimate, iteration)
        next_theta, state = step(theta, state, estimate)
        spent += size * estimator.cost(theta) + estimator.pilot
        seconds = time.perf_counter() - start
        yield Record(iteration, theta, estimate, spent, seconds, next_theta, state)
        theta = next_theta
        iteration += 1


def _refuse_infinite(estimate: Estimate, iteration: int) -> None:
    if not all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(estimate.gradient)):
        raise FloatingPointError(
            f"the gradient of iteration {iteration} is not finite. The record before it is intact: "
            "lower the learning rate or bound θ with `bounds`, and go on with `start_from=record`."
        )


def check_training(training: Any) -> None:
    """Refuse what is no `Training`, such as an estimator."""
    if not isinstance(training, Training):
        raise TypeError(
            "expected fluctua.Training(estimator, theta, optimiser, trajectories); got "
            f"{type(training).__name__}."
        )


def check_bounds(bounds: Any) -> Bounds:
    """The bounds as a record, or an error if they are not two or are in the wrong order."""
    try:
        low, high = bounds
    except (TypeError, ValueError):
        raise ValueError(
            f"`bounds` must be a pair (low, high), or None for no bounds; got {bounds!r}."
        ) from None
    for below, above in zip(jax.tree.leaves(low), jax.tree.leaves(high), strict=True):
        if not np.all(np.asarray(below) <= np.asarray(above)):
            raise ValueError(
                f"every lower bound must be at most its upper bound; got {below} and {above}."
            )
    return Bounds(low, high)


def _refuse_outside(theta: Params, bounds: Bounds) -> None:
    """Refuse parameters outside of their bounds."""

    def flatten(tree: Params) -> np.ndarray:
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])

    values = flatten(theta)
    outside = np.flatnonzero(values != flatten(bounds.project(theta)))
    if not outside.size:
        return
    first = outside[0]
    low, high = map(flatten, bounds.spread(theta))
    raise ValueError(
        f"`theta` must start within its bounds: {text.names(theta)[first]} is {values[first]:g}, "
        f"outside of {low[first]:g} … {high[first]:g}. Change one of them."
    )


def check_whole_number(name: str, value: Any, minimum: int) -> None:
    """Refuse a value that is not a whole number, below `minimum`, or not below 2⁶³."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or not minimum <= value < 2**63:
        raise ValueError(
            f"`{name}` must be a whole number, at least {minimum} and below 2⁶³; got {value!r}."
        )


def _clip(values: Array, low: Array, high: Array) -> Array:
    return jnp.clip(values, low, high).astype(values.dtype)


def _spread(bound: Params, theta: Params) -> Params:
    """Spread a prefix over the parameters below it."""
    try:
        return jax.tree.map(
            lambda b, sub: jax.tree.map(lambda leaf: jnp.broadcast_to(b, leaf.shape), sub),
            bound,
            theta,
        )
    except ValueError as error:
        raise ValueError(
            f"the bounds must have the structure of theta, {_list_names(theta)}, or be one number "
            f"for all; got {_list_names(bound)}."
        ) from error


def _list_names(theta: Params) -> str:
    """The names of all parameters, such as 'centre', 'layer.weight'."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(theta)]
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]
    return ", ".join(names) or "one array"
