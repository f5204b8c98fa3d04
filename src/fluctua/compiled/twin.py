"""The twin correction in a kernel: simulation, noise-free path, reverse sweep and score in one
program.

One step is traced from the functions of `fluctua.core.twin`; what comes after the last step and
before the first is theirs as well.
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
from fluctua.core.arrays import Array, PyTree
from fluctua.core.draws import Density
from fluctua.core.process import Step
from fluctua.core.simulate import Ensemble
from fluctua.core.twin import backward
from fluctua.core.twin import correction as core_twin
from fluctua.core.twin import sweep as twin_sweep

KEPT_BYTES = 256 * 2**20
"""The most that the kept states of the trajectories of one pass may take."""

MAX_ORDER_TWO_STATES = 8
"""States of a twin of order 2, whose Hessian is written out."""

BASELINES = {baselines.none: 0, baselines.time_only: 0, baselines.mean: 1, baselines.optimal: 2}


class TwinProgram(NamedTuple):
    """One step of a trajectory and its twin. program: its explicit terms are those of the direct
    part.

    ahead: x̄ₙ₊₁ (M,). delta: δₙ without the reward of the step. reward: gΔt + r. left: r − r̃.
    gain: vₙ − vₙ₊₁. slope: pₙ (M,), and Sₙ of order 2.
    """

    program: trace.Program
    ahead: list[int]
    delta: int
    reward: int
    left: int
    gain: int
    slope: list[int]


def trace_twin_step(call: twin_sweep.TwinCall, ensemble: Ensemble) -> TwinProgram:
    """The step of a trajectory and of its twin, from the first of an ensemble that is about to
    begin.
    """
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
    (flat, unravel) = trace.flatten_parameters(numbers.theta)
    (own, unravel_own) = trace.flatten_parameters(numbers.twin)

    def forwards(own: Array, xbar: Array, t: Array, dt: Array, context: PyTree) -> Array:
        one = jax.tree.map(lambda leaf: leaf[None], (xbar, context))
        return backward.advance_twin(
            twin, core_twin.Numbers(None, unravel_own(own)), one[0], t, dt, one[1]
        )[0]

    def back(
        flat: Array,
        own: Array,
        x: Array,
        x_next: Array,
        xbar: Array,
        flat_guess: Array,
        t: Array,
        dt: Array,
        context: PyTree,
        origin: Array,
    ) -> tuple[Array, ...]:
        numbers = core_twin.Numbers(unravel(flat), unravel_own(own))
        guess = unflatten_guess(flat_guess, m)
        step = Step(x, x_next, t, dt, context)
        direct, expected, reward, left = core_twin.direct_terms(
            twin, numbers, guess, step, xbar, origin
        )
        new, gain = core_twin.expand(twin, numbers, guess, xbar, t, dt, context)
        return direct, expected - gain - new.at(x - xbar), reward, left, gain, flatten_guess(new)

    time, origin = (jax.ShapeDtypeStruct(shape, t.dtype) for shape in ((), (2,)))
    flat_guess = jax.ShapeDtypeStruct((m + m * m if twin.order == 2 else m,), x.dtype)
    values = (flat, own, x, x, x, flat_guess, time, time, context, origin)
    inputs = [
        tracer.input("theta", flat),
        tracer.input("theta", own, flat.size),
        tracer.input("x", x),
        np.array(program.x_next),
        tracer.input("p", x),
        tracer.input("p", flat_guess, m),
        tracer.input("t", time),
        tracer.input("dt", time),
        tracer.tree("context", context),
        tracer.input("origin", origin),
    ]
    some = [1, 4, 6, 7, 8]
    (later,) = tracer.call(forwards, [values[k] for k in some], [inputs[k] for k in some])
    direct, delta, reward, left, gain, slope = tracer.call(back, list(values), inputs)
    program = program._replace(explicit=direct.tolist())
    return TwinProgram(
        program, later.tolist(), int(delta), int(reward), int(left), int(gain), slope.tolist()
    )


def flatten_guess(guess: core_twin.Guess) -> Array:
    """V in one vector: the slope, and the bend of order 2. (…, M) or (…, M + M²)"""
    if guess.bend is None:
        return guess.slope
    return jnp.concatenate([guess.slope, guess.bend.reshape(*guess.bend.shape[:-2], -1)], axis=-1)


def unflatten_guess(flat_guess: Array, m: int) -> core_twin.Guess:
    """The way back."""
    bend = (
        flat_guess[..., m:].reshape(*flat_guess.shape[:-1], m, m)
        if flat_guess.shape[-1] > m
        else None
    )
    return core_twin.Guess(flat_guess[..., :m], bend)


def _write_twin_functions(of: TwinProgram, layout: emit.Layout) -> str:
    """The functions `twin_ahead` and `twin_back`."""
    program = of.program
    ahead = [("y", k, node) for k, node in enumerate(of.ahead)]
    back = [
        *(("s", k, program.score[p]) for k, p in enumerate(layout.scores)),
        *(("d", k, program.explicit[p]) for k, p in enumerate(layout.explicits)),
        ("delta", None, of.delta),
        ("reward", None, of.reward),
        ("left", None, of.left),
        ("gain", None, of.gain),
        *(("q", k, node) for k, node in enumerate(of.slope)),
    ]
    results = "const V *p, V *s, V *d, V &delta, V &reward, V &left, V &gain, V *q"
    return "\n".join(
        [
            emit.write_function(program, layout, "twin_ahead", ahead, "const V *p, V *y"),
            emit.write_function(program, layout, "twin_back", back, results),
        ]
    )


def _write_defines(key: TwinKey, of: TwinProgram) -> str:
    return f"#define TWIN_BASELINE {key.baseline}\n#define GUESS {len(of.slope)}\n"


class TwinKernel(NamedTuple):
    """A program, where its numbers are, its text, the loaded library and the type of its
    numbers.
    """

    program: trace.Program
    layout: emit.Layout
    source: str
    library: CpuTwinLibrary | cuda.GpuTwinLibrary | None
    real: np.dtype
    guess: int  # numbers of V


class TwinKey:
    """What a kernel is made of; equal where code, structure and types are, whatever the numbers."""

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
        """Shapes and types of a trajectory that is about to begin."""
        return jax.eval_shape(lambda: begin_twin_ensemble(self.call, 1, 0))

    def __hash__(self) -> int:
        return hash(self._identity)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TwinKey) and self._identity == other._identity


def encode_baseline(call: twin_sweep.TwinCall) -> int:
    """How Λ is centred: by a table, by the mean of the others, by their weighted mean."""
    of = call.twin.model.baseline
    for make, number in BASELINES.items():
        if make().function is of:
            return number
    raise Unsupported(
        "baseline", "this baseline of the twin's Λ; kernels serve none, time, mean, optimal"
    )


@functools.lru_cache(maxsize=64)
def make_twin_kernel(key: TwinKey, build: bool) -> TwinKernel:
    """The kernel of a twin, traced, written and compiled."""
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
        form = cuda.GpuSource(
            program, layout, real, key.noise64, key.wiener, twin=text, ahead=ahead, theta=theta
        )
        return TwinKernel(
            program,
            layout,
            form.source("twin_backward"),
            cuda.GpuTwinLibrary(form) if build else None,
            real,
            len(traced_step.slope),
        )
    source = cpu.write_cpu_source(
        program, layout, double=double, noise64=key.noise64, wiener=key.wiener, sweep=0
    )
    twin = emit.read_native("twin.hpp")
    source = "\n".join(
        [
            source,
            _write_defines(key, traced_step) + _write_twin_functions(traced_step, layout),
            twin,
        ]
    )
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
    """The passes of a twin on the CPU: pieces of an ensemble, on all cores."""

    def run(
        self, name: str, arrays: dict[str, Any], *, count: int, steps: int, segment: int
    ) -> None:
        """One pass."""
        pieces = [(a, min(a + 128, count)) for a in range(0, count, 128)]
        if name == "twin_backward":
            pieces = [(k, k + 1) for k in range(len(arrays["edges"]) - 1)]
        run = _TwinRunStruct(count=count, steps=steps, segment=segment)
        for key in POINTERS:
            if key in arrays:
                assert arrays[key].flags.c_contiguous
                setattr(run, key, arrays[key].ctypes.data)
        function = self.library[name]
        cpu.run_pieces(
            lambda piece: function(ctypes.byref(run), *map(ctypes.c_int64, piece)), pieces
        )


def begin_twin_ensemble(call: twin_sweep.TwinCall, count: int, low: int) -> Ensemble:
    """Trajectories from number `low` on, before their first step."""
    substrate = call.substrate
    return twin_sweep.begin_from(
        substrate.recipe, count, call.key, call.numbers.theta, substrate.x0, call.offset + low
    )


def collect_parts(call: twin_sweep.TwinCall, kernel: TwinKernel) -> twin_sweep.Parts:
    """Direct and correction (E, P), returns (E,), mean of Λ (T+1,)."""
    steps = len(call.substrate.times.dt)
    segment = int(np.ceil(np.sqrt(steps)))
    if isinstance(kernel.library, cuda.GpuTwinLibrary):
        segment = 4 * -(-segment // 4)  # normals of up to four steps are drawn together
    each = -(-steps // segment) * 2 * kernel.program.state * kernel.real.itemsize
    slices = twin_sweep.batches(call.count, call.batch)
    at_once = max(1, KEPT_BYTES // (each * call.batch))
    pieces: list[twin_sweep.Parts] = []
    for k in range(0, len(slices), at_once):
        pieces += _run_pass(call, kernel, slices[k : k + at_once], segment)
    return twin_sweep.join_parts(pieces)


def _make_arrays(
    call: twin_sweep.TwinCall, kernel: TwinKernel, ensemble: Ensemble
) -> dict[str, Any]:
    """An ensemble and the numbers that are computed ahead, or what a GPU computes them from."""
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

    own = library.from_jax(_stack_carry(carry, real))
    v = kernel.guess
    edges = np.array([slices[0][0], *(high for _, high in slices)], np.int64) - low
    bar = np.zeros(steps, real)
    if numbers.table is not None:  # n+1: δ precedes the kick
        bar = library.keep(
            "bar", numbers.table, lambda table: np.ascontiguousarray(np.asarray(table)[1:], real)
        )
    arrays |= {
        "slope": own[:v],
        "value": own[v],
        "residual": own[v + 1],
        "reward": own[v + 2],
        "direct": own[v + 3 : v + 3 + p],
        "correction": own[v + 3 + p :],
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

    back = _unstack_carry(library.to_jax(own), m, v, np.dtype(carry.direct.dtype))
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
    # its draw leaves one out of a batch
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
    """X_T and x̄_T (E, M), of what a kernel left."""
    half = last.shape[0] // 2
    return last[:half].T, last[half:].T


@functools.partial(jax_arrays.jit, static_argnums=1)
def _stack_carry(carry: backward.Backward, real: np.dtype) -> Array:
    """What a kernel takes backwards, with the trajectory last: slope, value, residual, reward,
    direct, correction.
    """
    count = len(carry.residual)

    def every(v):
        return jnp.broadcast_to(v, (count, *v.shape[1:]))

    numbers = [
        every(flatten_guess(carry.guess)).T,
        every(carry.value)[None],
        carry.residual[None],
        carry.reward[None],
    ]
    return jnp.concatenate([v.astype(real) for v in (*numbers, carry.direct.T, carry.correction.T)])


@functools.partial(jax_arrays.jit, static_argnums=(1, 2, 3))
def _unstack_carry(own: Array, m: int, v: int, theta_dtype: np.dtype) -> backward.Backward:
    """The way back, after the first step. v: numbers of V."""
    p = (len(own) - v - 3) // 2
    direct, correction = (own[k : k + p].T.astype(theta_dtype) for k in (v + 3, v + 3 + p))
    return backward.Backward(
        unflatten_guess(own[:v].T, m), own[v], own[v + 1], own[v + 2], direct, correction
    )
