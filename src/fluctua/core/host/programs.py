"""Small functions of JAX, evaluated by NumPy: for checks, whose compilation would take longest.

Values agree with those of JAX to rounding. Operations without a rule raise `NoRule`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from fluctua.core.arrays import PyTree
from fluctua.core.dependence import CALLS, MOVES, PARTS, Marks, mark_outputs


class NoRule(Exception):
    """An operation that NumPy does not do here."""


class HostProgram:
    """A function at the shapes of its arguments. It returns arrays by NumPy, one per output."""

    def __init__(self, function: Callable[..., PyTree], *arguments: PyTree):
        self.closed = jax.make_jaxpr(function)(*arguments)
        self.leaves = [len(jax.tree.leaves(argument)) for argument in arguments]

    def __call__(self, *arguments: PyTree) -> list[np.ndarray]:
        """Evaluate the function; raise `NoRule` where it has an operation without a rule."""
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(arguments)]
        with np.errstate(all="ignore"):
            return _evaluate(self.closed, leaves)

    def mark_dependent(self, *marked: bool) -> Marks:
        """Elements of the outputs that may depend on the arguments that are marked.

        marked: one mark per argument.
        """
        each = zip(marked, self.leaves, strict=True)
        return mark_outputs(self.closed, [mark for mark, count in each for _ in range(count)])


def _evaluate(program: ClosedJaxpr | Jaxpr, inputs: list[np.ndarray]) -> list[np.ndarray]:
    jaxpr, consts = (
        (program.jaxpr, program.consts) if isinstance(program, ClosedJaxpr) else (program, [])
    )
    values: dict[Any, np.ndarray] = dict(zip(jaxpr.invars, inputs, strict=True))
    values.update(zip(jaxpr.constvars, map(np.asarray, consts), strict=True))

    def read(atom: Any) -> np.ndarray:
        if not isinstance(atom, Literal):
            return values[atom]
        kind: Any = atom.aval  # the type that JAX gives it: 2.0 is float32 beside float32
        return np.asarray(atom.val, kind.dtype)

    for equation in jaxpr.eqns:
        results = _apply(equation, [read(atom) for atom in equation.invars])
        for variable, result in zip(equation.outvars, results, strict=True):
            values[variable] = np.asarray(result).astype(variable.aval.dtype, copy=False)
    return [read(atom) for atom in jaxpr.outvars]


def _apply(equation: Any, inputs: list[np.ndarray]) -> list[Any]:
    name = equation.primitive.name
    if name in CALLS:
        return _evaluate(equation.params[CALLS[name]], inputs)
    if name in ELEMENTWISE:
        return [ELEMENTWISE[name](*inputs)]
    rule = RULES.get(name) or MOVES.get(name)
    try:
        if name in PARTS:
            return PARTS[name](equation, *inputs)
        if rule is not None:
            return [rule(equation, *inputs)]
    except KeyError as problem:  # a parameter that has another name in this version of JAX
        raise NoRule(f"{name}: {problem}") from None
    raise NoRule(name)


def _divide(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Divide as XLA does: integers towards zero, with −1 where the divisor is zero."""
    if x.dtype.kind not in "iu":
        return np.divide(x, y)
    whole = np.where(y == 0, 1, y)
    down = x // whole
    towards_zero = down + ((down < 0) & (down * whole != x))
    return np.where(y == 0, np.asarray(-1).astype(x.dtype), towards_zero)


ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "abs": np.abs,
    "add": np.add,
    "add_any": np.add,
    "and": np.bitwise_and,
    "atan2": np.arctan2,
    "cbrt": np.cbrt,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "cos": np.cos,
    "cosh": np.cosh,
    "div": _divide,
    "eq": np.equal,
    "exp": np.exp,
    "expm1": np.expm1,
    "ge": np.greater_equal,
    "gt": np.greater,
    "is_finite": np.isfinite,
    "le": np.less_equal,
    "log": np.log,
    "log1p": np.log1p,
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.invert,
    "or": np.bitwise_or,
    "pow": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sign": np.sign,
    "sin": np.sin,
    "sinh": np.sinh,
    "sqrt": np.sqrt,
    "square": np.square,
    "stop_gradient": np.asarray,
    "sub": np.subtract,
    "tan": np.tan,
    "tanh": np.tanh,
}


def _convert(equation: Any, x: np.ndarray) -> np.ndarray:
    """Convert the type. Reals beyond an integer type become its nearest limit, and NaN zero."""
    kind = np.dtype(equation.params["new_dtype"])
    if kind.kind not in "iu" or x.dtype.kind in "biu":
        return x.astype(kind)
    limits = np.iinfo(kind)
    inside = np.where((x > limits.min) & (x < limits.max), x, 0).astype(kind)
    ends = np.where(x >= limits.max, limits.max, limits.min).astype(kind)
    return np.where((x >= limits.max) | (x <= limits.min), ends, inside)


def _integer_pow(equation: Any, x: np.ndarray) -> np.ndarray:
    return np.power(x, np.asarray(equation.params["y"], x.dtype))


def _iota(equation: Any) -> np.ndarray:
    shape = equation.params["shape"]
    return np.indices(shape)[equation.params["dimension"]]


def _select(equation: Any, which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    return np.choose(which.astype(int), cases) if which.ndim else cases[int(which)]


def _sum(equation: Any, x: np.ndarray) -> np.ndarray:
    return x.sum(axis=tuple(equation.params["axes"]))


def _product(equation: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    (over_a, over_b), (batch_a, batch_b) = equation.params["dimension_numbers"]
    axes_a = list(range(a.ndim))
    axes_b = [a.ndim + k for k in range(b.ndim)]
    for left, right in zip((*over_a, *batch_a), (*over_b, *batch_b), strict=True):
        axes_b[right] = left
    free_a = [k for k in range(a.ndim) if k not in (*over_a, *batch_a)]
    free_b = [axes_b[k] for k in range(b.ndim) if k not in (*over_b, *batch_b)]
    kind = equation.outvars[0].aval.dtype  # JAX adds in this type, even operands of fewer bits
    if kind.kind not in "biufc":  # NumPy has no products of bfloat16
        kind = np.dtype(np.float32)
    left = a.astype(kind, copy=False)
    right = b.astype(kind, copy=False)
    return np.einsum(left, axes_a, right, axes_b, [*batch_a, *free_a, *free_b])


RULES: dict[str, Callable[..., Any]] = {
    "convert_element_type": _convert,
    "dot_general": _product,
    "integer_pow": _integer_pow,
    "iota": _iota,
    "reduce_sum": _sum,
    "select_n": _select,
}
