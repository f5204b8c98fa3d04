"""Rounding of simulated steps: a warning where it moves an exact answer, silence where not.

A trap far from zero, X' = X + k(c − X)Δt + κz, has ∂E[X_T]/∂c = 1 − (1 − kΔt)ⁿ wherever it is. In
float32 its states lie on a grid of width u, which adds u²/12 to the variance κ² of a kick, and the
score divides by κ²: the gradient is 1 + (u/κ)²/12 times too large as long as u is below two kicks.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl

STEPS = 100
DT = 0.02
EXACT = 1 - (1 - DT) ** STEPS
COUNT = 4000


def estimate_far(offset, over, dtype=jnp.float32):
    """∂E[X_T]/∂c of a trap at a power of two, where u is `over` kicks; in units of the exact."""
    kick = np.spacing(np.float32(1.01 * offset)) / over
    trap = fl.Process(
        lambda theta, x: theta["c"] - x, lambda theta, x: jnp.full(1, kick / np.sqrt(DT), x.dtype)
    )
    centre = 1.5 * offset
    reward = fl.Objective(terminal=lambda theta, x: (x[0] - centre) / kick)
    t = np.arange(STEPS + 1) * DT
    simulator = fl.simulator(trap, jnp.full(1, centre, dtype), t, backend="jax")
    estimator = fl.ppgt(simulator, reward, baseline="none")
    estimate = estimator(jax.random.key(0), {"c": jnp.array(centre, dtype)}, COUNT)
    unit = EXACT / kick
    return float(estimate.gradient["c"]) / unit, float(estimate.stderr["c"]) / unit


@pytest.mark.parametrize("over", [0.02, 0.2])
def test_steps_that_are_held_are_right_and_silent(over):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ratio, error = estimate_far(2.0**14, over)
    assert abs(ratio - 1) < 4 * error  # the bias (u/κ)²/12 is 0.3 % at most, its error 3 %
    assert error < 0.05


def test_steps_that_are_lost_warn_and_are_wrong():
    with pytest.warns(
        RuntimeWarning, match=r"near 24576 .* float32 are 2.0e-03 apart, 2 times the kick"
    ):
        ratio, error = estimate_far(2.0**14, 2.0)
    assert abs(ratio - (1 + 2.0**2 / 12)) < 4 * error
    assert ratio - 1 > 5 * error


def test_double_precision_holds_them():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ratio, error = estimate_far(2.0**14, 2.0, jnp.float64)
    assert abs(ratio - 1) < 4 * error


def test_a_warning_points_at_the_caller_and_comes_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trap = fl.Process(lambda theta, x: -theta["k"] * x, lambda theta, x: 0 * x + 1e-3)
        simulator = fl.simulator(trap, jnp.full(1, 1e4, jnp.float32), np.linspace(0, 1, 11))
        for seed in range(3):
            simulator(jax.random.key(seed), {"k": jnp.zeros((), jnp.float32)}, 2)
    about = [one for one in caught if "lost in rounding" in str(one.message)]
    assert [one.filename for one in about] == [__file__]


def move_without_noise(speed):
    """The distance of ten thousand steps of a component without noise, from 4,096 on."""
    cart = fl.Process(
        lambda theta, x: jnp.stack([0 * x[0] + speed, -theta["k"] * x[1]]),
        lambda theta, x: jnp.array([0.0, 1.0], x.dtype),
        noiseless=(0,),
    )
    t = np.arange(10_001) * 1e-3
    simulator = fl.simulator(cart, jnp.array([4096.0, 0.0], jnp.float32), t)
    x = simulator(jax.random.key(0), {"k": jnp.ones((), jnp.float32)}, 2).x
    return (float(x[0, -1, 0]) - 4096) / (10 * speed)


def test_components_without_noise_lose_their_drift():
    """At 4,096 numbers are 4.9e-4 apart: a step of 2e-4 is lost whole, one of 0.05 is not."""
    with pytest.warns(RuntimeWarning, match="2.4 times the drift of one step"):
        assert move_without_noise(0.2) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert move_without_noise(50.0) == pytest.approx(1, abs=0.005)


def test_times_that_fall_together_are_named():
    driven = fl.Process(
        lambda theta, x, t: theta["a"] * jnp.sin(t) - x, lambda theta, x: jnp.ones(1)
    )
    steady = fl.Process(lambda theta, x: theta["a"] - x, lambda theta, x: jnp.ones(1))
    late = 1e5 + np.arange(101) * 0.01  # float64; 0.0078 apart in float32

    def run(process):
        simulator = fl.simulator(process, jnp.zeros(1), late)
        simulator(jax.random.key(0), {"a": jnp.array(1.0)}, 2)

    with jax.enable_x64(False):
        with pytest.warns(RuntimeWarning, match="the drift depends on time"):
            run(driven)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(steady)
