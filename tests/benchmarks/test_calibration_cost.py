"""The cost of calibrating: what is timed, on a process with one state."""

import itertools

import jax.numpy as jnp
import numpy as np

import calibration_cost
import fluctua as fl

T = np.arange(11) * 0.1
PROCESS = fl.Process(lambda p, x: -p["k"] * x, lambda p, x: 0.3 * jnp.ones_like(x))
SIMULATOR = fl.simulator(PROCESS, jnp.array([1.0]), T)
MODEL = fl.ppgt(SIMULATOR, fl.Objective(running=lambda p, x: -(x[0] ** 2)), baseline=fl.Twin())


def test_iterations_with_and_without_a_measurement_are_timed():
    asked = []

    def device(key, theta, count):
        asked.append(count)
        return SIMULATOR(key, theta, count)

    estimator = fl.SelfCalibrating(
        MODEL,
        device,
        lambda theta, phi: {"k": theta["k"] + phi},
        jnp.array(0.0),
        0.2,
        measure_every=3,
        on_doubt="continue",
    )
    ticks = itertools.count()
    theta = {"k": jnp.array(1.0)}
    cost = calibration_cost.measure(estimator, theta, 2, 2, lambda: float(next(ticks)))
    assert cost == (1.0,) * 5  # one tick between the two looks at the clock
    assert asked == [2] * 6  # measured beforehand; nothing is measured while the clock runs
    # three batches are learnt from directly, and three by calls of which one of three measures
    assert estimator.calibration.trajectories == 12
    assert estimator.state["calls"] == 7


def test_the_first_call_compiles_and_does_not_count():
    times = iter([0.0, 9.0, 10.0, 12.0, 20.0, 21.0])
    assert calibration_cost.fastest(lambda: next(times), [lambda: None] * 3) == 1.0
