"""Tests run in float64, so that tolerances speak of the equations, and each has one fixed seed.

Most of their time would be XLA optimising code that runs once, so here it does not optimise, nor in
the processes that tests start unless they ask for `environment_of_a_user`: half of the time. To
have the compiler of users everywhere: `XLA_FLAGS= make test`. What was compiled is kept with
pytest's cache, for the other workers and the next run; `pytest --cache-clear` begins anew.
"""

import contextlib
import ctypes
import gc
import os
import zlib
from pathlib import Path

# Before NumPy is imported: the threads of its linear algebra wait for each other by spinning, on
# the cores of the other workers. An eigenvalue problem of the paper's lattice takes a tenth of the
# time without them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault(
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0"
)  # the lines of Python are not compiled in

import jax
import pytest

from cuda_device import device  # noqa: F401
from fluctua.compiled import backend
from processes import compile_quickly

backend.MIN_KERNEL_WORK = (
    10**18
)  # large calls of other tests stay on JAX: none waits for a compiler of C++
compile_quickly()  # before JAX first looks for devices
jax.config.update("jax_enable_x64", True)

with contextlib.suppress(ImportError):  # wheels are tested without it
    from hypothesis import HealthCheck, settings

    # The same examples in every run, however slow the machine.
    settings.register_profile(
        "fixed",
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    settings.load_profile("fixed")


def pytest_configure(config):
    if hasattr(config, "cache"):
        keep_compiled(str(config.cache.mkdir("jax")))


def keep_compiled(folder):
    """However small: in a folder of compiled functions, for this process and those that it
    starts.
    """
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


def pytest_collection_finish():
    """Tracing makes many small objects: Python would look for cycles, among all that was
    imported, all the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


MOST_MAPS = 50_000
"""Memory maps of a process at which compiled functions are let go: XLA crashes at Linux' limit
of 65,530, which a module adds some thousands to; letting go takes seconds.
"""

MOST_MEMORY = 3 * 2**30
"""Bytes of a process at which they are let go too: half a suite leaves 8 GiB of them behind."""


@pytest.fixture(autouse=True, scope="module")
def _few_compiled_functions():
    """Every function that JAX compiles takes memory, and maps some of it."""
    yield
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if memory > MOST_MEMORY or maps.read_bytes().count(b"\n") > MOST_MAPS:
        let_go_of_compiled_functions()


def let_go_of_compiled_functions():
    """Their memory would stay with the C library, and every later module would let go again: of
    619 MiB with 300 functions 617 are left, and 246 once it is trimmed.
    """
    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(AttributeError):  # glibc's own
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture
def key(request):
    """A random key that is the same in every run and different for every test."""
    return jax.random.key(zlib.crc32(request.node.name.encode()))
