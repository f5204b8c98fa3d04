"""What the commands share: messages, options with one name each, progress bars, JSON."""

from __future__ import annotations

import inspect
import math
import zipfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import typer

from fluctua.cli.settings import Key, Keys, describe_keys
from fluctua.core.words import escape_controls
from fluctua.store.files import require_file

if TYPE_CHECKING:
    from fluctua.core.likelihood.guard import Residuals
    from fluctua.insitu.recording.reader import RecordingFile
    from fluctua.runs.config import Config
    from fluctua.tcmt import Task

EXPECTED = (ValueError, TypeError, FloatingPointError, ImportError, RuntimeError, MemoryError)
"""Errors that explain themselves; any other is a bug and shows its trace."""

STOPPED = 130
"""Exit status after Ctrl-C, as shells have it."""

PRESET = "demo, fast, unknown, isolation, paper, paper-quick"

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


def say(text: object, **style: Any) -> None:
    """Print a line.

    Names of files, runs and parameters may hold control characters, which are escaped.
    """
    typer.secho(escape_controls(str(text)), **style)


def fail(message: str) -> NoReturn:
    """Print what is wrong on stderr and exit with status 2."""
    say(f"fluctua: {message}", err=True, fg=typer.colors.RED)
    raise typer.Exit(2)


def note(message: object) -> None:
    """Print a remark on stderr."""
    say(f"note: {message}", err=True, fg=typer.colors.YELLOW)


def help_text(command: Callable[..., Any], keys: Keys | None = None) -> str:
    """The docstring of a command, one line per paragraph, and the keys of its `--set`."""
    text = inspect.getdoc(command) or ""
    parts = [" ".join(part.split("\n")) for part in text.split("\n\n")]
    if keys:
        parts.append(describe_keys(keys))
    return "\n\n".join(parts)


def refuse_options(context: typer.Context, allowed: Collection[str], reason: str) -> None:
    """Raise `ValueError` for options on the command line that would be ignored.

    allowed: names of parameters that are heeded. reason: why the others are not.
    """
    ignored = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.param_type_name == "option"
        and parameter.name is not None
        and parameter.name not in allowed
        and getattr(context.get_parameter_source(parameter.name), "name", "") == "COMMANDLINE"
    ]
    if ignored:
        raise ValueError(f"{', '.join(ignored)}: {reason}")


def find_free_folder(name: str) -> Path:
    """Return runs/NAME-1, or the first that does not exist."""
    number = 1
    while (folder := Path("runs") / f"{name}-{number}").exists():
        number += 1
    return folder


# ------------------------------------------------------------------------------ simulated networks


def is_simulated(source: str) -> bool:
    """Whether a source is a preset, a TOML file or the folder of a run."""
    from fluctua.runs.config import PRESETS

    return source in PRESETS or source.endswith(".toml") or Path(source).is_dir()


def configure(source: str, settings: dict[str, Any]) -> Config:
    """The configuration of a preset, a TOML file or a run's folder, with changed settings."""
    from fluctua.runs.config import apply_changes, find_config, load_unedited

    folder = Path(source)
    if folder.suffix == ".npz" and folder.is_file():
        raise ValueError(
            f"{source} holds parameters and no settings: give it with --params, and as the source "
            "a preset, a TOML file or the folder of a run."
        )
    if not folder.is_dir():
        return apply_changes(find_config(source), settings)
    if not (folder / "final.npz").exists():
        raise ValueError(
            f"{folder} has no final.npz: it is not a run folder, or its training never stopped."
        )
    return apply_changes(load_unedited(folder / "config.toml"), settings)


def initial_theta(task: Task, config: Config, seed: int) -> dict[str, Any]:
    """Parameters at which the training of a configuration starts."""
    import jax

    from fluctua import tcmt

    start, _ = jax.random.split(jax.random.key(seed))
    return tcmt.initial_parameters(start, task.network, chi_std=config.start.chi_std)


# -------------------------------------------------------------------------------------- recordings


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


def warn_of_residuals(strict: bool, *residuals: Residuals | None) -> None:
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


# ------------------------------------------------------------------------------------------ output


class Output(NamedTuple):
    """What a command does with its result."""

    out: Path | None
    strict: bool
    as_json: bool


@contextmanager
def show_progress(label: str, *, show: bool = True) -> Iterator[Callable[[int, int], None]]:
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


def to_json(value: Any) -> Any:
    """Arrays and records as JSON has them; NaN, which JSON has not, as null."""
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    if hasattr(value, "_asdict"):
        return to_json(value._asdict())
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    if hasattr(value, "tolist"):
        return to_json(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
