"""`fluctua advise`: noise, trajectories and time that a gradient takes."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Annotated

import typer

from fluctua.cli import networks, options
from fluctua.cli.common import EXPECTED, fail, refuse_options
from fluctua.cli.settings import Key, Keys, Settings, read_settings

NETWORK_KEYS: Keys = {
    "return_bias": Key(float, "network: largest relative change of the return by noise (0.02)"),
    "sigma_w": Key(list, "network: noise amplitudes to measure at, [0.1, 0.5]"),
    "pilot": Key(int, "network: trajectories at each amplitude (400)"),
    "backend": Key(str, "network: auto, cpu or cuda"),
}
RECORDING_KEYS: Keys = {
    name: key._replace(help=f"recording: {key.help}")
    for name, key in {**options.FILE_KEYS, **options.CALIBRATION_KEYS}.items()
}
ADVISE_KEYS: Keys = {**NETWORK_KEYS, **RECORDING_KEYS}
FOR_RECORDINGS = (
    "error",
    "rate",
    "score",
    "continuing",
    "model",
    "params",
    "places",
    "settings",
    "as_json",
)
FOR_NETWORKS = ("error", "rate", "trajectories", "params", "settings", "as_json")


def advise(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="PRESET|FILE.toml|RUN|FILE",
            help=f"A preset ({options.PRESET}), a file of settings, the folder of a run, or "
            "a recording",
        ),
    ] = "paper",
    error: Annotated[
        float | None,
        typer.Option(help="Wanted relative error of the gradient", show_default="0.1"),
    ] = None,
    trajectories: Annotated[
        int | None,
        typer.Option(help="Number of trajectories of one estimate, in place of --error"),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Trajectories per second of your hardware")
    ] = None,
    score: Annotated[
        str,
        typer.Option(
            help="Score of a recording: euler, local-linear for samples far apart, or auto: as "
            "the file was calibrated"
        ),
    ] = "auto",
    continuing: options.Continuing = False,
    model: options.ModelCode = None,
    params: options.ParamsFile = None,
    places: options.Map = None,
    settings: Settings = None,
    as_json: options.AsJson = False,
) -> None:
    """Advise on noise, number of trajectories and time of a gradient.

    Of a simulated network, from small pilots. Of a recording: how many trajectories, how far apart
    the samples should be, and whether the readout is in the way.
    """
    try:
        for name, value in (("--error", error), ("--rate", rate)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be positive; got {value:g}.")
        if is_recording(source) or (places and not networks.is_simulated(source)):
            from fluctua.cli.advise_recording import advise_recording

            refuse_options(
                context,
                FOR_RECORDINGS,
                "a recording has the noise that it has. These are for a network that "
                "can be simulated.",
            )
            advise_recording(
                source,
                error=error or 0.1,
                rate=rate,
                score=score,
                model=model,
                params=params,
                places=places,
                settings=read_settings(settings, RECORDING_KEYS),
                continuing=continuing,
                as_json=as_json,
            )
            return
        from fluctua.cli.advise_network import advise_network

        refuse_options(context, FOR_NETWORKS, f"only recordings have these, and {source} is none.")
        if error is not None and trajectories is not None:
            raise ValueError("--error and --trajectories follow from each other: give one of them.")
        keys = read_settings(settings, NETWORK_KEYS)
        advise_network(
            source, params, rate, {"error": error, "trajectories": trajectories, **keys}, as_json
        )
    except EXPECTED as problem:
        fail(str(problem))


def is_recording(source: str) -> bool:
    """Whether a source is a file of trajectories, and not of parameters or settings."""
    path = Path(source)
    if not path.is_file() or path.suffix == ".toml":
        return False
    if zipfile.is_zipfile(path):
        import numpy as np

        with np.load(path, allow_pickle=False) as file:
            return "x" in file.files
    return True  # what it is instead, the message of the reader has
