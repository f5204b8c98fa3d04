"""Speed of processes that a user writes: the generated kernel, JAX, and other libraries.

Every competitor of one process and ensemble is called in turn, several times over, so that a busy
machine is as busy for all of them. Times are of whole calls: estimates with the scores of all
parameters for us and for the kernel that was written by hand, simulations without scores for
diffrax and torchsde.

    python benchmarks/own_speed.py [--process pendulum] [--backend cuda] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fluctua.compiled.backend import simulator
from fluctua.compiled.toolchain import require_cupy
from fluctua.core.arrays import jit
from fluctua.core.baselines import time_only
from fluctua.core.estimation.batches import MIN_TRAJECTORIES
from fluctua.core.estimator import ppgt
from fluctua.core.streamed import estimate_seeds
from lattice_speed import write_json
from machine import describe_machine
from own_processes import FURTHER, Own
from own_processes import PROCESSES as FIRST

FOLDER = Path(__file__).parent
PROCESSES = {**FIRST, **FURTHER}
COUNTS = (2_000, 200_000)
BASELINES = ("time", "optimal", "twin")
KERNEL = (
    ("time", "threefry"),
    ("time", "philox"),
    ("time", "philox7"),
    ("optimal", "threefry"),
    ("twin", "threefry"),
)
"""Baselines and noises of the generated kernel. JAX has the noise that is the default, threefry."""
TWIN_MOST = 2_000
"""Trajectories of the twin on JAX: it takes 256 at a time, so that more of them cost as much each.
"""
CALL_SECONDS = 1.0
"""What a slow call on the CPU may take: it is cut to fewer steps, and the time given by step."""

FAST = ("-O3", "-march=native", "-fopenmp-simd", "-ffast-math", "-fPIC")
"""Vectors of sines come with `-ffast-math` alone."""


class Competitor(NamedTuple):
    """One row: `call` does the work of `trajectories` × `steps` and waits for it."""

    who: str
    what: str
    trajectories: int
    steps: int
    call: Callable[[], Any]


class Skipped(NamedTuple):
    """A row that is not there, and why."""

    who: str
    reason: str


def measure(
    backend: str,
    counts: tuple[int, ...],
    quick: bool,
    kernels: Path,
    names: tuple[str, ...] = (),
    baselines: tuple[str, ...] = BASELINES,
) -> dict[str, Any]:
    """All processes, or those with some names.

    Returns {"machine", "rows", "skipped"}; rows have ns per trajectory and step.
    """
    if backend not in ("cpu", "cuda"):
        raise ValueError(f'`backend` must be "cpu" or "cuda"; got {backend!r}.')
    unknown = sorted(set(names) - set(PROCESSES))
    if unknown:
        raise ValueError(f"no process {unknown[0]!r}; there are {', '.join(PROCESSES)}.")
    names = names or tuple(PROCESSES)
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2)) as pool:
        starts = dict(
            zip(names, pool.map(lambda name: starting(name, backend), names), strict=True)
        )
    rows = []
    skipped = {}
    for name in names:
        own = PROCESSES[name]()
        for count in counts:
            print(f"  {name}, {count:,} trajectories …")
            field = []
            for entry in competitors(name, own, backend, count, quick, kernels):
                if isinstance(entry, Skipped):
                    skipped[entry.who] = entry.reason
                elif entry.what.split(",")[0] in (*baselines, "simulation only"):
                    field.append(entry)
            rows += [{"process": name, **row} for row in race(field, 1 if quick else 3)]
    return {
        "machine": describe_machine(backend),
        "backend": backend,
        "quick": quick,
        "rows": rows,
        "starts": starts,
        "skipped": skipped,
    }


def starting(name: str, backend: str) -> dict[str, float]:
    """Seconds of the first call of a process with nothing compiled, of one with the kernel on disk,
    and of a later one.

    Of two trajectories and ten steps, so that nearly all of it is not the work itself.
    """
    program = (
        "import time; started = time.perf_counter(); from own_speed import PROCESSES, "
        "estimate\n"
        f"call = estimate(PROCESSES[{name!r}](), 'time', 2, 10, {backend!r}); imported = "
        "time.perf_counter()\n"
        "call(); first = time.perf_counter(); call(); again = time.perf_counter(); call()\n"
        "print(first - imported, time.perf_counter() - again)"
    )
    with tempfile.TemporaryDirectory() as folder:
        places = {
            "FLUCTUA_KERNELS": f"{folder}/kernels",
            "CUPY_CACHE_DIR": f"{folder}/cupy",
            "CUDA_CACHE_PATH": f"{folder}/driver",
        }
        times = []
        for _ in range(2):
            run = [sys.executable, "-c", program]
            done = subprocess.run(
                run,
                env={**os.environ, **places},
                cwd=FOLDER,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                reason = done.stderr.strip().splitlines()[-1]
                if "no kernel can be made" in reason:
                    return {}
                raise RuntimeError(reason)
            times.append([float(v) for v in done.stdout.split()])
    return {"first": times[0][0], "on disk": times[1][0], "later": min(times[0][1], times[1][1])}


def race(field: list[Competitor], rounds: int) -> list[dict[str, Any]]:
    """Call everyone in turn. first: seconds of the call that compiles; ns: of the best call,
    median_ns.
    """
    first = {c: _seconds(c.call) for c in field}
    times: dict[Competitor, list[float]] = {c: [] for c in field}
    for _ in range(rounds):
        for c in field:
            times[c].append(_seconds(c.call))

    def ns(c, seconds):
        return 1e9 * seconds / (c.trajectories * c.steps)

    return [
        {
            **c._asdict(),
            "call": None,
            "first": first[c],
            "seconds": min(t),
            "ns": ns(c, min(t)),
            "median_ns": ns(c, statistics.median(t)),
        }
        for c, t in times.items()
    ]


def _seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def competitors(
    name: str, own: Own, backend: str, count: int, quick: bool, kernels: Path
) -> Iterator[Competitor | Skipped]:
    """Everyone who can run this process here."""
    steps = max(2, own.steps // 20) if quick else own.steps

    def affordable(ns, most):
        return steps

    if backend == "cpu":

        def affordable(ns, most):
            return int(min(steps, max(10, CALL_SECONDS * 1e9 / (ns * most))))

    slow = affordable(own.cost, count)
    fast = affordable(own.cost / 12, count)
    for baseline in BASELINES:
        most = min(count, TWIN_MOST) if baseline == "twin" else count
        length = affordable(own.cost, most)
        yield Competitor(
            "JAX", baseline, most, length, estimate(own, baseline, most, length, "jax")
        )
    for baseline, noise in KERNEL:
        what = baseline if noise == "threefry" else f"{baseline}, {noise}"
        try:
            estimate(own, baseline, MIN_TRAJECTORIES, 2, backend, noise)()
        except ValueError as error:
            yield Skipped(f"kernel of {name}, {what}", str(error))
            continue
        yield Competitor(
            "kernel", what, count, fast, estimate(own, baseline, count, fast, backend, noise)
        )
    simulated = {"diffrax": diffrax_call, "torchsde": torchsde_call}
    for who, make in simulated.items():
        if who == "torchsde" and own.torch is None:
            continue
        try:
            yield Competitor(who, "simulation only", count, slow, make(own, backend, count, slow))
        except ImportError as error:
            yield Skipped(who, f"{error} (pip install 'fluctua[bench]')")
    if name == "pendulum":
        try:
            yield Competitor(
                "by hand", "time", count, fast, by_hand(own, backend, count, fast, kernels)
            )
        except (OSError, RuntimeError, ImportError) as error:
            yield Skipped("by hand", str(error))


def estimate(
    own: Own, baseline: str, count: int, steps: int, backend: str, noise: str = "threefry"
) -> Callable[[], Any]:
    """One estimate as a call; the table of the time-only baseline is known, as it is after a
    first estimate.
    """
    t = np.arange(steps + 1) * own.dt
    known: Any = time_only(_table(steps)) if baseline == "time" else baseline
    substrate = simulator(own.process, own.start, t, wiener=noise, backend=backend)
    estimator = ppgt(substrate, own.objective, baseline=known)
    key = jax.random.key(1)
    return lambda: jax.block_until_ready(estimator(key, own.theta, count))


def _table(steps: int) -> np.ndarray:
    return np.linspace(1.0, 0.0, steps + 1, dtype=np.float32)


def diffrax_call(own: Own, backend: str, count: int, steps: int) -> Callable[[], Any]:
    """Euler with the fastest noise and the cheapest derivatives that a fixed step allows."""
    import diffrax
    import lineax

    from fluctua.core import check

    process = check.process(own.process)
    end = steps * own.dt

    def one(key: Any) -> Any:
        path = diffrax.UnsafeBrownianPath(own.start.shape, key)

        def sigma(t, y, args):
            return lineax.DiagonalLinearOperator(process.noise(own.theta, y, t, None))

        drift = diffrax.ODETerm(lambda t, y, args: process.drift(own.theta, y, t, None))
        terms: Any = diffrax.MultiTerm(drift, diffrax.ControlTerm(sigma, path))
        return diffrax.diffeqsolve(
            terms,
            diffrax.Euler(),
            0.0,
            end,
            own.dt,
            own.start,
            max_steps=None,
            adjoint=diffrax.ForwardMode(),
        ).ys

    batch = jit(jax.vmap(one))
    return lambda: jax.block_until_ready(batch(jax.random.split(jax.random.key(0), count)))


def torchsde_call(own: Own, backend: str, count: int, steps: int) -> Callable[[], Any]:
    """Euler without derivatives."""
    import torch
    import torchsde

    place = "cuda" if backend == "cuda" else "cpu"

    def tensor(v):
        return torch.as_tensor(np.array(v), device=place)

    theta = jax.tree.map(tensor, own.theta)

    class System(torch.nn.Module):
        noise_type = "diagonal"
        sde_type = "ito"

        def f(self, t: Any, y: Any) -> Any:
            return own.torch(torch, theta, y)[0]

        def g(self, t: Any, y: Any) -> Any:
            return own.torch(torch, theta, y)[1]

    start = tensor(own.start).expand(count, -1)
    ends = torch.tensor([0.0, steps * own.dt], device=place)
    torch.set_num_threads(len(os.sched_getaffinity(0)))

    def call() -> None:
        with torch.no_grad():
            torchsde.sdeint(System(), start, ends, dt=own.dt, method="euler")[
                -1
            ].sum().item()  # waits for the GPU

    return call


# ---------------------------------------------------------------------------- the kernel by hand


def by_hand(own: Own, backend: str, count: int, steps: int, kernels: Path) -> Callable[[], Any]:
    """The pendulum of benchmarks/pendulum.cpp or pendulum.cu: gradients and returns of all
    trajectories, averaged.

    Its noise is `philox`, so an estimate of the library with the same key has the same numbers, to
    rounding.
    """
    source = kernels / ("pendulum.cu" if backend == "cuda" else "pendulum.cpp")
    if not source.exists():
        raise FileNotFoundError(
            f"{source} is missing; it is beside this script in the source tree."
        )
    seed, _ = estimate_seeds(jax.random.key(1))
    theta = np.array([own.theta[name] for name in ("friction", "shaking", "stiffness")], np.float32)
    run = _cuda_by_hand if backend == "cuda" else _cpu_by_hand
    return run(source, seed, count, steps, np.float32(own.dt), theta, _table(steps))


def _cpu_by_hand(
    source: Path, seed: int, count: int, steps: int, dt: Any, theta: np.ndarray, table: np.ndarray
) -> Callable[[], Any]:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise RuntimeError("no C++ compiler")
    tag = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / f"pendulum-{tag}.so"
        built = library.with_suffix(".o")
        subprocess.run([compiler, *FAST, "-c", str(source), "-o", str(built)], check=True)
        # linked without -ffast-math: with it, numbers below 1e-308 would be zero for the whole
        # process from then on
        subprocess.run(
            [compiler, "-shared", "-pthread", str(built), "-o", str(library), "-lm"], check=True
        )
        function = ctypes.CDLL(str(library)).pendulum
    threads = len(os.sched_getaffinity(0))
    gradient = np.empty((count, 3), np.float32)
    returns = np.empty(count, np.float32)

    def pointer(array):
        return array.ctypes.data_as(ctypes.c_void_p)

    def call() -> Any:
        numbers = (ctypes.c_uint64(seed), ctypes.c_uint32(count), steps, ctypes.c_float(dt))
        function(
            *numbers, pointer(theta), pointer(table), threads, pointer(gradient), pointer(returns)
        )
        return gradient.mean(axis=0), returns.mean()

    return call


def _cuda_by_hand(
    source: Path, seed: int, count: int, steps: int, dt: Any, theta: np.ndarray, table: np.ndarray
) -> Callable[[], Any]:
    cp = require_cupy()
    kernel = cp.RawModule(code=source.read_text(), options=("-std=c++17",)).get_function("pendulum")
    block = 32 if count < 10_000 else 128
    values = cp.asarray(table)

    def call() -> Any:
        gradient = cp.empty((3, count), np.float32)
        returns = cp.empty(count, np.float32)
        numbers = (
            np.uint64(seed),
            np.uint32(count),
            np.int32(steps),
            dt,
            *theta,
            values,
            gradient,
            returns,
        )
        kernel((-(-count // block),), (block,), numbers)
        return gradient.mean(axis=1).get(), returns.mean().get()

    return call


# ---------------------------------------------------------------------------- the table


def report(result: dict[str, Any]) -> str:
    """ns per trajectory and step of everyone, and how many times the kernel's."""
    lines = []
    for process, count in dict.fromkeys((r["process"], r["group"]) for r in _group(result["rows"])):
        rows = [r for r in _group(result["rows"]) if (r["process"], r["group"]) == (process, count)]
        lines += [f"{process}, {count:,} trajectories", *_lines(rows), ""]
    for name, start in result["starts"].items():
        lines.append(
            f"{name}: "
            + ", ".join(f"{what} call {seconds:.3g} s" for what, seconds in start.items())
        )
    lines += [f"{who}: left out, {reason}" for who, reason in result["skipped"].items()]
    return "\n".join(
        [
            *lines,
            result["machine"] + ("; quick: a look, not a measurement" if result["quick"] else ""),
        ]
    )


def _group(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with the ensemble that they belong to: the twin of JAX has fewer trajectories."""
    most: dict[str, int] = {}
    out = []
    for row in rows:
        if row["who"] == "JAX" and row["what"] == BASELINES[0]:
            most[row["process"]] = row["trajectories"]
        out.append({**row, "group": most[row["process"]]})
    return out


def _lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    ours = {r["what"]: r["ns"] for r in rows if r["who"] == "kernel"}
    yield (
        f"  {'':<30} {'trajectories':>12} {'steps':>6} {'ns':>10} {'median':>10} "
        f"{'first call':>11} {'× kernel':>9}"
    )
    for row in rows:
        against = ours.get(row["what"], ours.get("time"))
        ratio = f"{row['ns'] / against:9.3g}" if against else f"{'':>9}"
        yield (
            f"  {row['who'] + ', ' + row['what']:<30} {row['trajectories']:>12,} "
            f"{row['steps']:>6,} {row['ns']:>10.3g} "
            f"{row['median_ns']:>10.3g} {row['first']:>9.2f} s {ratio}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="cpu", help="kernels to measure: cpu or cuda")
    parser.add_argument("--trajectories", type=int, nargs="+", default=COUNTS, help="ensembles")
    parser.add_argument("--process", nargs="+", default=(), help=f"some of {', '.join(PROCESSES)}")
    parser.add_argument("--baseline", nargs="+", default=BASELINES, choices=BASELINES)
    parser.add_argument("--quick", action="store_true", help="short runs: a look only")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    result = measure(
        options.backend,
        tuple(options.trajectories),
        options.quick,
        FOLDER,
        tuple(options.process),
        tuple(options.baseline),
    )
    print(report(result))
    write_json(result, options.json)


if __name__ == "__main__":
    main()
