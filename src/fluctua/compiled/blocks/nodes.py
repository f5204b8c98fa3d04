"""Arrays of one trajectory as nodes of a graph, equal ones once.

A node depends on θ, on the time, or on the trajectory. What does not depend on the trajectory is
computed ahead by JAX; the rest becomes loops of a kernel. Operations that only move elements are
views: for each element the place of its source.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fluctua.compiled.scalar import Unsupported

THETA = 1
TIMED = 2
LANE = 4
"""What a node depends on: parameters, time, trajectory."""

SPREAD = "spread"
"""Operation that puts elements at places which depend on the time. Arguments: elements, places."""

MAX_ELEMENTS = 4_000_000
"""Largest array whose elements are counted one by one."""


class ArrayNode(NamedTuple):
    """One array.

    op: an operation of a kernel, or "input", "const", "view", "assemble", "dot", "ahead".
    args: nodes.
    kind: "f" for numbers, "b" for true and false, "i" for integers.
    data: places of a view, value of a constant, or parameters of the operation.
    evaluate: the same by JAX, arrays of `args` -> array; None where JAX is not used.
    """

    op: str
    args: tuple[int, ...]
    shape: tuple[int, ...]
    kind: str
    depends: int
    data: Any = None
    evaluate: Callable[..., Any] | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class IndexMap:
    """Places of elements of one array in another, hashable. places: (size,)."""

    def __init__(self, places: np.ndarray):
        self.places = np.ascontiguousarray(places, np.int64).ravel()

    @cached_property
    def _identity(self) -> tuple[int, bytes]:
        return len(self.places), self.places.tobytes()

    def __hash__(self) -> int:
        return hash(self._identity)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IndexMap) and np.array_equal(self.places, other.places)


class Affine(NamedTuple):
    """Places offset + Σ strides·index of the elements of a shape."""

    offset: int
    strides: tuple[int, ...]


def find_strides(places: np.ndarray, shape: Sequence[int]) -> Affine | None:
    """Return offset and strides of places, one per element of `shape`; None if there are none."""
    table = places.reshape(shape)
    if not table.size:
        return Affine(0, (0,) * len(shape))
    first = (0,) * len(shape)
    offset = int(table[first])
    strides = tuple(
        int(table[(*first[:axis], 1, *first[axis + 1 :])]) - offset if length > 1 else 0
        for axis, length in enumerate(shape)
    )
    expected = np.full((1,) * len(shape), offset)
    for axis, (stride, length) in enumerate(zip(strides, shape, strict=True)):
        along = [-1 if k == axis else 1 for k in range(len(shape))]
        expected = expected + (stride * np.arange(length)).reshape(along)
    return Affine(offset, strides) if np.array_equal(expected, table) else None


class ArrayGraph:
    """Nodes in the order in which they can be computed."""

    def __init__(self) -> None:
        self.nodes: list[ArrayNode] = []
        self._known: dict[Any, int] = {}

    def __getitem__(self, node: int) -> ArrayNode:
        return self.nodes[node]

    def add(self, node: ArrayNode, key: Any) -> int:
        """Add a node, or find the one with the same operation, arguments and `key`."""
        whole = (node.op, node.args, node.shape, node.kind, key)
        if whole not in self._known:
            self._known[whole] = len(self.nodes)
            self.nodes.append(node)
        return self._known[whole]

    def input(self, name: str, shape: Sequence[int], kind: str, depends: int) -> int:
        """Add an input."""
        return self.add(ArrayNode("input", (), tuple(shape), kind, depends, name), name)

    def const(self, value: Any) -> int:
        """Add a constant array."""
        array = np.asarray(value)
        kind = {"u": "i"}.get(array.dtype.kind, array.dtype.kind)
        if kind not in "fib":
            raise Unsupported("constant", f"an array of type {array.dtype}")
        flat = array.ravel()
        # a uniform array by its value, so that large ones are cheap
        same = flat.size and (flat == flat[0]).all()
        if same and flat[0] == 0 and kind == "f":  # 0 and −0 are equal, and two numbers
            same = not np.any(np.signbit(flat) != np.signbit(flat[0]))
        key = (str(array.dtype), flat[:1].tobytes() if same else array.tobytes(), bool(same))
        return self.add(ArrayNode("const", (), array.shape, kind, 0, array), key)

    def uniform(self, node: int) -> float | None:
        """Return the value of a constant whose elements are all equal; else None."""
        value = self.nodes[node]
        if value.op != "const" or not value.size:
            return None
        flat = value.data.ravel()
        return flat[0].item() if (flat == flat[0]).all() else None

    def view(self, node: int, places: np.ndarray, shape: Sequence[int]) -> int:
        """Add the array whose elements are those of `node` at `places`."""
        shape = tuple(int(length) for length in shape)
        places = np.asarray(places, np.int64).ravel()
        of = self.nodes[node]
        if of.op == "const":
            return self.const(of.data.ravel()[places].reshape(shape))
        if of.op == "view":
            places = of.data.places[places]
            node = of.args[0]
            of = self.nodes[node]
        if shape == of.shape and np.array_equal(places, np.arange(of.size)):
            return node
        index = IndexMap(places)

        def take(array: Any) -> Any:
            return jnp.take(array.ravel(), jnp.asarray(index.places)).reshape(shape)

        return self.add(ArrayNode("view", (node,), shape, of.kind, of.depends, index, take), index)

    def trace_source(self, node: int) -> tuple[int, np.ndarray | None]:
        """Return the node that a view looks at and the places; None for the node itself."""
        of = self.nodes[node]
        return (of.args[0], of.data.places) if of.op == "view" else (node, None)

    def broadcast(self, node: int, shape: Sequence[int]) -> int:
        """Broadcast a node to a shape by the rules of NumPy."""
        of = self.nodes[node]
        if of.shape == tuple(shape):
            return node
        return self.view(node, np.broadcast_to(count_elements(of.shape), shape), shape)

    def reachable(self, roots: Sequence[int]) -> list[int]:
        """Return all nodes that roots depend on, in order."""
        reached: set[int] = set()
        waiting = list(roots)
        while waiting:
            node = waiting.pop()
            if node not in reached:
                reached.add(node)
                waiting.extend(self.nodes[node].args)
        return sorted(reached)


def count_elements(shape: Sequence[int]) -> np.ndarray:
    """Return the numbers of the elements of an array, in its shape."""
    size = math.prod(shape)
    if size > MAX_ELEMENTS:
        raise Unsupported("array", f"an array of {size} numbers per trajectory")
    return np.arange(size).reshape(shape)
