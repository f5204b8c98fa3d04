"""The folder of a run of any system: its files, its lock, and its disk space.

config.toml | plan.json | run.json   settings of a lattice, an instrument, a process
history.csv                          one row per iteration
signal.csv                           gradient and error of each array of θ, one row per iteration
predictions.csv, records.csv         what a calibrated model expected (fluctua.store.expectations)
parameters.h5                        θ over the iterations
checkpoints/                         states to continue from
final.npz                            θ after the last step
summary.txt, summary.json, figures/  results
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from fluctua.store import locks
from fluctua.store.files import require_file

LOCK = ".lock"
SETTINGS = ("config.toml", "plan.json", "run.json")
FILES = (
    LOCK,
    *SETTINGS,
    "history.csv",
    "devices.csv",
    "incidents.csv",
    "start.npz",
    "final.npz",
    "summary.txt",
    "summary.json",
)
"""Files that a run needs to continue.

Others (signal.csv, predictions.csv, parameters.h5) are set aside where they are damaged.
"""
FOLDERS = ("checkpoints", "figures", "recordings")


class RunFolder(NamedTuple):
    """Paths of a run.

    Args:
        path: the folder.
        settings_name: the settings file, one of `SETTINGS`.
        resume: command that continues a run; `{folder}` stands for the path.
        again: option that replaces an earlier run; empty where there is none.
    """

    path: Path
    settings_name: str = "config.toml"
    resume: str = "fluctua train --resume {folder}"
    again: str = "--replace"

    @property
    def settings(self) -> Path:
        """The settings file."""
        return self.path / self.settings_name

    @property
    def history(self) -> Path:
        """The history, see `fluctua.store.history`."""
        return self.path / "history.csv"

    @property
    def signal(self) -> Path:
        """The signal of each array of θ, see `fluctua.store.history`."""
        return self.path / "signal.csv"

    @property
    def predictions(self) -> Path:
        """Predictions of a calibrated model for each row, see `fluctua.store.expectations`."""
        return self.path / "predictions.csv"

    @property
    def records(self) -> Path:
        """The last measured record and the expected one, see `fluctua.store.expectations`."""
        return self.path / "records.csv"

    @property
    def parameters(self) -> Path:
        """θ over the iterations, see `fluctua.store.course`."""
        return self.path / "parameters.h5"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints, see `fluctua.store.checkpoint`."""
        return self.path / "checkpoints"

    @property
    def start(self) -> Path:
        """The state that a branch began from; absent for a run from its initial conditions."""
        return self.path / "start.npz"

    @property
    def final(self) -> Path:
        """θ after the last step, for `fluctua estimate --params`."""
        return self.path / "final.npz"

    @property
    def figures(self) -> Path:
        """Figures, drawn at the end and by `fluctua plot`."""
        return self.path / "figures"

    @property
    def go_on(self) -> str:
        """The command that continues this run."""
        return self.resume.format(folder=self.path)


def find_run(path: str | Path, place: RunFolder | None = None) -> RunFolder:
    """The folder of an existing run.

    Args:
        path: the folder.
        place: the expected kind of run; any kind by default.

    Returns: its paths.
    """
    path = Path(path)
    if path.is_file():
        raise ValueError(f"{path} is a file, where the folder of a run was expected.")
    if not path.is_dir():
        raise ValueError(f"there is no run folder {path}.")
    check_entries(path)
    if place is not None:
        place = place._replace(path=path)
    else:
        names = [name for name in SETTINGS if (path / name).exists()]
        place = RunFolder(path, *names[:1])
    if place.settings.is_file():
        return place
    if is_unfinished(path):
        raise ValueError(
            f"{path} holds no run, or one that was killed before it began: it has no "
            f"{place.settings_name}. A training into the same folder begins it again."
        )
    raise ValueError(f"{path} is not the folder of a run: it has no {place.settings_name}.")


def check_entries(path: Path) -> None:
    """Refuse a run folder with an entry of the wrong kind, such as a pipe named history.csv."""
    for name in FILES:
        require_file(path / name, "a file of the run")
    for name in FOLDERS:
        if (path / name).exists() and not (path / name).is_dir():
            raise ValueError(
                f"{path / name} is not a folder, where a folder of the run was expected."
            )


def is_unfinished(path: Path) -> bool:
    """Whether a folder holds only the files of a run that was killed before its first row."""
    known = {
        LOCK,
        "history.csv",
        "signal.csv",
        "parameters.h5",
        "start.npz",
        "checkpoints",
        "figures",
        "recordings",
        *SETTINGS,
    }
    known |= {f"{name}.partial" for name in known}
    for entry in path.iterdir():
        if entry.name not in known:
            return False
        if entry.name in ("history.csv", "signal.csv") and entry.read_bytes().count(b"\n") > 1:
            return False
        if entry.is_dir() and any(
            not inside.name.endswith(".partial") for inside in entry.iterdir()
        ):
            return False
    return True


def prepare(place: RunFolder, need: int, *, replace: bool = False, advice: str = "") -> IO[str]:
    """Create and lock an empty, writable folder; raise before any time is spent.

    Args:
        place: the folder, which need not exist.
        need: bytes that the run will take.
        replace: remove an earlier run there.
        advice: how a run takes less space.

    Returns: the lock, which ends with the process, even if that is killed.
    """
    try:
        place.path.mkdir(parents=True, exist_ok=True)
        check_entries(place.path)
        with hold(place) as lock:
            _clear(place, replace)
            place.checkpoints.mkdir(exist_ok=True)
            require_room(place, need, advice)
    except OSError as error:
        raise ValueError(
            f"the run folder {place.path} cannot be written: {error.strerror or error}. Choose "
            "another."
        ) from None
    return lock


def require_room(place: RunFolder, need: int, advice: str = "") -> None:
    """Raise if the disk has less than `need` bytes left."""
    free = shutil.disk_usage(place.path).free
    if free < need:
        raise ValueError(
            f"the disk of {place.path} has {free / 2**20:,.0f} MiB free, and this run takes about "
            f"{need / 2**20:,.0f} MiB. Free some, choose another "
            f"folder{advice and f', or {advice}'}."
        )


@contextmanager
def hold(place: RunFolder) -> Iterator[IO[str]]:
    """Lock a folder; the lock is released at once only if the block fails."""
    lock = acquire(place)
    try:
        yield lock
    except BaseException:
        lock.close()
        raise


def acquire(place: RunFolder) -> IO[str]:
    """Lock a folder for this process."""
    try:
        file = open(place.path / LOCK, "a+", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise ValueError(
            f"the run folder {place.path} cannot be written: {error.strerror}. Copy it to where it "
            "can be, or change who may write there."
        ) from None
    if not locks.try_lock(file):
        file.seek(0)
        holder = file.read().strip()
        file.close()
        raise ValueError(
            f"another process{f' ({holder})' if holder else ''} is training into {place.path}. "
            "Wait for it, stop it, or choose another folder."
        )
    file.truncate(0)
    file.write(f"process {os.getpid()}")
    file.flush()
    return file


WRITING = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), or use another file system",
    errno.EROFS: "make it writable",
    errno.EACCES: "make it writable",
    errno.EIO: "look after the disk",
    errno.ENOENT: "do not remove it while a run writes",
}
"""Advice by error number of a failed write."""


@contextmanager
def explain_failures(place: RunFolder) -> Iterator[None]:
    """Turn errors of a failing disk into messages with advice."""
    try:
        yield
    except OSError as error:
        if error.errno not in WRITING:
            raise
        if not place.settings.exists():
            raise RuntimeError(
                f"the run folder {place.path} was removed or emptied while the run was writing "
                "into it. What was in it is gone; begin again."
            ) from error
        raise RuntimeError(
            f"{place.path} can no longer be written ({error.strerror}). The run up to its last "
            f"checkpoint is safe; {WRITING[error.errno]}, then: {place.go_on}"
        ) from error


def fingerprint(*parts: bytes) -> str:
    """Sixteen hexadecimal digits that identify a run; every file of the run carries them."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()[:16]


def refuse_full(place: RunFolder, *, replace: bool = False) -> None:
    """Raise if a folder holds something that a new run must not remove."""
    path = place.path
    if not path.is_dir() or _is_empty(path):
        return
    a_run = place.settings.exists() and place.history.exists()
    if not is_unfinished(path) and not (replace and a_run):
        again = f"; do it again: {place.again}" if place.again else ""
        choices = f"Go on with it: {place.go_on}{again}; or choose"
        hint = choices if a_run else "It is not a run. Choose"
        raise ValueError(f"the folder {path} is not empty. {hint} another folder.")


def _is_empty(path: Path) -> bool:
    return all(entry.name == LOCK for entry in path.iterdir())


def _clear(place: RunFolder, replace: bool) -> None:
    path = place.path
    if _is_empty(path):
        return
    refuse_full(place, replace=replace)
    for folder in (place.checkpoints, place.figures):
        shutil.rmtree(folder, ignore_errors=True)
    # the settings go last: what they stand for can be replaced again as long as they are there
    for old in (
        place.signal,
        place.predictions,
        place.records,
        place.parameters,
        place.start,
        place.final,
        *path.glob("summary.*"),
        place.history,
        place.settings,
    ):
        old.unlink(missing_ok=True)
        old.with_name(old.name + ".partial").unlink(missing_ok=True)
