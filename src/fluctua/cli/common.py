"""What the commands share."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import typer

EXPECTED = (ValueError, TypeError, FloatingPointError, ImportError, RuntimeError, MemoryError)
"""Errors that say by themselves what is wrong and what to do; anything else is a bug and shows its trace."""


def fail(message: str) -> NoReturn:
    """What is wrong, on stderr, and exit status 2."""
    typer.secho(f"fluctua: {message}", err=True, fg=typer.colors.RED)
    raise typer.Exit(2)


def paragraphs(command: Callable[..., Any] | None) -> str:
    """The docstring of a command with one line a paragraph, which a terminal of any width breaks where it has to."""
    text = inspect.getdoc(command) or ""
    return "\n\n".join(" ".join(part.split("\n")) for part in text.split("\n\n"))


def lattice_size(text: str) -> tuple[int, int]:
    """`11x13` as (11, 13)."""
    match = re.fullmatch(r"\s*(\d+)\s*[xX×]\s*(\d+)\s*", text)
    if not match:
        raise ValueError(f"--lattice is rows x columns, such as 11x13; got {text!r}.")
    return int(match[1]), int(match[2])


def free_folder(name: str) -> Path:
    """runs/NAME-1, or the first that does not exist."""
    number = 1
    while (folder := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return folder
