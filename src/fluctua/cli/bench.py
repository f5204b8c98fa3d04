"""`fluctua bench`: the speed of the kernels, beside the JAX reference, on the paper's lattice; of
processes that a user writes with `bench own` (`fluctua.cli.own`).

143 resonators, 262 bonds, the scores of all 548 parameters included. The slow reference runs fewer
steps of the same ensemble, and the time is given per trajectory and step. Other libraries:
`benchmarks/peers.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fluctua.cli.common import fail, machine, say

if TYPE_CHECKING:
    from fluctua.tcmt import Network

STEPS = 20_000
DT = 1e-3
VARIANTS: dict[str, dict[str, Any]] = {
    "time-only": {},
    "no baseline": {"baseline": "none"},
    "time-only, σ_κ = 0.2": {"sigma_kappa": 0.2},
    "quantile-binned": {"baseline": "binned"},
}
Row = dict[str, Any]


def bench(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT", help="lattice: the paper's; own: processes that a user writes"
        ),
    ] = "lattice",
    backend: Annotated[str, typer.Option(help="cpu or cuda: which kernels to measure")] = "cpu",
    trajectories: Annotated[
        list[int] | None,
        typer.Option(help="of each run; 1000, or 2000 and 200000 for own (give it twice)"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="short runs: a look, not a measurement")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--json", help="also write the table to this file")
    ] = None,
    process: Annotated[
        list[str] | None,
        typer.Option(help="this one only; may be repeated", rich_help_panel="With own"),
    ] = None,
    kernels: Annotated[
        Path,
        typer.Option(help="the folder of pendulum.cpp and pendulum.cu", rich_help_panel="With own"),
    ] = Path("benchmarks"),
) -> None:
    """Time kernels and JAX side by side, with `own` other libraries too."""
    try:
        if what == "lattice":
            if trajectories and len(trajectories) > 1:
                raise ValueError(
                    f"the lattice takes one number of `--trajectories`; got {trajectories}."
                )
            result = measure(backend, trajectories[0] if trajectories else 1000, quick)
            text = report(result)
        elif what == "own":
            from fluctua.cli.own import measure as own

            counts = tuple(trajectories or own.COUNTS)
            result = own.measure(backend, counts, quick, kernels, tuple(process or ()))
            text = own.report(result)
        else:
            raise ValueError(f"bench measures lattice or own; got {what!r}.")
    except (ValueError, ImportError, RuntimeError) as error:
        fail(str(error))
    say(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
        say(f"table: {out}")


def measure(backend: str, trajectories: int, quick: bool) -> dict[str, Any]:
    """Returns {"machine", "rows", "scaling"}; each row has ns per trajectory and step."""
    if backend not in ("cpu", "cuda"):
        raise ValueError(f'`backend` must be "cpu" or "cuda"; got {backend!r}.')
    repeats, steps = (1, STEPS // 20) if quick else (3, STEPS)
    slow_steps = 100 if quick else 400 if backend == "cpu" else 4000
    kernels = [
        timed(
            f"{backend} kernel, {name}",
            kernel_call(backend, trajectories, steps, **options),
            trajectories,
            steps,
            repeats,
        )
        for name, options in VARIANTS.items()
    ]
    slow = kernel_call("jax", trajectories, slow_steps)
    reference = timed("JAX reference, time-only", slow, trajectories, slow_steps, repeats)
    return {
        "machine": machine(backend),
        "backend": backend,
        "quick": quick,
        "rows": [*kernels, reference],
        "scaling": _scaling(backend, trajectories, quick),
    }


def timed(
    name: str,
    call: Callable[[], Any],
    trajectories: int,
    steps: int,
    repeats: int,
    scores: bool = True,
) -> Row:
    """The best of some calls after one that compiles."""
    say(f"  {name} …")
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
    from contextlib import nullcontext

    import jax
    import jax.numpy as jnp
    import numpy as np

    from fluctua import tcmt
    from fluctua.core.baselines import binned, time_only

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
    from fluctua import tcmt

    short = 200 if quick else 2000
    cases = [(f"{n} × {n} resonators", n * n, trajectories, short) for n in (4, 8, 16, 32)]
    cases += [
        (f"{e:,} trajectories", 143, e, short)
        for e in (trajectories // 4, trajectories, 4 * trajectories)
    ]
    cases += [(f"{t:,} steps", 143, trajectories, t) for t in (short // 4, short, 4 * short)]
    rows = []
    for what, sites, e, t in cases:
        say(f"  scaling: {what} …")
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
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
