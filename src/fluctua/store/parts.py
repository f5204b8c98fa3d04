"""The parts of a training by name, with their fingerprints: process.drift, optimiser, times, …

A run folder holds them, so that continuing with another drift, reward or learning rate is refused
by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax

from fluctua.core import check
from fluctua.core.arrays import Params, PyTree
from fluctua.core.estimation.method import Method
from fluctua.core.estimator import PPGT
from fluctua.core.protocols import FunctionEstimator
from fluctua.core.simulate import Simulator, shape_first_state
from fluctua.store import fingerprint
from fluctua.store.fingerprint import as_shapes, configuration, describe

Parts = dict[str, str]
"""Fingerprints by name of the part."""

PARTS = "parts"
VERSIONS = "made_with"
"""Entries of a settings file: the parts of a training, and the versions that they depend on."""


def stamp_parts(parts: Parts) -> dict[str, Any]:
    """Entries of a settings file with the parts of its run and the versions they depend on."""
    return {PARTS: parts, VERSIONS: fingerprint.versions()}


def refuse_other_parts(
    path: Path, began: Mapping[str, Any], now: Mapping[str, Any], report: Callable[[str], None]
) -> None:
    """Raise if the code of a run has changed since it began; report what cannot be compared.

    Args:
        path: of the settings file.
        began: its content.
        now: entries of `stamp_parts` of the present training.
        report: called with a line of text.
    """
    before = began.get(PARTS)
    after = now[PARTS]
    began_with = began.get(VERSIONS)
    if not isinstance(before, dict) or not isinstance(began_with, dict):
        report(
            f"{path} has no fingerprints of process, objective and optimiser: the run is of an "
            "earlier version, or they were removed. They are taken as they are now, and compared "
            "from now on."
        )
        return
    changed, unsure, versions = fingerprint.compare(before, began_with, after)
    if changed:
        lines = [
            f"`{name}` {_describe_change(before.get(name), after.get(name))}" for name in changed
        ]
        raise ValueError(
            f"a run continues as it started: {', '.join(lines)}. Only `iterations` can change; "
            "for another training start another run. If it computes the same and is only written "
            f'in another way, remove "{PARTS}" from {path}.'
        )
    if unsure:
        names = ", ".join(f"`{name}`" for name in unsure)
        report(
            f"{names} cannot be compared with what the run began with, because versions differ: "
            f"{', '.join(versions)}. Make sure that nothing was changed."
        )


def _describe_change(before: str | None, after: str | None) -> str:
    for line in (before, after):
        if line is not None and line.startswith((fingerprint.TRACED, fingerprint.CODE)):
            return "is not what it was"
    return f"was {before} and is {after}"


# ------------------------------------------------------------------------------------------ parts


class Shapes(NamedTuple):
    """Shapes and types to trace functions at, of one trajectory at one time."""

    theta: Params
    x: Any
    t: Any
    context: PyTree


def _at_state(s: Shapes) -> tuple[Any, ...]:
    return s.theta, s.x, s.t, s.context


def _at_end(s: Shapes) -> tuple[Any, ...]:
    return s.theta, s.x, s.context


ARGUMENTS: dict[str, Callable[[Shapes], tuple[Any, ...]]] = {
    "drift": _at_state,
    "noise": _at_state,
    "rates": _at_state,
    "running": _at_state,
    "terminal": _at_end,
    "initial": _at_end,
    "per_step": lambda s: (s.theta, s.x, s.x, s.t, s.t, s.context),
    "diffusion": lambda s: (*_at_state(s), s.x),
    "log_density": _at_end,
    "level": _at_state,
    "theta": lambda s: (s.theta,),
}
"""Arguments of the functions of a process, an objective, a start and a twin, by field."""


def describe_training(
    estimator: Any,
    theta: Params,
    rule: optax.GradientTransformation,
    project: Callable[[Params], Params] | None,
) -> Parts:
    """Describe everything that a training computes with, besides its numbers.

    Args:
        estimator: of ∇θJ.
        theta: parameters that the training starts from.
        rule: the optimiser.
        project: Π, or None.
    """
    parts = describe_estimator(estimator, theta)
    parts["optimiser"] = describe_optimiser(rule, theta)
    parts["bounds"] = describe(project, as_shapes(theta))
    return parts


def describe_estimator(estimator: Any, theta: Params) -> Parts:
    """Describe an estimator: process, objective and simulator, or its own fields."""
    if isinstance(estimator, PPGT):
        return _describe_ppgt(estimator, theta)
    if isinstance(estimator, FunctionEstimator):
        return {"estimator": describe(estimator.function)}
    kind = type(estimator)
    parts = {"estimator": describe(kind)}
    for name, value in configuration(estimator).items():
        if hasattr(value, "restore") and hasattr(value, "cost"):  # an estimator within
            parts = describe_estimator(value, theta) | parts
        elif name == "options" and dataclasses.is_dataclass(value):
            parts |= describe_record(kind.__name__, value, None)
        elif name not in (*fingerprint.NOT_COMPUTED, "pool"):  # where it runs may change
            parts[f"{kind.__name__}.{name.lstrip('_')}"] = describe(value)
    return parts


def describe_optimiser(rule: optax.GradientTransformation, theta: Params) -> str:
    """Describe an optimiser by the programs of `init` and `update`: learning rates count."""
    shapes = as_shapes(theta)
    number = jax.ShapeDtypeStruct((), jax.numpy.result_type(float))
    updating = optax.with_extra_args_support(rule)

    def update(gradient: Params, state: Any, theta: Params, value: Any) -> Any:
        extra = {"second_moment": theta, "value": value, "natural": theta}
        return updating.update(gradient, state, theta, **extra)

    began = fingerprint.trace(rule.init, shapes)
    if began:
        state = jax.eval_shape(rule.init, shapes)
        updated = fingerprint.trace(update, shapes, state, shapes, number)
        if updated:
            return f"{began} {updated.removeprefix(fingerprint.TRACED)}"
    return describe(tuple(rule))


STORED_NAMES = {"integrator": "step", "noiseless": "silent", "per_step": "step"}
"""Fields that run folders store under an earlier name."""


NOT_STORED = ("stop",)
"""Fields that are left out where they are None: earlier run folders do not have them."""


def describe_record(name: str, record: Any, shapes: Shapes | None) -> Parts:
    """Describe the fields of a process, an objective or another record, each as one part.

    Args:
        name: of the record; its fields are `name.field`.
        record: a named tuple or a dataclass.
        shapes: to trace its functions at; None where the state is not known before a measurement.
    """
    parts: Parts = {}
    for field, value in configuration(record).items():
        full = f"{name}.{STORED_NAMES.get(field, field)}"
        if field in fingerprint.NOT_COMPUTED or (value is None and field in NOT_STORED):
            continue
        if _is_record(value):
            parts |= describe_record(full, value, shapes)
        elif shapes is not None and field in ARGUMENTS:
            parts[full] = describe(value, *ARGUMENTS[field](shapes))
        else:
            parts[full] = describe(value)
    return parts


def _is_record(value: Any) -> bool:
    if callable(value):
        return False
    return dataclasses.is_dataclass(value) or (
        isinstance(value, tuple) and hasattr(value, "_fields")
    )


def _describe_ppgt(estimator: PPGT, theta: Params) -> Parts:
    method = estimator.method
    substrate = estimator.substrate
    if not isinstance(substrate, Simulator):
        known = substrate if isinstance(substrate, type(describe)) else type(substrate)
        return {"substrate": describe(known), **_describe_method(method, None)}
    shapes = _find_shapes(substrate, theta)
    recipe = substrate.recipe
    parts = _describe_method(method, shapes)
    simulated = describe_record("process", recipe.process, shapes)
    if any(parts.get(name) != line for name, line in simulated.items()):
        parts |= {f"simulator.{name}": line for name, line in simulated.items()}
    if recipe.start is None:
        parts["start"] = describe(substrate.x0)
    else:
        parts |= describe_record("start", recipe.start, shapes)
    parts["context"] = describe(recipe.context)
    parts["wiener"] = describe(recipe.wiener)
    parts["times"] = describe(substrate.t)
    return parts


def _describe_method(method: Method, shapes: Shapes | None) -> Parts:
    parts = describe_record("process", method.model.process, shapes)
    if method.means is None:
        parts |= describe_record("objective", method.model.objective, shapes)
    else:
        numbers = [shapes.t for _ in method.means.parts] if shapes else ()
        parts["objective"] = describe(method.means.function, *numbers)
        for k, part in enumerate(method.means.parts):
            parts |= describe_record(f"objective.{k + 1}", part, shapes)
    parts["score"] = describe(method.model.score)
    for name in ("baseline", "initial_baseline"):
        baseline = getattr(method, name)
        parts[f"{name}.name"] = describe(baseline.name)
        parts[name] = describe(baseline)
    if method.twin is None:
        return parts
    twin = method.twin._replace(baseline="as above")
    return parts | describe_record("twin", twin, shapes)


def _find_shapes(substrate: Simulator, theta: Params) -> Shapes:
    theta = check.parameters(theta)
    first = shape_first_state(substrate, theta)
    part = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), first)
    x, context = part
    return Shapes(as_shapes(theta), x, jax.ShapeDtypeStruct((), x.dtype), context)
