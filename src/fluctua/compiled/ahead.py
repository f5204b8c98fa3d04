"""Arrays that kernels read: ensembles with the trajectory last, and numbers computed ahead."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.compiled.emit import Layout
from fluctua.compiled.scalar import Unsupported
from fluctua.compiled.trace import Program
from fluctua.core import draws
from fluctua.core.arrays import Array, Params, PyTree, jit
from fluctua.core.draws import Wiener, threefry
from fluctua.core.simulate import Ensemble, Simulator
from fluctua.core.trajectories import Times

DOMINATED = 1
NOT_FINITE = 2
OUT_OF_RANGE = 4
"""Flags that passes set, as in native/ensemble.hpp and native/ahead.cuh."""


STREAM_WORDS = {0: 0, 1: 2, 2: 3, 3: 3}
"""Words that identify the noise of a trajectory, by the number of the generator."""


def encode_generator(wiener: Wiener) -> int:
    """Return the number of a source of noise in native/noise.hpp."""
    known = {draws.no_noise: 0, threefry: 1, draws.philox: 2, draws.philox7: 3}
    if wiener not in known:
        raise Unsupported("wiener", f"a source of noise other than {', '.join(draws.GENERATORS)}")
    partitionable = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    if wiener is threefry and not partitionable:
        raise Unsupported("wiener", "the noise of jax_threefry_partitionable = False")
    return known[wiener]


def compute_numbers(
    program: Program,
    layout: Layout,
    real: np.dtype,
    substrate: Simulator,
    flat: np.ndarray,
    context: np.ndarray,
    tables: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Compute the numbers that a kernel needs before its first step, as arrays by name.

    "shared": the same for all trajectories and steps. "timed": per step (T, ·). "context": the
    context of each trajectory, and what JAX computes of it (·, E).

    flat: θ, in the order of the leaves of the program. context: (·, E). tables: inputs of the kinds
    "table" (T, ·) and "last" (·,), of a program that has them.
    """
    graph = program.graph
    flat = np.asarray(flat, np.float64)
    times = Times(*(np.asarray(v, np.float64) for v in substrate.times))
    count = context.shape[1]
    steps = len(times.dt)

    def leaf(kind: str, index: int) -> Any:
        if kind == "theta":
            return flat[index]
        if kind == "context":
            return context[index]
        if kind in ("table", "last"):
            assert tables is not None
            return tables[kind][..., index]
        return {"t": times.t[:-1], "dt": times.dt, "origin": times.t[(0, 1, -1)[index]]}[kind]

    shared = np.array([float(v) for v in graph.evaluate(layout.shared, leaf)])
    timed = [np.broadcast_to(v, steps) for v in graph.evaluate(layout.timed, leaf)]
    table = np.stack(timed, axis=1).astype(float) if timed else np.empty((steps, 0))
    columns = [np.broadcast_to(v, count) for v in graph.evaluate(layout.columns, leaf)]
    for values in (shared, table):
        _check_range(values, real)

    with_columns = np.concatenate([context, *(v[None] for v in columns)])
    tables = {"shared": shared, "timed": table, "context": with_columns}
    return {name: np.ascontiguousarray(values, real) for name, values in tables.items()}


def make_arrays(
    program: Program,
    layout: Layout,
    real: np.dtype,
    substrate: Simulator,
    flat: np.ndarray,
    ensemble: Ensemble,
) -> dict[str, np.ndarray]:
    """Return the arrays of an ensemble, trajectory last, and those of `compute_numbers`."""
    count = len(ensemble.x)
    leaves = jax.tree.leaves(ensemble.context)
    rows = [np.asarray(leaf).reshape(count, -1).T for leaf in leaves]
    context = np.concatenate(rows) if rows else np.empty((0, count))
    words = {0: _no_words, 1: threefry_words, 2: _philox_words, 3: _philox_words}[
        encode_generator(substrate.recipe.wiener)
    ]
    return compute_numbers(program, layout, real, substrate, flat, context) | {
        "x": np.ascontiguousarray(np.asarray(ensemble.x).T, real),
        "stream": np.ascontiguousarray(words(ensemble.streams, count), np.uint32),
    }


@jit
def concatenate_parameters(*thetas: Params) -> Array:
    """Concatenate parameters into one vector, in the widest of their types."""
    return jnp.concatenate([ravel_pytree(theta)[0] for theta in thetas])


@partial(jit, static_argnums=(0, 1))
def lay_out_ensemble(wiener: int, real: np.dtype, ensemble: Ensemble) -> dict[str, Array]:
    """Return the arrays of an ensemble as `make_arrays` does, on the device that holds it."""
    count = len(ensemble.x)
    leaves = jax.tree.leaves(ensemble.context)
    table = {"x": ensemble.x.T.astype(real)}
    if leaves:
        table["context"] = jnp.concatenate(
            [leaf.reshape(count, -1).T.astype(real) for leaf in leaves]
        )
    if wiener == 1:
        raw = ensemble.streams.dtype == jnp.uint32
        table["stream"] = (ensemble.streams if raw else jax.random.key_data(ensemble.streams)).T
    elif wiener >= 2:
        seed, trajectory = ensemble.streams
        words = jnp.broadcast_to(seed.reshape(-1, 2), (count, 2)).T
        table["stream"] = jnp.concatenate([words, trajectory.astype(jnp.uint32)[None]])
    return table


def _no_words(streams: PyTree, count: int) -> np.ndarray:
    return np.empty((0, count), np.uint32)


def check_generator(keys: Array) -> None:
    """Raise for keys of a generator other than threefry2x32, which kernels do not have."""
    if keys.dtype != np.uint32 and jax.random.key_impl(keys) != "threefry2x32":
        raise Unsupported("key", f"keys of the generator {jax.random.key_impl(keys)}")


def threefry_words(streams: PyTree, count: int) -> np.ndarray:
    """Return keys as words. (2, E)"""
    check_generator(streams)
    words = streams if streams.dtype == np.uint32 else jax.random.key_data(streams)
    return np.asarray(words).T


def _philox_words(streams: PyTree, count: int) -> np.ndarray:
    seed, trajectory = streams
    return np.concatenate(
        [np.asarray(seed).reshape(-1, 2).T, np.asarray(trajectory, np.uint32)[None]]
    )


def _check_range(values: np.ndarray, real: np.dtype) -> None:
    """Raise where products of shared factors leave the range of `real`."""
    size = np.abs(values[np.isfinite(values)])
    limits = np.finfo(real)
    if size.size and (size.max() > limits.max or (size[size > 0].min(initial=1.0)) < limits.tiny):
        raise make_range_error(real)


def make_range_error(real: np.dtype) -> Unsupported:
    """Return the error for numbers computed ahead that the type of the states cannot hold."""
    return Unsupported(
        "numbers", f"products of parameters and time steps leave the range of {real.name}"
    )
