"""Draw figure 2, the properties of the estimator, from the tables of `properties`."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from fluctua.paper.properties import Convergence, Curve, Properties
from fluctua.plot.style import LOOK, WIDTH, letter, sigma_colour
from fluctua.runs.reading import rolling_mean

INK = "#2166ac"
BAND = "#9ecae1"
"""The estimate, and its standard error."""

SMOOTH = 0.05
"""Window of the moving average, as a share of all trajectories."""

MARK: dict[str, Any] = {"color": "0.45", "lw": 0.8, "ls": (0, (4, 2)), "zorder": 0}
"""Vertical lines: the largest budget, the amplitude of the training."""

PLATE: dict[str, Any] = {
    "frameon": True,
    "facecolor": "white",
    "edgecolor": "none",
    "framealpha": 1.0,
    "borderpad": 0.2,
}
"""Opaque background of a legend that a line would cross."""

TREND: dict[str, Any] = {"color": "black", "lw": 0.9, "ls": (0, (1, 1.6))}
"""What the paper predicts."""


def draw(properties: Properties) -> Figure:
    """Panels a–d across two columns."""
    with mpl.rc_context(LOOK):
        layout = ConstrainedLayoutEngine(w_pad=0.04, h_pad=0.04, wspace=0.04, hspace=0.04)
        figure = Figure(figsize=(WIDTH, 5.0), layout=layout)
        (a, b), (c, d) = figure.subplots(2, 2, height_ratios=[1, 1.25])
        for axes, name in zip((a, b, c, d), "abcd", strict=True):
            letter(axes, name)
        for axes, convergence in zip((a, b), properties.convergence, strict=True):
            draw_convergence(axes, convergence)
        a.legend(loc="lower right", ncols=2, columnspacing=1.2, **PLATE)
        draw_variance(c, properties)
        draw_bias(d, properties)
        return figure


def draw_convergence(axes: Axes, convergence: Convergence) -> None:
    """Draw the running estimate: its moving average, its error, and the finite difference."""
    count = convergence.running.trajectories / 1000
    estimate = convergence.running.estimate
    error = convergence.running.stderr
    smooth = rolling_mean(estimate, max(3, int(SMOOTH * len(count))))
    axes.fill_between(
        count, smooth - error, smooth + error, color=BAND, alpha=0.45, lw=0, label="standard error"
    )
    axes.plot(count, estimate, color=INK, lw=0.6, alpha=0.35)
    axes.plot(count, smooth, color=INK, label="running estimate")
    value, spread = convergence.difference
    axes.axhspan(value - spread, value + spread, color="black", alpha=0.15, lw=0)
    axes.axhline(value, color="black", lw=0.9, ls=(0, (5, 2)), label="finite difference")
    axes.axvline(convergence.budget / 1000, **MARK, label="largest budget")
    # the first few thousand trajectories are anywhere: show five errors of the estimate at a tenth
    # of them
    tenth = error[len(error) // 10]
    axes.set_ylim(min(value, smooth[-1]) - 5 * tenth, max(value, smooth[-1]) + 4 * tenth)
    axes.set_xlim(0, count[-1])
    axes.set(
        xlabel="trajectories (10³)",
        ylabel=rf"$\partial J/\partial\omega_{{{convergence.site}}}$  ($1/\gamma_e$)",
    )
    axes.set_title(
        rf"$\sigma_\kappa={convergence.sigma_kappa:g}$,  $z={convergence.z:+.1f}$",
        loc="right",
        pad=2,
    )


def draw_variance(axes: Axes, properties: Properties) -> None:
    """Draw the variance against σ_W, solid with baselines and dashed without."""
    for (_, name), curve in properties.variance.items():
        _draw_points(axes, curve, "-" if name == "binned" else (0, (4, 1.5)))
    largest = max(
        (c for (_, name), c in properties.variance.items() if name == "none"),
        key=lambda c: c.value[0],
    )
    _draw_trend(axes, largest, -2, above=6.0, label=r"$\propto\sigma_W^{-2}$", right=True)
    axes.axvline(properties.operating, **MARK)
    axes.set(xscale="log", yscale="log", xlabel=r"noise amplitude $\sigma_W$")
    axes.set_ylabel(r"$\langle\mathrm{Var}\,\mathcal{G}\rangle_{\{\omega_n\}}$  ($1/\gamma_e^2$)")
    handles = [
        Line2D([], [], color=sigma_colour(s), label=rf"$\sigma_\kappa={s:g}$")
        for s in properties.bias
    ]
    handles += [
        Line2D([], [], color="0.3", label="with baseline"),
        Line2D([], [], color="0.3", ls=(0, (4, 1.5)), label="without"),
    ]
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.12)  # room for the legend
    axes.legend(handles=handles, loc="upper right", ncols=2, columnspacing=1.2, **PLATE)


def draw_bias(axes: Axes, properties: Properties) -> None:
    """Draw |J(σ_W) − J(0)| against σ_W; inset: the spread of single returns."""
    for k, curve in enumerate(properties.bias.values()):
        # they coincide: the later ones on top, and thinner
        _draw_points(axes, curve, "-", width=3.2 / (1 + k))
    first = next(iter(properties.bias.values()))
    _draw_trend(axes, first, 2, above=5.0, label=r"$\propto\sigma_W^{2}$")
    axes.axvline(properties.operating, **MARK)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel=r"noise amplitude $\sigma_W$",
        ylabel=r"$|J(\sigma_W)-J(0)|$",
    )
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.25)  # room for the inset
    axes.yaxis.set_major_locator(LogLocator(numticks=6))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.annotate(
        r"colours as in c; the three $\sigma_\kappa$ nearly "
        r"coincide",
        (0.98, 0.03),
        xycoords="axes fraction",
        ha="right",
        fontsize=7,
        color="0.35",
    )
    inset = axes.inset_axes((0.16, 0.62, 0.37, 0.36))
    for curve in properties.spread.values():
        _draw_points(inset, curve, "-", size=0.8)
    calm = properties.spread[min(properties.spread)]
    _draw_trend(inset, calm, 1, above=0.25, label=r"$\propto\sigma_W$", below=True)
    inset.axvline(properties.operating, **MARK)
    inset.set(xscale="log", yscale="log")
    inset.set_ylabel("std of return", fontsize=7, labelpad=1)
    inset.tick_params(pad=1, length=2)
    inset.minorticks_off()


def _draw_points(
    axes: Axes, curve: Curve, style: Any, *, size: float = 1.6, width: float = 0.9
) -> None:
    colour = sigma_colour(curve.sigma_kappa)
    axes.plot(
        curve.sigma_w,
        curve.value,
        color=colour,
        ls=style,
        lw=width,
        marker="o",
        ms=size + width,
        mew=0,
    )
    axes.vlines(
        curve.sigma_w,
        np.maximum(curve.value - curve.error, curve.value / 10),
        curve.value + curve.error,
        color=colour,
        lw=0.8,
    )


def _draw_trend(
    axes: Axes,
    curve: Curve,
    power: float,
    *,
    above: float,
    label: str,
    right: bool = False,
    below: bool = False,
) -> None:
    """Draw a labelled dotted power law beside the small-σ_W end of a curve."""
    x = curve.sigma_w[[0, -1 - len(curve.sigma_w) // 4]]
    y = above * curve.value[0] * (x / x[0]) ** power
    axes.plot(x, y, **TREND)
    middle = np.exp(np.log(x).mean())
    name: dict[str, Any] = {
        "ha": "left" if right or below else "right",
        "va": "top" if below else "bottom",
    }
    axes.annotate(
        label,
        (middle, above * curve.value[0] * (middle / x[0]) ** power),
        (3 if right or below else -3, 0),
        textcoords="offset points",
        fontsize=7,
        **name,
    )
