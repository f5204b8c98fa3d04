"""How far the CUDA kernel is from what the chip can issue: counts from Nsight Compute.

python benchmarks/limit_cuda.py [--out FILE]

Runs itself under `ncu` for one launch of the paper's lattice (one wave of blocks, 2,000 steps,
time-only baseline) and prints issue slots, pipes and instructions per site and step. Needs a GPU,
CuPy and `ncu`."""

import argparse
import csv
import io
import subprocess
import sys
from pathlib import Path

STEPS, TRAJECTORIES = 2000, 1056
METRICS = {
    "gpu__time_duration.sum": "time",
    "smsp__inst_executed.sum": "warp instructions",
    "sm__inst_issued.avg.pct_of_peak_sustained_active": "issue slots used",
    "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active": "FMA pipe used",
    "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active": "ALU pipe used",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active": "special functions used",
    "sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_active": "load/store pipe used",
    "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum": "fused multiply-adds",
    "smsp__sass_thread_inst_executed_op_fadd_pred_on.sum": "additions",
    "smsp__sass_thread_inst_executed_op_fmul_pred_on.sum": "multiplications",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps resident",
}


def profile_target() -> None:
    import numpy as np

    from fluctua.tcmt.kernel import run as kernel
    from kernel_cpu import paper_lattice

    table = np.linspace(0.2, 0.0, STEPS + 1)
    kernel.run(paper_lattice(steps=STEPS), 0, TRAJECTORIES, baseline=table, backend="cuda")


def measure() -> dict[str, float]:
    here = Path(__file__).resolve()
    command = [
        "ncu",
        "--clock-control",
        "none",
        "--csv",
        "--page",
        "raw",
        "--kernel-name",
        "one_pass",
        "--metrics",
        ",".join(METRICS),
        sys.executable,
        str(here),
        "--profile",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    table = done.stdout[done.stdout.find('"ID"') :]
    rows = list(csv.DictReader(io.StringIO(table)))
    if len(rows) < 2:
        raise SystemExit(f"ncu gave no table:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    units, values = rows[0], rows[1]
    rates = {}
    for metric, label in METRICS.items():
        text = values.get(metric, "").replace(",", "")
        if text:
            scale = {
                "nsecond": 1e-9,
                "ns": 1e-9,
                "usecond": 1e-6,
                "us": 1e-6,
                "msecond": 1e-3,
                "ms": 1e-3,
            }.get(units[metric], 1)
            rates[label] = float(text) * scale
    return rates


def report(rates: dict[str, float]) -> str:
    sites = 143 * STEPS * TRAJECTORIES
    lines = [
        f"one launch: {TRAJECTORIES} trajectories × {STEPS} steps of the paper's lattice, "
        "time-only baseline"
    ]
    for label, value in rates.items():
        if label.endswith(("used", "resident")):
            lines.append(f"  {label:<24} {value:6.1f} % of peak")
    flops = 2 * rates["fused multiply-adds"] + rates["additions"] + rates["multiplications"]
    lines += [
        f"  time                     {1e3 * rates['time']:6.2f} ms",
        f"  thread instructions      {32 * rates['warp instructions'] / sites:6.1f} per site and "
        "step",
        f"  floating-point           {flops / sites:6.1f} operations per site and step",
        f"  rate                     {flops / rates['time'] / 1e12:6.1f} Tflop/s in single "
        "precision",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.profile:
        profile_target()
    else:
        text = report(measure())
        print(text)
        if options.out:
            options.out.write_text(text + "\n")
