"""Rules for elementwise operations of JAX: arithmetic, functions, comparisons, conversions.

A rule is (graph, equation, *identities of the inputs) -> identities of the outputs, an array of the
output's shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.compiled.graph import Graph

MAX_NODES = 30_000
"""Largest graph; beyond, a compiler takes too long."""


class Unsupported(Exception):
    """An operation that kernels do not have.

    primitive: its name in JAX.
    why: the reason.
    """

    def __init__(self, primitive: str, why: str):
        super().__init__(f"`{primitive}`: {why}")
        self.primitive = primitive
        self.why = why


UNARY = {
    "neg": "neg",
    "abs": "abs",
    "sign": "sign",
    "floor": "floor",
    "ceil": "ceil",
    "sqrt": "sqrt",
    "cbrt": "cbrt",
    "exp": "exp",
    "exp2": "exp2",
    "expm1": "expm1",
    "log": "log",
    "log1p": "log1p",
    "sin": "sin",
    "cos": "cos",
    "tan": "tan",
    "asin": "asin",
    "acos": "acos",
    "atan": "atan",
    "sinh": "sinh",
    "cosh": "cosh",
    "tanh": "tanh",
    "asinh": "asinh",
    "acosh": "acosh",
    "atanh": "atanh",
    "erf": "erf",
    "erfc": "erfc",
    "erf_inv": "erf_inv",
    "lgamma": "lgamma",
    "is_finite": "isfinite",
}

BINARY = {
    "add": "add",
    "add_any": "add",
    "sub": "sub",
    "mul": "mul",
    "max": "max",
    "min": "min",
    "pow": "pow",
    "atan2": "atan2",
    "eq": "eq",
    "ne": "ne",
    "lt": "lt",
    "le": "le",
    "eq_to": "eq",
    "lt_to": "lt",
    "le_to": "le",
}

IDENTITY = {
    "copy",
    "copy_p",
    "stop_gradient",
    "device_put",
    "optimization_barrier",
    "name",
}


def make_constants(graph: Graph, value: Any) -> np.ndarray:
    """Return the identities of the elements of a constant array."""
    dtype = getattr(value, "dtype", None)
    if dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        raise Unsupported("random key", "random numbers come from the noise of the simulator alone")
    array = np.asarray(value)
    if array.size > MAX_NODES:
        raise Unsupported(
            "constant", f"an array of {array.size} numbers is too long to be written out"
        )

    def make_complex(v):
        return graph.make_complex(graph.const(v.real), graph.const(v.imag))

    make = make_complex if array.dtype.kind == "c" else graph.const
    return np.array([make(v) for v in array.ravel()], dtype=np.int64).reshape(array.shape)


def map_elements(function: Callable[..., int], *arrays: np.ndarray) -> np.ndarray:
    """Apply a function to every element, after broadcasting."""
    arrays = np.broadcast_arrays(*arrays)
    flat = [
        function(*elements) for elements in zip(*(a.ravel().tolist() for a in arrays), strict=True)
    ]
    return np.array(flat, dtype=np.int64).reshape(arrays[0].shape)


def _is_integer(eqn: Any) -> bool:
    return eqn.outvars[0].aval.dtype.kind in "iu"


def _varies(graph: Graph, ids: np.ndarray) -> bool:
    """Whether an element depends on the state, the time or θ."""
    return any(graph.depends[node] for node in ids.ravel())


def _refuse_varying_integers(graph: Graph, eqn: Any, *inputs: np.ndarray) -> None:
    """Raise for integers that are not constant: kernels keep them as floats."""
    if _is_integer(eqn) and any(_varies(graph, ids) for ids in inputs):
        raise Unsupported(eqn.primitive.name, "integers that depend on the state, the time or θ")


WRAPPING = {
    "add",
    "add_any",
    "cumprod",
    "cumsum",
    "dot_general",
    "integer_pow",
    "mul",
    "neg",
    "pow",
    "reduce_prod",
    "reduce_sum",
    "square",
    "sub",
}
"""Operations of integers whose result may be beyond the limits of its type."""


def refuse_wrapping(eqn: Any) -> None:
    """Raise for integers that wrap at limits which the floats of a kernel do not have.

    Those of 32 bits with a sign are taken to be small, as indices are.
    """
    name = eqn.primitive.name
    if name not in WRAPPING or not _is_integer(eqn):
        return
    dtype = eqn.outvars[0].aval.dtype
    if dtype.itemsize < 4 or dtype.kind == "u":
        raise Unsupported(name, f"arithmetic of {dtype}, which wraps")


def refuse_narrowing(eqn: Any) -> None:
    """Raise for a conversion of integers to a type without their sign, or that wraps.

    Those of 64 bits are taken to be small: under `jax_enable_x64` they are indices.
    """
    old, new = (v.aval.dtype for v in (eqn.invars[0], eqn.outvars[0]))
    if old.kind not in "iu" or new.kind not in "iu" or np.can_cast(old, new):
        return
    if old.kind != new.kind or new.itemsize < 4:
        raise Unsupported("convert_element_type", f"from {old} to {new}, which wraps")


def refuse_short_floats(eqn: Any) -> None:
    """Raise for a conversion to floats of fewer than 32 bits."""
    new = eqn.outvars[0].aval.dtype
    if jnp.issubdtype(new, jnp.floating) and jnp.finfo(new).bits < 32:
        raise Unsupported("convert_element_type", f"to {new}, numbers of fewer bits")


def takes_booleans(eqn: Any) -> bool:
    """Whether the first operand of an equation is boolean."""
    return eqn.invars[0].aval.dtype == bool


def choose_fold(op: str, eqn: Any) -> str:
    """The operation for the type of its operands: max and min of booleans are or and and."""
    return {"max": "or", "min": "and"}.get(op, op) if takes_booleans(eqn) else op


def _compare_booleans(graph: Graph, op: str, a: int, b: int) -> int:
    """a < b or a ≤ b of booleans. op: "lt" or "le"."""
    return graph.make("and" if op == "lt" else "or", graph.make("not", a), b)


def check_precision(eqn: Any) -> None:
    """Raise for `reduce_precision` to fewer bits than its operand has."""
    kept = jnp.finfo(eqn.outvars[0].aval.dtype)
    if eqn.params["mantissa_bits"] < kept.nmant or eqn.params["exponent_bits"] < kept.nexp:
        raise Unsupported("reduce_precision", "numbers of fewer bits")


def _reduce_precision(graph: Graph, eqn: Any, x: np.ndarray) -> np.ndarray:
    check_precision(eqn)
    return x


def _unary(op: str) -> Callable:
    def rule(graph: Graph, eqn: Any, x: np.ndarray) -> np.ndarray:
        return map_elements(lambda a: graph.make(op, a), x)

    return rule


def _binary(op: str) -> Callable:
    def rule(graph: Graph, eqn: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        if op in ("lt", "le") and takes_booleans(eqn):
            return map_elements(lambda a, b: _compare_booleans(graph, op, a, b), x, y)
        if op == "mul" and _varies(graph, x) and _varies(graph, y):
            _refuse_varying_integers(graph, eqn, x)
        used = choose_fold(op, eqn)
        return map_elements(lambda a, b: graph.make(used, a, b), x, y)

    return rule


def _swapped(op: str) -> Callable:
    rule = _binary(op)
    return lambda graph, eqn, x, y: rule(graph, eqn, y, x)


def _logical(op: str) -> Callable:
    def rule(graph: Graph, eqn: Any, *inputs: np.ndarray) -> np.ndarray:
        if eqn.outvars[0].aval.dtype != bool:
            raise Unsupported(eqn.primitive.name, "bits of integers")
        return map_elements(lambda *a: graph.make(op, *a), *inputs)

    return rule


def _div(graph: Graph, eqn: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if _is_integer(eqn):
        _refuse_varying_integers(graph, eqn, x, y)
        return map_elements(lambda a, b: graph.make("trunc", graph.make("div", a, b)), x, y)
    return map_elements(lambda a, b: graph.make("div", a, b), x, y)


def _rem(graph: Graph, eqn: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    _refuse_varying_integers(graph, eqn, x, y)
    return map_elements(lambda a, b: graph.make("rem", a, b), x, y)


def _pow(graph: Graph, eqn: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    def raise_to(a: int, b: int) -> int:
        value = graph.value(b)
        if value is not None and abs(value) <= 16 and value == int(value):
            return graph.power(a, int(value))
        if value == 0.5:
            return graph.make("sqrt", a)
        return graph.make("pow", a, b)

    return map_elements(raise_to, x, y)


def _integer_pow(graph: Graph, eqn: Any, x: np.ndarray) -> np.ndarray:
    _refuse_varying_integers(graph, eqn, x)
    return map_elements(lambda a: graph.power(a, int(eqn.params["y"])), x)


def _conj(graph: Graph, eqn: Any, x: np.ndarray) -> np.ndarray:
    def conjugate(a: int) -> int:
        re, im = graph.split_complex(a)
        return graph.make_complex(re, graph.make("neg", im))

    return map_elements(conjugate, x)


def _square(graph: Graph, eqn: Any, x: np.ndarray) -> np.ndarray:
    _refuse_varying_integers(graph, eqn, x)
    return map_elements(lambda a: graph.make("mul", a, a), x)


def _one_minus_square(graph: Graph, eqn: Any, x: np.ndarray) -> np.ndarray:
    return map_elements(lambda a: graph.make("sub", graph.const(1.0), graph.make("mul", a, a)), x)


def _rsqrt(graph: Graph, eqn: Any, x: np.ndarray) -> np.ndarray:
    return map_elements(lambda a: graph.make("div", graph.const(1.0), graph.make("sqrt", a)), x)


def _logistic(graph: Graph, eqn: Any, x: np.ndarray) -> np.ndarray:
    one = graph.const(1.0)
    return map_elements(
        lambda a: graph.make(
            "div", one, graph.make("add", one, graph.make("exp", graph.make("neg", a)))
        ),
        x,
    )


def _round(graph: Graph, eqn: Any, x: np.ndarray) -> np.ndarray:
    even = eqn.params["rounding_method"] == jax.lax.RoundingMethod.TO_NEAREST_EVEN
    return map_elements(lambda a: graph.make("round_even" if even else "round_away", a), x)


def _clamp(graph: Graph, eqn: Any, low: np.ndarray, x: np.ndarray, high: np.ndarray) -> np.ndarray:
    above = choose_fold("max", eqn)
    below = choose_fold("min", eqn)
    return map_elements(lambda a, b, c: graph.make(below, graph.make(above, a, b), c), low, x, high)


def _select_n(graph: Graph, eqn: Any, which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    if eqn.invars[0].aval.dtype == bool:
        no, yes = cases if len(cases) == 2 else (cases[0], cases[0])
        return map_elements(lambda c, a, b: graph.make("select", c, a, b), which, yes, no)
    chosen = cases[0]
    for k, case in enumerate(cases[1:], 1):
        chosen = map_elements(
            lambda w, a, b, k=k: graph.make(
                "select", graph.make("eq", w, graph.const(float(k))), a, b
            ),
            which,
            case,
            chosen,
        )
    return chosen


def _convert(graph: Graph, eqn: Any, x: np.ndarray) -> np.ndarray:
    old = eqn.invars[0].aval.dtype
    new = eqn.outvars[0].aval.dtype
    refuse_short_floats(eqn)
    if new.kind == "c":
        zero = graph.const(0.0)
        return x if old.kind == "c" else map_elements(lambda a: graph.make_complex(a, zero), x)
    if old.kind == "c":
        x = map_elements(lambda a: graph.split_complex(a)[0], x)
    if new.kind == "b":
        return (
            x
            if old.kind == "b"
            else map_elements(lambda a: graph.make("ne", a, graph.const(0.0)), x)
        )
    if old.kind == "b":
        one = graph.const(1.0)
        zero = graph.const(0.0)
        return map_elements(lambda a: graph.make("select", a, one, zero), x)
    if new.kind in "iu" and old.kind == "f":
        limits = np.iinfo(new)
        low = graph.const(float(limits.min))
        high = graph.const(float(limits.max))

        def cut(a: int) -> int:
            return graph.make("min", graph.make("max", graph.make("trunc", a), low), high)

        return map_elements(cut, x)
    refuse_narrowing(eqn)
    return x


ELEMENTWISE: dict[str, Callable] = {
    **{name: _unary(op) for name, op in UNARY.items()},
    **{name: _binary(op) for name, op in BINARY.items()},
    **{name: lambda graph, eqn, *inputs: list(inputs) for name in IDENTITY},
    "gt": _swapped("lt"),
    "ge": _swapped("le"),
    "and": _logical("and"),
    "or": _logical("or"),
    "xor": _logical("xor"),
    "not": _logical("not"),
    "div": _div,
    "rem": _rem,
    "pow": _pow,
    "integer_pow": _integer_pow,
    "square": _square,
    "one_minus_square": _one_minus_square,
    "real": lambda graph, eqn, x: map_elements(lambda a: graph.split_complex(a)[0], x),
    "imag": lambda graph, eqn, x: map_elements(lambda a: graph.split_complex(a)[1], x),
    "conj": _conj,
    "complex": lambda graph, eqn, x, y: map_elements(graph.make_complex, x, y),
    "rsqrt": _rsqrt,
    "logistic": _logistic,
    "round": _round,
    "reduce_precision": _reduce_precision,
    "clamp": _clamp,
    "select_n": _select_n,
    "convert_element_type": _convert,
}
