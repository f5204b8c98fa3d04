"""The terms of the theorem for all trajectories at once, from a process and rewards of one.

A user writes drift, noise and rewards for one trajectory at one time. `EstimatorModel` puts them
together with a score, a start and baselines. The functions here evaluate them for an ensemble of E
trajectories, as the arrays that `fluctua.core.theorem` adds up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fluctua.core import theorem
from fluctua.core.arrays import Array, Params, PyTree, jit
from fluctua.core.baselines import Inputs
from fluctua.core.draws import Density, Reparameterised
from fluctua.core.objective import Rewards
from fluctua.core.process import AnyProcess, HistoryDependent, Process, Score, ScoreState, Step
from fluctua.core.theorem import StepTerms, Sums
from fluctua.core.trajectories import Times


class EstimatorModel(NamedTuple):
    """What the estimator knows about the substrate: code, not numbers; hashable.

    process: drift and noise, or a transition of another kind.
    objective: the rewards.
    score: of one step.
    start: a start that depends on θ; None for one that does not.
    baseline: λ̄ₙ of the steps.
    initial_baseline: λ̄ of the draw of X₀.
    """

    process: AnyProcess
    objective: Rewards
    score: Score
    start: Density | Reparameterised | None
    baseline: Callable[[Inputs], Array]
    initial_baseline: Callable[[Inputs], Array]


class Tables(NamedTuple):
    """Mean return-to-go (T+1,) of the baselines that need one; None for the others."""

    step: Array | None
    initial: Array | None

    def fill_missing(self, values: Array) -> Tables:
        """The tables with these values where there are none."""
        return Tables(*(values if table is None else table for table in self))


class Moment(NamedTuple):
    """Step n of all trajectories, from x to x_next (E, M), at time t and over dt.

    context, events: pytrees with leaves (E, ...), or None.
    """

    n: Array
    t: Array
    dt: Array
    x: Array
    x_next: Array
    context: PyTree = None
    events: PyTree = None


class ScoreTerms(NamedTuple):
    """What one step adds through the score and directly.

    score: Uₙ (E, P). explicit: ∂θ{g Δt + r} (E, P).
    """

    score: Array
    explicit: Array


class Progress(NamedTuple):
    """Sums of the theorem, and the state of a score that depends on the past (else None)."""

    sums: Sums
    score_state: ScoreState | None = None


ENSEMBLE_AXES = ScoreState(None, 0)
"""The axes of a `ScoreState` that belong to trajectories."""


def replace_process(model: EstimatorModel, process: AnyProcess) -> EstimatorModel:
    """The model with another form of its process, checked against the start.

    A start that displaces the path needs noise in every component.
    """
    if (
        isinstance(process, Process)
        and process.noiseless
        and isinstance(model.start, Reparameterised)
    ):
        raise ValueError(
            "a `Reparameterised` start displaces the path, and state component "
            f"{process.noiseless[0]}, which has no noise, cannot be displaced. Give the start a "
            "`Density` in the components with noise, or add noise to that component."
        )
    return model._replace(process=process)


def has_random_start(model: EstimatorModel) -> bool:
    """Whether the draw of X₀ has a score."""
    return isinstance(model.start, Density) or isinstance(model.process, HistoryDependent)


# ---------------------------------------------------------------------------------------- rewards


def running_rewards(rewards: Rewards, theta: Params, x: Array, t: Array, context: PyTree) -> Array:
    """g(X_n, t_n) of every trajectory. Shape (E,)."""
    batched = jax.vmap(rewards.running, in_axes=(None, 0, None, 0))
    return batched(theta, x, t, context).astype(x.dtype)


def terminal_rewards(rewards: Rewards, theta: Params, x: Array, context: PyTree) -> Array:
    """g_T(X_T) of every trajectory. Shape (E,)."""
    batched = jax.vmap(rewards.terminal, in_axes=(None, 0, 0))
    return batched(theta, x, context).astype(x.dtype)


def initial_rewards(rewards: Rewards, theta: Params, x: Array, context: PyTree) -> Array:
    """g_0(X₀) of every trajectory; zero without such a reward. Shape (E,)."""
    if rewards.initial is None:
        return jnp.zeros(x.shape[0], x.dtype)
    return jax.vmap(rewards.initial, in_axes=(None, 0, 0))(theta, x, context).astype(x.dtype)


def step_rewards(rewards: Rewards, theta: Params, moment: Moment) -> Array | None:
    """r(X_n, X_{n+1}) of every trajectory (E,); None without such a reward."""
    if rewards.per_step is None:
        return None
    batched = jax.vmap(rewards.per_step, in_axes=(None, 0, 0, None, None, 0))
    rows = batched(theta, moment.x, moment.x_next, moment.t, moment.dt, moment.context)
    return rows.astype(moment.x.dtype)


def add_step_reward(rewards: Rewards, theta: Params, collected: Array, moment: Moment) -> Array:
    """Add the reward of the step x → x_next to the reward collected so far. Shape (E,)."""
    reward = step_rewards(rewards, theta, moment)
    return collected if reward is None else collected + reward


def add_rewards(rewards: Rewards, theta: Params, collected: Array, moment: Moment) -> Array:
    """Add g Δt and r of one step to the reward collected so far. Shape (E,)."""
    rate = running_rewards(rewards, theta, moment.x, moment.t, moment.context)
    collected = collected + rate * moment.dt.astype(moment.x.dtype)
    return add_step_reward(rewards, theta, collected, moment)


def returns_to_go(
    rewards: Rewards, theta: Params, times: Times, x: Array, context: PyTree
) -> Array:
    """λ̂ₙ at every time (E, T+1) of trajectories x (E, T+1, M) held in memory."""

    def evaluate(x: Array, context: PyTree) -> tuple[Array, Array, Array | None]:
        rates = jax.vmap(lambda x, t: rewards.running(theta, x, t, context))(x[:-1], times.t[:-1])
        steps = None
        if rewards.per_step is not None:
            batched = jax.vmap(rewards.per_step, in_axes=(None, 0, 0, 0, 0, None))
            steps = batched(theta, x[:-1], x[1:], times.t[:-1], times.dt, context)
        return rates, rewards.terminal(theta, x[-1], context), steps

    rates, terminal, steps = jax.vmap(evaluate)(x, context)
    arrival = None
    if steps is not None or rewards.initial is not None:
        first = initial_rewards(rewards, theta, x[:, 0], context)[:, None]
        steps = jnp.zeros_like(rates) if steps is None else steps
        arrival = jnp.concatenate([first, steps], axis=1)
    return theorem.returns_to_go(rates, terminal, times.dt, arrival)


# ------------------------------------------------------------------------------ the draw of X₀


@partial(jit, static_argnums=0)
def start(
    model: EstimatorModel,
    theta: Params,
    x: Array,
    t: Array,
    context: PyTree,
    returns: Array,
    tables: Tables,
) -> Progress:
    """Sums after the draw of X₀, whose score is ∂θ ln p₀ (step −1), with ∂θ g_0."""
    flat, _ = ravel_pytree(theta)
    reward = initial_rewards(model.objective, theta, x, context).astype(returns.dtype)
    explicit = initial_slopes(model, theta, x, context)
    if explicit is None:
        explicit = jnp.zeros((x.shape[0], flat.size), flat.dtype)
    score, score_state = _score_start(model, theta, x, t, context)

    def baseline(to_go: Array, score: Array) -> Array:
        inputs = Inputs(jnp.array(-1), theta, None, t, context, to_go, score, tables.initial)
        return model.initial_baseline(inputs)

    return Progress(theorem.start_sums(returns, reward, score, explicit, baseline), score_state)


def _score_start(
    model: EstimatorModel, theta: Params, x: Array, t: Array, context: PyTree
) -> tuple[Array | None, ScoreState | None]:
    """∂θ ln p₀(X₀) (E, P) or None, and the state of a score that depends on the past."""
    if isinstance(model.process, HistoryDependent):
        begin = partial(model.process.score_start, theta)
        batched = jax.vmap(begin, in_axes=(0, None, 0), out_axes=(0, ENSEMBLE_AXES))
        score, score_state = batched(x, t, context)
        return jax.vmap(lambda u: ravel_pytree(u)[0])(score), score_state
    return density_scores(model, theta, x, context), None


def density_scores(model: EstimatorModel, theta: Params, x: Array, context: PyTree) -> Array | None:
    """∂θ ln p₀(X₀) of every trajectory (E, P); None where X₀ is not drawn from a density."""
    if not isinstance(model.start, Density):
        return None
    slope = jax.grad(model.start.log_density)
    return jax.vmap(lambda x, c: ravel_pytree(slope(theta, x, c))[0])(x, context)


def initial_slopes(model: EstimatorModel, theta: Params, x: Array, context: PyTree) -> Array | None:
    """∂θ g_0(X₀) of every trajectory (E, P); None without such a reward."""
    reward = model.objective.initial
    if reward is None:
        return None

    def differentiate(x: Array, context: PyTree) -> Array:
        move = _displacement(model, theta, context)

        def value(th: Params) -> Array:
            return reward(th, x if move is None else x + move(th), context)

        return ravel_pytree(jax.grad(value)(theta))[0]

    return jax.vmap(differentiate)(x, context)


def _displacement(
    model: EstimatorModel,
    theta: Params,
    context: PyTree,
    t: Array | None = None,
    grid: Array | None = None,
) -> Callable[[Params], Array] | None:
    """θ -> w(t) dX₀ (M,) of a start that moves with θ, w = 1 if t is None; None for another."""
    if not isinstance(model.start, Reparameterised):
        return None
    move = model.start.shift(theta, context)
    if t is None or grid is None:
        return move
    weight = model.start.weight(t, grid[0], grid[1] - grid[0])
    return lambda th: weight * move(th)


# ------------------------------------------------------------------------------------- one step


def add_moment(
    model: EstimatorModel,
    theta: Params,
    progress: Progress,
    returns: Array,
    tables: Tables,
    moment: Moment,
    origin: Array,
) -> Progress:
    """Add step n of all trajectories to the sums.

    returns: R (E,), or a guess of it. origin: the first two times of the grid.
    """
    x = moment.x
    rate = running_rewards(model.objective, theta, x, moment.t, moment.context)
    if progress.score_state is None:
        terms = scores(model, theta, moment, origin)
        score_state = None
    else:
        terms, score_state = _history_scores(model, theta, progress.score_state, moment)
    step = StepTerms(
        running=rate * moment.dt.astype(x.dtype),
        on_arrival=step_rewards(model.objective, theta, moment),
        score=terms.score,
        explicit=terms.explicit,
    )

    def baseline(to_go: Array, score: Array) -> Array:
        inputs = Inputs(moment.n, theta, x, moment.t, moment.context, to_go, score, tables.step)
        return model.baseline(inputs)

    return Progress(theorem.add_step(progress.sums, returns, step, baseline), score_state)


def scores(model: EstimatorModel, theta: Params, moment: Moment, origin: Array) -> ScoreTerms:
    """Uₙ and ∂θ{g Δt + r} of every trajectory. origin: the first two times of the grid."""
    moving = isinstance(model.start, Reparameterised)
    evaluate = _moving_scores if moving else _fixed_scores

    def one(x: Array, x_next: Array, context: PyTree, events: PyTree) -> ScoreTerms:
        step = Step(x, x_next, moment.t, moment.dt, context, events)
        return evaluate(model, theta, step, origin)

    return jax.vmap(one)(moment.x, moment.x_next, moment.context, moment.events)


def _fixed_scores(model: EstimatorModel, theta: Params, step: Step, origin: Array) -> ScoreTerms:
    """Uₙ and ∂θ{g Δt + r} of one trajectory, its states held fixed."""
    score = model.score(model.process, theta, step)
    explicit = jax.grad(lambda th: _step_total(model.objective, th, step))(theta)
    return ScoreTerms(ravel_pytree(score)[0], ravel_pytree(explicit)[0])


def _moving_scores(model: EstimatorModel, theta: Params, step: Step, origin: Array) -> ScoreTerms:
    """The same where the start moves with θ, and with it both ends of the step (by w(t) dX₀)."""
    assert isinstance(model.start, Reparameterised)
    move = model.start.shift(theta, step.context)
    dt0 = origin[1] - origin[0]
    before = model.start.weight(step.t, origin[0], dt0)
    after = model.start.weight(step.t + step.dt, origin[0], dt0)

    def shift(th: Params) -> tuple[Array, Array]:
        return before * move(th), after * move(th)

    def reward(th: Params) -> Array:
        moved = step._replace(x=step.x + before * move(th), x_next=step.x_next + after * move(th))
        return _step_total(model.objective, th, moved)

    score = model.score(model.process, theta, step, shift=shift)  # type: ignore[call-arg]
    explicit = jax.grad(reward)(theta)
    return ScoreTerms(ravel_pytree(score)[0], ravel_pytree(explicit)[0])


def _step_total(rewards: Rewards, theta: Params, step: Step) -> Array:
    """g Δt + r of one step of one trajectory."""
    running = rewards.running(theta, step.x, step.t, step.context) * step.dt
    if rewards.per_step is None:
        return running
    return running + rewards.per_step(theta, step.x, step.x_next, step.t, step.dt, step.context)


def _history_scores(
    model: EstimatorModel, theta: Params, score_state: ScoreState, moment: Moment
) -> tuple[ScoreTerms, ScoreState]:
    """`scores` of a partially observed process, and their state after the step."""

    def one(
        x: Array, x_next: Array, context: PyTree, score_state: ScoreState
    ) -> tuple[ScoreTerms, ScoreState]:
        assert isinstance(model.process, HistoryDependent)
        step = Step(x, x_next, moment.t, moment.dt, context)
        score, score_state = model.process.update(theta, step, score_state)
        explicit = jax.grad(lambda th: _step_total(model.objective, th, step))(theta)
        return ScoreTerms(ravel_pytree(score)[0], ravel_pytree(explicit)[0]), score_state

    batched = jax.vmap(one, in_axes=(0, 0, 0, ENSEMBLE_AXES), out_axes=(0, ENSEMBLE_AXES))
    return batched(moment.x, moment.x_next, moment.context, score_state)


# -------------------------------------------------------------------------------------- the end


def terminal_slopes(
    model: EstimatorModel, theta: Params, x: Array, t: Array, context: PyTree
) -> Array:
    """∂θ g_T(X_T) of every trajectory. t: the time grid (T+1,). Shape (E, P)."""

    def differentiate(x: Array, context: PyTree) -> Array:
        move = _displacement(model, theta, context, t[-1], t)

        def value(th: Params) -> Array:
            return model.objective.terminal(th, x if move is None else x + move(th), context)

        return ravel_pytree(jax.grad(value)(theta))[0]

    return jax.vmap(differentiate)(x, context)


@partial(jit, static_argnums=0)
def finish(
    model: EstimatorModel,
    theta: Params,
    sums: Sums,
    x: Array,
    t: Array,
    context: PyTree,
    missing: Array | None = None,
) -> Array:
    """G of every trajectory from the sums after the last step, which ends at x. Shape (E, P).

    missing: R − R' (E,), if the returns were a guess R'.
    """
    return theorem.finish_sums(sums, terminal_slopes(model, theta, x, t, context), missing)
