"""`fluctua train`."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fluctua.cli.common import EXPECTED, STOPPED, fail, free_folder, say
from fluctua.core.words import escape_controls

if TYPE_CHECKING:
    from rich.console import Console

    from fluctua.runs.config import Config


def train(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="PRESET|FILE.toml",
            help="demo (the default), fast, unknown, isolation, paper, paper-quick, or a file",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="the run folder; runs/PRESET-1, -2, … if not given")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="go on with the run in this folder")] = None,
    branch: Annotated[
        Path | None,
        typer.Option(
            "--from", help="begin where the run in this folder stands, in a folder of its own"
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="remove an earlier run in --out")
    ] = False,
    backend: Annotated[str | None, typer.Option(help="auto, cpu, cuda or jax")] = None,
    iterations: Annotated[
        int | None, typer.Option(help="how many, those before a --resume included")
    ] = None,
    trajectories: Annotated[
        int | None, typer.Option(help="of every iteration; ends any schedule")
    ] = None,
    sigma_kappa: Annotated[
        float | None, typer.Option(help="amplitude of the antagonistic modulation")
    ] = None,
    sigma_w: Annotated[
        float | None, typer.Option(help="noise amplitude of every open channel")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="of everything random")] = None,
    optimiser: Annotated[
        str | None, typer.Option(help="paper, or any of optax: adam, sgd, lion, …")
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help="of the optimiser")] = None,
    baseline: Annotated[
        str | None, typer.Option(help="none, time, carried, optimal, binned or twin; jax: mean")
    ] = None,
    max_trajectories: Annotated[
        int | None, typer.Option(help="stop before more than this are used")
    ] = None,
    max_minutes: Annotated[float | None, typer.Option(help="stop after this long")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="any key of the file: --set task.horizon=5; may be repeated"),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="print the resolved configuration and stop")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="follow it on a page in the browser")
    ] = False,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="compute on a Ray cluster: HOST:PORT, auto for the one that runs here, or local"
        ),
    ] = None,
) -> None:
    """Train a resonator network and leave a folder that explains itself.

    Without arguments: a small lattice, in less than a minute. The folder holds the configuration,
    the history, the parameters over time, figures and checkpoints. Ctrl-C saves; --resume goes on
    exactly where it stopped.
    """
    options: dict[str, Any] = {
        "backend": backend,
        "iterations": iterations,
        "ensemble.trajectories": trajectories,
        "ensemble.schedule": None if trajectories is None else "fixed",
        "task.sigma_kappa": sigma_kappa,
        "task.sigma_w": sigma_w,
        "seed": seed,
        "optimiser.rule": optimiser,
        "optimiser.learning_rate": learning_rate,
        "optimiser.options": None if optimiser is None else {},
        "baseline.kind": baseline,
        "stop.max_trajectories": max_trajectories,
        "stop.max_minutes": max_minutes,
    }
    try:
        changes = {key: value for key, value in options.items() if value is not None}
        for key, value in map(_setting, settings or []):
            if changes.setdefault(key, value) != value:
                raise ValueError(
                    f"`{key}` was given twice, as {changes[key]!r} and as {value!r}. Give one."
                )
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
            if source or out or replace or branch:
                raise ValueError(
                    "--resume takes everything from its folder: leave out all but the budgets."
                )
            status = _go_on(resume, changes, watch, cluster)
        elif branch is not None:
            if source:
                raise ValueError(
                    f"--from takes the configuration of its run: leave out {source!r}."
                )
            status = _branch(branch, out, changes, replace, watch, cluster)
        else:
            status = _begin(source or "demo", out, changes, replace, show, watch, cluster)
    except EXPECTED as error:
        fail(str(error))
    raise typer.Exit(status)  # here: it is a RuntimeError


def _begin(
    source: str,
    out: Path | None,
    changes: dict[str, Any],
    replace: bool,
    show: bool,
    watch: bool,
    cluster: str | None,
) -> int:
    from rich.console import Console

    from fluctua.runs import lattice as runs
    from fluctua.runs.build import resolve_backend
    from fluctua.runs.config import PRESETS, apply_changes, dump, find_config
    from fluctua.runs.heeded import refuse_ignored

    config = _sharded(apply_changes(find_config(source), changes), cluster)
    refuse_ignored(config, PRESETS[config.preset])
    if show:
        say(dump(config), nl=False)
        return 0
    folder = free_folder(config.preset) if out is None else out
    console = Console()
    config = dataclasses.replace(config, backend=resolve_backend(config.backend))
    with _page(folder, watch, console):
        return _drive(
            runs.run(config, folder, replace=replace, cluster=cluster), config, folder, console, []
        )


def _sharded(config: Config, cluster: str | None) -> Config:
    """With shards for a cluster, if it has none."""
    from fluctua.scale.distributed import SHARDS

    if cluster is None or config.ensemble.shards:
        return config
    return dataclasses.replace(config, ensemble=dataclasses.replace(config.ensemble, shards=SHARDS))


def _branch(
    source: Path,
    out: Path | None,
    changes: dict[str, Any],
    replace: bool,
    watch: bool,
    cluster: str | None,
) -> int:
    from rich.console import Console

    from fluctua.runs import lattice as runs
    from fluctua.runs.config import load
    from fluctua.scale.distributed import SHARDS

    folder = free_folder(f"{source.name}-branch") if out is None else out
    if cluster is not None and not load(source / "config.toml").ensemble.shards:
        changes = {"ensemble.shards": SHARDS} | changes
    rows = runs.branch(source, folder, changes, replace=replace, report=_warn, cluster=cluster)
    console = Console()
    with _page(folder, watch, console):
        return _drive(rows, load(folder / "config.toml"), folder, console, [])


def _warn(text: str) -> None:
    say(f"fluctua: {text}", err=True)


def _go_on(folder: Path, changes: dict[str, Any], watch: bool, cluster: str | None) -> int:
    from rich.console import Console

    from fluctua.runs import lattice as runs
    from fluctua.runs.config import load
    from fluctua.store import history

    console = Console()
    rows = runs.resume(folder, changes, report=_warn, cluster=cluster)
    earlier = history.read(folder / "history.csv")
    console.print(f"going on from row {len(earlier):,}", highlight=False)
    with _page(folder, watch, console):
        return _drive(rows, load(folder / "config.toml"), folder, console, earlier)


@contextmanager
def _page(folder: Path, wanted: bool, console: Console) -> Iterator[None]:
    """The page of a run in a process of its own, which cannot disturb the training, for as long
    as that lasts.
    """
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
    """Train to the end, or until asked to stop. Returns the exit status."""
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
        except (
            KeyboardInterrupt
        ):  # asked twice: the iteration is given up, what came before it is saved
            rows.close()
    if asked:
        say(f"Saved. Go on with: fluctua train --resume {folder}")
        return STOPPED
    say((folder / "summary.txt").read_text(), nl=False)
    for path in draw_folder(find_run(folder)):
        if path.suffix == ".png":
            say(f"figure     {path}")
    more = 2 * config.iterations
    say(
        f"run        {folder}   try: fluctua evaluate {folder}, or go on: fluctua train --resume "
        f"{folder} "
        f"--iterations {more}"
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


def _setting(text: str) -> tuple[str, Any]:
    """`task.horizon=5` as a key and a TOML value; a bare word is a string."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set takes key=value, such as task.horizon=5; got {text!r}.")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


@contextmanager
def _asked_to_stop(console: Console) -> Iterator[list[int]]:
    """A list that fills when Ctrl-C or a polite kill arrives: the iteration at hand is finished
    first.

    A second one does not wait.
    """
    asked: list[int] = []

    def note(number: int, frame: Any) -> None:
        asked.append(number)
        if len(asked) > 1:
            raise KeyboardInterrupt
        console.print(
            "finishing this iteration, then saving; once more gives the iteration up",
            highlight=False,
        )

    old = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
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
