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

from fluctua.core import arrays, baselines, check, diffusion, recorded, simulate, stopping
from fluctua.core import model as terms
from fluctua.core import process as processes
from fluctua.core import trajectories as records
from fluctua.core.arrays import Array, Params, PyTree
from fluctua.core.draws import philox_key_words
from fluctua.core.host import keys
from fluctua.core.integrators import mean_rate
from fluctua.core.objective import Rewards

EXPLODED = 1e6
"""Times their start that states may be: beyond, it is the time step that is too large."""


class EstimateKeys(NamedTuple):
    """The keys of one estimate: each is the key of a simulator."""

    run: Array
    pilot: Array


def split_key(key: Array) -> EstimateKeys:
    """The keys of the run and of the pilot of the estimate with this key."""
    check.key(key)
    words = keys.read_host_words(key)
    if words is None:
        return _split_key(key)
    return EstimateKeys(*(keys.make_key(part, key) for part in _split_words(words)))


def _split_words(words: keys.Words) -> list[keys.Words]:
    return [keys.split_words(words, part) for part in range(len(EstimateKeys._fields))]


@arrays.jit
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
    words = keys.read_host_words(key)
    if words is not None:
        noises = [keys.split_words(part, simulate.NOISE) for part in _split_words(words)]
        return EstimateSeeds(*(noise.first << 32 | noise.second for noise in noises))
    # one compiled call: a dozen small ones take a millisecond
    run, pilot = arrays.on_host(_seed_words(key)).tolist()
    return EstimateSeeds(run[1] << 32 | run[0], pilot[1] << 32 | pilot[0])


@arrays.jit
def _seed_words(key: Array) -> Array:
    return jnp.stack([philox_key_words(simulate.noise_key(k)) for k in _split_key(key)])


def streamed_samples(call: Call) -> recorded.FlatSamples:
    """Gradients (E, P) and returns (E,) of simulated trajectories."""
    check.key(call.key)
    substrate = call.substrate
    for plan in call.plans:
        baselines.check_baseline(plan, call.count, substrate.t)

    key = call.key if substrate.recipe.fixed else split_key(call.key).run
    call = call._replace(model=prepare_model(call.model, substrate, key, call.theta))
    swept = None if substrate.backend is None else substrate.backend.samples(call)
    swept = _samples_by_jax(call) if swept is None else swept
    if not swept.finite:
        _explain_not_finite(call, swept)
    if substrate.recipe.context is None and jax.default_backend() == "cpu":
        simulate.warn_about_rounding(substrate, call.theta, swept.last, None)
    return recorded.FlatSamples(swept.gradients, swept.returns, swept.survival)


def prepare_model(
    model: terms.EstimatorModel, substrate: simulate.Simulator, key: Array, theta: Params
) -> terms.EstimatorModel:
    """The model, checked where the simulator starts, with its noiseless components marked."""
    state, context = simulate.first_state(substrate, key, theta)
    process = diffusion.check_model(
        model.process, model.objective, theta, state, substrate.t, context
    )
    check_sampler = getattr(process, "check_sampler", None)
    if check_sampler is not None:  # a chain: sampler and score are two functions
        check_sampler(substrate, theta)
    return terms.replace_process(model, process)


def _explain_not_finite(call: Call, swept: SweepResult) -> None:
    """Raise for states or gradients that are not finite, with the first place and its cause."""
    substrate = call.substrate
    process = call.model.process
    first = call.first or 0
    run = split_key(call.key).run
    check_path(process, substrate, run, call.theta, swept.last, first)
    trajectory = replay_trajectory(substrate, run, call.theta, first)
    recorded.check_scores(swept.gradients, process, call.theta, trajectory, substrate.t, first)


@arrays.jit
def _are_finite(*values: Array) -> Array:
    """Whether all are numbers: in one call, and nothing but the answer comes from a device."""
    return jnp.stack([jnp.all(jnp.isfinite(array)) for array in values]).all().astype(jnp.int8)


class Call(NamedTuple):
    """A request of an estimator to a simulator.

    key: of the estimate. first: number of the first trajectory, or None.
    """

    model: terms.EstimatorModel
    plans: tuple[baselines.Baseline, ...]
    tables: terms.Tables
    substrate: simulate.Simulator
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


class SweepResult(NamedTuple):
    """The result of a `Call`.

    returns: (E,). gradients: (E, P). last: final states (E, M). finite: whether all are finite.
    survival: probability of reaching the horizon (E,); None where nothing stops.
    """

    returns: Array
    gradients: Array
    last: Array
    finite: bool
    survival: Array | None = None


class Passes(NamedTuple):
    """The passes that baselines need before the sweep.

    pilot: trajectories of a pilot, 0 without one. returns: whether the returns are needed first.
    """

    pilot: int
    returns: bool


def plan_passes(call: Call) -> Passes:
    """The passes that the baselines of a call need."""
    pilot = max(plan.pilot for plan in call.plans) if call.needs_pilot else 0
    return Passes(pilot, any(plan.needs_returns for plan in call.plans))


def _samples_by_jax(call: Call) -> SweepResult:
    substrate = call.substrate
    k_run, k_pilot = split_key(call.key)
    run = Run(k_run, call.theta, substrate.times, substrate.x0, call.first)
    passes = plan_passes(call)
    swept = sweep(call.model, substrate.recipe, call.count, passes, run, k_pilot, call.tables)
    finite = bool(arrays.on_host(_are_finite(swept.last, swept.gradients)))
    return swept._replace(finite=finite)


def sweep(
    model: terms.EstimatorModel,
    recipe: simulate.Recipe,
    count: int,
    passes: Passes,
    run: Run,
    pilot_key: Array,
    tables: terms.Tables,
) -> SweepResult:
    """Returns, gradients and final states of one run, after the passes that its baselines need.

    Not yet looked at for finite numbers. JAX can trace it, for several θ in one program.
    """
    if passes.pilot:
        pilot = run._replace(key=pilot_key, first=None)
        tables = tables.fill_missing(
            _mean_return_to_go(model.objective, recipe, passes.pilot, pilot)
        )
    if passes.returns:
        guess = collect_returns(model.objective, recipe, count, run)
    else:  # near the mean return the correction (R − R')ΣU is small, and so is its rounding
        guess = jnp.zeros(()) if tables.step is None else arrays.part(tables.step, 0)
    return _run_and_add(model, recipe, count, run, guess, tables)


def pilot_table(
    model: terms.EstimatorModel,
    plans: tuple[baselines.Baseline, ...],
    substrate: simulate.Simulator,
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
    substrate: simulate.Simulator, key: Array, theta: Params, first: int
) -> Callable[[int], records.Trajectories]:
    """j -> trajectory first + j alone. key: of the run."""

    def replay(j: int) -> records.Trajectories:
        x, context = simulate.sample_states(substrate, key, theta, jnp.array([first + j]), 1)
        return records.Trajectories(substrate.t, x, context)

    return replay


# ------------------------------------------------------------------------------- compiled passes


class Run(NamedTuple):
    """The numbers of one run of a simulator. first: number of the first trajectory, or None."""

    key: Array
    theta: Params
    times: records.Times
    x0: Array | None
    first: Array | int | None = None


class Collected(NamedTuple):
    """States (E, M), and what was collected on the way to them."""

    x: Array
    rewards: terms.CollectedReward


class Added(NamedTuple):
    """States (E, M), and the sums of the theorem on arrival at them."""

    x: Array
    progress: terms.Progress


def _begin(recipe: simulate.Recipe, count: int, run: Run) -> simulate.Ensemble:
    return simulate.start_ensemble(recipe, count, run.key, run.theta, run.x0, run.first)


def _observe(
    recipe: simulate.Recipe, step: Any, x: Array, x_next: Array, context: PyTree
) -> terms.Moment:
    """A step as trajectories hold it. step: (n, t, dt)."""
    n, t, dt = step
    return terms.Moment(
        n, t, dt, simulate.observe(recipe, x), simulate.observe(recipe, x_next), context
    )


@partial(arrays.jit, static_argnums=(0, 1, 2))
def collect_returns(rewards: Rewards, recipe: simulate.Recipe, count: int, run: Run) -> Array:
    """R of every trajectory, none of which is stored. (E,)"""
    ensemble = _begin(recipe, count, run)
    context = ensemble.context

    def body(carry: Collected, step: Any) -> tuple[Collected, None]:
        x_next = simulate.advance(recipe, run.theta, ensemble._replace(x=carry.x), *step)
        x_next = stopping.hold_stopped(carry.rewards.survival, x_next, carry.x)
        moment = _observe(recipe, step, carry.x, x_next, context)
        return Collected(
            x_next, terms.collect_step(rewards, run.theta, carry.rewards, moment)
        ), None

    first = simulate.observe(recipe, ensemble.x)
    initial = terms.start_collection(rewards, run.theta, first, run.times.t[0], context)
    start = Collected(ensemble.x, initial)
    end, _ = jax.lax.scan(body, start, simulate.enumerate_steps(run.times))
    last = simulate.observe(recipe, end.x)
    return terms.finish_collection(rewards, run.theta, end.rewards, last, context)


class _MeanStep(NamedTuple):
    """Means over a pilot of one step: g Δt, what is collected on arrival, and the survival."""

    running: Array
    arrival: Array
    survival: Array


@partial(arrays.jit, static_argnums=(0, 1, 2))
def _mean_return_to_go(rewards: Rewards, recipe: simulate.Recipe, count: int, run: Run) -> Array:
    """E[λ̂ₙ] (T+1,) of a pilot, from the mean reward of each step; nothing of size E·T.

    Of the trajectories that still run, where some stop.
    """
    theta = run.theta
    ensemble = _begin(recipe, count, run)
    context = ensemble.context
    first = simulate.observe(recipe, ensemble.x)
    initial = terms.start_collection(rewards, theta, first, run.times.t[0], context)
    nothing = jnp.zeros(count, ensemble.x.dtype)

    def body(carry: Collected, step: Any) -> tuple[Collected, _MeanStep]:
        x, (_, survival) = carry
        x_next = simulate.advance(recipe, theta, ensemble._replace(x=x), *step)
        x_next = stopping.hold_stopped(survival, x_next, x)
        moment = _observe(recipe, step, x, x_next, context)
        rate = terms.running_rewards(rewards, theta, moment.x, moment.t, context)
        arrival = terms.evaluate_arrivals(rewards, theta, moment)
        collected = nothing if arrival is None else arrival.reward
        means = _MeanStep(
            stopping.keep_running(survival, rate).mean() * moment.dt,
            stopping.keep_running(survival, collected).mean(),
            jnp.ones(()) if survival is None else survival.mean(),
        )
        after = terms.CollectedReward(nothing, terms.advance_survival(survival, arrival))
        return Collected(x_next, after), means

    start = Collected(ensemble.x, initial._replace(reward=nothing))
    end, means = jax.lax.scan(body, start, simulate.enumerate_steps(run.times))
    last = terms.finish_collection(
        rewards, theta, end.rewards, simulate.observe(recipe, end.x), context
    )
    steps = jnp.append(means.running, last.mean())
    if any(v is not None for v in (rewards.per_step, rewards.initial, rewards.stop)):
        steps = steps + jnp.concatenate([initial.reward.mean()[None], means.arrival])
    to_go = jnp.flip(jnp.cumsum(jnp.flip(steps)))
    if rewards.stop is None:
        return to_go
    return terms.average_running(to_go, jnp.append(jnp.ones(1), means.survival))


@partial(arrays.jit, static_argnums=(0, 1, 2))
def _run_and_add(
    model: terms.EstimatorModel,
    recipe: simulate.Recipe,
    count: int,
    run: Run,
    guess: Array,
    tables: terms.Tables,
) -> SweepResult:
    """Returns, gradients and final states, not yet looked at for finite numbers.

    `guess`: R where it is known, near it otherwise.
    """
    theta = run.theta
    times = run.times
    ensemble = _begin(recipe, count, run)
    context = ensemble.context
    guess = jnp.broadcast_to(guess, (count,)).astype(ensemble.x.dtype)
    first = simulate.observe(recipe, ensemble.x)
    progress = terms.start(model, theta, first, times.t[0], context, guess, tables)

    def body(carry: Added, step: Any) -> tuple[Added, None]:
        x_next, events = simulate.transition(recipe, theta, ensemble._replace(x=carry.x), *step)
        x_next = stopping.hold_stopped(carry.progress.survival, x_next, carry.x)
        moment = _observe(recipe, step, carry.x, x_next, context)._replace(events=events)
        progress = terms.add_moment(
            model, theta, carry.progress, guess, tables, moment, times.t[:2]
        )
        return Added(x_next, progress), None

    end, _ = jax.lax.scan(body, Added(ensemble.x, progress), simulate.enumerate_steps(times))
    last = simulate.observe(recipe, end.x)
    survival = end.progress.survival
    collected = terms.CollectedReward(end.progress.sums.reward, survival)
    returns = terms.finish_collection(model.objective, theta, collected, last, context)
    missing = returns - guess
    gradients = terms.finish(model, theta, end.progress, last, times.t, context, missing)
    return SweepResult(returns, gradients, end.x, True, survival)


def check_path(
    process: processes.AnyProcess,
    substrate: simulate.Simulator,
    key: Array,
    theta: Params,
    last: Array,
    offset: int = 0,
) -> None:
    """Refuse simulated states that are not finite.

    The message tells a drift that is not a number from a time step that is too large.
    """
    bad = np.flatnonzero(~np.isfinite(np.asarray(last)).all(axis=1))
    if bad.size:
        j = offset + int(bad[0])
        x, context = simulate.sample_states(substrate, key, theta, jnp.array([j]), 1)
        n = max(int(np.argmin(np.isfinite(np.asarray(x[0])).all(axis=1))) - 1, 0)
        one = jax.tree.map(lambda leaf: leaf[0], context)
        if not isinstance(process, processes.Process):
            where = f"on trajectory {j} at time index {n}"
            process.check(theta, x[0, n], substrate.t[n], one, where)
            raise FloatingPointError(
                f"the step {where}, from x = {np.asarray(x[0, n]).tolist()}, ended in a state "
                "that is not finite: the time step is too large, a rate was negative or not "
                "finite within it, or it has a million events and more (a "
                "process that explodes)."
            )
        if float(jnp.abs(x[0, n]).max()) < EXPLODED * max(1.0, float(jnp.abs(x[0, 0]).max())):
            where = f"on trajectory {j} at time index {n}"
            diffusion.check_finite(process, theta, x[0, n], substrate.t[n], one, where)
            rate = mean_rate(process, theta, x[0, n], substrate.t[n], substrate.times.dt[n], one)
            if not bool(jnp.isfinite(rate).all()):
                raise FloatingPointError(
                    f"the `integrator` of the process is not finite {where}, x = "
                    f"{np.asarray(x[0, n]).tolist()}, though its drift and noise are: Δt is too "
                    "large for it, or a number of its own is at fault."
                )
    check.finite_simulation(last, substrate.t, offset)
