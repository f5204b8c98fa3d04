"""Checkpoints: a dictionary of arrays in one .npz, written atomically, with a checksum, read back or refused.

A file appears under its name only when it is complete and on the disk, so a kill at any moment leaves the earlier
ones as they were. Never pickle.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

CHECKSUM = "sha256"


class Damaged(ValueError):
    """A checkpoint that cannot be trusted."""


def write(folder: Path, number: int, arrays: Mapping[str, np.ndarray], keep: int) -> Path:
    """Write `row-<number>.npz`, and remove all but the last `keep`."""
    folder.mkdir(exist_ok=True)  # not its parents: a run folder that was removed stays so
    path = folder / f"row-{number:08d}.npz"
    replace(path, packed(arrays))
    for old in listed(folder)[:-keep]:
        old.unlink(missing_ok=True)
    return path


def packed(arrays: Mapping[str, np.ndarray]) -> bytes:
    """An .npz with its checksum."""
    named = {name: np.asarray(value) for name, value in arrays.items()}
    memory = io.BytesIO()
    np.savez(memory, **{**named, CHECKSUM: np.frombuffer(checksum(named), np.uint8)})  # type: ignore[arg-type]
    return memory.getvalue()


def read(path: Path) -> dict[str, np.ndarray]:
    """The arrays, or `Damaged` with the reason."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, NotImplementedError) as error:
        raise Damaged(f"it is not a complete .npz ({error})") from None
    stated = arrays.pop(CHECKSUM, None)
    if stated is None or stated.tobytes() != checksum(arrays):
        raise Damaged("its checksum does not fit its contents")
    return arrays


def newest(folder: Path, report: Callable[[str], None]) -> tuple[Path, dict[str, np.ndarray]] | None:
    """The newest checkpoint that can be read. Damaged ones are reported, set aside, and the one before is tried."""
    for path in reversed(listed(folder)):
        try:
            return path, read(path)
        except Damaged as error:
            name = set_aside(path)
            report(f"checkpoint {path.name} is damaged: {error}. It is kept as {name}; trying the one before it.")
    return None


def set_aside(path: Path) -> str:
    """Rename what is damaged, so that it is neither read nor lost; the name it has then."""
    aside, number = path.with_suffix(".damaged"), 1
    while aside.exists():
        aside, number = path.with_suffix(f".damaged-{number}"), number + 1
    path.rename(aside)
    return aside.name


def listed(folder: Path) -> list[Path]:
    """All checkpoints, oldest first."""
    return sorted(folder.glob("row-*.npz"))


def checksum(arrays: Mapping[str, np.ndarray]) -> bytes:
    """SHA-256 of names, types, shapes and contents."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {np.shape(arrays[name])}\n".encode())
        digest.update(array.tobytes())
    return digest.digest()


def replace(path: Path, content: bytes) -> None:
    """Put `content` under `path` in one step: readers see the old file or the new one, never a part."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    settle(partial, path)


def settle(partial: Path, path: Path) -> None:
    """Give a complete file its name, and make the name last."""
    os.replace(partial, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
