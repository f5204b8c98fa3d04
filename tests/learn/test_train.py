"""Training: it climbs, it stays in its box, and it repeats itself."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluctua as fl
from fluctua.learn.training import Bounds

PROCESS = fl.Process(lambda th, x: th["f"] - x, lambda th, x: 0.3 * jnp.ones_like(x))
OBJECTIVE = fl.Objective(terminal=lambda th, x: -((x[0] - 1) ** 2))
RUN = fl.simulator(PROCESS, jnp.zeros(1), jnp.linspace(0, 2, 21))
ESTIMATOR = fl.ppgt(RUN, OBJECTIVE, baseline="optimal")
THETA = {"f": jnp.zeros(1)}


def run(iterations=60, start_from=None, trajectories=100, **options):
    training = fl.Training(ESTIMATOR, THETA, optax.adam(0.1), trajectories=trajectories, **options)
    return fl.train(training, iterations, start_from=start_from)


def test_it_reaches_the_optimum():
    last = list(run())[-1]
    gain = 1 - (1 - 0.1) ** 20  # E[X_T] = f·gain in the Euler scheme
    assert last.next_theta["f"][0] == pytest.approx(1 / gain, abs=0.1)
    assert last.trajectories == 6000


def test_resumed_training_repeats_itself_exactly():
    whole = list(run(iterations=8))
    tail = list(run(iterations=8, start_from=whole[4]))
    assert [r.iteration for r in tail] == [5, 6, 7]
    for a, b in zip(whole[5:], tail, strict=True):
        np.testing.assert_array_equal(a.next_theta["f"], b.next_theta["f"])
        assert a.trajectories == b.trajectories


def test_bounds_hold():
    inside = [r.theta["f"][0] for r in run(bounds=(0.0, 0.3), iterations=10)]
    assert min(inside) >= 0
    assert max(inside) == pytest.approx(0.3)


def test_a_start_outside_of_its_bounds_is_refused():
    theta = {"k": jnp.array([1.0, -0.3]), "m": jnp.array(0.5)}
    with pytest.raises(ValueError, match=r"k\[1\] is -0\.3, outside of 0\.1 … 2"):
        fl.Training(lambda key, theta, count: None, theta, optax.sgd(0.1), 10, bounds=(0.1, 2.0))
    at_the_bound = jax.tree.map(lambda leaf: jnp.full_like(leaf, 0.1), theta)
    fl.Training(lambda key, theta, count: None, at_the_bound, optax.sgd(0.1), 10, bounds=(0.1, 2.0))


def test_bounds_of_some_parameters_name_those_of_theta():
    with pytest.raises(ValueError, match=r"structure of theta, f, or be one number.*got k\."):
        run(bounds=({"k": 0.1}, {"k": 0.3}), iterations=1)


def test_an_estimator_is_no_training():
    with pytest.raises(TypeError, match=r"expected fluctua\.Training\(.*got PPGT"):
        fl.train(ESTIMATOR, iterations=1)
    with pytest.raises(TypeError, match=r"expected fluctua\.Training\(.*got PPGT"):
        fl.run(ESTIMATOR, iterations=1, folder="absent")


def test_bounds_take_prefixes():
    theta = {"a": jnp.array([-1.0, 5.0]), "b": {"c": jnp.asarray(9.0)}}
    got = Bounds({"a": 0.0, "b": -1.0}, {"a": jnp.array([1.0, 2.0]), "b": 3.0}).project(theta)
    np.testing.assert_array_equal(got["a"], [0, 2])
    assert got["b"]["c"] == 3


def test_trajectories_may_follow_a_schedule_and_the_caller_stops():
    records = list(
        itertools.islice(
            run(trajectories=lambda iteration: 10 * (iteration + 1), iterations=None), 3
        )
    )
    assert [r.trajectories for r in records] == [10, 30, 60]


def test_optimisers_that_ask_get_the_second_moment():
    def update(updates, state, params=None, *, second_moment, value, **_):
        zeros = jax.tree.map(jnp.zeros_like, updates)
        return zeros, (second_moment, value)

    asking = optax.GradientTransformationExtraArgs(lambda params: (), update)
    training = fl.Training(ESTIMATOR, THETA, asking, trajectories=50)
    record = next(fl.train(training, iterations=1))
    second_moment, value = record.optimiser_state
    np.testing.assert_array_equal(second_moment["f"], record.estimate.second_moment["f"])
    assert value == -record.estimate.value


def test_a_gradient_that_is_not_finite_stops_with_the_records_intact():
    def failing(key, theta, count):
        estimate = ESTIMATOR(key, theta, count)
        bad = {"f": jnp.full(1, jnp.nan)} if theta["f"][0] != 0 else estimate.gradient
        return estimate._replace(gradient=bad)

    records = fl.train(fl.Training(failing, THETA, optax.sgd(0.1), trajectories=10))
    next(records)
    with pytest.raises(
        FloatingPointError, match="gradient of iteration 1 is not finite.*start_from=record"
    ):
        next(records)


def test_negative_iterations():
    with pytest.raises(ValueError, match="must not be negative; got -1"):
        run(iterations=-1)


def test_a_bare_function_trains_and_a_half_estimator_is_refused(key):
    exact = lambda key, theta, count: fl.Estimate(
        -2 * theta, theta * 0, theta**2, -(theta**2), theta * 0, count
    )
    training = fl.Training(exact, jnp.array(1.0), optax.sgd(0.25), trajectories=7)
    records = list(fl.train(training, iterations=3))
    assert records[-1].trajectories == 21
    assert float(records[-1].next_theta) == pytest.approx(0.125)

    class Half:
        def cost(self, theta):
            return 3

        def __call__(self, key, theta, count):
            return exact(key, theta, count)

    with pytest.raises(TypeError, match=r"Half has 'cost' and lacks 'pilot', 'restore', 'state'"):
        fl.Training(Half(), jnp.array(1.0), optax.sgd(0.25), trajectories=7)


def test_the_pilot_of_a_time_only_baseline_is_counted(key):
    process = fl.Process(lambda k, x: -k * x, lambda k, x: jnp.ones_like(x))
    run = fl.simulator(process, jnp.ones(1), jnp.linspace(0, 1, 3))
    estimator = fl.ppgt(
        run, fl.Objective(terminal=lambda k, x: x[0]), baseline=fl.baselines.time_only(pilot=16)
    )
    training = fl.Training(estimator, jnp.array(1.0), optax.sgd(0.1), trajectories=5)
    records = list(fl.train(training, iterations=2))
    assert records[-1].trajectories == 2 * (5 + 16)
