"""The return-to-go: the sampled Feynman–Kac adjoint."""

from __future__ import annotations

import jax.numpy as jnp

from fluctua.core.types import Array


def returns_to_go(rewards: Array, terminal: Array, dt: Array) -> Array:
    """Reward still to come at each time, λ̂ₙ = g_T(X_T) + Σ_{k≥n} g(X_k, t_k)Δt_k (Eq. 6).

    rewards (E, T), terminal (E,), dt (T,) -> (E, T+1). The reward of step k is taken at X_k, so λ̂ₙ
    includes g(X_n) and the score of step n meets λ̂ₙ₊₁.

    >>> returns_to_go(jnp.array([[1.0, 2.0]]), jnp.array([10.0]), jnp.array([0.5, 0.25]))
    Array([[11. , 10.5, 10. ]], dtype=float32)
    """
    steps = jnp.concatenate([rewards * dt, terminal[:, None]], axis=1)
    return jnp.flip(jnp.cumsum(jnp.flip(steps, 1), axis=1), 1)
