"""Options that several commands share, each with one name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fluctua.cli.settings import Key, Keys

PRESET = "demo, fast, unknown, ports, isolation, paper, paper-quick"
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else")]
Seed = Annotated[int, typer.Option(help="Seed of all random numbers")]
Trajectories = Annotated[int, typer.Option(min=1, help="Number of trajectories")]
ParamsFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE.npz", help="Parameters that take the place of the source's own"),
]
ModelCode = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.py:NAME",
        help="Model of a system that is no network: an object with `process` and `objective`",
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Exit with status 1 if the recording contradicts the model")
]
Map = Annotated[
    list[str] | None,
    typer.Option(
        "--map",
        metavar="NAME=PLACE",
        help="Where another program's file keeps a quantity, such as x=Data/psi; may be repeated",
    ),
]
Continuing = Annotated[
    bool, typer.Option("--continuing", help="The file is one long record of a steady state")
]
FILE_KEYS: Keys = {
    "dt": Key(float, "interval between samples, for a file without times"),
    "scale": Key(str, "units per count for integer samples, 0.01, or one per channel, 0.01,0.02"),
}
CALIBRATION_KEYS: Keys = {
    "noise": Key(str, "diffusion Q: auto, file (its calibration), nominal (the model's) (auto)"),
    "theta": Key(str, "parameters of the drift: set, or calibrated, as fitted in the file (set)"),
}
