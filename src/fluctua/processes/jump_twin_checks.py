"""Checks of the guess of a jump twin: its inputs, its size, its numbers and its gain.

One guess serves all trajectories that have one start and no context; else each has its own, and
they go `Twin.batch` at a time.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import arrays, baselines, check, simulate
from fluctua.core import model as terms
from fluctua.core.arrays import Array, PyTree
from fluctua.core.draws import Density, Reparameterised
from fluctua.core.trajectories import Times
from fluctua.core.twin import correction, sweep
from fluctua.core.twin.correction import Numbers, TwinModel
from fluctua.processes import jump_guess
from fluctua.processes.jump_guess import ReturnGuess


def refuse_model(model: terms.EstimatorModel) -> None:
    """Refuse a start that the twin of a jump process does not serve."""
    if isinstance(model.start, Reparameterised):
        raise ValueError(
            "a `Twin` of `Jumps` needs a start that is a state or a `Density`; a "
            "`Reparameterised` one displaces the path. Use another baseline."
        )


def refuse_call(call: sweep.TwinCall) -> None:
    """Refuse a simulated jump process or a start that its twin does not serve."""
    simulated: Any = call.substrate.recipe.process
    scored: Any = call.twin.model.process
    if scored.rates is not simulated.rates or scored.changes != simulated.changes:
        raise ValueError(
            "the simulator runs other `Jumps` than those of the score, and a `Twin` of `Jumps` "
            "needs one process. Give the guess other rates by Twin(process=Jumps(...))."
        )
    refuse_model(call.twin.model)


def can_share_guess(recipe: simulate.Recipe) -> bool:
    """Whether one guess serves all: one start, and no context."""
    return recipe.context is None and not isinstance(recipe.start, Density)


def needs_returns(twin: TwinModel) -> bool:
    """Whether the baseline of Λ uses the Λ of other trajectories."""
    alone = (baselines.none().function, baselines.time_only(np.zeros(1)).function)
    return twin.model.baseline not in alone


def solve_and_check(
    twin: TwinModel, numbers: Numbers, x: Array, times: Times, context: PyTree, shared: bool
) -> ReturnGuess:
    """The guess for all trajectories, or (shared: False) one for each, leaves (E, …).

    x: starts (E, M).
    """
    jumps: Any = twin.process
    states = x.shape[1]
    parameters = sum(np.size(leaf) for leaf in jax.tree.leaves(numbers.theta))
    numbers_each = jump_guess.count_numbers(twin.order, states, parameters, len(times.dt))
    needed = (1 if shared else len(x)) * numbers_each * x.dtype.itemsize
    if needed > correction.HESSIAN_BYTES:
        advice = "order=1" if twin.order == 2 else "fewer steps"
        advice += "" if shared else " or a smaller Twin.batch"
        raise ValueError(
            f"the guess of a `Twin` of `Jumps` takes {needed / 2**30:.1f} GiB for {states} states, "
            f"{parameters} parameters and {len(times.dt)} steps. Use {advice}."
        )
    try:
        jumps.check(numbers.twin, *check.take_first((x, times.t, context)))
    except ValueError as error:
        raise ValueError(f"the twin's process does not fit the states: {error}") from None
    model = jump_guess.GuessModel(jumps.rates, jumps.changes, twin.model.objective, twin.order)
    if shared:
        start = arrays.part(x, 0)
        guess = jump_guess.solve_shared(model, numbers.theta, numbers.twin, start, times, None)
    else:
        guess = jump_guess.solve_each(model, numbers.theta, numbers.twin, x, times, context)
    _check_guess(guess, times)
    return guess


def _check_guess(guess: ReturnGuess, times: Times) -> None:
    if not check.all_finite(guess.centre):
        step = float(np.max(np.asarray(times.dt)))
        raise FloatingPointError(
            "the rate equations of the twin overflowed: they are unstable at its parameters with "
            f"time steps of up to {step:g}. Bound Twin.theta, refine `t`, or do without a twin."
        )
    if not all(check.all_finite(leaf) for leaf in jax.tree.leaves((guess.value, guess.slope))):
        raise FloatingPointError(
            "the twin's guess at the return is not finite, and its rate equations are: a "
            "derivative of the rates or of a reward on their path is not (a power or sqrt at "
            "zero?), or the time steps are too long. Write them so that they have one, refine "
            "`t`, or give the twin a smooth `process`."
        )


MIN_JUDGED = 32
"""Trajectories from which on variances are compared."""


def warn_about_guess(residual: Array, reward: Array) -> None:
    """Warn where Λ₀ (E,) varies more than the return (E,): the guess then costs variance.

    Returns that are all zero are not compared: the reward may be of a rare event.
    """
    if len(residual) < MIN_JUDGED:
        return
    left, of_return = arrays.on_host(_compare(residual, reward)).tolist()
    if left > of_return > 0:
        warnings.warn(
            f"the twin's guess leaves a variance of {left:.3g} of a return with {of_return:.3g}: "
            "the trajectories are far from the rate equations (several stable states, "
            "oscillations that lose their phase) or the rates have steps. The error bar is right, "
            'and larger than that of baseline="mean".',
            RuntimeWarning,
            stacklevel=2,
        )


@arrays.jit
def _compare(residual: Array, reward: Array) -> Array:
    return jnp.stack([jnp.var(residual), jnp.var(reward) + 1e-9 * jnp.mean(reward**2)])
