"""Load objects that a user defines in a Python file, named `FILE.py:NAME`."""

from __future__ import annotations

import importlib.util
import traceback
from functools import lru_cache
from pathlib import Path
from typing import Any

from fluctua.core.words import close_match
from fluctua.store.files import require_file


def is_code(text: str) -> bool:
    """Whether a text has the form `FILE.py:NAME`, or is a Python file whose name is missing.

    >>> is_code("trap.py:training"), is_code("demo")
    (True, False)
    """
    path, colon, name = text.rpartition(":")
    return text.endswith(".py") or bool(colon and path.endswith(".py") and name)


def load_code(text: str, expected: str) -> Any:
    """Load the object that `FILE.py:NAME` names.

    Args:
        text: `FILE.py:NAME`.
        expected: what the object should be, for the error messages: "a fluctua.Training".

    Returns: the object. The same content of a file is executed once.

    """
    file, colon, name = text.rpartition(":")
    if not colon or not file.endswith(".py"):
        file = text if text.endswith(".py") else "FILE.py"
        raise ValueError(
            f"{text!r} names no object: {expected} is given as FILE.py:NAME, such as {file}:NAME."
        )
    path = Path(file)
    require_file(path, "a Python file")
    if not path.exists():
        raise ValueError(f"there is no file {path}: {expected} is given as FILE.py:NAME.")
    module = _execute(path.resolve(), path.read_bytes())
    if not hasattr(module, name):
        public = [public_name for public_name in vars(module) if not public_name.startswith("_")]
        raise ValueError(
            f"{path} does not define {name!r}, which should be {expected}."
            + close_match(name, public)
        )
    return getattr(module, name)


@lru_cache(maxsize=16)
def _execute(path: Path, _content: bytes) -> Any:
    """Execute a file as a module, once per content, so that JAX's compilations are reused."""
    spec = importlib.util.spec_from_file_location(f"code_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path.name} does not run: {_locate(error, path)}.") from error
    return module


def _locate(error: Exception, path: Path) -> str:
    """Describe an error with the last line of the file itself: `NameError, line 3: ...`."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}, line {error.lineno}: {error.msg}"
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(path)
    ]
    where = f", line {lines[-1]}" if lines else ""
    return f"{type(error).__name__}{where}: {error}"
