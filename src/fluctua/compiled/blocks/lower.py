"""Nodes of a jaxpr: one rule per operation of JAX.

An operation without a rule is left to JAX, ahead of the run, if its inputs do not depend on the
trajectory. Otherwise it raises `Unsupported`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from fluctua.compiled import elements
from fluctua.compiled.blocks.elementwise import apply_elementwise, bind, choose
from fluctua.compiled.blocks.moves import MOVES, assemble
from fluctua.compiled.blocks.nodes import LANE, ArrayGraph, ArrayNode, count_elements
from fluctua.compiled.blocks.products import PRODUCTS
from fluctua.compiled.scalar import CALLS, Unsupported

MAX_LOOP_STEPS = 32
"""Largest number of steps of a loop that is unrolled."""


def lower(graph: ArrayGraph, closed: ClosedJaxpr, inputs: Sequence[int]) -> list[int]:
    """Return the nodes of the outputs of a jaxpr from those of its inputs."""
    return _lower_jaxpr(graph, closed.jaxpr, [graph.const(v) for v in closed.consts], inputs)


def _lower_jaxpr(
    graph: ArrayGraph, jaxpr: Jaxpr, consts: Sequence[int], inputs: Sequence[int]
) -> list[int]:
    known: dict[Any, int] = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True)
    )

    def read(atom: Any) -> int:
        if isinstance(atom, Literal):
            aval: Any = atom.aval
            return graph.const(np.asarray(atom.val, aval.dtype))
        return known[atom]

    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if any(v in needed for v in eqn.outvars):
            needed |= {v for v in eqn.invars if not isinstance(v, Literal)}
    for eqn in jaxpr.eqns:
        if any(v in needed for v in eqn.outvars):
            outputs = _lower_equation(graph, eqn, [read(atom) for atom in eqn.invars])
            known.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _lower_equation(graph: ArrayGraph, eqn: Any, inputs: list[int]) -> list[int]:
    name = eqn.primitive.name
    if name in CALLS:
        inner = eqn.params[CALLS[name]]
        if isinstance(inner, ClosedJaxpr):
            return lower(graph, inner, inputs)
        return _lower_jaxpr(graph, inner, [], inputs)
    try:
        for v in eqn.outvars:
            dtype = v.aval.dtype
            if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) or dtype.kind == "c":
                raise Unsupported(name, f"of type {dtype}")
        rule = RULES.get(name)
        if rule is None:
            raise Unsupported(name, "kernels on arrays have no rule for it")
        elements.refuse_wrapping(eqn)
        outputs = rule(graph, eqn, *inputs)
        return outputs if isinstance(outputs, list) else [outputs]
    except Unsupported:
        if any(graph[node].depends & LANE for node in inputs):
            raise
        return _leave_to_jax(graph, eqn, inputs)


def _leave_to_jax(graph: ArrayGraph, eqn: Any, inputs: list[int]) -> list[int]:
    """Add outputs that JAX computes ahead."""
    call = bind(eqn)
    many = eqn.primitive.multiple_results
    depends = 0
    for node in inputs:
        depends |= graph[node].depends
    outputs = []
    for k, v in enumerate(eqn.outvars):

        def one(*arrays: Any, k: int = k) -> Any:
            result = call(*arrays)
            return result[k] if many else result

        if not depends:
            with jax.ensure_compile_time_eval():
                value = one(*(jnp.asarray(graph[node].data) for node in inputs))
            outputs.append(graph.const(np.asarray(value)))
            continue
        dtype = v.aval.dtype
        kind = {"u": "i"}.get(getattr(dtype, "kind", "V"), getattr(dtype, "kind", "V"))
        ahead = ArrayNode("ahead", tuple(inputs), v.aval.shape, kind, depends, None, one)
        # by the equation itself, which the node keeps: its text would not show all constants
        outputs.append(graph.add(ahead, (id(eqn), k)))
    return outputs


# ------------------------------------------------------------------------------------ elementwise


def _elementwise(op: str) -> Callable:
    def rule(graph: ArrayGraph, eqn: Any, *inputs: int) -> int:
        if op in ("and", "or", "xor", "not") and eqn.outvars[0].aval.dtype != bool:
            raise Unsupported(eqn.primitive.name, "bits of integers")
        if op == "div" and eqn.outvars[0].aval.dtype.kind != "f":
            raise Unsupported(eqn.primitive.name, "of integers")
        if op in ("lt", "le", "gt", "ge") and elements.takes_booleans(eqn):
            raise Unsupported(eqn.primitive.name, "an order of booleans")
        return apply_elementwise(graph, elements.choose_fold(op, eqn), inputs, bind(eqn))

    return rule


def _square(graph: ArrayGraph, eqn: Any, x: int) -> int:
    return apply_elementwise(graph, "mul", (x, x), jnp.multiply)


def _integer_pow(graph: ArrayGraph, eqn: Any, x: int) -> int:
    power = int(eqn.params["y"])
    if power == 2:
        return _square(graph, eqn, x)
    return apply_elementwise(graph, "integer_pow", (x,), bind(eqn), power)


def _pow(graph: ArrayGraph, eqn: Any, x: int, y: int) -> int:
    value = graph.uniform(y)
    if value is not None and abs(value) <= 16 and value == int(value):
        power = int(value)
        return apply_elementwise(graph, "integer_pow", (x,), lambda a: a**power, power)
    if value == 0.5:
        return apply_elementwise(graph, "sqrt", (x,), jnp.sqrt)
    return apply_elementwise(graph, "pow", (x, y), jnp.power)


def _rsqrt(graph: ArrayGraph, eqn: Any, x: int) -> int:
    root = apply_elementwise(graph, "sqrt", (x,), jnp.sqrt)
    one = graph.const(np.ones((), eqn.outvars[0].aval.dtype))
    return apply_elementwise(graph, "div", (one, root), jnp.divide)


def _one_minus_square(graph: ArrayGraph, eqn: Any, x: int) -> int:
    one = graph.const(np.ones((), eqn.outvars[0].aval.dtype))
    return apply_elementwise(graph, "sub", (one, _square(graph, eqn, x)), jnp.subtract)


def _round(graph: ArrayGraph, eqn: Any, x: int) -> int:
    even = eqn.params["rounding_method"] == jax.lax.RoundingMethod.TO_NEAREST_EVEN
    return apply_elementwise(graph, "round_even" if even else "round_away", (x,), bind(eqn))


def _reduce_precision(graph: ArrayGraph, eqn: Any, x: int) -> int:
    elements.check_precision(eqn)
    return x


def _clamp(graph: ArrayGraph, eqn: Any, low: int, x: int, high: int) -> int:
    if elements.takes_booleans(eqn):
        raise Unsupported("clamp", "of booleans")
    raised = apply_elementwise(graph, "max", (low, x), jnp.maximum)
    return apply_elementwise(graph, "min", (raised, high), jnp.minimum)


def _select_n(graph: ArrayGraph, eqn: Any, which: int, *cases: int) -> int:
    if eqn.invars[0].aval.dtype == bool:
        no, yes = cases if len(cases) == 2 else (cases[0], cases[0])
        return apply_elementwise(graph, "select", (which, yes, no), choose)
    if graph[which].op != "const":
        raise Unsupported("select_n", "a choice by an integer")
    chosen = cases[0]
    for k, case in enumerate(cases[1:], 1):
        is_case = graph.const(graph[which].data == k)
        chosen = apply_elementwise(graph, "select", (is_case, case, chosen), choose)
    return chosen


def _convert(graph: ArrayGraph, eqn: Any, x: int) -> int:
    elements.refuse_short_floats(eqn)
    old = graph[x].kind
    dtype = eqn.outvars[0].aval.dtype
    if graph[x].op == "const":
        return graph.const(graph[x].data.astype(dtype))
    elements.refuse_narrowing(eqn)
    if dtype.kind == old or (old == "i" and dtype.kind == "f"):
        return x
    if dtype.kind == "b":
        zero = graph.const(np.zeros((), np.float32))
        return apply_elementwise(graph, "ne", (x, zero), jnp.not_equal)
    if old == "b":  # integers that depend on the trajectory are 0 and 1 alone
        return apply_elementwise(graph, "as_number", (x,), bind(eqn))
    raise Unsupported("convert_element_type", f"to {dtype}")


# ------------------------------------------------------------------------------------------ control


def _cond(graph: ArrayGraph, eqn: Any, which: int, *inputs: int) -> list[int]:
    branches = eqn.params["branches"]
    known = graph.uniform(which)
    if known is not None:
        return lower(graph, branches[min(max(int(known), 0), len(branches) - 1)], inputs)
    if len(branches) != 2 or graph[which].kind == "i":
        raise Unsupported("cond", "a choice by an integer")
    if graph[which].kind == "f":
        zero = graph.const(np.zeros((), np.float32))
        which = apply_elementwise(graph, "ne", (which, zero), jnp.not_equal)
    no, yes = (lower(graph, branch, inputs) for branch in branches)
    return [
        apply_elementwise(graph, "select", (which, a, b), choose)
        for a, b in zip(yes, no, strict=True)
    ]


def _scan(graph: ArrayGraph, eqn: Any, *inputs: int) -> list[int]:
    p = eqn.params
    if not any(graph[node].depends & LANE for node in inputs):
        raise Unsupported("scan", "left to JAX")
    if p["length"] > MAX_LOOP_STEPS:
        raise Unsupported("scan", f"a loop of {p['length']} steps")
    fixed, carried = (
        map(len, p["ft_in"].unpack()[:2]) if "ft_in" in p else (p["num_consts"], p["num_carry"])
    )
    consts = list(inputs[:fixed])
    carry = list(inputs[fixed:][:carried])
    along = inputs[fixed + carried :]

    def take(node: int, k: int) -> int:
        counted = count_elements(graph[node].shape)[k]
        return graph.view(node, counted, counted.shape)

    rows: list[list[int]] = []
    order = range(p["length"] - 1, -1, -1) if p["reverse"] else range(p["length"])
    for k in order:
        outputs = lower(graph, p["jaxpr"], [*consts, *carry, *(take(v, k) for v in along)])
        carry = outputs[:carried]
        rows.append(outputs[carried:])
    rows = rows[::-1] if p["reverse"] else rows
    return [*carry, *(_stack(graph, column) for column in zip(*rows, strict=True))]


def _stack(graph: ArrayGraph, parts: Sequence[int]) -> int:
    size = graph[parts[0]].size
    shape = (len(parts), *graph[parts[0]].shape)
    places = [np.arange(size) + k * size for k in range(len(parts))]
    return assemble(graph, shape, None, list(zip(parts, places, strict=True)))


RULES: dict[str, Callable] = {
    **{name: _elementwise(op) for name, op in {**elements.UNARY, **elements.BINARY}.items()},
    **{name: lambda graph, eqn, *inputs: list(inputs) for name in elements.IDENTITY},
    **{name: _elementwise(name) for name in ("gt", "ge", "and", "or", "xor", "not", "div", "rem")},
    **MOVES,
    "logistic": _elementwise("logistic"),
    "square": _square,
    "integer_pow": _integer_pow,
    "pow": _pow,
    "rsqrt": _rsqrt,
    "one_minus_square": _one_minus_square,
    "round": _round,
    "reduce_precision": _reduce_precision,
    "clamp": _clamp,
    "select_n": _select_n,
    "convert_element_type": _convert,
    **PRODUCTS,
    "cond": _cond,
    "scan": _scan,
}
