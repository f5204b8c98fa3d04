"""The twin of a continuing task: its noise-free path from measured states, over a window.

For any guess Vₙ at the rewards that follow step n, a function of Xₙ₊₁ that is settled before the
kick, the reward

    g̃ₙ = gₙ + E[Vₙ(Xₙ₊₁)|Xₙ] − Vₙ₋₁(Xₙ)

has the long-run average of g, whatever θ is, because the differences of V add up to two ends. Its
gradient is the same sum with g̃ in the place of g,

    ∇J = E[∂θ gₙ + ∂θ E[Vₙ(Xₙ₊₁)|Xₙ]] + Σ_{k≥1} E[(g̃ₙ₊ₖ − J) Uₙ],

where ∂θ leaves V as it is. A guess that is right leaves nothing of g̃ to vary: the first part is
the whole gradient, the second has no variance, and a window cuts nothing off. A wrong one costs
variance, and no bias where the window is long.

V is the expansion of the twin's return about its noise-free path, as in `fluctua.core.twin`. The
path begins anew at a measured state every `stride` steps and goes a window beyond the next
beginning, so that it follows what is measured and its adjoint has the whole window ahead.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core.arrays import Array, Params, PyTree, jit
from fluctua.core.baselines import Twin
from fluctua.core.baselines import none as no_baseline
from fluctua.core.integrators import mean_rate
from fluctua.core.model import EstimatorModel
from fluctua.core.objective import Rewards
from fluctua.core.process import AnyProcess, Score, Step
from fluctua.core.recorded import Recording
from fluctua.core.trajectories import Times
from fluctua.core.twin.correction import (
    Guess,
    Numbers,
    TwinModel,
    check_fit,
    check_twin,
    direct_terms,
    expand,
    twin_parameters,
)

BEGINNINGS = 20
"""Times that the path begins anew within a window."""


class Lookahead(NamedTuple):
    """A checked twin. dt: the interval of the record."""

    twin: TwinModel
    numbers: Numbers
    dt: Array
    context: PyTree

    def over(self, window: int, mean: float) -> Path:
        """Its path over a window of so many steps. mean: a level of the reward, taken off."""
        return Path(self, max(1, window // BEGINNINGS), window, mean)


class Path:
    """The twin's path along a record, block after block."""

    def __init__(self, ahead: Lookahead, stride: int, window: int, mean: float):
        self.ahead = ahead
        self.stride = stride
        self.window = window
        self.mean = mean
        self.last: np.ndarray | None = None  # Vₙ₋₁(Xₙ) at the end of the block before (E,)

    def block(self, times: Times, x: Array) -> tuple[np.ndarray, np.ndarray]:
        """g̃ₙ less the mean (E, b), and ∂θ{gₙ + E[Vₙ(Xₙ₊₁)|Xₙ]} (E, b, P), of states x (E,
        b+1, M).
        """
        a = self.ahead
        parts = _follow_block(
            a.twin, self.stride, self.window, a.numbers, times.t, a.dt, x, a.context, self.mean
        )
        inside, begin, end, direct = (np.array(part, np.float64) for part in parts)
        if not np.isfinite(end).all():
            raise FloatingPointError(
                f"the twin's path of {self.window + self.stride} steps, or its adjoint, is not "
                "finite: its drift is "
                "unstable at its parameters. Bound Twin.theta, give a shorter `window`, or do "
                "without a twin."
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


def lookahead(
    choice: Twin,
    process: AnyProcess,
    rewards: Rewards,
    score: Score,
    theta: Params,
    recording: Recording,
) -> Lookahead:
    """The twin, if it fits the process and the record."""
    twin = check_twin(choice, score, process)
    if twin.baseline.name != "mean":  # type: ignore[union-attr]
        raise ValueError(
            "a long-run average takes the mean off what a twin leaves; "
            f"Twin(baseline={twin.baseline.name!r}) "  # type: ignore[union-attr]
            "is for trajectories. Leave it off."
        )
    assert twin.process is not None  # `check_twin` fills it in
    free = no_baseline().of
    model = TwinModel(
        EstimatorModel(process, rewards, score, None, free, free), twin.process, twin.order
    )
    numbers = Numbers(theta, twin_parameters(twin, theta))
    check_fit(model, numbers, recording.first, recording.t, recording.context, recording.count)
    return Lookahead(model, numbers, recording.times.dt[0], recording.context)


@partial(jit, static_argnums=(0, 1, 2))
def _follow_block(
    twin: TwinModel,
    stride: int,
    window: int,
    numbers: Numbers,
    t: Array,
    dt: Array,
    x: Array,
    context: PyTree,
    mean: Array,
) -> tuple[Array, Array, Array, Array]:
    """For S stretches of x (E, S·stride+1, M), each from where the path begins anew; V in units of
    reward times time.

    δₙ less the mean (E, S, stride) as if the path went on, E[V₀(X₁)|X₀] + g₀Δt less the mean (E, S)
    of the first step, V(X) at the end (E, S) of a path of `stride` + `window` steps, and the direct
    term (E, S, stride, P).
    """
    count = (x.shape[1] - 1) // stride
    stretches = x[:, stride * np.arange(count)[:, None] + np.arange(stride + 1)]
    index = np.arange(stride + window)

    def one(x: Array, start: Array, context: PyTree) -> tuple[Array, Array, Array, Array]:
        times = start + dt * index

        def move(at, t):
            return (
                (at + mean_rate(twin.process, numbers.twin, at, t, dt, context) * dt).astype(
                    at.dtype
                ),
                at,
            )

        _, path = jax.lax.scan(move, x[0], times)
        level = (mean * dt).astype(x.dtype)

        def behind(carry: tuple[Guess, Array], step: Any) -> tuple[tuple[Guess, Array], None]:
            xbar, t = step
            guess, gain = expand(twin, numbers, carry[0], xbar, t, dt, context)
            return (guess, carry[1] + gain - level), None

        size = x.shape[1]
        nothing = Guess(
            jnp.zeros(size, x.dtype), jnp.zeros((size, size), x.dtype) if twin.order == 2 else None
        )
        carry, _ = jax.lax.scan(
            behind, (nothing, jnp.zeros((), x.dtype)), (path[stride:], times[stride:]), reverse=True
        )
        end = carry[1] + carry[0].at(x[stride] - path[stride])

        def back(
            carry: tuple[Guess, Array], step: Any
        ) -> tuple[tuple[Guess, Array], tuple[Array, Array, Array]]:
            x, xbar, t = step
            guess, value = carry
            # rewards of steps are refused, so that the end of the step, in second place, is not
            # looked at
            predicted = direct_terms(twin, numbers, guess, Step(x, x, t, dt, context), xbar, start)
            direct = predicted.slope
            expected = predicted.expected
            before, gain = expand(twin, numbers, guess, xbar, t, dt, context)
            inside = expected - gain - before.at(x - xbar)  # differences of like numbers first
            return (before, value + gain - level), (inside, expected + value - level, direct)

        here = (x[:-1], path[:stride], times[:stride])
        _, (inside, expected, direct) = jax.lax.scan(back, carry, here, reverse=True)
        return inside, expected[0], end, direct

    starts = t[:-1:stride][:count]
    along = jax.vmap(one, in_axes=(0, 0, None))
    return jax.vmap(along, in_axes=(0, None, 0))(stretches, starts, context)
