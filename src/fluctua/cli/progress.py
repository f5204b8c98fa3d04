"""Progress of a training: a bar or a small panel at a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from fluctua.cli.common import can_redraw
from fluctua.core.text import with_error
from fluctua.learn.training import Record
from fluctua.runs.config import Config
from fluctua.store.history import Row, effective

BARS = "▁▂▃▄▅▆▇█"
PLAIN_SECONDS = 10.0
"""Between two plain lines, so that a log stays short; short runs have about twenty."""


def watch(
    records: Iterable[Record], iterations: int, *, console: Console | None = None
) -> Iterator[Record]:
    """Pass records on while showing iteration, J with its error, trajectories and time left.

    Used as `for record in watch(train(...), iterations)`.
    """
    with show_records(iterations, console=console) as show:
        for record in records:
            show(record)
            yield record


@contextmanager
def show_rows(
    iterations: int, *, console: Console | None = None
) -> Iterator[Callable[[Row, Record], None]]:
    """A function that shows each row of a run as it is written, for `fluctua.run(on_row=)`."""
    with show_records(iterations, console=console) as show:
        yield lambda row, record: show(record)


@contextmanager
def show_records(
    iterations: int, *, console: Console | None = None
) -> Iterator[Callable[[Record], None]]:
    """A function that shows each record: in a bar at a terminal, in plain lines elsewhere."""
    console = console or Console()
    if not can_redraw(console):
        yield partial(_print_record, console, iterations)
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
        yield lambda record: bar.update(
            task,
            completed=record.iteration + 1,
            value=_format_value(record),
            spent=f"{record.trajectories:,}",
        )


def _format_value(record: Record) -> str:
    return with_error(float(record.estimate.value), float(record.estimate.value_stderr))


def _print_record(console: Console, iterations: int, record: Record) -> None:
    """Print about ten of all records."""
    every = max(1, iterations // 10)
    if record.iteration % every == 0 or record.iteration == iterations - 1:
        console.print(
            f"iteration {record.iteration + 1:>5} of {iterations}   J = {_format_value(record)}   "
            f"{record.trajectories:,} trajectories",
            highlight=False,
        )


def watch_run(
    rows: Iterable[tuple[Row, Record]],
    config: Config,
    *,
    earlier: list[Row] | None = None,
    console: Console | None = None,
) -> Iterator[tuple[Row, Record]]:
    """Pass the rows of a run on while showing them. earlier: rows before a --resume."""
    console = console or Console()
    seen = list(earlier or [])
    if not can_redraw(console):
        yield from _print_rows(rows, config, seen, console)
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        for row, record in rows:
            seen.append(row)
            live.update(make_panel(seen, config))
            if row.event:
                console.print(describe_event(row), highlight=False)
            yield row, record
    if seen:
        console.print(make_panel(seen, config))


def _print_rows(
    rows: Iterable[tuple[Row, Record]], config: Config, seen: list[Row], console: Console
) -> Iterator[tuple[Row, Record]]:
    every = max(1, config.iterations // 20)
    shown = -PLAIN_SECONDS
    for row, record in rows:
        seen.append(row)
        now = time.monotonic()
        on_grid = row.iteration % every == 0 and config.iterations <= 400
        if (
            on_grid
            or row.event
            or now - shown >= PLAIN_SECONDS
            or row.iteration == config.iterations - 1
        ):
            shown = now
            left = describe_time_left(seen, config)
            console.print(
                f"iteration {row.iteration + 1:>5} of {config.iterations:,}   J = "
                f"{describe_value(row)}, {row.trajectories:,} in all   {left}".rstrip(),
                highlight=False,
                soft_wrap=True,
            )
        if row.event:
            console.print(describe_event(row), highlight=False)
        yield row, record


def make_panel(rows: list[Row], config: Config, width: int = 48) -> Panel:
    """Panel with the present state of a run."""
    kept = effective(rows)
    last = rows[-1]
    recent = [row.seconds for row in rows[-10:]]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    grid.add_row("iteration", f"{last.iteration + 1:,} of {config.iterations:,}")
    source = "" if last.ensemble else "   by the model"
    grid.add_row(
        "J",
        f"[bold]{with_error(last.J, last.J_stderr)}[/]{source}   gain {last.J - kept[0].J:+.3f}",
    )
    grid.add_row("", f"[cyan]{draw_sparkline([row.J for row in kept], width)}[/]")
    grid.add_row("trajectories", f"{last.trajectories:,}   ({last.ensemble:,} per iteration)")
    grid.add_row(
        "time",
        f"{sum(recent) / len(recent):.2f} s per iteration   "
        f"{describe_time_left(rows, config)}".rstrip(),
    )
    return Panel(
        grid,
        title=f"training: {config.preset}",
        title_align="left",
        expand=False,
        border_style="dim",
    )


def describe_value(row: Row) -> str:
    """J of a row and what it was measured with."""
    value = with_error(row.J, row.J_stderr)
    if not row.ensemble:
        return f"{value} by the model   none measured"
    return f"{value}   {row.ensemble:,} per iteration"


def draw_sparkline(values: list[float], width: int) -> str:
    """Draw a curve in one line of text, from the lowest value to the highest.

    >>> draw_sparkline([0, 1, 2, 3], 4)
    '▁▃▆█'
    """
    if not values:
        return ""
    parts = min(width, len(values))
    means = []
    for i in range(parts):
        piece = values[i * len(values) // parts : (i + 1) * len(values) // parts]
        means.append(sum(piece) / len(piece))
    low = min(means)
    span = max(means) - min(means)
    return "".join(
        BARS[round((m - low) / span * (len(BARS) - 1))] if span > 0 else BARS[0] for m in means
    )


def estimate_time_left(rows: list[Row], config: Config) -> float:
    """Estimate the seconds to the first of the limits, at the pace of the last ten iterations."""
    last = rows[-1]
    recent = rows[1:][-10:] or rows  # the first one compiles
    pace = sum(row.seconds for row in recent) / len(recent)
    left = [(config.iterations - 1 - last.iteration) * pace]
    measured = sum(row.ensemble for row in recent) / len(recent)
    if config.stop.max_trajectories and measured:
        left.append((config.stop.max_trajectories - last.trajectories) / measured * pace)
    if config.stop.max_minutes:
        left.append(60 * config.stop.max_minutes - sum(row.seconds for row in rows))
    return max(0.0, min(left))


def describe_time_left(rows: list[Row], config: Config) -> str:
    """The time left in words; nothing after the first iteration, which compiles."""
    if len(rows) < 2:
        return ""
    return f"{format_duration(estimate_time_left(rows, config))} left"


def format_duration(seconds: float) -> str:
    """Format seconds as `42 s`, `3 min` or `2.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def describe_event(row: Row) -> str:
    """Describe an event in words."""
    if "escalate" not in row.event:
        return f"iteration {row.iteration + 1}: {row.event}"
    whole = row.event.split("; ")
    schedule = [part for part in whole if part.split()[0] in ("escalate", "rewind")]
    parts = dict(part.split() for part in schedule)
    text = (
        f"iteration {row.iteration + 1}: no longer improving; {int(parts['escalate']):,} "
        "trajectories from here on"
    )
    if "rewind" in parts:
        text += f", from iteration {int(parts['rewind']) + 1:,} again"
    return "; ".join([text, *(part for part in whole if part not in schedule)])
