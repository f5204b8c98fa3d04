"""The command line. Each command is a thin layer over a library call, in `fluctua.cli`."""

from __future__ import annotations

import warnings
from importlib import metadata
from typing import Annotated, Any

import typer

from fluctua.cli import insitu, reproduce
from fluctua.cli.advise import advise
from fluctua.cli.calibrate import calibrate
from fluctua.cli.common import paragraphs, say
from fluctua.cli.estimate import estimate
from fluctua.cli.recordings import convert, inspect, record
from fluctua.cli.runs import evaluate, gradient, plot, watch
from fluctua.cli.train import train
from fluctua.cli.virtual_bench import virtual_bench
from fluctua.core.words import escape_controls

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


FORMAT_WARNING = warnings.formatwarning


def _print_version(asked: bool) -> None:
    if asked:
        say(f"fluctua {metadata.version('fluctua')}")
        raise typer.Exit


def _format_warning(*arguments: Any, **options: Any) -> str:
    return escape_controls(FORMAT_WARNING(*arguments, **options))


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", help="print the version", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Train stochastic physical systems from their own fluctuations."""
    warnings.formatwarning = _format_warning


COMMANDS = {
    "Networks and runs": (train, evaluate, gradient, advise, plot, watch),
    "Recordings": (record, inspect, convert, calibrate, estimate),
    "Instruments": (insitu.app, virtual_bench),
    "Figures of the paper": (reproduce.app,),
}
for panel, commands in COMMANDS.items():
    for command in commands:
        if isinstance(command, typer.Typer):
            app.add_typer(command, rich_help_panel=panel)
        else:
            app.command(command.__name__.replace("_", "-"), rich_help_panel=panel)(command)
for info in (
    *app.registered_commands,
    *insitu.app.registered_commands,
    *reproduce.app.registered_commands,
):
    info.help = paragraphs(info.callback)
