"""Records of a response: checks, memory, window and batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from fluctua.core import check, diffusion, recorded, scores
from fluctua.core import objective as objectives
from fluctua.core import process as processes
from fluctua.core.arrays import Array, Params, working_dtype
from fluctua.core.likelihood import guard, unknowns
from fluctua.core.likelihood.report import Residuals
from fluctua.core.trajectories import Trajectories
from fluctua.processes import response_batches as batching
from fluctua.processes import response_sums as sums
from fluctua.processes import stationary

ROOM = 20
"""Number of batches for which "auto" shortens a window."""
MAX_BATCHES = 400
"""Number of batches beyond which they are made longer: errors are then accurate to 4 %."""
STATES = 2**22
"""Maximum number of values of states from which their memory is measured."""


class RecordOptions(NamedTuple):
    """Options of the score and the baseline; see `step_response`."""

    stride: int
    score: processes.Score
    period: float | Sequence[float | None] | None
    baseline: Callable[[Array], Array] | None


class CorrelationTimes(NamedTuple):
    """Correlation times in samples.

    reward: 1 + 2Σρ of the reward.
    absolute: 1 + 2Σ|ρ| of the reward.
    slowest: 1 + 2Σ|ρ| of the slowest state, or of the reward if that is slower.
    """

    reward: float
    absolute: float
    slowest: float


def open_records(
    process: processes.AnyProcess,
    reward: Callable[..., Array] | objectives.Objective,
    theta: Params,
    record: Trajectories | Sequence[Trajectories],
    options: RecordOptions,
) -> batching.BatchedRecord:
    """Check a problem and load its traces, before they are cut into batches."""
    process = check.process(process)
    objective = objectives.Objective(running=reward) if callable(reward) else reward
    rewards = check.objective(objective)
    for name in ("terminal", "initial"):
        if getattr(objective, name) is not None:
            raise ValueError(
                f"a response needs a `running` or a `per_step` reward, and no `{name}` one."
            )
    stride = options.stride
    if stride < 1 or int(stride) != stride:
        raise ValueError(f"`stride` must be a whole number of samples, 1 or more; got {stride!r}.")
    if stride > 1 and rewards.per_step is not None:
        raise ValueError(
            "a `per_step` reward belongs to one sample, and the score to a stride of "
            f"{stride}: give stride=1."
        )
    records = [record] if isinstance(record, Trajectories) else list(record)
    if not records:
        raise ValueError("`record` must have one record or more; got none.")
    opened = [recorded.Recording(one, theta) for one in records]
    dt = _check_intervals(opened)
    first = opened[0]
    process = diffusion.check_model(
        process, rewards, theta, first.first_states, first.t, first.context
    )
    for one in opened:
        recorded.check_rounding(process, theta, one)
    if stride > 1 and not isinstance(process, processes.Process):
        raise ValueError(f"a {type(process).__name__} has events within every step: give stride=1.")
    periods = _check_periods(options.period, first.first_states.shape[1])
    used = scores.select_score(process, options.score)
    law = sums.ResponseLaw(process, rewards, used, options.baseline)
    return batching.BatchedRecord(
        law,
        sums.LagGrid(0, int(stride), 0, dt),
        sums.load_traces(records, periods),
        periods,
        working_dtype(theta, first.first_states),
        (),
    )


def _check_intervals(opened: Sequence[recorded.Recording]) -> float:
    """The interval between samples, which is one for all records."""
    intervals = np.concatenate([np.asarray(one.times.dt, np.float64) for one in opened])
    if np.ptp(intervals) > stationary.UNEVEN * intervals.mean():
        raise ValueError(
            "a response needs a uniform time grid, the same in all records, because products are "
            f"taken by lag; intervals are {intervals.min():g} to {intervals.max():g}."
        )
    sizes = {one.first_states.shape[1] for one in opened}
    if len(sizes) > 1:
        raise ValueError(f"records must have the same components; got {sorted(sizes)} of them.")
    return float(intervals.mean())


def _check_periods(period: float | Sequence[float | None] | None, size: int) -> np.ndarray:
    """Periods (M,), infinite for components that are not periodic."""
    each = list(period) if isinstance(period, Sequence | np.ndarray) else [period] * size
    if len(each) != size:
        raise ValueError(
            f"`period` must be a number, or one per component, {size}; got {len(each)}."
        )
    periods = np.array([np.inf if p is None else float(p) for p in each])
    if not np.all(periods > 0):
        raise ValueError(f"a period must be positive; got {period!r}.")
    return periods


def measure_memory(
    source: batching.BatchedRecord, rewards: Sequence[np.ndarray]
) -> CorrelationTimes:
    """Measure correlation times of the reward and of the slowest state, over all traces."""
    own = _measure_traces(stationary.autocorrelation_time, rewards)
    absolute = _measure_traces(stationary.memory_time, rewards)
    size = sum(trace.path.size for trace in source.traces)
    every = max(1, -(-size // STATES))
    slowest = absolute
    for i, period in enumerate(source.periods):
        paths = [trace.path[::every, i] for trace in source.traces]
        for series in _form_series(paths, float(period)):
            if max(np.ptp(one) for one in series) > 0:
                slowest = max(slowest, every * _measure_traces(stationary.memory_time, series))
    return CorrelationTimes(own, absolute, slowest)


def _form_series(paths: list[np.ndarray], period: float) -> list[list[np.ndarray]]:
    """Series whose memory is measured: x and x², or cosine and sine of a periodic component."""
    if np.isfinite(period):
        angles = [2 * np.pi / period * path for path in paths]
        return [[np.cos(angle) for angle in angles], [np.sin(angle) for angle in angles]]
    return [[path - path.mean() for path in paths], [path**2 - np.mean(path**2) for path in paths]]


def _measure_traces(measure: Callable[..., float], series: Sequence[np.ndarray]) -> float:
    """Measure a correlation time in samples, over all traces together."""
    cuts = np.cumsum([len(one) for one in series])[:-1]
    return measure(np.concatenate(series)[None], cuts)


def cut_batches(
    source: batching.BatchedRecord, window: float | str, memory: CorrelationTimes
) -> batching.BatchedRecord:
    """Choose the lags and cut the traces into batches that are independent of each other."""
    grid = source.grid
    step = grid.dt * grid.stride
    longest = max(len(trace.t) for trace in source.traces)
    if isinstance(window, str):
        if window != "auto":
            raise ValueError(f'`window` is a time or "auto"; got {window!r}.')
        samples = sum(len(trace.t) for trace in source.traces)
        wanted = stationary.find_window(memory.slowest, samples)
        lags = max(1, -(-wanted // grid.stride))
        while lags > 1 and len(_cut(source, lags, memory).batches) < ROOM:
            lags = lags * 3 // 4
    else:
        lags = round(window / step) if np.isfinite(window) else 0
    if lags < 1:
        raise ValueError(f"`window` must be a step of the score ({step:g}) at least; got {window}.")
    made = _cut(source, lags, memory)
    if len(made.batches) < stationary.MIN_BATCHES:
        raise ValueError(
            f"the record is too short: {len(source.traces)} traces of up to "
            f"{longest * grid.dt:.4g} units of time hold {len(made.batches)} batches of "
            f"{made.grid.length * grid.dt:.4g}, which a window of {lags * step:.4g} and an "
            f"autocorrelation time of {memory.absolute * grid.dt:.3g} need; errors need "
            f"{stationary.MIN_BATCHES}. Record for longer, or give a shorter `window`."
        )
    return made


def _cut(
    source: batching.BatchedRecord, lags: int, memory: CorrelationTimes
) -> batching.BatchedRecord:
    """The batches of a window of so many lags, each longer than window and correlations."""
    grid = source.grid._replace(lags=lags)
    shortest = max(10 * memory.reward, 5 * memory.absolute, grid.stride)
    kicks = [max(len(trace.t) - grid.reach, 0) for trace in source.traces]
    length = max(2 * grid.reach, int(np.ceil(shortest)), sum(kicks) // MAX_BATCHES)
    # one trace is independent of the others, however short
    length = max(min(length, max(kicks)), 1)
    # the rest of a trace is lost: spread over its batches, for the shortest trace that has some
    room = min((count for count in kicks if count >= length), default=length)
    length = room // _round_down(room // length)
    grid = grid._replace(length=length)
    return source._replace(grid=grid, batches=batching.list_batches(source.traces, grid))


def _round_down(number: int) -> int:
    """Round down to a series with ratio 2^¼: few shapes, and few programs to compile."""
    return max(1, int(2 ** (np.floor(4 * np.log2(number) + 1e-9) / 4)))


def require_fittable(
    source: batching.BatchedRecord, theta: Params, fitted: batching.Unknowns
) -> None:
    """Refuse a fit of parameters for which the likelihood of a step is not known."""
    process = source.law.process
    if not isinstance(process, processes.Process):
        raise ValueError(
            f"a {type(process).__name__} is not fitted to a record: fit it beforehand and give "
            "the covariance of θ as `calibration`."
        )
    if source.law.score is scores.drift_score:
        raise ValueError(
            "a fit needs the score of drift and noise; `drift_score` is that of the drift alone. "
            "Leave `score` off."
        )
    trace = source.traces[0]
    state = (np.asarray(trace.path[0], source.dtype), trace.t[0], trace.context)

    def at(theta: Params, u: Array) -> Params:
        return batching.insert_values(theta, fitted.which, u)

    signature = check.tree_signature((theta, state[0], state[1], source.grid.dt, state[2]))
    roles = unknowns.examine_roles(process, at, len(fitted.which), signature)
    if roles.noisy and not unknowns.has_independent_noise(process, theta, *state):
        raise ValueError(
            "parameters of the noise are fitted where it is independent on every component; this "
            "process has a matrix, a product or components without noise. Fit its amplitude "
            "beforehand."
        )


def warn_about_residuals(source: batching.BatchedRecord, theta: Params) -> Residuals | None:
    """Compare the residuals at the beginning of the longest trace with the noise, by strides.

    None where there is no law to compare them with.
    """
    law = guard.LAWS.get(source.law.score)
    if law is None or not isinstance(source.law.process, processes.Process):
        return None
    trace = max(source.traces, key=lambda one: len(one.t))
    some = np.s_[: guard.TRANSITIONS * source.grid.stride + 1 : source.grid.stride]
    beginning = _select_samples(trace, some, source.dtype)
    return guard.warn_about_residuals(
        source.law.process, theta, beginning, transition=law, stacklevel=3
    )


def require_finite(products: np.ndarray, source: batching.BatchedRecord, theta: Params) -> None:
    """Refuse products that are not finite, and name the state where the diffusion fails."""
    if np.all(np.isfinite(products)):
        return
    bad = np.flatnonzero(~np.isfinite(products).all(axis=(1, 2)))
    which = source.batches[int(bad[0])]
    trace = source.traces[which.trace]
    first = which.number * source.grid.length
    part = np.s_[first : first + source.grid.length + 1]
    states = _select_samples(trace, part, source.dtype)
    diffusion.check_along(source.law.process, theta, states, which.trace)
    raise FloatingPointError(
        f"the products of {len(bad)} of {len(products)} batches are not finite, first in trace "
        f"{which.trace}: a derivative of the drift, noise or reward is not."
    )


def _select_samples(trace: sums.Trace, some: slice, dtype: np.dtype) -> Trajectories:
    """Samples of a trace as a record of one trajectory."""
    context = jax.tree.map(lambda leaf: np.asarray(leaf)[None], trace.context)
    return Trajectories(trace.t[some], trace.path[None, some].astype(dtype), context)


def average_blocks(rewards: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Average rewards over blocks of `length` samples, for the error of their mean."""
    blocks = [g[: len(g) // length * length].reshape(-1, length).mean(axis=1) for g in rewards]
    return np.concatenate(blocks)
