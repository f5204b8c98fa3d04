"""Double precision for every test, and one fixed seed per test."""

import zlib

import jax
import pytest

jax.config.update("jax_enable_x64", True)


@pytest.fixture
def key(request):
    """A random key that is the same in every run and different for every test."""
    return jax.random.key(zlib.crc32(request.node.name.encode()))
