"""One step of a jump process with its twin as a graph, from the functions that JAX runs.

The theorem holds for what the guess leaves over (`fluctua.processes.jump_twin`), so the program is
that of a jump process with this as its reward. The sums over the waits of a step are carried
through the loop over its events, behind their score. Three groups take the place of the parameters:
the correction (P,), which has the score, the direct part (P,), and the return itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.compiled import events, trace
from fluctua.compiled.graph import Graph
from fluctua.compiled.scalar import Unsupported
from fluctua.core import simulate
from fluctua.core.arrays import Array
from fluctua.core.process import Step
from fluctua.core.twin.sweep import TwinCall
from fluctua.processes import jump_guess, jump_twin

MAX_TABLE = 4096
"""Most numbers of the guess in a step; beyond, operations on arrays are faster."""


class _Rows(NamedTuple):
    """Shapes of one step of a guess, and of its end: `GuessRow`, (centre, last, its slope)."""

    row: Any
    end: tuple[Any, Any, Any]


def _describe_rows(order: int, states: int, parameters: int, dtype: Any) -> _Rows:
    size = 1 + states + (states**2 if order == 2 else 0)
    powers = jump_guess.DEGREE + 1

    def shaped(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    row = jump_twin.GuessRow(
        shaped(states),
        shaped(powers, size),
        shaped(powers, size, parameters),
        shaped(size),
        shaped(size, parameters),
    )
    return _Rows(row, (shaped(states), shaped(size), shaped(size, parameters)))


def trace_jump_twin(call: TwinCall, ensemble: simulate.Ensemble) -> trace.Program:
    """Trace one step of a jump process with its twin. ensemble: shapes before step 0."""
    recipe = call.substrate.recipe
    process = events.find_jumps(recipe)
    assert process is not None
    rewards = call.twin.model.objective
    x, context, _ = trace.drop_ensemble_axis(ensemble._replace(streams=None))
    flat, unravel = trace.flatten_parameters(call.numbers.theta)
    rows = _describe_rows(call.twin.order, x.size, flat.size, x.dtype)
    numbers = sum(np.size(leaf) for leaf in rows.row)
    if x.size > trace.MAX_STATES or numbers > MAX_TABLE:
        raise Unsupported(
            "twin", f"a guess of {numbers} numbers in a step; kernels have up to {MAX_TABLE}"
        )
    graph = Graph()
    tracer = trace.Tracer(graph)
    time = jax.ShapeDtypeStruct((), call.substrate.t.dtype)
    draws = jax.ShapeDtypeStruct((events.DRAWS,), x.dtype)
    theta, state, t, dt = (
        tracer.input(kind, value)
        for kind, value in (("theta", flat), ("x", x), ("t", time), ("dt", time))
    )
    table = tracer.tree("table", rows.row)
    end = tracer.tree("last", rows.end)

    # one event
    start = [theta, state, t, dt, context, tracer.input("p", draws)]
    happened = tracer.call(
        events.bind_event(process, unravel), [flat, x, time, time, context, draws], start
    )
    x_after, after, over, score = happened
    scored = [p for p, node in enumerate(score) if graph.value(int(node)) != 0.0]
    so_far = np.full(flat.size, graph.const(0.0))
    so_far[scored] = tracer.input("p", score[scored], events.DRAWS)

    def add_wait(
        flat: Array,
        x: Array,
        t: Array,
        dt: Array,
        begin: Array,
        after: Array,
        score: Array,
        first: Array,
        row: jump_twin.GuessRow,
    ) -> tuple[Array, ...]:
        theta = unravel(flat)
        step = Step(first, first, t, dt)
        full = jump_twin.expand_step_reward(rewards, theta, row, step)
        wait = jump_twin.Wait(x, begin, after, unravel(score))
        nothing = jump_twin.start_wait_sums(theta, x.dtype)
        return jump_twin.add_wait(process, theta, full, step, nothing, wait)

    def input_start(count: int) -> np.ndarray:
        """Input of X_n, behind all sums of the events."""
        return tracer.input("p", x, events.DRAWS + count)

    def trace_wait(first: np.ndarray) -> list[int]:
        scalar = jax.ShapeDtypeStruct((), x.dtype)
        values = [flat, x, time, time, scalar, scalar, flat, x, rows.row]
        since = tracer.input("p", scalar)
        inputs = [theta, state, t, dt, since, after, so_far, first, table]
        residual, direct, weighted = tracer.call(add_wait, values, inputs)
        return [*score.tolist(), int(residual), *direct.tolist(), *weighted.tolist()]

    # where X_n is found depends on how many sums are not zero
    sums = trace_wait(input_start(0))
    used = [k for k, node in enumerate(sums) if graph.value(node) != 0.0]
    sums = trace_wait(input_start(len(used)))
    event = events.EventProgram(x_after.tolist(), int(after), int(over), sums, used, carries=True)

    # the step, after its events
    total = np.full(len(sums), graph.const(0.0))
    total[used] = tracer.input("p", np.zeros(len(used)), x.size)
    x_next = tracer.input("p", x)
    parameters = flat.size

    def finish(
        flat: Array, x: Array, x_next: Array, t: Array, dt: Array, sums: Array, row: Any
    ) -> tuple[Array, ...]:
        theta = unravel(flat)
        score = sums[:parameters]
        residual = sums[parameters]
        direct, weighted = jnp.split(sums[parameters + 1 :], 2)
        collected = jump_twin.WaitSums(residual, direct, weighted)
        step = Step(x, x_next, t, dt)
        return jump_twin.finish_step(rewards, theta, row, step, collected, unravel(score))

    flat_sums = jax.ShapeDtypeStruct((len(sums),), x.dtype)
    residual, score, direct, weighted, reward = tracer.call(
        finish,
        [flat, x, x, time, time, flat_sums, rows.row],
        [theta, state, x_next, t, dt, total, table],
    )

    def subtract_guess(flat: Array, x: Array, centre: Array, last: Array, slope: Array) -> tuple:
        nothing = jump_guess.GuessTable(None, None, last, None)
        of_slope = jump_guess.GuessTable(None, None, slope, None)
        guess = jump_guess.ReturnGuess(centre[None], nothing, of_slope)
        return jump_twin.finish_path(rewards, unravel(flat), guess, x, None)

    terminal, last_direct, last_reward = tracer.call(
        subtract_guess, [flat, x, *rows.end], [theta, state, *end]
    )
    zeros = [graph.const(0.0)] * parameters
    names = trace.names(call.numbers.theta)
    return trace.Program(
        graph,
        x_next.tolist(),
        int(residual),
        graph.const(0.0),
        [*score.tolist(), *zeros, graph.const(0.0)],
        [*weighted.tolist(), *direct.tolist(), int(reward)],
        int(terminal),
        [*zeros, *last_direct.tolist(), int(last_reward)],
        0,
        0,
        [*names, *(f"direct {name}" for name in names), "return"],
        event,
    )
