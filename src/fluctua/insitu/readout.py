"""Noise of the measurement itself: y = x + ε, ε ~ N(0, S) on every sample, S diagonal.

A reward of y has another mean than that of x, E[g(y) | x] = g(x) + ½ Tr[S ∂²g(x)] + O(S²). The
reward of what is measured is therefore

    g̃(y) = g(y) − ½ Tr[S ∂²g(y)],     E[g̃(y) | x] = g(x) up to O(S² ∂⁴g),

exact up to the third degree (`correct_objective`). It takes the place of g in the return, in the
baseline and in ∂θg, so that J and its gradient are those of the states. With the score of a filter,
which is that of y itself, nothing else is due: the theorem holds for any reward of y. Without a
filter the score is that of x, and at y the estimator gains two terms, derivatives at y:

    (a)  ½ Tr[S ∂²U_n] (λ̂ₙ₊₁ − λ̄ₙ)
         ε enters the score twice, through the residual and through ∂μ;
    (b)  {∇g̃ᵀ S ∂U_n/∂x' − ½ Tr[S ∂²g S ∂²U_n/∂x'²]} Δt
         ε of sample n+1 enters the residual of step n and g̃(y_{n+1}); the later ones are
         independent of U_n.

(a) is taken off the score (`fluctua.core.scores.CorrectedScore`) and (b) off each trajectory's
gradient. Exact where U and g are at most quadratic in the state, as for a linear network and the
amplitudes of its noise: g̃ and g then differ by a constant, Cov[g̃, U] = Cov[g, U] is ∇gᵀS∂U + ½
Tr[S∂²g S∂²U] of the true states, and ∇gᵀS∂U at noisy ones is larger by Tr[S∂²g S∂²U] on average.
The second part of (b) matters for parameters of the noise alone, whose score is quadratic in the
residual.

Q in the process must be that of the system: a quadratic variation that takes ε for diffusion, Q +
S/Δt, shrinks the whole gradient (`fluctua.core.likelihood.noise` separates the two).

The variance remains: a residual has variance 2QΔt + 2S, so S > QΔt wastes trajectories. Longer
intervals with `local_linear_score` get them back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core import check
from fluctua.core.arrays import Array, Params, jit, working_dtype
from fluctua.core.estimate import sample_error
from fluctua.core.objective import Objective, Rewards
from fluctua.core.process import Process, Score, Step
from fluctua.core.scores import remove_readout_bias
from fluctua.core.text import with_error
from fluctua.core.trajectories import Trajectories


@dataclass(frozen=True)
class CorrectedReward:
    """g − ½ Tr[S ∂²g], a reward of measured states whose mean is that of the true states.

    reward: g.
    variance: S (M,).
    states: number of arguments after θ that are states.
    """

    reward: Callable[..., Array]
    variance: tuple[float, ...]
    states: int = 1

    def __call__(self, theta: Params, *rest: Any) -> Array:
        """g̃, a scalar."""
        z = jnp.concatenate(rest[: self.states])
        return remove_readout_bias(
            self.join_states(theta, *rest[self.states :]), self.repeat_variance(z)
        )(z)

    def join_states(self, theta: Params, *others: Any) -> Callable[[Array], Array]:
        """g as a function of all its states concatenated, (states · M,)."""
        return lambda z: self.reward(theta, *jnp.split(z, self.states), *others)

    def repeat_variance(self, z: Array) -> Array:
        """S of all its states concatenated."""
        return jnp.tile(jnp.asarray(self.variance, z.dtype), self.states)


def correct_objective(objective: Objective, variance: np.ndarray) -> Objective:
    """Correct an objective of states for measured states with noise of variance S (M,) on them."""
    rewards = check.objective(objective)
    s = tuple(np.asarray(variance, float).tolist())
    corrected: dict[str, Any] = {}
    for name in Objective._fields:
        if getattr(objective, name) is not None:
            corrected[name] = CorrectedReward(
                getattr(rewards, name), s, 2 if name == "per_step" else 1
            )
    return Objective(**corrected)


class Remainder(NamedTuple):
    """Remainder of a correction in J.

    value, stderr: an estimate with its error.
    bound: the sum of absolute values.
    """

    value: float
    stderr: float
    bound: float


SAMPLED = 4096
"""States at which the correction of a reward is compared with an average over the readout noise."""


def measure_remainder(
    objective: Objective,
    variance: np.ndarray,
    theta: Params,
    recording: Any,
    *,
    average: bool = False,
) -> Remainder:
    """Measure what `correct_objective` leaves in J where the reward is strongly curved.

    The average over ε is by three points for each component, 0 and ±√3 s, right to the fifth
    degree.

    Args:
        objective: of the states.
        variance: S (M,).
        theta: θ.
        recording: an open one; a sample of its states is read.
        average: whether J is the long-run average of the running reward.

    Returns: a `Remainder`.
    """
    t = np.asarray(recording.t, float)
    steps = len(recording.t) - 1
    rows = min(recording.count, max(1, SAMPLED // min(steps, 16)))
    every = max(1, rows * steps // SAMPLED)
    here = slice(0, steps, every)
    used = {"running": (here,), "per_step": (here, slice(1, steps + 1, every))}
    used |= {"initial": (slice(0, 1),), "terminal": (slice(steps, steps + 1),)}
    context = jax.tree.map(lambda leaf: leaf[:rows], recording.context)
    dt = np.diff(t)[::every]
    length = 1.0 if average else float(t[-1] - t[0])
    total = np.zeros(rows)
    bound = 0.0
    for name, corrected in correct_objective(objective, variance)._asdict().items():
        if corrected is None:
            continue
        x = [recording.x[:rows, times] for times in used[name]]
        states = tuple(jnp.asarray(part, working_dtype(theta, part)) for part in x)
        each = np.asarray(
            _compute_remainders(corrected, name, theta, states, t[:steps:every], dt, context), float
        )
        weight = {
            "running": dt * length / dt.sum(),
            "per_step": np.full(len(dt), steps / len(dt)),
        }.get(name, np.ones(1))
        total += each.sum(axis=2) @ weight
        bound += float(np.mean(np.abs(each).sum(axis=2) @ weight))
    error = sample_error(total) if rows > 1 else np.inf
    return Remainder(float(total.mean()), float(error), bound)


@partial(jit, static_argnums=(0, 1))
def _compute_remainders(
    corrected: CorrectedReward,
    name: str,
    theta: Params,
    states: tuple[Array, ...],
    t: Array,
    dt: Array,
    context: Any,
) -> Array:
    """E[g(z + ε_i)] − g(z) − ½ S_ii ∂²g/∂z_i² of each component. Returns (E, N, states · M)."""

    def one(states: tuple[Array, ...], t: Array, dt: Array, context: Any) -> Array:
        others = {"running": (t, context), "per_step": (t, dt, context)}.get(name, (context,))
        z = jnp.concatenate(states)
        reward = corrected.join_states(theta, *others)
        s = corrected.repeat_variance(z)

        def along(i: Array) -> Array:
            def moved(h):
                return reward(z.at[i].add(h))

            zero = jnp.zeros((), z.dtype)
            far = jnp.sqrt(3 * s[i])
            second = jax.jvp(
                lambda h: jax.jvp(moved, (h,), (jnp.ones_like(h),))[1],
                (zero,),
                (jnp.ones_like(zero),),
            )[1]
            return (moved(far) - 2 * moved(zero) + moved(-far)) / 6 - s[i] * second / 2

        return jax.lax.map(along, jnp.arange(len(z)))

    many = states[0].shape[1]
    times = (t[:many], dt[:many])
    along_time = jax.vmap(one, in_axes=(0, 0, 0, None))
    return jax.vmap(along_time, in_axes=(0, None, None, 0))(states, *times, context)


def warn_about_remainder(remainder: Remainder, value_stderr: float, stacklevel: int = 2) -> None:
    """Warn where the correction of the reward may leave more in J than its standard error."""
    if remainder.bound > value_stderr:
        warnings.warn(
            "the reward bends on the scale of the readout noise, so that its correction to "
            f"second order leaves {with_error(remainder.value, remainder.stderr)} in J, and at "
            f"most {remainder.bound:.2g} (J is known to {value_stderr:.2g}). The gradient is that "
            "of the corrected reward. Reduce the readout noise or use a smoother reward.",
            RuntimeWarning,
            stacklevel=stacklevel + 1,
        )


@partial(jit, static_argnums=(0, 1, 2))
def compute_reward_term(
    process: Process,
    rewards: Rewards,
    score: Score,
    variance: Array,
    theta: Params,
    data: Trajectories,
) -> Array:
    """Term (b) of each trajectory, Σ_n {∇g̃ᵀ S ∂U_n/∂x' − ½ Tr[S ∂²g S ∂²U_n/∂x'²]} Δt_{n+1}.

    The last one is of the terminal reward.

    score: without term (a).
    variance: S (M,).
    data: y, in memory.

    Returns (E, P), in the order of `ravel_pytree`.
    """
    t = jnp.asarray(data.t)
    dt = jnp.diff(jnp.asarray(data.t))
    steps = dt.shape[0]

    def one(x: Array, context: Any) -> Array:
        def body(total: Array, n: Array) -> tuple[Array, None]:
            after = x[n + 1]
            last = n == steps - 1
            weight = dt[jnp.minimum(n + 1, steps - 1)]

            def reward(z: Array) -> Array:
                running = rewards.running(theta, z, t[n + 1], context) * weight
                return jnp.where(last, rewards.terminal(theta, z, context), running)

            corrected = remove_readout_bias(reward, variance)  # g̃ is what meets U
            push = (jax.grad(corrected)(after) * variance).astype(after.dtype)
            bend = (jax.hessian(reward)(after) * variance * variance[:, None]).astype(after.dtype)
            step = Step(x[n], after, t[n], dt[n], context)

            def u(z):
                return ravel_pytree(score(process, theta, step._replace(x_next=z)))[0]

            def add(i: Array, second: Array) -> Array:
                along = jnp.zeros_like(after).at[i].set(1)

                def slope(z):
                    return jax.jvp(u, (z,), (along,))[1]

                return second + jax.jvp(slope, (after,), (bend[i],))[1]

            first = jax.jvp(u, (after,), (push,))[1]
            second = jax.lax.fori_loop(0, after.shape[0], add, jnp.zeros_like(first))
            return total + first - second / 2, None

        size = ravel_pytree(theta)[0].size
        return jax.lax.scan(body, jnp.zeros(size, x.dtype), jnp.arange(steps))[0]

    return jax.vmap(one)(jnp.asarray(data.x), data.context)


def subtract_rows(each: Params, off: Array, theta: Params) -> Params:
    """Subtract rows (E, P) from per-trajectory gradients, leaves (E, ...)."""
    _, unravel = ravel_pytree(theta)
    return jax.tree.map(
        lambda g, d: g - d, each, jax.vmap(unravel)(off.astype(jax.tree.leaves(theta)[0].dtype))
    )


def check_observation_variance(variance: Any, size: int) -> np.ndarray:
    """Return S as (M,); refuse negative or infinite values."""
    s = np.asarray(variance, float)
    if s.shape not in ((), (size,)) or not np.all(np.isfinite(s)) or np.any(s < 0):
        raise ValueError(
            "the variance of the observation noise is one number ≥ 0, or "
            f"({size},); got {variance!r}."
        )
    return np.broadcast_to(s, (size,)).copy()
