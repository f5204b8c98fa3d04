"""Kernels for the CPU: compiled by the system's compiler, kept on disk, run on all cores.

A library is known by the hash of its source, compiler, options and processor. It lies in a folder
that is private to its user (mode 0700), beside the hash of its content, and is built again if
anything about it is not as it was left.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fluctua.compiled import emit
from fluctua.compiled.scalar import Unsupported
from fluctua.compiled.trace import Program

OPTIONS = (
    "-std=c++17",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-exceptions",
    "-fno-rtti",
    "-Wno-psabi",
    "-shared",
    "-fPIC",
)
"""Infinities and what is not a number keep their meaning: checks of states and gradients look for
them.
"""

GROUP = 16
"""Blocks of lanes that go through time together where sums over the ensemble are formed, as in
native/sweep.hpp.
"""

KEPT_BYTES = 2**20
"""Of scores that wait for the return of their trajectories, of one block of lanes."""

ALIGNED = 64
"""Bytes to whose multiples arrays are aligned, or JAX would copy them."""

SUM_BYTES = 64 * 2**20
PARTS = 16
"""Pieces of an ensemble that have sums of their own, at most; fewer where those would take more
than `SUM_BYTES`.
"""


def cpu_source(
    program: Program,
    layout: emit.Layout,
    *,
    double: bool,
    noise64: bool,
    wiener: int,
    sweep: int,
    begins: bool = False,
) -> str:
    """The whole text of a kernel.

    sweep: 1 for a baseline that depends on time alone, 2 for one that is weighted. begins:
    trajectories, from one state and a key.
    """
    head = {
        "LANES": 8 if double or noise64 else 16,
        "REAL": "double" if double else "float",
        "DOUBLE": int(double),
        "NOISE64": int(noise64),
        "WIENER": wiener,
        "STREAM": {0: 0, 1: 2, 2: 3}[wiener],
        "SWEEP": sweep,
        "BEGINS": int(begins),
    }
    return "\n".join(
        [
            *(f"#define {name} {value}" for name, value in head.items()),
            emit.definitions(program, layout),
            emit.common(*emit.COMMON, "vectors.hpp"),
            emit.native("lanes.hpp", "noise.hpp"),
            emit.functions(program, layout, scores=sweep > 0),
            emit.native("sweep.hpp"),
        ]
    )


# ---------------------------------------------------------------------------------------- compiling


@cache
def compiler() -> str | None:
    """The system's C++ compiler: $CXX, or the first of g++, clang++ and c++."""
    named = os.environ.get("CXX")
    return next(
        (
            path
            for name in ([named] if named else ["g++", "clang++", "c++"])
            if (path := shutil.which(name))
        ),
        None,
    )


def cache_folder() -> Path:
    """Where libraries are kept: $FLUCTUA_KERNELS, or a folder in the user's cache."""
    own = os.environ.get("FLUCTUA_KERNELS")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(own) if own else base / "fluctua" / "kernels"


def private_folder(folder: Path) -> Path:
    """The folder, made if need be, after a check that no other user can write to it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(
            f"{folder} must be a folder of your own; it holds compiled code that will be run."
        )
    if stat.S_IMODE(status.st_mode) != 0o700:
        os.chmod(folder, 0o700)
    return folder


@cache
def _processor() -> str:
    """What `-march=native` stands for on this machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(wanted)}))


def find_or_build(source: str, optimise: str = "-O2") -> Path:
    """The compiled library of a source, from the folder of kernels or built now."""
    program = compiler()
    if program is None:
        raise Unsupported(
            "compiler", "there is no C++ compiler: install g++ or clang++, or set CXX"
        )
    real = Path(program).resolve()
    version = (str(real), str(real.stat().st_mtime_ns), str(real.stat().st_size))
    identity = (source, *version, *OPTIONS, optimise, _processor())
    name = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:40]
    try:
        folder = private_folder(cache_folder())
    except OSError as problem:
        raise Unsupported(
            "cache", f"no private folder for kernels, {problem}. Set FLUCTUA_KERNELS"
        ) from None
    library = folder / f"{name}.so"
    if not intact(library):
        _build(program, source, optimise, library)
    return library


def intact(library: Path) -> bool:
    """Whether a library is a file of this user alone, with the content that it was left with."""
    try:
        status = library.lstat()
        noted = library.with_suffix(".sha256").read_text().strip()
        if (
            not stat.S_ISREG(status.st_mode)
            or status.st_uid != os.getuid()
            or status.st_mode & 0o022
        ):
            return False
        return hashlib.sha256(library.read_bytes()).hexdigest() == noted
    except OSError:
        return False


def _build(program: str, source: str, optimise: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        text, built, noted = (Path(folder) / f"kernel{end}" for end in (".cpp", ".so", ".sha256"))
        text.write_text(source)
        command = [program, *OPTIONS, optimise, str(text), "-o", str(built), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unsupported(
                "compiler", f"{Path(program).name} failed: {done.stderr.strip()[:400]}"
            )
        os.chmod(built, 0o700)
        noted.write_text(hashlib.sha256(built.read_bytes()).hexdigest())
        # the hash first: a library beside an old hash is built again, one without any hash too
        os.replace(noted, library.with_suffix(".sha256"))
        os.replace(built, library)
        os.replace(text, library.with_suffix(".cpp"))


# ------------------------------------------------------------------------------------------ running

POINTERS = (
    "shared",
    "timed",
    "x",
    "context",
    "stream",
    "guess",
    "reward",
    "last",
    "gradient",
    "rows",
    "score",
    "bar",
    "inverse",
    "sums",
    "flags",
)


class _RunStruct(ctypes.Structure):
    """`struct Run` of native/sweep.hpp."""

    _fields_ = [
        ("count", ctypes.c_int64),
        ("steps", ctypes.c_int64),
        ("first", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in POINTERS),
        ("scale", ctypes.c_double),
        ("same", ctypes.c_double),
    ]


class CpuArrays:
    """Arrays of kernels on the CPU."""

    def __init__(self, library: ctypes.CDLL, real: np.dtype):
        self.library = library
        self.real = real

    def own(self, values: Any) -> np.ndarray:
        """A copy that a pass may write to."""
        return np.array(values, self.real, order="C")

    def empty(self, *shape: int) -> np.ndarray:
        """Room for a pass to write to, where JAX takes it as it is."""
        size = math.prod(shape) * self.real.itemsize
        room = np.empty(size + ALIGNED, np.uint8)
        first = -room.ctypes.data % ALIGNED
        return room[first : first + size].view(self.real).reshape(shape)

    def flags(self) -> np.ndarray:
        """What a pass may set. (1,)"""
        return np.zeros(1, np.int32)

    def read(self, flags: np.ndarray) -> int:
        """What passes have set."""
        return int(flags[0])

    def kept(self, name: str, source: Any, make: Callable[[Any], np.ndarray]) -> np.ndarray:
        """An array that is made of an object.

        On a GPU it is there already, as long as the object is the same.
        """
        return make(source)

    def host(self, array: np.ndarray) -> np.ndarray:
        """The numbers of an array."""
        return array

    def zeros(self, *shape: int) -> np.ndarray:
        """Room for sums in double precision."""
        return np.zeros(shape)

    def total(self, array: np.ndarray) -> float:
        """The sum, in double precision."""
        return float(array.sum(dtype=np.float64))

    def from_jax(self, array: Any) -> np.ndarray:
        """A copy of an array of JAX, for a pass to write to."""
        return self.own(array)

    def to_jax(self, array: np.ndarray) -> Any:
        """An array as JAX takes it."""
        return array


class CpuLibrary(CpuArrays):
    """A loaded kernel: passes over an ensemble, whose arrays have the trajectory last."""

    def __init__(self, path: Path, lanes: int, real: np.dtype):
        super().__init__(ctypes.CDLL(str(path)), real)
        self.lanes = lanes
        self.block = lanes * real.itemsize

    def places(self, state: int, parameters: int, count: int) -> dict[str, np.ndarray]:
        """Room for what a sweep leaves of every trajectory."""
        return {
            "reward": self.empty(count),
            "last": self.empty(state, count),
            "rows": self.empty(count, parameters),
        }

    def with_gradient(
        self, places: dict[str, np.ndarray], before: np.ndarray
    ) -> dict[str, np.ndarray]:
        """With the part of the gradients that comes before the first step. (P, E)"""
        return places | {"gradient": before}

    def rows(self, places: dict[str, np.ndarray], flat: np.dtype) -> tuple[Any, Any, Any]:
        """Returns (E,), gradients (E, P) in the type of θ, final states (E, M)."""

        def taken(v):
            return jax.device_put(v, may_alias=True)  # no pass writes to them any more

        return (
            taken(places["reward"]),
            taken(places["rows"].astype(flat, copy=False)),
            places["last"].T,
        )

    def run(
        self,
        name: str,
        arrays: dict[str, Any],
        *,
        count: int,
        steps: int,
        sums: tuple[int, ...] = (),
        scale: float = 1.0,
        same: float = 0.0,
    ) -> np.ndarray:
        """One pass. sums: the shape of what is summed over the ensemble; returned in double
        precision.

        scale, same: as in `Run` of native/sweep.hpp.
        """
        bounds = self._parts(count, sums)
        partial = np.zeros((len(bounds), *sums))
        function: Callable[..., Any] = self.library[name]

        whole = _RunStruct(
            count=count, steps=steps, first=arrays.get("first", 0), scale=scale, same=same
        )
        for key in POINTERS:
            if arrays.get(key) is not None:
                assert arrays[key].flags.c_contiguous
                setattr(whole, key, arrays[key].ctypes.data)
        start = partial.ctypes.data
        size = 8 * math.prod(sums)

        def piece(k: int) -> None:
            run = _RunStruct.from_buffer_copy(whole)
            run.sums = start + k * size
            function(ctypes.byref(run), ctypes.c_int64(bounds[k][0]), ctypes.c_int64(bounds[k][1]))

        each(piece, range(len(bounds)))
        return partial.sum(axis=0)

    def _parts(self, count: int, sums: tuple[int, ...]) -> list[tuple[int, int]]:
        """(first, stop) of the pieces of an ensemble.

        Of sums a function of sizes alone, so that sums are too.
        """
        unit = self.lanes * (GROUP if sums else 1)
        most = (
            4 * _cores()
            if not sums
            else max(2, min(PARTS, SUM_BYTES // max(1, 8 * math.prod(sums))))
        )
        size = unit * -(-count // (unit * most))
        return [(first, min(first + size, count)) for first in range(0, count, size)]


def each(work: Callable[[Any], None], pieces: Sequence[Any]) -> None:
    """Do the work of every piece, on all cores: a kernel runs without the interpreter's lock."""
    threads = min(len(pieces), _cores())
    if threads == 1:
        for piece in pieces:
            work(piece)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, pieces))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
