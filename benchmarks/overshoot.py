"""Mean time of exit and its slopes without a correction, with shifted boundaries and with the
bridge, beside the exact answer.

Brownian motion with drift 0.5 and noise 1 leaves (−1, 1) from 0.2. "shift" looks at the grid alone,
with boundaries 0.5826 σ√Δt nearer, as a user can write them.

    python benchmarks/overshoot.py
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import first_passage as exits
import fluctua as fl

STEPS = (0.2, 0.1, 0.05, 0.02)
HORIZON = 8.0
NAMES = ("mu", "sigma", "b")


class Row(NamedTuple):
    """One estimate: time step, correction, and (estimate, error) of the value and its slopes."""

    dt: float
    correction: str
    numbers: dict[str, tuple[float, float]]


def make_objective(correction, dt):
    """The running reward 1 until exit from (−1, b), or from a smaller interval for "shift"."""

    def running(theta, x):
        return jnp.ones(())

    if correction == "bridge":
        return fl.Objective(running, stop=exits.moving_level, overshoot="bridge")
    nearer = exits.SHIFT * dt**0.5 if correction == "shift" else 0.0

    def level(theta, x):
        return jnp.abs(x[0]) - 1 + nearer

    return fl.Objective(running, stop=level)


def estimate(correction, dt, count, seed=0):
    """Estimate E[τ] and its slopes from `count` trajectories."""
    simulator = exits.simulator(dt, round(HORIZON / dt), backend="jax")
    estimator = fl.ppgt(simulator, make_objective(correction, dt))
    made = estimator(jax.random.key(seed), exits.parameters(b=1.0), count)
    numbers = {"value": (float(made.value), float(made.value_stderr))}
    for name in NAMES if correction == "bridge" else NAMES[:2]:
        numbers[name] = (float(made.gradient[name]), float(made.stderr[name]))
    return Row(dt, correction, numbers)


def exact():
    """E[τ] and its slopes."""
    theta = exits.parameters(b=1.0, cost=1.0, gain=0.0)
    value, gradient = jax.value_and_grad(exits.continuous_value)(theta)
    return {"value": float(value)} | {name: float(gradient[name]) for name in NAMES}


def format_row(row, truth):
    """The row of a table: differences from the exact answer, with their errors."""
    cells = [f"{row.dt:g}", row.correction]
    for name, expected in truth.items():
        found = row.numbers.get(name)
        cells.append("–" if found is None else f"{found[0] - expected:+.3f} ± {found[1]:.3f}")
    return cells


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50_000, help="trajectories per estimate")
    options = parser.parse_args()
    truth = exact()
    print("exact: " + ", ".join(f"{name} {value:.4f}" for name, value in truth.items()))
    for dt in STEPS:
        for correction in ("none", "shift", "bridge"):
            row = format_row(estimate(correction, dt, options.count), truth)
            print(" | ".join(row), flush=True)


if __name__ == "__main__":
    main()
