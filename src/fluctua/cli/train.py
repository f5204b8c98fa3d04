"""`fluctua train`: a preset, a file of settings, or a training of one's own."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from fluctua.cli.common import (
    EXPECTED,
    PRESET,
    STOPPED,
    fail,
    find_free_folder,
    refuse_options,
    say,
)
from fluctua.cli.settings import parse_settings
from fluctua.core.words import escape_controls
from fluctua.store.code import is_code

if TYPE_CHECKING:
    from rich.console import Console

    from fluctua.learn.training import Training
    from fluctua.runs.config import Config

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


def train(
    context: typer.Context,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="PRESET|FILE.toml|FILE.py:NAME",
            help=f"A preset ({PRESET}), a file of settings, or a fluctua.Training of your own "
            "in a Python file; demo if not given",
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
        typer.Option(help="Number of iterations, including those before a --resume"),
    ] = None,
    trajectories: Annotated[
        int | None, typer.Option(help="Trajectories per iteration; ends any schedule")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all random numbers")] = None,
    backend: Annotated[
        str | None, typer.Option(help="Where to compute: auto, cpu, cuda or jax")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(help="Baseline: none, time, carried, optimal, binned, twin; on jax also mean"),
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
            raise typer.Exit(_train_code(source, resume, iterations, place))
        changes = _merge_changes(options, parse_settings(settings))
        if show and (resume or branch):
            raise ValueError(
                "--show prints the configuration of a new training: leave out --resume and --from."
            )
        if replace and out is None and resume is None:
            raise ValueError(
                "--replace removes the run in --out: give both. Without --out the folder is a new "
                "one."
            )
        if resume is not None:
            if source:
                raise ValueError(f"--resume takes everything from its folder: leave out {source}.")
            refuse_options(
                context, RESUME_OPTIONS, "--resume takes everything but budgets from its folder."
            )
            status = _resume(resume, changes, place)
        elif branch is not None:
            if source:
                raise ValueError(
                    f"--from takes the configuration of its run: leave out {source!r}."
                )
            status = _branch(branch, changes, place)
        else:
            status = _begin(source or "demo", changes, place, show)
    except typer.Exit:
        raise
    except EXPECTED as error:
        fail(str(error))
    raise typer.Exit(status)


class Target(NamedTuple):
    """Where a training goes: its folder, the page, the cluster."""

    out: Path | None
    replace: bool
    watch: bool
    cluster: str | None


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


def _begin(source: str, changes: dict[str, Any], place: Target, show: bool) -> int:
    from rich.console import Console

    from fluctua.runs import lattice as runs
    from fluctua.runs.build import resolve_backend
    from fluctua.runs.config import PRESETS, apply_changes, dump, find_config
    from fluctua.runs.heeded import refuse_ignored

    config = _add_shards(apply_changes(find_config(source), changes), place.cluster)
    refuse_ignored(config, PRESETS[config.preset])
    if show:
        say(dump(config), nl=False)
        return 0
    folder = find_free_folder(config.preset) if place.out is None else place.out
    console = Console()
    config = dataclasses.replace(config, backend=resolve_backend(config.backend))
    with _page(folder, place.watch, console):
        rows = runs.run(config, folder, replace=place.replace, cluster=place.cluster)
        return _drive(rows, config, folder, console, [])


def _add_shards(config: Config, cluster: str | None) -> Config:
    """The configuration with shards for a cluster, if it has none."""
    from fluctua.scale.distributed import SHARDS

    if cluster is None or config.ensemble.shards:
        return config
    return dataclasses.replace(config, ensemble=dataclasses.replace(config.ensemble, shards=SHARDS))


def _branch(source: Path, changes: dict[str, Any], place: Target) -> int:
    from rich.console import Console

    from fluctua.runs import lattice as runs
    from fluctua.runs.config import load
    from fluctua.scale.distributed import SHARDS

    folder = find_free_folder(f"{source.name}-branch") if place.out is None else place.out
    if place.cluster is not None and not load(source / "config.toml").ensemble.shards:
        changes = {"ensemble.shards": SHARDS} | changes
    rows = runs.branch(
        source, folder, changes, replace=place.replace, report=_warn, cluster=place.cluster
    )
    console = Console()
    with _page(folder, place.watch, console):
        return _drive(rows, load(folder / "config.toml"), folder, console, [])


def _warn(text: str) -> None:
    say(f"fluctua: {text}", err=True)


def _resume(folder: Path, changes: dict[str, Any], place: Target) -> int:
    from rich.console import Console

    from fluctua.runs import lattice as runs
    from fluctua.runs.config import load
    from fluctua.store import history

    if (folder / "run.json").exists() and not (folder / "config.toml").exists():
        raise ValueError(
            f"{folder} holds a training of your own, whose code is not in the folder: fluctua "
            f"train FILE.py:NAME --resume {folder}."
        )
    console = Console()
    rows = runs.resume(folder, changes, report=_warn, cluster=place.cluster)
    earlier = history.read(folder / "history.csv")
    console.print(f"continuing after row {len(earlier):,}", highlight=False)
    with _page(folder, place.watch, console):
        return _drive(rows, load(folder / "config.toml"), folder, console, earlier)


# ------------------------------------------------------------------------- trainings of one's own


ITERATIONS = 100
"""Iterations of a training of one's own, if their number is not given."""


def _train_code(source: str, resume: Path | None, iterations: int | None, place: Target) -> int:
    """Train what `FILE.py:NAME` is, into a folder. Returns the exit status."""
    from rich.console import Console

    from fluctua.cli.progress import show_rows
    from fluctua.store.runner import run

    if resume is not None and (place.out is not None or place.replace):
        raise ValueError("--resume continues the run in its folder: leave out --out and --replace.")
    training = _load_training(source)
    folder = resume or place.out or find_free_folder(Path(source.rpartition(":")[0]).stem)
    known = folder / "run.json"
    if resume is not None and not known.exists():
        raise ValueError(f"--resume: {folder} holds no training of your own (no run.json).")
    if resume is None and known.exists() and not place.replace:
        raise ValueError(
            f"{folder} holds a run already: continue it with --resume {folder}, or --replace it."
        )
    if iterations is None:
        iterations = json.loads(known.read_text())["iterations"] if resume else ITERATIONS
    console = Console()
    again = f"fluctua train {source} --resume {folder}"
    try:
        with _page(folder, place.watch, console), show_rows(iterations, console=console) as on_row:
            result = run(
                training, iterations, folder, on_row=on_row, replace=place.replace, report=_warn
            )
    except KeyboardInterrupt:
        say(f"\nStopped. Continue with: {again}")
        return STOPPED
    say((result.folder / "summary.txt").read_text(), nl=False)
    say(f"run        {folder}   continue: {again} --iterations {2 * iterations}")
    return 0


def _load_training(source: str) -> Training:
    """The `fluctua.Training` that `FILE.py:NAME` is, or returns."""
    from fluctua.learn.training import Training
    from fluctua.store.code import load_code

    expected = "a fluctua.Training, or a function without arguments that returns one"
    training = load_code(source, expected)
    if callable(training) and not isinstance(training, type):
        training = training()
    if not isinstance(training, Training):
        raise TypeError(f"{source} must be {expected}; got {type(training).__name__}.")
    return training


@contextmanager
def _page(folder: Path, wanted: bool, console: Console) -> Iterator[None]:
    """Serve the page of a run by a process of its own, which cannot disturb the training."""
    if not wanted:
        yield
        return
    from fluctua.watch.server import needed

    needed()
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "fluctua", "watch", str(folder), "--open"]
    page = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert page.stdout is not None
        console.print(f"page       {page.stdout.readline().split()[0]}", highlight=False)
        yield
        say(f"page       closed; again: fluctua watch {folder}")
    finally:
        page.terminate()
        page.wait()


def _drive(rows: Any, config: Config, folder: Path, console: Console, earlier: list[Any]) -> int:
    """Train to the end, or until a signal stops it. Returns the exit status."""
    from fluctua.cli.progress import watch_run
    from fluctua.plot.training import draw_folder
    from fluctua.store.folder import find_run

    say(_opening(config, folder))
    with _warnings_as_notes(console), _asked_to_stop(console) as asked:
        try:
            for _ in watch_run(rows, config, earlier=earlier, console=console):
                if asked:
                    rows.close()  # writes a checkpoint
                    break
        except KeyboardInterrupt:
            rows.close()  # asked twice: the iteration is given up, what came before it is saved
    if asked:
        say(f"Saved. Continue with: fluctua train --resume {folder}")
        return STOPPED
    say((folder / "summary.txt").read_text(), nl=False)
    for path in draw_folder(find_run(folder)):
        if path.suffix == ".png":
            say(f"figure     {path}")
    more = 2 * config.iterations
    say(
        f"run        {folder}   try: fluctua evaluate {folder}, or continue: fluctua train "
        f"--resume {folder} --iterations {more}"
    )
    return 0


def _opening(config: Config, folder: Path) -> str:
    lattice = config.lattice
    b = config.bounds
    return (
        f"{lattice.rows}x{lattice.columns} lattice, σ_κ = {config.task.sigma_kappa:g}, "
        f"{config.optimiser.rule} rule, "
        f"{config.baseline.kind} baseline, {config.backend} backend, into {folder}\n"
        f"bounds: omega {list(b.omega)}, kappa {list(b.kappa)}, chi {list(b.chi)}"
    )


@contextmanager
def _asked_to_stop(console: Console) -> Iterator[list[int]]:
    """A list that fills when Ctrl-C or SIGTERM arrives; the iteration is finished first.

    A second signal does not wait.
    """
    asked: list[int] = []

    def note_signal(number: int, frame: Any) -> None:
        asked.append(number)
        if len(asked) > 1:
            raise KeyboardInterrupt
        console.print(
            "finishing this iteration, then saving; once more gives the iteration up",
            highlight=False,
        )

    old = {number: signal.signal(number, note_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextmanager
def _warnings_as_notes(console: Console) -> Iterator[None]:
    """Warnings of the library as a line above the display, each once."""
    with warnings.catch_warnings():
        warnings.simplefilter("once", RuntimeWarning)
        warnings.showwarning = lambda message, *_, **__: console.print(
            escape_controls(f"note: {message}"), style="yellow", soft_wrap=True, markup=False
        )
        yield
