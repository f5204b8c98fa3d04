"""Trainings that read a device at its ports alone: J on the device and what the model predicted.

    python benchmarks/ports.py RUNS...        # table.txt, one line per run

RUNS are folders of `fluctua train ports`. J is that of the device, measured at the end with
trajectories that are not counted."""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path

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


def main() -> None:
    """Read runs, write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results/ports"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    lines = [COLUMNS, *sorted(map(describe_run, arguments.runs)), ""]
    (arguments.out / "table.txt").write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
