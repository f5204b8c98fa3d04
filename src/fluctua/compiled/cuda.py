"""Kernels for an NVIDIA GPU: one trajectory per thread, compiled through CuPy (NVRTC).

Each pass is a module of its own, compiled when it is first used; CuPy keeps modules on disk. The
kernel itself starts an ensemble that has one start state and no context. Where JAX is on the GPU
too, parameters and gradients never leave it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np

from fluctua.compiled import toolchain
from fluctua.compiled.ahead import STREAM_WORDS, concatenate_parameters, lay_out_ensemble
from fluctua.compiled.emit import (
    Layout,
    count_waves,
    write_definitions,
    write_functions,
)
from fluctua.compiled.scalar import Unsupported
from fluctua.compiled.trace import Program
from fluctua.core.arrays import Params, jit
from fluctua.core.simulate import Ensemble, Simulator

OPTIONS = ("-std=c++17", "--prec-div=false", "--prec-sqrt=false")
CONSTANT_BYTES = 60_000
"""Constant memory for the numbers that all trajectories share."""

REGISTERS = 200
"""Sums per trajectory that registers hold; more go to the shared memory of the block."""

BLOCK_BYTES = 200 * 2**10
"""Largest shared memory of a block for sums."""

MAX_INLINE_WAVES = 40
"""Sines and cosines per step up to which each is inlined, with its reduction of large arguments."""

MAX_STEADY = 32
"""Numbers of a step up to which registers keep them, if all steps have the same."""

MAX_UNROLLED = 400
"""Nodes of a program up to which several steps are written out one after the other."""

HELPERS = 3
"""Warps that draw normals for each warp that takes steps, if trajectories are few."""

MAX_THREADS = 512
"""Largest block, by the registers that the batch of a twin needs."""

SUM_BYTES = 2**29
"""Largest memory for sums over the ensemble, of all warps together."""

FOLD = 1024
"""Threads of a block that adds up numbers, as in native/fold.cuh."""

ADDING_THREADS = 256
"""Threads of a block that adds up the sums of all warps in one step."""

NORMAL_BYTES = 40 * 2**10
"""Shared memory of a block for normals of several steps."""

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


@cache
def is_available() -> bool:
    """Whether there is a GPU, and CuPy to use it."""
    try:
        toolchain.require_cupy()
    except (ImportError, RuntimeError):
        return False
    return True


class GpuSource(NamedTuple):
    """All that the text of a pass depends on; `write` returns that text.

    program: nodes that a step computes.
    layout: where the kernel finds its numbers.
    real: type of states and sums.
    noise64: normals are drawn in double precision.
    wiener: 0 for no noise, 1 for threefry, 2 for Philox, 3 for Philox of 7 rounds.
    weighted: the baseline depends on scores.
    self_starting: the kernel starts its trajectories itself, from one state and a key.
    twin: text of the functions of a twin; "" for none.
    ahead: text of `emit.write_numbers_ahead`; "" if the host computes those numbers.
    theta: type of θ.
    """

    program: Program
    layout: Layout
    real: np.dtype
    noise64: bool
    wiener: int
    weighted: bool = False
    self_starting: bool = False
    twin: str = ""
    ahead: str = ""
    theta: np.dtype = np.dtype(np.float32)

    def block_bytes(self, name: str) -> int:
        """Shared memory of a block for the sums of its trajectories, in bytes."""
        sums = 2 * len(self.program.names)
        return 32 * self.real.itemsize * sums if name == "sweep" and sums > REGISTERS else 0

    def block_threads(self, name: str, helpers: int) -> int:
        """Threads of a block. helpers: warps that draw normals for each that takes steps."""
        return 32 if self.block_bytes(name) else 32 * (1 + helpers) if helpers else 64

    def count_steps_drawn(self, threads: int) -> int:
        """Steps whose normals are drawn together. threads: that take steps, of a block."""
        normals = len(self.layout.normals)
        together = {0: 1, 1: 4, 2: 2}.get(normals, 1)
        if self.wiener == 3:  # one draw serves four steps, if the block has the memory
            return 4 if 4 * normals * threads * self.real.itemsize <= NORMAL_BYTES else 1
        return max(together, 2) if self.wiener == 2 else together

    def is_unrolled(self, batch: int, helpers: int) -> bool:
        """Whether the program of a step is written out for several steps, whose loads overlap."""
        short = len(self.program.graph) <= MAX_UNROLLED and self.program.event is None
        in_registers = batch > 1 and 0 < len(self.layout.normals) <= 4
        return short and not self.twin and bool(helpers or in_registers)

    def can_be_steady(self) -> bool:
        """Whether equal steps share all their numbers: time enters by its steps alone."""
        graph = self.program.graph
        inputs = {graph.ops[node] for node in graph.find_reachable(self.layout.timed)}
        return len(self.layout.timed) <= MAX_STEADY and not inputs & {"t", "table", "external"}

    def write(self, name: str, helpers: int = 0, threads: int = 0, *, steady: bool = False) -> str:
        """Return the complete text of a pass.

        name: "rewards_summed", "weights", "sweep", "twin_forward" or "twin_backward". helpers: as
        of `block_threads`. threads: of a block, in place of `block_threads`. steady: all steps have
        the same numbers.
        """
        block = threads or self.block_threads(name, helpers)
        batch = self.count_steps_drawn(32 if helpers else block)
        head = {
            "REAL": "double" if self.real == np.float64 else "float",
            "NOISE64": int(self.noise64),
            "WIENER": self.wiener,
            "STREAM": STREAM_WORDS[self.wiener],
            "WEIGHTED": int(self.weighted),
            "BEGINS": int(self.self_starting),
            "THREADS": block,
            "HELPERS": helpers,
            "IN_BLOCK": int(self.block_bytes(name) > 0),
            "PASS": name.upper(),
            "MANY_FUNCTIONS": int(count_waves(self.program) > MAX_INLINE_WAVES),
            "THETA": "double" if self.theta == np.float64 else "float",
            "BATCH": batch,
            "STEADY": int(steady),
            "UNROLLED": int(self.is_unrolled(batch, helpers)),
        }
        ahead = []
        if self.ahead:
            ahead = [toolchain.read_native("ahead.cuh").replace("NUMBERS_AHEAD", self.ahead)]
        after = "moments.cuh" if name == "sweep" else "tables.cuh"
        passes = [toolchain.read_native("sweep.cuh", "fold.cuh", after)]
        if self.twin:
            passes = [self.twin, toolchain.read_native("twin.cuh")]
        return "\n".join(
            [
                *(f"#define {key} {value}" for key, value in head.items()),
                toolchain.read_common(*toolchain.COMMON),
                toolchain.read_native("device.cuh"),
                write_definitions(self.program, self.layout).replace(
                    "constexpr int ", "__device__ constexpr int "
                ),
                toolchain.read_native("noise.hpp"),
                write_functions(self.program, self.layout, scores=not self.twin),
                *ahead,
                toolchain.read_native("ensemble.cuh"),
                *passes,
            ]
        )


class _Pass(NamedTuple):
    """A compiled pass.

    module: of CuPy.
    run: kernel of the pass.
    ahead: kernel that computes shared numbers; None if the host does.
    shared: address of the numbers that trajectories share.
    further: other kernels of the module that were used.
    """

    module: Any
    run: Any
    ahead: Any
    shared: np.uint64
    further: dict[str, Any]

    def find(self, name: str) -> Any:
        """Return a kernel of the module; CuPy takes some time for each question."""
        if name not in self.further:
            self.further[name] = self.module.get_function(name)
        return self.further[name]


class PassOptions(NamedTuple):
    """Options of a pass: shape of its sums, and numbers as in `Run` of native/ensemble.cuh."""

    sums: tuple[int, ...] = ()
    scale: float = 1.0
    same: float = 0.0


class LaunchedPass(NamedTuple):
    """A pass that was launched. sums: of every warp (T, warps, ...), on the device, or None."""

    compiled: _Pass
    sums: Any


@lru_cache(maxsize=64)
def compile_module(source: str) -> Any:
    """Compile a module for the current device, once per text."""
    import cupy as cp

    try:
        return cp.RawModule(code=source, options=OPTIONS)
    except Exception as problem:  # CuPy's own, which it does not export
        if type(problem).__name__ != "CompileException":
            raise
        raise Unsupported("compiler", f"NVRTC failed: {str(problem).strip()[:400]}") from None


def _write_shared(cp: Any, module: Any, numbers: np.ndarray) -> None:
    """Write the numbers that trajectories share into the constant memory of a module."""
    data = np.frombuffer(numbers.tobytes(), np.uint8)
    if data.size:
        cp.ndarray(data.shape, np.uint8, module.get_global("c_shared")).set(data)


class GpuArrays:
    """Arrays on the current device, and compiled passes over them."""

    def __init__(self, source: GpuSource):
        self.cp = toolchain.require_cupy()
        self.source = source
        self.real = source.real
        shared = len(source.layout.shared) * self.real.itemsize
        if shared > CONSTANT_BYTES:
            raise Unsupported(
                "theta",
                f"{shared} bytes of numbers that trajectories share; at most {CONSTANT_BYTES} are "
                "supported",
            )
        self._passes: dict[str, _Pass] = {}
        self._sources: dict[tuple[str, int], str] = {}
        self._kept: dict[str, tuple[Any, Any]] = {}
        self._steady: tuple[Any, bool] = (None, False)

    def copy(self, values: Any) -> Any:
        """Copy values to the device, for a pass to write to."""
        return self.cp.asarray(np.ascontiguousarray(values, self.real))

    def copy_words(self, words: np.ndarray) -> Any:
        """Copy words of 32 bits to the device."""
        return self.cp.asarray(words)

    def empty(self, *shape: int) -> Any:
        """Allocate an array for a pass to write to."""
        return self.cp.empty(shape, self.real)

    def make_flags(self) -> Any:
        """Allocate the flags that a pass sets. (1,)"""
        return self.cp.zeros(1, np.int32)

    def read_flags(self, flags: Any) -> int:
        """Return the flags that passes have set."""
        return int(flags.get()[0])

    def to_host(self, array: Any) -> np.ndarray:
        """Copy an array to the host."""
        return array.get()

    def zeros(self, *shape: int) -> Any:
        """Allocate sums in double precision, which start at zero."""
        return self.cp.zeros(shape)

    def total(self, array: Any) -> float:
        """Return the sum of an array, in double precision."""
        return float(array.sum(dtype=np.float64))

    def keep(self, name: str, source: Any, make: Callable[[Any], np.ndarray]) -> Any:
        """Return make(source) on the device; made again only for another `source`."""
        if name not in self._kept or self._kept[name][0] is not source:
            self._kept[name] = (source, self.cp.asarray(make(source)))
        return self._kept[name][1]

    def from_jax(self, array: Any) -> Any:
        """Return an array of JAX on the device, without a copy if JAX is there too."""
        if jax.default_backend() == "gpu":
            return self.cp.from_dlpack(array)
        return self.cp.asarray(np.asarray(array))

    def to_jax(self, array: Any) -> Any:
        """Return an array of the device for JAX, without a copy if JAX is there too."""
        return jax.dlpack.from_dlpack(array) if jax.default_backend() == "gpu" else array.get()

    def load_ensemble(self, wiener: int, ensemble: Ensemble) -> dict[str, Any]:
        """Return the arrays of trajectories that JAX has started."""
        return {
            name: self.from_jax(array)
            for name, array in lay_out_ensemble(wiener, self.real, ensemble).items()
        }

    def load_times(self, substrate: Simulator) -> Any:
        """Return t (T+1,), then Δt (T,), in double precision, as one array."""

        def concatenate(times):
            return np.concatenate([np.asarray(v, np.float64) for v in times])

        return self.keep("times", substrate.times, concatenate)

    def is_steady(self, substrate: Simulator) -> bool:
        """Whether all steps of a simulator have the same numbers."""
        if self._steady[0] is not substrate.times:
            dt = np.asarray(substrate.times.dt)
            steady = self.source.can_be_steady() and bool((dt == dt[0]).all())
            self._steady = (substrate.times, steady)
        return self._steady[1]

    def load_parameters(self, *thetas: Params) -> Any:
        """Return parameters as one vector."""
        return self.from_jax(concatenate_parameters(*thetas))

    def compile_pass(self, kernel: str, text: str, block_bytes: int = 0) -> _Pass:
        """Compile and load a pass, once per text. block_bytes: shared memory of its blocks."""
        if text not in self._passes:
            module = compile_module(text)
            function = module.get_function(kernel)
            if block_bytes:
                function.max_dynamic_shared_size_bytes = block_bytes
            ahead = module.get_function("numbers_ahead") if self.source.ahead else None
            self._passes[text] = _Pass(
                module, function, ahead, np.uint64(module.get_global("c_shared").ptr), {}
            )
        return self._passes[text]

    def prepare(self, compiled: _Pass, arrays: dict[str, Any], steps: int) -> dict[str, Any]:
        """Return the arrays of a pass on the device, with its shared numbers in constant memory."""
        if compiled.ahead is None:
            _write_shared(self.cp, compiled.module, arrays["shared"])
        else:
            rows = 1 if arrays.get("steady") else steps
            timed = self.empty(rows, len(self.source.layout.timed))
            target = timed if timed.size else np.uint64(0)
            numbers = (
                np.int64(steps),
                np.int64(rows),
                arrays["theta"],
                arrays["times"],
                compiled.shared,
                target,
                arrays["flags"],
            )
            compiled.ahead((-(-rows // 128),), (128,), numbers)
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
    """The passes of a twin on the current device."""

    def run(
        self, name: str, arrays: dict[str, Any], *, count: int, steps: int, segment: int
    ) -> None:
        """Run one pass of a twin. segment: a multiple of 4."""
        blocks = -(-count // 64)
        threads = 64
        source = self.source
        if name == "twin_backward":
            largest = int(np.diff(arrays["edges"]).max())
            blocks = len(arrays["edges"]) - 1
            threads = -(-largest // 32) * 32
            if threads > MAX_THREADS:
                raise Unsupported(
                    "twin", f"batches of {largest} trajectories; a GPU takes up to {MAX_THREADS}"
                )
            width = 2 * source.program.state + len(source.layout.normals)
            arrays = arrays | {"path": self.empty(segment, width, count)}
        if (name, threads) not in self._sources:
            self._sources[name, threads] = source.write(name, threads=threads)
        compiled = self.compile_pass("twin_pass", self._sources[name, threads])
        ready = self.prepare(compiled, arrays, steps)
        numbers = [np.int64(v) for v in (count, steps, segment)]
        compiled.run((blocks,), (threads,), (*numbers, *_pointers(TWIN_POINTERS, ready)))


class GpuLibrary(GpuArrays):
    """The passes of a kernel on the current device. Arrays have the trajectory last."""

    def __init__(self, source: GpuSource):
        super().__init__(source)
        if source.block_bytes("sweep") > BLOCK_BYTES:
            raise Unsupported(
                "theta", f"{len(source.program.names)} parameters, whose sums a GPU cannot hold"
            )
        # kept: the query is slow
        self._processors = int(self.cp.cuda.Device().attributes["MultiProcessorCount"])

    def make_outputs(self, state: int, parameters: int, count: int) -> dict[str, Any]:
        """Allocate the outputs of a sweep for every trajectory, in one array."""
        out = self.empty(1 + state + parameters, count)
        return {
            "out": out,
            "reward": out[0],
            "last": out[1 : 1 + state],
            "gradient": out[1 + state :],
        }

    def set_gradient(self, places: dict[str, Any], before: Any) -> dict[str, Any]:
        """Start the gradients from what comes before the first step, `before` (P, E)."""
        places["gradient"][...] = before
        return places

    def collect_outputs(self, places: dict[str, Any], flat: np.dtype) -> tuple[Any, Any, Any]:
        """Return returns (E,), gradients (E, P) in the type of θ, and final states (E, M)."""
        return _split_outputs(self.to_jax(places["out"]), len(places["last"]), flat)

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

        sums: shape of those sums; () for none. scale, same: as in `Run` of native/ensemble.cuh.
        """
        options = PassOptions(sums, scale, same)
        totals = self.launch(name, arrays, count, steps, options).sums
        return np.empty(0) if totals is None else totals.sum(axis=1).get()

    def launch(
        self, name: str, arrays: dict[str, Any], count: int, steps: int, options: PassOptions
    ) -> LaunchedPass:
        """Launch one pass, and do not wait for it."""
        block_bytes = self.source.block_bytes(name)
        helpers = 0 if block_bytes else self._count_helpers(count)
        block = self.source.block_threads(name, helpers)
        steady = bool(arrays.get("steady"))
        code = (f"{name}, steady" if steady else name, helpers)
        if code not in self._sources:
            self._sources[code] = self.source.write(name, helpers, steady=steady)
        compiled = self.compile_pass("one_pass", self._sources[code], block_bytes)
        together = block // 32 if helpers == 0 else 1
        warps = -(-self._count_warps(count, options.sums) // together) * together
        totals = None
        if options.sums:
            totals = self.cp.zeros((options.sums[0], warps, *options.sums[1:]))
        ready = self.prepare(compiled, arrays, steps) | {"sums": totals}
        numbers = (np.int64(count), np.int64(steps), np.int64(arrays.get("first", 0)))
        last = (self.real.type(options.scale), self.real.type(options.same))
        pointers = _pointers(POINTERS, ready)
        near = _pointers(("near",), ready)
        arguments = (*numbers, *pointers, *last, *near)
        compiled.run((warps // together,), (block,), arguments, shared_mem=block_bytes)
        return LaunchedPass(compiled, totals)

    def average_rewards(self, launched: LaunchedPass, reward: Any) -> Any:
        """Return the mean of λ̂ₙ at every time (T+1,), on the device. reward: R (E,)."""
        sums = self._add_warps(launched)
        steps = len(sums)
        table = self.empty(steps + 1)
        numbers = (np.int64(len(reward)), np.int64(steps), sums, reward, table)
        launched.compiled.find("tabulate_rewards")((1,), (FOLD,), numbers)
        return table

    def average_weights(self, launched: LaunchedPass, flags: Any) -> dict[str, Any]:
        """Return the weighted means of `optimal` and 1/ΣU² (T, S), on the device."""
        sums = self._add_warps(launched)
        tables = {"bar": self.empty(*sums.shape[:-1]), "inverse": self.empty(*sums.shape[:-1])}
        size = sums.size // 2
        numbers = (np.int64(size), sums, *tables.values(), flags)
        launched.compiled.find("tabulate_weights")((-(-size // FOLD),), (FOLD,), numbers)
        return tables

    def _add_warps(self, launched: LaunchedPass) -> Any:
        steps, warps, *shape = launched.sums.shape
        sums = self.cp.empty((steps, *shape))
        numbers = (np.int64(warps), np.int64(math.prod(shape)), launched.sums, sums)
        launched.compiled.find("add_warps")((steps,), (ADDING_THREADS,), numbers)
        return sums

    def take_moments(self, launched: LaunchedPass, values: Any) -> Any:
        """Return five moments of every row of values (rows, E), on the device. (5, rows)

        Mean, unbiased deviation, skewness, excess kurtosis and mean square.
        """
        rows, count = values.shape
        table = self.empty(5, rows)
        launched.compiled.find("take_moments")((rows,), (FOLD,), (np.int64(count), values, table))
        return table

    def _count_warps(self, count: int, sums: tuple[int, ...]) -> int:
        """Return the number of warps: one per 32 trajectories, fewer if sums need the memory."""
        wanted = -(-count // 32)
        if sums:
            wanted = min(
                wanted, 16 * self._processors, max(1, SUM_BYTES // (8 * int(np.prod(sums))))
            )
        return wanted

    def _count_helpers(self, count: int) -> int:
        """Return the number of helper warps: some if the GPU would be idle otherwise."""
        is_idle = -(-count // 32) <= 2 * self._processors
        return (
            HELPERS
            if is_idle and 0 < len(self.source.layout.normals) * self.real.itemsize <= 32
            else 0
        )


@partial(jit, static_argnums=(1, 2))
def _split_outputs(out: Any, state: int, flat: np.dtype) -> tuple[Any, Any, Any]:
    return out[0], out[1 + state :].T.astype(flat), out[1 : 1 + state].T
