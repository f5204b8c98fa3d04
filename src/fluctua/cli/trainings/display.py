"""What a training shows beside its rows: the page, warnings, and the answer to Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from fluctua.cli.common import say
from fluctua.core.words import escape_controls


class Target(NamedTuple):
    """Destination of a training: its folder, the page, the cluster."""

    out: Path | None
    replace: bool
    watch: bool
    cluster: str | None


def warn(text: str) -> None:
    """Print a remark of the library on stderr."""
    say(f"fluctua: {text}", err=True)


@contextmanager
def serve_page(folder: Path, wanted: bool, console: Console) -> Iterator[None]:
    """Serve the page of a run by a process of its own, which cannot disturb the training."""
    if not wanted:
        yield
        return

    from fluctua.watch.server import check_installed

    check_installed()
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


@contextmanager
def catch_signals(console: Console) -> Iterator[list[int]]:
    """A list that fills when Ctrl-C or SIGTERM arrives; the iteration is finished first.

    A second signal does not wait.
    """
    signals: list[int] = []

    def note_signal(number: int, frame: Any) -> None:
        signals.append(number)
        if len(signals) > 1:
            raise KeyboardInterrupt
        console.print(
            "finishing this iteration, then saving; a second signal drops the iteration",
            highlight=False,
        )

    old = {number: signal.signal(number, note_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextmanager
def show_warnings(console: Console) -> Iterator[None]:
    """Warnings of the library as a line above the display, each once."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        text = escape_controls(f"note: {message}")
        console.print(text, style="yellow", soft_wrap=True, markup=False)

    with warnings.catch_warnings():
        warnings.simplefilter("once", RuntimeWarning)
        warnings.showwarning = show
        yield
