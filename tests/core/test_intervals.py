"""Intervals of 95 % cover 93 to 97 % at ensembles of 50, 200 and 1,000, where ±1.96 standard errors
cover 86 to 88.

Below 50 they are widened, and cover 92 % at least on average over the components of the same
problems."""

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import fluctua as fl
from fluctua.core.estimate import (
    Moments,
    RunningSums,
    Samples,
    _moments,
    _student,
    estimate_from_moments,
    interval,
    reduce_samples,
)
from problems import flat, multiplicative, non_normal, ornstein_uhlenbeck, problem

REPEATS = {2: 2000, 3: 2000, 5: 2000, 10: 1000, 20: 1000, 50: 400, 200: 400, 1000: 100}
FEW = (2, 3, 5, 7, 10, 20)
PROBLEMS = (ornstein_uhlenbeck, non_normal, multiplicative)

compute_interval = jax.jit(lambda rows, size: interval(_moments(rows), size), static_argnums=1)


@cache
def draw_deviations():
    """Gradients and returns of as many trajectories as the largest ensembles have together, less
    the exact answers: (E, components and 1) of each problem.
    """
    count = max(size * repeats for size, repeats in REPEATS.items())

    def draw(the):
        samples = the.estimator().samples(jax.random.key(1), the.theta, count)
        leaves = (*jax.tree.leaves(samples.gradient), samples.returns)
        rows = np.concatenate([np.asarray(v).reshape(count, -1) for v in leaves], axis=1)
        return rows - np.append(flat(the.exact_gradient), the.exact_value)

    return [draw(problem(make)) for make in PROBLEMS]


class Cover(NamedTuple):
    """Fraction of intervals that hold the exact answer, for components and return: (n,)."""

    ours: np.ndarray
    plain: np.ndarray  # of ±1.96 standard errors


def measure_cover(size):
    """`Cover` of each problem."""
    repeats = REPEATS[size]
    rows = np.concatenate(draw_deviations(), axis=1)[: size * repeats]
    each = rows.reshape(repeats, size, -1)
    low, high = compute_interval(each.swapaxes(0, 1).reshape(size, -1), size)
    holds = (np.asarray(low) < 0) & (np.asarray(high) > 0)
    error = each.std(axis=1, ddof=1) / np.sqrt(size)
    ours = holds.reshape(repeats, -1).mean(axis=0)
    plain = (np.abs(each.mean(axis=1)) < 1.96 * error).mean(axis=0)
    ends = np.cumsum([one.shape[1] for one in draw_deviations()])[:-1]
    return [Cover(*both) for both in zip(np.split(ours, ends), np.split(plain, ends), strict=True)]


@pytest.mark.long
@pytest.mark.parametrize("size", [50, 200, 1000])
def test_cover(size):
    """The mean over components of three problems; 400 repeats (100 of the largest) know it to
    half a per cent.
    """
    found = measure_cover(size)
    assert 0.93 < np.mean([cover.ours.mean() for cover in found]) < 0.97
    if size < 1000:
        assert np.mean([cover.plain.mean() for cover in found]) < 0.93


@pytest.mark.long
@pytest.mark.parametrize("size", [2, 3, 5, 10, 20])
def test_cover_of_few_trajectories(size):
    """Before they were widened it was 0.81, 0.89, 0.87, 0.89 and 0.91; some components are as
    skewed as 26.
    """
    found = measure_cover(size)
    assert np.mean([cover.ours.mean() for cover in found]) > 0.92
    assert min(cover.ours.min() for cover in found) > 0.75


SKEWED = {
    "normal": lambda rng, size: rng.normal(size=size),
    "score and return": lambda rng, size: rng.normal(size=size) * (0.5 + rng.normal(size=size)),
    "exponential": lambda rng, size: rng.exponential(size=size) - 1,
    "square": lambda rng, size: rng.normal(size=size) ** 2 - 1,
}


@pytest.mark.parametrize("kind", SKEWED)
@pytest.mark.parametrize("size", FEW)
def test_few_samples_are_covered(kind, size):
    """4,000 intervals know their cover to 0.4 %; it was 0.72 for two squares and 0.85 for two
    normal numbers.
    """
    rows = SKEWED[kind](np.random.default_rng(size), (size, 4000))
    low, high = (np.asarray(side) for side in compute_interval(rows, size))
    assert np.mean((low < 0) & (high > 0)) > 0.92


def test_normal_samples_have_the_interval_of_student():
    z = np.random.default_rng(0).normal(size=(20_000, 1))
    e = reduce_samples(Samples(z, z[:, 0]))
    low, high = (float(side[0]) for side in e.interval)
    assert (high - low) / (2 * float(e.stderr[0])) == pytest.approx(1.96, rel=0.01)


@pytest.mark.parametrize("nu", [2 / 3, 1, 2, 3, 5, 20, 1e6])
def test_quantiles_of_student(nu):
    assert float(_student(nu)) == pytest.approx(stats.t.ppf(0.975, nu), rel=3e-4)


def test_widths_meet_where_nothing_is_added():
    """From 50 samples on the interval of normal numbers is Student's, and below it grows
    without a jump.
    """
    normal = Moments(*np.array([0.0, 1.0, 0.0, 0.0]))
    width = lambda n: float(interval(normal, n)[1]) * np.sqrt(n)
    assert width(50) == pytest.approx(stats.t.ppf(0.975, 49), rel=1e-4)
    assert width(49) / width(50) == pytest.approx(1, abs=0.003)
    assert all(width(n) > width(n + 1) for n in range(2, 60))


def test_sums_of_chunks_have_the_interval_of_the_whole():
    rng = np.random.default_rng(1)
    samples = Samples({"a": rng.exponential(size=(300, 2))}, 5 + rng.gamma(2, size=300))
    whole = reduce_samples(samples)
    sums = RunningSums({"a": jnp.zeros(2)})
    for low, high in ((0, 50), (50, 51), (51, 300)):
        sums.add(jax.tree.map(lambda v: v[low:high], samples))  # noqa: B023
    ours = sums.estimate()
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_the_text_says_how_they_were_made():
    samples = Samples({"a": np.arange(50.0)[:, None]}, np.arange(50.0))
    text = repr(reduce_samples(samples))
    assert "95 %, corrected for skewness" in text
    assert "[" in text.splitlines()[0]
    assert "95 %" not in repr(reduce_samples(samples)._replace(interval=None))


def test_the_text_says_that_samples_are_few():
    samples = Samples({"a": np.arange(5.0)[:, None]}, np.arange(5.0))
    few = reduce_samples(samples)
    assert "widened, because 5 samples show little" in repr(few)
    assert "fewer than 50" in repr(few)
    assert "fewer than 50 samples ±1.96 of it" in repr(few._replace(interval=None))
    assert fl.Estimate(*reduce_samples(samples)[:6]).interval is None


@pytest.mark.parametrize("count", [1, 5, 40, 4_000])
def test_estimates_from_moments_are_the_same_on_host_and_device(count):
    theta = {"a": jnp.array(1.0), "b": jnp.ones((2, 2))}
    rng = np.random.default_rng(count)
    moments = np.abs(rng.normal(size=(5, 1 + 3 + 5)))  # three numbers that are not looked at
    on_host = estimate_from_moments(theta, moments, 3, count)
    on_device = estimate_from_moments(theta, jnp.asarray(moments), 3, count)
    assert jax.tree.structure(on_host) == jax.tree.structure(on_device)
    for one, other in zip(jax.tree.leaves(on_host), jax.tree.leaves(on_device), strict=True):
        assert np.shape(one) == np.shape(other)
        np.testing.assert_allclose(one, other, rtol=1e-9)
    np.testing.assert_array_equal(on_host.gradient["b"], moments[0, 5:].reshape(2, 2))
    np.testing.assert_allclose(on_host.value_stderr, moments[1, 0] / np.sqrt(count))
