"""One training in pictures: its learning curve, and the network before and after.

Iterations are counted from one, as the console counts them.

The sim-to-real gap: J measured on the bench against the trajectories spent there.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fluctua.core.arrays import Params
from fluctua.plot.network import draw_panel
from fluctua.plot.style import LOOK, WIDTH, save
from fluctua.runs.reading import History, SavedRun, effective, read_history, read_run
from fluctua.store.folder import RunFolder
from fluctua.tcmt import Network

INK = "#117733"
SIZE = "#cc6677"
UNDONE = "0.8"
"""J, the ensemble size, and branches that a rewind left behind."""

BAND: dict = {"color": "#117733", "alpha": 0.3, "lw": 0}
SEEN = 0.008
"""Half-width of a band, relative to the height of its panel, below which it is not visible and has
no entry in the legend.
"""


def draw_run(run: SavedRun) -> Figure:
    """The picture of a run of a lattice: before, after, and the curve between."""
    return draw_before_after(run.task.network, run.course.theta(0), run.trained, run.history)


def draw_before_after(network: Network, theta0: Params, theta1: Params, history: History) -> Figure:
    """Two diagrams on one scale, and J against iteration beneath. history: without rewound rows."""
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(WIDTH, 5.0), layout="constrained")
        grid = figure.add_gridspec(2, 1, height_ratios=[2.1, 1])
        before, after = draw_panel(figure, grid[0], network, theta0, theta1)
        before.set_title(f"before:  $J$ = {history.J[0]:.3f}")
        after.set_title(
            f"after {history.iteration[-1] + 1:,} iterations:  $J$ = {history.J[-1]:.3f}"
        )
        learning_curve(figure.add_subplot(grid[1]), history)
        return figure


def learning_curve(axes: Axes, history: History) -> None:
    """J against iteration; two standard errors on either side where they are wide enough to be
    seen.
    """
    iteration = history.iteration + 1
    reach = 2 * history.J_stderr
    low = history.J - reach
    high = history.J + reach
    seen = np.median(reach) > SEEN * (high.max() - low.min())
    if seen:
        axes.fill_between(iteration, low, high, **BAND, label="± 2 standard errors")
    axes.plot(iteration, history.J, color=INK)
    axes.set(xlabel="iteration", ylabel="expected return $J$")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.margins(x=0.01)
    if seen:
        axes.legend(loc="lower right")


def draw_learning(history: History) -> Figure:
    """J, branches that were rewound in grey; below it the trajectories an iteration. history:
    all rows.
    """
    kept = effective(history)
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        for branch in _undone(history, kept):
            top.plot(history.iteration[branch] + 1, history.J[branch], color=UNDONE, lw=0.8)
        learning_curve(top, kept)
        top.set_xlabel("")
        bottom.step(kept.iteration + 1, kept.ensemble, where="mid", color=SIZE)
        bottom.set(
            xlabel="iteration",
            ylabel="trajectories\nan iteration",
            ylim=(0, 1.15 * kept.ensemble.max()),
        )
        bottom.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
        figure.align_ylabels((top, bottom))
        return figure


def draw_folder(place: RunFolder) -> list[Path]:
    """All figures of a run, as PNG and PDF in its folder; what was written.

    Of a lattice the network too.
    """
    learning = save(draw_learning(read_history(place.path)), place.figures / "learning")
    if place.settings_name != "config.toml":
        return learning
    return [*learning, *save(draw_run(read_run(place.path)), place.figures / "before_after")]


def _undone(history: History, kept: History) -> list[np.ndarray]:
    """Places in the history, one array for every run of rows that a rewind left behind."""
    places = np.flatnonzero(~np.isin(history.row, kept.row))
    breaks = (np.diff(places) > 1) | (np.diff(history.iteration[places]) < 1)
    return [branch for branch in np.split(places, np.flatnonzero(breaks) + 1) if branch.size]


# ---------------------------------------------------------------------------- training on the bench


LEVELS = {"in situ": "#332288", "true": "#117733", "nominal": "#AA4422", "gap": "0.45"}
