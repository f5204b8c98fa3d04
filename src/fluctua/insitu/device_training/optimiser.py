"""The optimiser of a training on an instrument."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import optax

from fluctua.core.arrays import Params
from fluctua.insitu.device_training.plan import Plan


def make_optimiser(plan: Plan, scale: Params | None) -> optax.GradientTransformationExtraArgs:
    """Adam with a falling learning rate. scale: factors on it, a prefix of the settings."""
    decay = optax.cosine_decay_schedule(plan.learning_rate, max(plan.iterations, 1), alpha=0.05)
    rule = optax.adam(decay)
    if scale is not None:
        rule = optax.chain(rule, optax.stateless(partial(_scale_updates, scale)))
    return optax.with_extra_args_support(rule)


def _scale_updates(scale: Params, updates: Params, theta: Params | None) -> Params:
    """Updates with the factor of each knob."""

    def scale_family(factor: Any, family: Params) -> Params:
        return jax.tree.map(lambda v: factor * v, family)

    return jax.tree.map(scale_family, scale, updates)
