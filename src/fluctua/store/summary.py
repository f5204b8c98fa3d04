"""Summary of a training of any system: its files, numbers from its history, and lines of text."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from fluctua.core.estimate import sample_error
from fluctua.core.text import with_error
from fluctua.core.words import format_count
from fluctua.store import checkpoint
from fluctua.store.folder import RunFolder
from fluctua.store.history import Row, effective

AROUND = 9
"""Iterations over which J is averaged to find its peak."""
FALL = 6.0
"""Standard errors below its peak at which a training counts as fallen.

The highest of many means is high by chance: by four standard errors in ten thousand.
"""
SIMULATOR = "simulator"
DEVICE = "device"
ESTIMATOR = "estimator"
"""What evaluates J: a simulator of the library, any other substrate, or a call of the estimator."""
FAILED = "final_failed"
"""Entry of a summary with the reason why the final parameters could not be measured."""
GRID = 3.0
"""Standard errors between J at two time steps above which a dependence is reported."""
MIN_COMPARED = 20
"""Trajectories from which it is: three standard errors are then exceeded in 1 of 200 cases."""
TEXT = "summary.txt"
NUMBERS = "summary.json"


def write(place: RunFolder, numbers: dict[str, Any], text: str) -> None:
    """Write a summary as text and as numbers, which mark the run as complete."""
    checkpoint.replace(place.path / TEXT, text.encode())
    checkpoint.replace(place.path / NUMBERS, (json.dumps(numbers, indent=1) + "\n").encode())


def remove(place: RunFolder) -> None:
    """Remove the summary of an earlier end, as soon as a run goes on."""
    (place.path / NUMBERS).unlink(missing_ok=True)
    (place.path / TEXT).unlink(missing_ok=True)


def summarise_rows(rows: list[Row]) -> dict[str, Any]:
    """Numbers of a summary that follow from the history alone."""
    first = effective(rows)[0]
    last = rows[-1]
    return {
        "start": {"J": first.J, "J_stderr": first.J_stderr},
        "iterations": last.iteration + 1,
        "rows": last.row + 1,
        "trajectories": last.trajectories,
        "seconds": round(sum(row.seconds for row in rows), 3),
    }


def compare_steps(final: dict[str, Any], finer: dict[str, Any]) -> dict[str, Any]:
    """The difference of J between two time steps in standard errors, if above `GRID`.

    Not of a few trajectories: two differ by three of their standard errors in one of ten cases.
    """
    if final["trajectories"] < MIN_COMPARED:
        return {}
    z = (finer["J"] - final["J"]) / max(np.hypot(final["J_stderr"], finer["J_stderr"]), 1e-300)
    return {"step_matters": float(z)} if abs(z) > GRID else {}


def find_fall(rows: list[Row], final: dict[str, Any], twin: bool = False) -> dict[str, Any]:
    """The highest J of a training that fell from it, if it did."""
    if len(rows) < AROUND:
        return {}
    window = np.ones(AROUND) / AROUND
    mean = np.convolve([row.J for row in rows], window, "valid")
    k = int(np.argmax(mean))
    highest = rows[k : k + AROUND]
    error = np.sqrt(sum(row.J_stderr**2 for row in highest)) / AROUND
    if np.isnan(error):  # one trajectory per iteration: how they scatter
        error = sample_error(np.array([row.J for row in highest]))
    drop = mean[k] - final["J"]
    least = max(FALL * np.hypot(error, final["J_stderr"]), 0.01 * abs(final["J"]))
    if not drop >= least:  # nor where the end has no error
        return {}
    middle = rows[k + AROUND // 2].iteration
    return {
        "peak": {
            "J": float(mean[k]),
            "J_stderr": float(error),
            "iteration": middle,
            "twin": twin,
        }
    }


def format_values(summary: dict[str, Any]) -> list[str]:
    """Lines with J before and after the training, and a warning where it depends on the step."""

    def value(part):
        return with_error(summary[part]["J"], summary[part]["J_stderr"])

    final = summary.get("final")
    lines = [f"J before   {value('start')}"]
    if final is None:
        lines.append(f"J after    {value('last')}   of the last iteration, not measured afresh")
        if FAILED in summary:
            lines.append(f"           {summary[FAILED]}")
        return lines
    where = {DEVICE: " of the device", ESTIMATOR: " of the estimator"}
    lines.append(
        f"J after    {value('final')}   final.npz, measured afresh with "
        f"{format_count(final['trajectories'], 'trajectory')}{where.get(final.get('source'), '')}"
    )
    if "finer" in summary:
        steps = f"{summary['finer']['dt']:g} instead of {final['dt']:g}"
        lines.append(f"           {value('finer')}   with steps of {steps}")
    if "step_matters" in summary:
        lines.append(
            f"step       these two differ by {abs(summary['step_matters']):.1f} standard errors: "
            "part of what was learnt may be the time grid and not the process. Train with smaller "
            "steps, and compare"
        )
    return lines


def format_training(summary: dict[str, Any]) -> str:
    """Iterations, trajectories and time of a training."""
    iterations = format_count(summary["iterations"], "iteration")
    trajectories = format_count(summary["trajectories"], "trajectory")
    return f"training   {iterations}, {trajectories}, {summary['seconds']:.1f} s"


def format_peak(summary: dict[str, Any]) -> list[str]:
    """A line about a fall from the highest J, if there was one."""
    if "peak" not in summary:
        return []
    peak = summary["peak"]
    cure = "try smaller steps, or more trajectories"
    cure += "; if the twin may be wrong, baseline.forget_after=1 with both" if peak["twin"] else ""
    where = f"around iteration {peak['iteration']:,}, above the end"
    return [f"peak       {with_error(peak['J'], peak['J_stderr'])} {where}: {cure}"]
