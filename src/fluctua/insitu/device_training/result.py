"""Result of a training on an instrument: J at its beginning and end, and the settings reached."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fluctua.core.text import with_error
from fluctua.core.words import format_count
from fluctua.insitu.model import Model
from fluctua.store import checkpoint, final
from fluctua.store.folder import RunFolder
from fluctua.store.history import Row, effective, read
from fluctua.store.summary import FAILED, summarise_rows, write

TAIL = 10
"""The last iterations of which J is averaged are one in so many."""
MAX_VALUES = 6
"""Maximum number of values of a setting that are listed."""
NEAR = 1e-6
"""Distance to a bound, in units of the range, below which a setting is at it."""


class MeanValue(NamedTuple):
    """The mean of J over the last measured iterations.

    J, J_stderr: mean and its standard error.
    iterations: number of iterations.
    """

    J: float
    J_stderr: float
    iterations: int


def average_end(rows: Sequence[Row], devices: int = 1) -> MeanValue:
    """Average J over the last tenth of the iterations that measured.

    Errors of one device are independent between iterations. Those of several devices are mostly
    the differences between the devices, which are the same in every iteration: averaging does not
    reduce them.
    """
    measured = [row for row in effective(rows) if row.ensemble] or list(rows)
    last = measured[-math.ceil(len(measured) / TAIL) :]
    count = len(last)
    variance = float(np.mean([row.J_stderr**2 for row in last]))
    error = math.sqrt(variance if devices > 1 else variance / count)
    return MeanValue(float(np.mean([row.J for row in last])), error, count)


def write_result(
    place: RunFolder, model: Model, state: checkpoint.RunState, devices: int = 1
) -> None:
    """Write J before and after, and the settings reached, to summary.txt and summary.json.

    state: at the end, with the final evaluation (`fluctua.store.final`) if there was one.
    """
    rows = read(place.history)
    if not rows:
        return
    summary = summarise_result(rows, final.read(state), devices)
    with np.load(place.final) as file:
        text = describe_result(summary, dict(file), model, devices)
    write(place, summary, f"{text}\n")


def summarise_result(
    rows: Sequence[Row], value: Mapping[str, Any] | None = None, devices: int = 1
) -> dict[str, Any]:
    """The numbers of a summary.

    Args:
        rows: the history, with one row at least.
        value: of the final evaluation, or None. `spent`: all trajectories on the instruments.
        devices: number of devices that were trained together.
    """
    which = " that measured" if any(not row.ensemble for row in rows) else ""
    summary = {
        **summarise_rows(list(rows)),
        "last": {**average_end(rows, devices)._asdict(), "which": which},
    }
    if value is None:
        return summary
    result = dict(value)
    summary["trajectories"] = result.pop("spent")
    if final.FAILED in result:
        return {**summary, FAILED: result[final.FAILED]}
    return {**summary, "final": result}


def describe_result(
    summary: Mapping[str, Any], settings: Mapping[str, np.ndarray], model: Model, devices: int = 1
) -> str:
    """Lines with J before and after, and the settings reached.

    Args:
        summary: from `summarise_result`.
        settings: after the last step.
        model: with the bounds of the settings.
        devices: number of devices that were trained together.
    """

    def value(part: str) -> str:
        return with_error(summary[part]["J"], summary[part]["J_stderr"])

    end = summary["last"]
    which = "the last iteration"
    if end["iterations"] > 1:
        which = f"mean of the last {end['iterations']} iterations"
    instruments = "instrument" if devices == 1 else "instruments"
    after = [f"{value('last')}   {which}{end['which']}"]
    last = ""
    if "final" in summary:
        count = summary["final"]["trajectories"]
        used = format_count(count, "trajectory")
        after.insert(0, f"{value('final')}   measured at the end with {used}")
        last = f", {count:,} of them at the end"
    elif FAILED in summary:
        after.append(f"the final evaluation failed: {summary[FAILED]}")
    lines = [
        f"J before   {value('start')}   the first iteration",
        *(f"{'' if k else 'J after':<11}{text}" for k, text in enumerate(after)),
        f"training   {format_count(summary['iterations'], 'iteration')}, "
        f"{format_count(summary['trajectories'], 'trajectory')} on the {instruments}{last}",
    ]
    for k, (name, setting) in enumerate(settings.items()):
        label = "" if k else "settings"
        lines.append(f"{label:<11}{name} = {_describe_setting(name, np.asarray(setting), model)}")
    return "\n".join(lines)


def _describe_setting(name: str, value: np.ndarray, model: Model) -> str:
    """`0.5, -1   1 of 2 at their bounds -1 … 1`; lowest and highest of many values."""
    each = value.ravel()
    if each.size <= MAX_VALUES:
        text = ", ".join(f"{v:.4g}" for v in each)
    else:
        text = f"{each.min():.4g} … {each.max():.4g} ({each.size} values)"
    knob = model.knobs.get(name)
    if knob is None:
        return text
    low, high = (np.broadcast_to(bound, value.shape).ravel() for bound in knob.bounds)
    margin = NEAR * (high - low)
    below = each <= low + margin
    above = each >= high - margin
    reached = int(np.sum(below | above))
    if not reached:
        return text
    if each.size == 1:
        return f"{text}   at its {'lower' if below[0] else 'upper'} bound"
    return f"{text}   {reached} of {each.size} at a bound"
