"""A guess at the remaining return of a jump process: quadratic, about the rate equations.

    V(x, t) = v(t) + p(t)·d + ½ dᵀH(t) d,        d = x − x̄(t),        dx̄/dt = Σ_i a_i(x̄) ν_i

solves, to second order in d, the backward equation ∂tV + Σ_i a_i(x){V(x + ν_i) − V(x)} = 0 between
the times of the grid, from the expansion of the terminal reward at x̄_T. With φ(x) = Σ_i a_i(x)
{V(x + ν_i) − V(x)} at fixed v, p and H,

    v' = p·x̄' − φ(x̄),        p' = H x̄' − ∇φ(x̄),        H' = −∇²φ(x̄),

the linear noise approximation with its correction of the mean. At t_n the expansion of the running
reward g Δt (and of the expected reward of the step) joins V. One solution serves all trajectories
of one start and context.

Rates are those at the beginning of a step, so V is smooth within it. There it is a polynomial of
degree `DEGREE` in u = (t − t_n)/Δt through values of the solution, about the centre x̄_n.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core.arrays import Array, Params, PyTree, jit
from fluctua.core.objective import Rewards
from fluctua.core.trajectories import Times

DEGREE = 4
"""Of V in time within a step; three Gauss nodes then integrate it exactly."""

SUBSTEPS = 4
"""Runge–Kutta steps between two of the values that the polynomial goes through."""

_POINTS = np.linspace(0.0, 1.0, DEGREE + 1)
_TO_POWERS = np.linalg.inv(np.vander(_POINTS, increasing=True))
"""(DEGREE+1, DEGREE+1): values at `_POINTS` -> coefficients of 1, u, u², …"""


class GuessModel(NamedTuple):
    """Code of a guess, without numbers; hashable.

    rates: of the twin, (theta, x, t, context) -> a (R,).
    changes: ν as a tuple of rows (R, M).
    rewards: always at θ: they are defined, not modelled.
    order: 1 for a linear guess, 2 for a quadratic one.
    """

    rates: Callable[..., Array]
    changes: tuple[tuple[float, ...], ...]
    rewards: Rewards
    order: int


class GuessTable(NamedTuple):
    """V along the time grid. C numbers are a level, a slope (M,), and a bend (M·M,) for order 2.

    powers: coefficients of 1, u, u², … in each step, after its running reward (T, DEGREE+1, C).
    collected: what V expects to collect at each t_n and in the step behind it (T, C).
    last: V_T, the expansion of the terminal reward (C,).
    first: V_0 before the first reward (C,).
    """

    powers: Array
    collected: Array
    last: Array
    first: Array


class ReturnGuess(NamedTuple):
    """V and its derivative along θ, at fixed states.

    centre: x̄ (T+1, M). value: `GuessTable`. slope: the same with P at the end of each leaf.
    """

    centre: Array
    value: GuessTable
    slope: GuessTable


def evaluate_guess(coefficients: Array, d: Array) -> Array:
    """v + p·d + ½ dᵀHd of C numbers at one departure d (M,)."""
    m = d.size
    linear = coefficients[0] + coefficients[1 : 1 + m] @ d
    if coefficients.size == 1 + m:
        return linear
    return linear + d @ coefficients[1 + m :].reshape(m, m) @ d / 2


def evaluate_changes(coefficients: Array, d: Array, changes: Array) -> Array:
    """V(x + ν_i) − V(x) of every event. changes: ν (R, M). Shape (R,)."""
    m = d.size
    linear = changes @ coefficients[1 : 1 + m]
    if coefficients.size == 1 + m:
        return linear
    bend = coefficients[1 + m :].reshape(m, m)
    return linear + jnp.sum((changes @ bend) * changes, axis=1) / 2 + changes @ (bend @ d)


def move_centre(coefficients: Array, shift: Array) -> Array:
    """Expand the quadratic about another centre, `shift` from the old one."""
    m = shift.size
    slope = coefficients[1 : 1 + m]
    level = evaluate_guess(coefficients, shift)
    if coefficients.size == 1 + m:
        return jnp.concatenate([level[None], slope])
    bend = coefficients[1 + m :].reshape(m, m)
    return jnp.concatenate([level[None], slope + bend @ shift, coefficients[1 + m :]])


def expand(function: Callable[[Array], Array], x: Array, order: int) -> Array:
    """The expansion of a function about x, as C numbers."""
    level, slope = jax.value_and_grad(function)(x)
    parts = [level[None], slope]
    if order == 2:
        parts.append(jax.hessian(function)(x).ravel())
    return jnp.concatenate(parts)


class _Stage(NamedTuple):
    """State between the stages of a step: the last slope, and the weighted sum of all."""

    slope: Array
    total: Array


def _runge_kutta(slope: Callable[..., Array], y: Array, h: Array, points: Array) -> Array:
    """One step of order 4 of dy/dt = slope(y, point). points: at its beginning, middle and end."""
    reach = jnp.array([0.0, 0.5, 0.5, 1.0], y.dtype)
    weight = jnp.array([1.0, 2.0, 2.0, 1.0], y.dtype) / 6

    def stage(so_far: _Stage, at: Any) -> tuple[_Stage, None]:
        reach, weight, point = at
        k = slope(y + h * reach * so_far.slope, point).astype(y.dtype)
        return _Stage(k, so_far.total + weight * k), None

    begin, middle, end = points
    stages = (reach, weight, jnp.stack([begin, middle, middle, end]))
    last, _ = jax.lax.scan(stage, _Stage(jnp.zeros_like(y), jnp.zeros_like(y)), stages)
    return (y + h * last.total).astype(y.dtype)


class _GridStep(NamedTuple):
    """Numbers of one step of the grid. path: x̄ at its 2·DEGREE·SUBSTEPS + 1 points (·, M)."""

    t: Array
    dt: Array
    path: Array
    centre: Array


def _follow_rates(model: GuessModel, theta: Params, x0: Array, times: Times, context: Any) -> Array:
    """x̄ within every step by the rate equations. Shape (T, 2·DEGREE·SUBSTEPS + 1, M)."""
    changes = jnp.asarray(model.changes, x0.dtype)
    parts = 2 * DEGREE * SUBSTEPS

    def step(x: Array, when: Any) -> tuple[Array, Array]:
        t, dt = when

        def slope(x: Array, _: Array) -> Array:
            return model.rates(theta, x, t, context) @ changes

        def advance(x: Array, _: None) -> tuple[Array, Array]:
            x = _runge_kutta(slope, x, dt / parts, jnp.zeros(3, x0.dtype))
            return x, x

        end, inside = jax.lax.scan(advance, x, None, length=parts)
        return end, jnp.concatenate([x[None], inside])

    return jax.lax.scan(step, x0, (times.t[:-1], times.dt.astype(x0.dtype)))[1]


def _step_back(
    model: GuessModel, theta: Params, twin: Params, after: Array, step: _GridStep, context: Any
) -> tuple[Array, tuple[Array, Array]]:
    """V_n about x̄_n from V_{n+1} about x̄_{n+1}; the rows of the table of step n."""
    changes = jnp.asarray(model.changes, after.dtype)
    t, dt, path, centre = step
    m = centre.size

    def slope(coefficients: Array, x: Array) -> Array:
        def phi(y: Array) -> Array:
            rates = model.rates(twin, y, t, context)
            return rates @ evaluate_changes(coefficients, y - x, changes)

        flow = model.rates(twin, x, t, context) @ changes
        moved = coefficients[1 : 1 + m] @ flow
        parts = [moved[None]]
        if model.order == 2:
            parts += [coefficients[1 + m :].reshape(m, m) @ flow, jnp.zeros(m * m, x.dtype)]
        else:
            parts.append(jnp.zeros(m, x.dtype))
        return jnp.concatenate(parts) - expand(phi, x, model.order)

    def part_back(coefficients: Array, points: Array) -> tuple[Array, Array]:
        coefficients = _runge_kutta(slope, coefficients, -dt / (DEGREE * SUBSTEPS), points)
        return coefficients, move_centre(coefficients, centre - points[2])

    back = path[::-1]
    points = jnp.stack([back[:-2:2], back[1::2], back[2::2]], axis=1)
    before, values = jax.lax.scan(part_back, after, points)
    values = values[SUBSTEPS - 1 :: SUBSTEPS]
    at_end = move_centre(after, centre - path[-1])
    nodes = jnp.concatenate([values[::-1], at_end[None]])
    powers = jnp.asarray(_TO_POWERS, after.dtype) @ nodes

    collected = expand(
        partial(_expect_reward, model, theta, twin, step, context), path[0], model.order
    ).astype(after.dtype)
    return before + collected, (powers, move_centre(collected, centre - path[0]))


def _expect_reward(
    model: GuessModel, theta: Params, twin: Params, step: _GridStep, context: Any, x: Array
) -> Array:
    """g Δt + E[r | X_n = x], the latter by the rate equations and to second order in the noise."""
    t = step.t
    dt = step.dt
    reward = model.rewards.running(theta, x, t, context) * dt
    per_step = model.rewards.per_step
    if per_step is None:
        return reward.astype(x.dtype)
    changes = jnp.asarray(model.changes, x.dtype)

    def slope(y: Array, _: Array) -> Array:
        return model.rates(twin, y, t, context) @ changes

    ahead = _runge_kutta(slope, x, dt, jnp.zeros(3, x.dtype))
    reward = reward + per_step(theta, x, ahead, t, dt, context)
    if model.order == 2:

        def end(z: Array) -> Array:
            return per_step(theta, x, z, t, dt, context)

        rates = model.rates(twin, x, t, context)
        spread = changes.T @ (rates[:, None] * changes)
        reward = reward + jnp.sum(spread * jax.hessian(end)(ahead)) * dt / 2
    return reward.astype(x.dtype)


def solve_guess(
    model: GuessModel,
    theta: Params,
    twin: Params,
    x0: Array,
    times: Times,
    context: PyTree,
) -> ReturnGuess:
    """V of the trajectories from x0 with one context, and its derivative along θ.

    θ̃ moves with θ where it has θ's structure; else V depends on θ through the rewards alone. Any
    such family is admissible: another one costs variance.

    Args:
        model: code.
        theta: θ.
        twin: θ̃.
        x0: the start (M,).
        times: the grid.
        context: of the trajectory.

    Returns: the guess about the rate equations, at every step of the grid.
    """
    flat, unravel = ravel_pytree(theta)
    flat_twin, unravel_twin = ravel_pytree(twin)
    follows = jax.tree.map(jnp.shape, theta) == jax.tree.map(jnp.shape, twin)

    def follow(numbers: Array) -> Array:
        moved = flat_twin + (numbers - flat) if follows else flat_twin
        return _follow_rates(model, unravel_twin(moved.astype(flat_twin.dtype)), x0, times, context)

    path = jax.lax.stop_gradient(follow(flat))
    centre = jnp.concatenate([path[:, 0], path[-1:, -1]])

    def table(numbers: Array) -> GuessTable:
        moved = flat_twin + (numbers - flat) if follows else flat_twin
        th = unravel(numbers)
        th_twin = unravel_twin(moved.astype(flat_twin.dtype))
        inside = follow(numbers)
        end = inside[-1, -1]

        def terminal(x: Array) -> Array:
            return model.rewards.terminal(th, x, context).astype(x0.dtype)

        last = expand(terminal, end, model.order)

        def back(after: Array, step: _GridStep) -> tuple[Array, tuple[Array, Array]]:
            return _step_back(model, th, th_twin, after, step, context)

        steps = _GridStep(times.t[:-1], times.dt.astype(x0.dtype), inside, centre[:-1])
        first, (powers, collected) = jax.lax.scan(back, last, steps, reverse=True)
        return GuessTable(powers, collected, move_centre(last, centre[-1] - end), first)

    def both(numbers: Array) -> tuple[GuessTable, GuessTable]:
        value = table(numbers)
        return value, value

    slope, value = jax.jacfwd(both, has_aux=True)(flat)
    return ReturnGuess(centre, value, slope)


solve_shared = jit(solve_guess, static_argnums=0)
"""`solve_guess` for the one start and context of all trajectories."""


@partial(jit, static_argnums=0)
def solve_each(
    model: GuessModel, theta: Params, twin: Params, x0: Array, times: Times, context: PyTree
) -> ReturnGuess:
    """`solve_guess` for every trajectory of a batch: leaves (E, …). x0: (E, M)."""

    def solve(x: Array, context: PyTree) -> ReturnGuess:
        return solve_guess(model, theta, twin, x, times, context)

    return jax.vmap(solve)(x0, context)


def count_numbers(order: int, states: int, parameters: int, steps: int) -> int:
    """Count of the numbers in the guess of one start and context."""
    numbers = 1 + states + (states**2 if order == 2 else 0)
    return steps * (DEGREE + 2) * numbers * (1 + parameters)
