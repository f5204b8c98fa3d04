"""False alarms, power and cost of the tests that `fl.gradient` makes of recorded trajectories.

    python benchmarks/gradient_guard.py right   -> results/guard/gradient_right.csv
    python benchmarks/gradient_guard.py faults  -> results/guard/gradient_faults.csv
    python benchmarks/gradient_guard.py cost    -> results/guard/gradient_cost.csv

Right models are processes of every kind, with 500, 5,000 and 50,000 steps. Faults are planted in
records of a trap, of as many steps. Cost is CPU time of a repeated call, with and without tests.
"""

import argparse
import csv
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import fluctua as fl
from fluctua.core.estimation import recorded_samples

FOLDER = Path(__file__).parents[1] / "results" / "guard"
SIZES = ((50, 10), (100, 50), (500, 100))
"""Trajectories and steps."""
DT = 0.05
EULER = fl.scores.full_score
THETA = {"k": jnp.array(2.0), "c": jnp.array(0.5)}
END = fl.Objective(terminal=lambda theta, x: x[0])


class Case(NamedTuple):
    """One process and its records: record(key, trajectories, steps)."""

    process: Any
    record: Callable[..., fl.Trajectories]
    theta: Any = THETA
    score: Any = EULER
    objective: Any = END


def pull(theta: Any, x: Any) -> Any:
    """The drift of a trap."""
    return theta["k"] * (theta["c"] - x)


def shake(theta: Any, x: Any) -> Any:
    """Noise of one amplitude."""
    return 0.5 * jnp.ones_like(x)


TRAP = fl.Process(pull, shake)
PAIR = fl.Process(lambda theta, x: pull(theta, x) + 0.5 * x[::-1], shake)


def simulate(process: Any, start: Any, finer: int = 1, theta: Any = THETA, **options: Any) -> Any:
    """record(key, trajectories, steps) of a simulation, in `finer` steps per sample."""

    def record(key: Any, count: int, steps: int) -> fl.Trajectories:
        t = np.arange(steps * finer + 1) * DT / finer
        run = fl.simulator(process, start, t, backend="jax", **options)(key, theta, count)
        if finer == 1:
            return run
        return fl.Trajectories(np.asarray(run.t)[::finer], np.asarray(run.x)[:, ::finer])

    return record


def right_cases() -> Iterator[tuple[str, Case]]:
    """Processes of every kind, each with records of its own."""
    one = jnp.zeros(1)
    two = jnp.array([0.3, -0.3])

    def make(process: Any, start: Any, **options: Any) -> Case:
        return Case(process, simulate(process, start, **options))

    yield "linear, 1 state", make(TRAP, one)
    yield "linear, 2 states", make(PAIR, two)
    yield "double well", make(fl.Process(lambda p, x: p["k"] * (x - x**3) + p["c"], shake), one)
    yield "multiplicative noise", make(fl.Process(pull, lambda p, x: 0.5 * jnp.sqrt(1 + x**2)), one)
    mixed = jnp.array([[0.5, 0.1, 0.0], [-0.2, 0.3, 0.4]])
    yield "noise that is a matrix", make(fl.Process(pull, lambda p, x: mixed), two)
    swing = fl.Process(
        lambda p, x: jnp.array([x[1], -p["k"] * jnp.sin(x[0]) - p["c"] * x[1]]),
        lambda p, x: jnp.array([0.0, 0.5]),
    )
    yield "component without noise", make(swing, two)
    yield "Heun's step", make(fl.Process(pull, shake, integrator="heun"), two)
    offset = fl.Process(lambda p, x, t, u: pull(p, x) + u * jnp.sin(t), shake)
    yield "context and time", make(offset, one, context=lambda key: jax.random.normal(key))
    walk = fl.Process(lambda p, x: p["c"] * jnp.ones_like(x) + 0 * p["k"], shake)
    yield "random walk", make(walk, one)
    fine = simulate(PAIR, two, finer=10)
    yield "ten steps per sample", Case(PAIR, fine)
    yield "long samples, locally linear", Case(PAIR, fine, score=fl.scores.local_linear_score)
    births = fl.Jumps(lambda p, x: jnp.array([10 * p["k"], p["c"] * x[0]]), [[1.0], [-1.0]])
    yield "jumps", make(births, jnp.array([20.0]))
    seen = fl.Observed(PAIR, observe=[[1.0, 0.0]], noise=0.01, start=two)
    yield "hidden component and readout noise", make(seen, None)


def find_warnings(case: Case, record: fl.Trajectories) -> tuple[Any, list[str]]:
    """The estimate of `fl.gradient`, and what it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = fl.gradient(case.process, case.objective, case.theta, record, score=case.score)
    return made, [str(one.message) for one in caught if one.category is RuntimeWarning]


def study_right(calls: int) -> list[dict[str, Any]]:
    """False alarms of right models."""
    table = []
    for name, case in right_cases():
        for count, steps in SIZES:
            alarms = []
            for seed in range(calls):
                record = case.record(jax.random.key(seed), count, steps)
                alarms += find_warnings(case, record)[1][:1]
            row = {"process": name, "steps": count * steps, "calls": calls, "alarms": len(alarms)}
            table.append(row | {"first": alarms[0] if alarms else ""})
            print(table[-1], flush=True)
    return table


def plant_faults() -> Iterator[tuple[str, Callable[..., fl.Trajectories]]]:
    """Records of a trap that is another than its model, or is read otherwise."""
    right = simulate(TRAP, jnp.zeros(1))

    def other(drift: Any = pull, noise: Any = shake, **changed: float) -> Any:
        theta = {**THETA, **{name: jnp.array(value) for name, value in changed.items()}}
        return simulate(fl.Process(drift, noise), jnp.zeros(1), theta=theta)

    yield "none", right
    for percent in (-20, -10, -5, 5, 10, 20):
        yield f"rate {percent:+d} %", other(k=2.0 * (1 + percent / 100))
    for percent in (-10, -5, 5, 10):
        noise = 0.5 * (1 + percent / 100)
        yield f"noise {percent:+d} %", other(noise=lambda p, x, s=noise: s * jnp.ones_like(x))
    yield "force 0.2 missing in the model", other(drift=lambda p, x: pull(p, x) + 0.2)
    yield "sign of the channel", lambda *a: right(*a)._replace(x=-right(*a).x)
    yield "time × 1000", lambda *a: right(*a)._replace(t=1e3 * np.asarray(right(*a).t))
    yield "state × 0.001", lambda *a: right(*a)._replace(x=1e-3 * right(*a).x)
    yield "coloured noise, 3 samples", colour_noise
    yield (
        "every trajectory twice",
        lambda *a: right(*a)._replace(x=jnp.tile(right(*a).x, (2, 1, 1))),
    )


def colour_noise(key: Any, count: int, steps: int) -> fl.Trajectories:
    """The trap, driven by noise of the same power at low frequencies and a memory of 3 samples."""
    memory = 3 * DT
    kicked = fl.Process(
        lambda p, x: jnp.array([p["k"] * (p["c"] - x[0]) + x[1], -x[1] / memory]),
        lambda p, x: jnp.array([0.0, 0.5 / memory]),
    )
    run = simulate(kicked, jnp.zeros(2))(key, count, steps)
    return fl.Trajectories(run.t, run.x[..., :1])


def study_faults(calls: int) -> list[dict[str, Any]]:
    """How often a fault is found, and the bias of ∂J/∂c that it makes, in standard errors."""
    table = []
    case = Case(TRAP, simulate(TRAP, jnp.zeros(1)))
    for fault, record in plant_faults():
        row: dict[str, Any] = {"fault": fault, "calls": calls}
        for count, steps in SIZES:
            each = [
                find_warnings(case, record(jax.random.key(seed), count, steps))
                for seed in range(calls)
            ]
            exact = 1 - (1 - _true_rate(fault) * DT) ** steps
            off = [float((made.gradient["c"] - exact) / made.stderr["c"]) for made, _ in each]
            row[f"found {count * steps}"] = float(np.mean([bool(found) for _, found in each]))
            row[f"bias {count * steps}"] = round(float(np.mean(off)), 2)
        words = [found[0] for _, found in each if found]
        table.append(row | {"words": max(set(words), key=words.count)[:160] if words else ""})
        print(table[-1], flush=True)
    return table


def _true_rate(fault: str) -> float:
    """k of the device."""
    return 2.0 * (1 + float(fault.split()[1]) / 100) if fault.startswith("rate") else 2.0


def measure_cost(calls: int) -> list[dict[str, Any]]:
    """CPU time of a call that was made before, with and without tests, the least of some."""
    network = fl.Process(lambda p, x: p["a"] @ x - x**3, lambda p, x: 0.3 * jnp.ones_like(x))
    weights = {"a": 0.1 * jax.random.normal(jax.random.key(3), (8, 8)) - jnp.eye(8)}
    cases = (
        ("trap", Case(TRAP, simulate(TRAP, jnp.zeros(1))), (50, 2000, 20_000)),
        (
            "8 states, 64 parameters",
            Case(network, simulate(network, jnp.zeros(8), theta=weights), weights),
            (50, 2000),
        ),
    )
    table = []
    for name, case, counts in cases:
        for count in counts:
            record = case.record(jax.random.key(0), count, 200)
            record = record._replace(x=np.asarray(record.x))
            row = {"process": name, "steps": 200 * count}
            row["with"] = _time_calls(case, record, calls)
            with (
                mock.patch.object(recorded_samples, "_warn", return_value=True),
                mock.patch.object(recorded_samples, "_warn_about_scores"),
            ):
                row["without"] = _time_calls(case, record, calls)
            table.append(row)
            print(row, flush=True)
    return table


def _time_calls(case: Case, record: fl.Trajectories, calls: int) -> float:
    """The least CPU time of a repeated call, in ms."""
    find_warnings(case, record)
    each = []
    for _ in range(calls):
        begin = time.process_time()
        find_warnings(case, record)
        each.append(1e3 * (time.process_time() - begin))
    return round(min(each), 1)


def main() -> None:
    """Run one study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=("right", "faults", "cost"))
    parser.add_argument("--calls", type=int, default=20)
    options = parser.parse_args()
    studies = {"right": study_right, "faults": study_faults, "cost": measure_cost}
    table = studies[options.study](options.calls)
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"gradient_{options.study}.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, table[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


if __name__ == "__main__":
    main()
