"""The learning curve of a run: J and the ensemble size against the iteration."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from fluctua.store import history
from fluctua.store.checkpoint import settle
from fluctua.store.folder import RunFolder


def draw(rows: list[history.Row]) -> Figure:
    """J with two standard errors, branches that were rewound in grey; below it the trajectories an iteration."""
    kept = history.effective(rows)
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    iteration, value, error, size = (
        np.array([getattr(r, n) for r in kept]) for n in ("iteration", "J", "J_stderr", "ensemble")
    )
    for branch in _abandoned(rows, kept):
        top.plot([r.iteration for r in branch], [r.J for r in branch], color="0.8", lw=0.8)
    top.fill_between(iteration, value - 2 * error, value + 2 * error, color="C0", alpha=0.25, lw=0)
    top.plot(iteration, value, color="C0", lw=1.3)
    top.set_ylabel("expected return $J$")
    bottom.step(iteration, size, where="post", color="C1", lw=1.3)
    bottom.set(xlabel="iteration", ylabel="trajectories", ylim=(0, 1.15 * size.max()))
    if len(iteration) > 1:
        bottom.set_xlim(iteration[0], iteration[-1])
    for axes in (top, bottom):
        axes.grid(color="0.92")
        axes.set_axisbelow(True)
    return figure


def save(place: RunFolder) -> list[Path]:
    """Draw a run into its folder, as PNG and PDF."""
    figure = draw(history.read(place.history))
    place.figures.mkdir(exist_ok=True)
    paths = [place.figures / f"learning.{kind}" for kind in ("png", "pdf")]
    for path in paths:
        partial = path.with_name("partial-" + path.name)
        figure.savefig(partial, dpi=150)
        settle(partial, path)
    return paths


def _abandoned(rows: list[history.Row], kept: list[history.Row]) -> list[list[history.Row]]:
    """Runs of rows that a rewind left behind."""
    stays = {row.row for row in kept}
    branches: list[list[history.Row]] = []
    for row in rows:
        if row.row in stays:
            continue
        if branches and branches[-1][-1].row == row.row - 1 and branches[-1][-1].iteration < row.iteration:
            branches[-1].append(row)
        else:
            branches.append([row])
    return branches
