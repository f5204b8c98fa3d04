"""Sums over batches of trajectories on an NVIDIA GPU: a team of threads for each trajectory.

Arrays of a trajectory are in the shared memory of its block, which limits their size to networks
of some thousand weights. Larger ones are left to JAX, whose products are then large enough.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.compiled import ahead as precomputed
from fluctua.compiled import cuda, kernels, toolchain
from fluctua.compiled.blocks import kernel as array_kernels
from fluctua.compiled.blocks import program as programs
from fluctua.compiled.blocks.nodes import LANE
from fluctua.compiled.blocks.plan import Demand, find_operand
from fluctua.compiled.blocks.write import (
    FunctionWriter,
    LoopNest,
    NumbersAhead,
    PlaceTables,
    write_index,
)
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

OUTER_ELEMENTS = 4
"""Elements from which the sum of products a bᵀ is taken as such."""

DRAWN = {0: 1, 1: 1, 2: 2, 3: 4}
"""Steps whose normals are drawn together, by generator."""


class _GpuWriter(FunctionWriter):
    """Writes a function whose arrays take each other's place once they are not needed."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.sizes: dict[str, int] = {}

    def _allocate(self, node: int) -> str:
        name = f"a{node}"
        self.sizes[name] = self.graph[node].size
        return name

    def nest(self, heads: Sequence[str], body: Sequence[str]) -> None:
        """Write a loop nest whose longest loop the team shares, and wait for all of it."""
        heads = list(heads)
        if not body[0].startswith("multiply("):  # which has the team share its rows
            loops = [
                re.fullmatch(r"for \(int (i\d+) = 0; i\d+ < (\d+); i\d+\+\+\)", h) for h in heads
            ]
            lengths = [int(loop[2]) if loop else 0 for loop in loops]
            if max(lengths, default=0):
                k = int(np.argmax(lengths))
                loop = loops[k]
                assert loop is not None
                heads[k] = f"for (int {loop[1]} = team; {loop[1]} < {loop[2]}; {loop[1]} += TEAM)"
            else:
                heads.insert(0, "if (team == 0)")
        super().nest(heads, body)
        self.lines.append("__syncthreads();")

    def add_product(self, root: int, first: int) -> None:
        """Write the sum over trajectories of a product of two arrays with strides."""
        of = self.graph[root]
        loop = LoopNest(of.shape)
        sides = []
        for arg in of.args:
            source, places = self._find_places(arg)
            index = write_index(loop, places, self.tables)
            sides.append(f"{self.buffers[source]} + ({index}) * BLOCKS")
        lines = ["int rest = e;"]
        for k in reversed(range(len(of.shape))):
            lines.append(f"const int i{k} = rest % {of.shape[k]};")
            lines.append(f"rest /= {of.shape[k]};")
        lines.append(f"sums[{first} + e] += add_row_products({sides[0]}, {sides[1]});")
        head = f"for (int e = threadIdx.x; e < {of.size}; e += THREADS)"
        FunctionWriter.nest(self, [head], lines)

    def _find_places(self, node: int) -> tuple[int, np.ndarray]:
        source = find_operand(self.graph, node)
        if source == node:
            return node, np.arange(self.graph[node].size)
        _, places = self.graph.trace_source(node)
        assert places is not None
        return source, places

    def place_arrays(self) -> list[str]:
        """Return the lines with declarations of all arrays, and count the memory they need."""
        starts = self._find_starts()
        nest = np.searchsorted(starts, np.arange(len(self.lines)), side="right").tolist()
        uses: dict[str, list[int]] = {name: [] for name in self.sizes}
        for k, line in enumerate(self.lines):
            for name in set(re.findall(r"\ba\d+\b", line)):
                uses[name].append(nest[k])
        texts: dict[int, str] = {}
        for k, line in zip(nest, self.lines, strict=True):
            texts[k] = texts.get(k, "") + line + "\n"
        placed: dict[str, tuple[int, int]] = {}
        declared = []
        for name, when in sorted(uses.items(), key=lambda item: item[1][0]):
            size = self.sizes[name]
            alive = []
            for other, place in placed.items():
                ends = uses[other][-1]
                replaced = ends == when[0] and _is_in_place(texts[ends], other, name)
                if ends > when[0] or (ends == when[0] and not replaced):
                    alive.append(place)
            place = 0
            for begin, length in sorted(alive):
                if place + size <= begin:
                    break
                place = max(place, begin + length)
            placed[name] = place, size
            self.work = max(self.work, place + size)
            declared.append(f"V* const {name} = work + {place} * BLOCKS;")
        return [*declared, *(line.replace("b < BLOCKS", "b < 1") for line in self.lines)]

    def _find_starts(self) -> list[int]:
        """Find the first lines of statements that are not inside another."""
        depth = 0
        starts = []
        pending = False
        for k, line in enumerate(self.lines):
            if depth == 0 and not pending:
                starts.append(k)
            depth += line.count("{") - line.count("}")
            pending = depth == 0 and line.startswith(("for ", "if "))
        return starts


def _is_in_place(text: str, old: str, new: str) -> bool:
    """Whether a loop reads an array only where it writes another, so that one can be the other."""
    pattern = r"\[(\([^\]]*\) \* BLOCKS \+ b)\]"
    written = set(re.findall(rf"\b{new}{pattern} = ", text))
    reads = re.findall(rf"\b{old}{pattern}", text)
    everywhere = len(re.findall(rf"\b{old}\b", text))
    return len(written) == 1 and set(reads) == written and len(reads) == everywhere


def write_gpu_program(program: programs.ArrayProgram) -> programs.ArrayText:
    """Write the functions of a kernel for a GPU."""
    graph = program.graph
    ahead = NumbersAhead(graph)
    tables = PlaceTables()
    roots = programs.place_roots(program, 1, OUTER_ELEMENTS)
    outers = [part for root in roots if root.outer for part in root.outer[:2]]
    added = [root.node for root in roots if root.outer is None]
    lane_inputs = {n: name for n, name in program.places.items() if graph[n].depends & LANE}

    def make_writer() -> _GpuWriter:
        writer = _GpuWriter(graph, ahead, tables)
        writer.buffers.update(lane_inputs)
        return writer

    step = make_writer()
    step.write_outputs(list(zip(program.step, ("y", "g", "r"), strict=True)), lane_inputs)
    end = make_writer()
    end.write_outputs([(program.terminal, "g")], lane_inputs)
    back = make_writer()
    factors = {node: graph[node].args for node in added if _is_product(program, node)}
    operands = [*outers, *(arg for pair in factors.values() for arg in pair)]
    stored = [find_operand(graph, node) for node in operands]
    stored += [node for node in added if node not in factors]
    needed = [node for node in stored if node not in lane_inputs]
    back.write(Demand(needed, [], back.buffers), {})
    elements = sum(graph[node].size for node in added)
    for root in roots:
        if root.outer is not None:
            back.add_outer(root.outer, elements + root.first, root.columns)
        elif root.node in factors:
            back.add_product(root.node, root.first)
        else:
            size = graph[root.node].size
            back.lines.append(f"add_rows({size}, {back.buffers[root.node]}, sums + {root.first});")
    back.lines.append("__syncthreads();")
    functions = [
        line.replace("static const int32_t", "__device__ const int") for line in tables.lines
    ]
    for name, writer in {"forward": step, "finish": end, "backward": back}.items():
        body = "\n".join(f"  {line}" for line in writer.place_arrays())
        functions.append(f"INLINE void {name}({programs.HEADS[name]}) {{\n{body}\n}}")
    products = [root for root in roots if root.outer is not None]
    sizes = {
        "STATE": program.state,
        "CONTEXT": program.contexts,
        "WIDTH": program.width,
        "NORMALS": program.width,
        "TIMED": ahead.sizes["timed"],
        "WORK": max(writer.work for writer in (step, end, back)),
        "ELEMENTS": elements,
        "PRODUCTS": sum(graph[root.node].size for root in products),
    }
    return programs.ArrayText("\n".join(functions), sizes, ahead, roots)


def _is_product(program: programs.ArrayProgram, node: int) -> bool:
    """Whether a node is a product of two arrays of the trajectory that have strides in it."""
    graph = program.graph
    of = graph[node]
    if of.op != "mul" or of.size == 1 or any(not graph[a].depends & LANE for a in of.args):
        return False
    return all(graph[a].op == "view" or graph[a].shape == of.shape for a in of.args)


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
        program, text, source, function, real, self_starting, ahead, None
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
    by_batch = sums.reshape(batches, -1, width).sum(axis=1, dtype=np.float64).get()
    results = {name: arrays[name].get() for name in ("reward", "last")}
    done = loaded._replace(arrays=loaded.arrays | results)
    return array_kernels.finish_call(kernel, call, done, by_batch, size)


def _find_pointer(arrays: dict[str, Any], name: str) -> Any:
    array = arrays.get(name)
    return np.uint64(0) if array is None or array.size == 0 else array
