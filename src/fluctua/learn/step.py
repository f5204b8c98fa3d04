"""One step of an optimiser: θ ← Π[θ + update(∇θJ)]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fluctua.core.arrays import Params, jit, put_on_host
from fluctua.core.estimate import Estimate
from fluctua.core.host.programs import HostProgram, NoRule

MAX_PARAMETERS = 2**16
"""Parameters up to which NumPy takes the step. With more, JAX takes it on its own device."""


class OptimiserResult(NamedTuple):
    """Parameters and state of the optimiser after a step."""

    theta: Params
    state: Any


class StepArguments(NamedTuple):
    """What a step depends on: parameters, state of the optimiser, and fields of the estimate."""

    theta: Params
    state: Any
    gradient: Params
    second_moment: Params
    value: Any
    natural: Params


class OptimiserStep:
    """A step of an optimiser of optax, projected onto the bounds of a training.

    The step is traced once and evaluated by NumPy from then on: single operations of JAX take
    several milliseconds on a GPU, and their compilation as long as many short trainings. Rules
    with operations that NumPy has no rule for are compiled by JAX. Rules that branch on values
    cannot be traced, and run as single operations of JAX.

    rule: of optax, with extra arguments. project: onto the bounds, or None.
    """

    def __init__(
        self,
        rule: optax.GradientTransformationExtraArgs,
        project: Callable[[Params], Params] | None,
    ):
        self.rule = rule
        self.project = project
        self._steps: dict[Any, Callable[[StepArguments], OptimiserResult]] = {}

    def __call__(self, theta: Params, state: Any, estimate: Estimate) -> OptimiserResult:
        """Take one step from θ."""
        fields = (estimate.gradient, estimate.second_moment, estimate.value, estimate.natural)
        arguments = StepArguments(theta, state, *fields)
        leaves, structure = jax.tree.flatten(arguments)
        try:
            signature = (structure, *map(_describe, leaves))
        except TypeError:  # a state with other things than numbers
            return self.apply(arguments)
        if signature not in self._steps:
            self._steps[signature] = self._choose(arguments)
        return self._steps[signature](arguments)

    def _choose(self, arguments: StepArguments) -> Callable[[StepArguments], OptimiserResult]:
        """Choose what evaluates the step at the shapes of these arguments."""
        large = sum(np.size(leaf) for leaf in jax.tree.leaves(arguments.theta)) > MAX_PARAMETERS
        try:
            step = _HostStep(self.apply, arguments)
            if not large:
                step(arguments)
                return step
        except NoRule:
            pass
        except (TypeError, IndexError):  # JAX raises them where a rule branches on a value
            return self.apply
        return jit(self.apply)

    def apply(self, arguments: StepArguments) -> OptimiserResult:
        """Take one step by operations of JAX."""
        descent = jax.tree.map(jnp.negative, arguments.gradient)  # optax minimises
        updates, state = self.rule.update(
            descent,
            arguments.state,
            arguments.theta,
            second_moment=arguments.second_moment,
            value=-arguments.value,
            natural=arguments.natural,
        )
        theta = optax.apply_updates(arguments.theta, updates)
        return OptimiserResult(theta if self.project is None else self.project(theta), state)


def _describe(leaf: Any) -> tuple[Any, ...]:
    """Shape and type of an argument, and whether JAX lets the type of another one decide."""
    is_weak = getattr(leaf, "weak_type", not hasattr(leaf, "dtype"))
    return np.shape(leaf), jnp.result_type(leaf), is_weak


class _HostStep:
    """A step by NumPy, at the shapes of its first arguments."""

    def __init__(self, step: Callable[[StepArguments], OptimiserResult], arguments: StepArguments):
        def list_leaves(arguments: StepArguments) -> list[Any]:
            leaves, self.structure = jax.tree.flatten(step(arguments))
            return leaves

        self.program = HostProgram(list_leaves, arguments)

    def __call__(self, arguments: StepArguments) -> OptimiserResult:
        leaves = self.program(jax.device_get(arguments))
        return jax.tree.unflatten(self.structure, put_on_host(leaves))
