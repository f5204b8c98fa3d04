"""Trainings that read a device at its ports alone: J on the device and what the model predicted.

    python benchmarks/ports.py RUNS...                # table.txt, one line per run
    python benchmarks/ports.py --evidence 11 13       # time and information of a pair of records

RUNS are folders of `fluctua train ports`. J is that of the device, measured at the end with
trajectories that are not counted. With --evidence no training is read: processor time of the
evidence, and the information ½ ln det(1 + PF) of means of samples about three random networks, with
the prior covariance P of the preset."""

from __future__ import annotations

import argparse
import json
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fluctua import tcmt
from fluctua.tcmt import conversion, port_records
from fluctua.tcmt.kernel.options import KernelSpec

COLUMNS = (
    "lattice  read    seed  trajectories  J at the end   at half steps   predicted J: rms error, "
    "cover   chi²/sample   minutes"
)


def describe_run(folder: Path) -> str:
    """One line of the table."""
    config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    summary = json.loads((folder / "summary.json").read_text())
    final = summary["final"]
    score = summary["calibration"]["predictions"]
    size = f"{config['lattice']['rows']} x {config['lattice']['columns']}"
    half = summary["finer"]["J"]
    return (
        f"{size:<8} {config['device']['read']:<7} {config['seed']:>4}  "
        f"{summary['trajectories']:>12}  {final['J']:.4f} ± {final['J_stderr']:.4f}  {half:13.4f}  "
        f"{score['error']:22.3f}  {score['covered']:6.0%}  {score['misfit']:11.3f}  "
        f"{summary['seconds'] / 60:8.1f}"
    )


REPEATS = 3
INTERVAL = 0.05
SAMPLES = 400


def draw_network(rows: int, columns: int, seed: int) -> KernelSpec:
    """A lattice with random detunings in [-5, 5] and couplings in [0, 2], as in a training."""
    network = tcmt.rectangular(rows, columns)
    rng = np.random.default_rng(seed)
    theta = {
        "omega": np.clip(3 * rng.normal(size=network.sites), -5, 5),
        "kappa": np.clip(1 + rng.normal(size=len(network.bonds)), 0, 2),
        "chi": np.zeros(network.sites),
    }
    task = tcmt.transmission(network, horizon=20.0, dt=0.0125, integrator="heun")
    return conversion.kernel_spec(task, theta)


def collect(spec: KernelSpec, averaged: int, readout: float) -> port_records.PortEvidence:
    """The evidence of a pair of records of zeros, with derivatives of the noise of each lead, of
    all other resonators and of the readout."""
    sites = (0, spec.sites - 1)
    grid = port_records.make_grid(spec, sites, INTERVAL * np.arange(SAMPLES + 1))
    numbers = port_records.make_numbers(spec, readout)
    amplitudes = np.zeros((4, spec.sites + 1))
    amplitudes[0, 0] = amplitudes[1, -2] = amplitudes[3, -1] = 1
    amplitudes[2, 1:-2] = 1
    powers = np.append(numbers.noise, numbers.readout)
    return port_records.collect_port_evidence(
        grid._replace(averaged=averaged),
        numbers,
        np.zeros((2, SAMPLES, 2), complex),
        2 * powers * amplitudes,
    )


def measure_processor(call: Callable[[], Any]) -> float:
    """Smallest processor time of some calls after the first, in seconds."""
    call()
    spent = []
    for _ in range(REPEATS):
        begin = time.process_time()
        call()
        spent.append(time.process_time() - begin)
    return min(spent)


def report_evidence(rows: int, columns: int) -> str:
    """Processor time and information of a pair of records, for single samples and means of four."""
    specs = [draw_network(rows, columns, seed) for seed in range(3)]
    sites = specs[0].sites
    bonds = len(specs[0].bonds)
    losses = np.full(sites, 0.3 * specs[0].damping.min())
    spread = np.concatenate([np.full(sites + bonds, 0.3), losses, [0.3]])
    lines = ["means of samples  readout noise  information  processor seconds of one evidence"]
    for readout in (0.05, 0.5):
        for averaged in (1, 4):
            total = sum(collect(spec, averaged, readout).information for spec in specs)
            scaled = np.eye(len(spread)) + spread[:, None] * total * spread
            information = np.linalg.slogdet(scaled)[1] / 2
            seconds = np.nan
            if readout == 0.05:
                spec = specs[0]
                seconds = measure_processor(lambda s=spec, a=averaged: collect(s, a, 0.05))
            lines.append(f"{averaged:16}  {readout:13}  {information:11.2f}  {seconds:9.3f}")
    return "\n".join(lines)


def main() -> None:
    """Read runs, write the table; or measure evidence."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--evidence", nargs=2, type=int, metavar=("ROWS", "COLUMNS"))
    parser.add_argument("--out", type=Path, default=Path("results/ports"))
    arguments = parser.parse_args()
    if arguments.evidence:
        print(report_evidence(*arguments.evidence))
        return
    if not arguments.runs:
        parser.error("give folders of runs, or --evidence ROWS COLUMNS.")
    arguments.out.mkdir(parents=True, exist_ok=True)
    lines = [COLUMNS, *sorted(map(describe_run, arguments.runs)), ""]
    (arguments.out / "table.txt").write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
