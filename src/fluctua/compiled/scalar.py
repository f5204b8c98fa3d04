"""Scalar expressions of a jaxpr: every element of every array becomes a node of a graph.

An operation without a rule is left to JAX, ahead of the run, if its inputs are the same for all
trajectories or for all steps. Otherwise it raises `Unsupported` with its name and the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from fluctua.compiled import elements
from fluctua.compiled.arrays import ARRAYS, MAX_MATRIX_ROWS, solve_by_elimination
from fluctua.compiled.elements import Unsupported
from fluctua.compiled.graph import CONTEXT, NOISE, STATE, TIME, External, Graph
from fluctua.core import dependence
from fluctua.core.arrays import jit

MAX_LOOP_STEPS = 128
"""Largest number of steps of a loop that is unrolled."""

CALLS = dependence.CALLS | {"custom_vjp_call_jaxpr": "fun_jaxpr", "custom_lin": "call_jaxpr"}
"""Operations that are a jaxpr themselves, and where they keep it."""


def scalarise(graph: Graph, closed: ClosedJaxpr, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the identities of the outputs of a jaxpr from those of its inputs."""
    consts = [elements.make_constants(graph, value) for value in closed.consts]
    return _scalarise_jaxpr(graph, closed.jaxpr, consts, inputs)


def _scalarise_jaxpr(
    graph: Graph, jaxpr: Jaxpr, consts: Sequence[np.ndarray], inputs: Sequence[np.ndarray]
) -> list[np.ndarray]:
    known: dict[Any, np.ndarray] = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True)
    )

    def read(atom):
        return (
            elements.make_constants(graph, atom.val) if isinstance(atom, Literal) else known[atom]
        )

    needed = _find_needed(jaxpr)
    for eqn in jaxpr.eqns:
        if not any(v in needed for v in eqn.outvars):
            continue
        outputs = _scalarise_equation(graph, eqn, [read(atom) for atom in eqn.invars])
        known.update(zip(eqn.outvars, outputs, strict=True))
        if len(graph) > elements.MAX_NODES:
            raise Unsupported(
                eqn.primitive.name, f"more than {elements.MAX_NODES} operations per step"
            )
    return [read(atom) for atom in jaxpr.outvars]


def _find_needed(jaxpr: Jaxpr) -> set:
    """Return the variables that outputs depend on; dead code need not be supported."""
    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if any(v in needed for v in eqn.outvars):
            needed |= {v for v in eqn.invars if not isinstance(v, Literal)}
    return needed


def _scalarise_equation(graph: Graph, eqn: Any, inputs: list[np.ndarray]) -> list[np.ndarray]:
    name = eqn.primitive.name
    try:
        if name in CALLS:
            inner = eqn.params[CALLS[name]]
            if isinstance(inner, ClosedJaxpr):
                return scalarise(graph, inner, inputs)
            return _scalarise_jaxpr(graph, inner, [], inputs)
        rule = RULES.get(name)
        if rule is None:
            raise Unsupported(name, "kernels have no rule for it")
        if name != "custom_linear_solve" and any((ids < 0).any() for ids in inputs):
            raise Unsupported(
                "lu", "factors of a matrix that depends on the state, other than to solve with"
            )
        elements.refuse_wrapping(eqn)
        try:
            outputs = rule(graph, eqn, *inputs)
        except NotImplementedError:
            raise Unsupported(name, "of complex numbers") from None
        except KeyError as problem:
            raise Unsupported(
                name, f"this version of JAX has no parameter {problem} of it"
            ) from None
        return outputs if isinstance(outputs, list) else [outputs]
    except Unsupported as problem:
        depends = 0
        for ids in inputs:
            for node in ids.ravel():
                depends |= graph.depends[node] if node >= 0 else STATE
        if depends & (STATE | NOISE) or (depends & CONTEXT and depends & TIME):
            raise problem from None
        return _leave_to_jax(graph, eqn, inputs, depends)


def _leave_to_jax(
    graph: Graph, eqn: Any, inputs: list[np.ndarray], depends: int
) -> list[np.ndarray]:
    """Add outputs that JAX computes ahead, with a row per step or trajectory of the inputs."""
    if any(
        jax.dtypes.issubdtype(v.aval.dtype, jax.dtypes.extended)
        for v in [*eqn.invars, *eqn.outvars]
    ):
        raise Unsupported(
            eqn.primitive.name, "random numbers come from the noise of the simulator alone"
        )
    params = eqn.primitive.get_bind_params(eqn.params)
    if any(np.dtype(v.aval.dtype).kind == "c" for v in [*eqn.invars, *eqn.outvars]):
        raise Unsupported(eqn.primitive.name, "of complex numbers")
    # a pair in older versions of JAX
    functions, params = params if isinstance(params, tuple) else ((), params)

    def bind(*arrays: Any) -> Sequence[Any]:
        outputs = eqn.primitive.bind(*functions, *arrays, **params)
        return outputs if eqn.primitive.multiple_results else [outputs]

    once = jit(bind)
    batched = jit(jax.vmap(bind))

    def call(*arrays, many):
        return (batched if many else once)(*map(jnp.asarray, arrays))

    dtypes = [np.dtype(v.aval.dtype) for v in eqn.invars]
    shapes = [v.aval.shape for v in eqn.outvars]
    if not depends:  # all constant: computed now
        values = [
            np.array([graph.value(int(i)) for i in ids.ravel()], dtype).reshape(ids.shape)
            for ids, dtype in zip(inputs, dtypes, strict=True)
        ]
        with jax.ensure_compile_time_eval():
            return [elements.make_constants(graph, v) for v in call(*values, many=False)]
    which = graph.add_external(External(call, tuple(zip(inputs, dtypes, strict=True)), depends))
    outputs = []
    for output, shape in enumerate(shapes):
        ids = [graph.result(which, output, k) for k in range(int(np.prod(shape)))]
        outputs.append(np.array(ids, dtype=np.int64).reshape(shape))
    return outputs


# ------------------------------------------------------------------------------------------ control


def _linear_solve(graph: Graph, eqn: Any, *inputs: np.ndarray) -> list[np.ndarray]:
    lengths = eqn.params["const_lengths"]
    jaxprs = eqn.params["jaxprs"]
    ends = np.cumsum([lengths.matvec, lengths.vecmat, lengths.solve, lengths.transpose_solve])
    sides = list(inputs[ends[3] :])
    factors = inputs[ends[1] : ends[2]]
    if not any((ids < 0).any() for ids in factors):
        return scalarise(graph, jaxprs.solve, [*factors, *sides])
    (side,) = sides
    if side.size > MAX_MATRIX_ROWS:
        raise Unsupported("solve", f"{side.size} unknowns; up to {MAX_MATRIX_ROWS} are written out")
    zero = graph.const(0.0)
    one = graph.const(1.0)
    units = np.where(np.eye(side.size, dtype=bool), one, zero).reshape(side.size, *side.shape)
    columns = [
        scalarise(graph, jaxprs.matvec, [*inputs[: ends[0]], unit])[0].ravel() for unit in units
    ]
    return [
        np.array(solve_by_elimination(graph, np.stack(columns, axis=1), side.ravel())).reshape(
            side.shape
        )
    ]


def _cond(graph: Graph, eqn: Any, which: np.ndarray, *inputs: np.ndarray) -> list[np.ndarray]:
    branches = eqn.params["branches"]
    known = graph.value(int(which))
    if known is not None:
        return scalarise(graph, branches[min(max(int(known), 0), len(branches) - 1)], inputs)
    cases = [scalarise(graph, branch, inputs) for branch in branches]
    chosen = cases[0]
    for k, case in enumerate(cases[1:], 1):
        is_case = graph.make("le", graph.const(float(k)), int(which))
        chosen = [
            elements.map_elements(
                lambda a, b, is_case=is_case: graph.make("select", is_case, a, b), new, old
            )
            for new, old in zip(case, chosen, strict=True)
        ]
    return chosen


def _scan(graph: Graph, eqn: Any, *inputs: np.ndarray) -> list[np.ndarray]:
    p = eqn.params
    if p["length"] > MAX_LOOP_STEPS:
        raise Unsupported(
            "scan", f"a loop of {p['length']} steps; up to {MAX_LOOP_STEPS} are written out"
        )
    # numbers of arguments that are constant and carried; newer versions of JAX keep a tree of them
    fixed, carried = (
        map(len, p["ft_in"].unpack()[:2]) if "ft_in" in p else (p["num_consts"], p["num_carry"])
    )
    consts = list(inputs[:fixed])
    carry = list(inputs[fixed:][:carried])
    along = inputs[fixed + carried :]
    rows: list[list[np.ndarray]] = []
    order = range(p["length"] - 1, -1, -1) if p["reverse"] else range(p["length"])
    for k in order:
        outputs = scalarise(graph, p["jaxpr"], [*consts, *carry, *(xs[k] for xs in along)])
        carry = outputs[:carried]
        rows.append(outputs[carried:])
    rows = rows[::-1] if p["reverse"] else rows
    return [*carry, *(np.stack(column) for column in zip(*rows, strict=True))]


RULES: dict[str, Callable] = {
    **elements.ELEMENTWISE,
    **ARRAYS,
    "custom_linear_solve": _linear_solve,
    "cond": _cond,
    "scan": _scan,
}
