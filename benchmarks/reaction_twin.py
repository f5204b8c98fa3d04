"""Gradients of reaction networks with a twin, beside scores, finite differences and
straight-through Gumbel (stochastix 0.2.0, `pip install stochastix==0.2.0`).

Root-mean-square errors against the number of trajectories on the three associations of
reactions.py, whose gradients are known, and variances where small numbers of molecules or several
stable states defeat the guess. Writes results/reactions/twin.txt, twin.csv and twin.png: `python
benchmarks/reaction_twin.py`."""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import fluctua as fl
from machine import describe_machine
from reaction_kernels import schloegl
from reactions import MOLECULES, ROOT, System, association, repressilator

CASES = {
    "weak, t = 2": (0.05, 1.0, 2.0),
    "strong, t = 2": (1.0, 1.0, 2.0),
    "weak, t = 8": (0.05, 1.0, 8.0),
}
"""Of `association`: on, off, horizon."""

EVENTS = {"weak, t = 2": 100, "strong, t = 2": 160, "weak, t = 8": 260}
"""Most events of a trajectory by stochastix, which needs the number beforehand."""

Gradient = Callable[[jax.Array, int], np.ndarray]
"""(key, trajectories) -> the gradient (P,) in the order of the names of θ."""


def flatten(tree: Any) -> np.ndarray:
    return np.array([float(leaf) for leaf in jax.tree.leaves(tree)])


CHUNK = 100
"""Trajectories of one call of what is compiled for their number."""


def use_estimator(estimator: Any, system: System) -> Gradient:
    """Spend all trajectories in one call."""

    def gradient(key: jax.Array, trajectories: int) -> np.ndarray:
        return flatten(estimator(key, system.theta, trajectories).gradient)

    return gradient


def average_calls(call: Callable[[jax.Array], np.ndarray]) -> Gradient:
    """Spend the trajectories in calls of `CHUNK`."""

    def gradient(key: jax.Array, trajectories: int) -> np.ndarray:
        keys = jax.random.split(key, trajectories // CHUNK)
        return np.mean([call(k) for k in keys], axis=0)

    return gradient


def use_differences(system: System, step: float) -> Gradient:
    """Central differences with common random numbers, four trajectories per sample."""
    run = fl.simulator(system.process, system.start, system.t, backend="jax")
    estimator = fl.reference.finite_differences(system.objective, run, step=step)

    def call(key: jax.Array) -> np.ndarray:
        return flatten(estimator(key, system.theta, CHUNK // 4).gradient)

    return average_calls(call)


def use_gumbel(case: str, temperature: float) -> Gradient | None:
    """Straight-through Gumbel of stochastix; None without it."""
    try:
        import stochastix
        from stochastix.kinetics import MassAction
    except ImportError:
        return None
    on, off, horizon = CASES[case]
    solver = stochastix.DifferentiableDirect(logits_scale=temperature)
    start = jnp.array([float(MOLECULES), float(MOLECULES), 0.0])

    def one(factors: jax.Array, key: jax.Array) -> jax.Array:
        network = stochastix.ReactionNetwork(
            [
                stochastix.Reaction("A + B -> C", MassAction(k=on * factors[1])),
                stochastix.Reaction("C -> A + B", MassAction(k=off * factors[0])),
            ]
        )
        path = stochastix.stochsimsolve(
            key,
            network,
            start,
            T=horizon,
            max_steps=EVENTS[case],
            solver=solver,
            save_trajectory=False,
            save_propensities=False,
        )
        return path.x[-1, network.species.index("C")]

    @jax.jit
    def mean(key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, CHUNK)
        return jax.grad(lambda f: jax.vmap(partial(one, f))(keys).mean())(jnp.ones(2))

    return average_calls(lambda key: np.asarray(mean(key)))


def move_rates(theta: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Parameters of a guess whose rates are 10 % off."""
    return {name: 1.1 * value for name, value in theta.items()}


def methods(case: str) -> dict[str, Gradient]:
    """Every estimator of one association."""
    system = association(*CASES[case])
    run = fl.simulator(system.process, system.start, system.t, backend="cpu")
    baselines: dict[str, Any] = {
        "score, mean": "mean",
        "twin": fl.Twin(),
        "twin, order 2": fl.Twin(order=2),
        "twin, order 2, rates 10 % off": fl.Twin(order=2, theta=move_rates),
    }
    made = {
        name: use_estimator(fl.ppgt(run, system.objective, baseline=plan), system)
        for name, plan in baselines.items()
    }
    for h in (0.1, 0.3):
        made[f"finite differences, h = {h}"] = use_differences(system, h)
    for temperature in (0.3, 3.0):
        gumbel = use_gumbel(case, temperature)
        if gumbel is not None:
            made[f"Gumbel, temperature {temperature:g}"] = gumbel
    return made


class Row(NamedTuple):
    """An estimator on an association: estimates (repeats, P) by number of trajectories."""

    case: str
    name: str
    exact: np.ndarray
    estimates: dict[int, np.ndarray]

    def error(self, count: int) -> float:
        """Root-mean-square error over |∇J|."""
        off = self.estimates[count] - self.exact
        return float(np.sqrt((off**2).sum(1).mean() / (self.exact**2).sum()))

    @property
    def variance(self) -> float:
        """Of a component, times the trajectories; from all calls together."""
        each = [count * v.var(axis=0, ddof=1) for count, v in self.estimates.items()]
        return float(np.mean(each))

    @property
    def bias(self) -> tuple[float, float]:
        """|mean − ∇J|/|∇J|, and what chance gives."""
        counts = np.array(list(self.estimates))
        means = [v.mean(axis=0) for v in self.estimates.values()]
        repeats = len(next(iter(self.estimates.values())))
        mean = np.average(means, axis=0, weights=counts)
        size = np.sqrt((self.exact**2).sum())
        chance = np.sqrt(len(self.exact) * self.variance / (counts.sum() * repeats))
        return float(np.sqrt(((mean - self.exact) ** 2).sum()) / size), float(chance / size)


def measure(case: str, counts: tuple[int, ...], repeats: int) -> list[Row]:
    exact = flatten(association(*CASES[case]).exact)
    rows = []
    for name, gradient in methods(case).items():
        estimates = {}
        for count in counts:
            keys = jax.random.split(jax.random.key(count), repeats)
            estimates[count] = np.stack([gradient(key, count) for key in keys])
        rows.append(Row(case, name, exact, estimates))
        print(format_row(rows[-1]), flush=True)
    return rows


def format_row(row: Row) -> str:
    errors = " ".join(f"{100 * row.error(count):>9.3g}" for count in row.estimates)
    bias, chance = row.bias
    return f"{row.name:<32} {errors} {row.variance:>10.3g} {100 * bias:>8.3f} ± {100 * chance:.3f}"


def check_bias(trajectories: int, calls: int = 2) -> list[str]:
    """z-scores of twins that are right and wrong, from many trajectories; they see small biases."""
    lines = [f"{trajectories:,} trajectories, {calls} calls: error of the mean and z of off and on"]
    plans = {
        "twin": fl.Twin(),
        "twin, order 2": fl.Twin(order=2),
        "twin, order 2, rates 10 % off": fl.Twin(order=2, theta=move_rates),
    }
    for case, numbers in CASES.items():
        system = association(*numbers)
        run = fl.simulator(system.process, system.start, system.t, backend="cpu")
        size = np.sqrt((flatten(system.exact) ** 2).sum())
        for name, plan in plans.items():
            estimator = fl.ppgt(run, system.objective, baseline=plan)
            for k in range(calls):
                estimate = estimator(jax.random.key(7 + k), system.theta, trajectories)
                error = flatten(estimate.stderr)
                z = (flatten(estimate.gradient) - flatten(system.exact)) / error
                share = 100 * np.sqrt((error**2).sum()) / size
                lines.append(f"{case:<14} {name:<30} {share:.4f} % {z[0]:>6.2f} {z[1]:>6.2f}")
                print(lines[-1], flush=True)
    return lines


# ---------------------------------------------------------------------------- where it is defeated


class Network(NamedTuple):
    """A jump process, its reward, start, grid and θ."""

    process: fl.Jumps
    objective: fl.Objective
    start: jax.Array
    t: jax.Array
    theta: dict[str, jax.Array]


def associate_few(molecules: int) -> Network:
    """The strong association with few molecules of each kind."""
    process = fl.Jumps(
        lambda th, x: jnp.array([th["on"] * (molecules - x[0]) ** 2, th["off"] * x[0]]),
        [[1.0], [-1.0]],
    )
    theta = {"on": jnp.array(1.0), "off": jnp.array(1.0)}
    objective = fl.Objective(terminal=lambda th, x: x[0])
    return Network(process, objective, jnp.zeros(1), jnp.linspace(0, 2, 21), theta)


def toggle(horizon: float) -> Network:
    """Two genes that repress each other, from near the line between their two stable states."""

    def rates(th, x):
        made = 20 * th["make"] / (1 + (x[::-1] / (4 * th["half"])) ** 2)
        return jnp.concatenate([made, th["loss"] * x])

    process = fl.Jumps(rates, np.concatenate([np.eye(2), -np.eye(2)]))
    theta = {name: jnp.array(1.0) for name in ("make", "half", "loss")}
    objective = fl.Objective(terminal=lambda th, x: x[0])
    return Network(process, objective, jnp.array([6.0, 5.0]), jnp.linspace(0, horizon, 31), theta)


HARD: dict[str, Callable[[], Network]] = {
    "association of 2 and 2, strong": partial(associate_few, 2),
    "association of 5 and 5, strong": partial(associate_few, 5),
    "toggle switch, t = 1": partial(toggle, 1.0),
    "toggle switch, t = 2": partial(toggle, 2.0),
    "toggle switch, t = 6": partial(toggle, 6.0),
    "Schlögl from the unstable state, t = 1": lambda: Network(*schloegl()[:5]),
    "repressilator, t = 6": lambda: Network(*repressilator()[:5]),
}


def compare_variances(network: Network, trajectories: int) -> dict[str, tuple[float, float]]:
    """Variance × trajectories, mean over the parameters in units of the score's, and the time."""
    run = fl.simulator(network.process, network.start, network.t, backend="cpu")
    results: dict[str, tuple[np.ndarray, float]] = {}
    plans: dict[str, Any] = {"score": "mean", "twin": fl.Twin(), "order 2": fl.Twin(order=2)}
    for name, plan in plans.items():
        estimator = fl.ppgt(run, network.objective, baseline=plan)
        estimate = estimator(jax.random.key(0), network.theta, trajectories)
        spent = []
        for k in range(3):
            started = time.process_time()
            jax.block_until_ready(
                estimator(jax.random.key(k), network.theta, trajectories).gradient
            )
            spent.append(time.process_time() - started)
        results[name] = (flatten(estimate.stderr) ** 2 * trajectories, min(spent))
    of_score, time_of_score = results["score"]
    return {
        name: (float(np.mean(of_score / variance)), spent / time_of_score)
        for name, (variance, spent) in results.items()
    }


def format_hard(trajectories: int) -> list[str]:
    lines = [
        "",
        f"variance of the score with a mean baseline ÷ that of the twin, {trajectories:,} "
        "trajectories; processor time ÷ score's",
        f"{'network':<40} {'order 1':>9} {'time':>5} {'order 2':>9} {'time':>5}",
    ]
    for name, make in HARD.items():
        ratios = compare_variances(make(), trajectories)
        cells = " ".join(
            f"{ratios[key][0]:>9.3g} {ratios[key][1]:>5.1f}" for key in ("twin", "order 2")
        )
        lines.append(f"{name:<40} {cells}")
        print(lines[-1], flush=True)
    return lines


def draw(rows: list[Row], path: Path) -> None:
    """Errors against trajectories, a panel for each association."""
    cases = list(dict.fromkeys(row.case for row in rows))
    figure, axes = plt.subplots(1, len(cases), figsize=(4 * len(cases), 4.2), sharey=True)
    names = list(dict.fromkeys(row.name for row in rows))
    colours = dict(zip(names, plt.get_cmap("tab10").colors, strict=False))
    for axis, case in zip(np.atleast_1d(axes), cases, strict=True):
        for row in rows:
            if row.case == case:
                counts = list(row.estimates)
                style = "--" if row.name.startswith(("finite", "Gumbel")) else "-"
                errors = [100 * row.error(count) for count in counts]
                axis.loglog(
                    counts, errors, style, marker="o", ms=3, color=colours[row.name], label=row.name
                )
        axis.set_title(f"association, {case}")
        axis.set_xlabel("trajectories")
        axis.grid(alpha=0.3)
    np.atleast_1d(axes)[0].set_ylabel("error of the gradient, % of its size")
    handles, labels = np.atleast_1d(axes)[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=4, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.1, 1, 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def write_csv(rows: list[Row], path: Path) -> None:
    lines = ["association,estimator,trajectories,rms_error_percent"]
    for row in rows:
        lines += [
            f'"{row.case}","{row.name}",{count},{100 * row.error(count):.5g}'
            for count in row.estimates
        ]
    path.write_text("\n".join(lines) + "\n")


NOTE = """Errors: root mean square over the size of the gradient, in %, by trajectories spent.
variance: of a component times the trajectories. bias: |mean − ∇J|/|∇J| in %, and its error.
Finite differences: common random numbers, four trajectories per sample."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=[100, 400, 1600])
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--trajectories", type=int, default=8000, help="of the hard networks")
    parser.add_argument(
        "--bias", type=int, default=0, help="trajectories of a check for bias alone, twin_bias.txt"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "reactions")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.bias:
        (options.out / "twin_bias.txt").write_text("\n".join([*check_bias(options.bias), ""]))
        raise SystemExit
    rows: list[Row] = []
    text = [describe_machine("cpu"), ""]
    for case in CASES:
        counts = " ".join(f"{count:>9,}" for count in options.counts)
        head = f"{f'association, {case}':<32} {counts} {'variance':>10} {'bias':>8}"
        print(head, flush=True)
        measured = measure(case, tuple(options.counts), options.repeats)
        text += [head, *(format_row(row) for row in measured), ""]
        rows += measured
    text += [f"{options.repeats} calls each. {NOTE}", *format_hard(options.trajectories), ""]
    (options.out / "twin.txt").write_text("\n".join(text))
    write_csv(rows, options.out / "twin.csv")
    draw(rows, options.out / "twin.png")
