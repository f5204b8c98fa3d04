"""Tests run in float64, so that tolerances speak of the equations, and each has one fixed seed."""

import zlib

import jax
import pytest

from cuda_device import device  # noqa: F401

jax.config.update("jax_enable_x64", True)


@pytest.fixture
def key(request):
    """A random key that is the same in every run and different for every test."""
    return jax.random.key(zlib.crc32(request.node.name.encode()))
