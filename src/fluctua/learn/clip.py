"""PPO's clipped surrogate: every step weighted by its own ratio, which is held near 1.

Biased, and never exhausted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fluctua.core import check, sources, sweep
from fluctua.core.arrays import Array, Params, PyTree, jit
from fluctua.core.baselines import Baseline, half
from fluctua.core.diffusion import check_model
from fluctua.core.draws import Density
from fluctua.core.estimate import Samples, unflatten
from fluctua.core.process import Step
from fluctua.core.scores import Ratio
from fluctua.core.simulate import grid
from fluctua.core.sources import Recording
from fluctua.core.trajectories import Times

RatioOfStep = Callable[[Any, Params, Params, Step], Ratio]
"""(process, new, old, step) -> Ratio."""


@dataclass(frozen=True)
class Clip:
    """PPO's weights for `reweighted`: each step has its own ratio ρₙ = p_θ(X_{n+1}|X_n)/p_old, held
    within 1 ± epsilon.

        value = R + Σ_n {min[ρₙAₙ, clip(ρₙ)Aₙ] − Aₙ},    Aₙ = λ̂ₙ₊₁ − λ̄ₙ,

    and the gradient of that. It never runs out of trajectories and it is biased: the states are
    those of the old parameters and so are the rewards that follow a step, an error of the gradient
    of first order in θ − θ_old however large `epsilon` is. The clip is of single steps, whose
    ratios tend to 1 with the time step: a path of T steps is about Tε²/2 nats away before it acts.
    """

    epsilon: float = 0.2

    def __post_init__(self) -> None:
        if not self.epsilon > 0:
            raise ValueError(f"`epsilon` of `Clip` must be positive; got {self.epsilon!r}.")


def clipped_samples(
    model: sweep.Model,
    ratio: RatioOfStep,
    theta: Params,
    old: Params,
    record: Recording,
    clip: Clip,
    plan: Baseline,
) -> tuple[Samples, float]:
    """Gradient and value of the surrogate for each trajectory of one batch, and the share of the
    steps that are held.

    plan: "time" or "none". With the first, each half of the batch has the mean return-to-go of the
    other.
    """
    check.only_of_states(model.objective, "`Clip`")
    process = check_model(
        model.process, model.objective, theta, record.first, record.t, record.context
    )
    model = sweep.silenced(model, process)
    steps = len(record.t) - 1
    times, x = record.block(0, steps)
    table = jnp.zeros((2, steps + 1), x.dtype)
    cut = half(record.count)
    if plan.values is not None:
        table = jnp.stack([plan.values, plan.values])
    elif plan.pilot:

        def of(side, tree):
            return jax.tree.map(lambda leaf: leaf[side], tree)

        means = [
            sources.mean_return_to_go(
                model.objective, theta, times, x[side], of(side, record.context)
            )
            for side in (slice(cut, None), slice(0, cut))
        ]
        table = jnp.stack(means)
    which = (jnp.arange(record.count) >= cut).astype(int)
    beside = record.context, record.events(0, steps)
    flat, value, held = _surrogate(
        model, ratio, theta, old, times, x, beside, table[which].T, clip.epsilon
    )
    sources.check_scores(flat, process, theta, record.trajectory, record.t, record.offset)
    return Samples(unflatten(theta, flat), value), float(held)


@partial(jit, static_argnums=(0, 1))
def _surrogate(
    model: sweep.Model,
    ratio: RatioOfStep,
    theta: Params,
    old: Params,
    times: Times,
    x: Array,
    beside: tuple[PyTree, PyTree],
    table: Array,
    epsilon: Array,
) -> tuple[Array, Array, Array]:
    """Gradients (E, P), values (E,), share of the steps that are held. table: λ̄ (T+1, E)."""
    context, events = beside

    def in_time(v):
        return jnp.swapaxes(v, 0, 1)

    path = in_time(x)
    rates = jax.vmap(lambda x, t: sweep.running(model, theta, x, t, context))(
        path[:-1], times.t[:-1]
    )
    returns = jnp.sum(rates * times.dt[:, None], axis=0) + sweep.terminal(
        model, theta, path[-1], context
    )

    def held_near_one(advantage: Array, log: Array) -> tuple[Array, Array, Array]:
        """min[ρA, clip(ρ)A] − A; its derivative by ln ρ; whether the clip holds."""
        rho = jnp.exp(log)
        free = rho * advantage
        held = jnp.clip(rho, 1 - epsilon, 1 + epsilon) * advantage
        return jnp.minimum(free, held) - advantage, jnp.where(held < free, 0, free), held < free

    value = returns
    gradient = jnp.zeros((x.shape[0], ravel_pytree(theta)[0].size), x.dtype)
    if isinstance(model.start, Density):
        density = model.start.log_density
        log = jax.vmap(lambda x, c: density(theta, x, c) - density(old, x, c))(path[0], context)
        score = jax.vmap(lambda x, c: ravel_pytree(jax.grad(density)(theta, x, c))[0])(
            path[0], context
        )
        gain, slope, _ = held_near_one(returns - table[0], log)
        value = value + gain
        gradient = slope[:, None] * score

    def body(carry: Any, step: Any) -> tuple[Any, None]:
        value, gradient, clipped, reward = carry
        x, x_next, happened, rate, bar, when = step
        _, t, dt = when
        reward = reward + rate * dt
        score, explicit = sweep.scores(
            model, theta, (x, x_next, context, happened), when, times.t[:2]
        )

        def one(x, x_next, c, e):
            return ratio(model.process, theta, old, Step(x, x_next, t, dt, c, e)).log

        log = jax.vmap(one)(x, x_next, context, happened)
        gain, slope, held = held_near_one(returns - reward - bar, log)  # λ̂ₙ₊₁ − λ̄ₙ
        gradient = gradient + (slope[:, None] * score + explicit).astype(gradient.dtype)
        return (value + gain, gradient, clipped + jnp.mean(held), reward), None

    steps = (path[:-1], path[1:], jax.tree.map(in_time, events), rates, table[1:], grid(times))
    carry = (value, gradient, jnp.zeros((), x.dtype), jnp.zeros_like(returns))
    (value, gradient, clipped, _), _ = jax.lax.scan(body, carry, steps)
    sums = sweep.Sums(returns, gradient, gradient)
    return (
        sweep.finish(model, theta, sums, path[-1], times.t, context),
        value,
        clipped / times.dt.size,
    )
