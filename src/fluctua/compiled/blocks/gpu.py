"""Sums over batches of trajectories on an NVIDIA GPU: a team of threads for each trajectory.

Arrays of a trajectory are in the shared memory of its block, which limits them to about 1,600
numbers in single precision; larger networks are left to JAX. Weights and sums are there too, if
they fit, and in the memory of the device otherwise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.compiled import ahead as precomputed
from fluctua.compiled import cuda, kernels, toolchain
from fluctua.compiled.blocks import kernel as array_kernels
from fluctua.compiled.blocks import program as programs
from fluctua.compiled.blocks.gpu_write import OUTER_ELEMENTS, write_gpu_program
from fluctua.compiled.blocks.nodes import LANE
from fluctua.compiled.blocks.sums import find_sum_places
from fluctua.compiled.scalar import Unsupported
from fluctua.compiled.trace import describe_shapes
from fluctua.core.estimation.batches import BatchSums
from fluctua.core.streamed import Call

THREADS = 256
"""Threads of a block, if several blocks share a multiprocessor."""

THREADS_ALONE = 512
"""Threads of a block that has a multiprocessor for itself."""

TRAJECTORIES = (128, 64, 32)
"""Trajectories of a block: the first for which its arrays fit."""

HALF_SHARED_BYTES = 113 * 2**10
"""Largest shared memory with which two blocks share a multiprocessor."""

BLOCK_BYTES = 226 * 2**10
"""Largest shared memory of a block."""

PADDING = 4
"""Numbers between rows of an array in shared memory."""

MAX_COPIED_NUMBERS = 6000
"""Largest count of numbers common to all trajectories of which a block keeps a copy."""

MAX_BLOCK_SUMS = 10_000
"""Largest number of sums that a block keeps in its shared memory."""

RESIDENT_THREADS = 768
"""Largest number of threads per multiprocessor for which the registers suffice."""

MAX_PIECES = 8192
"""Largest number of pieces of a pass."""

SUM_BYTES = 2**28
"""Largest memory for the sums of all pieces."""

COMPARING_THREADS = 128
"""Threads of a block that compares batches."""

PATH_BYTES = 2**30
"""Memory of all blocks for states that wait for returns."""

DRAWN = {0: 1, 1: 1, 2: 2, 3: 4}
"""Steps whose normals are drawn together, by generator."""


# ------------------------------------------------------------------------------------------ kernels


class BlockShape(NamedTuple):
    """Extent of a block. shared_bytes: its shared memory."""

    trajectories: int
    threads: int
    shared_bytes: int

    @property
    def resident(self) -> int:
        """Blocks that share a multiprocessor, by their memory and registers."""
        return max(1, min(BLOCK_BYTES // self.shared_bytes, RESIDENT_THREADS // self.threads))


class GpuArrayKernel(NamedTuple):
    """A kernel on arrays for the current device.

    kernel: what it computes. block: extent of its blocks. compare: kernel that compares batches.
    places: of the elements of each gradient among the sums; None if one needs several sums.
    """

    kernel: array_kernels.ArrayKernel
    block: BlockShape
    compare: Any
    places: list[np.ndarray] | None


_kernels: dict[Any, GpuArrayKernel] = {}


def find_gpu_kernel(call: Call, size: int) -> GpuArrayKernel:
    """Find or make the kernel of a call. size: trajectories per batch."""
    structure = (
        call.model,
        call.substrate.recipe,
        describe_shapes(call.theta),
        describe_shapes(call.substrate.x0),
        str(call.substrate.t.dtype),
        jnp.result_type(float),
        min(size, max(TRAJECTORIES)),
        cuda.is_available(),
    )
    if structure not in _kernels:
        _kernels[structure] = _make_kernel(call, size)
        if len(_kernels) > array_kernels.MAX_KERNELS:
            _kernels.pop(next(iter(_kernels)))
    return _kernels[structure]


def forget_kernels() -> None:
    """Forget all kernels, as after a change of the device."""
    _kernels.clear()


def _make_kernel(call: Call, size: int) -> GpuArrayKernel:
    recipe = call.substrate.recipe
    ensemble = jax.eval_shape(lambda: kernels.begin_ensemble(call, call.key, 1))
    program = programs.trace_program(
        call.model, recipe, call.theta, ensemble, call.substrate.t, least=OUTER_ELEMENTS
    )
    text = write_gpu_program(program)
    double = ensemble.x.dtype == np.float64
    real = np.dtype(np.float64 if double else np.float32)
    wiener = precomputed.encode_generator(recipe.wiener)
    sums = text.sizes["ELEMENTS"] + text.sizes["PRODUCTS"]
    normals = text.sizes["WIDTH"] if wiener else 0
    own = 2 * program.state + DRAWN[wiener] * normals + program.contexts + 4 + text.sizes["WORK"]
    copied = text.ahead.sizes["shared"] if text.ahead.sizes["shared"] <= MAX_COPIED_NUMBERS else 0
    in_block = sums <= MAX_BLOCK_SUMS
    common = copied + in_block * sums
    block = choose_block_shape(own, common, real.itemsize, size, large=not in_block)
    self_starting = recipe.fixed and call.model.objective.initial is None
    head = {
        "REAL": "double" if double else "float",
        "SINGLE": int(not double),
        "NOISE64": int(jnp.result_type(float) == np.float64),
        "MANY_FUNCTIONS": 1,
        "THREADS": block.threads,
        "TRAJECTORIES": block.trajectories,
        "RESIDENT": block.resident,
        "WIENER": wiener,
        "STREAM": precomputed.STREAM_WORDS[wiener],
        "DRAWN": DRAWN[wiener],
        "BEGINS": int(self_starting),
        "OWN": own,
        "SUMS": sums,
        "SUMS_IN_BLOCK": int(in_block),
        "NUMBERS": copied,
        "FIXED": "fixed" if copied else "numbers",
        **text.sizes,
        "NORMALS": normals,
    }
    source = "\n".join(
        [
            *(f"#define {name} {value}" for name, value in head.items()),
            toolchain.read_common(*toolchain.COMMON),
            toolchain.read_native("device.cuh", "noise.hpp", "batches.cuh"),
            text.functions,
            toolchain.read_native("batches_pass.cuh"),
        ]
    )
    module = cuda.compile_module(source)
    function = module.get_function("batch_pass")
    function.max_dynamic_shared_size_bytes = block.shared_bytes
    ahead = array_kernels.NumbersOfCall(program, text)
    kernel = array_kernels.ArrayKernel(
        program, text, source, function, real, self_starting, ahead, []
    )
    compare = module.get_function("compare_batches")
    return GpuArrayKernel(kernel, block, compare, _find_gradients(kernel))


def choose_block_shape(own: int, common: int, itemsize: int, size: int, large: bool) -> BlockShape:
    """Choose the extent of a block by its memory.

    own: numbers of a trajectory. common: numbers of the block. size: trajectories per batch.
    large: weights and sums are outside of the block, so that many trajectories should share them.
    Then, and with few trajectories, a block has a multiprocessor for itself.
    """
    alone = large or size <= min(TRAJECTORIES)
    limits = {THREADS: HALF_SHARED_BYTES, THREADS_ALONE: BLOCK_BYTES}
    for threads, limit in list(limits.items())[:: -1 if alone else 1]:
        for trajectories in TRAJECTORIES:
            used = itemsize * (own * (trajectories + PADDING) + common)
            if used <= limit and trajectories <= max(size, min(TRAJECTORIES)):
                return BlockShape(trajectories, threads, used)
    raise Unsupported("state", f"{own} numbers per trajectory, more than a GPU has memory for")


def _find_gradients(kernel: array_kernels.ArrayKernel) -> list[np.ndarray] | None:
    """Return where the elements of each gradient are among the sums; None if one needs several.

    Sums are numbered from 1 on. A negative number stands for the negative of a sum.
    """
    program = kernel.program
    width = kernel.text.sizes["ELEMENTS"] + kernel.text.sizes["PRODUCTS"]
    numbers = programs.read_sums(program, kernel.text, np.arange(1, width + 1)[None])
    places = []
    for output in program.sums.outputs:
        of = program.graph[output]
        if not of.depends & LANE:
            return None
        at = find_sum_places(program.graph, program.sums, output)
        if at is None:
            return None
        places.append(at.sign * numbers[at.root].ravel()[at.places])
    return places


# ------------------------------------------------------------------------------------------ running


def sum_batches_on_gpu(call: Call, size: int) -> BatchSums:
    """Run a call on a kernel on arrays of a GPU. size: trajectories per batch.

    A pilot fills tables of baselines that are missing.
    """
    gpu_kernel = find_gpu_kernel(call, size)
    kernel = gpu_kernel.kernel
    precomputed.check_generator(call.key)
    if call.needs_pilot:
        table = run_pilot(gpu_kernel, call)
        call = call._replace(tables=call.tables.fill_missing(table))
    cp = toolchain.require_cupy()
    loaded = array_kernels.load_call(kernel, call)
    width = kernel.text.count_sums(len(call.substrate.times.dt))
    batches = -(-call.count // size)
    piece = _choose_piece(gpu_kernel.block, size, batches, width * kernel.real.itemsize)
    per_batch = -(-size // piece)
    sums = cp.empty((batches * per_batch, width), kernel.real)
    extent = PieceExtent(call.count, call.first or 0, size, piece, batches * per_batch)
    results = _launch(gpu_kernel, loaded.arrays, extent, sums)
    done = loaded._replace(arrays=loaded.arrays | results)
    if gpu_kernel.places is None or array_kernels.has_ends(kernel, call):
        by_batch = sums.reshape(batches, per_batch, width).sum(axis=1, dtype=np.float64).get()
        return array_kernels.finish_call(kernel, call, done, by_batch, size)
    table = cp.empty((4, width))
    numbers = [np.int64(v) for v in (call.count, size, batches, per_batch)]
    grid = -(-width // COMPARING_THREADS)
    gpu_kernel.compare((grid,), (COMPARING_THREADS,), (*numbers, sums, table))
    moments = _order_moments(table.get(), np.concatenate(gpu_kernel.places))
    returns = done.arrays["reward"]
    last = done.arrays["last"].T
    finite = bool(np.isfinite(moments[0]).all() and np.isfinite(last).all())
    return BatchSums(returns, None, last, finite, moments)


def _order_moments(table: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return the moments of gradients (4, P) from those of sums. places: from `_find_gradients`."""
    moments = table[:, np.abs(places) - 1]
    moments[::2] *= np.sign(places)  # mean and skewness have the sign of the gradient
    return moments


def run_pilot(gpu_kernel: GpuArrayKernel, call: Call) -> np.ndarray:
    """Return the mean return-to-go (T+1,) of the independent run for a time-only baseline."""
    kernel = gpu_kernel.kernel
    count = max(plan.pilot for plan in call.plans)
    loaded = array_kernels.start_arrays(kernel, call, count, pilot=True)
    loaded.arrays["bar"] = np.zeros(0, kernel.real)
    piece = gpu_kernel.block.trajectories
    pieces = -(-count // piece)
    extent = PieceExtent(count, 0, pieces * piece, piece, pieces)
    results = _launch(gpu_kernel, loaded.arrays, extent, None)
    steps = len(call.substrate.times.dt)
    collected = results["path"].get().reshape(pieces, steps, piece)
    by_trajectory = np.swapaxes(collected, 0, 1).reshape(steps, -1)[:, :count]
    total = results["reward"].mean(dtype=np.float64)
    to_go = total - by_trajectory.mean(axis=1, dtype=np.float64)
    return np.append(total, to_go).astype(kernel.real)


class PieceExtent(NamedTuple):
    """Trajectories of a pass. first: number of the first. size: of a batch. piece: of a block."""

    number: int
    first: int
    size: int
    piece: int
    pieces: int


def _choose_piece(block: BlockShape, size: int, batches: int, sum_bytes: int) -> int:
    """Return how many trajectories of a batch a block sums up, by the memory of all sums."""
    piece = min(size, block.trajectories)
    max_pieces = min(MAX_PIECES, SUM_BYTES // max(1, sum_bytes))
    while batches * (size // piece) > max_pieces and piece < size:
        piece *= 2
    return piece


def _launch(
    gpu_kernel: GpuArrayKernel, arrays: dict[str, Any], extent: PieceExtent, sums: Any
) -> dict[str, Any]:
    """Run a pass, and return rewards, final states and path by name.

    sums: array to fill (pieces, sums of a piece); None for rewards alone.
    """
    kernel = gpu_kernel.kernel
    block = gpu_kernel.block
    cp = toolchain.require_cupy()
    on_device = {name: cp.asarray(value) for name, value in arrays.items()}
    steps = len(arrays["timed"])
    kept = 0 if sums is None else (steps + 1) * kernel.program.state
    slot = (kept + steps) * block.trajectories
    processors = int(cp.cuda.Device().attributes["MultiProcessorCount"])
    max_blocks = min(block.resident * processors, PATH_BYTES // (slot * kernel.real.itemsize))
    grid = extent.pieces if sums is None else max(1, min(extent.pieces, max_blocks))
    path = cp.empty(grid * slot, kernel.real)
    counts = (extent.number, steps, extent.first, extent.size, extent.piece, extent.pieces)
    numbers = [np.int64(v) for v in counts]
    names = ("shared", "timed", "x", "context", "stream", "bar", "reward", "last")
    pointers = [_find_pointer(on_device, name) for name in names]
    target = np.uint64(0) if sums is None else sums
    arguments = (*numbers, *pointers, path, target)
    kernel.library((grid,), (block.threads,), arguments, shared_mem=block.shared_bytes)
    results = {name: on_device[name].get() for name in ("reward", "last")}
    return results | {"path": path}


def _find_pointer(arrays: dict[str, Any], name: str) -> Any:
    array = arrays.get(name)
    return np.uint64(0) if array is None or array.size == 0 else array
