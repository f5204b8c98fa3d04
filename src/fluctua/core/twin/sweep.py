"""The twin's reverse sweep over a simulator or a recording, without storing paths.

A forward pass leaves the states at the beginning of every segment of about √T steps; the sweep goes
back segment by segment and makes the states inside again, the measured ones by replaying the noise
(or by reading), the twin's by its drift. All trajectories of a batch go together. What is held is
batch·√T·M numbers, and P a trajectory for either part of the gradient.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import arrays, check, recorded, simulate
from fluctua.core import model as terms
from fluctua.core.arrays import Array, Params, PyTree, jit
from fluctua.core.diffusion import check_model
from fluctua.core.draws import Density
from fluctua.core.streamed import replay_trajectory
from fluctua.core.trajectories import Times
from fluctua.core.twin import backward
from fluctua.core.twin import correction as twin_terms
from fluctua.core.twin.correction import TwinModel
from fluctua.core.twin.own_twins import TwinProvider

UNEVEN = 1.6
"""Times √T up to which a segment is longer so that all are as long."""


class Parts(NamedTuple):
    """The two parts of the gradients of E trajectories.

    direct, correction: (E, P) each. returns: (E,). mean_lambda: mean of Λ (T+1,).
    """

    direct: Array
    correction: Array
    returns: Array
    mean_lambda: Array


def streamed_parts(
    twin: TwinModel,
    numbers: twin_terms.Numbers,
    batch: int,
    substrate: simulate.Simulator,
    key: Array,
    count: int,
    offset: int = 0,
) -> Parts:
    """The two parts of the gradients of `count` simulated trajectories, numbered from `offset`.

    key: of the run, not of the estimate.
    """
    theta = numbers.theta
    first, context = simulate.first_state(substrate, key, theta)
    process = check_model(
        twin.model.process, twin.model.objective, theta, first, substrate.t, context
    )
    twin = twin._replace(model=terms.replace_process(twin.model, process))
    own: Any = process if isinstance(process, TwinProvider) else None
    if own is None:
        twin_terms.check_fit(twin, numbers, first, substrate.t, context, batch)
    call = TwinCall(twin, numbers, batch, substrate, key, count, offset)
    parts = None if substrate.backend is None else substrate.backend.parts(call)
    if parts is None:
        parts = _parts_by_jax(call) if own is None else own.twin_parts(call)
    trajectory = replay_trajectory(substrate, key, theta, offset)
    recorded.check_scores(
        parts.direct + parts.correction, twin.model.process, theta, trajectory, substrate.t, offset
    )
    return parts


class TwinCall(NamedTuple):
    """A request of an estimator with a twin to a simulator.

    key: of the run. offset: number of the first trajectory.
    """

    twin: TwinModel
    numbers: twin_terms.Numbers
    batch: int
    substrate: simulate.Simulator
    key: Array
    count: int  # type: ignore[assignment]
    offset: int = 0


class RecordedTwinCall(NamedTuple):
    """A request of an estimator with a twin to a recording.

    batch: trajectories that go together. block_bytes: how much is held at a time.
    """

    twin: TwinModel
    numbers: twin_terms.Numbers
    batch: int
    recording: recorded.Recording
    block_bytes: int


def _parts_by_jax(call: TwinCall) -> Parts:
    twin, numbers, batch, substrate, key, count, offset = call
    theta = numbers.theta
    recipe = substrate.recipe
    times = substrate.times
    # one noise-free path serves all where the trajectories do not differ before their noise
    shared = recipe.context is None and not isinstance(recipe.start, Density)
    bounds = split_segments(len(times.dt), choose_length(len(times.dt)))
    origin = arrays.part(times.t, np.s_[:2])

    pieces = []
    for low, high in split_batches(count, batch):
        ensemble = start_batch(recipe, high - low, key, theta, substrate.x0, offset + low)
        xbar = arrays.part(ensemble.x, np.s_[:1]) if shared else ensemble.x
        kept = [backward.States(ensemble.x, xbar)]
        for n, stop in bounds:
            steps = _slice_times(times, n, stop)
            kept.append(_forward(twin, recipe, numbers, ensemble, kept[-1], n, steps))
        check.finite_simulation(kept[-1].x, substrate.t, offset + low)
        twin_terms.check_path(kept[-1].xbar, substrate.t)

        carry = backward.start_backward(twin, numbers, kept.pop(), times, ensemble.context)
        lambdas = [carry.residual.mean()[None]]
        for n, stop in reversed(bounds):
            states = kept.pop()  # what is behind is let go
            steps = _slice_times(times, n, stop)
            path = _replay(recipe, theta, ensemble, states.x, n, steps)
            carry, block = backward.reverse_block(
                twin, numbers, carry, n, steps, path, states.xbar, ensemble.context, origin
            )
            lambdas.append(block)
        pieces.append(
            finish_parts(twin, numbers, carry, ensemble.x, times, ensemble.context, lambdas)
        )
    return join_parts(pieces)


def recorded_parts(
    twin: TwinModel,
    numbers: twin_terms.Numbers,
    batch: int,
    recording: recorded.Recording,
    block_bytes: int,
) -> Parts:
    """The two parts of the gradients of recorded trajectories.

    All of them are read together, a block of steps at a time, last block first, so that a source is
    gone through as often as without a twin.
    """
    theta = numbers.theta
    times = recording.times
    context = recording.context
    process = check_model(
        twin.model.process,
        twin.model.objective,
        theta,
        recording.first_states,
        recording.t,
        context,
    )
    twin = twin._replace(model=terms.replace_process(twin.model, process))
    own: Any = process
    if isinstance(own, TwinProvider):
        call = RecordedTwinCall(twin, numbers, batch, recording, block_bytes)
        parts = own.recorded_twin_parts(call)
        gradients = parts.direct + parts.correction
        recorded.check_scores(gradients, process, theta, recording.read_trajectory, recording.t)
        return parts
    recorded.check_rounding(twin.model.process, theta, recording)
    twin_terms.check_fit(twin, numbers, recording.first_states, recording.t, context, batch)
    steps = len(times.dt)
    room = block_bytes // max(1, recording.first_states.nbytes)
    bounds = split_segments(steps, min(steps, max(choose_length(steps), room)))
    slices = split_batches(recording.count, batch)
    same = not jax.tree.leaves(context) and bool(
        jnp.all(recording.first_states == recording.first_states[:1])
    )

    contexts = [_slice_rows(context, low, high) for low, high in slices]
    starts = [recording.first_states[low:high][: 1 if same else None] for low, high in slices]
    kept: list[list[Array]] = [[xbar] for xbar in starts]
    for row, c in zip(kept, contexts, strict=True):
        for n, stop in bounds:
            row.append(_forward_twin(twin, numbers, row[-1], _slice_times(times, n, stop), c))
        twin_terms.check_path(row[-1], recording.t)

    carries: list[backward.Backward] = []
    lambdas: list[list[Array]] = []
    for n, stop in reversed(bounds):
        part, x = recording.read_block(n, stop)
        for i, (low, high) in enumerate(slices):
            path = jnp.swapaxes(x[low:high], 0, 1)
            if len(carries) == i:  # the last block holds X_T
                last = backward.States(path[-1], kept[i].pop())
                carries.append(backward.start_backward(twin, numbers, last, times, contexts[i]))
                lambdas.append([carries[i].residual.mean()[None]])
            carries[i], block = backward.reverse_block(
                twin, numbers, carries[i], n, part, path, kept[i].pop(), contexts[i], times.t[:2]
            )
            lambdas[i].append(block)
    parts = join_parts(
        [
            finish_parts(twin, numbers, carry, recording.first_states[low:high], times, c, means)
            for carry, (low, high), c, means in zip(carries, slices, contexts, lambdas, strict=True)
        ]
    )
    gradients = parts.direct + parts.correction
    recorded.check_scores(
        gradients, twin.model.process, theta, recording.read_trajectory, recording.t
    )
    return parts


def _slice_rows(tree: PyTree, low: int, high: int) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[low:high], tree)


def split_batches(count: int, size: int) -> list[tuple[int, int]]:
    """(low, high) of as few batches as possible, equal in size up to one trajectory.

    None is left alone with its baseline.
    """
    many = -(-count // size)
    edges = [count * i // many for i in range(many + 1)]
    return list(pairwise(edges))


def choose_length(steps: int) -> int:
    """Length of segments of which about √steps are held, and as many states within one.

    A divisor of `steps` if one is near: a shorter last segment would be compiled once more.
    """
    root = int(np.ceil(np.sqrt(steps)))
    even = [n for n in range(root, int(UNEVEN * root) + 1) if steps % n == 0]
    return even[0] if even else root


def split_segments(steps: int, length: int) -> list[tuple[int, int]]:
    """(n, stop) of consecutive segments of at most `length` steps."""
    return [(n, min(n + length, steps)) for n in range(0, steps, length)]


def _slice_times(times: Times, n: int, stop: int) -> Times:
    return Times(arrays.part(times.t, np.s_[n : stop + 1]), arrays.part(times.dt, np.s_[n:stop]))


@partial(jit, static_argnums=(0, 1))
def start_batch(
    recipe: simulate.Recipe, count: int, key: Array, theta: Params, x0: Array | None, low: Array
) -> simulate.Ensemble:
    """Trajectories low … low + count − 1 before their first step."""
    return simulate.start_ensemble(recipe, count, key, theta, x0, low)


@partial(jit, static_argnums=(0, 1))
def _forward(
    twin: TwinModel,
    recipe: simulate.Recipe,
    numbers: twin_terms.Numbers,
    ensemble: simulate.Ensemble,
    states: backward.States,
    first: Array,
    times: Times,
) -> backward.States:
    """X and x̄ at the end of a segment that begins with step `first`."""
    index, t, dt = simulate.enumerate_steps(times)

    def body(states: backward.States, step: Any) -> tuple[backward.States, None]:
        n, t, dt = step
        x = simulate.advance(recipe, numbers.theta, ensemble._replace(x=states.x), n, t, dt)
        xbar = backward.advance_twin(twin, numbers, states.xbar, t, dt, ensemble.context)
        return backward.States(x, xbar), None

    return jax.lax.scan(body, states, (first + index, t, dt))[0]


@partial(jit, static_argnums=0)
def _replay(
    recipe: simulate.Recipe,
    theta: Params,
    ensemble: simulate.Ensemble,
    x: Array,
    first: Array,
    times: Times,
) -> Array:
    """The states of a segment again, from the one at its beginning. (b+1, E, M)"""
    index, t, dt = simulate.enumerate_steps(times)

    def body(x: Array, step: Any) -> tuple[Array, Array]:
        x = simulate.advance(recipe, theta, ensemble._replace(x=x), *step)
        return x, x

    return jnp.concatenate([x[None], jax.lax.scan(body, x, (first + index, t, dt))[1]])


@partial(jit, static_argnums=0)
def _forward_twin(
    twin: TwinModel, numbers: twin_terms.Numbers, xbar: Array, times: Times, context: PyTree
) -> Array:
    """x̄ at the end of a segment."""

    def body(xbar: Array, step: Any) -> tuple[Array, None]:
        _, t, dt = step
        return backward.advance_twin(twin, numbers, xbar, t, dt, context), None

    return jax.lax.scan(body, xbar, simulate.enumerate_steps(times))[0]


def finish_parts(
    twin: TwinModel,
    numbers: twin_terms.Numbers,
    carry: backward.Backward,
    x: Array,
    times: Times,
    context: PyTree,
    lambdas: list[Array],
) -> Parts:
    """The parts of the gradients, with those of the start.

    lambdas: the mean of Λ in blocks, the last first.
    """
    twin_terms.check_guess(carry.guess)
    direct, correction = backward.start_terms(twin, numbers, carry, x, times.t[0], context)
    returns = carry.reward
    if twin.model.objective.initial is not None:
        returns = returns + terms.initial_rewards(twin.model.objective, numbers.theta, x, context)
    return Parts(direct, correction, returns, jnp.concatenate(lambdas[::-1]))


def join_parts(pieces: list[Parts]) -> Parts:
    """The parts of all batches."""
    if len(pieces) == 1:
        return pieces[0]
    direct, correction, returns, means = zip(*pieces, strict=True)
    sizes = np.array([len(r) for r in returns])
    mean = jnp.tensordot(jnp.asarray(sizes / sizes.sum(), means[0].dtype), jnp.stack(means), 1)
    return Parts(
        arrays.concatenate_rows(direct),
        arrays.concatenate_rows(correction),
        arrays.concatenate_rows(returns),
        mean,
    )
