"""The events of a jump process in a kernel: one event is straight-line code, and a loop runs it
until a step is over.

What is traced is `fluctua.processes.jumps` itself, with the numbers of chance as inputs.
native/events.hpp draws those, number for number as JAX does, and has the loop: all lanes go round
until the last of them has passed the end.
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


class Inner(NamedTuple):
    """One event, as nodes of a graph: functions of x and of `DRAWS` numbers p.

    x: (M,) after it. after: its time since the step began. over: there is none before the step
    ends. score: (P,). The step itself then has for its p where the events lead (M,), and the score
    of `scores`, the parameters that have one.
    """

    x: list[int]
    after: int
    over: int
    score: list[int]
    scores: list[int]


def served(recipe: Recipe) -> Jumps | None:
    """The jump process of a simulator, if it is one and a kernel can be made of it."""
    process = recipe.process
    if not isinstance(process, Jumps):
        return None
    if isinstance(process.changes, RandomJump):
        raise Unsupported("Sized", "changes of random size")
    if recipe.wiener is not threefry:
        raise Unsupported("wiener", "`Jumps` are simulated with JAX's own generator")
    return process


def bind_event(process: Jumps, unravel: Callable[[Array], PyTree]) -> Callable:
    """(θ, x, t, Δt, context, p) -> state, time, whether there is none, score: the next event of
    a step.
    """

    def event(
        flat: Array, x: Array, t: Array, dt: Array, context: PyTree, p: Array
    ) -> tuple[Array, ...]:
        step = EventStep(x, t, dt, context)
        new = next_event(process, unravel(flat), step, p[0], EventDraws(p[1], p[2]), _take)
        return new.x, new.after, new.over, ravel_pytree(new.score)[0]

    return event


def _take(table: Array, row: Array) -> Array:
    """table[row] as a sum of choices: indices of a kernel are constants."""
    here = jnp.arange(len(table)) == row
    return jnp.sum(jnp.where(here.reshape(-1, *(1,) * (table.ndim - 1)), table, 0), axis=0)


def left_by(unravel: Callable[[Array], PyTree], x: Array, jumped: Array, score: Array) -> Scored:
    """What the events of a step leave for its score."""
    return Scored(jumped - x, unravel(score), jnp.zeros((), int))
