"""Continuing tasks: the gradient of a long-run average from one long record, or a few.

In the steady state every kick is answered by all rewards that follow it, so that with kicks Uₙ and
rewards gₙ = g(Xₙ)

    ∇J = E[∂θ g] + Σ_{k≥1} E[(gₙ₊ₖ − J) Uₙ],        J = E[g],

of which the record gives the sum up to a window w, as the mean over n of (gₙ − ḡ) zₙ with the
eligibility trace zₙ = Uₙ₋₁ + … + Uₙ₋w (Baxter and Bartlett). What later rewards would add is lost:
too short a window is a bias, too long a one is noise. The sum over the window that follows, w … 2w,
measures that bias, with as much noise as the gradient has. The process is Markov, so that its
states hold all that rewards depend on: they show a slow mode with a small share in the
fluctuations of the reward and a large one in its response to a kick.

ḡ responds to the kicks too, each by ∇J/N of N steps, which takes w/N of the gradient: the products
are divided by 1 − w/N.

A reward r(Xₙ, Xₙ₊₁) of a step is counted on arrival: gₙ also has r(Xₙ₋₁, Xₙ)/Δt, and Uₙ₋₁ is the
first kick that acts on it.

A twin changes the reward and nothing else (`fluctua.processes.lookahead`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax.flatten_util import ravel_pytree

from fluctua.core import baselines, check, recorded, scores
from fluctua.core import estimate as estimates
from fluctua.core import objective as objectives
from fluctua.core import process as processes
from fluctua.core.arrays import Array, Params
from fluctua.core.diffusion import check_model
from fluctua.core.likelihood import guard
from fluctua.core.text import with_error
from fluctua.core.trajectories import Trajectories
from fluctua.processes import pieces as joining
from fluctua.processes import record_passes
from fluctua.processes.lookahead import make_lookahead

PLATEAU = 5.0
"""The first window of "auto", in memory times of the reward (twice what errors need)."""
NEGLIGIBLE = 0.25
"""Bias that "auto" accepts, in standard errors: 95 % intervals then cover 94.3 %."""
DOUBT = 0.01
"""Probability that "auto" doubles a window that is long enough."""
MIN_BATCHES = 10
"""Minimum number of batches for an error; each is longer than the window and the correlations."""
UNEVEN = joining.UNEVEN
ALARM = 1e-4
"""Probability that a steady record is reported as changing."""


class Change(NamedTuple):
    """Largest difference between the halves of a record.

    what: the quantity that differs most.
    difference: second half − first half.
    z: in standard errors, from the scatter of parts of each half.
    limit: value of z that chance exceeds with probability `ALARM`.
    """

    what: str
    difference: float
    z: float
    limit: float

    @property
    def seen(self) -> bool:
        """Whether the difference is more than chance."""
        return self.z > self.limit

    def __repr__(self) -> str:
        return (
            f"{self.what} differs by {self.difference:.3g} between its halves, {self.z:.1f} "
            "standard errors"
        )


CUT_NOTE = (
    "\n  → the correlation time of the slowest state is {:.4g}: […] include what the window may "
    "leave out; record for longer"
)
"""Printed where the window is shorter than it should be."""


class Stationary(NamedTuple):
    """The gradient of a long-run average, with its window and diagnostics.

    Times are in units of time. Batch means are skewed: two standard errors of a short record cover
    78 to 91 %, so `estimate.interval` is corrected for skewness.

    estimate: `stderr` by batch means; `count` is the number of batches.
    window: time over which a kick is remembered.
    autocorrelation_time: of the reward, integrated.
    missing: what the next window would add to the gradient, like θ. A window is long enough where
        this is within a few of its errors.
    missing_stderr: error of `missing`.
    duration: of the record, all traces together.
    batches: the gradients of single batches (B, P), trace by trace.
    length: of a batch.
    change: between the halves of the record; None where it is too short.
    memory: of the slowest state or of the reward, 1 + 2Σ|ρ|: twice the time constant of a decay.
    cut: whether "auto" needs a longer window than the record has room for; `interval` then has
        `bias_bound` added.
    pieces: report on the pieces of several records; None for one record.
    starts: first sample of every batch, (B / traces,).
    """

    estimate: estimates.Estimate
    window: float
    autocorrelation_time: float
    missing: Params
    missing_stderr: Params
    duration: float
    batches: np.ndarray
    length: float
    change: Change | None
    memory: float
    cut: bool = False
    pieces: joining.PieceReport | None = None
    starts: np.ndarray | None = None

    @property
    def effective(self) -> float:
        """Number of independent samples of the reward in the record."""
        return self.duration / self.autocorrelation_time

    @property
    def bias_bound(self) -> Params:
        """95 % bound on what the window leaves out, like θ.

        (|missing| + 2 missing_stderr) / (1 − r): every further window adds r times the contribution
        of the one before. r is the ratio of `missing` to the gradient, over all components and
        without their noise, and at least e^{−w/τ}, with τ of the slowest state.
        """

        def flat(tree):
            return np.asarray(ravel_pytree(tree)[0], np.float64)

        unit = np.maximum(flat(self.missing_stderr), np.finfo(float).tiny)
        missing, near, error = (
            flat(v) / unit for v in (self.missing, self.estimate.gradient, self.estimate.stderr)
        )
        signal = float(np.nansum(near**2 - error**2))  # what could not be estimated is NaN
        ratio = np.sqrt(max(np.nansum(missing**2 - 1), 0) / signal) if signal > 0 else 0.0
        left = 1 - min(max(ratio, np.exp(-2 * self.window / self.memory)), 0.99)
        return jax.tree.map(lambda m, e: (abs(m) + 2 * e) / left, self.missing, self.missing_stderr)

    def __repr__(self) -> str:
        missing, error = (ravel_pytree(tree)[0] for tree in (self.missing, self.missing_stderr))
        worst = int(np.nanargmax(np.abs(missing) / np.where(error > 0, error, np.inf)))
        added = with_error(float(missing[worst]), float(error[worst]))
        text = repr(self.estimate).replace("trajectories)", "batches)", 1)
        text += (
            f"\n  window {self.window:.4g}, autocorrelation time {self.autocorrelation_time:.4g}, "
            f"{self.effective:,.0f} independent samples; the next window would add {added} at most"
        )
        if self.pieces is not None:
            text += f"\n  {self.pieces!r}"
        if self.cut:
            text += CUT_NOTE.format(self.memory)
        if self.change is not None and self.change.seen:
            text += f"\n  → not steady: {self.change!r}"
        return text


def stationary(
    process: processes.AnyProcess,
    reward: Callable[..., Array] | objectives.Objective,
    theta: Params,
    record: joining.Records,
    *,
    window: float | str = "auto",
    score: processes.Score = scores.full_score,
    baseline: baselines.Twin | str | None = None,
) -> Stationary:
    """Estimate ∇θ of the long-run average of a reward, from one trace or a few.

    Args:
        process: drift and noise that the score uses, or another kind of process.
        reward: (theta, x, t, context) -> g, a number; or an `Objective` with `running`, `per_step`
            or both.
        theta: the parameters at which the record was taken.
        record: `Trajectories` in the steady state, x (E, T+1, M), on a uniform grid; E may be 1. An
            array that loads when sliced is read a block of steps at a time. Or a list of them, of
            any lengths at one interval: the pieces of a record with gaps, or several records.
        window: time over which a kick is remembered. "auto" starts from the memory of the reward
            and of the slowest state, and doubles the window until the next one adds nothing beyond
            chance. Where the record is too short for that, `interval` is wider by `bias_bound`. A
            number is used as given.
        score: ∂θ ln p(x'|x) of one step.
        baseline: "time" by default, the mean reward; "twin" or a `Twin`, whose noise-free path from
            the measured states explains most of the rewards of a window.

    Returns: a `Stationary`, with the gradient, its error by batch means, and what the window leaves
    out.

    >>> long = fl.simulator(process, jnp.zeros(1), t=jnp.arange(0.0, 200.0, 0.05))(key, theta, 4)
    >>> estimate = fl.stationary(process, objective, theta, long, window=10.0).estimate
    >>> exact = 0.4**2 / (2 * 0.8**2)  # the mean reward is −s²/2k
    >>> bool(abs(estimate.gradient["k"] - exact) < 4 * estimate.stderr["k"])
    True
    """
    process = check.process(process)
    theta = check.parameters(theta)
    objective = objectives.Objective(running=reward) if callable(reward) else reward
    rewards = check.objective(objective)
    for name in ("terminal", "initial"):
        if getattr(objective, name) is not None:
            raise ValueError(
                f"a long-run average has a `running` or a `per_step` reward and no `{name}` one."
            )
    several = not isinstance(record, Trajectories)
    joined, pieces = joining.join_records(record)
    recording = recorded.Recording(joined, theta)
    dt = joining.check_intervals([np.asarray(recording.times.dt, np.float64)])
    process = check_model(
        process, rewards, theta, recording.first_states, recording.t, recording.context
    )
    plan = baselines.resolve_baseline(
        baseline, caller="a long-run average", serves=("time", "twin")
    )
    used = scores.select_score(process, score)
    ahead = None
    if isinstance(plan, baselines.Twin):
        check.require_state_rewards(rewards, "the twin of a long-run average")
        ahead = make_lookahead(plan, process, rewards, used, theta, recording)
    recorded.check_rounding(process, theta, recording)
    _warn_about_residuals(process, score, theta, _select_longest(joined, pieces))

    source = record_passes.Source(process, rewards, used, theta, recording, ahead, pieces)
    g, parts, states = record_passes.read_rewards(source)
    own = autocorrelation_time(g, pieces.cuts)
    memory = memory_time(g, pieces.cuts)
    slowest = max(memory, _find_longest_memory(states, pieces.cuts))
    room = _RecordSize(len(g), pieces, max(10 * own, 5 * memory))
    lags = wanted = _choose_window(window, memory, dt, int(pieces.steps.max()), parts)
    if window == "auto":
        of_states = find_window(slowest, g.size)
        # a twin's path goes another window beyond
        wanted = max(lags, of_states if ahead is None else of_states // 2)
        lags = room.fit_window(lags, wanted)
    while True:
        length = room.batch_length(lags)
        _require_batches(room, lags, memory, dt, parts)
        near, far = record_passes.average_products(source, g, lags, length)
        if window != "auto" or not _exceeds_chance(far):
            break
        wanted = 2 * lags
        if room.fit_window(lags, wanted) == lags:
            break
        lags = wanted
    blocks = pieces.average_blocks(g, length)
    estimate = average_batches(theta, near, blocks)._replace(value=jnp.asarray(g.mean()))
    change = _compare_halves(parts, memory * record_passes.PARTS * 2 / g.shape[1])
    if change is not None and change.seen:
        warnings.warn(
            f"the record is not in a steady state: {change!r}.", RuntimeWarning, stacklevel=2
        )
    missing = _shape_like(theta, far.mean(axis=0))
    missing_error = _shape_like(theta, compute_batch_error(far))
    return include_bias(
        Stationary(
            estimate,
            lags * dt,
            own * dt,
            missing,
            missing_error,
            len(g) * int(pieces.steps.sum()) * dt,
            near,
            length * dt,
            change,
            slowest * dt,
            wanted > lags,
            joining.report_pieces(pieces, lags, length, dt) if several else None,
            pieces.start_batches(lags, length),
        )
    )


def include_bias(answer: Stationary) -> Stationary:
    """Add `bias_bound` to both sides of the interval where the window is cut."""
    if not answer.cut:
        return answer
    assert answer.estimate.interval is not None
    low, high = answer.estimate.interval
    bound = answer.bias_bound
    wider = (jax.tree.map(jnp.subtract, low, bound), jax.tree.map(jnp.add, high, bound))
    return answer._replace(estimate=answer.estimate._replace(interval=wider))


class _RecordSize(NamedTuple):
    """Size of a record.

    traces: number of traces.
    pieces: of each trace.
    shortest: minimum length of a batch, in steps.
    """

    traces: int
    pieces: joining.Pieces
    shortest: float

    def batch_length(self, lags: int) -> int:
        """Steps per batch, ten times the correlations across its ends."""
        return max(2 * lags, int(np.ceil(self.shortest)))

    def count_batches(self, lags: int) -> int:
        """Number of batches that a window of so many steps leaves."""
        each = self.pieces.count_batches(2 * lags, self.batch_length(lags))
        return int(each.sum()) * self.traces

    def describe(self, dt: float) -> str:
        """Number and length of the traces or pieces."""
        steps = self.pieces.steps
        if len(steps) > 1:
            return (
                f"{len(steps)} pieces of {steps.min() * dt:.4g} to {steps.max() * dt:.4g} units of "
                f"time, {steps.sum() * dt:.4g} together,"
            )
        return f"{self.traces} × {steps[0] * dt:.4g} units of time"

    def fit_window(self, lags: int, wanted: int) -> int:
        """The wanted window, halved until there are enough batches; at least `lags`."""
        while wanted > lags and self.count_batches(wanted) < MIN_BATCHES:
            wanted = max(lags, wanted // 2)
        return wanted


def find_window(memory: float, steps: int) -> int:
    """Steps after which a state with that memory retains a negligible part of a kick.

    Its time constant is τ = memory/2, N steps hold N/2τ independent samples, and a gradient is
    hardly known to more than √(2τ/N) of itself: e^{−w/τ} is set to a quarter of that. Neither
    gradient nor error enters, since windows that end where the gradient happens to be small would
    bias it.
    """
    decay = memory / 2
    return int(np.ceil(decay * max(np.log(np.sqrt(steps / memory) / NEGLIGIBLE), 1)))


def average_batches(theta: Params, batches: np.ndarray, values: np.ndarray) -> estimates.Estimate:
    """The estimate from gradients (B, P) and mean rewards (B',) of batches."""
    gradient = estimates.reduce_samples(
        estimates.Samples(_unflatten_rows(theta, batches), jnp.asarray(batches[:, 0]))
    )
    value = estimates.reduce_samples(estimates.Samples(jnp.asarray(values), jnp.asarray(values)))
    return estimates.Estimate(
        _shape_like(theta, batches.mean(axis=0)),
        _shape_like(theta, compute_batch_error(batches)),
        _shape_like(theta, (batches**2).mean(axis=0)),
        value.value,
        jnp.asarray(compute_batch_error(values)),
        len(batches),
        gradient.interval,
        value.value_interval,
    )


def _unflatten_rows(theta: Params, v: np.ndarray) -> Params:
    """`unflatten` in NumPy, since JAX would compile it anew for every number of batches."""
    leaves, tree = jax.tree.flatten(theta)
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
    columns = np.split(v.astype(jnp.result_type(*leaves)), ends, axis=1)
    shaped = [
        jnp.asarray(part.reshape(-1, *leaf.shape), leaf.dtype)
        for part, leaf in zip(columns, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, shaped)


def _shape_like(theta: Params, v: np.ndarray) -> Params:
    flat, unravel = ravel_pytree(theta)
    return unravel(jnp.asarray(v, flat.dtype))


def autocorrelation_time(g: np.ndarray, cuts: np.ndarray = joining.UNCUT) -> float:
    """1 + 2Σ_k ρ(k) of series g (E, T), in steps, summed to five times its own value (Sokal).

    cuts: first samples of the pieces after the first; no product has factors from two pieces.
    """
    return _sum_correlations(_compute_correlations(g, cuts))


def memory_time(g: np.ndarray, cuts: np.ndarray = joining.UNCUT) -> float:
    """1 + 2Σ_k |ρ(k)| of series g (E, T), in steps: the correlation time of an oscillation.

    Σρ nearly cancels where a series oscillates. cuts: as for `autocorrelation_time`.
    """
    return _sum_correlations(np.abs(_compute_correlations(g, cuts)))


def _compute_correlations(g: np.ndarray, cuts: np.ndarray = joining.UNCUT) -> np.ndarray:
    """ρ(k) of series g (E, T), k = 0 … length of the longest piece − 1."""
    pieces = np.split(g - g.mean(), cuts, axis=1)
    lengths = np.array([piece.shape[1] for piece in pieces])
    covariance = np.zeros(lengths.max())
    for centred in pieces:
        size = 2 ** int(np.ceil(np.log2(2 * centred.shape[1])))
        power = np.abs(np.fft.rfft(centred, size, axis=1)) ** 2
        products = np.fft.irfft(power, size, axis=1)[:, : centred.shape[1]]
        covariance[: centred.shape[1]] += products.sum(axis=0)
    if len(pieces) > 1:  # a piece has fewer pairs of samples at longer lags
        lags = np.arange(len(covariance))
        ordered = np.sort(lengths)
        longer = len(lengths) - np.searchsorted(ordered, lags, side="right")
        rest = np.cumsum(ordered[::-1])[longer - 1] - longer * lags
        covariance = covariance * (lengths.sum() / rest)
    if not covariance[0] > 0:
        raise ValueError(
            "the reward does not vary along the record: there is nothing to learn from."
        )
    return covariance / covariance[0]


def _sum_correlations(rho: np.ndarray) -> float:
    total = 2 * np.cumsum(rho) - 1
    done = np.arange(total.size) >= 5 * total
    return float(total[np.argmax(done)] if done.any() else total[-1])


def _select_longest(record: Trajectories, pieces: joining.Pieces) -> Trajectories:
    """The longest piece of a joined record; one record as it is."""
    if len(pieces.steps) == 1:
        return record
    first = int(pieces.starts[np.argmax(pieces.steps)])
    last = first + int(pieces.steps.max()) + 1
    return Trajectories(record.t[first:last], record.x[:, first:last], record.context)


def _warn_about_residuals(
    process: processes.AnyProcess, score: processes.Score, theta: Params, record: Trajectories
) -> None:
    """Warn if the residuals are not the noise of the process.

    All tests are at the beginning of the record, those of the drift along all of it.
    """
    law = guard.LAWS.get(score)
    if law is None or not isinstance(process, processes.Process):
        return
    samples = max(2, min(len(record.t), guard.TRANSITIONS // len(record.x) + 1))
    beginning = Trajectories(
        np.asarray(record.t)[:samples], np.asarray(record.x[:, :samples]), record.context
    )
    guard.warn_about_residuals(
        process, theta, beginning, transition=law, every=record, stacklevel=3
    )


def _choose_window(
    window: float | str, memory: float, dt: float, steps: int, parts: np.ndarray
) -> int:
    if isinstance(window, str):
        if window != "auto":
            raise ValueError(f'`window` is a time or "auto"; got {window!r}.')
        lags = int(np.ceil(PLATEAU * memory))
    else:
        lags = round(window / dt) if np.isfinite(window) else 0
    if not lags >= 1:
        raise ValueError(f"`window` must be a step ({dt:g}) at least; got {window}.")
    if 2 * lags >= steps:
        raise ValueError(
            f"the record, {steps * dt:.4g} units of time, must be longer than two windows of "
            f"{lags * dt:.4g} (the reward's autocorrelation time is {memory * dt:.3g}). Record for "
            f"longer.{_describe_drift(parts)}"
        )
    return lags


def _require_batches(
    room: _RecordSize, lags: int, memory: float, dt: float, parts: np.ndarray
) -> None:
    batches = room.count_batches(lags)
    length = room.batch_length(lags)
    if batches < MIN_BATCHES:
        raise ValueError(
            f"the record is too short: {room.describe(dt)} hold {batches} "
            f"batches of {length * dt:.4g}, which is what a window of {lags * dt:.4g} and an "
            f"autocorrelation time of {memory * dt:.3g} need; an error bar needs {MIN_BATCHES}. "
            f"Record for longer, or give a shorter `window`.{_describe_drift(parts)}"
        )


def _describe_drift(parts: np.ndarray) -> str:
    """A sentence for records that are too short: a drift looks like a long correlation."""
    change = _compare_halves(parts, 0.0)
    if change is None or not change.seen:
        return ""
    return f" Or it is not in a steady state: {change!r}."


def compute_batch_error(means: np.ndarray) -> np.ndarray:
    """Standard error of the mean of a few batches, widened by Student's t. (B, …) -> (…)"""
    return estimates.sample_error(means, scipy.stats.t.ppf(0.8413447, len(means) - 1))


def _exceeds_chance(far: np.ndarray) -> bool:
    """Whether the next window adds more than chance to a component of the gradient. far: (B, P)."""
    limit = scipy.stats.t.isf(DOUBT / (2 * far.shape[1]), len(far) - 1)
    return bool(np.any(np.abs(far.mean(axis=0)) > limit * estimates.sample_error(far)))


def _find_longest_memory(states: record_passes.SpacedStates, cuts: np.ndarray) -> float:
    """Longest memory of a component of the states, or of its square, in steps.

    The memory of a constant component is 0. cuts: first samples of the pieces after the first.
    """
    spaced = np.unique(-(-cuts // states.stride))
    spaced = spaced[(spaced > 0) & (spaced < states.x.shape[1])]
    series = np.moveaxis(states.x, 2, 0)
    series = np.concatenate([series, series**2])  # an amplitude may be slow where its phase is fast
    # traces with other contexts have other means
    series = series - series.mean(axis=2, keepdims=True)
    times = [memory_time(component, spaced) for component in series if np.ptp(component) > 0]
    return states.stride * max(times, default=0.0)


def _compare_halves(parts: np.ndarray, memory: float) -> Change | None:
    """Compare the means of the first and of the second half of a record.

    parts: sums (E, 2·PARTS, 2M+2).
    memory: in units of a part.
    """
    width = 1
    while width < min(10 * memory, record_passes.PARTS):
        width += 1
        while record_passes.PARTS % width:
            width += 1
    merged = parts.reshape(len(parts), 2 * record_passes.PARTS // width, width, -1).sum(axis=2)
    means = merged[..., 1:] / merged[..., :1]
    half = means.shape[1] // 2
    first, second = (
        side.reshape(-1, means.shape[2]) for side in (means[:, :half], means[:, half:])
    )
    count = len(first)
    if width < 10 * memory or count < 5:
        return None
    difference = second.mean(axis=0) - first.mean(axis=0)
    error = np.sqrt((first.var(axis=0, ddof=1) + second.var(axis=0, ddof=1)) / count)
    z = np.abs(difference) / np.where(error > 0, error, np.inf)
    worst = int(np.argmax(z))
    size = (len(z) - 1) // 2
    names = [
        "the reward",
        *(f"the {kind} of component {i}" for kind in ("mean", "mean square") for i in range(size)),
    ]
    limit = scipy.stats.t.isf(ALARM / (2 * len(z)), 2 * (count - 1))
    return Change(names[worst], float(difference[worst]), float(z[worst]), float(limit))
