"""What the commands share: messages, refusals, progress bars, JSON."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import typer

from fluctua.cli.settings import Keys, describe_keys
from fluctua.core.words import can_redraw, escape_controls

if TYPE_CHECKING:
    from rich.console import Console

EXPECTED = (
    ValueError,
    TypeError,
    FloatingPointError,
    ImportError,
    RuntimeError,
    MemoryError,
    OSError,
)
"""Errors that explain themselves; any other is a bug and shows its trace."""

STOPPED = 130
"""Exit status after Ctrl-C, as shells have it."""


def say(text: object, **style: Any) -> None:
    """Print a line.

    Names of files, runs and parameters may hold control characters, which are escaped.
    """
    typer.secho(escape_controls(str(text)), **style)


def fail(message: str) -> NoReturn:
    """Print what is wrong on stderr and exit with status 2."""
    error = sys.exc_info()[1]
    if isinstance(error, BrokenPipeError):
        raise error  # nothing reads the output any more: click ends the command without a word
    if isinstance(error, OSError) and error.filename is not None:
        message = f"{error.filename} cannot be read or written: {error.strerror}."
    say(f"fluctua: {message}", err=True, fg=typer.colors.RED)
    raise typer.Exit(2)


def note(message: object) -> None:
    """Print a remark on stderr."""
    say(f"note: {message}", err=True, fg=typer.colors.YELLOW)


def make_help(command: Callable[..., Any], keys: Keys | None = None) -> str:
    """Make the help of a command from its docstring, with the keys of its `--set`."""
    text = inspect.getdoc(command) or ""
    parts = [" ".join(part.split("\n")) for part in text.split("\n\n")]
    if keys:
        parts.append(describe_keys(keys))
    return "\n\n".join(parts)


def refuse_options(context: typer.Context, allowed: Collection[str], reason: str) -> None:
    """Raise `ValueError` for options on the command line that would be ignored.

    allowed: names of parameters that are heeded. reason: why the others are not.
    """
    ignored = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.param_type_name == "option"
        and parameter.name is not None
        and parameter.name not in allowed
        and getattr(context.get_parameter_source(parameter.name), "name", "") == "COMMANDLINE"
    ]
    if ignored:
        raise ValueError(f"{', '.join(ignored)}: {reason}")


def find_free_folder(name: str) -> Path:
    """Return runs/NAME-1, or the first that does not exist."""
    number = 1
    while (folder := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return folder


class Output(NamedTuple):
    """Output of a command: file, JSON, strictness.

    out: file to write.
    strict: whether a doubt is an error.
    as_json: whether to print JSON.
    """

    out: Path | None
    strict: bool
    as_json: bool


def make_console() -> Console:
    """A console on stderr, quiet where lines cannot be drawn again."""
    from rich.console import Console

    console = Console(stderr=True)
    console.quiet = not can_redraw(console)
    return console


@contextmanager
def show_progress(label: str, *, show: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, (done, total) -> None; nothing where there is no terminal."""
    from rich import progress as bars

    console = make_console()
    if not show or console.quiet:
        yield lambda done, total: None
        return
    columns: Any = (
        bars.TextColumn(label),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TextColumn("left"),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def to_json(value: Any) -> Any:
    """Convert arrays and records for JSON; NaN becomes null."""
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    if hasattr(value, "_asdict"):
        return to_json(value._asdict())
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    if hasattr(value, "tolist"):
        return to_json(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
