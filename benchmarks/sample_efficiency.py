"""J against the trajectories spent, of trainings by different estimators: curves, table and figure.

From run folders: `python benchmarks/sample_efficiency.py --runs RUNS... --out
results/sample_efficiency`, which also writes curves.csv.gz and table.txt there. Without --runs the
figure is drawn again from that curves.csv.gz.

A training with a twin that is wrong on purpose: `python benchmarks/sample_efficiency.py
--train-wrong 0.05 --seed 0 --learning-rate 0.02 --out RUNS/fast5_0_0`.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import fluctua as fl
from estimators import wrong_by
from fluctua import tcmt
from fluctua.plot.style import LOOK, WIDTH, letter, save
from fluctua.runs.build import build
from fluctua.runs.config import PRESETS, Config, apply_changes, parse
from fluctua.runs.reading import find_runs, rolling_mean
from fluctua.store import history, tables

SMOOTHED = 9
"""Iterations of the rolling mean under a curve: with 16 trajectories an iteration J itself is
noisy.
"""

POINTS = 300
"""Of a curve in the table, evenly spaced in the logarithm of the trajectories."""

PAPER_FINAL = 0.65
"""The paper's J at the end, without modulation."""

LEVELS = (0.3, 0.4, 0.5, 0.55, 0.6, PAPER_FINAL)
EXACT = "exact model as twin, Adam"
INK = {
    "binned": "#888888",
    "time": "#222222",
    "twin": "#d55e00",
    "wrong": ("#e69f00", "#cc79a7", "#56b4e9"),
}


class Curve(NamedTuple):
    """One training. spent, J: (I,). finer: J at the end with half the time step, or None."""

    label: str
    sigma_kappa: float
    seed: int
    spent: np.ndarray
    J: np.ndarray
    finer: float | None


class Band(NamedTuple):
    """Trainings that differ in their seeds alone. spent: (K,); low, mean, high: over the seeds
    (K,).
    """

    label: str
    spent: np.ndarray
    low: np.ndarray
    mean: np.ndarray
    high: np.ndarray
    finer: list[float]


WRONG = "wrong_twin.json"
"""In the folder of a training whose twin is wrong on purpose: by how much, and what else the
figure needs.
"""


def train_wrong(
    folder: Path,
    error: float,
    seed: int,
    learning_rate: float,
    changes: Mapping[str, Any] | None = None,
    forget_after: float = 1,
) -> None:
    """Train the `fast` preset with a twin that is wrong by `error` and a score that is exact;
    forget_after: of `ShrunkCorrection`.
    """
    config = apply_changes(
        PRESETS["fast"],
        {
            "seed": seed,
            "optimiser.learning_rate": learning_rate,
            "iterations": 780,
            "ensemble.trajectories": 64,
            "backend": "cpu",
            "task.integrator": "euler",
            "task.dt": 1e-3,
            **(changes or {}),
        },
    )
    parts = build(config)
    twin: Any = parts.task.estimator("cpu", baseline=tcmt.KernelTwin(theta=wrong_by(error, seed)))
    estimator = fl.ShrunkCorrection(twin, forget_after=forget_after, carry=True)
    size, iterations = config.ensemble.trajectories, config.iterations
    fl.run(
        fl.Training(
            estimator, parts.theta, parts.rule, trajectories=size, bounds=parts.bounds, seed=seed
        ),
        iterations=iterations,
        folder=folder,
    )
    (folder / WRONG).write_text(
        json.dumps({"error": error, "seed": seed, "sigma_kappa": config.task.sigma_kappa})
    )


def read_curve(folder: Path) -> Curve:
    """A run folder as a curve."""
    if (folder / WRONG).exists():
        about, rows = json.loads((folder / WRONG).read_text()), history.read(folder / "history.csv")
        spent, J = (
            np.array([getattr(row, name) for row in rows]) for name in ("trajectories", "J")
        )
        label = f"twin {100 * about['error']:g} % wrong, score exact, Adam"
        return Curve(
            label, about["sigma_kappa"], about["seed"], spent, rolling_mean(J, SMOOTHED), None
        )
    tree = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    wrong = tree.get("baseline", {}).pop("twin_error", 0.0)
    config, rows = parse(tree), history.effective(history.read(folder / "history.csv"))
    summary = folder / "summary.json"
    finer = json.loads(summary.read_text())["finer"]["J"] if summary.exists() else None
    spent, J = (np.array([getattr(row, name) for row in rows]) for name in ("trajectories", "J"))
    return Curve(
        describe(config, wrong),
        config.task.sigma_kappa,
        config.seed,
        spent,
        rolling_mean(J, SMOOTHED),
        finer,
    )


def describe(config: Config, wrong: float = 0.0) -> str:
    """What sets a training apart from the others of the figure, and what its estimator knew.

    wrong: relative error of its twin.
    """
    b = config.baseline
    if b.kind == "twin":
        return f"twin {100 * wrong:g} % wrong, score exact, Adam" if wrong else EXACT
    rule = "paper's rule" if config.optimiser.rule == "paper" else config.optimiser.rule
    return f"{rule}, {'binned' if b.kind == 'binned' else 'time-only'}"


def write_curves(path: Path, curves: Sequence[Curve]) -> None:
    """The curves as a small table."""
    header = [
        {"label": c.label, "sigma_kappa": c.sigma_kappa, "seed": c.seed, "finer": c.finer}
        for c in curves
    ]
    columns: dict[str, list[float]] = {"curve": [], "trajectories": [], "J": []}
    for k, c in enumerate(curves):
        kept = np.searchsorted(c.spent, np.geomspace(c.spent[0], c.spent[-1], POINTS).round())
        kept = np.unique(np.clip(kept, 0, len(c.spent) - 1))
        columns["curve"] += [k] * len(kept)
        columns["trajectories"] += c.spent[kept].tolist()
        columns["J"] += c.J[kept].round(5).tolist()
    tables.write(path, columns, {"smoothed_over_iterations": SMOOTHED, "curves": header})


def read_curves(path: Path) -> list[Curve]:
    """What `write_curves` wrote."""
    table = tables.read(path)
    each = (table.where(curve=k) for k in range(len(table.header["curves"])))
    return [
        Curve(
            h["label"],
            h["sigma_kappa"],
            h["seed"],
            rows["trajectories"].astype(int),
            rows["J"],
            h["finer"],
        )
        for h, rows in zip(table.header["curves"], each, strict=True)
    ]


def bands(curves: Sequence[Curve]) -> list[Band]:
    """Curves with one label and one σ_κ, put together; as far as the shortest of them goes."""
    made = []
    for label in sorted({c.label for c in curves}, key=_rank):
        of = [c for c in curves if c.label == label]
        grid = np.geomspace(max(c.spent[0] for c in of), min(c.spent[-1] for c in of), POINTS)
        J = np.array([np.interp(np.log(grid), np.log(c.spent), c.J) for c in of])
        finer = [c.finer for c in of if c.finer is not None]
        made.append(Band(label, grid, J.min(axis=0), J.mean(axis=0), J.max(axis=0), finer))
    return made


def spent_until(curve: Curve, J: float) -> int | None:
    """Trajectories until the smoothed J reaches a value; None if it never does."""
    there = np.flatnonzero(curve.J >= J)
    return int(curve.spent[there[0]]) if there.size else None


def table_text(curves: Sequence[Curve]) -> str:
    """Trajectories until every level of J, of every training."""
    width = max(len(c.label) for c in curves)
    lines = [
        f"{'training':<{width}}  σ_κ seed {'spent':>11}  J, Δt/2   trajectories until J =",
        " " * (width + 29) + "".join(f"{level:>11g}" for level in LEVELS),
    ]
    for c in sorted(curves, key=lambda c: (c.sigma_kappa, c.label, c.seed)):
        when = (spent_until(c, level) for level in LEVELS)
        finer = "      –" if c.finer is None else f"{c.finer:7.4f}"
        lines.append(
            f"{c.label:<{width}} {c.sigma_kappa:>4g} {c.seed:>4} {c.spent[-1]:>11,}  {finer}  "
            + "".join(f"{'–' if n is None else f'{n:,}':>11}" for n in when)
        )
    return "\n".join([*lines, ""])


def draw(curves: Sequence[Curve]) -> Figure:
    """One panel for each σ_κ; lines are means over seeds, shades their spread, dots J with half
    the time step.
    """
    sigmas = sorted({c.sigma_kappa for c in curves})
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
        panels = np.atleast_1d(figure.subplots(1, len(sigmas), sharey=True))
        for k, (axes, sigma) in enumerate(zip(panels, sigmas, strict=True)):
            _panel(axes, bands([c for c in curves if c.sigma_kappa == sigma]))
            letter(axes, "abcdef"[k])
            axes.set_title(rf"$\sigma_\kappa = {sigma:g}$")
            axes.set_xlabel("trajectories spent")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2)
        panels[0].set_ylabel("$J$, fraction of power transmitted")
        top = max(float(c.J.max()) for c in curves)
        panels[0].set_ylim(0, max(0.74, 1.06 * top))
    return figure


def _panel(axes: Axes, of: Sequence[Band]) -> None:
    wrong = iter(INK["wrong"])
    for band in of:
        kind = "twin" if band.label == EXACT else "binned" if "binned" in band.label else "time"
        ink = next(wrong) if "wrong" in band.label else INK[kind]
        # the two baselines of the paper's rule coincide: the wide one lies below
        width, order = (3.0, 1.5) if kind == "binned" else (1.0, 2)
        axes.fill_between(band.spent, band.low, band.high, color=ink, alpha=0.25, lw=0)
        axes.plot(band.spent, band.mean, color=ink, lw=width, zorder=order, label=band.label)
        if band.finer:
            axes.plot(
                band.spent[-1],
                np.mean(band.finer),
                "o",
                ms=3.5,
                color=ink,
                mec="white",
                mew=0.5,
                zorder=5,
            )
    axes.axhline(PAPER_FINAL, color="0.6", lw=0.6, ls=(0, (4, 3)))
    axes.annotate(
        rf"the paper's final $J={PAPER_FINAL}$ at $\sigma_\kappa=0$",
        (1, PAPER_FINAL),
        (0, -3),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        fontsize=7,
        color="0.4",
        ha="right",
        va="top",
    )
    axes.set(xscale="log")


def _rank(label: str) -> tuple[bool, bool, int, str]:
    """The best first, as the eye meets them from the left."""
    return ("rule" in label, "wrong" in label, len(label), label)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--runs",
        type=Path,
        nargs="+",
        help="folders of run folders; only σ_κ = 0 and 0.2 are shown",
    )
    parser.add_argument("--out", type=Path, default=Path("results/sample_efficiency"))
    parser.add_argument(
        "--train-wrong",
        type=float,
        metavar="ERROR",
        help="train with a twin wrong by this, into --out",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument(
        "--forget-after", type=float, default=1, help="of the correction; 1 takes all of it"
    )
    options = parser.parse_args()
    if options.train_wrong is not None:
        train_wrong(
            options.out,
            options.train_wrong,
            options.seed,
            options.learning_rate,
            forget_after=options.forget_after,
        )
        return
    if options.runs:
        read = (read_curve(run) for folder in options.runs for run in find_runs(folder))
        curves = [curve for curve in read if curve.sigma_kappa in (0.0, 0.2)]
        write_curves(options.out / "curves.csv.gz", curves)
        (options.out / "table.txt").write_text(table_text(curves))
        print(table_text(curves))
    for path in save(
        draw(read_curves(options.out / "curves.csv.gz")), options.out / "sample_efficiency"
    ):
        print(path)


if __name__ == "__main__":
    main()
