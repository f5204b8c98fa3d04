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

from fluctua.core import stopping, theorem
from fluctua.core.arrays import Array, Params, PyTree, jit
from fluctua.core.baselines import Inputs
from fluctua.core.draws import Density, Reparameterised
from fluctua.core.objective import Rewards
from fluctua.core.process import AnyProcess, HistoryDependent, Process, Score, ScoreState, Step
from fluctua.core.trajectories import Times


class EstimatorModel(NamedTuple):
    """Model of the substrate in the estimator: code, not numbers; hashable.

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
    """Terms of one step, through the score and explicit.

    score: Uₙ (E, P). explicit: ∂θ{g Δt + r} (E, P). survival_slope: ∂θ ln(Wₙ₊₁/Wₙ) (E, P); None
    where it is zero.
    """

    score: Array
    explicit: Array
    survival_slope: Array | None = None


class Progress(NamedTuple):
    """Sums of the theorem, and the state of a score that depends on the past (else None).

    survival: W (E,), of trajectories that may stop; else None.
    """

    sums: theorem.Sums
    score_state: ScoreState | None = None
    survival: Array | None = None


class CollectedReward(NamedTuple):
    """The reward collected so far (E,), and the survival W (E,), None where nothing stops."""

    reward: Array
    survival: Array | None = None


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
    # `Process` first: to compare with a protocol takes longer than the rest of a small call
    other = not isinstance(model.process, Process)
    return isinstance(model.start, Density) or (
        other and isinstance(model.process, HistoryDependent)
    )


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


def evaluate_arrivals(rewards: Rewards, theta: Params, moment: Moment) -> stopping.Arrival | None:
    """What trajectories that run collect on arrival at X_{n+1}, and how likely each goes on.

    (E,) each; None without rewards on arrival and without a stop.
    """
    if rewards.stop is None:
        reward = step_rewards(rewards, theta, moment)
        return None if reward is None else stopping.Arrival(reward, jnp.ones_like(reward))

    def one(x: Array, x_next: Array, context: PyTree) -> stopping.Arrival:
        return stopping.collect_arrival(
            rewards, theta, Step(x, x_next, moment.t, moment.dt, context)
        )

    return jax.vmap(one)(moment.x, moment.x_next, moment.context)


def start_collection(
    rewards: Rewards, theta: Params, x: Array, t: Array, context: PyTree
) -> CollectedReward:
    """g_0(X₀), with g_T(X₀) of trajectories that stop before their first step."""
    reward = initial_rewards(rewards, theta, x, context)
    survival = start_survival(rewards, theta, x, t, context)
    if survival is None:
        return CollectedReward(reward)
    at_end = terminal_rewards(rewards, theta, x, context)
    at_end = jnp.where(jnp.isnan(survival), jnp.nan, at_end)  # a level that is not a number
    return CollectedReward(reward + jnp.where(survival > 0, 0, at_end), survival)


def start_survival(
    rewards: Rewards, theta: Params, x: Array, t: Array, context: PyTree
) -> Array | None:
    """W₀ (E,); None where nothing stops."""
    rule = rewards.stop
    if rule is None:
        return None
    return jax.vmap(lambda x, c: stopping.is_running(rule, theta, x, t, c))(x, context)


def collect_step(
    rewards: Rewards, theta: Params, collected: CollectedReward, moment: Moment
) -> CollectedReward:
    """Add g Δt and what is collected on arrival, of one step."""
    survival = collected.survival
    rate = running_rewards(rewards, theta, moment.x, moment.t, moment.context)
    running = rate * moment.dt.astype(moment.x.dtype)
    reward = collected.reward + stopping.keep_running(survival, running)
    arrival = evaluate_arrivals(rewards, theta, moment)
    if arrival is None:
        return CollectedReward(reward, survival)
    reward = reward + stopping.keep_running(survival, arrival.reward)
    return CollectedReward(reward, advance_survival(survival, arrival))


def advance_survival(survival: Array | None, arrival: stopping.Arrival | None) -> Array | None:
    """Wₙ₊₁ = Wₙ q (E,); None where nothing stops."""
    if survival is None or arrival is None:
        return None
    return stopping.multiply_survival(survival, arrival.going_on)


def finish_collection(
    rewards: Rewards, theta: Params, collected: CollectedReward, x: Array, context: PyTree
) -> Array:
    """R of trajectories that arrive at the horizon in x. Shape (E,)."""
    terminal = terminal_rewards(rewards, theta, x, context)
    return collected.reward + stopping.keep_running(collected.survival, terminal)


def returns_to_go(
    rewards: Rewards, theta: Params, times: Times, x: Array, context: PyTree
) -> Array:
    """λ̂ₙ at every time (E, T+1) of trajectories x (E, T+1, M) held in memory."""
    if rewards.stop is not None:
        return _stopped_returns_to_go(rewards, theta, times, x, context)[0]

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


def _stopped_returns_to_go(
    rewards: Rewards, theta: Params, times: Times, x: Array, context: PyTree
) -> tuple[Array, Array]:
    """`returns_to_go` of trajectories that may stop, and Wₙ₋₁, with W₋₁ = 1. (E, T+1) each."""
    start = start_collection(rewards, theta, x[:, 0], times.t[0], context)
    steps = (jnp.arange(len(times.dt)), times.t[:-1], times.dt, *_ends_by_time(x))

    def one(survival: Array, step: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
        n, t, dt, x, x_next = step
        moment = Moment(n, t, dt, x, x_next, context)
        rate = running_rewards(rewards, theta, moment.x, moment.t, context)
        arrival = evaluate_arrivals(rewards, theta, moment)
        assert arrival is not None
        running = stopping.keep_running(survival, rate)
        reward = stopping.keep_running(survival, arrival.reward)
        after = stopping.multiply_survival(survival, arrival.going_on)
        return after, (running, reward, survival)

    last, rows = jax.lax.scan(one, start.survival, steps)
    running, reward, before = (jnp.swapaxes(v, 0, 1) for v in rows)
    terminal = stopping.keep_running(last, terminal_rewards(rewards, theta, x[:, -1], context))
    arrival = jnp.concatenate([start.reward[:, None], reward], axis=1)
    survival = jnp.concatenate([jnp.ones_like(before[:, :1]), before], axis=1)
    return theorem.returns_to_go(running, terminal, times.dt, arrival), survival


def _ends_by_time(x: Array) -> tuple[Array, Array]:
    """States before and after each step, the time first. x: (E, T+1, M)."""
    path = jnp.swapaxes(x, 0, 1)
    return path[:-1], path[1:]


def mean_return_to_go(
    rewards: Rewards,
    theta: Params,
    times: Times,
    x: Array,
    context: PyTree,
    share: Array | None = None,
) -> Array:
    """E[λ̂ₙ] (T+1,) of trajectories x (E, T+1, M); of those that still run, if some stop.

    share: weight of each trajectory in several means (E, H), whose shape is then (T+1, H).
    """

    def average(v: Array) -> Array:
        if share is None:
            return v.mean(axis=0)
        return v.T @ share.astype(v.dtype) / jnp.maximum(share.sum(axis=0), 1)

    if rewards.stop is None:
        return average(returns_to_go(rewards, theta, times, x, context))
    to_go, survival = _stopped_returns_to_go(rewards, theta, times, x, context)
    return average_running(average(to_go), average(survival))


def average_running(mean: Array, survival: Array) -> Array:
    """Means over all trajectories as means over those that run; zero where none does."""
    return jnp.where(survival > 0, mean / jnp.where(survival > 0, survival, 1), 0)


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
    initial = start_collection(model.objective, theta, x, t, context)
    reward = initial.reward.astype(returns.dtype)
    explicit = initial_slopes(model, theta, x, context)
    if explicit is None:
        explicit = jnp.zeros((x.shape[0], flat.size), flat.dtype)
    if initial.survival is not None:
        at_end = terminal_slopes(model, theta, x, jnp.stack([t, t]), context)
        explicit = explicit + jnp.where(initial.survival[:, None] > 0, 0, at_end)
    score, score_state = _score_start(model, theta, x, t, context)

    def baseline(to_go: Array, score: Array) -> Array:
        inputs = Inputs(jnp.array(-1), theta, None, t, context, to_go, score, tables.initial)
        return model.initial_baseline(inputs)

    sums = theorem.start_sums(returns, reward, score, explicit, baseline)
    return Progress(sums, score_state, initial.survival)


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
    survival = progress.survival
    arrival = evaluate_arrivals(model.objective, theta, moment)
    step = theorem.StepTerms(
        running=rate * moment.dt.astype(x.dtype),
        on_arrival=None if arrival is None else arrival.reward,
        score=terms.score,
        explicit=terms.explicit,
        survival=survival,
        survival_slope=terms.survival_slope,
    )

    def baseline(to_go: Array, score: Array) -> Array:
        inputs = Inputs(moment.n, theta, x, moment.t, moment.context, to_go, score, tables.step)
        return model.baseline(inputs._replace(survival=survival))

    sums = theorem.add_step(progress.sums, returns, step, baseline)
    return Progress(sums, score_state, advance_survival(survival, arrival))


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
    explicit, survival_slope = _explicit_terms(model.objective, theta, step)
    return ScoreTerms(ravel_pytree(score)[0], explicit, survival_slope)


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
        return step_total(model.objective, th, moved)

    score = model.score(model.process, theta, step, shift=shift)  # type: ignore[call-arg]
    explicit = jax.grad(reward)(theta)
    return ScoreTerms(ravel_pytree(score)[0], ravel_pytree(explicit)[0])


def _explicit_terms(rewards: Rewards, theta: Params, step: Step) -> tuple[Array, Array | None]:
    """∂θ of what a step collects (P,), and of ln q of a bridge (P,), None without one."""
    rule = rewards.stop
    explicit = ravel_pytree(jax.grad(lambda th: step_total(rewards, th, step))(theta))[0]
    if rule is None:
        return explicit, None
    if rule.bridge:
        return explicit, ravel_pytree(stopping.differentiate_survival(rule, theta, step))[0]
    crossing = stopping.find_crossing(rule, theta, step)
    at_end = jax.grad(lambda th: rewards.terminal(th, step.x_next, step.context))(theta)
    return explicit + jnp.where(crossing.going_on > 0, 0, ravel_pytree(at_end)[0]), None


def step_total(rewards: Rewards, theta: Params, step: Step) -> Array:
    """g Δt + r of one step of one trajectory, with what a bridge makes of it."""
    running = rewards.running(theta, step.x, step.t, step.context) * step.dt
    if rewards.stop is not None and rewards.stop.bridge:
        return running + stopping.collect_arrival(rewards, theta, step).reward
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
        explicit, survival_slope = _explicit_terms(model.objective, theta, step)
        return ScoreTerms(ravel_pytree(score)[0], explicit, survival_slope), score_state

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
    progress: Progress,
    x: Array,
    t: Array,
    context: PyTree,
    missing: Array | None = None,
) -> Array:
    """G of every trajectory from the sums after the last step, which ends at x. Shape (E, P).

    missing: R − R' (E,), if the returns were a guess R'.
    """
    slopes = terminal_slopes(model, theta, x, t, context)
    explicit = stopping.keep_running(progress.survival, slopes)
    return theorem.finish_sums(progress.sums, explicit, missing)
