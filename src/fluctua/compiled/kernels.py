"""Kernels of one's own process, traced, written and compiled once for each structure of a call."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.compiled import cpu, cuda, emit, trace
from fluctua.compiled.ahead import (
    number_generator,
)
from fluctua.compiled.scalar import Unsupported
from fluctua.core import baselines, simulate
from fluctua.core.arrays import Array, Params, jit
from fluctua.core.streamed import Call

SWEEPS = {"none": 1, "time": 1, "mean": 1, "optimal": 2}
"""The sweep of native/sweep.hpp for each baseline that a kernel serves."""

OPTIMISE = "-O2"


class Kernel(NamedTuple):
    """A program, where its numbers are, its text and the loaded library."""

    program: trace.Program
    layout: emit.Layout
    source: str
    library: cpu.CpuLibrary | cuda.GpuLibrary | None
    real: np.dtype
    begins: bool  # its trajectories itself, from one state, without a context


@lru_cache(maxsize=256)
def make_kernel(key: _Key, build: bool) -> Kernel:
    """The kernel of a key. build: whether its library is compiled and loaded too."""
    program = trace.traced(key.model, key.recipe, key.theta, key.ensemble, key.t)
    layout = emit.laid_out(program)
    real = np.dtype(np.float64 if key.double else np.float32)
    library: cpu.CpuLibrary | cuda.GpuLibrary | None = None
    begins = key.recipe.fixed and key.model.objective.initial is None
    if key.place == "cuda":
        ahead = emit.numbers_ahead(program, layout)
        theta = np.result_type(*(leaf.dtype for leaf in jax.tree.leaves(key.theta)))
        form = cuda.Form(
            program,
            layout,
            real,
            key.noise64,
            key.wiener,
            key.sweep == 2,
            begins,
            ahead=ahead,
            theta=theta,
        )
        return Kernel(
            program,
            layout,
            form.source("sweep"),
            cuda.GpuLibrary(form) if build else None,
            real,
            begins,
        )
    source = cpu.cpu_source(
        program,
        layout,
        double=key.double,
        noise64=key.noise64,
        wiener=key.wiener,
        sweep=key.sweep,
        begins=begins,
    )
    if build:
        library = cpu.CpuLibrary(
            cpu.find_or_build(source, OPTIMISE), 8 if key.double or key.noise64 else 16, real
        )
    return Kernel(program, layout, source, library, real, begins)


class _Key:
    """What a kernel is made of; equal where code, structure and types are, whatever the numbers."""

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
        self.wiener = number_generator(self.recipe.wiener)
        self.sweep = _choose_sweep(call)
        one = ensemble._replace(streams=None)
        self._identity = (
            call.model._replace(baseline=_none, initial_baseline=_none),
            self.recipe,
            trace.describe_shapes(call.theta),
            trace.describe_shapes(one),
            str(self.t.dtype),
            self.noise64,
            self.wiener,
            self.sweep,
            place,
        )

    def __hash__(self) -> int:
        return hash(self._identity)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._identity == other._identity


def _none(kick: Any) -> Any:
    return kick


def find_kernel(call: Call, place: str, build: bool = True) -> Kernel:
    """The kernel of a call, found without beginning an ensemble if there was a call like it."""
    like = (
        call.model,
        call.plans[0].name,
        call.substrate.recipe,
        trace.describe_shapes(call.theta),
        trace.describe_shapes(call.substrate.x0),
        str(call.substrate.t.dtype),
        jnp.result_type(float),
        place,
        build,
    )
    if like not in KERNELS:
        KERNELS[like] = make_kernel(_Key(call, place), build)
        if len(KERNELS) > MOSTKERNELS:
            KERNELS.pop(next(iter(KERNELS)))
    return KERNELS[like]


KERNELS: dict[Any, Kernel] = {}
MOSTKERNELS = 256


def _choose_sweep(call: Call) -> int:
    name = call.plans[0].name
    known = {
        "none": baselines.none,
        "time": baselines.time_only,
        "mean": baselines.mean,
        "optimal": baselines.optimal,
    }
    if name not in known or call.model.baseline is not known[name]().of:
        raise Unsupported("baseline", f"the baseline {name!r}; kernels serve {', '.join(SWEEPS)}")
    return SWEEPS[name]


@partial(jit, static_argnums=(0, 1))
def _ensemble(
    recipe: simulate.Recipe,
    count: int,
    key: Array,
    theta: Params,
    x0: Array | None,
    first: int | None,
) -> simulate.Ensemble:
    return simulate.begin(recipe, count, key, theta, x0, first)


def begin_ensemble(
    call: Call, key: Array, count: int, first: int | None = None
) -> simulate.Ensemble:
    """Trajectories of a call before their first step, from the key of their noise."""
    return _ensemble(call.substrate.recipe, count, key, call.theta, call.substrate.x0, first)
