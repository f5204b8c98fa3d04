"""`fluctua train` of a resonator network: a new run, a branch, or one that continues."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console

from fluctua.cli.common import STOPPED, find_free_folder, say
from fluctua.cli.progress import watch_run
from fluctua.cli.trainings.display import Target, catch_signals, serve_page, show_warnings, warn
from fluctua.runs import config as configs
from fluctua.runs import lattice
from fluctua.runs.build import resolve_backend
from fluctua.runs.conditions import refuse_ignored
from fluctua.runs.config import Config
from fluctua.scale.distributed import SHARDS
from fluctua.store import history
from fluctua.store.folder import find_run


def begin(source: str, changes: dict[str, Any], place: Target, show: bool) -> int:
    """Train a configuration into a new folder; the exit status."""
    config = _add_shards(configs.apply_changes(configs.find_config(source), changes), place.cluster)
    refuse_ignored(config, configs.PRESETS[config.preset])
    if show:
        say(configs.dump(config), nl=False)
        return 0
    folder = find_free_folder(config.preset) if place.out is None else place.out
    console = Console()
    config = dataclasses.replace(config, backend=resolve_backend(config.backend))
    with serve_page(folder, place.watch, console):
        rows = lattice.run(config, folder, replace=place.replace, cluster=place.cluster)
        return _drive(rows, config, folder, console, [])


def _add_shards(config: Config, cluster: str | None) -> Config:
    """The configuration with shards for a cluster, if it has none."""
    if cluster is None or config.ensemble.shards:
        return config
    return dataclasses.replace(config, ensemble=dataclasses.replace(config.ensemble, shards=SHARDS))


def branch(source: Path, changes: dict[str, Any], place: Target) -> int:
    """Train from the last parameters of another run; the exit status."""
    folder = find_free_folder(f"{source.name}-branch") if place.out is None else place.out
    if place.cluster is not None and not configs.load(source / "config.toml").ensemble.shards:
        changes = {"ensemble.shards": SHARDS} | changes
    rows = lattice.branch(
        source, folder, changes, replace=place.replace, report=warn, cluster=place.cluster
    )
    console = Console()
    with serve_page(folder, place.watch, console):
        return _drive(rows, configs.load(folder / "config.toml"), folder, console, [])


def resume(folder: Path, changes: dict[str, Any], place: Target) -> int:
    """Continue the run in a folder; the exit status."""
    if (folder / "run.json").exists() and not (folder / "config.toml").exists():
        raise ValueError(
            f"{folder} holds a training of your own, whose code is not in the folder: fluctua "
            f"train FILE.py:NAME --resume {folder}."
        )
    console = Console()
    rows = lattice.resume(folder, changes, report=warn, cluster=place.cluster)
    earlier = history.read(folder / "history.csv")
    console.print(f"continuing after row {len(earlier):,}", highlight=False)
    with serve_page(folder, place.watch, console):
        return _drive(rows, configs.load(folder / "config.toml"), folder, console, earlier)


def _drive(rows: Any, config: Config, folder: Path, console: Console, earlier: list[Any]) -> int:
    """Train to the end, or until a signal stops it; the exit status."""
    say(_describe_start(config, folder))
    with show_warnings(console), catch_signals(console) as signals:
        try:
            for _ in watch_run(rows, config, earlier=earlier, console=console):
                if signals:
                    rows.close()  # writes a checkpoint
                    break
        except KeyboardInterrupt:
            rows.close()  # signals twice: the iteration is given up, what came before it is saved
    if signals:
        say(f"Saved. Continue with: fluctua train --resume {folder}")
        return STOPPED
    say((folder / "summary.txt").read_text(), nl=False)
    from fluctua.plot.training import draw_folder

    for path in draw_folder(find_run(folder)):
        if path.suffix == ".png":
            say(f"figure     {path}")
    more = 2 * config.iterations
    say(
        f"run        {folder}   try: fluctua evaluate {folder}, or continue: fluctua train "
        f"--resume {folder} --iterations {more}"
    )
    return 0


def _describe_start(config: Config, folder: Path) -> str:
    size = config.lattice
    b = config.bounds
    return (
        f"{size.rows}x{size.columns} lattice, σ_κ = {config.task.sigma_kappa:g}, "
        f"{config.optimiser.rule} rule, {config.baseline.kind} baseline, {config.backend} "
        f"backend, into {folder}\n"
        f"bounds: omega {list(b.omega)}, kappa {list(b.kappa)}, chi {list(b.chi)}"
    )
