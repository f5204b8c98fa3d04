"""`fluctua estimate` of a network that is simulated."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fluctua.cli import networks
from fluctua.cli.common import Output, say, to_json
from fluctua.core.display.estimates import describe_estimate
from fluctua.core.estimate import Estimate
from fluctua.runs.build import make_task, resolve_backend
from fluctua.runs.evaluate import load_parameters
from fluctua.runs.reading import read_run


class Simulation(NamedTuple):
    """Simulation of a preset, a file of settings or a run."""

    source: str
    params: Path | None
    baseline: str
    trajectories: int
    seed: int


def estimate_network(simulation: Simulation, settings: dict[str, Any], output: Output) -> None:
    """Simulate, estimate and print."""
    config = networks.configure(simulation.source, settings)
    task = make_task(config)
    backend = resolve_backend(config.backend)
    folder = Path(simulation.source)
    theta = networks.draw_initial_theta(task, config, simulation.seed)
    if folder.is_dir():
        theta = read_run(folder).trained
    if simulation.params is not None:
        theta = load_parameters(simulation.params, task.network, theta)
    estimator = task.estimator(backend, baseline=simulation.baseline)
    _, key = jax.random.split(jax.random.key(simulation.seed))
    started = time.perf_counter()
    estimate = estimator(key, theta, simulation.trajectories)
    jax.block_until_ready(estimate.gradient)
    seconds = time.perf_counter() - started
    _save(output.out, estimate)
    if output.as_json:
        result = {
            "J": float(estimate.value),
            "J_stderr": float(estimate.value_stderr),
            "trajectories": simulation.trajectories,
            "bonds": task.network.bonds,
            "gradient": estimate.gradient,
            "stderr": estimate.stderr,
            "seconds": seconds,
        }
        say(json.dumps(to_json(result)))
        return
    c = config.task
    say(
        f"{config.lattice.rows}x{config.lattice.columns} lattice: {task.network.sites} "
        f"resonators, {len(task.network.bonds)} bonds"
    )
    say(
        f"σ_W = {c.sigma_w:g}, σ_κ = {c.sigma_kappa:g}, T = {c.horizon:g}, Δt = {c.dt:g} "
        f"({c.integrator})"
    )
    say(describe_estimate(estimate))
    for name, gradient in estimate.gradient.items():
        say(_summarise_family(name, np.asarray(gradient), np.asarray(estimate.stderr[name])))
    say(f"{seconds:.2f} s on the {backend} backend, {simulation.baseline} baseline")


def _save(out: Path | None, estimate: Estimate) -> None:
    """Write gradient and errors to an .npz file."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {}
    for name, gradient in estimate.gradient.items():
        arrays[f"gradient.{name}"] = np.asarray(gradient)
        arrays[f"stderr.{name}"] = np.asarray(estimate.stderr[name])
    np.savez(out, **arrays)


def _summarise_family(name: str, gradient: np.ndarray, stderr: np.ndarray) -> str:
    """One line on the gradient of a family of parameters."""
    with np.errstate(invalid="ignore", divide="ignore"):
        clear = np.mean(np.abs(gradient) > 2 * stderr)
    return (
        f"  {name:<6} |∇J| = {np.linalg.norm(gradient):.3g}, typical error "
        f"{np.sqrt(np.mean(stderr**2)):.2g}, {clear:.0%} of {gradient.size} beyond two errors"
    )
