"""Figures of one training: its learning curve, and the network before and after.

Iterations are counted from one, as on the console.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fluctua.core.arrays import Params
from fluctua.core.words import format_count
from fluctua.plot.network import draw_panel
from fluctua.plot.style import LOOK, WIDTH, save
from fluctua.runs.reading import History, SavedRun, effective, read_history, read_run
from fluctua.store.folder import RunFolder
from fluctua.tcmt import Network

INK = "#117733"
SIZE = "#cc6677"
UNDONE = "0.8"
"""Colours of J, of the ensemble size, and of branches that were rewound."""

BAND: dict = {"color": "#117733", "alpha": 0.3, "lw": 0}
SEEN = 0.008
"""Half-width of a band, relative to its panel, below which it is not drawn."""


def draw_run(run: SavedRun) -> Figure:
    """Draw a run of a lattice: before, after, and the curve between."""
    return draw_before_after(run.task.network, run.course.theta(0), run.trained, run.history)


def draw_before_after(network: Network, theta0: Params, theta1: Params, history: History) -> Figure:
    """Draw two diagrams on one scale, and J against iteration. history: without rewound rows."""
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(WIDTH, 5.0), layout="constrained")
        grid = figure.add_gridspec(2, 1, height_ratios=[2.1, 1])
        before, after = draw_panel(figure, grid[0], network, theta0, theta1)
        before.set_title(f"before:  $J$ = {history.J[0]:.3f}")
        measured = history.J[history.ensemble > 0]
        used = format_count(int(history.iteration[-1]) + 1, "iteration")
        after.set_title(f"after {used}:  $J$ = {measured[-1]:.3f}")
        draw_learning_curve(figure.add_subplot(grid[1]), history)
        return figure


def draw_learning_curve(axes: Axes, history: History) -> None:
    """Draw J against iteration, with a band of ± 2 standard errors where it is visible.

    J of iterations that measured nothing is the model's, and grey.
    """
    measured = history.ensemble > 0
    alone = not measured.all()
    if alone:
        axes.plot(history.iteration + 1, history.J, color=UNDONE, label="the model's $J$")
        history = history.select(measured)
    iteration = history.iteration + 1
    reach = 2 * history.J_stderr
    low = history.J - reach
    high = history.J + reach
    seen = np.median(reach) > SEEN * (high.max() - low.min())
    if seen:
        axes.fill_between(iteration, low, high, **BAND, label="± 2 standard errors")
    axes.plot(iteration, history.J, color=INK, label="measured" if alone else None)
    axes.set(xlabel="iteration", ylabel="expected return $J$")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.margins(x=0.01)
    if seen or alone:
        axes.legend(loc="lower right")


def draw_learning(history: History) -> Figure:
    """Draw J, rewound branches in grey, and the trajectories per iteration. history: all rows."""
    kept = effective(history)
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        for branch in _find_undone(history, kept):
            top.plot(history.iteration[branch] + 1, history.J[branch], color=UNDONE, lw=0.8)
        draw_learning_curve(top, kept)
        top.set_xlabel("")
        bottom.step(kept.iteration + 1, kept.ensemble, where="mid", color=SIZE)
        bottom.set(
            xlabel="iteration",
            ylabel="trajectories\nper iteration",
            ylim=(0, 1.15 * kept.ensemble.max()),
        )
        bottom.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
        figure.align_ylabels((top, bottom))
        return figure


def draw_folder(place: RunFolder) -> list[Path]:
    """Draw all figures of a run into its folder as PNG and PDF, and return their paths.

    For a lattice also the network.
    """
    learning = save(draw_learning(read_history(place.path)), place.figures / "learning")
    if place.settings_name != "config.toml":
        return learning
    return [*learning, *save(draw_run(read_run(place.path)), place.figures / "before_after")]


def _find_undone(history: History, kept: History) -> list[np.ndarray]:
    """Indices of the rows that were rewound, one array per branch."""
    places = np.flatnonzero(~np.isin(history.row, kept.row))
    breaks = (np.diff(places) > 1) | (np.diff(history.iteration[places]) < 1)
    return [branch for branch in np.split(places, np.flatnonzero(breaks) + 1) if branch.size]


# ---------------------------------------------------------------------------- training on the bench


LEVELS = {"in situ": "#332288", "true": "#117733", "nominal": "#AA4422", "gap": "0.45"}
