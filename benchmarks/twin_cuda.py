"""How long the twin correction takes on the GPU: the paper's lattice, whole calls, the best of
three.

`python benchmarks/twin_cuda.py [trajectories]`
"""

import sys
import time

import jax

from fluctua import tcmt
from fluctua.tcmt.fused import kernel_spec
from fluctua.tcmt.kernel import run as kernel
from fluctua.tcmt.kernel.twin import run_twin

if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    theta = tcmt.initial_parameters(jax.random.key(0), tcmt.paper())
    for sigma, ranks in ((0.0, (0, 8, 16)), (0.2, (0,))):
        spec = kernel_spec(tcmt.transmission(tcmt.paper(), sigma_kappa=sigma), theta)
        table = kernel.run(spec, 1, 128, scores=False, backend="cuda").mean_return_to_go
        calls = {
            "time only": lambda spec=spec, table=table: kernel.run(
                spec, 0, count, baseline=table, backend="cuda"
            )
        }
        for rank in ranks:
            lam = run_twin(spec, 1, 128, rank=rank, backend="cuda").mean_lambda
            calls[f"twin, rank {rank}"] = lambda spec=spec, lam=lam, rank=rank: run_twin(
                spec, 0, count, rank=rank, table=lam, backend="cuda"
            )
        for name, call in calls.items():
            call()
            times = []
            for _ in range(3):
                begin = time.perf_counter()
                call()
                times.append(time.perf_counter() - begin)
            print(
                f"σ_κ = {sigma:g}  {name:<16} {1e3 * min(times):8.1f} ms for {count:,} "
                "trajectories",
                flush=True,
            )
