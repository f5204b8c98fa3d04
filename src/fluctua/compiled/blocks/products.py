"""Rules for sums along axes, products of arrays, and small matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.compiled.blocks.elementwise import apply_elementwise, bind
from fluctua.compiled.blocks.moves import assemble
from fluctua.compiled.blocks.nodes import LANE, ArrayGraph, ArrayNode, count_elements
from fluctua.compiled.scalar import Unsupported

MAX_PRODUCT = 1_000_000
"""Largest number of terms of a product of two arrays that both depend on the trajectory."""

MAX_MATRIX_ROWS = 8
"""Largest matrix of a trajectory that is factorised or solved with."""


def _reduce(op: str) -> Callable:
    def rule(graph: ArrayGraph, eqn: Any, x: int) -> int:
        if graph[x].kind == "b":
            return _reduce_booleans(op)(graph, eqn, x)
        axes = tuple(int(axis) for axis in eqn.params["axes"])
        return reduce_axes(graph, op, x, axes, bind(eqn))

    return rule


def _reduce_booleans(op: str) -> Callable:
    """Rule for "all" and "any": the smallest and the largest of 0 and 1."""

    def rule(graph: ArrayGraph, eqn: Any, x: int) -> int:
        axes = tuple(int(axis) for axis in eqn.params["axes"])
        if graph[x].kind != "b":
            raise Unsupported(eqn.primitive.name, "bits of integers")
        numbers = apply_elementwise(graph, "as_number", (x,), lambda a: a.astype(jnp.float32))
        whole: Callable[..., Any] = jnp.min if op == "min" else jnp.max
        reduced = reduce_axes(graph, op, numbers, axes, lambda a: whole(a, axis=axes))
        zero = graph.const(np.zeros((), np.float32))
        return apply_elementwise(graph, "ne", (reduced, zero), jnp.not_equal)

    return rule


def reduce_axes(
    graph: ArrayGraph, op: str, x: int, axes: tuple[int, ...], evaluate: Callable[..., Any]
) -> int:
    """Add the combination of the elements along axes. op: "sum", "prod", "max", "min"."""
    of = graph[x]
    if of.op == "const":
        combined = getattr(np, op)(of.data, axis=axes)
        return graph.const(np.asarray(combined, of.data.dtype))
    if of.kind != "f":
        raise Unsupported(f"reduce_{op}", "of integers or booleans")
    rest = [axis for axis in range(len(of.shape)) if axis not in axes]
    shape = tuple(of.shape[axis] for axis in rest)
    if math.prod(of.shape[axis] for axis in axes) == 1:
        return graph.view(x, np.arange(of.size), shape)
    # reduced axes last
    order = [*rest, *axes]
    moved = np.transpose(count_elements(of.shape), order)
    rows = graph.view(x, moved, moved.shape)

    def combine(array: Any) -> Any:
        return evaluate(jnp.transpose(array, np.argsort(order).tolist()))

    node = ArrayNode(f"reduce_{op}", (rows,), shape, "f", of.depends, len(rest), combine)
    return graph.add(node, len(rest))


def _dot(graph: ArrayGraph, eqn: Any, a: int, b: int) -> int:
    numbers = eqn.params["dimension_numbers"]
    (over_a, over_b), (batch_a, batch_b) = numbers
    left, batch, rows, inner = _arrange(graph, a, batch_a, over_a)
    right, _, columns, _ = _arrange(graph, b, batch_b, over_b)
    shape = eqn.outvars[0].aval.shape
    m, n, k, groups = (math.prod(v) for v in (rows, columns, inner, batch))
    left = graph.view(left, np.arange(graph[left].size), (groups, m, k))
    right = graph.view(right, np.arange(graph[right].size), (groups, n, k))
    return multiply(graph, left, right, shape)


def multiply(graph: ArrayGraph, left: int, right: int, shape: tuple[int, ...]) -> int:
    """Add Σₖ left[g, i, k] right[g, j, k], in the given shape."""
    groups, m, k = graph[left].shape
    n = graph[right].shape[1]
    depends = graph[left].depends | graph[right].depends
    lanes = [bool(graph[v].depends & LANE) for v in (left, right)]
    if not any(lanes):
        raise Unsupported("dot_general", "left to JAX")
    if not all(lanes) and k > 1:

        def contract(p: Any, q: Any) -> Any:
            return jnp.einsum("gmk,gnk->gmn", p, q)

        node = ArrayNode("dot", (left, right), (groups, m, n), "f", depends, None, contract)
        product = graph.add(node, None)
        return graph.view(product, np.arange(groups * m * n), shape)
    if groups * m * n * k > MAX_PRODUCT:
        raise Unsupported("dot_general", "a large product of two arrays of the trajectory")
    g, i, j, h = np.ix_(*(np.arange(v) for v in (groups, m, n, k)))
    whole = (groups, m, n, k)
    first = graph.view(left, np.broadcast_to((g * m + i) * k + h, whole), whole)
    second = graph.view(right, np.broadcast_to((g * n + j) * k + h, whole), whole)
    terms = apply_elementwise(graph, "mul", (first, second), jnp.multiply)
    total = reduce_axes(graph, "sum", terms, (3,), lambda array: jnp.sum(array, axis=3))
    return graph.view(total, np.arange(groups * m * n), shape)


def _cumsum(graph: ArrayGraph, eqn: Any, x: int) -> int:
    """Multiply by a triangle of ones."""
    if not graph[x].depends & LANE:
        raise Unsupported("cumsum", "left to JAX")
    axis = eqn.params["axis"]
    moved = np.moveaxis(count_elements(graph[x].shape), axis, -1)
    length = moved.shape[-1]
    left = graph.view(x, moved, (1, moved.size // length, length))
    ones = np.tri(length, dtype=eqn.outvars[0].aval.dtype)
    right = graph.const((ones.T if eqn.params["reverse"] else ones)[None])
    total = multiply(graph, left, right, moved.shape)
    back = np.moveaxis(count_elements(moved.shape), -1, axis)
    return graph.view(total, back, back.shape)


def _arrange(
    graph: ArrayGraph, node: int, batch: Sequence[int], over: Sequence[int]
) -> tuple[int, list[int], list[int], list[int]]:
    """Order axes as batch, free, contracted; return the view and the lengths of the three."""
    shape = graph[node].shape
    free = [axis for axis in range(len(shape)) if axis not in (*batch, *over)]
    places = np.transpose(count_elements(shape), [*batch, *free, *over])
    lengths = [[shape[axis] for axis in axes] for axes in (batch, free, over)]
    return graph.view(node, places, places.shape), lengths[0], lengths[1], lengths[2]


# ---------------------------------------------------------------------------------- small matrices


def _take(graph: ArrayGraph, node: int, *index: int) -> int:
    """Return one element of an array."""
    place = np.ravel_multi_index(index, graph[node].shape)
    return graph.view(node, np.array([place]), ())


def _check_matrix(graph: ArrayGraph, eqn: Any, node: int) -> int:
    shape = graph[node].shape
    if len(shape) != 2:
        raise Unsupported(eqn.primitive.name, "of several matrices")
    if shape[0] > MAX_MATRIX_ROWS:
        raise Unsupported(
            eqn.primitive.name, f"a matrix of {shape[0]} rows; up to {MAX_MATRIX_ROWS}"
        )
    return shape[0]


def _subtract(graph: ArrayGraph, total: int, a: int, b: int) -> int:
    """Return total − a b."""
    product = apply_elementwise(graph, "mul", (a, b), jnp.multiply)
    return apply_elementwise(graph, "sub", (total, product), jnp.subtract)


def _cholesky(graph: ArrayGraph, eqn: Any, x: int) -> int:
    if not graph[x].depends & LANE:
        raise Unsupported("cholesky", "left to JAX")
    n = _check_matrix(graph, eqn, x)
    low: dict[tuple[int, int], int] = {}
    for j in range(n):
        for i in range(j, n):
            total = _take(graph, x, i, j)
            for k in range(j):
                total = _subtract(graph, total, low[i, k], low[j, k])
            if i == j:
                low[i, j] = apply_elementwise(graph, "sqrt", (total,), jnp.sqrt)
            else:
                low[i, j] = apply_elementwise(graph, "div", (total, low[j, j]), jnp.divide)
    zero = graph.const(np.zeros((n, n), eqn.outvars[0].aval.dtype))
    places = [(node, np.array([i * n + j])) for (i, j), node in low.items()]
    return assemble(graph, (n, n), zero, places)


def _triangular_solve(graph: ArrayGraph, eqn: Any, a: int, b: int) -> int:
    p = eqn.params
    if len(graph[a].shape) != 2 or len(graph[b].shape) != 2:
        raise Unsupported("triangular_solve", "of several matrices")
    if not graph[a].depends & LANE:
        return _solve_ahead(graph, eqn, a, b)
    n = _check_matrix(graph, eqn, a)
    sides = graph[b].shape[1 if p["left_side"] else 0]
    # X A = B is Aᵀ Xᵀ = Bᵀ
    turned = p["transpose_a"] == p["left_side"]
    lower = p["lower"] != turned
    rows = range(n) if lower else range(n - 1, -1, -1)
    solution: dict[tuple[int, int], int] = {}
    for c in range(sides):
        for i in rows:
            total = _take(graph, b, *((i, c) if p["left_side"] else (c, i)))
            for k in range(i) if lower else range(i + 1, n):
                factor = _take(graph, a, *((k, i) if turned else (i, k)))
                total = _subtract(graph, total, factor, solution[k, c])
            if not p["unit_diagonal"]:
                pivot = _take(graph, a, i, i)
                total = apply_elementwise(graph, "div", (total, pivot), jnp.divide)
            solution[i, c] = total
    shape = graph[b].shape
    places = [
        (node, np.array([i * sides + c if p["left_side"] else c * n + i]))
        for (i, c), node in solution.items()
    ]
    return assemble(graph, shape, None, places)


def _solve_ahead(graph: ArrayGraph, eqn: Any, a: int, b: int) -> int:
    """Multiply by the inverse of a matrix that is the same for all trajectories."""
    if not graph[b].depends & LANE:
        raise Unsupported("triangular_solve", "left to JAX")
    n = graph[a].shape[0]
    params = {k: v for k, v in eqn.params.items() if k != "left_side"}

    def invert(matrix: Any) -> Any:
        eye = jnp.eye(n, dtype=matrix.dtype)
        return jax.lax.linalg.triangular_solve(matrix, eye, left_side=True, **params)

    node = ArrayNode("ahead", (a,), (n, n), "f", graph[a].depends, None, invert)
    inverse = graph.add(node, ("inverse", str(params)))
    if graph[a].op == "const":
        with jax.ensure_compile_time_eval():
            inverse = graph.const(np.asarray(invert(jnp.asarray(graph[a].data))))
    rows, columns = graph[b].shape
    if eqn.params["left_side"]:
        left = graph.view(inverse, np.arange(n * n), (1, n, n))
        turned = count_elements((rows, columns)).T
        right = graph.view(b, turned, (1, columns, rows))
    else:
        left = graph.view(b, np.arange(rows * columns), (1, rows, columns))
        right = graph.view(inverse, count_elements((n, n)).T, (1, n, n))
    return multiply(graph, left, right, (rows, columns))


PRODUCTS: dict[str, Callable] = {
    "reduce_sum": _reduce("sum"),
    "reduce_prod": _reduce("prod"),
    "reduce_max": _reduce("max"),
    "reduce_min": _reduce("min"),
    "reduce_and": _reduce_booleans("min"),
    "reduce_or": _reduce_booleans("max"),
    "dot_general": _dot,
    "cumsum": _cumsum,
    "cholesky": _cholesky,
    "triangular_solve": _triangular_solve,
}
