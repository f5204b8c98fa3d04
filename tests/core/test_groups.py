"""Trajectories of several devices: errors between devices, and how many trajectories a device
are worth while.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua.core.estimate import Samples, Variances, label_groups, reduce_samples
from fluctua.core.trajectories import Trajectories

COUNTS = np.array([4, 4, 6, 2, 8])
GROUP = np.repeat(np.arange(5) + 7, COUNTS)  # any numbers will do
TAU, SIGMA, MEAN = 0.5, 1.0, 0.3


def draw_samples(seed):
    """Samples of devices that differ by τ, with trajectories that differ by σ."""
    rng = np.random.default_rng(seed)
    own = MEAN + TAU * rng.normal(size=(5, 3))
    rows = np.repeat(own, COUNTS, axis=0) + SIGMA * rng.normal(size=(GROUP.size, 3))
    return Samples({"a": jnp.asarray(rows[:, :2])}, jnp.asarray(rows[:, 2]), GROUP)


@pytest.mark.long
def test_errors_between_groups_cover_the_population():
    """Of 400 repeats: variance (τ² + σ²⟨1/n⟩)/K, its estimate and both its parts unbiased, 95 %
    covered.
    """
    repeats = [reduce_samples(draw_samples(seed)) for seed in range(400)]
    means = np.array([[*e.gradient["a"], e.value] for e in repeats])
    variance = np.array([[*e.stderr["a"], e.value_stderr] for e in repeats]) ** 2
    expected = (TAU**2 + SIGMA**2 * np.mean(1 / COUNTS)) / 5
    n = means.size
    assert abs(means.mean() - MEAN) < 4 * np.sqrt(expected / n)
    assert abs(means.var() - expected) < 4 * expected * np.sqrt(2 / n)
    assert abs(variance.mean() - expected) < 4 * expected * np.sqrt(2 / 4 / n)
    pooled = np.array(
        [reduce_samples(draw_samples(seed)._replace(group=None)).value_stderr for seed in range(40)]
    )
    assert (
        np.mean(pooled**2) < 0.8 * expected
    )  # what would be claimed if trajectories were independent
    low, high = (
        np.array([[*e.interval[k]["a"], e.value_interval[k]] for e in repeats]) for k in (0, 1)
    )
    covered = np.mean((low < MEAN) & (high > MEAN))
    assert abs(covered - 0.95) < 4 * np.sqrt(0.95 * 0.05 / n)
    within = np.array([e.groups.returns.within for e in repeats])
    assert abs(within.mean() - SIGMA**2) < 4 * SIGMA**2 * np.sqrt(2 / 19 / 400)
    here = np.array([float(e.groups.value_stderr) for e in repeats]) ** 2
    exact = SIGMA**2 * np.mean(1 / COUNTS) / 5
    assert abs(here.mean() - exact) < 4 * here.std() / np.sqrt(400)


def test_every_group_counts_the_same():
    estimate = reduce_samples(draw_samples(0))
    rows = np.asarray(draw_samples(0).returns, float)
    means = [rows[k == GROUP].mean() for k in np.unique(GROUP)]
    np.testing.assert_allclose(estimate.value, np.mean(means), rtol=1e-6)
    np.testing.assert_allclose(estimate.groups.values, means, rtol=1e-6)
    np.testing.assert_array_equal(estimate.groups.counts, COUNTS)
    np.testing.assert_array_equal(estimate.groups.group, np.arange(5) + 7)
    assert "5 devices" in str(estimate)
    alone = reduce_samples(Samples(*draw_samples(0)[:2], np.zeros(GROUP.size, int)))
    assert np.isnan(alone.value_stderr)  # nothing is known of the population
    assert float(alone.groups.value_stderr) > 0


def test_trajectories_a_device_that_are_worth_while():
    """n = √(c_g σ²/c_t τ²) is where K(c_g + c_t n)·(τ² + σ²/n)/K is least."""
    variances, price = Variances(between=0.04, within=1.0), (30.0, 2.0)
    n = np.arange(1, 200)
    cost = (price[0] + price[1] * n) * (variances.between + variances.within / n)
    assert abs(n[np.argmin(cost)] - variances.optimal_size(*price)) <= 0.5
    assert variances._replace(between=0.0).optimal_size() == np.inf
    with pytest.raises(ValueError, match=r"-1"):
        variances.optimal_size(-1)


@pytest.mark.long
def test_groups_travel_with_the_trajectories():
    """Through `gradient`, with every kind of baseline, in one piece and in chunks."""
    process = fl.Process(lambda k, x, t, c: -k * x + c, lambda k, x: jnp.ones_like(x))
    objective = fl.Objective(running=lambda k, x: x[0])
    rng = np.random.default_rng(2)
    t, x = np.linspace(0, 1, 6), rng.normal(size=(8, 6, 1)).cumsum(axis=1) * np.sqrt(0.2)
    group, context = np.arange(8) % 4, np.repeat([0.1, -0.1], 4)[:, None]
    whole = Trajectories(t, x, context, None, group)
    halves = [Trajectories(t, x[s], context[s], None, group[s]) for s in (slice(0, 3), slice(3, 8))]
    for baseline in ("none", "time", "mean", "twin"):
        estimate = fl.gradient(process, objective, jnp.asarray(1.0), whole, baseline=baseline)
        assert list(estimate.groups.counts) == [2, 2, 2, 2]
        if baseline == "time":
            parts = fl.gradient(process, objective, jnp.asarray(1.0), halves, baseline=baseline)
            np.testing.assert_allclose(parts.stderr, estimate.stderr, rtol=1e-5)
    device = lambda key, theta, count: whole
    estimate = fl.ppgt(device, objective, process=process, baseline="twin")(
        jax.random.key(0), jnp.asarray(1.0), 8
    )
    assert estimate.groups is not None
    with pytest.raises(
        ValueError, match="4 devices"
    ):  # ShrunkCorrection and SelfCalibrating would have errors between trajectories
        fl.ppgt(device, objective, process=process, baseline="twin").split(
            jax.random.key(0), jnp.asarray(1.0), 8
        )
    samples = Samples(jnp.zeros(8), jnp.zeros(8))
    with pytest.raises(ValueError, match="some chunks"):
        label_groups(samples, [halves[0], halves[1]._replace(group=None)])
    with pytest.raises(ValueError, match=r"\(8,\).*\(3,\)"):
        label_groups(samples, halves[0])
