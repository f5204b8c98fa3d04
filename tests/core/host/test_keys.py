"""Keys on the host are those of JAX, bit for bit."""

import jax
import numpy as np
import pytest

from fluctua.compiled import passes
from fluctua.core import streamed
from fluctua.core.arrays import is_on_host
from fluctua.core.host import keys

SEEDS = (0, 1, 12345, 2**31 - 1)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_split_words_are_those_of_jax(make, seed):
    key = make(seed)
    words = keys.read_words(key)
    for count in (2, 3, 10):
        parts = jax.random.split(key, count)
        expected = parts if parts.dtype == np.uint32 else jax.random.key_data(parts)
        found = [keys.split_words(words, index) for index in range(count)]
        np.testing.assert_array_equal(np.array(found, np.uint32), expected)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_keys_and_seeds_of_an_estimate_are_those_of_jax(make, monkeypatch):
    key = jax.random.fold_in(make(5), 2)
    found = (*streamed.split_key(key), *streamed.estimate_seeds(key))
    monkeypatch.setattr(keys, "read_host_words", lambda key: None)
    expected = (*streamed.split_key(key), *streamed.estimate_seeds(key))
    for ours, theirs in zip(found, expected, strict=True):
        assert getattr(ours, "dtype", int) == getattr(theirs, "dtype", int)
        assert jax.numpy.array_equal(ours, theirs)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
@pytest.mark.parametrize("number", [0, 1, 20_519, 2**31 + 5])
def test_keys_of_iterations_are_those_of_jax(make, number):
    key = make(3)
    ours = keys.fold_in(key, number)
    theirs = jax.random.fold_in(key, np.uint32(number))
    assert is_on_host(ours)
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(jax.random.key_data(ours), jax.random.key_data(theirs))


def test_many_keys_are_folded_at_once():
    key = jax.random.key(3)
    numbers = np.array([0, 1, 7, 2**31, 2**32 - 1], np.uint32)
    expected = jax.vmap(lambda number: jax.random.fold_in(key, number))(numbers)
    found = np.stack(keys.split_words(keys.read_words(key), numbers), axis=1)
    np.testing.assert_array_equal(found, jax.random.key_data(expected))


def test_a_known_block_of_threefry():
    """From the known answers of Random123."""
    most = keys.Words(keys.MASK, keys.MASK)
    assert keys.encrypt(keys.Words(0, 0), keys.Words(0, 0)) == (0x6B200159, 0x99BA4EFE)
    assert keys.encrypt(most, most) == (0x1CB996FC, 0xBB002BE7)


def test_keys_within_traced_functions_are_left_to_jax():
    key = jax.random.key(4)
    expected = jax.random.key_data(streamed.split_key(key).run)
    by_closure = jax.jit(lambda: jax.random.key_data(streamed.split_key(key).run))
    by_argument = jax.jit(lambda key: jax.random.key_data(streamed.split_key(key).run))
    np.testing.assert_array_equal(by_closure(), expected)
    np.testing.assert_array_equal(by_argument(key), expected)


def test_keys_of_other_generators_are_left_to_jax():
    assert keys.read_words(jax.random.key(0, impl="rbg")) is None
    with jax.threefry_partitionable(False):
        assert keys.read_words(jax.random.key(0)) is None


@pytest.mark.parametrize("wiener", [1, 2, 3])
@pytest.mark.parametrize("partitionable", [True, False])
def test_noise_words_are_those_that_jax_packs(wiener, partitionable):
    with jax.threefry_partitionable(partitionable):
        key = jax.random.fold_in(jax.random.key(7), 3)
        expected = passes._split_noise_key(wiener, key)
        np.testing.assert_array_equal(passes.compute_noise_words(wiener, key), expected)


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint32, jax.numpy.asarray])
def test_numbers_of_iterations_are_integers_of_any_type(kind):
    key = jax.random.key(3)
    expected = jax.random.fold_in(key, 70_001)
    assert jax.numpy.array_equal(keys.fold_in(key, kind(70_001)), expected)


def test_numbers_of_iterations_may_be_traced():
    key = jax.random.key(3)
    found = jax.vmap(lambda number: keys.fold_in(key, number))(jax.numpy.arange(2))
    assert jax.numpy.array_equal(found[1], jax.random.fold_in(key, 1))


@pytest.mark.parametrize("count", [2, 3])
def test_several_keys_are_refused_by_jax(count):
    with pytest.raises(ValueError, match="single key"):
        keys.fold_in(jax.random.split(jax.random.key(3), count), 1)
