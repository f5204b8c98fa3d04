"""Pieces of an ensemble on one GPU and on as many as there are: the same bits, and what it costs.

    python benchmarks/several_gpus.py [--pretend 2]

Where there is one GPU, `--pretend N` has it stand for N: the bits are compared as they would be,
times are not."""

import argparse
import time

import numpy as np

from fluctua.tcmt.kernel import cuda, gpus
from fluctua.tcmt.kernel import run as kernel
from fluctua.tcmt.kernel.options import Binned
from fluctua.tcmt.kernel.twin import run_twin
from kernel_cpu import paper_lattice


def time_call(function):
    function()
    started = time.perf_counter()
    result = function()
    return result, time.perf_counter() - started


def same(one, other):
    """Whether every array of two results has the same bits."""
    for a, b in zip(one, other, strict=True):
        parts = zip(a, b, strict=True) if hasattr(a, "_asdict") else ((a, b),)
        if not all(v is None or np.array_equal(v, w) for v, w in parts):
            return False
    return True


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--pretend", type=int, default=0)
    options.add_argument("--steps", type=int, default=1000)
    asked = options.parse_args()
    cp = cuda.require_cupy()
    numbers = [0] * asked.pretend if asked.pretend else gpus.list_gpus(cp)
    spec, table = paper_lattice(steps=asked.steps), np.linspace(0.2, 0, asked.steps + 1)
    cases = {
        "time-only, 100,000": lambda: kernel.run(spec, 1, 100_000, baseline=table, backend="cuda"),
        "twin, 40,000": lambda: run_twin(spec, 1, 40_000, table=0 * table, backend="cuda"),
        "binned, 16,384": lambda: kernel.run(
            spec, 1, 16_384, baseline=Binned(20, 50), backend="cuda"
        ),
    }
    pretended = " (one stands for all)" * bool(asked.pretend)
    print(f"11 × 13 resonators, {asked.steps:,} steps; {len(numbers)} GPUs{pretended}")
    every, piece = gpus.list_gpus, gpus.PIECE
    for name, run in cases.items():
        gpus.list_gpus = lambda cp: numbers[:1]
        one, alone = time_call(run)
        gpus.PIECE = 2**40
        _, whole = time_call(run)
        gpus.PIECE, gpus.list_gpus = piece, lambda cp: numbers
        several, shared = time_call(run)
        gpus.list_gpus = every
        bits = "the same bits" if same(one, several) else "OTHER BITS"
        print(
            f"  {name:20} one launch {whole:6.3f} s, pieces {alone:6.3f} s, on all {shared:6.3f} "
            f"s: {bits}",
            flush=True,
        )


if __name__ == "__main__":
    main()
