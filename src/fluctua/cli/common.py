"""What the commands share, and those on recordings."""

from __future__ import annotations

import inspect
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import numpy as np
import typer

from fluctua.core.words import escape_controls
from fluctua.store.files import require_file

if TYPE_CHECKING:
    from fluctua.core.likelihood.guard import Residuals
    from fluctua.insitu.recording.reader import RecordingFile
    from fluctua.tcmt import Task

EXPECTED = (ValueError, TypeError, FloatingPointError, ImportError, RuntimeError, MemoryError)
"""Errors that say by themselves what is wrong and what to do; anything else is a bug and shows its
trace.
"""


STOPPED = 130
"""Exit status after Ctrl-C, as shells have it."""

AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]


def say(text: object, **style: Any) -> None:
    """Print a line.

    Names of files, runs and parameters may hold control characters, which are escaped.
    """
    typer.secho(escape_controls(str(text)), **style)


def fail(message: str) -> NoReturn:
    """What is wrong, on stderr, and exit status 2."""
    say(f"fluctua: {message}", err=True, fg=typer.colors.RED)
    raise typer.Exit(2)


def paragraphs(command: Callable[..., Any] | None) -> str:
    """The docstring of a command with one line a paragraph, which a terminal of any width
    breaks where it has to.
    """
    text = inspect.getdoc(command) or ""
    return "\n\n".join(" ".join(part.split("\n")) for part in text.split("\n\n"))


# ------------------------------------------------------------------------- commands on a lattice


Size = Annotated[str, typer.Option(help="rows x columns, leads on opposite corners")]
Horizon = Annotated[float, typer.Option(help="T, in units of 1 / coupling")]
TimeStep = Annotated[float, typer.Option(help="time step")]
SigmaW = Annotated[float, typer.Option(help="noise amplitude of every open channel")]
SigmaKappa = Annotated[float, typer.Option(help="amplitude of the antagonistic modulation")]
ChiSpread = Annotated[float, typer.Option(help="spread of the initial Kerr coefficients")]
Seed = Annotated[
    int, typer.Option(help="of the noise, the modulation and the initial Kerr coefficients")
]


def lattice_start(
    lattice: str,
    horizon: float,
    dt: float,
    sigma_w: float,
    sigma_kappa: float,
    chi_std: float,
    seed: int,
    step: str = "euler",
) -> tuple[Task, dict[str, Any], Any]:
    """The task of the options, its initial parameters, and the key of the noise."""
    import jax

    from fluctua import tcmt

    network = tcmt.rectangular(*lattice_size(lattice), sigma_w=sigma_w)
    task = tcmt.transmission(
        network, horizon=horizon, dt=dt, sigma_kappa=sigma_kappa, integrator=step
    )
    k_start, k_run = jax.random.split(jax.random.key(seed))
    return task, tcmt.initial_parameters(k_start, network, chi_std=chi_std), k_run


def lattice_size(text: str) -> tuple[int, int]:
    """`11x13` as (11, 13)."""
    match = re.fullmatch(r"\s*(\d+)\s*[xX×]\s*(\d+)\s*", text)
    if not match:
        raise ValueError(f"--lattice is rows x columns, such as 11x13; got {text!r}.")
    return int(match[1]), int(match[2])


def free_folder(name: str) -> Path:
    """runs/NAME-1, or the first that does not exist."""
    number = 1
    while (folder := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return folder


# ------------------------------------------------------------------------- commands on recordings


ParamsFile = Annotated[Path | None, typer.Option(help=".npz of parameters, in place of the file's")]
ModelFile = Annotated[
    Path | None,
    typer.Option(
        help="a Python file with `process` and `objective`, for other systems than networks"
    ),
]
Strict = Annotated[bool, typer.Option("--strict", help="exit 1 if the file is not of the model")]
FOREIGN = "Files of other programs"
Map = Annotated[
    list[str] | None,
    typer.Option(
        "--map", help="NAME=PLACE in a foreign file; may be repeated", rich_help_panel=FOREIGN
    ),
]
Interval = Annotated[
    float | None,
    typer.Option(
        "--dt", help="interval of the samples, if the file has no times", rich_help_panel=FOREIGN
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(
        "--rate", help="in place of --dt: samples a unit of time", rich_help_panel=FOREIGN
    ),
]
Scale = Annotated[
    str | None,
    typer.Option(
        "--scale",
        help="units a count, for integer samples; or one a channel",
        rich_help_panel=FOREIGN,
    ),
]


def opened(
    file: Path,
    map_: list[str] | None = None,
    dt: float | None = None,
    rate: float | None = None,
    scale: str | None = None,
    *,
    damaged: bool = False,
) -> RecordingFile:
    """The file as the options say."""
    from fluctua.insitu.recording.reader import open_recording

    return open_recording(
        file, mapping(map_), dt=interval(dt, rate), scale=factors(scale), damaged=damaged
    )


def interval(dt: float | None, rate: float | None) -> float | None:
    """The time between two samples from `--dt` or `--rate`."""
    if dt is not None and rate is not None:
        raise ValueError("--dt and --rate are two ways to say one thing: give one of them.")
    if rate is None:
        return dt
    if not rate > 0:
        raise ValueError(f"--rate must be positive; got {rate:g}.")
    return 1 / rate


def factors(scale: str | None) -> float | list[float] | None:
    """`--scale 0.01` as a number, `--scale 0.01,0.02` as one for each channel."""
    try:
        each = None if scale is None else [float(word) for word in scale.split(",")]
    except ValueError:
        raise ValueError(
            f"--scale is a number, or one for each channel, 0.01,0.02; got {scale!r}."
        ) from None
    return each[0] if each and len(each) == 1 else each


def mapping(texts: list[str] | None) -> dict[str, str]:
    """`--map x=Data/psi` as {"x": "Data/psi"}."""
    places = {}
    for text in texts or []:
        name, equals, where = text.partition("=")
        if not equals or not name or not where:
            raise ValueError(
                f"--map is NAME=PLACE, such as x=Data/psi or parameters.omega=w0; got {text!r}."
            )
        places[name] = where
    return places


def parameters(path: Path | None) -> dict[str, np.ndarray] | None:
    """θ from an .npz."""
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


def refuse_if(strict: bool, *residuals: Residuals | None) -> None:
    """Say on stderr that residuals are not the noise of the model; with `strict` exit 1."""
    wrong = [one for one in residuals if one is not None and one.cause]
    for one in wrong:
        say(f"→ the file is not of this model: {one!r}", err=True, fg=typer.colors.YELLOW)
    if wrong and strict:
        raise typer.Exit(1)


def npz_file(path: Path) -> Path:
    """Where --out goes: numpy adds .npz to a name that has none, so the name that is told must
    have it too.
    """
    path = path if path.suffix == ".npz" else path.with_name(path.name + ".npz")
    if path.is_dir():
        raise ValueError(f"--out names an .npz file; {path} is a folder.")
    return path


def precision(dtype: str) -> None:
    """A recording in double precision is worked on in double precision."""
    if dtype in ("float64", "complex128"):
        import jax

        jax.config.update("jax_enable_x64", True)


@contextmanager
def bar(label: str, *, show: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, (done, total) -> None; nothing where there is no terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if not (show and console.is_terminal):
        yield lambda done, total: None
        return
    columns: Any = (
        TextColumn(label),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def plain(value: Any) -> Any:
    """Arrays and records as JSON has them; NaN, which JSON has not, as null."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):
        return plain(np.asarray(value).tolist())
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return value
