"""The folder of compiled code in the user's cache, which only its owner can enter."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def find_cache_folder() -> Path:
    """Return the folder of compiled code: $FLUCTUA_KERNELS, or one in the user's cache."""
    chosen = os.environ.get("FLUCTUA_KERNELS")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(chosen) if chosen else base / "fluctua" / "kernels"


def make_private_folder(folder: Path) -> Path:
    """Make a folder that only this user can enter; raise if another user owns it.

    An existing folder that others can enter stays as it is; a private one is made within it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if _is_open(folder):
        folder = folder / f"fluctua-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or _is_open(folder):
        raise PermissionError(
            f"{folder} must be a folder owned by you that only you can enter: it holds compiled "
            "code that will be run."
        )
    return folder


def _is_open(folder: Path) -> bool:
    """Whether other users have any permission in a folder."""
    return bool(stat.S_IMODE(folder.lstat().st_mode) & 0o077)
