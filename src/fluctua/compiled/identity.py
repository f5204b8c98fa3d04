"""What a kernel depends on, as one hash: the same in every process that would write the same text.

A kernel is written from drift, noise, rewards and stop, which JAX traces in milliseconds, and from
functions of this library, which differentiate them and take longest. The hash is of the former and
of the state of the latter: of the traced functions with their constants, of shapes and types, of
the files of the library, and of versions and settings of JAX. It is None where a function has parts
without a hash, such as a derivative of its own; such a process is traced as a whole.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fluctua.compiled import trace
from fluctua.core import draws, scores, simulate
from fluctua.core.arrays import Params, PyTree
from fluctua.core.model import EstimatorModel
from fluctua.core.objective import Rewards
from fluctua.core.process import STEPS, NoiseProduct, Process
from fluctua.store.fingerprint import digest_program

FORMAT = 1
"""Raise it when files of saved kernels change."""

PACKAGES = ("jax", "jaxlib", "numpy")
FOLDERS = ("compiled", "core", "processes")
"""Folders of this library whose files a kernel is made by."""

SCORES: tuple[Any, ...] = (scores.full_score, scores.drift_score)


class Opaque(Exception):
    """A part of a process that has no hash."""


class StepShapes(NamedTuple):
    """Shapes and types of the arguments of a step of one trajectory."""

    theta: Params
    x: Any
    t: Any
    context: PyTree


def identify_step(
    model: EstimatorModel,
    recipe: simulate.Recipe,
    theta: Params,
    ensemble: simulate.Ensemble,
    t: Any,
) -> str | None:
    """Return the hash of what `trace.trace_step` would make of its arguments, or None."""
    flat, unravel = trace.flatten_parameters(theta)
    x, context, _ = trace.drop_ensemble_axis(ensemble._replace(streams=None))
    time = jax.ShapeDtypeStruct((), t.dtype)
    shapes = StepShapes(jax.eval_shape(unravel, flat), x, time, context)
    try:
        parts = [
            *_describe_surroundings(),
            str(jax.tree.structure(theta)),
            *(f"{leaf.dtype} {np.shape(leaf)}" for leaf in jax.tree.leaves((theta, x, time))),
            str(jax.tree.structure(context)),
            *(f"{leaf.dtype} {leaf.shape}" for leaf in jax.tree.leaves(context)),
            str(recipe.wiener is draws.no_noise),
            *_describe_process(recipe.process, shapes),
            *_describe_model(model, shapes),
        ]
    except Opaque:
        return None
    return hash_parts(parts)


def hash_parts(parts: list[str]) -> str:
    """Return the hash of several words, as 40 hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode()
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()[:40]


def _describe_model(model: EstimatorModel, shapes: StepShapes) -> Iterator[str]:
    if model.score not in SCORES or isinstance(model.start, draws.Reparameterised):
        raise Opaque("score")
    yield f"score {SCORES.index(model.score)}"
    yield from _describe_process(model.process, shapes)
    yield from _describe_rewards(model.objective, shapes)


def _describe_process(process: Any, shapes: StepShapes) -> Iterator[str]:
    plain = isinstance(process, Process) and process.diffusion is None
    if not plain or process.noise is None or isinstance(process.noise, NoiseProduct):
        raise Opaque("process")
    if process.integrator not in STEPS:
        raise Opaque("integrator")
    yield f"{process.integrator} {process.noiseless}"
    yield _describe_function(process.drift, *shapes)
    yield _describe_function(process.noise, *shapes)


def _describe_rewards(rewards: Rewards, shapes: StepShapes) -> Iterator[str]:
    theta, x, t, context = shapes
    yield _describe_function(rewards.running, *shapes)
    yield _describe_function(rewards.terminal, theta, x, context)
    yield "no reward of steps"
    if rewards.per_step is not None:
        yield _describe_function(rewards.per_step, theta, x, x, t, t, context)
    yield f"initial {rewards.initial is not None}"  # JAX computes it
    stop = rewards.stop
    if stop is not None:
        yield f"stop {stop.bridge}"
        yield _describe_function(stop.level, *shapes)
        if stop.process is not None:
            yield from _describe_process(stop.process, shapes)


def _describe_function(function: Callable[..., Any], *shapes: Any) -> str:
    # through a new function: JAX keeps what it traced, also where a global has changed since
    program = jax.make_jaxpr(lambda *arguments: function(*arguments))(*shapes)
    digest = digest_program(program)
    if digest is None:
        raise Opaque("function")
    return digest


def _describe_surroundings() -> Iterator[str]:
    """Versions, settings of JAX and files of the library."""
    yield f"format {FORMAT} Python {platform.python_version()}"
    yield from _describe_library()
    settings = getattr(jax.config, "values", None)
    if settings is None:
        raise Opaque("settings of JAX")
    yield repr(sorted((name, repr(value)) for name, value in settings.items()))


@cache
def _describe_library() -> list[str]:
    """Versions of packages, and the size and time of the files that write kernels."""
    lines = [f"{name} {version(name)}" for name in PACKAGES]
    root = Path(__file__).parents[1]
    for folder in FOLDERS:
        for place, folders, files in os.walk(root / folder):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            for name in sorted(files):
                status = os.stat(os.path.join(place, name))
                lines.append(f"{place} {name} {status.st_size} {status.st_mtime_ns}")
    return lines
