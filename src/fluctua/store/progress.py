"""Progress of a training while it runs: one line, with a small curve in a notebook.

    iteration 12 of 60   J = 0.312 ± 0.004   2,400 trajectories   14 s left

A terminal draws the line anew, a notebook replaces its output, so that a cell keeps the last state
alone. Elsewhere nothing is shown, or about ten lines on request.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.text import Text

from fluctua.core.display.html import draw_curves
from fluctua.core.text import with_error
from fluctua.core.words import can_redraw, format_count
from fluctua.store.history import Row, effective

RECENT = 10
"""Iterations whose pace is that of the next ones."""

NOTEBOOK_SECONDS = 0.5
"""Between two updates of a notebook's output."""


class RunLimits(NamedTuple):
    """Limits of a training, which ends at the first of these; 0 is no limit of that kind."""

    iterations: int
    max_trajectories: int = 0
    max_minutes: float = 0.0


def estimate_time_left(rows: Sequence[Row], limits: RunLimits, earlier: int = 0) -> float | None:
    """Estimate the seconds to the first of the limits, at the pace of the last iterations.

    Args:
        rows: of the run so far.
        limits: of the run.
        earlier: how many rows were there before this session. Their pace may be that of another
            machine.

    Returns: None as long as there is the first iteration of a session alone, which compiles.
    """
    recent = rows[earlier + 1 :][-RECENT:]
    if not recent:
        return None
    last = rows[-1]
    pace = sum(row.seconds for row in recent) / len(recent)
    left = [(limits.iterations - 1 - last.iteration) * pace]
    measured = sum(row.ensemble for row in recent) / len(recent)
    if limits.max_trajectories and measured:
        left.append((limits.max_trajectories - last.trajectories) / measured * pace)
    if limits.max_minutes:
        left.append(60 * limits.max_minutes - sum(row.seconds for row in rows))
    return max(0.0, min(left))


def format_duration(seconds: float) -> str:
    """Format seconds as `42 s`, `3 min` or `2.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class TrainingProgress:
    """The rows of a run as they are written.

    Args:
        limits: of the run.
        earlier: rows before this session.
    """

    def __init__(self, limits: RunLimits, earlier: Sequence[Row] = ()):
        self.limits = limits
        self.rows = list(earlier)
        self.earlier = len(self.rows)
        self.is_over = False
        self.update: Callable[[], None] = lambda: None

    def add(self, row: Row) -> None:
        """Show one more row."""
        self.rows.append(row)
        self.update()

    @property
    def line(self) -> str:
        """Iteration, J with its error, trajectories and the time left; empty before a row."""
        if not self.rows:
            return ""
        row = self.rows[-1]
        done = row.iteration + 1
        total = f"{self.limits.iterations:,}"
        parts = [
            f"iteration {done:>{len(total)},} of {total}",
            f"J = {with_error(row.J, row.J_stderr)}" + ("" if row.ensemble else " by the model"),
            format_count(row.trajectories, "trajectory"),
        ]
        if not self.is_over:
            is_last = done >= self.limits.iterations
            parts.append("final evaluation" if is_last else self.time_left)
        return "   ".join(filter(None, parts))

    @property
    def time_left(self) -> str:
        """`14 s left`, or nothing where it is not known."""
        seconds = estimate_time_left(self.rows, self.limits, self.earlier)
        return "" if seconds is None else f"{format_duration(seconds)} left"

    def __repr__(self) -> str:
        return self.line

    def _repr_html_(self) -> str:
        kept = effective(self.rows)
        curve = draw_curves(
            [[row.J for row in kept]],
            error=[row.J_stderr for row in kept],
            width=320,
            height=64,
            label="J and its standard error against the iteration",
        )
        line = f'<small style="white-space:pre-wrap">{escape(self.line)}</small>'
        return f"<div>{curve}<br/>{line}</div>"


@contextmanager
def show_progress(
    limits: RunLimits,
    *,
    show: bool | None = None,
    earlier: Sequence[Row] = (),
    console: Console | None = None,
) -> Iterator[TrainingProgress]:
    """Show each row that is added to the progress that is yielded.

    Args:
        limits: of the run.
        show: False for nothing, True for plain lines where a line cannot be drawn anew; by default
            nothing is shown there.
        earlier: rows before this session.
        console: by default standard output.
    """
    progress = TrainingProgress(limits, earlier)
    output = console or Console()
    notebook = None if console else find_notebook()
    if show is False:
        yield progress
    elif notebook is not None:
        yield from _update_notebook(progress, notebook)
    elif can_redraw(output) and (console is not None or sys.stdout.isatty()):

        def draw() -> Text:
            line = progress.line
            if len(line) > output.width:
                line = line.replace("   ", "  ")
            return Text(line, no_wrap=True, overflow="ellipsis")

        with Live(console=output, get_renderable=draw, refresh_per_second=4):
            yield from _finish(progress)
    else:
        if show:
            progress.update = lambda: _print_line(progress, output)
        yield progress


def find_notebook() -> Any:
    """The module IPython.display in a notebook, else None. Nothing is imported."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    in_kernel = getattr(shell, "kernel", None) is not None
    return sys.modules.get("IPython.display") if in_kernel else None


def _finish(progress: TrainingProgress) -> Iterator[TrainingProgress]:
    try:
        yield progress
    finally:
        progress.is_over = True


def _update_notebook(progress: TrainingProgress, notebook: Any) -> Iterator[TrainingProgress]:
    """Replace one output of a cell, not too often, and at the end."""
    handle: Any = None
    shown = 0.0

    def update() -> None:
        nonlocal handle, shown
        if handle is None:
            handle = notebook.display(progress, display_id=True)
        elif progress.is_over or time.monotonic() - shown >= NOTEBOOK_SECONDS:
            handle.update(progress)
        else:
            return
        shown = time.monotonic()

    progress.update = update
    try:
        yield from _finish(progress)
    finally:
        if handle is not None:
            update()


def _print_line(progress: TrainingProgress, console: Console) -> None:
    """Print about ten of all rows."""
    row = progress.rows[-1]
    iterations = progress.limits.iterations
    every = max(1, iterations // 10)
    if row.iteration % every == 0 or row.iteration == iterations - 1:
        console.print(progress.line, highlight=False, soft_wrap=True)
