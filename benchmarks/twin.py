"""What the twin correction is worth on the paper's lattice: variance of each family, and cost, of every estimator.

Prints one table for each strength of modulation: variance of one trajectory's gradient averaged over a family, relative
to the paper's binned baseline, and processor time a trajectory and step, with and without what is computed once
a call: `python benchmarks/twin.py --count 256 --sigma 0 0.2`.
"""

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # waiting threads would be counted as processor time

import jax
import numpy as np

from fluctua import tcmt
from fluctua.tcmt import kernel
from fluctua.tcmt.fused import kernel_spec
from fluctua.tcmt.spec import KernelSpec
from fluctua.tcmt.twin_kernel import run_twin

FAMILIES = ("omega", "kappa", "chi")


def variance(result: Any) -> np.ndarray:
    return np.array([np.asarray(getattr(result.samples, f), float).var(axis=0, ddof=1).mean() for f in FAMILIES])


def measured(run: Callable[[int], Any], count: int, steps: int) -> tuple[np.ndarray, float, float]:
    """Variances, and nanoseconds a trajectory and step: of `count`, and of `count` more."""
    times = [np.inf, np.inf]
    for _ in range(3):
        for place, size in enumerate((count, 2 * count)):
            begin = time.process_time()
            result = run(size)
            times[place] = min(times[place], time.process_time() - begin)
    each = 1e9 / (count * steps)
    return variance(result), times[0] * each, (times[1] - times[0]) * each


def estimators(spec: KernelSpec, modulated: bool, ranks: list[int], backend: str) -> dict[str, Callable[[int], Any]]:
    shared: dict[str, Any] = {"backend": backend, "samples": True}
    pilot = kernel.run(spec, 1, 128, scores=False).mean_return_to_go
    made: dict[str, Callable[[int], Any]] = {
        "binned (the paper's)": lambda n: kernel.run(spec, 0, n, baseline=kernel.Binned(), **shared),
        "time only": lambda n: kernel.run(spec, 0, n, baseline=pilot, **shared),
        "twin": lambda n: run_twin(spec, 0, n, **shared),
    }
    if modulated:
        made["twin, modulation unknown"] = lambda n: run_twin(spec, 0, n, knows_modulation=False, **shared)
    else:
        for rank in ranks:
            made[f"twin, rank {rank}"] = lambda n, rank=rank: run_twin(spec, 0, n, rank=rank, **shared)  # type: ignore[misc]
    return made


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--count", type=int, default=256, help="trajectories (twice as many are run for the variances)")
    ask.add_argument("--sigma", type=float, nargs="+", default=[0.0, 0.2], help="strengths of the modulation")
    ask.add_argument("--rank", type=int, nargs="+", default=[4, 8, 16, 32], help="ranks of the quadratic term")
    ask.add_argument("--horizon", type=float, default=20.0)
    ask.add_argument("--backend", default="cpu")
    given = ask.parse_args()
    theta = tcmt.initial_parameters(jax.random.key(0), tcmt.paper())
    for sigma in given.sigma:
        spec = kernel_spec(tcmt.transmission(tcmt.paper(), sigma_kappa=sigma, horizon=given.horizon), theta)
        print(f"\nσ_κ = {sigma:g}, {2 * given.count} trajectories of {spec.steps} steps")
        print(f"{'':26} {'lower variance than binned':^30} ns a trajectory and step")
        print(f"{'':26} {'omega':>9} {'kappa':>9} {'chi':>9} {'of ' + str(given.count):>12} {'more':>9}")
        reference = None
        for name, run in estimators(spec, sigma > 0, given.rank, given.backend).items():
            found, total, marginal = measured(run, given.count, spec.steps)
            reference = found if reference is None else reference
            ratio = " ".join(f"{r:9.4g}" for r in reference / found)
            print(f"{name:26} {ratio} {total:12.0f} {marginal:9.0f}", flush=True)


if __name__ == "__main__":
    main()
