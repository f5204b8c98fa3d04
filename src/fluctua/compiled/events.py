"""Events of a jump process in a kernel: one traced event, and the inputs of the loop over events.

`fluctua.processes.jumps` itself is traced, with its random numbers as inputs. native/events.hpp
draws them, number for number as JAX does, and has the loop: all lanes repeat until the last of
them has passed the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fluctua.compiled.scalar import Unsupported
from fluctua.core.arrays import Array, PyTree
from fluctua.core.draws import threefry
from fluctua.core.simulate import Recipe
from fluctua.processes.jumps import EventDraws, EventStep, Jumps, RandomJump, Scored, next_event

DRAWS = 3
"""Inputs p of an event: the time since the step began, a standard exponential, a uniform number."""


class EventProgram(NamedTuple):
    """One event, as nodes of a graph: functions of x and of `DRAWS` numbers p.

    The step itself has other numbers p: the state after all events (M,), and their score in the
    parameters `scores`.

    x: state after the event (M,).
    after: time of the event since the step began.
    over: whether no event is left before the step ends.
    score: score of the event (P,), and further numbers that are added up over the events.
    scores: those of them that are not zero.
    carries: whether the event is a function of these sums so far and of the state at the beginning
        of the step too, which follow the `DRAWS` numbers.
    """

    x: list[int]
    after: int
    over: int
    score: list[int]
    scores: list[int]
    carries: bool = False


def find_jumps(recipe: Recipe) -> Jumps | None:
    """Return the jump process of a simulator, None for another; raise if kernels cannot run it."""
    process = recipe.process
    if not isinstance(process, Jumps):
        return None
    if isinstance(process.changes, RandomJump):
        raise Unsupported("RandomJump", "changes of random size")
    if recipe.wiener is not threefry:
        raise Unsupported("wiener", "`Jumps` are simulated with JAX's own generator")
    return process


def bind_event(process: Jumps, unravel: Callable[[Array], PyTree]) -> Callable:
    """Return a function (θ, x, t, Δt, context, p) -> (state, time, over, score) of one event."""

    def event(
        flat: Array, x: Array, t: Array, dt: Array, context: PyTree, p: Array
    ) -> tuple[Array, ...]:
        step = EventStep(x, t, dt, context)
        new = next_event(process, unravel(flat), step, p[0], EventDraws(p[1], p[2]), _select_row)
        return new.x, new.after, new.over, ravel_pytree(new.score)[0]

    return event


def _select_row(table: Array, row: Array) -> Array:
    """Return table[row] as a sum over all rows: a kernel's indices are constants."""
    is_row = jnp.arange(len(table)) == row
    mask = is_row.reshape(-1, *(1,) * (table.ndim - 1))
    return jnp.sum(jnp.where(mask, table, 0), axis=0)


def collect_events(
    unravel: Callable[[Array], PyTree], x: Array, jumped: Array, score: Array
) -> Scored:
    """Return the jump and the score of all events of a step, for the score of the step."""
    return Scored(jumped - x, unravel(score), jnp.zeros((), int))
