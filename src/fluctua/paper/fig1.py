"""Figure 1: training at several modulation amplitudes, and what it made of the lattice.

`gather` reads the runs and computes the exposure; `draw` only draws. A piece that is not there leaves a note, and
the other panels are drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec
from matplotlib.layout_engine import ConstrainedLayoutEngine

from fluctua.plot import continuations
from fluctua.plot.network import draw_panel
from fluctua.plot.runs import Run, find_runs, read_run
from fluctua.plot.style import FAMILY, LOOK, WIDTH, letter, sigma_colour
from fluctua.tcmt.exposure import Exposure, exposure

FAINTEST = 0.03
"""Opacity of the least exposed parameter of a family."""

POINTS = 800
"""Most points of one curve: more than a printed panel resolves."""


class Results(NamedTuple):
    """What Fig. 1 shows. runs: by σ_κ, for a and b. inset: continuations of the run without modulation.

    trained, exposure: the run of c–f and what its parameters see; None where there is no such run.
    notes: what is missing, and what would bring it.
    """

    runs: list[Run]
    inset: list[Run]
    trained: Run | None
    exposure: Exposure | None
    notes: list[str]


def gather(folder: Path, *, inset: Path | None = None, sigma_kappa: float = 0.2, count: int = 32) -> Results:
    """Read a folder of run folders; the continuations are in its `inset`, unless another folder is given.

    sigma_kappa: which run c–f show. count: trajectories behind their opacities.
    """
    notes: list[str] = []
    runs = sorted(_readable(find_runs(folder), notes), key=lambda run: run.sigma_kappa)
    if not runs:
        why = " ".join(notes) or "A run folder holds history.csv and parameters.h5."
        raise ValueError(f"no runs in {folder}. {why} Make one: fluctua train paper-quick --out {folder / 'sigma-0'}")
    inset = folder / "inset" if inset is None else inset
    continued = _readable(find_runs(inset), notes)
    if len(continued) < 2:
        notes.append(
            f"panel b has no inset: it takes run folders of the continuations in {inset}; found {len(continued)}."
        )
        continued = []
    elif continuations.breakpoint_of(continued) is None:
        notes.append(f"panel b has no inset: the continuations in {inset} never differ in their ensembles.")
        continued = []
    chosen = [run for run in runs if np.isclose(run.sigma_kappa, sigma_kappa)]
    if not chosen:
        have = ", ".join(f"{run.sigma_kappa:g}" for run in runs)
        notes.append(f"panels c–f are not drawn: no run has σ_κ = {sigma_kappa:g}; there are {have}.")
        return Results(runs, continued, None, None, notes)
    trained = chosen[-1]
    return Results(runs, continued, trained, exposure(0, trained.task, trained.trained, count=count), notes)


def _readable(folders: list[Path], notes: list[str]) -> list[Run]:
    runs = []
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except ValueError as error:
            notes.append(f"{folder.name} is left out: {error}")
    return runs


def opacity(exposed: np.ndarray) -> np.ndarray:
    """The logarithm of the exposures of one family, from `FAINTEST` at the least to 1 at the most exposed."""
    seen = exposed > 0  # a resonator that no bond reaches sees nothing
    if not seen.any():
        return np.full(exposed.shape, FAINTEST)
    size = np.log(np.where(seen, exposed, exposed[seen].min()))
    low, high = size.min(), size.max()
    return FAINTEST + (1 - FAINTEST) * (size - low) / (high - low) if high > low else np.ones(exposed.shape)


def draw(results: Results) -> Figure:
    """Panels a–f across two columns; a and b alone where there is no run for the others."""
    with mpl.rc_context(LOOK):
        whole = results.trained is not None
        layout = ConstrainedLayoutEngine(w_pad=0.04, h_pad=0.03, wspace=0.03, hspace=0.03)
        figure = Figure(figsize=(WIDTH, 5.2 if whole else 2.0), layout=layout)
        grid = figure.add_gridspec(2 if whole else 1, 1, height_ratios=[1, 1.7] if whole else [1])
        top = grid[0].subgridspec(1, 2)
        a, b = figure.add_subplot(top[0]), figure.add_subplot(top[1])
        letter(a, "a")
        letter(b, "b")
        _draw_returns(a, results.runs)
        _draw_budgets(b, results.runs)
        if results.inset:
            parents = [run for run in results.runs if run.sigma_kappa == results.inset[0].sigma_kappa]
            continuations.draw_inset(b, results.inset, parents[0] if parents else None)
        if results.trained is not None and results.exposure is not None:
            bottom = grid[1].subgridspec(1, 2, width_ratios=[1, 1.35])
            _draw_courses(figure, bottom[0], results.trained, results.exposure)
            letter(draw_panel(figure, bottom[1], results.trained.task.network, results.trained.trained)[0], "f")
        return figure


def _draw_returns(axes: Axes, runs: list[Run]) -> None:
    labelled: set[float] = set()
    for run in runs:
        label = None if run.sigma_kappa in labelled else f"{run.sigma_kappa:g}"
        labelled.add(run.sigma_kappa)
        axes.plot(run.history.iteration, run.history.J, color=sigma_colour(run.sigma_kappa), label=label)
    axes.set(xlabel="iteration", ylabel="expected return $J$")
    axes.margins(x=0.01)
    axes.legend(title=r"$\sigma_\kappa$", ncols=2, loc="lower right", title_fontsize=8, columnspacing=1.2)


def _draw_budgets(axes: Axes, runs: list[Run]) -> None:
    for run in runs:
        thousands = run.history.ensemble / 1000
        axes.plot(run.history.iteration, thousands, color=sigma_colour(run.sigma_kappa), drawstyle="steps-post")
    axes.set(xlabel="iteration", ylabel="trajectories per\niteration (10³)")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)


def _draw_courses(figure: Figure, where: SubplotSpec, run: Run, exposed: Exposure) -> None:
    """Panels c, d and e: every parameter against iteration, the more opaque the more light it sees."""
    panels: Any = where.subgridspec(3, 1, hspace=0.02).subplots(sharex=True)
    told = {
        "omega": (r"\omega_n-\omega", r"|\psi_n|^2"),
        "kappa": (r"\kappa_{nm}", r"|\psi_n\psi_m|"),
        "chi": (r"\chi_n", r"|\psi_n|^4"),
    }
    for axes, name, (family, (symbol, seen)) in zip(panels, "cde", told.items(), strict=True):
        letter(axes, name)
        values, power = getattr(run.course, family), 0
        if family == "chi":  # a few thousandths: the power of ten goes into the label
            power = int(np.floor(np.log10(np.abs(values).max(initial=1e-12))))
        _draw_family(axes, run.course.iteration, values / 10.0**power, getattr(exposed, family), FAMILY[family])
        axes.set_ylabel(rf"${symbol}$  ($10^{{{power}}}\gamma_e$)" if power else rf"${symbol}$  ($\gamma_e$)")
        axes.set_title(rf"opacity: $\log\int\!dt\,\langle {seen}\rangle$", loc="right", fontsize=7, color="0.35", pad=2)
    panels[-1].set_xlabel("iteration")
    figure.align_ylabels(panels)


def _draw_family(axes: Axes, iteration: np.ndarray, values: np.ndarray, exposed: np.ndarray, colour: str) -> None:
    rows = np.unique(np.linspace(0, len(iteration) - 1, min(POINTS, len(iteration))).round().astype(int))
    alpha = opacity(exposed)
    order = np.argsort(alpha)  # the exposed ones on top
    lines = [np.stack([iteration[rows], values[rows, k]], axis=1) for k in order]
    colours = [(*mpl.colors.to_rgb(colour), a) for a in alpha[order]]
    axes.add_collection(LineCollection(lines, colors=colours, linewidths=0.5, rasterized=True))
    axes.autoscale_view()
    axes.margins(x=0.01)
