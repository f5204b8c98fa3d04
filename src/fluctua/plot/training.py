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
from fluctua.insitu.bench.demo import DemoResult
from fluctua.insitu.bench.population import PopulationComparison
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
"""Half-width of a band, relative to the height of its panel, below which nobody sees it and the
legend has no key.
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


def draw_in_situ(result: DemoResult) -> Figure:
    """One curve and three levels; an arrow for what the simulation promised and the bench did
    not keep.
    """
    with mpl.rc_context({**LOOK, "font.size": 9, "axes.labelsize": 9, "legend.fontsize": 8}):
        figure = Figure(figsize=(6.0, 3.6), layout="constrained")
        axes = figure.subplots()
        spent = np.array([row.trajectories for row in result.rows]) / 1000
        value = np.array([row.J for row in result.rows])
        error = np.array([row.J_stderr for row in result.rows])
        calibrated = (result.rows[0].trajectories - result.rows[0].ensemble) / 1000
        end = spent[-1]
        axes.axvspan(0, calibrated, color="0.93", lw=0)
        axes.fill_between(
            spent, value - 2 * error, value + 2 * error, color=LEVELS["in situ"], alpha=0.25, lw=0
        )
        axes.plot(spent, value, color=LEVELS["in situ"], lw=1.5)
        axes.errorbar(
            end,
            result.in_situ.J,
            2 * result.in_situ.stderr,
            fmt="o",
            ms=4,
            color=LEVELS["in situ"],
            clip_on=False,
            zorder=5,
        )
        right = 1.015 * end
        for name, level, text in (
            ("true", result.true, "trained with the\nbench's true parameters"),
            ("nominal", result.nominal, "trained on the nominal\nmodel, carried over"),
        ):
            axes.axhline(level.J, color=LEVELS[name], ls="--", lw=1.1)
            axes.text(right, level.J, text, color=LEVELS[name], va="center", fontsize=8)
        axes.text(
            right,
            min(result.in_situ.J, result.true.J - 0.065),
            "trained in situ",
            color=LEVELS["in situ"],
            va="center",
            fontsize=8,
        )
        at = 0.8 * end
        axes.annotate(
            "",
            (at, result.nominal.J),
            (at, result.nominal_promised),
            arrowprops={
                "arrowstyle": "->",
                "color": LEVELS["gap"],
                "lw": 0.9,
                "shrinkA": 0,
                "shrinkB": 0,
            },
        )
        axes.plot(at, result.nominal_promised, "_", ms=12, color=LEVELS["nominal"])
        axes.text(
            at - 0.015 * end,
            (result.nominal.J + min(value[int(0.8 * len(value))], result.nominal_promised)) / 2,
            "gap: promised by the\nnominal simulation,\nnot kept by the bench",
            color=LEVELS["gap"],
            fontsize=7.5,
            ha="right",
            va="center",
        )
        top = max(result.true.J, result.nominal_promised, value.max())
        note = f"← the first {calibrated * 1000:,.0f} calibrate"
        axes.text(
            calibrated + 0.015 * end, 0.02 * top, note, va="bottom", fontsize=7.5, color="0.4"
        )
        axes.set(
            xlabel="trajectories run on the bench (thousands)",
            ylabel="transmitted power $J$, measured on the bench",
            xlim=(0, end),
            ylim=(0, 1.08 * top),
        )
    return figure


DESIGNS = {
    "before": "before\ntraining",
    "one device": "trained on\nbox 1 alone",
    "settings": "trained together,\nsame settings",
    "parameters": "trained together,\nsettings corrected",
    "whole range": "the same, whole\nrange of the knobs",
}


def draw_population(result: PopulationComparison) -> Figure:
    """J of every box after each way of training: those that were trained on the left, those
    that were not beside.
    """
    with mpl.rc_context({**LOOK, "font.size": 9, "axes.labelsize": 9, "legend.fontsize": 8}):
        figure = Figure(figsize=(6.0, 3.2), layout="constrained")
        axes = figure.subplots()
        for label, boxes, shift, colour, mark in (
            (
                "boxes that were trained, and their mean",
                slice(0, result.devices),
                -0.14,
                LEVELS["in situ"],
                "o",
            ),
            (
                "boxes that took no part, and their mean",
                slice(result.devices, None),
                0.14,
                LEVELS["nominal"],
                "s",
            ),
        ):
            for place, design in enumerate(result.designs):
                each = np.array([level.J for level in design.levels[boxes]])
                spread = 0.07 * np.linspace(-1, 1, len(each)) if len(each) > 1 else np.zeros(1)
                axes.plot(
                    place + shift + spread, each, mark, ms=3.5, color=colour, alpha=0.6, mec="none"
                )
                ends = place + shift + np.array([-0.1, 0.1])
                axes.plot(
                    ends, 2 * [each.mean()], color=colour, lw=2, label=label if place == 0 else None
                )
        axes.set_xticks(
            range(len(result.designs)), [DESIGNS[design.name] for design in result.designs]
        )
        axes.set(
            ylabel="transmitted power $J$, measured",
            ylim=(0, None),
            xlim=(-0.4, len(result.designs) - 0.6),
        )
        figure.legend(loc="outside upper center", ncols=2)
    return figure
