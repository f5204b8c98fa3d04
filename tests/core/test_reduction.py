"""Means, errors and intervals by NumPy are those that JAX computes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fluctua.core import estimate
from fluctua.core.simulate import plan_calls


@pytest.fixture
def compiled_leaves(monkeypatch):
    """Shapes of the leaves that JAX reduces."""
    shapes = []
    original = estimate._reduce_leaf

    def reduce_leaf(leaf):
        shapes.append(leaf.shape)
        return original(leaf)

    monkeypatch.setattr(estimate, "_reduce_leaf", reduce_leaf)
    return shapes


def draw_samples(count):
    """Skewed samples of a scalar and a matrix, and a component without spread."""
    rng = np.random.default_rng(count)
    matrix = rng.normal(size=(count, 2, 3)) ** 2
    matrix[:, 0, 1] = 0.25
    gradient = {"a": jnp.asarray(rng.normal(size=count)), "b": jnp.asarray(matrix)}
    return estimate.Samples(gradient, jnp.asarray(rng.exponential(size=count)))


@pytest.mark.parametrize("count", [1, 2, 7, 30, 400])
def test_numpy_and_jax_reduce_alike(count, compiled_leaves, monkeypatch):
    samples = draw_samples(count)
    found = estimate.reduce_samples(samples)
    assert not compiled_leaves
    monkeypatch.setattr(estimate, "MAX_HOST_WORK", 0)
    expected = estimate.reduce_samples(samples)
    assert len(compiled_leaves) == 3
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12), found, expected)
    assert all(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(found[:5]))


def test_samples_without_spread_have_their_mean_to_the_last_digits():
    """Sums by pairs: of 4,000 equal numbers, and not an error that grows with their number."""
    samples = estimate.Samples(jnp.full((4000, 3), 0.1), jnp.full(4000, 1 / 3))
    reduced = estimate.reduce_samples(samples)
    np.testing.assert_allclose(reduced.gradient, 0.1, rtol=2e-15)
    np.testing.assert_allclose(reduced.value, 1 / 3, rtol=2e-15)


def test_leaves_may_be_empty():
    samples = estimate.Samples({"a": jnp.zeros((4, 0)), "b": jnp.ones((4, 2))}, jnp.ones(4))
    reduced = estimate.reduce_samples(samples)
    assert reduced.gradient["a"].shape == reduced.interval[1]["a"].shape == (0,)
    np.testing.assert_array_equal(reduced.gradient["b"], 1)


def test_types_are_those_of_the_samples():
    samples = estimate.Samples(jnp.ones((4, 2), jnp.float32), jnp.arange(4))
    reduced = estimate.reduce_samples(samples)
    assert reduced.gradient.dtype == reduced.interval[0].dtype == jnp.float32
    assert reduced.value.dtype == jnp.float64
    assert reduced.value == 1.5


def test_long_trainings_and_traced_samples_are_left_to_jax(compiled_leaves):
    samples = draw_samples(30)
    with plan_calls(10_000):
        estimate.reduce_samples(samples)
    assert len(compiled_leaves) == 3
    jax.jit(lambda samples: estimate.reduce_samples(samples).value)(samples)
    assert len(compiled_leaves) == 6
