"""Text of a kernel: a graph as straight-line C that compilers for CPUs and GPUs accept.

The text uses the types F (a number), V (a number per trajectory) and B (true or false per
trajectory), the functions m_sin, m_exp, … of V, `sel` and `bc`; a prelude defines them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fluctua.compiled.events import EventProgram
from fluctua.compiled.graph import LEAVES, TIME, Graph
from fluctua.compiled.toolchain import read_native
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
"""Arguments of every generated function: shared numbers, numbers of the step, context, state and
normals."""

STEP = "const U *stream, unsigned n"
"""Arguments of a step that only events use."""


class Layout(NamedTuple):
    """Places of the numbers of a kernel.

    shared: nodes computed ahead that are the same for all trajectories and steps.
    timed: nodes computed ahead that are the same for all trajectories, per step.
    columns: nodes that JAX computes ahead per trajectory, stored after the context.
    normals: components of the noise that the step uses.
    scores: parameters whose score is not zero.
    explicits: parameters with an explicit term.
    terminal_explicits: parameters with an explicit term of the terminal reward.
    survival_slopes: parameters that move the probability of a stop.
    """

    shared: list[int]
    timed: list[int]
    columns: list[int]
    normals: list[int]
    scores: list[int]
    explicits: list[int]
    terminal_explicits: list[int]
    survival_slopes: list[int]


def make_layout(program: Program, more: Sequence[int] = ()) -> Layout:
    """Return the layout of a program: shared nodes go outside the loop over trajectories.

    more: outputs besides those of the program.
    """
    graph = program.graph

    def find_nonzero(nodes: Sequence[int]) -> list[int]:
        return [p for p, node in enumerate(nodes) if graph.value(node) != 0.0]

    scores = find_nonzero(program.score)
    explicits = find_nonzero(program.explicit)
    terminal_explicits = find_nonzero(program.terminal_explicit)
    outputs = [
        *program.x_next,
        program.running,
        program.step_reward,
        *program.score,
        *program.explicit,
        program.terminal,
    ]
    survival_slopes = find_nonzero(program.survival_slope)
    outputs += [*program.terminal_explicit, *program.survival_slope, *more]
    if program.event is not None:
        outputs += [*program.event.x, program.event.after, program.event.over, *program.event.score]

    def is_ahead(node):
        return graph.is_shared(node) or graph.ops[node] == "external"

    shared: list[int] = []
    timed: list[int] = []
    columns: list[int] = []
    normals: list[int] = []
    for node in graph.find_reachable(outputs, stop=is_ahead):
        if not graph.is_shared(node):
            if graph.ops[node] == "external":
                columns.append(node)
            elif graph.ops[node] == "z":
                normals.append(graph.args[node][0])
        elif graph.ops[node] != "const":
            (timed if graph.depends[node] & TIME else shared).append(node)
    return Layout(
        shared, timed, columns, normals, scores, explicits, terminal_explicits, survival_slopes
    )


def count_waves(program: Program) -> int:
    """Return the number of sines and cosines that a step computes per trajectory."""
    graph = program.graph
    outputs = [
        *program.x_next,
        program.running,
        program.step_reward,
        *program.score,
        *program.explicit,
    ]
    return sum(
        graph.ops[node] in ("sin", "cos")
        for node in graph.find_reachable(outputs, stop=graph.is_shared)
    )


class _Writer:
    """Writes nodes of a graph as statements of C."""

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
        """Return the statements of all nodes that differ between trajectories, in order.

        A product that is used once is written inside its sum.
        """
        graph = self.graph
        nodes = [
            n
            for n in graph.find_reachable(outputs, stop=lambda n: n in self.names)
            if n not in self.names
        ]
        nodes = [n for n in nodes if graph.ops[n] != "const"]
        uses: dict[int, int] = {}
        for node in nodes:
            for operand in graph.operands(node):
                uses[operand] = uses.get(operand, 0) + 1
        for node in outputs:
            uses[node] = uses.get(node, 0) + 2  # an output has a name of its own
        quotients = {}  # products with a reciprocal that nothing else uses
        for node in nodes:
            if graph.ops[node] == "mul":
                for k, operand in enumerate(graph.args[node]):
                    once = uses[operand] == 1 and operand not in self.names
                    if (
                        once
                        and graph.ops[operand] == "div"
                        and graph.value(graph.args[operand][0]) == 1.0
                    ):
                        quotients[node] = (graph.args[node][1 - k], graph.args[operand][1])
        reciprocals = {
            operand
            for node in quotients
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
            if node in quotients:
                text = " / ".join(self.vector(a, names) for a in quotients[node])
            elif node in reciprocals and uses[node] == 1:
                continue
            else:
                text = self.expression(node, names)
            if uses[node] == 1 and op in ("mul", "neg") and len(text) < 60:
                names[node] = f"({text})"
            else:
                names[node] = f"v{node}"
                lines.append(f"const {'B' if graph.is_boolean(node) else 'V'} v{node} = {text};")
        self.last = names
        return lines

    def name(self, node: int, names: dict[int, str]) -> str:
        """Return a node as an operand."""
        if node not in names:
            return write_literal(self.graph, node)
        if self.graph.is_shared(node) and self.graph.is_boolean(node):
            return f"mask({names[node]} != 0)"
        return names[node]

    def expression(self, node: int, names: dict[int, str]) -> str:
        """Return the text of one operation."""
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
        """Return a node as an argument of type V."""
        text = self.name(node, names)
        return (
            f"bc({text})"
            if self.graph.is_shared(node) and not self.graph.is_boolean(node)
            else text
        )


def write_literal(graph: Graph, node: int) -> str:
    """Return a constant in C."""
    value = graph.value(node)
    assert value is not None
    if isinstance(value, bool):
        return f"mask({int(value)})"
    if np.isnan(value):
        return "F(NAN)"
    if np.isinf(value):
        return "F(INFINITY)" if value > 0 else "F(-INFINITY)"
    return f"F({value!r})"


def write_functions(program: Program, layout: Layout, *, scores: bool = True) -> str:
    """Return the text of step_rewards, step_weights, step_scores, end_rewards and end_scores.

    scores: False for step_rewards and end_rewards alone.
    """
    reward: list[tuple[str, int | None, int]] = [
        ("y", k, node) for k, node in enumerate(program.x_next)
    ]
    reward += [("g", None, program.running), ("r", None, program.step_reward)]
    score = [*reward, *(("s", k, program.score[p]) for k, p in enumerate(layout.scores))]
    explicit = [*score, *(("e", k, program.explicit[p]) for k, p in enumerate(layout.explicits))]
    slopes = enumerate(layout.survival_slopes)
    explicit += [("q", k, program.survival_slope[p]) for k, p in slopes]
    kinds = {
        "step_rewards": (reward, "yGR"),
        "step_weights": (score, "yGRs"),
        "step_scores": (explicit, "yGRseq"),
    }
    texts = [] if program.event is None else [_write_events(program, layout, program.event, scores)]
    for name, (outputs, results) in (
        kinds.items() if scores else [("step_rewards", kinds["step_rewards"])]
    ):
        declared = ", ".join(f"V &{v.lower()}" if v.isupper() else f"V *{v}" for v in results)
        if program.event is None:
            texts.append(write_function(program, layout, name, outputs, f"{declared}, {STEP}"))
            continue
        scored = name != "step_rewards" or program.event.carries
        texts.append(
            write_function(program, layout, f"{name}_joined", outputs, f"const V *p, {declared}")
        )
        texts.append(
            f"INLINE void {name}({INPUTS}, {declared}, {STEP}) {{\n"
            "  V p[STATE + EVENT_SCORES];  // where the events lead, and their score\n"
            f"  events<{'true' if scored else 'false'}>(u, w, c, x, stream, n, p);\n"
            f"  {name}_joined(u, w, c, x, z, p, {', '.join(results.lower())});\n}}\n"
        )
    end: list[tuple[str, int | None, int]] = [("h", None, program.terminal)]
    texts.append(write_function(program, layout, "end_rewards", end, "V &h"))
    if scores:
        end += [
            ("f", k, program.terminal_explicit[p]) for k, p in enumerate(layout.terminal_explicits)
        ]
        texts.append(write_function(program, layout, "end_scores", end, "V &h, V *f"))
    return "\n".join(texts)


def _write_events(program: Program, layout: Layout, event: EventProgram, scores: bool) -> str:
    """Return the text of `event` and `event_scores`, and of the loop that runs them."""
    next_one: list[tuple[str, int | None, int]] = [("y", k, node) for k, node in enumerate(event.x)]
    next_one += [("after", None, event.after), ("over", None, event.over)]
    scored = [*next_one, *(("ds", k, event.score[p]) for k, p in enumerate(event.scores))]
    declared = "const V *p, V *y, V &after, B &over, V *ds"
    events = [write_function(program, layout, "event", next_one, declared)]
    if scores or event.carries:
        events.append(write_function(program, layout, "event_scores", scored, declared))
    numbers = [
        f"#define EVENT_SCORES {len(event.scores)}",
        f"#define EVENT_CARRIES {int(event.carries)}",
        f"#define MAX_EVENTS {jumps.MAX_EVENTS}",
    ]
    return "\n".join([*numbers, *events, read_native("events.hpp")])


def write_function(
    program: Program,
    layout: Layout,
    name: str,
    outputs: Sequence[tuple[str, int | None, int]],
    results: str,
) -> str:
    """Return the text of one function of C.

    outputs: (array, index in it or None, node). results: arguments after `INPUTS`.
    """
    writer = _Writer(program, layout)
    lines = writer.statements([node for _, _, node in outputs])
    notes = {
        "s": "score of",
        "e": "explicit term of",
        "q": "slope of the survival by",
        "d": "direct term of",
        "f": "last term of",
    }
    which = {
        "q": layout.survival_slopes,
        "s": layout.scores,
        "e": layout.explicits,
        "d": layout.explicits,
        "f": layout.terminal_explicits,
    }
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


def write_definitions(program: Program, layout: Layout) -> str:
    """Return the text of sizes, places of components, and comments on numbers computed ahead."""
    place = {component: k for k, component in enumerate(layout.normals)}

    def array(name, values):
        return f"constexpr int {name}[] = {{{', '.join(map(str, values)) or '0'}}};"

    sizes = {
        "STATE": program.state,
        "STOPS": int(program.stops),
        "CONTEXT": program.contexts + len(layout.columns),
        "WIDTH": program.width,
        "PARAMETERS": len(program.names),
        "NORMALS": len(layout.normals),
        "SCORES": len(layout.scores),
        "EXPLICITS": len(layout.explicits),
        "FINALS": len(layout.terminal_explicits),
        "SLOPES": len(layout.survival_slopes),
        "SHARED": len(layout.shared),
        "TIMED": len(layout.timed),
    }
    notes = [
        f"//   u[{k}] = {describe_node(program, node)}" for k, node in enumerate(layout.shared)
    ]
    notes += [
        f"//   w[{k}] = {describe_node(program, node)}" for k, node in enumerate(layout.timed)
    ]
    return "\n".join(
        [
            *(f"#define {name} {value}" for name, value in sizes.items()),
            array("NORMAL_OF", layout.normals),
            array("PLACE_OF", [place.get(component, -1) for component in range(program.width)]),
            array("SCORE_OF", layout.scores),
            array("EXPLICIT_OF", layout.explicits),
            array("FINAL_OF", layout.terminal_explicits),
            array("SLOPE_OF", layout.survival_slopes),
            "// The same for all trajectories, and computed ahead:",
            *(notes or ["//   nothing"]),
        ]
    )


def describe_node(program: Program, node: int, depth: int = 6) -> str:
    """Return the formula of a node, with the user's names of parameters."""
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
    words = [describe_node(program, a, depth - 1) for a in args]
    if op in INFIX:
        return f"({words[0]} {INFIX[op]} {words[1]})"
    return f"{op}({', '.join(words)})"


class _ScalarWriter(_Writer):
    """Writes nodes as statements where all numbers are scalars."""

    def name(self, node: int, names: dict[int, str]) -> str:
        return names[node] if node in names else write_literal(self.graph, node)

    vector = name


def write_numbers_ahead(program: Program, layout: Layout) -> str:
    """Return the text that computes shared numbers on a GPU; "" if JAX computes some of them."""
    graph = program.graph
    writer = _ScalarWriter(program, layout)
    if layout.columns or any(
        graph.ops[node] == "external"
        for node in graph.find_reachable([*layout.shared, *layout.timed])
    ):
        return ""

    def write_body(outputs: Sequence[int]) -> str:
        names: dict[int, str] = {}
        lines = []
        for node in graph.find_reachable(outputs):
            op = graph.ops[node]
            args = graph.args[node]
            if op in LEAVES:
                names[node] = op if op in ("t", "dt") else f"F({op}[{args[0]}])"
            elif op != "const":
                names[node] = f"v{node}"
                lines.append(
                    f"const {'B' if graph.is_boolean(node) else 'V'} v{node} = "
                    f"{writer.expression(node, names)};"
                )
        for k, node in enumerate(outputs):
            text = writer.name(node, names)
            lines.append(
                f"put(to + {k}, {f'sel({text}, 1.0, 0.0)' if graph.is_boolean(node) else text}, "
                "flags);"
            )
        return "\n".join(f"    {line}" for line in lines)

    inputs = "const THETA* theta, const double* origin, double t, double dt, REAL* to, int* flags"
    return "\n".join(
        [
            f"static __device__ void shared({inputs}) {{\n{write_body(layout.shared)}\n  }}",
            f"static __device__ void timed({inputs}) {{\n{write_body(layout.timed)}\n  }}",
        ]
    )
