"""Tests run in float64, so that tolerances speak of the equations, and each has one fixed seed.

Most of their time would be XLA optimising code that runs once, so here it does not optimise: half of the time. Python
processes that tests start (the examples, commands, memory) have the compiler as users have it. To have it everywhere:
`XLA_FLAGS= make test`.
"""

import os
import zlib

import jax
import pytest

from cuda_device import device  # noqa: F401


def _compile_quickly():
    if "XLA_FLAGS" in os.environ:
        return
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    jax.devices()  # reads them, once and for all
    del os.environ["XLA_FLAGS"]


_compile_quickly()
jax.config.update("jax_enable_x64", True)


@pytest.fixture
def key(request):
    """A random key that is the same in every run and different for every test."""
    return jax.random.key(zlib.crc32(request.node.name.encode()))
