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
from jax.flatten_util import ravel_pytree

from fluctua.core import check
from fluctua.core import model as terms
from fluctua.core.arrays import Array, Params, PyTree, concatenate_rows, jit, part
from fluctua.core.baselines import Inputs
from fluctua.core.diffusion import check_model
from fluctua.core.draws import Density
from fluctua.core.integrators import mean_rate
from fluctua.core.model import Moment, density_scores, mark_noiseless
from fluctua.core.process import Step
from fluctua.core.recorded import Recording, check_rounding, check_scores
from fluctua.core.simulate import Ensemble, Recipe, Simulator, advance, begin_one, first_state, grid
from fluctua.core.streamed import replay_trajectory
from fluctua.core.theorem import weigh_score
from fluctua.core.trajectories import Times
from fluctua.core.twin.correction import (
    DirectTerms,
    Guess,
    Numbers,
    TwinModel,
    check_fit,
    check_guess,
    check_path,
    direct_terms,
    expand,
    expand_terminal,
)

Parts = tuple[Array, Array, Array, Array]
"""Direct and correction (E, P) each, returns (E,), mean of Λ (T+1,)."""


class Backward(NamedTuple):
    """What the reverse sweep carries: sums over the steps after the present one."""

    guess: Guess  # of V at the next time; one for all trajectories where their twins are the same
    value: Array  # v (E,) or (1,)
    residual: Array  # Λ (E,)
    reward: Array  # λ̂ (E,)
    direct: Array  # (E, P)
    correction: Array  # (E, P)


def advance_twin(
    twin: TwinModel, numbers: Numbers, xbar: Array, t: Array, dt: Array, context: PyTree
) -> Array:
    """x̄ₙ₊₁ = m̃(x̄ₙ, Δt) of every trajectory, or of the one that stands for all.

    (E, M) or (1, M)
    """

    def move(x, c):
        return (x + mean_rate(twin.process, numbers.twin, x, t, dt, c) * dt).astype(x.dtype)

    return jax.vmap(move)(xbar, context)


def end(
    twin: TwinModel, numbers: Numbers, x: Array, xbar: Array, times: Times, context: PyTree
) -> Backward:
    """After the last step: Λ_T = g_T(X_T) − V_T(X_T), and ∂θg_T."""
    # Two compilations and not one: without a terminal reward S_T is a constant zero, and XLA's CPU
    # backend returns uninitialised memory for its product with a vector if it sees that (jaxlib
    # 0.10.2).
    return _end(
        twin, numbers, *_guesses(twin, numbers.theta, xbar, context), x, xbar, times, context
    )


@partial(jit, static_argnums=0)
def _guesses(twin: TwinModel, theta: Params, xbar: Array, context: PyTree) -> tuple[Guess, Array]:
    return jax.vmap(lambda x, c: expand_terminal(twin, theta, x, c))(xbar, context)


@partial(jit, static_argnums=0)
def _end(
    twin: TwinModel,
    numbers: Numbers,
    guess: Guess,
    value: Array,
    x: Array,
    xbar: Array,
    times: Times,
    context: PyTree,
) -> Backward:
    flat, _ = ravel_pytree(numbers.theta)
    zero = jnp.zeros((x.shape[0], flat.size), flat.dtype)
    reward = terms.terminal_rewards(twin.model.objective, numbers.theta, x, context)
    residual = (
        reward - value - jax.vmap(Guess.at, in_axes=(_axis(guess, x), 0))(_drop(guess, x), x - xbar)
    )
    direct = zero + terms.terminal_slopes(twin.model, numbers.theta, x, times.t, context)
    return Backward(guess, value, residual, reward, direct, zero)


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
    index, t, dt = grid(times)

    def ahead(xbar: Array, step: tuple[Array, Array]) -> tuple[Array, Array]:
        return advance_twin(twin, numbers, xbar, step[0], step[1], context), xbar

    _, path = jax.lax.scan(ahead, xbar, (t, dt))

    def body(carry: Backward, step: Any) -> tuple[Backward, Array]:
        xbar, n, t, dt, x, x_next = step
        moment = Moment(n, t, dt, x, x_next, context)
        carry = _step_back(twin, numbers, carry, moment, xbar, origin)
        return carry, carry.residual.mean()

    steps = (path, first + index, t, dt, x[:-1], x[1:])
    return jax.lax.scan(body, carry, steps, reverse=True)


def _step_back(
    twin: TwinModel,
    numbers: Numbers,
    carry: Backward,
    moment: Moment,
    xbar: Array,
    origin: Array,
) -> Backward:
    model = twin.model
    theta = numbers.theta
    x = moment.x

    def predict(guess: Guess, x: Array, x_next: Array, xbar: Array, context: PyTree) -> DirectTerms:
        step = Step(x, x_next, moment.t, moment.dt, context)
        return direct_terms(twin, numbers, guess, step, xbar, origin)

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
        return expand(twin, numbers, guess, xbar, moment.t, moment.dt, context)

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
    """Direct and correction, each (E, P), with the draw of X₀: ∂θ ln p₀ meets V₀(X₀) and Λ₀, each
    less its baseline.

    An initial reward g_0 is known with X₀: it goes with V₀.
    """
    model = twin.model
    theta = numbers.theta
    explicit = terms.initial_slopes(model, theta, x, context)
    direct = carry.direct if explicit is None else carry.direct + explicit
    score = density_scores(model, theta, x, context)
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


# ---------------------------------------------------------------------- a run or a recording


def streamed_parts(
    twin: TwinModel,
    numbers: Numbers,
    batch: int,
    substrate: Simulator,
    key: Array,
    count: int,
    offset: int = 0,
) -> Parts:
    """The two parts of the gradients of `count` simulated trajectories, numbered from `offset`.

    key: of the run, not of the estimate.
    """
    theta = numbers.theta
    first, context = first_state(substrate, key, theta)
    process = check_model(
        twin.model.process, twin.model.objective, theta, first, substrate.t, context
    )
    twin = twin._replace(model=mark_noiseless(twin.model, process))
    check_fit(twin, numbers, first, substrate.t, context, batch)
    call = TwinCall(twin, numbers, batch, substrate, key, count, offset)
    parts = None if substrate.backend is None else substrate.backend.parts(call)
    parts = _parts_by_jax(call) if parts is None else parts
    trajectory = replay_trajectory(substrate, key, theta, offset)
    check_scores(parts[0] + parts[1], twin.model.process, theta, trajectory, substrate.t, offset)
    return parts


class TwinCall(NamedTuple):
    """What an estimator with a twin asks of a simulator. key: of the run. offset: number of the
    first trajectory.
    """

    twin: TwinModel
    numbers: Numbers
    batch: int
    substrate: Simulator
    key: Array
    count: int  # type: ignore[assignment]
    offset: int = 0


def _parts_by_jax(call: TwinCall) -> Parts:
    twin, numbers, batch, substrate, key, count, offset = call
    theta = numbers.theta
    recipe = substrate.recipe
    times = substrate.times
    # one noise-free path serves all where nothing tells the trajectories apart before their noise
    shared = recipe.context is None and not isinstance(recipe.start, Density)
    bounds = segments(len(times.dt), int(np.ceil(np.sqrt(len(times.dt)))))
    origin = part(times.t, np.s_[:2])

    pieces = []
    for low, high in batches(count, batch):
        ensemble = begin_from(recipe, high - low, key, theta, substrate.x0, offset + low)
        xbar = part(ensemble.x, np.s_[:1]) if shared else ensemble.x
        kept = [(ensemble.x, xbar)]
        for n, stop in bounds:
            steps = _part(times, n, stop)
            kept.append(_forward(twin, recipe, numbers, ensemble, *kept[-1], n, steps))
        check.finite_simulation(kept[-1][0], substrate.t, offset + low)
        check_path(kept[-1][1], substrate.t)

        carry = end(twin, numbers, *kept.pop(), times, ensemble.context)
        lambdas = [carry.residual.mean()[None]]
        for n, stop in reversed(bounds):
            x, xbar = kept.pop()  # what is behind is let go
            steps = _part(times, n, stop)
            path = _replay(recipe, theta, ensemble, x, n, steps)
            carry, block = reverse_block(
                twin, numbers, carry, n, steps, path, xbar, ensemble.context, origin
            )
            lambdas.append(block)
        pieces.append(
            finish_parts(twin, numbers, carry, ensemble.x, times, ensemble.context, lambdas)
        )
    return joined(pieces)


def recorded_parts(
    twin: TwinModel, numbers: Numbers, batch: int, recording: Recording, block_bytes: int
) -> Parts:
    """The two parts of the gradients of recorded trajectories.

    All of them are read together, a block of steps at a time, last block first, so that a source is
    gone through as often as without a twin.
    """
    theta = numbers.theta
    times = recording.times
    context = recording.context
    process = check_model(
        twin.model.process, twin.model.objective, theta, recording.first, recording.t, context
    )
    twin = twin._replace(model=mark_noiseless(twin.model, process))
    check_rounding(twin.model.process, theta, recording)
    check_fit(twin, numbers, recording.first, recording.t, context, batch)
    steps = len(times.dt)
    room = block_bytes // max(1, recording.first.nbytes)
    bounds = segments(steps, min(steps, max(int(np.ceil(np.sqrt(steps))), room)))
    slices = batches(recording.count, batch)
    same = not jax.tree.leaves(context) and bool(jnp.all(recording.first == recording.first[:1]))

    of = [jax.tree.map(lambda leaf: leaf[low:high], context) for low, high in slices]  # noqa: B023
    starts = [recording.first[low:high][: 1 if same else None] for low, high in slices]
    kept: list[list[Array]] = [[xbar] for xbar in starts]
    for row, c in zip(kept, of, strict=True):
        for n, stop in bounds:
            row.append(_forward_twin(twin, numbers, row[-1], _part(times, n, stop), c))
        check_path(row[-1], recording.t)

    carries: list[Backward] = []
    lambdas: list[list[Array]] = []
    for n, stop in reversed(bounds):
        part, x = recording.block(n, stop)
        for i, (low, high) in enumerate(slices):
            path = jnp.swapaxes(x[low:high], 0, 1)
            if len(carries) == i:  # the last block holds X_T
                carries.append(end(twin, numbers, path[-1], kept[i].pop(), times, of[i]))
                lambdas.append([carries[i].residual.mean()[None]])
            carries[i], block = reverse_block(
                twin, numbers, carries[i], n, part, path, kept[i].pop(), of[i], times.t[:2]
            )
            lambdas[i].append(block)
    parts = joined(
        [
            finish_parts(twin, numbers, carry, recording.first[low:high], times, c, means)
            for carry, (low, high), c, means in zip(carries, slices, of, lambdas, strict=True)
        ]
    )
    check_scores(parts[0] + parts[1], twin.model.process, theta, recording.trajectory, recording.t)
    return parts


def batches(count: int, size: int) -> list[tuple[int, int]]:
    """(low, high) of as few batches as will do, of equal size up to one: none is left alone
    with its baseline.
    """
    many = -(-count // size)
    edges = [count * i // many for i in range(many + 1)]
    return list(pairwise(edges))


def segments(steps: int, length: int) -> list[tuple[int, int]]:
    """(n, stop) of consecutive segments."""
    return [(n, min(n + length, steps)) for n in range(0, steps, length)]


def _part(times: Times, n: int, stop: int) -> Times:
    return Times(part(times.t, np.s_[n : stop + 1]), part(times.dt, np.s_[n:stop]))


@partial(jit, static_argnums=(0, 1))
def begin_from(
    recipe: Recipe, count: int, key: Array, theta: Params, x0: Array | None, low: Array
) -> Ensemble:
    """Trajectories low … low + count − 1 before their first step."""
    return jax.vmap(lambda j: begin_one(recipe, key, theta, x0, j))(low + jnp.arange(count))


@partial(jit, static_argnums=(0, 1))
def _forward(
    twin: TwinModel,
    recipe: Recipe,
    numbers: Numbers,
    ensemble: Ensemble,
    x: Array,
    xbar: Array,
    first: Array,
    times: Times,
) -> tuple[Array, Array]:
    """X and x̄ at the end of a segment that begins with step `first`."""
    index, t, dt = grid(times)

    def body(carry: tuple[Array, Array], step: Any) -> tuple[tuple[Array, Array], None]:
        n, t, dt = step
        x = advance(recipe, numbers.theta, ensemble._replace(x=carry[0]), n, t, dt)
        return (x, advance_twin(twin, numbers, carry[1], t, dt, ensemble.context)), None

    return jax.lax.scan(body, (x, xbar), (first + index, t, dt))[0]


@partial(jit, static_argnums=0)
def _replay(
    recipe: Recipe, theta: Params, ensemble: Ensemble, x: Array, first: Array, times: Times
) -> Array:
    """The states of a segment again, from the one at its beginning. (b+1, E, M)"""
    index, t, dt = grid(times)

    def body(x: Array, step: Any) -> tuple[Array, Array]:
        x = advance(recipe, theta, ensemble._replace(x=x), *step)
        return x, x

    return jnp.concatenate([x[None], jax.lax.scan(body, x, (first + index, t, dt))[1]])


@partial(jit, static_argnums=0)
def _forward_twin(
    twin: TwinModel, numbers: Numbers, xbar: Array, times: Times, context: PyTree
) -> Array:
    """x̄ at the end of a segment."""

    def body(x, step):
        return (advance_twin(twin, numbers, x, step[0], step[1], context), None)

    return jax.lax.scan(body, xbar, grid(times)[1:])[0]


def finish_parts(
    twin: TwinModel,
    numbers: Numbers,
    carry: Backward,
    x: Array,
    times: Times,
    context: PyTree,
    lambdas: list[Array],
) -> Parts:
    """lambdas: the mean of Λ in blocks, the last first."""
    check_guess(carry.guess)
    direct, correction = start_terms(twin, numbers, carry, x, times.t[0], context)
    returns = carry.reward
    if twin.model.objective.initial is not None:
        returns = returns + terms.initial_rewards(twin.model.objective, numbers.theta, x, context)
    return direct, correction, returns, jnp.concatenate(lambdas[::-1])


def joined(pieces: list[Parts]) -> Parts:
    """The parts of all batches."""
    if len(pieces) == 1:
        return pieces[0]
    direct, correction, returns, means = zip(*pieces, strict=True)
    sizes = np.array([len(r) for r in returns])
    mean = jnp.tensordot(jnp.asarray(sizes / sizes.sum(), means[0].dtype), jnp.stack(means), 1)
    return concatenate_rows(direct), concatenate_rows(correction), concatenate_rows(returns), mean
