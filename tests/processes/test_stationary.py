"""Long-run averages from one record, against the exact stationary law of the Euler chain."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua.processes.stationary import autocorrelation_time, stationary

OU = fl.Process(lambda th, x: -th["k"] * x, lambda th, x: th["s"] * jnp.ones(1))
THETA = {"k": jnp.array(1.5), "s": jnp.array(0.8)}
DT = 0.05
SQUARE = lambda th, x: x[0] ** 2


def stationary_square(theta):
    """E[X²] of X' = (1 − kΔ)X + s√Δ z."""
    return theta["s"] ** 2 * DT / (1 - (1 - theta["k"] * DT) ** 2)


def record(key, steps, traces=1):
    """From the stationary law on."""
    start = fl.Density(
        log_density=lambda th, x: jnp.zeros(()),
        sample=lambda key, th: jnp.sqrt(stationary_square(THETA)) * jax.random.normal(key, (1,)),
    )
    return fl.simulator(OU, start, DT * jnp.arange(steps + 1))(key, THETA, traces)


@pytest.mark.parametrize("traces", [1, 4])
def test_gradient_of_a_long_run_average(key, traces):
    answer = stationary(OU, SQUARE, THETA, record(key, 80_000 // traces, traces))
    exact = jax.grad(stationary_square)(THETA)
    for name in THETA:
        z = (answer.estimate.gradient[name] - exact[name]) / answer.estimate.stderr[name]
        assert abs(z) < 4, (name, z)
    assert abs(answer.estimate.value - stationary_square(THETA)) < 4 * answer.estimate.value_stderr
    assert "window" in repr(answer)


def test_a_short_window_keeps_its_share(key):
    """Of dJ/dk a window of w steps has the share 1 − (1 − kΔ)^{2w}, and the next window has what it says is missing."""
    w = 4
    answer = stationary(OU, SQUARE, THETA, record(key, 80_000), window=w * DT)
    whole, decay = jax.grad(stationary_square)(THETA)["k"], float(1 - THETA["k"] * DT)
    share = 1 - decay ** (2 * w)
    assert abs(answer.estimate.gradient["k"] - share * whole) < 4 * answer.estimate.stderr["k"]
    assert abs(answer.estimate.gradient["k"] - whole) > 8 * answer.estimate.stderr["k"]  # the test can see the window
    assert abs(answer.missing["k"] - share * (1 - share) * whole) < 4 * answer.missing_stderr["k"]


def test_errors_cover():
    z = []
    exact = jax.grad(stationary_square)(THETA)
    for seed in range(60):
        answer = stationary(OU, SQUARE, THETA, record(jax.random.key(seed), 8000), window=2.0)
        z.append([(answer.estimate.gradient[n] - exact[n]) / answer.estimate.stderr[n] for n in THETA])
    z = np.array(z)
    # the mean square of 60 Student variables of ten batches or more: 1 to within 4 of its own errors, √(2·1.5/60)
    assert np.all(np.abs(z.mean(axis=0)) < 4 / np.sqrt(60))
    assert np.all(np.mean(z**2, axis=0) < 1 + 4 * np.sqrt(3 / 60))
    assert np.all(np.mean(z**2, axis=0) > 1 - 4 * np.sqrt(3 / 60) / 1.5)


def test_autocorrelation_time_of_an_autoregression():
    rng, decay = np.random.default_rng(0), 0.9
    x = np.zeros(200_000)
    for n in range(1, x.size):
        x[n] = decay * x[n - 1] + rng.normal()
    exact = (1 + decay) / (1 - decay)
    assert abs(autocorrelation_time(x[None]) / exact - 1) < 4 * np.sqrt(
        2 * (2 * 5 + 1) * exact / x.size
    )  # Sokal's error


def test_a_reward_that_depends_on_theta_has_its_explicit_term(key):
    answer = stationary(OU, lambda th, x: th["k"] * x[0] ** 2, THETA, record(key, 40_000))
    exact = jax.grad(lambda th: th["k"] * stationary_square(th))(THETA)
    for name in THETA:
        assert abs(answer.estimate.gradient[name] - exact[name]) < 4 * answer.estimate.stderr[name]


def test_bad_records_are_named(key):
    short = record(key, 40)
    with pytest.raises(ValueError, match=r"longer than two windows|too short"):
        stationary(OU, SQUARE, THETA, short)
    with pytest.raises(ValueError, match=r"`window`.*soon"):
        stationary(OU, SQUARE, THETA, short, window="soon")
    with pytest.raises(ValueError, match=r"`window`.*0\.05.*0"):
        stationary(OU, SQUARE, THETA, short, window=0.0)
    with pytest.raises(ValueError, match=r"does not vary"):
        stationary(OU, lambda th, x: 0.0 * x[0], THETA, short)
    with pytest.raises(ValueError, match=r"uniform"):
        stationary(OU, SQUARE, THETA, fl.Trajectories(np.array([0.0, 1.0, 3.0]), np.ones((1, 3, 1))))
    with pytest.raises(ValueError, match=r"terminal"):
        stationary(OU, fl.Objective(terminal=SQUARE), THETA, short)
