"""Figures of trainings in situ: one virtual bench, and several that differ."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from fluctua.insitu.bench.demo import DemoResult
from fluctua.insitu.bench.population import PopulationComparison
from fluctua.plot.style import LOOK
from fluctua.plot.training import LEVELS


def draw_in_situ(result: DemoResult) -> Figure:
    """Draw J on the bench with three reference levels, and an arrow for the sim-to-real gap."""
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
            (at, result.nominal_predicted),
            arrowprops={
                "arrowstyle": "->",
                "color": LEVELS["gap"],
                "lw": 0.9,
                "shrinkA": 0,
                "shrinkB": 0,
            },
        )
        axes.plot(at, result.nominal_predicted, "_", ms=12, color=LEVELS["nominal"])
        axes.text(
            at - 0.015 * end,
            (result.nominal.J + min(value[int(0.8 * len(value))], result.nominal_predicted)) / 2,
            "gap between the nominal\nsimulation and the bench",
            color=LEVELS["gap"],
            fontsize=7.5,
            ha="right",
            va="center",
        )
        top = max(result.true.J, result.nominal_predicted, value.max())
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
    """Draw J of every box after each kind of training: trained boxes left, untrained ones right."""
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
