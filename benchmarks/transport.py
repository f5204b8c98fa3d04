"""A trapped particle moved with the least work: what `examples/moving_trap.py` and
`examples/kicked_trap.py` learn.

Trains both, measures their protocols by exact moments and draws them beside the optima:
`python benchmarks/transport.py --out results/transport`.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.flatten_util
import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fluctua.plot.style import LOOK, WIDTH, letter, save


def example(name: str) -> Any:
    """The module examples/NAME.py."""
    spec = importlib.util.spec_from_file_location(
        name, Path(__file__).resolve().parents[1] / "examples" / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


moving_trap, kicked_trap = example("moving_trap"), example("kicked_trap")
LEARNT, EXACT, START = "#0072b2", "0.25", "0.6"


def curve(example: Any, records: list) -> np.ndarray:
    """(iteration, trajectories so far, exact work of the protocol after it), a row an iteration."""
    work = jax.jit(example.exact_work)
    return np.array([(r.iteration + 1, r.trajectories, float(work(r.next_theta))) for r in records])


def draw_moving(axes: Axes, protocol: np.ndarray) -> None:
    """Centre against time: learnt, best on the grid and in continuous time, with the jumps at
    both ends.
    """
    t = np.asarray(moving_trap.T)

    def stairs(p, **look):
        return axes.stairs(p, t, baseline=None, **look)

    stairs(protocol, color=LEARNT, lw=1.0, label="learnt, 100 parameters")
    axes.plot(
        [0, 0, 1, 1],
        [0, 5 / 3, 10 / 3, 5],
        color=EXACT,
        ls="--",
        lw=1.0,
        label="exact, continuous time",
    )
    axes.plot([0, 1], [0, 5], color=START, ls=":", label="before training")
    axes.set(xlabel="time", ylabel="centre of the trap", title="overdamped: jumps at both ends")
    axes.legend(loc="upper left")


def draw_kicked(axes: Axes, th: dict) -> None:
    """Centre between the kicks, and the kicks by their impulse."""
    e = kicked_trap
    speed = e.END / (e.DURATION + 2 * e.FRICTION)
    t = np.asarray(e.T)
    inner = (t[1:-2] + t[2:-1]) / 2
    ramp = float(th["level"]) + float(th["rise"]) * (inner / e.DURATION - 0.5)
    axes.plot(inner, ramp, color=LEARNT, label="learnt, 4 parameters")
    axes.plot(t, speed * (t + e.FRICTION), color=EXACT, ls="--", label="exact, continuous time")
    axes.plot([0, e.DURATION], [0, 5], color=START, ls=":", label="before training")
    for x, kick, sign in ((0.0, th["kicks"][0], 1), (e.DURATION, th["kicks"][1], -1)):
        axes.bar(x - 0.012, float(kick), width=0.022, color=LEARNT)
        axes.bar(
            x + 0.012, sign * speed, width=0.022, color="none", edgecolor=EXACT, ls="--", lw=0.8
        )
    axes.axhline(0, color="0.8", lw=0.5, zorder=0)
    axes.set(
        xlabel="time",
        ylabel="centre; bars: impulse of a kick",
        title="underdamped: a kick at both ends",
    )
    axes.legend(loc="lower left", bbox_to_anchor=(0.08, 0.0))


def draw_work(axes: Axes, rows: np.ndarray, least: float, best: float) -> None:
    """Exact work of the protocol against iteration."""
    axes.plot(rows[:, 0], rows[:, 2], color=LEARNT, label="protocol, exact moments")
    axes.axhline(least, color=EXACT, ls="--", lw=0.8, label=f"$W^*$ = {least:.4f}")
    axes.axhline(best, color="#d55e00", ls=":", lw=0.8, label=f"best on the grid, {best:.4f}")
    axes.set(xlabel="iteration", ylabel="mean work", xlim=(1, rows[-1, 0]), xscale="log")
    axes.set_ylim(0.998 * min(best, least), min(rows[:, 2].max(), 1.25 * least))
    axes.legend(loc="best")


def find_best(example: Any) -> float:
    """The least work of the family of protocols on its grid: the work is quadratic in the
    parameters.
    """
    flat, unravel = jax.flatten_util.ravel_pytree(example.RAMP)

    def work(p):
        return example.exact_work(unravel(p))

    slope, bend = jax.grad(work)(flat), jax.hessian(work)(flat)
    return float(work(flat - jax.numpy.linalg.solve(bend, slope)))


PLANS: dict[str, tuple[Any, int, int]] = {
    "moving_trap": (moving_trap, 200, 1000),
    "kicked_trap": (kicked_trap, 300, 4000),
}
"""Example, iterations, trajectories per iteration."""


def train_both(out: Path, share: float) -> None:
    """Train both and leave curves, protocols and a table."""
    lines, protocols = [], {}
    for name, (example, iterations, count) in PLANS.items():
        records = example.train(max(2, round(share * iterations)), count)
        rows, measured = curve(example, records), records[-1].estimate
        np.savetxt(
            out / f"{name}.csv",
            rows,
            "%.6g",
            ",",
            header="iteration,trajectories,work",
            comments="",
        )
        protocols[name] = jax.flatten_util.ravel_pytree(records[-1].next_theta)[0]
        lines.append(
            f"{name}: W {rows[-1, 2]:.4f}, W* {example.LEAST:.5f}, ratio "
            f"{rows[-1, 2] / example.LEAST:.4f}, best of "
            f"its family {find_best(example):.4f}, ramp "
            f"{float(example.exact_work(example.RAMP)):.4f}, "
            f"{int(rows[-1, 1]):,} trajectories; "
            f"last batch measured {-float(measured.value):.3f} ± {float(measured.value_stderr):.3f}"
        )
        print(lines[-1])
    np.savez(out / "trained.npz", **protocols)
    (out / "table.txt").write_text("\n".join(lines) + "\n")


def draw(out: Path) -> Figure:
    """Protocols above, work against iteration below, from the files in `out`."""
    protocols = np.load(out / "trained.npz")
    thetas = {
        name: jax.flatten_util.ravel_pytree(PLANS[name][0].RAMP)[1](protocols[name])
        for name in PLANS
    }
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
        axes = figure.subplots(2, 2, height_ratios=[1.3, 1])
        draw_moving(axes[0, 0], np.asarray(thetas["moving_trap"]))
        draw_kicked(axes[0, 1], thetas["kicked_trap"])
        for place, (name, (example, *_)) in zip(axes[1], PLANS.items(), strict=True):
            rows = np.loadtxt(out / f"{name}.csv", delimiter=",", skiprows=1)
            draw_work(place, rows, example.LEAST, find_best(example))
        for place, mark in zip(axes.ravel(), "abcd", strict=True):
            letter(place, mark)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("results/transport"))
    parser.add_argument(
        "--share", type=float, default=1.0, help="of the iterations; 0 draws what --out has"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.share:
        train_both(options.out, options.share)
    save(draw(options.out), options.out / "transport")
