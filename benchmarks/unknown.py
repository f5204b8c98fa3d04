"""Trainings on a device with hidden errors: J on the device against measured trajectories, as table
and figure.

    python benchmarks/unknown.py --runs RUNS... [--nominal RUNS/nominal]     # curves.csv and the
    figure python benchmarks/unknown.py                                             # the figure
    again, from curves.csv

RUNS are folders of `fluctua train unknown`; J at some iterations of those in the figure is measured
afresh on the device, with trajectories that are not counted. NOMINAL is a training that knew of no
hidden errors (`fluctua train fast`), whose parameters are set on the same devices. The curve of the
paper's rule is that of results/fig1."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from fluctua.plot.style import LOOK, WIDTH, save
from fluctua.runs.build import make_network
from fluctua.runs.config import Config, apply_changes, find_config, parse
from fluctua.runs.evaluate import evaluate, load_parameters
from fluctua.store import history, tables

EVALUATED = 64
"""Trajectories of every J on the way, none of them counted; that at the end is the summary's."""

AT = (0, 2, 5, 8, 12, 16, 20, 25, 30, 40, 50, 60, 75, 90, 105, 120, 135, 149, 174, 199)
"""Iterations whose parameters are measured."""

AT_PORTS = (0, 10, 20, 30, 40, 50, 70, 100, 130, 160, 200, 250, 300, 400, 500, 600, 700, 800, 900)
"""The same of trainings that read the ports alone, of which every tenth iteration is kept."""

GOAL = 0.65
INK = {
    "hard": "#d55e00",
    "paper": "#222222",
    "nominal": "#888888",
    "ports": "#0072b2",
    "output": "#009e73",
}


HARD = "every number hidden, noisy samples 0.02 apart"

READ = {"ports": "read at input and output alone", "output": "read at the output alone"}

ALL_READ = f"{HARD}; measured in one iteration of 3"

KINDS = {
    ALL_READ: ("hard", "all 143 resonators read, 0.02 apart; the structure known"),
    READ["ports"]: ("ports", "input and output read, 0.05 apart; the structure known"),
    READ["output"]: ("output", "the output read, 0.05 apart; the structure known"),
}
"""What is drawn, and what each of them knows."""


class Curve(NamedTuple):
    """One training. spent, J (I,): measured trajectories, and J on the device after them."""

    label: str
    seed: int
    spent: np.ndarray
    J: np.ndarray


def make_label(config: Config) -> str:
    """What sets a training apart from the others, in words."""
    d, c, t = config.device, config.calibration, config.task
    if d.read != "all":
        return READ[d.read]
    hard = d.kind == "hard"
    parts = [
        (hard, HARD),
        (c.correction == "measured", "with the measured correction"),
        (c.measure_every > 1, f"measured in one iteration of {c.measure_every}"),
        (t.sigma_kappa, f"σ_κ = {t.sigma_kappa:g}, modulation recorded"),
        (
            d.kerr_error,
            f"Kerr coefficients off by {d.kerr_error:g}, " + SECOND[c.kerr],
        ),
        (
            d.second_neighbours,
            f"couplings of {d.second_neighbours:g} across the cells, {SECOND[c.second_neighbours]}",
        ),
        (
            d.readout and not hard,
            f"readout noise of {d.readout:g}, "
            + ("taken off" if c.readout else "not in the model"),
        ),
        (d.sample_every > 1 and not hard, f"sampled every {d.sample_every} steps"),
    ]
    return "; ".join(text for there, text in parts if there) or "calibrated gradient alone"


SECOND = {"ignore": "not in the model", "watch": "watched", "fit": "fitted"}


def read_curve(folder: Path) -> Curve:
    """J on the device of the parameters in a run folder: at some iterations if it is drawn, and
    at the end.
    """
    config = parse(tomllib.loads((folder / "config.toml").read_text(encoding="utf-8")))
    rows = history.effective(history.read(folder / "history.csv"))
    spent = {row.iteration: row.trajectories for row in rows}
    label = make_label(config)
    end = (
        json.loads((folder / "summary.json").read_text())["final"]["J"]
        if (folder / "summary.json").exists()
        else None
    )
    counts, values = [], []
    with h5py.File(folder / "parameters.h5") as file:
        iterations = file["iteration"][:]
        wanted = AT_PORTS if label in READ.values() else AT if label in KINDS else ()
        for k in np.flatnonzero(
            np.isin(iterations, wanted if end is not None else (*wanted, iterations[-1]))
        ):
            theta = {name: np.asarray(file[name][k]) for name in ("omega", "kappa", "chi")}
            # θ of iteration l was reached with what was measured before it
            counts.append(spent.get(int(iterations[k]) - 1, 0))
            values.append(evaluate(config, theta, trajectories=EVALUATED, seed=1, backend="cpu").J)
    if end is not None:
        counts.append(rows[-1].trajectories)
        values.append(end)
    return Curve(label, config.seed, np.array(counts), np.array(values))


def nominal(folder: Path, seeds: Sequence[int]) -> list[Curve]:
    """A training that never measured, on the devices of some seeds."""
    theta: Any = None
    made = []
    for seed in seeds:
        config = apply_changes(find_config("unknown"), {"seed": seed, "backend": "cpu"})
        theta = (
            load_parameters(folder / "final.npz", make_network(config)) if theta is None else theta
        )
        J = evaluate(config, theta, trajectories=4 * EVALUATED, seed=1).J
        made.append(Curve("nominal model carried over", seed, np.array([0]), np.array([J])))
    return made


def write_curves(path: Path, curves: Sequence[Curve]) -> None:
    """The curves as a small table."""
    columns: dict[str, list[float]] = {"curve": [], "trajectories": [], "J": []}
    for k, curve in enumerate(curves):
        columns["curve"] += [k] * len(curve.J)
        columns["trajectories"] += curve.spent.tolist()
        columns["J"] += curve.J.round(5).tolist()
    header = [{"label": curve.label, "seed": curve.seed} for curve in curves]
    tables.write(path, columns, {"evaluated": EVALUATED, "curves": header})


def read_curves(path: Path) -> list[Curve]:
    """What `write_curves` wrote."""
    table = tables.read(path)
    each = (table.where(curve=k) for k in range(len(table.header["curves"])))
    return [
        Curve(h["label"], h["seed"], rows["trajectories"].astype(int), rows["J"])
        for h, rows in zip(table.header["curves"], each, strict=True)
    ]


def table_text(curves: Sequence[Curve]) -> str:
    """Trajectories until J = 0.65, and J at the end, of every training."""
    width = max(len(curve.label) for curve in curves)
    lines = [
        f"{'training':<{width}}  seed  trajectories  J at the end  trajectories until J = {GOAL}"
    ]
    for curve in curves:
        there = np.flatnonzero(curve.J >= GOAL)
        until = f"{curve.spent[there[0]]:,}" if there.size else "–"
        lines.append(
            f"{curve.label:<{width}}  {curve.seed:>4}  {curve.spent[-1]:>12,}  "
            f"{curve.J[-1]:>12.4f}  {until:>10}"
        )
    return "\n".join([*lines, ""])


def paper_curve(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Trajectories and J of the paper's rule with the exact drift in its score."""
    table = tables.read(path)
    names = [run["name"] for run in table.header["runs"]]
    rows = table.where(run=names.index("sigma_kappa_0"))
    spent = np.cumsum(rows["ensemble"])
    kept = np.unique(
        np.searchsorted(spent, np.geomspace(spent[0], spent[-1], 300)).clip(0, len(spent) - 1)
    )
    window = np.ones(9) / 9
    smooth = np.convolve(np.pad(rows["J"], 4, mode="edge"), window, mode="valid")
    return spent[kept], smooth[kept]


def draw(curves: Sequence[Curve], paper: tuple[np.ndarray, np.ndarray] | None) -> Figure:
    """J on the device against measured trajectories, on a logarithmic axis; a line for each
    seed.
    """
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(WIDTH, 4.0), layout="constrained")
        axes = figure.subplots()
        if paper is not None:
            axes.plot(
                *paper,
                color=INK["paper"],
                lw=1,
                label="the paper's rule on a known lattice: all resonators read, exact drift known",
            )
        for label, (kind, text) in KINDS.items():
            for k, curve in enumerate([c for c in curves if c.label == label]):
                last = np.append(
                    np.diff(curve.spent) > 0, True
                )  # of several J after as many trajectories
                spent = np.maximum(curve.spent, 1)
                axes.plot(
                    spent[last], curve.J[last], color=INK[kind], lw=1.2, label=None if k else text
                )
        never = [float(c.J[-1]) for c in curves if c.label == "nominal model carried over"]
        for k, J in enumerate(never):
            text = None if k else "nominal model carried over: nothing read, the data sheet known"
            axes.axhline(J, color=INK["nominal"], lw=1, ls="--", label=text)
        axes.axhline(GOAL, color="#bbbbbb", lw=0.8, zorder=0)
        axes.set(
            xscale="log",
            xlabel="measured trajectories, all counted",
            ylabel="$J$ on the device",
            ylim=(0, 0.72),
        )
        figure.legend(loc="outside lower center", ncols=1, fontsize=8)
    return figure


def main() -> None:
    """Read runs or curves, write table and figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", nargs="*", type=Path, default=[])
    parser.add_argument("--nominal", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results/unknown"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "curves.csv"
    curves = read_curves(path) if path.exists() else []
    for folder in given.runs:
        curve = read_curve(folder)
        curves = [c for c in curves if (c.label, c.seed) != (curve.label, curve.seed)] + [curve]
        print(f"{folder}: {curve.label}, J = {curve.J[-1]:.4f} after {curve.spent[-1]}", flush=True)
    if given.nominal:
        curves = [c for c in curves if c.label != "nominal model carried over"] + nominal(
            given.nominal, (0, 1, 2)
        )
    curves.sort(key=lambda c: (c.label, c.seed))
    write_curves(path, curves)
    text = table_text(curves)
    (given.out / "table.txt").write_text(text)
    print(text)
    reference = Path("results/fig1/long/curves.csv.gz")
    save(
        draw(curves, paper_curve(reference) if reference.exists() else None), given.out / "unknown"
    )


if __name__ == "__main__":
    main()
