"""Simulated trajectories: run and added up on the way, never stored.

A baseline that needs the returns first has the noise of the simulator replayed. Where it does not,
a guess R' stands for the return R during the run and (R − R') ΣU is added at the end: exact, and
one pass instead of two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import check
from fluctua.core import model as terms
from fluctua.core.arrays import Array, Params, PyTree, jit, on_host, part
from fluctua.core.baselines import Baseline, check_baseline
from fluctua.core.diffusion import check_finite, check_model
from fluctua.core.draws import philox_key_words
from fluctua.core.integrators import mean_rate
from fluctua.core.model import EstimatorModel, Moment, Progress, Tables, mark_noiseless
from fluctua.core.objective import Rewards
from fluctua.core.process import AnyProcess, Process
from fluctua.core.recorded import FlatSamples, check_scores
from fluctua.core.simulate import (
    Ensemble,
    Recipe,
    Simulator,
    advance,
    begin,
    first_state,
    grid,
    noise_key,
    sampled,
    seen,
    transition,
)
from fluctua.core.trajectories import Times, Trajectories

EXPLODED = 1e6
"""Times their start that states may be: beyond, it is the time step that is too large."""


class EstimateKeys(NamedTuple):
    """The keys of one estimate: each is the key of a simulator."""

    run: Array
    pilot: Array


def split_key(key: Array) -> EstimateKeys:
    """The keys of the run and of the pilot of the estimate with this key."""
    check.key(key)
    return _split_key(key)


@jit
def _split_key(key: Array) -> EstimateKeys:
    run, pilot = jax.random.split(key)
    return EstimateKeys(run, pilot)


class EstimateSeeds(NamedTuple):
    """The 64-bit Philox seeds of one estimate."""

    run: int
    pilot: int


def estimate_seeds(key: Array) -> EstimateSeeds:
    """The Philox seeds of the run and of the pilot of the estimate with this key.

    A fused estimator that draws with them has the noise of `ppgt(simulator(..., wiener=philox),
    ...)(key, ...)`.
    """
    # one compiled call: a dozen small ones take a millisecond
    run, pilot = on_host(_seed_words(key)).tolist()
    return EstimateSeeds(run[1] << 32 | run[0], pilot[1] << 32 | pilot[0])


@jit
def _seed_words(key: Array) -> Array:
    return jnp.stack([philox_key_words(noise_key(k)) for k in _split_key(key)])


def streamed_samples(call: Call) -> FlatSamples:
    """Gradients (E, P) and returns (E,) of simulated trajectories."""
    check.key(call.key)
    substrate = call.substrate
    for plan in call.plans:
        check_baseline(plan, call.count, substrate.t)

    key = call.key if substrate.recipe.fixed else split_key(call.key).run
    state, context = first_state(substrate, key, call.theta)
    process = check_model(
        call.model.process, call.model.objective, call.theta, state, substrate.t, context
    )
    call = call._replace(model=mark_noiseless(call.model, process))
    swept = None if substrate.backend is None else substrate.backend.samples(call)
    swept = _samples_by_jax(call) if swept is None else swept
    if not swept.finite:
        _explain_not_finite(call, swept)
    return FlatSamples(swept.gradients, swept.returns)


def _explain_not_finite(call: Call, swept: Swept) -> None:
    """Raise for states or gradients that are not finite, with the first place and its cause."""
    substrate = call.substrate
    process = call.model.process
    first = call.first or 0
    run = split_key(call.key).run
    check_path(process, substrate, run, call.theta, swept.last, first)
    trajectory = replay_trajectory(substrate, run, call.theta, first)
    check_scores(swept.gradients, process, call.theta, trajectory, substrate.t, first)


@jit
def _finite(*arrays: Array) -> Array:
    """Whether all are numbers: in one call, and nothing but the answer comes from a device."""
    return jnp.stack([jnp.all(jnp.isfinite(array)) for array in arrays]).all().astype(jnp.int8)


class Call(NamedTuple):
    """What an estimator asks of a simulator. key: of the estimate. first: number of the first
    trajectory, or None.
    """

    model: EstimatorModel
    plans: tuple[Baseline, ...]
    tables: Tables
    substrate: Simulator
    key: Array
    theta: Params
    count: int  # type: ignore[assignment]
    first: int | None = None

    @property
    def needs_pilot(self) -> bool:
        """Whether a table of the mean return-to-go is still to be made."""
        return any(plan.pilot for plan in self.plans) and any(
            table is None for table in self.tables
        )


class Swept(NamedTuple):
    """What came of a `Call`: returns (E,), gradients (E, P), final states (E, M), and whether
    all are finite.
    """

    returns: Array
    gradients: Array
    last: Array
    finite: bool


def _samples_by_jax(call: Call) -> Swept:
    model = call.model
    substrate = call.substrate
    tables = call.tables
    run = Run(split_key(call.key).run, call.theta, substrate.times, substrate.x0, call.first)
    if call.needs_pilot:
        tables = tables.fill_missing(
            pilot_table(model, call.plans, substrate, call.key, call.theta)
        )
    if any(plan.needs_returns for plan in call.plans):
        guess = _collect_returns(model.objective, substrate.recipe, call.count, run)
    else:  # near the mean return the correction (R − R')ΣU is small, and so is its rounding
        guess = jnp.zeros(()) if tables.step is None else part(tables.step, 0)
    returns, flat, last = _run_and_add(model, substrate.recipe, call.count, run, guess, tables)
    return Swept(returns, flat, last, bool(on_host(_finite(last, flat))))


def pilot_table(
    model: EstimatorModel,
    plans: tuple[Baseline, ...],
    substrate: Simulator,
    key: Array,
    theta: Params,
) -> Array:
    """The mean return-to-go (T+1,) of the independent run for a time-only baseline.

    key: of the estimate.
    """
    pilot = max(plan.pilot for plan in plans)
    run = Run(split_key(key).pilot, theta, substrate.times, substrate.x0)
    return _mean_return_to_go(model.objective, substrate.recipe, pilot, run)


def replay_trajectory(
    substrate: Simulator, key: Array, theta: Params, first: int
) -> Callable[[int], Trajectories]:
    """j -> trajectory first + j alone. key: of the run."""

    def replay(j: int) -> Trajectories:
        x, context = sampled(substrate, key, theta, jnp.array([first + j]), 1)
        return Trajectories(substrate.t, x, context)

    return replay


# ------------------------------------------------------------------------------- compiled passes


class Run(NamedTuple):
    """The numbers of one run of a simulator. first: number of the first trajectory, or None."""

    key: Array
    theta: Params
    times: Times
    x0: Array | None
    first: Array | int | None = None


def _begin(recipe: Recipe, count: int, run: Run) -> Ensemble:
    return begin(recipe, count, run.key, run.theta, run.x0, run.first)


def _observe(recipe: Recipe, step: Any, x: Array, x_next: Array, context: PyTree) -> Moment:
    """A step as trajectories hold it. step: (n, t, dt)."""
    n, t, dt = step
    return Moment(n, t, dt, seen(recipe, x), seen(recipe, x_next), context)


@partial(jit, static_argnums=(0, 1, 2))
def _collect_returns(rewards: Rewards, recipe: Recipe, count: int, run: Run) -> Array:
    """R of every trajectory: the first pass. (E,)"""
    ensemble = _begin(recipe, count, run)
    context = ensemble.context

    def body(carry: tuple[Array, Array], step: Any) -> tuple[tuple[Array, Array], None]:
        x, collected = carry
        x_next = advance(recipe, run.theta, ensemble._replace(x=x), *step)
        moment = _observe(recipe, step, x, x_next, context)
        return (x_next, terms.add_rewards(rewards, run.theta, collected, moment)), None

    first = terms.initial_rewards(rewards, run.theta, seen(recipe, ensemble.x), context)
    (x, collected), _ = jax.lax.scan(body, (ensemble.x, first), grid(run.times))
    return collected + terms.terminal_rewards(rewards, run.theta, seen(recipe, x), context)


@partial(jit, static_argnums=(0, 1, 2))
def _mean_return_to_go(rewards: Rewards, recipe: Recipe, count: int, run: Run) -> Array:
    """E[λ̂ₙ] (T+1,) of a pilot, from the mean reward of each step; nothing of size E·T."""
    theta = run.theta
    ensemble = _begin(recipe, count, run)
    context = ensemble.context
    nothing = jnp.zeros(count, ensemble.x.dtype)

    def body(x: Array, step: Any) -> tuple[Array, tuple[Array, Array]]:
        x_next = advance(recipe, theta, ensemble._replace(x=x), *step)
        moment = _observe(recipe, step, x, x_next, context)
        rate = terms.running_rewards(rewards, theta, moment.x, moment.t, context)
        arrival = terms.add_step_reward(rewards, theta, nothing, moment)
        return x_next, (rate.mean() * moment.dt, arrival.mean())

    x, (means, arrivals) = jax.lax.scan(body, ensemble.x, grid(run.times))
    last = terms.terminal_rewards(rewards, theta, seen(recipe, x), context)
    means = jnp.append(means, last.mean())
    if rewards.per_step is not None or rewards.initial is not None:
        first = terms.initial_rewards(rewards, theta, seen(recipe, ensemble.x), context)
        means = means + jnp.concatenate([first.mean()[None], arrivals])
    return jnp.flip(jnp.cumsum(jnp.flip(means)))


@partial(jit, static_argnums=(0, 1, 2))
def _run_and_add(
    model: EstimatorModel, recipe: Recipe, count: int, run: Run, guess: Array, tables: Tables
) -> tuple[Array, Array, Array]:
    """Returns (E,), gradients (E, P), final states (E, M).

    `guess`: R where it is known, near it otherwise.
    """
    theta = run.theta
    times = run.times
    ensemble = _begin(recipe, count, run)
    context = ensemble.context
    guess = jnp.broadcast_to(guess, (count,)).astype(ensemble.x.dtype)
    first = seen(recipe, ensemble.x)
    progress = terms.start(model, theta, first, times.t[0], context, guess, tables)

    def body(carry: tuple[Array, Progress], step: Any) -> tuple[tuple[Array, Progress], None]:
        x, progress = carry
        x_next, events = transition(recipe, theta, ensemble._replace(x=x), *step)
        moment = _observe(recipe, step, x, x_next, context)._replace(events=events)
        progress = terms.add_moment(model, theta, progress, guess, tables, moment, times.t[:2])
        return (x_next, progress), None

    (x, progress), _ = jax.lax.scan(body, (ensemble.x, progress), grid(times))
    last = seen(recipe, x)
    sums = progress.sums
    returns = sums.reward + terms.terminal_rewards(model.objective, theta, last, context)
    gradients = terms.finish(model, theta, sums, last, times.t, context, returns - guess)
    return returns, gradients, x


def check_path(
    process: AnyProcess,
    substrate: Simulator,
    key: Array,
    theta: Params,
    last: Array,
    offset: int = 0,
) -> None:
    """Simulated states are finite; if not, tell a drift that is not a number from a time step
    that is too large.
    """
    bad = np.flatnonzero(~np.isfinite(np.asarray(last)).all(axis=1))
    if bad.size:
        j = offset + int(bad[0])
        x, context = sampled(substrate, key, theta, jnp.array([j]), 1)
        n = max(int(np.argmin(np.isfinite(np.asarray(x[0])).all(axis=1))) - 1, 0)
        one = jax.tree.map(lambda leaf: leaf[0], context)
        if not isinstance(process, Process):
            where = f"on trajectory {j} at time index {n}"
            process.check(theta, x[0, n], substrate.t[n], one, where)
            raise FloatingPointError(
                f"the step {where}, from x = {np.asarray(x[0, n]).tolist()}, ended in a state that "
                "is not finite: the "
                "time step is too large, a rate was negative or not finite within it, or it has a "
                "million events and "
                "more (a process that explodes)."
            )
        if float(jnp.abs(x[0, n]).max()) < EXPLODED * max(1.0, float(jnp.abs(x[0, 0]).max())):
            where = f"on trajectory {j} at time index {n}"
            check_finite(process, theta, x[0, n], substrate.t[n], one, where)
            rate = mean_rate(process, theta, x[0, n], substrate.t[n], substrate.times.dt[n], one)
            if not bool(jnp.isfinite(rate).all()):
                raise FloatingPointError(
                    f"the `integrator` of the process is not finite {where}, x = "
                    f"{np.asarray(x[0, n]).tolist()}, though its "
                    "drift and noise are: Δt is too large for it, or a number of its own is at "
                    "fault."
                )
    check.finite_simulation(last, substrate.t, offset)
