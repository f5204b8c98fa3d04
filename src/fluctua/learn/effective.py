"""Models for a self-calibrating estimator, and their parameters p(θ, φ).

For a knob, p is a linear function of its setting θ (`KnobLine`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core.arrays import Array, Params, jit
from fluctua.core.estimator import PPGT
from fluctua.core.simulate import Simulator
from fluctua.learn.calibratable import CalibratableModel, CalibratableProcess

EffectiveParameters = Callable[[Params, Params], Params]
"""(θ, φ) -> p: parameters of the model at settings θ and unknowns φ."""

ArrayFunction = Callable[[np.ndarray], np.ndarray]


class KnobLine(NamedTuple):
    """The line from a setting to its parameter: p = offset + gain · setting, element by element."""

    offset: Array | float = 0.0
    gain: Array | float = 1.0

    def set(self, setting: Any) -> Any:
        """The parameter at a setting."""
        return self.offset + self.gain * setting


def read_knob(values: Mapping[str, Any], name: str) -> KnobLine:
    """The knob of a family from its entries `NAME_offset` and `NAME_gain`."""
    return KnobLine(values[f"{name}_offset"], values[f"{name}_gain"])


@dataclass(frozen=True)
class Effective:
    """The function (θ, u) -> p with flat unknowns u (K,), made of the user's (θ, φ) -> p.

    A record, so that equal ones share a compilation.
    """

    effective: EffectiveParameters
    tree: Any
    shapes: tuple[tuple[int, ...], ...]

    def __call__(self, theta: Params, u: Array) -> Params:
        """The parameters p of the model."""
        edges = np.cumsum([math.prod(shape) for shape in self.shapes])[:-1]
        leaves = [
            part.reshape(shape)
            for part, shape in zip(jnp.split(u, edges), self.shapes, strict=True)
        ]
        return self.effective(theta, jax.tree.unflatten(self.tree, leaves))


@partial(jit, static_argnums=0)
def evaluate(at: Effective, theta: Params, u: Array) -> Params:
    """p(θ, u), compiled: one call where its operations would be dozens."""
    return at(theta, u)


@partial(jit, static_argnums=0)
def pull_back(at: Effective, theta: Params, u: Array, gradients: Params) -> Array:
    """(∂p/∂θ)ᵀ times each row of gradients by p, leaves (E, ...). Shape (E, P)."""
    pull = jax.vjp(lambda settings: at(settings, u), theta)[1]
    return jax.vmap(lambda gradient: ravel_pytree(pull(gradient)[0])[0])(gradients)


def as_schedule(model: Any) -> Callable[[int], Any]:
    """A function call -> model; a single model is used for every call."""
    # an estimator can be called too: what has the parts of one is one
    scheduled = callable(model) and not isinstance(model, PPGT) and not hasattr(model, "split")
    return model if scheduled else lambda call: model


def as_calibratable(model: Any) -> CalibratableModel:
    """A model that `SelfCalibrating` can use; of `ppgt`, the process that it simulates."""
    if isinstance(model, PPGT) and (
        model.method.twin is None or not isinstance(model.substrate, Simulator)
    ):
        raise TypeError(
            "the model of a `SelfCalibrating` simulates and has a twin: ppgt(simulator, ..., "
            "baseline=Twin())."
        )
    model = CalibratableProcess(model) if isinstance(model, PPGT) else model
    lacking = [
        name
        for name in ("split", "recorded", "returns", "evidence", "examine")
        if not hasattr(model, name)
    ]
    if lacking:
        raise TypeError(
            "`SelfCalibrating` needs a model that simulates and has a twin, such as "
            f"ppgt(simulator, objective, baseline=Twin()); this {type(model).__name__} has no "
            f"{', '.join(lacking)}."
        )
    return model
