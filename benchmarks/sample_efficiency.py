"""Draws results/sample_efficiency from its run folders, and says what each training needed.

python benchmarks/sample_efficiency.py results/sample_efficiency results/fig1
"""

from __future__ import annotations

import sys
from pathlib import Path

from fluctua.plot.efficiency import PAPER_FINAL, draw, read_curve, spent_until
from fluctua.plot.runs import find_runs
from fluctua.plot.style import save

LEVELS = (0.3, 0.4, 0.5, 0.55, 0.6, PAPER_FINAL)

if __name__ == "__main__":
    curves = [read_curve(run) for folder in sys.argv[1:] for run in find_runs(Path(folder))]
    shown = [c for c in curves if c.sigma_kappa in (0.0, 0.2)]
    print(f"{'training':<36} {'σ_κ':>4} seed {'spent':>11}  J, Δt/2   trajectories until J =")
    print(" " * 66 + "".join(f"{level:>11g}" for level in LEVELS))
    for c in sorted(shown, key=lambda c: (c.sigma_kappa, c.label, c.seed)):
        when = (spent_until(c, level) for level in LEVELS)
        finer = "      –" if c.finer is None else f"{c.finer:7.4f}"
        print(f"{c.label:<36} {c.sigma_kappa:>4g} {c.seed:>4} {c.spent[-1]:>11,}  {finer}  "
              + "".join(f"{'–' if n is None else f'{n:,}':>11}" for n in when))  # fmt: skip
    for path in save(draw(shown), Path(sys.argv[1]) / "sample_efficiency"):
        print(path)
