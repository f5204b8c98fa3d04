"""C++ of the functions of a kernel on arrays, and where its numbers are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fluctua.compiled.blocks import sums as array_sums
from fluctua.compiled.blocks.nodes import LANE, ArrayGraph
from fluctua.compiled.blocks.plan import Demand, choose_kept, find_operand
from fluctua.compiled.blocks.step import ArrayProgram, trace_program
from fluctua.compiled.blocks.write import FunctionWriter, NumbersAhead, PlaceTables
from fluctua.compiled.scalar import Unsupported

__all__ = ["ArrayProgram", "ArrayText", "place_roots", "read_sums", "trace_program"]


MAX_STEP_SUMS = 2**21
"""Largest number of sums of single steps: 1 GiB in 64 batches."""


class Root(NamedTuple):
    """A node that is added up. first: place of its sums. columns: padded, of a product; else 0."""

    node: int
    first: int
    outer: array_sums.Outer | None
    columns: int


class ArrayText(NamedTuple):
    """The generated functions of a kernel, and where its numbers are.

    sizes: constants of the C++ text. ahead: numbers that are the same for all trajectories.
    roots: sums over all steps. by_step: sums of every step.
    """

    functions: str
    sizes: dict[str, int]
    ahead: NumbersAhead
    roots: list[Root]
    by_step: list[Root]

    def count_sums(self, steps: int) -> int:
        """Return the number of sums of a batch."""
        by_step = steps * self.sizes["PER_STEP"]
        if by_step > MAX_STEP_SUMS:
            raise Unsupported(
                "time", f"{by_step} sums of single steps; at most {MAX_STEP_SUMS} are supported"
            )
        return self.sizes["ELEMENTS"] + self.sizes["PRODUCTS"] + by_step


HEADS = {
    "forward": "const F* shared, const F* timed, const V* c, const V* x, const V* z, V* y, V* g, "
    "V* r, V* kept, V* work",
    "finish": "const F* shared, const V* c, const V* x, V* g, V* work",
    "backward": "const F* shared, const F* timed, const V* c, const V* x, const V* y, "
    "const V* weight, const V* once, const V* kept, V* sums, F* products, V* step_sums, V* work, "
    "F* scratch",
}


def count_inputs(program: ArrayProgram, ahead: NumbersAhead) -> dict[str, int]:
    """Return the constants of the C++ text for what a step reads."""
    return {
        "STATE": program.state,
        "CONTEXT": program.contexts,
        "WIDTH": program.width,
        "NORMALS": program.width,
        "TIMED": ahead.sizes["timed"],
    }


def write_program(program: ArrayProgram, lanes: int) -> ArrayText:
    """Write the functions of a kernel. lanes: trajectories per vector."""
    graph = program.graph
    ahead = NumbersAhead(graph)
    tables = PlaceTables()
    roots = place_roots(program, lanes)
    outers = [part for root in roots if root.outer for part in root.outer[:2]]
    by_step = place_step_roots(program)
    added = [root.node for root in roots if root.outer is None]
    in_loops = [*added, *(root.node for root in by_step)]
    kept = choose_kept(graph, program.step, [*outers, *in_loops])
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
    back.write(Demand(operands, in_loops, back.buffers), {})
    for root in by_step:
        back.add_elements(root.node, root.first, "step_sums")
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
        **count_inputs(program, ahead),
        "KEPT": sum(graph[n].size for n in kept),
        "WORK": max(writer.work for writer in writers.values()),
        "ELEMENTS": sum(graph[n].size for n in added),
        "PRODUCTS": sum(_count_rows(graph, root) * root.columns for root in products),
        "SCRATCH": max([0, *(root.columns for root in products)]),
        "PER_STEP": sum(graph[root.node].size for root in by_step),
    }
    return ArrayText("\n".join(functions), sizes, ahead, roots, by_step)


def _count_rows(graph: ArrayGraph, root: Root) -> int:
    assert root.outer is not None
    return graph[root.outer.rows].size


def place_roots(
    program: ArrayProgram, lanes: int, least: int = array_sums.OUTER_ELEMENTS
) -> list[Root]:
    """Find a place for the sums of every root. least: elements of a product a bᵀ."""
    graph = program.graph
    roots = []
    ends = {False: 0, True: 0}
    for node in program.sums.roots:
        outer = array_sums.find_outer(graph, node, least)
        is_product = outer is not None
        columns = 0
        size = graph[node].size
        if outer is not None:
            columns = -(-graph[outer.columns].size // lanes) * lanes
            size = graph[outer.rows].size * columns
        roots.append(Root(node, ends[is_product], outer, columns))
        ends[is_product] += size
    return roots


def place_step_roots(program: ArrayProgram) -> list[Root]:
    """Find a place for the sums of every step."""
    nodes = [program.graph[node].args[0] for node in program.sums.by_step]
    ends = np.cumsum([0, *(program.graph[node].size for node in nodes)]).tolist()
    return [Root(node, first, None, 0) for node, first in zip(nodes, ends, strict=False)]


def read_step_sums(text: ArrayText, sums: np.ndarray) -> np.ndarray:
    """Return the sums of every step (B, T, L) from the array that a kernel has filled."""
    fixed = text.sizes["ELEMENTS"] + text.sizes["PRODUCTS"]
    return sums[:, fixed:].reshape(len(sums), -1, text.sizes["PER_STEP"])


def read_sums(program: ArrayProgram, text: ArrayText, sums: np.ndarray) -> dict[int, np.ndarray]:
    """Return the sums of every root (B, ...) from the array that a kernel has filled."""
    graph = program.graph
    by_root = {}
    for root in text.roots:
        of = graph[root.node]
        if root.outer is None:
            part = sums[:, root.first : root.first + of.size]
        else:
            rows = graph[root.outer.rows].size
            first = text.sizes["ELEMENTS"] + root.first
            part = sums[:, first : first + rows * root.columns]
            part = part.reshape(-1, rows, root.columns)[:, :, : graph[root.outer.columns].size]
            part = array_sums.take_columns(part, root.outer.order)
        by_root[root.node] = part.reshape(-1, *of.shape)
    return by_root
