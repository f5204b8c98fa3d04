"""Sums over batches of trajectories, for gradients with many parameters.

Error bars need the spread of the gradient, and the means of a few dozen batches show it as well as
single trajectories do. The gradient of a batch is

    Σ_j Σ_n {(λ̂ₙ₊₁ − λ̄ₙ) Uₙ + ∂θ(g Δt + r)},   Uₙ = ∂θ ln p(X_{n+1}|X_n),

with weights λ̂ − λ̄ that are known once the batch has run: one reverse pass through the logarithm
of the density, in which products with matrices stay products of matrices, instead of P numbers per
trajectory and step. The states of some trajectories are kept meanwhile, at most `PATH_BYTES`.
Memory is that and one gradient per batch, not E·P.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core import arrays, baselines, scores, simulate, streamed
from fluctua.core import model as terms
from fluctua.core.arrays import Array, Params, PyTree
from fluctua.core.draws import Density
from fluctua.core.estimate import compare_batches
from fluctua.core.host import keys
from fluctua.core.process import Process, Step

MIN_PARAMETERS = 128
"""Parameters from which an estimate adds up batches (`benchmarks/many_parameters.py`)."""

MIN_TRAJECTORIES = 128
"""Trajectories from which it does: 32 batches of four."""

MAX_BATCHES = 64
SMALLEST_BATCH = 4

PATH_BYTES = 2**28
"""States that are kept while a batch waits for its returns, at most."""

CPU_TRAJECTORIES = 2**12
"""Trajectories that run together on a CPU: what a step works on stays in the cache."""

GPU_NUMBERS = 2**25
CPU_NUMBERS = 2**18
"""Rows of one reverse pass, times the width of a square matrix of P weights."""


class BatchSums(NamedTuple):
    """Sums over batches of trajectories.

    returns: R (E,). sums: of the gradients of each batch (B, P). last: final states (E, M).
    finite: whether all are finite. moments: from `compare_batches` (4, P), in place of the sums.
    """

    returns: Array
    sums: Array | None
    last: Array
    finite: bool
    moments: np.ndarray | None = None

    def compare(self, size: int) -> np.ndarray:
        """Moments over the batches (4, P). size: trajectories per batch."""
        if self.moments is not None:
            return self.moments
        assert self.sums is not None
        return compare_batches(self.sums, size, len(self.returns))


def batch_size(count: int) -> int:
    """Trajectories per batch, a power of two, so that there are 32 to 64 batches.

    A function of the count alone: every backend has the same batches. The last may be smaller.
    """
    size = SMALLEST_BATCH
    while size * MAX_BATCHES < count:
        size *= 2
    return size


def is_large(theta: Params, count: int) -> bool:
    """Whether parameters and trajectories are enough for batches to pay."""
    parameters = sum(np.size(leaf) for leaf in jax.tree.leaves(theta))
    return parameters >= MIN_PARAMETERS and count >= MIN_TRAJECTORIES


def is_summable(call: streamed.Call) -> bool:
    """Whether the weights of the scores do not depend on other trajectories or on scores."""
    model = call.model
    known = {"none": baselines.none().function, "time": baselines.time_only().function}
    used = zip(call.plans, (model.baseline, model.initial_baseline), strict=False)
    return (
        isinstance(model.process, Process)
        and isinstance(call.substrate.recipe.process, Process)
        and model.objective.stop is None
        and (model.start is None or isinstance(model.start, Density))
        and scores.find_log_density(model.score) is not None
        and all(known.get(plan.name) is function for plan, function in used)
    )


def sum_batches(call: streamed.Call) -> BatchSums | None:
    """The sums of a call that is served; None where some are not finite."""
    substrate = call.substrate
    for plan in call.plans:
        baselines.check_baseline(plan, call.count, substrate.t)
    # on the host NumPy checks them: nothing to compile, and one transfer from a GPU
    theta = jax.tree.map(arrays.on_host, call.theta)
    key = keys.move_to_host(call.key)
    model = streamed.prepare_model(call.model, substrate, streamed.split_key(key).run, theta)
    call = call._replace(model=model)
    size = batch_size(call.count)
    swept = None
    if substrate.backend is not None:
        swept = substrate.backend.batch_sums(call._replace(key=key, theta=theta), size)
    if swept is None:
        if call.needs_pilot:
            table = streamed.pilot_table(model, call.plans, substrate, call.key, call.theta)
            call = call._replace(tables=call.tables.fill_missing(table))
        swept = _sum_by_jax(call, size)
    return swept if swept.finite else None


# ------------------------------------------------------------------------------------ by JAX


class Chunk(NamedTuple):
    """Trajectories that run together.

    batches: their number. trajectories: of each. steps: that one reverse pass takes.
    """

    batches: int
    trajectories: int
    steps: int


def plan_chunk(count: int, size: int, steps: int, state: int, parameters: int) -> Chunk:
    """The largest chunk within the limits of memory: some batches, or a part of one.

    steps: T. state: bytes of a state and its weight.
    """
    on_cpu = jax.default_backend() == "cpu"
    rows = (CPU_NUMBERS if on_cpu else GPU_NUMBERS) // max(64, round(parameters**0.5))
    most = min(PATH_BYTES // (steps * state), CPU_TRAJECTORIES if on_cpu else rows)
    trajectories = size
    while trajectories > max(most, 1):
        trajectories //= 2
    batches = 1
    if trajectories == size:
        batches = max(1, min(-(-count // size), most // size))
    return Chunk(batches, trajectories, max(1, min(steps, rows // (batches * trajectories))))


def _sum_by_jax(call: streamed.Call, size: int) -> BatchSums:
    substrate = call.substrate
    state, _ = simulate.first_state(substrate, call.key, call.theta)
    parameters = sum(np.size(leaf) for leaf in jax.tree.leaves(call.theta))
    steps = len(substrate.times.dt)
    bytes_each = (np.size(state) + 1) * state.dtype.itemsize
    chunk = plan_chunk(call.count, size, steps, bytes_each, parameters)
    together = chunk.batches * chunk.trajectories
    sums = np.zeros((-(-call.count // size), parameters))
    parts = []
    key = streamed.split_key(call.key).run
    for first in range(0, call.count, together):
        number = (call.first or 0) + first
        run = streamed.Run(key, call.theta, substrate.times, substrate.x0, number)
        left = call.count - first
        part = _sum_chunk(call.model, substrate.recipe, chunk, run, call.tables, left)
        begin = first // size
        rows = arrays.on_host(part.sums)[: len(sums) - begin]
        sums[begin : begin + len(rows)] += rows
        parts.append((part.returns[:left], part.last[:left]))
    returns, last = (arrays.concatenate_rows(column) for column in zip(*parts, strict=True))
    finite = bool(np.isfinite(sums).all() and np.isfinite(arrays.on_host(last)).all())
    return BatchSums(returns, sums, last, finite)


class BatchPath(NamedTuple):
    """Trajectories of a chunk, time first.

    x: states (T+1, E, M). weights: λ̂ₙ₊₁ − λ̄ₙ (T, E). start_weight: λ̂₀ − λ̄₋₁ (E,).
    counts: 1, or 0 for a trajectory that only fills the chunk (E,).
    """

    x: Array
    weights: Array
    start_weight: Array
    counts: Array
    context: PyTree


@partial(arrays.jit, static_argnums=(0, 1, 2))
def _sum_chunk(
    model: terms.EstimatorModel,
    recipe: simulate.Recipe,
    chunk: Chunk,
    run: streamed.Run,
    tables: terms.Tables,
    left: Array,
) -> BatchSums:
    """Sums of one chunk. left: trajectories from its first on; beyond, the last is repeated."""
    together = chunk.batches * chunk.trajectories
    index = jnp.arange(together)
    counts = index < left
    assert run.first is not None
    numbers = run.first + jnp.minimum(index, left - 1)
    ensemble = jax.vmap(lambda j: simulate.start_trajectory(recipe, run.key, run.theta, run.x0, j))(
        numbers
    )
    path, returns = _simulate(model, recipe, run, tables, ensemble, counts)
    summed = _add_steps(model, run, chunk, path)
    ends = sum_ends(model, run.theta, _split_ends(path, chunk))
    rows = jax.vmap(lambda tree: ravel_pytree(tree)[0])(jax.tree.map(jnp.add, summed, ends))
    return BatchSums(returns, rows, path.x[-1], True)


def _simulate(
    model: terms.EstimatorModel,
    recipe: simulate.Recipe,
    run: streamed.Run,
    tables: terms.Tables,
    ensemble: simulate.Ensemble,
    counts: Array,
) -> tuple[BatchPath, Array]:
    """States of all trajectories, the weights of their scores, and their returns (E,)."""
    theta = run.theta
    context = ensemble.context
    rewards = model.objective

    def body(carry: streamed.Collected, step: Any) -> tuple[streamed.Collected, Any]:
        x = carry.x
        x_next = simulate.advance(recipe, theta, ensemble._replace(x=x), *step)
        n, t, dt = step
        moment = terms.Moment(n, t, dt, x, x_next, context)
        rate = terms.running_rewards(rewards, theta, x, moment.t, context)
        collected = carry.rewards.reward + rate * moment.dt.astype(x.dtype)
        arrival = terms.step_rewards(rewards, theta, moment)
        after = collected if arrival is None else collected + arrival
        return streamed.Collected(x_next, terms.CollectedReward(after)), (x_next, collected)

    x = ensemble.x
    initial = terms.initial_rewards(rewards, theta, x, context)
    start = streamed.Collected(x, terms.CollectedReward(initial))
    end, (states, collected) = jax.lax.scan(body, start, simulate.enumerate_steps(run.times))
    returns = terms.finish_collection(rewards, theta, end.rewards, end.x, context)
    bar = jnp.zeros(1) if tables.step is None else tables.step[1:]
    bar = bar.astype(x.dtype)
    initial_bar = jnp.zeros(()) if tables.initial is None else tables.initial[0]
    path = BatchPath(
        jnp.concatenate([x[None], states]),
        counts * (returns - collected - bar[:, None]),  # the running reward precedes the kick
        counts * (returns - initial_bar.astype(x.dtype)),
        counts.astype(x.dtype),
        context,
    )
    return path, returns


def _add_steps(
    model: terms.EstimatorModel, run: streamed.Run, chunk: Chunk, path: BatchPath
) -> Params:
    """Σ (λ̂ₙ₊₁ − λ̄ₙ) Uₙ + ∂θ(g Δt + r) of every batch; leaves (B, ...)."""
    theta = run.theta
    times = run.times
    steps = len(path.weights)
    blocks = -(-steps // chunk.steps)
    length = -(-steps // blocks)
    index = np.arange(blocks * length).reshape(blocks, length)
    find_log_density = scores.find_log_density(model.score)
    assert find_log_density is not None
    process = model.process
    assert isinstance(process, Process)

    def split(v: Array) -> Array:
        """(steps, E, ...) -> (B, steps, m, ...): sums are then over neighbouring axes."""
        shaped = v.reshape(len(v), chunk.batches, chunk.trajectories, *v.shape[2:])
        return jnp.swapaxes(shaped, 0, 1)

    context = jax.tree.map(lambda v: split(v[None])[:, 0], path.context)

    def weigh(theta: Params, n: Array, rows: Any, context: PyTree) -> Array:
        """A number whose gradient is the sum of a batch. n: (b,). rows: (b, m, ...)."""
        fixed = jax.lax.stop_gradient(theta)

        def one(n: Array, x: Array, x_next: Array, weight: Array, once: Array, c: PyTree) -> Array:
            step = Step(x, x_next, times.t[n], times.dt[n], c)
            log_density = find_log_density(process, fixed, step)
            return weight * log_density(theta) + once * terms.step_total(
                model.objective, theta, step
            )

        of_step: Callable[..., Array] = jax.vmap(one, in_axes=(None, 0, 0, 0, 0, 0))
        return jnp.sum(jax.vmap(of_step, in_axes=(0, 0, 0, 0, 0, None))(n, *rows, context))

    differentiate = jax.vmap(jax.grad(weigh), in_axes=(None, None, 0, 0))

    def body(total: Params, index: Array) -> tuple[Params, None]:
        n = jnp.minimum(index, steps - 1)
        once = (index < steps)[:, None] * path.counts
        rows = jax.tree.map(split, (path.x[n], path.x[n + 1], once * path.weights[n], once))
        return jax.tree.map(jnp.add, total, differentiate(theta, n, rows, context)), None

    zero = jax.tree.map(lambda v: jnp.zeros((chunk.batches, *v.shape), v.dtype), theta)
    return jax.lax.scan(body, zero, jnp.asarray(index))[0]


def _split_ends(path: BatchPath, chunk: Chunk) -> BatchEnds:
    def split(v: Array) -> Array:
        return v.reshape(chunk.batches, chunk.trajectories, *v.shape[1:])

    ends = BatchEnds(path.x[0], path.x[-1], path.start_weight, path.counts, path.context)
    return jax.tree.map(split, ends)


class BatchEnds(NamedTuple):
    """Ends of trajectories, in batches (B, m, ...).

    first, last: states. weight: λ̂₀ − λ̄₋₁, of those that count. counts: 1, or 0 for a trajectory
    that only fills its batch.
    """

    first: Array
    last: Array
    weight: Array
    counts: Array
    context: PyTree


def sum_ends(model: terms.EstimatorModel, theta: Params, ends: BatchEnds) -> Params:
    """Σ (λ̂₀ − λ̄₋₁) ∂θ ln p₀ + ∂θ g_0 + ∂θ g_T of every batch; leaves (B, ...)."""
    rewards = model.objective

    def weigh(theta: Params, ends: BatchEnds) -> Array:
        def one(end: BatchEnds) -> Array:
            total = rewards.terminal(theta, end.last, end.context)
            if rewards.initial is not None:
                total = total + rewards.initial(theta, end.first, end.context)
            total = end.counts * total
            if isinstance(model.start, Density):
                density = model.start.log_density(theta, end.first, end.context)
                total = total + end.weight * density
            return total

        return jnp.sum(jax.vmap(one)(ends))

    return jax.vmap(jax.grad(weigh), in_axes=(None, 0))(theta, ends)
