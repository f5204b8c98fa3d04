"""One step of one trajectory as a graph, from the functions that the JAX path itself runs.

The transition, the rewards, the score and the explicit terms are those of `fluctua.core`, with the
noise as an input: a kernel has no formulas of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.compiled import events as jump_events
from fluctua.compiled.graph import Graph
from fluctua.compiled.scalar import Unsupported, scalarise
from fluctua.core import draws, simulate, stopping
from fluctua.core import model as terms
from fluctua.core.arrays import Array, Params, PyTree
from fluctua.core.model import EstimatorModel, Moment
from fluctua.core.process import Process
from fluctua.core.simulate import noise_width
from fluctua.core.text import names

MAX_STATES = 300
MAX_PARAMETERS = 1024
"""Largest state and θ of a kernel; beyond, operations on arrays are faster than scalars."""


class Program(NamedTuple):
    """Program of a kernel: one step as nodes of a graph.

    x_next: state after the step (M,).
    running: running reward g Δt.
    step_reward: reward of the step on arrival.
    score: (P,).
    explicit: explicit terms ∂θ(g Δt + r) (P,).
    terminal: terminal reward, a function of x as the last state.
    terminal_explicit: explicit terms of the terminal reward (P,).
    contexts: number of components of a trajectory's context.
    width: W, the number of noises.
    names: of the parameters (P,).
    event: one event inside the step of a jump process.
    stops: whether trajectories may stop; the last component of the state is then their survival.
    survival_slope: ∂θ of the logarithm of its change (P,), if they may.
    """

    graph: Graph
    x_next: list[int]
    running: int
    step_reward: int
    score: list[int]
    explicit: list[int]
    terminal: int
    terminal_explicit: list[int]
    contexts: int
    width: int
    names: list[str]
    event: jump_events.EventProgram | None = None
    stops: bool = False
    survival_slope: Sequence[int] = ()

    @property
    def state(self) -> int:
        """M."""
        return len(self.x_next)


def describe_shapes(tree: PyTree) -> Any:
    """Return structure, shapes and types of a pytree, hashable: what a trace depends on."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((np.shape(leaf), leaf.dtype) for leaf in leaves)


def drop_ensemble_axis(ensemble: PyTree) -> PyTree:
    """Return shape and type of every leaf of one trajectory of an ensemble."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), ensemble)


def flatten_parameters(theta: Params) -> tuple[jax.ShapeDtypeStruct, Callable[[Array], Params]]:
    """Return shape and type of θ as one vector (P,), and the function back to θ.

    Nothing is computed, so nothing is compiled.
    """
    inverses = []

    def flat(theta: Params) -> Array:
        vector, unravel = ravel_pytree(theta)
        inverses.append(unravel)
        return vector

    return jax.eval_shape(flat, theta), inverses[0]


def trace_step(
    model: EstimatorModel,
    recipe: simulate.Recipe,
    theta: Params,
    ensemble: simulate.Ensemble,
    t: Array,
) -> Program:
    """Trace one step of a trajectory into a graph.

    ensemble: trajectories, or their shapes and types alone. t: the time grid (T+1,).
    """
    process = recipe.process
    jumps = jump_events.find_jumps(recipe)
    stops = model.objective.stop is not None
    if stops and jumps is not None:
        raise Unsupported("stop", "jump processes that stop")
    if jumps is not None:
        smooth = jumps.diffusion
    elif isinstance(process, Process) and isinstance(model.process, Process):
        smooth = process
    else:
        raise Unsupported(
            type(process).__name__,
            "kernels are made of processes with a drift and a noise, or events",
        )
    x, context, _ = drop_ensemble_axis(ensemble._replace(streams=None))
    flat, unravel = flatten_parameters(theta)

    def shaped(*shape, of=t):
        return jax.ShapeDtypeStruct(shape, of.dtype)

    if x.size > MAX_STATES or flat.size > MAX_PARAMETERS:
        raise Unsupported(
            "state",
            f"{x.size} components and {flat.size} parameters; kernels have up to {MAX_STATES} and "
            f"{MAX_PARAMETERS}",
        )
    wieners = 0 if smooth is None else noise_width(smooth, theta, x, shaped(), context)
    replayed = recipe._replace(
        wiener=draws.Wiener(draws.no_noise.stream, lambda stream, step, width: stream)
    )

    def add_axis(tree):
        return jax.tree.map(lambda leaf: leaf[None], tree)

    def step(
        flat: Array, x: Array, t: Array, dt: Array, context: PyTree, z: Array, events: PyTree
    ) -> Array:
        theta = unravel(flat)
        n = jnp.zeros((), int)
        if jumps is None:
            return simulate.transition_one(replayed, theta, x, context, z, n, t, dt)[0]
        left = jump_events.collect_events(unravel, x, *events)
        return jumps.add_diffusion(
            theta, x, events[0], left, (context, z, replayed.wiener.draw, n, t, dt)
        )

    def rewards(
        flat: Array,
        x: Array,
        x_next: Array,
        t: Array,
        dt: Array,
        context: PyTree,
        survival: Array | None,
    ) -> tuple[Array, ...]:
        theta = unravel(flat)
        moment = Moment(0, t, dt, *add_axis((x, x_next, context)))
        rate = terms.running_rewards(model.objective, theta, moment.x, t, moment.context)
        running = rate * dt.astype(x.dtype)
        arrival = terms.evaluate_arrivals(model.objective, theta, moment)
        reward = jnp.zeros(1, x.dtype) if arrival is None else arrival.reward
        if survival is None:
            return running[0], reward[0]
        assert arrival is not None
        before = survival[None]
        rows = (
            stopping.keep_running(before, running),
            stopping.keep_running(before, reward),
            stopping.multiply_survival(before, arrival.going_on),
        )
        return tuple(row[0] for row in rows)

    def hold(x_next: Array, x: Array, survival: Array) -> Array:
        return stopping.hold_stopped(survival[None], *add_axis((x_next, x)))[0]

    def scores(
        flat: Array,
        x: Array,
        x_next: Array,
        t: Array,
        dt: Array,
        context: PyTree,
        origin: Array,
        events: PyTree,
        survival: Array | None,
    ) -> tuple[Array, ...]:
        left = None if events is None else jump_events.collect_events(unravel, x, *events)
        moment = Moment(0, t, dt, *add_axis((x, x_next, context, left)))
        rows = terms.scores(model, unravel(flat), moment, origin[:2])
        if survival is None:
            return rows.score[0], rows.explicit[0]
        slope = rows.survival_slope
        return (
            jnp.where(survival > 0, rows.score[0], 0),
            stopping.keep_running(survival[None], rows.explicit)[0],
            jnp.zeros_like(flat) if slope is None else jnp.where(survival > 0, slope[0], 0),
        )

    def terminal_terms(
        flat: Array, x: Array, context: PyTree, origin: Array, survival: Array | None
    ) -> tuple[Array, Array]:
        theta = unravel(flat)
        states, contexts = add_axis((x, context))
        explicit = terms.terminal_slopes(model, theta, states, origin, contexts)
        reward = terms.terminal_rewards(model.objective, theta, states, contexts)
        last = None if survival is None else survival[None]
        return stopping.keep_running(last, reward)[0], stopping.keep_running(last, explicit)[0]

    graph = Graph()
    tracer = Tracer(graph)
    time = shaped()
    origin = shaped(3)
    z = shaped(wieners, of=x)
    inputs = {
        "theta": tracer.input("theta", flat),
        "x": tracer.input("x", x),
        "t": tracer.input("t", time),
        "dt": tracer.input("dt", time),
        "context": tracer.tree("context", context),
        "z": tracer.input("z", z),
        "origin": tracer.input("origin", origin),
        "survival": tracer.input("x", shaped(of=x), x.size) if stops else None,
    }
    if recipe.wiener is draws.no_noise:
        inputs["z"] = np.full(wieners, graph.const(0.0))
    values = {
        "theta": flat,
        "x": x,
        "t": time,
        "dt": time,
        "context": context,
        "z": z,
        "origin": origin,
        "x_next": x,
        "survival": shaped(of=x) if stops else None,
        "events": None if jumps is None else (x, flat),
        "p": shaped(jump_events.DRAWS, of=x),
    }

    def call(function, *kinds):
        return tracer.call(function, [values[k] for k in kinds], [inputs[k] for k in kinds])

    event = None
    inputs["events"] = None
    if jumps is not None:
        inputs["p"] = tracer.input("p", values["p"])
        x_after, after, over, event_score = call(
            jump_events.bind_event(jumps, unravel), "theta", "x", "t", "dt", "context", "p"
        )
        scored = [p for p, node in enumerate(event_score) if graph.value(int(node)) != 0.0]
        event = jump_events.EventProgram(
            x_after.tolist(), int(after), int(over), event_score.tolist(), scored
        )
        score = np.full(flat.size, graph.const(0.0))
        score[scored] = tracer.input("p", score[scored], x.size)
        inputs["events"] = tracer.input("p", x), score
    (x_next,) = call(step, "theta", "x", "t", "dt", "context", "z", "events")
    for k, (total, part) in enumerate(zip(x_next.tolist(), inputs["x"].tolist(), strict=True)):
        graph.mark_sum(total, part)
        # the sum of the noise's kick and of what the events add
        if jumps is not None and graph.ops[total] in ("add", "sub"):
            graph.mark_sum(total, graph.make("sub", int(inputs["events"][0][k]), part))
            for operand in graph.args[total]:
                graph.mark_sum(operand, part)
    inputs["x_next"] = x_next
    ends = "theta", "x", "x_next", "t", "dt", "context"
    running, step_reward, *after = call(rewards, *ends, "survival")
    score, explicit, *slope = call(scores, *ends, "origin", "events", "survival")
    last = call(terminal_terms, "theta", "x", "context", "origin", "survival")
    terminal, terminal_explicit = last
    if stops:
        (held,) = call(hold, "x_next", "x", "survival")
        x_next = np.append(held, after[0])
    return Program(
        graph,
        x_next.tolist(),
        int(running),
        int(step_reward),
        score.tolist(),
        explicit.tolist(),
        int(terminal),
        terminal_explicit.tolist(),
        sum(np.size(leaf) for leaf in jax.tree.leaves(context)),
        wieners,
        names(theta),
        event,
        stops,
        slope[0].tolist() if stops else (),
    )


class Tracer:
    """Traces functions of JAX into one graph."""

    def __init__(self, graph: Graph):
        self.graph = graph

    def input(self, kind: str, value: Array, first: int = 0) -> np.ndarray:
        """Add a leaf for every element of an input; return their identities in its shape."""
        dtype = getattr(value, "dtype", np.dtype(float))
        if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) or np.dtype(dtype).kind == "c":
            raise Unsupported(kind, f"an input of type {dtype}")
        ids = [self.graph.leaf(kind, first + k) for k in range(np.size(value))]
        if np.dtype(dtype) == bool:
            ids = [self.graph.make("ne", node, self.graph.const(0.0)) for node in ids]
        return np.array(ids, dtype=np.int64).reshape(np.shape(value))

    def tree(self, kind: str, tree: PyTree) -> PyTree:
        """Add a leaf for every number of a pytree, counted through its leaves."""
        leaves, structure = jax.tree.flatten(tree)
        first = np.cumsum([0, *(np.size(leaf) for leaf in leaves)])
        numbered = [self.input(kind, leaf, k) for leaf, k in zip(leaves, first, strict=False)]
        return jax.tree.unflatten(structure, numbered)

    def call(self, function: Callable, values: list[Any], inputs: list[PyTree]) -> list[np.ndarray]:
        """Trace a function and return the identities of its outputs."""
        closed = jax.make_jaxpr(function)(*values)
        return scalarise(self.graph, closed, jax.tree.leaves(inputs))
