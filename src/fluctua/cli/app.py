"""The command line. Each command is a thin layer over a library call, in `fluctua.cli`.

A command's module is imported when the command is called: `fluctua --help` needs no JAX.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module, metadata
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from fluctua.cli.common import make_help, say
from fluctua.cli.kept_programs import keep_programs
from fluctua.core.words import escape_controls


class Place(NamedTuple):
    """Place of a command: its module in `fluctua.cli`, and the panel of the help."""

    module: str
    panel: str


LOOK: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False}
RUNS = "Networks and runs"
FILES = "Recordings"
INSTRUMENTS = "Instruments"

COMMANDS = {
    "train": Place("train", RUNS),
    "evaluate": Place("runs", RUNS),
    "plot": Place("runs", RUNS),
    "watch": Place("runs", RUNS),
    "reproduce": Place("reproduce", RUNS),
    "estimate": Place("estimate", FILES),
    "advise": Place("advise", FILES),
    "record": Place("record", FILES),
    "inspect": Place("recordings", FILES),
    "convert": Place("recordings", FILES),
    "calibrate": Place("calibrate", FILES),
    "insitu": Place("insitu", INSTRUMENTS),
    "virtual-bench": Place("virtual_bench", INSTRUMENTS),
}


def _hide_type(option: Any) -> Any:
    """An option whose help does not say that a flag is a `<bool>`."""
    if option is not None and getattr(option, "is_flag", False):
        option.metavar = ""
    return option


class PlainCommand(TyperCommand):
    """A command whose flags have no type in the help."""

    def get_params(self, ctx: Any) -> Any:
        """All parameters."""
        return [_hide_type(parameter) for parameter in super().get_params(ctx)]


class Commands(TyperGroup):
    """Commands that are imported when they are first requested for."""

    def get_params(self, ctx: Any) -> Any:
        """All parameters."""
        return [_hide_type(parameter) for parameter in super().get_params(ctx)]

    def list_commands(self, ctx: Any) -> list[str]:
        """All commands, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command."""
        place = COMMANDS.get(cmd_name)
        if place is None:
            return None
        function = cmd_name.replace("-", "_")
        keep_programs()
        module = import_module(f"fluctua.cli.{place.module}")
        keys = getattr(module, f"{function.upper()}_KEYS", None)
        callback: Callable[..., Any] = getattr(module, function)
        alone = typer.Typer(**LOOK)
        alone.command(
            cmd_name,
            cls=PlainCommand,
            help=make_help(callback, keys),
            rich_help_panel=place.panel,
        )(callback)
        return get_command(alone)


app = typer.Typer(cls=Commands, no_args_is_help=True, **LOOK)

FORMAT_WARNING = warnings.formatwarning


def _print_version(requested: bool) -> None:
    if requested:
        say(f"fluctua {metadata.version('fluctua')}")
        raise typer.Exit


def _format_warning(*arguments: Any, **options: Any) -> str:
    return escape_controls(FORMAT_WARNING(*arguments, **options))


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Train stochastic physical systems from their own fluctuations."""
    warnings.formatwarning = _format_warning
