"""Figures, one module each. A figure is drawn from results and never computes any.

>>> run = read_run("runs/demo")
>>> draw_run(run).savefig("demo.png")
>>> diagram(run.task.network, run.trained).savefig("network.pdf")
"""

from fluctua.plot.before_after import draw_before_after, draw_run, learning_curve
from fluctua.plot.network import diagram, draw_network
from fluctua.plot.runs import Run, find_runs, read_run
from fluctua.plot.style import save

__all__ = [
    "Run",
    "diagram",
    "draw_before_after",
    "draw_network",
    "draw_run",
    "find_runs",
    "learning_curve",
    "read_run",
    "save",
]
