"""The inset of Fig. 1b: one training continued with more, as many, and fewer trajectories an iteration."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from fluctua.plot.runs import Run

WINDOW = 25
"""Iterations of the rolling mean."""

BEFORE = 0.4
"""How much of the time before the breakpoint is shown, relative to the time after it."""

COLOURS = ("#d55e00", "black", "#009e73")
"""Fewest, as before, most."""


def rolling_mean(values: np.ndarray, window: int = WINDOW) -> np.ndarray:
    """Mean over `window` values about each; towards the ends fewer on both sides, so that a trend stays in place."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    place = np.arange(len(values))
    reach = np.minimum(window // 2, np.minimum(place, place[::-1]))
    return (total[place + reach + 1] - total[place - reach]) / (2 * reach + 1)


def breakpoint_of(runs: Sequence[Run]) -> int | None:
    """The first iteration at which the continuations differ in their ensembles; None if they never do."""
    shared = sorted(set.intersection(*(set(run.history.iteration.tolist()) for run in runs)))
    for iteration in shared:
        if len({int(run.history.ensemble[run.history.iteration == iteration][0]) for run in runs}) > 1:
            return iteration
    return None


def draw_inset(axes: Axes, runs: Sequence[Run], parent: Run | None) -> Axes:
    """The inset, in a corner of its panel that is empty or made so. parent: what happened before the breakpoint."""
    at = breakpoint_of(runs)
    assert at is not None
    inset = axes.inset_axes(_empty_corner(axes))
    ensemble = lambda run: int(run.history.ensemble[run.history.iteration == at][0])
    runs = sorted(runs, key=ensemble)
    end = max(int(run.history.iteration[-1]) for run in runs)
    start = at - BEFORE * (end - at)
    colours = COLOURS if len(runs) == 3 else [f"C{k}" for k in range(len(runs))]
    for run, colour in zip(runs, colours, strict=True):
        _draw_stretch(inset, run, at, end, colour, f"{ensemble(run) / 1000:g}k")
    if parent is not None:
        _draw_stretch(inset, parent, start, at, "0.45", None)
    inset.axvline(at, color="0.35", lw=0.7, ls=(0, (4, 2)))
    inset.set_ylabel("$J$", labelpad=1)
    inset.tick_params(pad=1.5, length=2)
    inset.locator_params(nbins=3)
    inset.margins(x=0)
    inset.spines[["top", "right"]].set_visible(True)
    handles, labels = inset.get_legend_handles_labels()
    inset.legend(
        handles[::-1], labels[::-1], labelcolor="linecolor", labelspacing=0.1, borderaxespad=0.1, handlelength=0,
        handletextpad=0,
    )  # fmt: skip
    return inset


def _draw_stretch(axes: Axes, run: Run, first: float, last: float, colour: str, label: str | None) -> None:
    """J between two iterations: faded as measured, and its rolling mean."""
    here = (run.history.iteration >= first) & (run.history.iteration <= last)
    iteration, J = run.history.iteration[here], run.history.J[here]
    axes.plot(iteration, J, color=colour, lw=0.5, alpha=0.3)
    axes.plot(iteration, rolling_mean(J), color=colour, lw=1.0, label=label)


def _empty_corner(axes: Axes) -> tuple[float, float, float, float]:
    """Left, bottom, width and height in fractions of the panel: lower right if empty, else upper left, made empty."""
    width, height = 0.40, 0.44
    fraction = axes.transData + axes.transAxes.inverted()
    points = np.concatenate([fraction.transform(line.get_xydata()) for line in axes.lines])
    if points[points[:, 0] > 0.45, 1].min(initial=1.0) > 0.65:
        return (0.58, 0.16, width, height)
    low, high = axes.get_ylim()
    reach = points[points[:, 0] < 0.60, 1].max(initial=0.0)
    axes.set_ylim(low, low + (high - low) * max(1.0, reach / 0.40))
    return (0.14, 0.56, width, height)
