"""One step of one trajectory as a graph, from the functions that the JAX path itself runs.

The transition, the rewards, the score and the explicit terms are those of `fluctua.core`, with the
noise as an input, so what a kernel computes is what they say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.compiled import events as jump_events
from fluctua.compiled.graph import Graph
from fluctua.compiled.scalar import Unsupported, scalarise
from fluctua.core import draws, simulate
from fluctua.core import model as terms
from fluctua.core.arrays import Array, Params, PyTree
from fluctua.core.model import EstimatorModel, Moment
from fluctua.core.process import Process
from fluctua.core.simulate import width
from fluctua.core.text import names

MOST_STATES = 300
MOST_PARAMETERS = 1024
"""What a kernel is made for; beyond, arrays are the better form."""


class Program(NamedTuple):
    """What a kernel computes at every step, as nodes of a graph.

    x_next: (M,). running: g Δt. paid: the reward of the step. score, explicit: (P,). terminal,
    final: the reward of the last state and its explicit terms (P,), of x as the state there.
    contexts: numbers of the context of a trajectory.
    width: W. names: of the parameters. inner: an event within the step, of a jump process.
    """

    graph: Graph
    x_next: list[int]
    running: int
    paid: int
    score: list[int]
    explicit: list[int]
    terminal: int
    final: list[int]
    contexts: int
    width: int
    names: list[str]
    inner: jump_events.Inner | None = None

    @property
    def state(self) -> int:
        """M."""
        return len(self.x_next)


def describe_shapes(tree: PyTree) -> Any:
    """What a trace depends on: structure, shapes and types, hashable."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((np.shape(leaf), leaf.dtype) for leaf in leaves)


def alone(ensemble: PyTree) -> PyTree:
    """Shape and type of every leaf of one trajectory of an ensemble."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), ensemble)


def flattened(theta: Params) -> tuple[jax.ShapeDtypeStruct, Callable[[Array], Params]]:
    """θ as one vector (P,), by shape and type, and the way back; nothing is computed, so
    nothing is compiled.
    """
    back = []

    def flat(theta: Params) -> Array:
        vector, unravel = ravel_pytree(theta)
        back.append(unravel)
        return vector

    return jax.eval_shape(flat, theta), back[0]


def traced(
    model: EstimatorModel,
    recipe: simulate.Recipe,
    theta: Params,
    ensemble: simulate.Ensemble,
    t: Array,
) -> Program:
    """The step of a trajectory of an ensemble, which may be shapes and types alone. t: the time
    grid.
    """
    process = recipe.process
    jumps = jump_events.served(recipe)
    if jumps is not None:
        smooth = jumps.diffusion
    elif isinstance(process, Process) and isinstance(model.process, Process):
        smooth = process
    else:
        raise Unsupported(
            type(process).__name__,
            "kernels are made of processes with a drift and a noise, or events",
        )
    x, context, _ = alone(ensemble._replace(streams=None))
    flat, unravel = flattened(theta)

    def like(*shape, of=t):
        return jax.ShapeDtypeStruct(shape, of.dtype)

    if x.size > MOST_STATES or flat.size > MOST_PARAMETERS:
        raise Unsupported(
            "state",
            f"{x.size} components and {flat.size} parameters; up to "
            f"{MOST_STATES} and "
            f"{MOST_PARAMETERS} are written out",
        )
    wieners = 0 if smooth is None else width(smooth, theta, x, like(), context)
    replayed = recipe._replace(
        wiener=draws.Wiener(draws.silent.stream, lambda stream, step, width: stream)
    )

    def one(tree):
        return jax.tree.map(lambda leaf: leaf[None], tree)

    def step(
        flat: Array, x: Array, t: Array, dt: Array, context: PyTree, z: Array, events: PyTree
    ) -> Array:
        theta = unravel(flat)
        n = jnp.zeros((), int)
        if jumps is None:
            return simulate.transition_one(replayed, theta, x, context, z, n, t, dt)[0]
        left = jump_events.left_by(unravel, x, *events)
        return jumps.add_diffusion(
            theta, x, events[0], left, (context, z, replayed.wiener.draw, n, t, dt)
        )

    def rewards(
        flat: Array, x: Array, x_next: Array, t: Array, dt: Array, context: PyTree
    ) -> tuple[Array, Array]:
        theta = unravel(flat)
        moment = Moment(0, t, dt, *one((x, x_next, context)))
        rate = terms.running_rewards(model.objective, theta, moment.x, t, moment.context)
        running = rate * dt.astype(x.dtype)
        nothing = jnp.zeros(1, x.dtype)
        arrival = terms.add_step_reward(model.objective, theta, nothing, moment)
        return running[0], arrival[0]

    def scores(
        flat: Array,
        x: Array,
        x_next: Array,
        t: Array,
        dt: Array,
        context: PyTree,
        origin: Array,
        events: PyTree,
    ) -> tuple[Array, Array]:
        left = None if events is None else jump_events.left_by(unravel, x, *events)
        moment = Moment(0, t, dt, *one((x, x_next, context, left)))
        rows = terms.scores(model, unravel(flat), moment, origin[:2])
        return rows.score[0], rows.explicit[0]

    def last(flat: Array, x: Array, context: PyTree, origin: Array) -> tuple[Array, Array]:
        theta = unravel(flat)
        (states, contexts) = one((x, context))
        explicit = terms.terminal_slopes(model, theta, states, origin, contexts)
        return terms.terminal_rewards(model.objective, theta, states, contexts)[0], explicit[0]

    graph = Graph()
    tracer = Tracer(graph)
    time = like()
    origin = like(3)
    z = like(wieners, of=x)
    inputs = {
        "theta": tracer.input("theta", flat),
        "x": tracer.input("x", x),
        "t": tracer.input("t", time),
        "dt": tracer.input("dt", time),
        "context": tracer.tree("context", context),
        "z": tracer.input("z", z),
        "origin": tracer.input("origin", origin),
    }
    if recipe.wiener is draws.silent:
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
        "events": None if jumps is None else (x, flat),
        "p": like(jump_events.DRAWS, of=x),
    }

    def call(function, *kinds):
        return tracer.call(function, [values[k] for k in kinds], [inputs[k] for k in kinds])

    inner = None
    inputs["events"] = None
    if jumps is not None:
        inputs["p"] = tracer.input("p", values["p"])
        new, after, over, own = call(
            jump_events.bind_event(jumps, unravel), "theta", "x", "t", "dt", "context", "p"
        )
        scored = [p for p, node in enumerate(own) if graph.value(int(node)) != 0.0]
        inner = jump_events.Inner(new.tolist(), int(after), int(over), own.tolist(), scored)
        score = np.full(flat.size, graph.const(0.0))
        score[scored] = tracer.input("p", score[scored], x.size)
        inputs["events"] = tracer.input("p", x), score
    (x_next,) = call(step, "theta", "x", "t", "dt", "context", "z", "events")
    for k, (total, part) in enumerate(zip(x_next.tolist(), inputs["x"].tolist(), strict=True)):
        graph.settled(total, part)
        if jumps is not None and graph.ops[total] in (
            "add",
            "sub",
        ):  # what a kick and what the events add
            graph.settled(total, graph.make("sub", int(inputs["events"][0][k]), part))
            for operand in graph.args[total]:
                graph.settled(operand, part)
    inputs["x_next"] = x_next
    running, paid = call(rewards, "theta", "x", "x_next", "t", "dt", "context")
    score, explicit = call(scores, "theta", "x", "x_next", "t", "dt", "context", "origin", "events")
    terminal, final = call(last, "theta", "x", "context", "origin")
    return Program(
        graph,
        x_next.tolist(),
        int(running),
        int(paid),
        score.tolist(),
        explicit.tolist(),
        int(terminal),
        final.tolist(),
        sum(np.size(leaf) for leaf in jax.tree.leaves(context)),
        wieners,
        names(theta),
        inner,
    )


class Tracer:
    """Traces functions into one graph."""

    def __init__(self, graph: Graph):
        self.graph = graph

    def input(self, kind: str, value: Array, first: int = 0) -> np.ndarray:
        """Leaves for every element of an input."""
        dtype = getattr(value, "dtype", np.dtype(float))
        if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) or np.dtype(dtype).kind == "c":
            raise Unsupported(kind, f"an input of type {dtype}")
        ids = [self.graph.leaf(kind, first + k) for k in range(np.size(value))]
        if np.dtype(dtype) == bool:
            ids = [self.graph.make("ne", node, self.graph.const(0.0)) for node in ids]
        return np.array(ids, dtype=np.int64).reshape(np.shape(value))

    def tree(self, kind: str, tree: PyTree) -> PyTree:
        """Leaves for every number of a pytree, numbered through."""
        leaves, structure = jax.tree.flatten(tree)
        first = np.cumsum([0, *(np.size(leaf) for leaf in leaves)])
        numbered = [self.input(kind, leaf, k) for leaf, k in zip(leaves, first, strict=False)]
        return jax.tree.unflatten(structure, numbered)

    def call(self, function: Callable, values: list[Any], inputs: list[PyTree]) -> list[np.ndarray]:
        """Outputs of a traced function."""
        closed = jax.make_jaxpr(function)(*values)
        return scalarise(self.graph, closed, jax.tree.leaves(inputs))
