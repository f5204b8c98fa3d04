"""Roots of covariances, regular and singular, and arrays of NumPy that are put on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fluctua.core.arrays import put_on_host, root_covariance


def make_covariance(size, rank):
    factor = np.random.default_rng(size + rank).normal(size=(size, rank))
    return jnp.asarray(factor @ factor.T)


@pytest.mark.parametrize(("size", "rank"), [(1, 1), (3, 3), (5, 2), (4, 0)])
def test_the_root_gives_its_covariance_also_where_that_is_singular(size, rank):
    covariance = make_covariance(size, rank)
    root = root_covariance(covariance)
    np.testing.assert_allclose(root @ root.T, covariance, atol=1e-13 * size)
    np.testing.assert_array_equal(root, jnp.tril(root))


def test_a_regular_root_and_its_slope_are_those_of_cholesky():
    covariance = make_covariance(4, 4)
    direction = make_covariance(4, 2)

    def slope(function):
        return jax.jvp(function, (covariance,), (direction,))

    for ours, exact in zip(slope(root_covariance), slope(jnp.linalg.cholesky), strict=True):
        np.testing.assert_allclose(ours, exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_the_unit_does_not_matter(scale):
    covariance = make_covariance(5, 2)
    root = root_covariance(scale * covariance) / np.sqrt(scale)
    np.testing.assert_allclose(root @ root.T, covariance, atol=1e-12)


def test_what_is_not_a_number_is_passed_on():
    covariance = make_covariance(3, 3).at[1, 1].set(jnp.nan)
    assert not jnp.isfinite(root_covariance(covariance)).all()


@pytest.mark.parametrize("size", [1, 1000])
def test_arrays_put_on_the_host_do_not_follow_their_source(size):
    memory = np.zeros(4 * size + 64, np.uint8)
    first = -memory.ctypes.data % 64  # where JAX could share it
    source = memory[first : first + 4 * size].view(np.float32)
    for _ in range(2):  # the second call of a shape is compiled
        source[:] = 1
        (array,) = put_on_host([source])
        array.block_until_ready()
        source[:] = 2
        assert float(array[0]) == 1
