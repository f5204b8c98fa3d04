"""`fluctua gradient`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from fluctua.cli.common import EXPECTED, fail, lattice_size


def gradient(
    lattice: Annotated[str, typer.Option(help="rows x columns, leads on opposite corners")] = "11x13",
    horizon: Annotated[float, typer.Option(help="T, in units of 1 / coupling")] = 20.0,
    dt: Annotated[float, typer.Option(help="Euler-Maruyama step")] = 1e-3,
    sigma_w: Annotated[float, typer.Option(help="noise amplitude of every open channel")] = 0.5,
    sigma_kappa: Annotated[float, typer.Option(help="amplitude of the antagonistic modulation")] = 0.0,
    chi_std: Annotated[float, typer.Option(help="spread of the initial Kerr coefficients")] = 1e-4,
    params: Annotated[
        Path | None, typer.Option(help=".npz with omega (detunings), kappa (in the order of the bonds), chi")
    ] = None,
    trajectories: Annotated[int, typer.Option(help="how many to average")] = 1000,
    baseline: Annotated[
        str, typer.Option(help="none, time, optimal, binned, twin; jax: mean; kernels: carried")
    ] = "time",
    backend: Annotated[str, typer.Option(help="cpu, cuda or jax")] = "cpu",
    seed: Annotated[int, typer.Option(help="of the noise, the modulation and the initial Kerr coefficients")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Estimate the gradient of the transmitted power once. Without options: the paper's lattice at its start."""
    import jax

    from fluctua import tcmt
    from fluctua.core.text import describe_estimate
    from fluctua.runs.evaluate import load_parameters

    try:
        network = tcmt.rectangular(*lattice_size(lattice), sigma_w=sigma_w)
        task = tcmt.transmission(network, horizon=horizon, dt=dt, sigma_kappa=sigma_kappa)
        estimator = task.estimator(backend, baseline=baseline)
        k_start, k_run = jax.random.split(jax.random.key(seed))
        theta = tcmt.initial_parameters(k_start, network, chi_std=chi_std)
        if params is not None:
            theta = load_parameters(params, network, theta)
        begun = time.perf_counter()
        estimate = estimator(k_run, theta, trajectories)
        jax.block_until_ready(estimate.gradient)
        seconds = time.perf_counter() - begun
    except EXPECTED as error:
        fail(str(error))

    families = ("omega", "kappa", "chi")
    if as_json:
        result = {
            "J": float(estimate.value),
            "J_stderr": float(estimate.value_stderr),
            "bonds": network.bonds.tolist(),
            "gradient": {name: np.asarray(estimate.gradient[name], float).tolist() for name in families},
            "stderr": {name: np.asarray(estimate.stderr[name], float).tolist() for name in families},
            "seconds": seconds,
        }
        typer.echo(json.dumps(result))
        return
    typer.echo(f"{lattice} lattice: {network.sites} resonators, {len(network.bonds)} bonds, leads on sites 0 and "
               f"{network.sites - 1}")  # fmt: skip
    typer.echo(f"σ_W = {sigma_w:g}, σ_κ = {sigma_kappa:g}, T = {horizon:g}, Δt = {dt:g}")
    typer.echo(describe_estimate(estimate))
    for name in families:
        g, e = np.asarray(estimate.gradient[name]), np.asarray(estimate.stderr[name])
        with np.errstate(invalid="ignore", divide="ignore"):
            clear = np.mean(np.abs(g) > 2 * e)
        typer.echo(f"  {name:<6} |∇J| = {np.linalg.norm(g):.3g}, typical error {np.sqrt(np.mean(e**2)):.2g}, "
                   f"{clear:.0%} of {g.size} beyond two errors")  # fmt: skip
    typer.echo(f"{seconds:.2f} s on the {backend} backend, {baseline} baseline")
