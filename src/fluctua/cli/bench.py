"""`fluctua bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fluctua.cli.common import fail


def bench(
    backend: Annotated[str, typer.Option(help="cpu or cuda: which kernels to measure")] = "cpu",
    trajectories: Annotated[int, typer.Option(help="of each run")] = 1000,
    quick: Annotated[bool, typer.Option("--quick", help="short runs: a look, not a measurement")] = False,
    peers: Annotated[bool, typer.Option(help="run diffrax and torchsde too, where installed")] = True,
    out: Annotated[Path | None, typer.Option("--json", help="also write the table to this file")] = None,
) -> None:
    """Kernels, JAX reference and peers side by side on the paper's lattice; prints ratios."""
    from fluctua.cli.speed import report, run

    try:
        result = run(backend=backend, trajectories=trajectories, quick=quick, peers=peers, say=typer.echo)
    except (ValueError, ImportError, RuntimeError) as error:
        fail(str(error))
    typer.echo(report(result))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
        typer.echo(f"table: {out}")
