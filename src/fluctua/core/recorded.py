"""Recorded trajectories: one record or chunks of any length, read block by block.

The estimator moves all trajectories through time together. Chunks are therefore read again for
every block of steps that fits in memory, and give the same result as one record for any baseline.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import arrays, check, diffusion, stopping
from fluctua.core import model as terms
from fluctua.core import trajectories as records
from fluctua.core.arrays import Array, Params, PyTree, jit
from fluctua.core.objective import Rewards
from fluctua.core.process import AnyProcess, Process
from fluctua.core.simulate import enumerate_steps

BLOCK_BYTES = 256 * 2**20
"""How much of a recording is held at a time, all trajectories together."""


SCANNED_BYTES = 64 * 2**20
"""How much is held at a time while states are looked at once."""

MAX_SEARCHED = 100
"""Trajectories that are gone through for the state that has no score."""

MAX_FOLLOWED = 64
"""Number of trajectories whose residuals are examined if some stop."""

MIN_CORRELATED = 50
"""Trajectories from which their starts are compared with the ends of those before."""

MAX_COMPARED = 16
"""Trajectories that are compared whole, where some samples are those of another."""

CONTINUED = 0.3
"""Correlation of the two from which trajectories are pieces of one record."""


class Recording:
    """A checked source of trajectories on one time grid, which can be read again.

    offset: number of the first trajectory, where this is a piece of a longer recording.
    """

    def __init__(
        self,
        source: records.Trajectories | Iterable[records.Trajectories],
        theta: Params,
        offset: int = 0,
    ):
        self.offset = offset  # of the first trajectory, where this is a piece of a longer recording
        self._chunks: Iterable[records.Trajectories] = (
            [source] if isinstance(source, records.Trajectories) else source
        )
        if isinstance(self._chunks, Iterator):
            raise TypeError(
                "chunks of trajectories are read more than once, and a generator can be read only "
                "once. Pass a list, or an object whose __iter__ starts afresh."
            )
        self.sizes: list[int] = []
        first = []
        contexts = []
        largest = []
        grid: np.ndarray | None = None
        bad: list[tuple[int, int, int]] = []
        for chunk in self._chunks:
            t, x = _check_shapes(chunk)
            if grid is None:
                grid = t
                shape = x.shape[1:]
            elif not np.array_equal(t, grid) or x.shape[1:] != shape:
                end = "." if x.shape[1:] != shape else ", at other times."
                raise ValueError(
                    f"all chunks must share one time grid and state: chunk 0 has {shape[0]} times "
                    f"and {shape[1]} components, chunk {len(self.sizes)} has {x.shape[1]} and "
                    f"{x.shape[2]}{end}"
                )
            before = self.offset + sum(self.sizes)
            states = records.Trajectories(t, x)
            for number, piece in records.split_pieces(
                states, records.count_within(x, SCANNED_BYTES)
            ):
                bad += check.find_not_finite(piece.x, before + number)
                largest.append(np.abs(piece.x).max(axis=(0, 1)))
            self.sizes.append(x.shape[0])
            first.append(np.asarray(x[:, 0]))
            contexts.append(chunk.context)
        if grid is None:
            raise ValueError("there are no trajectories: the source of chunks is empty.")
        check.finite_trajectories(bad, self.count)
        self.times = check.grid(grid)
        self.dtype = arrays.working_dtype(theta, np.concatenate(first))
        self.first_states = jnp.asarray(np.concatenate(first), self.dtype)
        coarsest = max(
            np.finfo(dtype).eps
            for dtype in {part.dtype for part in first} | {self.first_states.dtype}
        )
        self.rounding = coarsest * np.max(largest, axis=0)  # (M,), of the largest states
        self.context: PyTree = jax.tree.map(_concatenate_chunks, *contexts)

    @property
    def count(self) -> int:
        """Number of trajectories E, over all chunks."""
        return sum(self.sizes)

    @property
    def t(self) -> Array:
        """The time grid. (T+1,)"""
        return self.times.t

    def iterate_blocks(self, block_bytes: int) -> Iterator[tuple[int, records.Times, Array]]:
        """(n, times of the block, x (E, b+1, M)) for consecutive blocks of b steps, ends shared."""
        steps = len(self.t) - 1
        b = max(1, min(steps, block_bytes // max(1, self.first_states.nbytes)))
        for n in range(0, steps, b):
            yield n, *self.read_block(n, min(n + b, steps))

    def read_block(self, n: int, stop: int) -> tuple[records.Times, Array]:
        """Times and states x (E, b+1, M) of the b steps from n to `stop`, ends included."""
        parts = [np.asarray(records.open_array(chunk.x)[:, n : stop + 1]) for chunk in self._chunks]
        if [len(part) for part in parts] != self.sizes:
            raise ValueError(
                f"the chunks changed while they were read: {self.sizes} trajectories at first, "
                f"{[len(part) for part in parts]} later."
            )
        t, dt = (
            arrays.put(np.asarray(v)[n:end])
            for v, end in zip(self.times, (stop + 1, stop), strict=True)
        )
        return records.Times(t, dt), jnp.asarray(np.concatenate(parts), self.dtype)

    def read_events(self, n: int, stop: int) -> PyTree:
        """Events within the steps from n to `stop`, leaves (E, b, ...); None if not recorded."""
        parts = [
            jax.tree.map(lambda leaf: np.asarray(records.open_array(leaf)[:, n:stop]), chunk.events)
            for chunk in self._chunks
        ]
        return jax.tree.map(lambda *leaves: arrays.put(np.concatenate(leaves)), *parts)

    def read_trajectory(self, j: int) -> records.Trajectories:
        """Trajectory j alone."""
        for chunk in self._chunks:
            if j < len(chunk.x):
                return records.select_trajectories(chunk._replace(t=self.t), np.s_[j : j + 1])
            j -= len(chunk.x)
        raise IndexError(j)


def _check_shapes(trajectories: records.Trajectories) -> tuple[np.ndarray, Array]:
    """The times and states of a record, after a check that their shapes fit together."""
    if not isinstance(trajectories, records.Trajectories):
        raise TypeError(
            f"expected fluctua.Trajectories(t, x, context); got {type(trajectories).__name__}. "
            "The order is gradient(process, objective, theta, Trajectories(t, x))."
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
        if len(shape) == 2 and shape[1] == len(t):
            hint = " For one component pass x[..., None]."
        elif shape == (len(t),):
            hint = " For one trajectory of one component pass x[None, :, None]."
        elif shape[:1] == (len(t),) and len(shape) == 2:
            hint = (
                " For one trajectory pass x[None]; for one component, times first, x.T[..., None]."
            )
        elif shape[:1] == (len(t),):
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
                else " Convert it: x.astype(float), times the unit of a count."
            )
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(trajectories.context):
        if np.shape(leaf)[:1] != shape[:1]:
            raise ValueError(
                f"`context{jax.tree_util.keystr(path)}` must have one row per trajectory, "
                f"({shape[0]}, ...); got {np.shape(leaf)}."
            )
    return t, records.open_array(x)


def _concatenate_chunks(*leaves: Any) -> Array:
    """The rows of all chunks; those of one are copied without being compiled for their shape."""
    one = leaves[0]
    if len(leaves) > 1 or arrays.is_key(one):
        return jnp.concatenate(leaves)
    return one if isinstance(one, jax.Array) else arrays.put(np.array(one))


def iterate_pieces(
    source: records.Trajectories | Iterable[records.Trajectories], block_bytes: int
) -> Iterator[records.Piece]:
    """Pieces of all chunks, numbered through."""
    before = 0
    for chunk in [source] if isinstance(source, records.Trajectories) else source:
        _check_shapes(chunk)
        size = records.count_within(chunk.x, block_bytes)
        for first, piece in records.split_pieces(chunk, size):
            yield records.Piece(before + first, piece)
        before += len(chunk.x)


class FlatSamples(NamedTuple):
    """Gradients (E, P), parameters flattened, and returns (E,).

    survival: probability of reaching the horizon (E,); None where nothing stops.
    scores: ΣU (E, P); None where it is not known.
    """

    gradients: Array
    returns: Array
    survival: Array | None = None
    scores: Array | None = None


def recorded_samples(
    model: terms.EstimatorModel,
    tables: terms.Tables,
    recording: Recording,
    theta: Params,
    block_bytes: int,
) -> FlatSamples:
    """Gradients (E, P) and returns (E,) of the trajectories of a recording."""
    context = recording.context
    process = diffusion.check_model(
        model.process, model.objective, theta, recording.first_states, recording.t, context
    )
    model = terms.replace_process(model, process)
    check_rounding(model.process, theta, recording)

    rewards = model.objective
    t = np.asarray(recording.t)
    collected = terms.start_collection(rewards, theta, recording.first_states, t[0], context)
    for _, times, x in recording.iterate_blocks(block_bytes):
        collected = _collect_block(rewards, theta, collected, times, x, context)
        last = arrays.part(x, np.s_[:, -1])
    returns = terms.finish_collection(rewards, theta, collected, last, context)

    progress = terms.start(model, theta, recording.first_states, t[0], context, returns, tables)
    for n, times, x in recording.iterate_blocks(block_bytes):
        block = StepBlock(n, times, x, context, recording.read_events(n, n + len(times.dt)))
        progress = _add_block(model, theta, progress, block, returns, tables, t[:2])
    flat = terms.finish(model, theta, progress, last, recording.t, context)
    check_scores(
        flat, model.process, theta, recording.read_trajectory, recording.t, recording.offset
    )
    return FlatSamples(flat, returns, progress.survival, progress.sums.score)


class StepBlock(NamedTuple):
    """Consecutive steps of recorded trajectories, from step `first`.

    times: of the b steps. x: (E, b+1, M). context: leaves (E, ...). events: leaves (E, b, ...).
    """

    first: Array | int
    times: records.Times
    x: Array
    context: PyTree = None
    events: PyTree = None


def scan_block(one: Callable[[Any, terms.Moment], Any], carry: Any, block: StepBlock) -> Any:
    """What is carried after `carry = one(carry, moment)` along a block. Called inside `jax.jit`."""

    def by_time(v: Array) -> Array:
        return jnp.swapaxes(v, 0, 1)

    path = by_time(block.x)
    index, t, dt = enumerate_steps(block.times)

    def body(carry: Any, step: tuple[Array, ...]) -> tuple[Any, None]:
        n, t, dt, x, x_next, events = step
        return one(carry, terms.Moment(n, t, dt, x, x_next, block.context, events)), None

    steps = (block.first + index, t, dt, path[:-1], path[1:], jax.tree.map(by_time, block.events))
    return jax.lax.scan(body, carry, steps)[0]


@partial(jit, static_argnums=0)
def _collect_block(
    rewards: Rewards,
    theta: Params,
    collected: terms.CollectedReward,
    times: records.Times,
    x: Array,
    context: PyTree,
) -> terms.CollectedReward:
    """What is collected up to the end of a block of steps. x: (E, b+1, M)."""

    def add(collected: terms.CollectedReward, moment: terms.Moment) -> terms.CollectedReward:
        return terms.collect_step(rewards, theta, collected, moment)

    return scan_block(add, collected, StepBlock(0, times, x, context))


@partial(jit, static_argnums=0)
def _add_block(
    model: terms.EstimatorModel,
    theta: Params,
    progress: terms.Progress,
    block: StepBlock,
    returns: Array,
    tables: terms.Tables,
    origin: Array,
) -> terms.Progress:
    """The sums after a block of steps. origin: the first two times of the recording."""

    def add(progress: terms.Progress, moment: terms.Moment) -> terms.Progress:
        return terms.add_moment(model, theta, progress, returns, tables, moment, origin)

    return scan_block(add, progress, block)


@partial(jit, static_argnums=0)
def mean_return_to_go(
    objective: Rewards,
    theta: Params,
    times: records.Times,
    x: Array,
    context: PyTree,
    share: Array | None = None,
) -> Array:
    """E[λ̂ₙ] (T+1,) of trajectories x (E, T+1, M) held in memory; of those that still run.

    share: weight of each trajectory in several means (E, H), whose shape is then (T+1, H).
    """
    return terms.mean_return_to_go(objective, theta, times, x, context, share)


def evaluate_returns(rewards: Rewards, theta: Params, trajectories: records.Trajectories) -> Array:
    """The return of each trajectory that is held in memory. (E,)"""
    times = check.grid(trajectories.t)
    context = trajectories.context
    x = jnp.asarray(trajectories.x, arrays.working_dtype(theta, trajectories.x))
    first = arrays.part(x, np.s_[:, 0])
    collected = terms.start_collection(rewards, theta, first, arrays.part(times.t, 0), context)
    collected = _collect_block(rewards, theta, collected, times, x, context)
    last = arrays.part(x, np.s_[:, -1])
    return terms.finish_collection(rewards, theta, collected, last, context)


def evaluate_pieces(
    rewards: Rewards,
    theta: Params,
    source: records.Trajectories | Iterable[records.Trajectories],
    block_bytes: int,
) -> np.ndarray:
    """The return of each trajectory of a source that is read once, piece by piece. (E,)"""
    parts = []
    for first, piece in iterate_pieces(source, block_bytes):
        recording = Recording(piece, theta, first)
        row = check.take_first((recording.first_states, recording.t, recording.context))
        check.check_rewards(rewards, theta, *row)
        parts.append(np.asarray(evaluate_returns(rewards, theta, piece)))
    if not parts:
        raise ValueError("there are no trajectories: the source of chunks is empty.")
    return np.concatenate(parts)


def cut_before_stops(
    rewards: Rewards,
    theta: Params,
    trajectories: records.Trajectories | Iterable[records.Trajectories],
) -> records.Trajectories | Iterable[records.Trajectories]:
    """The trajectories; if they may stop, the first 64 until one of these stops.

    What a record holds after a stop need not be of the process. A cut at each trajectory's own stop
    would keep the longest of them in the late steps, whose noise is not that of all.
    """
    rule = rewards.stop
    if rule is None:
        return trajectories
    whole = (
        trajectories if isinstance(trajectories, records.Trajectories) else next(iter(trajectories))
    )
    few = records.select_trajectories(whole, np.s_[:MAX_FOLLOWED])
    t = jnp.asarray(few.t)

    def follow(x: Array, context: Any) -> Array:
        return jax.vmap(lambda x, t: stopping.is_running(rule, theta, x, t, context))(x, t)

    running = np.asarray(jax.vmap(follow)(jnp.asarray(few.x), few.context)).all(axis=0)
    steps = len(t) - 1 if running.all() else max(1, int(np.argmin(running)))
    events = jax.tree.map(lambda leaf: leaf[:, :steps], few.events)
    return records.Trajectories(few.t[: steps + 1], few.x[:, : steps + 1], few.context, events)


def check_rounding(process: AnyProcess, theta: Params, recording: Recording) -> None:
    """Warn when the states are rounded more coarsely than a hundredth of a kick."""
    if not isinstance(process, Process):
        return
    t = np.asarray(recording.t)
    q = np.asarray(
        diffusion.q_matrix(
            process, theta, *check.take_first((recording.first_states, t, recording.context))
        )
    )
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


def check_independence(process: AnyProcess, recording: Recording) -> None:
    """Warn where trajectories are copies of others, or begin where the one before ended.

    Error bars are those of independent trajectories. Only of diffusions: paths of a jump process
    or a chain may be the same by chance.
    """
    count = recording.count
    steps = len(recording.t) - 1
    if not isinstance(process, Process) or count < 2:
        return
    few = sorted({0, steps // 2, steps - 1})
    blocks = [np.asarray(recording.read_block(n, n + 1)[1]) for n in few]
    ends = np.ascontiguousarray(np.concatenate(blocks, axis=1).reshape(count, -1))
    copies = _find_copies(recording, ends) if np.ptp(ends, axis=0).any() else []
    if copies:
        later, earlier = copies[0]
        more = "at least " if len(copies) == MAX_COMPARED else ""
        warnings.warn(
            f"{more}{len(copies)} of {count} trajectories are copies of others: number {later} is "
            f"number {earlier}. Their error bars are too small; leave the copies out.",
            RuntimeWarning,
            stacklevel=5,
        )
    elif _is_continued(np.asarray(recording.first_states), ends[:, -blocks[-1].shape[2] :]):
        warnings.warn(
            "trajectories begin where the one before ended: pieces of one record have no known "
            "start and are not independent, so that gradient and error bar are those of another "
            "question. Use fl.stationary, or --continuing for a file.",
            RuntimeWarning,
            stacklevel=5,
        )


def _find_copies(recording: Recording, few: np.ndarray) -> list[tuple[int, int]]:
    """Numbers of trajectories and of earlier ones that are the same, at most `MAX_COMPARED`.

    few: some samples of each trajectory (E, K). A coarse converter makes them alike by chance, so
    those that agree are compared whole.
    """
    # + 0: a negative zero is a zero
    _, first, place = np.unique(_view_rows(few + 0), return_index=True, return_inverse=True)
    alike = np.setdiff1d(np.arange(len(few)), first)[:MAX_COMPARED]
    pairs = [(int(j), int(first[place[j]])) for j in alike]
    return [
        pair for pair in pairs if np.array_equal(*(recording.read_trajectory(j).x for j in pair))
    ]


def _view_rows(values: np.ndarray) -> np.ndarray:
    """Rows (n, K) as one item each, to be compared whole. (n,)"""
    return values.view(np.dtype((np.void, values.dtype.itemsize * values.shape[1])))[:, 0]


def _is_continued(first: np.ndarray, last: np.ndarray) -> bool:
    """Whether starts (E, M) are correlated with the ends (E, M) of the trajectories before."""
    if len(first) <= MIN_CORRELATED:
        return False
    starts = first[1:].astype(np.float64)
    before = last[:-1].astype(np.float64)
    spread = starts.std(axis=0) * before.std(axis=0)
    product = np.mean((starts - starts.mean(axis=0)) * (before - before.mean(axis=0)), axis=0)
    correlation = np.where(spread > 0, product / np.where(spread > 0, spread, 1), 0)
    # of independent trajectories it is 0 ± 1/√E, and beyond 6/√E once in 10⁹
    return bool(np.max(correlation) > max(CONTINUED, 6 / np.sqrt(len(starts))))


def check_scores(
    flat: Array,
    process: AnyProcess,
    theta: Params,
    trajectory: Callable[[int], records.Trajectories],
    t: Array,
    offset: int = 0,
) -> None:
    """Refuse gradients (E, P) that are not finite, and name the state where the diffusion fails."""
    if check.all_finite(flat):
        return
    which = np.flatnonzero(~np.isfinite(np.asarray(flat)).all(axis=1))
    # a baseline that looks at scores passes it on to the others
    for j in which[:MAX_SEARCHED].tolist():
        diffusion.check_along(process, theta, trajectory(j), offset + j)
    raise FloatingPointError(
        f"the gradients of {len(which)} of {len(flat)} trajectories are not finite: "
        f"{check.list_indices(which + offset)}. The states and the diffusion are; a derivative of "
        "the drift, noise or reward is not (sqrt or abs at zero?), or the level of a `stop` (log "
        "of a negative number?), or a matrix-free solve did not converge."
    )
