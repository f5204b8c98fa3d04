"""A study of many trainings: jobs in processes of one core each, and a point a row in a table
that is read back.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

from fluctua.store import tables

Point = TypeVar("Point", bound=NamedTuple)
Job = TypeVar("Job")


def measure_jobs(
    study: Callable[[Job], list[Point]], jobs: Sequence[Job], processes: int
) -> list[Point]:
    """The points of all jobs, in their order."""
    os.environ |= {
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return [point for points in pool.imap(study, jobs, chunksize=1) for point in points]


def write(path: Path, points: Sequence[Any]) -> None:
    """One row a point; numbers that are not whole with six digits."""
    columns = dict(zip(points[0]._fields, zip(*points, strict=True), strict=True))
    tables.write(path, columns, {}, digits=6)


def read(path: Path, kind: type[Point]) -> list[Point]:
    """What `write` wrote."""
    types, columns = get_type_hints(kind), tables.read(path).columns
    cells = [[types[name](cell) for cell in columns[name].tolist()] for name in types]
    return [kind(*row) for row in zip(*cells, strict=True)]
