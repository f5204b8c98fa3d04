"""One step of a trajectory forwards, and its weighted score backwards, as nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.compiled.blocks import nodes
from fluctua.compiled.blocks.lower import lower
from fluctua.compiled.blocks.sums import OUTER_ELEMENTS, SumPlan, refuse_spread, split_sums
from fluctua.compiled.scalar import Unsupported
from fluctua.compiled.trace import drop_ensemble_axis
from fluctua.core import draws, scores, simulate
from fluctua.core import model as terms
from fluctua.core.arrays import Array, Params, PyTree
from fluctua.core.process import Process, Step

MAX_STATES = 512
"""Largest state and number of noises of a kernel on arrays."""


class ArrayProgram(NamedTuple):
    """Program of a kernel on arrays.

    theta: nodes of the leaves of θ. step: nodes of the state after a step, of g Δt and of r.
    terminal: reward at the end. sums: what the reverse pass adds up.
    terminal_moves: whether θ enters the terminal reward. contexts: numbers of a context.
    """

    graph: nodes.ArrayGraph
    theta: tuple[int, ...]
    step: tuple[int, int, int]
    terminal: int
    sums: SumPlan
    terminal_moves: bool
    state: int
    contexts: int
    width: int
    places: dict[int, str]


def trace_program(
    model: terms.EstimatorModel,
    recipe: simulate.Recipe,
    theta: Params,
    ensemble: simulate.Ensemble,
    t: Array,
    least: int = OUTER_ELEMENTS,
) -> ArrayProgram:
    """Trace a step of a process, its rewards and its weighted score into nodes.

    ensemble: trajectories, or their shapes and types alone. t: the time grid (T+1,).
    least: elements of a product a bᵀ that is summed as such.
    """
    process = recipe.process
    scored = model.process
    if not isinstance(process, Process) or not isinstance(scored, Process):
        raise Unsupported(type(process).__name__, "sums over batches need a drift and a noise")
    find_log_density = scores.find_log_density(model.score)
    if find_log_density is None or model.objective.stop is not None:
        raise Unsupported("score", "sums over batches need a score of the library and no stop")
    x, context, _ = drop_ensemble_axis(ensemble._replace(streams=None))
    if x.size > MAX_STATES:
        raise Unsupported("state", f"{x.size} components; kernels have up to {MAX_STATES}")
    time = jax.ShapeDtypeStruct((), t.dtype)
    one = jax.ShapeDtypeStruct((), x.dtype)
    width = simulate.noise_width(process, theta, x, time, context)
    if width > MAX_STATES:
        raise Unsupported("noise", f"{width} noises; kernels have up to {MAX_STATES}")
    z = jax.ShapeDtypeStruct((width,), x.dtype)
    replayed = recipe._replace(
        wiener=draws.Wiener(draws.no_noise.stream, lambda stream, step, width: stream)
    )
    rewards = model.objective

    def advance(
        theta: Params, x: Array, t: Array, dt: Array, context: PyTree, z: Array
    ) -> tuple[Array, Array, Array]:
        n = jnp.zeros((), int)
        if recipe.wiener is draws.no_noise:  # no normals are drawn: z has no place in memory
            z = jnp.zeros_like(z)
        x_next = simulate.transition_one(replayed, theta, x, context, z, n, t, dt)[0]
        # a reward may be a number of Python
        running = jnp.asarray(rewards.running(theta, x, t, context), x.dtype)
        reward = jnp.zeros((), x.dtype)
        if rewards.per_step is not None:
            reward = jnp.asarray(rewards.per_step(theta, x, x_next, t, dt, context), x.dtype)
        return x_next, running * dt.astype(x.dtype), reward

    def weigh(
        theta: Params,
        x: Array,
        x_next: Array,
        t: Array,
        dt: Array,
        context: PyTree,
        weight: Array,
        once: Array,
    ) -> Array:
        step = Step(x, x_next, t, dt, context)
        log_density = find_log_density(scored, jax.lax.stop_gradient(theta), step)
        total = terms.step_total(rewards, theta, step)
        return weight * log_density(theta) + once * total

    def end(theta: Params, x: Array, context: PyTree) -> Array:
        return jnp.asarray(rewards.terminal(theta, x, context), x.dtype)

    inputs = _Inputs()
    known = {
        "theta": inputs.add("theta", theta, nodes.THETA),
        "x": inputs.add("x", x, nodes.LANE),
        "x_next": inputs.add("y", x, nodes.LANE),
        "t": inputs.add("t", time, nodes.TIMED),
        "dt": inputs.add("dt", time, nodes.TIMED),
        "context": inputs.add("c", context, nodes.LANE),
        "z": inputs.add("z", z, nodes.LANE),
        "weight": inputs.add("weight", one, nodes.LANE),
        "once": inputs.add("once", one, nodes.LANE),
    }
    values = {"theta": theta, "x": x, "x_next": x, "t": time, "dt": time, "context": context}
    values |= {"z": z, "weight": one, "once": one}
    graph = inputs.graph

    def call(function: Callable[..., Any], *names: str) -> list[int]:
        closed = jax.make_jaxpr(function)(*(values[name] for name in names))
        return lower(graph, closed, [node for name in names for node in known[name]])

    step = call(advance, "theta", "x", "t", "dt", "context", "z")
    ends = ("theta", "x", "x_next", "t", "dt", "context", "weight", "once")
    slopes = call(jax.grad(weigh), *ends)
    terminal = call(end, "theta", "x", "context")
    refuse_spread(graph, [*step, *terminal])
    at_end = call(jax.grad(end), "theta", "x", "context")
    return ArrayProgram(
        graph,
        tuple(known["theta"]),
        (step[0], step[1], step[2]),
        terminal[0],
        split_sums(graph, slopes, least),
        any(graph.uniform(node) != 0 for node in at_end),
        x.size,
        sum(int(np.size(leaf)) for leaf in jax.tree.leaves(context)),
        width,
        inputs.places,
    )


class _Inputs:
    """Inputs of all functions of a kernel, and the arrays of C++ that hold them."""

    def __init__(self) -> None:
        self.graph = nodes.ArrayGraph()
        self.places: dict[int, str] = {}

    def add(self, name: str, tree: PyTree, depends: int) -> list[int]:
        nodes = []
        first = 0
        for k, leaf in enumerate(jax.tree.leaves(tree)):
            kind = {"u": "i"}.get(np.dtype(leaf.dtype).kind, np.dtype(leaf.dtype).kind)
            if kind not in "fib":
                raise Unsupported(name, f"an input of type {leaf.dtype}")
            node = self.graph.input(f"{name}{k}", np.shape(leaf), kind, depends)
            self.places[node] = f"({name} + {first} * BLOCKS)"
            first += int(np.size(leaf))
            nodes.append(node)
        return nodes
