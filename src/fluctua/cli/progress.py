"""A progress bar around a training, for people at a terminal; plain lines when there is none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fluctua.core.text import with_error
from fluctua.learn.train import Record


def watch(records: Iterable[Record], iterations: int, *, console: Console | None = None) -> Iterator[Record]:
    """Pass records on while showing iteration, J with its error, trajectories spent and the time left.

    >>> for record in watch(train(..., iterations=100), 100):
    ...     ...
    """
    console = console or Console()
    if not console.is_terminal:
        yield from _plain(records, iterations, console)
        return
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("J = {task.fields[value]}"),
        TextColumn("{task.fields[spent]} trajectories"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("training", total=iterations, value="…", spent="0")
        for record in records:
            value = with_error(float(record.estimate.value), float(record.estimate.value_stderr))
            bar.update(task, completed=record.iteration + 1, value=value, spent=f"{record.trajectories:,}")
            yield record


def _plain(records: Iterable[Record], iterations: int, console: Console) -> Iterator[Record]:
    every = max(1, iterations // 10)
    for record in records:
        if record.iteration % every == 0 or record.iteration == iterations - 1:
            value = with_error(float(record.estimate.value), float(record.estimate.value_stderr))
            console.print(
                f"iteration {record.iteration + 1:>5} of {iterations}   J = {value}   "
                f"{record.trajectories:,} trajectories",
                highlight=False,
            )
        yield record
