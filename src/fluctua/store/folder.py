"""The folder of a run: who may write into it, and what is in it.

config.toml       the configuration, every key
history.csv       one row an iteration
parameters.h5     θ over the iterations, and the network
checkpoints/      what `--resume` goes on from
final.npz         omega, kappa, chi after the last step
summary.txt/.json what came out
figures/
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from fluctua.runs.config import Config

LOCK = ".lock"


class RunFolder(NamedTuple):
    """Paths of a run."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.toml"

    @property
    def history(self) -> Path:
        """See `fluctua.store.history`."""
        return self.path / "history.csv"

    @property
    def parameters(self) -> Path:
        """See `fluctua.runs.parameters`."""
        return self.path / "parameters.h5"

    @property
    def checkpoints(self) -> Path:
        """See `fluctua.store.checkpoint`."""
        return self.path / "checkpoints"

    @property
    def start(self) -> Path:
        """The state that a branch began from; absent where a run began from its initial conditions."""
        return self.path / "start.npz"

    @property
    def final(self) -> Path:
        """`fluctua gradient --params` reads it."""
        return self.path / "final.npz"

    @property
    def figures(self) -> Path:
        """Drawn at the end, and by `fluctua plot`."""
        return self.path / "figures"


def existing(path: str | Path) -> RunFolder:
    """The folder of a run that was begun."""
    folder = RunFolder(Path(path))
    if not folder.path.is_dir():
        raise ValueError(f"there is no run folder {path}.")
    missing = [p.name for p in (folder.config, folder.history, folder.parameters) if not p.exists()]
    if missing:
        raise ValueError(
            f"{path} is not the folder of a run: it has no {', '.join(missing)}. `fluctua train --out NEW` makes one."
        )
    return folder


def prepare(path: str | Path, config: Config, parameters: int, *, replace: bool = False) -> tuple[RunFolder, IO[str]]:
    """An empty folder that can be written to, locked; or an error before any time is spent.

    parameters: how many, for an estimate of the room that is needed. replace: remove an earlier run there.
    """
    folder = RunFolder(Path(path))
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        lock = acquire(folder)
        _clear(folder, replace)
        folder.checkpoints.mkdir(exist_ok=True)
        folder.figures.mkdir(exist_ok=True)
    except OSError as error:
        raise ValueError(f"the run folder {path} cannot be written: {error.strerror}. Choose another --out.") from None
    room(folder, config, parameters)
    return folder, lock


def room(folder: RunFolder, config: Config, parameters: int) -> None:
    """Raise if the disk has less room than the run will take."""
    need, free = space(config, parameters), shutil.disk_usage(folder.path).free
    if free < need:
        raise ValueError(
            f"the disk of {folder.path} has {free / 2**20:,.0f} MiB free, and this run takes about "
            f"{need / 2**20:,.0f} MiB. Free some, choose another --out, or record less often "
            "(keep.parameters_every)."
        )


def space(config: Config, parameters: int) -> int:
    """Bytes that a run may take: records twice (one copy while writing), checkpoints and rewind history."""
    records = 2 * 8 * parameters * (config.iterations // config.keep.parameters_every + 2)
    rewinds = 12 * config.ensemble.window if config.ensemble.schedule == "escalation" else 0
    steps = round(config.task.horizon / config.task.dt)
    checkpoint = 8 * (3 * parameters * (rewinds + 2) + steps + config.iterations)
    return records + (config.keep.checkpoints + 1) * checkpoint + 150 * config.iterations + 2**22


def acquire(folder: RunFolder) -> IO[str]:
    """Lock a folder for this process. The lock goes with the process, even if it is killed."""
    file = open(folder.path / LOCK, "a+", encoding="utf-8")  # noqa: SIM115, held as long as the run
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = file.read().strip()
        file.close()
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise ValueError(
            f"another process{f' ({holder})' if holder else ''} is training into {folder.path}. Wait for it, stop it, "
            "or choose another --out."
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()}")
    file.flush()
    return file


@contextmanager
def explained(folder: RunFolder, command: str = "fluctua train") -> Iterator[None]:
    """A failing disk, in words, with what to do. command: what goes on with the run."""
    try:
        yield
    except OSError as error:
        known = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES)
        if error.errno not in known and "No space left" not in str(error):  # HDF5 may tell it in words only
            raise
        why = error.strerror or "no space left"
        raise RuntimeError(
            f"{folder.path} can no longer be written ({why}). The run up to its last checkpoint is safe; make room, "
            f"then: {command} --resume {folder.path}"
        ) from error


def _clear(folder: RunFolder, replace: bool) -> None:
    inside = [p for p in folder.path.iterdir() if p.name != LOCK]
    if not inside:
        return
    a_run = folder.config.exists() and folder.history.exists()
    if not replace or not a_run:
        hint = (
            f"Go on with it: fluctua train --resume {folder.path}; do it again: --replace; or choose another --out."
            if a_run
            else "It is not a run. Choose another --out."
        )
        raise ValueError(f"the folder {folder.path} is not empty. {hint}")
    for old in (folder.checkpoints, folder.figures):
        shutil.rmtree(old, ignore_errors=True)
    for old in (
        folder.config,
        folder.history,
        folder.parameters,
        folder.start,
        folder.final,
        *folder.path.glob("summary.*"),
    ):
        old.unlink(missing_ok=True)
