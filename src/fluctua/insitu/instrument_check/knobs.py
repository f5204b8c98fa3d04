"""Comparison of the knobs of a model with a driver: names, limits, units."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fluctua.core.words import close_match
from fluctua.insitu.instrument.protocol import Instrument
from fluctua.insitu.model import Knob, Model, Range

ROUNDING = 1e-9
"""Relative difference of two equal limits."""


class DriverSheet(NamedTuple):
    """Optional attributes of a driver; see `protocol.Instrument`.

    limits: lowest and highest value by knob.
    units: by knob and channel.
    channels: names of the components of a sample.
    """

    limits: Mapping[str, Any]
    units: Mapping[str, str]
    channels: tuple[str, ...]


class KnobReport(NamedTuple):
    """One knob of the model.

    name: of the knob.
    size: number of settings.
    start: lowest and highest start.
    bounds: of the training.
    limits: of the instrument; None where the driver has none.
    unit: empty where the driver has none.
    """

    name: str
    size: int
    start: Range
    bounds: Range
    limits: Range | None
    unit: str

    def __str__(self) -> str:
        several = f" × {self.size}" if self.size > 1 else ""
        start = f"{self.start.low:g}"
        if self.start.high > self.start.low:
            start += f" … {self.start.high:g}"
        unit = f" {self.unit}" if self.unit else ""
        limits = "no limits stated"
        if self.limits is not None:
            limits = f"limits {self.limits.low:g} … {self.limits.high:g}"
        bounds = f"{self.bounds.low:g} … {self.bounds.high:g}"
        return f"{self.name}{several}   start {start} within {bounds}{unit} ({limits})"


def read_sheet(driver: Instrument) -> DriverSheet:
    """Read the optional attributes of a driver."""
    limits = getattr(driver, "limits", None)
    units = getattr(driver, "units", None)
    channels = getattr(driver, "channels", None)
    return DriverSheet(
        dict(limits) if isinstance(limits, Mapping) else {},
        dict(units) if isinstance(units, Mapping) else {},
        tuple(map(str, channels)) if isinstance(channels, tuple | list) else (),
    )


def describe_knob(name: str, knob: Knob, sheet: DriverSheet) -> KnobReport:
    """Describe a knob, with limits and unit of the driver."""
    limits = None
    if name in sheet.limits:
        low, high = sheet.limits[name]
        limits = Range(float(np.max(low)), float(np.min(high)))
    return KnobReport(
        name,
        int(np.size(knob.start)),
        Range(float(np.min(knob.start)), float(np.max(knob.start))),
        Range(*knob.bounds),
        limits,
        sheet.units.get(name, ""),
    )


def find_knob_problems(model: Model, sheet: DriverSheet) -> list[str]:
    """List problems with names, bounds and limits of the knobs."""
    if not model.knobs:
        return ["the model has no knobs. Name the settings that are trained: Model(knobs={…})."]
    problems = _compare_names(model, sheet)
    for name, knob in model.knobs.items():
        problems += _find_bound_problems(name, knob)
        problems += _find_limit_problems(name, knob, sheet.limits.get(name))
    return problems


def _compare_names(model: Model, sheet: DriverSheet) -> list[str]:
    """List names that differ. Knobs that the model does not have stay as they are."""
    missing = [name for name in model.knobs if name not in sheet.limits]
    unknown = [name for name in sheet.limits if name not in model.knobs]
    if not missing or not unknown:
        return []
    return [
        f"the model has the knobs {', '.join(model.knobs)}, and the driver has limits of "
        f"{', '.join(sheet.limits)}: it lacks {', '.join(missing)}. Give both the same names."
        + close_match(missing[0], unknown)
    ]


def _find_bound_problems(name: str, knob: Knob) -> list[str]:
    low, high = knob.bounds
    if not (np.isfinite(low) and np.isfinite(high) and low < high):
        return [f"the bounds of the knob {name} must be (low, high); got ({low:g}, {high:g})."]
    start = np.asarray(knob.start, float)
    if not np.all(np.isfinite(start)):
        return [f"the start of the knob {name} must be finite."]
    outside = (start < low) | (start > high)
    if outside.any():
        return [
            f"the knob {name} starts at {start[outside].flat[0]:g}, outside its bounds {low:g} … "
            f"{high:g}. Change one of them in the model."
        ]
    return []


def _find_limit_problems(name: str, knob: Knob, limits: Any) -> list[str]:
    if limits is None:
        return []
    if np.ndim(limits) < 1 or len(limits) != 2:
        return [f"the driver's limits of the knob {name} must be (low, high); got {limits!r}."]
    low = np.asarray(limits[0], float)
    high = np.asarray(limits[1], float)
    slack = ROUNDING * np.abs(high - low)
    problems = []
    for kind, values in (("start", knob.start), ("bounds", knob.bounds)):
        lowest = float(np.min(values))
        highest = float(np.max(values))
        if np.any(lowest < low - slack) or np.any(highest > high + slack):
            span = f"{lowest:g}" if lowest == highest else f"{lowest:g} … {highest:g}"
            problems.append(
                f"the instrument takes {name} from {np.max(low):g} to {np.min(high):g}; the {kind} "
                f"of the model {'is' if kind == 'start' else 'are'} {span}. Narrow the model, or "
                "widen the instrument's limits."
            )
            break
    return problems
