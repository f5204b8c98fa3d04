"""The CUDA kernel on a real GPU: every step against the reference, then timings with CUDA events.

python benchmarks/kernel_cuda_check.py [--quick]
python benchmarks/kernel_cuda_check.py --calls [--parts]     what a call costs beside its kernel
python benchmarks/kernel_cuda_check.py --large               steps and baselines of large networks

Needs CuPy. Exits with 1 if a check fails.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "benchmarks")]

from gpu_check import only_kernels  # noqa: E402

try:
    import fluctua.tcmt  # noqa: F401
except ImportError as missing:  # the kernels need less than the rest of the library
    if str(missing.name).startswith("fluctua"):
        raise
    where = next(folder for folder in sys.path if (Path(folder) / "fluctua" / "tcmt").is_dir())
    only_kernels(Path(where))

from fluctua.tcmt.kernel import cuda  # noqa: E402
from fluctua.tcmt.kernel import run as kernel  # noqa: E402
from fluctua.tcmt.kernel.layout import make_plan  # noqa: E402
from fluctua.tcmt.kernel.options import Binned, KernelJob, KernelOptions  # noqa: E402
from fluctua.tcmt.kernel.twin import run_twin  # noqa: E402
from kernel_cpu import paper_lattice  # noqa: E402
from kernel_reference import binned_bars, rectangle, simulate  # noqa: E402

SEED = 0x1234_5678_9ABC_DEF0
BACKENDS = ("cpu", "cuda")
FAILED = []


def deviation(actual, expected):
    scale = np.abs(expected).max() if np.size(expected) else 1.0
    return float(np.abs(actual - expected).max() / scale) if np.size(expected) else 0.0


def report(name, what, value, limit):
    ok = value < limit
    if not ok:
        FAILED.append(f"{name}: {what}")
    print(
        f"  {name:44} {what:18} {value:9.2e}  {'ok' if ok else f'FAILED, limit {limit:g}'}",
        flush=True,
    )


def check_against_reference():
    print("CUDA against the float64 reference, step by step (largest deviation over largest value)")
    cases = {
        "plain": ({}, {}),
        "lab frame": ({"lab": True}, {}),
        "odd steps": ({"steps": 61}, {}),
        "modulated": ({"sigma_kappa": 0.2, "steps": 150, "dt": 2e-3}, {}),
        "antithetic, modulated": ({"sigma_kappa": 0.2}, {"antithetic": True}),
        "chain": ({"rows": 1, "columns": 5}, {}),
        "one resonator": ({"rows": 1, "columns": 1}, {}),
        "40 × 40": ({"rows": 40, "columns": 40, "steps": 20}, {}),
    }
    for dtype, limit in (("float32", 5e-5), ("float64", 1e-10)):
        for name, (network, options) in cases.items():
            spec = rectangle(**network)
            path = simulate(spec, SEED, 20, **options)
            table = np.append(path.rewards.mean(0)[::-1].cumsum()[::-1], 0.0) + 0.01
            for baseline in (None, table):
                run = kernel.run(
                    spec,
                    SEED,
                    20,
                    backend="cuda",
                    dtype=dtype,
                    baseline=baseline,
                    rates=spec.omega.size > 1,
                    record_every=1,
                    samples=True,
                    **options,
                )
                expected = path.gradient(0.0 if baseline is None else table[None, 1:, None])
                label = f"{name}, {dtype}{'' if baseline is None else ', time-only'}"
                report(label, "trajectories", deviation(run.trajectories, path.psi), limit)
                report(label, "returns", deviation(run.returns, path.rewards.sum(1)), limit)
                report(label, "return to go", deviation(run.mean_return_to_go, table - 0.01), limit)
                samples = {k: v for k, v in run.samples._asdict().items() if v is not None}
                worst = max(deviation(samples[k], v) for k, v in expected.items() if k in samples)
                report(label, "scores", worst, limit)
                if "gain" in samples:
                    report(
                        label, "∂g/∂gain", deviation(samples["gain"], path.explicit.sum(1)), limit
                    )


def check_heun():
    print("Heun's step on CUDA against the CPU kernel, on the same noise")
    cases = {
        "a drive in time, rates": ({"lab": True, "steps": 61}, {"rates": True}),
        "modulated, antithetic": ({"sigma_kappa": 0.2, "dt": 0.03}, {"antithetic": True}),
        "modulated, longer pieces": ({"sigma_kappa": 0.2, "steps": 150, "dt": 2e-3}, {}),
        "40 × 40": ({"rows": 40, "columns": 40, "steps": 20}, {}),
    }
    for dtype, limit in (("float32", 5e-5), ("float64", 1e-10)):
        for name, (network, options) in cases.items():
            spec = rectangle(**network, integrator="heun")
            options = {
                **options,
                "dtype": dtype,
                "samples": True,
                "baseline": np.linspace(0.02, 0.01, spec.steps + 1),
            }
            cpu = kernel.run(spec, SEED, 20, **options)
            gpu = kernel.run(spec, SEED, 20, backend="cuda", **options)
            report(f"{name}, {dtype}", "returns", deviation(gpu.returns, cpu.returns), limit)
            of = zip(gpu.samples, cpu.samples, strict=True)
            report(
                f"{name}, {dtype}",
                "scores",
                max(deviation(a, b) for a, b in of if b is not None),
                limit,
            )


def time_heun(cp):
    """Picoseconds a site and step of whole calls, Euler's beside Heun's."""
    print("The paper's lattice, 2,000 steps, 20,000 trajectories, whole calls, fastest of 3")
    for sigma_kappa in (0.0, 0.2):
        for step in ("euler", "heun"):
            spec = paper_lattice(steps=2_000, sigma_kappa=sigma_kappa).replace(integrator=step)
            best = np.inf
            for _ in range(4):
                begin = time.perf_counter()
                kernel.run(spec, 0, 20_000, backend="cuda")
                cp.cuda.Device().synchronize()
                best = min(best, time.perf_counter() - begin)
            each = best / (20_000 * 2_000 * spec.sites) * 1e12
            print(
                f"  σ_κ = {sigma_kappa}, {step:6} {1e3 * best:9.2f} ms   {each:6.2f} ps a site and "
                "step",
                flush=True,
            )


def check_binned():
    print("The binned baseline on CUDA against its definition")
    cases = {
        "5 bins, every step": (rectangle(2, 3, steps=24), 50, Binned(5, 1)),
        "5 bins, every 7 steps, modulated": (
            rectangle(2, 3, steps=40, sigma_kappa=0.2),
            50,
            Binned(5, 7),
        ),
        "40 bins, many with one member": (rectangle(2, 3, steps=24), 50, Binned(40, 3)),
        "1,300 trajectories": (rectangle(2, 2, steps=6), 1300, Binned(20, 3)),
    }
    for dtype, limit in (("float32", 5e-4), ("float64", 1e-9)):
        for name, (spec, count, baseline) in cases.items():
            path = simulate(spec, SEED, count)
            path = path._replace(scores={k: path.scores[k] for k in ("omega", "kappa", "chi")})
            expected = path.gradient(binned_bars(spec, path, baseline.bins, baseline.every))
            run = kernel.run(
                spec, SEED, count, backend="cuda", dtype=dtype, baseline=baseline, samples=True
            )
            worst = max(deviation(getattr(run.samples, k), v) for k, v in expected.items())
            report(f"{name}, {dtype}", "gradients", worst, limit)


def time_binned(cp, quick):
    steps = 2_000 if quick else 20_000
    print(
        f"Binned baseline, the paper's lattice, {steps} steps; whole calls, both passes, fastest "
        "of 3"
    )
    for sigma_kappa in (0.0, 0.2):
        spec = paper_lattice(steps=steps, sigma_kappa=sigma_kappa)
        for count in (1000,) if quick else (1000, 4000, 30_000):
            for every in (50, 1) if count == 1000 and sigma_kappa == 0 else (50,):
                best = np.inf
                for _ in range(2 if count > 1000 or every == 1 else 4):
                    begin = time.perf_counter()
                    kernel.run(spec, 0, count, backend="cuda", baseline=Binned(20, every))
                    cp.cuda.Device().synchronize()
                    best = min(best, time.perf_counter() - begin)
                used = cp.get_default_memory_pool().total_bytes() / 2**30
                label = f"σ_κ = {sigma_kappa}, sorted every {every}"
                print(
                    f"  {label:44} {count:6} {1e3 * best:9.1f} ms   pool {used:.2f} GiB", flush=True
                )
                cp.get_default_memory_pool().free_all_blocks()


def check_against_cpu(quick):
    print("CUDA against the CPU kernel, the paper's lattice over its full horizon, 64 trajectories")
    for sigma_kappa in (0.0, 0.2):
        spec = paper_lattice(steps=2_000 if quick else 20_000, sigma_kappa=sigma_kappa)
        options = {"record_every": spec.steps // 10, "samples": True}
        cpu, gpu = (kernel.run(spec, SEED, 64, backend=b, **options) for b in ("cpu", "cuda"))
        label = f"σ_κ = {sigma_kappa}"
        report(label, "trajectories", deviation(gpu.trajectories, cpu.trajectories), 1e-4)
        report(label, "returns", deviation(gpu.returns, cpu.returns), 1e-4)
        for name in ("omega", "kappa", "chi"):
            report(
                label,
                f"scores of {name}",
                deviation(getattr(gpu.samples, name), getattr(cpu.samples, name)),
                1e-3,
            )


def check_large():
    print(
        "CUDA against the CPU kernel, networks of several blocks: 6 trajectories × 101 steps, all "
        "of their parameters"
    )
    for rows, columns, network, options in (
        (48, 48, {}, {}),
        (64, 64, {"lab": True}, {"rates": True}),
        (64, 64, {"sigma_kappa": 0.2}, {"antithetic": True}),
        (80, 80, {}, {"dtype": "float64"}),
        (100, 100, {"sigma_kappa": 0.2}, {"rates": True}),
        (150, 150, {}, {}),
    ):
        spec = rectangle(rows, columns, steps=101, **network)
        options = {
            "record_every": 25,
            "samples": True,
            "baseline": np.linspace(0.02, 0, 102),
            **options,
        }
        cpu, gpu = (kernel.run(spec, SEED, 6, backend=b, **options) for b in ("cpu", "cuda"))
        label = f"{rows} × {columns}, " + ", ".join(map(str, [*network, *list(options)[3:]]))
        limit = 1e-10 if options.get("dtype") == "float64" else 1e-4
        report(label, "trajectories", deviation(gpu.trajectories, cpu.trajectories), limit)
        report(label, "returns", deviation(gpu.returns, cpu.returns), limit)
        pairs = [
            (getattr(gpu.samples, k), v) for k, v in cpu.samples._asdict().items() if v is not None
        ]
        report(label, "scores", max(deviation(*pair) for pair in pairs), limit)


def check_large_baselines():
    """Heun's step, the twin and the binned baseline on networks of several blocks."""
    print("CUDA against the CPU kernel, other steps and baselines on networks of several blocks")
    for size, variant, network, options in (
        (64, "Heun", {"integrator": "heun", "lab": True}, {"rates": True}),
        (64, "Heun", {"integrator": "heun", "sigma_kappa": 0.2}, {"antithetic": True}),
        (100, "Heun", {"integrator": "heun"}, {"dtype": "float64"}),
        (64, "binned", {}, {"baseline": Binned(4, 20)}),
        (100, "binned", {"sigma_kappa": 0.2}, {"baseline": Binned(4, 20)}),
        (32, "twin", {"lab": True}, {"rates": True}),
        (64, "twin", {}, {"dtype": "float64"}),
        (64, "twin", {"sigma_kappa": 0.2}, {"antithetic": True}),
        (64, "twin", {}, {"rank": 8}),
        (100, "twin", {}, {"rates": True}),
        (64, "twin", {"integrator": "heun"}, {"rates": True}),
        (64, "twin", {"integrator": "heun", "sigma_kappa": 0.2}, {"dtype": "float64"}),
        (100, "twin", {"integrator": "heun"}, {}),
    ):
        spec = rectangle(size, size, steps=61, **network)
        count = 24 if variant == "binned" else 6
        run = run_twin if variant == "twin" else kernel.run
        if variant == "twin":
            options = {"table": np.linspace(3e-3, 0, 62), **options}
        cpu, gpu = (run(spec, SEED, count, backend=b, samples=True, **options) for b in BACKENDS)
        label_parts = [*network, *(k for k in options if k not in ("table", "baseline"))]
        label = f"{size} × {size}, {variant}, " + ", ".join(label_parts)
        limit = 1e-8 if options.get("dtype") == "float64" else 1e-3
        report(label, "returns", deviation(gpu.returns, cpu.returns), limit)
        parts = ("direct_samples", "correction_samples") if variant == "twin" else ("samples",)
        for part in parts:
            pairs = zip(getattr(gpu, part), getattr(cpu, part), strict=True)
            worst = max(deviation(a, b) for a, b in pairs if b is not None and np.any(b))
            report(label, part.replace("_", " "), worst, limit)


def event_time(cp, call, repeat):
    """Median milliseconds between two events."""
    call()
    cp.cuda.Device().synchronize()
    times = []
    for _ in range(repeat):
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(cp.cuda.get_elapsed_time(begin, end))
    return float(np.median(times))


def time_one_pass(cp, quick):
    print(
        "One pass, the paper's lattice, median of CUDA events: the kernel, then kernel and "
        "reduction"
    )
    print(
        f"  {'variant':44} {'E':>6} {'kernel':>10} {'+ reduce':>10} {'whole call':>11}  regs spill "
        "blocks/SM"
    )
    steps, repeat = (2_000, 3) if quick else (20_000, 7)
    table = np.linspace(0.2, 0, steps + 1)
    plain, modulated = paper_lattice(steps=steps), paper_lattice(steps=steps, sigma_kappa=0.2)
    variants = {
        "time-only": (plain, {"baseline": table}),
        "no baseline": (plain, {}),
        "time-only, σ_κ = 0.2": (modulated, {"baseline": table}),
        "time-only, antithetic": (plain, {"baseline": table, "antithetic": True}),
        "time-only, rates": (plain, {"baseline": table, "rates": True}),
        "simulation only": (plain, {"scores": False}),
        "time-only, float64": (plain, {"baseline": table, "dtype": "float64"}),
    }
    for count in (1000,) if quick else (1000, 20_000):
        for name, (spec, options) in variants.items():
            ensemble = make_ensemble(spec, count, **options)
            device = cuda.LoadedNetwork(cp, ensemble, make_plan(ensemble))
            few = min(count, device.chunk)
            bare = event_time(cp, lambda d=device, n=few: d.launch(0, n, 0), repeat)
            full = bare
            if ensemble.scores:
                full = event_time(
                    cp,
                    lambda d=device, n=few: d.add_moments(d.launch(0, n, 0)),
                    max(2, repeat // 2),
                )
            begin = time.perf_counter()
            kernel.run(spec, 0, count, backend="cuda", **options)
            whole = 1e3 * (time.perf_counter() - begin)
            k = device.kernel
            print(
                f"  {name:44} {few:6} {bare:8.2f}ms {full:8.2f}ms {whole:9.2f}ms  "
                f"{k.num_regs:4} {k.local_size_bytes:5} {device.blocks}",
                flush=True,
            )


def make_ensemble(spec, count, baseline=None, **options):
    return KernelJob(spec, 0, count, KernelOptions(backend="cuda", **options), table=baseline)


def time_sizes(cp, quick):
    print("How the time grows: one pass, time-only, 1,000 trajectories × 2,000 steps")
    print(f"  {'lattice':26} {'whole launch':>13} {'kernel':>11} {'ps a site and step':>19}  {HOW}")
    for size in [4, 8, (11, 13), 16, 32, *([] if quick else [33, 45, 48, 64, 80, 100, 128])]:
        time_size(cp, *(size if isinstance(size, tuple) else (size, size)))
    for size in (32, 64) if quick else (16, 32, 64, 100):
        time_size(cp, size, size, sigma_kappa=0.2)
    for size in () if quick else (32, 64):
        time_size(cp, size, size, rates=True)
        time_size(cp, size, size, dtype="float64")


HOW = "blocks × threads × sites, clusters at once, registers, bytes of stack"


def time_size(cp, rows, columns, sigma_kappa=0.0, count=1000, **options):
    spec = paper_lattice(rows, columns, steps=2_000, sigma_kappa=sigma_kappa)
    ensemble = make_ensemble(spec, count, baseline=np.linspace(0.2, 0, 2_001), **options)
    device = cuda.LoadedNetwork(cp, ensemble, make_plan(ensemble))
    launch = event_time(
        cp, lambda: device.launch(0, min(count, device.chunk), 0), 3 if rows < 64 else 1
    )
    alone, k, how = kernel_time(cp, device, count), device.kernel, device.layout
    each = 1e9 / (rows * columns * 2e3 * min(count, device.chunk))
    name = (
        f"{rows} × {columns}"
        + (f", σ_κ = {sigma_kappa}" if sigma_kappa else "")
        + "".join(map(_describe_option, options.items()))
    )
    print(
        f"  {name:26} {launch:11.3f}ms {alone:9.3f}ms {each * alone:19.2f}  "
        f"{how.cluster:2} × {how.threads} × {how.per}, {device.grid}, {k.num_regs}, "
        f"{k.local_size_bytes}",
        flush=True,
    )


def _describe_option(option):
    return f", {option[0] if option[1] is True else option[1]}"


def time_spreads(cp):
    """The same with the sites spread over more and fewer blocks than `spread` says."""
    print("How sites are spread over blocks: one pass, time-only, 1,000 trajectories × 2,000 steps")
    chosen = cuda.spread
    ways = {
        33: [(1, 2), (2, 1), (2, 2)],
        48: [(2, 2), (3, 1), (3, 2), (4, 1)],
        64: [(2, 2), (3, 2), (4, 1), (4, 2), (8, 1)],
        80: [(4, 2), (5, 2), (7, 1), (8, 1), (8, 2), (16, 1)],
        100: [(8, 2), (10, 1), (16, 1), (16, 2)],
        128: [(12, 2), (16, 1), (16, 2)],
    }
    try:
        for size, several in ways.items():
            for way in several:
                cuda.spread = lambda *_, way=way: way
                for sigma_kappa in (0.0, 0.2) if size in (64, 100) else (0.0,):
                    time_size(cp, size, size, sigma_kappa)
    finally:
        cuda.spread = chosen


CALLS = 30
SHORT, LONG = 100, 2000
"""Steps of calls whose own cost is looked at. While a kernel runs, the host is ahead: a longer
run hides more of it.
"""


def time_calls(cp, in_parts):
    """The seconds of an estimate that are not the kernel's: whole calls, beside the kernel
    alone.
    """
    import jax

    print(
        f"Whole calls of an estimator, median of {CALLS}; θ on the host, then on JAX's own device"
    )
    print(
        f"  {'lattice':10} {'steps':>6} {'E':>6} {'baseline':8} {'θ':>4} {'estimator':>11} "
        f"{'fastest':>9} "
        f"{'kernel.run':>11} {'kernel':>9} {'estimator − kernel':>19}"
    )
    for rows, columns in ((4, 4), (11, 13), (32, 32)):
        for steps in (SHORT, LONG):
            for count in (100, 1000):
                baselines = ["table"]
                if (rows, steps, count) == (11, SHORT, 1000):
                    baselines += ["time", "binned", "twin"]
                spec, table = (
                    paper_lattice(rows, columns, steps=steps),
                    np.linspace(0.2, 0, steps + 1),
                )
                direct = wall(
                    lambda s=spec, n=count, b=table: kernel.run(s, 0, n, backend="cuda", baseline=b)
                )[0]
                ensemble = make_ensemble(spec, count, baseline=table)
                alone = kernel_time(
                    cp, cuda.LoadedNetwork(cp, ensemble, make_plan(ensemble)), count
                )
                for name in baselines:
                    for place in sorted({"cpu", jax.default_backend()}):
                        with jax.default_device(jax.devices(place)[0]):
                            call, estimator = whole_call(rows, columns, steps, count, name)
                            median, least = wall(call)
                            beside = f"{median - alone:17.3f}ms" if name == "table" else ""
                            print(
                                f"  {rows:3} × {columns:<4} {steps:6} {count:6} {name:8} "
                                f"{place:>4} {median:9.3f}ms "
                                f"{least:7.3f}ms {direct:9.3f}ms {alone:7.3f}ms {beside}",
                                flush=True,
                            )
                            if (
                                in_parts
                                and name == "table"
                                and (rows, steps, count) == (11, SHORT, 1000)
                            ):
                                time_parts(cp, estimator, count)


def whole_call(rows, columns, steps, count, name):
    """An estimate as a call, and its estimator."""
    import jax

    from fluctua import tcmt
    from lattice_speed import DT

    baselines = {"table": np.linspace(0.2, 0, steps + 1), "binned": Binned(20, 50)}
    network = tcmt.rectangular(rows, columns)
    task = tcmt.transmission(network, horizon=steps * DT, dt=DT)
    estimator, key = task.estimator("cuda", baseline=baselines.get(name, name)), jax.random.key(1)
    theta = tcmt.initial_parameters(jax.random.key(0), network)
    return lambda: jax.block_until_ready(estimator(key, theta, count).gradient), estimator


def kernel_time(cp, device, count):
    """Milliseconds of `one_pass` by itself."""
    few = min(count, device.chunk)
    _part = device.launch(0, few, 0)  # what the kernel writes to again
    grid, arguments = min(device.grid, few) * device.layout.cluster, device.make_arguments(0, few)

    def call():
        return device.kernel((grid,), (device.layout.threads,), arguments, shared_mem=device.shared)

    return event_time(cp, call, 15 if device.layout.cluster == 1 else 3)


def wall(call):
    """Milliseconds of a call after some that compile and warm up: median and least."""
    for _ in range(5):
        call()
    times = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - begin))
    return float(np.median(times)), min(times)


def time_parts(cp, estimator, count):
    """What the parts of a call take by themselves, one after the other."""
    import jax

    from fluctua import tcmt
    from fluctua.core import check
    from fluctua.core.streamed import estimate_seeds
    from fluctua.tcmt import conversion

    key, theta = (
        jax.random.key(1),
        tcmt.initial_parameters(jax.random.key(0), estimator.task.network),
    )
    values = check.host_parameters(theta)
    spec = estimator._spec(values)
    ensemble = make_ensemble(spec, count, baseline=estimator.baseline)
    plan = make_plan(ensemble)
    device = cuda.LoadedNetwork(cp, ensemble, plan)
    part = device.add_moments(device.launch(0, count, 0))
    sums = cuda.run(ensemble)
    result = kernel.make_result(ensemble, sums)
    of_blocks, of_parts = cp.zeros((device.grid, spec.steps)), cp.zeros((62, 3, ensemble.width))
    parts = {
        "θ is checked and read": lambda: check.host_parameters(
            check.parameters(theta, numbers=False)
        ),
        "its time step is watched": lambda: estimator.watch(estimator.task, values),
        "the network's arrays": lambda: estimator._spec(values),
        "seeds of a key": lambda: estimate_seeds(key),
        "an ensemble": lambda: make_ensemble(spec, count, baseline=estimator.baseline),
        "its plan": lambda: make_plan(ensemble),
        "on the device": lambda: cuda.LoadedNetwork(cp, ensemble, plan),
        "of that, the copy": device._upload,
        "a launch": lambda: device.launch(0, count, 0),
        "of that, the sum of rewards": lambda: of_blocks.sum(axis=0, out=part.sums["reward_sum"]),
        "moments": lambda: device.add_moments(part),
        "of that, the sum": lambda: of_parts.sum(axis=0, out=part.sums["moments"]),
        "the copy back": part.sums.get,
        "the kernels' part of all this": lambda: cuda.run(ensemble),
        "means and errors": lambda: kernel.make_result(ensemble, sums),
        "as arrays of JAX": lambda: conversion.to_estimate(theta, result),
    }
    for name, call in parts.items():
        median, least = wall(call)
        cp.cuda.Device().synchronize()
        print(f"      {name:30} {1e3 * median:7.0f} µs, fastest {1e3 * least:5.0f} µs", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-checks", action="store_true")
    parser.add_argument("--checks", action="store_true", help="nothing but the checks")
    parser.add_argument(
        "--sizes", action="store_true", help="nothing but large networks and the table of sizes"
    )
    parser.add_argument(
        "--spreads", action="store_true", help="and how it depends on the blocks of a trajectory"
    )
    parser.add_argument(
        "--calls", action="store_true", help="nothing but what a call costs beside its kernel"
    )
    parser.add_argument("--parts", action="store_true", help="and where")
    parser.add_argument(
        "--large", action="store_true", help="nothing but steps and baselines of large networks"
    )
    parser.add_argument(
        "--heun", action="store_true", help="nothing but Heun's step: checks and times"
    )
    a = parser.parse_args()
    cp = cuda.require_cupy()
    print(cp.cuda.runtime.getDeviceProperties(0)["name"].decode(), "CuPy", cp.__version__)
    if a.calls:
        time_calls(cp, a.parts)
        return 0
    if a.large:
        check_large_baselines()
        return verdict()
    if a.heun:
        check_heun()
        time_heun(cp)
        return verdict()
    if a.sizes or a.spreads:
        check_large()
        check_large_baselines()
        time_sizes(cp, a.quick)
        if a.spreads:
            time_spreads(cp)
        return verdict()
    if not a.no_checks:
        check_large()
        check_large_baselines()
        check_against_reference()
        check_heun()
        check_binned()
        check_against_cpu(a.quick or a.checks)
    if not a.checks:
        time_all(cp, a.quick)
    return verdict()


def verdict():
    print("FAILED: " + "; ".join(FAILED) if FAILED else "all checks passed")
    return 1 if FAILED else 0


def time_all(cp, quick):
    time_one_pass(cp, quick)
    time_binned(cp, quick)
    time_sizes(cp, quick)


if __name__ == "__main__":
    sys.exit(main())
