"""Locks on files, which the system releases when their process ends; on POSIX and on Windows."""

from __future__ import annotations

import errno
import sys
from typing import IO

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

BEYOND = 2**30
"""Place of the byte that Windows locks: the holder that a file names stays readable."""


def try_lock(file: IO[str], *, shared: bool = False) -> bool:
    """Lock an open file; False if another process holds it.

    shared: only test whether an exclusive lock is held, beside other tests.
    """
    try:
        if sys.platform == "win32":
            file.seek(BEYOND)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            file.seek(0)
        else:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
