"""Sums of parts against the statistics of the whole."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluctua as fl
from fluctua.core.estimate import RunningSums
from fluctua.scale import parts

THETA = {"a": jnp.zeros(2), "b": jnp.zeros(())}


@pytest.fixture(scope="module")
def samples():
    """Skewed, heavy tailed, and far from zero against their spread."""
    rng = np.random.default_rng(0)
    a, b = rng.gamma(0.5, size=(300, 2)), 1e3 + rng.standard_t(5, size=300)
    return fl.Samples({"a": a, "b": b}, 50 + rng.gamma(2.0, size=300))


def piece(samples, low, high):
    return jax.tree.map(lambda leaf: leaf[low:high], samples)


def leaves(estimate):
    return np.concatenate(
        [np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(estimate)]
    )


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("edges", [(0, 300), (0, 1, 2, 150, 300), (0, 100, 200, 300)])
def test_parts_add_up_to_the_estimate_of_all(samples, edges):
    theta = jax.tree.map(lambda leaf: leaf.astype(float), THETA)
    of = [parts.sum_samples(piece(samples, low, high)) for low, high in pairwise(edges)]
    together = parts.make_estimate(parts.sum_parts(of), theta)
    whole = fl.reduce_samples(jax.tree.map(jnp.asarray, samples))
    np.testing.assert_allclose(
        leaves(together), leaves(whole), rtol=1e-10
    )  # means of 1e3, spreads of 1: 1e3·ε
    assert together.count == 300


def test_a_recording_and_its_samples_are_the_same_part(samples):
    theta = jax.tree.map(lambda leaf: leaf.astype(float), THETA)
    sums = RunningSums(theta)
    for low in range(0, 300, 70):
        sums.add(piece(samples, low, low + 70))
    a, b = parts.sum_recording(sums), parts.sum_samples(samples)
    for name in ("mean", "second", "spread", "third", "fourth"):
        np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=1e-9, err_msg=name)


def test_estimates_of_which_no_more_is_known_are_pooled(samples):
    theta = jax.tree.map(lambda leaf: leaf.astype(float), THETA)
    halves = [
        fl.reduce_samples(jax.tree.map(jnp.asarray, piece(samples, *at)))
        for at in ((0, 120), (120, 300))
    ]
    pooled = parts.make_estimate(
        parts.sum_parts([parts.sum_estimate(half) for half in halves]), theta
    )
    whole = fl.reduce_samples(jax.tree.map(jnp.asarray, samples))
    np.testing.assert_allclose(leaves(pooled[:6]), leaves(whole[:6]), rtol=1e-10)
    assert pooled.interval is None


def test_one_trajectory_has_no_error():
    with pytest.raises(ValueError, match="got 1"):
        parts.make_estimate(
            parts.sum_samples(fl.Samples({"a": np.ones((1, 2)), "b": np.ones(1)}, np.ones(1))),
            THETA,
        )
