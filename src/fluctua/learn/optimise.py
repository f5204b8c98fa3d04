"""The paper's ascent as an optax transformation, and optax's own by name.

    θ ← Π[θ + α ⟨G⟩/h̃],   h̃ = clamp(h, h̄/ρ, ρh̄),   h̄ ← βh̄ + (1 − β)h,   h = √⟨G²⟩ + ε

⟨·⟩ is over the single trajectories of one iteration, so ⟨G⟩/h is the signal-to-noise ratio of one trajectory:
a component moves by at most α, and only as far as it is known.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fluctua.core.text import close_match
from fluctua.core.types import Params


class RmsAscentState(NamedTuple):
    """average: h̄, with the structure of θ. iterations: so far."""

    average: Params
    iterations: jax.Array


def rms_ascent(
    learning_rate: float = 0.05, *, rho: float = 10.0, beta: float = 0.9, epsilon: float = 1e-8
) -> optax.GradientTransformationExtraArgs:
    """The paper's rule (Optimization Details). Its `update` needs `second_moment=`, which `train` passes.

    Like every optax rule it is given the gradient of a loss, −⟨G⟩, and its updates are added to θ. The average
    starts at the first h, so the first clamp does nothing. It takes in h itself and not the clamped h̃, so a
    lasting change of scale is followed.

    Args:
        learning_rate: α.
        rho: the factor by which h may leave its average before it is clamped.
        beta: memory of the average.
        epsilon: keeps the denominator from zero.

    Returns: an optax rule.

    >>> train(key, theta, estimator, rms_ascent(0.05), count=1000, iterations=75, project=box(0, 2))
    """
    for name, value, fits in (
        ("learning_rate", learning_rate, learning_rate > 0),
        ("rho", rho, rho >= 1),
        ("beta", beta, 0 <= beta < 1),
        ("epsilon", epsilon, epsilon >= 0),
    ):
        if not fits:
            raise ValueError(f"`{name}` = {value} does not fit: learning_rate > 0, rho ≥ 1, 0 ≤ beta < 1, epsilon ≥ 0.")

    def init(theta: Params) -> RmsAscentState:
        return RmsAscentState(jax.tree.map(jnp.zeros_like, theta), jnp.zeros((), jnp.int32))

    def update(
        updates: Params, state: RmsAscentState, params: Params = None, *, second_moment: Params = None, **_: Any
    ) -> tuple[Params, RmsAscentState]:
        if second_moment is None:
            raise ValueError(
                "rms_ascent needs the mean square over single trajectories: call update(..., second_moment="
                "estimate.second_moment), as `fluctua.train` does."
            )
        h = jax.tree.map(lambda square: jnp.sqrt(square) + epsilon, second_moment)
        average = jax.tree.map(
            lambda old, new: jnp.where(state.iterations == 0, new, beta * old + (1 - beta) * new), state.average, h
        )
        # h > 0 by ε, so a component without any signal, whose G is 0 in every trajectory, stays where it is
        steps = jax.tree.map(
            lambda descent, new, mean: -learning_rate * descent / jnp.clip(new, mean / rho, mean * rho),
            updates,  # −⟨G⟩: two signs, uphill
            h,
            average,
        )
        return steps, RmsAscentState(average, state.iterations + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def scaled(factors: Mapping[str, float]) -> optax.GradientTransformation:
    """Multiply the updates of each family of a dict θ by its own factor: units for rules that know none.

    Adam moves every component by about the learning rate, though a Kerr coefficient that matters is a
    thousandth of a coupling that does.
    """
    return optax.stateless(lambda updates, _: {name: factors.get(name, 1.0) * value for name, value in updates.items()})


def fading(decay: float) -> optax.GradientTransformation:
    """Multiply the updates of iteration l by 1/√(1 + l/decay): steps small enough, in the end, for the noise.

    It does not know when training ends, so that a training may go on.
    """
    return optax.scale_by_schedule(lambda iteration: (1 + iteration / decay) ** -0.5)


def by_name(
    rule: str,
    learning_rate: float,
    options: Mapping[str, Any],
    scale: Mapping[str, float] | None = None,
    decay: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """`"paper"`, or any optimiser of optax that takes a learning rate: `"adam"`, `"sgd"`, `"lion"`, …

    >>> by_name("adam", 0.02, {"b1": 0.8}, {"chi": 0.01})
    """
    make = rms_ascent if rule == "paper" else getattr(optax, rule, None)
    names = list(inspect.signature(make).parameters) if callable(make) else []
    if not names or names[0] != "learning_rate":
        known = ["paper", *sorted(n for n in dir(optax) if _takes_rate(getattr(optax, n)))]
        raise ValueError(
            f'`rule` is "paper" or an optimiser of optax, such as "adam", "sgd", "lion" or "adabelief"; got {rule!r}.'
            + close_match(rule, known)
        )
    unknown = sorted(set(options) - set(names))
    if unknown:
        raise ValueError(
            f"{rule} has no option {unknown[0]!r}; it has {', '.join(names[1:])}." + close_match(unknown[0], names[1:])
        )
    chosen = optax.with_extra_args_support(make(learning_rate, **options))  # type: ignore[misc]
    further = [scaled(scale)] if scale and any(factor != 1 for factor in scale.values()) else []
    further += [fading(decay)] if decay else []
    return optax.with_extra_args_support(optax.chain(chosen, *further)) if further else chosen


def _takes_rate(thing: Any) -> bool:
    if isinstance(thing, type) or not callable(thing):
        return False
    try:
        return next(iter(inspect.signature(thing).parameters), None) == "learning_rate"
    except (TypeError, ValueError):
        return False
