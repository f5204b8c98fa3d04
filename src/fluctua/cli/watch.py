"""`fluctua watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fluctua.cli.common import fail


def watch(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="RUNS…", help="folders of runs; runs if not given")
    ] = None,
    host: Annotated[str, typer.Option(help="address to listen on; others than this machine's own are seen by all")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="0 takes 8765, or a free one")] = 0,
    show: Annotated[bool, typer.Option("--open", help="open the page in a browser")] = False,
) -> None:
    """Follow trainings on a page: those that run, have ended or were killed.

    It reads the run folders and nothing else. For runs on another machine start it there, and
    `ssh -L 8765:localhost:8765 THERE` here. Ctrl-C ends it.
    """
    import webbrowser

    from fluctua.watch.server import serve

    def ready(address: str) -> None:
        typer.echo(f"{address}   Ctrl-C ends it")
        if show:
            webbrowser.open(address)

    try:
        serve(runs or [Path("runs")], host, port, ready)
    except (ValueError, OSError) as error:
        fail(str(error))
