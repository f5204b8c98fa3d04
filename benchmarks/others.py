"""Policy gradients beside PPO, evolution, SPSA and finite differences, at equal trajectories on two
tasks.

The device is run one trajectory at a time with settings u ∈ [−1, 1]^P between bounds that all
methods share, and nobody repeats its noise. Every method is tuned by four trials with a quarter of
the budget each, on a seed of their own, then run on three others.

    pip install 'fluctua[gym]' stable-baselines3 cmaes
    python benchmarks/others.py --task trap --task lattice    # two cores; tables and figure into
    results/others python benchmarks/others.py                               # the figure and the
    table again, from curves.csv.gz
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
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
from fluctua.plot.style import LOOK, WIDTH, letter, save
from others_tasks import Problem, lattice, trap

TUNING, SEEDS = 100, (0, 1, 2)
POINTS = 16
"""Times at which J is measured along a run, evenly in the logarithm of the trajectories; these
do not count.
"""


# ------------------------------------------------------------------------------------------ methods

Course = Iterator[tuple[int, np.ndarray]]
"""Trajectories spent so far, and the settings that the method would use now."""


def gradient(
    problem: Problem, seed: int, *, known: str, rule: str, rate: float, count: int
) -> Course:
    """Policy gradients: the paper's rule or Adam."""
    rules = {"paper": fl.optimisers.rms_ascent, "adam": optax.adam}
    ascent = optax.with_extra_args_support(rules[rule](rate))
    u, spent, key, estimator = (
        np.zeros(problem.size),
        0,
        jax.random.key(seed),
        problem.estimators[known](),
    )
    state = ascent.init(jnp.asarray(u))
    while True:
        key, now = jax.random.split(key)
        slope, square, cost = estimator(now, u, count)
        step, state = ascent.update(
            -jnp.asarray(slope), state, jnp.asarray(u), second_moment=jnp.asarray(square)
        )
        u, spent = np.clip(u + np.asarray(step), -1, 1), spent + cost
        yield spent, u


def _adam(rate: float, size: int) -> Callable[[np.ndarray], np.ndarray]:
    """Steps of Adam uphill."""
    rule, state = optax.adam(rate), [optax.adam(rate).init(jnp.zeros(size))]

    def step(slope: np.ndarray) -> np.ndarray:
        update, state[0] = rule.update(-jnp.asarray(slope), state[0])
        return np.asarray(update)

    return step


def evolution(problem: Problem, seed: int, *, sigma: float, rate: float, pairs: int) -> Course:
    """OpenES (Salimans et al. 2017): antithetic Gaussian perturbations, centred ranks, Adam."""
    rng, u, step, spent = (
        np.random.default_rng(seed),
        np.zeros(problem.size),
        _adam(rate, problem.size),
        0,
    )
    while True:
        half = rng.standard_normal((pairs, problem.size))
        noise = np.concatenate([half, -half])
        returns = np.array(
            [problem.measure(int(rng.integers(2**31)), u + sigma * z) for z in noise]
        )
        ranks = np.argsort(np.argsort(returns)) / (len(returns) - 1) - 0.5
        u, spent = (
            np.clip(u + step(ranks @ noise / (len(noise) * sigma)), -1, 1),
            spent + len(noise),
        )
        yield spent, u


def covariance(
    problem: Problem, seed: int, *, sigma: float, diagonal: bool, population: int
) -> Course:
    """CMA-ES, or with a diagonal covariance (package cmaes)."""
    from cmaes import CMA, SepCMA

    rng, bounds, spent = np.random.default_rng(seed), np.tile([-1.0, 1.0], (problem.size, 1)), 0
    options: Any = {"bounds": bounds, "seed": seed, "population_size": population}
    strategy = (SepCMA if diagonal else CMA)(np.zeros(problem.size), sigma, **options)
    while True:
        asked = [strategy.ask() for _ in range(population)]
        strategy.tell([(u, -problem.measure(int(rng.integers(2**31)), u)) for u in asked])
        spent += population
        yield spent, np.clip(strategy.mean, -1, 1)


def spsa(problem: Problem, seed: int, *, gain: float, width: float) -> Course:
    """SPSA with Spall's gains, one pair of trajectories an iteration."""
    rng, u, spent = np.random.default_rng(seed), np.zeros(problem.size), 0
    calm = 0.1 * problem.budget / 2
    for k in range(10**9):
        a, c = gain * ((1 + calm) / (k + 1 + calm)) ** 0.602, width / (k + 1) ** 0.101
        signs = rng.choice([-1.0, 1.0], problem.size)
        up, down = (
            problem.measure(int(rng.integers(2**31)), np.clip(u + s * c * signs, -1, 1))
            for s in (1, -1)
        )
        u, spent = np.clip(u + a * (up - down) / (2 * c) * signs, -1, 1), spent + 2
        yield spent, u


def differences(problem: Problem, seed: int, *, width: float, rate: float) -> Course:
    """Central differences of every setting, one trajectory on either side, Adam."""
    rng, u, step, spent = (
        np.random.default_rng(seed),
        np.zeros(problem.size),
        _adam(rate, problem.size),
        0,
    )
    while True:
        either = np.concatenate([width * np.eye(problem.size), -width * np.eye(problem.size)])
        returns = np.array(
            [problem.measure(int(rng.integers(2**31)), np.clip(u + d, -1, 1)) for d in either]
        )
        up, down = np.split(returns, 2)
        u, spent = np.clip(u + step((up - down) / (2 * width)), -1, 1), spent + len(returns)
        yield spent, u


def make_environment(problem: Problem) -> Any:
    """A `gymnasium.Env`: settings in, return out; an episode is one trajectory."""
    import gymnasium

    nothing = np.zeros(1, np.float32)

    class Settings(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
        action_space = gymnasium.spaces.Box(-1.0, 1.0, (problem.size,), np.float32)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return nothing, {}

        def step(self, action: np.ndarray) -> Any:
            key = jax.random.key(int(self.np_random.integers(2**31)))
            seed = int(jax.random.bits(key) >> 1)
            gain = problem.measure(seed, np.clip(np.asarray(action, np.float32), -1, 1))
            return nothing, float(gain), True, False, {}

    return Settings()


def ppo(problem: Problem, seed: int, *, batch: int, rate: float, log_std: float) -> Course:
    """PPO over the settings (Stable-Baselines3): every episode is one action."""
    import torch
    from stable_baselines3 import PPO

    torch.set_num_threads(1)
    agent = PPO(
        "MlpPolicy",
        make_environment(problem),
        seed=seed,
        n_steps=batch,
        batch_size=batch // 2,
        learning_rate=rate,
        device="cpu",
        policy_kwargs={"log_std_init": log_std, "net_arch": []},
    )
    for spent in range(batch, 10**9, batch):
        agent.learn(batch, reset_num_timesteps=False)
        yield (
            spent,
            np.clip(
                agent.predict(np.zeros(1, np.float32), deterministic=True)[0].astype(float), -1, 1
            ),
        )


# --------------------------------------------------------------------------------------- comparison


class Method(NamedTuple):
    """knows: besides the returns that everybody sees. trials: settings that are tried, by task.

    most: trajectories after which it is stopped though the budget has more.
    """

    label: str
    knows: str
    run: Callable[..., Course]
    trials: dict[str, list[dict[str, Any]]]
    ink: str
    most: int = 10**9


def _grid(**values: list[Any]) -> list[dict[str, Any]]:
    """Every combination of two options, the others fixed."""
    names, grids = (
        list(values),
        np.meshgrid(*(np.arange(len(v)) for v in values.values()), indexing="ij"),
    )
    return [
        {n: values[n][g.flat[k]] for n, g in zip(names, grids, strict=True)}
        for k in range(grids[0].size)
    ]


def _both(trials: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {"trap": trials, "lattice": trials}


METHODS = {
    "ppgt-twin": Method(
        "policy gradient, exact model as twin, Adam",
        "the exact model",
        gradient,
        _both(_grid(known=["twin"], rule=["adam"], rate=[0.02, 0.05], count=[16, 64])),
        "#332288",
    ),
    "ppgt-calibrated": Method(
        "policy gradient, twin calibrated from the same trajectories, Adam",
        "the structure",
        gradient,
        _both(_grid(known=["calibrated"], rule=["adam"], rate=[0.02, 0.05], count=[8, 16])),
        "#88ccee",
        480,
    ),
    "ppgt": Method(
        "policy gradient, score only, the paper's rule",
        "the exact drift, in the score",
        gradient,
        _both(_grid(known=["score"], rule=["paper"], rate=[0.05, 0.2], count=[50, 200])),
        "#117733",
    ),
    "cma": Method(
        "CMA-ES",
        "nothing",
        covariance,
        _both(_grid(sigma=[0.1, 0.3], diagonal=[False, True], population=[20])),
        "#882255",
    ),
    "es": Method(
        "OpenES",
        "nothing",
        evolution,
        _both(_grid(sigma=[0.05, 0.2], rate=[0.02, 0.05], pairs=[16])),
        "#cc6677",
    ),
    "ppo": Method(
        "PPO over the settings",
        "nothing",
        ppo,
        _both(_grid(batch=[128], rate=[3e-3, 3e-2], log_std=[-2.5, -1.5])),
        "#ddaa33",
    ),
    "spsa": Method(
        "SPSA",
        "nothing",
        spsa,
        {
            "trap": _grid(gain=[0.002, 0.0005], width=[0.1, 0.3]),
            "lattice": _grid(gain=[0.1, 0.02], width=[0.05, 0.15]),
        },
        "#44aa99",
    ),
    "fd": Method(
        "finite differences, Adam",
        "nothing",
        differences,
        _both(_grid(width=[0.1, 0.3], rate=[0.05, 0.15])),
        "0.5",
    ),
}
"""Four trials each."""


class Point(NamedTuple):
    """One row of curves.csv.gz: J of a run at some number of trajectories."""

    task: str
    method: str
    settings: str
    seed: int
    trajectories: int
    J: float


def follow(problem: Problem, name: str, settings: dict[str, Any], seed: int) -> list[Point]:
    """J along one run; no iteration is started that would exceed the budget."""
    due = list(np.geomspace(20, problem.budget, POINTS))

    def row(spent, u):
        return Point(problem.name, name, json.dumps(settings), seed, spent, problem.value(u))

    last, points = (0, np.zeros(problem.size)), []
    for spent, u in METHODS[name].run(problem, seed, **settings):
        if spent > min(problem.budget, METHODS[name].most):
            break
        last = spent, u
        if spent >= due[0]:
            points.append(row(spent, u))
            due = [d for d in due if d > spent] or [np.inf]
    return points if points and points[-1].trajectories == last[0] else [*points, row(*last)]


def contest(problem: Problem, name: str) -> list[Point]:
    """All trials on the seed for tuning, which share one budget, then the best of them on the
    others.
    """
    trials = METHODS[name].trials[problem.name]
    short = problem._replace(budget=problem.budget // len(trials))
    tuned = [follow(short, name, settings, TUNING) for settings in trials]
    chosen = trials[int(np.argmax([points[-1].J for points in tuned]))]
    return [point for points in tuned for point in points] + [
        point for seed in SEEDS for point in follow(problem, name, chosen, seed)
    ]


def find_curves(points: list[Point], task: str, name: str) -> list[np.ndarray]:
    """(spent, J) of every seed that is not the tuning's. (·, 2)"""
    rows = [p for p in points if (p.task, p.method) == (task, name)]
    return [np.array([(p.trajectories, p.J) for p in rows if p.seed == seed]) for seed in SEEDS]


def table(points: list[Point], problems: list[Problem]) -> str:
    """J at the end and trajectories until half of the best gain, by method and task."""
    lines = []
    for problem in problems:
        present = [
            name
            for name in METHODS
            if any((p.task, p.method) == (problem.name, name) for p in points)
        ]
        if not present:
            continue
        start, ends = problem.value(np.zeros(problem.size)), {}
        for name in present:
            ends[name] = [curve[-1, 1] for curve in find_curves(points, problem.name, name)]
        top = max(np.mean(v) for v in ends.values()) if problem.best is None else problem.best
        half = start + 0.5 * (top - start)
        best = f", {top:.4g} at best" if problem.best is not None else ""
        counts = f"{problem.size} settings, {problem.budget:,} trajectories"
        lines += [
            f"{problem.name}: {counts}, J = {start:.4g} at the start{best}",
            "",
            "| method | knows | J at the end, three seeds | trajectories until half of the gain | "
            "tuned to |",
            "| --- | --- | --- | --- | --- |",
        ]
        for name in present:
            first = [
                _find_reached(curve, half) for curve in find_curves(points, problem.name, name)
            ]
            settings = next(
                p.settings
                for p in points
                if (p.task, p.method, p.seed) == (problem.name, name, SEEDS[0])
            )
            numbers = ", ".join(
                f"{k} {v}" for k, v in json.loads(settings).items() if k not in ("known", "rule")
            )
            lines.append(
                f"| {METHODS[name].label} | {METHODS[name].knows} | "
                f"{', '.join(f'{v:.4g}' for v in ends[name])} "
                f"| {', '.join(first)} | {numbers} |"
            )
        lines.append("")
    return "\n".join(lines)


def _find_reached(curve: np.ndarray, level: float) -> str:
    beyond = np.flatnonzero(curve[:, 1] >= level)
    return f"{int(curve[beyond[0], 0]):,}" if beyond.size else "–"


def draw(points: list[Point], problems: list[Problem]) -> Figure:
    """J against trajectories: the mean of three seeds, and all of them as a band."""
    keys: dict[str, Any] = {}
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(WIDTH, 3.5), layout="constrained")
        for axes, problem, name in zip(
            figure.subplots(1, len(problems)), problems, "ab", strict=False
        ):
            for method in METHODS:
                runs = find_curves(points, problem.name, method)
                if not all(len(run) for run in runs):
                    continue
                spent = np.array(runs[0][:, 0])
                each = np.array(
                    [np.interp(np.log(spent), np.log(run[:, 0]), run[:, 1]) for run in runs]
                )
                ink = METHODS[method].ink
                axes.fill_between(
                    spent, each.min(axis=0), each.max(axis=0), color=ink, alpha=0.2, lw=0
                )
                (keys[METHODS[method].label],) = axes.plot(spent, each.mean(axis=0), color=ink)
            start = problem.value(np.zeros(problem.size))
            for level, text in ((start, "start"), (problem.best, "best")):
                if level is not None:
                    axes.axhline(level, color="0.7", lw=0.6, ls=(0, (4, 3)))
                    axes.text(20, level, text, fontsize=7, color="0.5", va="bottom")
            if problem.best is not None:
                axes.set_ylim(
                    start - 1.2 * (problem.best - start),
                    problem.best + 0.15 * (problem.best - start),
                )
            axes.set(xscale="log", xlabel="trajectories", title=TITLES[problem.name])
            letter(axes, name)
        figure.legend(keys.values(), keys.keys(), loc="outside lower center", ncols=2)
    return figure


TITLES = {
    "trap": "trap protocol, 20 settings: $J=-$ mean work",
    "lattice": "5 × 8 lattice, 147 settings: power transmitted",
}
PROBLEMS = {"trap": trap, "lattice": lattice}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--task",
        action="append",
        choices=PROBLEMS,
        default=[],
        help="measured anew; may be repeated",
    )
    parser.add_argument(
        "--method", action="append", choices=METHODS, default=[], help="these only; may be repeated"
    )
    parser.add_argument("--out", type=Path, default=Path("results/others"))
    options = parser.parse_args()
    path = options.out / "curves.csv.gz"
    for task in options.task:
        problem = PROBLEMS[task]()
        for name in options.method or METHODS:
            started = time.perf_counter()
            measured = contest(problem, name)
            kept = study.read(path, Point) if path.exists() else []
            study.write(path, [p for p in kept if (p.task, p.method) != (task, name)] + measured)
            print(
                f"{task} {name}: J = {measured[-1].J:.4g}, {time.perf_counter() - started:.0f} s",
                flush=True,
            )
    points, problems = study.read(path, Point), [make() for make in PROBLEMS.values()]
    text = table(points, problems)
    (options.out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    for drawn in save(draw(points, problems), options.out / "others"):
        print(drawn)


if __name__ == "__main__":
    main()
