"""Kernels of a user's process, traced, written and compiled once per structure of a call."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.compiled import cpu, cuda, emit, identity, saved, trace
from fluctua.compiled.ahead import encode_generator
from fluctua.compiled.scalar import Unsupported
from fluctua.core import baselines, draws, simulate
from fluctua.core.arrays import Array, Params, jit, working_dtype
from fluctua.core.host import keys
from fluctua.core.streamed import Call

SWEEPS = {"none": 1, "time": 1, "mean": 1, "optimal": 2}
"""The sweep of native/sweep.hpp by baseline; kernels have no other baselines."""

OPTIMISE = "-O2"
"""Optimisation level of the C++ compiler."""

MAX_KERNELS = 256
"""Kernels kept in `KERNELS`; the oldest is dropped first."""


class Kernel(NamedTuple):
    """A compiled step of a process, ready to run over an ensemble.

    program: nodes that a step computes.
    layout: where the kernel finds its numbers.
    source: generated text; empty for a kernel that was found on disk, beside its library.
    library: loaded passes; None if only the text is wanted.
    real: type of states and sums.
    self_starting: the kernel starts its trajectories itself, from one state and without a context.
    """

    program: trace.Program
    layout: emit.Layout
    source: str
    library: cpu.CpuLibrary | cuda.GpuLibrary | None
    real: np.dtype
    self_starting: bool


@lru_cache(maxsize=256)
def make_kernel(key: _Key, build: bool) -> Kernel:
    """Make the kernel of a key. build: compile and load its library too."""
    real = key.real
    self_starting = key.self_starting
    name = key.identify() if build and key.place == "cpu" else None
    known = None if name is None else saved.load_kernel(name)
    if known is not None:
        library = cpu.CpuLibrary(known.library, key.lanes, real)
        return Kernel(known.program, known.layout, "", library, real, self_starting)
    program = trace.trace_step(key.model, key.recipe, key.theta, key.ensemble, key.t)
    layout = emit.make_layout(program)
    if key.place == "cuda":
        ahead = emit.write_numbers_ahead(program, layout)
        theta = np.result_type(*(leaf.dtype for leaf in jax.tree.leaves(key.theta)))
        source_on_gpu = cuda.GpuSource(
            program,
            layout,
            real,
            key.noise64,
            key.wiener,
            key.sweep == 2,
            self_starting,
            ahead=ahead,
            theta=theta,
        )
        return Kernel(
            program,
            layout,
            source_on_gpu.write("sweep"),
            cuda.GpuLibrary(source_on_gpu) if build else None,
            real,
            self_starting,
        )
    source = cpu.write_cpu_source(
        program,
        layout,
        double=key.double,
        noise64=key.noise64,
        wiener=key.wiener,
        sweep=key.sweep,
        self_starting=self_starting,
    )
    if not build:
        return Kernel(program, layout, source, None, real, self_starting)
    path = cpu.find_or_build(source, OPTIMISE)
    if name is not None:
        saved.save_kernel(name, program, layout, path)
    library = cpu.CpuLibrary(path, key.lanes, real)
    return Kernel(program, layout, source, library, real, self_starting)


class _Key:
    """Key of a kernel. Equal keys have the same code, structure and types, not numbers."""

    def __init__(self, call: Call, place: str):
        ensemble = jax.eval_shape(lambda: begin_ensemble(call, call.key, 1))
        self.place = place
        self.model = call.model
        self.recipe = call.substrate.recipe
        self.t = call.substrate.t
        self.theta = call.theta
        self.ensemble = ensemble
        self.double = ensemble.x.dtype == np.float64
        self.noise64 = jnp.result_type(float) == np.float64
        self.wiener = encode_generator(self.recipe.wiener)
        self.sweep = _choose_sweep(call)
        self._identity = (
            call.model._replace(baseline=_no_baseline, initial_baseline=_no_baseline),
            self.recipe,
            trace.describe_shapes(call.theta),
            trace.describe_shapes(ensemble._replace(streams=None)),
            str(self.t.dtype),
            self.noise64,
            self.wiener,
            self.sweep,
            place,
        )

    @property
    def real(self) -> np.dtype:
        """Type of states and sums."""
        return np.dtype(np.float64 if self.double else np.float32)

    @property
    def lanes(self) -> int:
        """Trajectories that a core advances together."""
        return 8 if self.double or self.noise64 else 16

    @property
    def self_starting(self) -> bool:
        """Whether all trajectories start from one state, with no reward there and no stop."""
        objective = self.model.objective
        return self.recipe.fixed and objective.initial is None and objective.stop is None

    def identify(self) -> str | None:
        """Return a hash of all that the kernel on the CPU depends on; None where there is none."""
        compiler = cpu.describe_compiler()
        step = identity.identify_step(self.model, self.recipe, self.theta, self.ensemble, self.t)
        if step is None or not compiler:
            return None
        numbers = (self.double, self.noise64, self.wiener, self.sweep, self.self_starting)
        return identity.hash_parts([step, *compiler, OPTIMISE, *map(str, numbers)])

    def __hash__(self) -> int:
        return hash(self._identity)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._identity == other._identity


def _no_baseline(kick: Any) -> Any:
    return kick


def describe_call(call: Call) -> tuple[Any, ...]:
    """Return what calls with the same kernel have in common: functions, shapes, precision."""
    return (
        call.model,
        call.plans[0].name,
        call.substrate.recipe,
        trace.describe_shapes(call.theta),
        trace.describe_shapes(call.substrate.x0),
        str(call.substrate.t.dtype),
        jnp.result_type(float),
    )


def find_kernel(call: Call, place: str, build: bool = True) -> Kernel:
    """Find or make the kernel of a call. A call like an earlier one traces nothing again."""
    structure = (*describe_call(call), place, build)
    if structure not in KERNELS:
        KERNELS[structure] = make_kernel(_Key(call, place), build)
        if len(KERNELS) > MAX_KERNELS:
            KERNELS.pop(next(iter(KERNELS)))
    return KERNELS[structure]


KERNELS: dict[Any, Kernel] = {}
"""Kernels by the structure of the calls that they serve."""


def _choose_sweep(call: Call) -> int:
    name = call.plans[0].name
    known = {
        "none": baselines.none,
        "time": baselines.time_only,
        "mean": baselines.mean,
        "optimal": baselines.optimal,
    }
    if name not in known or call.model.baseline is not known[name]().function:
        raise Unsupported("baseline", f"the baseline {name!r}; kernels serve {', '.join(SWEEPS)}")
    if SWEEPS[name] == 2 and call.model.objective.stop is not None:
        raise Unsupported(
            "baseline", f"the baseline {name!r} with a `stop`, whose last trajectory is alone"
        )
    return SWEEPS[name]


@partial(jit, static_argnums=(0, 1))
def _begin(
    recipe: simulate.Recipe,
    count: int,
    key: Array,
    theta: Params,
    x0: Array | None,
    first: int | None,
) -> simulate.Ensemble:
    return simulate.start_ensemble(recipe, count, key, theta, x0, first)


def _begin_on_host(call: Call, key: Array, count: int, first: int) -> simulate.Ensemble | None:
    """Return trajectories that all begin alike, by NumPy; None where JAX must start them."""
    recipe = call.substrate.recipe
    x0 = call.substrate.x0
    words = keys.read_words(key) if jax.default_backend() == "cpu" else None
    if not recipe.fixed or x0 is None or words is None:
        return None
    noise = keys.split_words(words, simulate.NOISE)
    numbers = np.arange(first, first + count, dtype=np.uint32)
    streams: Any = ()
    if recipe.wiener is draws.threefry:  # a key per trajectory, as `fold_in` makes it
        streams = np.stack(keys.split_words(noise, numbers), axis=1)
    elif recipe.wiener is not draws.no_noise:
        seed = np.array(noise[::-1], np.uint32)
        streams = draws.PhiloxStream(np.broadcast_to(seed, (count, 2)), numbers)
    state = np.asarray(x0).astype(working_dtype(call.theta, x0))
    return simulate.Ensemble(np.broadcast_to(state, (count, *state.shape)), None, streams)


def begin_ensemble(
    call: Call, key: Array, count: int, first: int | None = None
) -> simulate.Ensemble:
    """Return `count` trajectories of a call before their first step. key: of their noise."""
    ensemble = _begin_on_host(call, key, count, first or 0)
    if ensemble is not None:
        return ensemble
    return _begin(call.substrate.recipe, count, key, call.theta, call.substrate.x0, first)
