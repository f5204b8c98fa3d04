"""What baselines are worth: every estimator on one problem with a large mean reward, at equal cost.

Four coupled Ornstein–Uhlenbeck components with a nonreciprocal coupling; the reward is ten plus a little
that depends on the state, so the return without a baseline is almost all offset. Writes the table and the
figure of docs/baselines.md: `python benchmarks/baselines.py`.
"""

from pathlib import Path

import jax
import jax.numpy as jnp

import fluctua as fl
from fluctua.plot.compare import draw

ROOT = Path(__file__).resolve().parents[1]
THETA = {"coupling": jnp.array([0.8, 0.5, -0.3, 0.2]), "force": jnp.array([1.0, 0.0, 0.0, 0.5])}

process = fl.Process(
    drift=lambda theta, x: -x + theta["coupling"] * jnp.roll(x, 1) + theta["force"],
    noise=lambda theta, x: 0.4 * jnp.ones(4),
)
objective = fl.Objective(running=lambda theta, x: 10 + x[3] ** 2)
simulator = fl.simulator(process, jnp.zeros(4), jnp.linspace(0, 3, 151))


def estimators() -> dict[str, fl.Estimator]:
    made: dict[str, fl.Estimator] = {
        name: fl.ppgt(process, objective, simulator, baseline=baseline)
        for name, baseline in {
            "policy gradient, no baseline": fl.none(),
            "  time only (pilot)": fl.time_only(),
            "  leave-one-out mean": fl.mean(),
            "  leave-one-out optimal": fl.optimal(),
            "  optimal in 20 bins": fl.binned(lambda theta, x: x[3] ** 2),
        }.items()
    }
    made["SPSA"] = fl.spsa(objective, simulator)
    made["finite differences"] = fl.finite_differences(objective, simulator)
    made["pathwise"] = fl.pathwise(objective, simulator)
    return made


if __name__ == "__main__":
    # 200,000 pathwise derivatives: their standard error is far below any of the others'
    reference = fl.pathwise(objective, simulator)(jax.random.key(1), THETA, 200_000)
    result = fl.compare(jax.random.key(0), THETA, estimators(), trajectories=2000, reference=reference, repeats=20)
    text = str(result)
    print(text)
    (ROOT / "results" / "baselines" / "table.txt").write_text(text + "\n")
    draw(result).savefig(ROOT / "docs" / "images" / "baselines.png", dpi=150)
