"""Kernels for an NVIDIA GPU: one trajectory a thread, compiled at run time through CuPy (NVRTC).

Each pass is a module of its own, compiled when it is first asked for; CuPy keeps them on disk. An
ensemble whose start is one state, without a context, is begun by the kernel itself. Where JAX is on
the device too, parameters and gradients never leave it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np

from fluctua.compiled.ahead import joined, rows
from fluctua.compiled.emit import (
    COMMON,
    Layout,
    common,
    definitions,
    functions,
    native,
    waves,
)
from fluctua.compiled.scalar import Unsupported
from fluctua.compiled.trace import Program
from fluctua.core.arrays import Params, jit
from fluctua.core.simulate import Ensemble, Simulator

OPTIONS = ("-std=c++17", "--prec-div=false", "--prec-sqrt=false")
CONSTANT_BYTES = 60_000
"""Of constant memory, for the numbers that all trajectories share."""

REGISTERS = 200
"""Sums of a trajectory that registers hold; more of them go to the memory of the block."""

BLOCK_BYTES = 200 * 2**10
"""Of that memory, at most."""

MOST_INLINE = 40
"""Sines and cosines of a step that are written out where they stand, with what large arguments
need.
"""

HELPERS = 3
"""Warps that draw normals for one that takes steps, where there are few trajectories."""

MOST_THREADS = 512
"""Of a block, with the registers that the batch of a twin needs."""

SUM_BYTES = 2**29
"""Sums over the ensemble that warps hold together, at most."""

POINTERS = (
    "timed",
    "x",
    "context",
    "stream",
    "guess",
    "reward",
    "last",
    "gradient",
    "score",
    "bar",
    "inverse",
    "sums",
    "flags",
)


def require_cupy() -> Any:
    """CuPy with a working device, or an error that says what is missing."""
    try:
        import cupy as cp
    except ImportError:
        raise ImportError(
            "backend='cuda' needs CuPy: pip install 'fluctua[cuda13]' for CUDA 13, "
            "'fluctua[cuda12]' for CUDA 12 "
            "(`nvidia-smi` shows which the driver has). backend='cpu' runs everywhere."
        ) from None
    try:
        if cp.cuda.runtime.getDeviceCount() > 0:
            return cp
    except cp.cuda.runtime.CUDARuntimeError:
        pass
    raise RuntimeError("backend='cuda' found no NVIDIA GPU here. backend='cpu' runs everywhere.")


@cache
def available() -> bool:
    """Whether there is a GPU, and CuPy to use it."""
    try:
        require_cupy()
    except (ImportError, RuntimeError):
        return False
    return True


class Form(NamedTuple):
    """What the text of a pass depends on.

    wiener: 0 for none, 1 for threefry, 2 for Philox. weighted: the baseline looks at scores.
    begins: trajectories, from one state and a key. twin: the functions of a twin. ahead: those of
    `numbers_ahead`, of θ in the type `theta`.
    """

    program: Program
    layout: Layout
    real: np.dtype
    noise64: bool
    wiener: int
    weighted: bool = False
    begins: bool = False
    twin: str = ""
    ahead: str = ""
    theta: np.dtype = np.dtype(np.float32)

    def in_block(self, name: str) -> int:
        """Bytes of the block's memory for the sums of its trajectories."""
        sums = 2 * len(self.program.names)
        return 32 * self.real.itemsize * sums if name == "sweep" and sums > REGISTERS else 0

    def threads(self, name: str, helpers: int) -> int:
        """Of a block."""
        return 32 if self.in_block(name) else 32 * (1 + helpers) if helpers else 64

    def source(self, name: str, helpers: int = 0, threads: int = 0) -> str:
        """The whole text of a pass: "rewards_summed", "weights", "sweep"; "twin_forward",
        "twin_backward".

        helpers: warps that draw normals for one that takes steps. threads: of a block, if not the
        usual number.
        """
        together = {0: 1, 1: 4, 2: 2}.get(len(self.layout.normals), 1)
        head = {
            "REAL": "double" if self.real == np.float64 else "float",
            "NOISE64": int(self.noise64),
            "WIENER": self.wiener,
            "STREAM": {0: 0, 1: 2, 2: 3}[self.wiener],
            "WEIGHTED": int(self.weighted),
            "BEGINS": int(self.begins),
            "THREADS": threads or self.threads(name, helpers),
            "HELPERS": helpers,
            "IN_BLOCK": int(self.in_block(name) > 0),
            "PASS": name.upper(),
            "MANY_FUNCTIONS": int(waves(self.program) > MOST_INLINE),
            "THETA": "double" if self.theta == np.float64 else "float",
            # one draw of Philox serves two steps
            "BATCH": max(together, 2) if self.wiener == 2 else together,
        }
        return "\n".join(
            [
                *(f"#define {key} {value}" for key, value in head.items()),
                common(*COMMON),
                native("device.cuh"),
                definitions(self.program, self.layout).replace(
                    "constexpr int ", "__device__ constexpr int "
                ),
                native("noise.hpp"),
                functions(self.program, self.layout, scores=not self.twin),
                *([native("ahead.cuh").replace("NUMBERS_AHEAD", self.ahead)] if self.ahead else []),
                native("ensemble.cuh"),
                *([self.twin, native("twin.cuh")] if self.twin else [native("sweep.cuh")]),
            ]
        )


class _Pass(NamedTuple):
    """A compiled pass: its module, its kernel, the one of `numbers_ahead`, the address of what
    trajectories share.
    """

    module: Any
    run: Any
    ahead: Any
    shared: np.uint64


@lru_cache(maxsize=64)
def _module(source: str) -> Any:
    import cupy as cp

    try:
        return cp.RawModule(code=source, options=OPTIONS)
    except Exception as problem:  # CuPy's own, which it does not export
        if type(problem).__name__ != "CompileException":
            raise
        raise Unsupported("compiler", f"NVRTC failed: {str(problem).strip()[:400]}") from None


def _shared(cp: Any, module: Any, numbers: np.ndarray) -> None:
    """Write the numbers that trajectories share into constant memory."""
    data = np.frombuffer(numbers.tobytes(), np.uint8)
    if data.size:
        cp.ndarray(data.shape, np.uint8, module.get_global("c_shared")).set(data)


class GpuArrays:
    """Arrays on the current device, and compiled passes over them."""

    def __init__(self, form: Form):
        self.cp = require_cupy()
        self.form = form
        self.real = form.real
        shared = len(form.layout.shared) * self.real.itemsize
        if shared > CONSTANT_BYTES:
            raise Unsupported(
                "theta",
                f"{shared} bytes of numbers that trajectories share; {CONSTANT_BYTES} are served",
            )
        self._passes: dict[str, _Pass] = {}
        self._sources: dict[tuple[str, int], str] = {}
        self._kept: dict[str, tuple[Any, Any]] = {}

    def own(self, values: Any) -> Any:
        """A copy on the device that a pass may write to."""
        return self.cp.asarray(np.ascontiguousarray(values, self.real))

    def empty(self, *shape: int) -> Any:
        """Room for a pass to write to."""
        return self.cp.empty(shape, self.real)

    def flags(self) -> Any:
        """What a pass may set. (1,)"""
        return self.cp.zeros(1, np.int32)

    def read(self, flags: Any) -> int:
        """What passes have set."""
        return int(flags.get()[0])

    def host(self, array: Any) -> np.ndarray:
        """The numbers of an array."""
        return array.get()

    def zeros(self, *shape: int) -> Any:
        """Room for sums in double precision."""
        return self.cp.zeros(shape)

    def total(self, array: Any) -> float:
        """The sum, in double precision."""
        return float(array.sum(dtype=np.float64))

    def kept(self, name: str, source: Any, make: Callable[[Any], np.ndarray]) -> Any:
        """An array of the host that was made of an object and is the same as long as that is."""
        if name not in self._kept or self._kept[name][0] is not source:
            self._kept[name] = (source, self.cp.asarray(make(source)))
        return self._kept[name][1]

    def from_jax(self, array: Any) -> Any:
        """An array of JAX: as it is, where JAX is on the device too."""
        return (
            self.cp.from_dlpack(array)
            if jax.default_backend() == "gpu"
            else self.cp.asarray(np.asarray(array))
        )

    def to_jax(self, array: Any) -> Any:
        """An array as JAX takes it."""
        return jax.dlpack.from_dlpack(array) if jax.default_backend() == "gpu" else array.get()

    def ensemble(self, wiener: int, ensemble: Ensemble) -> dict[str, Any]:
        """Trajectories that JAX has begun."""
        return {
            name: self.from_jax(array) for name, array in rows(wiener, self.real, ensemble).items()
        }

    def times(self, substrate: Simulator) -> Any:
        """t (T+1,), then Δt (T,), in double precision."""

        def both(times):
            return np.concatenate([np.asarray(v, np.float64) for v in times])

        return self.kept("times", substrate.times, both)

    def parameters(self, *thetas: Params) -> Any:
        """One vector."""
        return self.from_jax(joined(*thetas))

    def compiled(self, kernel: str, source: str, in_block: int = 0) -> _Pass:
        """A pass, compiled and loaded. in_block: bytes of the block's memory that it takes."""
        if source not in self._passes:
            module = _module(source)
            function = module.get_function(kernel)
            if in_block:
                function.max_dynamic_shared_size_bytes = in_block
            ahead = module.get_function("numbers_ahead") if self.form.ahead else None
            self._passes[source] = _Pass(
                module, function, ahead, np.uint64(module.get_global("c_shared").ptr)
            )
        return self._passes[source]

    def prepared(self, compiled: _Pass, arrays: dict[str, Any], steps: int) -> dict[str, Any]:
        """The arrays of a pass on the device, after the numbers that trajectories share
        went to constant memory.
        """
        if compiled.ahead is None:
            _shared(self.cp, compiled.module, arrays["shared"])
        else:
            timed = self.empty(steps, len(self.form.layout.timed))
            to = timed if timed.size else np.uint64(0)
            numbers = (
                np.int64(steps),
                arrays["theta"],
                arrays["times"],
                compiled.shared,
                to,
                arrays["flags"],
            )
            compiled.ahead((-(-steps // 128),), (128,), numbers)
            arrays = arrays | {"timed": timed}
        return {
            key: self.cp.asarray(v) if type(v) is np.ndarray else v for key, v in arrays.items()
        }


def _pointers(names: tuple[str, ...], arrays: dict[str, Any]) -> list[Any]:
    return [
        np.uint64(0) if arrays.get(name) is None or arrays[name].size == 0 else arrays[name]
        for name in names
    ]


TWIN_POINTERS = (
    "timed",
    "x",
    "context",
    "stream",
    "kept",
    "path",
    "last",
    "slope",
    "value",
    "residual",
    "reward",
    "direct",
    "correction",
    "bar",
    "edges",
    "sums",
    "flags",
)


class GpuTwinLibrary(GpuArrays):
    """The passes of a twin."""

    def run(
        self, name: str, arrays: dict[str, Any], *, count: int, steps: int, segment: int
    ) -> None:
        """One pass. segment: a multiple of 4."""
        blocks = -(-count // 64)
        threads = 64
        form = self.form
        if name == "twin_backward":
            most = int(np.diff(arrays["edges"]).max())
            blocks = len(arrays["edges"]) - 1
            threads = -(-most // 32) * 32
            if threads > MOST_THREADS:
                raise Unsupported(
                    "twin", f"batches of {most} trajectories; a GPU takes up to {MOST_THREADS}"
                )
            wide = 2 * form.program.state + len(form.layout.normals)
            arrays = arrays | {"path": self.empty(segment, wide, count)}
        if (name, threads) not in self._sources:
            self._sources[name, threads] = form.source(name, threads=threads)
        compiled = self.compiled("twin_pass", self._sources[name, threads])
        ready = self.prepared(compiled, arrays, steps)
        numbers = [np.int64(v) for v in (count, steps, segment)]
        compiled.run((blocks,), (threads,), (*numbers, *_pointers(TWIN_POINTERS, ready)))


class GpuLibrary(GpuArrays):
    """A kernel on the current device: passes over an ensemble, whose arrays have the trajectory
    last.
    """

    def __init__(self, form: Form):
        super().__init__(form)
        if form.in_block("sweep") > BLOCK_BYTES:
            raise Unsupported(
                "theta", f"{len(form.program.names)} parameters, whose sums a GPU cannot hold"
            )
        self._processors = int(
            self.cp.cuda.Device().attributes["MultiProcessorCount"]
        )  # slow to ask for

    def places(self, state: int, parameters: int, count: int) -> dict[str, Any]:
        """Room for what a sweep leaves of every trajectory, in one piece."""
        out = self.empty(1 + state + parameters, count)
        return {
            "out": out,
            "reward": out[0],
            "last": out[1 : 1 + state],
            "gradient": out[1 + state :],
        }

    def with_gradient(self, places: dict[str, Any], before: Any) -> dict[str, Any]:
        """With the part of the gradients that comes before the first step. (P, E)"""
        places["gradient"][...] = before
        return places

    def rows(self, places: dict[str, Any], flat: np.dtype) -> tuple[Any, Any, Any]:
        """Returns (E,), gradients (E, P) in the type of θ, final states (E, M)."""
        return _rows(self.to_jax(places["out"]), len(places["last"]), flat)

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

        scale, same: as in `Run` of native/ensemble.cuh.
        """
        in_block = self.form.in_block(name)
        helpers = 0 if in_block else self._helpers(count)
        block = self.form.threads(name, helpers)
        if (name, helpers) not in self._sources:
            self._sources[name, helpers] = self.form.source(name, helpers)
        compiled = self.compiled("one_pass", self._sources[name, helpers], in_block)
        together = block // 32 if helpers == 0 else 1
        warps = -(-self._warps(count, sums) // together) * together
        totals = self.cp.zeros((warps, *sums)) if sums else None
        ready = self.prepared(compiled, arrays, steps) | {"sums": totals}
        numbers = (np.int64(count), np.int64(steps), np.int64(arrays.get("first", 0)))
        last = (self.real.type(scale), self.real.type(same))
        arguments = (*numbers, *_pointers(POINTERS, ready), *last)
        compiled.run((warps // together,), (block,), arguments, shared_mem=in_block)
        return np.empty(0) if totals is None else totals.sum(axis=0).get()

    def _warps(self, count: int, sums: tuple[int, ...]) -> int:
        """Groups of 32 trajectories that run side by side: as many as there are, or as many
        as sums leave room for.
        """
        wanted = -(-count // 32)
        if sums:
            wanted = min(
                wanted, 16 * self._processors, max(1, SUM_BYTES // (8 * int(np.prod(sums))))
            )
        return wanted

    def _helpers(self, count: int) -> int:
        """Warps that do nothing else than draw normals, where the GPU would be idle otherwise."""
        few = -(-count // 32) <= 2 * self._processors
        return (
            HELPERS if few and 0 < len(self.form.layout.normals) * self.real.itemsize <= 32 else 0
        )


@partial(jit, static_argnums=(1, 2))
def _rows(out: Any, state: int, flat: np.dtype) -> tuple[Any, Any, Any]:
    return out[0], out[1 + state :].T.astype(flat), out[1 : 1 + state].T
