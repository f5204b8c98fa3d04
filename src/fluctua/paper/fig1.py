"""Draw figure 1: training at several modulation amplitudes, and the trained lattice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec
from matplotlib.layout_engine import ConstrainedLayoutEngine

from fluctua.paper.training import Results, Trained, TrainingCurve, find_breakpoint
from fluctua.plot.network import draw_panel
from fluctua.plot.style import FAMILY, LOOK, WIDTH, letter, sigma_colour
from fluctua.runs.reading import rolling_mean

FAINTEST = 0.03
"""Opacity of the least exposed parameter of a family."""

POINTS = 800
"""Maximum number of points of a curve: more than a printed panel resolves."""

BEFORE = 0.4
"""Inset: time shown before the breakpoint, relative to the time after it."""

CONTINUED = ("#d55e00", "black", "#009e73")
"""Inset: colours of fewest trajectories, as before, most."""


def scale_opacity(exposed: np.ndarray) -> np.ndarray:
    """Opacities from the logarithm of the exposures of one family: `FAINTEST` to 1."""
    seen = exposed > 0  # a resonator that no bond reaches receives nothing
    if not seen.any():
        return np.full(exposed.shape, FAINTEST)
    size = np.log(np.where(seen, exposed, exposed[seen].min()))
    low = size.min()
    high = size.max()
    if not high > low:
        return np.ones(exposed.shape)
    return FAINTEST + (1 - FAINTEST) * (size - low) / (high - low)


def draw(results: Results) -> Figure:
    """Panels a–f across two columns; a and b alone where there is no run for the others."""
    with mpl.rc_context(LOOK):
        complete = results.trained is not None
        layout = ConstrainedLayoutEngine(w_pad=0.04, h_pad=0.03, wspace=0.03, hspace=0.03)
        figure = Figure(figsize=(WIDTH, 5.2 if complete else 2.0), layout=layout)
        grid = figure.add_gridspec(
            2 if complete else 1, 1, height_ratios=[1, 1.7] if complete else [1]
        )
        top = grid[0].subgridspec(1, 2)
        a = figure.add_subplot(top[0])
        b = figure.add_subplot(top[1])
        letter(a, "a")
        letter(b, "b")
        _draw_returns(a, results.runs)
        _draw_budgets(b, results.runs)
        if results.inset:
            parents = [
                run for run in results.runs if run.sigma_kappa == results.inset[0].sigma_kappa
            ]
            draw_inset(b, results.inset, parents[0] if parents else None)
        if results.trained is not None:
            bottom = grid[1].subgridspec(1, 2, width_ratios=[1, 1.35])
            _draw_courses(figure, bottom[0], results.trained)
            (f,) = draw_panel(figure, bottom[1], results.trained.network, results.trained.theta)
            letter(f, "f")
            f.set_title(
                rf"$\sigma_\kappa={results.trained.sigma_kappa:g}$, after training",
                loc="right",
                fontsize=7,
            )
        return figure


def _draw_returns(axes: Axes, runs: list[TrainingCurve]) -> None:
    labelled: set[float] = set()
    for run in runs:
        label = None if run.sigma_kappa in labelled else f"{run.sigma_kappa:g}"
        labelled.add(run.sigma_kappa)
        axes.plot(run.iteration + 1, run.J, color=sigma_colour(run.sigma_kappa), label=label)
    axes.set(xlabel="iteration", ylabel="expected return $J$")
    axes.margins(x=0.01)
    axes.legend(
        title=r"$\sigma_\kappa$", ncols=2, loc="lower right", title_fontsize=8, columnspacing=1.2
    )


def _draw_budgets(axes: Axes, runs: list[TrainingCurve]) -> None:
    for k, run in enumerate(runs):  # they coincide for long: the later ones on top, and thinner
        axes.plot(
            run.iteration + 1,
            run.ensemble / 1000,
            color=sigma_colour(run.sigma_kappa),
            lw=2.6 / (1 + 0.6 * k),
            drawstyle="steps-mid",
        )
    axes.set(xlabel="iteration", ylabel="trajectories per\niteration (10³)")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)


def _draw_courses(figure: Figure, where: SubplotSpec, run: Trained) -> None:
    """Draw panels c, d and e: parameters against iteration, opaque where they see much light."""
    panels: Any = where.subgridspec(3, 1, hspace=0.02).subplots(sharex=True)
    labels = {
        "omega": (r"\omega_n-\omega", r"|\psi_n|^2"),
        "kappa": (r"\kappa_{nm}", r"|\psi_n\psi_m|"),
        "chi": (r"\chi_n", r"|\psi_n|^4"),
    }
    for axes, name, (family, (symbol, seen)) in zip(panels, "cde", labels.items(), strict=True):
        letter(axes, name)
        values = getattr(run, family)
        power = 0
        if family == "chi":  # a few thousandths: the power of ten goes into the label
            power = int(np.floor(np.log10(np.abs(values).max(initial=1e-12))))
        _draw_family(
            axes,
            run.iteration + 1,
            values / 10.0**power,
            getattr(run.exposure, family),
            FAMILY[family],
        )
        axes.set_ylabel(
            rf"${symbol}$  ($10^{{{power}}}\gamma_e$)" if power else rf"${symbol}$  ($\gamma_e$)"
        )
        opaque = (
            rf"$\sigma_\kappa={run.sigma_kappa:g}$;  opacity: $\log\int\!dt\,\langle {seen}\rangle$"
        )
        axes.set_title(opaque, loc="right", fontsize=7, color="0.35", pad=2)
    panels[-1].set_xlabel("iteration")
    figure.align_ylabels(panels)


def _draw_family(
    axes: Axes, iteration: np.ndarray, values: np.ndarray, exposed: np.ndarray, colour: str
) -> None:
    rows = np.unique(
        np.linspace(0, len(iteration) - 1, min(POINTS, len(iteration))).round().astype(int)
    )
    alpha = scale_opacity(exposed)
    order = np.argsort(alpha)  # the exposed ones on top
    lines = [np.stack([iteration[rows], values[rows, k]], axis=1) for k in order]
    colours = [(*mpl.colors.to_rgb(colour), a) for a in alpha[order]]
    axes.add_collection(LineCollection(lines, colors=colours, linewidths=0.5, rasterized=True))
    axes.autoscale_view()
    axes.margins(x=0.01)


# -------------------------------------------------------------------------------------------- inset


def draw_inset(axes: Axes, runs: Sequence[TrainingCurve], parent: TrainingCurve | None) -> Axes:
    """Draw the inset of panel b in an empty corner.

    parent: the run before the breakpoint.
    """
    breakpoint_ = find_breakpoint(runs)
    assert breakpoint_ is not None
    inset = axes.inset_axes(_empty_corner(axes))

    def ensemble(run):
        return int(run.ensemble[run.iteration == breakpoint_][0])

    runs = sorted(runs, key=ensemble)
    end = max(int(run.iteration[-1]) for run in runs)
    start = breakpoint_ - BEFORE * (end - breakpoint_)
    colours = CONTINUED if len(runs) == 3 else [f"C{k}" for k in range(len(runs))]
    for run, colour in zip(runs, colours, strict=True):
        _draw_stretch(inset, run, breakpoint_, end, colour, f"{ensemble(run) / 1000:g}k")
    if parent is not None:
        _draw_stretch(inset, parent, start, breakpoint_, "0.45", None)
    inset.axvline(breakpoint_ + 1, color="0.35", lw=0.7, ls=(0, (4, 2)))
    inset.set_ylabel("$J$", labelpad=1)
    inset.tick_params(pad=1.5, length=2)
    inset.locator_params(nbins=3)
    inset.margins(x=0)
    inset.spines[["top", "right"]].set_visible(True)
    handles, labels = inset.get_legend_handles_labels()
    inset.legend(
        handles[::-1],
        labels[::-1],
        labelcolor="linecolor",
        labelspacing=0.1,
        borderaxespad=0.1,
        handlelength=0,
        handletextpad=0,
    )
    return inset


def _draw_stretch(
    axes: Axes, run: TrainingCurve, first: float, last: float, colour: str, label: str | None
) -> None:
    """Draw J between two iterations: pale as measured, and its rolling mean."""
    here = (run.iteration >= first) & (run.iteration <= last)
    iteration = run.iteration[here]
    J = run.J[here]
    axes.plot(iteration + 1, J, color=colour, lw=0.5, alpha=0.3)
    axes.plot(iteration + 1, rolling_mean(J), color=colour, lw=1.0, label=label)


def _empty_corner(axes: Axes) -> tuple[float, float, float, float]:
    """Left, bottom, width and height of the inset in fractions of the panel.

    Lower right if that is empty; else upper left, made empty by a larger vertical range.
    """
    width = 0.40
    height = 0.44
    fraction = axes.transData + axes.transAxes.inverted()
    points = np.concatenate([fraction.transform(line.get_xydata()) for line in axes.lines])
    if points[points[:, 0] > 0.45, 1].min(initial=1.0) > 0.65:
        return (0.58, 0.16, width, height)
    low, high = axes.get_ylim()
    reach = points[points[:, 0] < 0.60, 1].max(initial=0.0)
    axes.set_ylim(low, low + (high - low) * max(1.0, reach / 0.40))
    return (0.18, 0.56, width, height)
