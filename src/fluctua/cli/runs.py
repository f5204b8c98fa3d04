"""`fluctua evaluate`, `gradient`, `plot` and `watch`: lattices and their runs, looked at without
training.
"""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from fluctua.cli.common import (
    EXPECTED,
    AsJson,
    ChiSpread,
    Horizon,
    Seed,
    SigmaKappa,
    SigmaW,
    Size,
    TimeStep,
    fail,
    lattice_start,
    say,
)

if TYPE_CHECKING:
    from fluctua.runs.config import Config
    from fluctua.runs.evaluate import Measurement


def evaluate(
    what: Annotated[
        Path, typer.Argument(metavar="RUN|PARAMS.npz", help="a run folder, or omega, kappa, chi")
    ],
    trajectories: Annotated[int, typer.Option(help="of each measurement")] = 1000,
    sigma_w: Annotated[
        list[float] | None, typer.Option(help="noise amplitude; may be repeated")
    ] = None,
    sigma_kappa: Annotated[
        list[float] | None, typer.Option(help="modulation amplitude; may be repeated")
    ] = None,
    dt: Annotated[
        list[float] | None,
        typer.Option(help="step; may be repeated. Default: the run's own, and half of it"),
    ] = None,
    seed: Annotated[int, typer.Option(help="of the noise and the modulation")] = 1,
    backend: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    config: Annotated[
        str | None,
        typer.Option(
            help="for PARAMS.npz: the preset or file with its lattice; the paper's if not given"
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print one JSON array and nothing else")
    ] = False,
) -> None:
    """Measure J of given parameters afresh.

    With more trajectories, other noise, another seed, a finer step. What is not given is as in the
    run's configuration. A J that changes with the step is an artefact.
    """
    from fluctua.runs.build import make_network
    from fluctua.runs.evaluate import evaluate as measure
    from fluctua.runs.evaluate import load_parameters

    try:
        if backend not in ("auto", "cpu", "cuda"):
            raise ValueError(f'--backend must be "auto", "cpu" or "cuda"; got {backend!r}.')
        path, settings = _find(what, config)
        theta = load_parameters(path, make_network(settings))
        steps = dt or [settings.task.dt, settings.task.dt / 2]
        fixed: Any = {"trajectories": trajectories, "seed": seed, "backend": backend}
        noises: Any = sigma_w or [None], sigma_kappa or [None]  # type: ignore[list-item]
        measured = [
            measure(settings, theta, **fixed, sigma_w=w, sigma_kappa=k, dt=d)
            for w, k, d in itertools.product(*noises, steps)
        ]
    except EXPECTED as error:
        fail(str(error))
    if as_json:
        say(json.dumps([m._asdict() for m in measured]))
        return
    _print(path, measured)


def _find(what: Path, config: str | None) -> tuple[Path, Config]:
    """The parameters, and the configuration they belong to."""
    from fluctua.runs.config import find_config, load_unedited

    if what.is_dir():
        what = what / "final.npz"
        if not what.exists():
            raise ValueError(
                f"{what.parent} has no final.npz: it is not a run folder, or its training never "
                "stopped."
            )
    beside = what.parent / "config.toml"
    if config is not None:
        return what, find_config(config)
    return what, load_unedited(beside) if beside.exists() else find_config("paper")


def _print(path: Path, measured: list[Measurement]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from fluctua.core.text import with_error

    # identical trajectories differ by rounding only
    def value(m):
        return with_error(m.J, m.J_stderr) if m.spread > 1e-12 else f"{m.J:.6f}"

    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("σ_W", "σ_κ", "Δt", "J", "spread of returns", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for m in measured:
        table.add_row(
            f"{m.sigma_w:g}",
            f"{m.sigma_kappa:g}",
            f"{m.dt:g}",
            value(m),
            f"{m.spread:.3g}",
            f"{m.seconds:.1f}",
        )
    say(f"{path}: {measured[0].trajectories:,} trajectories each, seed {measured[0].seed}")
    Console().print(table)


def gradient(
    lattice: Size = "11x13",
    horizon: Horizon = 20.0,
    dt: TimeStep = 1e-3,
    step: Annotated[
        str, typer.Option(help="euler, heun (longer steps at the same bias); jax: rk4")
    ] = "euler",
    sigma_w: SigmaW = 0.5,
    sigma_kappa: SigmaKappa = 0.0,
    chi_std: ChiSpread = 1e-4,
    params: Annotated[
        Path | None,
        typer.Option(help=".npz with omega (detunings), kappa (in the order of the bonds), chi"),
    ] = None,
    trajectories: Annotated[int, typer.Option(help="how many to average")] = 1000,
    baseline: Annotated[
        str, typer.Option(help="none, time, optimal, binned, twin; jax: mean; kernels: carried")
    ] = "time",
    backend: Annotated[str, typer.Option(help="cpu, cuda or jax")] = "cpu",
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Estimate the gradient of the transmitted power once.

    Without options: the paper's lattice at its start.
    """
    import jax

    from fluctua.core.text import describe_estimate
    from fluctua.runs.evaluate import load_parameters

    try:
        task, theta, k_run = lattice_start(
            lattice, horizon, dt, sigma_w, sigma_kappa, chi_std, seed, step
        )
        network = task.network
        estimator = task.estimator(backend, baseline=baseline)
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
            "gradient": {
                name: np.asarray(estimate.gradient[name], float).tolist() for name in families
            },
            "stderr": {
                name: np.asarray(estimate.stderr[name], float).tolist() for name in families
            },
            "seconds": seconds,
        }
        say(json.dumps(result))
        return
    say(
        f"{lattice} lattice: {network.sites} resonators, {len(network.bonds)} bonds, leads on "
        "sites 0 and "
        f"{network.sites - 1}"
    )
    say(f"σ_W = {sigma_w:g}, σ_κ = {sigma_kappa:g}, T = {horizon:g}, Δt = {dt:g} ({step})")
    say(describe_estimate(estimate))
    for name in families:
        g = np.asarray(estimate.gradient[name])
        e = np.asarray(estimate.stderr[name])
        with np.errstate(invalid="ignore", divide="ignore"):
            clear = np.mean(np.abs(g) > 2 * e)
        say(
            f"  {name:<6} |∇J| = {np.linalg.norm(g):.3g}, typical error "
            f"{np.sqrt(np.mean(e**2)):.2g}, "
            f"{clear:.0%} of {g.size} beyond two errors"
        )
    say(f"{seconds:.2f} s on the {backend} backend, {baseline} baseline")


def plot(run: Annotated[Path, typer.Argument(metavar="RUN", help="a run folder")]) -> None:
    """Draw the figures of a run again, also while it trains."""
    from fluctua.plot.training import draw_folder
    from fluctua.store.folder import find_run

    try:
        paths = draw_folder(find_run(run))
    except EXPECTED as error:
        fail(str(error))
    for path in paths:
        say(path)


def watch(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUNS", help="folders of runs; runs if not given")
    ] = None,
    host: Annotated[
        str,
        typer.Option(help="address to listen on; others than this machine's own are seen by all"),
    ] = ("127.0.0.1"),
    port: Annotated[int, typer.Option(help="0 takes 8765, or a free one")] = 0,
    show: Annotated[bool, typer.Option("--open", help="open the page in a browser")] = False,
) -> None:
    """Follow trainings on a page: those that run, have ended or were killed.

    It reads the run folders and nothing else. For runs on another machine start it there, and
    `ssh -L 8765:localhost:8765 THERE` here. Ctrl-C ends it.
    """
    import webbrowser

    from fluctua.watch.server import serve

    def ready(address: str) -> None:
        say(f"{address}   Ctrl-C ends it")
        if show:
            webbrowser.open(address)

    try:
        serve(runs or [Path("runs")], host, port, ready)
    except (ValueError, OSError) as error:
        fail(str(error))
