"""The command line. Each command is a thin layer over a library call, in `fluctua.cli`."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from fluctua.cli import insitu, reproduce
from fluctua.cli.advise import advise
from fluctua.cli.bench import bench
from fluctua.cli.calibrate import calibrate
from fluctua.cli.common import paragraphs
from fluctua.cli.estimate import estimate
from fluctua.cli.recordings import convert, inspect, record
from fluctua.cli.runs import evaluate, gradient, plot, watch
from fluctua.cli.train import train
from fluctua.cli.virtual_bench import virtual_bench

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"fluctua {metadata.version('fluctua')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="print the version", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Train stochastic physical systems from their own fluctuations."""


COMMANDS = {
    "Networks and runs": (train, evaluate, gradient, advise, plot, watch),
    "Recordings": (record, inspect, convert, calibrate, estimate),
    "Instruments": (insitu.app, virtual_bench),
    "Benchmarks and figures": (bench, reproduce.app),
}
for panel, commands in COMMANDS.items():
    for command in commands:
        if isinstance(command, typer.Typer):
            app.add_typer(command, rich_help_panel=panel)
        else:
            app.command(command.__name__.replace("_", "-"), rich_help_panel=panel)(command)
for info in (*app.registered_commands, *insitu.app.registered_commands, *reproduce.app.registered_commands):
    info.help = paragraphs(info.callback)
