"""Scalar expressions as a graph: one node a number, equal expressions are one node, constants are
folded.

Rewriting keeps values to rounding. Factors and divisors that are the same for all trajectories move
together, so that they are computed once a step and not once a trajectory; signs move outwards, so
that sin(a − b) and sin(b − a) are one node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import special

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
}
"""Inputs. origin: the first two times. p: slope of a twin's guess and other numbers that a sweep
carries.
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


def _quiet(function: Callable) -> Callable:
    def called(*arguments: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*arguments)

    return called


def _round_away(x: Any) -> Any:
    return np.sign(x) * np.floor(np.abs(x) + 0.5)


NUMPY: dict[str, Callable] = {
    name: _quiet(function)
    for name, function in {
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
        "erf": special.erf,
        "erfc": special.erfc,
        "erf_inv": special.erfinv,
        "lgamma": special.gammaln,
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
    }.items()
}
"""Every operation but leaves and externals, as NumPy computes it."""


class External(NamedTuple):
    """An operation that JAX computes ahead: what it depends on is the same for all steps, or for
    all trajectories.

    call: arrays -> tuple of arrays. inputs: (identities, dtype) of each. depends: bits.
    """

    call: Callable[..., Sequence[Any]]
    inputs: tuple[tuple[np.ndarray, np.dtype], ...]
    depends: int


class Graph:
    """Nodes in the order of their making: arguments precede what is made of them."""

    def __init__(self) -> None:
        self.ops: list[str] = []
        self.args: list[tuple] = []
        self.depends: list[int] = []
        self.externals: list[External] = []
        self._known: dict[tuple, int] = {}
        self._sums: set[int] = set()

    def __len__(self) -> int:
        return len(self.ops)

    # --------------------------------------------------------------------------------- making nodes

    def const(self, value: float | bool) -> int:
        """A number. Booleans are numbers of their own."""
        value = bool(value) if isinstance(value, bool | np.bool_) else float(value)
        return self._node("const", (value,), 0, key=("const", type(value), repr(value)))

    def leaf(self, kind: str, index: int = 0) -> int:
        """An input."""
        return self._node(kind, (index,), LEAVES[kind])

    def external(self, call: External) -> int:
        """Register an operation of JAX; its results are `result` nodes."""
        self.externals.append(call)
        return len(self.externals) - 1

    def result(self, external: int, output: int, position: int) -> int:
        """Element of an array that JAX computes ahead."""
        return self._node(
            "external", (external, output, position), self.externals[external].depends
        )

    def settled(self, total: int, part: int) -> None:
        """Remember that a new state `total` is `part` and a step, and the step a drift and a kick.

        The residual of the step is then the kick as it was made, without the rounding of the state.
        For states
        alone: in a user's expression the rounding of a difference of sums may be meant.
        """
        self._sums.add(total)
        if self.ops[total] in ("add", "sub"):
            self._sums |= {a for a in self.args[total] if a != part}

    def _undone(self, total: int, part: int) -> int | None:
        """total − part, where the one is known to be made of the other; else None."""
        if total not in self._sums or self.ops[total] not in ("add", "sub"):
            return None
        a, b = self.args[total]
        if self.ops[total] == "add":
            return b if part == a else a if part == b else None
        return self.make("neg", b) if part == a else None

    def pair(self, re: int, im: int) -> int:
        """A complex number: a node that no program ever computes, only its two parts."""
        return self._plain("complex", re, im)

    def parts(self, node: int) -> tuple[int, int]:
        """Real and imaginary part."""
        return self.args[node] if self.ops[node] == "complex" else (node, self.const(0.0))

    def _make_complex(self, op: str, *args: int) -> int:
        """op of complex numbers."""
        make = self.make
        pairs = [self.parts(a) for a in args]
        if op in ("add", "sub", "neg"):
            return self.pair(*(make(op, *parts) for parts in zip(*pairs, strict=True)))
        if op == "select":
            return self.pair(
                *(make(op, args[0], yes, no) for yes, no in zip(*pairs[1:], strict=True))
            )
        (a, b) = pairs[0]
        (c, d) = pairs[-1]
        if op == "mul":
            return self.pair(
                make("sub", make("mul", a, c), make("mul", b, d)),
                make("add", make("mul", a, d), make("mul", b, c)),
            )
        if op == "div":
            size = make("add", make("mul", c, c), make("mul", d, d))
            re, im = self.parts(self._make_complex("mul", args[0], self.pair(c, make("neg", d))))
            return self.pair(make("div", re, size), make("div", im, size))
        if op == "abs":
            return make("sqrt", make("add", make("mul", a, a), make("mul", b, b)))
        if op == "exp":
            size = make("exp", a)
            return self.pair(make("mul", size, make("cos", b)), make("mul", size, make("sin", b)))
        if op in ("eq", "ne"):
            return make("and" if op == "eq" else "or", make(op, a, c), make(op, b, d))
        raise NotImplementedError(op)

    def make(self, op: str, *args: int) -> int:
        """The node of op(args), simplified."""
        if any(self.ops[a] == "complex" for a in args):
            return self._make_complex(op, *args)
        if all(self.ops[a] == "const" for a in args):
            return self.const(NUMPY[op](*(self.args[a][0] for a in args))[()])
        simplified = getattr(self, f"_{op}", None)
        if simplified is not None:
            return simplified(*args)
        if op in ODD and self.ops[args[0]] == "neg":
            return self.make("neg", self.make(op, *self.args[args[0]]))
        if op in EVEN and self.ops[args[0]] == "neg":
            return self.make(op, *self.args[args[0]])
        return self._plain(op, *args)

    def _plain(self, op: str, *args: int) -> int:
        depends = 0
        for a in args:
            depends |= self.depends[a]
        return self._node(op, args, depends)

    def _node(self, op: str, args: tuple, depends: int, key: tuple | None = None) -> int:
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
        """The value of a constant; None of anything else."""
        return self.args[node][0] if self.ops[node] == "const" else None

    def shared(self, node: int) -> bool:
        """Whether the node is the same for all trajectories."""
        return not self.depends[node] & LANE

    def boolean(self, node: int) -> bool:
        """Whether the node is true or false and not a number."""
        if self.ops[node] == "select":
            return self.boolean(self.args[node][1])
        return self.ops[node] in BOOLEAN or isinstance(self.value(node), bool)

    # ---------------------------------------------------------------------------------- simplifying

    def _is(self, node: int, value: float) -> bool:
        return self.ops[node] == "const" and self.args[node][0] == value

    def _add(self, a: int, b: int) -> int:
        if self._is(a, 0.0):
            return b
        if self._is(b, 0.0):
            return a
        if self.ops[b] == "neg":
            return self.make("sub", a, *self.args[b])
        if self.ops[a] == "neg":
            return self.make("sub", b, *self.args[a])
        for total, part in ((a, b), (b, a)):
            if total in self._sums and self.ops[total] == "sub" and self.args[total][1] == part:
                return self.args[total][0]
        return self._plain("add", min(a, b), max(a, b))

    def _sub(self, a: int, b: int) -> int:
        if a == b:
            return self.const(0.0)
        if self._is(a, 0.0):
            return self.make("neg", b)
        if self._is(b, 0.0):
            return a
        undone = self._undone(a, b)
        if undone is not None:
            return undone
        if self.ops[b] == "neg":
            return self.make("add", a, *self.args[b])
        if self.ops[a] == "neg":
            return self.make("neg", self.make("add", *self.args[a], b))
        if a > b:
            return self._neg(self._plain("sub", b, a))
        return self._plain("sub", a, b)

    def _neg(self, a: int) -> int:
        if self.ops[a] == "neg":
            return self.args[a][0]
        if self.ops[a] == "mul":
            factor, rest = self.args[a]
            if self.ops[factor] == "const" or (self.shared(factor) and not self.shared(rest)):
                return self._mul(self.make("neg", factor), rest)
        return self._plain("neg", a)

    def _mul(self, a: int, b: int) -> int:
        if (self.shared(b) and not self.shared(a)) or self.ops[b] == "const":
            return self._mul_ordered(b, a)  # what is shared comes first, constants before all
        return self._mul_ordered(a, b)

    def _mul_ordered(self, a: int, b: int) -> int:
        """a·b, of which a is shared or a constant if either is."""
        if self._is(a, 0.0):
            return a
        if self._is(a, 1.0):
            return b
        if self._is(a, -1.0):
            return self.make("neg", b)
        if self.ops[b] == "neg":
            return self.make("neg", self.make("mul", a, *self.args[b]))
        if self.ops[a] == "neg" and not (self.shared(a) and not self.shared(b)):
            return self.make("neg", self.make("mul", *self.args[a], b))
        if self.ops[b] == "mul" and self.shared(self.args[b][0]) and not self.shared(b):
            factor, rest = self.args[b]
            if self.shared(a):
                return self.make("mul", self.make("mul", a, factor), rest)
            return self.make("mul", factor, self.make("mul", a, rest))
        if self.ops[a] == "mul" and not self.shared(a) and self.shared(self.args[a][0]):
            factor, rest = self.args[a]
            return self.make("mul", factor, self.make("mul", rest, b))
        if self.shared(a) == self.shared(b) and self.ops[a] != "const":
            return self._plain("mul", min(a, b), max(a, b))
        return self._plain("mul", a, b)

    def _div(self, a: int, b: int) -> int:
        if self._is(a, 0.0):
            return a
        value = self.value(b)
        if value == 1.0:
            return a
        if value and math.isfinite(1.0 / value):
            return self.make("mul", self.const(1.0 / value), a)
        if self.ops[b] == "neg":
            return self.make("neg", self.make("div", a, *self.args[b]))
        if self._is(a, 1.0):
            return self._plain("div", a, b)
        return self.make("mul", a, self.make("div", self.const(1.0), b))

    def _select(self, choice: int, yes: int, no: int) -> int:
        known = self.value(choice)
        if yes == no or known is True:
            return yes
        if known is False:
            return no
        if self.ops[choice] == "not":
            return self.make("select", *self.args[choice], no, yes)
        if self.boolean(yes):  # masks have no third way in all compilers
            both = self.make("and", choice, yes)
            return self.make("or", both, self.make("and", self.make("not", choice), no))
        return self._plain("select", choice, yes, no)

    def _and(self, a: int, b: int) -> int:
        if a == b or self.value(b) is True:
            return a
        if self.value(a) is True:
            return b
        if self.value(a) is False or self.value(b) is False:
            return self.const(False)
        return self._plain("and", min(a, b), max(a, b))

    def _or(self, a: int, b: int) -> int:
        if a == b or self.value(b) is False:
            return a
        if self.value(a) is False:
            return b
        if self.value(a) is True or self.value(b) is True:
            return self.const(True)
        return self._plain("or", min(a, b), max(a, b))

    def _not(self, a: int) -> int:
        return self.args[a][0] if self.ops[a] == "not" else self._plain("not", a)

    def _max(self, a: int, b: int) -> int:
        return a if a == b else self._plain("max", *self._shared_first(a, b))

    def _min(self, a: int, b: int) -> int:
        return a if a == b else self._plain("min", *self._shared_first(a, b))

    def _shared_first(self, a: int, b: int) -> tuple[int, int]:
        return (b, a) if self.shared(b) and not self.shared(a) else (a, b)

    def power(self, base: int, exponent: int) -> int:
        """base to a whole number, by squaring."""
        if exponent < 0:
            return self.make("div", self.const(1.0), self.power(base, -exponent))
        if exponent == 0:
            return self.const(1.0)
        half = self.power(base, exponent // 2)
        square = self.make("mul", half, half)
        return self.make("mul", square, base) if exponent % 2 else square

    # -------------------------------------------------------------------------------------- walking

    def reachable(
        self, outputs: Iterable[int], stop: Callable[[int], bool] = lambda node: False
    ) -> list[int]:
        """Nodes that outputs are made of, in order. stop: nodes beyond which there is no
        need to look.
        """
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
        """The nodes that a node is made of."""
        op = self.ops[node]
        if op == "const" or op in LEAVES:
            return []
        if op == "external":
            inputs = self.externals[self.args[node][0]].inputs
            return [int(i) for ids, _ in inputs for i in ids.ravel()]
        return list(self.args[node])

    def evaluate(self, outputs: Sequence[int], leaf: Callable[[str, int], Any]) -> list[Any]:
        """Values of nodes by NumPy. leaf: (kind, index) -> a number, or an array along
        steps or trajectories.
        """
        values: dict[int, Any] = {}
        results: dict[int, Sequence[Any]] = {}
        for node in self.reachable(outputs):
            op = self.ops[node]
            args = self.args[node]
            if op == "const":
                values[node] = args[0]
            elif op in LEAVES:
                values[node] = leaf(op, *args)
            elif op == "external":
                which, output, position = args
                if which not in results:
                    results[which] = _called(self.externals[which], values)
                values[node] = results[which][output][..., position]
            else:
                values[node] = NUMPY[op](*(values[a] for a in args))
        return [values[node] for node in outputs]


def _called(external: External, values: dict[int, Any]) -> list[np.ndarray]:
    """Results of an external, (..., elements): one row for each step or trajectory that its
    inputs have.
    """
    rows = [[np.asarray(values[int(i)]) for i in ids.ravel()] for ids, _ in external.inputs]
    lengths = {len(v) for row in rows for v in row if v.ndim}
    count = lengths.pop() if lengths else None
    arrays = []
    for row, (ids, dtype) in zip(rows, external.inputs, strict=True):
        if count is None:
            arrays.append(np.array(row, dtype).reshape(ids.shape))
        else:
            whole = (
                np.stack([np.broadcast_to(v, count) for v in row], axis=1)
                if row
                else np.empty((count, 0))
            )
            arrays.append(whole.astype(dtype).reshape(count, *ids.shape))
    outputs = external.call(*arrays, many=count is not None)
    return [np.asarray(v).reshape(*(() if count is None else (count,)), -1) for v in outputs]
