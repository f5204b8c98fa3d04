"""Time per site and step of every baseline and step on the GPU, beside that of one pass.

    python benchmarks/lattice_baselines.py --out results/bench/cuda-baselines.csv

Whole calls of the kernels, host code and reduction included, and the time of each kernel in them by
events of the GPU. The target: at most four times one pass. Single precision; the binned baseline
has 20 bins, sorted every 50 steps; the twin is the network itself. Needs CuPy.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fluctua.compiled.toolchain import require_cupy
from fluctua.tcmt.kernel import cuda
from fluctua.tcmt.kernel import run as kernel
from fluctua.tcmt.kernel.options import Binned
from fluctua.tcmt.kernel.twin import run_twin
from kernel_cpu import paper_lattice

SIZES = ((11, 13), (32, 32), (64, 64), (100, 100))
VARIANTS = ("one pass", "Heun", "binned", "twin", "twin with Heun")


class Row(NamedTuple):
    """Times of one variant on one lattice.

    whole_ps, kernel_ps: picoseconds per site and step of a whole call, and of its kernels.
    ratio: whole call over that of one pass. kernel_ratio: the same of the kernels.
    kernels: milliseconds of each kernel.
    """

    lattice: str
    variant: str
    trajectories: int
    steps: int
    whole_ms: float
    whole_ps: float
    ratio: float
    kernel_ps: float
    kernel_ratio: float
    kernels: str


class TimedKernel:
    """A kernel whose launches are timed by events."""

    def __init__(self, function: Any, name: str, cp: Any, launches: list[Any]) -> None:
        vars(self).update(function=function, name=name, cp=cp, launches=launches)

    def __call__(self, *arguments: Any, **options: Any) -> None:
        begin = self.cp.cuda.Event()
        end = self.cp.cuda.Event()
        begin.record()
        self.function(*arguments, **options)
        end.record()
        self.launches.append((self.name, begin, end))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.function, name, value)


class TimedModule:
    """A compiled module of timed kernels."""

    def __init__(self, module: Any, cp: Any, launches: list[Any]) -> None:
        self.module = module
        self.cp = cp
        self.launches = launches

    def get_function(self, name: str) -> TimedKernel:
        return TimedKernel(self.module.get_function(name), name, self.cp, self.launches)

    def get_global(self, name: str) -> Any:
        return self.module.get_global(name)


@contextmanager
def time_launches(cp: Any) -> Iterator[list[Any]]:
    """Time all launches of the lattice's kernels in the block: (name, begin, end)."""
    launches: list[Any] = []
    compile_module = cuda.compile_module
    modules: dict[int, TimedModule] = {}

    def compile_timed(*how: Any) -> TimedModule:
        module = compile_module(*how)
        return modules.setdefault(id(module), TimedModule(module, cp, launches))

    def forget() -> None:  # networks of earlier runs, and what was written into their modules
        cuda._free.clear()
        cuda.find_constant.cache_clear()

    cuda.compile_module = compile_timed
    forget()
    try:
        yield launches
    finally:
        cuda.compile_module = compile_module
        forget()


def add_by_name(cp: Any, launches: list[Any]) -> dict[str, float]:
    """Return the milliseconds of each kernel, the longest first."""
    times: dict[str, float] = {}
    for name, begin, end in launches:
        end.synchronize()
        times[name] = times.get(name, 0.0) + cp.cuda.get_elapsed_time(begin, end)
    return dict(sorted(times.items(), key=lambda item: -item[1]))


def make_call(
    variant: str, rows: int, columns: int, steps: int, trajectories: int, **options: Any
) -> Callable[[], Any]:
    """Return one estimate as a call."""
    spec = paper_lattice(rows, columns, steps=steps)
    if "Heun" in variant:
        spec = spec.replace(integrator="heun")
    options = {"backend": "cuda", **options}
    table = np.linspace(0.2, 0, steps + 1)
    if variant.startswith("twin"):
        return lambda: run_twin(spec, 0, trajectories, table=1e-3 * table, **options)
    baseline = Binned(20, 50) if variant == "binned" else table
    return lambda: kernel.run(spec, 0, trajectories, baseline=baseline, **options)


def measure(cp: Any, call: Callable[[], Any], repeats: int) -> tuple[float, dict[str, float]]:
    """Return the milliseconds of the fastest whole call, and of the kernels in the fastest one."""
    call()
    best = np.inf
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    fastest: dict[str, float] = {}
    with time_launches(cp) as launches:
        call()  # loads the network
        for _ in range(repeats):
            launches.clear()
            call()
            kernels = add_by_name(cp, launches)
            if not fastest or sum(kernels.values()) < sum(fastest.values()):
                fastest = kernels
    return 1e3 * best, fastest


def measure_lattice(
    cp: Any, size: tuple[int, int], trajectories: int, steps: int, repeats: int
) -> list[Row]:
    """Return the times of all variants on one lattice; one that is refused is left out."""
    rows: list[Row] = []
    each = 1e9 / (size[0] * size[1] * trajectories * steps)
    for variant in VARIANTS:
        try:
            whole, kernels = measure(cp, make_call(variant, *size, steps, trajectories), repeats)
        except ValueError as refusal:
            print(f"  {size[0]} × {size[1]}, {variant}: refused: {refusal}", flush=True)
            continue
        alone = sum(kernels.values())
        first = rows[0] if rows else None
        row = Row(
            f"{size[0]} × {size[1]}",
            variant,
            trajectories,
            steps,
            round(whole, 2),
            round(each * whole, 2),
            round(each * whole / first.whole_ps, 2) if first else 1.0,
            round(each * alone, 2),
            round(each * alone / first.kernel_ps, 2) if first else 1.0,
            ", ".join(f"{name} {ms:.1f}" for name, ms in kernels.items()),
        )
        rows.append(row)
        print("  " + format_row(row), flush=True)
    return rows


def format_row(row: Row) -> str:
    """Return a row for people."""
    return (
        f"{row.lattice:>9}, {row.variant:15} {row.whole_ms:9.1f} ms "
        f"{row.whole_ps:7.2f} ps ({row.ratio:5.2f} ×)   kernels {row.kernel_ps:7.2f} ps "
        f"({row.kernel_ratio:5.2f} ×)   {row.kernels}"
    )


def write_table(rows: list[Row], path: Path) -> None:
    """Write the rows as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Row._fields)
        writer.writerows(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trajectories", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sizes", nargs="*", default=[f"{a}x{b}" for a, b in SIZES])
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    cp = require_cupy()
    print(cp.cuda.runtime.getDeviceProperties(0)["name"].decode(), "CuPy", cp.__version__)
    print(
        f"{options.trajectories:,} trajectories × {options.steps:,} steps, fastest of "
        f"{options.repeats}; per site and step"
    )
    rows: list[Row] = []
    for size in options.sizes:
        a, b = (int(side) for side in size.split("x"))
        rows += measure_lattice(cp, (a, b), options.trajectories, options.steps, options.repeats)
        if options.out:
            write_table(rows, options.out)


if __name__ == "__main__":
    main()
