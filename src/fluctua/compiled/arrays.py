"""Rules for array operations of JAX: shapes, reductions, and small matrices, element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.compiled.elements import (
    MAX_NODES,
    Unsupported,
    choose_fold,
    make_constants,
    map_elements,
    takes_booleans,
)
from fluctua.compiled.graph import Graph
from fluctua.core.dependence import JOINS, PARTS, VIEWS

MAX_MATRIX_ROWS = 16
"""Largest matrix that is factorised or solved with, element by element."""


# ------------------------------------------------------------------------------------------ shapes


def _move(function: Callable[..., Any]) -> Callable:
    """Rule for an operation whose output is function(equation, nodes)."""
    return lambda graph, eqn, *inputs: function(eqn, *inputs)


def _argument(order: str) -> Callable:
    """Rule for argmax ("lt") and argmin ("gt"); the first of equal elements."""

    def rule(graph: Graph, eqn: Any, x: np.ndarray) -> np.ndarray:
        (axis,) = eqn.params["axes"]
        if takes_booleans(eqn):
            one = graph.const(1.0)
            zero = graph.const(0.0)
            x = map_elements(lambda a: graph.make("select", a, one, zero), x)
        rows = np.moveaxis(x, axis, 0)
        best = rows[0]
        where = np.full(rows.shape[1:], graph.const(0.0))
        for k, row in enumerate(rows[1:], 1):
            better = map_elements(
                lambda a, b: graph.make("lt", *((a, b) if order == "lt" else (b, a))), best, row
            )
            best = map_elements(lambda c, a, b: graph.make("select", c, a, b), better, row, best)
            where = map_elements(
                lambda c, a, k=k: graph.make("select", c, graph.const(float(k)), a), better, where
            )
        return where

    return rule


def _pad(graph: Graph, eqn: Any, x: np.ndarray, value: np.ndarray) -> np.ndarray:
    for axis, (low, high, inside) in enumerate(eqn.params["padding_config"]):
        size = x.shape[axis]
        wide = max(0, size + (size - 1) * inside) if size else 0
        spread = np.full((*x.shape[:axis], wide, *x.shape[axis + 1 :]), int(value), dtype=np.int64)
        spread[(slice(None),) * axis + (slice(None, None, inside + 1),)] = x
        before = max(low, 0)
        after = max(high, 0)
        widths = [(0, 0)] * x.ndim
        widths[axis] = (before, after)
        spread = np.pad(spread, widths, constant_values=int(value))
        x = spread[
            (slice(None),) * axis + (slice(max(-low, 0), spread.shape[axis] - max(-high, 0)),)
        ]
    return x


def _iota(graph: Graph, eqn: Any, *_: Any) -> np.ndarray:
    shape = eqn.params["shape"]
    axis = eqn.params["dimension"]
    along = [-1 if k == axis else 1 for k in range(len(shape))]
    row = make_constants(graph, np.arange(shape[axis]))
    return np.broadcast_to(row.reshape(along), shape)


def _indices(graph: Graph, eqn: Any, *arrays: np.ndarray) -> list[np.ndarray]:
    """Return indices as integers; raise for an index that is not a constant."""
    if any(graph.value(int(node)) is None for ids in arrays for node in ids.ravel()):
        raise Unsupported(eqn.primitive.name, "an index that is not a constant")
    return [
        np.array([int(graph.args[int(n)][0]) for n in ids.ravel()], np.int64).reshape(ids.shape)
        for ids in arrays
    ]


def _clamped_slices(
    starts: list[np.ndarray], shape: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[slice, ...]:
    """Return slices of some sizes, moved inside the array as JAX does."""
    slices = []
    for start, length, size in zip(starts, shape, sizes, strict=True):
        first = min(max(int(start), 0), length - size)
        slices.append(slice(first, first + size))
    return tuple(slices)


def _dynamic_slice(graph: Graph, eqn: Any, x: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    sizes = eqn.params["slice_sizes"]
    return x[_clamped_slices(_indices(graph, eqn, *starts), x.shape, sizes)]


def _dynamic_update_slice(
    graph: Graph, eqn: Any, x: np.ndarray, new: np.ndarray, *starts: np.ndarray
) -> np.ndarray:
    x = x.copy()
    x[_clamped_slices(_indices(graph, eqn, *starts), x.shape, new.shape)] = new
    return x


def _gather(graph: Graph, eqn: Any, x: np.ndarray, index: np.ndarray) -> np.ndarray:
    (where,) = _indices(graph, eqn, index)
    params = dict(eqn.params, fill_value=-1)
    with jax.ensure_compile_time_eval():
        moved = np.asarray(
            eqn.primitive.bind(jnp.asarray(x, jnp.int32), jnp.asarray(where, jnp.int32), **params)
        )
    fill = eqn.params["fill_value"]
    outside = graph.const(float("nan") if fill is None else float(fill))
    return np.where(moved < 0, outside, moved).astype(np.int64)


def _scatter(
    graph: Graph, eqn: Any, x: np.ndarray, index: np.ndarray, new: np.ndarray
) -> np.ndarray:
    """Scatter updates; their places come from JAX, by unit vectors."""
    (where,) = _indices(graph, eqn, index)
    p = eqn.params
    numbers = {
        name: p[name]
        for name in ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    }
    units = np.eye(new.size, dtype=np.int32).reshape(new.size, *new.shape)

    def send(unit):
        return jax.lax.scatter_add(
            jnp.zeros(x.shape, jnp.int32), jnp.asarray(where, jnp.int32), unit, **numbers
        )

    with jax.ensure_compile_time_eval():
        landed = np.asarray(jax.vmap(send)(jnp.asarray(units))).reshape(new.size, -1)
    op = eqn.primitive.name.removeprefix("scatter")[1:]  # "" for one that replaces
    flat = x.ravel().copy()
    updates = new.ravel()
    for update, row in zip(updates, landed, strict=True):
        for k in np.flatnonzero(row):
            flat[k] = graph.make(op, int(flat[k]), int(update)) if op else update
    return flat.reshape(x.shape)


# -------------------------------------------------------------------------------- sums and matrices


def _reduce(op: str) -> Callable:
    def rule(graph: Graph, eqn: Any, x: np.ndarray) -> np.ndarray:
        axes = [int(a) for a in eqn.params["axes"]]
        rest = [a for a in range(x.ndim) if a not in axes]
        rows = np.transpose(x, rest + axes).reshape(*(x.shape[a] for a in rest), -1)
        return _fold(graph, choose_fold(op, eqn), rows)

    return rule


START = {"add": 0.0, "mul": 1.0, "max": -np.inf, "min": np.inf, "and": True, "or": False}


def _fold(graph: Graph, op: str, rows: np.ndarray) -> np.ndarray:
    """Combine elements along the last axis."""
    total = np.full(rows.shape[:-1], graph.const(START[op]), dtype=np.int64)
    for k in range(rows.shape[-1]):
        total = (
            rows[..., k]
            if k == 0
            else map_elements(lambda a, b: graph.make(op, a, b), total, rows[..., k])
        )
    return total


def _cumulative(op: str) -> Callable:
    def rule(graph: Graph, eqn: Any, x: np.ndarray) -> np.ndarray:
        axis = eqn.params["axis"]
        rows = np.moveaxis(x, axis, 0)
        rows = rows[::-1] if eqn.params["reverse"] else rows
        out = [rows[0]]
        used = choose_fold(op, eqn)
        for row in rows[1:]:
            out.append(map_elements(lambda a, b: graph.make(used, a, b), out[-1], row))
        out = out[::-1] if eqn.params["reverse"] else out
        return np.moveaxis(np.stack(out), 0, axis)

    return rule


def _dot(graph: Graph, eqn: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    (over_a, over_b), (batch_a, batch_b) = eqn.params["dimension_numbers"]
    free_a = [k for k in range(a.ndim) if k not in (*over_a, *batch_a)]
    free_b = [k for k in range(b.ndim) if k not in (*over_b, *batch_b)]
    shape = (
        [a.shape[k] for k in batch_a] + [a.shape[k] for k in free_a] + [b.shape[k] for k in free_b]
    )
    batch = int(np.prod([a.shape[k] for k in batch_a]))
    inner = int(np.prod([a.shape[k] for k in over_a]))
    left = np.transpose(a, [*batch_a, *free_a, *over_a]).reshape(batch, -1, inner)
    right = np.transpose(b, [*batch_b, *free_b, *over_b]).reshape(batch, -1, inner)
    if left.shape[1] * right.shape[1] * batch * inner > 4 * MAX_NODES:
        raise Unsupported(
            "dot_general",
            f"a product of matrices {a.shape} and {b.shape} is too large to be written out",
        )
    products = map_elements(
        lambda p, q: graph.make("mul", p, q), left[:, :, None, :], right[:, None, :, :]
    )
    return _fold(graph, "add", products).reshape(shape)


def _matrices(eqn: Any, x: np.ndarray) -> np.ndarray:
    """Return matrices as (batch, n, n); raise for one that is too large."""
    if x.shape[-1] > MAX_MATRIX_ROWS:
        raise Unsupported(
            eqn.primitive.name,
            f"a matrix of {x.shape[-1]} rows; up to {MAX_MATRIX_ROWS} are written out",
        )
    return x.reshape(-1, *x.shape[-2:])


def _cholesky(graph: Graph, eqn: Any, x: np.ndarray) -> np.ndarray:
    make = graph.make
    zero = graph.const(0.0)
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
        matrices = np.swapaxes(matrices, 1, 2)
        sides = np.swapaxes(sides, 1, 2)
    lower = p["lower"] if p["left_side"] else not p["lower"]
    if p["transpose_a"]:
        matrices = np.swapaxes(matrices, 1, 2)
        lower = not lower
    out = np.empty(sides.shape, dtype=np.int64)
    for matrix, side, solution in zip(matrices, sides, out, strict=True):
        rows = range(len(matrix)) if lower else range(len(matrix) - 1, -1, -1)
        for i in rows:
            done = range(i) if lower else range(i + 1, len(matrix))
            for c in range(side.shape[1]):
                total = int(side[i, c])
                for k in done:
                    total = graph.make(
                        "sub", total, graph.make("mul", int(matrix[i, k]), int(solution[k, c]))
                    )
                solution[i, c] = (
                    total if p["unit_diagonal"] else graph.make("div", total, int(matrix[i, i]))
                )
    return (out if p["left_side"] else np.swapaxes(out, 1, 2)).reshape(b.shape)


def _lu(graph: Graph, eqn: Any, x: np.ndarray) -> list[np.ndarray]:
    """Return placeholders: the solve that uses the factors eliminates with its own pivots."""
    _matrices(eqn, x)
    if all(graph.is_shared(int(node)) for node in x.ravel()):
        raise Unsupported("lu", "left to JAX")
    return [np.full(v.aval.shape, -1) for v in eqn.outvars]


def solve_by_elimination(graph: Graph, matrix: np.ndarray, side: np.ndarray) -> list[int]:
    """Solve matrix · y = side by elimination, with pivots chosen per trajectory."""
    make = graph.make
    n = len(side)
    rows = [[*map(int, row), int(b)] for row, b in zip(matrix, side, strict=True)]
    for k in range(n):
        for i in range(k + 1, n):
            larger = make("lt", make("abs", rows[k][k]), make("abs", rows[i][k]))
            pivot_row = [
                make("select", larger, b, a) for a, b in zip(rows[k], rows[i], strict=True)
            ]
            rows[i] = [make("select", larger, a, b) for a, b in zip(rows[k], rows[i], strict=True)]
            rows[k] = pivot_row
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


ARRAYS: dict[str, Callable] = {
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul"), _scatter
    ),
    **{name: _move(rule) for name, rule in (VIEWS | PARTS | JOINS).items()},
    "argmax": _argument("lt"),
    "argmin": _argument("gt"),
    "lu": _lu,
    "pad": _pad,
    "iota": _iota,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "reduce_sum": _reduce("add"),
    "reduce_prod": _reduce("mul"),
    "reduce_max": _reduce("max"),
    "reduce_min": _reduce("min"),
    "reduce_and": _reduce("and"),
    "reduce_or": _reduce("or"),
    "cumsum": _cumulative("add"),
    "cumprod": _cumulative("mul"),
    "cummax": _cumulative("max"),
    "cummin": _cumulative("min"),
    "dot_general": _dot,
    "cholesky": _cholesky,
    "triangular_solve": _triangular_solve,
}
