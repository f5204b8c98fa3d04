"""The comparison with other optimisers: its trap against exact work, and trajectories counted
as they are run.
"""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import study
from others import METHODS, SEEDS, Point, contest, follow, gradient, table
from others_tasks import AROUND, OFFSETS, RAMP, SETTINGS, Problem, mean_positions, trap, work

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def dragged():
    return trap()


def test_measured_work_has_the_exact_mean(dragged):
    u = np.linspace(-0.5, 0.4, SETTINGS)
    returns = np.array([dragged.measure(seed, u) for seed in range(3000)])
    error = returns.std(ddof=1) / np.sqrt(len(returns))
    assert abs(returns.mean() - dragged.value(u)) < 4 * error
    assert error < 0.15


@pytest.mark.parametrize("known", ["score", "twin"])
def test_gradients_of_the_work_are_exact(dragged, known):
    u = np.linspace(-0.3, 0.2, SETTINGS)
    centres = lambda u: RAMP + OFFSETS + AROUND * u
    mean = lambda u: -work(centres(u), mean_positions(centres(u)))
    slope, square, cost = dragged.estimators[known]()(jax.random.key(1), u, 4000)
    z = (slope - np.asarray(jax.jit(jax.grad(mean))(jnp.asarray(u)))) / np.sqrt(
        (square - slope**2) / 4000
    )
    assert np.abs(z).max() < 4
    assert cost == 4000


def test_best_protocol_is_near_that_of_continuous_time(dragged):
    """Schmiedl and Seifert: W = 5²/(1 + 2); Euler steps and held settings change it by 0.2 %."""
    assert dragged.best == pytest.approx(-25 / 3, rel=0.005)
    assert dragged.value(np.zeros(SETTINGS)) < dragged.best - 0.5


def hill(size=4, budget=400):
    """J = −|u − 0.3|², and a count of the trajectories that were asked for."""
    calls = itertools.count()
    value = lambda u: -float(np.sum((u - 0.3) ** 2))

    def measure(seed, u):
        next(calls)
        return value(u) + 0.01 * np.random.default_rng(seed).standard_normal()

    return Problem("hill", size, budget, measure, value, {}, 0.0), calls


@pytest.mark.parametrize(
    "name", [name for name, method in METHODS.items() if method.run is not gradient]
)
def test_methods_climb_and_count_what_they_run(name):
    if name == "cma":
        pytest.importorskip("cmaes")
    if name == "ppo":
        pytest.importorskip("stable_baselines3")
    problem, calls = hill(budget=1000)
    settings = METHODS[name].trials["lattice"][0]
    spent, _ = next(iter(METHODS[name].run(problem, 0, **settings)))
    assert spent == next(calls)
    points = follow(problem, name, settings, 0)
    assert points[-1].trajectories <= problem.budget
    assert problem.value(np.zeros(problem.size)) < points[-1].J


def test_every_method_has_as_many_trials():
    assert {len(trials) for method in METHODS.values() for trials in method.trials.values()} == {4}


def test_the_best_trial_is_run_on_other_seeds_and_read_back(tmp_path):
    problem, _ = hill(budget=200)
    problem = problem._replace(name="lattice")
    points = contest(problem, "es")
    ends = {p.settings: p.J for p in points if p.seed not in SEEDS}
    chosen = {p.settings for p in points if p.seed in SEEDS}
    assert chosen == {max(ends, key=ends.get)}
    assert len(ends) == 4
    study.write(tmp_path / "curves.csv.gz", points)
    again = study.read(tmp_path / "curves.csv.gz", Point)
    assert [p[:-1] for p in again] == [p[:-1] for p in points]
    np.testing.assert_allclose([p.J for p in again], [p.J for p in points], rtol=1e-5)
    text = table(points, [problem])
    assert "OpenES" in text
    assert "PPO" not in text


def test_half_of_the_gain_is_a_number_of_trajectories():
    rows = [
        Point("hill", "fd", json.dumps({"rate": 1}), seed, n, j)
        for seed in SEEDS
        for n, j in ((10, -0.3), (90, 0.0))
    ]
    problem, _ = hill()
    assert "| 90, 90, 90 |" in table(rows, [problem])
