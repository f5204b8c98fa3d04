"""`fluctua evaluate`, `plot` and `watch`: networks and their runs, without training."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fluctua.cli import networks, options
from fluctua.cli.common import EXPECTED, fail, say
from fluctua.cli.settings import parse_settings
from fluctua.core.words import format_count

if TYPE_CHECKING:
    from fluctua.runs import evaluate as evaluation

VARIED = ("task.sigma_w", "task.sigma_kappa", "task.dt")
"""Keys that may have several values; each combination is measured."""


def evaluate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|PRESET|FILE.toml",
            help=f"Folder of a run; or with --params a preset ({options.PRESET}) or a file of "
            "settings",
        ),
    ],
    params: options.ParamsFile = None,
    trajectories: options.Trajectories = 1000,
    seed: options.Seed = 1,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any key of the configuration, such as backend=cuda; task.sigma_w, "
            "task.sigma_kappa and task.dt may have several values, task.sigma_w=[0, 0.5]",
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure J of trained parameters again.

    With more trajectories, other noise, another seed, a finer time step. Other settings are
    those of the run. Without task.dt, J is measured with the time step of the run and with half
    of it: a J that changes with the step is an artefact.
    """
    from fluctua.runs import evaluate as evaluation
    from fluctua.runs.build import make_network

    try:
        changes = parse_settings(settings)
        varied = {key: _list_values(key, changes.pop(key, None)) for key in VARIED}
        config = networks.configure(source, changes)
        if config.backend == "jax":
            raise ValueError('backend must be "auto", "cpu" or "cuda" here; got "jax".')
        if params is None and not Path(source).is_dir():
            raise ValueError(
                f"{source} has settings and no trained parameters: give them with --params "
                "FILE.npz, or the folder of a run."
            )
        path = Path(source) / "final.npz" if params is None else params
        theta = evaluation.load_parameters(path, make_network(config))
        sigma_w, sigma_kappa, dt = varied.values()
        steps = dt or [config.task.dt, config.task.dt / 2]
        measured = [
            evaluation.evaluate(
                config,
                theta,
                trajectories=trajectories,
                seed=seed,
                sigma_w=w,
                sigma_kappa=k,
                dt=step,
            )
            for w, k, step in itertools.product(sigma_w or [None], sigma_kappa or [None], steps)
        ]
    except EXPECTED as error:
        fail(str(error))
    if as_json:
        say(json.dumps([m._asdict() for m in measured]))
        return
    _print(path, measured)


def _list_values(key: str, value: Any) -> list[Any]:
    """The values of a key that may have several; none if it is not given."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    for one in values:
        if isinstance(one, bool) or not isinstance(one, int | float):
            raise ValueError(f"--set {key} takes numbers, such as 0.5 or [0, 0.5]; got {one!r}.")
    return [float(one) for one in values]


def _print(path: Path, measured: list[evaluation.Measurement]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from fluctua.core.text import with_error

    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("σ_W", "σ_κ", "Δt", "J", "spread of returns", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for m in measured:
        table.add_row(
            f"{m.sigma_w:g}",
            f"{m.sigma_kappa:g}",
            f"{m.dt:g}",
            # identical trajectories differ by rounding only
            with_error(m.J, m.J_stderr) if m.spread > 1e-12 else f"{m.J:.6f}",
            f"{m.spread:.3g}",
            f"{m.seconds:.1f}",
        )
    each = format_count(measured[0].trajectories, "trajectory")
    say(f"{path}: {each} each, seed {measured[0].seed}")
    Console().print(table)


def plot(run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run")]) -> None:
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
        list[Path] | None,
        typer.Argument(
            metavar="RUNS", help="Folders of runs, or that hold several; `runs` if not given"
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on; any but 127.0.0.1 can be reached from other machines"
        ),
    ] = ("127.0.0.1"),
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes 8765, or a free one")] = 0,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser")] = False,
) -> None:
    """Follow trainings on a page: those that run, have ended or were killed.

    The page reads the run folders and nothing else. For runs on another machine start it there,
    and `ssh -L 8765:localhost:8765 THERE` here. Ctrl-C ends it.
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
