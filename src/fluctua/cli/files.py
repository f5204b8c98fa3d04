"""Files of recordings and parameters, as the options describe them."""

from __future__ import annotations

import warnings
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fluctua.cli.common import say
from fluctua.store.files import require_file

if TYPE_CHECKING:
    from fluctua.core.likelihood.guard import Residuals
    from fluctua.insitu.recording.reader import RecordingFile


def open_file(
    file: Path, places: list[str] | None, settings: dict[str, Any], *, damaged: bool = False
) -> RecordingFile:
    """Open a recording or another program's file, as `--map` and `--set` describe it."""
    from fluctua.insitu.recording.reader import open_recording

    return open_recording(
        file,
        parse_places(places),
        dt=settings.get("dt"),
        scale=parse_scale(settings.get("scale")),
        axes=settings.get("axes"),
        damaged=damaged,
    )


def parse_scale(scale: str | None) -> float | list[float] | None:
    """Read `0.01` as a number, `0.01,0.02` as one for each channel."""
    if scale is None:
        return None
    try:
        each = [float(word) for word in scale.strip("[]").split(",")]
    except ValueError:
        raise ValueError(
            f"--set scale takes a number, or one per channel, 0.01,0.02; got {scale!r}."
        ) from None
    return each[0] if len(each) == 1 else each


def parse_places(texts: list[str] | None) -> dict[str, str]:
    """Read `--map x=Data/psi` as {"x": "Data/psi"}."""
    places = {}
    for text in texts or []:
        name, equals, where = text.partition("=")
        if not equals or not name or not where:
            raise ValueError(
                f"--map is NAME=PLACE, such as x=Data/psi or parameters.omega=w0; got {text!r}."
            )
        places[name] = where
    return places


def read_params(path: Path | None) -> dict[str, Any] | None:
    """θ from an .npz file."""
    import numpy as np

    if path is None:
        return None
    wanted = (
        "it is an .npz with an array for each parameter, as `fluctua calibrate --out` and "
        "numpy.savez write"
    )
    require_file(path, "an .npz file")
    if not path.exists():
        raise ValueError(f"--params: there is no file {path}; {wanted}.")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"--params: {path} is not an .npz; {wanted}.")
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: np.asarray(file[name], np.float64) for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"--params: {path} cannot be read ({error}); {wanted}.") from None


def refuse_two_sources(params: Path | None, theta: str) -> None:
    """Raise where parameters are given that a calibration would replace."""
    if params is not None and theta == "calibrated":
        raise ValueError(
            "--params and --set theta=calibrated are two sources of the parameters: give "
            "one of them."
        )


def ignore_reported_warnings() -> None:
    """Silence the warnings that a command prints in words of its own."""
    for start in (
        "the (recording is not of this|trajectories are not those of the)",
        "the record is not in a steady state",
    ):
        warnings.filterwarnings("ignore", start)


def report_residuals(strict: bool, *residuals: Residuals | None) -> None:
    """Print on stderr that residuals are not the noise of the model; with `strict` exit 1."""
    wrong = [one for one in residuals if one is not None and one.cause]
    for one in wrong:
        say(f"→ the file is not of this model: {one!r}", err=True, fg=typer.colors.YELLOW)
    if wrong and strict:
        raise typer.Exit(1)


def complete_npz(path: Path | None) -> Path | None:
    """The path of --out with the suffix .npz, which NumPy adds where it is missing."""
    if path is None:
        return None
    path = path if path.suffix == ".npz" else path.with_name(path.name + ".npz")
    if path.is_dir():
        raise ValueError(f"--out names an .npz file; {path} is a folder.")
    return path


def set_precision(dtype: str) -> None:
    """Compute in double precision if a recording is."""
    if dtype in ("float64", "complex128"):
        import jax

        jax.config.update("jax_enable_x64", True)
