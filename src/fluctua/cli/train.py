"""`fluctua train`: a preset, a file of settings, or a training of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fluctua.cli import options
from fluctua.cli.common import EXPECTED, fail, refuse_options
from fluctua.cli.settings import parse_settings
from fluctua.cli.trainings.display import Target
from fluctua.store.code import is_code

CODE_OPTIONS = ("out", "resume", "replace", "iterations", "watch")
"""Options that a training of one's own heeds; its file holds the rest."""

RESUME_OPTIONS = (
    "resume",
    "iterations",
    "trajectories",
    "seed",
    "backend",
    "baseline",
    "settings",
    "watch",
    "cluster",
)
"""Options that may be given with --resume; the library refuses those that change the training."""
PRESET = "that of the preset, see --show"


def train(
    context: typer.Context,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="PRESET|FILE.toml|FILE.py:NAME",
            help=f"A preset ({options.PRESET}), a file of settings, or a fluctua.Training of "
            "your own in a Python file; demo if not given",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder of the run", show_default="runs/PRESET-1, -2, …"
        ),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Continue the run in this folder")
    ] = None,
    branch: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FOLDER",
            help="Start from the last parameters of another run, in a new folder",
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Remove an earlier run in --out")
    ] = False,
    iterations: Annotated[
        int | None,
        typer.Option(
            help="Number of iterations, including those before a --resume",
            show_default=f"{PRESET}; 100 of FILE.py:NAME",
        ),
    ] = None,
    trajectories: Annotated[
        int | None,
        typer.Option(help="Trajectories per iteration; ends any schedule", show_default=PRESET),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of all random numbers", show_default=PRESET)
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="Where to compute: auto, cpu, cuda or jax", show_default=PRESET),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="Baseline: none, time, carried, optimal, binned, twin; on jax also mean",
            show_default=PRESET,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any key of the configuration, as --show lists them, such as "
            "task.sigma_kappa=0.2 or optimiser.rule=adam; may be repeated",
        ),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print the configuration with every key and exit")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Follow the training on a page in the browser")
    ] = False,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Compute on a Ray cluster: HOST:PORT, auto for one that runs here, or local",
        ),
    ] = None,
) -> None:
    """Train a resonator network, or a process of your own, into a folder.

    Without arguments: a small lattice, in less than a minute. The folder holds the configuration,
    the history, the parameters over time, figures and checkpoints. Ctrl-C saves; --resume
    continues exactly where the run stopped.

    FILE.py:NAME is a fluctua.Training, or a function without arguments that returns one. The
    same name continues it: fluctua train FILE.py:NAME --resume FOLDER.
    """
    options: dict[str, Any] = {
        "backend": backend,
        "iterations": iterations,
        "ensemble.trajectories": trajectories,
        "ensemble.schedule": None if trajectories is None else "fixed",
        "seed": seed,
        "baseline.kind": baseline,
    }
    place = Target(out, replace, watch, cluster)
    try:
        if source is not None and is_code(source):
            refuse_options(
                context,
                CODE_OPTIONS,
                f"a training of your own heeds {', '.join(f'--{name}' for name in CODE_OPTIONS)}; "
                "everything else is in its file.",
            )
            from fluctua.cli.trainings.own_code import train_code

            raise typer.Exit(train_code(source, resume, iterations, place))
        changes = _merge_changes(options, parse_settings(settings))
        if show and (resume or branch):
            raise ValueError(
                "--show prints the configuration of a new training: leave out --resume and --from."
            )
        if replace and out is None and resume is None:
            raise ValueError(
                "--replace removes the run in --out: give both. Without --out the folder is a "
                "new one."
            )
        from fluctua.cli.trainings import network

        if resume is not None:
            if source:
                raise ValueError(f"--resume takes everything from its folder: leave out {source}.")
            refuse_options(
                context, RESUME_OPTIONS, "--resume takes everything but budgets from its folder."
            )
            status = network.resume(resume, changes, place)
        elif branch is not None:
            if source:
                raise ValueError(
                    f"--from takes the configuration of its run: leave out {source!r}."
                )
            status = network.branch(branch, changes, place)
        else:
            status = network.begin(source or "demo", changes, place, show)
    except typer.Exit:
        raise
    except EXPECTED as error:
        fail(str(error))
    raise typer.Exit(status)


def _merge_changes(options: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Changes by flags and by --set. Another optimiser does not keep the options of the former."""
    changes = {key: value for key, value in options.items() if value is not None}
    for key, value in settings.items():
        if changes.setdefault(key, value) != value:
            raise ValueError(
                f"`{key}` was given twice, as {changes[key]!r} and as {value!r}. Give one."
            )
    if "optimiser.rule" in changes:
        changes = {"optimiser.options": {}} | changes
    return changes
