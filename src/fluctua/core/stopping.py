"""Stopping: a trajectory that ends when a level h(x, t) first reaches zero (first passage).

A trajectory that stopped is in an additional absorbing state, without rewards and scores. Stopping
is therefore a Markov chain like any other, and the theorem holds for it as it stands. What is
carried along is the survival W_n, the probability that the trajectory still runs at t_n: 1 or 0
where the level is looked at on the grid only. With q = W_{n+1}/W_n, step n adds W_n times

    g Δt + r(X_n, X_{n+1}) + (1 − q) g_T(X_{n+1}),

so that the terminal reward is collected on arrival at the stop, and W_T g_T(X_T) at the horizon.

**Overshoot.** A path of Euler's steps misses crossings between two times of the grid, and ends
beyond the level by 0.58 σ_n√Δt on average: mean times and probabilities of exit are off by O(√Δt).
Between the ends of a step the path is a Brownian bridge, whatever the drift. With a = |h(X_n)|,
b = |h(X_{n+1})|, D = a + b and s = σ_n²Δt, the variance of the noise along ∇h, it has not crossed
with the probability

    q = 1 − exp(−2ab/s)   where h(X_{n+1}) < 0, else 0,

and if it has, the first crossing is on average at the fraction f = a √(π/2s) erfcx(D/√(2s)) of the
step. Step n then adds W_n times

    q {g Δt + r(X_n, X_{n+1})} + (1 − q) {g f Δt + r(X_n, X*) + g_T(X*)},

with X* on the boundary. No random number is drawn: W is the conditional probability, which has less
variance than a random crossing, and serves recorded trajectories as well. For a constant
drift and noise and a flat boundary it is exact at any Δt. Of several levels h_k each is a boundary:
q = Π q_k, and a crossing is of boundary k with the probability (1 − q_k)/Σ(1 − q_k). What is missed
are paths that cross two of them in one step.

All of it is continuous in θ. Parameters of the noise and of the level itself are therefore served:
∂θ of what is collected is explicit, and (λ̂ₙ₊₁ − what step n collects on arrival) ∂θ ln q is the
share of the survival. Without the bridge a level that depends on θ has a gradient that no
derivative of an indicator shows, and is refused.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import dependence
from fluctua.core.arrays import Array, Params, PyTree
from fluctua.core.objective import FunctionOfMeans, Rewards, StopRule
from fluctua.core.process import AnyProcess, NoiseProduct, Process, Step

ERFCX = (
    -1.26551223,
    1.00002368,
    0.37409196,
    0.09678418,
    -0.18628806,
    0.27886807,
    -1.13520398,
    1.48851587,
    -0.82215223,
    0.17087277,
)
"""ln(erfcx(z)/u) in powers of u = 1/(1 + z/2), z ≥ 0: erfcx to 1.2e-7 of itself (Numerical Recipes,
erfcc)."""


class Crossing(NamedTuple):
    """Crossing of K boundaries by one step of one trajectory, given both ends of the step.

    going_on: q, the probability that it does not end it.
    share: probability of each boundary, if it ends (K,).
    fraction: f, the part of the step before the stop (K,).
    x: the states at the stop (K, M).
    """

    going_on: Array
    share: Array
    fraction: Array
    x: Array


class Arrival(NamedTuple):
    """Reward that one step collects on arrival, and the probability q of going on after it."""

    reward: Array
    going_on: Array


# ------------------------------------------------------------------------------- at the boundary


def bind_process(
    rewards: Rewards | FunctionOfMeans, process: AnyProcess
) -> Rewards | FunctionOfMeans:
    """The rewards with the process whose noise the bridge uses; unchanged without a bridge."""
    if isinstance(rewards, FunctionOfMeans):
        parts = tuple(bind_process(part, process) for part in rewards.parts)
        return rewards._replace(parts=parts)
    if rewards.stop is None or not rewards.stop.bridge:
        return rewards
    if not isinstance(process, Process):
        raise ValueError(
            'overshoot="bridge" is for a `Process`, whose path between two times is that of its '
            f"noise; got a {type(process).__name__}. Leave `overshoot` off: the level is then "
            "looked at on the time grid."
        )
    return rewards._replace(stop=rewards.stop._replace(process=process))


def check_rule(rule: StopRule, theta: Params, x: Array, t: Array, context: PyTree) -> None:
    """Refuse a stop that is not a number or a vector, or that moves with θ without a bridge."""
    got = jax.eval_shape(rule.level, theta, x, t, context)
    shape = getattr(got, "shape", (0, 0))
    if len(shape) > 1 or 0 in shape:
        raise ValueError(
            "`stop` must be one number per state, or (K,) for K boundaries, or True and False; got "
            f"shape {getattr(got, 'shape', type(got).__name__)}."
        )
    if not (got.dtype == bool or jnp.issubdtype(got.dtype, jnp.floating)):
        raise ValueError(
            "`stop` must be a real level, ≥ 0 where a trajectory ends, or True and False; got "
            f"{got.dtype}. Return the comparison itself, x[0] > 1, and not numbers made of it."
        )
    level = np.asarray(rule.level(theta, x, t, context))
    if np.isnan(level).any():
        raise ValueError(
            f"`stop` is {level} at the first state, x = {np.asarray(x).tolist()}. Write a level "
            "that is a number wherever the process may go: x[0] - 1 in place of sqrt(x[0]) - 1."
        )
    if not rule.bridge:
        if dependence.depends(rule.level, theta, x, t, context, on=0):
            raise ValueError(
                "`stop` depends on `theta`: whether a trajectory has stopped jumps there, and the "
                "gradient would miss what the jump adds. Give a level and "
                'overshoot="bridge", with which it is smooth, or scale the state so that the '
                "boundary stays where it is."
            )
        return
    if not jnp.issubdtype(got.dtype, jnp.floating):
        raise ValueError(
            f'overshoot="bridge" needs the distance to the boundary; `stop` is {got.dtype}. '
            "Return a level that is negative inside and zero at the boundary, x[0] - 1 for x[0] "
            "> 1."
        )
    slope = jax.jacrev(lambda x: rule.level(theta, x, t, context))(x)
    if not np.isfinite(np.asarray(slope)).all():
        raise ValueError(
            "the derivative of `stop` by the state, which a bridge needs, is not finite at the "
            f"first state, x = {np.asarray(x).tolist()}. Write a level that is smooth there: "
            "jnp.sum(x**2) - 1 in place of jnp.linalg.norm(x) - 1 around zero."
        )


# --------------------------------------------------------------------------- one step of one path


def is_running(rule: StopRule, theta: Params, x: Array, t: Array, context: PyTree) -> Array:
    """1 where a trajectory goes on, 0 where it ends, NaN without a level; in the precision of x."""
    level = jnp.asarray(rule.level(theta, x, t, context))
    if level.dtype == bool:
        return jnp.where(jnp.any(level), 0, 1).astype(x.dtype)
    running = jnp.where(jnp.any(level >= 0), 0, 1)
    return jnp.where(jnp.any(jnp.isnan(level)), jnp.nan, running).astype(x.dtype)


def find_crossing(rule: StopRule, theta: Params, step: Step) -> Crossing:
    """Probability that a step ends its trajectory, and the states at which it does."""
    x, x_next, t, dt, context = step[:5]
    if not rule.bridge:
        going_on = is_running(rule, theta, x_next, t + dt, context)
        one = jnp.ones(1, x.dtype)
        return Crossing(going_on, one, one, x_next[None])

    def levels(x: Array, t: Array) -> Array:
        return jnp.atleast_1d(rule.level(theta, x, t, context))

    here = levels(x, t)
    there = levels(x_next, t + dt)
    a = jnp.abs(here)
    b = jnp.abs(there)
    slopes = jax.jacrev(levels)(x, t)
    spread = jax.vmap(lambda slope: _apply_covariance(rule.process, theta, step, slope))(slopes)
    s = jnp.sum(slopes * spread, axis=1) * dt
    noisy = s > 0
    s = jnp.where(noisy, s, 1)
    missed = jnp.where(noisy, -jnp.expm1(-2 * a * b / s), 1)
    missed = jnp.where(there >= 0, 0, missed)
    hit = 1 - missed
    total = jnp.sum(hit)
    reach = jnp.where(a + b > 0, a + b, 1)
    part = a / reach
    fraction = part * jnp.where(noisy, _scale_erfcx(reach / jnp.sqrt(2 * s)), 1)
    # the mean state of the bridge at the mean time of the crossing, and from there along the noise:
    # a path that went to the boundary took the other components along
    middle = x + fraction[:, None] * (x_next - x)
    height = jnp.diagonal(jax.vmap(levels)(middle, t + fraction * dt))
    edge = middle - jnp.where(noisy, height * dt / s, 0)[:, None] * spread
    return Crossing(
        jnp.prod(missed).astype(x.dtype), hit / jnp.where(total > 0, total, 1), fraction, edge
    )


def _apply_covariance(process: Any, theta: Params, step: Step, slope: Array) -> Array:
    """σσᵀ∇h. Shape (M,)."""
    if process is None:
        raise ValueError(
            'overshoot="bridge" needs the noise of the process, which is not known here. Use '
            "`ppgt` or `gradient`, or leave `overshoot` off."
        )
    x, _, t, _, context = step[:5]
    if process.noise is None:
        return 2 * process.diffusion(theta, x, t, context, slope)
    if isinstance(process.noise, NoiseProduct):
        push = partial(process.noise.product, theta, x, t, context)
        dw = jax.ShapeDtypeStruct((process.noise.width,), slope.dtype)
        return push(*jax.linear_transpose(push, dw)(slope))
    sigma = process.noise(theta, x, t, context)
    return sigma**2 * slope if sigma.ndim == 1 else sigma @ (sigma.T @ slope)


def _scale_erfcx(z: Array) -> Array:
    """√π z erfcx(z), z ≥ 0: from 0 to 1."""
    u = 1 / (1 + z / 2)
    exponent = jnp.zeros_like(z)
    for term in reversed(ERFCX):
        exponent = exponent * u + term
    return np.sqrt(np.pi) * z * u * jnp.exp(exponent)


def collect_arrival(rewards: Rewards, theta: Params, step: Step) -> Arrival:
    """Reward on arrival of a step that began running, without g Δt, and the probability q."""
    rule = rewards.stop
    assert rule is not None
    x, x_next, t, dt, context = step[:5]
    crossing = find_crossing(rule, theta, step)
    going_on = crossing.going_on

    def step_reward(end: Array, length: Array) -> Array:
        if rewards.per_step is None:
            return jnp.zeros((), x.dtype)
        return rewards.per_step(theta, x, end, t, length, context)

    if not rule.bridge:
        at_end = rewards.terminal(theta, x_next, context)
        reward = step_reward(x_next, dt) + jnp.where(going_on > 0, 0, at_end)
        # a level that is not a number must not pass for one that has not been reached
        reward = jnp.where(jnp.isnan(going_on), jnp.nan, reward)
        return Arrival(reward.astype(x.dtype), going_on)
    rate = rewards.running(theta, x, t, context)

    def stop_at(edge: Array, fraction: Array) -> Array:
        before = fraction * dt
        end = rewards.terminal(theta, edge, context) + step_reward(edge, before)
        return end - rate * (dt - before)

    stopped = jnp.sum(crossing.share * jax.vmap(stop_at)(crossing.x, crossing.fraction))
    reward = going_on * step_reward(x_next, dt) + jnp.where(
        going_on < 1, (1 - going_on) * stopped, 0
    )
    return Arrival(reward.astype(x.dtype), going_on)


def differentiate_survival(rule: StopRule, theta: Params, step: Step) -> Params:
    """∂θ ln q of one step; zero where it ends its trajectory. The structure of θ."""

    def value(th: Params) -> Array:
        going_on = find_crossing(rule, th, step).going_on
        return jnp.log(jnp.where(going_on > 0, going_on, 1))

    return jax.grad(value)(theta)


# ---------------------------------------------------------------------------- many trajectories


def hold_stopped(survival: Array | None, x_next: Array, x: Array) -> Array:
    """The next states (E, ...); where a trajectory has stopped, those before."""
    if survival is None:
        return x_next
    return jnp.where(survival[:, None] > 0, x_next, x)


def multiply_survival(survival: Array, going_on: Array) -> Array:
    """Wₙ₊₁ = Wₙ q (E,), and zero below the square root of the least number.

    The return-to-go is divided by W for a baseline; below this limit it is lost to rounding.
    """
    after = survival * going_on
    return jnp.where(after > np.sqrt(np.finfo(after.dtype).tiny), after, 0)


def keep_running(survival: Array | None, rows: Array) -> Array:
    """Rows (E, ...) times the survival, and zero where a trajectory has stopped, even for NaN."""
    if survival is None:
        return rows
    weight = survival.reshape(-1, *(1,) * (rows.ndim - 1)).astype(rows.dtype)
    return jnp.where(weight > 0, weight * rows, 0)
