"""Minutes from `pip install` to a trained lattice: the presets `fast`, `unknown` and `ports`.

    python benchmarks/end_to_end.py --install --json results/end_to_end/cpu.json
    python benchmarks/end_to_end.py --backend cuda --json results/end_to_end/cuda.json

With --install an environment is made and the project installed into it as a user would, its native
core compiled; without it the present environment is used. Each preset is then trained by the
command `fluctua train` in a fresh process. A row of the history is the first at J ≥ 0.65 if the J
measured in it is; single rows have 2 to 16 trajectories, so J of its parameters is measured afresh
as well, of rows at equal distances, until one is there too. Minutes count from the start of the
process: imports, compilations and files are included. Processor time is reported beside them, for
machines that are busy otherwise.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fluctua.runs.config import load
from fluctua.runs.evaluate import evaluate
from fluctua.runs.reading import read_course
from fluctua.store import history
from machine import describe_machine

PROJECT = Path(__file__).parent.parent
TARGET = 0.65
CHECKS = 16
"""Maximum number of rows whose parameters are measured afresh."""
TRAJECTORIES = 128
"""Trajectories of a fresh measurement, for a standard error of 0.002."""

LIMITS = {"fast": 100, "unknown": 150, "ports": 1000}
"""Iterations per preset. Those of `fast` are a third of its own, which go on to J = 0.67."""
QUICK = {
    "iterations": 2,
    "lattice.rows": 2,
    "lattice.columns": 3,
    "task.horizon": 1.0,
}
"""A few seconds per preset, to try the benchmark itself."""


class Clock(NamedTuple):
    """Seconds of the wall and of the processor, and when a command began, as a file's time."""

    wall: float
    processor: float
    started: float


class Reached(NamedTuple):
    """The first row whose parameters reach the target.

    minutes: from the start of the process to the end of the row's iteration.
    J, J_stderr: measured in the row, on the device where it has hidden errors.
    fresh: J of the row's parameters, measured afresh.
    """

    iteration: int
    trajectories: int
    minutes: float
    J: float
    J_stderr: float
    fresh: float


def run_timed(command: Sequence[str], log: Path) -> Clock:
    """Run a command, its output in a file, and return its time; an error if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.time()
    begin = time.perf_counter()
    with log.open("w", encoding="utf-8") as file:
        status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode
    wall = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if status:
        raise RuntimeError(f"{' '.join(command)} ended with status {status}; its output: {log}")
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Clock(wall, used, started)


def install(place: Path, log: Path) -> tuple[Path, Clock]:
    """Make an environment, install the project, and return its Python and the time."""
    begin = time.perf_counter()
    venv.create(place, with_pip=True)
    made = time.perf_counter() - begin
    python = place / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "--no-cache-dir", str(PROJECT)]
    clock = run_timed(command, log)
    return python, clock._replace(wall=clock.wall + made)


def make_command(python: Path, preset: str, folder: Path, given: argparse.Namespace) -> list[str]:
    """The command that trains a preset into a folder."""
    command = [str(python), "-m", "fluctua", "train", preset, "--out", str(folder), "--replace"]
    command += ["--backend", given.backend, "--seed", str(given.seed)]
    changes: dict[str, Any] = QUICK if given.quick else {"iterations": LIMITS[preset]}
    for name, value in changes.items():
        command += ["--set", f"{name}={value}"]
    if given.max_minutes:
        command += ["--set", f"stop.max_minutes={given.max_minutes}"]
    return command


def list_candidates(rows: Iterable[history.Row], target: float) -> list[history.Row]:
    """Rows that measured the target or more. J of rows without trajectories is the model's."""
    return [row for row in rows if row.ensemble and target <= row.J]


def find_reached(folder: Path, before: float, target: float = TARGET) -> Reached | None:
    """The first row that reaches the target, by its own J and by a fresh measurement.

    Of many rows that measured it, at most `CHECKS` are tried, at equal distances.
    before: seconds of the process before the first iteration.
    """
    rows = history.effective(history.read(folder / "history.csv"))
    course = read_course(folder / "parameters.h5")
    config = load(folder / "config.toml")
    records = {int(iteration): k for k, iteration in enumerate(course.iteration)}
    candidates = [row for row in list_candidates(rows, target) if row.iteration in records]
    for row in candidates[:: max(1, -(-len(candidates) // CHECKS))]:
        theta = course.theta(records[row.iteration])
        fresh = evaluate(config, theta, trajectories=TRAJECTORIES, seed=config.seed)
        if target <= fresh.J:
            spent = sum(r.seconds for r in rows if r.iteration <= row.iteration)
            minutes = (before + spent) / 60
            return Reached(
                row.iteration + 1, row.trajectories, minutes, row.J, row.J_stderr, fresh.J
            )
    return None


def report_preset(preset: str, folder: Path, clock: Clock, target: float) -> dict[str, Any]:
    """The numbers of a finished run."""
    summary = json.loads((folder / "summary.json").read_text())
    # the configuration is written once, before the first iteration
    before = max((folder / "config.toml").stat().st_mtime - clock.started, 0.0)
    reached = find_reached(folder, before, target)
    config = load(folder / "config.toml")
    return {
        "preset": preset,
        "knew": summary["how"],
        "integrator": config.task.integrator,
        "dt": config.task.dt,
        "reached": None if reached is None else reached._asdict(),
        "minutes": clock.wall / 60,
        "processor_minutes": clock.processor / 60,
        "training_minutes": summary["seconds"] / 60,
        "seconds_before_training": before,
        "seconds_after_training": clock.wall - summary["seconds"] - before,
        "iterations": summary["iterations"],
        "trajectories": summary["trajectories"],
        "J": summary["final"]["J"],
        "J_stderr": summary["final"]["J_stderr"],
        "J_half_step": summary["finer"]["J"],
        "J_half_step_stderr": summary["finer"]["J_stderr"],
    }


def format_table(report: dict[str, Any]) -> str:
    """The report as a table in Markdown."""
    head = (
        f"| preset | knew | minutes to J ≥ {report['target']} | iteration, trajectories | "
        "minutes in all | processor | J at the end | at Δt/2 |\n"
    )
    lines = [head, "| --- | --- | --- | --- | --- | --- | --- | --- |\n"]
    for row in report["presets"]:
        reached = row["reached"]
        when = "not reached" if reached is None else f"{reached['minutes']:.2f}"
        spent = "" if reached is None else f"{reached['iteration']}, {reached['trajectories']:,}"
        lines.append(
            f"| {row['preset']} | {row['knew']} | {when} | {spent} | {row['minutes']:.2f} | "
            f"{row['processor_minutes']:.2f} | {row['J']:.4f} ± {row['J_stderr']:.4f} | "
            f"{row['J_half_step']:.4f} ± {row['J_half_step_stderr']:.4f} |\n"
        )
    if report["install"]:
        lines.append(f"\ninstallation: {report['install']['wall'] / 60:.2f} minutes\n")
    return "".join(lines)


def measure(given: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Install if asked, train each preset, and return the report."""
    out.mkdir(parents=True, exist_ok=True)
    python = Path(sys.executable)
    installed = None
    if given.install:
        python, installed = install(out / "environment", out / "install.log")
    presets = []
    for preset in given.presets:
        folder = out / preset
        clock = run_timed(make_command(python, preset, folder, given), out / f"{preset}.log")
        presets.append(report_preset(preset, folder, clock, given.target))
        print(json.dumps(presets[-1]), flush=True)
    return {
        "machine": describe_machine(given.backend),
        "backend": given.backend,
        "seed": given.seed,
        "target": given.target,
        "quick": given.quick,
        "install": None if installed is None else installed._asdict(),
        "presets": presets,
    }


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--presets", nargs="+", choices=list(LIMITS), default=list(LIMITS))
    parser.add_argument("--backend", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=TARGET, help="J to reach")
    parser.add_argument("--max-minutes", type=float, default=0.0, help="of training per preset")
    parser.add_argument("--install", action="store_true", help="into an environment of its own")
    parser.add_argument("--quick", action="store_true", help="tiny lattices, two iterations")
    parser.add_argument("--out", type=Path, help="folder of the runs; temporary if not given")
    parser.add_argument("--json", type=Path, help="file of the report")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write the report."""
    given = parse_arguments(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        report = measure(given, given.out or Path(temporary))
    print(report["machine"])
    print(format_table(report))
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
