"""One step of the twin's reverse sweep, and a block of steps.

The guess at the value goes back from the end of the trajectories together with the two parts of the
gradient: what the twin predicts, and the correction by what is measured.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fluctua.core import model as terms
from fluctua.core import simulate
from fluctua.core.arrays import Array, Params, PyTree, jit
from fluctua.core.baselines import Inputs
from fluctua.core.integrators import mean_rate
from fluctua.core.process import Step
from fluctua.core.theorem import weigh_score
from fluctua.core.trajectories import Times
from fluctua.core.twin import correction as twin_terms
from fluctua.core.twin.correction import Guess, Numbers, TwinModel


class States(NamedTuple):
    """States of trajectories and their twins at one time.

    x: measured or simulated (E, M). xbar: of the twin, (E, M), or (1, M) where one stands for all.
    """

    x: Array
    xbar: Array


class LastGuess(NamedTuple):
    """The guess at the value at the last time, and its level on the twin's path."""

    guess: Guess
    value: Array


class Backward(NamedTuple):
    """Sums of the reverse sweep over the steps after the present one.

    guess: of V at the next time; one for all trajectories where their twins are the same.
    value: v (E,) or (1,).
    residual: Λ (E,).
    reward: λ̂ (E,).
    direct: (E, P).
    correction: (E, P).
    """

    guess: Guess
    value: Array
    residual: Array
    reward: Array
    direct: Array
    correction: Array


def advance_twin(
    twin: TwinModel, numbers: Numbers, xbar: Array, t: Array, dt: Array, context: PyTree
) -> Array:
    """x̄ₙ₊₁ = m̃(x̄ₙ, Δt) of every trajectory, or of the one that stands for all.

    (E, M) or (1, M)
    """

    def move(x, c):
        return (x + mean_rate(twin.process, numbers.twin, x, t, dt, c) * dt).astype(x.dtype)

    return jax.vmap(move)(xbar, context)


def start_backward(
    twin: TwinModel, numbers: Numbers, last: States, times: Times, context: PyTree
) -> Backward:
    """The sums before the reverse sweep: Λ_T = g_T(X_T) − V_T(X_T), and ∂θg_T."""
    # Two compilations and not one: without a terminal reward S_T is a constant zero, and XLA's CPU
    # backend returns uninitialised memory for its product with a vector if it sees that (jaxlib
    # 0.10.2).
    guess = _expand_last(twin, numbers.theta, last.xbar, context)
    return _start_sums(twin, numbers, guess, last, times, context)


@partial(jit, static_argnums=0)
def _expand_last(twin: TwinModel, theta: Params, xbar: Array, context: PyTree) -> LastGuess:
    expand = jax.vmap(lambda x, c: twin_terms.expand_terminal(twin, theta, x, c))
    return LastGuess(*expand(xbar, context))


@partial(jit, static_argnums=0)
def _start_sums(
    twin: TwinModel,
    numbers: Numbers,
    last: LastGuess,
    states: States,
    times: Times,
    context: PyTree,
) -> Backward:
    x = states.x
    guess = last.guess
    flat, _ = ravel_pytree(numbers.theta)
    zero = jnp.zeros((x.shape[0], flat.size), flat.dtype)
    reward = terms.terminal_rewards(twin.model.objective, numbers.theta, x, context)
    depart = jax.vmap(Guess.at, in_axes=(_axis(guess, x), 0))
    residual = reward - last.value - depart(_drop(guess, x), x - states.xbar)
    direct = zero + terms.terminal_slopes(twin.model, numbers.theta, x, times.t, context)
    return Backward(guess, last.value, residual, reward, direct, zero)


@partial(jit, static_argnums=0)
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

    x: (b+1, E, M) measured or replayed. xbar: (E, M) or (1, M), the twin at the block's first time;
    the rest of its path is made again here. -> what is carried to the block before, and the mean of
    Λₙ at the block's times (b,).
    """
    index, t, dt = simulate.enumerate_steps(times)

    def follow(xbar: Array, step: Any) -> tuple[Array, Array]:
        t, dt = step
        return advance_twin(twin, numbers, xbar, t, dt, context), xbar

    _, path = jax.lax.scan(follow, xbar, (t, dt))

    def body(carry: Backward, step: Any) -> tuple[Backward, Array]:
        xbar, n, t, dt, x, x_next = step
        moment = terms.Moment(n, t, dt, x, x_next, context)
        carry = _step_back(twin, numbers, carry, moment, xbar, origin)
        return carry, carry.residual.mean()

    steps = (path, first + index, t, dt, x[:-1], x[1:])
    return jax.lax.scan(body, carry, steps, reverse=True)


def _step_back(
    twin: TwinModel,
    numbers: Numbers,
    carry: Backward,
    moment: terms.Moment,
    xbar: Array,
    origin: Array,
) -> Backward:
    model = twin.model
    theta = numbers.theta
    x = moment.x

    def predict(
        guess: Guess, x: Array, x_next: Array, xbar: Array, context: PyTree
    ) -> twin_terms.DirectTerms:
        step = Step(x, x_next, moment.t, moment.dt, context)
        return twin_terms.direct_terms(twin, numbers, guess, step, xbar, origin)

    shared = _axis(carry.guess, x)
    predicted = jax.vmap(predict, in_axes=(shared, 0, 0, shared, 0))(
        _drop(carry.guess, x), x, moment.x_next, _drop(xbar, x), moment.context
    )
    residual = carry.residual  # Λₙ₊₁: δₙ precedes the kick
    if model.objective.per_step is not None:
        residual = residual + predicted.unexplained
    score = terms.scores(model, theta, moment, origin).score

    def baseline(residual: Array, score: Array) -> Array:
        inputs = Inputs(
            moment.n, theta, x, moment.t, moment.context, residual, score, numbers.table
        )
        return model.baseline(inputs)

    correction = weigh_score(residual, score, baseline)

    def go_back(guess: Guess, xbar: Array, context: PyTree) -> tuple[Guess, Array]:
        return twin_terms.expand(twin, numbers, guess, xbar, moment.t, moment.dt, context)

    guess, gain = jax.vmap(go_back)(carry.guess, xbar, moment.context)
    departure = jax.vmap(Guess.at, in_axes=(shared, 0))(_drop(guess, x), x - xbar)
    delta = predicted.expected - gain - departure
    return Backward(
        guess,
        carry.value + gain,
        residual + delta,
        carry.reward + predicted.reward,
        carry.direct + predicted.slope.astype(score.dtype),
        carry.correction + correction.astype(score.dtype),
    )


@partial(jit, static_argnums=0)
def start_terms(
    twin: TwinModel, numbers: Numbers, carry: Backward, x: Array, t: Array, context: PyTree
) -> tuple[Array, Array]:
    """Direct part and correction, (E, P) each, with the draw of X₀.

    ∂θ ln p₀ meets V₀(X₀) and Λ₀, each less its baseline. An initial reward g_0 is known with X₀: it
    goes with V₀.
    """
    model = twin.model
    theta = numbers.theta
    explicit = terms.initial_slopes(model, theta, x, context)
    direct = carry.direct if explicit is None else carry.direct + explicit
    score = terms.density_scores(model, theta, x, context)
    if score is None:
        return direct, carry.correction

    def baseline(worth: Array, score: Array) -> Array:
        inputs = Inputs(jnp.array(-1), theta, None, t, context, worth, score, None)
        return model.initial_baseline(inputs)

    def term(worth: Array) -> Array:
        return weigh_score(worth, score, baseline).astype(score.dtype)

    value = jnp.broadcast_to(carry.value, carry.residual.shape)  # x̄₀ = X₀, so that V₀(X₀) = v₀
    if model.objective.initial is not None:
        value = value + terms.initial_rewards(model.objective, theta, x, context)
    return direct + term(value), carry.correction + term(carry.residual)


def _axis(guess: Guess, x: Array) -> int | None:
    """The axis that a `vmap` over trajectories maps: none where one twin stands for all."""
    return None if guess.slope.shape[0] < x.shape[0] else 0


def _drop(tree: PyTree, x: Array) -> PyTree:
    """Without the axis of trajectories where one twin stands for all."""
    return jax.tree.map(lambda leaf: leaf[0] if leaf.shape[0] < x.shape[0] else leaf, tree)
