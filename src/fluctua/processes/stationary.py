"""Continuing tasks: the gradient of a long-run average from one long record, or a few.

In the steady state every kick is answered by all rewards that follow it, so that with kicks Uₙ and
rewards gₙ = g(Xₙ)

    ∇J = E[∂θ g] + Σ_{k≥1} E[(gₙ₊ₖ − J) Uₙ],        J = E[g],

of which the record gives the sum up to a window w, as the mean over n of (gₙ − ḡ) zₙ with the
eligibility trace zₙ = Uₙ₋₁ + … + Uₙ₋w (Baxter and Bartlett). What later rewards would add is lost:
too short a window is a bias, too long a one is noise. The sum over the window that follows, w … 2w,
measures that bias, with as much noise as the gradient has. The process is Markov, so that its
states remember whatever the rewards do: a slow mode with a small share in the fluctuations of the
reward, and a large one in its answer to a kick, is seen in them.

ḡ answers the kicks too, each by ∇J/N of N steps, which takes w/N of the gradient: the products are
divided by 1 − w/N.

A reward r(Xₙ, Xₙ₊₁) of a step is paid on arrival: gₙ has r(Xₙ₋₁, Xₙ)/Δt besides, which its own kick
Uₙ₋₁ meets first.

A twin changes the reward and nothing else (`fluctua.processes.lookahead`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax.flatten_util import ravel_pytree

from fluctua.core import check
from fluctua.core.arrays import Array, Params, PyTree, jit
from fluctua.core.baselines import Twin, resolve_baseline
from fluctua.core.diffusion import check_model
from fluctua.core.estimate import Estimate, Samples, reduce_samples
from fluctua.core.likelihood.guard import LAWS, TRANSITIONS, warn_about_residuals
from fluctua.core.objective import Objective, Rewards
from fluctua.core.process import AnyProcess, Process, Score, Step
from fluctua.core.recorded import Recording, check_rounding, check_scores
from fluctua.core.scores import full_score, select_score
from fluctua.core.text import describe_estimate, with_error
from fluctua.core.trajectories import Trajectories
from fluctua.processes.lookahead import Lookahead, lookahead

PLATEAU = 5.0
"""The window that "auto" begins with, in memory times of the reward (twice what errors need)."""
NEGLIGIBLE = 0.25
"""Bias that "auto" accepts, in standard errors: 95 % intervals then cover 94.3 %."""
STATES = 2**24
"""Numbers that the memory of the states is taken from, at the most."""
DOUBT = 0.01
"""Probability that "auto" doubles a window that is long enough."""
MINIMUM = 10
"""Batches that an error is taken from, at the least; each is longer than the window and the
correlations.
"""
BLOCK = 4096
"""Steps whose scores are computed together."""
UNEVEN = 0.01
"""Relative differences of intervals that pass: times that were rounded have them."""
PARTS = 20
"""Parts of either half of a record whose means are compared, at the most."""
ALARM = 1e-4
"""Probability that a steady record is said to change."""


class Change(NamedTuple):
    """How far the halves of a record differ. what: the quantity that does most. difference: second
    half − first.

    z: in standard errors, from the scatter of parts of each half. limit: what chance exceeds with
    `ALARM`.
    """

    what: str
    difference: float
    z: float
    limit: float

    @property
    def seen(self) -> bool:
        """Whether it is more than chance."""
        return self.z > self.limit

    def __repr__(self) -> str:
        return (
            f"{self.what} differs by {self.difference:.3g} between its halves, {self.z:.1f} "
            "standard errors"
        )


CUT = (
    "\n  → the slowest state remembers {:.4g}: […] have what the window may leave out; record for "
    "longer"
)
"""What is printed of a window that is shorter than it should be."""


class Stationary(NamedTuple):
    """The gradient of a long-run average and what it rests on.

    estimate: `stderr` by batch means; `count` is the number of batches, `interval` is corrected for
    their skewness, which is large: two standard errors of a short record cover 78 to 91 %. window:
    in units of time.
    autocorrelation_time: of the reward, integrated, in units of time. missing: what the window that
    follows would add to the gradient, as θ; missing_stderr: its error. A plateau is where the one
    is within a few of the other.
    duration: of the record, all traces together. batches: the gradients of single batches (B, P),
    trace by trace.
    length: of a batch, in units of time. change: between the halves of the record; None where it is
    too short to tell.
    memory: of the slowest state or of the reward, 1 + 2Σ|ρ| in units of time: twice the time
    constant of a decay.
    cut: whether "auto" asked for a longer window than the record has room for; `interval` then has
    `bias_bound` added.
    """

    estimate: Estimate
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

    @property
    def effective(self) -> float:
        """Independent samples of the reward that the record is worth."""
        return self.duration / self.autocorrelation_time

    @property
    def bias_bound(self) -> Params:
        """What the window may have left out, with 95 %: (|missing| + 2 missing_stderr) / (1 − r),
        as θ.

        Every window that follows adds r times what the one before it did, r being how much smaller
        `missing` is than the gradient, all components together and without their noise; e^{−w/τ} at
        the least, with τ of the slowest state.
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
        return (
            describe_estimate(self.estimate).replace("trajectories)", "batches)", 1)
            + f"\n  window {self.window:.4g}, autocorrelation time "
            f"{self.autocorrelation_time:.4g}, "
            + f"{self.effective:,.0f} independent samples; "
            + f"the next window would add {with_error(float(missing[worst]), float(error[worst]))} "
            "at most"
            + (CUT.format(self.memory) if self.cut else "")
            + (
                f"\n  → not steady: {self.change!r}"
                if self.change is not None and self.change.seen
                else ""
            )
        )


def stationary(
    process: AnyProcess,
    reward: Callable[..., Array] | Objective,
    theta: Params,
    record: Trajectories,
    *,
    window: float | str = "auto",
    score: Score = full_score,
    baseline: Twin | str | None = None,
) -> Stationary:
    """∇θ of the long-run average of a reward, from one trace or a few.

    Args:
        process: drift and noise that the score uses, or another kind of process.
        reward: (theta, x, t, context) -> g, a number; or an `Objective` with `running`, `per_step`
            or both.
        theta: the parameters at which the record was taken.
        record: `Trajectories` in the steady state, x (E, T+1, M), on a uniform grid; E may be 1. An
            array that loads when sliced is read a block of steps at a time.
        window: time over which a kick is remembered. "auto" begins with what the memory of the
            reward and of the slowest state ask for, and doubles it until the window that follows
            adds nothing beyond chance. Where the record is too short for that, `interval` is wider
            by `bias_bound`. A window that is given is taken as it is.
        score: ∂θ ln p(x'|x) of one step.
        baseline: "time" if not given, the mean reward; "twin" or a `Twin`, whose noise-free path
            from the measured states explains most of the rewards of a window.

    Returns: a `Stationary`, with the gradient, its error by batch means, and what the window leaves
    out.

    """
    process = check.process(process)
    theta = check.parameters(theta)
    objective = Objective(running=reward) if callable(reward) else reward
    rewards = check.objective(objective)
    for name in ("terminal", "initial"):
        if getattr(objective, name) is not None:
            raise ValueError(
                f"a long-run average has a `running` or a `per_step` reward and no `{name}` one."
            )
    recording = Recording(record, theta)
    steps = len(recording.t) - 1
    dt = _interval(recording)
    process = check_model(process, rewards, theta, recording.first, recording.t, recording.context)
    plan = resolve_baseline(baseline, caller="a long-run average", serves=("time", "twin"))
    used = select_score(process, score)
    if isinstance(plan, Twin):
        check.require_state_rewards(rewards, "the twin of a long-run average")
    ahead = (
        lookahead(plan, process, rewards, used, theta, recording)
        if isinstance(plan, Twin)
        else None
    )
    check_rounding(process, theta, recording)
    _guard(process, score, theta, record)

    source = _Source(process, rewards, used, theta, recording, ahead)
    g, parts, states = _rewards(source)
    own = autocorrelation_time(g)
    memory = memory_time(g)
    slowest = max(memory, _slowest(states))
    room = _Room(len(g), steps, max(10 * own, 5 * memory))
    lags = wanted = _window(window, memory, dt, steps, parts)
    if window == "auto":
        of_states = _find_window(slowest, g.size)
        wanted = max(
            lags, of_states if ahead is None else of_states // 2
        )  # a twin's path goes another window beyond
        lags = room.longest(lags, wanted)
    while True:
        length = room.length(lags)
        _long_enough(room, lags, memory, dt, parts)
        near, far = _batch_means(source, g, lags, length)
        if window != "auto" or not _stands_out(far):
            break
        wanted = 2 * lags
        if room.longest(lags, wanted) == lags:
            break
        lags = wanted
    blocks = g[:, : steps // length * length].reshape(-1, length).mean(axis=1)
    estimate = average_batches(theta, near, blocks)._replace(value=jnp.asarray(g.mean()))
    change = _change(parts, memory * PARTS * 2 / steps)
    if change is not None and change.seen:
        warnings.warn(
            f"the record is not in a steady state: {change!r}.", RuntimeWarning, stacklevel=2
        )
    missing = _shaped(theta, far.mean(axis=0))
    missing_error = _shaped(theta, _error(far))
    return include_bias(
        Stationary(
            estimate,
            lags * dt,
            own * dt,
            missing,
            missing_error,
            len(g) * steps * dt,
            near,
            length * dt,
            change,
            slowest * dt,
            wanted > lags,
        )
    )


def include_bias(answer: Stationary) -> Stationary:
    """With `bias_bound` added to both sides of the interval, where the window is cut; as it is
    elsewhere.
    """
    if not answer.cut:
        return answer
    assert answer.estimate.interval is not None
    low, high = answer.estimate.interval
    bound = answer.bias_bound
    wider = (jax.tree.map(jnp.subtract, low, bound), jax.tree.map(jnp.add, high, bound))
    return answer._replace(estimate=answer.estimate._replace(interval=wider))


class _Room(NamedTuple):
    """What a record of so many traces and steps has room for. shortest: length of a batch, at
    the least, in steps.
    """

    traces: int
    steps: int
    shortest: float

    def length(self, lags: int) -> int:
        """Steps of a batch: the correlations across its ends are a tenth of it."""
        return max(2 * lags, int(np.ceil(self.shortest)))

    def batches(self, lags: int) -> int:
        """Batches that a window of so many steps leaves."""
        return max((self.steps - 2 * lags) // self.length(lags), 0) * self.traces

    def longest(self, lags: int, wanted: int) -> int:
        """The window that is wanted, or halves of it until there are batches enough; not
        below `lags`.
        """
        while wanted > lags and self.batches(wanted) < MINIMUM:
            wanted = max(lags, wanted // 2)
        return wanted


def _find_window(memory: float, steps: int) -> int:
    """Steps after which a state with that memory holds a negligible part of what a kick does.

    Its time constant is τ = memory/2, N steps hold N/2τ independent samples, and a gradient is
    hardly known to more than √(2τ/N) of itself: e^{−w/τ} is to be a quarter of that. Neither
    gradient nor error is looked at, since windows that end where the gradient happens to be small
    would bias it.
    """
    decay = memory / 2
    return int(np.ceil(decay * max(np.log(np.sqrt(steps / memory) / NEGLIGIBLE), 1)))


def average_batches(theta: Params, batches: np.ndarray, values: np.ndarray) -> Estimate:
    """The estimate that gradients (B, P) and mean rewards (B',) of batches make, with intervals
    for skewed ones.
    """
    gradient = reduce_samples(Samples(_rows(theta, batches), jnp.asarray(batches[:, 0])))
    value = reduce_samples(Samples(jnp.asarray(values), jnp.asarray(values)))
    return Estimate(
        _shaped(theta, batches.mean(axis=0)),
        _shaped(theta, _error(batches)),
        _shaped(theta, (batches**2).mean(axis=0)),
        value.value,
        jnp.asarray(_error(values)),
        len(batches),
        gradient.interval,
        value.value_interval,
    )


def _rows(theta: Params, v: np.ndarray) -> Params:
    """`unflatten` with NumPy: it is compiled for every number of rows, and that of batches is
    another each time.
    """
    leaves, tree = jax.tree.flatten(theta)
    each = np.split(
        v.astype(jnp.result_type(*leaves)), np.cumsum([leaf.size for leaf in leaves])[:-1], axis=1
    )
    return jax.tree.unflatten(
        tree,
        [
            jnp.asarray(part.reshape(-1, *leaf.shape), leaf.dtype)
            for part, leaf in zip(each, leaves, strict=True)
        ],
    )


def _shaped(theta: Params, v: np.ndarray) -> Params:
    flat, unravel = ravel_pytree(theta)
    return unravel(jnp.asarray(v, flat.dtype))


def autocorrelation_time(g: np.ndarray) -> float:
    """1 + 2Σ_k ρ(k), in steps, of series g (E, T): summed to five times its own value (Sokal's
    window).
    """
    return _summed(_correlations(g))


def memory_time(g: np.ndarray) -> float:
    """1 + 2Σ_k |ρ(k)|, in steps: how long an oscillating series g (E, T) is correlated, which
    Σρ does not tell.
    """
    return _summed(np.abs(_correlations(g)))


def _correlations(g: np.ndarray) -> np.ndarray:
    """ρ(k) of series g (E, T), k = 0 … T−1."""
    centred = g - g.mean()
    size = 2 ** int(np.ceil(np.log2(2 * g.shape[1])))
    power = np.abs(np.fft.rfft(centred, size, axis=1)) ** 2
    covariance = np.fft.irfft(power, size, axis=1)[:, : g.shape[1]].sum(axis=0)
    if not covariance[0] > 0:
        raise ValueError(
            "the reward does not vary along the record: there is nothing to learn from."
        )
    return covariance / covariance[0]


def _summed(rho: np.ndarray) -> float:
    total = 2 * np.cumsum(rho) - 1
    done = np.arange(total.size) >= 5 * total
    return float(total[np.argmax(done)] if done.any() else total[-1])


def _interval(recording: Recording) -> float:
    each = np.asarray(recording.times.dt, np.float64)
    if np.ptp(each) > UNEVEN * each.mean():
        raise ValueError(
            "a continuing record needs a uniform time grid, because its correlations are taken by "
            "lag; its intervals "
            f"are {each.min():g} to {each.max():g}."
        )
    return float(each.mean())


def _guard(process: AnyProcess, score: Score, theta: Params, record: Trajectories) -> None:
    """Whether the residuals of the beginning are the noise of the process."""
    law = LAWS.get(score)
    if law is None or not isinstance(process, Process):
        return
    few = max(2, min(len(record.t), TRANSITIONS // len(record.x) + 1))
    some = Trajectories(np.asarray(record.t)[:few], np.asarray(record.x[:, :few]), record.context)
    warn_about_residuals(process, theta, some, transition=law, stacklevel=3)


def _window(window: float | str, memory: float, dt: float, steps: int, parts: np.ndarray) -> int:
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
            f"{lags * dt:.4g} (the "
            f"reward's autocorrelation time is {memory * dt:.3g}). Record for "
            f"longer.{_drifts(parts)}"
        )
    return lags


def _long_enough(room: _Room, lags: int, memory: float, dt: float, parts: np.ndarray) -> None:
    batches = room.batches(lags)
    length = room.length(lags)
    traces = room.traces
    steps = room.steps
    if batches < MINIMUM:
        raise ValueError(
            f"the record is too short: {traces} × {steps * dt:.4g} units of time hold {batches} "
            "stretches of "
            f"{length * dt:.4g}, which is what a window of {lags * dt:.4g} and an autocorrelation "
            "time of "
            f"{memory * dt:.3g} need; {MINIMUM} make an error bar. Record for longer, or give a "
            "shorter `window`."
            f"{_drifts(parts)}"
        )


def _drifts(parts: np.ndarray) -> str:
    """What to add where a record is too short for its correlations, because a drift looks like
    a long one.
    """
    change = _change(parts, 0.0)
    return (
        f" Or it is not in a steady state: {change!r}."
        if change is not None and change.seen
        else ""
    )


def _error(means: np.ndarray) -> np.ndarray:
    """One standard error of the mean of a few batches, as wide as Student has it. (B, …) -> (…)"""
    return (
        scipy.stats.t.ppf(0.8413447, len(means) - 1)
        * means.std(axis=0, ddof=1)
        / np.sqrt(len(means))
    )


def _stands_out(far: np.ndarray) -> bool:
    """Whether the window that follows adds more than chance to some component of the gradient.
    far: (B, P)
    """
    error = far.std(axis=0, ddof=1) / np.sqrt(len(far))
    return bool(
        np.any(
            np.abs(far.mean(axis=0))
            > scipy.stats.t.isf(DOUBT / (2 * far.shape[1]), len(far) - 1) * error
        )
    )


# --------------------------------------------------------------------------- passes over the record


class _Source(NamedTuple):
    """What is read, and with what."""

    process: AnyProcess
    rewards: Rewards
    score: Score
    theta: Params
    recording: Recording
    ahead: Lookahead | None


class _Read(NamedTuple):
    """What a first pass over a record finds. rewards: gₙ (E, T).

    parts: sums of (1, g, x, x²) over 2·PARTS parts of each trace (E, parts, 2M+2). states: some of
    them, evenly spaced.
    """

    rewards: np.ndarray
    parts: np.ndarray
    states: _StateMoments


class _StateMoments(NamedTuple):
    """x (E, N, M) every `stride` steps."""

    x: np.ndarray
    stride: int


def _rewards(source: _Source) -> _Read:
    recording = source.recording
    steps = len(source.recording.t) - 1
    rewards = []
    parts = np.zeros((recording.count, 2 * PARTS, 2 * recording.first.shape[1] + 2))
    stride = max(1, -(-steps * recording.first.size // STATES))
    some = []
    for n in range(0, steps, BLOCK):
        times, x = recording.block(n, min(n + BLOCK, steps))
        g = np.asarray(
            _evaluate_rewards(source.rewards, source.theta, times, x, recording.context), np.float64
        )
        if source.rewards.per_step is not None:
            g = g + _arrival_rewards(source, n, n + g.shape[1])[0]
        states = np.asarray(x[:, :-1], np.float64)
        rows = np.concatenate([np.ones_like(g)[..., None], g[..., None], states, states**2], axis=2)
        _add(parts, rows, (n + np.arange(g.shape[1])) * 2 * PARTS // steps)
        rewards.append(g)
        some.append(states[:, -n % stride :: stride])
    return _Read(
        np.concatenate(rewards, axis=1), parts, _StateMoments(np.concatenate(some, axis=1), stride)
    )


def _slowest(states: _StateMoments) -> float:
    """The longest memory of a component of the states or of its square, in steps; that of one
    which is still is 0.
    """
    series = np.moveaxis(states.x, 2, 0)
    series = np.concatenate([series, series**2])  # an amplitude may be slow where its phase is fast
    series = series - series.mean(
        axis=2, keepdims=True
    )  # traces with other contexts have other means
    moving = [one for one in series if np.ptp(one) > 0]
    return states.stride * max((memory_time(one) for one in moving), default=0.0)


def _add(sums: np.ndarray, rows: np.ndarray, index: np.ndarray) -> None:
    """Add rows (E, b, …) to sums (E, B, …) by number; numbers outside 0 … B−1 belong to none."""
    for k in np.unique(index[(index >= 0) & (index < sums.shape[1])]):
        sums[:, k] += rows[:, index == k].sum(axis=1)


def _batch_means(
    source: _Source, g: np.ndarray, lags: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Means over stretches of (gₙ − ḡ)(Uₙ₋₁ + … + Uₙ₋w) + ∂θ g and of (gₙ − ḡ)(Uₙ₋w₋₁ + … + Uₙ₋₂w).

    (B, P) each
    """
    traces, steps, mean = *g.shape, g.mean()
    unbiased = 1 / (1 - lags / g.size)
    size = ravel_pytree(source.theta)[0].size
    sums = [np.zeros((traces, (steps - first) // length, size)) for first in (lags, 2 * lags)]
    kicks = [
        [np.zeros_like(part) for part in sums] for _ in range(2)
    ]  # Σz, where a look ahead begins and elsewhere
    levels = np.zeros((2, 2))  # count and sum of g̃ − ḡ in either place
    before = np.zeros((traces, 2 * lags + 1, size))  # Σ_{k<m} U_k up to a constant, m = n − 2w … n
    for n, begins, level, explicit, u in _traces(source, g, mean, lags):
        b = u.shape[1]
        level = unbiased * level
        total = np.concatenate([before, before[:, -1:] + np.cumsum(u, axis=1)], axis=1)
        ends = [total[:, first : first + b] for first in (2 * lags, lags, 0)]
        before = total[:, b:] - total[:, b : b + 1]
        inside = n + np.arange(b) >= lags
        levels += [[np.sum(at), level[:, at].sum()] for at in (inside & ~begins, inside & begins)]
        for k in range(2):
            trace = ends[k] - ends[k + 1]
            index = (n + np.arange(b) - (k + 1) * lags) // length
            _add(sums[k], level[..., None] * trace + (explicit if k == 0 else 0.0), index)
            if source.ahead is not None:
                for which, at in enumerate((~begins, begins)):
                    _add(kicks[which][k], trace[:, at], index[at])
    if (
        source.ahead is not None
    ):  # the level that a twin gets wrong in the same way everywhere is no reward of a kick
        for which in range(2):
            offset = levels[which, 1] / max(levels[which, 0] * traces, 1)
            sums = [part - offset * z for part, z in zip(sums, kicks[which], strict=True)]
    flat = source.recording
    check_scores(sums[0].sum(axis=1), source.process, source.theta, flat.trajectory, flat.t)
    near, far = (part.reshape(-1, size) / length for part in sums)
    return near, far


def _traces(
    source: _Source, g: np.ndarray, mean: float, lags: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """First step of a block, where a look ahead begins (b,), gₙ − ḡ (E, b), ∂θ gₙ and Uₙ (E, b,
    P), block by block.
    """
    recording = source.recording
    ahead = source.ahead
    steps = g.shape[1]
    block = max(BLOCK, 2 * lags)
    path = None if ahead is None else ahead.over(lags, mean)
    if path is not None:
        block = max(1, block // path.stride) * path.stride
        steps = steps // path.stride * path.stride
    for n in range(0, steps, block):
        stop = min(n + block, steps)
        times, x = recording.block(n, stop)
        events = recording.events(n, stop)
        u, explicit = _evaluate_block(*source[:4], times, x, recording.context, events)
        if source.rewards.per_step is not None:
            explicit = explicit + _arrival_rewards(source, n, stop)[1]
        level = g[:, n:stop] - mean
        begins = np.zeros(stop - n, bool)
        if path is not None:
            level, explicit = path.block(times, x)
            begins[:: path.stride] = True
        yield n, begins, level, np.asarray(explicit, np.float64), np.asarray(u, np.float64)


@partial(jit, static_argnums=0)
def _evaluate_rewards(
    rewards: Rewards, theta: Params, times: Any, x: Array, context: PyTree
) -> Array:
    along = jax.vmap(
        lambda x, t, context: rewards.running(theta, x, t, context), in_axes=(0, 0, None)
    )
    return jax.vmap(along, in_axes=(0, None, 0))(x[:, :-1], times.t[:-1], context)


def _arrival_rewards(source: _Source, n: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """r(X_{k−1}, X_k)/Δt (E, b) and its ∂θ (E, b, P), k = n … stop−1."""
    recording = source.recording
    times, x = recording.block(max(n - 1, 0), max(stop - 1, 1))
    rows = _evaluate_step_rewards(source.rewards, source.theta, times, x, recording.context)
    paid, slopes = (np.asarray(v, np.float64) for v in rows)
    if (
        n == 0
        # the step that led to X₀ is not in the record; it meets no score, and the next one stands
        # for it
    ):
        paid, slopes = (np.concatenate([v[:, :1], v], axis=1)[:, :stop] for v in (paid, slopes))
    return paid, slopes


@partial(jit, static_argnums=0)
def _evaluate_step_rewards(
    rewards: Rewards, theta: Params, times: Any, x: Array, context: PyTree
) -> tuple[Array, Array]:
    def one(x: Array, x_next: Array, t: Array, dt: Array, context: PyTree) -> tuple[Array, Array]:
        assert rewards.per_step is not None
        paid = rewards.per_step
        r, slope = jax.value_and_grad(
            lambda th: (paid(th, x, x_next, t, dt, context) / dt).astype(x.dtype)
        )(theta)
        return r, ravel_pytree(slope)[0]

    along = jax.vmap(one, in_axes=(0, 0, 0, 0, None))
    return jax.vmap(along, in_axes=(0, 0, None, None, 0))(
        x[:, :-1], x[:, 1:], times.t[:-1], times.dt, context
    )


@partial(jit, static_argnums=(0, 1, 2))
def _evaluate_block(
    process: AnyProcess,
    rewards: Rewards,
    score: Score,
    theta: Params,
    times: Any,
    x: Array,
    context: PyTree,
    events: Any,
) -> tuple[Array, Array]:
    """Uₙ and ∂θ gₙ. (E, b, P)"""

    def one(
        x: Array, x_next: Array, t: Array, dt: Array, events: PyTree, context: PyTree
    ) -> tuple[Array, Array]:
        explicit = jax.grad(lambda th: rewards.running(th, x, t, context).astype(x.dtype))(theta)
        u = score(process, theta, Step(x, x_next, t, dt, context, events))
        return ravel_pytree(u)[0], ravel_pytree(explicit)[0]

    along = jax.vmap(one, in_axes=(0, 0, 0, 0, 0, None))
    return jax.vmap(along, in_axes=(0, 0, None, None, 0, 0))(
        x[:, :-1], x[:, 1:], times.t[:-1], times.dt, events, context
    )


def _change(parts: np.ndarray, memory: float) -> Change | None:
    """Means of the first and of the second half. parts: sums (E, 2·PARTS, 2M+2). memory: in
    units of a part.
    """
    width = 1
    while width < min(10 * memory, PARTS):
        width += 1
        while PARTS % width:
            width += 1
    merged = parts.reshape(len(parts), 2 * PARTS // width, width, -1).sum(axis=2)
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
