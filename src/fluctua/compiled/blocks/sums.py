"""Which sums over trajectories a kernel forms, and how gradients follow from them.

Gradients are linear in what depends on the trajectory. A factor that depends on θ alone can wait
until the sum is formed: the kernel adds up `roots`, and JAX applies the rest once per batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.compiled.blocks.nodes import LANE, SPREAD, THETA, ArrayGraph, find_strides
from fluctua.compiled.scalar import Unsupported
from fluctua.core.arrays import jit

OUTER_ELEMENTS = 512
"""Elements from which the sum of products a bᵀ is a product of matrices over trajectories."""


class Outer(NamedTuple):
    """A root that is a product a bᵀ.

    rows, columns: nodes a (m,) and b (n,).
    order: place in the m × n products of each element of the root.
    """

    rows: int
    columns: int
    order: np.ndarray


def find_outer(graph: ArrayGraph, node: int, least: int = OUTER_ELEMENTS) -> Outer | None:
    """Return the factors of a node that is a large product a bᵀ; None for any other.

    least: elements of a large one.
    """
    of = graph[node]
    if of.op != "mul" or of.size < least:
        return None
    if any(not graph[a].depends & LANE for a in of.args):
        return None
    strides = []
    for arg in of.args:
        source, places = graph.trace_source(arg)
        layout = None if places is None else find_strides(places, of.shape)
        if layout is None:
            return None
        strides.append(layout.strides)
    axes = range(len(of.shape))
    if any(strides[0][k] and strides[1][k] for k in axes):
        return None
    rows = [k for k in axes if strides[0][k]]
    columns = [k for k in axes if not strides[0][k]]
    m = int(np.prod([of.shape[k] for k in rows]))
    n = of.size // m
    if min(m, n) < 2:
        return None
    numbers = np.transpose(np.arange(of.size).reshape(of.shape), [*rows, *columns]).reshape(m, n)
    first, second = of.args
    if m > n:  # columns are the longer
        first, second = of.args[::-1]
        numbers = numbers.T
    left = graph.view(first, numbers[:, 0], numbers.shape[:1])
    right = graph.view(second, numbers[0], numbers.shape[1:])
    return Outer(left, right, np.argsort(numbers.ravel()))


class SumPlan(NamedTuple):
    """Sums that a kernel forms.

    outputs: gradients. roots: nodes that are added up over trajectories and steps.
    by_step: nodes `SPREAD`, whose elements are added up over trajectories alone.
    """

    outputs: tuple[int, ...]
    roots: tuple[int, ...]
    by_step: tuple[int, ...]


def split_sums(graph: ArrayGraph, outputs: Sequence[int], least: int = OUTER_ELEMENTS) -> SumPlan:
    """Find the nodes to add up over trajectories, from which gradients follow.

    least: elements of a product a bᵀ.
    """
    roots: set[int] = set()
    by_step: set[int] = set()

    @cache
    def is_divided(node: int) -> bool:
        """Whether parts of a node are summed up separately.

        Such parts are products a bᵀ, few elements among zeros, and elements whose places depend on
        the time.
        """
        of = graph[node]
        if of.op == SPREAD or find_outer(graph, node, least) is not None:
            return True
        lanes = _linear_arguments(graph, node)
        if lanes is None:
            return False
        sparse = of.op == "assemble" and sum(graph[a].size for a in lanes) < of.size
        return sparse or any(is_divided(arg) for arg in lanes)

    @cache
    def has_factor(node: int) -> bool:
        """Whether a factor of θ alone can wait until the sum is formed."""
        lanes = _linear_arguments(graph, node)
        if lanes is None:
            return False
        return graph[node].op in ("mul", "dot", "div") or any(has_factor(arg) for arg in lanes)

    def visit(node: int) -> None:
        if not graph[node].depends & LANE or node in roots:
            return
        if graph[node].op == SPREAD:
            by_step.add(node)
            return
        lanes = _linear_arguments(graph, node)
        if lanes is None or find_outer(graph, node, least) is not None:
            roots.add(node)
            return
        small = all(graph[a].size <= graph[node].size for a in lanes)
        if (small and (graph[node].op == "view" or has_factor(node))) or is_divided(node):
            for arg in lanes:
                visit(arg)
        else:
            roots.add(node)

    for node in outputs:
        visit(node)
    plan = SumPlan(tuple(outputs), tuple(sorted(roots)), tuple(sorted(by_step)))
    refuse_spread(graph, [*plan.roots, *(graph[node].args[0] for node in plan.by_step)])
    return plan


def refuse_spread(graph: ArrayGraph, nodes: Sequence[int]) -> None:
    """Raise where nodes are computed from elements whose places change with the time."""
    if any(graph[node].op == SPREAD for node in graph.reachable(nodes)):
        raise Unsupported("scatter", "an index that changes with the time, within a step")


def _linear_arguments(graph: ArrayGraph, node: int) -> list[int] | None:
    """Return the arguments that a node is linear in, with factors of θ alone; None if it is not."""
    of = graph[node]
    lanes = [a for a in of.args if graph[a].depends & LANE]
    rest = [a for a in of.args if not graph[a].depends & LANE]
    if any(graph[a].depends & ~THETA for a in rest):
        return None
    zeros = all(graph.uniform(a) == 0 for a in rest)
    if of.op in ("neg", "view", "reduce_sum"):
        return lanes
    if of.op in ("add", "sub", "assemble") and zeros:
        return lanes
    if of.op in ("mul", "dot") and len(lanes) == 1 and lanes[0] not in rest and len(of.args) == 2:
        return lanes if of.args[0] != of.args[1] else None
    if of.op == "div" and lanes == [of.args[0]]:
        return lanes
    return None


# -------------------------------------------------------------------------------------- evaluation


def evaluate_nodes(graph: ArrayGraph, targets: Sequence[int], values: dict[int, Any]) -> list[Any]:
    """Evaluate nodes by JAX. values: of inputs and of nodes that are known."""
    known = dict(values)

    def value(node: int) -> Any:
        if node not in known:
            of = graph[node]
            if of.op == "const":
                return jnp.asarray(of.data)
            assert of.evaluate is not None
            known[node] = of.evaluate(*(value(a) for a in of.args))
        return known[node]

    return [value(node) for node in targets]


NUMPY_SUMS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "neg": np.negative,
}


def finish_sums(
    graph: ArrayGraph,
    plan: SumPlan,
    sums: dict[int, np.ndarray],
    theta: dict[int, Any],
    batches: int,
) -> list[np.ndarray]:
    """Return the gradients of every batch (B, ...) from the sums of the roots (B, ...)."""
    known = dict(sums)

    def assemble_sums(node: int) -> np.ndarray | None:
        """Put sums among zeros (B, ...)."""
        of = graph[node]
        has_base, pieces = of.data
        table = np.zeros((batches, of.size))
        for arg, piece in zip(of.args[has_base:], pieces, strict=True):
            part = value(arg) if graph[arg].depends & LANE else np.zeros(())
            if part is None:
                return None
            flat = part.reshape(len(part), -1) if part.ndim else part
            if piece.added:
                np.add.at(table.T, piece.target.places, flat.T)
            else:
                table[:, piece.target.places] = flat
        return table.reshape(batches, *of.shape)

    def value(node: int) -> np.ndarray | None:
        of = graph[node]
        if node in known:
            return known[node]
        if of.op == "view":
            base = value(of.args[0])
            if base is None:
                return None
            known[node] = take_columns(base, of.data.places).reshape(-1, *of.shape)
            return known[node]
        if of.op == "assemble":
            assembled = assemble_sums(node)
            if assembled is not None:
                known[node] = assembled
            return assembled
        if of.op in NUMPY_SUMS:
            parts = [value(a) for a in of.args]
            if any(part is None for part in parts):
                return None
            known[node] = NUMPY_SUMS[of.op](*parts)
            return known[node]
        return None

    left = [node for node in plan.outputs if graph[node].depends & LANE and value(node) is None]
    if left:
        function = _make_finish(graph, tuple(left), tuple(sums), tuple(theta))
        results = function(list(sums.values()), list(theta.values()))
        known.update(zip(left, map(np.asarray, results), strict=True))
    return [
        known[node] if graph[node].depends & LANE else np.zeros((batches, *graph[node].shape))
        for node in plan.outputs
    ]


def spread_sums(values: np.ndarray, places: np.ndarray, size: int) -> np.ndarray:
    """Return sums of steps at their places (B, size). values: (B, T, L). places: (T, L)."""
    rows = values.reshape(len(values), -1).T
    where = places.ravel()
    kept = where >= 0
    table = np.zeros((size, len(values)))
    np.add.at(table, where[kept], rows[kept])
    return table.T


class SumPlaces(NamedTuple):
    """Where the elements of a gradient are among the sums of the roots, and with which sign.

    root: a node. places: of the elements in its sums. sign: 1 or −1.
    """

    root: int
    places: np.ndarray
    sign: int


def find_sum_places(graph: ArrayGraph, plan: SumPlan, output: int) -> SumPlaces | None:
    """Return where the elements of an output are, if they are sums of one root; else None."""
    places = np.arange(graph[output].size)
    node = output
    sign = 1
    while node not in plan.roots:
        of = graph[node]
        if of.op == "neg":
            sign = -sign
        elif of.op == "view":
            places = of.data.places.ravel()[places]
        else:
            return None
        node = of.args[0]
    return SumPlaces(node, places, sign)


def take_columns(rows: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return elements of every row (B, ...), without a copy where they are all in order."""
    flat = rows.reshape(len(rows), -1)
    if np.array_equal(places, np.arange(flat.shape[1])):
        return flat
    return flat[:, places]


@cache
def _make_finish(
    graph: ArrayGraph, targets: tuple[int, ...], roots: tuple[int, ...], inputs: tuple[int, ...]
) -> Callable[..., Any]:
    def finish(sums: list[Any], theta: list[Any]) -> list[Any]:
        values = dict(zip(roots, sums, strict=True)) | dict(zip(inputs, theta, strict=True))
        return evaluate_nodes(graph, targets, values)

    return jit(jax.vmap(finish, in_axes=(0, None)))
