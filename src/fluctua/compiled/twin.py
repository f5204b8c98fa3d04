"""The twin correction of first order in a kernel: simulation, noise-free path, reverse sweep and score in one program.

One step is traced from the functions of `fluctua.core.twin`; what comes after the last step and before the first is
theirs as well.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.compiled import ahead, cpu, cuda
from fluctua.compiled.ahead import wiener_of
from fluctua.compiled.emit import Layout, function, laid_out, native
from fluctua.compiled.scalar import Unsupported
from fluctua.compiled.trace import Program, Tracer, alone, flattened, shape_of, traced
from fluctua.core import baselines, check, twin_sweep
from fluctua.core.draws import Density
from fluctua.core.simulate import Ensemble
from fluctua.core.twin import Guess, Numbers, check_path, direct_term, expand
from fluctua.core.twin_sweep import Backward, Parts, TwinCall, advance_twin, batches, end
from fluctua.core.types import Array, PyTree

KEPT_BYTES = 256 * 2**20
"""The most that the kept states of the trajectories of one pass may take."""

BASELINES = {baselines.none: 0, baselines.time_only: 0, baselines.mean: 1, baselines.optimal: 2}


class TwinProgram(NamedTuple):
    """One step of a trajectory and its twin. program: its explicit terms are those of the direct part.

    ahead: x̄ₙ₊₁ (M,). delta: δₙ without the reward of the step. reward: gΔt + r. left: r − r̃. gain: vₙ − vₙ₊₁. slope: pₙ
    (M,).
    """

    program: Program
    ahead: list[int]
    delta: int
    reward: int
    left: int
    gain: int
    slope: list[int]


def traced_twin(call: TwinCall, ensemble: Ensemble) -> TwinProgram:
    """The step of a trajectory and of its twin, from the first of an ensemble that is about to begin."""
    twin, numbers, t = call.twin, call.numbers, call.substrate.t
    if twin.order != 1:
        raise Unsupported("twin", f"a twin of order {twin.order}; kernels follow those of order 1")
    program = traced(twin.model, call.substrate.recipe, numbers.theta, ensemble, t)
    tracer = Tracer(program.graph)
    x, context, _ = alone(ensemble._replace(streams=None))
    (flat, unravel), (own, unravel_own) = flattened(numbers.theta), flattened(numbers.twin)

    def forwards(own: Array, xbar: Array, t: Array, dt: Array, context: PyTree) -> Array:
        one = jax.tree.map(lambda leaf: leaf[None], (xbar, context))
        return advance_twin(twin, Numbers(None, unravel_own(own)), one[0], t, dt, one[1])[0]

    def back(
        flat: Array, own: Array, x: Array, x_next: Array, xbar: Array, slope: Array, t: Array, dt: Array,
        context: PyTree, origin: Array,
    ) -> tuple[Array, ...]:  # fmt: skip
        numbers, guess = Numbers(unravel(flat), unravel_own(own)), Guess(slope, None)
        direct, expected, reward, left = direct_term(twin, numbers, guess, x, x_next, xbar, (t, dt, origin), context)
        new, gain = expand(twin, numbers, guess, xbar, t, dt, context)
        return direct, expected - gain - new.at(x - xbar), reward, left, gain, new.slope

    time, origin = (jax.ShapeDtypeStruct(shape, t.dtype) for shape in ((), (2,)))
    values = (flat, own, x, x, x, x, time, time, context, origin)
    inputs = [
        tracer.input("theta", flat), tracer.input("theta", own, flat.size), tracer.input("x", x),
        np.array(program.x_next), tracer.input("p", x), tracer.input("p", x, x.size), tracer.input("t", time),
        tracer.input("dt", time), tracer.tree("context", context), tracer.input("origin", origin),
    ]  # fmt: skip
    some = [1, 4, 6, 7, 8]
    (later,) = tracer.call(forwards, [values[k] for k in some], [inputs[k] for k in some])
    direct, delta, reward, left, gain, slope = tracer.call(back, list(values), inputs)
    program = program._replace(explicit=direct.tolist())
    return TwinProgram(program, later.tolist(), int(delta), int(reward), int(left), int(gain), slope.tolist())


def _text(of: TwinProgram, layout: Layout) -> str:
    """The functions `twin_ahead` and `twin_back`."""
    program = of.program
    ahead = [("y", k, node) for k, node in enumerate(of.ahead)]
    back = [
        *(("s", k, program.score[p]) for k, p in enumerate(layout.scores)),
        *(("d", k, program.explicit[p]) for k, p in enumerate(layout.explicits)),
        ("delta", None, of.delta), ("reward", None, of.reward), ("left", None, of.left), ("gain", None, of.gain),
        *(("q", k, node) for k, node in enumerate(of.slope)),
    ]  # fmt: skip
    results = "const V *p, V *s, V *d, V &delta, V &reward, V &left, V &gain, V *q"
    return "\n".join(
        [
            function(program, layout, "twin_ahead", ahead, "const V *p, V *y"),
            function(program, layout, "twin_back", back, results),
        ]
    )


class TwinKernel(NamedTuple):
    """A program, where its numbers are, its text, the loaded library and the type of its numbers."""

    program: Program
    layout: Layout
    source: str
    library: Any  # of the CPU, or the form of a kernel for a GPU
    real: np.dtype


class TwinKey:
    """What a kernel is made of; equal where code, structure and types are, whatever the numbers."""

    def __init__(self, call: TwinCall, optimise: str, place: str = "cpu"):
        self.call, self.optimise, self.place = call, optimise, place
        self.wiener = wiener = wiener_of(call.substrate.recipe.wiener)
        self.ensemble = jax.eval_shape(lambda: begun(call, 1, 0))
        self.noise64 = jnp.result_type(float) == np.float64
        self.baseline = baseline_of(call)
        one = self.ensemble._replace(streams=None)
        self._identity = (
            call.twin, call.substrate.recipe, shape_of(call.numbers[:2]), shape_of(one), str(call.substrate.t.dtype),
            self.noise64, wiener, self.baseline, optimise, place,
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash(self._identity)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TwinKey) and self._identity == other._identity


def baseline_of(call: TwinCall) -> int:
    """How Λ is centred: by a table, by the mean of the others, by their weighted mean."""
    of = call.twin.model.baseline
    for make, number in BASELINES.items():
        if make().of is of:
            return number
    raise Unsupported("baseline", "this baseline of the twin's Λ; kernels serve none, time, mean, optimal")


@lru_cache(maxsize=64)
def twin_kernel(key: TwinKey, build: bool) -> TwinKernel:
    """The kernel of a twin, traced, written and compiled."""
    traced_step = traced_twin(key.call, key.ensemble)
    program = traced_step.program
    more = [*traced_step.ahead, *traced_step[2:6], *traced_step.slope]
    layout = laid_out(program, more)
    real = np.dtype(key.ensemble.x.dtype)
    double = real == np.float64
    if key.place == "cuda":
        text = f"#define TWIN_BASELINE {key.baseline}\n" + _text(traced_step, layout)
        form = cuda.Form(program, layout, real, key.noise64, key.wiener, twin=text)
        return TwinKernel(program, layout, form.source("twin_backward"), form, real)
    source = cpu.cpu_source(program, layout, double=double, noise64=key.noise64, wiener=key.wiener, sweep=0)
    twin = native("twin.hpp")
    source = "\n".join([source, f"#define TWIN_BASELINE {key.baseline}", _text(traced_step, layout), twin])
    library = ctypes.CDLL(str(cpu.library_of(source, key.optimise))) if build else None
    return TwinKernel(program, layout, source, library, real)


# ------------------------------------------------------------------------------------------ running

POINTERS = ("shared", "timed", "x", "context", "stream", "kept", "last", "slope", "value", "residual", "reward",
            "direct", "correction", "bar", "edges", "sums", "dominated")  # fmt: skip


class _TwinRun(ctypes.Structure):
    """`struct TwinRun` of native/twin.hpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("count", "steps", "segment")),
        *((name, ctypes.c_void_p) for name in POINTERS),
    ]


def begun(call: TwinCall, count: int, low: int) -> Ensemble:
    """Trajectories from number `low` on, before their first step."""
    substrate = call.substrate
    return twin_sweep.begin_from(substrate.recipe, count, call.key, call.numbers.theta, substrate.x0, call.offset + low)


def parts(call: TwinCall, kernel: TwinKernel) -> Parts:
    """Direct and correction (E, P), returns (E,), mean of Λ (T+1,)."""
    steps = len(call.substrate.times.dt)
    segment = int(np.ceil(np.sqrt(steps)))
    if isinstance(kernel.library, cuda.Form):
        segment = 4 * -(-segment // 4)  # normals of up to four steps are drawn together
    each = -(-steps // segment) * 2 * kernel.program.state * kernel.real.itemsize
    slices = batches(call.count, call.batch)
    at_once = max(1, KEPT_BYTES // (each * call.batch))
    pieces: list[Parts] = []
    for k in range(0, len(slices), at_once):
        pieces += _pass(call, kernel, slices[k : k + at_once], segment)
    return twin_sweep.joined(pieces)


def _pass(call: TwinCall, kernel: TwinKernel, slices: list[tuple[int, int]], segment: int) -> list[Parts]:
    twin, numbers, times, real = call.twin, call.numbers, call.substrate.times, kernel.real
    low, count, steps = slices[0][0], slices[-1][1] - slices[0][0], len(call.substrate.times.dt)
    ensemble = begun(call, count, low)
    flat = np.concatenate([np.asarray(ravel_pytree(tree)[0], float) for tree in numbers[:2]])
    arrays: dict[str, np.ndarray] = ahead.arrays(kernel.program, kernel.layout, real, call.substrate, flat, ensemble)
    m = kernel.program.state
    arrays |= {"last": np.empty((2 * m, count), real)}
    sizes = {"count": count, "steps": steps, "segment": segment}
    run: Any
    if isinstance(kernel.library, cuda.Form):
        run = cuda.TwinRunner(kernel.library, sizes, arrays)
    else:
        arrays["kept"] = np.empty((-(-steps // segment), 2 * m, count), real)
        run = _Runner(kernel, sizes, arrays)
    edges = np.array([slices[0][0], *(high for _, high in slices)], np.int64) - low
    run("twin_forward")
    x, xbar = arrays["last"][:m].T, arrays["last"][m:].T
    check.finite_simulation(x, call.substrate.t, call.offset + low)
    check_path(xbar, call.substrate.t)
    carry = end(twin, numbers, x, xbar, times, ensemble.context)

    own = lambda values: np.array(values, real, order="C")
    table = np.zeros(steps) if numbers.table is None else np.asarray(numbers.table)[1:]  # n+1: δ precedes the kick
    arrays |= {
        "slope": own(carry.guess.slope.T), "value": own(carry.value), "residual": own(carry.residual),
        "reward": own(carry.reward), "direct": own(carry.direct.T), "correction": own(carry.correction.T),
        "bar": own(table), "edges": edges, "sums": np.zeros((len(slices), steps)), "dominated": np.zeros(1, np.int32),
    }  # fmt: skip
    last = np.asarray(carry.residual, float)
    run("twin_backward")
    if arrays["dominated"][0]:
        raise Unsupported("baseline", "one trajectory has nearly all of the weight of a step")

    of_theta = np.dtype(carry.direct.dtype)
    back = Backward(
        Guess(arrays["slope"].T, None), arrays["value"], arrays["residual"], arrays["reward"],
        arrays["direct"].T.astype(of_theta), arrays["correction"].T.astype(of_theta),
    )  # fmt: skip
    whole = [(0, count)]
    if isinstance(twin.model.start, Density):  # the draw of X₀ leaves one out of its batch
        whole = [(a - low, b - low) for a, b in slices]
    finished = []
    for number, (a, b) in enumerate(whole):
        cut = lambda tree, a=a, b=b: jax.tree.map(lambda leaf: leaf[a:b], tree)
        sums = arrays["sums"][number] if len(whole) > 1 else arrays["sums"].sum(axis=0)
        means = np.append(sums / (b - a), last[a:b].mean()).astype(real)
        finished.append(
            twin_sweep.finish_parts(
                twin, numbers, cut(back), cut(ensemble.x), times, cut(ensemble.context), [jnp.asarray(means)]
            )
        )
    return finished


class _Runner(NamedTuple):
    """Calls a kernel on pieces of an ensemble, on all cores."""

    kernel: TwinKernel
    sizes: dict[str, int]
    arrays: dict[str, np.ndarray]

    def __call__(self, name: str) -> None:
        count = self.sizes["count"]
        pieces = [(a, min(a + 128, count)) for a in range(0, count, 128)]
        if name == "twin_backward":
            pieces = [(k, k + 1) for k in range(len(self.arrays["edges"]) - 1)]
        run = _TwinRun(**self.sizes)
        for key, array in self.arrays.items():
            assert array.flags.c_contiguous
            setattr(run, key, array.ctypes.data)
        function = self.kernel.library[name]
        cpu.each(lambda piece: function(ctypes.byref(run), *map(ctypes.c_int64, piece)), pieces)
