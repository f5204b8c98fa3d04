"""Load objects that a user defines, named `FILE.py:NAME` or `package.module:NAME`."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from fluctua.core.words import close_match
from fluctua.store.files import require_file

FORMS = "FILE.py:NAME or package.module:NAME"
MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
"""`package.module:NAME`. An address such as tcp://HOST:PORT has slashes, and a port is no name."""


def is_code(text: str) -> bool:
    """Whether a text has one of the `FORMS`, or is a Python file whose name is missing.

    >>> is_code("trap.py:training"), is_code("lab.traps:training"), is_code("demo")
    (True, True, False)
    """
    path, colon, name = text.rpartition(":")
    if text.endswith(".py") or (colon and path.endswith(".py") and name):
        return True
    return MODULE.fullmatch(text) is not None


def load_code(text: str, expected: str) -> Any:
    """Load the object that a text names.

    Args:
        text: `FILE.py:NAME`, or `package.module:NAME` with modules that Python finds, those of the
            current folder included.
        expected: what the object should be, for the error messages: "a fluctua.Training".

    Returns: the object. The same content of a file is executed once.

    """
    place, _, name = text.rpartition(":")
    if place.endswith(".py"):
        module = _load_file(Path(place), expected)
    elif MODULE.fullmatch(text):
        module = _import_module(place, expected)
    else:
        file = text if text.endswith(".py") else "FILE.py"
        raise ValueError(
            f"{text!r} names no object: {expected} is given as {FORMS}, such as {file}:NAME."
        )
    if not hasattr(module, name):
        public = [public_name for public_name in vars(module) if not public_name.startswith("_")]
        raise ValueError(
            f"{place} does not define {name!r}, which should be {expected}."
            + close_match(name, public)
        )
    return getattr(module, name)


def load_value(text: str, kind: type, expected: str) -> Any:
    """Load an object of a class, or the result of a function without arguments.

    Args:
        text: one of the `FORMS`.
        kind: class of the object.
        expected: what it should be, for the error messages.

    Returns: the object. `TypeError` for an object of another class.

    """
    expected = f"{expected}, or a function without arguments that returns one"
    value = load_code(text, expected)
    if callable(value) and not isinstance(value, type | kind):
        value = call_code(text, value)
    if not isinstance(value, kind):
        raise TypeError(f"{text} must be {expected}; got {type(value).__name__}.")
    return value


def call_code(text: str, function: Callable[..., Any], *values: Any, **named: Any) -> Any:
    """Call a function that a text names; an error is raised again with its line."""
    try:
        return function(*values, **named)
    except Exception as error:
        if isinstance(error, ValueError) and not _list_own_frames(error):
            raise  # a message of the library is complete
        raise ValueError(f"{text} does not run: {locate_error(error)}.") from error


def make_absolute(text: str) -> str:
    """Give a name the whole path of its file, for use from another folder."""
    place, _, name = text.rpartition(":")
    return f"{Path(place).resolve()}:{name}" if place.endswith(".py") else text


def locate_error(error: BaseException) -> str:
    """Describe an error with its place in code that is not this package's or Python's own.

    `NameError, line 3 of lab.py: name 'x' is not defined`.
    """
    if isinstance(error, SyntaxError):
        place = f" of {Path(error.filename).name}" if error.filename else ""
        return f"{type(error).__name__}, line {error.lineno}{place}: {error.msg}"
    frames = _list_own_frames(error)
    where = f", line {frames[-1].lineno} of {Path(frames[-1].filename).name}" if frames else ""
    return f"{type(error).__name__}{where}: {error}"


def _list_own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Calls in code of the user, the innermost last."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not _is_foreign(frame.filename)]


def _is_foreign(filename: str) -> bool:
    """Whether a file belongs to this package, an installed one or Python, not to the user."""
    path = Path(filename)
    package = Path(__file__).parents[1]
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    standard = path.is_relative_to(Path(traceback.__file__).parent)
    return filename.startswith("<") or bool(installed) or path.is_relative_to(package) or standard


def _load_file(path: Path, expected: str) -> Any:
    require_file(path, "a Python file")
    if not path.exists():
        beside = path.parent.glob("*.py") if path.parent.is_dir() else ()
        raise ValueError(
            f"there is no file {path}: {expected} is given as {FORMS}."
            + close_match(path.name, [file.name for file in beside])
        )
    return _execute(path.resolve(), path.read_bytes())


@lru_cache(maxsize=16)
def _execute(path: Path, _content: bytes) -> Any:
    """Execute a file as a module, once per content, so that JAX's compilations are reused."""
    spec = importlib.util.spec_from_file_location(f"code_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _add_to_path(path.parent)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path.name} does not run: {locate_error(error)}.") from error
    return module


def _add_to_path(folder: Path) -> None:
    """Let modules of a folder be imported, after all others."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _import_module(name: str, expected: str) -> Any:
    _add_to_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not f"{name}.".startswith(f"{missing}."):
            raise ValueError(f"{name} does not run: {locate_error(error)}.") from error
        raise ValueError(
            f"there is no module {missing}: {expected} is given as {FORMS}."
            + close_match(missing, _list_modules(missing))
        ) from None
    except Exception as error:
        raise ValueError(f"{name} does not run: {locate_error(error)}.") from error


def _list_modules(name: str) -> list[str]:
    """Modules beside one that is missing."""
    package, dot, _ = name.rpartition(".")
    path = getattr(sys.modules.get(package), "__path__", ()) if package else None
    return [package + dot + module.name for module in pkgutil.iter_modules(path)]
