"""What the commands on recordings share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np


def mapping(given: list[str] | None) -> dict[str, str]:
    """`--map x=Data/psi` as {"x": "Data/psi"}."""
    found = {}
    for text in given or []:
        name, equals, where = text.partition("=")
        if not equals or not name or not where:
            raise ValueError(f"--map is NAME=PLACE, such as x=Data/psi or parameters.omega=w0; got {text!r}.")
        found[name] = where
    return found


def parameters(path: Path | None) -> dict[str, np.ndarray] | None:
    """θ from an .npz."""
    if path is None:
        return None
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: np.asarray(file[name], np.float64) for name in file.files}
    except (OSError, ValueError) as error:
        raise ValueError(f"--params: {path} cannot be read as an .npz of plain arrays ({error}).") from None


def precision(dtype: str) -> None:
    """A recording in double precision is worked on in double precision."""
    if dtype in ("float64", "complex128"):
        import jax

        jax.config.update("jax_enable_x64", True)


@contextmanager
def bar(label: str, *, show: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, (done, total) -> None; nothing where there is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not (show and console.is_terminal):
        yield lambda done, total: None
        return
    columns: Any = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TextColumn("left"), TimeRemainingColumn())
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
