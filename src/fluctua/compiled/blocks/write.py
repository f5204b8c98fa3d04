"""C++ of the functions of a kernel: loops over the elements of arrays, BLOCKS vectors at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fluctua.compiled.blocks.elementwise import FORMS
from fluctua.compiled.blocks.nodes import LANE, TIMED, ArrayGraph, find_strides
from fluctua.compiled.blocks.plan import Demand, find_operand, plan_storage
from fluctua.compiled.blocks.sums import Outer

START = {"sum": "bc(F(0))", "prod": "bc(F(1))", "max": "bc(F(-INFINITY))", "min": "bc(F(INFINITY))"}
COMBINE = {"sum": "{0} + {1}", "prod": "{0} * {1}", "max": "m_max({0}, {1})"}
COMBINE["min"] = "m_min({0}, {1})"


class NumbersAhead:
    """Places of arrays that are the same for all trajectories, in the order of their first use."""

    def __init__(self, graph: ArrayGraph):
        self.graph = graph
        self.places: dict[int, tuple[str, int]] = {}
        self.sizes = {"shared": 0, "timed": 0}

    def find(self, node: int) -> tuple[str, int]:
        """Return the array of C++ that holds a node, and the place of its first element."""
        if node not in self.places:
            of = self.graph[node]
            name = "timed" if of.depends & TIMED else "shared"
            self.places[node] = name, self.sizes[name]
            self.sizes[name] += -(-of.size // 4) * 4  # vectors of four begin at its first
        return self.places[node]


class PlaceTables:
    """Places of elements that have no strides, as arrays of the C++ text."""

    def __init__(self) -> None:
        self.names: dict[bytes, str] = {}
        self.lines: list[str] = []

    def name(self, places: np.ndarray) -> str:
        """Return the name of a table."""
        key = np.asarray(places, np.int32).tobytes()
        if key not in self.names:
            self.names[key] = f"TABLE_{len(self.names)}"
            text = ",".join(map(str, places.ravel().tolist()))
            self.lines.append(f"static const int32_t {self.names[key]}[] = {{{text}}};")
        return self.names[key]


class LoopNest(NamedTuple):
    """Indices of a loop nest over a shape: their names, and the lengths that are not 1."""

    shape: tuple[int, ...]

    @property
    def names(self) -> list[str]:
        """Name of the index of every axis."""
        return [f"i{k}" for k in range(len(self.shape))]

    def heads(self, axes: Sequence[int]) -> list[str]:
        """Return the heads of the loops over some axes."""
        return [
            f"for (int i{k} = 0; i{k} < {self.shape[k]}; i{k}++)"
            for k in axes
            if self.shape[k] != 1
        ]


def write_index(loop: LoopNest, places: np.ndarray, tables: PlaceTables) -> str:
    """Return the place of an element in C++, for each index of a loop nest."""
    layout = find_strides(places, loop.shape)
    if layout is None:
        strides = np.cumprod([1, *loop.shape[:0:-1]])[::-1]
        return f"{tables.name(places)}[{_write_sum(0, strides.tolist(), loop)}]"
    return _write_sum(layout.offset, layout.strides, loop)


def _write_sum(offset: int, strides: Sequence[int], loop: LoopNest) -> str:
    terms = [
        name if stride == 1 else f"{stride} * {name}"
        for stride, name, length in zip(strides, loop.names, loop.shape, strict=True)
        if stride and length != 1
    ]
    if offset or not terms:
        terms.insert(0, str(offset))
    return " + ".join(terms)


class FunctionWriter:
    """Writes one function of a kernel.

    graph: all nodes. ahead: numbers that are the same for all trajectories.
    buffers: C++ names of arrays that exist, by node.
    """

    def __init__(self, graph: ArrayGraph, ahead: NumbersAhead, tables: PlaceTables):
        self.graph = graph
        self.ahead = ahead
        self.tables = tables
        self.buffers: dict[int, str] = {}
        self.lines: list[str] = []
        self.work = 0

    def write(self, demand: Demand, targets: dict[int, str]) -> None:
        """Write loops for all nodes of a demand. targets: names of arrays to store some in."""
        order = plan_storage(self.graph, demand)
        for node in order:
            self.buffers[node] = targets.get(node) or self._allocate(node)
            self._store(node)

    def write_outputs(self, outputs: Sequence[tuple[int, str]], existing: dict[int, str]) -> None:
        """Write a function that stores nodes in the arrays of the given names."""
        targets: dict[int, str] = {}
        for node, name in outputs:
            if self.graph[node].depends & LANE and node not in existing:
                targets.setdefault(node, name)
        self.write(Demand(list(targets), [], existing), targets)
        for node, name in outputs:
            if self.buffers.get(node) != name:
                self._store_elements(node, name, np.arange(self.graph[node].size), False)

    def _allocate(self, node: int) -> str:
        name = f"a{node}"
        self.lines.append(f"V* const __restrict {name} = work + {self.work} * BLOCKS;")
        self.work += self.graph[node].size
        return name

    # ------------------------------------------------------------------------------------ elements

    def read(self, node: int, places: np.ndarray, loop: LoopNest) -> str:
        """Return the C++ of one element of an array that exists, or of a number ahead."""
        of = self.graph[node]
        if of.depends & LANE:
            index = write_index(loop, places, self.tables)
            text = f"{self.buffers[node]}[({index}) * BLOCKS + b]"
            return f"(B)({text} != F(0))" if of.kind == "b" else text
        value = self.graph.uniform(node)
        if value is not None:
            return write_constant(value, of.kind)
        array, first = self.ahead.find(node)
        index = write_index(loop, places, self.tables)
        text = f"{array}[{first} + {index}]"
        return f"mask({text} != F(0))" if of.kind == "b" else f"bc({text})"

    def evaluate(self, root: int, loop: LoopNest) -> tuple[list[str], str]:
        """Return the statements that compute an element of a node, and its name."""
        lines: list[str] = []
        names: dict[tuple[int, int], str] = {}
        alive: list[np.ndarray] = []

        def element(node: int, places: np.ndarray) -> str:
            key = node, id(places)
            if key in names:
                return names[key]
            of = self.graph[node]
            if not of.depends & LANE or node in self.buffers:
                if of.op == "view" and node not in self.buffers:
                    text = self.read(of.args[0], of.data.places[places], loop)
                else:
                    text = self.read(node, places, loop)
            elif of.op == "view":
                moved = of.data.places[places]
                alive.append(moved)
                names[key] = element(of.args[0], moved)
                return names[key]
            else:
                args = [element(a, places) for a in of.args]
                text = FORMS[of.op][0].format(*args, data=of.data)
            names[key] = f"v{len(names)}"
            lines.append(f"const {'B' if of.kind == 'b' else 'V'} {names[key]} = {text};")
            return names[key]

        everything = np.arange(math.prod(loop.shape))
        return lines, element(root, everything)

    # --------------------------------------------------------------------------------------- loops

    def _store(self, node: int) -> None:
        of = self.graph[node]
        target = self.buffers[node]
        if of.op == "dot":
            self._store_product(node, target)
        elif of.op.startswith("reduce_"):
            self._store_reduction(node, target)
        elif of.op == "assemble":
            has_base, pieces = of.data
            args = list(of.args)
            if has_base:
                self._store_elements(args.pop(0), target, np.arange(of.size), False)
            for arg, piece in zip(args, pieces, strict=True):
                self._store_elements(arg, target, piece.target.places, piece.added)
        else:
            buffer = self.buffers.pop(node)
            self._store_elements(node, target, np.arange(of.size), False)
            self.buffers[node] = buffer

    def _store_elements(self, node: int, target: str, places: np.ndarray, added: bool) -> None:
        loop = LoopNest(self.graph[node].shape)
        lines, value = self.evaluate(node, loop)
        if self.graph[node].kind == "b":
            value = f"sel({value}, bc(F(1)), bc(F(0)))"
        index = write_index(loop, places, self.tables)
        sign = "+=" if added else "="
        self.nest(
            [*loop.heads(range(len(loop.shape))), "for (int b = 0; b < VECTORS; b++)"],
            [*lines, f"{target}[({index}) * BLOCKS + b] {sign} {value};"],
        )

    def _store_reduction(self, node: int, target: str) -> None:
        of = self.graph[node]
        op = of.op.removeprefix("reduce_")
        loop = LoopNest(self.graph[of.args[0]].shape)
        kept = of.data
        lines, value = self.evaluate(of.args[0], loop)
        outside = LoopNest(loop.shape[:kept])
        index = write_index(outside, np.arange(of.size), self.tables)
        inner = loop.heads(range(kept, len(loop.shape)))
        body = [*lines, f"total = {COMBINE[op].format('total', value)};"]
        self.nest(
            ["for (int b = 0; b < VECTORS; b++)", *outside.heads(range(kept))],
            [
                f"V total = {START[op]};",
                *indent(inner, body),
                f"{target}[({index}) * BLOCKS + b] = total;",
            ],
        )

    def _store_product(self, node: int, target: str) -> None:
        of = self.graph[node]
        lane_first = bool(self.graph[of.args[0]].depends & LANE)
        lane, fixed = of.args if lane_first else of.args[::-1]
        _, m, n = of.shape
        columns = self.graph[lane].shape[1]
        rows, inner = self.graph[fixed].shape[1:]
        matrix, (a0, ag, ar, ak) = self._find_strided(fixed)
        array, first = self.ahead.find(matrix)
        x, (x0, xg, xc, xk) = self._find_strided(lane)
        step, across = (1, n) if lane_first else (n, 1)
        loop = LoopNest((of.shape[0], columns))
        a = _write_sum(first + a0, (ag, 0), loop)
        place = _write_sum(x0, (xg, xc), loop)
        out = _write_sum(0, (m * n, across), loop)
        self.nest(
            loop.heads((0, 1)),
            [
                f"multiply({rows}, {inner}, {array} + {a}, {ar}, {ak}, "
                f"{self.buffers[x]} + ({place}) * BLOCKS, {xk}, "
                f"{target} + ({out}) * BLOCKS, {step});"
            ],
        )

    def _find_strided(self, node: int) -> tuple[int, tuple[int, ...]]:
        """Return an array, and offset and strides of the elements of a node in it."""
        operand = find_operand(self.graph, node)
        source, places = self.graph.trace_source(node)
        if operand != source or places is None:
            places = np.arange(self.graph[node].size)
        layout = find_strides(places, self.graph[node].shape)
        assert layout is not None
        return operand, (layout.offset, *layout.strides)

    # ---------------------------------------------------------------------------------------- sums

    def add_elements(self, node: int, first: int, target: str = "sums") -> None:
        """Write the loop that adds a node to sums per lane, from place `first` on."""
        of = self.graph[node]
        loop = LoopNest(of.shape)
        lines, value = self.evaluate(node, loop)
        index = write_index(loop, np.arange(of.size), self.tables)
        body = [
            "V total = V{};",
            *indent(["for (int b = 0; b < VECTORS; b++)"], [*lines, f"total += {value};"]),
            f"{target}[{first} + {index}] += total;",
        ]
        self.nest(loop.heads(range(len(of.shape))), body)

    def add_outer(self, outer: Outer, first: int, columns: int) -> None:
        """Write the call that adds products a bᵀ. columns: padded length of a row of the sums."""
        a, (a0, a1) = self._find_strided(outer.rows)
        b, (b0, b1) = self._find_strided(outer.columns)
        m = self.graph[outer.rows].size
        n = self.graph[outer.columns].size
        self.lines.append(
            f"add_outer({m}, {n}, {self.buffers[a]} + {a0} * BLOCKS, {a1}, "
            f"{self.buffers[b]} + {b0} * BLOCKS, {b1}, products + {first}, {columns}, scratch);"
        )

    def nest(self, heads: Sequence[str], body: Sequence[str]) -> None:
        """Write a loop nest."""
        self.lines.extend(indent(heads, ["{", *(f"  {line}" for line in body), "}"]))


def indent(heads: Sequence[str], body: Sequence[str]) -> list[str]:
    """Return a loop nest as lines."""
    lines = list(heads)
    braces = [] if body and body[0] == "{" else ["{", "}"]
    return [*lines, *braces[:1], *body, *braces[1:]]


def write_constant(value: Any, kind: str) -> str:
    """Return a constant in C++, for all lanes."""
    if kind == "b":
        return f"mask({int(value)})"
    if not math.isfinite(value):
        text = "NAN" if math.isnan(value) else ("INFINITY" if value > 0 else "-INFINITY")
        return f"bc(F({text}))"
    return f"bc(F({float(value)!r}))"
