"""Where trajectories come from: a recording, in one piece or in chunks, or a simulator, streamed
and never stored.

The estimator moves all trajectories through time together. Chunks of a recording are therefore read
again for every block of steps that fits in memory, which is what makes them give the same result as
one piece for any baseline.

A baseline that needs the returns first has the noise of a simulator replayed. Where it does not, a
guess R' stands for the return R during the sweep and (R − R') ΣU is added at the end: exact, and
one pass instead of two.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import check, sweep
from fluctua.core.arrays import Array, Params, PyTree, jit, on_host, part, put, working_dtype
from fluctua.core.baselines import Baseline, check_baseline
from fluctua.core.diffusion import check_along, check_finite, check_model, q_matrix
from fluctua.core.draws import philox_key_words
from fluctua.core.integrators import mean_rate
from fluctua.core.objective import Rewards
from fluctua.core.process import AnyProcess, Process
from fluctua.core.simulate import (
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
from fluctua.core.sweep import Model, Sums, Tables, silenced
from fluctua.core.trajectories import Times, Trajectories

BLOCK_BYTES = 256 * 2**20
"""How much of a recording is held at a time, all trajectories together."""

MOST_SEARCHED = 100
"""Trajectories that are gone through for the state that has no score."""

EXPLODED = 1e6
"""Times their start that states may be: beyond, it is the time step that is too large."""


class Recording:
    """A checked, re-readable source of trajectories on one time grid."""

    def __init__(
        self, source: Trajectories | Iterable[Trajectories], theta: Params, offset: int = 0
    ):
        self.offset = offset  # of the first trajectory, where this is a piece of a longer recording
        self._chunks: Iterable[Trajectories] = (
            [source] if isinstance(source, Trajectories) else source
        )
        if isinstance(self._chunks, Iterator):
            raise TypeError(
                "chunks of trajectories are gone through more than once, and a generator can be "
                "only once. Pass "
                "a list, or an object whose __iter__ starts afresh."
            )
        self.sizes: list[int] = []
        first = []
        contexts = []
        largest = []
        whole: np.ndarray | None = None
        bad: list[tuple[int, int, int]] = []
        for chunk in self._chunks:
            t, x = _checked(chunk)
            if whole is None:
                whole = t
                shape = x.shape[1:]
            elif not np.array_equal(t, whole) or x.shape[1:] != shape:
                raise ValueError(
                    f"all chunks must share one time grid and state: chunk 0 has {shape[0]} times "
                    "and "
                    f"{shape[1]} components, chunk {len(self.sizes)} has {x.shape[1]} and "
                    f"{x.shape[2]}" + ("." if x.shape[1:] != shape else ", at other times.")
                )
            for row, rows in _rows(x):
                rows = np.asarray(rows)
                bad += check.first_bad(rows, self.offset + sum(self.sizes) + row)
                largest.append(np.abs(rows).max(axis=(0, 1)))
            self.sizes.append(x.shape[0])
            first.append(np.asarray(x[:, 0]))
            contexts.append(chunk.context)
        if whole is None:
            raise ValueError("there are no trajectories: the source of chunks is empty.")
        check.finite_trajectories(bad, self.count)
        self.times = check.grid(whole)
        self.dtype = working_dtype(theta, np.concatenate(first))
        self.first = jnp.asarray(np.concatenate(first), self.dtype)
        coarsest = max(
            np.finfo(dtype).eps for dtype in {part.dtype for part in first} | {self.first.dtype}
        )
        self.rounding = coarsest * np.max(largest, axis=0)  # (M,), of the largest states
        self.context: PyTree = jax.tree.map(_one_after_the_other, *contexts)

    @property
    def count(self) -> int:
        """E, over all chunks."""
        return sum(self.sizes)

    @property
    def t(self) -> Array:
        """The time grid. (T+1,)"""
        return self.times.t

    def blocks(self, block_bytes: int) -> Iterator[tuple[int, Times, Array]]:
        """(n, times of the block, x (E, b+1, M)) for consecutive blocks of b steps, ends shared."""
        steps = len(self.t) - 1
        b = max(1, min(steps, block_bytes // max(1, self.first.nbytes)))
        for n in range(0, steps, b):
            yield n, *self.block(n, min(n + b, steps))

    def block(self, n: int, stop: int) -> tuple[Times, Array]:
        """Times and states x (E, b+1, M) of the b steps from n to `stop`, ends included."""
        parts = [np.asarray(_held(chunk.x)[:, n : stop + 1]) for chunk in self._chunks]
        if [len(part) for part in parts] != self.sizes:
            raise ValueError(
                f"the chunks changed while they were read: {self.sizes} trajectories at first, "
                f"{[len(part) for part in parts]} later."
            )
        t, dt = (
            put(np.asarray(v)[n:end]) for v, end in zip(self.times, (stop + 1, stop), strict=True)
        )
        return Times(t, dt), jnp.asarray(np.concatenate(parts), self.dtype)

    def events(self, n: int, stop: int) -> PyTree:
        """What happened within the steps from n to `stop`, leaves (E, b, ...); None where
        nothing is known of it.
        """
        parts = [
            jax.tree.map(lambda leaf: np.asarray(_held(leaf)[:, n:stop]), chunk.events)
            for chunk in self._chunks
        ]
        return jax.tree.map(lambda *leaves: put(np.concatenate(leaves)), *parts)

    def trajectory(self, j: int) -> Trajectories:
        """Trajectory j alone."""
        for chunk in self._chunks:
            if j < len(chunk.x):
                return only(chunk._replace(t=self.t), j)
            j -= len(chunk.x)
        raise IndexError(j)


def _checked(trajectories: Trajectories) -> tuple[np.ndarray, Array]:
    """Shapes that fit together."""
    if not isinstance(trajectories, Trajectories):
        raise TypeError(
            f"expected fluctua.Trajectories(t, x, context); got {type(trajectories).__name__}."
        )
    t = check.times(trajectories.t)
    x = trajectories.x
    if not hasattr(x, "dtype"):
        raise TypeError(
            f"`x` must be an array (trajectories, {len(t)}, state); got a {type(x).__name__}. "
            "Write np.asarray(x)."
        )
    shape = np.shape(x)
    if len(shape) != 3 or shape[1] != len(t):
        hint = ""
        if shape[:1] == (len(t),):
            hint = " For one trajectory pass x[None]."
            if len(shape) == 3:
                hint = " It looks like (time, trajectory, state): pass x.swapaxes(0, 1)."
        raise ValueError(
            f"`x` must be (trajectories, {len(t)}, state) to match `t`; got {shape}.{hint}"
        )
    if shape[0] == 0 or shape[2] == 0:
        raise ValueError(f"`x` holds no trajectories or no state: shape {shape}.")
    if not np.issubdtype(x.dtype, np.floating):
        raise TypeError(
            f"`x` must be real floating point; it is {x.dtype}."
            + (
                " Stack real and imaginary parts as components."
                if np.issubdtype(x.dtype, np.complexfloating)
                else ""
            )
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(trajectories.context):
        if np.shape(leaf)[:1] != shape[:1]:
            raise ValueError(
                f"`context{jax.tree_util.keystr(path)}` must have one row per trajectory, "
                f"({shape[0]}, ...); got "
                f"{np.shape(leaf)}."
            )
    return t, _held(x)


def _held(x: Array) -> Array:
    """An array in memory as NumPy has it, whose slices are not compiled; what loads when sliced
    as it is.
    """
    return np.asarray(x) if isinstance(x, jax.Array) else x


def _one_after_the_other(*leaves: Any) -> Array:
    """The rows of all chunks; those of one are copied without being compiled for their shape."""
    one = leaves[0]
    if len(leaves) > 1 or check.is_key(one):
        return jnp.concatenate(leaves)
    return one if isinstance(one, jax.Array) else put(np.array(one))


def pieces(
    source: Trajectories | Iterable[Trajectories], cut: int, block_bytes: int
) -> Iterator[tuple[int, Trajectories]]:
    """A few trajectories at a time, held whole, with the number of the first; none on both
    sides of number `cut`.
    """
    seen = 0
    for chunk in [source] if isinstance(source, Trajectories) else source:
        count = len(chunk.x)
        low = 0
        size = max(
            1, block_bytes // max(1, chunk.x.shape[1] * chunk.x.shape[2] * chunk.x.dtype.itemsize)
        )
        while low < count:
            high = min(low + size, count)
            if seen + low < cut:
                high = min(high, cut - seen)

            def some(leaf):
                return (leaf if check.is_key(leaf) else _held(leaf))[low:high]  # noqa: B023

            beside = (jax.tree.map(some, tree) for tree in chunk[2:])
            yield seen + low, Trajectories(chunk.t, np.asarray(_held(chunk.x)[low:high]), *beside)
            low = high
        seen += count


def _rows(x: Array, bytes_at_once: int = 64 * 2**20) -> Iterator[tuple[int, Array]]:
    """A few trajectories at a time, so that a chunk that loads when sliced is never held whole."""
    size = max(1, bytes_at_once // max(1, x.shape[1] * x.shape[2] * x.dtype.itemsize))
    for j in range(0, x.shape[0], size):
        yield j, x[j : j + size]


# ---------------------------------------------------------------------- recorded


def recorded_samples(
    model: Model, tables: Tables, recording: Recording, theta: Params, block_bytes: int
) -> tuple[Array, Array]:
    """Gradients (E, P) and returns (E,) of the trajectories of a recording."""
    context = recording.context
    process = check_model(
        model.process, model.objective, theta, recording.first, recording.t, context
    )
    model = silenced(model, process)
    check_rounding(model.process, theta, recording)

    reward = sweep.at_start(model.objective, theta, recording.first, context)
    for _, times, x in recording.blocks(block_bytes):
        reward = _reward_of_block(model, theta, reward, times, x, context)
        last = part(x, np.s_[:, -1])
    returns = reward + sweep.terminal(model, theta, last, context)

    t = np.asarray(recording.t)
    sums = sweep.initial_sums(model, theta, recording.first, t[0], context, returns, tables)
    for n, times, x in recording.blocks(block_bytes):
        events = recording.events(n, n + len(times.dt))
        sums = _sweep_block(
            model, theta, sums, n, times, x, (context, events), returns, tables, t[:2]
        )
    flat = sweep.finish(model, theta, sums, last, recording.t, context)
    check_scores(flat, model.process, theta, recording.trajectory, recording.t, recording.offset)
    return flat, returns


def over_block(
    one: Callable[[Any, Any, Any], Any],
    carry: Any,
    first: Array | int,
    times: Times,
    x: Array,
    beside: tuple[PyTree, PyTree],
) -> Any:
    """`one(carry, (x, x', context, events), (n, t, Δt))` along a block of steps of recorded
    trajectories.

    first: number of its first step. x: (E, b+1, M). beside: context and events. Called inside of
    `jax.jit`.
    """
    context, events = beside

    def in_time(v):
        return jnp.swapaxes(v, 0, 1)

    path = in_time(x)
    index, t, dt = grid(times)

    def body(carry: Any, step: Any) -> tuple[Any, None]:
        x, x_next, happened, when = step
        return one(carry, (x, x_next, context, happened), when), None

    return jax.lax.scan(
        body, carry, (path[:-1], path[1:], jax.tree.map(in_time, events), (first + index, t, dt))
    )[0]


@partial(jit, static_argnums=0)
def _reward_of_block(
    model: Model, theta: Params, reward: Array, times: Times, x: Array, context: PyTree
) -> Array:
    """C at the end of a block of steps. x (E, b+1, M)."""

    def paid(reward: Array, states: Any, when: Any) -> Array:
        x, x_next, *_ = states
        _, t, dt = when
        reward = reward + sweep.running(model, theta, x, t, context) * dt.astype(x.dtype)
        return sweep.after_step(model.objective, theta, reward, x, x_next, when, context)

    return over_block(paid, reward, 0, times, x, (context, None))


@partial(jit, static_argnums=0)
def _sweep_block(
    model: Model,
    theta: Params,
    sums: Sums,
    n: Array,
    times: Times,
    x: Array,
    beside: tuple[PyTree, PyTree],
    returns: Array,
    tables: Tables,
    origin: Array,
) -> Sums:
    def step(sums, states, when):
        return sweep.sweep_step(model, theta, sums, returns, tables, states, when, origin)

    return over_block(step, sums, n, times, x, beside)


@partial(jit, static_argnums=0)
def mean_return_to_go(
    objective: Rewards, theta: Params, times: Times, x: Array, context: PyTree
) -> Array:
    """E[λ̂ₙ] (T+1,) of trajectories x (E, T+1, M) held in memory."""
    return sweep.to_go(objective, theta, times, x, context).mean(axis=0)


def returns_of(rewards: Rewards, theta: Params, trajectories: Trajectories) -> Array:
    """The return of each trajectory that is held in memory. (E,)"""
    t, x, context = trajectories[:3]
    t = jnp.asarray(t)
    x = jnp.asarray(x)

    def one(path: Array, context: PyTree) -> Array:
        rates = jax.vmap(lambda x, t: rewards.running(theta, x, t, context))(path[:-1], t[:-1])
        total = jnp.sum(rates * jnp.diff(t)) + rewards.terminal(theta, path[-1], context)
        if rewards.step is not None:
            of_step = jax.vmap(rewards.step, in_axes=(None, 0, 0, 0, 0, None))
            total += jnp.sum(of_step(theta, path[:-1], path[1:], t[:-1], jnp.diff(t), context))
        return (
            total if rewards.initial is None else total + rewards.initial(theta, path[0], context)
        )

    return jax.vmap(one)(x, context)


# ---------------------------------------------------------------------- streamed


def run_and_pilot(key: Array) -> tuple[Array, Array]:
    """The keys of the run and of the pilot of one estimate: each is the key of a simulator."""
    check.key(key)
    return _in_two(key)


@jit
def _in_two(key: Array) -> tuple[Array, Array]:
    run, pilot = jax.random.split(key)
    return run, pilot


def estimate_seeds(key: Array) -> tuple[int, int]:
    """The 64-bit Philox seeds of the run and of the pilot of an estimate with this key.

    A fused estimator that draws with them has the noise of `ppgt(..., simulator(...,
    wiener=philox))(key, ...)`.
    """
    run, pilot = on_host(
        _seed_words(key)
    ).tolist()  # one compiled call: a dozen small ones take a millisecond
    return run[1] << 32 | run[0], pilot[1] << 32 | pilot[0]


@jit
def _seed_words(key: Array) -> Array:
    return jnp.stack([philox_key_words(noise_key(k)) for k in _in_two(key)])


def streamed_samples(
    model: Model,
    tables: Tables,
    plans: tuple[Baseline, ...],
    substrate: Simulator,
    key: Array,
    theta: Params,
    count: int,
    first: int | None = None,
    table: Array | None = None,
) -> tuple[Array, Array]:
    """Gradients (E, P) and returns (E,) of `count` simulated trajectories.

    plans: step and initial baseline. first: number of the first trajectory; 0 if not given. table:
    of `pilot_table`, if it is there already.
    """
    check.key(key)
    for plan in plans:
        check_baseline(plan, count, substrate.t)

    def of_run():
        return run_and_pilot(key)[0]

    state, context = first_state(substrate, key if substrate.recipe.fixed else of_run(), theta)
    model = silenced(
        model, check_model(model.process, model.objective, theta, state, substrate.t, context)
    )
    if table is not None:
        tables = tables.filled(table)
    call = Call(model, plans, tables, substrate, key, theta, count, first)
    swept = None if substrate.backend is None else substrate.backend.samples(call)
    returns, flat, last, finite = _samples_by_jax(call) if swept is None else swept
    if not finite:
        check_path(model.process, substrate, of_run(), theta, last, first or 0)
        check_scores(
            flat,
            model.process,
            theta,
            trajectory_of(substrate, of_run(), theta, first or 0),
            substrate.t,
            first or 0,
        )
    return flat, returns


@jit
def _finite(*arrays: Array) -> Array:
    """Whether all are numbers: in one call, and nothing but the answer comes from a device."""
    return jnp.stack([jnp.all(jnp.isfinite(array)) for array in arrays]).all().astype(jnp.int8)


class Call(NamedTuple):
    """What an estimator asks of a simulator. key: of the estimate. first: number of the first
    trajectory, or None.
    """

    model: Model
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
    model, plans, tables, substrate, key, theta, count, first = call
    k_run, _ = run_and_pilot(key)
    run = (substrate.recipe, count, k_run, theta, substrate.times, substrate.x0, first)
    if call.needs_pilot:
        tables = tables.filled(pilot_table(model, plans, substrate, key, theta))
    if any(plan.needs_returns for plan in plans):
        guess = _returns(model, *run)
    else:  # near the mean return the correction (R − R')ΣU is small, and so is its rounding
        guess = jnp.zeros(()) if tables.step is None else part(tables.step, 0)
    returns, flat, last = _sweep(model, *run, guess, tables)
    return Swept(returns, flat, last, bool(on_host(_finite(last, flat))))


def pilot_table(
    model: Model, plans: tuple[Baseline, ...], substrate: Simulator, key: Array, theta: Params
) -> Array:
    """The mean return-to-go (T+1,) of the independent run that a time-only baseline asks for.
    key: of the estimate.
    """
    pilot = max(plan.pilot for plan in plans)
    _, k_pilot = run_and_pilot(key)
    return _mean_return_to_go(
        model, substrate.recipe, pilot, k_pilot, theta, substrate.times, substrate.x0
    )


def trajectory_of(
    substrate: Simulator, key: Array, theta: Params, first: int
) -> Callable[[int], Trajectories]:
    """j -> trajectory first + j alone. key: of the run."""

    def trajectory(j: int) -> Trajectories:
        x, context = sampled(substrate, key, theta, jnp.array([first + j]), 1)
        return Trajectories(substrate.t, x, context)

    return trajectory


def only(trajectories: Trajectories, j: int) -> Trajectories:
    """Trajectory j alone."""

    def alone(tree):
        return jax.tree.map(lambda leaf: leaf[j : j + 1], tree)

    return Trajectories(trajectories.t, *map(alone, trajectories[1:]))


@partial(jit, static_argnums=(0, 1, 2))
def _returns(
    model: Model,
    recipe: Recipe,
    count: int,
    key: Array,
    theta: Params,
    times: Times,
    x0: Array | None,
    first: Array | None = None,
) -> Array:
    """R of every trajectory: the first pass. (E,)"""
    ensemble = begin(recipe, count, key, theta, x0, first)

    def body(carry: tuple[Array, Array], step: Any) -> tuple[tuple[Array, Array], None]:
        x, reward = carry
        n, t, dt = step
        here = seen(recipe, x)
        reward = reward + sweep.running(model, theta, here, t, ensemble.context) * dt.astype(
            x.dtype
        )
        x_next = advance(recipe, theta, ensemble._replace(x=x), n, t, dt)
        there = seen(recipe, x_next)
        return (
            x_next,
            sweep.after_step(model.objective, theta, reward, here, there, step, ensemble.context),
        ), None

    begun = sweep.at_start(model.objective, theta, seen(recipe, ensemble.x), ensemble.context)
    (x, reward), _ = jax.lax.scan(body, (ensemble.x, begun), grid(times))
    return reward + sweep.terminal(model, theta, seen(recipe, x), ensemble.context)


@partial(jit, static_argnums=(0, 1, 2))
def _mean_return_to_go(
    model: Model,
    recipe: Recipe,
    count: int,
    key: Array,
    theta: Params,
    times: Times,
    x0: Array | None,
) -> Array:
    """E[λ̂ₙ] (T+1,) of a pilot, from the mean reward of each step; nothing of size E·T."""
    ensemble = begin(recipe, count, key, theta, x0)

    nothing = jnp.zeros(count, ensemble.x.dtype)

    def body(x: Array, step: Any) -> tuple[Array, tuple[Array, Array]]:
        n, t, dt = step
        here = seen(recipe, x)
        reward = sweep.running(model, theta, here, t, ensemble.context).mean() * dt
        x_next = advance(recipe, theta, ensemble._replace(x=x), n, t, dt)
        there = seen(recipe, x_next)
        paid = sweep.after_step(
            model.objective, theta, nothing, here, there, step, ensemble.context
        ).mean()
        return x_next, (reward, paid)

    x, (rewards, paid) = jax.lax.scan(body, ensemble.x, grid(times))
    rewards = jnp.append(
        rewards, sweep.terminal(model, theta, seen(recipe, x), ensemble.context).mean()
    )
    if model.objective.step is not None or model.objective.initial is not None:
        begun = sweep.at_start(
            model.objective, theta, seen(recipe, ensemble.x), ensemble.context
        ).mean()
        rewards = rewards + jnp.concatenate([begun[None], paid])
    return jnp.flip(jnp.cumsum(jnp.flip(rewards)))


@partial(jit, static_argnums=(0, 1, 2))
def _sweep(
    model: Model,
    recipe: Recipe,
    count: int,
    key: Array,
    theta: Params,
    times: Times,
    x0: Array | None,
    first: Array | None,
    guess: Array,
    tables: Tables,
) -> tuple[Array, Array, Array]:
    """Returns (E,), gradients (E, P), final states (E, M).

    `guess`: R where it is known, near it otherwise.
    """
    ensemble = begin(recipe, count, key, theta, x0, first)
    guess = jnp.broadcast_to(guess, (count,)).astype(ensemble.x.dtype)
    started = seen(recipe, ensemble.x)
    sums = sweep.initial_sums(model, theta, started, times.t[0], ensemble.context, guess, tables)

    def body(carry: tuple[Array, Sums], step: Any) -> tuple[tuple[Array, Sums], None]:
        x, sums = carry
        x_next, events = transition(recipe, theta, ensemble._replace(x=x), *step)
        states = (seen(recipe, x), seen(recipe, x_next), ensemble.context, events)
        return (
            x_next,
            sweep.sweep_step(model, theta, sums, guess, tables, states, step, times.t[:2]),
        ), None

    (x, sums), _ = jax.lax.scan(body, (ensemble.x, sums), grid(times))
    last = seen(recipe, x)
    returns = sums.reward + sweep.terminal(model, theta, last, ensemble.context)
    flat = sweep.finish(model, theta, sums, last, times.t, ensemble.context)
    return returns, flat + (returns - guess)[:, None] * sums.score, x


# ---------------------------------------------------------------------- checks


def check_rounding(process: AnyProcess, theta: Params, recording: Recording) -> None:
    """Warn when the precision of the states is coarse against the kicks that the score reads
    off them.
    """
    if not isinstance(process, Process):
        return
    t = np.asarray(recording.t)
    q = np.asarray(q_matrix(process, theta, *check.first((recording.first, t, recording.context))))
    kick = np.sqrt(2 * (q if q.ndim == 1 else np.diag(q)) * float(t[1] - t[0]))
    coarse = np.flatnonzero((recording.rounding > 0.01 * kick) & (kick > 0))
    if coarse.size:
        i = coarse[np.argmax(recording.rounding[coarse] / kick[coarse])]
        warnings.warn(
            f"the states are rounded to about {recording.rounding[i]:.1e} (component {i}), more "
            "than a hundredth of a "
            f"typical kick ({kick[i]:.1e}): the score will carry rounding noise. Record in float64 "
            "and use "
            'jax.config.update("jax_enable_x64", True).',
            RuntimeWarning,
            stacklevel=5,
        )


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
                    f"the `step` of the process is not finite {where}, x = "
                    f"{np.asarray(x[0, n]).tolist()}, though its "
                    "drift and noise are: Δt is too large for it, or a number of its own is at "
                    "fault."
                )
    check.finite_simulation(last, substrate.t, offset)


def check_scores(
    flat: Array,
    process: AnyProcess,
    theta: Params,
    trajectory: Callable[[int], Trajectories],
    t: Array,
    offset: int = 0,
) -> None:
    """Per-trajectory gradients (E, P) are numbers; if not, look for the state where the
    diffusion fails.
    """
    if check.all_finite(flat):
        return
    which = np.flatnonzero(~np.isfinite(np.asarray(flat)).all(axis=1))
    for j in which[
        :MOST_SEARCHED
    ].tolist():  # a baseline that looks at scores passes it on to the others
        check_along(process, theta, trajectory(j), offset + j)
    raise FloatingPointError(
        f"the gradients of {len(which)} of {len(flat)} trajectories are not finite: "
        f"{check.few(which + offset)}. The "
        "states and the diffusion are; a derivative of the drift, noise or reward is not (sqrt or "
        "abs at zero?), or a "
        "matrix-free solve did not converge."
    )
