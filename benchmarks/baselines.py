"""What baselines are worth: every estimator on one problem with a large mean reward, at equal cost.

Four coupled Ornstein–Uhlenbeck components with a nonreciprocal coupling; the reward is ten plus a
little that depends on the state, so the return without a baseline is almost all offset. Writes the
table and the figure of docs/baselines.md: `python benchmarks/baselines.py`.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

import fluctua as fl
from fluctua.core.protocols import Estimator
from fluctua.learn.comparison import Comparison
from fluctua.plot.style import LOOK, WIDTH, save_png

ROOT = Path(__file__).resolve().parents[1]
THETA = {"coupling": jnp.array([0.8, 0.5, -0.3, 0.2]), "force": jnp.array([1.0, 0.0, 0.0, 0.5])}

process = fl.Process(
    drift=lambda theta, x: -x + theta["coupling"] * jnp.roll(x, 1) + theta["force"],
    noise=lambda theta, x: 0.4 * jnp.ones(4),
)
objective = fl.Objective(running=lambda theta, x: 10 + x[3] ** 2)
simulator = fl.simulator(process, jnp.zeros(4), jnp.linspace(0, 3, 151))


def estimators() -> dict[str, Estimator]:
    made: dict[str, Estimator] = {
        name: fl.ppgt(simulator, objective, baseline=baseline)
        for name, baseline in {
            "policy gradient, no baseline": fl.baselines.none(),
            "  time only (pilot)": fl.baselines.time_only(),
            "  leave-one-out mean": fl.baselines.mean(),
            "  leave-one-out optimal": fl.baselines.optimal(),
            "  optimal in 20 bins": fl.baselines.binned(lambda theta, x: x[3] ** 2),
        }.items()
    }
    made["SPSA"] = fl.reference.spsa(objective, simulator)
    made["finite differences"] = fl.reference.finite_differences(objective, simulator)
    made["pathwise"] = fl.reference.pathwise(objective, simulator)
    return made


def draw(comparison: Comparison) -> Figure:
    """Three panels over the estimators: bias in standard errors, variance per trajectory, time
    per call.
    """
    rows = comparison.rows
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(WIDTH, 1.1 + 0.26 * len(rows)), layout="constrained")
        bias, variance, seconds = figure.subplots(1, 3, sharey=True)
        place = np.arange(len(rows))[::-1]
        for y, row in zip(place, rows, strict=True):
            bias.plot(row.z, np.full(row.z.size, y), "o", ms=4, alpha=0.6, color="C0", mec="none")
            size = np.where(row.variance > 0, row.variance, np.nan)
            variance.plot(size, np.full(size.size, y), "o", ms=4, alpha=0.6, color="C1", mec="none")
            if np.isfinite(size).any():
                variance.plot(np.nanmean(size), y, "|", ms=12, mew=1.5, color="C1")
            seconds.plot(1e3 * row.seconds, y, "s", ms=5, color="C2")
        bias.axvspan(-2, 2, color="C0", alpha=0.1, lw=0)
        bias.axvline(0, color="0.4", lw=0.8)
        reach = max(3.0, 1.1 * max(np.abs(row.z).max() for row in rows))
        bias.set(
            xlim=(-reach, reach), xlabel="bias (standard errors)", ylim=(-0.6, len(rows) - 0.4)
        )
        bias.set_yticks(place, [row.name for row in rows])
        variance.set(xscale="log", xlabel="variance per trajectory")
        seconds.set(xlabel="time per call (ms)", xlim=(0, 1.1e3 * max(row.seconds for row in rows)))
        for axes in (bias, variance, seconds):
            axes.grid(axis="x", color="0.9")
            axes.set_axisbelow(True)
        spent = max(row.trajectories for row in rows)
        figure.suptitle(
            f"{spent:,} trajectories each; a dot is one parameter, a bar their mean", fontsize=8
        )
    return figure


if __name__ == "__main__":
    # 200,000 pathwise derivatives: their standard error is far below any of the others'
    reference = fl.reference.pathwise(objective, simulator)(jax.random.key(1), THETA, 200_000)
    result = fl.reference.compare(
        jax.random.key(0), THETA, estimators(), trajectories=2000, reference=reference, repeats=20
    )
    text = str(result)
    print(text)
    (ROOT / "results" / "baselines" / "table.txt").write_text(text + "\n")
    save_png(draw(result), ROOT / "docs" / "images" / "baselines.png")
