"""What the result of a function may depend on, element by element, from its operations.

A function is read as its jaxpr, and marks go along with the elements of every array in it: an
element is marked if it may depend on a marked one. Choices on the way (`jnp.where`, `cond`) count
with all of their branches, so the answer holds for every time, state and context, where a look at
one of them says nothing of the others. An operation without a rule marks all of its results: the
answer may name too much, never too little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from fluctua.core.arrays import Array, PyTree

Marks = list[np.ndarray]
"""One boolean array for each input or output of an operation, of its shape."""

Constants = list[np.ndarray | None]
"""The values of the inputs that are constants: indices, and factors that are zero."""

MAX_CONSTANT_SIZE = 10_000
"""Of a constant that is read."""


def depends(f: Callable[..., PyTree], *arguments: PyTree, on: int | None = None) -> bool:
    """Whether a result of f may depend on its arguments, or on the one with the number `on`.

    Give as arguments whatever may have other values: numbers that f brings along are constants.
    """
    marked = [on is None or k == on for k in range(len(arguments))]
    return any(bool(marks.any()) for marks in _trace(f, arguments, marked))


def varies_in_slope(f: Callable[..., Array], *arguments: PyTree, on: int) -> bool:
    """Whether ∂f/∂x may depend on x, argument number `on`.

    False where f is affine in x, whatever the other arguments are.
    """
    return depends(jax.jacfwd(f, argnums=on), *arguments, on=on)


def find_slopes(f: Callable[..., Array], *arguments: PyTree) -> np.ndarray:
    """Elements of f whose derivative by the first argument may differ from zero.

    Boolean, of the shape of f.
    """

    def push(direction: PyTree, theta: PyTree, *rest: PyTree) -> Array:
        return jax.jvp(lambda theta: f(theta, *rest), (theta,), (direction,))[1]

    return _trace(push, (arguments[0], *arguments), [True] + [False] * len(arguments))[0]


def find_sources(f: Callable[..., PyTree], *arguments: PyTree, on: int) -> PyTree | None:
    """The one element of an array that each element of f may depend on.

    Integers in the structure of f, −1 where nothing of the array matters; None if some element may
    depend on two. With it the Jacobian follows from one directional derivative. on: number of the
    argument, one array.
    """
    program = jax.make_jaxpr(f)(*arguments)
    before = len(jax.tree.leaves(arguments[:on]))
    size = np.size(arguments[on])

    def push(marked: np.ndarray) -> Marks:
        inputs = [_mark_none(v) for v in program.jaxpr.invars]
        inputs[before] = marked.reshape(inputs[before].shape)
        return _propagate(program, inputs, [None] * len(inputs))

    reached = push(np.ones(size, bool))
    sources = [np.where(marks, 0, -1) for marks in reached]
    number = np.arange(size)
    for bit in range((size - 1).bit_length()):
        has_bit = (number >> bit & 1).astype(bool)
        for source, ones, zeros in zip(sources, push(has_bit), push(~has_bit), strict=True):
            if np.any(ones & zeros):
                return None
            source[ones] |= 1 << bit
    return jax.tree.unflatten(jax.tree.structure(jax.eval_shape(f, *arguments)), sources)


def _trace(f: Callable[..., PyTree], arguments: Sequence[PyTree], marked: Sequence[bool]) -> Marks:
    closed = jax.make_jaxpr(f)(*arguments)
    each = [
        mark for mark, tree in zip(marked, arguments, strict=True) for _ in jax.tree.leaves(tree)
    ]
    return mark_outputs(closed, each)


def mark_outputs(program: ClosedJaxpr, marked: Sequence[bool]) -> Marks:
    """Elements of the outputs that may depend on marked inputs. marked: one per input."""
    inputs = [
        np.full(v.aval.shape, mark) for v, mark in zip(program.jaxpr.invars, marked, strict=True)
    ]
    return _propagate(program, inputs, [None] * len(inputs))


def _propagate(program: ClosedJaxpr | Jaxpr, marks: Marks, numbers: Constants) -> Marks:
    """Marks of the outputs of a program from those of its inputs."""
    jaxpr, consts = (
        (program.jaxpr, program.consts) if isinstance(program, ClosedJaxpr) else (program, [])
    )
    marked: dict[Any, np.ndarray] = dict(zip(jaxpr.invars, marks, strict=True))
    known: dict[Any, np.ndarray | None] = dict(zip(jaxpr.invars, numbers, strict=True))
    for v, value in zip(jaxpr.constvars, consts, strict=True):
        marked[v] = _mark_none(v)
        known[v] = _read(value)
    for eqn in jaxpr.eqns:
        before = [_mark_none(v) if isinstance(v, Literal) else marked[v] for v in eqn.invars]
        values = [_read(v.val) if isinstance(v, Literal) else known.get(v) for v in eqn.invars]
        if len(eqn.outvars) == 1:
            known[eqn.outvars[0]] = _compute(eqn, values)
        after = (
            _mark(eqn, before, values)
            if any(m.any() for m in before)
            else [_mark_none(v) for v in eqn.outvars]
        )
        marked.update(zip(eqn.outvars, after, strict=True))
    return [_mark_none(v) if isinstance(v, Literal) else marked[v] for v in jaxpr.outvars]


def _mark_none(v: Any) -> np.ndarray:
    return np.zeros(v.aval.shape, bool)


def _read(value: Any) -> np.ndarray | None:
    """The numbers of a constant, if they can be had and are few."""
    kind = jnp.result_type(value)
    simple = not isinstance(value, jax.core.Tracer) and (
        jnp.issubdtype(kind, jnp.number) or kind == jnp.bool_
    )
    return np.asarray(value) if simple and np.size(value) <= MAX_CONSTANT_SIZE else None


def _compute(eqn: Any, values: Constants) -> np.ndarray | None:
    """The numbers of a result, where they are constant.

    Of what is put elsewhere, of products with zeros, and of sums and choices that make indices.
    """
    move = MOVES.get(eqn.primitive.name)
    if move and all(value is not None for value in values):
        try:
            return move(eqn, *values)
        except KeyError:
            return None
    fold = INDEX_SUMS.get(eqn.primitive.name)
    if fold and all(value is not None for value in values):
        return fold(*values)
    if eqn.primitive.name == "mul" and any(
        value is not None and not value.any() for value in values
    ):
        return np.zeros(eqn.outvars[0].aval.shape)
    return None


def _mark(eqn: Any, marks: Marks, numbers: Constants) -> Marks:
    """Marks of the results of one operation, of which some operand is marked."""
    try:
        after = _apply_rule(eqn, marks, numbers)
    except KeyError:  # a parameter that has another name in this version of JAX
        after = None
    return [~_mark_none(v) for v in eqn.outvars] if after is None else after


def _apply_rule(eqn: Any, marks: Marks, numbers: Constants) -> Marks | None:
    """The marks that the rule of an operation gives; None without one."""
    name = eqn.primitive.name
    if name == "mul":  # what is multiplied by a constant 0 says nothing
        marks = [
            m if n is None else m & (n != 0) for m, n in zip(marks, numbers[::-1], strict=True)
        ]
    if name in ELEMENTWISE:
        return [
            np.broadcast_to(
                np.logical_or.reduce(np.broadcast_arrays(*marks)), eqn.outvars[0].aval.shape
            )
        ]
    if name in MOVES:
        return [MOVES[name](eqn, *marks)]
    if name in PARTS:
        return PARTS[name](eqn, *marks)
    if name in CALLS:
        return _propagate(eqn.params[CALLS[name]], marks, numbers)
    rule = RULES.get(name)
    return None if rule is None else rule(eqn, marks, numbers)


# --------------------------------------------------------------------------------------- operations

ELEMENTWISE = {
    "abs",
    "acos",
    "acosh",
    "add",
    "add_any",
    "and",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "ceil",
    "clamp",
    "complex",
    "conj",
    "cos",
    "cosh",
    "div",
    "eq",
    "erf",
    "erf_inv",
    "erfc",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "ge",
    "gt",
    "imag",
    "integer_pow",
    "is_finite",
    "le",
    "lgamma",
    "log",
    "log1p",
    "logistic",
    "lt",
    "max",
    "min",
    "mul",
    "ne",
    "neg",
    "nextafter",
    "not",
    "or",
    "pow",
    "real",
    "reduce_precision",
    "rem",
    "round",
    "rsqrt",
    "select_n",
    "sign",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "stop_gradient",
    "sub",
    "tan",
    "tanh",
    "xor",
}
"""Each element of the result is made of the elements in its place; a scalar is in every place."""

CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
"""Operations that are a jaxpr themselves, and where they keep it."""


def _broadcast(eqn: Any, x: np.ndarray) -> np.ndarray:
    shape = eqn.params["shape"]
    wide = [1] * len(shape)
    for axis, target in enumerate(eqn.params["broadcast_dimensions"]):
        wide[target] = x.shape[axis]
    return np.broadcast_to(x.reshape(wide), shape)


def _slice(eqn: Any, x: np.ndarray) -> np.ndarray:
    begin = eqn.params["start_indices"]
    end = eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, begin, end, strides))]


def _fit(eqn: Any, x: np.ndarray) -> np.ndarray:
    return x.reshape(eqn.outvars[0].aval.shape)


def _reshape(eqn: Any, x: np.ndarray) -> np.ndarray:
    axes = eqn.params["dimensions"]  # in which order elements are counted; None: as they are
    return _fit(eqn, x if axes is None else np.transpose(x, axes))


def _split(eqn: Any, x: np.ndarray) -> list[np.ndarray]:
    return np.split(x, np.cumsum(eqn.params["sizes"])[:-1], axis=eqn.params["axis"])


VIEWS: dict[str, Callable[[Any, np.ndarray], np.ndarray]] = {
    "broadcast_in_dim": _broadcast,
    "expand_dims": _fit,
    "reshape": _reshape,
    "rev": lambda eqn, x: np.flip(x, eqn.params["dimensions"]),
    "slice": _slice,
    "squeeze": _fit,
    "tile": lambda eqn, x: np.tile(x, eqn.params["reps"]),
    "transpose": lambda eqn, x: np.transpose(x, eqn.params["permutation"]),
}
"""One array from one array, as NumPy does it: of marks, of numbers, or of numbers of nodes."""

PARTS: dict[str, Callable[[Any, np.ndarray], list[np.ndarray]]] = {
    "split": _split,
    "unstack": lambda eqn, x: list(np.moveaxis(x, eqn.params["axis"], 0)),
}
"""Several arrays from one array."""

JOINS: dict[str, Callable[..., np.ndarray]] = {
    "concatenate": lambda eqn, *rows: np.concatenate(rows, axis=eqn.params["dimension"]),
    "stack": lambda eqn, *rows: np.stack(rows, axis=eqn.params["axis"]),
}
"""One array from several arrays."""


def _convert(eqn: Any, x: np.ndarray) -> np.ndarray:
    return x  # whatever its type


MOVES: dict[str, Callable[..., np.ndarray]] = {
    "convert_element_type": _convert,
    "copy": _convert,
    "copy_p": _convert,
    **VIEWS,
    **JOINS,
}
"""Operations that put elements elsewhere: of marks, and of numbers."""


def _sum(eqn: Any, marks: Marks, numbers: Constants) -> Marks:
    return [np.asarray(marks[0].any(axis=tuple(eqn.params["axes"])))]


def _pad(eqn: Any, marks: Marks, numbers: Constants) -> Marks | None:
    widths = eqn.params["padding_config"]
    if marks[1].any() or any(low < 0 or high < 0 or inside for low, high, inside in widths):
        return None
    return [np.pad(marks[0], [(low, high) for low, high, _ in widths])]


def _product(eqn: Any, marks: Marks, numbers: Constants) -> Marks:
    """A row of the left matrix reaches its row of the product, a column of the right its column."""
    (over_a, over_b), (batch_a, batch_b) = eqn.params["dimension_numbers"]
    rows, columns = (
        m.any(axis=tuple(over), keepdims=True)
        for m, over in zip(marks, (over_a, over_b), strict=True)
    )
    free_a = [k for k in range(rows.ndim) if k not in (*over_a, *batch_a)]
    free_b = [k for k in range(columns.ndim) if k not in (*over_b, *batch_b)]
    left = np.transpose(rows, [*batch_a, *free_a, *over_a])
    right = np.transpose(columns, [*batch_b, *free_b, *over_b])
    left = left.reshape(left.shape[: len(batch_a) + len(free_a)] + (1,) * len(free_b))
    right = right.reshape(
        right.shape[: len(batch_b)]
        + (1,) * len(free_a)
        + right.shape[len(batch_b) :][: len(free_b)]
    )
    return [left | right]


def _scatter(eqn: Any, marks: Marks, numbers: Constants) -> Marks | None:
    """Updates of known rows of the first axis, such as `x.at[2].set(…)`.

    Rows are marked whole; single elements as their updates.
    """
    operand, _, updates = marks
    where = numbers[1]
    form = eqn.params["dimension_numbers"]
    if where is None or form.scatter_dims_to_operand_dims != (0,) or form.operand_batching_dims:
        return None
    height = 1 if 0 in form.inserted_window_dims else updates.shape[form.update_window_dims[0]]
    rows = where.ravel()[:, None] + np.arange(height)
    if rows.min(initial=0) < 0 or rows.max(initial=0) >= len(operand):
        return None
    after = operand.copy()
    if operand.ndim == 1 and updates.size == rows.size:
        np.logical_or.at(after, rows.ravel(), updates.ravel())
    else:
        after[rows.ravel()] |= bool(updates.any())
    return [after]


def _cond(eqn: Any, marks: Marks, numbers: Constants) -> Marks | None:
    choice, *inputs = marks
    if choice.any():
        return None
    cases = [_propagate(branch, inputs, numbers[1:]) for branch in eqn.params["branches"]]
    return [np.logical_or.reduce(parts) for parts in zip(*cases, strict=True)]


def _choose(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    return np.choose(which.astype(int), cases)


INDEX_SUMS: dict[str, Callable[..., np.ndarray]] = {"add": np.add, "select_n": _choose}
"""Operations with which JAX counts negative indices from the end."""

RULES: dict[str, Callable[[Any, Marks, Constants], Marks | None]] = {
    "reduce_sum": _sum,
    "pad": _pad,
    "dot_general": _product,
    "scatter": _scatter,
    "scatter-add": _scatter,
    "scatter_add": _scatter,
    "cond": _cond,
}
"""The others; None marks everything."""
