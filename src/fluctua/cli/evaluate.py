"""`fluctua evaluate`."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fluctua.cli.common import EXPECTED, fail

if TYPE_CHECKING:
    from fluctua.runs.config import Config
    from fluctua.runs.evaluate import Measurement


def evaluate(
    what: Annotated[Path, typer.Argument(metavar="RUN|PARAMS.npz", help="a run folder, or omega, kappa, chi")],
    trajectories: Annotated[int, typer.Option(help="of each measurement")] = 1000,
    sigma_w: Annotated[list[float] | None, typer.Option(help="noise amplitude; may be repeated")] = None,
    sigma_kappa: Annotated[list[float] | None, typer.Option(help="modulation amplitude; may be repeated")] = None,
    dt: Annotated[
        list[float] | None, typer.Option(help="step; may be repeated. Default: the run's own, and half of it")
    ] = None,
    seed: Annotated[int, typer.Option(help="of the noise and the modulation")] = 1,
    backend: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    config: Annotated[
        str | None, typer.Option(help="for PARAMS.npz: the preset or file with its lattice; the paper's if not given")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON array and nothing else")] = False,
) -> None:
    """Measure J of given parameters afresh: more trajectories, other noise, another seed, a finer step.

    What is not given is as in the run's configuration. A J that changes with the step is an artefact.
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
        typer.echo(json.dumps([m._asdict() for m in measured]))
        return
    _print(path, measured)


def _find(what: Path, config: str | None) -> tuple[Path, Config]:
    """The parameters, and the configuration they belong to."""
    from fluctua.runs.config import load, named

    if what.is_dir():
        what = what / "final.npz"
        if not what.exists():
            raise ValueError(f"{what.parent} has no final.npz: it is not a run folder, or its training never stopped.")
    beside = what.parent / "config.toml"
    if config is not None:
        return what, named(config)
    return what, load(beside) if beside.exists() else named("paper")


def _print(path: Path, measured: list[Measurement]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from fluctua.core.text import with_error

    # identical trajectories differ by rounding only
    value = lambda m: with_error(m.J, m.J_stderr) if m.spread > 1e-12 else f"{m.J:.6f}"
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("σ_W", "σ_κ", "Δt", "J", "spread of returns", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for m in measured:
        table.add_row(f"{m.sigma_w:g}", f"{m.sigma_kappa:g}", f"{m.dt:g}", value(m),
                      f"{m.spread:.3g}", f"{m.seconds:.1f}")  # fmt: skip
    typer.echo(f"{path}: {measured[0].trajectories:,} trajectories each, seed {measured[0].seed}")
    Console().print(table)
