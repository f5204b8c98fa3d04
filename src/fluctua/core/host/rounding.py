"""Rounding of simulated steps: numbers near a large state may lie further apart than a kick."""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

import jax
import numpy as np

from fluctua.core import arrays, check
from fluctua.core.arrays import Array, Params, PyTree
from fluctua.core.host import programs
from fluctua.core.process import AnyProcess, NoiseProduct, Process
from fluctua.core.trajectories import Times

COARSE_KICK = 0.35
"""Distance of neighbouring numbers over a kick from which a gradient is off by a per cent.

Rounding a state to a grid of width u adds u²/12 to the variance σ²Δt of its kick, and the score
divides by the latter. Beyond one kick most steps are rounded away.
"""

COARSE_DRIFT = 0.1
"""The same over the drift of a step, without noise: its rounding repeats from step to step."""

COARSE_TIME = 0.1
"""Distance of neighbouring times over a step from which a drift is taken at other times."""

STATES = 8
"""Number of states at which drift and noise are evaluated."""

MAX_ROUNDED = 256

_ROUNDED: dict[Any, bool] = {}
"""Simulations whose rounding was looked at, the latest ones, and whether along their paths."""


def warn_about_rounding(
    process: AnyProcess, theta: Params, x: Array, times: Times, context: PyTree
) -> None:
    """Warn where the steps of a simulation are smaller than its numbers can hold.

    Once for each process, step and size of the states, and by NumPy: nothing is compiled. A noise
    that is a matrix-free product is not examined.

    Args:
        process: what is simulated.
        theta: θ.
        x: some states (n, M), as they are stored.
        times: the grid.
        context: leaves (n, ...).

    """
    if not isinstance(process, Process) or process.noise is None:
        return
    leaves = jax.tree.leaves(context)
    is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in (x, times.t, *leaves))
    if is_traced or isinstance(process.noise, NoiseProduct) or any(map(arrays.is_key, leaves)):
        return
    states = np.asarray(x)
    largest = np.abs(states).max(axis=0)
    exponents = np.frexp(largest)[1].tobytes()
    # as NumPy: within `jax.eval_shape`, as of a fingerprint, JAX would trace the minimum
    code = (process, check.tree_signature(theta), float(np.asarray(times.dt).min()), exponents)
    along = len(states) > 1
    seen = _ROUNDED.get(code)
    if seen or (seen is False and not along) or not np.isfinite(largest).all():
        return
    message = _describe_rounding(process, theta, states, times, context)
    _ROUNDED[code] = along or bool(message)
    if len(_ROUNDED) > MAX_ROUNDED:
        _ROUNDED.pop(next(iter(_ROUNDED)))
    if message:
        _warn_outside(message)


def _describe_rounding(
    process: Process, theta: Params, states: np.ndarray, times: Times, context: PyTree
) -> str:
    """Which steps are rounded away, and what to do; empty where none are."""
    size = states.shape[1]
    dt = float(np.asarray(times.dt).min())
    some = np.resize(states, (STATES, size))
    end, one = check.take_first((np.asarray(times.t)[-1:], context))
    check.shapes(process, theta, states[0], end, one)  # its messages before those of JAX
    gap = np.spacing(np.abs(end))
    program = _trace_states(process, *map(check.tree_signature, (theta, some, end, one)))
    try:
        drift, sigma = program(theta, some, end, one)
        later = drift
        if gap > COARSE_TIME * dt:
            later = program(theta, some, np.asarray(end + dt, end.dtype), one)[0]
    except programs.NoRule:
        return ""
    width = np.spacing(np.abs(states).max(axis=0))
    square = np.mean(sigma**2 if sigma.ndim == 2 else np.sum(sigma**2, axis=2), axis=0)
    noisy = square > 0
    # one state may rest where others move
    move = np.sqrt(np.mean(drift**2, axis=0)) * dt if len(states) > 1 else np.zeros(size)
    step = np.where(noisy, np.sqrt(square * dt), move)
    over = np.where(step > 0, width / np.where(step > 0, step, 1), 0)
    i = int(np.argmax(over / np.where(noisy, COARSE_KICK, COARSE_DRIFT)))
    remedy = (
        'or call jax.config.update("jax_enable_x64", True) before anything else.'
        if states.dtype == np.float32
        else "or take longer steps."
    )
    if over[i] > (COARSE_KICK if noisy[i] else COARSE_DRIFT):
        return (
            f"the steps of the simulation are lost in rounding: near {states[0, i]:.6g} the "
            f"numbers of {states.dtype} are {width[i]:.1e} apart, {over[i]:.2g} times the "
            f"{'kick' if noisy[i] else 'drift'} of one step (component {i}). Returns and gradients "
            f"are wrong. Measure the state from there (subtract an offset), {remedy}"
        )
    if np.array_equal(drift, later, equal_nan=True):
        return ""
    return (
        f"the drift depends on time, and near t = {end:.6g} the times of {end.dtype} are {gap:.1e} "
        f"apart, with steps of {dt:.1e}. Begin at t = 0, or take another unit, {remedy}"
    )


@functools.lru_cache(maxsize=256)
def _trace_states(process: Process, *signatures: Any) -> programs.HostProgram:
    """Drift and noise at several states."""
    noise: Any = process.noise

    def evaluate(theta: Params, states: Array, t: Array, context: PyTree) -> tuple[Array, Array]:
        def at(state: Array) -> tuple[Array, Array]:
            return process.drift(theta, state, t, context), noise(theta, state, t, context)

        return jax.vmap(at)(states)

    return programs.HostProgram(evaluate, *map(check.abstract_tree, signatures))


def _warn_outside(message: str) -> None:
    """A `RuntimeWarning` that points at the first caller outside of the library."""
    frame: Any = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_globals.get("__name__", "").startswith("fluctua."):
        frame = frame.f_back
        level += 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)
