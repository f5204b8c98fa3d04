"""What a calibrated instrument cannot have measured: dead, frozen, random; and that honest data
pass.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua.core.trajectories import Trajectories
from fluctua.insitu.instrument.guard import ResidualGuard
from fluctua.insitu.instrument.repeats import Repeats

SIGMA = np.array([0.3, 0.1])
T = np.linspace(0, 2, 101)
PROCESS = fl.Process(
    lambda theta, x, t, context: -theta["k"] * x + context["drive"],
    noise=lambda theta, x: jnp.asarray(SIGMA),
)
SETTINGS = {"k": np.array(1.0)}


def simulate_kicks(count, seed=0, *, noise=1.0, drive=5.0):
    """Euler steps of dx = (drive − x)dt + noise σ dW, which is exactly what the guard assumes
    with noise = 1.
    """
    rng, x = np.random.default_rng(seed), np.zeros((count, T.size, 2))
    for n, dt in enumerate(np.diff(T)):
        kick = noise * SIGMA * np.sqrt(dt) * rng.normal(size=(count, 2))
        x[:, n + 1] = x[:, n] + (drive - x[:, n]) * dt + kick
    return x


def batch(x, drive=5.0):
    return Trajectories(T, x, {"drive": np.full(len(x), drive)})


@pytest.fixture(scope="module")
def guard():
    return ResidualGuard(PROCESS, np.ones(2))


@pytest.mark.parametrize("noise", [1.0, 0.5, 3.0])
def test_the_measure_is_the_ratio_of_the_variances(guard, noise):
    """ν = noise², whatever drive and rate the calibration has: χ² of 400 · 100 kicks, less
    0.43/400 for the median.
    """
    for drive, k in ((5.0, 1.0), (5.1, 1.0), (5.0, 4.0)):
        measured = guard.measure({"k": np.array(k)}, batch(simulate_kicks(400, noise=noise), drive))
        z = (measured.mean(axis=0) / noise**2 - 1) / np.sqrt(2 / 40_000)
        assert np.abs(z).max() < 4


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2, 3, 10, 100])
def test_honest_data_pass(guard, count):
    for seed in range(2000 // count if count < 10 else 100):
        assert not guard(SETTINGS, batch(simulate_kicks(count, seed))).bad.any()


def test_a_calibration_that_is_a_little_off_passes(guard):
    assert not guard(SETTINGS, batch(simulate_kicks(50, noise=1.2))).bad.any()
    assert not guard(SETTINGS, batch(simulate_kicks(50), drive=5.5)).bad.any()


@pytest.mark.parametrize("count", [3, 100])
@pytest.mark.parametrize(
    "what",
    [
        lambda x: 0 * x,
        lambda x: np.broadcast_to(x[:, -1:], x.shape),
        lambda x: x * [1, 0],
        lambda x: np.random.default_rng(1).uniform(-10, 10, x.shape),
        lambda x: x[..., ::-1],
    ],
    ids=["dead", "stuck", "a dead channel", "random", "channels swapped"],
)
def test_what_is_not_the_noise_is_set_aside_as_a_whole(guard, count, what):
    verdict = guard(SETTINGS, batch(np.ascontiguousarray(what(simulate_kicks(count)))))
    assert verdict.bad.all()
    assert "fluctuates" in verdict.reason


def test_one_random_trajectory_is_seen(guard):
    assert guard(
        SETTINGS, batch(np.random.default_rng(1).uniform(-10, 10, (1, T.size, 2)))
    ).bad.all()


def test_single_dead_trajectories_are_told_from_the_others(guard):
    x = simulate_kicks(50)
    x[[3, 17]] = 0
    np.testing.assert_array_equal(np.flatnonzero(guard(SETTINGS, batch(x)).bad), [3, 17])


def test_noise_at_calibration_is_the_scale():
    """Readout noise adds to every step; a batch is compared with what the probes had."""
    read = lambda seed: (
        simulate_kicks(50, seed)
        + 0.05 * np.random.default_rng(seed + 99).normal(size=(50, T.size, 2))
    )
    guard = ResidualGuard(PROCESS)
    assert not guard(SETTINGS, batch(0 * read(0))).bad.any()  # nothing is known yet
    guard.calibrate([(SETTINGS, Trajectories(T, read(seed))) for seed in (0, 1)], {"drive": 5.0})
    once = 0.05**2 / (SIGMA**2 * 0.02)  # at either end of a step; the state tells of one
    assert np.all((guard.noise > 0.9 * (1 + once)) & (guard.noise < 1.1 * (1 + 2 * once)))
    assert once.max() > 10
    assert not guard(SETTINGS, batch(read(2))).bad.any()
    assert guard(
        SETTINGS, batch(simulate_kicks(50))
    ).bad.all()  # without the readout it is not the noise that was calibrated


def test_a_trajectory_that_comes_again_is_known():
    repeats, x = Repeats(), simulate_kicks(10)
    assert not repeats(x).any()
    assert repeats(x[:4]).all()
    assert repeats(
        x + 1e-6 * np.random.default_rng(5).normal(size=x.shape)
    ).all()  # a stale buffer, with a little noise
    assert not repeats(x + 0.1 * np.random.default_rng(6).normal(size=x.shape)).any()
    again = Repeats(repeats.marks())
    assert again(x).all()
    assert not again(simulate_kicks(5, seed=1)).any()
    assert list(repeats(np.zeros((3, 101, 2)))) == [False, True, True]


def test_short_coarse_trajectories_may_repeat():
    assert not Repeats()(np.zeros((100, 10, 2))).any()


def test_repeats_forget_what_is_long_ago(monkeypatch):
    monkeypatch.setattr("fluctua.insitu.instrument.repeats.REMEMBERED", 20)
    repeats = Repeats()
    for seed in range(5):
        repeats(simulate_kicks(10, seed))
    assert len(repeats.seen) == 20
    assert repeats(simulate_kicks(10, 4)).all()
