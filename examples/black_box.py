"""Black-box search
================

SPSA, evolution strategies and CMA-ES beside the score, per measured trajectory.

A bead in a double well is pushed over the barrier: from −1 to 1 within a time 4, by a force that is
a line through 3 or 30 knots, each a parameter between −2 and 2. All methods see the same device,
have the same bounds, and may measure the same number of trajectories. Noise is independent, as on
hardware. SPSA, evolution strategies (ES) and CMA-ES know the returns alone. The score also reads
the states, and uses the exact drift and noise of the bead.

Run it with `pip install cma`, `python examples/black_box.py`; the gallery ran
`python examples/black_box.py --budget 1000 --seeds 3`. `--tune` repeats the choice of the settings
below, on seeds of its own.
"""

import argparse
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import fluctua as fl

try:
    import cma
except ImportError:
    raise SystemExit("This example needs the package cma: pip install cma") from None

HORIZON, SIGMA, LIMIT = 4.0, 0.4, 2.0
MARKS = 13  # parameters of a run whose J is shown


def force(theta, t):
    return jnp.interp(t, jnp.linspace(0.0, HORIZON, theta.size), theta)


process = fl.Process(
    drift=lambda theta, x, t: x - x**3 + force(theta, t),
    noise=lambda theta, x: SIGMA * jnp.ones(1),
)
arrive = fl.Objective(
    running=lambda theta, x, t: -0.05 * force(theta, t) ** 2,
    terminal=lambda theta, x: -((x[0] - 1) ** 2),
)
device = fl.simulator(process, -jnp.ones(1), jnp.linspace(0.0, HORIZON, 41), backend="jax")
estimator = fl.ppgt(device, arrive, baseline="optimal")  # needs no pilot


# %%
# `ask` returns a stack of parameters (K, P), to be measured with `repeats` trajectories each, and
# `tell` takes the results. The gradient of the first three goes to Adam; CMA-ES has its own rule.


class ScoreAscent:
    """Adam with the gradient of `fl.ppgt`, from `count` trajectories at one θ."""

    def __init__(self, parameters, seed, rate, count):
        self.theta = np.zeros(parameters)
        self.repeats = count
        self.optimiser = optax.adam(rate)
        self.state = self.optimiser.init(self.theta)

    def ask(self):
        return self.theta[None]

    def tell(self, estimates):
        self.ascend(estimates[0].gradient)

    def ascend(self, gradient):
        step, self.state = self.optimiser.update(-np.asarray(gradient), self.state)
        self.theta = np.clip(self.theta + np.asarray(step), -LIMIT, LIMIT)


class PairAscent(ScoreAscent):
    """Adam with slopes of J between θ ± width·direction, normal directions: antithetic ES."""

    def __init__(self, parameters, seed, rate, count, width):
        super().__init__(parameters, seed, rate, 1)
        self.pairs = count // 2
        self.width = width
        self.rng = np.random.default_rng(seed)

    def draw(self):
        return self.rng.normal(size=(self.pairs, self.theta.size))

    def ask(self):
        self.directions = self.draw()
        offsets = self.width * np.concatenate([self.directions, -self.directions])
        return np.clip(self.theta + offsets, -LIMIT, LIMIT)

    def tell(self, values):
        up, down = np.split(np.asarray(values), 2)
        slopes = (up - down) / (2 * self.width)
        self.ascend((slopes[:, None] * self.directions).mean(axis=0))


class SignAscent(PairAscent):
    """The same with random signs: SPSA."""

    def draw(self):
        return np.sign(super().draw())


class CovarianceAdaptation:
    """CMA-ES with the population of the package cma, `repeats` trajectories per candidate."""

    def __init__(self, parameters, seed, width, repeats):
        options = {"bounds": [-LIMIT, LIMIT], "seed": seed + 1, "verbose": -9}
        self.search = cma.CMAEvolutionStrategy(np.zeros(parameters), width, options)
        self.repeats = repeats

    @property
    def theta(self):
        return self.search.result.xfavorite  # the mean of the search, not its luckiest candidate

    def ask(self):
        self.candidates = self.search.ask()
        return np.array(self.candidates)

    def tell(self, values):
        self.search.tell(self.candidates, [-float(J) for J in values])


METHODS = {
    "score": ScoreAscent,
    "SPSA": SignAscent,
    "ES": PairAscent,
    "CMA-ES": CovarianceAdaptation,
}


# %%
# One loop for all of them. All seeds run side by side: their requests are one stack.


def search(name, parameters, setting, seeds, budget):
    """Parameters of every seed after 0 … `budget` trajectories, (marks, S, P)."""
    runs = [METHODS[name](parameters, seed, **setting) for seed in seeds]
    marks = np.linspace(0, budget, MARKS)
    course: list[list[np.ndarray]] = []
    results: Any
    spent = 0
    for step in itertools.count():
        stacks = [run.ask() for run in runs]
        each = len(stacks[0])
        repeats = runs[0].repeats
        while spent + each * repeats > marks[len(course)]:  # the next mark is within this step
            course.append([run.theta for run in runs])
            if len(course) == MARKS:
                return marks, np.array(course)
        stack = jnp.asarray(np.concatenate(stacks), jnp.float32)
        drawn = [np.random.SeedSequence((seed, step)).generate_state(each) for seed in seeds]
        noise = np.concatenate(drawn)  # independent for every θ, as on hardware
        if name == "score":
            keys = jax.vmap(jax.random.key)(noise)
            results = estimator.estimate_many(keys, stack, repeats)
        else:
            results = fl.evaluate_many(estimator, stack, count=repeats, seed=noise).J
        spent += each * repeats
        for k, run in enumerate(runs):
            run.tell(results[k * each : (k + 1) * each])


def evaluate_course(course):
    """J of all parameters, to 0.007, from trajectories that no method has seen. (marks, S)"""
    stack = jnp.asarray(course.reshape(-1, course.shape[-1]), jnp.float32)
    return fl.evaluate_many(estimator, stack, count=2000).J.reshape(course.shape[:2])


def find_best(parameters):
    """J that derivatives of the simulated path reach, with 40,000 trajectories: a reference."""
    exact = fl.reference.pathwise(arrive, device)
    rule = optax.adam(optax.cosine_decay_schedule(0.1, 200))
    training = fl.Training(
        exact, jnp.zeros(parameters), rule, trajectories=200, bounds=(-LIMIT, LIMIT)
    )
    *_, record = fl.train(training, iterations=200)
    return fl.evaluate(estimator, record.next_theta, count=20_000).J


PAIRS: dict[str, tuple[float, ...]] = {
    "rate": (0.05, 0.1, 0.2, 0.4),
    "count": (24, 48),
    "width": (0.2, 0.3, 0.4, 0.6),
}
CHOICES: dict[str, dict[str, tuple[float, ...]]] = {
    "score": {"rate": (0.1, 0.2, 0.4), "count": (12, 24, 48)},
    "SPSA": PAIRS,
    "ES": PAIRS,
    "CMA-ES": {"width": (0.3, 0.6, 1.0), "repeats": (4, 8, 16, 32)},
}
SETTINGS: dict[int, dict[str, dict[str, Any]]] = {
    3: {
        "score": {"rate": 0.4, "count": 24},
        "SPSA": {"rate": 0.2, "count": 48, "width": 0.3},
        "ES": {"rate": 0.2, "count": 48, "width": 0.3},
        "CMA-ES": {"width": 1.0, "repeats": 16},
    },
    30: {
        "score": {"rate": 0.1, "count": 24},
        "SPSA": {"rate": 0.05, "count": 24, "width": 0.6},
        "ES": {"rate": 0.05, "count": 24, "width": 0.6},
        "CMA-ES": {"width": 0.6, "repeats": 8},
    },
}
"""The best medians of `--tune` among `CHOICES`, to 0.01, for each number of parameters."""


def tune(parameters, budget):
    """Print the median of J at the end for every setting, over seeds that are not used again."""
    for name, choices in CHOICES.items():
        for values in itertools.product(*choices.values()):
            setting = dict(zip(choices, values, strict=True))
            _, course = search(name, parameters, setting, range(100, 105), budget)
            J = np.median(evaluate_course(course[-1:]))
            print(f"{parameters:>3}  {name:<7} {J:7.3f}  {setting}", flush=True)


def compare(parameters, budget, seeds, axes):
    """Print and draw J against trajectories: median and range over seeds."""
    best = find_best(parameters)
    print(f"\n{parameters} parameters, {budget:,} trajectories, {seeds} seeds: median [range]")
    print(f"{'':<9}{'J at the start':>16}{'half of budget':>26}{'end':>26}")
    for name, setting in SETTINGS[parameters].items():
        spent, course = search(name, parameters, setting, range(seeds), budget)
        J = evaluate_course(course)
        low, middle, high = J.min(axis=1), np.median(J, axis=1), J.max(axis=1)
        shown = [f"{middle[k]:.3f} [{low[k]:.3f}, {high[k]:.3f}]" for k in (MARKS // 2, -1)]
        print(f"{name:<9}{middle[0]:>16.3f}{shown[0]:>26}{shown[1]:>26}")
        (line,) = axes.plot(spent, middle, label=name)
        axes.fill_between(spent, low, high, color=line.get_color(), alpha=0.2, lw=0)
    print(f"best, by derivatives of the simulated path: {best:.3f}")
    axes.axhline(best, color="0.5", lw=0.8, ls=":")
    axes.set(xlabel="measured trajectories", title=f"{parameters} parameters")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=int, default=2000, help="trajectories per run")
    parser.add_argument("--seeds", type=int, default=9, help="runs per method")
    parser.add_argument("--tune", action="store_true")
    options = parser.parse_args()
    if options.tune:
        for parameters in SETTINGS:
            tune(parameters, options.budget)
    else:
        figure, both = plt.subplots(1, 2, figsize=(7, 2.8), sharey=True, layout="constrained")
        for parameters, axes in zip(SETTINGS, both, strict=True):
            compare(parameters, options.budget, options.seeds, axes)
        both[0].set_ylabel("J: median and range over seeds")
        both[1].legend(frameon=False)
        plt.show()
