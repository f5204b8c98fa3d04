"""CUDA of the functions of a kernel on arrays, whose arrays are in shared memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fluctua.compiled.blocks import program as programs
from fluctua.compiled.blocks.nodes import LANE
from fluctua.compiled.blocks.plan import Demand, find_operand
from fluctua.compiled.blocks.write import (
    FunctionWriter,
    LoopNest,
    NumbersAhead,
    PlaceTables,
    write_index,
)

OUTER_ELEMENTS = 4
"""Elements from which the sum of products a bᵀ is taken as such."""


class ArrayPlace(NamedTuple):
    """Place of an array in the memory of a trajectory."""

    first: int
    size: int


class _GpuWriter(FunctionWriter):
    """Writes a function whose arrays take each other's place once they are not needed."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.sizes: dict[str, int] = {}

    def _allocate(self, node: int) -> str:
        name = f"a{node}"
        self.sizes[name] = self.graph[node].size
        return name

    def nest(self, heads: Sequence[str], body: Sequence[str]) -> None:
        """Write a loop nest whose longest loop the team shares, and wait for all of it."""
        heads = list(heads)
        if not body[0].startswith("multiply("):  # which has the team share its rows
            loops = [
                re.fullmatch(r"for \(int (i\d+) = 0; i\d+ < (\d+); i\d+\+\+\)", h) for h in heads
            ]
            lengths = [int(loop[2]) if loop else 0 for loop in loops]
            if max(lengths, default=0):
                k = int(np.argmax(lengths))
                loop = loops[k]
                assert loop is not None
                heads[k] = f"for (int {loop[1]} = team; {loop[1]} < {loop[2]}; {loop[1]} += TEAM)"
            else:
                heads.insert(0, "if (team == 0)")
        super().nest(heads, body)
        self.lines.append("__syncthreads();")

    def add_product(self, root: int, first: int) -> None:
        """Write the sum over trajectories of a product of two arrays with strides."""
        of = self.graph[root]
        loop = LoopNest(of.shape)
        sides = []
        for arg in of.args:
            source, places = self._find_places(arg)
            index = write_index(loop, places, self.tables)
            sides.append(f"{self.buffers[source]} + ({index}) * BLOCKS")
        lines = ["int rest = e;"]
        for k in reversed(range(len(of.shape))):
            lines.append(f"const int i{k} = rest % {of.shape[k]};")
            lines.append(f"rest /= {of.shape[k]};")
        lines.append(f"sums[{first} + e] += add_row_products({sides[0]}, {sides[1]});")
        head = f"for (int e = threadIdx.x; e < {of.size}; e += THREADS)"
        FunctionWriter.nest(self, [head], lines)

    def _find_places(self, node: int) -> tuple[int, np.ndarray]:
        source = find_operand(self.graph, node)
        if source == node:
            return node, np.arange(self.graph[node].size)
        _, places = self.graph.trace_source(node)
        assert places is not None
        return source, places

    def place_arrays(self) -> list[str]:
        """Return the lines with declarations of all arrays, and count the memory they need."""
        starts = self._find_starts()
        nest = np.searchsorted(starts, np.arange(len(self.lines)), side="right").tolist()
        uses: dict[str, list[int]] = {name: [] for name in self.sizes}
        for k, line in enumerate(self.lines):
            for name in set(re.findall(r"\ba\d+\b", line)):
                uses[name].append(nest[k])
        texts: dict[int, str] = {}
        for k, line in zip(nest, self.lines, strict=True):
            texts[k] = texts.get(k, "") + line + "\n"
        placed: dict[str, ArrayPlace] = {}
        for name, when in sorted(uses.items(), key=lambda item: item[1][0]):
            alive = {other: p for other, p in placed.items() if uses[other][-1] >= when[0]}
            size = self.sizes[name]
            first = _find_room(list(alive.values()), size)
            for other, place in alive.items():
                ends = uses[other][-1] == when[0] and place.size == size
                if ends and _is_in_place(texts[when[0]], other, name):
                    first = place.first
            placed[name] = ArrayPlace(first, size)
            self.work = max(self.work, first + size)
        declared = [f"V* const {n} = work + {p.first} * BLOCKS;" for n, p in placed.items()]
        return [*declared, *self.lines]

    def _find_starts(self) -> list[int]:
        """Find the first lines of statements that are not inside another."""
        depth = 0
        starts = []
        pending = False
        for k, line in enumerate(self.lines):
            if depth == 0 and not pending:
                starts.append(k)
            depth += line.count("{") - line.count("}")
            pending = depth == 0 and line.startswith(("for ", "if "))
        return starts


def _find_room(alive: list[ArrayPlace], size: int) -> int:
    """Return the first place with room for an array beside those that are needed."""
    first = 0
    for place in sorted(alive):
        if first + size <= place.first:
            break
        first = max(first, place.first + place.size)
    return first


def _is_in_place(text: str, old: str, new: str) -> bool:
    """Whether a loop reads an array only where it writes another, so that one can be the other."""
    pattern = r"\[(\([^\]]*\) \* BLOCKS \+ b)\]"
    written = set(re.findall(rf"\b{new}{pattern} = ", text))
    reads = re.findall(rf"\b{old}{pattern}", text)
    everywhere = len(re.findall(rf"\b{old}\b", text))
    return len(written) == 1 and set(reads) == written and len(reads) == everywhere


def write_gpu_program(program: programs.ArrayProgram) -> programs.ArrayText:
    """Write the functions of a kernel for a GPU."""
    graph = program.graph
    ahead = NumbersAhead(graph)
    tables = PlaceTables()
    roots = programs.place_roots(program, 1, OUTER_ELEMENTS)
    outers = [part for root in roots if root.outer for part in root.outer[:2]]
    added = [root.node for root in roots if root.outer is None]
    lane_inputs = {n: name for n, name in program.places.items() if graph[n].depends & LANE}

    def make_writer() -> _GpuWriter:
        writer = _GpuWriter(graph, ahead, tables)
        writer.buffers.update(lane_inputs)
        return writer

    step = make_writer()
    step.write_outputs(list(zip(program.step, ("y", "g", "r"), strict=True)), lane_inputs)
    end = make_writer()
    end.write_outputs([(program.terminal, "g")], lane_inputs)
    back = make_writer()
    factors = {node: graph[node].args for node in added if _is_product(program, node)}
    operands = [*outers, *(arg for pair in factors.values() for arg in pair)]
    stored = [find_operand(graph, node) for node in operands]
    stored += [node for node in added if node not in factors]
    needed = [node for node in stored if node not in lane_inputs]
    back.write(Demand(needed, [], back.buffers), {})
    elements = sum(graph[node].size for node in added)
    for root in roots:
        if root.outer is not None:
            back.add_outer(root.outer, elements + root.first, root.columns)
        elif root.node in factors:
            back.add_product(root.node, root.first)
        else:
            size = graph[root.node].size
            back.lines.append(f"add_rows({size}, {back.buffers[root.node]}, sums + {root.first});")
    back.lines.append("__syncthreads();")
    functions = [
        line.replace("static const int32_t", "__device__ const int") for line in tables.lines
    ]
    for name, writer in {"forward": step, "finish": end, "backward": back}.items():
        body = "\n".join(f"  {line}" for line in writer.place_arrays())
        functions.append(f"INLINE void {name}({programs.HEADS[name]}) {{\n{body}\n}}")
    products = [root for root in roots if root.outer is not None]
    sizes = {
        **programs.count_inputs(program, ahead),
        "WORK": max(writer.work for writer in (step, end, back)),
        "ELEMENTS": elements,
        "PRODUCTS": sum(graph[root.node].size for root in products),
    }
    return programs.ArrayText("\n".join(functions), sizes, ahead, roots)


def _is_product(program: programs.ArrayProgram, node: int) -> bool:
    """Whether a node is a product of two arrays of the trajectory that have strides in it."""
    graph = program.graph
    of = graph[node]
    if of.op != "mul" or of.size == 1 or any(not graph[a].depends & LANE for a in of.args):
        return False
    return all(graph[a].op == "view" or graph[a].shape == of.shape for a in of.args)
