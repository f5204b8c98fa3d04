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
from fluctua.cli.convert import convert
from fluctua.cli.estimate import estimate
from fluctua.cli.evaluate import evaluate
from fluctua.cli.gradient import gradient
from fluctua.cli.inspect import inspect
from fluctua.cli.plot import plot
from fluctua.cli.record import record
from fluctua.cli.train import train
from fluctua.cli.virtual_bench import virtual_bench
from fluctua.cli.watch import watch

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


for command in (train, evaluate, plot, gradient, advise, bench, record, inspect, convert, estimate, calibrate, watch):
    app.command()(command)
app.command("virtual-bench")(virtual_bench)
app.add_typer(insitu.app, name="insitu")
app.add_typer(reproduce.app, name="reproduce")
for info in (*app.registered_commands, *insitu.app.registered_commands, *reproduce.app.registered_commands):
    info.help = paragraphs(info.callback)
