"""Speed of the kernels beside the JAX reference, on the paper's lattice.

143 resonators, 262 bonds, the scores of all 548 parameters included. The slow reference runs fewer
steps of the same ensemble, and the time is given per trajectory and step. Processes of one's own:
`own_speed.py`; other libraries: `peers.py`.

    python benchmarks/lattice_speed.py [--backend cuda] [--json results/bench/cpu.json]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluctua import tcmt
from fluctua.core.baselines import binned, time_only
from fluctua.tcmt import Network
from machine import describe_machine

STEPS = 20_000
DT = 1e-3
VARIANTS: dict[str, dict[str, Any]] = {
    "time-only": {},
    "no baseline": {"baseline": "none"},
    "time-only, σ_κ = 0.2": {"sigma_kappa": 0.2},
    "quantile-binned": {"baseline": "binned"},
}
Row = dict[str, Any]


def measure(backend: str, trajectories: int, quick: bool) -> dict[str, Any]:
    """Returns {"machine", "rows", "scaling"}; each row has ns per trajectory and step."""
    if backend not in ("cpu", "cuda"):
        raise ValueError(f'`backend` must be "cpu" or "cuda"; got {backend!r}.')
    repeats = 1 if quick else 3
    steps = STEPS // 20 if quick else STEPS
    slow_steps = 100 if quick else 400 if backend == "cpu" else 4000
    kernels = [
        time_calls(
            f"{backend} kernel, {name}",
            kernel_call(backend, trajectories, steps, **options),
            trajectories,
            steps,
            repeats,
        )
        for name, options in VARIANTS.items()
    ]
    slow = kernel_call("jax", trajectories, slow_steps)
    reference = time_calls("JAX reference, time-only", slow, trajectories, slow_steps, repeats)
    return {
        "machine": describe_machine(backend),
        "backend": backend,
        "quick": quick,
        "rows": [*kernels, reference],
        "scaling": _scaling(backend, trajectories, quick),
    }


def time_calls(
    name: str,
    call: Callable[[], Any],
    trajectories: int,
    steps: int,
    repeats: int,
    scores: bool = True,
) -> Row:
    """The best of some calls after one that compiles."""
    print(f"  {name} …")
    call()
    seconds = min(_seconds(call) for _ in range(repeats))
    return {
        "name": name,
        "steps": steps,
        "trajectories": trajectories,
        "scores": scores,
        "seconds": seconds,
        "ns": 1e9 * seconds / (steps * trajectories),
    }


def report(result: dict[str, Any]) -> str:
    """The table, with ratios to our time-only kernel."""
    lines = [table(result["rows"]), "", "How the time grows (time-only, with scores):"]
    for row in result["scaling"]:
        each = 1e12 * row["seconds"] / row["work"]
        lines.append(
            f"  {row['what']:<34} {row['seconds']:8.3f} s   {each:8.2f} ps / site·trajectory·step"
        )
    lines += [
        "",
        result["machine"] + ("; quick: a look, not a measurement" if result["quick"] else ""),
    ]
    return "\n".join(lines)


def table(rows: list[Row]) -> str:
    """Times, and their ratios to the first row."""
    width = max(len(row["name"]) for row in rows)
    lines = [
        f"  {'':<{width}} {'steps':>8} {'seconds':>9} {'ns / trajectory·step':>21} "
        f"{'× our kernel':>13}"
    ]
    for row in rows:
        lines.append(
            f"  {row['name']:<{width}} {row['steps']:>8,} {row['seconds']:>9.3g} "
            f"{row['ns']:>21.3g} "
            f"{row['ns'] / rows[0]['ns']:>13.3g}"
        )
    return "\n".join(lines)


def kernel_call(
    backend: str,
    trajectories: int,
    steps: int,
    *,
    baseline: str = "time",
    network: Network | None = None,
    **options: Any,
) -> Callable[[], Any]:
    """One estimate as a call, the table of the time-only baseline being known (as it is in
    training).
    """
    network = tcmt.paper() if network is None else network
    task = tcmt.transmission(network, horizon=steps * DT, dt=DT, **options)
    theta = tcmt.initial_parameters(jax.random.key(0), network)
    known: Any = (
        time_only(jnp.asarray(np.linspace(0.2, 0.0, steps + 1))) if baseline == "time" else baseline
    )
    if baseline == "binned" and backend != "jax":
        known = binned(every=100, group=4096)
    # a process that gives the GPU to the kernels keeps JAX's small arrays on the host
    where = jax.default_device(jax.devices("cpu")[0]) if backend == "cuda" else nullcontext()
    estimator = task.estimator(backend, baseline=known)

    def call() -> None:
        with where:
            jax.block_until_ready(estimator(jax.random.key(1), theta, trajectories).gradient)

    return call


def _scaling(backend: str, trajectories: int, quick: bool) -> list[Row]:
    """Time against N, E and T, one at a time."""
    short = 200 if quick else 2000
    cases = [(f"{n} × {n} resonators", n * n, trajectories, short) for n in (4, 8, 16, 32)]
    cases += [
        (f"{e:,} trajectories", 143, e, short)
        for e in (trajectories // 4, trajectories, 4 * trajectories)
    ]
    cases += [(f"{t:,} steps", 143, trajectories, t) for t in (short // 4, short, 4 * short)]
    rows = []
    for what, sites, e, t in cases:
        print(f"  scaling: {what} …")
        side = round(sites**0.5)
        call = kernel_call(
            backend, e, t, network=tcmt.paper() if sites == 143 else tcmt.rectangular(side, side)
        )
        call()
        rows.append(
            {"what": what, "seconds": min(_seconds(call) for _ in range(2)), "work": sites * e * t}
        )
    return rows


def _seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def write_json(result: dict[str, Any], path: Path | None) -> None:
    """Write a table where `--json` asks for it."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"table: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="cpu", help="kernels to measure: cpu or cuda")
    parser.add_argument("--trajectories", type=int, default=1000, help="trajectories per call")
    parser.add_argument("--quick", action="store_true", help="short runs: a look only")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    result = measure(options.backend, options.trajectories, options.quick)
    print(report(result))
    write_json(result, options.json)


if __name__ == "__main__":
    main()
