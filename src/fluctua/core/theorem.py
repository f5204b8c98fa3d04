"""The physical policy gradient theorem (Eq. 13) as sums over time: start, add one step, finish.

    G = Σ_{n=−1}^{T−1} (λ̂ₙ₊₁ − λ̄ₙ) Uₙ + Σ_n ∂θ{g(X_n, t_n) Δtₙ + r(X_n, X_{n+1})}
        + ∂θ g_0(X₀) + ∂θ g_T(X_T)

U_n is the score of step n, λ̂ₙ₊₁ = R − Cₙ₊₁ the reward still to come after it (R the whole return,
C the reward collected so far), λ̄ₙ a baseline. The draw of X₀ is step −1, with U₋₁ = ∂θ ln p₀(X₀).

The running reward at X_n precedes the kick of step n, so that λ̂ₙ₊₁ does not contain it. The step
reward r is collected on arrival at X_{n+1}, which the kick decides, so that λ̂ₙ₊₁ contains it; the
initial reward is collected on arrival at X₀.

Everything here is arithmetic on arrays of E trajectories and P parameters. What a score or a reward
is, and where trajectories come from, is decided elsewhere: `fluctua.core.model` evaluates the
terms, and `streamed`, `recorded` and `twin.sweep` call these functions step by step. All
trajectories move together: memory is O(E·P), and a baseline may compare trajectories at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp

from fluctua.core.arrays import Array

Baseline = Callable[[Array, Array], Array]
"""(λ̂ₙ₊₁ (E,), Uₙ (E, P)) -> λ̄ₙ, which broadcasts to (E, P)."""


class StepTerms(NamedTuple):
    """Contribution of one step.

    running: g(X_n, t_n) Δt (E,), collected before the kick.
    on_arrival: r(X_n, X_{n+1}) (E,), collected after it; None without such a reward.
    score: Uₙ (E, P). explicit: ∂θ{g Δt + r} at fixed states (E, P).
    survival: Wₙ (E,), the probability that a trajectory has not stopped before the step, with which
        all of these count (`fluctua.core.stopping`); None where nothing stops.
    survival_slope: ∂θ ln(Wₙ₊₁/Wₙ) at fixed states (E, P); None where it is zero.
    """

    running: Array
    on_arrival: Array | None
    score: Array
    explicit: Array
    survival: Array | None = None
    survival_slope: Array | None = None


class Sums(NamedTuple):
    """Sums over the steps so far.

    reward: C, the reward collected (E,). gradient: the terms of G (E, P). score: ΣU (E, P), with
    slopes of the survival, which corrects the gradient if the return was only a guess (`finish`).
    """

    reward: Array
    gradient: Array
    score: Array


def weigh_score(to_go: Array, score: Array, baseline: Baseline) -> Array:
    """(λ̂ₙ₊₁ − λ̄ₙ) Uₙ, the term of one kick. to_go: λ̂ₙ₊₁ (E,). Shape (E, P)."""
    return (to_go[:, None] - baseline(to_go, score)) * score


def start_sums(
    returns: Array, reward: Array, score: Array | None, explicit: Array, baseline: Baseline
) -> Sums:
    """Sums after the draw of X₀: (λ̂₀ − λ̄₋₁) U₋₁ + ∂θ g_0.

    Args:
        returns: R (E,), or a guess of it.
        reward: g_0(X₀) (E,).
        score: ∂θ ln p₀(X₀) (E, P); None where the start does not depend on θ by chance.
        explicit: ∂θ g_0 (E, P).
        baseline: of the start.

    """
    if score is None:
        return Sums(reward, explicit, jnp.zeros_like(explicit))
    kick = weigh_score(returns, score, baseline).astype(score.dtype)
    return Sums(reward, kick + explicit, score)


def add_step(sums: Sums, returns: Array, step: StepTerms, baseline: Baseline) -> Sums:
    """Add (λ̂ₙ₊₁ − λ̄ₙ) Uₙ + ∂θ{g Δt + r} to the sums. returns: R (E,), or a guess of it."""
    if step.survival is not None:
        return _add_surviving(sums, returns, step, step.survival, baseline)
    collected = sums.reward + step.running
    to_go = returns - collected  # λ̂ₙ₊₁: the running reward at n precedes the kick
    term = weigh_score(to_go, step.score, baseline) + step.explicit
    return Sums(
        reward=collected if step.on_arrival is None else collected + step.on_arrival,
        gradient=sums.gradient + term.astype(step.score.dtype),
        score=sums.score + step.score,
    )


def _add_surviving(
    sums: Sums, returns: Array, step: StepTerms, survival: Array, baseline: Baseline
) -> Sums:
    """`add_step` of trajectories that may stop: (λ̂ₙ₊₁ − Wₙλ̄ₙ) Uₙ + Wₙ ∂θ{g Δt + r}.

    λ̂ₙ₊₁ is Wₙ times what is to come for a trajectory that runs. The baseline sees the latter, and
    the score times Wₙ. A slope of the survival meets what is to come after the step.
    """
    runs = survival > 0
    rows = runs[:, None]
    weight = survival[:, None]

    def weigh(values: Array) -> Array:
        return jnp.where(runs, survival * values, 0)

    collected = sums.reward + weigh(step.running)
    to_go = returns - collected
    score = jnp.where(rows, step.score, 0)
    running_value = jnp.where(runs, to_go / jnp.where(runs, survival, 1), 0)
    bar = baseline(running_value, weight * score)
    term = (to_go[:, None] - weight * bar) * score + jnp.where(rows, weight * step.explicit, 0)
    if step.on_arrival is not None:
        collected = collected + weigh(step.on_arrival)
    if step.survival_slope is not None:
        slope = jnp.where(rows, step.survival_slope, 0)
        term = term + (returns - collected)[:, None] * slope
        score = score + slope
    return Sums(
        reward=collected,
        gradient=sums.gradient + term.astype(step.score.dtype),
        score=sums.score + score,
    )


def finish_sums(sums: Sums, explicit: Array, missing: Array | None = None) -> Array:
    """G of every trajectory, with ∂θ g_T(X_T). Shape (E, P).

    Args:
        sums: after the last step.
        explicit: ∂θ g_T (E, P).
        missing: R − R' (E,), if R' was a guess of the return R: λ̂ enters linearly, and (R − R')ΣU
            corrects the sum exactly. None if the return was known.

    """
    gradient = sums.gradient + explicit
    return gradient if missing is None else gradient + missing[:, None] * sums.score


def returns_to_go(
    rewards: Array, terminal: Array, dt: Array, arrival: Array | None = None
) -> Array:
    """Reward still to come at each time, λ̂ₙ = g_T(X_T) + Σ_{k≥n} {g(X_k, t_k)Δt_k + aₖ} (Eq. 6).

    The reward of step k is taken at X_k, so λ̂ₙ includes g(X_n) and the score of step n meets
    λ̂ₙ₊₁.

    Args:
        rewards: (E, T).
        terminal: (E,).
        dt: (T,).
        arrival: (E, T+1), aₙ, the reward collected on arrival at X_n: the initial reward, then
            r(X_{n−1}, X_n).

    Returns: (E, T+1).

    >>> rewards = jnp.array([[1.0, 2.0]])  # one trajectory, two steps
    >>> fl.returns_to_go(rewards, terminal=jnp.array([10.0]), dt=jnp.array([0.5, 0.25]))
    Array([[11. , 10.5, 10. ]], dtype=float32)
    """
    steps = jnp.concatenate([rewards * dt, terminal[:, None]], axis=1)
    steps = steps if arrival is None else steps + arrival
    return jnp.flip(jnp.cumsum(jnp.flip(steps, 1), axis=1), 1)
