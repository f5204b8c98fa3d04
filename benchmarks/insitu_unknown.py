"""A bench of 11 × 13 resonators whose every number is hidden, trained over its socket: J against
measured trajectories.

    python benchmarks/insitu_unknown.py --seed 0 --out RUNS/bench_0   # one training; J in J.csv
    python benchmarks/insitu_unknown.py --table RUNS/bench_*          # results/insitu/unknown.*

A training is `fluctua virtual-bench` and `fluctua insitu train --calibration training` with the
options below. J of the settings is simulated with the hidden parameters at the age of the bench,
with trajectories that are not counted."""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from fluctua.insitu import Plan, run
from fluctua.insitu.bench import device
from fluctua.insitu.bench.bench_model import make_model
from fluctua.insitu.bench.processes import bench_process, list_sheet_options
from fluctua.insitu.instrument.virtual import VirtualBench
from fluctua.plot.style import LOOK, WIDTH, save_png
from fluctua.store import history

POINTS = 2001
"""Samples of a trajectory: T = 20, as the paper's."""

EVALUATED, AT = 64, (0, 10, 20, 30, 45, 60, 75, 90, 105, 120, 135, 150)
"""Trajectories of a J, and the iterations whose settings are measured."""


def make_sheet(given: argparse.Namespace) -> device.Sheet:
    """20 % of everything, and detunings that turn by 0.05 in 1,000 trajectories."""
    return device.Sheet(
        rows=given.rows,
        columns=given.columns,
        seed=given.seed,
        disorder=0.2,
        kappa_disorder=0.2,
        gain_error=0.2,
        loss_spread=0.2,
        ageing=0.05,
        ageing_shots=1000.0,
    )


def value(sheet: device.Sheet, settings: dict[str, np.ndarray], shots: int) -> tuple[float, float]:
    """J on the box after so many trajectories, and its error."""
    codes = device.measure(
        sheet, device.draw_hidden(sheet), settings, count=EVALUATED, points=POINTS, shots=shots
    )
    x = codes[:, :-1].astype(np.float32) * np.float32(sheet.scale)
    out = sheet.nominal.lead_sites[-1]
    power = (
        2 * sheet.nominal.gamma_e[-1] * (x[..., out] ** 2 + x[..., sheet.nominal.sites + out] ** 2)
    )
    returns = power.sum(axis=1) * sheet.interval / (10.0**2 * (POINTS - 1) * sheet.interval)
    return float(returns.mean()), float(returns.std(ddof=1) / np.sqrt(EVALUATED))


def train(given: argparse.Namespace) -> None:
    """One training, and J of its settings on the way."""
    sheet = make_sheet(given)
    plan = Plan(
        iterations=given.iterations,
        trajectories=2,
        calibration="training",
        measure_every=given.measure_every,
        forget_after=given.forget_after,
        record=False,
    )
    started = time.monotonic()
    with bench_process(*list_sheet_options(sheet)) as (host, port):
        connect = partial(VirtualBench, f"tcp://{host}:{port}", points=POINTS, timeout=120.0)
        bench = connect()
        model = make_model(bench, omega_max=3.0, kappa_max=2.0)
        bench.close()
        for row, _ in run(connect, model, plan, given.out):
            if row.iteration % 10 == 0 or row.event:
                text = f"{row.iteration:>4} J = {row.J:.4f} after {row.trajectories} {row.event}"
                print(f"{text}   {time.monotonic() - started:.0f} s", flush=True)
    write_values(given, sheet)


def write_values(given: argparse.Namespace, sheet: device.Sheet) -> None:
    """J of the settings in a run's folder, as J.csv."""
    rows = history.effective(history.read(given.out / "history.csv"))
    spent = {row.iteration + 1: row.trajectories for row in rows}
    lines = ["iteration,trajectories,J,error"]
    with h5py.File(given.out / "parameters.h5") as file:
        settings = {
            int(k): {n: np.asarray(file[n][i]) for n in ("omega", "kappa")}
            for i, k in enumerate(file["iteration"][:])
        }
    with np.load(given.out / "final.npz") as final:
        settings[rows[-1].iteration + 1] = {
            name: np.array(final[name]) for name in ("omega", "kappa")
        }
    for k in sorted(set(settings) & {*AT, rows[-1].iteration + 1}):
        shots = spent.get(k, 0)
        J, error = value(
            sheet, {name: np.asarray(v, float) for name, v in settings[k].items()}, shots
        )
        lines.append(f"{k},{shots},{J:.5f},{error:.5f}")
    (given.out / "J.csv").write_text("\n".join(lines) + "\n")
    print("\n".join(lines), flush=True)


def read(folder: Path) -> dict[str, Any]:
    """A training: its plan and its curve."""
    plan = json.loads((folder / "plan.json").read_text())
    table = np.genfromtxt(folder / "J.csv", delimiter=",", names=True)
    kept = plan["forget_after"]
    label = f"{kept:g} batches remembered" if kept else "nothing fades"
    box = folder.name.split("_")[1]  # RUNS/bench_SEED…
    return {
        "name": folder.name,
        "label": f"box {box}, {label}",
        "table": table,
        "dashed": not kept,
    }


def summarise(folders: list[Path], out: Path) -> None:
    """Table and figure of some trainings."""
    runs = [read(folder) for folder in folders]
    head = (
        f"{'training':<16} {'bench and calibration':<30} {'trajectories':>12} {'J':>8} {'error':>7}"
    )
    lines = [f"{head}  trajectories until J = 0.65"]
    rows = ["run,trajectories,J,error"]
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(WIDTH, 3.2), layout="constrained")
        axes = figure.subplots()
        for run in runs:
            t = run["table"]
            there = np.flatnonzero(t["J"] >= 0.65)
            until = f"{t['trajectories'][there[0]]:.0f}" if there.size else "–"
            lines.append(
                f"{run['name']:<16} {run['label']:<30} {t['trajectories'][-1]:>12.0f} "
                f"{t['J'][-1]:>8.4f} "
                f"{t['error'][-1]:>7.4f}  {until:>10}"
            )
            rows += [
                f"{run['name']},{r['trajectories']:.0f},{r['J']:.5f},{r['error']:.5f}" for r in t
            ]
            last = np.append(np.diff(t["trajectories"]) > 0, True)
            axes.plot(
                t["trajectories"][last],
                t["J"][last],
                lw=1.2,
                marker=".",
                label=run["label"],
                ls="--" if run["dashed"] else "-",
            )
        axes.axhline(0.65, color="#bbbbbb", lw=0.8, zorder=0)
        axes.set(
            xlabel="trajectories measured on the bench, all counted",
            ylabel="$J$ on the bench",
            ylim=(0, 0.72),
        )
        axes.legend(fontsize=8, loc="lower right")
    out.mkdir(parents=True, exist_ok=True)
    (out / "unknown.csv").write_text("\n".join(rows) + "\n")
    (out / "unknown.txt").write_text("\n".join(lines) + "\n")
    save_png(figure, out / "unknown.png")
    print("\n".join(lines))


def main() -> None:
    """Train, or summarise."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results/insitu"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=11)
    parser.add_argument("--columns", type=int, default=13)
    parser.add_argument("--iterations", type=int, default=150)
    parser.add_argument("--measure-every", type=int, default=3)
    parser.add_argument("--forget-after", type=float, default=20.0)
    given = parser.parse_args()
    if given.table:
        summarise(given.table, given.out)
    else:
        train(given)


if __name__ == "__main__":
    main()
