"""NESTbench25 (arXiv 2506.15122): train all five problems, and score them with their C++ engines.

    python benchmarks/nestbench.py CHECKOUT
    python benchmarks/nestbench.py CHECKOUT --problems abp --seeds 0 --score-only

CHECKOUT is a clone of protocol-benchmarks/NESTbench25. Protocols and tables go to
results/nestbench. Engines are copied to a temporary folder, built and run there.

An engine takes the second of the clock as its seed, anew for each of its samples: samples shorter
than a second repeat the same trajectories, and the error that it prints is then too small. Here it
takes one sample per run, no two runs begin in the same second, and errors are those of the runs.
"""

from __future__ import annotations

import argparse
import csv
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import nestbench_active
import nestbench_erasure
import nestbench_ising
import nestbench_traps
from fluctua.plot.style import LOOK, WIDTH, save_png
from nestbench_protocols import ROWS, read_protocol, write_protocol

RESULTS = Path(__file__).parents[1] / "results" / "nestbench"
LEARNED = "input_control_parameters_learned.dat"
FLAGS = "-Wall -O3 -march=native"
"""Of the compiler; the engines' own -O takes 1.6 times as long."""
BETWEEN_RUNS = 2.1
"""Least seconds between the starts of two runs of one protocol."""

Train = Callable[..., dict[str, Any]]


class Problem(NamedTuple):
    """A problem of the benchmark.

    train: (seed, quick=False) -> protocol, trajectories, minutes, history.
    controls: names of the columns of the file.
    samples: trajectories of one run of the engine. runs: how many.
    limits: lowest and highest values to which the engine clips each column.
    """

    train: Train
    controls: tuple[str, ...]
    samples: int
    runs: int
    limits: tuple[tuple[float, float], ...] = ()


PROBLEMS = {
    "trap_overdamped": Problem(nestbench_traps.train_overdamped, ("centre",), 100_000, 4),
    "trap_underdamped": Problem(nestbench_traps.train_underdamped, ("centre / nm",), 15_000, 4),
    "erasure": Problem(nestbench_erasure.train, ("c₀", "c₁"), 30_000, 4),
    "ising": Problem(nestbench_ising.train, ("temperature", "field"), 1000, 4),
    "abp": Problem(
        nestbench_active.train, ("stiffness", "speed"), 150_000, 3, ((1.0, 7.0), (0.0, 11.0))
    ),
}


class Score(NamedTuple):
    """Order parameter of one protocol, from runs of the engine."""

    problem: str
    protocol: str
    value: float
    stderr: float
    runs: int
    samples: int


def prepare_training(name: str, checkout: Path) -> Train:
    """The training of a problem; that of the active particle needs the target of the checkout."""
    train = PROBLEMS[name].train
    if name == "abp":
        path = checkout / "abp" / "cpp_code" / "target_p_r.dat"
        return partial(train, target=nestbench_active.read_target(path))
    return train


def build_engine(checkout: Path, name: str, folder: Path) -> Path:
    """Copy the engine of a problem into a folder and build it there; its folder is returned."""
    source = checkout / name / "cpp_code"
    if not (source / "Makefile").is_file():
        raise FileNotFoundError(
            f"{source} has no Makefile: CHECKOUT must be a clone of "
            "protocol-benchmarks/NESTbench25."
        )
    place = folder / name
    shutil.copytree(source, place)
    command = ["make", "standalone", f"CXXFLAGS={FLAGS}"]
    subprocess.run(command, cwd=place, check=True, capture_output=True)
    return place


def parse_answer(text: str) -> float:
    """Order parameter of the last line of an engine's report."""
    found = re.findall(r"order parameter = (\S+?),? ", text)
    if not found:
        raise ValueError(f"the report of an engine has no order parameter; got {text[:80]!r}.")
    return float(found[-1])


def run_engine(engine: Path, protocol: Path | None, samples: int, runs: int) -> list[float]:
    """Order parameters of several runs of an engine, in a folder of their own.

    protocol: a file; None for the engine's default.
    """
    values = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "engine"
        shutil.copytree(engine, folder)
        command = ["./sim", "-n", str(samples)]
        if (
            "n_samples"
            in subprocess.run(
                ["./sim", "-h"], cwd=folder, capture_output=True, text=True, check=False
            ).stderr
        ):
            command += ["-s", "1"]
        if protocol is not None:
            command += ["-p", str(protocol.resolve())]
        for _ in range(runs):
            began = time.monotonic()
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
            values.append(parse_answer((folder / "report_answer.dat").read_text() + " "))
            time.sleep(max(0.0, BETWEEN_RUNS - (time.monotonic() - began)))
    return values


def list_protocols(name: str, checkout: Path, seeds: Iterable[int]) -> dict[str, Path | None]:
    """Protocols of a problem that are scored: the default, the learned one, and ours."""
    protocols: dict[str, Path | None] = {
        "default": None,
        "learned": checkout / name / "cpp_code" / LEARNED,
    }
    for label in (*(f"seed{seed}" for seed in seeds), "loophole"):
        path = RESULTS / f"{name}_{label}.dat"
        if path.is_file():
            protocols[label] = path
    return protocols


def score(name: str, label: str, protocol: Path | None, engine: Path, runs: int | None) -> Score:
    """Score one protocol. runs: of the engine; those of the problem for None."""
    problem = PROBLEMS[name]
    values = np.array(run_engine(engine, protocol, problem.samples, runs or problem.runs))
    stderr = values.std(ddof=1) / np.sqrt(len(values))
    return Score(name, label, float(values.mean()), float(stderr), len(values), problem.samples)


def update_table(path: Path, rows: list[dict[str, Any]], keys: tuple[str, ...]) -> None:
    """Write rows into a CSV file, in the place of those with the same keys."""
    old = []
    if path.is_file():
        with path.open(newline="") as file:
            old = list(csv.DictReader(file))
    names = {tuple(str(row[key]) for key in keys) for row in rows}
    kept = [row for row in old if tuple(row[key] for key in keys) not in names]
    order = list(PROBLEMS)
    merged = sorted([*kept, *rows], key=lambda row: (order.index(row["problem"]), row[keys[1]]))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(merged)


def train_problem(name: str, seed: int, checkout: Path, *, quick: bool) -> None:
    """Train one problem with one seed; write its protocol and what it cost."""
    result = prepare_training(name, checkout)(seed, quick=quick)
    save_training(name, f"seed{seed}", result)


def save_training(name: str, label: str, result: dict[str, Any]) -> None:
    """Write the protocol of a training and what it cost."""
    write_protocol(RESULTS / f"{name}_{label}.dat", result["protocol"])
    row = {
        "problem": name,
        "protocol": label,
        "trajectories": result["trajectories"],
        "iterations": len(result["history"]),
        "minutes": f"{result['minutes']:.2f}",
    }
    update_table(RESULTS / "trainings.csv", [row], ("problem", "protocol"))
    print(*row.values(), flush=True)


def score_problems(names: list[str], options: argparse.Namespace) -> None:
    """Score all protocols of the problems, and write the table."""
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(options.workers) as pool:
        engines = {name: build_engine(options.checkout, name, Path(place)) for name in names}
        scores = [
            pool.submit(score, name, label, protocol, engines[name], options.runs)
            for name in names
            for label, protocol in list_protocols(name, options.checkout, options.seeds).items()
            if options.protocols is None or label in options.protocols
        ]
        for future in scores:
            result = future.result()
            row = {
                **result._asdict(),
                "value": f"{result.value:.6g}",
                "stderr": f"{result.stderr:.2g}",
            }
            update_table(RESULTS / "scores.csv", [row], ("problem", "protocol"))
            print(*row.values(), flush=True)


def draw_protocols(checkout: Path, seeds: Iterable[int]) -> Figure:
    """Draw the protocols of all problems, ours and the learned ones, as the engines read them."""
    figure = Figure(figsize=(1.5 * WIDTH, 0.75 * WIDTH), layout="constrained")
    places = iter(figure.subplots(2, 4).flat)
    for name, problem in PROBLEMS.items():
        protocols = list_protocols(name, checkout, seeds)
        for column in range(len(problem.controls)):
            axis = next(places)
            draw_control(axis, problem, column, protocols)
            axis.set_title(TITLES[name])
            if name == "trap_underdamped":
                axis.set_yscale("symlog", linthresh=5)
                axis.set_yticks([-100, -10, 0, 10, 100], ["−100", "−10", "0", "10", "100"])
    figure.axes[0].legend()
    return figure


TITLES = {
    "trap_overdamped": "overdamped trap",
    "trap_underdamped": "underdamped trap",
    "erasure": "erasure",
    "ising": "Ising magnet",
    "abp": "active particle",
}


def draw_control(
    axis: Axes, problem: Problem, column: int, protocols: dict[str, Path | None]
) -> None:
    """Draw one column of all protocols of a problem."""
    axis.set_ylabel(problem.controls[column])
    axis.set_xlabel("time / duration")
    for label, protocol in protocols.items():
        if protocol is None or label == "loophole":
            continue
        values = read_protocol(protocol)[:, column]
        if problem.limits:
            values = np.clip(values, *problem.limits[column])
        style = {"color": "k", "ls": "--"} if label == "learned" else {}
        axis.plot(
            (np.arange(ROWS) + 0.5) / ROWS, values, label=label.replace("seed", "seed "), **style
        )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="clone of protocol-benchmarks/NESTbench25")
    parser.add_argument("--problems", nargs="+", choices=list(PROBLEMS), default=list(PROBLEMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--score-only", action="store_true", help="score the protocols there are")
    parser.add_argument("--train-only", action="store_true", help="train, and run no engine")
    parser.add_argument(
        "--loophole", action="store_true", help="also train on the sum of the underdamped engine"
    )
    parser.add_argument(
        "--protocols", nargs="+", help="score these alone: default, learned, seed0, …, loophole"
    )
    parser.add_argument("--runs", type=int, help="of the engine per protocol, at least 2")
    parser.add_argument("--quick", action="store_true", help="a few iterations, to try it out")
    parser.add_argument("--workers", type=int, default=2, help="engines that run at a time")
    options = parser.parse_args()
    if not options.score_only:
        for name in options.problems:
            for seed in options.seeds:
                train_problem(name, seed, options.checkout, quick=options.quick)
        if options.loophole:
            result = nestbench_traps.train_loophole(0, quick=options.quick)
            save_training("trap_underdamped", "loophole", result)
    if not options.train_only:
        score_problems(options.problems, options)
    with mpl.rc_context(LOOK):
        save_png(draw_protocols(options.checkout, options.seeds), RESULTS / "protocols.png")


if __name__ == "__main__":
    main()
