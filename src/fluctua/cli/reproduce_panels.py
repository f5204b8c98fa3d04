"""`fluctua reproduce fig2`: the measurements of its panels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import progress as bars
from rich.console import Console

from fluctua.cli.common import can_redraw, say
from fluctua.paper import panels, training
from fluctua.runs.build import resolve_backend


def measure_panels(
    runs: Path | None, out: Path, quick: bool, replace: bool, settings: dict[str, Any]
) -> None:
    """Measure the panels of figure 2 that `out` does not hold."""
    backend = settings.get("backend", "auto")
    if backend not in ("auto", "cpu", "cuda"):
        raise ValueError(f'backend must be "auto", "cpu" or "cuda"; got {backend!r}.')
    chosen = _choose_panels(quick, settings)
    lattices = _find_lattices(runs, quick, settings)
    sites = lattices[0].task.network.sites
    if not -1 <= chosen.site < sites:
        raise ValueError(f"site must be one of 0 … {sites - 1}; got {chosen.site}.")
    every = panels.plan(out, lattices, chosen, resolve_backend(backend))
    with _show_panels() as show:
        for panel, measure in panels.measure(every, replace=replace):
            show(panel, measure)


def _choose_panels(quick: bool, settings: dict[str, Any]) -> panels.PanelSettings:
    """Choose how the panels are measured, by the keys of `--set`."""
    names = {
        "site": "site",
        "trajectories": "running",
        "returns": "bias",
        "every": "every",
        "seed": "seed",
    }
    chosen = panels.QUICK if quick else panels.PanelSettings()
    chosen = chosen._replace(
        **{name: settings[key] for key, name in names.items() if key in settings}
    )
    if chosen.running < chosen.group or chosen.running % chosen.group:
        raise ValueError(
            f"trajectories must be a multiple of {chosen.group:,}; got {chosen.running:,}."
        )
    return chosen


def _find_lattices(
    runs: Path | None, quick: bool, settings: dict[str, Any]
) -> list[training.TrainedLattice]:
    """The trained lattices to measure."""
    if runs is None and not quick:
        raise ValueError(
            "--runs is missing: a folder of run folders, or --quick for a small lattice."
        )
    of_file = runs is not None and runs.suffix == ".npz"
    if "config" in settings and not of_file:
        raise ValueError("--set config needs --runs PARAMS.npz, whose lattice it describes.")
    if "iteration" in settings and (runs is None or of_file):
        raise ValueError("--set iteration needs --runs FOLDER: it is an iteration of its runs.")
    if runs is None:
        return [training.train_small_lattice(k, sigma) for k, sigma in enumerate((0.0, 0.2))]
    if of_file:
        return training.from_file(runs, settings.get("config", "paper"))
    return training.from_runs(runs, settings.get("iteration"))


@contextmanager
def _show_panels() -> Iterator[Callable[[panels.Panel, Callable[..., None]], None]]:
    """A progress bar per panel at a terminal, one line per panel elsewhere."""
    console = Console()
    columns = (
        bars.TextColumn("panel {task.fields[name]}"),
        bars.BarColumn(),
        bars.TextColumn("{task.completed:,.0f} of {task.total:,.0f} trajectories"),
        bars.TimeElapsedColumn(),
        bars.TextColumn("left"),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=console, disable=not can_redraw(console)) as progress:

        def show(panel: panels.Panel, measure: Callable[..., None]) -> None:
            task = progress.add_task("", total=panel.work, name=panel.name)
            start = time.perf_counter()
            measure(lambda count: progress.advance(task, count))
            if not can_redraw(console):
                seconds = time.perf_counter() - start
                say(f"panel {panel.name}: {panel.work:,} trajectories, {seconds:.1f} s")

        yield show
