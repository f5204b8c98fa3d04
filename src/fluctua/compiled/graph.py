"""Scalar expressions as a graph of nodes, one per number; equal expressions share a node.

Constants are folded, and rewriting keeps values to rounding. Factors and divisors that are the same
for all trajectories move together, so that they are computed once per step and not once per
trajectory; signs move outwards, so that sin(a − b) and sin(b − a) share a node. The sign of a zero
is kept where atan2 looks at a difference, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy

THETA = 1
TIME = 2
CONTEXT = 4
STATE = 8
NOISE = 16
"""What a node depends on, as bits."""

LANE = CONTEXT | STATE | NOISE
"""Nodes with one of these bits differ between trajectories; the others are shared."""

LEAVES = {
    "theta": THETA,
    "t": TIME,
    "dt": TIME,
    "origin": THETA,
    "context": CONTEXT,
    "x": STATE,
    "z": NOISE,
    "p": STATE,
    "table": TIME,
    "last": THETA,
}
"""Kinds of inputs, and the bits they set.

origin: the first two times and the last. p: numbers that a sweep carries, such as a twin's slope.
table, last: numbers that are computed before the trajectories, of each step and of the end.
"""

BOOLEAN = frozenset({"lt", "le", "eq", "ne", "and", "or", "xor", "not", "isfinite"})
ODD = frozenset(
    {
        "sin",
        "tan",
        "asin",
        "atan",
        "sinh",
        "tanh",
        "asinh",
        "atanh",
        "erf",
        "erf_inv",
        "cbrt",
        "sign",
    }
)
EVEN = frozenset({"cos", "cosh", "abs"})


def _ignore_errors(function: Callable) -> Callable:
    def called(*arguments: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*arguments)

    return called


def _round_away(x: Any) -> Any:
    return np.sign(x) * np.floor(np.abs(x) + 0.5)


def _use_special(name: str) -> Callable:
    """A function of `scipy.special`, which is imported when the function is first called."""
    return lambda *arguments: getattr(scipy.special, name)(*arguments)


PLAIN: dict[str, Any] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "abs": np.abs,
    "max": np.maximum,
    "min": np.minimum,
    "sqrt": np.sqrt,
    "cbrt": np.cbrt,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "tanh": np.tanh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "erf": _use_special("erf"),
    "erfc": _use_special("erfc"),
    "erf_inv": _use_special("erfinv"),
    "lgamma": _use_special("gammaln"),
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "round_even": np.rint,
    "round_away": _round_away,
    "sign": np.sign,
    "pow": np.power,
    "atan2": np.arctan2,
    "rem": np.fmod,
    "lt": np.less,
    "le": np.less_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
    "not": np.logical_not,
    "isfinite": np.isfinite,
    "select": lambda choice, yes, no: np.where(choice, yes, no),
}
"""Operations other than leaves and externals, by NumPy."""

NUMPY: dict[str, Callable] = {name: _ignore_errors(function) for name, function in PLAIN.items()}
"""The same without warnings."""


class External(NamedTuple):
    """An operation that JAX computes ahead: its inputs are the same for all steps or trajectories.

    call: arrays -> tuple of arrays.
    inputs: (identities, dtype) of each array.
    depends: bits of what the inputs depend on.
    """

    call: Callable[..., Sequence[Any]]
    inputs: tuple[tuple[np.ndarray, np.dtype], ...]
    depends: int


class Graph:
    """Nodes in the order in which they were added: operands precede results."""

    def __init__(self) -> None:
        self.ops: list[str] = []
        self.args: list[tuple] = []
        self.depends: list[int] = []
        self.externals: list[External] = []
        self._known: dict[tuple, int] = {}
        self._sums: set[int] = set()
        # of `evaluate`, which kernels on the CPU ask at every call
        self._orders: dict[tuple[int, ...], list[int]] = {}

    def __len__(self) -> int:
        return len(self.ops)

    # --------------------------------------------------------------------------------- making nodes

    def const(self, value: float | bool) -> int:
        """Return the node of a constant. A boolean is not the number of the same value."""
        value = bool(value) if isinstance(value, bool | np.bool_) else float(value)
        return self._find_or_add("const", (value,), 0, key=("const", type(value), repr(value)))

    def leaf(self, kind: str, index: int = 0) -> int:
        """Return the node of an input."""
        return self._find_or_add(kind, (index,), LEAVES[kind])

    def add_external(self, call: External) -> int:
        """Add an operation of JAX; its results are `result` nodes."""
        self.externals.append(call)
        return len(self.externals) - 1

    def result(self, external: int, output: int, position: int) -> int:
        """Return the node of one element of an array that JAX computes ahead."""
        return self._find_or_add(
            "external", (external, output, position), self.externals[external].depends
        )

    def mark_sum(self, total: int, part: int) -> None:
        """Mark a new state `total` as the sum of `part` and a step, and the step as a sum.

        The residual of the step is then the kick itself, without the rounding of the state. Only
        for states: in a user's expression the rounding of a difference of sums may be intended.
        """
        self._sums.add(total)
        if self.ops[total] in ("add", "sub"):
            self._sums |= {a for a in self.args[total] if a != part}

    def _subtract_part(self, total: int, part: int) -> int | None:
        """Return total − part if `total` is a marked sum with `part` in it; else None."""
        if total not in self._sums or self.ops[total] not in ("add", "sub"):
            return None
        a, b = self.args[total]
        if self.ops[total] == "add":
            return b if part == a else a if part == b else None
        return self.make("neg", b) if part == a else None

    def make_complex(self, re: int, im: int) -> int:
        """Return a complex number: a node that no program computes, only its two parts."""
        return self._add_node("complex", re, im)

    def split_complex(self, node: int) -> tuple[int, int]:
        """Return real and imaginary part of a node."""
        return self.args[node] if self.ops[node] == "complex" else (node, self.const(0.0))

    def _apply_complex(self, op: str, *args: int) -> int:
        """Return the node of op(args) for complex numbers."""
        make = self.make
        pairs = [self.split_complex(a) for a in args]
        if op in ("add", "sub", "neg"):
            return self.make_complex(*(make(op, *parts) for parts in zip(*pairs, strict=True)))
        if op == "select":
            return self.make_complex(
                *(make(op, args[0], yes, no) for yes, no in zip(*pairs[1:], strict=True))
            )
        (a, b) = pairs[0]
        (c, d) = pairs[-1]
        if op == "mul":
            return self.make_complex(
                make("sub", make("mul", a, c), make("mul", b, d)),
                make("add", make("mul", a, d), make("mul", b, c)),
            )
        if op == "div":
            size = make("add", make("mul", c, c), make("mul", d, d))
            re, im = self.split_complex(
                self._apply_complex("mul", args[0], self.make_complex(c, make("neg", d)))
            )
            return self.make_complex(make("div", re, size), make("div", im, size))
        if op == "abs":
            return make("sqrt", make("add", make("mul", a, a), make("mul", b, b)))
        if op == "exp":
            size = make("exp", a)
            return self.make_complex(
                make("mul", size, make("cos", b)), make("mul", size, make("sin", b))
            )
        if op in ("eq", "ne"):
            return make("and" if op == "eq" else "or", make(op, a, c), make(op, b, d))
        raise NotImplementedError(op)

    def make(self, op: str, *args: int) -> int:
        """Return the node of op(args), simplified."""
        if any(self.ops[a] == "complex" for a in args):
            return self._apply_complex(op, *args)
        if all(self.ops[a] == "const" for a in args):
            return self.const(NUMPY[op](*(self.args[a][0] for a in args))[()])
        simplified = getattr(self, f"_{op}", None)
        if simplified is not None:
            return simplified(*args)
        if op in ODD and self.ops[args[0]] == "neg":
            return self.make("neg", self.make(op, *self.args[args[0]]))
        if op in EVEN and self.ops[args[0]] == "neg":
            return self.make(op, *self.args[args[0]])
        return self._add_node(op, *args)

    def _add_node(self, op: str, *args: int) -> int:
        depends = 0
        for a in args:
            depends |= self.depends[a]
        return self._find_or_add(op, args, depends)

    def _find_or_add(self, op: str, args: tuple, depends: int, key: tuple | None = None) -> int:
        key = key or (op, *args)
        node = self._known.get(key)
        if node is None:
            node = self._known[key] = len(self.ops)
            self.ops.append(op)
            self.args.append(args)
            self.depends.append(depends)
        return node

    # ----------------------------------------------------------------------------- looking at nodes

    def value(self, node: int) -> float | bool | None:
        """Return the value of a constant; None for another node."""
        return self.args[node][0] if self.ops[node] == "const" else None

    def is_shared(self, node: int) -> bool:
        """Whether the node is the same for all trajectories."""
        return not self.depends[node] & LANE

    def is_boolean(self, node: int) -> bool:
        """Whether the node is true or false and not a number."""
        if self.ops[node] == "select":
            return self.is_boolean(self.args[node][1])
        return self.ops[node] in BOOLEAN or isinstance(self.value(node), bool)

    # ---------------------------------------------------------------------------------- simplifying

    def _is_constant(self, node: int, value: float) -> bool:
        return self.ops[node] == "const" and self.args[node][0] == value

    def _add(self, a: int, b: int) -> int:
        if self._is_constant(a, 0.0):
            return b
        if self._is_constant(b, 0.0):
            return a
        if self.ops[b] == "neg":
            return self.make("sub", a, *self.args[b])
        if self.ops[a] == "neg":
            return self.make("sub", b, *self.args[a])
        for total, part in ((a, b), (b, a)):
            if total in self._sums and self.ops[total] == "sub" and self.args[total][1] == part:
                return self.args[total][0]
        return self._add_node("add", min(a, b), max(a, b))

    def _sub(self, a: int, b: int) -> int:
        if a == b:
            return self.const(0.0)
        if self._is_constant(a, 0.0):
            return self.make("neg", b)
        if self._is_constant(b, 0.0):
            return a
        rest = self._subtract_part(a, b)
        if rest is not None:
            return rest
        if self.ops[b] == "neg":
            return self.make("add", a, *self.args[b])
        if self.ops[a] == "neg":
            return self.make("neg", self.make("add", *self.args[a], b))
        if a > b:
            return self._neg(self._add_node("sub", b, a))
        return self._add_node("sub", a, b)

    def _atan2(self, y: int, x: int) -> int:
        return self._add_node("atan2", self._unshare(y), self._unshare(x))

    def _unshare(self, node: int) -> int:
        """Return a − b where the node is −(b − a), whose zero has the other sign."""
        inner = self.args[node][0] if self.ops[node] == "neg" else node
        if inner == node or self.ops[inner] != "sub":
            return node
        b, a = self.args[inner]
        return self._add_node("sub", a, b)

    def _neg(self, a: int) -> int:
        if self.ops[a] == "neg":
            return self.args[a][0]
        if self.ops[a] == "mul":
            factor, rest = self.args[a]
            if self.ops[factor] == "const" or (self.is_shared(factor) and not self.is_shared(rest)):
                return self._mul(self.make("neg", factor), rest)
        return self._add_node("neg", a)

    def _mul(self, a: int, b: int) -> int:
        if (self.is_shared(b) and not self.is_shared(a)) or self.ops[b] == "const":
            return self._mul_ordered(b, a)  # constants first, then shared factors
        return self._mul_ordered(a, b)

    def _mul_ordered(self, a: int, b: int) -> int:
        """Return a·b; a is the shared or constant factor if there is one."""
        if self._is_constant(a, 0.0):
            return a
        if self._is_constant(a, 1.0):
            return b
        if self._is_constant(a, -1.0):
            return self.make("neg", b)
        if self.ops[b] == "neg":
            return self.make("neg", self.make("mul", a, *self.args[b]))
        if self.ops[a] == "neg" and not (self.is_shared(a) and not self.is_shared(b)):
            return self.make("neg", self.make("mul", *self.args[a], b))
        if self.ops[b] == "mul" and self.is_shared(self.args[b][0]) and not self.is_shared(b):
            factor, rest = self.args[b]
            if self.is_shared(a):
                return self.make("mul", self.make("mul", a, factor), rest)
            return self.make("mul", factor, self.make("mul", a, rest))
        if self.ops[a] == "mul" and not self.is_shared(a) and self.is_shared(self.args[a][0]):
            factor, rest = self.args[a]
            return self.make("mul", factor, self.make("mul", rest, b))
        if self.is_shared(a) == self.is_shared(b) and self.ops[a] != "const":
            return self._add_node("mul", min(a, b), max(a, b))
        return self._add_node("mul", a, b)

    def _div(self, a: int, b: int) -> int:
        if self._is_constant(a, 0.0):
            return a
        value = self.value(b)
        if value == 1.0:
            return a
        if value and math.isfinite(1.0 / value):
            return self.make("mul", self.const(1.0 / value), a)
        if self.ops[b] == "neg":
            return self.make("neg", self.make("div", a, *self.args[b]))
        if self._is_constant(a, 1.0):
            return self._add_node("div", a, b)
        return self.make("mul", a, self.make("div", self.const(1.0), b))

    def _select(self, choice: int, yes: int, no: int) -> int:
        known = self.value(choice)
        if yes == no or known is True:
            return yes
        if known is False:
            return no
        if self.ops[choice] == "not":
            return self.make("select", *self.args[choice], no, yes)
        if self.is_boolean(yes):  # not all compilers have `?:` for masks
            both = self.make("and", choice, yes)
            return self.make("or", both, self.make("and", self.make("not", choice), no))
        return self._add_node("select", choice, yes, no)

    def _and(self, a: int, b: int) -> int:
        if a == b or self.value(b) is True:
            return a
        if self.value(a) is True:
            return b
        if self.value(a) is False or self.value(b) is False:
            return self.const(False)
        return self._add_node("and", min(a, b), max(a, b))

    def _or(self, a: int, b: int) -> int:
        if a == b or self.value(b) is False:
            return a
        if self.value(a) is False:
            return b
        if self.value(a) is True or self.value(b) is True:
            return self.const(True)
        return self._add_node("or", min(a, b), max(a, b))

    def _not(self, a: int) -> int:
        return self.args[a][0] if self.ops[a] == "not" else self._add_node("not", a)

    def _max(self, a: int, b: int) -> int:
        return a if a == b else self._add_node("max", *self._shared_first(a, b))

    def _min(self, a: int, b: int) -> int:
        return a if a == b else self._add_node("min", *self._shared_first(a, b))

    def _shared_first(self, a: int, b: int) -> tuple[int, int]:
        return (b, a) if self.is_shared(b) and not self.is_shared(a) else (a, b)

    def power(self, base: int, exponent: int) -> int:
        """Return base to an integer power, by squaring."""
        if exponent < 0:
            return self.make("div", self.const(1.0), self.power(base, -exponent))
        if exponent == 0:
            return self.const(1.0)
        half = self.power(base, exponent // 2)
        square = self.make("mul", half, half)
        return self.make("mul", square, base) if exponent % 2 else square

    # -------------------------------------------------------------------------------------- walking

    def find_reachable(
        self, outputs: Iterable[int], stop: Callable[[int], bool] = lambda node: False
    ) -> list[int]:
        """Return all nodes that outputs depend on, in order. stop: nodes to go no further from."""
        seen: set[int] = set()
        waiting = list(outputs)
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if not stop(node):
                waiting += self.operands(node)
        return sorted(seen)

    def operands(self, node: int) -> list[int]:
        """Return the operands of a node."""
        op = self.ops[node]
        if op == "const" or op in LEAVES:
            return []
        if op == "external":
            inputs = self.externals[self.args[node][0]].inputs
            return [int(i) for ids, _ in inputs for i in ids.ravel()]
        return list(self.args[node])

    def evaluate(self, outputs: Sequence[int], leaf: Callable[[str, int], Any]) -> list[Any]:
        """Return values of nodes by NumPy.

        leaf: (kind, index) -> a number, or an array along steps or trajectories.
        """
        with np.errstate(all="ignore"):
            return self._evaluate(outputs, leaf)

    def _evaluate(self, outputs: Sequence[int], leaf: Callable[[str, int], Any]) -> list[Any]:
        values: dict[int, Any] = {}
        results: dict[int, Sequence[Any]] = {}
        if (wanted := tuple(outputs)) not in self._orders:
            self._orders[wanted] = self.find_reachable(wanted)
        for node in self._orders[wanted]:
            op = self.ops[node]
            args = self.args[node]
            if op == "const":
                values[node] = args[0]
            elif op in LEAVES:
                values[node] = leaf(op, *args)
            elif op == "external":
                which, output, position = args
                if which not in results:
                    results[which] = _call_external(self.externals[which], values)
                values[node] = results[which][output][..., position]
            else:
                values[node] = PLAIN[op](*[values[a] for a in args])
        return [values[node] for node in outputs]


def _call_external(external: External, values: dict[int, Any]) -> list[np.ndarray]:
    """Return the results of an external, with a row per step or trajectory of its inputs."""
    rows = [[np.asarray(values[int(i)]) for i in ids.ravel()] for ids, _ in external.inputs]
    lengths = {len(v) for row in rows for v in row if v.ndim}
    count = lengths.pop() if lengths else None
    arrays = []
    for row, (ids, dtype) in zip(rows, external.inputs, strict=True):
        if count is None:
            arrays.append(np.array(row, dtype).reshape(ids.shape))
        else:
            columns = np.empty((count, 0))
            if row:
                columns = np.stack([np.broadcast_to(v, count) for v in row], axis=1)
            arrays.append(columns.astype(dtype).reshape(count, *ids.shape))
    outputs = external.call(*arrays, many=count is not None)
    return [np.asarray(v).reshape(*(() if count is None else (count,)), -1) for v in outputs]
