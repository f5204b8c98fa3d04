"""Sums over batches of trajectories on an NVIDIA GPU: a team of threads for each trajectory.

Arrays of a trajectory are in the shared memory of its block, which limits their size to networks
of some thousand weights. Larger ones are left to JAX, whose products are then large enough.
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
from fluctua.compiled.scalar import Unsupported
from fluctua.compiled.trace import describe_shapes
from fluctua.core.estimation.batches import BatchSums
from fluctua.core.streamed import Call

THREADS = 256
"""Threads of a block."""

TRAJECTORIES = (128, 64, 32)
"""Trajectories of a block: the first for which its arrays fit."""

ROOMY_BYTES = 113 * 2**10
"""Shared memory with which two blocks share a processor."""

BLOCK_BYTES = 226 * 2**10
"""Largest shared memory of a block."""

PADDING = 4
"""Numbers between rows of an array in shared memory."""

FIXED_NUMBERS = 6000
"""Numbers that are the same for all trajectories, up to which a block has a copy of its own."""

MAX_SUMS = 16_000
"""Largest number of sums of a block."""

MAX_PIECES = 8192
PATH_BYTES = 2**30
"""Memory of all blocks for states that wait for returns."""

DRAWN = {0: 1, 1: 1, 2: 2, 3: 4}
"""Steps whose normals are drawn together, by generator."""


# ------------------------------------------------------------------------------------------ kernels


class GpuArrayKernel(NamedTuple):
    """A kernel on arrays for the current device.

    kernel: what it computes. trajectories: of a block. shared_bytes: its shared memory.
    """

    kernel: array_kernels.ArrayKernel
    trajectories: int
    shared_bytes: int


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
        size < max(TRAJECTORIES),
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
    if sums > MAX_SUMS:
        raise Unsupported("theta", f"{sums} sums; a block of a GPU holds {MAX_SUMS}")
    normals = text.sizes["WIDTH"] if wiener else 0
    own = 2 * program.state + DRAWN[wiener] * normals + program.contexts + 4 + text.sizes["WORK"]
    copied = text.ahead.sizes["shared"] if text.ahead.sizes["shared"] <= FIXED_NUMBERS else 0
    trajectories, shared_bytes = _choose_block(own, sums + copied, real.itemsize, size)
    self_starting = recipe.fixed and call.model.objective.initial is None
    head = {
        "REAL": "double" if double else "float",
        "NOISE64": int(jnp.result_type(float) == np.float64),
        "MANY_FUNCTIONS": 1,
        "THREADS": THREADS,
        "TRAJECTORIES": trajectories,
        "WIENER": wiener,
        "STREAM": precomputed.STREAM_WORDS[wiener],
        "DRAWN": DRAWN[wiener],
        "BEGINS": int(self_starting),
        "OWN": own,
        "SUMS": sums,
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
    function = cuda.compile_module(source).get_function("batch_pass")
    function.max_dynamic_shared_size_bytes = shared_bytes
    ahead = array_kernels.NumbersOfCall(program, text)
    kernel = array_kernels.ArrayKernel(
        program, text, source, function, real, self_starting, ahead, []
    )
    return GpuArrayKernel(kernel, trajectories, shared_bytes)


class _BlockShape(NamedTuple):
    trajectories: int
    shared_bytes: int


def _choose_block(own: int, common: int, itemsize: int, size: int) -> _BlockShape:
    """Choose the trajectories of a block by its memory.

    own: numbers of a trajectory. common: numbers of the block. size: trajectories per batch.
    """
    shapes = [
        _BlockShape(n, itemsize * (own * (n + PADDING) + common))
        for n in TRAJECTORIES
        if n <= size or n == min(TRAJECTORIES)
    ]
    for limit in (ROOMY_BYTES, BLOCK_BYTES):
        for shape in shapes:
            if shape.shared_bytes <= limit:
                return shape
    raise Unsupported("state", f"{own} numbers per trajectory, more than a GPU has memory for")


# ------------------------------------------------------------------------------------------ running


def sum_batches_on_gpu(call: Call, size: int) -> BatchSums:
    """Run a call on a kernel on arrays of a GPU. size: trajectories per batch."""
    kernel, trajectories, shared_bytes = find_gpu_kernel(call, size)
    cp = toolchain.require_cupy()
    loaded = array_kernels.load_call(kernel, call)
    arrays = {name: cp.asarray(value) for name, value in loaded.arrays.items()}
    count = call.count
    steps = len(call.substrate.times.dt)
    batches = -(-count // size)
    piece = min(size, trajectories)
    while batches * (size // piece) > MAX_PIECES and piece < size:
        piece *= 2
    pieces = batches * -(-size // piece)
    itemsize = kernel.real.itemsize
    slot = ((steps + 1) * kernel.program.state + steps) * trajectories
    processors = int(cp.cuda.Device().attributes["MultiProcessorCount"])
    resident = max(1, min(BLOCK_BYTES // shared_bytes, 2048 // THREADS)) * processors
    grid = max(1, min(pieces, resident, PATH_BYTES // (slot * itemsize)))
    path = cp.empty(grid * slot, kernel.real)
    width = kernel.text.sizes["ELEMENTS"] + kernel.text.sizes["PRODUCTS"]
    sums = cp.empty((pieces, width), kernel.real)
    numbers = [np.int64(v) for v in (count, steps, call.first or 0, size, piece, pieces)]
    names = ("shared", "timed", "x", "context", "stream", "bar", "reward", "last")
    pointers = [_find_pointer(arrays, name) for name in names]
    kernel.library((grid,), (THREADS,), (*numbers, *pointers, path, sums), shared_mem=shared_bytes)
    rows = sums.reshape(batches, pieces // batches, width)
    by_batch = rows.sum(axis=1, dtype=np.float64).get()
    results = {name: arrays[name].get() for name in ("reward", "last")}
    done = loaded._replace(arrays=loaded.arrays | results)
    return array_kernels.finish_call(kernel, call, done, by_batch, size)


def _find_pointer(arrays: dict[str, Any], name: str) -> Any:
    array = arrays.get(name)
    return np.uint64(0) if array is None or array.size == 0 else array
