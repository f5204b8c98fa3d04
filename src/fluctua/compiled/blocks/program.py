"""One step of a trajectory forwards, and its weighted score backwards, as nodes and as C++."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.compiled.blocks.lower import lower
from fluctua.compiled.blocks.nodes import LANE, THETA, TIMED, ArrayGraph
from fluctua.compiled.blocks.plan import Demand, choose_kept, find_operand
from fluctua.compiled.blocks.sums import (
    OUTER_ELEMENTS,
    Outer,
    SumPlan,
    find_outer,
    split_sums,
    take_columns,
)
from fluctua.compiled.blocks.write import FunctionWriter, NumbersAhead, Tables
from fluctua.compiled.scalar import Unsupported
from fluctua.compiled.trace import drop_ensemble_axis
from fluctua.core import draws, scores, simulate
from fluctua.core import model as terms
from fluctua.core.arrays import Array, Params, PyTree
from fluctua.core.process import Process, Step

MAX_STATES = 1024
"""Largest state of a kernel on arrays."""


class ArrayProgram(NamedTuple):
    """What a kernel on arrays computes.

    theta: nodes of the leaves of θ. step: nodes of the state after a step, of g Δt and of r.
    terminal: reward at the end. sums: what the reverse pass adds up.
    terminal_moves: whether θ enters the terminal reward. contexts: numbers of a context.
    """

    graph: ArrayGraph
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
    z = jax.ShapeDtypeStruct((width,), x.dtype)
    replayed = recipe._replace(
        wiener=draws.Wiener(draws.no_noise.stream, lambda stream, step, width: stream)
    )
    rewards = model.objective

    def advance(
        theta: Params, x: Array, t: Array, dt: Array, context: PyTree, z: Array
    ) -> tuple[Array, Array, Array]:
        n = jnp.zeros((), int)
        x_next = simulate.transition_one(replayed, theta, x, context, z, n, t, dt)[0]
        running = rewards.running(theta, x, t, context).astype(x.dtype) * dt.astype(x.dtype)
        reward = jnp.zeros((), x.dtype)
        if rewards.per_step is not None:
            reward = rewards.per_step(theta, x, x_next, t, dt, context).astype(x.dtype)
        return x_next, running, reward

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
        return rewards.terminal(theta, x, context).astype(x.dtype)

    inputs = _Inputs()
    known = {
        "theta": inputs.add("theta", theta, THETA),
        "x": inputs.add("x", x, LANE),
        "x_next": inputs.add("y", x, LANE),
        "t": inputs.add("t", time, TIMED),
        "dt": inputs.add("dt", time, TIMED),
        "context": inputs.add("c", context, LANE),
        "z": inputs.add("z", z, LANE),
        "weight": inputs.add("weight", one, LANE),
        "once": inputs.add("once", one, LANE),
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
        self.graph = ArrayGraph()
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


# ------------------------------------------------------------------------------------------ C++


class Root(NamedTuple):
    """A node that is added up. first: place of its sums. columns: padded, of a product; else 0."""

    node: int
    first: int
    outer: Outer | None
    columns: int


class ArrayText(NamedTuple):
    """The generated functions of a kernel, and where its numbers are.

    sizes: constants of the C++ text. ahead: numbers that are the same for all trajectories.
    """

    functions: str
    sizes: dict[str, int]
    ahead: NumbersAhead
    roots: list[Root]


HEADS = {
    "forward": "const F* shared, const F* timed, const V* c, const V* x, const V* z, V* y, V* g, "
    "V* r, V* kept, V* work",
    "finish": "const F* shared, const V* c, const V* x, V* g, V* work",
    "backward": "const F* shared, const F* timed, const V* c, const V* x, const V* y, "
    "const V* weight, const V* once, const V* kept, V* sums, F* products, V* work, F* scratch",
}


def write_program(program: ArrayProgram, lanes: int) -> ArrayText:
    """Write the functions of a kernel. lanes: trajectories per vector."""
    graph = program.graph
    ahead = NumbersAhead(graph)
    tables = Tables()
    roots = place_roots(program, lanes)
    outers = [part for root in roots if root.outer for part in root.outer[:2]]
    added = [root.node for root in roots if root.outer is None]
    kept = choose_kept(graph, program.step, [*outers, *added])
    places = dict(zip(kept, np.cumsum([0, *(graph[n].size for n in kept)]).tolist(), strict=False))
    kept_names = {node: f"(kept + {place} * BLOCKS)" for node, place in places.items()}

    def make_writer(names: dict[int, str]) -> FunctionWriter:
        writer = FunctionWriter(graph, ahead, tables)
        writer.buffers.update(names)
        return writer

    lane_inputs = {n: name for n, name in program.places.items() if graph[n].depends & LANE}
    step = make_writer(lane_inputs)
    outputs = list(zip(program.step, ("y", "g", "r"), strict=True))
    step.write_outputs([*outputs, *kept_names.items()], lane_inputs)
    end = make_writer(lane_inputs)
    end.write_outputs([(program.terminal, "g")], lane_inputs)
    back = make_writer(lane_inputs | kept_names)
    operands = [find_operand(graph, part) for part in outers]
    back.write(Demand(operands, added, back.buffers), {})
    for root in roots:
        if root.outer is None:
            back.add_elements(root.node, root.first)
        else:
            back.add_outer(root.outer, root.first, root.columns)
    writers = {"forward": step, "finish": end, "backward": back}
    functions = [*tables.lines]
    for name, writer in writers.items():
        body = "\n".join(f"  {line}" for line in writer.lines)
        functions.append(f"OUTLINE void {name}({HEADS[name]}) {{\n{body}\n}}")
    products = [root for root in roots if root.outer is not None]
    sizes = {
        "STATE": program.state,
        "CONTEXT": program.contexts,
        "WIDTH": program.width,
        "NORMALS": program.width,
        "TIMED": ahead.sizes["timed"],
        "KEPT": sum(graph[n].size for n in kept),
        "WORK": max(writer.work for writer in writers.values()),
        "ELEMENTS": sum(graph[n].size for n in added),
        "PRODUCTS": sum(_count_rows(graph, root) * root.columns for root in products),
        "SCRATCH": max([0, *(root.columns for root in products)]),
    }
    return ArrayText("\n".join(functions), sizes, ahead, roots)


def _count_rows(graph: ArrayGraph, root: Root) -> int:
    assert root.outer is not None
    return graph[root.outer.rows].size


def place_roots(program: ArrayProgram, lanes: int, least: int = OUTER_ELEMENTS) -> list[Root]:
    """Find a place for the sums of every root. least: elements of a product a bᵀ."""
    graph = program.graph
    roots = []
    ends = {False: 0, True: 0}
    for node in program.sums.roots:
        outer = find_outer(graph, node, least)
        is_product = outer is not None
        columns = 0
        size = graph[node].size
        if outer is not None:
            columns = -(-graph[outer.columns].size // lanes) * lanes
            size = graph[outer.rows].size * columns
        roots.append(Root(node, ends[is_product], outer, columns))
        ends[is_product] += size
    return roots


def read_sums(program: ArrayProgram, text: ArrayText, sums: np.ndarray) -> dict[int, np.ndarray]:
    """Return the sums of every root (B, ...) from the array that a kernel has filled."""
    graph = program.graph
    found = {}
    for root in text.roots:
        of = graph[root.node]
        if root.outer is None:
            part = sums[:, root.first : root.first + of.size]
        else:
            rows = graph[root.outer.rows].size
            first = text.sizes["ELEMENTS"] + root.first
            part = sums[:, first : first + rows * root.columns]
            part = part.reshape(-1, rows, root.columns)[:, :, : graph[root.outer.columns].size]
            part = take_columns(part, root.outer.order)
        found[root.node] = part.reshape(-1, *of.shape)
    return found
