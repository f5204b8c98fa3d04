"""How far a batch can be used again, and what trust regions are worth: tables and figure of
results/reuse.

`python benchmarks/reuse.py reach`: effective trajectories against the length of a step, on the
paper's lattice, a trap and a double well. `... training`: trap and double well at equal
trajectories. `... natural`: the paper's rule against the natural gradient on small lattices. `...
draw`: table.txt and the figure from the csv files."""

from __future__ import annotations

import argparse
import csv
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from matplotlib.figure import Figure

import fluctua as fl
from fluctua.core.streamed import split_key
from fluctua.learn.training import Length, ascend
from fluctua.plot.style import LOOK, WIDTH, letter, save
from fluctua.runs.build import build
from fluctua.runs.config import PRESETS, apply_changes

ROOT = Path(__file__).resolve().parents[1]
FRACTIONS = np.geomspace(1e-3, 10, 41)
"""Of one step of the lattice; small problems have ten times as many."""
SEEDS = (0, 1, 2)


# ----------------------------------------------------------------------------------------- problems


class Problem(NamedTuple):
    """A small process to train. rate: Adam's. kl: of a natural step."""

    process: fl.Process
    objective: fl.Objective
    simulator: Any
    theta: Any
    rate: float
    kl: float
    count: int

    @property
    def estimator(self) -> Any:
        return fl.ppgt(self.simulator, self.objective)


def trap() -> Problem:
    """A bead carried from 0 to 1 by a trap with eight way points and a stiffness, at little
    work.
    """
    horizon, sigma = 2.0, 0.4

    def centre(theta: Any, t: Any) -> Any:
        return jnp.interp(
            t, jnp.linspace(0, horizon, 9), jnp.concatenate([jnp.zeros(1), theta["way"]])
        )

    process = fl.Process(
        lambda th, x, t: -th["stiffness"] * (x - centre(th, t)), lambda th, x: sigma * jnp.ones(1)
    )
    objective = fl.Objective(
        running=lambda th, x, t: -0.1 * (th["stiffness"] * (x[0] - centre(th, t))) ** 2,
        terminal=lambda th, x: -2 * (x[0] - 1) ** 2,
    )
    simulator = fl.simulator(process, jnp.zeros(1), jnp.linspace(0, horizon, 101))
    theta = {"stiffness": jnp.array(1.0), "way": jnp.zeros(8)}
    return Problem(process, objective, simulator, theta, 0.05, 0.1, 40)


def double_well() -> Problem:
    """Twelve amplitudes of a force that is to push a particle over a barrier
    (examples/double_well.py).
    """
    centres = jnp.linspace(0.0, 8.0, 12)

    def pulse(u, t):
        return jnp.sum(u * jnp.exp(-(((t - centres) / 0.5) ** 2)))

    process = fl.Process(lambda u, x, t: x - x**3 + pulse(u, t), lambda u, x: 0.4 * jnp.ones(1))
    objective = fl.Objective(
        running=lambda u, x, t: -0.15 * pulse(u, t) ** 2, terminal=lambda u, x: jnp.tanh(4 * x[0])
    )
    simulator = fl.simulator(process, jnp.array([-1.0]), jnp.linspace(0, 8, 201))
    return Problem(process, objective, simulator, 0.3 * jnp.ones(12), 0.05, 0.1, 80)


PPO = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "ppo_clip.py"))
SMALL = {"trap": trap, "double well": double_well}


# ------------------------------------------------------------------------------------------ reach


def effective(log: np.ndarray) -> float:
    """ESS/N of weights with these logarithms."""
    w = np.exp(log - log.max())
    return float(w.sum() ** 2 / (w**2).sum() / len(w))


def reach_small(name: str) -> Iterator[dict[str, Any]]:
    """1,000 trajectories at the start, looked at from along the first step of Adam."""
    problem = SMALL[name]()
    batch = problem.simulator(jax.random.key(1), problem.theta, 1000)
    gradient = problem.estimator(jax.random.key(0), problem.theta, 1000).gradient
    for fraction in 10 * FRACTIONS:
        theta = jax.tree.map(
            lambda v, g, f=fraction: v + f * problem.rate * jnp.sign(g), problem.theta, gradient
        )
        found = fl.reweighted(
            problem.process, problem.objective, theta, [(problem.theta, batch)], minimum_ess=0
        )
        yield row(name, f"Adam {problem.rate:g}", fraction, found.kl[0], found.ess / 1000)


def row(problem: str, step: str, fraction: float, kl: float, share: float) -> dict[str, Any]:
    return {"problem": problem, "step": step, "fraction": float(fraction), "kl": kl, "share": share}


def reach_lattice(count: int = 1000, checked: int = 4) -> Iterator[dict[str, Any]]:
    """The paper's lattice. The drift is linear in θ, so ln w = f Δθ·ΣU − f² k with k = KL of the
    whole step.

    ΣU of every trajectory comes from the kernels; `reweighted` says on a few trajectories that k is
    ½ var(Δθ·ΣU)."""
    parts = build(
        apply_changes(
            PRESETS["paper"],
            {"baseline.kind": "time", "backend": "cpu", "ensemble.schedule": "fixed"},
        )
    )
    saved = np.load(ROOT / "results" / "fig1" / "final_0.npz")
    trained = {name: jnp.asarray(saved[name], parts.theta[name].dtype) for name in parts.theta}
    fast = optax.chain(optax.adam(0.1), optax.stateless(lambda v, _: v | {"chi": 0.01 * v["chi"]}))
    for place, theta in (("start", parts.theta), ("trained", trained)):
        estimator = parts.estimator
        key = jax.random.key(5)
        estimate = estimator(key, theta, count)
        scores = np.asarray(estimator.scores(key, theta, count, 1), np.float64)
        information = (scores**2).mean(axis=0)
        edges = np.cumsum([0, *(v.size for v in jax.tree.leaves(theta))])
        for k, family in enumerate(sorted(theta)):
            part = information[edges[k] : edges[k + 1]]
            print(
                f"{place}: F of one {family}: median {np.median(part):.3g}, largest "
                f"{part.max():.3g} a trajectory"
            )
        descent = jax.tree.map(jnp.negative, estimate.gradient)
        for name, rule in (
            ("paper's rule 0.05", fl.optimisers.rms_ascent(0.05)),
            ("Adam 0.1", optax.with_extra_args_support(fast)),
        ):
            step, _ = rule.update(
                descent, rule.init(theta), theta, second_moment=estimate.second_moment
            )
            along = scores @ np.asarray(ravel_pytree(step)[0], np.float64)
            k = along.var() / 2
            tiny = 1e-3
            paths = parts.task.simulator()(split_key(key)[0], theta, checked)
            moved = jax.tree.map(lambda v, s, f=tiny: v + f * s, theta, step)
            exact = fl.reweighted(
                parts.task.process, parts.task.objective, moved, [(theta, paths)], minimum_ess=0
            )
            print(
                f"{place}, {name}: KL = {k:.4g}; by `reweighted` on {checked} trajectories "
                f"{exact.kl[0] / tiny**2:.4g}"
            )
            for fraction in FRACTIONS:
                yield row(
                    f"paper's lattice, {place}",
                    name,
                    fraction,
                    fraction**2 * k,
                    effective(fraction * along),
                )


# ----------------------------------------------------------------------------------------- training


def loop(
    problem: Problem,
    seed: int,
    iterations: int,
    gradients: Callable[..., Iterator[Any]],
    rate: float,
) -> Iterator[Any]:
    """θ after each batch. gradients: (θ, batches so far) -> the gradients of the steps that
    follow a batch.
    """
    rule, theta, key = optax.adam(rate), problem.theta, jax.random.key(seed)
    state, batches = rule.init(theta), []
    for iteration in range(iterations):
        yield theta
        batches.append(
            (theta, problem.simulator(jax.random.fold_in(key, iteration), theta, problem.count))
        )
        for gradient in gradients(lambda: theta, batches):  # noqa: B023  (θ as it is when asked)
            updates, state = rule.update(jax.tree.map(jnp.negative, gradient), state)
            theta = optax.apply_updates(theta, updates)
    yield theta


def methods(problem: Problem) -> dict[str, Callable[[int, int], Iterator[Any]]]:
    def at(theta, batches, **options):
        return fl.reweighted(
            problem.process, problem.objective, theta, batches, **options
        ).estimate.gradient

    def fresh(now: Any, batches: Any) -> Iterator[Any]:
        yield at(now(), batches[-1:])

    def balanced(now: Any, batches: Any) -> Iterator[Any]:
        yield at(now(), batches[-4:])  # the newest is of `now`: ESS is a batch at least

    def repeated(now: Any, batches: Any) -> Iterator[Any]:
        yield at(now(), batches[-1:])
        for _ in range(3):
            try:
                yield at(now(), batches[-1:], minimum_ess=problem.count / 2)
            except ValueError:  # the batch is used up
                return

    def clipped(now: Any, batches: Any) -> Iterator[Any]:
        old, batch = batches[-1]
        for _ in range(4):
            yield PPO["clipped_gradient"](problem.process, problem.objective, now(), old, batch)

    def natural(seed: int, iterations: int) -> Iterator[Any]:
        records = fl.train(
            fl.Training(
                fl.natural(problem.estimator),
                problem.theta,
                fl.optimisers.kl_ascent(problem.kl),
                trajectories=problem.count,
                seed=seed,
            ),
            iterations=iterations,
        )
        for record in records:
            yield record.theta
        yield record.next_theta

    by_adam = {
        "Adam, fresh batches": (fresh, 1),
        "Adam, last 4 batches, balance heuristic": (balanced, 1),
        "Adam, up to 4 steps a batch, reweighted": (repeated, 1),
        "Adam, 4 steps a batch, clipped (PPO)": (clipped, 1),
        "Adam, fresh batches, 4 times the rate": (fresh, 4),
    }
    made = {
        name: lambda s, n, g=g, f=f: loop(problem, s, n, g, f * problem.rate)
        for name, (g, f) in by_adam.items()
    }
    return made | {"natural gradient, steps by KL": natural}


def training(iterations: int, only: str) -> Iterator[dict[str, Any]]:
    for name, make in SMALL.items():
        problem = make()
        for method, thetas in methods(problem).items():
            for seed in SEEDS if only in method else ():
                for iteration, theta in enumerate(thetas(seed, iterations)):
                    if iteration % 4 == 0:
                        J = fl.evaluate(problem.estimator, theta, count=2000, seed=99).J
                        spent = iteration * problem.count
                        yield {
                            "problem": name,
                            "method": method,
                            "seed": seed,
                            "trajectories": spent,
                            "J": J,
                        }
            if only in method:
                print(f"{name}, {method}: J = {J:.4f} after {spent:,} trajectories", flush=True)


# --------------------------------------------------------------------------------- natural gradient


def natural(iterations: int) -> Iterator[dict[str, Any]]:
    """Small lattices, 300 trajectories an iteration, no model but the drift in the score."""
    for seed in SEEDS:
        for rows, columns in ((5, 8), (4, 5)):
            size = {"lattice.rows": rows, "lattice.columns": columns, "backend": "cpu"}
            parts = build(apply_changes(PRESETS["demo"], size | {"seed": seed}))
            rules = {
                "paper's rule 0.05": (parts.estimator, fl.optimisers.rms_ascent(0.05)),
                "Adam 0.02": (parts.estimator, parts.rule),
                "natural, KL 10": (
                    fl.natural(parts.estimator, blocks=2),
                    fl.optimisers.kl_ascent(10.0),
                ),
                "natural, KL 100": (
                    fl.natural(parts.estimator, blocks=2),
                    fl.optimisers.kl_ascent(100.0),
                ),
            }
            for name, (estimator, rule) in rules.items():
                parts.estimator.restore({}, parts.theta)
                training = fl.Training(
                    estimator, parts.theta, rule, trajectories=300, bounds=parts.bounds
                )
                for record in ascend(training, parts.key, training.start, Length(iterations)):
                    if record.iteration % 2 == 0:
                        yield {
                            "problem": f"{rows} × {columns}",
                            "method": name,
                            "seed": seed,
                            "trajectories": record.trajectories,
                            "J": float(record.estimate.value),
                        }
                print(
                    f"{rows} × {columns}, {name}, seed {seed}: J = {record.estimate.value:.4f}",
                    flush=True,
                )


# -------------------------------------------------------------------------------- tables and figure


def write(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        out = None
        for entry in rows:
            if out is None:
                out = csv.DictWriter(file, entry)
                out.writeheader()
            out.writerow(
                {name: f"{v:.6g}" if isinstance(v, float) else v for name, v in entry.items()}
            )
            file.flush()


def read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []

    def number(text):
        return (
            float(text)
            if text.replace(".", "").replace("-", "").replace("e", "").replace("+", "").isdigit()
            else text
        )

    with path.open() as file:
        return [
            {name: number(text) for name, text in entry.items()} for entry in csv.DictReader(file)
        ]


def group_rows(rows: list[dict[str, Any]], *names: str) -> dict[tuple, list[dict[str, Any]]]:
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for entry in rows:
        groups.setdefault(tuple(entry[name] for name in names), []).append(entry)
    return groups


def at_share(rows: list[dict[str, Any]], share: float) -> float:
    """The fraction of a step at which so much of a batch is left, between the points of the
    table.
    """
    rows = sorted(rows, key=lambda entry: entry["fraction"])
    shares = np.minimum.accumulate([entry["share"] for entry in rows])
    return float(np.exp(np.interp(-share, -shares, np.log([entry["fraction"] for entry in rows]))))


def table(folder: Path) -> Iterator[str]:
    yield "one step of the usual size, 1,000 trajectories"
    yield (
        f"{'problem':<28} {'step':<18} {'KL (nats)':>10} {'ESS/N':>9} {'half left at':>14} "
        f"{'2 % left at':>13}"
    )
    for (problem, step), rows in group_rows(read(folder / "reach.csv"), "problem", "step").items():
        whole = min(rows, key=lambda entry: abs(np.log(entry["fraction"])))
        yield (
            f"{problem:<28} {step:<18} {whole['kl'] / whole['fraction'] ** 2:>10.3g} "
            f"{whole['share']:>9.3g} "
            f"{at_share(rows, 0.5):>8.3f} steps {at_share(rows, 0.02):>7.3f} steps"
        )
    for name in ("training", "natural"):
        entries = read(folder / f"{name}.csv")
        levels = [0.5, 1.0]
        yield ""
        yield f"{'problem':<14} {'method':<42}" + "".join(
            f"{f'J after {v:.0%}':>20}" for v in levels
        )
        for (problem, method), rows in group_rows(entries, "problem", "method").items():
            most = max(entry["trajectories"] for entry in rows)
            cells = []
            for level in levels:
                near = [
                    seed_rows[int(level * (len(seed_rows) - 1))]
                    for seed_rows in group_rows(rows, "seed").values()
                ]
                J = [entry["J"] for entry in near]
                cells.append(f"{np.mean(J):.4f} ± {np.std(J, ddof=1) if len(J) > 1 else 0:.4f}")
            yield (
                f"{problem:<14} {method:<42}"
                + "".join(f"{cell:>20}" for cell in cells)
                + f"   of {most:,.0f} trajectories"
            )


def draw(folder: Path) -> Figure:
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
        axes = figure.subplots(2, 3)
        panels = list(axes.flat)
        for (problem, step), rows in group_rows(
            read(folder / "reach.csv"), "problem", "step"
        ).items():
            panels[0].plot(
                [r["fraction"] for r in rows],
                [r["share"] for r in rows],
                label=f"{problem}, {step}",
            )
            panels[1].plot([r["kl"] for r in rows], [r["share"] for r in rows])
        kl = np.geomspace(1e-3, 10, 200)
        panels[1].plot(kl, np.exp(-2 * kl), color="0.2", ls=":", label="exp(−2 KL)")
        panels[0].set(xscale="log", xlabel="fraction of one step", ylabel="ESS / N", ylim=(0, 1.02))
        panels[0].axvline(1, color="0.7", lw=0.6)
        panels[1].set(
            xscale="log",
            xlabel="KL of the paths (nats)",
            ylabel="ESS / N",
            xlim=(1e-3, 20),
            ylim=(0, 1.02),
        )
        panels[1].legend()
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
        curves = [*read(folder / "training.csv"), *read(folder / "natural.csv")]
        for panel, (problem, rows) in zip(
            panels[2:], group_rows(curves, "problem").items(), strict=False
        ):
            for method, some in group_rows(rows, "method").items():
                seeds = [[e["J"] for e in v] for v in group_rows(some, "seed").values()]
                spent = [e["trajectories"] for e in next(iter(group_rows(some, "seed").values()))]
                (line,) = panel.plot(spent, np.mean(seeds, axis=0), label=method[0])
                low, high = np.min(seeds, axis=0), np.max(seeds, axis=0)
                panel.fill_between(spent, low, high, color=line.get_color(), alpha=0.2, lw=0)
            panel.set(xlabel="trajectories", ylabel="J", title=problem[0])
            if problem[0] == "trap":
                panel.set_ylim(-0.8, -0.12)
            if problem[0] != "trap":  # its methods are those of the double well
                panel.legend(fontsize=5.5, loc="lower right")
        for name, panel in zip("abcdef", panels, strict=True):
            letter(panel, name)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("reach", "training", "natural", "draw"))
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "reuse")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--only", default="", help="methods whose names hold this")
    options = parser.parse_args()
    if options.part == "reach":
        write(
            options.out / "reach.csv",
            (
                r
                for part in (reach_small("trap"), reach_small("double well"), reach_lattice())
                for r in part
            ),
        )
    elif options.part == "training":
        write(options.out / "training.csv", training(options.iterations, options.only))
    elif options.part == "natural":
        write(options.out / "natural.csv", natural(options.iterations))
    else:
        text = "\n".join(table(options.out)) + "\n"
        (options.out / "table.txt").write_text(text)
        print(text, end="")
        save(draw(options.out), options.out / "reuse")


if __name__ == "__main__":
    main()
