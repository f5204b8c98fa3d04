"""How long the CPU kernel takes on the paper's lattice, per instruction set, precision and
baseline.

python benchmarks/kernel_cpu.py [--trajectories 1000] [--steps 20000] [--repeat 3] [--engines all]
"""

import argparse
import time

import numpy as np

from fluctua.tcmt.kernel import run as kernel
from fluctua.tcmt.kernel.options import Binned, KernelSpec
from fluctua.tcmt.native import _native


def paper_lattice(
    rows=11, columns=13, steps=20_000, sigma_kappa=0.0, dt=1e-3, sigma=0.5
) -> KernelSpec:
    """The paper's start, in the frame of the drive."""
    n = rows * columns
    index = np.arange(n).reshape(rows, columns)
    across = np.stack([index[:, :-1].ravel(), index[:, 1:].ravel()], 1)
    down = np.stack([index[:-1].ravel(), index[1:].ravel()], 1)
    bonds = np.concatenate([across, down])
    rate = np.full(n, 0.02)
    rate[[0, -1]] += 1.0
    return KernelSpec(
        omega=np.zeros(n),
        kappa=np.ones(len(bonds)),
        chi=1e-4 * np.random.default_rng(0).standard_normal(n),
        bonds=bonds,
        damping=rate,
        noise=sigma * np.sqrt(2 * rate),
        dt=dt,
        steps=steps,
        drive_sites=np.array([0]),
        drive=np.array([10 * np.sqrt(2.0) + 0j]),
        port_sites=np.array([n - 1]),
        port_gain=np.array([np.sqrt(2.0)]),
        port_weight=np.array([1 / (100 * steps * dt)]),
        incoming=np.zeros(1, complex),
        sigma_kappa=sigma_kappa,
    )


def seconds(repeat, call):
    best = np.inf
    for _ in range(repeat):
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trajectories", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--repeat", type=int, default=3, help="the fastest of so many is printed")
    parser.add_argument("--engines", default="best", choices=["best", "all"])
    a = parser.parse_args()
    spec = paper_lattice(steps=a.steps)
    table = kernel.run(spec, 1, 128, scores=False).mean_return_to_go
    variants = {
        "no baseline": (spec, {}),
        "time-only": (spec, {"baseline": table}),
        "time-only, σ_κ = 0.2": (
            paper_lattice(steps=a.steps, sigma_kappa=0.2),
            {"baseline": table},
        ),
        "time-only, float64": (spec, {"baseline": table, "dtype": "float64"}),
        "binned": (spec, {"baseline": Binned(every=100)}),
        "simulation only": (spec, {"scores": False}),
    }
    print(
        f"{a.trajectories} trajectories × {a.steps} steps, {spec.omega.size} sites, "
        f"{len(spec.bonds)} bonds"
    )
    for engine in _native.engines() if a.engines == "all" else _native.engines()[:1]:
        for name, (of, options) in variants.items():
            t = seconds(
                a.repeat,
                lambda of=of, o=options, e=engine: kernel.run(of, 0, a.trajectories, engine=e, **o),
            )
            print(f"{engine:10} {name:24} {t:8.2f} s", flush=True)


if __name__ == "__main__":
    main()
