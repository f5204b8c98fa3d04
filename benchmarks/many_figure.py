"""Figure of how the time of an estimate grows with E, T, the state and P.

    python benchmarks/many_figure.py CPU.json [GPU.json] --out results/own/scaling.png

The files are of `many_parameters.py --scaling --json FILE`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import NullFormatter

AXES = {
    "E": ("trajectories", "trajectories E"),
    "T": ("steps", "steps T"),
    "state": ("state", "components of the state"),
    "P": ("parameters", "parameters P"),
}
COLOURS = ("tab:blue", "tab:orange")


def draw(tables: list[dict[str, Any]], out: Path) -> None:
    """One panel per quantity; all but one are fixed in each. Dotted: proportional."""
    figure, panels = plt.subplots(
        1, len(AXES), figsize=(12, 3.4), sharey=True, layout="constrained"
    )
    for panel, (axis, (key, label)) in zip(panels, AXES.items(), strict=True):
        for table, colour in zip(tables, COLOURS, strict=False):
            rows = sorted((r for r in table["rows"] if r["axis"] == axis), key=lambda r: r[key])
            x = np.array([r[key] for r in rows], float)
            seconds = np.array([r["seconds"] for r in rows])
            panel.loglog(x, seconds, "o-", color=colour, label=table["machine"])
            panel.loglog(x, seconds[-1] * x / x[-1], ":", color=colour, lw=0.8)
        panel.set_xlabel(label)
        shown = x[(len(x) - 1) % 2 :: 2]  # every other one, and the last
        panel.set_xticks(shown, [f"{v:,.0f}" for v in shown])
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(True, which="both", alpha=0.2)
    panels[0].set_ylabel("seconds per estimate")
    lines, machines = panels[0].get_legend_handles_labels()
    figure.legend(lines, machines, loc="outside upper center", ncols=len(lines), fontsize=8)
    figure.savefig(out, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    draw([json.loads(path.read_text()) for path in options.tables], options.out)
    print(f"figure: {options.out}")


if __name__ == "__main__":
    main()
