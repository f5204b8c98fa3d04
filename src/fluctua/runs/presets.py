"""Configurations to start from."""

from __future__ import annotations

from pathlib import Path

from fluctua.core.text import close_match
from fluctua.runs.config import Config, changed, load

PAPER = changed(
    Config(preset="paper"),
    {
        "ensemble.schedule": "escalation",
        "optimiser.options": {"rho": 10.0, "beta": 0.9, "epsilon": 1e-8},
    },
)
"""Everything as in the paper: 11 × 13, T = 20, its rule, its binned baseline, its escalation."""

PAPER_QUICK = changed(
    PAPER,
    {
        "preset": "paper-quick",
        "iterations": 75,
        "ensemble.schedule": "fixed",
        "baseline.every": 50,  # as unbiased, and several times faster on two cores
        "keep.parameters_every": 1,
    },
)
"""The paper's lattice and rule before any escalation: 75 iterations of 1,000 trajectories."""

DEMO = changed(
    Config(preset="demo"),
    {
        "iterations": 60,
        "lattice.rows": 5,
        "lattice.columns": 8,
        "task.horizon": 20.0,
        "task.dt": 2.5e-3,
        "ensemble.trajectories": 300,
        "optimiser.rule": "adam",
        "optimiser.learning_rate": 0.02,
        "optimiser.chi_scale": 0.01,  # a Kerr coefficient of 0.01 detunes by as much as ω = 0.5
        "baseline.kind": "carried",
        "keep.parameters_every": 1,
        "keep.checkpoint_seconds": 5.0,
    },
)
"""A small lattice that learns in less than a minute on two cores."""

FAST = changed(
    PAPER,
    {
        "preset": "fast",
        "iterations": 300,
        "ensemble.schedule": "fixed",
        "ensemble.trajectories": 16,
        "optimiser.rule": "adam",
        "optimiser.learning_rate": 0.1,
        "optimiser.decay": 100.0,
        "optimiser.options": {"b2": 0.99},
        "optimiser.chi_scale": 0.01,
        "baseline.kind": "twin",
        "keep.parameters_every": 1,
    },
)
"""The paper's lattice and bounds with the twin correction: its result from 16 trajectories an iteration."""

PRESETS = {"demo": DEMO, "fast": FAST, "paper": PAPER, "paper-quick": PAPER_QUICK}


def named(source: str) -> Config:
    """A preset by its name, or the configuration in a TOML file."""
    if source in PRESETS:
        return PRESETS[source]
    if not source.endswith(".toml") and not Path(source).exists():
        raise ValueError(
            f"{source!r} is neither a preset ({', '.join(PRESETS)}) nor a file.{close_match(source, PRESETS)}"
        )
    return load(source)
