"""Models that a self-calibrating estimator can ask, and their parameters p(θ, φ)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core.arrays import Array, Params
from fluctua.core.estimator import PPGT
from fluctua.core.simulate import Simulator
from fluctua.learn.calibratable import CalibratableModel, CalibratableProcess

EffectiveParameters = Callable[[Params, Params], Params]
"""(θ, φ) -> p: the parameters of the model at settings θ, if the unknowns are φ."""

ArrayFunction = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Effective:
    """(θ, u (K,)) -> p of the user's (θ, φ) -> p.

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


def as_schedule(model: Any) -> Callable[[int], Any]:
    """A function of the call that gives its model; a single model is that of every call."""
    # an estimator can be called too: what has the parts of one is one
    scheduled = callable(model) and not isinstance(model, PPGT) and not hasattr(model, "split")
    return model if scheduled else lambda call: model


def as_calibratable(model: Any) -> CalibratableModel:
    """A model that a calibration can ask; of `ppgt`, the process that it simulates."""
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
