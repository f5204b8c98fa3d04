"""Fingerprints of functions and values: one line of text each, the same in every process.

    0.05                               a number, a word
    float32 (101,) 3f2a90c1b2d4e5f6    an array: type, shape, hash of its bytes
    values 90aa4e218c1d812f            a tree of arrays
    traced 8c1d812f00aa4e21            a function that JAX can trace
    code b61d5d3a94af1e77              another function, or a record that holds functions

A traced function is identified by its JAX program at the shapes of the run: constants, globals and
helpers count, names and spelling do not. Another function is identified by its bytecode, constants,
closure and globals. Addresses, line numbers and the order of dictionaries never enter.

Traced programs depend on the version of JAX, and bytecode on that of Python: `compare` separates
differences that may be due to another version from others.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import hashlib
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

FORMAT = 3
"""Raise it when the same training gets other fingerprints, or its parts other names."""

TRACED = "traced "
CODE = "code "

LIBRARIES = ("fluctua", "jax", "jaxlib", "numpy", "optax", "scipy")
"""Packages whose functions are identified by name, like the standard library and site-packages."""

NOT_COMPUTED = ("name", "debug_info", "backend", "on_doubt")
"""Fields of records and traced equations that affect only rounding, or when a run stops."""

FILLING = {"add", "append", "clear", "extend", "insert", "pop", "remove", "setdefault", "update"}
"""Methods that change a list, a dictionary or a set."""


class Differences(NamedTuple):
    """Names of the parts that differ.

    changed: certainly.
    unsure: possibly because versions differ.
    versions: those that differ.
    """

    changed: list[str]
    unsure: list[str]
    versions: list[str]


def versions() -> dict[str, str]:
    """Versions that fingerprints of functions depend on."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    packages = {name: version(name) for name in ("fluctua", "jax", "optax")}
    return {"format": str(FORMAT), "python": python, **packages}


def compare(
    began: Mapping[str, str], began_with: Mapping[str, str], now: Mapping[str, str]
) -> Differences:
    """Compare the parts of a run with those that it began with.

    Args:
        began: the parts then.
        began_with: the `versions` then.
        now: the parts now.

    """
    others = []
    for name, present in versions().items():
        if began_with.get(name) != present:
            others.append(f"{name} {began_with.get(name)} → {present}")
    changed: list[str] = []
    unsure: list[str] = []
    for name in sorted({*began, *now}):
        before = began.get(name)
        after = now.get(name)
        if before == after:
            continue
        depends = before is None or after is None or before.startswith((TRACED, CODE))
        (unsure if others and depends else changed).append(name)
    return Differences(changed, unsure, others)


def describe(value: Any, *arguments: Any) -> str:
    """The fingerprint of a value, one line of text.

    Args:
        value: a number, an array, a function or a record of such.
        *arguments: for a function: pytrees of `jax.ShapeDtypeStruct` to trace it at. Without them,
            or where it cannot be traced, its code counts.
    """
    if isinstance(value, np.ndarray | np.generic | jax.Array) or _is_table(value):
        array = _as_numpy(value)
        return f"{array.dtype} {array.shape} {_shorten(_hash(array.tobytes()))}"
    if isinstance(value, float) and value.is_integer():
        return repr(int(value))  # 5 iterations are 5.0
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, dict | list | tuple) and _is_numeric(value):
        return f"values {_shorten(_Digester().digest(value))}"
    if callable(value) and arguments:
        program = trace(value, *arguments)
        if program:
            return program
    return CODE + _shorten(_Digester().digest(value))


def trace(function: Callable[..., Any], *arguments: Any) -> str:
    """The fingerprint of a function's JAX program; empty where it cannot be traced."""
    try:
        # through a new function: JAX keeps what it traced, also where a global has changed since
        program = jax.make_jaxpr(lambda *values: function(*values))(*arguments)
    except Exception:  # a function of the user's may raise anything where it gets shapes
        return ""
    return TRACED + _shorten(_Digester().digest(program))


def digest_program(program: ClosedJaxpr) -> str | None:
    """SHA-256 of a traced function with its constants, and of the types of its results.

    None where it has parts that are no data: callbacks, and derivatives of its own, which are code
    beside the program.
    """
    if not _is_plain(program):
        return None
    types = [f"{aval} {getattr(aval, 'weak_type', None)}" for aval in program.out_avals]
    return _hash(_Digester().digest(program), *types).hex()


def as_shapes(tree: Any) -> Any:
    """The tree with shapes and types in place of its arrays, without weak types."""

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(leaf), jax.numpy.asarray(leaf).dtype)

    return jax.tree.map(shape, tree)


def configuration(value: Any) -> dict[str, Any]:
    """The fields of an object, or the attributes that only `__init__` assigns.

    Attributes that a method assigns, and containers that `__init__` makes itself, are state and
    left out.
    """
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return value._asdict()
    memory = set()
    for method in _list_methods(type(value)):
        memory |= _find_stores(method.__code__, "STORE_ATTR")
    init = getattr(type(value).__init__, "__code__", None)
    parameters: tuple[str, ...] = ()
    if init is not None:
        parameters = init.co_varnames[: init.co_argcount + init.co_kwonlyargcount]
    return {
        name: part
        for name, part in getattr(value, "__dict__", {}).items()
        if name not in memory and (name in parameters or not isinstance(part, dict | list | set))
    }


# ------------------------------------------------------------------------------------------ digests


class _Digester:
    """Digests of values, part by part. It keeps every value, so that no address is reused."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Any, bytes]] = {}

    def digest(self, value: Any) -> bytes:
        """SHA-256 of what `value` computes or holds."""
        simple = value is None or isinstance(value, bool | int | float | complex | str | bytes)
        if simple and not isinstance(value, np.generic):
            return _hash(type(value).__name__, repr(value))
        if id(value) in self.known:
            return self.known[id(value)][1]
        self.known[id(value)] = value, _hash("itself")  # of a cycle
        result = self._compound(value)
        self.known[id(value)] = value, result
        return result

    def _all(self, kind: str, values: Iterable[Any]) -> bytes:
        return _hash(kind, *map(self.digest, values))

    def _compound(self, value: Any) -> bytes:
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            array = _as_numpy(value)
            return _hash("array", str(array.dtype), str(array.shape), array.tobytes())
        if isinstance(value, ClosedJaxpr | Jaxpr):
            # from JAX 0.11 on they are one class, whose `jaxpr` is itself
            equations: Any = value if hasattr(value, "invars") else getattr(value, "jaxpr", None)
            constants = self._all("constants", getattr(value, "consts", ()))
            return _hash("program", self._jaxpr(equations), constants)
        if isinstance(value, np.dtype | enum.Enum):
            return _hash("word", str(value))
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self._record(value)
        if isinstance(value, tuple | list):
            return self._all("sequence", value)
        if isinstance(value, dict):
            return _hash("table", *sorted(self._all("entry", entry) for entry in value.items()))
        if isinstance(value, set | frozenset):
            return _hash("set", *sorted(map(self.digest, value)))
        if isinstance(value, types.CodeType):
            parts = (value.co_code, value.co_names, value.co_consts)
            return self._all("code", parts)
        if callable(value):
            return self._callable(value)
        if dataclasses.is_dataclass(value):
            return self._record(value)
        return _hash("object", type(value).__qualname__)

    def _callable(self, value: Any) -> bytes:
        if isinstance(value, functools.partial):
            return self._all("partial", (value.func, value.args, value.keywords))
        if isinstance(value, types.MethodType):
            return self._all("method", (value.__func__, value.__self__))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if dataclasses.is_dataclass(value):
            return self._record(value)
        if hasattr(value, "__wrapped__"):  # of `jax.jit`, `functools.cache`
            return self.digest(value.__wrapped__)
        if isinstance(value, types.BuiltinFunctionType | np.ufunc):
            return _hash("builtin", value.__name__)
        return self._class(type(value))

    def _record(self, value: Any) -> bytes:
        kind = type(value)
        skipped = NOT_COMPUTED if _is_library(kind) else ()
        fields = configuration(value)
        counted = [part for name, part in fields.items() if name not in skipped]
        return _hash("record", self._class(kind), *map(self.digest, counted))

    def _class(self, kind: type) -> bytes:
        methods = [] if _is_library(kind) else _list_methods(kind, init=True)
        return _hash("class", kind.__qualname__, *map(self.digest, methods))

    def _function(self, function: types.FunctionType) -> bytes:
        code = function.__code__
        memory = _find_stores(code, "STORE_DEREF") | _find_stores(code, "STORE_GLOBAL")
        held: list[Any] = [function.__defaults__, function.__kwdefaults__]
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name not in memory and _is_filled(cell):
                held.append(cell.cell_contents)
        if _is_library(function):
            return _hash("library", function.__qualname__, self._all("holds", held))
        for name in sorted(_find_names(code) - memory):
            part = function.__globals__.get(name)
            if not isinstance(part, types.ModuleType):
                held.append(part)
        if _changes_container(code):  # what it keeps in them is memory
            held = [part for part in held if not isinstance(part, dict | list | set | np.ndarray)]
        return _hash("function", self.digest(code), self._all("holds", held))

    def _jaxpr(self, jaxpr: Jaxpr) -> bytes:
        """The equations, with variables numbered in the order in which they appear."""
        numbers: dict[Any, int] = {}

        def name(variable: Any) -> str | bytes:
            aval = variable.aval
            kind = type(aval).__name__
            if hasattr(aval, "dtype"):
                kind = f"{aval.dtype} {aval.shape}"
            if isinstance(variable, Literal):
                return _hash(kind, self.digest(np.asarray(variable.val)))
            return f"{numbers.setdefault(variable, len(numbers))} {kind}"

        lines = [_hash(*map(name, [*jaxpr.constvars, *jaxpr.invars]))]
        for equation in jaxpr.eqns:
            inputs = _hash(*map(name, equation.invars))
            outputs = _hash(*map(name, equation.outvars))
            options = dict(equation.params)
            for key in NOT_COMPUTED:
                options.pop(key, None)
            lines.append(_hash(equation.primitive.name, inputs, outputs, self.digest(options)))
        return _hash("equations", *lines, *map(name, jaxpr.outvars))


PARTS_OF_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr"}
"""Operations that are programs themselves, beside options that change no number."""


def _is_plain(value: Any) -> bool:
    """Whether a traced function, or an option of one, consists of numbers, words and programs."""
    if isinstance(value, ClosedJaxpr | Jaxpr):
        jaxpr: Any = value if hasattr(value, "invars") else getattr(value, "jaxpr", None)
        for equation in jaxpr.eqns:
            part = PARTS_OF_CALLS.get(equation.primitive.name)
            inside = [equation.params[part]] if part else list(equation.params.values())
            if not all(map(_is_plain, inside)):
                return False
        return True
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    words = bool | int | float | complex | str | np.dtype | enum.Enum
    return value is None or isinstance(value, words | np.ndarray | np.generic)


def _hash(*parts: str | bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.digest()


def _shorten(digest: bytes) -> str:
    return digest.hex()[:16]


def _as_numpy(array: Any) -> np.ndarray:
    """The numbers of an array; those behind it for a random key."""
    if isinstance(array, jax.Array) and jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array)


def _is_table(value: Any) -> bool:
    """Whether nested tuples or lists are an array of numbers."""
    if not isinstance(value, tuple | list) or hasattr(value, "_fields"):
        return False
    try:
        return np.asarray(value).dtype.kind in "biuf"
    except ValueError:  # rows of different lengths
        return False


def _is_numeric(tree: Any) -> bool:
    """Whether all leaves of a tree are numbers or arrays of them."""
    numbers = bool | int | float | np.ndarray | np.generic | jax.Array
    return all(isinstance(leaf, numbers) for leaf in jax.tree.leaves(tree))


def _is_library(code: Any) -> bool:
    module = getattr(code, "__module__", None) or ""
    root = module.partition(".")[0]
    if root in LIBRARIES or root in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def _list_methods(kind: type, init: bool = False) -> list[types.FunctionType]:
    """The functions of a class and of its bases outside of libraries. init: also `__init__`."""
    methods = []
    for inner in kind.__mro__:
        if inner is not kind and _is_library(inner):
            continue
        for name, part in sorted(vars(inner).items()):
            function = getattr(part, "fget", None) or getattr(part, "__func__", part)
            if isinstance(function, types.FunctionType) and (init or name != "__init__"):
                methods.append(function)
    return methods


def _list_codes(code: types.CodeType) -> list[types.CodeType]:
    """The code of a function and of all functions within it."""
    codes = [code]
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            codes += _list_codes(const)
    return codes


def _find_stores(code: types.CodeType, operation: str) -> set[str]:
    """Names that a function assigns to by this operation of the bytecode."""
    stores = set()
    for inner in _list_codes(code):
        stores |= {step.argval for step in dis.get_instructions(inner) if step.opname == operation}
    return stores


def _find_names(code: types.CodeType) -> set[str]:
    """Names of globals and attributes that a function uses."""
    return {name for inner in _list_codes(code) for name in inner.co_names}


def _changes_container(code: types.CodeType) -> bool:
    """Whether a function modifies a container."""
    if _find_names(code) & FILLING:
        return True
    steps = (step.opname for inner in _list_codes(code) for step in dis.get_instructions(inner))
    return any(step in ("STORE_SUBSCR", "DELETE_SUBSCR") for step in steps)


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018, raises
    except ValueError:
        return False
    return True
