"""Time from the start of a process to its first estimate, in fresh processes.

    python benchmarks/latency.py --json results/own/latency.json

Processes alternate, so that a change of the machine's load meets all of them, and medians are
reported. Wall time is what a user waits; processor time, of the process and of the compilers that
it starts, is a cross-check where cores are shared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from machine import describe_machine

FOLDER = Path(__file__).parent

CLOCK = """
import json, os, resource, time

def read_clocks():
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter(), time.process_time(), children.ru_utime + children.ru_stime

def measure(begin):
    now = read_clocks()
    wall, own, compilers = (after - before for after, before in zip(now, begin))
    return {"wall": wall, "processor": own + compilers, "compilers": compilers}

begin = read_clocks()
times = {}
"""
"""Start of every program: seconds of the wall, of the processor, and of started compilers."""

IMPORT_JAX = """
import jax, jax.numpy as jnp
times["import jax"] = measure(begin)
"""

IMPORT_FLUCTUA = """
import jax, jax.numpy as jnp, fluctua as fl
fl.Process, fl.Objective, fl.simulator, fl.ppgt  # modules are imported when they are first used
times["import jax and fluctua"] = measure(begin)
"""

ARRAYS = """
begin = read_clocks()
theta = {"stiffness": jnp.array(2.0), "friction": jnp.array(0.5), "shaking": jnp.array(0.4)}
start = jnp.array([1.0, 0.0])
t = jnp.linspace(0, 5, 501)
key = jax.random.key(0)
times["arrays of the user"] = measure(begin)
"""
"""Numbers of the README's pendulum: JAX compiles for them, whatever comes after."""

PENDULUM = """
def drift(theta, x):
    angle, speed = x
    return jnp.array([speed, -theta["stiffness"] * jnp.sin(angle) - theta["friction"] * speed])

def noise(theta, x):
    return jnp.array([0.0, theta["shaking"]])

process = fl.Process(drift, noise, noiseless=(0,), integrator="heun")
energy = fl.Objective(running=lambda theta, x: x[1] ** 2 / 2)
options = {}
baseline = "time"
exec(VARIANT)
simulator = fl.simulator(process, start=start, t=t, backend=BACKEND, **options)
estimator = fl.ppgt(simulator, energy, baseline=baseline)
call = read_clocks()
estimate = estimator(key, theta, 4000)
jax.block_until_ready(estimate.gradient)
times["call"] = measure(call)
times["import to answer"] = measure(begin)
for seed in range(1, 6):
    key = jax.random.key(seed)
    call = read_clocks()
    jax.block_until_ready(estimator(key, theta, 4000).gradient)
    times["sixth call"] = measure(call)
"""

VARIANTS = {
    "mean": "baseline = 'mean'",
    "optimal": "baseline = 'optimal'",
    "twin": "baseline = 'twin'",
    "stop": "energy = energy._replace(stop=lambda theta, x: x[0] - 1.5)",
    "initial reward": "energy = energy._replace(initial=lambda theta, x: x[0])",
    "context": """
process = process._replace(
    drift=lambda theta, x, t, push: drift(theta, x) + jnp.array([0.0, 1.0]) * push
)
options = {"context": lambda key: jax.random.normal(key, ())}
""",
    "random start": """
start = fl.Density(
    lambda theta, x: -jnp.sum((x - theta["stiffness"]) ** 2) / 2,
    lambda key, theta: theta["stiffness"] + jax.random.normal(key, (2,)),
)
""",
}
"""Other estimates of the pendulum, as changes of the program."""

OWN = """
import own_speed
own = own_speed.PROCESSES[PROCESS]()
call = own_speed.estimate(own, "time", COUNT, STEPS, BACKEND)
begin = read_clocks()
call()
times["call"] = measure(begin)
"""
"""First call of a process of `own_processes.py`."""

COMMAND = """
import contextlib, io
from fluctua.cli.app import app
with contextlib.redirect_stdout(io.StringIO()):
    app(WORDS, standalone_mode=False)
times["command"] = measure(begin)
"""
"""A command line, import included."""

COMMANDS = ("estimate", "calibrate", "advise", "inspect")
"""Commands on a recording."""

END = "\nprint(json.dumps(times))\n"


class Case(NamedTuple):
    """A program that runs in processes of its own.

    name: in the table.
    program: Python, between `CLOCK` and `END`.
    kernels: "shared" for a folder with what the same case compiled before, "none" for an empty one.
    """

    name: str
    program: str
    kernels: str = "none"


def list_cases(backends: Iterable[str] = ("auto", "cpu", "jax")) -> list[Case]:
    """Imports, and the first answer of the README's pendulum with and without a kernel on disk."""
    cases = [
        Case("import jax", IMPORT_JAX),
        Case("import jax and fluctua", IMPORT_FLUCTUA),
        Case("arrays of the user, without fluctua", IMPORT_JAX + ARRAYS),
    ]
    for backend in backends:
        program = write_pendulum(backend)
        cases.append(Case(f"{backend}, nothing compiled", program))
        if backend != "jax":
            cases.append(Case(f"{backend}, kernel on disk", program, "shared"))
    return cases


def write_pendulum(backend: str, variant: str = "") -> str:
    """The program of the README's pendulum. variant: a change of it."""
    chosen = f"BACKEND = {backend!r}; VARIANT = {variant!r}"
    return IMPORT_FLUCTUA + ARRAYS + chosen + PENDULUM


def list_variants() -> list[Case]:
    """Other estimates of the pendulum, with their kernels on disk."""
    return [
        Case(f"{name}, kernel on disk", write_pendulum("cpu", change), "shared")
        for name, change in VARIANTS.items()
    ]


def list_commands(recording: Path) -> list[Case]:
    """Commands on a recording, the first and a later one. recording: file that is written."""
    program = f"WORDS = {['record', str(recording), '--trajectories', '50']!r}" + COMMAND
    run_case(Case("record", program), recording.parent)
    cases = []
    for name in COMMANDS:
        program = f"WORDS = {[name, str(recording)]!r}" + COMMAND
        cases.append(Case(f"fluctua {name}, first", program))
        cases.append(Case(f"fluctua {name}, again", program, "shared"))
    return cases


def list_own_cases(names: Iterable[str], count: int, steps: int) -> list[Case]:
    """First calls of other processes, by a kernel and by JAX."""
    cases = []
    for name in names:
        for backend in ("cpu", "jax"):
            numbers = f"PROCESS = {name!r}; COUNT = {count}; STEPS = {steps}; BACKEND = {backend!r}"
            cases.append(Case(f"{name}, {backend}, nothing compiled", numbers + OWN))
            if backend == "cpu":
                cases.append(Case(f"{name}, {backend}, kernel on disk", numbers + OWN, "shared"))
    return cases


def run_case(case: Case, folder: Path) -> dict[str, dict[str, float]]:
    """Run one case in a fresh process. folder: of bytecode, and of kernels that are shared."""
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    with tempfile.TemporaryDirectory() as empty:
        kernels = folder / "kernels" if case.kernels == "shared" else empty
        places = {"FLUCTUA_KERNELS": str(kernels), "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
        done = subprocess.run(
            [sys.executable, "-c", CLOCK + case.program + END],
            env=environment | places,
            cwd=FOLDER,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{case.name}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_cases(cases: list[Case], rounds: int) -> list[dict[str, Any]]:
    """Medians of every case over `rounds` processes, all cases in turn."""
    samples: dict[str, list[dict[str, dict[str, float]]]] = {case.name: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:  # bytecode and shared kernels
            run_case(case, Path(folder))
        for _ in range(rounds):
            for case in cases:
                samples[case.name].append(run_case(case, Path(folder)))
    return [{"case": name, "times": take_medians(runs)} for name, runs in samples.items()]


def take_medians(runs: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians of every clock of every part."""
    return {
        part: {clock: statistics.median(run[part][clock] for run in runs) for clock in clocks}
        for part, clocks in runs[0].items()
    }


def write_table(rows: list[dict[str, Any]]) -> str:
    """The medians as a table of Markdown, in seconds."""
    lines = [
        "| case | part | wall | processor | of it compilers |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        for part, clocks in row["times"].items():
            numbers = " | ".join(
                f"{clocks[clock]:.3f}" for clock in ("wall", "processor", "compilers")
            )
            lines.append(f"| {row['case']} | {part} | {numbers} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="processes per case")
    parser.add_argument("--own", nargs="*", default=[], help="processes of own_processes.py")
    parser.add_argument("--count", type=int, default=500, help="trajectories of those")
    parser.add_argument("--steps", type=int, default=100, help="steps of those")
    parser.add_argument("--variants", action="store_true", help="other estimates of the pendulum")
    parser.add_argument("--commands", action="store_true", help="commands on a recording")
    parser.add_argument("--json", type=Path, help="file for the medians")
    options = parser.parse_args()
    chosen = options.own or options.variants or options.commands
    cases = [] if chosen else list_cases()
    cases += list_variants() if options.variants else []
    cases += list_own_cases(options.own, options.count, options.steps)
    with tempfile.TemporaryDirectory() as folder:
        cases += list_commands(Path(folder) / "recording.nc") if options.commands else []
        rows = measure_cases(cases, options.rounds)
    load = os.getloadavg()[0]
    print(describe_machine("cpu"), f"; load {load:.1f}", sep="")
    print(write_table(rows))
    if options.json:
        result = {
            "machine": describe_machine("cpu"),
            "load": load,
            "rounds": options.rounds,
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
