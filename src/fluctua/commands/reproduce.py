"""`fluctua reproduce`: the paper's figures from run folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Draw the paper's figures from run folders.")


@app.callback()
def _main() -> None:
    pass


@app.command()
def fig1(
    runs: Annotated[Path, typer.Option(help="folder of run folders, one for each σ_κ")],
    out: Annotated[Path, typer.Option(help="folder for fig1.pdf and fig1.png")] = Path(),
    inset: Annotated[
        Path | None, typer.Option(help="folder of the continuations from one breakpoint", show_default="RUNS/inset")
    ] = None,
    sigma_kappa: Annotated[float, typer.Option(help="the run whose parameters and network are drawn")] = 0.2,
    trajectories: Annotated[int, typer.Option(help="average behind the opacities of c-e")] = 32,
) -> None:
    """Training at several modulation amplitudes (a, b), the course of the parameters (c-e), the network (f)."""
    from fluctua.commands.common import fail
    from fluctua.figures.fig1 import draw, gather
    from fluctua.figures.style import save

    try:
        results = gather(runs, inset=inset, sigma_kappa=sigma_kappa, count=trajectories)
        written = save(draw(results), out / "fig1")
    except (ValueError, OSError, FloatingPointError) as error:
        fail(str(error))
    for run in results.runs:
        last = run.history
        typer.echo(
            f"σ_κ = {run.sigma_kappa:<5g} J = {last.J[-1]:.4f} ± {last.J_stderr[-1]:.4f} after iteration "
            f"{last.iteration[-1]:,}, {last.trajectories[-1]:,} trajectories ({run.folder.name})"
        )
    for note in results.notes:
        typer.secho(f"note: {note}", err=True, fg=typer.colors.YELLOW)
    for path in written:
        typer.echo(path)
