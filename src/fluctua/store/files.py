"""Refuse paths that are not plain files: a device or a pipe may have no end."""

from __future__ import annotations

import stat
from pathlib import Path

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def describe_kind(path: Path) -> str:
    """The kind of a path that is not a plain file, such as "a folder"; empty otherwise."""
    try:
        return KINDS.get(stat.S_IFMT(path.stat().st_mode), "")
    except OSError:
        return ""


def require_file(path: Path, expected: str = "a file") -> None:
    """Raise `ValueError` if `path` exists and is not a plain file."""
    kind = describe_kind(path)
    if kind:
        raise ValueError(f"{path} is {kind}, where {expected} was expected.")
