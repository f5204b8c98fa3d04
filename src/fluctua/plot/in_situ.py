"""The sim-to-real gap: J measured on the bench against the trajectories spent there."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from fluctua.insitu.bench.demo import Result
from fluctua.plot.style import LOOK

INK = {"in situ": "#332288", "true": "#117733", "nominal": "#AA4422", "gap": "0.45"}


def draw(result: Result) -> Figure:
    """One curve and three levels; an arrow for what the simulation promised and the bench did not keep."""
    with mpl.rc_context({**LOOK, "font.size": 9, "axes.labelsize": 9, "legend.fontsize": 8}):
        figure = Figure(figsize=(6.0, 3.6), layout="constrained")
        axes = figure.subplots()
        spent = np.array([row.trajectories for row in result.rows]) / 1000
        value = np.array([row.J for row in result.rows])
        error = np.array([row.J_stderr for row in result.rows])
        calibrated = (result.rows[0].trajectories - result.rows[0].ensemble) / 1000
        end = spent[-1]
        axes.axvspan(0, calibrated, color="0.93", lw=0)
        axes.fill_between(spent, value - 2 * error, value + 2 * error, color=INK["in situ"], alpha=0.25, lw=0)
        axes.plot(spent, value, color=INK["in situ"], lw=1.5)
        axes.errorbar(
            end,
            result.in_situ.J,
            2 * result.in_situ.stderr,
            fmt="o",
            ms=4,
            color=INK["in situ"],
            clip_on=False,
            zorder=5,
        )
        right = 1.015 * end
        for name, level, text in (
            ("true", result.true, "trained with the\nbench's true parameters"),
            ("nominal", result.nominal, "trained on the nominal\nmodel, carried over"),
        ):
            axes.axhline(level.J, color=INK[name], ls="--", lw=1.1)
            axes.text(right, level.J, text, color=INK[name], va="center", fontsize=8)
        axes.text(right, min(result.in_situ.J, result.true.J - 0.065), "trained in situ", color=INK["in situ"],
                  va="center", fontsize=8)  # fmt: skip
        at = 0.8 * end
        axes.annotate(
            "", (at, result.nominal.J), (at, result.nominal_promised),
            arrowprops={"arrowstyle": "->", "color": INK["gap"], "lw": 0.9, "shrinkA": 0, "shrinkB": 0},
        )  # fmt: skip
        axes.plot(at, result.nominal_promised, "_", ms=12, color=INK["nominal"])
        axes.text(at - 0.015 * end, (result.nominal.J + min(value[int(0.8 * len(value))], result.nominal_promised)) / 2,
                  "gap: promised by the\nnominal simulation,\nnot kept by the bench", color=INK["gap"], fontsize=7.5,
                  ha="right", va="center")  # fmt: skip
        top = max(result.true.J, result.nominal_promised, value.max())
        note = f"← the first {calibrated * 1000:,.0f} calibrate"
        axes.text(calibrated + 0.015 * end, 0.02 * top, note, va="bottom", fontsize=7.5, color="0.4")
        axes.set(
            xlabel="trajectories run on the bench (thousands)",
            ylabel="transmitted power $J$, measured on the bench",
            xlim=(0, end),
            ylim=(0, 1.08 * top),
        )
    return figure
