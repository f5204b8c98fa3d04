"""Programs that JAX compiled for a command, kept for the next one.

Commands on recordings spend up to half of their time on compilation.
"""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path

from fluctua.core.host.cache_folder import find_cache_folder, make_private_folder

FOLDER = "JAX_COMPILATION_CACHE_DIR"
SECONDS = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
"""Variables of JAX: where programs are kept, and how long one compiles at least."""

MAX_BYTES = 2**28
"""Size at which the folder is emptied. A program takes about 7 kB."""


def keep_programs() -> None:
    """Choose a folder for the programs of JAX, which reads the choice when it is imported.

    A folder that the user has chosen stays, as does an empty choice, which keeps nothing.
    """
    if FOLDER in os.environ or not hasattr(os, "getuid"):
        return
    try:
        folder = make_private_folder(make_private_folder(find_cache_folder()) / "jax")
        if _measure_size(folder) > MAX_BYTES:
            shutil.rmtree(folder)
            make_private_folder(folder)
    except OSError:  # a home that cannot be written to: every command compiles for itself
        return
    os.environ[FOLDER] = str(folder)
    os.environ.setdefault(SECONDS, "0")
    # JAX notices a damaged file, such as that of a process which was killed, and compiles again
    warnings.filterwarnings("ignore", "Error reading persistent compilation cache")


def _measure_size(folder: Path) -> int:
    """Bytes of the files in a folder."""
    with os.scandir(folder) as entries:
        return sum(entry.stat().st_size for entry in entries)
