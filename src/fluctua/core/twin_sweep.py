"""One block of the twin's reverse sweep: all trajectories of a batch go back through time together."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fluctua.core import sweep
from fluctua.core.baselines import Kick
from fluctua.core.simulate import grid
from fluctua.core.start import Density
from fluctua.core.twin import Guess, Numbers, TwinModel, direct_term, expand, expand_terminal
from fluctua.core.types import Array, Params, PyTree, Times


class Backward(NamedTuple):
    """What the reverse sweep carries: sums over the steps after the present one."""

    guess: Guess  # of V at the next time; one for all trajectories where their twins are the same
    value: Array  # v (E,) or (1,)
    residual: Array  # Λ (E,)
    reward: Array  # λ̂ (E,)
    direct: Array  # (E, P)
    correction: Array  # (E, P)


def advance_twin(twin: TwinModel, numbers: Numbers, xbar: Array, t: Array, dt: Array, context: PyTree) -> Array:
    """x̄ₙ₊₁ = x̄ₙ + μ̃Δt of every trajectory, or of the one that stands for all. (E, M) or (1, M)"""
    move = lambda x, c: (x + twin.process.drift(numbers.twin, x, t, c) * dt).astype(x.dtype)
    return jax.vmap(move)(xbar, context)


def end(twin: TwinModel, numbers: Numbers, x: Array, xbar: Array, times: Times, context: PyTree) -> Backward:
    """After the last step: Λ_T = g_T(X_T) − V_T(X_T), and ∂θg_T."""
    # Two compilations and not one: without a terminal reward S_T is a constant zero, and XLA's CPU backend returns
    # uninitialised memory for its product with a vector if it sees that (jaxlib 0.10.2).
    return _end(twin, numbers, *_guesses(twin, numbers.theta, xbar, context), x, xbar, times, context)


@partial(jax.jit, static_argnums=0)
def _guesses(twin: TwinModel, theta: Params, xbar: Array, context: PyTree) -> tuple[Guess, Array]:
    return jax.vmap(lambda x, c: expand_terminal(twin, theta, x, c))(xbar, context)


@partial(jax.jit, static_argnums=0)
def _end(
    twin: TwinModel,
    numbers: Numbers,
    guess: Guess,
    value: Array,
    x: Array,
    xbar: Array,
    times: Times,
    context: PyTree,
) -> Backward:
    flat, _ = ravel_pytree(numbers.theta)
    zero = jnp.zeros((x.shape[0], flat.size), flat.dtype)
    reward = sweep.terminal(twin.model, numbers.theta, x, context)
    residual = reward - value - jax.vmap(Guess.at, in_axes=(_axis(guess, x), 0))(_drop(guess, x), x - xbar)
    direct = sweep.finish(twin.model, numbers.theta, sweep.Sums(reward, zero, zero), x, times.t, context)
    return Backward(guess, value, residual, reward, direct, zero)


@partial(jax.jit, static_argnums=0)
def reverse_block(
    twin: TwinModel,
    numbers: Numbers,
    carry: Backward,
    first: Array,
    times: Times,
    x: Array,
    xbar: Array,
    context: PyTree,
    origin: Array,
) -> tuple[Backward, Array]:
    """Go back through a block of b steps that begins at step `first`.

    x: (b+1, E, M) measured or replayed. xbar: (E, M) or (1, M), the twin at the block's first time; the rest of its
    path is made again here. -> what is carried to the block before, and the mean of Λₙ at the block's times (b,).
    """
    index, t, dt = grid(times)

    def ahead(xbar: Array, step: tuple[Array, Array]) -> tuple[Array, Array]:
        return advance_twin(twin, numbers, xbar, step[0], step[1], context), xbar

    _, path = jax.lax.scan(ahead, xbar, (t, dt))

    def body(carry: Backward, step: Any) -> tuple[Backward, Array]:
        x, x_next, xbar, when = step
        carry = _step_back(twin, numbers, carry, (x, x_next, context), xbar, when, origin)
        return carry, carry.residual.mean()

    return jax.lax.scan(body, carry, (x[:-1], x[1:], path, (first + index, t, dt)), reverse=True)


def _step_back(
    twin: TwinModel,
    numbers: Numbers,
    carry: Backward,
    ensemble: tuple[Array, Array, PyTree],
    xbar: Array,
    when: tuple[Array, Array, Array],
    origin: Array,
) -> Backward:
    x, _, context = ensemble
    n, t, dt = when
    model, theta = twin.model, numbers.theta
    score, _ = sweep.scores(model, theta, ensemble, when, origin)
    kick = Kick(n, theta, x, t, context, carry.residual, score, numbers.table)
    correction = (carry.residual[:, None] - model.baseline(kick)) * score  # Λₙ₊₁: δₙ precedes the kick

    one = lambda guess, x, xbar, c: direct_term(twin, numbers, guess, x, xbar, (t, dt, origin), c)
    shared = _axis(carry.guess, x)
    direct, expected, g = jax.vmap(one, in_axes=(shared, 0, shared, 0))(
        _drop(carry.guess, x), x, _drop(xbar, x), context
    )
    back = lambda guess, xbar, c: expand(twin, numbers, guess, xbar, t, dt, c)
    guess, gain = jax.vmap(back)(carry.guess, xbar, context)
    departure = jax.vmap(Guess.at, in_axes=(shared, 0))(_drop(guess, x), x - xbar)
    delta = expected - gain - departure
    return Backward(
        guess,
        carry.value + gain,
        carry.residual + delta,
        carry.reward + g * dt.astype(g.dtype),
        carry.direct + direct.astype(score.dtype),
        carry.correction + correction.astype(score.dtype),
    )


@partial(jax.jit, static_argnums=0)
def start_terms(
    twin: TwinModel, numbers: Numbers, carry: Backward, x: Array, t: Array, context: PyTree
) -> tuple[Array, Array]:
    """Direct and correction, each (E, P), with the draw of X₀: ∂θ ln p₀ meets V₀(X₀) and Λ₀, each less its baseline."""
    model, theta = twin.model, numbers.theta
    if not isinstance(model.start, Density):
        return carry.direct, carry.correction
    one = lambda x, c: ravel_pytree(jax.grad(model.start.log_density)(theta, x, c))[0]
    score = jax.vmap(one)(x, context)

    def term(worth: Array) -> Array:
        kick = Kick(jnp.array(-1), theta, None, t, context, worth, score, None)
        return ((worth[:, None] - model.initial_baseline(kick)) * score).astype(score.dtype)

    value = jnp.broadcast_to(carry.value, carry.residual.shape)  # x̄₀ = X₀, so that V₀(X₀) = v₀
    return carry.direct + term(value), carry.correction + term(carry.residual)


def _axis(guess: Guess, x: Array) -> int | None:
    """The axis that a `vmap` over trajectories maps: none where one twin stands for all."""
    return None if guess.slope.shape[0] < x.shape[0] else 0


def _drop(tree: PyTree, x: Array) -> PyTree:
    """Without the axis of trajectories where one twin stands for all."""
    return jax.tree.map(lambda leaf: leaf[0] if leaf.shape[0] < x.shape[0] else leaf, tree)
