"""The picture of a `Comparison`: who is biased, who is noisy, who is slow."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from fluctua.core.compare import Comparison


def draw(comparison: Comparison) -> Figure:
    """Three panels over the estimators: bias in standard errors, variance per trajectory, time per call."""
    rows = comparison.rows
    figure = Figure(figsize=(9.6, 1.5 + 0.42 * len(rows)), layout="constrained")
    bias, variance, seconds = figure.subplots(1, 3, sharey=True)
    place = np.arange(len(rows))[::-1]
    for y, row in zip(place, rows, strict=True):
        bias.plot(row.z, np.full(row.z.size, y), "o", ms=4, alpha=0.6, color="C0", mec="none")
        size = np.where(row.variance > 0, row.variance, np.nan)
        variance.plot(size, np.full(size.size, y), "o", ms=4, alpha=0.6, color="C1", mec="none")
        if np.isfinite(size).any():
            variance.plot(np.nanmean(size), y, "|", ms=16, mew=2, color="C1")
        seconds.plot(1e3 * row.seconds, y, "s", ms=6, color="C2")
    bias.axvspan(-2, 2, color="C0", alpha=0.1, lw=0)
    bias.axvline(0, color="0.4", lw=0.8)
    reach = max(3.0, 1.1 * max(np.abs(row.z).max() for row in rows))
    bias.set(xlim=(-reach, reach), xlabel="bias (standard errors)", ylim=(-0.6, len(rows) - 0.4))
    bias.set_yticks(place, [row.name for row in rows])
    variance.set(xscale="log", xlabel="variance per trajectory")
    seconds.set(xlabel="time per call (ms)", xlim=(0, 1.1e3 * max(row.seconds for row in rows)))
    for axes in (bias, variance, seconds):
        axes.grid(axis="x", color="0.9")
        axes.set_axisbelow(True)
    spent = max(row.trajectories for row in rows)
    figure.suptitle(f"{spent:,} trajectories each; a dot is one parameter, a bar their mean", fontsize=10)
    return figure
