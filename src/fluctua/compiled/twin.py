"""The twin correction in a kernel: simulation, noise-free path, reverse sweep and score.

One step is traced from the functions of `fluctua.core.twin`, which also compute what comes after
the last step and before the first.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.compiled import ahead as precomputed
from fluctua.compiled import cpu, cuda, emit, trace
from fluctua.compiled.scalar import Unsupported
from fluctua.core import arrays as jax_arrays
from fluctua.core import baselines, check
from fluctua.core.arrays import Array
from fluctua.core.draws import Density
from fluctua.core.host import threads
from fluctua.core.process import Step
from fluctua.core.simulate import Ensemble
from fluctua.core.twin import backward
from fluctua.core.twin import correction as core_twin
from fluctua.core.twin import sweep as twin_sweep

KEPT_BYTES = 256 * 2**20
"""Largest memory for the kept states of the trajectories of one pass."""

MAX_ORDER_TWO_STATES = 8
"""Largest state of a twin of order 2, whose Hessian is written out element by element."""

BASELINES = {baselines.none: 0, baselines.time_only: 0, baselines.mean: 1, baselines.optimal: 2}


class TwinProgram(NamedTuple):
    """One step of a trajectory and its twin, as nodes of a graph.

    program: the step; its explicit terms are those of the direct part.
    ahead: x̄ₙ₊₁ (M,).
    delta: δₙ without the reward of the step.
    reward: gΔt + r.
    left: r − r̃.
    gain: vₙ − vₙ₊₁.
    slope: pₙ (M,), followed by Sₙ (M·M,) for order 2.
    """

    program: trace.Program
    ahead: list[int]
    delta: int
    reward: int
    left: int
    gain: int
    slope: list[int]


def trace_twin_step(call: twin_sweep.TwinCall, ensemble: Ensemble) -> TwinProgram:
    """Trace one step of a trajectory and its twin. ensemble: shapes and types before step 0."""
    twin = call.twin
    numbers = call.numbers
    t = call.substrate.t
    x, context, _ = trace.drop_ensemble_axis(ensemble._replace(streams=None))
    if twin.order == 2 and x.size > MAX_ORDER_TWO_STATES:
        raise Unsupported(
            "twin",
            f"a twin of order 2 with {x.size} states; kernels follow up to {MAX_ORDER_TWO_STATES}",
        )
    program = trace.trace_step(twin.model, call.substrate.recipe, numbers.theta, ensemble, t)
    tracer = trace.Tracer(program.graph)
    m = x.size
    flat, unravel = trace.flatten_parameters(numbers.theta)
    flat_twin, unravel_twin = trace.flatten_parameters(numbers.twin)

    def advance(
        flat_twin: Array, xbar: Array, t: Array, dt: Array, context: jax_arrays.PyTree
    ) -> Array:
        states, contexts = jax.tree.map(lambda leaf: leaf[None], (xbar, context))
        return backward.advance_twin(
            twin, core_twin.Numbers(None, unravel_twin(flat_twin)), states, t, dt, contexts
        )[0]

    def step_back(
        flat: Array,
        flat_twin: Array,
        x: Array,
        x_next: Array,
        xbar: Array,
        flat_guess: Array,
        t: Array,
        dt: Array,
        context: jax_arrays.PyTree,
        origin: Array,
    ) -> tuple[Array, ...]:
        numbers = core_twin.Numbers(unravel(flat), unravel_twin(flat_twin))
        guess = unflatten_guess(flat_guess, m)
        step = Step(x, x_next, t, dt, context)
        direct, expected, reward, left = core_twin.direct_terms(
            twin, numbers, guess, step, xbar, origin
        )
        new, gain = core_twin.expand(twin, numbers, guess, xbar, t, dt, context)
        return direct, expected - gain - new.at(x - xbar), reward, left, gain, flatten_guess(new)

    time, origin = (jax.ShapeDtypeStruct(shape, t.dtype) for shape in ((), (2,)))
    flat_guess = jax.ShapeDtypeStruct((m + m * m if twin.order == 2 else m,), x.dtype)
    values = (flat, flat_twin, x, x, x, flat_guess, time, time, context, origin)
    inputs = [
        tracer.input("theta", flat),
        tracer.input("theta", flat_twin, flat.size),
        tracer.input("x", x),
        np.array(program.x_next),
        tracer.input("p", x),
        tracer.input("p", flat_guess, m),
        tracer.input("t", time),
        tracer.input("dt", time),
        tracer.tree("context", context),
        tracer.input("origin", origin),
    ]
    of_twin = [1, 4, 6, 7, 8]
    (ahead,) = tracer.call(advance, [values[k] for k in of_twin], [inputs[k] for k in of_twin])
    direct, delta, reward, left, gain, slope = tracer.call(step_back, list(values), inputs)
    program = program._replace(explicit=direct.tolist())
    return TwinProgram(
        program, ahead.tolist(), int(delta), int(reward), int(left), int(gain), slope.tolist()
    )


def flatten_guess(guess: core_twin.Guess) -> Array:
    """Return V as one vector: its slope, and its bend for order 2. (…, M) or (…, M + M²)"""
    if guess.bend is None:
        return guess.slope
    return jnp.concatenate([guess.slope, guess.bend.reshape(*guess.bend.shape[:-2], -1)], axis=-1)


def unflatten_guess(flat_guess: Array, m: int) -> core_twin.Guess:
    """Return V from its vector, the inverse of `flatten_guess`. m: size of the state."""
    bend = (
        flat_guess[..., m:].reshape(*flat_guess.shape[:-1], m, m)
        if flat_guess.shape[-1] > m
        else None
    )
    return core_twin.Guess(flat_guess[..., :m], bend)


def _write_twin_functions(traced: TwinProgram, layout: emit.Layout) -> str:
    """Return the text of the functions `twin_ahead` and `twin_back`."""
    program = traced.program
    ahead = [("y", k, node) for k, node in enumerate(traced.ahead)]
    back = [
        *(("s", k, program.score[p]) for k, p in enumerate(layout.scores)),
        *(("d", k, program.explicit[p]) for k, p in enumerate(layout.explicits)),
        ("delta", None, traced.delta),
        ("reward", None, traced.reward),
        ("left", None, traced.left),
        ("gain", None, traced.gain),
        *(("v", k, node) for k, node in enumerate(traced.slope)),
    ]
    results = "const V *p, V *s, V *d, V &delta, V &reward, V &left, V &gain, V *v"
    return "\n".join(
        [
            emit.write_function(program, layout, "twin_ahead", ahead, "const V *p, V *y"),
            emit.write_function(program, layout, "twin_back", back, results),
        ]
    )


def _write_defines(key: TwinKey, traced: TwinProgram) -> str:
    return f"#define TWIN_BASELINE {key.baseline}\n#define GUESS {len(traced.slope)}\n"


class TwinKernel(NamedTuple):
    """A compiled step of a trajectory and its twin.

    program: nodes that a step computes.
    layout: where the kernel finds its numbers.
    source: generated text.
    library: loaded passes; None if only the text is wanted.
    real: type of states and sums.
    guess: numbers of V, the length of `flatten_guess`.
    """

    program: trace.Program
    layout: emit.Layout
    source: str
    library: CpuTwinLibrary | cuda.GpuTwinLibrary | None
    real: np.dtype
    guess: int


class TwinKey:
    """Key of a kernel. Equal keys have the same code, structure and types, not numbers."""

    def __init__(self, call: twin_sweep.TwinCall, optimise: str, place: str = "cpu"):
        self.call = call
        self.optimise = optimise
        self.place = place
        self.wiener = wiener = precomputed.encode_generator(call.substrate.recipe.wiener)
        self.noise64 = jnp.result_type(float) == np.float64
        self.baseline = encode_baseline(call)
        self._identity = (
            call.twin,
            call.substrate.recipe,
            trace.describe_shapes(call.numbers[:2]),
            trace.describe_shapes(call.substrate.x0),
            call.substrate.t.dtype,
            self.noise64,
            wiener,
            self.baseline,
            optimise,
            place,
        )

    @property
    def ensemble(self) -> Ensemble:
        """Shapes and types of one trajectory before its first step."""
        return jax.eval_shape(lambda: begin_twin_ensemble(self.call, 1, 0))

    def __hash__(self) -> int:
        return hash(self._identity)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TwinKey) and self._identity == other._identity


def encode_baseline(call: twin_sweep.TwinCall) -> int:
    """Return how Λ is centred: 0 by a table, 1 by the mean of the others, 2 by a weighted mean."""
    baseline = call.twin.model.baseline
    for make, number in BASELINES.items():
        if make().function is baseline:
            return number
    raise Unsupported(
        "baseline", "this baseline of the twin's Λ; kernels serve none, time, mean, optimal"
    )


@functools.lru_cache(maxsize=64)
def make_twin_kernel(key: TwinKey, build: bool) -> TwinKernel:
    """Trace and write the kernel of a twin. build: compile and load its library too."""
    ensemble = key.ensemble
    traced_step = trace_twin_step(key.call, ensemble)
    program = traced_step.program
    scalars = [traced_step.delta, traced_step.reward, traced_step.left, traced_step.gain]
    more = [*traced_step.ahead, *scalars, *traced_step.slope]
    layout = emit.make_layout(program, more)
    real = np.dtype(ensemble.x.dtype)
    double = real == np.float64
    if key.place == "cuda":
        text = _write_defines(key, traced_step) + _write_twin_functions(traced_step, layout)
        theta = np.result_type(*(leaf.dtype for leaf in jax.tree.leaves(key.call.numbers[:2])))
        ahead = emit.write_numbers_ahead(program, layout)
        source_on_gpu = cuda.GpuSource(
            program, layout, real, key.noise64, key.wiener, twin=text, ahead=ahead, theta=theta
        )
        return TwinKernel(
            program,
            layout,
            source_on_gpu.write("twin_backward"),
            cuda.GpuTwinLibrary(source_on_gpu) if build else None,
            real,
            len(traced_step.slope),
        )
    source = cpu.write_cpu_source(
        program, layout, double=double, noise64=key.noise64, wiener=key.wiener, sweep=0
    )
    text = _write_defines(key, traced_step) + _write_twin_functions(traced_step, layout)
    source = "\n".join([source, text, emit.read_native("twin.hpp")])
    loaded = (
        CpuTwinLibrary(ctypes.CDLL(str(cpu.find_or_build(source, key.optimise))), real)
        if build
        else None
    )
    return TwinKernel(program, layout, source, loaded, real, len(traced_step.slope))


# ------------------------------------------------------------------------------------------ running

POINTERS = (
    "shared",
    "timed",
    "x",
    "context",
    "stream",
    "kept",
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


class _TwinRunStruct(ctypes.Structure):
    """`struct TwinRun` of native/twin.hpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("count", "steps", "segment")),
        *((name, ctypes.c_void_p) for name in POINTERS),
    ]


class CpuTwinLibrary(cpu.CpuArrays):
    """The passes of a twin on the CPU, over pieces of an ensemble on all cores."""

    def run(
        self, name: str, arrays: dict[str, Any], *, count: int, steps: int, segment: int
    ) -> None:
        """Run one pass of a twin."""
        pieces = [(a, min(a + 128, count)) for a in range(0, count, 128)]
        if name == "twin_backward":
            pieces = [(k, k + 1) for k in range(len(arrays["edges"]) - 1)]
        run = _TwinRunStruct(count=count, steps=steps, segment=segment)
        for key in POINTERS:
            if key in arrays:
                assert arrays[key].flags.c_contiguous
                setattr(run, key, arrays[key].ctypes.data)
        function = self.library[name]
        threads.run_on_cores(
            lambda piece: function(ctypes.byref(run), *map(ctypes.c_int64, piece)), pieces
        )


def begin_twin_ensemble(call: twin_sweep.TwinCall, count: int, low: int) -> Ensemble:
    """Return `count` trajectories from number `low` on, before their first step."""
    substrate = call.substrate
    return twin_sweep.start_batch(
        substrate.recipe, count, call.key, call.numbers.theta, substrate.x0, call.offset + low
    )


def collect_parts(call: twin_sweep.TwinCall, kernel: TwinKernel) -> twin_sweep.Parts:
    """Return direct part and correction (E, P), returns (E,) and the mean of Λ (T+1,)."""
    steps = len(call.substrate.times.dt)
    segment = int(np.ceil(np.sqrt(steps)))
    if isinstance(kernel.library, cuda.GpuTwinLibrary):
        segment = 4 * -(-segment // 4)  # normals of up to four steps are drawn together
    bytes_each = -(-steps // segment) * 2 * kernel.program.state * kernel.real.itemsize
    slices = twin_sweep.split_batches(call.count, call.batch)
    at_once = max(1, KEPT_BYTES // (bytes_each * call.batch))
    pieces: list[twin_sweep.Parts] = []
    for k in range(0, len(slices), at_once):
        pieces += _run_pass(call, kernel, slices[k : k + at_once], segment)
    return twin_sweep.join_parts(pieces)


def _make_arrays(
    call: twin_sweep.TwinCall, kernel: TwinKernel, ensemble: Ensemble
) -> dict[str, Any]:
    """Return the arrays of an ensemble and its shared numbers, or a GPU's inputs for those."""
    library = kernel.library
    substrate = call.substrate
    thetas = call.numbers[:2]
    if isinstance(library, cuda.GpuTwinLibrary) and library.source.ahead:
        wiener = precomputed.encode_generator(substrate.recipe.wiener)
        precomputed.check_generator(call.key)
        numbers = {
            "theta": library.load_parameters(*thetas),
            "times": library.load_times(substrate),
        }
        return library.load_ensemble(wiener, ensemble) | numbers
    flat = np.concatenate([np.asarray(leaf, float).ravel() for leaf in jax.tree.leaves(thetas)])
    return precomputed.make_arrays(
        kernel.program, kernel.layout, kernel.real, substrate, flat, ensemble
    )


def _run_pass(
    call: twin_sweep.TwinCall, kernel: TwinKernel, slices: list[tuple[int, int]], segment: int
) -> list[twin_sweep.Parts]:
    twin = call.twin
    numbers = call.numbers
    times = call.substrate.times
    real = kernel.real
    library = kernel.library
    assert library is not None
    low = slices[0][0]
    count = slices[-1][1] - slices[0][0]
    steps = len(call.substrate.times.dt)
    m = kernel.program.state
    p = len(kernel.program.names)
    sizes = {"count": count, "steps": steps, "segment": segment}
    ensemble = begin_twin_ensemble(call, count, low)
    arrays = _make_arrays(call, kernel, ensemble)
    arrays |= {
        "last": library.empty(2 * m, count),
        "flags": library.make_flags(),
        "kept": library.empty(-(-steps // segment), 2 * m, count),
    }
    library.run("twin_forward", arrays, **sizes)
    x, xbar = _split_ends(library.to_jax(arrays["last"]))
    check.finite_simulation(x, call.substrate.t, call.offset + low)
    core_twin.check_path(xbar, call.substrate.t)
    states = backward.States(x, xbar)
    carry = backward.start_backward(twin, numbers, states, times, ensemble.context)

    stacked = library.from_jax(_stack_carry(carry, real))
    v = kernel.guess
    edges = np.array([slices[0][0], *(high for _, high in slices)], np.int64) - low
    bar = np.zeros(steps, real)
    if numbers.table is not None:  # n+1: δ precedes the kick
        bar = library.keep(
            "bar", numbers.table, lambda table: np.ascontiguousarray(np.asarray(table)[1:], real)
        )
    arrays |= {
        "slope": stacked[:v],
        "value": stacked[v],
        "residual": stacked[v + 1],
        "reward": stacked[v + 2],
        "direct": stacked[v + 3 : v + 3 + p],
        "correction": stacked[v + 3 + p :],
        "bar": bar,
        "edges": edges,
        "sums": library.zeros(len(slices), steps),
    }
    library.run("twin_backward", arrays, **sizes)
    flags = library.read_flags(arrays["flags"])
    if flags & precomputed.OUT_OF_RANGE:
        raise precomputed.make_range_error(real)
    if flags:
        raise Unsupported("baseline", "one trajectory has nearly all of the weight of a step")

    back = _unstack_carry(library.to_jax(stacked), m, v, np.dtype(carry.direct.dtype))
    last = np.asarray(jax_arrays.on_host(carry.residual), float)
    sums = library.to_host(arrays["sums"])
    ends = (ensemble.x, ensemble.context)
    if not isinstance(twin.model.start, Density):
        means = np.append(sums.sum(axis=0) / count, last.mean()).astype(real)
        return [
            twin_sweep.finish_parts(
                twin, numbers, back, ends[0], times, ends[1], [jnp.asarray(means)]
            )
        ]
    finished = []
    # the score of a random start is centred by the rest of its batch
    for number, (first, stop) in enumerate((a - low, b - low) for a, b in slices):
        rows = slice(first, stop)
        part, (x0, context) = jax.tree.map(lambda leaf, rows=rows: leaf[rows], (back, ends))
        means = np.append(sums[number] / (stop - first), last[first:stop].mean()).astype(real)
        finished.append(
            twin_sweep.finish_parts(twin, numbers, part, x0, times, context, [jnp.asarray(means)])
        )
    return finished


@jax_arrays.jit
def _split_ends(last: Array) -> tuple[Array, Array]:
    """Split the last states of a kernel into X_T and x̄_T, (E, M) each."""
    half = last.shape[0] // 2
    return last[:half].T, last[half:].T


@functools.partial(jax_arrays.jit, static_argnums=1)
def _stack_carry(carry: backward.Backward, real: np.dtype) -> Array:
    """Stack the carry of the reverse sweep with the trajectory last, in the order of its fields."""
    count = len(carry.residual)

    def broadcast(v):
        return jnp.broadcast_to(v, (count, *v.shape[1:]))

    numbers = [
        broadcast(flatten_guess(carry.guess)).T,
        broadcast(carry.value)[None],
        carry.residual[None],
        carry.reward[None],
    ]
    return jnp.concatenate([v.astype(real) for v in (*numbers, carry.direct.T, carry.correction.T)])


@functools.partial(jax_arrays.jit, static_argnums=(1, 2, 3))
def _unstack_carry(stacked: Array, m: int, v: int, theta_dtype: np.dtype) -> backward.Backward:
    """Return the carry from its stack (rows, E), the inverse of `_stack_carry`.

    m: components of the state. v: rows of the guess V, its slope and bend.
    """
    p = (len(stacked) - v - 3) // 2
    direct, correction = (stacked[k : k + p].T.astype(theta_dtype) for k in (v + 3, v + 3 + p))
    return backward.Backward(
        unflatten_guess(stacked[:v].T, m),
        stacked[v],
        stacked[v + 1],
        stacked[v + 2],
        direct,
        correction,
    )
