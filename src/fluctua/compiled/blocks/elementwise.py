"""Elementwise operations of kernels on arrays: their C++, their cost, and simplifications."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.compiled.blocks.nodes import ArrayGraph, ArrayNode
from fluctua.compiled.elements import UNARY, Unsupported

CHEAP = 1
DIVISION = 5
FUNCTION = 12
LIBRARY = 200
"""Cost of an operation on one vector, in additions; the last goes to the C library by lanes."""

FORMS: dict[str, tuple[str, int]] = {
    "neg": ("-{0}", CHEAP),
    "add": ("{0} + {1}", CHEAP),
    "sub": ("{0} - {1}", CHEAP),
    "mul": ("{0} * {1}", CHEAP),
    "div": ("{0} / {1}", DIVISION),
    "max": ("m_max({0}, {1})", CHEAP),
    "min": ("m_min({0}, {1})", CHEAP),
    "lt": ("(B)({0} < {1})", CHEAP),
    "le": ("(B)({0} <= {1})", CHEAP),
    "gt": ("(B)({0} > {1})", CHEAP),
    "ge": ("(B)({0} >= {1})", CHEAP),
    "eq": ("(B)({0} == {1})", CHEAP),
    "ne": ("(B)({0} != {1})", CHEAP),
    "and": ("{0} & {1}", CHEAP),
    "or": ("{0} | {1}", CHEAP),
    "xor": ("{0} ^ {1}", CHEAP),
    "not": ("~{0}", CHEAP),
    "select": ("sel({0}, {1}, {2})", CHEAP),
    "as_number": ("sel({0}, bc(F(1)), bc(F(0)))", CHEAP),
    "abs": ("m_abs({0})", CHEAP),
    "sign": ("m_sign({0})", 2 * CHEAP),
    "isfinite": ("m_isfinite({0})", 2 * CHEAP),
    "sqrt": ("m_sqrt({0})", DIVISION),
    "logistic": ("F(1) / (F(1) + m_exp(-{0}))", FUNCTION),
    "integer_pow": ("integer_power<{data}>({0})", 2 * CHEAP),
    "pow": ("m_pow({0}, {1})", 3 * FUNCTION),
    "atan2": ("m_atan2({0}, {1})", LIBRARY),
    "rem": ("m_rem({0}, {1})", LIBRARY),
    "tanh": ("array_tanh({0})", FUNCTION),
    "log1p": ("array_log1p({0})", 2 * FUNCTION),
    "expm1": ("array_expm1({0})", 2 * FUNCTION),
    **{name: (f"m_{name}({{0}})", FUNCTION) for name in ("exp", "log", "sin", "cos")},
}
"""C++ of an operation, and its cost. Truth values are masks."""
for _name in UNARY.values():
    FORMS.setdefault(_name, (f"m_{_name}({{0}})", LIBRARY))
for _name in ("trunc", "round_even", "round_away"):
    FORMS[_name] = (f"m_{_name}({{0}})", LIBRARY)

TRUTHS = {"lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor", "not", "isfinite"}

NUMPY: dict[str, Callable[..., Any]] = {
    "neg": np.negative,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.logical_and,
    "or": np.logical_or,
    "not": np.logical_not,
    "select": np.where,
    "sqrt": np.sqrt,
}
"""Operations on constants that need no compilation by JAX."""


def apply_elementwise(
    graph: ArrayGraph,
    op: str,
    args: Sequence[int],
    evaluate: Callable[..., Any],
    data: int | None = None,
) -> int:
    """Add an elementwise operation, simplified. evaluate: the same by JAX. data: an exponent."""
    shape = np.broadcast_shapes(*(graph[a].shape for a in args))
    args = tuple(graph.broadcast(a, shape) for a in args)
    simple = _simplify(graph, op, args)
    if simple is not None:
        return simple
    nodes = [graph[a] for a in args]
    if all(node.op == "const" for node in nodes):
        return graph.const(_evaluate_constants(graph, op, args, evaluate))
    depends = 0
    for node in nodes:
        depends |= node.depends
    kind = "b" if op in TRUTHS else nodes[-1].kind
    if op == "as_number":
        kind = "f"
    if kind == "i" and depends:
        raise Unsupported(op, "integers that depend on the state, the time or θ")
    return graph.add(ArrayNode(op, args, shape, kind, depends, data, evaluate), data)


def _simplify(graph: ArrayGraph, op: str, args: tuple[int, ...]) -> int | None:
    """Return the node that an operation with 0, 1 or a constant condition is; else None."""
    values = [graph.uniform(a) for a in args]
    shape = graph[args[0]].shape

    def zero(like: int) -> int:
        return graph.const(np.zeros(shape, _dtype(graph, like)))

    if op == "mul":
        for k in (0, 1):
            if values[k] == 0 and graph[args[1 - k]].kind == "f":
                return zero(args[k])
            if values[k] == 1:
                return args[1 - k]
    if op == "add":
        for k in (0, 1):
            if values[k] == 0:
                return args[1 - k]
    if op == "sub" and values[1] == 0:
        return args[0]
    if op == "div" and (values[1] == 1 or values[0] == 0):
        return args[0]
    if op == "select" and values[0] is not None:
        return args[1] if values[0] else args[2]
    if op == "select" and args[1] == args[2]:
        return args[1]
    return None


def _dtype(graph: ArrayGraph, node: int) -> np.dtype:
    value = graph[node]
    return value.data.dtype if value.op == "const" else np.dtype(float)


def _evaluate_constants(
    graph: ArrayGraph, op: str, args: Sequence[int], evaluate: Callable[..., Any]
) -> np.ndarray:
    values = [graph[a].data for a in args]
    if op in NUMPY:
        return np.asarray(NUMPY[op](*values))
    with jax.ensure_compile_time_eval():
        return np.asarray(evaluate(*map(jnp.asarray, values)))


def choose(condition: Any, yes: Any, no: Any) -> Any:
    """`jnp.where` of three arrays."""
    return jnp.where(condition, yes, no)


def bind(eqn: Any) -> Callable[..., Any]:
    """Return the operation of an equation as a function of arrays."""
    params = eqn.primitive.get_bind_params(eqn.params)
    functions, params = params if isinstance(params, tuple) else ((), params)
    avals = [v.aval for v in eqn.invars]

    def call(*arrays: Any) -> Any:
        typed = [
            array
            if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)
            else jnp.asarray(array, aval.dtype)
            for array, aval in zip(arrays, avals, strict=True)
        ]
        return eqn.primitive.bind(*functions, *typed, **params)

    return call
