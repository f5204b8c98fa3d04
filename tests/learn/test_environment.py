"""A device as a Gymnasium environment: Gymnasium's own checks, and returns with the mean of the
device's.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl

X0, STEPS = 0.7, 40
TIMES = np.linspace(0, 1, STEPS + 1)
PROCESS = fl.Process(
    drift=lambda th, x: -th["k"] * x + th["force"], noise=lambda th, x: 0.4 * jnp.ones(1)
)
OBJECTIVE = fl.Objective(
    running=lambda th, x: x[0] - 0.1 * th["force"][0] ** 2, terminal=lambda th, x: 2 * x[0]
)
SIMULATOR = fl.simulator(PROCESS, jnp.array([X0]), TIMES)
LOW = {"k": jnp.array([0.0]), "force": jnp.array([-2.0])}
HIGH = {"k": jnp.array([2.0]), "force": jnp.array([4.0])}


def returned(key, theta):
    x = SIMULATOR(key, theta, 1).x[0, :, 0]
    return jnp.mean(x[:-1]) - 0.1 * theta["force"][0] ** 2 + 2 * x[-1]


def expected(k, force):
    """Mean return of the Euler chain: m' = m + (−km + f)Δt."""
    mean = [X0]
    for _ in range(STEPS):
        mean.append(mean[-1] + (-k * mean[-1] + force) / STEPS)
    return np.mean(mean[:-1]) - 0.1 * force**2 + 2 * mean[-1]


def settings():
    return fl.settings_environment(returned, LOW, HIGH)


def feedback(every=5):
    return fl.feedback_environment(SIMULATOR, OBJECTIVE, LOW, HIGH, every=every)


def test_without_gymnasium_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ImportError, match=r"fluctua\[gym\]"):
        settings()


def test_bounds_and_intervals_that_do_not_fit_are_refused():
    pytest.importorskip("gymnasium")
    with pytest.raises(ValueError, match="`low` must lie below `high`"):
        fl.settings_environment(returned, HIGH, LOW)
    with pytest.raises(ValueError, match="`low` must lie below `high`"):
        fl.settings_environment(returned, {"k": LOW["k"]}, HIGH)
    with pytest.raises(ValueError, match=f"divide the {STEPS} steps.*got 7"):
        feedback(every=7)


@pytest.mark.parametrize("make", [settings, feedback])
def test_gymnasium_accepts_the_environment(make):
    checker = pytest.importorskip("gymnasium.utils.env_checker")
    checker.check_env(make(), skip_render_check=True)


@pytest.mark.parametrize(("make", "length"), [(settings, 1), (feedback, STEPS // 5)])
def test_returns_have_the_mean_of_the_device(make, length):
    """A constant action u = (0.5, −0.2) is force = 2.5, k = 0.8: leaves are in the order of the
    pytree.
    """
    pytest.importorskip("gymnasium")
    env, totals = make(), []
    for episode in range(300):
        env.reset(seed=episode)
        gains, over = [], False
        while not over:
            _, gain, over, _, _ = env.step(np.array([0.5, -0.2], np.float32))
            gains.append(gain)
        assert len(gains) == length
        totals.append(sum(gains))
    error = np.std(totals, ddof=1) / np.sqrt(len(totals))
    assert abs(np.mean(totals) - expected(0.8, 2.5)) < 4 * error
    assert error < 0.05


def test_one_key_is_one_trajectory():
    """Feedback that never changes its mind runs the trajectories of the simulator, number by
    number.
    """
    pytest.importorskip("gymnasium")
    env = feedback(every=8)
    seen = [env.reset(seed=3)[0]] + [env.step(np.zeros(2, np.float32))[0] for _ in range(5)]
    seed = int(np.random.default_rng(np.random.PCG64(np.random.SeedSequence(3))).integers(2**31))
    path = SIMULATOR(jax.random.key(seed), {"k": jnp.array([1.0]), "force": jnp.array([1.0])}, 1).x[
        0, ::8, 0
    ]
    np.testing.assert_allclose(np.array(seen)[:, 0], path, rtol=1e-5)
    np.testing.assert_allclose(np.array(seen)[:, 1], np.linspace(0, 1, 6), rtol=1e-6)
