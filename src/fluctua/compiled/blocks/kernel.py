"""Sums over batches of trajectories by a kernel on arrays."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.compiled import ahead as precomputed
from fluctua.compiled import cpu, kernels, toolchain
from fluctua.compiled.blocks import ends
from fluctua.compiled.blocks import program as programs
from fluctua.compiled.blocks.numbers import NumbersOfCall
from fluctua.compiled.blocks.sums import finish_sums, spread_sums
from fluctua.compiled.passes import compute_noise_words
from fluctua.compiled.trace import describe_shapes
from fluctua.core.estimation.batches import BatchSums
from fluctua.core.host import threads
from fluctua.core.streamed import Call, SweepResult, split_key

__all__ = ["ArrayKernel", "NumbersOfCall", "find_array_kernel", "finish_call", "load_call"]

BLOCK = 64
"""Trajectories that advance together, at most."""

SMALLEST_BLOCK = 16
"""At least so many: the lanes of a vector."""

MAX_LANES = 16
"""Trajectories per vector, at most."""

STORED_BYTES = 2**27
"""States and other numbers of a block that wait for its returns, at most; else it runs twice."""

SPARED_BYTES = 2**25
"""Memory of a thread that is kept for the next call, at most."""

MAX_KERNELS = 64


class ArrayKernel(NamedTuple):
    """A compiled kernel on arrays.

    program, text: what it computes. source: generated text. library: loaded, or None.
    real: type of states. self_starting: it starts its trajectories itself.
    ahead: computes numbers that are the same for all trajectories. spaces: memory for later calls.
    """

    program: programs.ArrayProgram
    text: programs.ArrayText
    source: str
    library: Any
    real: np.dtype
    self_starting: bool
    ahead: NumbersOfCall
    spaces: list[np.ndarray]


class _BatchRun(ctypes.Structure):
    """`struct BatchRun` of native/batches.hpp, which begins with a `Run`."""

    _fields_ = [
        ("count", ctypes.c_int64),
        ("steps", ctypes.c_int64),
        ("first", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in cpu.POINTERS),
        ("scale", ctypes.c_double),
        ("same", ctypes.c_double),
        ("size", ctypes.c_int64),
        ("stored", ctypes.c_int64),
        ("totals", ctypes.c_void_p),
    ]


_kernels: dict[Any, ArrayKernel] = {}


def choose_block(size: int) -> int:
    """Trajectories that advance together. size: trajectories per batch."""
    return max(SMALLEST_BLOCK, min(BLOCK, size))


def find_array_kernel(call: Call, size: int) -> ArrayKernel:
    """Find or make the kernel of a call. size: trajectories per batch."""
    block = choose_block(size)
    structure = (
        call.model,
        call.substrate.recipe,
        describe_shapes(call.theta),
        describe_shapes(call.substrate.x0),
        str(call.substrate.t.dtype),
        jnp.result_type(float),
        block,
    )
    if structure not in _kernels:
        kernel = write_array_kernel(call, size)
        library = ctypes.CDLL(str(cpu.find_or_build(kernel.source, kernels.OPTIMISE)))
        library.workspace_bytes.restype = ctypes.c_int64
        _kernels[structure] = kernel._replace(library=library)
        if len(_kernels) > MAX_KERNELS:
            _kernels.pop(next(iter(_kernels)))
    return _kernels[structure]


def write_array_kernel(call: Call, size: int) -> ArrayKernel:
    """Return the kernel of a call, not compiled. size: trajectories per batch."""
    recipe = call.substrate.recipe
    ensemble = jax.eval_shape(lambda: kernels.begin_ensemble(call, call.key, 1))
    program = programs.trace_program(call.model, recipe, call.theta, ensemble, call.substrate.t)
    noise64 = jnp.result_type(float) == np.float64
    double = ensemble.x.dtype == np.float64
    text = programs.write_program(program, MAX_LANES)
    self_starting = recipe.fixed and call.model.objective.initial is None
    wiener = precomputed.encode_generator(recipe.wiener)
    sizes = text.sizes | {
        "BLOCK": choose_block(size),
        "REAL": "double" if double else "float",
        "DOUBLE": int(double),
        "NOISE64": int(noise64),
        "WIENER": wiener,
        "STREAM": precomputed.STREAM_WORDS[wiener],
        "BEGINS": int(self_starting),
    }
    if wiener == 0:
        sizes["NORMALS"] = 0
    numbers = ", ".join(map(str, range(program.width))) or "0"
    source = "\n".join(
        [
            *(f"#define {name} {value}" for name, value in sizes.items()),
            *(f"constexpr int {name}[] = {{{numbers}}};" for name in ("NORMAL_OF", "PLACE_OF")),
            toolchain.read_common(*toolchain.COMMON, "vectors.hpp"),
            # one vector of the processor: compilers keep longer ones in memory
            "#define LANES (VECTOR_BYTES / (DOUBLE || NOISE64 ? 8 : 4))",
            "#define BLOCKS (BLOCK / LANES)",
            "#define VECTORS BLOCKS",
            "#define EACH_NORMAL(k) for (int k = 0; k < NORMALS; k++)",  # compiled once
            toolchain.read_native("lanes.hpp", "noise.hpp", "ensemble.hpp", "blocks.hpp"),
            text.functions,
            toolchain.read_native("batches.hpp"),
        ]
    )
    real = np.dtype(np.float64 if double else np.float32)
    ahead = NumbersOfCall(program, text)
    return ArrayKernel(program, text, source, None, real, self_starting, ahead, [])


# ------------------------------------------------------------------------------------------ running


class Extent(NamedTuple):
    """Trajectories of a pass. number: E. size: of a batch. first: number of the first."""

    number: int
    size: int
    first: int


def sum_batches_by_kernel(call: Call, size: int) -> BatchSums:
    """Run a call on a kernel on arrays. size: trajectories per batch.

    Tables of baselines that are missing are filled by a pilot.
    """
    kernel = find_array_kernel(call, size)
    precomputed.check_generator(call.key)
    if call.needs_pilot:
        table = run_pilot(kernel, call, choose_block(size))
        call = call._replace(tables=call.tables.fill_missing(table))
    loaded = load_call(kernel, call)
    shape = (kernel.text.count_sums(len(call.substrate.times.dt)),)
    extent = Extent(call.count, size, call.first or 0)
    sums = _run_batches(kernel, "batch_sums", loaded.arrays, extent, shape)
    return finish_call(kernel, call, loaded, sums, size)


def run_pilot(kernel: ArrayKernel, call: Call, size: int) -> np.ndarray:
    """Return the mean return-to-go (T+1,) of the independent run for a time-only baseline."""
    count = max(plan.pilot for plan in call.plans)
    loaded = start_arrays(kernel, call, count, pilot=True)
    steps = len(call.substrate.times.dt)
    at_start = loaded.arrays["reward"].sum(dtype=float)
    extent = Extent(count, size, 0)
    sums = _run_batches(kernel, "batch_rewards", loaded.arrays, extent, (steps, 2)).sum(axis=0)
    # C after the running reward of step n; that of the step itself follows
    collected = at_start + np.cumsum(sums[:, 0]) + np.cumsum(np.append(0.0, sums[:-1, 1]))
    total = loaded.arrays["reward"].sum(dtype=float)
    return (np.append(total, total - collected) / count).astype(kernel.real)


def add_gradients(swept: SweepResult, size: int) -> BatchSums:
    """Return sums over batches of single gradients. size: trajectories per batch."""
    rows = np.asarray(swept.gradients, float)
    sums = np.add.reduceat(rows, np.arange(0, len(rows), size))
    return BatchSums(swept.returns, sums, swept.last, swept.finite)


class LoadedCall(NamedTuple):
    """The arrays of a kernel for one call. ensemble: that JAX has started, or None."""

    arrays: dict[str, Any]
    ensemble: Any


def load_call(kernel: ArrayKernel, call: Call) -> LoadedCall:
    """Return what a kernel reads, and room for returns and final states."""
    precomputed.check_generator(call.key)
    loaded = start_arrays(kernel, call, call.count, pilot=False)
    bar = np.zeros(len(call.substrate.times.dt), kernel.real)
    if call.tables.step is not None:
        bar[:] = np.asarray(call.tables.step)[1:]
    loaded.arrays["bar"] = bar
    return loaded


def start_arrays(kernel: ArrayKernel, call: Call, count: int, *, pilot: bool) -> LoadedCall:
    """Return the arrays of `count` trajectories of the run, or of its pilot."""
    arrays: dict[str, Any] = kernel.ahead.fill(call.theta, call.substrate.times, kernel.real)
    ensemble = None
    wiener = precomputed.encode_generator(call.substrate.recipe.wiener)
    if kernel.self_starting:
        words = compute_noise_words(wiener, call.key)
        arrays["stream"] = words[2:4].copy() if pilot else words[:2].copy()
        arrays["x"] = np.array(call.substrate.x0, kernel.real)
    else:
        first = None if pilot else call.first
        ensemble = kernels.begin_ensemble(call, split_key(call.key)[pilot], count, first)
        table = precomputed.lay_out_ensemble(wiener, kernel.real, ensemble)
        arrays |= {name: np.ascontiguousarray(value) for name, value in table.items()}
    arrays["reward"] = ends.start_rewards(call, ensemble, count, kernel.real)
    arrays["last"] = np.empty((kernel.program.state, count), kernel.real)
    return LoadedCall(arrays, ensemble)


def has_ends(kernel: ArrayKernel, call: Call) -> bool:
    """Whether gradients have terms of the ends, which are not among the sums."""
    return ends.has_ends(kernel.program.terminal_moves, call)


def finish_call(
    kernel: ArrayKernel, call: Call, loaded: LoadedCall, sums: np.ndarray, size: int
) -> BatchSums:
    """Return the result of a call from returns, final states and the sums of batches."""
    program = kernel.program
    theta = dict(zip(program.theta, jax.tree.leaves(call.theta), strict=True))
    roots = programs.read_sums(program, kernel.text, sums)
    roots |= _place_step_sums(kernel, call, sums)
    leaves = finish_sums(program.graph, program.sums, roots, theta, len(sums))
    rows = np.concatenate([leaf.reshape(len(sums), -1) for leaf in leaves], axis=1)
    returns = loaded.arrays["reward"]
    last = loaded.arrays["last"].T
    slopes = ends.add_ends(program.terminal_moves, call, loaded.ensemble, returns, last, size)
    if slopes is not None:
        rows = rows + slopes
    finite = bool(np.isfinite(rows).all() and np.isfinite(last).all())
    return BatchSums(returns, rows, last, finite)


def _place_step_sums(kernel: ArrayKernel, call: Call, sums: np.ndarray) -> dict[int, np.ndarray]:
    """Return the sums per step at their places (B, ...), by node."""
    nodes = kernel.program.sums.by_step
    if not nodes:
        return {}
    graph = kernel.program.graph
    values = programs.read_step_sums(kernel.text, sums)
    tables = kernel.ahead.find_step_places(call.theta, call.substrate.times)
    placed = {}
    for node, root, places in zip(nodes, kernel.text.by_step, tables, strict=True):
        size = graph[root.node].size
        part = values[:, :, root.first : root.first + size]
        table = spread_sums(part, places.reshape(len(places), size), graph[node].size)
        placed[node] = table.reshape(-1, *graph[node].shape)
    return placed


def _run_batches(
    kernel: ArrayKernel,
    name: str,
    arrays: dict[str, np.ndarray],
    extent: Extent,
    shape: tuple[int, ...],
) -> np.ndarray:
    """Run a pass over all batches and return their sums (B, *shape)."""
    batches = -(-extent.number // extent.size)
    sums = np.zeros((batches, *shape))
    steps = len(arrays["timed"])
    needed = kernel.library.workspace_bytes
    stored = needed(ctypes.c_int64(steps), ctypes.c_int64(1)) <= STORED_BYTES
    memory = needed(ctypes.c_int64(steps), ctypes.c_int64(int(stored)))
    run = _BatchRun(steps=steps, stored=int(stored), size=extent.size, first=extent.first)
    run.count = extent.number
    for key, array in (arrays | {"totals": sums}).items():
        assert array.flags.c_contiguous
        setattr(run, key, array.ctypes.data)
    function = kernel.library[name]
    spaces = kernel.spaces
    following = np.zeros(1, np.int64)

    def run_some(_: int) -> None:
        try:
            space = spaces.pop()
        except IndexError:
            space = _allocate(memory)
        if len(space) < memory:
            space = _allocate(memory)
        function(
            ctypes.byref(run),
            ctypes.c_void_p(following.ctypes.data),
            ctypes.c_int64(batches),
            ctypes.c_void_p(space.ctypes.data),
        )
        spaces.append(space)

    threads.run_on_cores(run_some, range(min(batches, threads.count_cores())))
    if memory > SPARED_BYTES:
        spaces.clear()
    return sums


def _allocate(size: int) -> np.ndarray:
    """Return aligned memory."""
    buffer = np.empty(size + cpu.ALIGNED, np.uint8)
    first = -buffer.ctypes.data % cpu.ALIGNED
    return buffer[first : first + size]
