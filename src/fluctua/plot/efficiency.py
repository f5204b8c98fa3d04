"""What a trajectory buys: J against the trajectories spent, of trainings by different estimators."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fluctua.plot.continuations import rolling_mean
from fluctua.plot.style import LOOK, WIDTH, letter
from fluctua.runs.config import Config, load
from fluctua.store import history

SMOOTHED = 9
"""Iterations of the rolling mean under a curve: with 16 trajectories an iteration J itself is noisy."""

PAPER_FINAL = 0.65
"""The paper's J at the end, without modulation."""

INK = {"binned": "#888888", "time": "#222222", "twin": "#d55e00", "wrong": ("#e69f00", "#cc79a7", "#56b4e9")}


class Curve(NamedTuple):
    """One training. spent, J: (I,). finer: J at the end with half the time step, or None."""

    label: str
    sigma_kappa: float
    seed: int
    spent: np.ndarray
    J: np.ndarray
    finer: float | None


class Band(NamedTuple):
    """Trainings that differ in their seeds alone. spent: (K,); low, mean, high: over the seeds (K,)."""

    label: str
    seeds: int
    spent: np.ndarray
    low: np.ndarray
    mean: np.ndarray
    high: np.ndarray
    finer: list[float]


def read_curve(folder: Path) -> Curve:
    """A run folder as a curve."""
    config, rows = load(folder / "config.toml"), history.effective(history.read(folder / "history.csv"))
    told = folder / "summary.json"
    finer = json.loads(told.read_text())["finer"]["J"] if told.exists() else None
    spent, J = (np.array([getattr(row, name) for row in rows]) for name in ("trajectories", "J"))
    return Curve(describe(config), config.task.sigma_kappa, config.seed, spent, rolling_mean(J, SMOOTHED), finer)


def describe(config: Config) -> str:
    """What sets a training apart from the others of the figure."""
    b = config.baseline
    if b.kind == "twin":
        return f"twin {100 * b.twin_error:g} % wrong" if b.twin_error else "twin correction"
    rule = "paper's rule" if config.optimiser.rule == "paper" else config.optimiser.rule
    return f"{rule}, {'binned' if b.kind == 'binned' else 'time-only'}"


def bands(curves: Sequence[Curve]) -> list[Band]:
    """Curves with one label and one σ_κ, put together; as far as the shortest of them goes."""
    made = []
    for label in sorted({c.label for c in curves}, key=_rank):
        of = [c for c in curves if c.label == label]
        grid = np.geomspace(max(c.spent[0] for c in of), min(c.spent[-1] for c in of), 300)
        J = np.array([np.interp(np.log(grid), np.log(c.spent), c.J) for c in of])
        finer = [c.finer for c in of if c.finer is not None]
        made.append(Band(label, len(of), grid, J.min(axis=0), J.mean(axis=0), J.max(axis=0), finer))
    return made


def spent_until(curve: Curve, J: float) -> int | None:
    """Trajectories until the smoothed J reaches a value; None if it never does."""
    there = np.flatnonzero(curve.J >= J)
    return int(curve.spent[there[0]]) if there.size else None


def draw(curves: Sequence[Curve]) -> Figure:
    """One panel for each σ_κ; lines are means over seeds, shades their spread, dots J with half the time step."""
    sigmas = sorted({c.sigma_kappa for c in curves})
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(WIDTH, 2.9), layout="constrained")
        panels = np.atleast_1d(figure.subplots(1, len(sigmas), sharey=True))
        for k, (axes, sigma) in enumerate(zip(panels, sigmas, strict=True)):
            _panel(axes, bands([c for c in curves if c.sigma_kappa == sigma]))
            letter(axes, "abcdef"[k])
            axes.set_title(rf"$\sigma_\kappa = {sigma:g}$")
            axes.set_xlabel("trajectories spent")
        panels[0].set_ylabel("$J$, fraction of power transmitted")
        top = max(float(c.J.max()) for c in curves)
        panels[0].set_ylim(0, max(0.72, 1.04 * top))
    return figure


def _panel(axes: Axes, of: Sequence[Band]) -> None:
    wrong = iter(INK["wrong"])
    for band in of:
        kind = "twin" if band.label.startswith("twin c") else "binned" if "binned" in band.label else "time"
        ink = next(wrong) if "wrong" in band.label else INK[kind]
        seeds = f" (×{band.seeds})" if band.seeds > 1 else ""
        axes.fill_between(band.spent, band.low, band.high, color=ink, alpha=0.25, lw=0)
        axes.plot(band.spent, band.mean, color=ink, label=band.label + seeds)
        if band.finer:
            axes.plot(band.spent[-1], np.mean(band.finer), "o", ms=3.5, color=ink, mec="white", mew=0.5, zorder=5)
    axes.axhline(PAPER_FINAL, color="0.6", lw=0.6, ls=(0, (4, 3)))
    axes.set(xscale="log")
    axes.legend(loc="lower right", borderaxespad=0.1)


def _rank(label: str) -> tuple[bool, bool, int, str]:
    """The best first, as the eye meets them from the left."""
    return ("rule" in label, "wrong" in label, len(label), label)
