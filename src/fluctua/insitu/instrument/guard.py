"""Whether trajectories can be what a calibrated instrument measured: fresh, and with the noise of the calibration.

With r = x' − x − μΔt, the kicks of component i are compared with the diffusion of the model,

    ν = ⟨(r − median r)²⟩ / 2QᵢᵢΔt,

the median over the trajectories of a batch, the mean over its steps, and less what is linear in the states: ν is the
noise of a trajectory whatever the calibrated drift misses. A dead channel has ν = 0, a random one a large ν.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from fluctua.core import check
from fluctua.core.diffusion import diffusion_matrix
from fluctua.core.steps import mean_rate
from fluctua.core.types import Array, NoiseProduct, Params, Process, PyTree, Trajectories

SLACK = 2.0
"""Noise within this factor of that at calibration is the noise: calibrations are good to some per cent, drifts slow."""
CHANCE = 1e-9
"""That a good trajectory is taken for a bad one by the scatter of its own sum of squares."""
SLACK_OF_FEW = 100.0
"""Upwards, for one or two trajectories, whose noise cannot be told from what the drift misses."""
MOST_STEPS = 200
"""Steps of a trajectory that are looked at, evenly over its time."""
FEWEST_FOR_MEDIAN = 3
"""Of fewer trajectories the median is one of them; their noise is then measured with what the drift misses."""
FEWEST_SAMPLES = 64
"""Shorter trajectories may repeat by chance where the converter is coarse."""
REMEMBERED = 2**16
"""Trajectories that a new one is compared with."""


class Verdict(NamedTuple):
    """bad: which trajectories are not what they should be (E,). reason: in words, "" if none."""

    bad: np.ndarray
    reason: str


class Repeats:
    """Remembers trajectories, and knows one that comes again: noise does not repeat itself, a full buffer does."""

    def __init__(self, marks: Iterable[int] = ()) -> None:
        self.seen = dict.fromkeys(int(mark) for mark in marks)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Which trajectories came before, in this batch or an earlier one. x: (E, T+1, M) -> (E,)"""
        repeated = np.zeros(len(x), bool)
        if x[0].size < FEWEST_SAMPLES:
            return repeated
        for i, one in enumerate(x):
            mark = int.from_bytes(hashlib.blake2b(np.ascontiguousarray(one).tobytes(), digest_size=8).digest(), "big")
            repeated[i] = mark in self.seen
            self.seen[mark] = None
        while len(self.seen) > REMEMBERED:
            del self.seen[next(iter(self.seen))]
        return repeated

    def marks(self) -> np.ndarray:
        """For a checkpoint."""
        return np.fromiter(self.seen, np.uint64)


class ResidualGuard:
    """Compares the noise of a batch with that of the calibration.

    Args:
        process: the model, with the calibration as its context.
        noise: ν of each component at calibration (M,); 1 where diffusion is all that moves a sample, more with readout
            noise. `calibrate` measures it; without it every trajectory passes.

    """

    def __init__(self, process: Process, noise: np.ndarray | None = None):
        self.noise = None if noise is None else np.asarray(noise, float)
        self.reading = np.nan  # noise of the last batch in units of the calibration's, of the component furthest off
        step = partial(_residual, check.process(process))
        steps = jax.vmap(step, in_axes=(None, 0, 0, 0, 0, None))
        self._residuals = jax.jit(jax.vmap(steps, in_axes=(None, 0, 0, None, None, 0)))

    def another(self) -> ResidualGuard:
        """A guard of another device of the same kind, which compiles nothing anew."""
        guard = copy.copy(self)
        guard.noise, guard.reading = None, np.nan
        return guard

    def calibrate(self, probes: list[tuple[Params, Trajectories]], context: PyTree) -> None:
        """Take ν from the trajectories that calibrated.

        Args:
            probes: settings and trajectories of the calibration.
            context: what they calibrated, without the axis of trajectories.

        """
        each = []
        for settings, (t, x, recorded, *_) in probes:
            known = jax.tree.map(partial(_rows, len(x)), context)
            noise = self.measure(settings, Trajectories(t, x, {**known, **recorded} if recorded else known))
            each.append(np.median(noise, axis=0))
        self.noise = np.maximum(np.median(each, axis=0), np.finfo(float).tiny)

    def __call__(self, settings: Params, trajectories: Trajectories) -> Verdict:
        """Which trajectories are not the calibrated noise."""
        count, steps = len(trajectories.x), min(len(trajectories.t) - 1, MOST_STEPS)
        if self.noise is None or count == 0:
            return Verdict(np.zeros(count, bool), "")
        unlike = self.measure(settings, trajectories) / self.noise
        most = SLACK if count >= FEWEST_FOR_MEDIAN else SLACK_OF_FEW
        bad = ~_within(unlike, steps, most)
        level = np.median(unlike, axis=0)
        if count >= FEWEST_FOR_MEDIAN:  # the noise of fewer is not told from what the drift misses
            self.reading = float(level[np.argmax(np.abs(np.log(np.maximum(level, np.finfo(float).tiny))))])
        off = ~_within(level, steps * count * 2 / np.pi, most)  # a median knows as much as 2/π of the values
        if not (bad.any() or off.any()):
            return Verdict(np.zeros(count, bool), "")
        i = int(np.argmax(off)) if off.any() else int(np.argmax(bad.sum(axis=0)))
        size = level[i] if off.any() else np.median(unlike[bad[:, i], i])
        reason = f"component {i} fluctuates {size:.3g} times as much as at calibration"
        return Verdict(np.logical_or(bad.any(axis=1), off.any()), reason)

    def measure(self, settings: Params, trajectories: Trajectories) -> np.ndarray:
        """ν of each trajectory; 1 for components that have no noise by the model. (E, M)"""
        t, x, context = np.asarray(trajectories.t, float), np.asarray(trajectories.x), trajectories.context
        count = len(x)
        n = np.linspace(0, len(t) - 2, min(len(t) - 1, MOST_STEPS)).round().astype(int)
        size = max(8, 1 << (count - 1).bit_length())  # few sizes, so that few are compiled

        def filled(v: Array) -> np.ndarray:
            v = np.asarray(v)
            return np.concatenate([v, np.broadcast_to(v[-1:], (size - count, *v.shape[1:]))])

        x, context = filled(x).astype(jnp.result_type(float)), jax.tree.map(filled, context)
        r, variance = self._residuals(settings, x[:, n], x[:, n + 1], t[n], np.diff(t)[n], context)
        r, variance = np.asarray(r)[:count], np.asarray(variance)[:count]
        scaled = r / np.sqrt(np.where(variance > 0, variance, np.inf))
        centre = np.median(scaled, axis=0) if count >= FEWEST_FOR_MEDIAN else np.zeros(scaled.shape[1:])
        silent = (variance == 0).all(axis=(0, 1))
        return np.where(silent, 1.0, np.mean(_unexplained(scaled - centre, x[:count, n]) ** 2, axis=1))


def _unexplained(kick: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Kicks less what is linear in the states: an error of the calibrated rates is no noise. (E, T, M)"""
    rows, size = kick.shape[0] * kick.shape[1], kick.shape[2]
    if kick.shape[0] < FEWEST_FOR_MEDIAN or rows < 4 * size:
        return kick
    states = (x - np.median(x, axis=0)).reshape(rows, size)
    slope = np.linalg.lstsq(states.T @ states, states.T @ kick.reshape(rows, size), rcond=None)[0]
    return (kick.reshape(rows, size) - states @ slope).reshape(kick.shape) * np.sqrt(rows / (rows - size))


def _within(ratio: np.ndarray, degrees: float, most: float) -> np.ndarray:
    """Whether a sum of squares over its mean is chance, within a factor. NaN is not."""
    low, high = scipy.stats.chi2.ppf([CHANCE, 1 - CHANCE], degrees) / degrees
    return (ratio >= low / SLACK) & (ratio <= high * most)


def _rows(count: int, value: Array) -> np.ndarray:
    return np.broadcast_to(np.asarray(value), (count, *np.shape(value)))


def _residual(
    process: Process, theta: Params, x: Array, x_next: Array, t: Array, dt: Array, context: PyTree
) -> tuple[Array, Array]:
    """r and 2QᵢᵢΔt of one step. (M,) each"""
    r = x_next - x - mean_rate(process, theta, x, t, dt, context) * dt
    if process.diffusion is None and not isinstance(process.noise, NoiseProduct):
        assert process.noise is not None  # checked at the boundary
        sigma = process.noise(theta, x, t, context)
        variance = sigma**2 if jnp.ndim(sigma) == 1 else jnp.sum(sigma**2, axis=1)
    else:
        variance = 2 * jnp.diag(diffusion_matrix(process, theta, x, t, context))
    return r, variance * dt
