"""Numbers of the runs behind figure 1 for each claim of the paper: `python
benchmarks/fig1_claims.py RUNS [TRAJECTORIES]`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from fluctua.paper.training import compute_exposure
from fluctua.runs.config import apply_changes, load
from fluctua.runs.evaluate import evaluate
from fluctua.runs.reading import SavedRun, find_runs, read_run

EVENTUAL = 0.65
"""The paper's final J at σ_κ = 0, against which it counts gains."""

BAND = 1.5
"""Lattice constants either side of the straight line between the leads."""


def distance(run: SavedRun, points: np.ndarray) -> np.ndarray:
    """From the straight line between the leads."""
    network = run.task.network
    a, b = network.positions[network.lead_sites[:2]]
    along = (b - a) / np.linalg.norm(b - a)
    return np.abs((points - a) @ np.array([-along[1], along[0]]))


def rms(v: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(v))))


def describe(run: SavedRun, trajectories: int) -> str:
    network, theta, h = run.task.network, run.trained, run.history
    sites, bonds = (
        distance(run, network.positions),
        distance(run, network.positions[network.bonds].mean(axis=1)),
    )
    light = compute_exposure(0, run.task, theta).omega
    bright, dark = light >= np.quantile(light, 0.75), light <= np.quantile(light, 0.25)

    def smooth(at):
        return float(np.mean(h.J[max(at - 2, 0) : at + 3]))

    def gain(at):
        return (smooth(at) - h.J[0]) / (EVENTUAL - h.J[0])

    lines = [
        f"σ_κ = {run.sigma_kappa:g}: {len(h.J):,} iterations, {h.trajectories[-1]:,} trajectories, "
        f"largest ensemble {h.ensemble.max():,}, {np.sum(h.seconds) / 60:.1f} minutes",
        f"  J {h.J[0]:.4f} at the start, {smooth(15):.4f} after 15 iterations, {smooth(75):.4f} "
        "after 75",
        f"  of a gain to {EVENTUAL}: {gain(15):.0%} after 15, {gain(75):.0%} after 75",
        f"  couplings within {BAND} of the diagonal {theta['kappa'][bonds < BAND].mean():.3f} in "
        "the mean, "
        f"beyond 3: {theta['kappa'][bonds > 3].mean():.3f}",
        f"  detuning within {BAND} of the diagonal {rms(theta['omega'][sites < BAND]):.3f} rms, "
        f"beyond 3: {rms(theta['omega'][sites > 3]):.3f}",
        "  Kerr coefficient of the quarter of sites with most light "
        f"{rms(theta['chi'][bright]):.4f} rms, "
        f"with least {rms(theta['chi'][dark]):.4f}",
    ]
    events = [f"{i} {e}" for i, e in zip(h.iteration, h.event, strict=True) if e]
    lines.append(f"  events: {', '.join(events) or 'none'}")
    config = load(run.folder / "config.toml")
    euler = apply_changes(config, {"task.integrator": "euler", "task.dt": 1e-3})
    cases = [(config, {}), (config, {"dt": config.task.dt / 2}), (config, {"sigma_w": 0.0})]
    if config.task.integrator != "euler":
        cases += [(euler, {}), (euler, {"dt": 5e-4})]
    for settings, change in cases:
        m = evaluate(settings, theta, trajectories=trajectories, backend="auto", **change)
        lines.append(
            f"  J = {m.J:.5f} ± {m.J_stderr:.5f} at Δt = {m.dt:g} ({settings.task.integrator}), "
            f"σ_W = {m.sigma_w:g}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 4000
    for run in sorted(map(read_run, find_runs(Path(sys.argv[1]))), key=lambda run: run.sigma_kappa):
        print(describe(run, count), flush=True)
