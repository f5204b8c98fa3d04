"""`fluctua plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fluctua.cli.common import EXPECTED, fail


def plot(run: Annotated[Path, typer.Argument(help="a run folder", show_default=False)]) -> None:
    """Draw the figures of a run again, also while it trains."""
    from fluctua.plot.training import draw_folder
    from fluctua.store.folder import existing

    try:
        paths = draw_folder(existing(run))
    except EXPECTED as error:
        fail(str(error))
    for path in paths:
        typer.echo(path)
