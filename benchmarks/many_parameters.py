"""Speed with many parameters: sums over batches, single gradients, and bare matrix products.

Every competitor is called in turn, several times over. The estimate has a time-only baseline whose
table is known. diffrax only simulates; `products` are the matrix products of one simulation and
nothing else, at the same precision.

    python benchmarks/many_parameters.py [--backend jax|cpu|cuda] [--process NAME] [--json FILE]
    python benchmarks/many_parameters.py --scaling [--backend jax] --json FILE
"""

from __future__ import annotations

import argparse
import itertools
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.compiled.backend import simulator
from fluctua.core.arrays import Array, Params, jit
from fluctua.core.baselines import time_only
from fluctua.core.estimate import reduce_samples
from fluctua.core.estimator import ppgt
from fluctua.core.objective import Objective
from fluctua.core.process import Process
from lattice_speed import write_json
from machine import describe_machine
from own_processes import Own, kuramoto
from own_speed import Competitor, diffrax_call, race

STEPS = 400
CPU_ROWS = 4096
"""Rows of bare products on a CPU, which are then fastest."""

SINGLE_BYTES = 2**28
"""Memory of single gradients beyond which they are not measured."""


def layered(widths: tuple[int, ...]) -> Own:
    """A drift −x + W_L tanh(… tanh(W₁x + b₁) …) + b_L, to be kept at a target."""

    def drift(theta: Params, x: Array) -> Array:
        h = x
        for layer in theta[:-1]:
            h = jnp.tanh(layer["W"] @ h + layer["b"])
        return theta[-1]["W"] @ h + theta[-1]["b"] - x

    def noise(theta: Params, x: Array) -> Array:
        return 0.3 * jnp.ones_like(x)

    rng = np.random.default_rng(0)
    theta = [
        {
            "W": jnp.asarray(rng.normal(size=(m, n)) / np.sqrt(n), jnp.float32),
            "b": jnp.zeros(m, jnp.float32),
        }
        for n, m in itertools.pairwise(widths)
    ]
    target = Objective(running=lambda theta, x: -jnp.sum((x - 0.5) ** 2))
    start = jnp.zeros(widths[0])
    return Own(Process(drift, noise), target, theta, start, 0.01, STEPS, 1000, None)


PROCESSES: dict[str, Callable[[], Own]] = {
    "604 weights": lambda: layered((4, 20, 20, 4)),
    "256 couplings": kuramoto,
    "4,740 weights": lambda: layered((4, 64, 64, 4)),
    "50,008 weights": lambda: layered((8, 216, 216, 8)),
}


def count_parameters(theta: Params) -> int:
    """P."""
    return sum(np.size(leaf) for leaf in jax.tree.leaves(theta))


def estimate(own: Own, count: int, steps: int, backend: str, single: bool) -> Callable[[], Any]:
    """One estimate as a call. single: from the gradients of single trajectories."""
    t = np.arange(steps + 1) * own.dt
    table = np.linspace(1.0, 0.0, steps + 1, dtype=np.float32)
    substrate = simulator(own.process, own.start, t, backend=backend)
    estimator = ppgt(substrate, own.objective, baseline=time_only(table))
    key = jax.random.key(1)
    if single:
        return lambda: jax.block_until_ready(
            reduce_samples(estimator.samples(key, own.theta, count))
        )
    return lambda: jax.block_until_ready(estimator(key, own.theta, count))


def products(own: Own, count: int, steps: int) -> Callable[[], Any]:
    """The products of the layers of one simulation, the rows of a step at once."""
    rows = min(count, CPU_ROWS) if jax.default_backend() == "cpu" else count
    matrices = [layer["W"] for layer in own.theta]

    @jit
    def call(matrices: list[Array], x: Array) -> Array:
        def body(x: Array, _: None) -> tuple[Array, None]:
            for matrix in matrices:
                x = x @ matrix.T
            return x, None

        return jax.lax.scan(body, x, length=steps)[0]

    x = jnp.ones((rows, own.start.shape[0]), jnp.float32)

    def repeat() -> None:
        for _ in range(0, count, rows):
            jax.block_until_ready(call(matrices, x))

    return repeat


def measure(name: str, own: Own, count: int, steps: int, backend: str) -> list[dict[str, Any]]:
    """Rows of all competitors for one process and ensemble."""
    try:
        estimate(own, 600, 2, backend, False)()
    except ValueError as error:
        print(f"{name}: {error}")
        backend = "jax"
    field = [
        Competitor("batches", backend, count, steps, estimate(own, count, steps, backend, False)),
        Competitor("diffrax", "simulation", count, steps, diffrax_call(own, "", count, steps)),
    ]
    if backend != "jax":
        call = estimate(own, count, steps, "jax", False)
        field.append(Competitor("batches", "jax", count, steps, call))
    if 4 * count * count_parameters(own.theta) < SINGLE_BYTES:
        call = estimate(own, count, steps, "jax", True)
        field.append(Competitor("single", "jax", count, steps, call))
    if isinstance(own.theta, list):
        field.append(Competitor("products", "", count, steps, products(own, count, steps)))
    rows = []
    for row in race(field, 3):
        row.update(process=name, parameters=count_parameters(own.theta), state=own.start.shape[0])
        rows.append(row)
        print(
            f"{name}, {count:,} × {steps}: {row['who']} {row['what']} {row['seconds']:.4f} s, "
            f"{row['ns']:.3g} ns, first call {row['first']:.2f} s",
            flush=True,
        )
    return rows


def scaling(backend: str, quick: bool) -> list[dict[str, Any]]:
    """Time of an estimate with E, T, the state and P, each varied alone."""
    small = 2 if quick else 1
    base = {"count": 4096 // small, "steps": 104 // small, "widths": (8, 64, 64, 8)}
    sweeps: dict[str, list[dict[str, Any]]] = {
        "E": [{"count": n // small} for n in (1024, 4096, 16_384, 65_536)],
        "T": [{"steps": n // small} for n in (52, 104, 208, 416)],
        "state": [{"widths": (m, 64, 64, m)} for m in (2, 8, 32, 128)],
        "P": [{"widths": (8, h, h, 8)} for h in (16, 64, 216, 432)],
    }
    rows = []
    for axis, changes in sweeps.items():
        for change in changes:
            case = {**base, **change}
            own = layered(case["widths"])
            call = estimate(own, case["count"], case["steps"], backend, False)
            (row,) = race([Competitor("batches", backend, case["count"], case["steps"], call)], 2)
            row.update(axis=axis, parameters=count_parameters(own.theta), state=case["widths"][0])
            rows.append(row)
            print(f"{axis}: {case} {row['seconds']:.4f} s, first {row['first']:.2f} s", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="auto", choices=("auto", "jax", "cpu", "cuda"))
    parser.add_argument("--process", action="append", choices=tuple(PROCESSES))
    parser.add_argument("--count", type=int, action="append")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    if options.scaling:
        rows = scaling(options.backend, options.quick)
    else:
        for name in options.process or PROCESSES:
            for count in options.count or (2000,):
                own = PROCESSES[name]()
                rows += measure(name, own, count, options.steps, options.backend)
    on_gpu = jax.default_backend() == "gpu"
    if on_gpu:
        used = jax.local_devices()[0].memory_stats()["peak_bytes_in_use"] / 2**30
        print(f"peak memory of the device, by JAX, {used:.2f} GiB")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory of the host {peak:.2f} GiB; {describe_machine('cpu')}")
    if options.json:
        place = "cuda" if on_gpu else "cpu"
        table = {"machine": describe_machine(place), "rows": rows, "peak": peak}
        write_json(table, options.json)


if __name__ == "__main__":
    main()
