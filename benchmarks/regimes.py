"""When does the score earn its keep? Direct part, correction and score alone at equal measured
trajectories.

    python benchmarks/regimes.py --processes 16     # measure; curves.csv.gz, table.md, the figure
    python benchmarks/regimes.py                    # table and figure again, from curves.csv.gz

Devices with hidden numbers, three seeds each:

    lattice   5 × 8 resonators, weak noise: the noise-free path is nearly the mean path
    well      a particle in a double well, noise that hops: reward is the share of time on the
              right, pushes cost; the noise-free path stays on the left, where the reward is flat
    skewed    the same, and the device has a force that the model lacks
    sweep     the double well with a quadratic reward, at noise from weak to strong

J is that of the device, measured with trajectories that are not counted.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import optax
from matplotlib.figure import Figure

import fluctua as fl
import study
from fluctua import tcmt
from fluctua.plot.style import LOOK, WIDTH, letter, save
from fluctua.runs.unknown import Device, EffectiveSettings

SEEDS = (0, 1, 2)
SIGMAS = (0.1, 0.2, 0.4, 0.8, 1.2)
STRONG = 0.8
PUSHES, HORIZON, DT = 8, 4.0, 0.02
SKEW = 0.5
"""Of the force s x² that the model of `skewed` lacks; that of the wells is x − x³."""


class Way(NamedTuple):
    """A way to the gradient. options: of `SelfCalibrating`; None is the score alone."""

    label: str
    knows: str
    ink: str
    options: dict[str, Any] | None


WAYS = {
    "direct": Way("direct part alone", "structure", "#0072b2", {"correction": "none"}),
    "simulated": Way(
        "with the correction of 16 simulated",
        "structure",
        "#56b4e9",
        {"correction": "simulated", "simulated": 16},
    ),
    "many": Way(
        "with the correction of 256 simulated",
        "structure",
        "#009e73",
        {"correction": "simulated", "simulated": 256},
    ),
    "measured": Way(
        "with the correction of the measured", "structure", "#cc79a7", {"correction": "measured"}
    ),
    "weighted": Way(
        "with the measured, weighted by the library",
        "structure",
        "#d55e00",
        {"correction": "weighted"},
    ),
    "score": Way("score alone, exact drift", "the exact drift", "#222222", None),
}


class Point(NamedTuple):
    """One row of curves.csv.gz: J on the device after some measured trajectories."""

    regime: str
    sigma: float
    seed: int
    way: str
    trajectories: int
    J: float


class Problem(NamedTuple):
    """A device. estimator: way -> estimator of ∇θJ. value: θ -> J. count: trajectories an
    iteration.
    """

    theta: Any
    estimator: Callable[[str], Any]
    value: Callable[[Any], float]
    bounds: tuple[Any, Any] | None
    rate: float
    count: int
    iterations: int


# -------------------------------------------------------------------------------------- the lattice


def lattice(seed: int) -> Problem:
    """5 × 8 resonators, T = 10, every gain and offset hidden and 20 % off; no Kerr effect."""
    task = tcmt.transmission(tcmt.rectangular(5, 8), horizon=10.0, dt=2.5e-3)
    network, rng = task.network, np.random.default_rng([6, seed])
    sites, bonds = network.sites, len(network.bonds)
    gain, offset = 1 + 0.2 * rng.standard_normal(bonds), 0.2 * rng.standard_normal(sites)

    def parameters(theta: Any) -> Any:
        """What the device makes of its settings."""
        numbers = {name: np.asarray(value, float) for name, value in theta.items()}
        return {**numbers, "omega": numbers["omega"] + offset, "kappa": numbers["kappa"] * gain}

    def twin():
        return task.estimator("cpu", baseline="twin", threads=1)

    run = task.estimator("cpu", baseline="none", threads=1).run  # type: ignore[attr-defined]

    def made(way: str) -> Any:
        options = WAYS[way].options
        if options is None:
            return OnDevice(task.estimator("cpu", baseline="carried", threads=1), parameters, gain)
        unknown = {"gain": jnp.ones(bonds), "offset": jnp.zeros(sites)}
        options = {"samples": 0, "every": 20, "on_doubt": "continue", **options}
        return fl.SelfCalibrating(
            twin(), Device(task, parameters), EffectiveSettings(), unknown, 0.2, **options
        )

    def value(theta):
        return float(run(jax.random.key(2**31 - 1), parameters(theta), 64, scores=False).value)

    start = {"omega": jnp.zeros(sites), "kappa": jnp.ones(bonds), "chi": jnp.zeros(sites)}
    bounds = [{"omega": 3.0 * s, "kappa": 1.0 + s, "chi": 0.0} for s in (-1, 1)]
    return Problem(start, made, value, tuple(bounds), 0.05, 4, 80)


class OnDevice:
    """An estimator in the device's own parameters as one in its settings: the score that knows
    everything.
    """

    def __init__(self, inner: Any, parameters: Callable[[Any], Any], gain: np.ndarray):
        self.inner, self.parameters, self.gain = inner, parameters, gain
        self.cost, self.state, self.restore = inner.cost, {}, lambda *_: None

    @property
    def pilot(self) -> int:
        """Trajectories that a call runs besides."""
        return int(self.inner.pilot)

    def __call__(self, key: Any, theta: Any, count: int) -> fl.Estimate:
        """Estimate ∇θJ."""
        estimate = self.inner(key, jax.tree.map(jnp.asarray, self.parameters(theta)), count)

        def pull(tree, power):
            return {**tree, "kappa": tree["kappa"] * self.gain**power}

        return estimate._replace(
            gradient=pull(estimate.gradient, 1),
            stderr=pull(estimate.stderr, 1),
            second_moment=pull(estimate.second_moment, 2),
        )


# -------------------------------------------------------------------------------------- double well


def _slot(t: Any) -> Any:
    return jnp.clip((t / HORIZON * PUSHES).astype(int), 0, PUSHES - 1)


def double_well(seed: int, sigma: float, *, quadratic: bool, skew: float) -> Problem:
    """dx = (x − x³ + push + tilt)dt + σdW from x = −1; eight pushes, their gains and the tilt
    hidden and 0.3 off.
    """
    rng = np.random.default_rng([7, seed])
    hidden = {
        "gain": 1 + 0.3 * rng.standard_normal(PUSHES),
        "tilt": np.asarray(0.3 * rng.standard_normal()),
    }

    def system(skew: float) -> tuple[fl.Process, Any]:
        def force(p, x, t):
            return x - x**3 + skew * x**2 + p["push"][_slot(t)] + p["tilt"]

        process = fl.Process(force, noise=lambda p, x: sigma * jnp.ones(1))
        return process, fl.simulator(
            process, jnp.array([-1.0]), jnp.linspace(0, HORIZON, round(HORIZON / DT) + 1)
        )

    worth = (lambda x: -((x - 1) ** 2)) if quadratic else (lambda x: jax.nn.sigmoid(6 * x))
    price = 1.0 if quadratic else 0.2
    objective = fl.Objective(
        running=lambda p, x, t: (worth(x[0]) - price * p["set"][_slot(t)] ** 2) / HORIZON
    )

    def effective(theta, phi):
        return {"push": phi["gain"] * theta, "set": theta, "tilt": phi["tilt"]}

    def of_device(theta):
        return effective(theta, jax.tree.map(jnp.asarray, hidden))

    _, simulator = system(0.0)
    true_process, true = system(skew)

    def device(key, theta, count):
        return true(key, of_device(theta), count)

    model = fl.ppgt(simulator, objective, baseline=fl.Twin())

    def made(way: str) -> Any:
        options = WAYS[way].options
        if options is None:
            return Pulled(
                fl.ppgt(true, objective, process=true_process, baseline="mean"), of_device
            )
        unknown = {"gain": jnp.ones(PUSHES), "tilt": jnp.zeros(())}
        options = {
            "samples": 0,
            "on_doubt": "continue",
            **options,
        }  # the model may lack what the device has
        return fl.SelfCalibrating(model, device, effective, unknown, 0.3, **options)

    def value(theta):
        return float(fl.evaluate(true, of_device(theta), objective=objective, count=4000).J)

    return Problem(jnp.zeros(PUSHES), made, value, (-3.0, 3.0), 0.05, 16, 96)


class Pulled:
    """An estimator in the parameters of a process as one in the settings."""

    pilot = 0

    def __init__(self, inner: Any, parameters: Callable[[Any], Any]):
        self.inner, self.parameters = inner, parameters
        self.cost, self.state, self.restore = lambda theta: 1, {}, lambda *_: None

    def __call__(self, key: Any, theta: Any, count: int) -> fl.Estimate:
        """Estimate ∇θJ."""
        p, pull = jax.vjp(self.parameters, theta)
        samples = self.inner.samples(key, p, count)
        return fl.reduce_samples(
            samples._replace(gradient=jax.vmap(lambda g: pull(g)[0])(samples.gradient))
        )


# ---------------------------------------------------------------------------------------- measuring


def make_problem(regime: str, sigma: float, seed: int) -> Problem:
    """The device of a regime."""
    if regime == "lattice":
        return lattice(seed)
    return double_well(
        seed, sigma, quadratic=regime == "sweep", skew=SKEW if regime == "skewed" else 0.0
    )


def trainings(job: tuple[str, float, int, tuple[str, ...]]) -> list[Point]:
    """Trainings of some ways on one device."""
    regime, sigma, seed, ways = job
    warnings.simplefilter("ignore", RuntimeWarning)  # `skewed` is warned of, as it should be
    problem, points = make_problem(regime, sigma, seed), []
    begin = problem.value(problem.theta)
    for way in ways:
        points.append(Point(regime, sigma, seed, way, 0, begin))
        for record in fl.train(
            fl.Training(
                problem.estimator(way),
                problem.theta,
                optax.adam(problem.rate, b2=0.99),
                trajectories=problem.count,
                bounds=problem.bounds,
                seed=seed,
            ),
            iterations=problem.iterations,
        ):
            last = record.iteration == problem.iterations - 1
            if last or (regime != "sweep" and record.iteration % 4 == 3):
                J = problem.value(record.next_theta)
                points.append(Point(regime, sigma, seed, way, record.trajectories, J))
        print(f"{regime} σ={sigma:g} seed {seed} {way}: J = {points[-1].J:.4f}", flush=True)
    return points


def jobs() -> list[tuple[str, float, int, tuple[str, ...]]]:
    """What is measured, the longest first. 256 simulated lattices an iteration take too long
    for what they tell.
    """
    few = [way for way in WAYS if way != "many"]
    made: list[Any] = [("lattice", 0.5, seed, (way,)) for way in few for seed in SEEDS]
    made += [(regime, STRONG, seed, tuple(WAYS)) for regime in ("well", "skewed") for seed in SEEDS]
    return made + [("sweep", sigma, seed, tuple(WAYS)) for sigma in SIGMAS for seed in SEEDS]


# ------------------------------------------------------------------------------------------ results


def find_runs(
    points: Sequence[Point], regime: str, way: str, sigma: float | None = None
) -> list[np.ndarray]:
    """(trajectories, J) of every seed. (·, 2)"""
    rows = [p for p in points if (p.regime, p.way) == (regime, way) and sigma in (None, p.sigma)]
    each = [np.array([(p.trajectories, p.J) for p in rows if p.seed == seed]) for seed in SEEDS]
    return [run for run in each if len(run)]


TITLES = {
    "lattice": "5 × 8 lattice, weak noise",
    "well": "double well, strong noise",
    "skewed": "the same, a force is not in the model",
}


def table(points: Sequence[Point]) -> str:
    """J at the end, three seeds, of every regime and of the sweep."""
    spent = {regime: int(find_runs(points, regime, "direct")[0][-1, 0]) for regime in TITLES}
    columns = [
        "gradient",
        "knows",
        *(f"{title}, {spent[regime]:,}" for regime, title in TITLES.items()),
    ]

    def ends(runs, digits):
        return ", ".join(f"{run[-1, 1]:.{digits}f}" for run in runs) or "–"

    lines = ["J on the device, seeds 0, 1, 2, and measured trajectories", ""]
    lines += [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    starts = [
        ends([run[:1] for run in find_runs(points, regime, "direct")], 3) for regime in TITLES
    ]
    lines.append(f"| start | | {' | '.join(starts)} |")
    for name, way in WAYS.items():
        cells = [ends(find_runs(points, regime, name), 3) for regime in TITLES]
        lines.append(f"| {way.label} | {way.knows} | {' | '.join(cells)} |")
    lines += ["", "Double well with a quadratic reward: J on the device, mean of three seeds", ""]
    lines += [
        f"| gradient | {' | '.join(f'σ = {s:g}' for s in SIGMAS)} |",
        "| --- " * (len(SIGMAS) + 1) + "|",
    ]
    for name, way in WAYS.items():
        cells = [
            f"{np.mean([run[-1, 1] for run in find_runs(points, 'sweep', name, s)]):.3f}"
            for s in SIGMAS
        ]
        lines.append(f"| {way.label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(points: Sequence[Point]) -> Figure:
    """Mean J of three seeds against measured trajectories, and what each way loses against the
    best of the sweep.
    """
    keys: dict[str, Any] = {}
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
        panels = figure.subplots(2, 2).ravel()
        for axes, (regime, title), name in zip(panels, TITLES.items(), "abc", strict=False):
            for way, (label, _, ink, _) in WAYS.items():
                runs = find_runs(points, regime, way)
                if not runs:
                    continue
                # seeds are other devices: their J differ by more than the ways do on one of them
                each = np.mean([run[:, 1] for run in runs], axis=0)
                (keys[label],) = axes.plot(runs[0][:, 0], each, color=ink, lw=1.2)
            axes.set(xlabel="measured trajectories", ylabel="$J$ on the device", title=title)
            letter(axes, name)
        mean = {
            way: np.array(
                [
                    np.mean([run[-1, 1] for run in find_runs(points, "sweep", way, s)])
                    for s in SIGMAS
                ]
            )
            for way in WAYS
        }
        best = np.max(list(mean.values()), axis=0)
        for way, values in mean.items():
            panels[3].plot(SIGMAS, best - values, "o-", ms=3, color=WAYS[way].ink, lw=1.2)
        panels[3].set(
            xscale="log",
            xlabel=r"noise $\sigma$",
            ylabel="$J$ below the best",
            title="double well, quadratic reward",
        )
        letter(panels[3], "d")
        figure.legend(keys.values(), keys.keys(), loc="outside lower center", ncols=2)
    return figure


def main() -> None:
    """Measure if asked; table and figure from curves.csv.gz."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--processes", type=int, default=0, help="measure anew, in so many processes"
    )
    parser.add_argument("--out", type=Path, default=Path("results/regimes"))
    options = parser.parse_args()
    path = options.out / "curves.csv.gz"
    if options.processes:
        study.write(path, study.measure_jobs(trainings, jobs(), options.processes))
    points = study.read(path, Point)
    text = table(points)
    (options.out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    save(draw(points), options.out / "regimes")


if __name__ == "__main__":
    main()
