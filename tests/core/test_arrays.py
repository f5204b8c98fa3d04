"""Roots of covariances, regular and singular, and arrays that are put on the host or read there."""

import ctypes
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from fluctua.core import arrays
from fluctua.core.arrays import on_host, put_on_host, root_covariance


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


@pytest.fixture
def _as_from_gpu(monkeypatch):
    """Arrays are read as those of a GPU are: their memory is copied."""
    runtime = SimpleNamespace(
        memcpyDeviceToHost=2, memcpy=lambda to, source, size, kind: ctypes.memmove(to, source, size)
    )
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(arrays, "_is_on_gpu", lambda array: isinstance(array, jax.Array))


@pytest.mark.usefixtures("_as_from_gpu")
@pytest.mark.parametrize("kind", [jnp.float32, jnp.bfloat16, jnp.bool_, jnp.int32])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 3)])
def test_numbers_are_read_by_a_copy_of_their_memory(kind, shape):
    array = jax.device_put(np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(kind))
    found = on_host(array)
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, np.asarray(array))


@pytest.mark.usefixtures("_as_from_gpu")
def test_columns_one_after_the_other_are_read_as_such():
    rows = jnp.arange(6.0).reshape(2, 3)
    columns = jax.device_put(rows, Format(Layout((1, 0)), rows.sharding))
    np.testing.assert_array_equal(on_host(columns), rows)


@pytest.mark.parametrize("double", [False, True])
def test_compiled_derivatives_of_maxima(double):
    """Those of `jnp.hypot`, by max and min, against those of a square root."""
    with jax.enable_x64(double):
        rng = np.random.default_rng(0)
        states, weights = jnp.asarray(rng.normal(size=(2, 600, 6)), float)
        matrix = jnp.asarray(rng.normal(size=(6, 6)), float)

        def total(matrix, by_maximum):
            v = jnp.tanh(states @ matrix) + 0.1 * matrix.sum(0)
            w = v[:, ::-1]
            return jnp.sum(weights * (jnp.hypot(v, w) if by_maximum else jnp.sqrt(v**2 + w**2)))

        found, expected = (jax.jit(jax.grad(total), static_argnums=1)(matrix, k) for k in (1, 0))
        error = 1e-12 if double else 1e-5
        np.testing.assert_allclose(found, expected, rtol=0, atol=error * np.abs(expected).max())


def test_equal_operands_share_the_derivative_of_their_maximum():
    for function, shares in ((jnp.maximum, (0.0, 0.5, 1.0)), (jnp.minimum, (1.0, 0.5, 0.0))):
        x = jnp.array([1.0, 2.0, 3.0])
        by_x, by_y = jax.jit(jax.jacrev(function, argnums=(0, 1)))(x, jnp.full(3, 2.0))
        np.testing.assert_array_equal(np.diag(by_x), shares)
        np.testing.assert_array_equal(np.diag(by_y), shares[::-1])
