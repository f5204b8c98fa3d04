"""`fluctua reproduce`: the paper's figures from run folders, or from the tables kept of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fluctua.cli.common import EXPECTED, fail, note, refuse_options, say
from fluctua.cli.settings import Key, Keys, Settings, read_settings
from fluctua.core.words import format_count

FIG1_KEYS: Keys = {
    "inset": Key(str, "fig1: folder of the continuations from one breakpoint (RUNS/inset)"),
    "sigma_kappa": Key(float, "fig1: amplitude of the run whose parameters are drawn (0.2)"),
    "trajectories": Key(
        int, "trajectories behind the opacities of fig1 c-e (32), and of fig2 a and b (200000)"
    ),
}
FIG2_KEYS: Keys = {
    "trajectories": FIG1_KEYS["trajectories"],
    "returns": Key(int, "fig2: trajectories of each point of d (10000)"),
    "every": Key(int, "fig2: steps between two sortings into bins; 1 is the paper's"),
    "iteration": Key(int, "fig2: iteration of the runs (where half of the gain is reached)"),
    "site": Key(int, "fig2: resonator whose frequency a and b show (the one resolved best)"),
    "seed": Key(int, "fig2: seed of all random numbers (0)"),
    "backend": Key(str, "fig2: auto, cpu or cuda"),
    "config": Key(str, "fig2: preset or file with the lattice of PARAMS.npz (paper)"),
}
REPRODUCE_KEYS: Keys = {**FIG1_KEYS, **FIG2_KEYS}


def reproduce(
    context: typer.Context,
    figure: Annotated[str, typer.Argument(metavar="FIGURE", help="fig1 or fig2")],
    runs: Annotated[
        Path | None,
        typer.Option(
            metavar="RUNS|PARAMS.npz",
            help="Folder of run folders, one per σ_κ; for fig2 also parameters of a lattice",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder for tables and figures")
    ] = Path(),
    quick: Annotated[
        bool, typer.Option("--quick", help="Small ensembles; without --runs a small lattice too")
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Measure again what --out holds already")
    ] = False,
    from_tables: Annotated[
        bool, typer.Option("--from-tables", help="Measure nothing, draw the tables in --out")
    ] = False,
    settings: Settings = None,
) -> None:
    """Draw a figure of the paper from run folders.

    fig1: training at several modulation amplitudes (a, b), the course of the parameters (c-e),
    the network (f). Kept in --out as curves.csv.gz and trained.npz.

    fig2: convergence (a, b) and variance (c) of the estimate, bias and spread of the return (d),
    in mid-training. Each panel is measured once and kept as a table in --out; after an
    interruption only the rest is measured.

    --from-tables draws either again.
    """
    try:
        if figure == "fig1":
            refuse_options(
                context, ("runs", "out", "from_tables", "settings"), "only fig2 is measured."
            )
            _reproduce_fig1(runs, out, from_tables, read_settings(settings, FIG1_KEYS))
        elif figure == "fig2":
            if from_tables:
                refuse_options(context, ("out", "from_tables"), "--from-tables measures nothing.")
            else:
                from fluctua.cli.reproduce_panels import measure_panels

                measure_panels(runs, out, quick, replace, read_settings(settings, FIG2_KEYS))
            _draw_fig2(out)
        else:
            raise ValueError(f"figures are fig1 and fig2; got {figure!r}.")
    except (*EXPECTED, OSError) as error:
        fail(str(error))


def _reproduce_fig1(
    runs: Path | None, out: Path, from_tables: bool, settings: dict[str, Any]
) -> None:
    from fluctua.paper import training
    from fluctua.paper.fig1 import draw
    from fluctua.plot.style import save

    if runs is None and not from_tables:
        raise ValueError(
            "--runs is missing: a folder of run folders; or --from-tables for the tables in --out."
        )
    if from_tables:
        ignored = [*(["--runs"] if runs else []), *(f"--set {key}" for key in settings)]
        if ignored:
            raise ValueError(f"{', '.join(ignored)}: --from-tables draws what is there.")
        results = training.read(out)
        written = []
    else:
        assert runs is not None
        inset = settings.get("inset")
        results = training.gather(
            runs,
            inset=None if inset is None else Path(inset),
            sigma_kappa=settings.get("sigma_kappa", 0.2),
            count=settings.get("trajectories", 32),
        )
        written = training.write(results, out)
    written += save(draw(results), out / "fig1")
    for run in results.runs:
        say(
            f"σ_κ = {run.sigma_kappa:<5g} J = {run.J[-1]:.4f} ± {run.J_stderr:.4f} at iteration "
            f"{run.iteration[-1] + 1:,}, {format_count(run.trajectories, 'trajectory')} "
            f"({run.name})"
        )
    for text in results.notes:
        note(text)
    for path in written:
        say(path)


def _draw_fig2(out: Path) -> None:
    from fluctua.paper import fig2, properties
    from fluctua.plot.style import save

    measured = properties.read(out)
    written = save(fig2.draw(measured), out / "fig2")
    text = properties.format_summary(measured)
    (out / "summary.txt").write_text(text, encoding="utf-8")
    say(text)
    for path in (*written, out / "summary.txt"):
        say(path)
