"""One training in one picture: the network before, after, and the learning curve between."""

from __future__ import annotations

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fluctua.core.types import Params
from fluctua.plot.network import draw_panel
from fluctua.plot.runs import History, Run
from fluctua.plot.style import LOOK, WIDTH
from fluctua.tcmt import Network


def draw_run(run: Run) -> Figure:
    """The picture of any run folder.

    >>> draw_run(read_run("runs/demo")).savefig("demo.png")
    """
    return draw_before_after(run.task.network, run.course.theta(0), run.trained, run.history)


def draw_before_after(network: Network, theta0: Params, theta1: Params, history: History) -> Figure:
    """Two diagrams on one scale, and J against iteration beneath. history: without rewound rows."""
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(WIDTH, 5.0), layout="constrained")
        grid = figure.add_gridspec(2, 1, height_ratios=[2.1, 1])
        before, after = draw_panel(figure, grid[0], network, theta0, theta1)
        before.set_title(f"iteration {history.iteration[0]:,}:  $J$ = {history.J[0]:.3f}")
        after.set_title(f"iteration {history.iteration[-1]:,}:  $J$ = {history.J[-1]:.3f}")
        learning_curve(figure.add_subplot(grid[1]), history)
        return figure


def learning_curve(axes: Axes, history: History) -> None:
    """J against iteration with two standard errors on either side."""
    low, high = history.J - 2 * history.J_stderr, history.J + 2 * history.J_stderr
    axes.fill_between(history.iteration, low, high, color="#117733", alpha=0.25, lw=0, label="± 2 standard errors")
    axes.plot(history.iteration, history.J, color="#117733")
    axes.set(xlabel="iteration", ylabel="expected return $J$")
    axes.margins(x=0.01)
    axes.legend(loc="lower right")
