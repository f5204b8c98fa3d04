"""Two ways to less variance that need no twin, for the table of `benchmarks/estimators.py`. They
lost there, so they live here and not in the library.

`leave_out_groups`: G trajectories share one modulation, and the baseline is the mean return-to-go
of the others in the group. `critic`: V_n(x) = v_n + q_n·(x − m_n) fitted to the returns-to-go of
earlier trajectories and used as the twin's would be. Both are unbiased. JAX, one scan over the
steps.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua import tcmt

Samples = dict[str, np.ndarray]


class Values(NamedTuple):
    """A linear value function on the whole grid: v (T+1,), q and m (T+1, 2N)."""

    v: jax.Array
    q: jax.Array
    m: jax.Array


def draws(task: tcmt.Task, key: jax.Array, count: int, group: int = 1) -> Any:
    """Modulations of `count` trajectories, one for each group of them; None without modulation."""
    if task.context is None:
        return None
    each = jax.vmap(lambda k: task.context.draw(key, k))(
        jnp.arange(count // group, dtype=jnp.uint32)
    )
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, group, axis=0), each)


def leave_out_groups(
    task: tcmt.Task, theta: dict[str, jax.Array], key: jax.Array, count: int, group: int = 16
) -> Samples:
    """Σ_n (λ̂ₙ₊₁ − mean of the others' λ̂ₙ₊₁)Uₙ, trajectory by trajectory. Leaves (E, ·)"""
    k_context, k_noise = jax.random.split(key)
    samples = _leave_out_groups(
        task.process,
        task.objective,
        group,
        count,
        theta,
        jnp.asarray(task.t, jnp.float32),
        draws(task, k_context, count, group),
        k_noise,
    )
    return {name: np.asarray(value) for name, value in samples.items()}


def critic(
    task: tcmt.Task,
    theta: dict[str, jax.Array],
    key: jax.Array,
    count: int,
    learn: int = 1000,
    knots: int = 100,
) -> Samples:
    """Σ_n q_{n+1}·∂μΔt + Σ_n Λ_{n+1}U_n with V fitted to `learn` other trajectories at `knots`
    times.
    """
    k_learn, k_context, k_noise = jax.random.split(key, 3)
    backend = "cpu" if jax.default_backend() == "cpu" else "cuda"
    kernel: Any = task.estimator(backend, baseline="none")
    every = (len(task.t) - 1) // knots
    result = kernel.run(k_learn, theta, learn, record_every=every, scores=False)
    values = fit_returns(task, theta, result.trajectories, result.returns, every)
    samples = _critic(
        task.process,
        task.objective,
        count,
        theta,
        jnp.asarray(task.t, jnp.float32),
        draws(task, k_context, count),
        k_noise,
        values,
    )
    return {name: np.asarray(value) for name, value in samples.items()}


def fit_returns(
    task: tcmt.Task, theta: Any, psi: np.ndarray, returns: np.ndarray, every: int
) -> Values:
    """Ridge regression of the returns-to-go on the states at each knot, joined by straight
    lines. psi (E, K+1, N)
    """
    x = np.concatenate([psi.real, psi.imag], axis=-1).astype(np.float64)
    step = float(task.t[1] - task.t[0]) * every
    rate = np.asarray(
        jax.vmap(jax.vmap(lambda s: task.objective.running(theta, s, 0.0)))(
            jnp.asarray(x, jnp.float32)
        )
    )
    trapezes = np.cumsum((rate[:, 1:] + rate[:, :-1]) / 2 * step, axis=1)
    to_go = np.pad(trapezes, ((0, 0), (1, 0)))[:, -1:] - np.pad(trapezes, ((0, 0), (1, 0)))
    m, v = x.mean(axis=0), to_go.mean(axis=0)
    q = np.zeros_like(m)
    for k in range(1, x.shape[1] - 1):
        d, y = x[:, k] - m[k], to_go[:, k] - v[k]
        gram = d.T @ d
        q[k] = np.linalg.solve(
            gram + 0.03 * np.trace(gram) / len(gram) * np.eye(len(gram)), d.T @ y
        )
    at, knots = np.asarray(task.t), np.asarray(task.t)[::every]

    def spread(table):
        return jnp.asarray(
            np.stack([np.interp(at, knots, c) for c in table.T], axis=-1), jnp.float32
        )

    return Values(spread(v[:, None])[:, 0], spread(q), spread(m))


def _transition(
    process: Any, theta: Any, x: jax.Array, t: jax.Array, dt: jax.Array, context: Any, z: jax.Array
) -> Any:
    """μΔt, the kick r, the pullback of μ to θ, and the score, of one trajectory."""
    drift, pull = jax.vjp(lambda p: process.drift(p, x, t, context), theta)
    sigma = process.noise(theta, x, t, context)
    return drift * dt, sigma * jnp.sqrt(dt) * z, pull, pull(jnp.sqrt(dt) * z / sigma)[0]


def _zeros(theta: Any, count: int) -> Any:
    return jax.tree.map(lambda v: jnp.zeros((count, *v.shape), jnp.float32), theta)


def _add(total: Any, weight: jax.Array, score: Any) -> Any:
    return jax.tree.map(lambda a, u: a + weight[:, None] * u, total, score)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _leave_out_groups(
    process: Any, objective: Any, group: int, count: int, theta: Any, t: Any, context: Any, key: Any
) -> Any:
    dt = (t[-1] - t[0]) / (len(t) - 1)

    def above_the_others(v: jax.Array) -> jax.Array:
        of = v.reshape(-1, group)
        return ((of - of.mean(axis=1, keepdims=True)) * (group / (group - 1))).ravel()

    def step(carry: Any, n: jax.Array) -> Any:
        x, c, plain, weighted = carry
        z = jax.random.normal(jax.random.fold_in(key, n), x.shape)
        one = partial(_transition, process, theta)
        axes = (0, None, None, None if context is None else 0, 0)
        move, kick, _, score = jax.vmap(lambda *a: _no_pull(one(*a)), axes)(x, t[n], dt, context, z)
        c = c + dt * jax.vmap(lambda s: objective.running(theta, s, t[n]))(x)
        ones = jnp.ones(count)
        return (
            x + move + kick,
            c,
            _add(plain, ones, score),
            _add(weighted, above_the_others(c), score),
        ), None

    start = (
        jnp.zeros((count, _width(process, theta))),
        jnp.zeros(count),
        _zeros(theta, count),
        _zeros(theta, count),
    )
    (_, returns, plain, weighted), _ = jax.lax.scan(step, start, jnp.arange(len(t) - 1))
    advantage = above_the_others(returns)
    return jax.tree.map(lambda a, b: advantage[:, None] * a - b, plain, weighted)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _critic(
    process: Any,
    objective: Any,
    count: int,
    theta: Any,
    t: Any,
    context: Any,
    key: Any,
    values: Values,
) -> Any:
    dt = (t[-1] - t[0]) / (len(t) - 1)

    def value(n, x):
        return values.v[n] + (x - values.m[n]) @ values.q[n]

    def step(carry: Any, n: jax.Array) -> Any:
        x, so_far, plain, weighted, direct = carry
        z = jax.random.normal(jax.random.fold_in(key, n), x.shape)

        def one(*a: Any) -> Any:
            move, kick, pull, score = _transition(process, theta, *a)
            return move, kick, score, pull(values.q[n + 1] * dt)[0]

        axes = (0, None, None, None if context is None else 0, 0)
        move, kick, score, first = jax.vmap(one, axes)(x, t[n], dt, context, z)
        reward = dt * jax.vmap(lambda s: objective.running(theta, s, t[n]))(x)
        so_far = so_far + reward + value(n + 1, x + move) - value(n, x)
        ones = jnp.ones(count)
        carry = (
            x + move + kick,
            so_far,
            _add(plain, ones, score),
            _add(weighted, so_far, score),
            _add(direct, ones, first),
        )
        return carry, None

    empty = _zeros(theta, count)
    start = (jnp.zeros((count, _width(process, theta))), jnp.zeros(count), empty, empty, empty)
    (_, total, plain, weighted, direct), _ = jax.lax.scan(step, start, jnp.arange(len(t) - 1))
    return jax.tree.map(lambda d, a, b: d + total[:, None] * a - b, direct, plain, weighted)


def _no_pull(parts: Any) -> Any:
    move, kick, _, score = parts
    return move, kick, 0.0, score


def _width(process: Any, theta: Any) -> int:
    return 2 * theta["omega"].shape[0]
