"""Progress of a lattice's training: a small panel at a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

from fluctua.core.text import with_error
from fluctua.core.words import can_redraw
from fluctua.learn.training import Record
from fluctua.runs.config import Config
from fluctua.store.history import Row, effective
from fluctua.store.progress import RECENT, RunLimits, TrainingProgress

BARS = "▁▂▃▄▅▆▇█"
PLAIN_SECONDS = 10.0
"""Between two plain lines, so that a log stays short; short runs have about twenty."""


def watch_run(
    rows: Iterable[tuple[Row, Record]],
    config: Config,
    *,
    earlier: list[Row] | None = None,
    console: Console | None = None,
) -> Iterator[tuple[Row, Record]]:
    """Pass the rows of a run on while showing them. earlier: rows before a --resume."""
    console = console or Console()
    limits = RunLimits(config.iterations, config.stop.max_trajectories, config.stop.max_minutes)
    seen = TrainingProgress(limits, earlier or ())
    if not can_redraw(console):
        yield from _print_rows(rows, config, seen, console)
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        for row, record in rows:
            seen.add(row)
            live.update(make_panel(seen, config))
            if row.event:
                console.print(describe_event(row), highlight=False)
            yield row, record
    if seen.rows:
        console.print(make_panel(seen, config))


def _print_rows(
    rows: Iterable[tuple[Row, Record]], config: Config, seen: TrainingProgress, console: Console
) -> Iterator[tuple[Row, Record]]:
    every = max(1, config.iterations // 20)
    shown = -PLAIN_SECONDS
    for row, record in rows:
        seen.add(row)
        now = time.monotonic()
        on_grid = row.iteration % every == 0 and config.iterations <= 400
        if (
            on_grid
            or row.event
            or now - shown >= PLAIN_SECONDS
            or row.iteration == config.iterations - 1
        ):
            shown = now
            console.print(
                f"iteration {row.iteration + 1:>5} of {config.iterations:,}   J = "
                f"{describe_value(row)}, {row.trajectories:,} in all   {seen.time_left}".rstrip(),
                highlight=False,
                soft_wrap=True,
            )
        if row.event:
            console.print(describe_event(row), highlight=False)
        yield row, record


def make_panel(seen: TrainingProgress, config: Config, width: int = 48) -> Panel:
    """Panel with the present state of a run."""
    kept = effective(seen.rows)
    last = seen.rows[-1]
    recent = [row.seconds for row in seen.rows[-RECENT:]]
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
        f"{sum(recent) / len(recent):.2f} s per iteration   {seen.time_left}".rstrip(),
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
