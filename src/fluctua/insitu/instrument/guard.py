"""Guard that compares the noise of a batch with the noise of the calibration.

With r = x' − x − μΔt, the kicks of component i are compared with the diffusion of the model,

    ν = ⟨(r − median r)²⟩ / 2QᵢᵢΔt,

the median over the trajectories of a batch, the mean over its steps, after subtracting what is
linear in the states: ν is the noise of a trajectory whatever the calibrated drift misses. A dead
channel has ν = 0, a random one a large ν.

The residuals of a batch are also tested against common faults (`core.likelihood`), with the
noise of the calibration; a finding is a doubt. Readout noise enters two successive residuals,
which distinguishes it from diffusion,

    ⟨rₙ rₙ₊₁⟩ = −S,     E[r²] = c 2QΔt + 2S.

A partially observed process (`fluctua.Observed`) has no residuals of its states: ν is that of the
innovations of its filter. They are large while the calibration is poor, so that more noise is
accepted, up to a factor of 100; less is not.
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
from fluctua.core import process as processes
from fluctua.core.arrays import Array, Params, PyTree, jit
from fluctua.core.diffusion import diffusion_matrix
from fluctua.core.integrators import mean_rate
from fluctua.core.likelihood import alternatives
from fluctua.core.likelihood.guard import Examination, examine_batch
from fluctua.core.likelihood.report import TOLERANCE
from fluctua.core.trajectories import Trajectories
from fluctua.insitu.instrument.repeats import MIN_SAMPLES
from fluctua.processes.observed import Observed

SLACK = 2.0
"""Factor between the noise and that at calibration which is accepted, as instruments age."""
CHANCE = 1e-9
"""Probability that a good trajectory is refused for the scatter of its own sum of squares."""
SLACK_FEW = 100.0
"""Upper factor for one or two trajectories, whose noise looks like an error of the drift."""
MAX_STEPS = 200
"""Steps of a trajectory that are compared, evenly over its time."""
MIN_FOR_MEDIAN = 3
"""Trajectories below which no median is subtracted; ν then includes what the drift misses."""
CERTAIN = 4.0
"""Standard errors of ⟨rₙ rₙ₊₁⟩ beyond which there is noise of a readout."""
DOUBTFUL = alternatives.Limits(variance=0.1)
"""Accepted deviations: a tenth of the drift, and of the noise, which is calibrated and may age."""
MAX_EXAMINED = 6000
"""Steps of a batch that are tested against common faults other than those of the drift."""
LEVERAGE = 30.0
"""Standard errors of the calibration by which a drift may be off between its probes: 26 at most in
400 settings of 10 devices."""
PER_CALIBRATED = 100
"""Calibrating steps per step at which the drift is tested, so that 3 standard errors of the test
are one of the calibration."""
WHITE = 0.2
"""Correlation of neighbouring samples below which a channel is white: it is not a state."""


class Verdict(NamedTuple):
    """Trajectories that the guard refuses.

    bad: which trajectories are refused (E,).
    reason: in words, "" if none is.
    """

    bad: np.ndarray
    reason: str


class ResidualGuard:
    """Guard of a substrate: sets aside trajectories whose noise is not that of the calibration.

    Args:
        process: the model, with the calibration as its context.
        noise: ν of each component at calibration (M,); 1 where diffusion is all that moves a
            sample, more with readout noise. `calibrate` measures it; without it every trajectory
            passes.

    >>> guard = insitu.instrument.ResidualGuard(model.process, noise=np.ones(1))
    >>> calibration = lambda count: {"gain": 0.9 * np.ones(count)}
    >>> substrate = insitu.instrument_substrate(connect, guard=guard, context=calibration)
    >>> substrate(None, {"force": 0.5}, 20).x.shape
    (20, 51, 1)
    """

    def __init__(self, process: processes.Process | Observed, noise: np.ndarray | None = None):
        self.noise = None if noise is None else np.asarray(noise, float)
        self.start: np.ndarray | None = None  # common first state of the calibration (M,)
        self.scale: np.ndarray | None = None  # c of each component (M,)
        self.readout: np.ndarray | None = None  # S of each component (M,)
        self.steps: np.ndarray | None = None  # number of steps that calibrated
        self.process = check.process(process)
        # noise of the last batch over that of the calibration, of the component furthest off
        self.reading = np.nan
        if isinstance(self.process, Observed):
            return
        self.scaled = scale_noise(self.process)
        step = partial(_residual, self.process)
        steps = jax.vmap(step, in_axes=(None, 0, 0, 0, 0, None))
        self._residuals = jit(jax.vmap(steps, in_axes=(None, 0, 0, None, None, 0)))

    def copy_uncalibrated(self) -> ResidualGuard:
        """Return a guard for another device of the same kind, without compiling again."""
        guard = copy.copy(self)
        guard.noise = guard.start = guard.scale = guard.readout = guard.steps = None
        guard.reading = np.nan
        return guard

    def calibrate(self, probes: list[tuple[Params, Trajectories]], context: PyTree) -> None:
        """Set ν, S and the start from the trajectories of the calibration.

        Args:
            probes: settings and trajectories of the calibration.
            context: the calibration, without the axis of trajectories.
        """
        noises = []
        kicks = []
        for settings, (t, x, recorded, *_) in probes:
            known = jax.tree.map(partial(_repeat_rows, len(x)), context)
            trajectories = Trajectories(t, x, {**known, **recorded} if recorded else known)
            noises.append(np.median(self.measure(settings, trajectories), axis=0))
            kicks.append(self._measure_neighbours(settings, trajectories))
        self.noise = np.maximum(np.median(noises, axis=0), np.finfo(float).tiny)
        diffusion, product, error = np.mean(kicks, axis=0)
        self.readout = np.where(-product > CERTAIN * error / np.sqrt(len(probes)), -product, 0.0)
        divisor = np.where(diffusion > 0, diffusion, 1)
        own_noise = np.maximum(self.noise - 2 * self.readout / divisor, 1e-3 * self.noise)
        self.scale = np.where(diffusion > 0, own_noise, 1.0)
        self.steps = np.array(sum(len(x) * (len(t) - 1) for _, (t, x, *_) in probes))
        self.start = _find_common_start([trajectories.x for _, trajectories in probes])

    def __call__(self, settings: Params, trajectories: Trajectories) -> Verdict:
        """Find the trajectories whose noise is not that of the calibration."""
        count = len(trajectories.x)
        steps = min(len(trajectories.t) - 1, MAX_STEPS)
        if self.noise is None or count == 0:
            return Verdict(np.zeros(count, bool), "")
        ratio = self.measure(settings, trajectories) / self.noise
        is_certain = count >= MIN_FOR_MEDIAN and not isinstance(self.process, Observed)
        slack = SLACK if is_certain else SLACK_FEW
        bad = ~_is_chance(ratio, steps, slack)
        level = np.median(ratio, axis=0)
        if count >= MIN_FOR_MEDIAN:  # the noise of fewer looks like an error of the drift
            distance = np.abs(np.log(np.maximum(level, np.finfo(float).tiny)))
            self.reading = float(level[np.argmax(distance)])
        # a median has the information of 2/π of the values
        off = ~_is_chance(level, steps * count * 2 / np.pi, slack)
        if not (bad.any() or off.any()):
            return Verdict(np.zeros(count, bool), "")
        i = int(np.argmax(off)) if off.any() else int(np.argmax(bad.sum(axis=0)))
        size = level[i] if off.any() else np.median(ratio[bad[:, i], i])
        reason = f"component {i} fluctuates {size:.3g} times as much as at calibration"
        return Verdict(np.logical_or(bad.any(axis=1), off.any()), reason)

    def examine(self, settings: Params, trajectories: Trajectories) -> str:
        """Say why the trajectories are not those of the calibrated process; "" if they may be."""
        if self.noise is None or not len(trajectories.x):
            return ""
        t, x, context, *_ = trajectories
        if isinstance(self.process, Observed):
            return examine_batch(self.process, settings, trajectories).residuals.cause
        scale = self.noise if self.scale is None else self.scale
        within = {CALIBRATION: context, ROOT: _repeat_rows(len(x), np.sqrt(scale))}
        examine = partial(
            examine_batch,
            self.scaled,
            settings,
            Trajectories(t, x, within),
            readout=self.readout,
            start=self.start,
        )
        steps = PER_CALIBRATED * MAX_EXAMINED if self.steps is None else int(self.steps)
        missed = _bound_missed_drift(steps, x.shape[2])
        examined = min(steps // PER_CALIBRATED, MAX_EXAMINED)
        cause = ""
        if examined >= max(alternatives.MIN_STEPS, 2 * (len(t) - 1)):
            cause = _find_cause(examine(limits=DOUBTFUL, max_transitions=examined), missed)
        if cause:
            return cause
        limits = alternatives.Limits(
            mean=np.inf,
            variance=DOUBTFUL.variance + missed,
            product=DOUBTFUL.product + missed,
            step=DOUBTFUL.step + 3 * np.sqrt(missed),  # three times the root mean square
        )
        return _find_cause(examine(limits=limits, max_transitions=MAX_EXAMINED), missed)

    def _measure_neighbours(self, settings: Params, trajectories: Trajectories) -> np.ndarray:
        """Measure 2QΔt, and ⟨rₙ rₙ₊₁⟩ with its standard error, of each component. Shape (3, M)."""
        t, x, context, *_ = trajectories
        t = np.asarray(t, float)
        x = np.asarray(x, jnp.result_type(float))
        if len(t) < 3 or isinstance(self.process, Observed):
            return np.zeros((3, x.shape[2]))
        n = np.linspace(0, len(t) - 3, min(len(t) - 2, MAX_STEPS)).round().astype(int)
        r, variance = self._residuals(settings, x[:, n], x[:, n + 1], t[n], np.diff(t)[n], context)
        later, _ = self._residuals(
            settings, x[:, n + 1], x[:, n + 2], t[n + 1], np.diff(t)[n + 1], context
        )
        r, later = (np.asarray(part) - np.median(part, axis=0) for part in (r, later))
        product = r * later
        error = product.std(axis=(0, 1)) / np.sqrt(product.shape[0] * product.shape[1])
        return np.stack([np.asarray(variance).mean(axis=(0, 1)), product.mean(axis=(0, 1)), error])

    def measure(self, settings: Params, trajectories: Trajectories) -> np.ndarray:
        """Measure ν of each trajectory; 1 for components without noise in the model. (E, M)"""
        t = np.asarray(trajectories.t, float)
        x = np.asarray(trajectories.x)
        context = trajectories.context
        count = len(x)
        n = np.linspace(0, len(t) - 2, min(len(t) - 1, MAX_STEPS)).round().astype(int)
        size = max(8, 1 << (count - 1).bit_length())  # few sizes, so that few are compiled

        def pad(v: Array) -> np.ndarray:
            v = np.asarray(v)
            return np.concatenate([v, np.broadcast_to(v[-1:], (size - count, *v.shape[1:]))])

        x = pad(x).astype(jnp.result_type(float))
        context = jax.tree.map(pad, context)
        if isinstance(self.process, Observed):
            return _measure_innovations(self.process, settings, t, x, context)[:count]
        r, variance = self._residuals(settings, x[:, n], x[:, n + 1], t[n], np.diff(t)[n], context)
        r = np.asarray(r)[:count]
        variance = np.asarray(variance)[:count]
        scaled = r / np.sqrt(np.where(variance > 0, variance, np.inf))
        if count >= MIN_FOR_MEDIAN:
            scaled = scaled - np.median(scaled, axis=0)
        noiseless = (variance == 0).all(axis=(0, 1))
        unexplained = _subtract_linear(scaled, x[:count, n])
        return np.where(noiseless, 1.0, np.mean(unexplained**2, axis=1))


def _measure_innovations(
    process: Observed, settings: Params, t: np.ndarray, x: np.ndarray, context: PyTree
) -> np.ndarray:
    """Measure e(S⁻¹e) of the innovations of each record; 1 where the model is right. (E, D)"""
    first = jax.tree.map(lambda leaf: leaf[0], context)
    theta = check.parameters(settings)
    checked = process.check(theta, x[0, 0], t[0], first)
    squares = np.asarray(checked.residuals(theta, check.grid(t), x, context))
    return squares.mean(axis=1)


def _find_cause(batch: Examination, missed: float) -> str:
    """Return the cause of a doubt; "" where what the drift may miss explains larger kicks."""
    wrong = batch.residuals.v[batch.residuals.wrong]
    if wrong.size and not batch.findings and np.all((wrong > 1) & (wrong < 1 + TOLERANCE + missed)):
        return ""
    return batch.residuals.cause


def _bound_missed_drift(steps: int, size: int) -> float:
    """Bound what a drift calibrated by so many steps adds to v and to products of kicks.

    Where that is as large as the noise, the drift is not known: infinite.
    """
    missed = size * LEVERAGE**2 / steps
    return missed if missed < 1 else np.inf


CALIBRATION = "calibration"
ROOT = "root of the noise's scale"
"""Entries of the context of a scaled process."""


@dataclass(frozen=True)
class _FromCalibration:
    """A function of the calibration, as a function of a context that holds the calibration.

    power: of √c that multiplies its rows.
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


def scale_noise(process: processes.Process) -> processes.Process:
    """Multiply the noise of component i by √c; √c and the calibration come from the context.

    The noise of a `NoiseProduct` stays as it is.
    """
    noise = process.noise
    if isinstance(noise, processes.NoiseProduct):
        noise = noise._replace(product=_FromCalibration(noise.product))
    elif noise is not None:
        noise = _FromCalibration(noise, 1)
    diffusion = None if process.diffusion is None else _FromCalibration(process.diffusion, 2)
    return process._replace(drift=_FromCalibration(process.drift), noise=noise, diffusion=diffusion)


def find_dead(x: np.ndarray) -> list[int]:
    """Find components without a signal: constant, or white about a constant. x: (E, T+1, M).

    The state of a process that is sampled often enough for Euler's steps is close to the sample
    before; a channel that is not connected is not, and its mean over the trajectories does not
    move.
    """
    count, times, _ = x.shape
    x = x.astype(float)
    constant = np.all(x == x[:, :1], axis=(0, 1))
    if count < MIN_FOR_MEDIAN or times < MIN_SAMPLES:
        return np.flatnonzero(constant).tolist()
    path = x.mean(axis=0)
    deviation = x - x.mean(axis=1, keepdims=True)
    variance = np.mean(deviation**2, axis=(0, 1))
    covariance = np.mean(deviation[:, 1:] * deviation[:, :-1], axis=(0, 1))
    # the mean path of white noise scatters by variance / E; CHANCE of more
    bound = scipy.stats.chi2.isf(CHANCE, times) / times / count
    still = np.var(path, axis=0) <= bound * variance
    white = np.abs(covariance) < WHITE * variance
    return np.flatnonzero(constant | (still & white)).tolist()


def _find_common_start(each: list[np.ndarray]) -> np.ndarray | None:
    """Mean first sample (M,), if all agree within the steps that follow. x: (E, T+1, M)."""
    first = np.concatenate([np.asarray(x, float)[:, 0] for x in each])
    steps = np.concatenate(
        [np.diff(np.asarray(x, float), axis=1).reshape(-1, x.shape[2]) for x in each]
    )
    scatter = first.std(axis=0)
    step = steps.std(axis=0)
    return first.mean(axis=0) if np.all(scatter <= step) else None


def _subtract_linear(kick: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Subtract from kicks what is linear in the states: an error of the rates. (E, T, M)"""
    rows = kick.shape[0] * kick.shape[1]
    size = kick.shape[2]
    if kick.shape[0] < MIN_FOR_MEDIAN or rows < 4 * size:
        return kick
    states = (x - np.median(x, axis=0)).reshape(rows, size)
    slope = np.linalg.lstsq(states.T @ states, states.T @ kick.reshape(rows, size), rcond=None)[0]
    unexplained = (kick.reshape(rows, size) - states @ slope).reshape(kick.shape)
    return unexplained * np.sqrt(rows / (rows - size))


def _is_chance(ratio: np.ndarray, degrees: float, slack: float) -> np.ndarray:
    """Whether a sum of squares over its mean is chance, within a factor; NaN is not."""
    low, high = scipy.stats.chi2.ppf([CHANCE, 1 - CHANCE], degrees) / degrees
    return (ratio >= low / SLACK) & (ratio <= high * slack)


def _repeat_rows(count: int, value: Array) -> np.ndarray:
    return np.broadcast_to(np.asarray(value), (count, *np.shape(value)))


def _residual(
    process: processes.Process,
    theta: Params,
    x: Array,
    x_next: Array,
    t: Array,
    dt: Array,
    context: PyTree,
) -> tuple[Array, Array]:
    """Return r and 2QᵢᵢΔt of one step. Shape (M,) each."""
    r = x_next - x - mean_rate(process, theta, x, t, dt, context) * dt
    if process.diffusion is None and not isinstance(process.noise, processes.NoiseProduct):
        assert process.noise is not None  # checked at the boundary
        sigma = process.noise(theta, x, t, context)
        variance = sigma**2 if jnp.ndim(sigma) == 1 else jnp.sum(sigma**2, axis=1)
    else:
        variance = 2 * jnp.diag(diffusion_matrix(process, theta, x, t, context))
    return r, variance * dt
