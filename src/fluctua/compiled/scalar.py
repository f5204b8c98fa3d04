"""From a jaxpr to scalar expressions: every element of every small array becomes a node of a graph.

What cannot be written as scalars, and is the same for all trajectories or for all steps, is left to JAX, which computes
it ahead of the run. Anything else raises `Unsupported` with the operation and the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from fluctua.compiled.graph import CONTEXT, NOISE, STATE, TIME, External, Graph

UNROLLED = 16
"""Rows of a matrix that is factorised or solved with, element by element."""

LENGTH = 128
"""Steps of a loop that is written out."""

NODES = 30_000
"""Nodes of a graph, beyond which a compiler takes too long."""


class Unsupported(Exception):
    """An operation that no kernel is made for. primitive: its name in JAX. why: what is in the way."""

    def __init__(self, primitive: str, why: str):
        super().__init__(f"`{primitive}`: {why}")
        self.primitive, self.why = primitive, why


UNARY = {
    "neg": "neg", "abs": "abs", "sign": "sign", "floor": "floor", "ceil": "ceil", "sqrt": "sqrt", "cbrt": "cbrt",
    "exp": "exp", "exp2": "exp2", "expm1": "expm1", "log": "log", "log1p": "log1p", "sin": "sin", "cos": "cos",
    "tan": "tan", "asin": "asin", "acos": "acos", "atan": "atan", "sinh": "sinh", "cosh": "cosh", "tanh": "tanh",
    "asinh": "asinh", "acosh": "acosh", "atanh": "atanh", "erf": "erf", "erfc": "erfc", "erf_inv": "erf_inv",
    "lgamma": "lgamma", "is_finite": "isfinite",
}  # fmt: skip

BINARY = {
    "add": "add", "add_any": "add", "sub": "sub", "mul": "mul", "max": "max", "min": "min", "pow": "pow",
    "atan2": "atan2", "eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "eq_to": "eq", "lt_to": "lt", "le_to": "le",
}  # fmt: skip

SAME = {"copy", "copy_p", "stop_gradient", "reduce_precision", "device_put", "optimization_barrier", "name"}

CALLS = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "remat": "jaxpr",
    "checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr", "custom_lin": "call_jaxpr",
}  # fmt: skip


def scalarise(graph: Graph, closed: ClosedJaxpr, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Identities of the outputs of a jaxpr from those of its inputs, each an array of its shape."""
    consts = [constant(graph, value) for value in closed.consts]
    return _run(graph, closed.jaxpr, consts, inputs)


def constant(graph: Graph, value: Any) -> np.ndarray:
    """Identities of the elements of an array of numbers."""
    dtype = getattr(value, "dtype", None)
    if dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        raise Unsupported("random key", "random numbers come from the noise of the simulator alone")
    array = np.asarray(value)
    if array.size > NODES:
        raise Unsupported("constant", f"an array of {array.size} numbers is too long to be written out")
    number = lambda v: graph.pair(graph.const(v.real), graph.const(v.imag))
    make = number if array.dtype.kind == "c" else graph.const
    return np.array([make(v) for v in array.ravel()], dtype=np.int64).reshape(array.shape)


def _run(graph: Graph, jaxpr: Jaxpr, consts: Sequence[np.ndarray], inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    known: dict[Any, np.ndarray] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
    read = lambda atom: constant(graph, atom.val) if isinstance(atom, Literal) else known[atom]
    needed = _needed(jaxpr)
    for eqn in jaxpr.eqns:
        if not any(v in needed for v in eqn.outvars):
            continue
        outputs = _equation(graph, eqn, [read(atom) for atom in eqn.invars])
        known.update(zip(eqn.outvars, outputs, strict=True))
        if len(graph) > NODES:
            raise Unsupported(eqn.primitive.name, f"more than {NODES} operations a step")
    return [read(atom) for atom in jaxpr.outvars]


def _needed(jaxpr: Jaxpr) -> set:
    """Variables that the outputs are made of: what is dead need not be supported."""
    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if any(v in needed for v in eqn.outvars):
            needed |= {v for v in eqn.invars if not isinstance(v, Literal)}
    return needed


def _equation(graph: Graph, eqn: Any, inputs: list[np.ndarray]) -> list[np.ndarray]:
    name = eqn.primitive.name
    try:
        if name in CALLS:
            inner = eqn.params[CALLS[name]]
            if isinstance(inner, ClosedJaxpr):
                return scalarise(graph, inner, inputs)
            return _run(graph, inner, [], inputs)
        rule = RULES.get(name)
        if rule is None:
            raise Unsupported(name, "no kernel is written for it")
        if name != "custom_linear_solve" and any((ids < 0).any() for ids in inputs):
            raise Unsupported("lu", "factors of a matrix that depends on the state, other than to solve with")
        try:
            outputs = rule(graph, eqn, *inputs)
        except NotImplementedError:
            raise Unsupported(name, "of complex numbers") from None
        except KeyError as problem:
            raise Unsupported(name, f"this version of JAX has no parameter {problem} of it") from None
        return outputs if isinstance(outputs, list) else [outputs]
    except Unsupported as problem:
        depends = 0
        for ids in inputs:
            for node in ids.ravel():
                depends |= graph.depends[node] if node >= 0 else STATE
        if depends & (STATE | NOISE) or (depends & CONTEXT and depends & TIME):
            raise problem from None
        return _left_to_jax(graph, eqn, inputs, depends)


def _left_to_jax(graph: Graph, eqn: Any, inputs: list[np.ndarray], depends: int) -> list[np.ndarray]:
    """Outputs that JAX computes ahead, with one row a step or a trajectory where the inputs have them."""
    if any(jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in [*eqn.invars, *eqn.outvars]):
        raise Unsupported(eqn.primitive.name, "random numbers come from the noise of the simulator alone")
    params = eqn.primitive.get_bind_params(eqn.params)
    if any(np.dtype(v.aval.dtype).kind == "c" for v in [*eqn.invars, *eqn.outvars]):
        raise Unsupported(eqn.primitive.name, "of complex numbers")
    functions, params = params if isinstance(params, tuple) else ((), params)  # a pair in older versions of JAX

    def bound(*arrays: Any) -> Sequence[Any]:
        outputs = eqn.primitive.bind(*functions, *arrays, **params)
        return outputs if eqn.primitive.multiple_results else [outputs]

    once, along = jax.jit(bound), jax.jit(jax.vmap(bound))
    call = lambda *arrays, many: (along if many else once)(*map(jnp.asarray, arrays))
    dtypes = [np.dtype(v.aval.dtype) for v in eqn.invars]
    shapes = [v.aval.shape for v in eqn.outvars]
    if not depends:  # all constant: no need to wait
        values = [np.array([graph.value(int(i)) for i in ids.ravel()], dtype).reshape(ids.shape)
                  for ids, dtype in zip(inputs, dtypes, strict=True)]  # fmt: skip
        with jax.ensure_compile_time_eval():
            return [constant(graph, v) for v in call(*values, many=False)]
    which = graph.external(External(call, tuple(zip(inputs, dtypes, strict=True)), depends))
    outputs = []
    for output, shape in enumerate(shapes):
        ids = [graph.result(which, output, k) for k in range(int(np.prod(shape)))]
        outputs.append(np.array(ids, dtype=np.int64).reshape(shape))
    return outputs


# ------------------------------------------------------------------------------------------ element by element


def _each(function: Callable[..., int], *arrays: np.ndarray) -> np.ndarray:
    """The function of every element, after broadcasting."""
    arrays = np.broadcast_arrays(*arrays)
    flat = [function(*elements) for elements in zip(*(a.ravel().tolist() for a in arrays), strict=True)]
    return np.array(flat, dtype=np.int64).reshape(arrays[0].shape)


def _whole(eqn: Any) -> bool:
    return eqn.outvars[0].aval.dtype.kind in "iu"


def _numbers_only(graph: Graph, eqn: Any, *inputs: np.ndarray) -> None:
    """Whole numbers that differ between trajectories are kept as floats, where only sums and products are exact."""
    if _whole(eqn) and any(graph.depends[node] for ids in inputs for node in ids.ravel()):
        raise Unsupported(eqn.primitive.name, "whole numbers that depend on the state, the time or θ")


def _unary(op: str) -> Callable:
    def rule(graph: Graph, eqn: Any, x: np.ndarray) -> np.ndarray:
        return _each(lambda a: graph.make(op, a), x)

    return rule


def _binary(op: str) -> Callable:
    def rule(graph: Graph, eqn: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return _each(lambda a, b: graph.make(op, a, b), x, y)

    return rule


def _swapped(op: str) -> Callable:
    def rule(graph: Graph, eqn: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return _each(lambda a, b: graph.make(op, b, a), x, y)

    return rule


def _logical(op: str) -> Callable:
    def rule(graph: Graph, eqn: Any, *inputs: np.ndarray) -> np.ndarray:
        if eqn.outvars[0].aval.dtype != bool:
            raise Unsupported(eqn.primitive.name, "bits of whole numbers")
        return _each(lambda *a: graph.make(op, *a), *inputs)

    return rule


def _div(graph: Graph, eqn: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if _whole(eqn):
        _numbers_only(graph, eqn, x, y)
        return _each(lambda a, b: graph.make("trunc", graph.make("div", a, b)), x, y)
    return _each(lambda a, b: graph.make("div", a, b), x, y)


def _rem(graph: Graph, eqn: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    _numbers_only(graph, eqn, x, y)
    return _each(lambda a, b: graph.make("rem", a, b), x, y)


def _pow(graph: Graph, eqn: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    def one(a: int, b: int) -> int:
        value = graph.value(b)
        if value is not None and value == int(value) and abs(value) <= 16:
            return graph.power(a, int(value))
        if value == 0.5:
            return graph.make("sqrt", a)
        return graph.make("pow", a, b)

    return _each(one, x, y)


def _integer_pow(graph: Graph, eqn: Any, x: np.ndarray) -> np.ndarray:
    return _each(lambda a: graph.power(a, int(eqn.params["y"])), x)


def _conj(graph: Graph, eqn: Any, x: np.ndarray) -> np.ndarray:
    def one(a: int) -> int:
        re, im = graph.parts(a)
        return graph.pair(re, graph.make("neg", im))

    return _each(one, x)


def _square(graph: Graph, eqn: Any, x: np.ndarray) -> np.ndarray:
    return _each(lambda a: graph.make("mul", a, a), x)


def _one_minus_square(graph: Graph, eqn: Any, x: np.ndarray) -> np.ndarray:
    return _each(lambda a: graph.make("sub", graph.const(1.0), graph.make("mul", a, a)), x)


def _rsqrt(graph: Graph, eqn: Any, x: np.ndarray) -> np.ndarray:
    return _each(lambda a: graph.make("div", graph.const(1.0), graph.make("sqrt", a)), x)


def _logistic(graph: Graph, eqn: Any, x: np.ndarray) -> np.ndarray:
    one = graph.const(1.0)
    return _each(lambda a: graph.make("div", one, graph.make("add", one, graph.make("exp", graph.make("neg", a)))), x)


def _round(graph: Graph, eqn: Any, x: np.ndarray) -> np.ndarray:
    even = eqn.params["rounding_method"] == jax.lax.RoundingMethod.TO_NEAREST_EVEN
    return _each(lambda a: graph.make("round_even" if even else "round_away", a), x)


def _clamp(graph: Graph, eqn: Any, low: np.ndarray, x: np.ndarray, high: np.ndarray) -> np.ndarray:
    return _each(lambda a, b, c: graph.make("min", graph.make("max", a, b), c), low, x, high)


def _select_n(graph: Graph, eqn: Any, which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    if eqn.invars[0].aval.dtype == bool:
        no, yes = cases if len(cases) == 2 else (cases[0], cases[0])
        return _each(lambda c, a, b: graph.make("select", c, a, b), which, yes, no)
    chosen = cases[0]
    for k, case in enumerate(cases[1:], 1):
        chosen = _each(
            lambda w, a, b, k=k: graph.make("select", graph.make("eq", w, graph.const(float(k))), a, b),
            which, case, chosen,
        )  # fmt: skip
    return chosen


def _convert(graph: Graph, eqn: Any, x: np.ndarray) -> np.ndarray:
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if new.kind == "c":
        zero = graph.const(0.0)
        return x if old.kind == "c" else _each(lambda a: graph.pair(a, zero), x)
    if old.kind == "c":
        x = _each(lambda a: graph.parts(a)[0], x)
    if new.kind == "b":
        return x if old.kind == "b" else _each(lambda a: graph.make("ne", a, graph.const(0.0)), x)
    if old.kind == "b":
        one, zero = graph.const(1.0), graph.const(0.0)
        return _each(lambda a: graph.make("select", a, one, zero), x)
    if new.kind in "iu" and old.kind == "f":
        return _each(lambda a: graph.make("trunc", a), x)
    return x


# ------------------------------------------------------------------------------------------ shapes


def _broadcast(graph: Graph, eqn: Any, x: np.ndarray, *_: Any) -> np.ndarray:
    shape, along = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    seen = [1] * len(shape)
    for axis, target in enumerate(along):
        seen[target] = x.shape[axis]
    return np.broadcast_to(x.reshape(seen), shape)


def _reshape(graph: Graph, eqn: Any, x: np.ndarray, *_: Any) -> np.ndarray:
    return x.reshape(eqn.params["new_sizes"])


def _slice(graph: Graph, eqn: Any, x: np.ndarray) -> np.ndarray:
    p = eqn.params
    strides = p["strides"] or (1,) * x.ndim
    return x[tuple(slice(a, b, s) for a, b, s in zip(p["start_indices"], p["limit_indices"], strides, strict=True))]


def _split(graph: Graph, eqn: Any, x: np.ndarray) -> list[np.ndarray]:
    return np.split(x, np.cumsum(eqn.params["sizes"])[:-1], axis=eqn.params["axis"])


def _unstack(graph: Graph, eqn: Any, x: np.ndarray) -> list[np.ndarray]:
    return list(np.moveaxis(x, eqn.params["axis"], 0))


def _argument(order: str) -> Callable:
    """The place of the largest ("lt") or smallest element; of equal ones the first."""

    def rule(graph: Graph, eqn: Any, x: np.ndarray) -> np.ndarray:
        (axis,) = eqn.params["axes"]
        rows = np.moveaxis(x, axis, 0)
        best, where = rows[0], np.full(rows.shape[1:], graph.const(0.0))
        for k, row in enumerate(rows[1:], 1):
            better = _each(lambda a, b: graph.make("lt", *((a, b) if order == "lt" else (b, a))), best, row)
            best = _each(lambda c, a, b: graph.make("select", c, a, b), better, row, best)
            where = _each(lambda c, a, k=k: graph.make("select", c, graph.const(float(k)), a), better, where)
        return where

    return rule


def _pad(graph: Graph, eqn: Any, x: np.ndarray, value: np.ndarray) -> np.ndarray:
    for axis, (low, high, inside) in enumerate(eqn.params["padding_config"]):
        size = x.shape[axis]
        wide = max(0, size + (size - 1) * inside) if size else 0
        spread = np.full((*x.shape[:axis], wide, *x.shape[axis + 1 :]), int(value), dtype=np.int64)
        spread[(slice(None),) * axis + (slice(None, None, inside + 1),)] = x
        before, after = max(low, 0), max(high, 0)
        widths = [(0, 0)] * x.ndim
        widths[axis] = (before, after)
        spread = np.pad(spread, widths, constant_values=int(value))
        x = spread[(slice(None),) * axis + (slice(max(-low, 0), spread.shape[axis] - max(-high, 0)),)]
    return x


def _iota(graph: Graph, eqn: Any, *_: Any) -> np.ndarray:
    shape, axis = eqn.params["shape"], eqn.params["dimension"]
    along = [-1 if k == axis else 1 for k in range(len(shape))]
    row = constant(graph, np.arange(shape[axis]))
    return np.broadcast_to(row.reshape(along), shape)


def _indices(graph: Graph, eqn: Any, *arrays: np.ndarray) -> list[np.ndarray]:
    """Constant whole numbers; the index of an element of a state must be one."""
    if any(graph.value(int(node)) is None for ids in arrays for node in ids.ravel()):
        raise Unsupported(eqn.primitive.name, "an index that is not a constant")
    return [np.array([int(graph.args[int(n)][0]) for n in ids.ravel()], np.int64).reshape(ids.shape) for ids in arrays]


def _dynamic_slice(graph: Graph, eqn: Any, x: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    sizes = eqn.params["slice_sizes"]
    at = [int(v) for v in _indices(graph, eqn, *starts)]
    at = [min(max(a, 0), n - size) for a, n, size in zip(at, x.shape, sizes, strict=True)]
    return x[tuple(slice(a, a + size) for a, size in zip(at, sizes, strict=True))]


def _dynamic_update_slice(graph: Graph, eqn: Any, x: np.ndarray, new: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    at = [int(v) for v in _indices(graph, eqn, *starts)]
    at = [min(max(a, 0), n - size) for a, n, size in zip(at, x.shape, new.shape, strict=True)]
    x = x.copy()
    x[tuple(slice(a, a + size) for a, size in zip(at, new.shape, strict=True))] = new
    return x


def _gather(graph: Graph, eqn: Any, x: np.ndarray, index: np.ndarray) -> np.ndarray:
    (where,) = _indices(graph, eqn, index)
    params = dict(eqn.params, fill_value=-1)
    with jax.ensure_compile_time_eval():
        moved = np.asarray(eqn.primitive.bind(jnp.asarray(x, jnp.int32), jnp.asarray(where, jnp.int32), **params))
    return np.where(moved < 0, graph.const(float("nan")), moved).astype(np.int64)


def _scatter(graph: Graph, eqn: Any, x: np.ndarray, index: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Where each update goes is asked of JAX, by sending unit vectors along."""
    (where,) = _indices(graph, eqn, index)
    p = eqn.params
    numbers = {name: p[name] for name in ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")}
    units = np.eye(new.size, dtype=np.int32).reshape(new.size, *new.shape)
    send = lambda unit: jax.lax.scatter_add(
        jnp.zeros(x.shape, jnp.int32), jnp.asarray(where, jnp.int32), unit, **numbers
    )
    with jax.ensure_compile_time_eval():
        landed = np.asarray(jax.vmap(send)(jnp.asarray(units))).reshape(new.size, -1)
    op = eqn.primitive.name.removeprefix("scatter")[1:]  # "" for one that replaces
    flat, updates = x.ravel().copy(), new.ravel()
    for update, row in zip(updates, landed, strict=True):
        for k in np.flatnonzero(row):
            flat[k] = graph.make(op, int(flat[k]), int(update)) if op else update
    return flat.reshape(x.shape)


# ------------------------------------------------------------------------------------------ sums and matrices


def _reduce(op: str) -> Callable:
    def rule(graph: Graph, eqn: Any, x: np.ndarray) -> np.ndarray:
        axes = [int(a) for a in eqn.params["axes"]]
        rest = [a for a in range(x.ndim) if a not in axes]
        rows = np.transpose(x, rest + axes).reshape(*(x.shape[a] for a in rest), -1)
        return _fold(graph, op, rows)

    return rule


START = {"add": 0.0, "mul": 1.0, "max": -np.inf, "min": np.inf, "and": True, "or": False}


def _fold(graph: Graph, op: str, rows: np.ndarray) -> np.ndarray:
    """Combine along the last axis."""
    total = np.full(rows.shape[:-1], graph.const(START[op]), dtype=np.int64)
    for k in range(rows.shape[-1]):
        total = rows[..., k] if k == 0 else _each(lambda a, b: graph.make(op, a, b), total, rows[..., k])
    return total


def _cumulative(op: str) -> Callable:
    def rule(graph: Graph, eqn: Any, x: np.ndarray) -> np.ndarray:
        axis = eqn.params["axis"]
        rows = np.moveaxis(x, axis, 0)
        rows = rows[::-1] if eqn.params["reverse"] else rows
        out = [rows[0]]
        for row in rows[1:]:
            out.append(_each(lambda a, b: graph.make(op, a, b), out[-1], row))
        out = out[::-1] if eqn.params["reverse"] else out
        return np.moveaxis(np.stack(out), 0, axis)

    return rule


def _dot(graph: Graph, eqn: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    (over_a, over_b), (batch_a, batch_b) = eqn.params["dimension_numbers"]
    free_a = [k for k in range(a.ndim) if k not in (*over_a, *batch_a)]
    free_b = [k for k in range(b.ndim) if k not in (*over_b, *batch_b)]
    shape = [a.shape[k] for k in batch_a] + [a.shape[k] for k in free_a] + [b.shape[k] for k in free_b]
    batch = int(np.prod([a.shape[k] for k in batch_a]))
    inner = int(np.prod([a.shape[k] for k in over_a]))
    left = np.transpose(a, [*batch_a, *free_a, *over_a]).reshape(batch, -1, inner)
    right = np.transpose(b, [*batch_b, *free_b, *over_b]).reshape(batch, -1, inner)
    if left.shape[1] * right.shape[1] * batch * inner > 4 * NODES:
        raise Unsupported(
            "dot_general", f"a product of matrices {a.shape} and {b.shape} is too large to be written out"
        )
    products = _each(lambda p, q: graph.make("mul", p, q), left[:, :, None, :], right[:, None, :, :])
    return _fold(graph, "add", products).reshape(shape)


def _matrices(eqn: Any, x: np.ndarray) -> np.ndarray:
    """(batch, n, n)"""
    if x.shape[-1] > UNROLLED:
        raise Unsupported(eqn.primitive.name, f"a matrix of {x.shape[-1]} rows; up to {UNROLLED} are written out")
    return x.reshape(-1, *x.shape[-2:])


def _cholesky(graph: Graph, eqn: Any, x: np.ndarray) -> np.ndarray:
    make, zero = graph.make, graph.const(0.0)
    out = np.full(x.shape, zero, dtype=np.int64)
    for a, low in zip(_matrices(eqn, x), out.reshape(-1, *x.shape[-2:]), strict=True):
        for j in range(len(a)):
            total = int(a[j, j])
            for k in range(j):
                total = make("sub", total, make("mul", int(low[j, k]), int(low[j, k])))
            low[j, j] = make("sqrt", total)
            for i in range(j + 1, len(a)):
                total = int(a[i, j])
                for k in range(j):
                    total = make("sub", total, make("mul", int(low[i, k]), int(low[j, k])))
                low[i, j] = make("div", total, int(low[j, j]))
    return out


def _triangular_solve(graph: Graph, eqn: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    p = eqn.params
    matrices = _matrices(eqn, a)
    sides = b.reshape(-1, *b.shape[-2:])
    if not p["left_side"]:  # X A = B is Aᵀ Xᵀ = Bᵀ
        matrices, sides = np.swapaxes(matrices, 1, 2), np.swapaxes(sides, 1, 2)
    lower = p["lower"] if p["left_side"] else not p["lower"]
    if p["transpose_a"]:
        matrices, lower = np.swapaxes(matrices, 1, 2), not lower
    out = np.empty(sides.shape, dtype=np.int64)
    for matrix, side, solution in zip(matrices, sides, out, strict=True):
        rows = range(len(matrix)) if lower else range(len(matrix) - 1, -1, -1)
        for i in rows:
            done = range(i) if lower else range(i + 1, len(matrix))
            for c in range(side.shape[1]):
                total = int(side[i, c])
                for k in done:
                    total = graph.make("sub", total, graph.make("mul", int(matrix[i, k]), int(solution[k, c])))
                solution[i, c] = total if p["unit_diagonal"] else graph.make("div", total, int(matrix[i, i]))
    return (out if p["left_side"] else np.swapaxes(out, 1, 2)).reshape(b.shape)


def _lu(graph: Graph, eqn: Any, x: np.ndarray) -> list[np.ndarray]:
    """Nothing yet: the solve that uses the factors starts again from its matrix, so that pivots are choices."""
    _matrices(eqn, x)
    if all(graph.shared(int(node)) for node in x.ravel()):
        raise Unsupported("lu", "left to JAX")
    return [np.full(v.aval.shape, -1) for v in eqn.outvars]


def _linear_solve(graph: Graph, eqn: Any, *inputs: np.ndarray) -> list[np.ndarray]:
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    ends = np.cumsum([lengths.matvec, lengths.vecmat, lengths.solve, lengths.transpose_solve])
    sides = list(inputs[ends[3] :])
    factors = inputs[ends[1] : ends[2]]
    if not any((ids < 0).any() for ids in factors):
        return scalarise(graph, jaxprs.solve, [*factors, *sides])
    (side,) = sides
    if side.size > UNROLLED:
        raise Unsupported("solve", f"{side.size} unknowns; up to {UNROLLED} are written out")
    zero, one = graph.const(0.0), graph.const(1.0)
    units = np.where(np.eye(side.size, dtype=bool), one, zero).reshape(side.size, *side.shape)
    columns = [scalarise(graph, jaxprs.matvec, [*inputs[: ends[0]], unit])[0].ravel() for unit in units]
    return [np.array(_eliminated(graph, np.stack(columns, axis=1), side.ravel())).reshape(side.shape)]


def _eliminated(graph: Graph, matrix: np.ndarray, side: np.ndarray) -> list[int]:
    """The solution by elimination; the largest element of a column goes up by exchanges, chosen for each trajectory."""
    make, n = graph.make, len(side)
    rows = [[*map(int, row), int(b)] for row, b in zip(matrix, side, strict=True)]
    for k in range(n):
        for i in range(k + 1, n):
            larger = make("lt", make("abs", rows[k][k]), make("abs", rows[i][k]))
            up = [make("select", larger, b, a) for a, b in zip(rows[k], rows[i], strict=True)]
            rows[i] = [make("select", larger, a, b) for a, b in zip(rows[k], rows[i], strict=True)]
            rows[k] = up
        for i in range(k + 1, n):
            factor = make("div", rows[i][k], rows[k][k])
            for j in range(k + 1, n + 1):
                rows[i][j] = make("sub", rows[i][j], make("mul", factor, rows[k][j]))
    solution = [0] * n
    for i in reversed(range(n)):
        total = rows[i][n]
        for j in range(i + 1, n):
            total = make("sub", total, make("mul", rows[i][j], solution[j]))
        solution[i] = make("div", total, rows[i][i])
    return solution


# ------------------------------------------------------------------------------------------ control


def _cond(graph: Graph, eqn: Any, which: np.ndarray, *inputs: np.ndarray) -> list[np.ndarray]:
    branches = eqn.params["branches"]
    known = graph.value(int(which))
    if known is not None:
        return scalarise(graph, branches[min(max(int(known), 0), len(branches) - 1)], inputs)
    cases = [scalarise(graph, branch, inputs) for branch in branches]
    chosen = cases[0]
    for k, case in enumerate(cases[1:], 1):
        here = graph.make("le", graph.const(float(k)), int(which))
        chosen = [
            _each(lambda a, b, here=here: graph.make("select", here, a, b), new, old)
            for new, old in zip(case, chosen, strict=True)
        ]
    return chosen


def _scan(graph: Graph, eqn: Any, *inputs: np.ndarray) -> list[np.ndarray]:
    p = eqn.params
    if p["length"] > LENGTH:
        raise Unsupported("scan", f"a loop of {p['length']} steps; up to {LENGTH} are written out")
    # numbers of arguments that are constant and carried; newer versions of JAX keep a tree of them
    fixed, carried = map(len, p["ft_in"].unpack()[:2]) if "ft_in" in p else (p["num_consts"], p["num_carry"])
    consts, carry, along = list(inputs[:fixed]), list(inputs[fixed:][:carried]), inputs[fixed + carried :]
    rows: list[list[np.ndarray]] = []
    order = range(p["length"] - 1, -1, -1) if p["reverse"] else range(p["length"])
    for k in order:
        outputs = scalarise(graph, p["jaxpr"], [*consts, *carry, *(xs[k] for xs in along)])
        carry = outputs[:carried]
        rows.append(outputs[carried:])
    rows = rows[::-1] if p["reverse"] else rows
    return [*carry, *(np.stack(column) for column in zip(*rows, strict=True))]


RULES: dict[str, Callable] = {
    **{name: _unary(op) for name, op in UNARY.items()},
    **{name: _binary(op) for name, op in BINARY.items()},
    **{name: lambda graph, eqn, *inputs: list(inputs) for name in SAME},
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul"), _scatter),
    "gt": _swapped("lt"), "ge": _swapped("le"), "and": _logical("and"), "or": _logical("or"), "xor": _logical("xor"),
    "not": _logical("not"), "div": _div, "rem": _rem, "pow": _pow, "integer_pow": _integer_pow, "square": _square,
    "one_minus_square": _one_minus_square,
    "real": lambda graph, eqn, x: _each(lambda a: graph.parts(a)[0], x),
    "imag": lambda graph, eqn, x: _each(lambda a: graph.parts(a)[1], x),
    "conj": _conj,
    "complex": lambda graph, eqn, x, y: _each(graph.pair, x, y),
    "rsqrt": _rsqrt, "logistic": _logistic, "round": _round, "clamp": _clamp, "select_n": _select_n,
    "convert_element_type": _convert, "broadcast_in_dim": _broadcast, "reshape": _reshape, "slice": _slice,
    "squeeze": lambda graph, eqn, x: x.reshape(eqn.outvars[0].aval.shape),
    "expand_dims": lambda graph, eqn, x: x.reshape(eqn.outvars[0].aval.shape),
    "transpose": lambda graph, eqn, x: np.transpose(x, eqn.params["permutation"]),
    "rev": lambda graph, eqn, x: np.flip(x, eqn.params["dimensions"]),
    "concatenate": lambda graph, eqn, *inputs: np.concatenate(inputs, axis=eqn.params["dimension"]),
    "stack": lambda graph, eqn, *inputs: np.stack(inputs, axis=eqn.params["axis"]),
    "unstack": _unstack, "tile": lambda graph, eqn, x: np.tile(x, eqn.params["reps"]), "argmax": _argument("lt"),
    "argmin": _argument("gt"), "lu": _lu, "split": _split, "pad": _pad, "iota": _iota, "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice, "gather": _gather,
    "reduce_sum": _reduce("add"), "reduce_prod": _reduce("mul"), "reduce_max": _reduce("max"),
    "reduce_min": _reduce("min"), "reduce_and": _reduce("and"), "reduce_or": _reduce("or"),
    "cumsum": _cumulative("add"), "cumprod": _cumulative("mul"), "cummax": _cumulative("max"),
    "cummin": _cumulative("min"), "dot_general": _dot, "cholesky": _cholesky, "triangular_solve": _triangular_solve,
    "custom_linear_solve": _linear_solve, "cond": _cond, "scan": _scan,
}  # fmt: skip
