"""Tests run in float64, so that tolerances speak of the equations, and each has one fixed seed.

Most of their time would be XLA optimising code that runs once, so here it does not optimise, nor in the processes that
tests start unless they ask for `environment_of_a_user`: half of the time. To have the compiler of users everywhere:
`XLA_FLAGS= make test`. What was compiled is kept with pytest's cache, for the other workers and the next run;
`pytest --cache-clear` begins anew.
"""

import os
import zlib

import jax
import pytest

from cuda_device import device  # noqa: F401
from processes import COMPILE_QUICKLY

os.environ.setdefault("XLA_FLAGS", COMPILE_QUICKLY)  # read by JAX when it first looks for devices
jax.config.update("jax_enable_x64", True)


def pytest_configure(config):
    if hasattr(config, "cache"):
        jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("jax")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


@pytest.fixture
def key(request):
    """A random key that is the same in every run and different for every test."""
    return jax.random.key(zlib.crc32(request.node.name.encode()))
