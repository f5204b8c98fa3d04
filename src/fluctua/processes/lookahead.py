"""The twin of a continuing task: its noise-free path from measured states, over a window.

For any prediction Vₙ of the rewards that follow step n, a function of Xₙ₊₁ that is fixed before the
kick, the reward

    g̃ₙ = gₙ + E[Vₙ(Xₙ₊₁)|Xₙ] − Vₙ₋₁(Xₙ)

has the long-run average of g for every θ, because the differences of V telescope. Its gradient is
the same sum with g̃ in place of g,

    ∇J = E[∂θ gₙ + ∂θ E[Vₙ(Xₙ₊₁)|Xₙ]] + Σ_{k≥1} E[(g̃ₙ₊ₖ − J) Uₙ],

where ∂θ does not act on V. With an exact V the reward g̃ is constant: the first part is the whole
gradient, the second has no variance, and a window cuts nothing off. A wrong V costs variance, and
no bias where the window is long.

V is the expansion of the twin's return about its noise-free path, as in `fluctua.core.twin`. The
path restarts at a measured state every `stride` steps and continues for a window beyond the next
restart, so that it follows the measurement and its adjoint has the whole window ahead.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import baselines
from fluctua.core.arrays import Array, Params, PyTree, jit
from fluctua.core.integrators import mean_rate
from fluctua.core.model import EstimatorModel
from fluctua.core.objective import Rewards
from fluctua.core.process import AnyProcess, Score, Step
from fluctua.core.recorded import Recording
from fluctua.core.trajectories import Times
from fluctua.core.twin import correction
from fluctua.core.twin.correction import Guess, Numbers, TwinModel

RESTARTS = 20
"""Number of restarts of the path within a window."""


class Lookahead(NamedTuple):
    """A checked twin of a continuing task.

    twin: process, objective and order of the expansion.
    numbers: θ of the score and of the twin.
    dt: interval of the record.
    context: of the traces.
    """

    twin: TwinModel
    numbers: Numbers
    dt: Array
    context: PyTree

    def make_path(self, window: int, mean: float) -> Path:
        """The twin's path over a window, in steps. mean: level subtracted from the reward."""
        return Path(self, max(1, window // RESTARTS), window, mean)


class Path:
    """The twin's path along a record, advanced block after block."""

    def __init__(self, ahead: Lookahead, stride: int, window: int, mean: float):
        self.ahead = ahead
        self.stride = stride
        self.window = window
        self.mean = mean
        self.last: np.ndarray | None = None  # Vₙ₋₁(Xₙ) at the end of the block before (E,)

    def block(self, times: Times, x: Array) -> tuple[np.ndarray, np.ndarray]:
        """g̃ₙ − mean (E, b) and ∂θ{gₙ + E[Vₙ(Xₙ₊₁)|Xₙ]} (E, b, P) of states x (E, b+1, M)."""
        a = self.ahead
        block = _follow_block(a, Stretch(self.stride, self.window), times.t, x, self.mean)
        inside, begin, end, direct = (np.array(part, np.float64) for part in block)
        if not np.isfinite(end).all():
            raise FloatingPointError(
                f"the twin's path of {self.window + self.stride} steps, or its adjoint, is not "
                "finite: its drift is unstable at its parameters. Bound Twin.theta, give a shorter "
                "`window`, or do without a twin."
            )
        old = np.concatenate(
            [begin[:, :1] - inside[:, :1, 0] if self.last is None else self.last[:, None], end],
            axis=1,
        )
        inside[:, :, 0] = begin - old[:, :-1]
        self.last = old[:, -1]
        dt = float(a.dt)
        traces = x.shape[0]
        steps = x.shape[1] - 1
        return inside.reshape(traces, steps) / dt, direct.reshape(traces, steps, -1) / dt


def make_lookahead(
    choice: baselines.Twin,
    process: AnyProcess,
    rewards: Rewards,
    score: Score,
    theta: Params,
    recording: Recording,
) -> Lookahead:
    """Check that the twin fits the process and the record, and prepare it."""
    twin = correction.check_twin(choice, score, process)
    if twin.baseline.name != "mean":  # type: ignore[union-attr]
        raise ValueError(
            "a long-run average takes the mean off what a twin leaves; "
            f"Twin(baseline={twin.baseline.name!r}) "  # type: ignore[union-attr]
            "is for trajectories. Leave it off."
        )
    assert twin.process is not None  # `check_twin` fills it in
    free = baselines.none().function
    model = TwinModel(
        EstimatorModel(process, rewards, score, None, free, free), twin.process, twin.order
    )
    numbers = Numbers(theta, correction.twin_parameters(twin, theta))
    correction.check_fit(
        model, numbers, recording.first_states, recording.t, recording.context, recording.count
    )
    return Lookahead(model, numbers, recording.times.dt[0], recording.context)


class Stretch(NamedTuple):
    """One stretch of the path.

    stride: steps between two restarts.
    window: steps beyond the second restart.
    """

    stride: int
    window: int


class StretchPrediction(NamedTuple):
    """Predictions of the twin along S stretches of E traces; V in units of reward times time.

    inside: δₙ less the mean (E, S, stride), as if the path continued.
    begin: E[V₀(X₁)|X₀] + g₀Δt less the mean, of the first step (E, S).
    end: V(X) at the end of the path (E, S).
    direct: the direct term (E, S, stride, P).
    """

    inside: Array
    begin: Array
    end: Array
    direct: Array


class GuessAhead(NamedTuple):
    """A prediction of the rewards that follow.

    guess: its expansion about the path.
    value: on the path itself.
    """

    guess: Guess
    value: Array


def _follow_block(
    ahead: Lookahead, stretch: Stretch, t: Array, x: Array, mean: float
) -> StretchPrediction:
    """Predictions along S stretches of x (E, S·stride+1, M), each from a restart of the path."""
    numbers = BlockNumbers(ahead.numbers, t, ahead.dt, x, ahead.context, mean)
    return _follow_stretches(ahead.twin, stretch, numbers)


class BlockNumbers(NamedTuple):
    """The arrays of one block. mean: level subtracted from the reward."""

    twin: Numbers
    t: Array
    dt: Array
    x: Array
    context: PyTree
    mean: Array | float


@partial(jit, static_argnums=(0, 1))
def _follow_stretches(twin: TwinModel, stretch: Stretch, block: BlockNumbers) -> StretchPrediction:
    stride, window = stretch
    numbers, t, dt, x, context, mean = block
    count = (x.shape[1] - 1) // stride
    stretches = x[:, stride * np.arange(count)[:, None] + np.arange(stride + 1)]
    index = np.arange(stride + window)

    def follow(x: Array, start: Array, context: PyTree) -> StretchPrediction:
        times = start + dt * index

        def move(at: Array, t: Array) -> tuple[Array, Array]:
            rate = mean_rate(twin.process, numbers.twin, at, t, dt, context)
            return (at + rate * dt).astype(at.dtype), at

        _, path = jax.lax.scan(move, x[0], times)
        level = (mean * dt).astype(x.dtype)

        def go_back(carry: GuessAhead, step: Any) -> tuple[GuessAhead, None]:
            xbar, t = step
            guess, gain = correction.expand(twin, numbers, carry.guess, xbar, t, dt, context)
            return GuessAhead(guess, carry.value + gain - level), None

        size = x.shape[1]
        nothing = Guess(
            jnp.zeros(size, x.dtype), jnp.zeros((size, size), x.dtype) if twin.order == 2 else None
        )
        last = GuessAhead(nothing, jnp.zeros((), x.dtype))
        carry, _ = jax.lax.scan(go_back, last, (path[stride:], times[stride:]), reverse=True)
        end = carry.value + carry.guess.at(x[stride] - path[stride])

        def predict(carry: GuessAhead, step: Any) -> tuple[GuessAhead, tuple[Array, Array, Array]]:
            x, xbar, t = step
            guess, value = carry
            # rewards of steps are refused, so that the end of the step, in second place, is not
            # looked at
            here = correction.direct_terms(
                twin, numbers, guess, Step(x, x, t, dt, context), xbar, start
            )
            direct = here.slope
            expected = here.expected
            before, gain = correction.expand(twin, numbers, guess, xbar, t, dt, context)
            inside = expected - gain - before.at(x - xbar)  # differences of like numbers first
            predicted = (inside, expected + value - level, direct)
            return GuessAhead(before, value + gain - level), predicted

        steps = (x[:-1], path[:stride], times[:stride])
        _, (inside, expected, direct) = jax.lax.scan(predict, carry, steps, reverse=True)
        return StretchPrediction(inside, expected[0], end, direct)

    starts = t[:-1:stride][:count]
    along = jax.vmap(follow, in_axes=(0, 0, None))
    return jax.vmap(along, in_axes=(0, None, 0))(stretches, starts, context)
