"""A device that changes while it is trained: what going on costs, against starting again and
against not looking.

    python benchmarks/continual.py --processes 16     # measure 3 × 3 × 8 trainings; curves.csv.gz,
    table.md, figure python benchmarks/continual.py                    # table and figure again,
    from curves.csv.gz

4 × 5 resonators with leads on three corners, every coupling with a hidden gain and every detuning
with a hidden offset. All trainings of a seed are alike for the first 60 iterations of two
trajectories; then

    drift    every detuning begins to move at a rate of its own, 0.005 an iteration rms, for the
    rest of the time jump     one coupling falls to a fifth: the one that costs most
    task     the output moves to another corner, and after 60 more iterations back

J is that of the device at the time, measured with trajectories that are not counted.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from fluctua.runs.unknown import Device

SEEDS = (0, 1, 2)
CHANGE, BACK, END = 60, 120, 180
"""Iterations: of the change, of the task's return, of all."""

COUNT = 2
"""Measured trajectories an iteration, of every method."""

RATE, ERROR, DRIFT, LEFT = 0.05, 0.2, 0.005, 0.2
"""Adam's rate; hidden errors; drift of a detuning an iteration, rms; what is left of the
coupling that jumps.
"""

EVALUATED, LOOK_EVERY, RESTARTED = 64, 4, 40
"""Trajectories of a J that is looked at, and iterations between two; iterations between two
restarts in the drift.
"""

RECOVERED = 0.95
"""Of the best J: what counts as recovered."""

SCENARIOS = {
    "drift": "every detuning drifts",
    "jump": "a coupling falls to a fifth",
    "task": "output moved, and back",
}


class Way(NamedTuple):
    """How a training meets a change. options: of `SelfCalibrating`. ink: of its line. only: the one
    scenario that has it.
    """

    label: str
    knows: str
    ink: str
    options: dict[str, Any] = {}  # noqa: RUF012
    only: str = ""


WAYS = {
    "told": Way("every hidden number given at every time", "the exact device", "#999999"),
    "both": Way(
        "goes on: forget_after=20, renew=True",
        "structure",
        "#d55e00",
        {"forget_after": 20, "renew": True},
    ),
    "memory": Way("goes on: forget_after=20", "structure", "#e69f00", {"forget_after": 20}),
    "renew": Way("goes on: renew=True", "structure", "#cc79a7", {"renew": True}),
    "all": Way("goes on, forgets nothing", "structure", "#0072b2"),
    "never": Way("no calibration after the change", "structure", "#222222"),
    "fresh": Way(
        "settings from scratch, calibration goes on",
        "structure, time of the change",
        "#56b4e9",
        {"forget_after": 20, "renew": True},
    ),
    "kept": Way(
        "settings from scratch, then those of the first task",
        "structure, time of the change",
        "#882255",
        {"forget_after": 20, "renew": True},
        only="task",
    ),
    "restart": Way(
        "settings and calibration from scratch, time given",
        "structure, time of the change",
        "#009e73",
    ),
}


class Point(NamedTuple):
    """One row of curves.csv.gz: J on the device before an iteration, with its event."""

    scenario: str
    seed: int
    way: str
    iteration: int
    J: float
    event: str


class Lattice:
    """The device of one seed and scenario, with its state at every iteration."""

    def __init__(self, scenario: str, seed: int):
        leads = [tcmt.Lead(site) for site in (0, 19, 15)]
        network = tcmt.rectangular(4, 5, leads=leads)
        self.scenario, self.seed, self.network = scenario, seed, network
        self.tasks = [tcmt.transmission(network, to=to, horizon=10.0, dt=2.5e-3) for to in (1, 2)]
        self.models = [task.estimator("cpu", baseline="twin", threads=1) for task in self.tasks]
        kernels: list[Any] = [
            task.estimator("cpu", baseline="none", threads=1) for task in self.tasks
        ]
        self.runs = [kernel.run for kernel in kernels]
        rng = np.random.default_rng([5, seed])
        self.gain = 1 + ERROR * rng.standard_normal(len(network.bonds))
        self.offset = ERROR * rng.standard_normal(network.sites)
        self.rate = DRIFT * rng.standard_normal(network.sites)
        self.broken = 0
        self.now = 0
        self.start = {"omega": jnp.zeros(network.sites), "kappa": jnp.ones(len(network.bonds))}
        self.device = Device(self.tasks[0], self.parameters)  # its reward is not asked

    def output(self, iteration: int) -> int:
        """Which of the tasks is set."""
        return int(self.scenario == "task" and CHANGE <= iteration < BACK)

    def hidden(self, iteration: int) -> dict[str, np.ndarray]:
        """Gains and offsets at an iteration."""
        since, gain = max(0, iteration - CHANGE), self.gain.copy()
        if self.scenario == "jump" and iteration >= CHANGE:
            gain[self.broken] *= LEFT
        return {
            "gain": gain,
            "offset": self.offset + (self.scenario == "drift") * since * self.rate,
        }

    def parameters(self, theta: Any) -> dict[str, np.ndarray]:
        """What the device makes of its settings now."""
        hidden = self.hidden(self.now)
        omega, kappa = (np.asarray(theta[name], float) for name in ("omega", "kappa"))
        return {
            "omega": omega + hidden["offset"],
            "kappa": kappa * hidden["gain"],
            "chi": np.zeros(len(omega)),
        }

    def value(self, theta: Any, iteration: int) -> float:
        """J of the device at an iteration."""
        self.now = iteration
        run = self.runs[self.output(iteration)]
        return float(
            run(jax.random.key(2**31 - 1), self.parameters(theta), EVALUATED, scores=False).value
        )

    def break_worst(self, theta: Any) -> None:
        """Choose the coupling whose fall costs most at these settings."""
        values = []
        for bond in range(len(self.gain)):
            self.broken = bond
            values.append(self.value(theta, CHANGE))
        self.broken = int(np.argmin(values))

    def calibrated(self, **options: Any) -> fl.SelfCalibrating:
        """An estimator that knows the structure."""
        unknown = {"gain": jnp.ones(len(self.gain)), "offset": jnp.zeros(len(self.offset))}

        def model(call):
            return self.models[self.output(call)]

        options = {
            "samples": 0,
            "every": 20,
            "on_doubt": "continue",
            **options,
        }  # changes are the point here
        return fl.SelfCalibrating(model, self.device, settings, unknown, ERROR, **options)


def settings(theta: Any, phi: Any) -> Any:
    """The model's parameters: gains and offsets."""
    omega = theta["omega"] + phi["offset"]
    return {"omega": omega, "kappa": theta["kappa"] * phi["gain"], "chi": jnp.zeros_like(omega)}


BOUNDS = ({"omega": -3.0, "kappa": 0.0}, {"omega": 3.0, "kappa": 2.0})
RULE = optax.adam(RATE, b2=0.99)


def follow(
    lattice: Lattice, way: str, key: Any, resume: Any, belief: dict[str, np.ndarray]
) -> list[Point]:
    """One training from the change on; everything before is `resume` and `belief`."""
    points: list[Point] = []
    estimator = lattice.calibrated(**WAYS[way].options)
    estimator.restore(belief)
    if way == "never":
        # its trajectories are measured and rewarded, and teach nothing
        estimator.options = replace(estimator.options, measure_every=10**9)
    now = resume
    while now.iteration < END:
        i = now.iteration
        again = i == CHANGE or (lattice.scenario == "task" and i == BACK)
        again |= lattice.scenario == "drift" and (i - CHANGE) % RESTARTED == 0
        if way in ("fresh", "kept", "restart") and again:
            if way == "restart":
                estimator.restore({**nothing_known(estimator), "calls": np.asarray(i)})
            theta = resume.theta if way == "kept" and i == BACK else lattice.start
            now = now._replace(theta=theta, optimiser_state=RULE.init(theta))
        if way == "told":
            tell(estimator, lattice.hidden(i))
        lattice.now = i
        training = fl.Training(
            estimator, now.theta, RULE, trajectories=COUNT, bounds=BOUNDS, seed=lattice.seed
        )
        (record,) = fl.train(training, iterations=i + 1, start_from=now)
        if (i - CHANGE) % LOOK_EVERY == 0 or estimator.event:
            J = lattice.value(record.theta, i)
            points.append(Point(lattice.scenario, lattice.seed, way, i, J, estimator.event))
        now = record.after
    return [
        *points,
        Point(lattice.scenario, lattice.seed, way, END, lattice.value(now.theta, END - 1), ""),
    ]


def nothing_known(estimator: fl.SelfCalibrating) -> dict[str, np.ndarray]:
    """The state of one that has measured nothing."""
    size = estimator.belief.start.size
    return {
        "information": np.zeros((size, size)),
        "vector": np.zeros(size),
        "trajectories": np.zeros(()),
        "surprise": np.zeros(2),
    }


def tell(estimator: fl.SelfCalibrating, hidden: dict[str, np.ndarray]) -> None:
    """Put the truth in place of what was measured."""
    truth = np.concatenate([hidden["gain"], hidden["offset"]])
    size = truth.size
    estimator.belief = estimator.belief._replace(
        start=truth, information=np.zeros((size, size)), vector=np.zeros(size)
    )
    estimator.options = replace(estimator.options, measure_every=10**9)


def trainings(job: tuple[str, int, tuple[str, ...]]) -> list[Point]:
    """Some ways of one scenario and seed.

    What comes before the change is made by each process, to the same bits.
    """
    scenario, seed, ways = job
    warnings.simplefilter("ignore", RuntimeWarning)  # those that forget nothing say so
    lattice, key, points = Lattice(scenario, seed), jax.random.key(seed), []
    estimator = lattice.calibrated()
    training = fl.Training(
        estimator, lattice.start, RULE, trajectories=COUNT, bounds=BOUNDS, seed=seed
    )
    for record in fl.train(training, iterations=CHANGE):
        if record.iteration % LOOK_EVERY == 0:
            points.append(
                Point(
                    scenario, seed, "before", record.iteration, lattice.value(record.theta, 0), ""
                )
            )
    if scenario == "jump":
        lattice.break_worst(record.next_theta)
    for way in ways:
        points += follow(lattice, way, key, record.after, estimator.state)
        print(f"{scenario} {seed} {way}: J = {points[-1].J:.4f}", flush=True)
    return points


# ------------------------------------------------------------------------------------------ results


def curve(
    points: Sequence[Point], scenario: str, seed: int, way: str
) -> tuple[np.ndarray, np.ndarray]:
    """Iterations and J, on the common grid."""
    rows = [
        p
        for p in points
        if (p.scenario, p.seed, p.way) == (scenario, seed, way) and p.iteration % LOOK_EVERY == 0
    ]
    return np.array([p.iteration for p in rows]), np.array([p.J for p in rows])


def best(points: Sequence[Point], scenario: str, seed: int) -> Callable[[np.ndarray], np.ndarray]:
    """The highest J that anybody reached on the device with the same output: iterations -> J*."""

    def phase(i):
        return (scenario == "task") & (i >= CHANGE) & (i < BACK)

    own = [
        p
        for p in points
        if (p.scenario, p.seed) == (scenario, seed) and (scenario != "jump" or p.way != "before")
    ]
    top = {
        side: max((p.J for p in own if phase(p.iteration) == side), default=np.nan)
        for side in (False, True)
    }
    return lambda i: np.where(phase(i), top[True], top[False])


class Measures(NamedTuple):
    """Of one training after the change. recovered: measured trajectories, one for each change;
    None is never.
    """

    regret: float
    recovered: list[int | None]
    lowest: float
    end: float


def measures(points: Sequence[Point], scenario: str, seed: int, way: str) -> Measures:
    """Regret Σ(J* − J) over the trajectories after the change, and the rest as shares of J*."""
    i, J = curve(points, scenario, seed, way)
    top = best(points, scenario, seed)(np.minimum(i, END - 1))
    regret = float(np.sum((top - J)[:-1]) * LOOK_EVERY * COUNT)
    recovered: list[int | None] = []
    for begin, end in (
        ((CHANGE, BACK), (BACK, END + 1)) if scenario == "task" else ((CHANGE, END + 1),)
    ):
        there = np.flatnonzero((i >= begin) & (i < end) & (RECOVERED * top <= J))
        recovered.append(int(i[there[0]] - begin) * COUNT if there.size else None)
    share = J / top
    return Measures(regret, recovered, float(share.min()), float(share[-10:].mean()))


def table(points: Sequence[Point]) -> str:
    """One table a scenario."""
    lines = []
    for scenario, title in SCENARIOS.items():
        tops = ", ".join(
            f"{float(best(points, scenario, seed)(np.array(CHANGE))):.3f}" for seed in SEEDS
        )
        columns = (
            "training",
            "knows",
            f"regret in {COUNT * (END - CHANGE)} trajectories",
            f"trajectories until {RECOVERED:.0%} of J*",
            "lowest J / J*",
            f"J / J* in the last {10 * LOOK_EVERY} iterations",
            "events",
        )
        lines += [f"**{scenario}**: {title}. J* = {tops} (seeds 0, 1, 2)", ""]
        lines += [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
        for name, way in WAYS.items():
            if way.only not in ("", scenario):
                continue
            found = [measures(points, scenario, seed, name) for seed in SEEDS]
            first = [" and ".join("–" if r is None else str(r) for r in m.recovered) for m in found]
            events = [
                sum(
                    bool(p.event)
                    for p in points
                    if (p.scenario, p.seed, p.way) == (scenario, seed, name)
                )
                for seed in SEEDS
            ]
            lines.append(
                f"| {way.label} | {way.knows} | {', '.join(f'{m.regret:.1f}' for m in found)} | "
                f"{', '.join(first)} "
                f"| {', '.join(f'{m.lowest:.2f}' for m in found)} | "
                f"{', '.join(f'{m.end:.3f}' for m in found)} "
                f"| {', '.join(map(str, events))} |"
            )
        lines.append("")
    return "\n".join(lines)


DRAWN = ("never", "all", "restart", "fresh", "kept", "both", "told")


def draw(points: Sequence[Point]) -> Figure:
    """J on the device against measured trajectories: mean of three seeds, and all of them as a
    band.
    """
    keys: dict[str, Any] = {}
    with mpl.rc_context(LOOK):
        figure = Figure(figsize=(WIDTH, 3.3), layout="constrained")
        panels = figure.subplots(1, len(SCENARIOS), sharey=True)
        for axes, (scenario, title), name in zip(panels, SCENARIOS.items(), "abc", strict=True):
            before = [curve(points, scenario, seed, "before") for seed in SEEDS]
            for way in DRAWN:
                if WAYS[way].only not in ("", scenario):
                    continue
                runs = [curve(points, scenario, seed, way) for seed in SEEDS]
                each = np.array([np.append(b[1], r[1]) for b, r in zip(before, runs, strict=True)])
                spent = COUNT * np.append(before[0][0], runs[0][0])
                ink = WAYS[way].ink
                axes.fill_between(
                    spent, each.min(axis=0), each.max(axis=0), color=ink, alpha=0.15, lw=0
                )
                (keys[WAYS[way].label],) = axes.plot(
                    spent,
                    each.mean(axis=0),
                    color=ink,
                    lw=1.2,
                    ls=(0, (3, 3)) if way == "told" else "-",
                )
            for at in (CHANGE, BACK) if scenario == "task" else (CHANGE,):
                axes.axvline(COUNT * at, color="0.8", lw=0.8, zorder=0)
            axes.set(xlabel="measured trajectories", title=title, ylim=(0, 0.9))
            letter(axes, name)
        panels[0].set_ylabel("$J$ on the device")
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
    parser.add_argument(
        "--way", action="append", choices=WAYS, help="these only, the others stay; may be repeated"
    )
    parser.add_argument("--out", type=Path, default=Path("results/continual"))
    options = parser.parse_args()
    path = options.out / "curves.csv.gz"
    if options.processes:
        pairs = [(scenario, way) for scenario in SCENARIOS for way in options.way or WAYS]
        pairs = [(scenario, way) for scenario, way in pairs if WAYS[way].only in ("", scenario)]
        jobs = [
            (scenario, seed, tuple(ways[k : k + 2]))
            for scenario in SCENARIOS
            for ways in [[way for place, way in pairs if place == scenario]]
            for seed in SEEDS
            for k in range(0, len(ways), 2)
        ]
        kept = (
            [p for p in study.read(path, Point) if (p.scenario, p.way) not in pairs]
            if options.way
            else []
        )
        measured = study.measure_jobs(trainings, jobs, options.processes)
        study.write(
            path, list(dict.fromkeys(kept + [p for p in measured if p.way != "before" or not kept]))
        )
    points = study.read(path, Point)
    text = table(points)
    (options.out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    save(draw(points), options.out / "continual")


if __name__ == "__main__":
    main()
