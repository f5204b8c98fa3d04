"""Noise of the measurement itself: y = x + ε, ε ~ N(0, S) on every sample, S diagonal.

The estimator computed from y in place of x gains three terms, all derivatives at y:

    (a)  ½ Tr[S ∂²U_n] (λ̂ₙ₊₁ − λ̄ₙ)            ε sits twice in the score, through the residual and through ∂μ
    (b)  {∇gᵀ S ∂U_n/∂x' − ½ Tr[S ∂²g S ∂²U_n/∂x'²]} Δt      ε of sample n+1 sits in the residual of step n and in
                                                g(y_{n+1})
    (c)  U_n ½ Tr[S ∂²g]                        not a bias: the gradient of the reward as it is measured

(a) is taken off the score (`fluctua.core.scores.CorrectedScore`) and (b) off each trajectory's gradient. Exact where U
and g are at most quadratic in the state, as for a linear network and the amplitudes of its noise: Cov[g, U] is then
∇gᵀS∂U + ½ Tr[S∂²g S∂²U] of the true states, and ∇gᵀS∂U at noisy ones is larger by Tr[S∂²g S∂²U] on average. The second
part of (b) matters for parameters of the noise alone, whose score is quadratic in the residual.

Q in the process must be that of the system: a quadratic variation that takes ε for diffusion, Q + S/Δt, shrinks the
whole gradient (`fluctua.insitu.calibration.noise` separates the two).

The variance remains: a residual has variance 2QΔt + 2S, so S > QΔt wastes trajectories. Longer intervals with
`local_linear_score` get them back.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core.types import Array, Params, Process, Rewards, Score, Step, Trajectories


@partial(jax.jit, static_argnums=(0, 1, 2))
def reward_term(
    process: Process, rewards: Rewards, score: Score, variance: Array, theta: Params, data: Trajectories
) -> Array:
    """Term (b), Σ_n {∇gᵀ S ∂U_n/∂x' − ½ Tr[S ∂²g S ∂²U_n/∂x'²]} Δt_{n+1} and the terminal reward's, of each trajectory.

    score: without term (a). variance: S (M,). data: y, in memory. Returns (E, P), in the order of `ravel_pytree`.
    """
    t, dt = jnp.asarray(data.t), jnp.diff(jnp.asarray(data.t))
    steps = dt.shape[0]

    def one(x: Array, context: Any) -> Array:
        def body(total: Array, n: Array) -> tuple[Array, None]:
            after = x[n + 1]
            last, weight = n == steps - 1, dt[jnp.minimum(n + 1, steps - 1)]

            def reward(z: Array) -> Array:
                running = rewards.running(theta, z, t[n + 1], context) * weight
                return jnp.where(last, rewards.terminal(theta, z, context), running)

            push = (jax.grad(reward)(after) * variance).astype(after.dtype)
            bend = (jax.hessian(reward)(after) * variance * variance[:, None]).astype(after.dtype)
            step = Step(x[n], after, t[n], dt[n], context)
            u = lambda z: ravel_pytree(score(process, theta, step._replace(x_next=z)))[0]

            def add(i: Array, second: Array) -> Array:
                along = jnp.zeros_like(after).at[i].set(1)
                slope = lambda z: jax.jvp(u, (z,), (along,))[1]
                return second + jax.jvp(slope, (after,), (bend[i],))[1]

            first = jax.jvp(u, (after,), (push,))[1]
            second = jax.lax.fori_loop(0, after.shape[0], add, jnp.zeros_like(first))
            return total + first - second / 2, None

        size = ravel_pytree(theta)[0].size
        return jax.lax.scan(body, jnp.zeros(size, x.dtype), jnp.arange(steps))[0]

    return jax.vmap(one)(jnp.asarray(data.x), data.context)


def subtract(each: Params, off: Array, theta: Params) -> Params:
    """Per-trajectory gradients, leaves (E, ...), less rows (E, P)."""
    _, unravel = ravel_pytree(theta)
    return jax.tree.map(lambda g, d: g - d, each, jax.vmap(unravel)(off.astype(jax.tree.leaves(theta)[0].dtype)))


def observation_variance(variance: Any, size: int) -> np.ndarray:
    """S as (M,), not negative."""
    s = np.asarray(variance, float)
    if s.shape not in ((), (size,)) or not np.all(np.isfinite(s)) or np.any(s < 0):
        raise ValueError(f"the variance of the observation noise is one number ≥ 0, or ({size},); got {variance!r}.")
    return np.broadcast_to(s, (size,)).copy()
