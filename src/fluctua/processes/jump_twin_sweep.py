"""All trajectories of a jump process with a twin: sums over a simulation or a recording.

Where the baseline of Λ compares trajectories, the events are replayed once Λ is known.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fluctua.core import baselines, check, simulate, streamed, theorem
from fluctua.core.arrays import Array, PyTree, jit
from fluctua.core.process import Step
from fluctua.core.trajectories import Times
from fluctua.core.twin import backward, correction, sweep
from fluctua.core.twin.correction import TwinModel
from fluctua.processes import jump_twin, jump_twin_checks
from fluctua.processes.jump_guess import ReturnGuess

# ------------------------------------------------------------------------------------------ checks


def check_twin(process: Any, twin: baselines.Twin) -> baselines.Twin:
    """The twin of a jump process with its process filled in; refused for what it cannot follow."""
    own: Any = process if twin.process is None else twin.process
    if type(own) is not type(process):
        raise TypeError(
            f"the twin of `Jumps` is a `Jumps` too; got {type(own).__name__}. Leave "
            "`Twin.process` off to use the rates of the process itself."
        )
    for name, jumps in (("the process", process), ("`Twin.process`", own)):
        if hasattr(jumps.changes, "sample"):
            raise ValueError(
                f"a `Twin` of `Jumps` needs changes that are numbers; {name} has a `RandomJump`. "
                "Use another baseline."
            )
        if jumps.diffusion is not None:
            raise ValueError(
                f"a `Twin` of `Jumps` follows events alone, and {name} has `diffusion` between "
                "them. Use another baseline."
            )
    return twin._replace(process=own)


# ------------------------------------------------------------------------------ one step of all


class TwinPass(NamedTuple):
    """The numbers of a pass over trajectories.

    guess: leaves (E, …) where every trajectory has its own. ensemble: before the first step.
    times: the whole grid. total: Λ₀ (E,), or zero if no baseline needs it.
    """

    numbers: correction.Numbers
    guess: ReturnGuess
    ensemble: simulate.Ensemble
    times: Times
    total: Array


class SweepSums(NamedTuple):
    """Sums over the steps so far.

    x: the states (E, M). residual: part of Λ₀ up to them (E,). reward: collected (E,). score: ΣU
    (E, P). direct, correction: (E, P).
    """

    x: Array
    residual: Array
    reward: Array
    score: Array
    direct: Array
    correction: Array


class EnsembleSteps(NamedTuple):
    """One step of all trajectories, or with time before them several.

    n: number. t, dt: beginning and length. x, x_next: both ends (E, M). events: of a recording,
    leaves (E, …); None in a simulation.
    """

    n: Array
    t: Array
    dt: Array
    x: Array
    x_next: Array
    events: Any = None


def _start_sums(run: TwinPass) -> SweepSums:
    x = run.ensemble.x
    flat, _ = ravel_pytree(run.numbers.theta)
    nothing = jnp.zeros(len(x), x.dtype)
    zero = jnp.zeros((len(x), flat.size), flat.dtype)
    return SweepSums(x, nothing, nothing, zero, zero, zero)


def _add_step(
    twin: TwinModel,
    run: TwinPass,
    swept: SweepSums,
    step: EnsembleSteps,
    left: jump_twin.StepResult,
) -> SweepSums:
    """Add one step of all trajectories. left: its terms, leaves (E, …)."""
    collected = swept.residual + left.residual
    to_go = run.total - collected  # Λ_{n+1}: the events of the step have met its own residual

    def baseline(to_go: Array, score: Array) -> Array:
        theta, _, table = run.numbers
        inputs = baselines.Inputs(
            step.n, theta, step.x, step.t, run.ensemble.context, to_go, score, table
        )
        return twin.model.baseline(inputs)

    kicks = theorem.weigh_score(to_go, left.score, baseline) + left.weighted
    return SweepSums(
        step.x_next,
        collected,
        swept.reward + left.reward,
        swept.score + left.score,
        swept.direct + left.direct,
        swept.correction + kicks.astype(swept.correction.dtype),
    )


def _select_rows(guess: ReturnGuess, n: Array, shared: bool) -> jump_twin.GuessRow:
    """V in step n, of each trajectory unless shared."""
    if shared:
        return jump_twin.select_row(guess, n)
    return jax.vmap(lambda own: jump_twin.select_row(own, n))(guess)


def _end_paths(twin: TwinModel, run: TwinPass, shared: bool, x: Array) -> jump_twin.PathEnd:
    def end(guess: ReturnGuess, x: Array, context: PyTree) -> jump_twin.PathEnd:
        return jump_twin.finish_path(twin.model.objective, run.numbers.theta, guess, x, context)

    return jax.vmap(end, in_axes=(None if shared else 0, 0, 0))(run.guess, x, run.ensemble.context)


@partial(jit, static_argnums=(0, 1))
def _finish(
    twin: TwinModel, shared: bool, run: TwinPass, swept: SweepSums, means: Array
) -> tuple[backward.Backward, Array]:
    """The sums with those of the last state and of V₀, and the mean of Λ (T+1,).

    means: of what each step takes off Λ (T,).
    """
    end = _end_paths(twin, run, shared, swept.x)
    residual = swept.residual + end.residual  # Λ₀, whatever `run.total` was
    missing = (residual - run.total)[:, None]
    first = run.guess.value.first
    slope = run.guess.slope.first[..., 0, :]  # at X₀ = x̄₀ only the level of V counts
    count = len(swept.x)
    carry = backward.Backward(
        correction.Guess(jnp.atleast_2d(first[..., 1:]), None),
        jnp.broadcast_to(first[..., 0], count),
        residual,
        swept.reward + end.reward,
        swept.direct + end.direct + jnp.broadcast_to(slope, swept.direct.shape),
        swept.correction + missing * swept.score,
    )
    behind = jnp.flip(jnp.cumsum(jnp.flip(means))) + end.residual.mean()
    return carry, jnp.append(behind, end.residual.mean())


@jit
def split_rows(rows: Array, residual: Array, guess: ReturnGuess) -> backward.Backward:
    """The sums of a kernel as `sweep.finish_parts` takes them.

    rows: correction, direct part and return (E, 2P + 1). residual: Λ₀ (E,).
    """
    parameters = (rows.shape[1] - 1) // 2
    first = guess.value.first
    return backward.Backward(
        correction.Guess(first[None, 1:], None),
        first[:1],
        residual,
        rows[:, -1].astype(residual.dtype),
        rows[:, parameters:-1] + guess.slope.first[0],
        rows[:, :parameters],
    )


# ------------------------------------------------------------------------------------ simulation


def simulated_parts(call: sweep.TwinCall) -> sweep.Parts:
    """The two parts of the gradients of simulated trajectories."""
    twin, numbers, batch, substrate, key, count, offset = call
    jump_twin_checks.refuse_call(call)
    recipe = substrate.recipe
    times = substrate.times
    shared = jump_twin_checks.can_share_guess(recipe)
    pieces = []
    for low, high in [(0, count)] if shared else sweep.split_batches(count, batch):
        ensemble = sweep.start_batch(
            recipe, high - low, key, numbers.theta, substrate.x0, offset + low
        )
        guess = jump_twin_checks.solve_and_check(
            twin, numbers, ensemble.x, times, ensemble.context, shared
        )
        run = TwinPass(numbers, guess, ensemble, times, jnp.zeros(high - low, ensemble.x.dtype))
        if jump_twin_checks.needs_returns(twin):
            run = run._replace(total=_sum_residuals(twin, recipe, shared, run))
        swept, means = _simulate(twin, recipe, shared, run)
        if not check.all_finite(swept.x):
            streamed.check_path(
                recipe.process, substrate, key, numbers.theta, swept.x, offset + low
            )
        carry, lambdas = _finish(twin, shared, run, swept, means)
        jump_twin_checks.warn_about_guess(carry.residual, carry.reward)
        pieces.append(
            sweep.finish_parts(twin, numbers, carry, ensemble.x, times, ensemble.context, [lambdas])
        )
    return sweep.join_parts(pieces)


class ResidualSums(NamedTuple):
    """States (E, M), and the part of Λ₀ up to them (E,)."""

    x: Array
    residual: Array


@partial(jit, static_argnums=(0, 1, 2))
def _sum_residuals(twin: TwinModel, recipe: simulate.Recipe, shared: bool, run: TwinPass) -> Array:
    """Λ₀ of every trajectory: the first pass. (E,)"""
    theta = run.numbers.theta
    rewards = twin.model.objective
    process: Any = recipe.process
    context = run.ensemble.context
    streams = run.ensemble.streams

    def body(so_far: ResidualSums, when: Any) -> tuple[ResidualSums, None]:
        n, t, dt = when

        def one(x: Array, context: PyTree, stream: PyTree, row: Any) -> tuple[Array, Array]:
            step = Step(x, x, t, dt, context)
            full = jump_twin.expand_step_reward(rewards, theta, row, step)
            add = partial(jump_twin.add_residual, process, theta, full, step)
            observer = jump_twin.Observer(jnp.zeros((), x.dtype), add)
            x_next, score, residual = process.observe_events(theta, step, stream, n, observer)
            sums = jump_twin.start_wait_sums(theta, x.dtype)._replace(residual=residual)
            step = step._replace(x_next=x_next)
            left = jump_twin.finish_step(rewards, theta, row, step, sums, score)
            return x_next, left.residual

        rows = _select_rows(run.guess, n, shared)
        batched = jax.vmap(one, in_axes=(0, 0, 0, None if shared else 0))
        x_next, left = batched(so_far.x, context, streams, rows)
        return ResidualSums(x_next, so_far.residual + left), None

    begin = ResidualSums(run.ensemble.x, jnp.zeros_like(run.total))
    end, _ = jax.lax.scan(body, begin, simulate.enumerate_steps(run.times))
    return end.residual + _end_paths(twin, run, shared, end.x).residual


@partial(jit, static_argnums=(0, 1, 2))
def _simulate(
    twin: TwinModel, recipe: simulate.Recipe, shared: bool, run: TwinPass
) -> tuple[SweepSums, Array]:
    """The sums over all steps, and the mean of what each step takes off Λ (T,)."""
    theta = run.numbers.theta
    rewards = twin.model.objective
    process: Any = recipe.process
    context = run.ensemble.context
    streams = run.ensemble.streams

    def body(swept: SweepSums, when: Any) -> tuple[SweepSums, Array]:
        n, t, dt = when

        def one(
            x: Array, context: PyTree, stream: PyTree, row: Any
        ) -> tuple[Array, jump_twin.StepResult]:
            step = Step(x, x, t, dt, context)
            observer = _observe(process, rewards, theta, row, step)
            x_next, score, sums = process.observe_events(theta, step, stream, n, observer)
            step = step._replace(x_next=x_next)
            return x_next, jump_twin.finish_step(rewards, theta, row, step, sums, score)

        rows = _select_rows(run.guess, n, shared)
        batched = jax.vmap(one, in_axes=(0, 0, 0, None if shared else 0))
        x_next, left = batched(swept.x, context, streams, rows)
        step = EnsembleSteps(n, t, dt, swept.x, x_next)
        return _add_step(twin, run, swept, step, left), left.residual.mean()

    return jax.lax.scan(body, _start_sums(run), simulate.enumerate_steps(run.times))


def _observe(
    process: Any, rewards: Any, theta: PyTree, row: jump_twin.GuessRow, step: Step
) -> jump_twin.Observer:
    """The observer of the waits of one step."""
    full = jump_twin.expand_step_reward(rewards, theta, row, step)
    add = partial(jump_twin.add_wait, process, theta, full, step)
    return jump_twin.Observer(jump_twin.start_wait_sums(theta, step.x.dtype), add)


# ------------------------------------------------------------------------------------- recordings


def recorded_parts(call: sweep.RecordedTwinCall) -> sweep.Parts:
    """The two parts of the gradients of recorded trajectories, read block by block."""
    twin, numbers, batch, recording, block_bytes = call
    jump_twin_checks.refuse_model(twin.model)
    if recording.read_events(0, 1) is None:
        raise ValueError(
            "a `Twin` of `Jumps` needs the events, not only the states: Trajectories(t, x, "
            "events=bin_events(...))."
        )
    x = recording.first_states
    context = recording.context
    times = recording.times
    shared = not jax.tree.leaves(context) and bool(jnp.all(x == x[:1]))
    pieces = []
    slices = [(0, recording.count)] if shared else sweep.split_batches(recording.count, batch)
    for low, high in slices:
        rows = slice(low, high)
        own = jax.tree.map(lambda leaf, rows=rows: leaf[rows], context)
        ensemble = simulate.Ensemble(x[rows], own, None)
        guess = jump_twin_checks.solve_and_check(twin, numbers, ensemble.x, times, own, shared)
        run = TwinPass(numbers, guess, ensemble, times, jnp.zeros(high - low, x.dtype))
        part = RecordedRows(recording, rows, block_bytes)
        if jump_twin_checks.needs_returns(twin):
            swept, _ = _read_through(twin, shared, run, part)
            run = run._replace(total=swept.residual + _last_residuals(twin, shared, run, swept.x))
        swept, means = _read_through(twin, shared, run, part)
        carry, lambdas = _finish(twin, shared, run, swept, means)
        jump_twin_checks.warn_about_guess(carry.residual, carry.reward)
        pieces.append(sweep.finish_parts(twin, numbers, carry, ensemble.x, times, own, [lambdas]))
    return sweep.join_parts(pieces)


@partial(jit, static_argnums=(0, 1))
def _last_residuals(twin: TwinModel, shared: bool, run: TwinPass, x: Array) -> Array:
    return _end_paths(twin, run, shared, x).residual


class RecordedRows(NamedTuple):
    """Some trajectories of a recording. block_bytes: how much is held at a time."""

    recording: Any
    rows: slice
    block_bytes: int


def _read_through(
    twin: TwinModel, shared: bool, run: TwinPass, part: RecordedRows
) -> tuple[SweepSums, Array]:
    """The sums over all recorded steps, and the mean of what each step takes off Λ (T,)."""
    recording, rows, block_bytes = part
    swept = _start_sums(run)
    means = []

    def by_time(leaf: Array) -> Array:
        return jnp.swapaxes(leaf[rows], 0, 1)

    for n, times, x in recording.iterate_blocks(block_bytes):
        index, t, dt = simulate.enumerate_steps(times)
        events = jax.tree.map(by_time, recording.read_events(n, n + len(times.dt)))
        path = by_time(x)
        block = EnsembleSteps(n + index, t, dt, path[:-1], path[1:], events)
        swept, mean = _add_block(twin, shared, run, swept, block)
        means.append(mean)
    return swept, jnp.concatenate(means)


@partial(jit, static_argnums=(0, 1))
def _add_block(
    twin: TwinModel, shared: bool, run: TwinPass, swept: SweepSums, block: EnsembleSteps
) -> tuple[SweepSums, Array]:
    theta = run.numbers.theta
    rewards = twin.model.objective
    process: Any = twin.model.process
    context = run.ensemble.context

    def body(swept: SweepSums, at: EnsembleSteps) -> tuple[SweepSums, Array]:
        def one(
            x: Array, x_next: Array, context: PyTree, events: Any, row: Any
        ) -> jump_twin.StepResult:
            step = Step(x, x_next, at.t, at.dt, context, events)
            observer = _observe(process, rewards, theta, row, step)
            score, sums = process.observe_recorded(theta, step, observer)
            return jump_twin.finish_step(rewards, theta, row, step, sums, score)

        rows = _select_rows(run.guess, at.n, shared)
        batched = jax.vmap(one, in_axes=(0, 0, 0, 0, None if shared else 0))
        left = batched(at.x, at.x_next, context, at.events, rows)
        return _add_step(twin, run, swept, at, left), left.residual.mean()

    return jax.lax.scan(body, swept, block)
