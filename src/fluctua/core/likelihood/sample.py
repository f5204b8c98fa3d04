"""Trajectories under examination, their law, and their residuals in units of noise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
import scipy

from fluctua.core import check, trajectories
from fluctua.core.arrays import Array, Params, PyTree, put, working_dtype
from fluctua.core.diffusion import q_matrix
from fluctua.core.integrators import Substeps
from fluctua.core.likelihood import alternatives, kicks
from fluctua.core.likelihood.alternatives import RUN
from fluctua.core.process import NoiseProduct, Process, Step
from fluctua.core.scores import euler, local_linear
from fluctua.core.trajectories import Trajectories

MINIMUM = 200

SLACK = 2.0
"""v of a component without noise up to which its residual is what an Euler step leaves out."""

ROUNDING = 4
"""Units in the last place by which a state that follows its drift exactly may be off."""

MAX_STEPS = 1_000_000
"""Steps up to which sums of the drift are over every one; over half of more."""

PIECE_BYTES = 64 * 2**20
"""How much is held at a time for these sums."""

MAX_LINEARISED = 16
"""Components up to which a deviation is compared with the locally linear law too."""


class Law(NamedTuple):
    """The law of one step.

    process: drift and noise.
    transition: None for Euler steps with independent noise.
    mixed: whether that noise spreads over the components within an interval; its correlations are
        taken from the locally linear law at the mean state.
    """

    process: Process
    transition: kicks.Transition | None
    mixed: bool = False


class Sample(NamedTuple):
    """Trajectories under examination.

    law: of one step.
    theta: the parameters at which they were taken.
    rows: their numbers in the data.
    x: states (E, T+1, M).
    t: times (T+1,).
    context: leaves (E, ...), or None.
    readout: variance of the measurement (M,).
    noiseless: components without noise of their own.
    last_place: rounding of their states (M,).
    steps: numbers of the steps that are examined (S,).
    run: how many of these are neighbours.
    """

    law: Law
    theta: Params
    rows: np.ndarray
    x: np.ndarray
    t: np.ndarray
    context: PyTree
    readout: Array
    noiseless: tuple[int, ...]
    last_place: np.ndarray
    steps: np.ndarray
    run: int

    @property
    def components(self) -> np.ndarray:
        """Components with noise of their own."""
        return np.setdiff1d(np.arange(self.x.shape[2]), self.noiseless)

    @property
    def blurred(self) -> bool:
        """Whether samples have noise of a readout."""
        return bool(np.any(np.asarray(self.readout) > 0))


def take_sample(
    process: Process,
    theta: Params,
    data: Trajectories,
    transition: kicks.Transition,
    readout: Any,
    max_transitions: int,
) -> Sample:
    """Some trajectories, evenly spread, to examine.

    readout: variance of the measurement. max_transitions: to examine.
    """
    plain = transition is euler and _is_diagonal(process, theta, data)
    noiseless = _find_noiseless(process, theta, data)
    if not plain or noiseless:  # a few solves of M × M matrices a transition
        max_transitions = min(
            max_transitions, max(MINIMUM, int(2e11 / (50 * data.x.shape[2] ** 3)))
        )
    rows = choose_rows(data, max_transitions)
    steps, run = _choose_steps(len(data.t) - 1, max_transitions // len(rows))
    raw = load_rows(data.x, rows)
    x = np.asarray(raw, working_dtype(theta, raw))
    variance = np.asarray(0.0 if readout is None else readout, float)
    if variance.shape not in ((), x.shape[2:]) or not np.all(variance >= 0):
        raise ValueError(
            f"the variance of the readout is one number ≥ 0, or ({x.shape[2]},); got {readout!r}."
        )
    last_place = np.zeros(x.shape[2])
    if noiseless:
        last_place = (
            ROUNDING * float(np.finfo(raw.dtype).eps) * np.abs(x).max(axis=(0, 1)).astype(float)
        )
    return Sample(
        law=Law(
            process,
            None if plain else transition,
            plain and isinstance(process.integrator, Substeps),
        ),
        theta=theta,
        rows=rows,
        x=x,
        t=np.asarray(data.t, np.float64),
        context=jax.tree.map(lambda leaf: put(load_rows(leaf, rows)), data.context),
        readout=put(np.full(x.shape[2:], variance, x.dtype)),
        noiseless=noiseless,
        last_place=last_place,
        steps=steps,
        run=run,
    )


def _choose_steps(total: int, maximum: int) -> tuple[np.ndarray, int]:
    """Numbers of the steps to examine, and how many are neighbours.

    All steps, or short runs evenly over time.
    """
    if total <= max(maximum, 2 * RUN):
        return np.arange(total), total
    begins = np.unique(np.linspace(0, total - RUN, max(2, maximum // RUN)).astype(int) // RUN * RUN)
    return (begins[:, None] + np.arange(RUN)).ravel(), RUN


class _Steps(NamedTuple):
    """Ends (E, S, M), beginnings (S,) and lengths (S,) of the steps that are looked at."""

    now: Array
    following: Array
    t: Array
    dt: Array


def _pick_steps(sample: Sample, x: np.ndarray, t: np.ndarray) -> _Steps:
    times = check.grid(t)
    steps = sample.steps if x.shape[1] == sample.x.shape[1] else np.unique(sample.steps // 2)
    steps = steps[steps < x.shape[1] - 1]
    begins, dt = (np.asarray(part)[steps] for part in (times.t, times.dt))
    return _Steps(put(x[:, steps]), put(x[:, steps + 1]), put(begins), put(dt))


def standardise_states(
    sample: Sample, law: Law, x: np.ndarray, t: np.ndarray
) -> kicks.Standardised:
    """Residuals of every step in units of their noise, in double precision. (n, M) each"""
    ends = _pick_steps(sample, x, t)
    made = kicks.standardise(
        *law[:2], sample.noiseless, sample.theta, *ends, sample.context, sample.readout
    )
    v, z, drift = (np.asarray(part, np.float64) for part in made)
    if law.mixed and not sample.noiseless:
        middle = put(x.mean(axis=(0, 1)))
        context = jax.tree.map(lambda leaf: leaf[0], sample.context)
        step = Step(middle, middle, ends.t[0], ends.dt[0], context)
        root = np.asarray(
            kicks.spread_noise(law.process, sample.theta, step, sample.readout), np.float64
        )
        z, drift = (
            scipy.linalg.solve_triangular(root, each.T, lower=True, check_finite=False).T
            for each in (z, drift)
        )
        v = z**2
    # squared here: a residual beyond 1e19 of its noise has no square in single precision
    return kicks.Standardised(v if law.transition else np.where(z == 0, v, z**2), z, drift)


def reduce_squares(
    sample: Sample, made: kicks.Standardised, x: np.ndarray, t: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """v and its standard error; of components without noise by what an Euler step leaves out.

    (M,) each
    """
    v, stderr = _compute_mean_and_error(made.v)
    if not sample.noiseless:
        return v, stderr
    ends = _pick_steps(sample, x, t)
    transition = sample.law.transition or euler
    left = kicks.measure_omitted(
        sample.law.process, transition, sample.theta, *ends, sample.context, sample.readout
    )
    square, expected = (np.asarray(part, np.float64) for part in left)
    mean, spread = _compute_mean_and_error(square)
    allowed = np.maximum(expected.mean(axis=0) + sample.last_place**2, np.finfo(float).tiny)
    is_noiseless = np.isin(np.arange(len(v)), sample.noiseless)
    quiet = np.where(mean <= SLACK * allowed, 1, mean / allowed)
    return np.where(is_noiseless, quiet, v), np.where(is_noiseless, spread / allowed, stderr)


def divide_noise(made: kicks.Standardised, variance: np.ndarray) -> kicks.Standardised:
    """Residuals in units of a noise whose variance is so many times as large. variance: (M,)"""
    root = np.sqrt(variance)
    return kicks.Standardised(made.v / variance, made.z / root, made.drift / root)


def _compute_mean_and_error(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard error over the first axis."""
    return values.mean(axis=0), values.std(axis=0) / np.sqrt(len(values))


def collect_sums(
    sample: Sample, made: kicks.Standardised, *, mean: bool = True
) -> alternatives.Table:
    """The sums of a batch; empty where it is too small, or where nothing has noise.

    mean: whether to test what the drift lacks.
    """
    there = sample.components
    z = made.z[:, there] if len(sample.noiseless) else made.z
    if len(z) < alternatives.MIN_STEPS or not there.size or not np.isfinite(z).all() or not z.any():
        return {}
    where = alternatives.Places(sample.steps, sample.run, sample.blurred)
    # a component that is held has z = v = 0, one without noise v = 1
    has_noise = (z != 0) | ((made.v[:, there] if len(sample.noiseless) else made.v) == 0)
    shape = (len(sample.x), len(sample.steps), -1)
    square = np.where(has_noise, z**2, 1)
    # most records have noise everywhere, and are long: no copy of them
    x = sample.x[..., there] if len(sample.noiseless) else sample.x
    return alternatives.sum_families(z.reshape(shape), square.reshape(shape), x, where, mean=mean)


def sum_every_step(
    sample: Sample, law: Law, source: Iterable[Trajectories] | None
) -> alternatives.Table:
    """Sums of the drift over every step of a source, or over half of more than `MAX_STEPS`.

    law: of one step. source: None for the steps of the sample. Features are centred on its mean.
    """
    some = np.asarray(sample.x[:, sample.steps], np.float64)
    centre = some.mean(axis=(0, 1))
    spread = some.std(axis=(0, 1))
    spread = np.where(spread > 0, spread, 1)
    if source is None:
        made = standardise_states(sample, law, sample.x, sample.t)
        total: Any = kicks.sum_steps(made, ((some - centre) / spread).reshape(made.z.shape))
        return alternatives.tabulate_drift(total, sample.components)
    units = [put(v.astype(sample.x.dtype)) for v in (centre, spread)]
    total = None
    for piece in _select_pieces(source):
        each = kicks.sum_trajectories(
            *law[:2],
            sample.noiseless,
            sample.theta,
            put(piece.x.astype(sample.x.dtype, copy=False)),
            check.grid(piece.t),
            jax.tree.map(put, piece.context),
            *units,
        )
        each = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), each)
        total = each if total is None else jax.tree.map(np.add, total, each)
    return alternatives.tabulate_drift(total, sample.components)


def _select_pieces(source: Iterable[Trajectories]) -> Iterable[Trajectories]:
    """Pieces of all trajectories, in memory; evenly spread ones of many."""
    for chunk in source:
        x = trajectories.open_array(chunk.x)
        count, samples = x.shape[:2]
        stride = 1 if count * (samples - 1) <= MAX_STEPS else 2
        length = samples - 1 if stride == 1 else min(samples - 1, MAX_STEPS // 4)
        size = count if stride == 1 else max(1, MAX_STEPS // 4 // length)
        size = min(size, count, trajectories.count_within(x, PIECE_BYTES))
        windows = [
            (np.s_[first : first + size], np.s_[begin : begin + length + 1])
            for first in range(0, count - size + 1, size)
            for begin in range(0, samples - length, length)
        ]
        for rows, times in windows[::stride]:
            context = jax.tree.map(lambda leaf, rows=rows: np.asarray(leaf[rows]), chunk.context)
            yield Trajectories(np.asarray(chunk.t)[times], np.asarray(x[rows, times]), context)


def choose_finer_law(sample: Sample) -> Law | None:
    """The law of a process that moves on within an interval; None if the law at hand is one.

    A device does move on, and its residuals against one Euler step deviate by what that leaves out.
    Locally linear, or for large states the noise-free path with one covariance for all steps.
    """
    process, transition, _ = sample.law
    if transition not in (None, euler) or process.integrator != "euler":
        return None
    if sample.x.shape[2] <= MAX_LINEARISED:
        return Law(process, local_linear)
    return (
        None
        if sample.noiseless
        else Law(process._replace(integrator="rk4"), transition, transition is None)
    )


def choose_rows(data: Trajectories, max_transitions: int) -> np.ndarray:
    """Some trajectories, evenly spread, of as many steps as are to be looked at."""
    count, times = np.shape(data.x)[:2]
    return np.unique(
        np.linspace(0, count - 1, min(count, max(2, max_transitions // (times - 1)))).astype(int)
    )


def load_rows(x: Array, rows: np.ndarray) -> np.ndarray:
    """Some rows of an array, which may load when sliced: one at a time then."""
    if isinstance(x, np.ndarray | jax.Array):
        whole = np.asarray(x)
        neighbours = len(rows) and np.array_equal(rows, rows[0] + np.arange(len(rows)))
        return whole[rows[0] : rows[-1] + 1] if neighbours else whole[rows]
    return np.concatenate([np.asarray(x[j : j + 1]) for j in map(int, rows)])


def _is_diagonal(process: Process, theta: Params, data: Trajectories) -> bool:
    if (
        process.diffusion is not None
        or process.noise is None
        or isinstance(process.noise, NoiseProduct)
    ):
        return False
    t, one = check.take_first((data.t, data.context))
    state = jax.ShapeDtypeStruct(np.shape(data.x)[2:], working_dtype(theta, data.x))
    return jax.eval_shape(process.noise, theta, state, t, one).ndim == 1


def _find_noiseless(process: Process, theta: Params, data: Trajectories) -> tuple[int, ...]:
    """Components without noise, at the first two states and along some of the trajectories."""
    t, one = check.take_first((data.t, data.context))
    states = np.asarray(load_rows(data.x, np.zeros(1, int))[0, :2], working_dtype(theta, data.x))
    rows = [np.abs(np.asarray(q_matrix(process, theta, x, t, one))) for x in states]
    noisy = np.any([q.reshape(len(q), -1).max(axis=1) > 0 for q in rows], axis=0)
    if not noisy.all():
        some = choose_rows(data, MINIMUM)[:MINIMUM]
        x = put(np.asarray(load_rows(data.x, some), states.dtype))
        context = jax.tree.map(lambda leaf: put(load_rows(leaf, some)), data.context)
        times = check.grid(data.t)
        noisy = np.asarray(kicks.find_noisy(process, theta, x, times.t[:-1], times.dt, context))
    return tuple(np.flatnonzero(~noisy).tolist())
