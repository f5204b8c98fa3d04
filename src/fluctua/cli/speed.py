"""Speed, measured: our kernels, our JAX reference and the peers, in one process on the same work.

The work is the paper's lattice (143 resonators, 262 bonds). Ours always includes the scores of all 548
parameters; diffrax and torchsde simulate only. Slow contenders run fewer steps of the same ensemble, and the
time is given per trajectory and step, which does not depend on how many there are.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from fluctua import tcmt

STEPS, DT = 20_000, 1e-3
Row = dict[str, Any]


def run(
    *, backend: str = "cpu", trajectories: int = 1000, quick: bool = False, peers: bool = True,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:  # fmt: skip
    """Measure everything. Returns {"machine", "rows", "scaling"}; each row has ns per trajectory and step."""
    if backend not in ("cpu", "cuda"):
        raise ValueError(f'`backend` must be "cpu" or "cuda"; got {backend!r}.')
    repeats = 1 if quick else 3
    steps = STEPS // 20 if quick else STEPS
    slow_steps = 100 if quick else 400 if backend == "cpu" else 4000
    rows: list[Row] = []

    def measure(name: str, contender: Callable[[], Callable[[], Any]], work: int, scores: bool) -> None:
        say(f"  {name} …")
        try:
            call = contender()
            call()  # compiles, and warms up
            seconds = min(_seconds(call) for _ in range(repeats))
        except ImportError as error:
            say(f"    left out: {error}")
            return
        rows.append({"name": name, "steps": work, "trajectories": trajectories, "scores": scores, "seconds": seconds,
                     "ns": 1e9 * seconds / (work * trajectories)})  # fmt: skip

    for name, options in _variants().items():
        task_options = {k: options[k] for k in ("sigma_kappa",) if k in options}
        measure(
            f"{backend} kernel, {name}",
            partial(_ours, backend, trajectories, steps, options.get("baseline", "time"), task_options),
            steps,
            True,
        )
    measure("JAX reference, time-only", lambda: _ours("jax", trajectories, slow_steps, "time", {}), slow_steps, True)
    if peers:
        measure("diffrax Euler, simulation only", partial(_diffrax, trajectories, slow_steps, False), slow_steps, False)
        measure(
            "  the same with its Brownian tree", partial(_diffrax, trajectories, slow_steps, True), slow_steps, False
        )
        if backend == "cpu":
            measure("torchsde Euler, simulation only", lambda: _torchsde(trajectories, slow_steps), slow_steps, False)
    return {
        "machine": _machine(backend),
        "backend": backend,
        "quick": quick,
        "rows": rows,
        "scaling": _scaling(backend, trajectories, quick, say),
    }


def report(result: dict[str, Any]) -> str:
    """The table, with ratios to our time-only kernel."""
    rows = result["rows"]
    ours = rows[0]["ns"]
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("", "steps", "seconds", "ns / trajectory·step", "× our kernel"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for row in rows:
        table.add_row(row["name"], f"{row['steps']:,}", f"{row['seconds']:.3g}", f"{row['ns']:.3g}",
                      f"{row['ns'] / ours:.3g}")  # fmt: skip
    console = Console(width=110, color_system=None)
    with console.capture() as capture:
        console.print(table)
    lines = [capture.get().rstrip(), "", "How the time grows (time-only, with scores):"]
    for row in result["scaling"]:
        each = 1e12 * row["seconds"] / row["work"]
        lines.append(f"  {row['what']:<34} {row['seconds']:8.3f} s   {each:8.2f} ps / site·trajectory·step")
    lines += ["", result["machine"] + ("; quick: a look, not a measurement" if result["quick"] else "")]
    return "\n".join(lines)


# ---------------------------------------------------------------------------------- the contenders


def _variants() -> dict[str, dict[str, Any]]:
    return {
        "time-only": {},
        "no baseline": {"baseline": "none"},
        "time-only, σ_κ = 0.2": {"sigma_kappa": 0.2},
        "quantile-binned": {"baseline": "binned"},
    }


def _task(steps: int, network: tcmt.Network | None = None, **options: Any) -> tuple[tcmt.Task, dict[str, Any]]:
    network = tcmt.paper() if network is None else network
    task = tcmt.transmission(network, horizon=steps * DT, dt=DT, **options)
    return task, tcmt.initial_parameters(jax.random.key(0), network)


def _ours(
    backend: str, trajectories: int, steps: int, baseline: str, options: dict[str, Any], network: Any = None
) -> Callable[[], Any]:
    """The estimate, the table of the time-only baseline being known (as it is in training)."""
    from fluctua.core.baselines import time_only

    task, theta = _task(steps, network, **options)
    table = np.linspace(0.2, 0.0, steps + 1)
    plan: Any = time_only(jnp.asarray(table)) if baseline == "time" else baseline
    # a process that gives the GPU to the kernels keeps JAX's small arrays on the host
    where = jax.default_device(jax.devices("cpu")[0]) if backend == "cuda" else nullcontext()
    estimator = task.estimator(backend, baseline=plan)

    def call() -> None:
        with where:
            jax.block_until_ready(estimator(jax.random.key(1), theta, trajectories).gradient)

    return call


def _diffrax(trajectories: int, steps: int, tree: bool) -> Callable[[], Any]:
    """tree: noise that an adaptive solver could ask for again, rather than the fastest that a fixed step allows."""
    import diffrax

    task, theta = _task(steps)
    drift, noise = task.process.drift, task.process.noise
    assert callable(noise)

    def one(key: Any) -> Any:
        shape = (2 * task.network.sites,)
        if tree:
            path: Any = diffrax.VirtualBrownianTree(0.0, steps * DT, DT / 2, shape, key)
        else:
            path = diffrax.UnsafeBrownianPath(shape, key)
        control = diffrax.ControlTerm(lambda t, y, args: diffrax_diagonal(noise(theta, y, t, None)), path)
        terms: Any = diffrax.MultiTerm(diffrax.ODETerm(lambda t, y, args: drift(theta, y, t, None)), control)
        return diffrax.diffeqsolve(
            terms, diffrax.Euler(), 0.0, steps * DT, DT, task.start, max_steps=None, adjoint=diffrax.ForwardMode()
        ).ys

    import lineax

    diffrax_diagonal = lineax.DiagonalLinearOperator
    batch = jax.jit(jax.vmap(one))
    return lambda: jax.block_until_ready(batch(jax.random.split(jax.random.key(0), trajectories)))


def _torchsde(trajectories: int, steps: int) -> Callable[[], Any]:
    import torch
    import torchsde

    network = tcmt.paper()
    bonds = torch.as_tensor(np.array(network.bonds), dtype=torch.int64)
    damping = torch.as_tensor(network.gamma + network.lead_weights**2 @ network.gamma_e, dtype=torch.float32)
    amplitude = 0.5 * torch.sqrt(2 * damping)
    source = torch.zeros(network.sites)
    source[0] = 10 * np.sqrt(2.0)

    class Lattice(torch.nn.Module):
        noise_type, sde_type = "diagonal", "ito"

        def f(self, t: Any, y: Any) -> Any:
            re, im = y.chunk(2, dim=1)
            h = lambda v: (
                torch.zeros_like(v)
                .index_add(1, bonds[:, 0], v[:, bonds[:, 1]])
                .index_add(1, bonds[:, 1], v[:, bonds[:, 0]])
            )
            return torch.cat([h(im) - damping * re + source, -h(re) - damping * im], dim=1)

        def g(self, t: Any, y: Any) -> Any:
            return torch.cat([amplitude, amplitude]).expand_as(y)

    start = torch.zeros(trajectories, 2 * network.sites)
    ends = torch.tensor([0.0, steps * DT])

    def call() -> Any:
        with torch.no_grad():
            return torchsde.sdeint(Lattice(), start, ends, dt=DT, method="euler")

    return call


# ------------------------------------------------------------------------------------------ helpers


def _scaling(backend: str, trajectories: int, quick: bool, say: Callable[[str], None]) -> list[Row]:
    """Time against N, E and T, one at a time."""
    short = 200 if quick else 2000
    cases = [(f"{n} × {n} resonators", n * n, trajectories, short) for n in (4, 8, 16, 32)]
    cases += [(f"{e:,} trajectories", 143, e, short) for e in (trajectories // 4, trajectories, 4 * trajectories)]
    cases += [(f"{t:,} steps", 143, trajectories, t) for t in (short // 4, short, 4 * short)]
    rows = []
    for what, sites, e, t in cases:
        say(f"  scaling: {what} …")
        side = round(sites**0.5)
        network = tcmt.paper() if sites == 143 else tcmt.rectangular(side, side)
        call = _ours(backend, e, t, "time", {}, network)
        call()
        rows.append({"what": what, "seconds": min(_seconds(call) for _ in range(2)), "work": sites * e * t})
    return rows


def _seconds(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _machine(backend: str) -> str:
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            name = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    from fluctua.tcmt.kernel.run import cores

    text = f"{cores()} cores of {name}"
    if backend == "cuda":
        import cupy

        text = f"{cupy.cuda.runtime.getDeviceProperties(0)['name'].decode()}; host {text}"
    return f"{text}; jax {jax.__version__}"
