"""Kernels for the CPU: compiled by the system's compiler, kept on disk, run on all cores.

A library is named by the hash of its source, compiler, options and processor. It is kept in a
folder private to the user (mode 0700), beside the hash of its content, and built again if owner,
permissions or content have changed.
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
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fluctua.compiled import emit, toolchain
from fluctua.compiled.ahead import STREAM_WORDS
from fluctua.compiled.scalar import Unsupported
from fluctua.compiled.trace import Program
from fluctua.core.host import threads
from fluctua.core.host.cache_folder import find_cache_folder, make_private_folder

OPTIONS = (
    "-std=c++17",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-exceptions",
    "-fno-rtti",
    "-Wno-psabi",
    "-shared",
    "-fPIC",
)
"""Without -ffast-math: checks of states and gradients look for infinities and NaN."""

PROCESSOR_FLAGS = ("-march=native", "-mcpu=native")
"""For the instructions of this machine; Clang on ARM may know only the second."""

GROUP = 16
"""Blocks of lanes that advance together where sums are formed, as in native/sweep.hpp."""

KEPT_BYTES = 2**20
"""Largest memory per block of lanes for scores that wait for the return of their trajectories."""

ALIGNED = 64
"""Alignment of arrays in bytes; JAX copies arrays of a smaller one."""

SUM_BYTES = 64 * 2**20
PARTS = 16
"""Pieces of an ensemble with sums of their own, at most; fewer if those exceed `SUM_BYTES`."""


def write_cpu_source(
    program: Program,
    layout: emit.Layout,
    *,
    double: bool,
    noise64: bool,
    wiener: int,
    sweep: int,
    self_starting: bool = False,
) -> str:
    """Return the complete text of a kernel.

    sweep: 1 for a baseline that depends on time alone, 2 for a weighted one, 0 for none.
    self_starting: the kernel starts its trajectories itself, from one state and a key.
    """
    head = {
        "LANES": 8 if double or noise64 else 16,
        "REAL": "double" if double else "float",
        "DOUBLE": int(double),
        "NOISE64": int(noise64),
        "WIENER": wiener,
        "STREAM": STREAM_WORDS[wiener],
        "SWEEP": sweep,
        "BEGINS": int(self_starting),
    }
    return "\n".join(
        [
            *(f"#define {name} {value}" for name, value in head.items()),
            emit.write_definitions(program, layout),
            toolchain.read_common(*toolchain.COMMON, "vectors.hpp"),
            toolchain.read_native("lanes.hpp", "noise.hpp"),
            emit.write_functions(program, layout, scores=sweep > 0),
            toolchain.read_native("ensemble.hpp", "sweep.hpp"),
        ]
    )


# ---------------------------------------------------------------------------------------- compiling


@cache
def find_compiler() -> str | None:
    """Find the system's C++ compiler: $CXX, or the first of g++, clang++ and c++."""
    chosen = os.environ.get("CXX")
    names = [chosen] if chosen else ["g++", "clang++", "c++"]
    return next((path for name in names if (path := shutil.which(name))), None)


@cache
def choose_options(program: str) -> tuple[str, ...]:
    """Return the flags of a compiler, with the first of `PROCESSOR_FLAGS` that it accepts."""
    for flag in PROCESSOR_FLAGS:
        preprocess = [program, flag, "-x", "c++", "-E", os.devnull]
        if subprocess.run(preprocess, capture_output=True, check=False).returncode == 0:
            return (flag, *OPTIONS)
    return OPTIONS


def _explain_missing_compiler() -> str:
    chosen = os.environ.get("CXX")
    if chosen:
        return f"CXX={chosen} is no program on the PATH: set it to a C++ compiler, or unset it"
    package = "Xcode's command line tools (xcode-select --install)"
    if platform.system() != "Darwin":
        package = "g++ or clang++ (apt install g++, dnf install gcc-c++, conda install gxx)"
    return f"no C++ compiler was found: install {package}, or set CXX"


@cache
def _describe_processor() -> str:
    """Describe the processor that "native" in `PROCESSOR_FLAGS` means on this machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(wanted)}))


def describe_compiler() -> list[str]:
    """Return words that identify the compiler and the processor; none where there is none."""
    program = find_compiler()
    if program is None or not hasattr(os, "getuid"):
        return []
    real = Path(program).resolve()
    status = real.stat()
    return [str(real), str(status.st_mtime_ns), str(status.st_size), _describe_processor()]


def find_or_build(source: str, optimise: str = "-O2") -> Path:
    """Return the compiled library of a source, from the cache folder or built now."""
    if not hasattr(os, "getuid"):
        raise Unsupported("platform", "kernels of own processes are not compiled on Windows")
    program = find_compiler()
    if program is None:
        raise Unsupported("compiler", _explain_missing_compiler())
    options = (*choose_options(program), optimise)
    identity = (source, *options, *describe_compiler())
    name = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:40]
    try:
        folder = make_private_folder(find_cache_folder())
    except OSError as problem:
        raise Unsupported(
            "cache", f"no private folder for kernels, {problem}. Set FLUCTUA_KERNELS"
        ) from None
    library = folder / f"{name}.so"
    if not is_intact(library):
        _build([program, *options], source, library)
    return library


def is_intact(library: Path) -> bool:
    """Whether a library is a file of this user alone whose content has not changed."""
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


def _build(compiler: list[str], source: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        text, built, noted = (Path(folder) / f"kernel{end}" for end in (".cpp", ".so", ".sha256"))
        text.write_text(source)
        command = [*compiler, str(text), "-o", str(built), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unsupported(
                "compiler", f"{Path(compiler[0]).name} failed: {done.stderr.strip()[:400]}"
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
    """`struct Run` of native/ensemble.hpp."""

    _fields_ = [
        ("count", ctypes.c_int64),
        ("steps", ctypes.c_int64),
        ("first", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in POINTERS),
        ("scale", ctypes.c_double),
        ("same", ctypes.c_double),
    ]


class CpuArrays:
    """Arrays for kernels on the CPU; `cuda.GpuArrays` has the same methods."""

    def __init__(self, library: ctypes.CDLL, real: np.dtype):
        self.library = library
        self.real = real

    def copy(self, values: Any) -> np.ndarray:
        """Copy values, for a pass to write to."""
        return np.array(values, self.real, order="C")

    def empty(self, *shape: int) -> np.ndarray:
        """Allocate an aligned array for a pass to write to."""
        size = math.prod(shape) * self.real.itemsize
        buffer = np.empty(size + ALIGNED, np.uint8)
        first = -buffer.ctypes.data % ALIGNED
        return buffer[first : first + size].view(self.real).reshape(shape)

    def make_flags(self) -> np.ndarray:
        """Allocate the flags that a pass sets. (1,)"""
        return np.zeros(1, np.int32)

    def read_flags(self, flags: np.ndarray) -> int:
        """Return the flags that passes have set."""
        return int(flags[0])

    def keep(self, name: str, source: Any, make: Callable[[Any], np.ndarray]) -> np.ndarray:
        """Return make(source); on a GPU it is kept for as long as `source` is the same."""
        return make(source)

    def to_host(self, array: np.ndarray) -> np.ndarray:
        """Return an array on the host."""
        return array

    def zeros(self, *shape: int) -> np.ndarray:
        """Allocate sums in double precision, which start at zero."""
        return np.zeros(shape)

    def total(self, array: np.ndarray) -> float:
        """Return the sum of an array, in double precision."""
        return float(array.sum(dtype=np.float64))

    def from_jax(self, array: Any) -> np.ndarray:
        """Copy an array of JAX, for a pass to write to."""
        return self.copy(array)

    def to_jax(self, array: np.ndarray) -> Any:
        """Return an array for JAX."""
        return array


class CpuLibrary(CpuArrays):
    """The passes of a loaded kernel. Arrays have the trajectory last."""

    def __init__(self, path: Path, lanes: int, real: np.dtype):
        super().__init__(ctypes.CDLL(str(path)), real)
        self.lanes = lanes
        self.block = lanes * real.itemsize

    def make_outputs(self, state: int, parameters: int, count: int) -> dict[str, np.ndarray]:
        """Allocate the outputs of a sweep for every trajectory."""
        return {
            "reward": self.empty(count),
            "last": self.empty(state, count),
            "rows": self.empty(count, parameters),
        }

    def set_gradient(
        self, places: dict[str, np.ndarray], before: np.ndarray
    ) -> dict[str, np.ndarray]:
        """Start the gradients from what comes before the first step, `before` (P, E)."""
        return places | {"gradient": before}

    def collect_outputs(
        self, places: dict[str, np.ndarray], flat: np.dtype
    ) -> tuple[Any, Any, Any]:
        """Return returns (E,), gradients (E, P) in the type of θ, and final states (E, M)."""
        gradients = places["rows"].astype(flat, copy=False)
        return (
            jax.device_put(places["reward"], may_alias=True),  # no pass writes to it any more
            jax.device_put(gradients, may_alias=True),
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
        """Run one pass, and return its sums over the ensemble in double precision.

        sums: shape of those sums; () for none. scale, same: as in `Run` of native/ensemble.hpp.
        """
        bounds = self._split_ensemble(count, sums)
        partial = np.zeros((len(bounds), *sums))
        function: Callable[..., Any] = self.library[name]

        template = _RunStruct(
            count=count, steps=steps, first=arrays.get("first", 0), scale=scale, same=same
        )
        for key in POINTERS:
            if arrays.get(key) is not None:
                assert arrays[key].flags.c_contiguous
                setattr(template, key, arrays[key].ctypes.data)
        start = partial.ctypes.data
        size = 8 * math.prod(sums)

        def run_piece(k: int) -> None:
            run = _RunStruct.from_buffer_copy(template)
            run.sums = start + k * size
            function(ctypes.byref(run), ctypes.c_int64(bounds[k][0]), ctypes.c_int64(bounds[k][1]))

        threads.run_on_cores(run_piece, range(len(bounds)))
        return partial.sum(axis=0)

    def _split_ensemble(self, count: int, sums: tuple[int, ...]) -> list[tuple[int, int]]:
        """Return (first, stop) of each piece of an ensemble.

        With sums, pieces depend on sizes alone, so that sums do not depend on the number of cores.
        """
        unit = self.lanes * (GROUP if sums else 1)
        pieces = 4 * threads.count_cores()
        if sums:
            pieces = max(2, min(PARTS, SUM_BYTES // max(1, 8 * math.prod(sums))))
        size = unit * -(-count // (unit * pieces))
        return [(first, min(first + size, count)) for first in range(0, count, size)]
