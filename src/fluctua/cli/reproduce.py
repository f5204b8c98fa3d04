"""`fluctua reproduce`: the paper's figures from run folders, or from the tables that were kept of
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fluctua.cli.common import say

if TYPE_CHECKING:
    from collections.abc import Callable

    from fluctua.paper.panels import Panel, Settings

app = typer.Typer(
    name="reproduce", no_args_is_help=True, help="Draw the paper's figures from run folders."
)


@app.callback()
def _main() -> None:
    pass


@app.command()
def fig1(
    runs: Annotated[
        Path | None, typer.Option(help="folder of run folders, one for each σ_κ")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="folder for the tables, fig1.pdf and fig1.png")
    ] = Path(),
    inset: Annotated[
        Path | None,
        typer.Option(
            help="folder of the continuations from one breakpoint", show_default="RUNS/inset"
        ),
    ] = None,
    sigma_kappa: Annotated[
        float, typer.Option(help="the run whose parameters and network are drawn")
    ] = 0.2,
    trajectories: Annotated[int, typer.Option(help="average behind the opacities of c-e")] = 32,
    from_tables: Annotated[
        bool, typer.Option("--from-tables", help="read no runs, draw the tables in --out")
    ] = False,
) -> None:
    """Training at several modulation amplitudes (a, b), the course of the parameters (c-e), the
    network (f).

    What the figure shows is left in --out as curves.csv.gz and trained.npz, from which
    --from-tables draws it again.
    """
    from fluctua.cli.common import fail
    from fluctua.paper import training
    from fluctua.paper.fig1 import draw
    from fluctua.plot.style import save

    try:
        if runs is None and not from_tables:
            raise ValueError(
                "--runs is missing: a folder of run folders; or --from-tables for the tables in "
                "--out."
            )
        if runs is None or from_tables:
            results = training.read(out)
            written = []
        else:
            results = training.gather(
                runs, inset=inset, sigma_kappa=sigma_kappa, count=trajectories
            )
            written = training.write(results, out)
        written += save(draw(results), out / "fig1")
    except (ValueError, OSError, FloatingPointError) as error:
        fail(str(error))
    for run in results.runs:
        say(
            f"σ_κ = {run.sigma_kappa:<5g} J = {run.J[-1]:.4f} ± {run.J_stderr:.4f} at iteration "
            f"{run.iteration[-1] + 1:,}, {run.trajectories:,} trajectories ({run.name})"
        )
    for note in results.notes:
        say(f"note: {note}", err=True, fg=typer.colors.YELLOW)
    for path in written:
        say(path)


@app.command()
def fig2(
    runs: Annotated[
        Path | None,
        typer.Option(
            metavar="RUNS|PARAMS.npz", help="folder of run folders, or parameters of a lattice"
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="folder for the tables, fig2.pdf, fig2.png and summary.txt")
    ] = Path(),
    backend: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    quick: Annotated[
        bool, typer.Option("--quick", help="small ensembles; without --runs a small lattice too")
    ] = False,
    iteration: Annotated[
        int | None,
        typer.Option(help="of the runs", show_default="where half of the gain is reached"),
    ] = None,
    site: Annotated[
        int | None,
        typer.Option(help="whose frequency a and b show", show_default="the one resolved best"),
    ] = None,
    trajectories: Annotated[
        int | None, typer.Option(help="of a and b", show_default="200000")
    ] = None,
    returns: Annotated[
        int | None, typer.Option(help="trajectories of each point of d", show_default="10000")
    ] = None,
    every: Annotated[
        int | None, typer.Option(help="steps between two sortings into bins; 1 is the paper's")
    ] = None,
    seed: Annotated[int, typer.Option(help="of everything random")] = 0,
    config: Annotated[
        str, typer.Option(help="for PARAMS.npz: the preset or file with its lattice")
    ] = "paper",
    replace: Annotated[bool, typer.Option("--replace", help="measure again what is there")] = False,
    from_tables: Annotated[
        bool, typer.Option("--from-tables", help="measure nothing, draw the tables in --out")
    ] = False,
) -> None:
    """Convergence (a, b) and variance (c) of the estimate, bias and spread of the return (d), in
    mid-training.

    Each panel is measured once and left as a table in --out; going on after an interruption
    measures only the rest.
    """
    from fluctua.cli.common import EXPECTED, fail
    from fluctua.paper import fig2 as figure
    from fluctua.paper import properties
    from fluctua.plot.style import save

    try:
        if not from_tables:
            settings = _settings(
                quick, site=site, running=trajectories, bias=returns, every=every, seed=seed
            )
            _measure(out, runs, settings, quick, iteration, config, backend, replace)
        measured = properties.read(out)
        written = save(figure.draw(measured), out / "fig2")
        text = properties.summary(measured)
        (out / "summary.txt").write_text(text, encoding="utf-8")
    except (*EXPECTED, OSError) as error:
        fail(str(error))
    say(text)
    for path in (*written, out / "summary.txt"):
        say(path)


def _settings(quick: bool, **options: Any) -> Settings:
    from fluctua.paper.panels import QUICK, Settings

    settings = QUICK if quick else Settings()
    settings = settings._replace(
        **{name: value for name, value in options.items() if value is not None}
    )
    if settings.running < settings.group or settings.running % settings.group:
        raise ValueError(
            f"--trajectories must be a multiple of {settings.group:,}; got {settings.running:,}."
        )
    return settings


def _measure(
    out: Path,
    runs: Path | None,
    settings: Settings,
    quick: bool,
    iteration: int | None,
    config: str,
    backend: str,
    replace: bool,
) -> None:
    from fluctua.paper import panels, training
    from fluctua.runs.build import resolve_backend

    if backend not in ("auto", "cpu", "cuda"):
        raise ValueError(f'--backend must be "auto", "cpu" or "cuda"; got {backend!r}.')
    if runs is None and not quick:
        raise ValueError(
            "--runs is missing: a folder of run folders, or --quick for a small lattice."
        )
    if runs is None:
        measured_on = [training.trained_here(k, sigma) for k, sigma in enumerate((0.0, 0.2))]
    elif runs.suffix == ".npz":
        measured_on = training.from_file(runs, config)
    else:
        measured_on = training.from_runs(runs, iteration)
    sites = measured_on[0].task.network.sites
    if not -1 <= settings.site < sites:
        raise ValueError(f"--site must be one of 0 … {sites - 1}; got {settings.site}.")
    every = panels.plan(out, measured_on, settings, resolve_backend(backend))
    with _bar() as bar:
        for panel, go in panels.measure(every, replace=replace):
            bar(panel, go)


@contextmanager
def _bar() -> Iterator[Callable[[Panel, Callable[..., None]], None]]:
    """A progress bar for each panel at a terminal, one line for each elsewhere."""
    import time

    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console()
    text = "panel {task.fields[name]}", "{task.completed:,.0f} of {task.total:,.0f} trajectories"
    columns = (
        TextColumn(text[0]),
        BarColumn(),
        TextColumn(text[1]),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def run(panel: Panel, go: Callable[..., None]) -> None:
            task = progress.add_task("", total=panel.work, name=panel.name)
            begun = time.perf_counter()
            go(lambda count: progress.advance(task, count))
            if not console.is_terminal:
                seconds = time.perf_counter() - begun
                say(f"panel {panel.name}: {panel.work:,} trajectories, {seconds:.1f} s")

        yield run
