"""Processes, rewards and trajectories as text and as HTML."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fluctua.core.display import html
from fluctua.core.words import format_count

MAX_COMPONENTS = 8
"""Components of a state that are listed."""

MAX_DRAWN = 5
"""Trajectories that are drawn."""

MAX_BYTES = 2**24
"""Bytes of states that are read for ranges and drawings; a file may be larger than memory."""


class NamedPart(NamedTuple):
    """A part of a record: its name, its value in a word, and more about it."""

    name: str
    value: str
    detail: str = ""


# --------------------------------------------------------------------------- processes and rewards


def name_parts(fields: Mapping[str, Any]) -> list[NamedPart]:
    """The parts of a record of functions and words; those that are None or empty are left out."""
    return [
        _describe_part(name, value)
        for name, value in fields.items()
        if value is not None and not (isinstance(value, tuple) and not value)
    ]


def describe_parts(title: str, parts: Sequence[NamedPart]) -> str:
    """`Process(drift=drift, noise=<lambda>, integrator='heun')`."""
    return f"{title}({', '.join(f'{part.name}={part.value}' for part in parts)})"


def render_parts(title: str, parts: Sequence[NamedPart]) -> str:
    """Render the parts of a record as a table in HTML, with the arguments of the functions."""
    rows = [(part.name, part.value.strip("'<>") + part.detail) for part in parts]
    return html.make_table(rows, (), title)


def _describe_part(name: str, value: Any) -> NamedPart:
    if isinstance(value, tuple) and not hasattr(value, "_fields") and np.ndim(value) == 2:
        return NamedPart(name, f"<{' × '.join(map(str, np.shape(value)))}>")
    if isinstance(value, str | tuple) or not callable(value):
        return NamedPart(name, _describe_value(value))
    return NamedPart(name, *describe_function(value))


def _describe_value(value: Any) -> str:
    """A record of functions within another one, in a line; anything else as Python writes it."""
    if hasattr(value, "_asdict"):
        return describe_parts(type(value).__name__, name_parts(value._asdict()))
    return repr(value)


def describe_function(function: Any) -> tuple[str, str]:
    """The name of a function without the place where it was made, and its arguments."""
    while hasattr(function, "arity") and hasattr(function, "f"):  # made by `check`
        function = function.f
    if isinstance(function, functools.partial):
        return f"partial({describe_function(function.func)[0]})", ""
    name = getattr(function, "__qualname__", type(function).__name__).rpartition("<locals>.")[2]
    try:
        arguments = ", ".join(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some builtins have no signature
        return name, ""
    return name, f"({arguments})"


# ------------------------------------------------------------------------------------ trajectories


class RangeRow(NamedTuple):
    """Lowest and highest value of a component, and curves of some trajectories (N, T+1)."""

    name: str
    text: str
    curves: np.ndarray


class TrajectoriesTable(NamedTuple):
    """Numbers of trajectories as they are shown.

    title: shape, type and size.
    parts: times, context, events, groups.
    ranges: of the first components.
    notes: what is left out.
    """

    title: str
    parts: list[NamedPart]
    ranges: list[RangeRow]
    notes: list[str]


def is_shown(trajectories: Any) -> bool:
    """Whether times and states have the shapes of a record, as within a compiled function too."""
    t = getattr(trajectories.t, "shape", None)
    x = getattr(trajectories.x, "shape", None)
    return t is not None and x is not None and len(t) == 1 and len(x) == 3


def tabulate_trajectories(trajectories: Any) -> TrajectoriesTable:
    """The rows of trajectories. Of data larger than `MAX_BYTES` only the first ones are read."""
    x = trajectories.x
    count, times, size = x.shape
    dtype = np.dtype(x.dtype)
    memory = _format_bytes(count * times * size * dtype.itemsize)
    title = (
        f"{format_count(count, 'trajectory')} × {times:,} times × "
        f"{format_count(size, 'component')}   {dtype}, {memory}"
    )
    parts = [] if is_traced(trajectories.t) else [NamedPart("t", _describe_times(trajectories.t))]
    for name in ("context", "events"):
        tree = getattr(trajectories, name)
        if tree is not None:
            parts.append(NamedPart(name, _describe_tree(tree)))
    if trajectories.group is not None and not is_traced(trajectories.group):
        groups = len(np.unique(np.asarray(trajectories.group)))
        parts.append(NamedPart("group", format_count(groups, "device")))
    if is_traced(x) or not count * times * size:
        return TrajectoriesTable(title, parts, [], [])
    first = min(count, max(1, MAX_BYTES // (times * size * dtype.itemsize)))
    last = min(times, max(1, MAX_BYTES // (size * dtype.itemsize)))
    states = np.asarray(x[:first, :last])
    notes = []
    if first < count:
        notes.append(f"  ranges of the first {format_count(first, 'trajectory')}")
    if last < times:
        notes.append(f"  ranges of the first {last:,} times")
    if size > MAX_COMPONENTS:
        notes.append(f"  … {size:,} components in all; shown: the first {MAX_COMPONENTS}")
    ranges = [
        RangeRow(f"x[{k}]", describe_range(states[:, :, k]), states[:MAX_DRAWN, :, k])
        for k in range(min(size, MAX_COMPONENTS))
    ]
    return TrajectoriesTable(title, parts, ranges, notes)


def describe_trajectories(trajectories: Any) -> str:
    """Trajectories as text for a terminal."""
    table = tabulate_trajectories(trajectories)
    rows = [*((p.name, p.value) for p in table.parts), *((r.name, r.text) for r in table.ranges)]
    room = max((len(name) for name, _ in rows), default=0)
    return "\n".join([table.title, *(f"  {n:<{room}}  {v}" for n, v in rows), *table.notes])


def render_trajectories(trajectories: Any) -> str:
    """Trajectories as HTML for a notebook, with curves of a few."""
    table = tabulate_trajectories(trajectories)
    rows: list[Sequence[str]] = [(part.name, part.value, "") for part in table.parts]
    for row in table.ranges:
        label = f"{row.name} of {format_count(len(row.curves), 'trajectory')}"
        rows.append((row.name, row.text, html.draw_curves(list(row.curves), label=label)))
    table_html = html.make_table(rows, (), table.title)
    return f"<div>{table_html}{html.make_notes(table.notes)}</div>"


def _describe_times(t: Any) -> str:
    """`0 … 2   steps of 0.01`."""
    times = np.asarray(t, np.float64)
    if len(times) < 2:
        return ", ".join(f"{time:g}" for time in times)
    steps = np.diff(times)
    low = float(steps.min())
    high = float(steps.max())
    # times in single precision: their differences scatter by the rounding of the times
    rounding = 4 * np.finfo(np.float32).eps * np.abs(times).max()
    uniform = high - low <= max(1e-3 * high, rounding)
    text = f"{steps.mean():.4g}" if uniform else f"{low:.4g} … {high:.4g}"
    return f"{times[0]:g} … {times[-1]:g}   steps of {text}"


def describe_range(values: np.ndarray) -> str:
    """`-1.05 … 1.93`, of the absolute value of complex numbers."""
    numbers = np.abs(values) if np.iscomplexobj(values) else np.asarray(values, np.float64)
    finite = numbers[np.isfinite(numbers)]
    bad = numbers.size - finite.size
    text = f"{finite.min():.4g} … {finite.max():.4g}" if finite.size else "none finite"
    return f"{text}   {bad:,} not finite" if bad and finite.size else text


def _describe_tree(tree: Any) -> str:
    """Names and shapes of the arrays of a pytree."""
    texts = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        texts.append(f"{name} {np.shape(leaf)}".strip())
    more = f", … {len(texts) - MAX_COMPONENTS} more" if len(texts) > MAX_COMPONENTS else ""
    return ", ".join(texts[:MAX_COMPONENTS]) + more


def is_traced(array: Any) -> bool:
    """Whether an array is a name in a function that JAX compiles, without numbers."""
    return isinstance(array, jax.core.Tracer | jax.ShapeDtypeStruct)


def _format_bytes(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
