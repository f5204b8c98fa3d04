"""Rules for operations that move elements: views of one array, and arrays put together."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.compiled.blocks.nodes import (
    LANE,
    SPREAD,
    ArrayGraph,
    ArrayNode,
    IndexMap,
    count_elements,
)
from fluctua.compiled.scalar import Unsupported
from fluctua.core.dependence import PARTS, VIEWS


class Placement(NamedTuple):
    """Elements of one argument and their places in the array that they are put into.

    added: added to what is there, not put in its place.
    """

    target: IndexMap
    added: bool


def _move(function: Callable[[Any, np.ndarray], Any]) -> Callable:
    """Rule for an operation whose output is function(equation, numbers of the elements)."""

    def rule(graph: ArrayGraph, eqn: Any, x: int, *_: int) -> Any:
        moved = function(eqn, count_elements(graph[x].shape))
        if isinstance(moved, list):
            return [graph.view(x, part, part.shape) for part in moved]
        return graph.view(x, moved, moved.shape)

    return rule


def _broadcast(eqn: Any, x: np.ndarray) -> np.ndarray:
    shape = eqn.params["shape"]
    if math.prod(shape) > 100 * max(1, x.size):
        count_elements(shape)
    return VIEWS["broadcast_in_dim"](eqn, x)


def _read_indices(graph: ArrayGraph, eqn: Any, nodes: Sequence[int]) -> list[np.ndarray]:
    if any(graph[node].op != "const" for node in nodes):
        raise Unsupported(eqn.primitive.name, "an index that is not a constant")
    return [graph[node].data for node in nodes]


def _clamp_slices(
    starts: Sequence[np.ndarray], shape: Sequence[int], sizes: Sequence[int]
) -> tuple[slice, ...]:
    """Return slices of some sizes, moved inside the array as JAX does."""
    slices = []
    for start, length, size in zip(starts, shape, sizes, strict=True):
        first = min(max(int(start), 0), length - size)
        slices.append(slice(first, first + size))
    return tuple(slices)


def _dynamic_slice(graph: ArrayGraph, eqn: Any, x: int, *starts: int) -> int:
    shape = graph[x].shape
    slices = _clamp_slices(_read_indices(graph, eqn, starts), shape, eqn.params["slice_sizes"])
    moved = count_elements(shape)[slices]
    return graph.view(x, moved, moved.shape)


def _gather(graph: ArrayGraph, eqn: Any, x: int, index: int) -> int:
    (where,) = _read_indices(graph, eqn, [index])
    params = dict(eqn.params, fill_value=-1)
    numbers = count_elements(graph[x].shape).astype(np.int32)
    with jax.ensure_compile_time_eval():
        moved = np.asarray(
            eqn.primitive.bind(jnp.asarray(numbers), jnp.asarray(where, jnp.int32), **params)
        )
    if (moved < 0).any():
        raise Unsupported("gather", "an index outside of the array")
    return graph.view(x, moved, moved.shape)


# ----------------------------------------------------------------------------- arrays put together


def assemble(
    graph: ArrayGraph,
    shape: Sequence[int],
    base: int | None,
    parts: Sequence[tuple[int, np.ndarray]],
    added: bool = False,
) -> int:
    """Add an array made of others.

    base: what it is where no part is; None if parts are everywhere.
    parts: nodes and the places of their elements; negative for elements that are dropped.
    added: parts are added to the base.
    """
    shape = tuple(int(length) for length in shape)
    pieces = []
    args = [] if base is None else [graph.broadcast(base, shape)]
    for node, places in parts:
        places = np.asarray(places).ravel()
        kept = places >= 0
        if not kept.all():
            node = graph.view(node, np.flatnonzero(kept), (int(kept.sum()),))
            places = places[kept]
        if places.size:
            args.append(node)
            pieces.append(Placement(IndexMap(places), added))
    nodes = [graph[a] for a in args]

    def put(*arrays: Any) -> Any:
        rest = list(arrays)
        flat = jnp.zeros(math.prod(shape), jnp.result_type(*arrays))
        if base is not None:
            flat = rest.pop(0).ravel().astype(flat.dtype)
        for array, piece in zip(rest, pieces, strict=True):
            at = flat.at[jnp.asarray(piece.target.places)]
            flat = at.add(array.ravel()) if piece.added else at.set(array.ravel())
        return flat.reshape(shape)

    if all(n.op == "const" for n in nodes):
        return graph.const(_put_constants(shape, base is not None, [n.data for n in nodes], pieces))
    depends = 0
    for n in nodes:
        depends |= n.depends
    kind = nodes[-1].kind
    data = (base is not None, tuple(pieces))
    return graph.add(ArrayNode("assemble", tuple(args), shape, kind, depends, data, put), data)


def _put_constants(
    shape: Sequence[int], has_base: bool, arrays: list[np.ndarray], pieces: Sequence[Placement]
) -> np.ndarray:
    flat = np.zeros(math.prod(shape), np.result_type(*arrays))
    if has_base:
        flat = arrays[0].ravel().copy()
    for array, piece in zip(arrays[has_base:], pieces, strict=True):
        if piece.added:
            np.add.at(flat, piece.target.places, array.ravel())
        else:
            flat[piece.target.places] = array.ravel()
    return flat.reshape(shape)


def _concatenate(graph: ArrayGraph, eqn: Any, *inputs: int) -> int:
    shape = eqn.outvars[0].aval.shape
    axis = eqn.params["dimension"]
    numbers = count_elements(shape)
    ends = np.cumsum([graph[x].shape[axis] for x in inputs])[:-1]
    places = np.split(numbers, ends, axis=axis)
    return assemble(graph, shape, None, list(zip(inputs, places, strict=True)))


def _stack(graph: ArrayGraph, eqn: Any, *inputs: int) -> int:
    shape = eqn.outvars[0].aval.shape
    places = np.moveaxis(count_elements(shape), eqn.params["axis"], 0)
    return assemble(graph, shape, None, list(zip(inputs, places, strict=True)))


def _pad(graph: ArrayGraph, eqn: Any, x: int, value: int) -> int:
    shape = eqn.outvars[0].aval.shape
    places = np.zeros(graph[x].shape, np.int64)
    inside = np.ones(graph[x].shape, bool)
    for axis, (low, _, between) in enumerate(eqn.params["padding_config"]):
        along = [-1 if k == axis else 1 for k in range(places.ndim)]
        position = (low + np.arange(graph[x].shape[axis]) * (between + 1)).reshape(along)
        inside &= (position >= 0) & (position < shape[axis])
        places = places * shape[axis] + position
    return assemble(graph, shape, value, [(x, np.where(inside, places, -1))])


def _dynamic_update_slice(graph: ArrayGraph, eqn: Any, x: int, new: int, *starts: int) -> int:
    shape = graph[x].shape
    if any(graph[node].op != "const" for node in starts) and graph.uniform(x) == 0:
        elements = count_elements(shape).astype(np.int32)

        def find_places(*first: Any) -> Any:
            return jax.lax.dynamic_slice(jnp.asarray(elements), first, graph[new].shape)

        return _spread(graph, eqn, shape, starts, new, find_places)
    slices = _clamp_slices(_read_indices(graph, eqn, starts), shape, graph[new].shape)
    return assemble(graph, shape, x, [(new, count_elements(shape)[slices])])


def _scatter(graph: ArrayGraph, eqn: Any, x: int, index: int, new: int) -> int:
    """Scatter updates; their places come from the gather with the same indices."""
    op = eqn.primitive.name.removeprefix("scatter")[1:]
    if op not in ("", "add"):
        raise Unsupported(eqn.primitive.name, "kernels on arrays have no rule for it")
    find_places = _make_place_finder(eqn, graph[x].shape, graph[new].shape)
    if graph[index].op != "const":
        if op != "add" or graph.uniform(x) != 0:
            raise Unsupported(eqn.primitive.name, "an index that is not a constant")
        return _spread(graph, eqn, graph[x].shape, (index,), new, find_places)
    with jax.ensure_compile_time_eval():
        places = np.asarray(find_places(jnp.asarray(graph[index].data, jnp.int32)))
    return assemble(graph, graph[x].shape, x, [(new, places)], added=op == "add")


def _make_place_finder(
    eqn: Any, shape: tuple[int, ...], new_shape: tuple[int, ...]
) -> Callable[[Any], Any]:
    """Return the function index -> places of the updates, negative for those that are dropped."""
    p = eqn.params["dimension_numbers"]
    if p.operand_batching_dims or p.scatter_indices_batching_dims:
        raise Unsupported(eqn.primitive.name, "with batches")
    window = [d for d in range(len(shape)) if d not in p.inserted_window_dims]
    sizes = [1] * len(shape)
    for axis, d in zip(p.update_window_dims, window, strict=True):
        sizes[d] = new_shape[axis]
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=p.update_window_dims,
        collapsed_slice_dims=p.inserted_window_dims,
        start_index_map=p.scatter_dims_to_operand_dims,
    )
    clips = eqn.params["mode"] == jax.lax.GatherScatterMode.CLIP
    elements = count_elements(shape).astype(np.int32)

    def find_places(index: Any) -> Any:
        return jax.lax.gather(
            jnp.asarray(elements),
            index,
            numbers,
            tuple(sizes),
            mode="clip" if clips else "fill",
            fill_value=-1,
        )

    return find_places


def _spread(
    graph: ArrayGraph,
    eqn: Any,
    shape: tuple[int, ...],
    indices: Sequence[int],
    new: int,
    find_places: Callable[..., Any],
) -> int:
    """Add updates to zeros, at places that all trajectories share in a step.

    An example is the gradient of a table that is read at an index of the time. It is summed up per
    step, and put into place after that. find_places: function of the indices, by JAX.
    """
    if any(graph[node].depends & LANE for node in indices) or not graph[new].depends & LANE:
        raise Unsupported(eqn.primitive.name, "an index that is not a constant")
    where = functools.reduce(operator.or_, (graph[node].depends for node in indices))
    # id(eqn) stays that of this equation, because the nodes keep it alive
    node = ArrayNode("ahead", tuple(indices), graph[new].shape, "i", where, eqn, find_places)
    places = graph.add(node, (id(eqn), "places"))
    depends = graph[new].depends | where
    return graph.add(ArrayNode(SPREAD, (new, places), shape, "f", depends, eqn), id(eqn))


def _iota(graph: ArrayGraph, eqn: Any, *_: int) -> int:
    shape = eqn.params["shape"]
    axis = eqn.params["dimension"]
    along = [-1 if k == axis else 1 for k in range(len(shape))]
    row = np.arange(shape[axis], dtype=eqn.params["dtype"]).reshape(along)
    return graph.const(np.broadcast_to(row, shape))


MOVES: dict[str, Callable] = {
    **{name: _move(rule) for name, rule in (VIEWS | PARTS).items()},
    "broadcast_in_dim": _move(_broadcast),
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "concatenate": _concatenate,
    "stack": _stack,
    "pad": _pad,
    "dynamic_update_slice": _dynamic_update_slice,
    "iota": _iota,
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add"), _scatter),
}
