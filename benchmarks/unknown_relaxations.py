"""What each hidden property of a device costs: J and coverage after 100 measured trajectories.

    python benchmarks/unknown_relaxations.py --work RUNS [--cases hard easy ...] [--seeds 0 1 2]
    python benchmarks/unknown_relaxations.py            # the table again, from relaxations.json

Every row is a training of the preset `unknown`. "easy" is the device with hidden couplings and
detunings alone, which shares its time steps with the model. The other rows add to it: "sampled"
and "prior" alone, and, since a record of every step takes twenty times as long to filter, "steps"
beside "sampled" and each of the rest beside both. "hard" has them all. The last rows hide a
structure that the model does not have, with and without watching for it. A training that is in the
table already is not repeated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fluctua.runs import lattice as runs
from fluctua.runs.config import apply_changes, find_config

HARD = {
    "task.integrator": "euler",
    "task.dt": 1e-3,
    "device.sample_every": 20,
    "device.finer": 2,
}
"""The hard device with Euler's steps of the model, as in all other rows."""
EASY = {"device.kind": "easy"}
SAMPLED = {**EASY, "device.sample_every": 20}
STEPS = {**SAMPLED, "device.integrator": "heun", "device.finer": 2}
IGNORED = {"calibration.kerr": "ignore", "calibration.second_neighbours": "ignore"}

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "hard": (HARD, "all of the below"),
    "easy": (EASY, "couplings and detunings alone"),
    "sampled": (SAMPLED, "easy, samples 0.02 apart"),
    "prior": ({**EASY, "calibration.prior": 1.5}, "easy, prior of 30 % for errors of 20 %"),
    "steps": (STEPS, "sampled, the device by Heun's steps of half the length"),
    "losses": ({**STEPS, "device.loss_error": 0.2}, "steps, losses off by 20 %"),
    "leads": ({**STEPS, "device.lead_error": 0.2}, "steps, lead couplings off by 20 %"),
    "noise": ({**STEPS, "device.noise_error": 0.2}, "steps, noise amplitudes off by 20 %"),
    "readout": ({**STEPS, "device.readout": 0.05}, "steps, readout noise of 0.05"),
    "kerr": ({**HARD, "device.kerr_error": 0.005}, "hard, hidden Kerr of 0.005, watched"),
    "second": (
        {**HARD, "device.second_neighbours": 0.05},
        "hard, couplings of 0.05 across, watched",
    ),
    "kerr-ignored": ({**HARD, "device.kerr_error": 0.005, **IGNORED}, "hidden Kerr, not watched"),
    "second-ignored": (
        {**HARD, "device.second_neighbours": 0.05, **IGNORED},
        "hidden couplings across, not watched",
    ),
}
"""Changes of the preset `unknown`, and what they are in words."""


def train(case: str, seed: int, work: Path) -> dict[str, Any]:
    """One training, as a row of the table."""
    config = apply_changes(
        find_config("unknown"),
        {"backend": "cpu", "seed": seed, "calibration.samples": 0, **CASES[case][0]},
    )
    summary = runs.complete(config, work / f"{case}_{seed}")
    known = summary["calibration"]
    return {
        "case": case,
        "seed": seed,
        "J": summary["final"]["J"],
        "J_stderr": summary["final"]["J_stderr"],
        "trajectories": summary["trajectories"],
        "families": known["families"],
        "widened": known["widened"],
        "caveat": known["caveat"],
    }


def format_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line per case: J of every seed, and rms error, error bar and pull of every family."""
    lines = ["device (trajectories: 100 each)", ""]
    for case, (_, words) in CASES.items():
        mine = sorted((row for row in rows if row["case"] == case), key=lambda row: row["seed"])
        if not mine:
            continue
        values = ", ".join(f"{row['J']:.4f}" for row in mine)
        seeds = ", ".join(str(row["seed"]) for row in mine)
        lines.append(f"{case}: {words}")
        lines.append(f"  J {values}   seeds {seeds}")
        for name in mine[0]["families"]:
            each = [row["families"][name] for row in mine]
            mean = {k: np.sqrt(np.mean([one[k] ** 2 for one in each])) for k in each[0]}
            lines.append(
                f"  {name:<8} error {mean['error']:.1e}   error bar {mean['stderr']:.1e}   "
                f"pull {mean['pull']:.2f}"
            )
        factors = ", ".join(f"{row['widened']:.2g}" for row in mine)
        lines.append(f"  error bars widened by {factors}")
        lines += sorted({f"  caveat: {row['caveat']}" for row in mine if row["caveat"]})
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Train what is missing, write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, help="folder of the trainings")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("results/unknown"))
    options = parser.parse_args()
    path = options.out / "relaxations.json"
    rows = json.loads(path.read_text()) if path.exists() else []
    done = {(row["case"], row["seed"]) for row in rows}
    for seed in options.seeds:
        for case in options.cases:
            if options.work is None or (case, seed) in done:
                continue
            row = train(case, seed, options.work)
            rows.append(row)
            path.write_text(json.dumps(rows, indent=1) + "\n")
            print(f"{case} {seed}: J = {row['J']:.4f}", flush=True)
    text = format_table(rows)
    (options.out / "relaxations.txt").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
