"""The table and the figure of `results/own` from the files that `own_speed.py --json` writes.

python benchmarks/own_table.py CPU.json ... --cuda CUDA.json ...; the folder is results/own.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from fluctua.plot.style import LOOK, WIDTH, save_png

OUT = Path(__file__).resolve().parent.parent / "results" / "own"
COLOURS = {
    "JAX": "#332288",
    "diffrax": "#DDCC77",
    "torchsde": "#CC6677",
    "kernel": "#117733",
    "by hand": "#999999",
}
SIMULATION = "simulation only"


def merge(paths):
    rows, starts = [], {}
    for path in paths:
        part = json.loads(Path(path).read_text())
        rows += [
            {key: v for key, v in row.items() if key not in ("call", "seconds")}
            for row in part["rows"]
        ]
        starts |= part["starts"]
    return {"machine": part["machine"], "rows": rows, "starts": starts}


def find_ns(rows, process, who, what, count):
    most = (
        2_000 if (who, what) == ("JAX", "twin") else count
    )  # in batches: as much for each of more
    values = [
        r["ns"]
        for r in rows
        if (r["process"], r["who"], r["what"], r["trajectories"]) == (process, who, what, most)
    ]
    return values[0] if values else None


def table(result):
    rows = result["rows"]

    def number(v):
        return "" if v is None else f"{v:.3g}"

    def ratio(a, b):
        return "" if a is None or b is None else f"{a / b:,.0f}" if a > 10 * b else f"{a / b:.2g}"

    head = [
        "process",
        "trajectories",
        "kernel, ns",
        "with Philox",
        "by hand",
        "JAX ÷ kernel: time",
        "optimal",
        "twin",
        "diffrax ÷ kernel",
        "torchsde ÷ kernel",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for process, count in dict.fromkeys((r["process"], r["trajectories"]) for r in rows):

        def ns(who, what, process=process, count=count):
            return find_ns(rows, process, who, what, count)

        own = ns("kernel", "time")
        cells = [
            process,
            f"{count:,}",
            number(own),
            number(ns("kernel", "time, philox")),
            number(ns("by hand", "time")),
        ]
        cells += [
            ratio(ns("JAX", what), ns("kernel", what)) for what in ("time", "optimal", "twin")
        ]
        cells += [ratio(ns(who, SIMULATION), own) for who in ("diffrax", "torchsde")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(panels):
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(WIDTH, 2.6), layout="constrained")
        for axes, (title, result, count) in zip(figure.subplots(1, 2), panels, strict=True):
            rows = result["rows"]
            processes = list(dict.fromkeys(r["process"] for r in rows))
            for k, (who, colour) in enumerate(COLOURS.items()):
                what = SIMULATION if who in ("diffrax", "torchsde") else "time"
                points = [(i, find_ns(rows, p, who, what, count)) for i, p in enumerate(processes)]
                points = [(i + 0.16 * (k - 2), v) for i, v in points if v is not None]
                if points:
                    axes.bar(*zip(*points, strict=True), width=0.15, color=colour, label=who)
            axes.set_yscale("log")
            axes.set_xticks(range(len(processes)), processes)
            axes.set_ylabel("ns per trajectory and step")
            axes.set_title(title, loc="left")
        names = {
            label: handle
            for axes in figure.axes
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(names.values(), names, loc="outside lower center", ncols=len(names))
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cpu", nargs="+")
    parser.add_argument("--cuda", nargs="+", required=True)
    options = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    results = {"cpu": merge(options.cpu), "cuda": merge(options.cuda)}
    for name, result in results.items():
        text = json.dumps(result, indent=None, separators=(",", ":")).replace(
            '{"process"', '\n{"process"'
        )
        (OUT / f"{name}.json").write_text(text + "\n")
    tables = [f"{result['machine']}\n\n{table(result)}\n" for result in results.values()]
    (OUT / "table.md").write_text("\n".join(tables))
    panels = [
        ("two CPU cores, 2,000 trajectories", results["cpu"], 2_000),
        ("H200, 200,000 trajectories", results["cuda"], 200_000),
    ]
    save_png(draw(panels), OUT / "own.png")


if __name__ == "__main__":
    main()
