"""Whether a path can be read to its end: a device or a pipe may have none."""

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
    """`a folder`, `a device`, `a pipe` or `a socket`; empty for a plain file and for nothing at
    all.
    """
    try:
        return KINDS.get(stat.S_IFMT(path.stat().st_mode), "")
    except OSError:
        return ""


def require_file(path: Path, expected: str = "a file") -> None:
    """Raise `ValueError` if there is something else than a plain file at `path`, before it is
    opened.
    """
    kind = describe_kind(path)
    if kind:
        raise ValueError(f"{path} is {kind}, where {expected} was expected.")
