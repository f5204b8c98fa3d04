"""Figure of a response in time."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from fluctua.core.text import names
from fluctua.plot.style import LOOK
from fluctua.processes.response_report import StepResponse, choose_components, flatten_rows

COLOUR = "#332288"


def draw_response(answer: StepResponse) -> Figure:
    """Draw χ(t) of a few components, with its interval at each time and its joint band."""
    shown = choose_components(answer)
    labels = names(answer.theta)
    columns = min(len(shown), 3)
    rows = -(-len(shown) // columns)
    with mpl.rc_context({**LOOK, "font.size": 9, "axes.labelsize": 9, "legend.fontsize": 8}):
        size = (2.6 * columns + 0.6, 2.2 * rows + 0.5)
        figure = Figure(figsize=size, layout="constrained")
        panels = np.ravel(figure.subplots(rows, columns, squeeze=False))
        for axes, i in zip(panels, shown, strict=False):
            _draw_component(axes, answer, i)
            axes.set_title(f"step of {labels[i]}", fontsize=9)
        for axes in panels[len(shown) :]:
            axes.set_axis_off()
        figure.supylabel("response of the mean reward χ", fontsize=9)
        handles, texts = panels[0].get_legend_handles_labels()
        figure.legend(handles, texts, loc="outside lower center", ncols=3)
    return figure


def _draw_component(axes: mpl.axes.Axes, answer: StepResponse, i: int) -> None:
    """Draw one component: the line, its interval, its band."""
    ends = {
        "95 % at all times together": (answer.band, 0.15),
        "95 % at each time": (answer.interval, 0.3),
    }
    for label, (sides, alpha) in ends.items():
        low, high = (flatten_rows(side)[:, i] for side in sides)
        axes.fill_between(answer.t, low, high, color=COLOUR, alpha=alpha, lw=0, label=label)
    axes.plot(answer.t, flatten_rows(answer.response)[:, i], color=COLOUR, lw=1.5, label="χ(t)")
    axes.axhline(0, color="0.6", lw=0.6)
    axes.set(xlabel="time since the step", xlim=(0, answer.t[-1]))
