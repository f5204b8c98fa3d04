"""CUDA of the functions of a kernel on arrays, whose arrays are in shared memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fluctua.compiled.blocks import program as programs
from fluctua.compiled.blocks.nodes import LANE
from fluctua.compiled.blocks.plan import Demand, find_operand
from fluctua.compiled.blocks.sums import Outer
from fluctua.compiled.blocks.write import (
    FunctionWriter,
    LoopNest,
    NumbersAhead,
    PlaceTables,
    write_index,
)

OUTER_ELEMENTS = 4
"""Elements from which the sum of products a bᵀ is taken as such."""

WORKERS = 512
"""Largest number of threads that share the sums of a block."""


class ArrayPlace(NamedTuple):
    """Place of an array in the memory of a trajectory."""

    first: int
    size: int


class _Statement(NamedTuple):
    """Lines that all threads of a block run. is_scalar: the first of each team runs all."""

    lines: list[str]
    is_scalar: bool = False

    @property
    def arrays(self) -> set[str]:
        """Arrays of the trajectory that it reads or writes."""
        return {name for line in self.lines for name in re.findall(r"\ba\d+\b", line)}


class _Use(NamedTuple):
    """A use of an array. group: number of the statements between two barriers."""

    group: int
    statement: _Statement


class _GpuWriter(FunctionWriter):
    """Writes a function whose arrays take each other's place once they are not needed.

    Sums over trajectories are taken as soon as their operands are ready, which frees the memory of
    these early.
    """

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.sizes: dict[str, int] = {}
        self.statements: list[_Statement] = []
        self.sums: list[_Statement] = []
        self.written: dict[str, int] = {}
        self.begin = 0

    def _allocate(self, node: int) -> str:
        name = f"a{node}"
        self.sizes[name] = self.graph[node].size
        return name

    def _store(self, node: int) -> None:
        super()._store(node)
        self.written[self.buffers[node]] = len(self.statements)

    def nest(self, heads: Sequence[str], body: Sequence[str]) -> None:
        """Write a loop nest whose longest loop the team shares."""
        heads = list(heads)
        is_scalar = False
        if not body[0].startswith("multiply("):  # which has the team share its rows
            loops = [
                re.fullmatch(r"for \(int (i\d+) = 0; i\d+ < (\d+); i\d+\+\+\)", h) for h in heads
            ]
            lengths = [int(loop[2]) if loop else 0 for loop in loops]
            is_scalar = max(lengths, default=0) == 0
            if is_scalar:
                heads.insert(0, "if (team == 0)")
            else:
                k = int(np.argmax(lengths))
                loop = loops[k]
                assert loop is not None
                heads[k] = f"for (int {loop[1]} = team; {loop[1]} < {loop[2]}; {loop[1]} += TEAM)"
        super().nest(heads, body)
        self.statements.append(_Statement(self.lines, is_scalar))
        self.lines = []

    def _store_elements(self, node: int, target: str, places: np.ndarray, added: bool) -> None:
        """Store or add elements. One thread adds all that are added in the same place."""
        if not added or len(np.unique(places)) == len(places):
            super()._store_elements(node, target, places, added)
            return
        loop = LoopNest(self.graph[node].shape)
        lines, value = self.evaluate(node, loop)
        index = write_index(loop, places, self.tables)
        heads = [*loop.heads(range(len(loop.shape))), f"if (({index}) % TEAM == team)"]
        heads.append("for (int b = 0; b < VECTORS; b++)")
        FunctionWriter.nest(self, heads, [*lines, f"{target}[({index}) * BLOCKS + b] += {value};"])
        self.statements.append(_Statement(self.lines))
        self.lines = []

    # ---------------------------------------------------------------------------------------- sums

    def _add_sum(self, text: str, workers: int) -> None:
        """Add the text of a sum. Its first thread follows the last one of the sum before."""
        self.sums.append(_Statement(text.replace("BEGIN", str(self.begin)).split("\n")))
        self.begin = (self.begin + -(-workers // 32) * 32) % WORKERS

    def add_outer(self, outer: Outer, first: int, columns: int) -> None:
        """Write the sum over trajectories of products a bᵀ."""
        super().add_outer(outer, first, columns)
        text = self.lines.pop().replace(f", {columns}, scratch)", ", BEGIN)")
        self._add_sum(text, self.graph[outer.rows].size * self.graph[outer.columns].size)

    def add_rows(self, node: int, first: int, target: str = "sums") -> None:
        """Write the sum over trajectories of an array."""
        size = self.graph[node].size
        self._add_sum(f"add_rows({size}, {self.buffers[node]}, {target} + {first}, BEGIN);", size)

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
        head = f"for (int e = find_worker(BEGIN); e < {of.size}; e += THREADS)"
        FunctionWriter.nest(self, [head], lines)
        self._add_sum("\n".join(self.lines), of.size)
        self.lines = []

    def _find_places(self, node: int) -> tuple[int, np.ndarray]:
        source = find_operand(self.graph, node)
        if source == node:
            return node, np.arange(self.graph[node].size)
        _, places = self.graph.trace_source(node)
        assert places is not None
        return source, places

    # -------------------------------------------------------------------------------------- places

    def finish(self) -> list[str]:
        """Return all lines with declarations of the arrays, and count the memory they need."""
        groups = self._group_statements()
        used: dict[str, list[_Use]] = {name: [] for name in self.sizes}
        for k, group in enumerate(groups):
            for statement in group:
                for name in statement.arrays:
                    used[name].append(_Use(k, statement))
        placed: dict[str, ArrayPlace] = {}
        for name, uses in sorted(used.items(), key=lambda item: item[1][0].group):
            first_use = uses[0]
            alive = {o: p for o, p in placed.items() if used[o][-1].group >= first_use.group}
            size = self.sizes[name]
            first = _find_room(list(alive.values()), size)
            for other, place in alive.items():
                here = [use for use in used[other] if use.group == first_use.group]
                ends = here == [first_use] and used[other][-1] == first_use
                text = "\n".join(first_use.statement.lines)
                if ends and place.size == size and _is_in_place(text, other, name):
                    first = place.first
            placed[name] = ArrayPlace(first, size)
            self.work = max(self.work, first + size)
        bodies = [[line for each in group for line in each.lines] for group in groups]
        declared = [f"V* const {n} = work + {p.first} * BLOCKS;" for n, p in placed.items()]
        return [*declared, *(line for body in bodies for line in [*body, "__syncthreads();"])]

    def _group_statements(self) -> list[list[_Statement]]:
        """Group the statements between two barriers.

        A sum is in the group after the last of its operands. Scalar statements in a row share a
        group: one thread writes and reads what they have in common.
        """
        groups: list[list[_Statement]] = [[]]
        last: _Statement | None = None
        waiting: dict[int, list[_Statement]] = {k: [] for k in range(len(self.statements) + 1)}
        for each in self.sums:
            ready = max((self.written.get(name, 0) for name in each.arrays), default=0)
            waiting[ready].append(each)
        for k, statement in enumerate(self.statements):
            chained = last is not None and last.is_scalar and statement.is_scalar
            if last is not None and not (chained and not waiting[k]):
                groups.append([])
            groups[-1] += [*waiting[k], statement]
            last = statement
        final = waiting[len(self.statements)]
        return [*groups, final] if final else groups


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
    whole = {find_operand(graph, node) for node in outers}
    factors = {
        node: graph[node].args for node in added if node not in whole and _is_product(program, node)
    }
    operands = [*outers, *(arg for pair in factors.values() for arg in pair)]
    stored = [find_operand(graph, node) for node in operands]
    by_step = programs.place_step_roots(program)
    stored += [node for node in added if node not in factors]
    stored += [root.node for root in by_step]
    needed = [node for node in stored if node not in lane_inputs]
    back.write(Demand(needed, [], back.buffers), {})
    elements = sum(graph[node].size for node in added)
    for root in by_step:
        back.add_rows(root.node, root.first, "step_sums")
    for root in roots:
        if root.outer is not None:
            back.add_outer(root.outer, elements + root.first, root.columns)
        elif root.node in factors:
            back.add_product(root.node, root.first)
        else:
            back.add_rows(root.node, root.first)
    functions = [
        line.replace("static const int32_t", "__device__ const int") for line in tables.lines
    ]
    for name, writer in {"forward": step, "finish": end, "backward": back}.items():
        body = "\n".join(f"  {line}" for line in writer.finish())
        functions.append(f"INLINE void {name}({programs.HEADS[name]}) {{\n{body}\n}}")
    products = [root for root in roots if root.outer is not None]
    sizes = {
        **programs.count_inputs(program, ahead),
        "WORK": max(writer.work for writer in (step, end, back)),
        "ELEMENTS": elements,
        "PRODUCTS": sum(graph[root.node].size for root in products),
        "PER_STEP": sum(graph[root.node].size for root in by_step),
    }
    return programs.ArrayText("\n".join(functions), sizes, ahead, roots, by_step)


def _is_product(program: programs.ArrayProgram, node: int) -> bool:
    """Whether a node is a product of two arrays of the trajectory that have strides in it."""
    graph = program.graph
    of = graph[node]
    if of.op != "mul" or of.size == 1 or any(not graph[a].depends & LANE for a in of.args):
        return False
    return all(graph[a].op == "view" or graph[a].shape == of.shape for a in of.args)
