"""Peak memory of 30,000 trajectories of the paper's lattice, by baseline: no array of size E × T.

python benchmarks/memory.py [--backend cpu] [--steps 400] [--trajectories 30000]

Each baseline runs in a process of its own, because a peak is never given back. Memory does not
depend on the number of steps, so a short horizon shows it.
"""

import argparse
import subprocess
import sys

CODE = """
import sys, numpy as np
sys.path.insert(0, {folder!r})
from kernel_cpu import paper_lattice
from fluctua.tcmt.kernel.options import Binned
from fluctua.tcmt.kernel.run import run
spec = paper_lattice(steps={steps})
tables = {{"none": None, "time": np.zeros({steps} + 1), "binned": Binned(every=100)}}
baseline = tables[{baseline!r}]
run(spec, 0, {trajectories}, baseline=baseline, backend={backend!r})
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
device = 0
if {backend!r} == "cuda":
    import cupy
    device = cupy.get_default_memory_pool().total_bytes()
print(int(status["VmHWM"].split()[0]) * 1024, device)
"""

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--trajectories", type=int, default=30_000)
    options = parser.parse_args()
    for baseline in ("none", "time", "binned"):
        code = CODE.format(
            folder=str(__file__).rsplit("/", 1)[0], baseline=baseline, **vars(options)
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        host, device = map(int, done.stdout.split())
        on_device = f", {device / 2**30:.2f} GiB on the GPU" if device else ""
        print(
            f"{options.trajectories:,} trajectories, {baseline:>6}: {host / 2**30:.2f} GiB of host "
            f"memory{on_device}"
        )
