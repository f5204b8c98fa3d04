"""An estimate as text and as HTML: J, and the components that stand out most from their errors."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from fluctua.core.display import html
from fluctua.core.text import (
    MIN_FOR_COVERAGE,
    describe_groups,
    describe_stops,
    format_interval,
    names,
    with_error,
)
from fluctua.core.words import format_count

MAX_ROWS = 12
"""Components that are listed."""

BEYOND = 2.0
"""Standard errors from zero beyond which a component of an array stands out."""


class ValueRow(NamedTuple):
    """A number with its error, and its interval, which may be empty."""

    name: str
    value: str
    interval: str


class ArrayRow(NamedTuple):
    """An array of the gradient: its shape, how many components stand out, and the largest one."""

    name: str
    shape: str
    beyond: str
    largest: str


class EstimateTable(NamedTuple):
    """Numbers of an estimate as they are shown.

    value: J.
    trajectories: their number in words.
    remarks: on J.
    components: those that stand out most, in the order of θ.
    arrays: of θ, where components are left out.
    notes: what is left out, and the meaning of errors and intervals.
    """

    value: ValueRow
    trajectories: str
    remarks: list[str]
    components: list[ValueRow]
    arrays: list[ArrayRow]
    notes: list[str]


def tabulate_estimate(estimate: Any, max_rows: int = MAX_ROWS) -> EstimateTable:
    """The rows of an estimate. max_rows: components that are listed."""

    def flatten(tree: Any) -> np.ndarray:
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])

    gradient = flatten(estimate.gradient)
    error = flatten(estimate.stderr)
    known = np.isfinite(gradient)  # what cannot be estimated is NaN
    z = np.where(known, np.abs(gradient) / np.where(error > 0, error, np.inf), -1)
    low, high = np.full((2, gradient.size), np.nan)
    least, greatest = np.full(2, np.nan)
    has_intervals = estimate.interval is not None and estimate.value_interval is not None
    if has_intervals:
        low, high = (flatten(side) for side in estimate.interval)
        least, greatest = estimate.value_interval

    def make_row(name: str, value: Any, stderr: Any, below: Any, above: Any) -> ValueRow:
        interval = ""
        if has_intervals:
            interval = format_interval(float(below), float(above), float(stderr))
        return ValueRow(name, with_error(float(value), float(stderr)), interval)

    labels = names(estimate.gradient)
    shown = np.sort(np.argsort(-z, kind="stable")[: min(max_rows, int(known.sum()))])
    remarks = [] if estimate.stopped is None else [describe_stops(estimate.stopped)]
    remarks += [] if estimate.groups is None else [describe_groups(estimate.groups)]
    left_out = int(known.sum()) > max_rows
    notes = []
    if left_out:
        notes.append(
            f"  … {known.sum()} components in all; shown: the {max_rows} furthest from zero in "
            "standard errors"
        )
    return EstimateTable(
        make_row("J", estimate.value, estimate.value_stderr, least, greatest),
        format_count(estimate.count, "trajectory"),
        remarks,
        [make_row(labels[i], gradient[i], error[i], low[i], high[i]) for i in shown],
        _summarise_arrays(estimate, z) if left_out else [],
        [*notes, *_explain_errors(estimate, has_intervals)],
    )


def _summarise_arrays(estimate: Any, z: np.ndarray) -> list[ArrayRow]:
    """One row per array of the gradient. z: distance from zero in standard errors (P,)."""
    rows = []
    start = 0
    leaves = jax.tree_util.tree_leaves_with_path(estimate.gradient)
    errors = jax.tree.leaves(estimate.stderr)
    for (path, leaf), stderr in zip(leaves, errors, strict=True):
        values = np.ravel(leaf)
        own = z[start : start + values.size]
        start += values.size
        if values.size < 2:
            continue
        top = int(np.argmax(own))
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "theta"
        index = list(map(int, np.unravel_index(top, np.shape(leaf))))
        largest = with_error(float(values[top]), float(np.ravel(stderr)[top]))
        shape = " × ".join(map(str, np.shape(leaf)))
        beyond = f"{int(np.sum(own > BEYOND))} of {values.size}"
        rows.append(ArrayRow(name, shape, beyond, f"{largest} at {index}"))
    return rows


def _explain_errors(estimate: Any, has_intervals: bool) -> list[str]:
    """The meaning of ± and of the intervals."""
    if estimate.groups is not None and has_intervals:
        degrees = len(estimate.groups.group) - 1
        return [
            f"  ±: standard error between devices; […]: 95 %, Student's with {degrees} "
            "degrees of freedom"
        ]
    if has_intervals and estimate.batches is not None:
        return [
            f"  ±: standard error from {estimate.batches} batches of trajectories; […]: 95 %, "
            "corrected for skewness and tails of the batches (Hall, Student)"
        ]
    if has_intervals and estimate.count < MIN_FOR_COVERAGE:
        return [
            f"  ±: standard error; […]: 95 %, widened, because {estimate.count} samples show "
            "little of their skewness and tails.\n"
            f"  Of very skewed ones fewer than {MIN_FOR_COVERAGE} cover less: take more"
        ]
    if has_intervals:
        return [
            "  ±: standard error; […]: 95 %, corrected for skewness and tails of the samples "
            "(Hall, Student)"
        ]
    if 0 < estimate.count < MIN_FOR_COVERAGE:
        return [
            f"  ±: standard error; with fewer than {MIN_FOR_COVERAGE} samples ±1.96 of it can "
            "hold as little as 60 %"
        ]
    return []


def describe_estimate(estimate: Any, max_rows: int = MAX_ROWS) -> str:
    """The estimate as text for a terminal."""
    table = tabulate_estimate(estimate, max_rows)

    def add_interval(row: ValueRow) -> str:
        return f"{row.value}   {row.interval}" if row.interval else row.value

    room = max((len(row.name) for row in table.components), default=0)
    lines = [
        f"J = {add_interval(table.value)}   ({table.trajectories})",
        *table.remarks,
        *(f"  ∂J/∂{row.name:<{room}} = {add_interval(row)}" for row in table.components),
        *table.notes,
    ]
    return "\n".join(lines)


def render_estimate(estimate: Any, max_rows: int = MAX_ROWS) -> str:
    """The estimate as HTML for a notebook."""
    table = tabulate_estimate(estimate, max_rows)
    rows = [table.value, *(row._replace(name=f"∂J/∂{row.name}") for row in table.components)]
    header = ["", "value ± standard error", *(["95 %"] if table.value.interval else [])]
    cells = [[row.name, row.value, *([row.interval] if row.interval else [])] for row in rows]
    parts = [
        html.make_table(cells, header, f"Estimate from {table.trajectories}"),
        html.make_notes([*table.remarks, *table.notes]),
    ]
    if table.arrays:
        beyond = f"beyond {BEYOND:g} standard errors"
        content = html.make_table(table.arrays, ("array", "shape", beyond, "furthest from zero"))
        parts.append(html.make_details("arrays", content))
    return "<div>" + "".join(parts) + "</div>"
