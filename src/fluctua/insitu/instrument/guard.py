"""Whether trajectories can be what a calibrated instrument measured: fresh, and with the noise of
the calibration.

With r = x' − x − μΔt, the kicks of component i are compared with the diffusion of the model,

    ν = ⟨(r − median r)²⟩ / 2QᵢᵢΔt,

the median over the trajectories of a batch, the mean over its steps, and less what is linear in the
states: ν is the noise of a trajectory whatever the calibrated drift misses. A dead channel has ν =
0, a random one a large ν.

Beside that, the residuals of a batch are tested against common faults (`core.likelihood`), with the
noise of the calibration: what is found is a doubt. Noise of a readout is in two residuals, which
distinguishes it from diffusion,

    ⟨rₙ rₙ₊₁⟩ = −S,     E[r²] = c 2QΔt + 2S.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from fluctua.core import check
from fluctua.core.arrays import Array, Params, PyTree, jit
from fluctua.core.diffusion import diffusion_matrix
from fluctua.core.integrators import mean_rate
from fluctua.core.likelihood import alternatives
from fluctua.core.likelihood.guard import Examination, examine_batch
from fluctua.core.likelihood.report import TOLERANCE
from fluctua.core.process import NoiseProduct, Process
from fluctua.core.trajectories import Trajectories
from fluctua.insitu.instrument.repeats import FEWEST_SAMPLES

SLACK = 2.0
"""Noise within this factor of that at calibration is the noise: calibrations are good to some per
cent, drifts slow.
"""
CHANCE = 1e-9
"""That a good trajectory is taken for a bad one by the scatter of its own sum of squares."""
SLACK_OF_FEW = 100.0
"""Upwards, for one or two trajectories, whose noise looks like an error of the drift."""
MOST_STEPS = 200
"""Steps of a trajectory that are looked at, evenly over its time."""
FEWEST_FOR_MEDIAN = 3
"""Of fewer trajectories the median is one of them; their noise is then measured with what the drift
misses.
"""
CERTAIN = 4.0
"""Standard errors of ⟨rₙ rₙ₊₁⟩ beyond which there is noise of a readout."""
DOUBTFUL = alternatives.Limits(variance=0.1)
"""Deviations that pass in a laboratory: a tenth of the drift, and of the noise, which is calibrated
and may age.
"""
MOST_EXAMINED = 6000
"""Steps of a batch that are tested against common faults, of which drifts are no part."""
LEVERAGE = 30.0
"""Standard errors of the calibration by which a drift may be off between its probes: 26 at most in
400 settings of 10 devices."""
PER_CALIBRATED = 100
"""Steps that calibrated for each at which the drift is tested: 3 standard errors of a test are the
calibration's.
"""
WHITE = 0.2
"""Correlation of neighbouring samples below which a channel has no memory: it is not the state of
anything.
"""


class Verdict(NamedTuple):
    """bad: which trajectories are not what they should be (E,). reason: in words, "" if none."""

    bad: np.ndarray
    reason: str


class ResidualGuard:
    """Compares the noise of a batch with that of the calibration.

    Args:
        process: the model, with the calibration as its context.
        noise: ν of each component at calibration (M,); 1 where diffusion is all that moves a
            sample, more with readout noise. `calibrate` measures it; without it every trajectory
            passes.

    """

    def __init__(self, process: Process, noise: np.ndarray | None = None):
        self.noise = None if noise is None else np.asarray(noise, float)
        self.start: np.ndarray | None = (
            None  # the state that every trajectory of the calibration begins from
        )
        self.scale: np.ndarray | None = None  # c of each component (M,)
        self.readout: np.ndarray | None = None  # S of each component (M,)
        self.steps: np.ndarray | None = None  # that calibrated
        self.process = check.process(process)
        self.scaled = scale_noise(self.process)
        self.reading = (
            np.nan
        )  # noise of the last batch in units of the calibration's, of the component furthest off
        step = partial(_residual, self.process)
        steps = jax.vmap(step, in_axes=(None, 0, 0, 0, 0, None))
        self._residuals = jit(jax.vmap(steps, in_axes=(None, 0, 0, None, None, 0)))

    def another(self) -> ResidualGuard:
        """A guard of another device of the same kind, which compiles nothing anew."""
        guard = copy.copy(self)
        guard.noise = guard.start = guard.scale = guard.readout = guard.steps = None
        guard.reading = np.nan
        return guard

    def calibrate(self, probes: list[tuple[Params, Trajectories]], context: PyTree) -> None:
        """Take ν, S and the start from the trajectories that calibrated.

        Args:
            probes: settings and trajectories of the calibration.
            context: what they calibrated, without the axis of trajectories.

        """
        each = []
        kicks = []
        for settings, (t, x, recorded, *_) in probes:
            known = jax.tree.map(partial(_rows, len(x)), context)
            whole = Trajectories(t, x, {**known, **recorded} if recorded else known)
            each.append(np.median(self.measure(settings, whole), axis=0))
            kicks.append(self._neighbours(settings, whole))
        self.noise = np.maximum(np.median(each, axis=0), np.finfo(float).tiny)
        diffusion, product, error = np.mean(kicks, axis=0)
        self.readout = np.where(-product > CERTAIN * error / np.sqrt(len(probes)), -product, 0.0)
        there = np.where(diffusion > 0, diffusion, 1)
        self.scale = np.where(
            diffusion > 0, np.maximum(self.noise - 2 * self.readout / there, 1e-3 * self.noise), 1.0
        )
        self.steps = np.array(sum(len(x) * (len(t) - 1) for _, (t, x, *_) in probes))
        self.start = _common_start([trajectories.x for _, trajectories in probes])

    def __call__(self, settings: Params, trajectories: Trajectories) -> Verdict:
        """Which trajectories are not the calibrated noise."""
        count = len(trajectories.x)
        steps = min(len(trajectories.t) - 1, MOST_STEPS)
        if self.noise is None or count == 0:
            return Verdict(np.zeros(count, bool), "")
        unlike = self.measure(settings, trajectories) / self.noise
        most = SLACK if count >= FEWEST_FOR_MEDIAN else SLACK_OF_FEW
        bad = ~_within(unlike, steps, most)
        level = np.median(unlike, axis=0)
        if count >= FEWEST_FOR_MEDIAN:  # the noise of fewer looks like an error of the drift
            self.reading = float(
                level[np.argmax(np.abs(np.log(np.maximum(level, np.finfo(float).tiny))))]
            )
        off = ~_within(
            level, steps * count * 2 / np.pi, most
        )  # a median knows as much as 2/π of the values
        if not (bad.any() or off.any()):
            return Verdict(np.zeros(count, bool), "")
        i = int(np.argmax(off)) if off.any() else int(np.argmax(bad.sum(axis=0)))
        size = level[i] if off.any() else np.median(unlike[bad[:, i], i])
        reason = f"component {i} fluctuates {size:.3g} times as much as at calibration"
        return Verdict(np.logical_or(bad.any(axis=1), off.any()), reason)

    def examine(self, settings: Params, trajectories: Trajectories) -> str:
        """Why the trajectories are not those of the calibrated process; empty if they may
        be, or if it is not known.
        """
        if self.noise is None or not len(trajectories.x):
            return ""
        t, x, context, *_ = trajectories
        scale = self.noise if self.scale is None else self.scale
        within = {CALIBRATION: context, ROOT: _rows(len(x), np.sqrt(scale))}
        look = partial(
            examine_batch,
            self.scaled,
            settings,
            Trajectories(t, x, within),
            readout=self.readout,
            start=self.start,
        )
        steps = PER_CALIBRATED * MOST_EXAMINED if self.steps is None else int(self.steps)
        missed = _missed(steps, x.shape[2])
        few = min(steps // PER_CALIBRATED, MOST_EXAMINED)
        cause = ""
        if few >= max(alternatives.FEWEST_STEPS, 2 * (len(t) - 1)):
            cause = _judge(look(limits=DOUBTFUL, most=few), missed)
        if cause:
            return cause
        limits = alternatives.Limits(
            mean=np.inf,
            variance=DOUBTFUL.variance + missed,
            product=DOUBTFUL.product + missed,
            step=DOUBTFUL.step
            + 3 * np.sqrt(missed),  # of a single step, three times the root mean square
        )
        return _judge(look(limits=limits, most=MOST_EXAMINED), missed)

    def _neighbours(self, settings: Params, trajectories: Trajectories) -> np.ndarray:
        """2QΔt, and ⟨rₙ rₙ₊₁⟩ with its standard error, of each component. (3, M)"""
        t, x, context, *_ = trajectories
        t = np.asarray(t, float)
        x = np.asarray(x, jnp.result_type(float))
        if len(t) < 3:
            return np.zeros((3, x.shape[2]))
        n = np.linspace(0, len(t) - 3, min(len(t) - 2, MOST_STEPS)).round().astype(int)
        r, variance = self._residuals(settings, x[:, n], x[:, n + 1], t[n], np.diff(t)[n], context)
        later, _ = self._residuals(
            settings, x[:, n + 1], x[:, n + 2], t[n + 1], np.diff(t)[n + 1], context
        )
        r, later = (np.asarray(part) - np.median(part, axis=0) for part in (r, later))
        product = r * later
        error = product.std(axis=(0, 1)) / np.sqrt(product.shape[0] * product.shape[1])
        return np.stack([np.asarray(variance).mean(axis=(0, 1)), product.mean(axis=(0, 1)), error])

    def measure(self, settings: Params, trajectories: Trajectories) -> np.ndarray:
        """ν of each trajectory; 1 for components that have no noise by the model. (E, M)"""
        t = np.asarray(trajectories.t, float)
        x = np.asarray(trajectories.x)
        context = trajectories.context
        count = len(x)
        n = np.linspace(0, len(t) - 2, min(len(t) - 1, MOST_STEPS)).round().astype(int)
        size = max(8, 1 << (count - 1).bit_length())  # few sizes, so that few are compiled

        def filled(v: Array) -> np.ndarray:
            v = np.asarray(v)
            return np.concatenate([v, np.broadcast_to(v[-1:], (size - count, *v.shape[1:]))])

        x = filled(x).astype(jnp.result_type(float))
        context = jax.tree.map(filled, context)
        r, variance = self._residuals(settings, x[:, n], x[:, n + 1], t[n], np.diff(t)[n], context)
        r = np.asarray(r)[:count]
        variance = np.asarray(variance)[:count]
        scaled = r / np.sqrt(np.where(variance > 0, variance, np.inf))
        centre = (
            np.median(scaled, axis=0) if count >= FEWEST_FOR_MEDIAN else np.zeros(scaled.shape[1:])
        )
        silent = (variance == 0).all(axis=(0, 1))
        return np.where(
            silent, 1.0, np.mean(_unexplained(scaled - centre, x[:count, n]) ** 2, axis=1)
        )


def _judge(batch: Examination, missed: float) -> str:
    """The cause of a doubt; none where kicks are larger than they should be by what the drift
    may miss alone.
    """
    wrong = batch.residuals.v[batch.residuals.wrong]
    if wrong.size and not batch.findings and np.all((wrong > 1) & (wrong < 1 + TOLERANCE + missed)):
        return ""
    return batch.residuals.cause


def _missed(steps: int, size: int) -> float:
    """What a drift that is calibrated by so many steps adds to v at most, and to products of kicks.

    Where that is as large as the noise, the drift is not known.
    """
    missed = size * LEVERAGE**2 / steps
    return missed if missed < 1 else np.inf


CALIBRATION = "calibration"
ROOT = "root of the noise's scale"
"""Entries of the context of a scaled process."""


@dataclass(frozen=True)
class _Within:
    """A function of the calibration as one of a context that holds it. power: of √c that
    multiplies its rows.
    """

    function: Callable[..., Array]
    power: int = 0

    def __call__(self, theta: Params, x: Array, t: Array, context: PyTree) -> Array:
        value = self.function(theta, x, t, context[CALIBRATION])
        if self.power == 0:
            return value
        root = context[ROOT]
        if jnp.ndim(value) == 1:
            return value * root**self.power
        return value * root[:, None] * (root if self.power == 2 else 1)


def scale_noise(process: Process) -> Process:
    """The process with √c times the noise in component i, both given by its context; that of a
    product is left.
    """
    noise = process.noise
    if isinstance(noise, NoiseProduct):
        noise = noise._replace(product=_Within(noise.product))
    elif noise is not None:
        noise = _Within(noise, 1)
    diffusion = None if process.diffusion is None else _Within(process.diffusion, 2)
    return process._replace(drift=_Within(process.drift), noise=noise, diffusion=diffusion)


def find_dead(x: np.ndarray) -> list[int]:
    """Components that are no signal: constant, or noise without memory about a constant. x: (E,
    T+1, M)

    The state of a process that is sampled often enough for Euler's steps remembers the sample
    before; a channel that is not connected does not, and its mean over the trajectories does not
    move.
    """
    count, times, _ = x.shape
    x = x.astype(float)
    constant = np.all(x == x[:, :1], axis=(0, 1))
    if count < FEWEST_FOR_MEDIAN or times < FEWEST_SAMPLES:
        return np.flatnonzero(constant).tolist()
    path = x.mean(axis=0)
    deviation = x - x.mean(axis=1, keepdims=True)
    variance = np.mean(deviation**2, axis=(0, 1))
    memory = np.mean(deviation[:, 1:] * deviation[:, :-1], axis=(0, 1))
    # of white noise the mean path scatters by variance / E; CHANCE of more
    most = scipy.stats.chi2.isf(CHANCE, times) / times / count
    still = np.var(path, axis=0) <= most * variance
    return np.flatnonzero(constant | (still & (np.abs(memory) < WHITE * variance))).tolist()


def _common_start(each: list[np.ndarray]) -> np.ndarray | None:
    """The first sample of all trajectories, if they agree within the steps that follow. x: (E,
    T+1, M) -> (M,)
    """
    first = np.concatenate([np.asarray(x, float)[:, 0] for x in each])
    steps = np.concatenate(
        [np.diff(np.asarray(x, float), axis=1).reshape(-1, x.shape[2]) for x in each]
    )
    scatter = first.std(axis=0)
    step = steps.std(axis=0)
    return first.mean(axis=0) if np.all(scatter <= step) else None


def _unexplained(kick: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Kicks less what is linear in the states: an error of the calibrated rates is no noise.

    (E, T, M)
    """
    rows = kick.shape[0] * kick.shape[1]
    size = kick.shape[2]
    if kick.shape[0] < FEWEST_FOR_MEDIAN or rows < 4 * size:
        return kick
    states = (x - np.median(x, axis=0)).reshape(rows, size)
    slope = np.linalg.lstsq(states.T @ states, states.T @ kick.reshape(rows, size), rcond=None)[0]
    return (kick.reshape(rows, size) - states @ slope).reshape(kick.shape) * np.sqrt(
        rows / (rows - size)
    )


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
