"""Work on all cores, with the precision of the caller, and libraries of linear algebra on one."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg  # loads a BLAS

from fluctua.core.host import threads


def count_blas_threads():
    threadpoolctl = pytest.importorskip("threadpoolctl", reason="it counts threads of BLAS")
    entries = threadpoolctl.threadpool_info()
    return [entry["num_threads"] for entry in entries if entry["user_api"] == "blas"]


@pytest.fixture
def use_cores(monkeypatch):
    """A machine with some cores, and threads of its own."""
    pools = []

    def use(cores):
        pools.append(ThreadPoolExecutor(cores))
        monkeypatch.setattr(threads, "count_cores", lambda: cores)
        monkeypatch.setattr(threads, "_find_pool", lambda process: pools[-1])

    yield use
    for pool in pools:
        pool.shutdown()


@pytest.mark.parametrize("cores", [1, 3])
def test_results_are_in_order_and_in_the_precision_of_the_caller(cores, use_cores):
    use_cores(cores)
    together = threading.Barrier(cores)  # breaks where fewer threads work at a time

    def work(k):
        together.wait(timeout=60)
        return jnp.full(2, k) / 3

    for double in (False, True):
        with jax.enable_x64(double):
            found = threads.map_on_cores(work, range(6))
        assert {array.dtype for array in found} == {np.dtype("float64" if double else "float32")}
        np.testing.assert_allclose([array[0] for array in found], np.arange(6) / 3, rtol=1e-6)


def test_work_may_use_all_cores_itself(use_cores):
    use_cores(2)

    def work(k):
        return sum(threads.run_on_cores(lambda j: 10 * k + j, range(4)))

    assert threads.run_on_cores(work, range(5)) == [40 * k + 6 for k in range(5)]


def test_the_calling_thread_works_alone_while_the_interpreter_shuts_down(use_cores):
    use_cores(2)
    threads._find_pool(0).shutdown()
    assert threads.run_on_cores(lambda k: k**2, range(4)) == [0, 1, 4, 9]


def test_a_process_that_was_forked_has_threads_of_its_own():
    assert threads._find_pool(1) is threads._find_pool(1)
    assert threads._find_pool(1) is not threads._find_pool(2)


def test_errors_of_work_are_raised():
    with pytest.raises(ZeroDivisionError):
        threads.map_on_cores(lambda k: 1 / k, [1, 0, 2])


def test_blas_has_one_thread_until_the_last_leaves():
    scipy.linalg.cholesky(np.eye(3))
    before = count_blas_threads()
    assert before
    with threads.one_blas_thread():
        other = threads.one_blas_thread()
        other.__enter__()
        assert set(count_blas_threads()) == {1}
    assert set(count_blas_threads()) == {1}
    other.__exit__(None, None, None)
    assert count_blas_threads() == before


def test_without_threadpoolctl_nothing_is_limited(monkeypatch):
    before = count_blas_threads()
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    threads._find_libraries.cache_clear()
    with threads.one_blas_thread():
        monkeypatch.undo()
        assert count_blas_threads() == before
    threads._find_libraries.cache_clear()
