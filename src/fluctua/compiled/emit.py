"""From a graph to straight-line C that compilers for CPUs and GPUs take alike.

The text knows the types F (a number), V (a number of each trajectory) and B (true or false for
each), the functions m_sin, m_exp, … of V, `sel` and `bc`; a prelude defines them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fluctua.compiled.events import Inner
from fluctua.compiled.graph import LEAVES, TIME, Graph
from fluctua.compiled.trace import Program
from fluctua.processes import jumps

INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "lt": "<",
    "le": "<=",
    "eq": "==",
    "ne": "!=",
    "and": "&",
    "or": "|",
    "xor": "^",
}

INPUTS = "const F *u, const F *w, const V *c, const V *x, const V *z"
"""Arguments of every generated function: shared numbers, those of the step, context, state,
normals.
"""

STEP = "const U *stream, unsigned n"
"""Arguments of a step that only events use."""

NATIVE = Path(__file__).parent / "native"


COMMON = ("inline.hpp", "polynomials.hpp", "philox.hpp")
"""Headers of native/common that kernels on the CPU and on GPUs begin with."""


def native(*names: str) -> str:
    """The texts of parts that are written by hand, one after the other.

    Headers name the parts they need, for compilers that find files; here the caller puts them in
    front.
    """
    texts = [(NATIVE / name).read_text(encoding="utf-8") for name in names]
    return re.sub(r'(?m)^#(pragma once|include ".*")\n', "", "\n".join(texts))


def common(*names: str) -> str:
    """The texts of headers that all kernels share."""
    return native(*(f"common/{name}" for name in names))


class Layout(NamedTuple):
    """Where a kernel finds its numbers.

    shared, timed: nodes that are the same for all trajectories, fixed in time and not; computed
    ahead. columns: nodes that JAX computes ahead for each trajectory, behind those of the context.
    normals: components of the noise that matter. scores, explicits, finals: parameters that have a
    score, an explicit term, one of the terminal reward.
    """

    shared: list[int]
    timed: list[int]
    columns: list[int]
    normals: list[int]
    scores: list[int]
    explicits: list[int]
    finals: list[int]


def laid_out(program: Program, more: Sequence[int] = ()) -> Layout:
    """The layout of a program: what is shared ends up outside of the loop over trajectories.
    more: other outputs.
    """
    graph = program.graph

    def zero(node):
        return graph.value(node) == 0.0

    scores = [p for p, node in enumerate(program.score) if not zero(node)]
    explicits = [p for p, node in enumerate(program.explicit) if not zero(node)]
    finals = [p for p, node in enumerate(program.final) if not zero(node)]
    outputs = [
        *program.x_next,
        program.running,
        program.paid,
        *program.score,
        *program.explicit,
        program.terminal,
    ]
    outputs += [*program.final, *more]
    if program.inner is not None:
        outputs += [*program.inner.x, program.inner.after, program.inner.over, *program.inner.score]

    def ahead(node):
        return graph.shared(node) or graph.ops[node] == "external"

    shared: list[int] = []
    timed: list[int] = []
    columns: list[int] = []
    normals: list[int] = []
    for node in graph.reachable(outputs, stop=ahead):
        if not graph.shared(node):
            if graph.ops[node] == "external":
                columns.append(node)
            elif graph.ops[node] == "z":
                normals.append(graph.args[node][0])
        elif graph.ops[node] != "const":
            (timed if graph.depends[node] & TIME else shared).append(node)
    return Layout(shared, timed, columns, normals, scores, explicits, finals)


def waves(program: Program) -> int:
    """How many sines and cosines a step computes for each trajectory."""
    graph = program.graph
    outputs = [*program.x_next, program.running, program.paid, *program.score, *program.explicit]
    return sum(
        graph.ops[node] in ("sin", "cos") for node in graph.reachable(outputs, stop=graph.shared)
    )


class _Writer:
    """Names of nodes, and the statements that make them."""

    def __init__(self, program: Program, layout: Layout):
        self.graph = program.graph
        self.program = program
        self.names: dict[int, str] = {}
        for k, node in enumerate(layout.shared):
            self.names[node] = f"u[{k}]"
        for k, node in enumerate(layout.timed):
            self.names[node] = f"w[{k}]"
        for k, node in enumerate(layout.columns):
            self.names[node] = f"c[{program.contexts + k}]"
        self.normal = {component: k for k, component in enumerate(layout.normals)}

    def statements(self, outputs: Sequence[int]) -> list[str]:
        """Everything that differs between trajectories, in order.

        Products that are used once go into their sum.
        """
        graph = self.graph
        nodes = [
            n
            for n in graph.reachable(outputs, stop=lambda n: n in self.names)
            if n not in self.names
        ]
        nodes = [n for n in nodes if graph.ops[n] != "const"]
        uses: dict[int, int] = {}
        for node in [*nodes]:
            for operand in graph.operands(node):
                uses[operand] = uses.get(operand, 0) + 1
        for node in outputs:
            uses[node] = uses.get(node, 0) + 2  # an output has a name of its own
        joined = {}  # reciprocals that one product uses: a quotient
        for node in nodes:
            if graph.ops[node] == "mul":
                for k, operand in enumerate(graph.args[node]):
                    once = uses[operand] == 1 and operand not in self.names
                    if (
                        once
                        and graph.ops[operand] == "div"
                        and graph.value(graph.args[operand][0]) == 1.0
                    ):
                        joined[node] = (graph.args[node][1 - k], graph.args[operand][1])
        below = {
            operand
            for node in joined
            for operand in graph.args[node]
            if graph.ops[operand] == "div"
        }
        names = dict(self.names)
        lines = []
        for node in nodes:
            op = graph.ops[node]
            args = graph.args[node]
            if op in LEAVES:
                array, k = {
                    "x": ("x", args[0]),
                    "context": ("c", args[0]),
                    "p": ("p", args[0]),
                }.get(op, ("z", 0))
                names[node] = f"{array}[{self.normal[args[0]] if op == 'z' else k}]"
                continue
            if node in joined:
                text = " / ".join(self.vector(a, names) for a in joined[node])
            elif node in below and uses[node] == 1:
                continue
            else:
                text = self.expression(node, names)
            if uses[node] == 1 and op in ("mul", "neg") and len(text) < 60:
                names[node] = f"({text})"
            else:
                names[node] = f"v{node}"
                lines.append(f"const {'B' if graph.boolean(node) else 'V'} v{node} = {text};")
        self.last = names
        return lines

    def name(self, node: int, names: dict[int, str]) -> str:
        """A node as an operand."""
        if node not in names:
            return literal(self.graph, node)
        if self.graph.shared(node) and self.graph.boolean(node):
            return f"mask({names[node]} != 0)"
        return names[node]

    def expression(self, node: int, names: dict[int, str]) -> str:
        """The text of one operation."""
        op = self.graph.ops[node]
        args = self.graph.args[node]
        if op in INFIX:
            return f"{self.name(args[0], names)} {INFIX[op]} {self.name(args[1], names)}"
        if op == "neg":
            return f"-{self.name(args[0], names)}"
        if op == "not":
            return f"~{self.name(args[0], names)}"
        if op == "select":
            choice, yes, no = args
            return (
                f"sel({self.name(choice, names)}, {self.vector(yes, names)}, "
                f"{self.vector(no, names)})"
            )
        return f"m_{op}({', '.join(self.vector(a, names) for a in args)})"

    def vector(self, node: int, names: dict[int, str]) -> str:
        """A node as an argument that must be of type V."""
        text = self.name(node, names)
        return f"bc({text})" if self.graph.shared(node) and not self.graph.boolean(node) else text


def literal(graph: Graph, node: int) -> str:
    """A constant as C writes it."""
    value = graph.value(node)
    assert value is not None
    if isinstance(value, bool):
        return f"mask({int(value)})"
    if np.isnan(value):
        return "F(NAN)"
    if np.isinf(value):
        return "F(INFINITY)" if value > 0 else "F(-INFINITY)"
    return f"F({value!r})"


def functions(program: Program, layout: Layout, *, scores: bool = True) -> str:
    """The functions step_rewards, step_weights and step_scores of one step of a trajectory, and
    those of its end.

    scores: without, the first of each alone.
    """
    reward: list[tuple[str, int | None, int]] = [
        ("y", k, node) for k, node in enumerate(program.x_next)
    ]
    reward += [("g", None, program.running), ("r", None, program.paid)]
    score = [*reward, *(("s", k, program.score[p]) for k, p in enumerate(layout.scores))]
    explicit = [*score, *(("e", k, program.explicit[p]) for k, p in enumerate(layout.explicits))]
    kinds = {
        "step_rewards": (reward, "yGR"),
        "step_weights": (score, "yGRs"),
        "step_scores": (explicit, "yGRse"),
    }
    texts = [] if program.inner is None else [_events(program, layout, program.inner, scores)]
    for name, (outputs, results) in (
        kinds.items() if scores else [("step_rewards", kinds["step_rewards"])]
    ):
        declared = ", ".join(f"V &{v.lower()}" if v.isupper() else f"V *{v}" for v in results)
        if program.inner is None:
            texts.append(function(program, layout, name, outputs, f"{declared}, {STEP}"))
            continue
        texts.append(
            function(program, layout, f"{name}_joined", outputs, f"const V *p, {declared}")
        )
        texts.append(
            f"INLINE void {name}({INPUTS}, {declared}, {STEP}) {{\n"
            "  V p[STATE + EVENT_SCORES];  // where the events lead, and their score\n"
            f"  events<{'false' if name == 'step_rewards' else 'true'}>(u, w, c, x, stream, n, "
            "p);\n"
            f"  {name}_joined(u, w, c, x, z, p, {', '.join(results.lower())});\n}}\n"
        )
    end: list[tuple[str, int | None, int]] = [("h", None, program.terminal)]
    texts.append(function(program, layout, "end_rewards", end, "V &h"))
    if scores:
        end += [("f", k, program.final[p]) for k, p in enumerate(layout.finals)]
        texts.append(function(program, layout, "end_scores", end, "V &h, V *f"))
    return "\n".join(texts)


def _events(program: Program, layout: Layout, inner: Inner, scores: bool) -> str:
    """The functions `event` and `event_scores`, and the loop that runs them."""
    next_one: list[tuple[str, int | None, int]] = [("y", k, node) for k, node in enumerate(inner.x)]
    next_one += [("after", None, inner.after), ("over", None, inner.over)]
    scored = [*next_one, *(("ds", k, inner.score[p]) for k, p in enumerate(inner.scores))]
    declared = "const V *p, V *y, V &after, B &over, V *ds"
    events = [function(program, layout, "event", next_one, declared)]
    if scores:
        events.append(function(program, layout, "event_scores", scored, declared))
    numbers = [
        f"#define EVENT_SCORES {len(inner.scores)}",
        f"#define MOST_EVENTS {jumps.MOST_EVENTS}",
    ]
    return "\n".join([*numbers, *events, native("events.hpp")])


def function(
    program: Program,
    layout: Layout,
    name: str,
    outputs: Sequence[tuple[str, int | None, int]],
    results: str,
) -> str:
    """One function of C. outputs: (array, place in it or None, node). results: its arguments
    behind the inputs.
    """
    writer = _Writer(program, layout)
    lines = writer.statements([node for _, _, node in outputs])
    notes = {"s": "score of", "e": "explicit term of", "d": "direct term of", "f": "last term of"}
    which = {"s": layout.scores, "e": layout.explicits, "d": layout.explicits, "f": layout.finals}
    for array, k, node in outputs:
        target = array if k is None else f"{array}[{k}]"
        note = (
            f"  // {notes[array]} {program.names[which[array][k]]}"
            if array in notes and k is not None
            else ""
        )
        lines.append(f"{target} = {writer.vector(node, writer.last)};{note}")
    body = "\n".join(f"  {line}" for line in lines)
    return f"INLINE void {name}({INPUTS}, {results}) {{\n{body}\n}}\n"


def definitions(program: Program, layout: Layout) -> str:
    """Sizes, the numbers that are computed ahead in words, and which component is where."""
    place = {component: k for k, component in enumerate(layout.normals)}

    def array(name, values):
        return f"constexpr int {name}[] = {{{', '.join(map(str, values)) or '0'}}};"

    sizes = {
        "STATE": program.state,
        "CONTEXT": program.contexts + len(layout.columns),
        "WIDTH": program.width,
        "PARAMETERS": len(program.names),
        "NORMALS": len(layout.normals),
        "SCORES": len(layout.scores),
        "EXPLICITS": len(layout.explicits),
        "FINALS": len(layout.finals),
        "SHARED": len(layout.shared),
        "TIMED": len(layout.timed),
    }
    notes = [f"//   u[{k}] = {in_words(program, node)}" for k, node in enumerate(layout.shared)]
    notes += [f"//   w[{k}] = {in_words(program, node)}" for k, node in enumerate(layout.timed)]
    return "\n".join(
        [
            *(f"#define {name} {value}" for name, value in sizes.items()),
            array("NORMAL_OF", layout.normals),
            array("PLACE_OF", [place.get(component, -1) for component in range(program.width)]),
            array("SCORE_OF", layout.scores),
            array("EXPLICIT_OF", layout.explicits),
            array("FINAL_OF", layout.finals),
            "// The same for all trajectories, and computed ahead:",
            *(notes or ["//   nothing"]),
        ]
    )


def in_words(program: Program, node: int, depth: int = 6) -> str:
    """A node that is computed ahead, with the user's names."""
    op = program.graph.ops[node]
    args = program.graph.args[node]
    if op == "const":
        return f"{args[0]:g}" if not isinstance(args[0], bool) else str(args[0]).lower()
    if op == "theta":
        own = args[0] - len(program.names)  # θ̃ comes behind θ
        return program.names[args[0]] if own < 0 else f"twin θ[{own}]"
    if op == "origin":
        return f"t[{args[0]}]"
    if op in LEAVES:
        return op if op in ("t", "dt") else f"{op}[{args[0]}]"
    if op == "external":
        return f"JAX {args[0]}[{args[2]}]"
    if depth == 0:
        return "…"
    words = [in_words(program, a, depth - 1) for a in args]
    if op in INFIX:
        return f"({words[0]} {INFIX[op]} {words[1]})"
    return f"{op}({', '.join(words)})"


class _Plain(_Writer):
    """Names of nodes where all numbers are scalars."""

    def name(self, node: int, names: dict[int, str]) -> str:
        return names[node] if node in names else literal(self.graph, node)

    vector = name


def numbers_ahead(program: Program, layout: Layout) -> str:
    """What is computed ahead of the steps as functions of one thread of a GPU; nothing where
    JAX has a part in it.
    """
    graph = program.graph
    writer = _Plain(program, layout)
    if layout.columns or any(
        graph.ops[node] == "external" for node in graph.reachable([*layout.shared, *layout.timed])
    ):
        return ""

    def body(outputs: Sequence[int]) -> str:
        names: dict[int, str] = {}
        lines = []
        for node in graph.reachable(outputs):
            op = graph.ops[node]
            args = graph.args[node]
            if op in LEAVES:
                names[node] = op if op in ("t", "dt") else f"F({op}[{args[0]}])"
            elif op != "const":
                names[node] = f"v{node}"
                lines.append(
                    f"const {'B' if graph.boolean(node) else 'V'} v{node} = "
                    f"{writer.expression(node, names)};"
                )
        for k, node in enumerate(outputs):
            text = writer.name(node, names)
            lines.append(
                f"put(to + {k}, {f'sel({text}, 1.0, 0.0)' if graph.boolean(node) else text}, "
                "flags);"
            )
        return "\n".join(f"    {line}" for line in lines)

    inputs = "const THETA* theta, const double* origin, double t, double dt, REAL* to, int* flags"
    return "\n".join(
        [
            f"static __device__ void shared({inputs}) {{\n{body(layout.shared)}\n  }}",
            f"static __device__ void timed({inputs}) {{\n{body(layout.timed)}\n  }}",
        ]
    )
