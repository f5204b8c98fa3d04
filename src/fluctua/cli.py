"""The command line. Each command is a thin layer over a library call, in `fluctua.commands`."""

from __future__ import annotations

import typer

from fluctua.commands import insitu, reproduce
from fluctua.commands.advise import advise
from fluctua.commands.bench import bench
from fluctua.commands.calibrate import calibrate
from fluctua.commands.common import paragraphs
from fluctua.commands.estimate import estimate
from fluctua.commands.evaluate import evaluate
from fluctua.commands.gradient import gradient
from fluctua.commands.inspect import inspect
from fluctua.commands.plot import plot
from fluctua.commands.record import record
from fluctua.commands.train import train
from fluctua.commands.virtual_bench import virtual_bench

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train stochastic physical systems from their own fluctuations.",
)
for command in (train, evaluate, plot, gradient, advise, bench, record, inspect, estimate, calibrate):
    app.command()(command)
app.command("virtual-bench")(virtual_bench)
app.add_typer(insitu.app, name="insitu")
app.add_typer(reproduce.app, name="reproduce")
for info in (*app.registered_commands, *insitu.app.registered_commands, *reproduce.app.registered_commands):
    info.help = paragraphs(info.callback)


if __name__ == "__main__":
    app()
