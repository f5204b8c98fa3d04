"""Time of a whole call of an estimator beside that of its kernel.

Whole calls of `fluctua.ppgt` are timed in turn with the pendulum that was written by hand; on a GPU
also the time between the first and the last launch of their passes, by events of CUDA. What is left
is the host: checks, requests to JAX, waiting.

    python benchmarks/small_calls.py [--backend cuda] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.compiled import cuda
from fluctua.compiled.backend import simulator
from fluctua.core.baselines import time_only
from fluctua.core.estimator import ppgt
from fluctua.core.objective import Objective
from fluctua.core.process import Process
from lattice_speed import write_json
from machine import describe_machine
from own_processes import PROCESSES, Own
from own_speed import by_hand

COUNTS = (2_000, 200_000)
STEPS = 2_000
NOISES = ("threefry", "philox", "philox7")
ROUNDS = 10
IN_A_ROW = 5


class Entry(NamedTuple):
    """One row: what is called, and with how many trajectories."""

    process: str
    who: str
    baseline: str
    noise: str
    trajectories: int
    call: Callable[[], Any]


def driven_pendulum() -> Own:
    """Two states and five parameters: the pendulum with a torque and a stiffer spring."""
    plain = PROCESSES["pendulum"]()

    def drift(theta: Any, x: Any) -> Any:
        angle, speed = x
        spring = theta["stiffness"] * jnp.sin(angle) + theta["cubic"] * angle**3
        return jnp.array([speed, theta["torque"] - spring - theta["friction"] * speed])

    def noise(theta, x):
        return jnp.array([0.0, theta["shaking"]])

    theta = plain.theta | {"torque": jnp.array(0.1), "cubic": jnp.array(0.05)}
    energy = Objective(running=lambda theta, x: x[1] ** 2 / 2)
    return plain._replace(process=Process(drift, noise), objective=energy, theta=theta)


OWN: dict[str, Callable[[], Own]] = {
    "pendulum, 3 parameters": PROCESSES["pendulum"],
    "driven pendulum, 5 parameters": driven_pendulum,
}


def make_call(
    own: Own, baseline: str, noise: str, count: int, steps: int, backend: str
) -> Callable[[], Any]:
    """One estimate as a call. baseline: a name, or "table" for a known mean return-to-go."""
    table = time_only(np.linspace(1.0, 0.0, steps + 1, dtype=np.float32))
    t = np.arange(steps + 1) * own.dt
    substrate = simulator(own.process, own.start, t, wiener=noise, backend=backend)
    known: Any = table if baseline == "table" else baseline
    estimator = ppgt(substrate, own.objective, baseline=known)
    key = jax.random.key(1)
    return lambda: jax.block_until_ready(estimator(key, own.theta, count))


def list_entries(backend: str, counts: tuple[int, ...], steps: int, kernels: Path) -> list[Entry]:
    """All rows that can run here."""
    entries = []
    for name, make in OWN.items():
        own = make()
        for count in counts:
            cases = [("table", noise) for noise in NOISES] + [("time", "philox7")]
            cases += [("mean", "philox7"), ("optimal", "philox7")]
            for baseline, noise in cases:
                call = make_call(own, baseline, noise, count, steps, backend)
                entries.append(Entry(name, "fl.ppgt", baseline, noise, count, call))
            if make is PROCESSES["pendulum"]:
                call = by_hand(own, backend, count, steps, kernels)
                entries.append(Entry(name, "by hand", "table", "philox", count, call))
    return entries


def time_calls(entries: list[Entry], rounds: int) -> list[list[float]]:
    """Seconds of calls, all entries in turn, each several times in a row as a training calls it.

    The first call in a row is not counted.
    """
    times: list[list[float]] = [[] for _ in entries]
    for _ in range(rounds):
        for entry, taken in zip(entries, times, strict=True):
            entry.call()
            for _ in range(IN_A_ROW):
                started = time.perf_counter()
                entry.call()
                taken.append(time.perf_counter() - started)
    return times


def time_passes(call: Callable[[], Any], rounds: int) -> float:
    """Seconds on the GPU from the first launch of a pass to the last: the least of some calls."""
    import cupy

    stamps: list[Any] = []
    launch = cuda.GpuLibrary.launch

    def stamp() -> None:
        event = cupy.cuda.Event()
        event.record()
        stamps.append(event)

    def launch_with_stamps(*arguments: Any) -> Any:
        stamp()
        launched = launch(*arguments)
        stamp()
        return launched

    best = float("inf")
    cuda.GpuLibrary.launch = launch_with_stamps  # type: ignore[method-assign]
    try:
        for _ in range(rounds):
            stamps.clear()
            call()
            pairs = zip(stamps[::2], stamps[1::2], strict=True)
            total = sum(cupy.cuda.get_elapsed_time(*pair) for pair in pairs)
            best = min(best, 1e-3 * total)
    finally:
        cuda.GpuLibrary.launch = launch  # type: ignore[method-assign]
    return best


def measure(
    backend: str, counts: tuple[int, ...], steps: int, rounds: int, kernels: Path
) -> dict[str, Any]:
    """All rows. Returns {"machine", "steps", "rows"}; times are in milliseconds."""
    entries = list_entries(backend, counts, steps, kernels)
    rows = []
    for entry, taken in zip(entries, time_calls(entries, rounds), strict=True):
        passes = None
        if backend == "cuda" and entry.who == "fl.ppgt":
            passes = 1e3 * time_passes(entry.call, rounds)
        times = {
            "best": 1e3 * min(taken),
            "median": 1e3 * statistics.median(taken),
            "passes": passes,
        }
        rows.append({**entry._asdict(), "call": None, **times})
    return {"machine": describe_machine(backend), "steps": steps, "rows": rows}


def report(result: dict[str, Any]) -> str:
    """The table, and how many times the kernel by hand each call takes."""
    lines = [f"{result['machine']}; {result['steps']:,} steps; ms per call"]
    hand = {r["trajectories"]: r["best"] for r in result["rows"] if r["who"] == "by hand"}
    head = ("", "trajectories", "best", "median", "passes", "beside", "× by hand")
    lines.append(f"{head[0]:<52}" + "".join(f"{name:>13}" for name in head[1:]))
    for row in result["rows"]:
        name = f"{row['process']}: {row['who']}, {row['baseline']}, {row['noise']}"
        passes = row["passes"]
        beside = "" if passes is None else f"{row['best'] - passes:.3f}"
        text = f"{name:<52}{row['trajectories']:>13,}{row['best']:>13.3f}{row['median']:>13.3f}"
        text += f"{'' if passes is None else f'{passes:.3f}':>13}{beside:>13}"
        ratio = row["best"] / hand[row["trajectories"]] if row["process"].startswith("pen") else 0
        lines.append(f"{text}{f'{ratio:.2f}' if ratio else '':>13}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", default="cpu", help="kernels to measure: cpu or cuda")
    parser.add_argument("--trajectories", type=int, nargs="+", default=COUNTS, help="ensembles")
    parser.add_argument("--steps", type=int, default=STEPS, help="time steps")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="calls of each")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    counts = tuple(options.trajectories)
    folder = Path(__file__).parent
    result = measure(options.backend, counts, options.steps, options.rounds, folder)
    print(report(result))
    write_json(result, options.json)


if __name__ == "__main__":
    main()
