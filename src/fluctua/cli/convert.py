"""`fluctua convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fluctua.cli.common import EXPECTED, Interval, Map, Rate, Scale, bar, fail, opened, parameters


def convert(
    file: Annotated[Path, typer.Argument(metavar="IN", help=".npz, .npy, .csv, MATLAB v7.3, HDF5 or a recording")],
    out: Annotated[Path, typer.Argument(metavar="OUT.nc", help="the recording to write")],
    map_: Map = None,
    dt: Interval = None,
    rate: Rate = None,
    scale: Scale = None,
    drop: Annotated[bool, typer.Option("--drop", help="leave out trajectories that are not finite")] = False,
    params: Annotated[Path | None, typer.Option(help=".npz of the parameters that were set, kept in OUT.nc")] = None,
) -> None:
    """Make a recording of a file of another program, or a sound copy of a damaged recording.

    What was counted gets its units, what has no times gets them, and what cannot be read or is not finite stays out.
    """
    from fluctua.insitu.recording.conversion import convert as copy
    from fluctua.insitu.recording.description import counted

    try:
        with opened(file, map_, dt, rate, scale, damaged=True) as recording, bar("copying") as progress:
            for text in recording.damage:
                typer.echo(f"damaged: {text}", err=True)
            done = copy(recording, out, drop=drop, parameters=parameters(params), progress=progress)
            kind = recording.kind
    except EXPECTED as error:
        fail(str(error))
    typer.echo(f"{out}: {counted(done.kept, 'trajectory')} of {file} ({kind})")
    for what, numbers in (("dropped, not finite", done.dropped), ("lost, unreadable", done.lost)):
        if numbers:
            shown = ", ".join(map(str, numbers[:10])) + (", …" if len(numbers) > 10 else "")
            typer.echo(f"{what}: {counted(len(numbers), 'trajectory')} ({shown})")
