"""The twin of a jump process: a guess at the remaining return, and the score for the rest.

Let V(x, t; θ) be any guess at the return that is still to come (`fluctua.processes.jump_guess`). By
Dynkin's formula, with event rates a_i, changes ν_i and ΔV_i(x, t) = V(x + ν_i, t) − V(x, t), the
mean of the return is that of V₀(X₀) and of what the guess leaves over,

    J = E[g_0(X₀) + V₀(X₀) + Λ₀],        Λ_s = ∫_s^T B dt + Σ_{t_n ≥ s} δ_n + g_T(X_T) − V_T(X_T),
    B(x, t) = ∂tV + Σ_i a_i ΔV_i,        δ_n = g(X_n)Δt + V_{n+}(X_n) − V_n(X_n),

since ∫ Σ_i ΔV_i (dN_i − a_i dt) has mean zero. That is the return of another objective, with the
same mean at every θ, and the theorem holds for it:

    ∇J = E[∂θ{g_0 + V₀(X₀)} + ∂θΛ₀]                              "direct"
       + E[∫ (Λ_s − λ̄) dU_s],                                   "correction"
    dU_s = Σ_i ∂θ ln a_i (dN_i − a_i ds).

∂θ of B is at fixed states: Σ_i ∂θa_i ΔV_i + ∂t∂θV + Σ_i a_i Δ(∂θV)_i. Nothing here is an
approximation: a wrong guess costs variance and no bias. If V is the mean of the remaining return, B
is zero and every trajectory gives the gradient itself.

Rates and states are constant between two events, and V is a polynomial in time within a step, so
three Gauss nodes give the integrals over each wait exactly. With U the score of the step up to time
r, its own events meet ∫_s^{t_{n+1}} B dr as ∫ U(r) B(r) dr, which is known when the step ends.

A reward r(X_n, X_{n+1}) of a step joins V within the step as its expansion ρ(x) about X_n; what is
left on arrival, r − ρ(X_{n+1}), meets the score of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core.arrays import Array, Params, PyTree
from fluctua.core.objective import Rewards
from fluctua.core.process import Step
from fluctua.processes import jump_guess
from fluctua.processes.jump_guess import DEGREE

_GAUSS = np.polynomial.legendre.leggauss(3)
NODES = (_GAUSS[0] + 1) / 2
WEIGHTS = _GAUSS[1] / 2
"""Of three Gauss nodes in [0, 1]: exact up to degree 5, that of (r − s)B(r)."""


class GuessRow(NamedTuple):
    """V in one step: rows of a `GuessTable`, and of its derivative along θ with P behind.

    centre: x̄_n (M,). powers: (DEGREE+1, C). collected: (C,).
    """

    centre: Array
    powers: Array
    powers_slope: Array
    collected: Array
    collected_slope: Array


def select_row(guess: jump_guess.ReturnGuess, n: Array) -> GuessRow:
    """V in step n."""
    return GuessRow(
        guess.centre[n],
        guess.value.powers[n],
        guess.slope.powers[n],
        guess.value.collected[n],
        guess.slope.collected[n],
    )


class WaitSums(NamedTuple):
    """Sums over the waits of a step so far.

    residual: ∫B dt. direct: ∂θ∫B dt (P,). weighted: ∫ U B dt (P,), U the score since the step
    began.
    """

    residual: Array
    direct: Array
    weighted: Array


class Wait(NamedTuple):
    """A time without events.

    x: the state (M,). begin, end: times since the step began. score: of the step before it, like θ.
    """

    x: Array
    begin: Array
    end: Array
    score: Params


class Observer(NamedTuple):
    """A sum over the waits of a step.

    begin: before the first. add: (sums, wait) -> sums.
    """

    begin: PyTree
    add: Callable[[PyTree, Wait], PyTree]


class EventRates(Protocol):
    """The part of a jump process that integrals over waits use."""

    @property
    def rates(self) -> Callable[..., Array]:
        """(theta, x, t, context) -> a (R,)."""

    @property
    def changes(self) -> Any:
        """ν, rows (R, M)."""


def start_wait_sums(theta: Params, dtype: Any) -> WaitSums:
    """Sums before the first wait."""
    flat, _ = ravel_pytree(theta)
    zero = jnp.zeros(flat.size, flat.dtype)
    return WaitSums(jnp.zeros((), dtype), zero, zero)


class WaitIntegrals(NamedTuple):
    """Integrals over one wait, from time s on. residual: ∫B dr. lever: ∫(r − s) B dr."""

    residual: Array
    lever: Array


def integrate_wait(
    process: EventRates, theta: Params, powers: Array, centre: Array, step: Step, wait: Wait
) -> WaitIntegrals:
    """∫B dr and ∫(r − s)B dr over a wait. step: its t, Δt and context. powers: V, with ρ in it."""
    x = wait.x
    dt = step.dt.astype(x.dtype)
    length = wait.end - wait.begin
    nodes = jnp.asarray(NODES, x.dtype)
    weights = jnp.asarray(WEIGHTS, x.dtype)
    changes = jnp.asarray(process.changes, x.dtype)
    d = x - centre
    values = jax.vmap(jump_guess.evaluate_guess, in_axes=(0, None))(powers, d)
    moves = jax.vmap(jump_guess.evaluate_changes, in_axes=(0, None, None))(powers, d, changes)
    gains = moves @ process.rates(theta, x, step.t, step.context).astype(x.dtype)
    u = (wait.begin + length * nodes) / dt
    left = gains[0] + values[1] / dt
    for k in range(1, DEGREE + 1):  # B at the nodes: Σ_k u^k {gain_k + (k+1) value_{k+1}/Δt}
        rise = (k + 1) * values[k + 1] / dt if k < DEGREE else 0.0
        left = left + u**k * (gains[k] + rise)
    residual = length * (weights @ left)
    lever = length**2 * ((weights * nodes) @ left)
    return WaitIntegrals(residual, lever)


def add_residual(
    process: EventRates, theta: Params, row: GuessRow, step: Step, sums: Array, wait: Wait
) -> Array:
    """Add ∫B dr of one wait to that of the step."""
    return sums + integrate_wait(process, theta, row.powers, row.centre, step, wait).residual


def add_wait(
    process: EventRates, theta: Params, row: GuessRow, step: Step, sums: WaitSums, wait: Wait
) -> WaitSums:
    """Add one wait to the sums. row: with ρ, if there is one."""

    def integrate(theta: Params, powers: Array) -> tuple[Array, Array]:
        return integrate_wait(process, theta, powers, row.centre, step, wait)

    def total_rate(theta: Params) -> Array:
        return jnp.sum(process.rates(theta, wait.x, step.t, step.context))

    slopes = jax.value_and_grad(integrate, argnums=(0, 1), has_aux=True)(theta, row.powers)
    (residual, lever), (of_rates, of_guess) = slopes
    direct = ravel_pytree(of_rates)[0] + of_guess.ravel() @ row.powers_slope.reshape(
        of_guess.size, -1
    )
    # U(r) = U − ∂θΣa_i (r − s): events add to it at the end of the wait
    score = ravel_pytree(wait.score)[0]
    leaving = ravel_pytree(jax.grad(total_rate)(theta))[0]
    weighted = score * residual - leaving * lever
    return WaitSums(
        (sums.residual + residual).astype(sums.residual.dtype),
        (sums.direct + direct).astype(sums.direct.dtype),
        (sums.weighted + weighted).astype(sums.weighted.dtype),
    )


# ------------------------------------------------------------------------------ ends of the step


def expand_step_reward(rewards: Rewards, theta: Params, row: GuessRow, step: Step) -> GuessRow:
    """The row with ρ, the expansion of the reward r(X_n, ·) about X_n; unchanged without one."""
    x = step.x
    per_step = rewards.per_step
    if per_step is None:
        return row
    order = 1 if row.collected.size == 1 + x.size else 2

    def expand(theta: Params) -> Array:
        def reward(z: Array) -> Array:
            return per_step(theta, x, z, step.t, step.dt, step.context).astype(x.dtype)

        return jump_guess.move_centre(jump_guess.expand(reward, x, order), row.centre - x)

    rho = expand(theta)
    slopes = jax.jacrev(expand)(theta)
    rows = [leaf.reshape(rho.size, -1) for leaf in jax.tree.leaves(slopes)]
    slope = jnp.concatenate(rows, axis=1)

    def add_constant(powers: Array, constant: Array) -> Array:
        return jnp.concatenate([powers[:1] + constant[None].astype(powers.dtype), powers[1:]])

    return row._replace(
        powers=add_constant(row.powers, rho),
        powers_slope=add_constant(row.powers_slope, slope),
    )


class StepResult(NamedTuple):
    """Terms of one step for the theorem.

    residual: its part of Λ. score: U (P,). direct, weighted: terms of the two parts (P,). reward:
    g Δt + r.
    """

    residual: Array
    score: Array
    direct: Array
    weighted: Array
    reward: Array


def finish_step(
    rewards: Rewards, theta: Params, row: GuessRow, step: Step, sums: WaitSums, score: Params
) -> StepResult:
    """Add δ_n and what is left of the reward of the step. row: without ρ; step: both ends."""
    x, x_next, t, dt, context, _ = step
    dt = dt.astype(x.dtype)
    per_step = rewards.per_step
    order = 1 if row.collected.size == 1 + x.size else 2

    def collect(theta: Params, collected: Array) -> tuple[Array, Array]:
        """(δ_n, g Δt), with ρ(X_n) in δ_n."""
        running = rewards.running(theta, x, t, context).astype(x.dtype) * dt
        delta = running - jump_guess.evaluate_guess(collected, x - row.centre)
        if per_step is not None:
            delta = delta + per_step(theta, x, x, t, step.dt, context).astype(x.dtype)
        return delta, running

    slopes = jax.value_and_grad(collect, argnums=(0, 1), has_aux=True)(theta, row.collected)
    (delta, reward), (explicit, of_guess) = slopes
    direct = sums.direct + ravel_pytree(explicit)[0] + of_guess @ row.collected_slope
    flat = ravel_pytree(score)[0]
    residual = sums.residual + delta
    weighted = sums.weighted
    if per_step is not None:

        def arrive(theta: Params) -> tuple[Array, Array]:
            """(r − ρ(X_{n+1}), r)."""

            def reward_at(z: Array) -> Array:
                return per_step(theta, x, z, t, step.dt, context).astype(x.dtype)

            r = reward_at(x_next)
            rho = jump_guess.evaluate_guess(jump_guess.expand(reward_at, x, order), x_next - x)
            return r - rho, r

        (left, r), of_left = jax.value_and_grad(arrive, has_aux=True)(theta)
        residual = residual + left
        direct = direct + ravel_pytree(of_left)[0]
        weighted = weighted + flat * left
        reward = reward + r
    return StepResult(residual, flat, direct.astype(flat.dtype), weighted, reward)


class PathEnd(NamedTuple):
    """Remainder at the end: g_T − V_T, its explicit slope (P,), and g_T."""

    residual: Array
    direct: Array
    reward: Array


def finish_path(
    rewards: Rewards, theta: Params, guess: jump_guess.ReturnGuess, x: Array, context: PyTree
) -> PathEnd:
    """The terminal reward of one trajectory, less its guess."""

    def subtract_guess(theta: Params, last: Array) -> tuple[Array, Array]:
        reward = rewards.terminal(theta, x, context).astype(x.dtype)
        return reward - jump_guess.evaluate_guess(last, x - guess.centre[-1]), reward

    slopes = jax.value_and_grad(subtract_guess, argnums=(0, 1), has_aux=True)(
        theta, guess.value.last
    )
    (residual, reward), (explicit, of_guess) = slopes
    direct = ravel_pytree(explicit)[0] + of_guess @ guess.slope.last
    return PathEnd(residual, direct, reward)
