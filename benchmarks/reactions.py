"""Gradients of reaction networks: scores with every baseline against finite differences, at equal
trajectories.

The two systems that Burger et al. (arXiv 2604.02121) compare estimators on, a bimolecular
association A + B <-> AB and a repressilator, with rate constants of our own. Parameters are factors
on the rate constants, all 1, so that gradients are per relative change. Writes
results/reactions/table.txt: `python benchmarks/reactions.py`."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fluctua as fl
from fluctua.core.protocols import Estimator

ROOT = Path(__file__).resolve().parents[1]
MOLECULES = 20


class System(NamedTuple):
    """A network at θ = 1, its reward, and the gradient if it is known exactly."""

    process: fl.Jumps
    objective: fl.Objective
    start: jax.Array
    t: jax.Array
    theta: dict[str, jax.Array]
    seen: Callable[..., jax.Array]  # what the binned baseline sorts by
    exact: Any = None


def association(on: float, off: float, horizon: float) -> System:
    """A + B -> AB at on·A·B, AB -> A + B at off·AB; the state is AB. Reward: AB at the end."""

    def rates(theta, x):
        free = MOLECULES - x[0]
        return jnp.array([on * theta["on"] * free**2, off * theta["off"] * x[0]])

    process = fl.Jumps(rates, [[1.0], [-1.0]])
    theta = {"on": jnp.array(1.0), "off": jnp.array(1.0)}

    def value(theta):
        """E[AB] at the end by the master equation, 21 states."""
        states = jnp.arange(MOLECULES + 1.0)
        up, down = jax.vmap(lambda n: rates(theta, n[None]))(states).T
        generator = jnp.diag(up[:-1], 1) + jnp.diag(down[1:], -1) - jnp.diag(up + down)
        return jax.scipy.linalg.expm(generator * horizon)[0] @ states

    complexes = fl.Objective(terminal=lambda theta, x: x[0])
    t = jnp.linspace(0, horizon, 21)
    return System(
        process, complexes, jnp.zeros(1), t, theta, lambda theta, x: x[0], jax.grad(value)(theta)
    )


def repressilator() -> System:
    """Three proteins in a ring, each made at a rate that the one before represses, each lost at
    rate 1.

    a_i = 60 / (1 + (p_{i−1}/8)³). Reward: minus the mean squared distance of the first protein to
    the time course of the rate equations with 20 % faster loss, which is what an inference of
    parameters from data would minimise."""

    def rates(theta, x):
        make = (
            60 * theta["make"] / (1 + (jnp.roll(x, 1) / (8 * theta["half"])) ** (3 * theta["hill"]))
        )
        return jnp.concatenate([make, theta["loss"] * x])

    process = fl.Jumps(rates, np.concatenate([np.eye(3), -np.eye(3)]))
    theta = {name: jnp.array(1.0) for name in ("make", "half", "hill", "loss")}
    start, t, fine = jnp.array([30.0, 5.0, 1.0]), jnp.linspace(0, 6, 61), 50
    other = {**theta, "loss": jnp.array(1.2)}

    def flow(x, _):
        a = rates(other, x)
        return x + (a[:3] - a[3:]) * (t[1] - t[0]) / fine, x[0]

    target = jax.lax.scan(flow, start, None, length=60 * fine)[1][::fine]

    def reward(theta, x, t):
        return -((x[0] - jnp.interp(t, jnp.linspace(0, 6, 61)[:-1], target)) ** 2) / 6

    return System(process, fl.Objective(running=reward), start, t, theta, lambda theta, x: x[0])


SYSTEMS = {
    "association, weak binding (on 0.05, off 1, to t = 2)": lambda: association(0.05, 1.0, 2.0),
    "association, strong binding (on 1, off 1, to t = 2)": lambda: association(1.0, 1.0, 2.0),
    "association, weak binding, four times as long (to t = 8)": lambda: association(0.05, 1.0, 8.0),
    "repressilator (to t = 6)": repressilator,
}


def estimators(system: System) -> dict[str, Estimator]:
    process, objective = system.process, system.objective
    run = fl.simulator(process, system.start, system.t)
    baselines = {
        "score, no baseline": fl.baselines.none(),
        "score, time only (pilot)": fl.baselines.time_only(),
        "score, leave-one-out mean": fl.baselines.mean(),
        "score, leave-one-out optimal": fl.baselines.optimal(),
        "score, optimal in 5 bins": fl.baselines.binned(system.seen, bins=5),
    }
    made: dict[str, Estimator] = {
        name: fl.ppgt(run, objective, baseline=plan) for name, plan in baselines.items()
    }
    for h in (0.02, 0.1, 0.3):
        made[f"finite differences, common numbers, h = {h}"] = fl.reference.finite_differences(
            objective, run, step=h
        )
    return made


def rows(system: System, trajectories: int, repeats: int, reference: int) -> list[str]:
    """A line for each estimator: variance, what a gradient to a tenth takes, bias, processor
    time.
    """
    methods, truth, known = estimators(system), system.exact, "exact, by the master equation"
    if truth is None:
        truth = methods["score, leave-one-out optimal"](jax.random.key(1), system.theta, reference)
        known = f"from the scores of {reference:,} other trajectories"
    result = fl.reference.compare(
        jax.random.key(0),
        system.theta,
        methods,
        trajectories=trajectories,
        reference=truth,
        repeats=repeats,
    )
    gradient = np.array(
        jax.tree.leaves(truth if system.exact is not None else truth.gradient), float
    )
    each = ", ".join(
        f"{name} {g:.4g}" for name, g in zip(sorted(system.theta), gradient, strict=True)
    )
    lines = [
        f"gradient ({known}): {each}",
        f"{'estimator':<44} {'variance':>9} {'to 10 %':>9} {'bias / |∇J|':>16} {'ms':>6} "
        f"{'variance × ms':>14}",
    ]
    for row in result.rows:
        variance, error = row.variance.mean(), np.sqrt(row.variance / (row.trajectories * repeats))
        size = np.sqrt(np.sum(gradient**2))
        bias, doubt = np.sqrt(np.sum((row.z * error) ** 2)) / size, np.sqrt(np.sum(error**2)) / size
        needed = row.variance.sum() / (0.1 * size) ** 2
        spent = processor_time(methods[row.name], system, row.samples) / row.trajectories
        lines.append(
            f"{row.name:<44} {variance:>9.3g} {needed:>9,.0f} {bias:>8.3f} ± {doubt:.3f} "
            f"{1e3 * spent:>6.3f} "
            f"{1e3 * spent * variance:>14.3g}"
        )
    return lines


def processor_time(estimator: Estimator, system: System, samples: int) -> float:
    """Seconds of one call, all cores together; the wall clock of a busy machine says little."""
    started = time.process_time()
    for j in range(3):
        jax.block_until_ready(estimator(jax.random.key(100 + j), system.theta, samples).gradient)
    return (time.process_time() - started) / 3


NOTES = """variance: of one component of the gradient times the trajectories spent, mean over
parameters. to 10 %: trajectories for a relative error of a tenth, by variance alone. bias:
|mean − reference| over |∇J|, beside what chance gives. ms: processor time of a trajectory."""


def table(systems: str, trajectories: int, repeats: int, reference: int) -> str:
    parts = []
    for name, make in ((name, make) for name, make in SYSTEMS.items() if name.startswith(systems)):
        parts.append("\n".join([name, *rows(make(), trajectories, repeats, reference), ""]))
        print(parts[-1], flush=True)
    return "\n".join(
        [*parts, f"{trajectories:,} trajectories a call, {repeats} calls. {NOTES}", ""]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--systems", default="", help="those whose name begins so, such as repressilator"
    )
    parser.add_argument(
        "--trajectories", type=int, default=2000, help="spent by every estimator in one call"
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--reference",
        type=int,
        default=100_000,
        help="trajectories, where no exact answer is known",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "reactions")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "table.txt").write_text(
        table(options.systems, options.trajectories, options.repeats, options.reference)
    )
