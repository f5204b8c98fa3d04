"""Threads of the host: independent work on all cores, and libraries of linear algebra on one."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import scipy

SMALL_MATRIX = 2048
"""Rows of a matrix up to which threads of BLAS cost more than they save."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def run_on_cores(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return [work(item) for item in items], on all cores, for work that releases Python's lock.

    The calling thread takes items too. The other threads are kept for later calls, since starting
    one takes as long as a small estimate.
    """
    results: list[Any] = [None] * len(items)
    following = itertools.count()

    def take_items() -> None:
        while (k := next(following)) < len(items):
            results[k] = work(items[k])

    helpers: list[Future[None]] = []
    try:
        for _ in range(min(len(items), count_cores()) - 1):
            try:
                helpers.append(_find_pool(os.getpid()).submit(take_items))
            except RuntimeError as error:
                if not str(error).startswith("cannot schedule new futures"):
                    raise
                break  # the interpreter is shutting down, and this thread outlives the main one
        take_items()
    finally:
        # a helper that still waits for a thread would find no items
        started = [helper for helper in helpers if not helper.cancel()]
        wait(started)
    for helper in started:
        helper.result()
    return results


def map_on_cores(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """`run_on_cores` for compiled functions of JAX, in the precision of the calling thread."""
    double = _is_double()

    def work_in_precision(item: Item) -> Result:
        # precision belongs to a thread; the same one as by default is not set, to compile once
        if _is_double() == double:
            return work(item)
        with jax.enable_x64(double):
            return work(item)

    return run_on_cores(work_in_precision, items)


def count_cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _find_pool(process: int) -> ThreadPoolExecutor:
    """Return the threads of a process. A child has none of them after a fork."""
    return ThreadPoolExecutor(count_cores(), f"fluctua-{process}")


def _is_double() -> bool:
    return bool(jnp.result_type(float) == jnp.float64)


class _BlasLimit:
    """Number of threads within `one_blas_thread`, and what ends the limit with the last of them."""

    lock = threading.Lock()
    users = 0
    limiter: AbstractContextManager = nullcontext()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let BLAS and LAPACK use one thread. Several threads may be within the context at a time.

    Their own threads wait in loops for one another, and beside those of XLA on as many cores they
    take several times the time that they save.
    """
    limit = _BlasLimit
    with limit.lock:
        if not limit.users:
            libraries = _find_libraries()
            limit.limiter = (
                libraries.limit(limits=1, user_api="blas") if libraries else nullcontext()
            )
            limit.limiter.__enter__()
        limit.users += 1
    try:
        yield
    finally:
        with limit.lock:
            limit.users -= 1
            if not limit.users:
                limit.limiter.__exit__(None, None, None)


def limit_blas(size: int) -> AbstractContextManager:
    """`one_blas_thread` for matrices of up to `SMALL_MATRIX` rows; larger ones gain by threads."""
    return one_blas_thread() if size <= SMALL_MATRIX else nullcontext()


@cache
def _find_libraries() -> Any:
    """Return the libraries of NumPy and of SciPy, whose LAPACK JAX calls too.

    None where threadpoolctl is missing, which saves time alone.
    """
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:
        return None
    _ = scipy.linalg.lapack  # loads it: a library that is loaded later would not be found
    return ThreadpoolController()
