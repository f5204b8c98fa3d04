"""Jump processes: events with rates and changes of state, with or without diffusion between them.

Event i happens at the rate a_i(X, t; θ) and takes X to X + ν_i. Over one step of the time grid,
with events i₁ … i_K after waits τ₁ … τ_K, the path has the density Π_k a_{i_k}(X⁻) exp(−∫ Σ_i
a_i(X_s) ds), so its score is

    U = Σ_k ∂θ ln a_{i_k}(X⁻) − ∫ ∂θ Σ_i a_i(X_s) ds  [+ Σ_k ∂θ ln f(ν_k | X⁻)],

the last term where the sizes of the changes are drawn from a density f. Rates are evaluated at the
time at which the step begins, so a protocol is piecewise constant on the grid. Without diffusion
the simulation is exact (Gillespie). With it, the events of a step and its Euler–Maruyama kick start
from the same state and add up; the score is exact for that chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import check, scores
from fluctua.core.arrays import Array, Params, PyTree
from fluctua.core.baselines import Twin
from fluctua.core.diffusion import find_noiseless
from fluctua.core.display import records
from fluctua.core.process import Process, Step
from fluctua.core.simulate import advance_diffusion
from fluctua.core.twin import sweep
from fluctua.processes import jump_twin, jump_twin_sweep


class RandomJump(NamedTuple):
    """Changes of random size, for `Jumps(rates, changes=RandomJump(...))`.

    sample: (key, theta, x, t, context, channel) -> ν (M,).
    log_density: (theta, change, x, t, context, channel) -> ln f(ν), up to a constant in θ.

    Arguments at the end that a callable does not use may be left off.

    >>> size = fl.RandomJump(  # exponentially distributed
    ...     sample=lambda key, theta: theta["mean"] * jax.random.exponential(key, (1,)),
    ...     log_density=lambda theta, change: -change[0] / theta["mean"] - jnp.log(theta["mean"]),
    ... )
    >>> shots = fl.Jumps(rates=lambda theta, x: jnp.array([theta["rate"]]), changes=size)
    """

    sample: Callable[..., Array]
    log_density: Callable[..., Array]


MAX_EVENTS = 2**20
"""Maximum number of events in one step of one trajectory; beyond it the state becomes NaN."""


class Events(NamedTuple):
    """The events within each step, in order; K is the maximum over all steps.

    after: time from the beginning of the step (…, K).
    channel: which event, −1 where there is none (…, K).
    change: ν (…, K, M).
    """

    after: Array
    channel: Array
    change: Array


class Scored(NamedTuple):
    """The events of a simulated step, reduced to what its score needs.

    change: ν summed over the events (M,).
    score: of the events, like θ.
    count: number of events.
    """

    change: Array
    score: Params
    count: Array


@dataclass(frozen=True)
class Jumps:
    """A process with events: reactions, photon counts, shot noise, failures.

    Use it in place of a `Process`.

    rates: (theta, x, t, context) -> a (R,), events per unit of time; trailing arguments are
        optional.
    changes: ν (R, M), added to the state by each event; or a `RandomJump`.
    diffusion: an Itô `Process` between events; None for none.

    >>> def rates(theta, x):  # x: susceptible, infected
    ...     return jnp.array([theta["infect"] * x[0] * x[1] / 100, theta["recover"] * x[1]])
    >>> epidemic = fl.Jumps(rates, changes=[[-1.0, 1.0], [0.0, -1.0]])  # one row per event
    >>> simulator = fl.simulator(epidemic, jnp.array([80.0, 20.0]), t=jnp.linspace(0.0, 3.0, 31))
    >>> cases = fl.Objective(terminal=lambda theta, x: 100 - x[0])
    >>> theta = {"infect": jnp.array(1.5), "recover": jnp.array(0.7)}
    >>> estimate = fl.ppgt(simulator, cases)(key, theta, 100)
    """

    rates: Callable[..., Array]
    changes: Any
    diffusion: Process | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates", check.drop_extra_arguments(self.rates, 4))
        if self.diffusion is not None:
            object.__setattr__(self, "diffusion", check.process(self.diffusion))
        if isinstance(self.changes, RandomJump):
            size = RandomJump(*(check.drop_extra_arguments(f, 6) for f in self.changes))
            object.__setattr__(self, "changes", size)
            return
        table = np.asarray(self.changes, float) + 0.0  # no −0, which is not nothing to a kernel
        if table.ndim != 2 or table.size == 0 or not np.isfinite(table).all():
            raise ValueError(
                f"`changes` must be finite numbers (events, state); got shape {table.shape}."
            )
        # hashable: compilations are shared
        object.__setattr__(self, "changes", tuple(map(tuple, table.tolist())))

    def __repr__(self) -> str:
        return records.describe_parts("Jumps", records.name_parts(vars(self)))

    def _repr_html_(self) -> str:
        return records.render_parts("Jumps", records.name_parts(vars(self)))

    def advance(
        self,
        theta: Params,
        x: Array,
        context: PyTree,
        stream: PyTree,
        draw: Callable,
        n: Array,
        t: Array,
        dt: Array,
    ) -> tuple[Array, Scored]:
        """Simulate a step: the state after it, and its events as `Scored`."""
        run = _simulate_events(self, theta, EventStep(x, t, dt, context), _event_key(stream, n), 0)
        left = Scored(run.x - x, run.score, run.count)
        return self.add_diffusion(theta, x, run.x, left, (context, stream, draw, n, t, dt)), left

    def add_diffusion(
        self, theta: Params, x: Array, jumped: Array, left: Scored, step: tuple
    ) -> Array:
        """Add the diffusion to a step whose events alone lead from x to `jumped`.

        step: the arguments of `advance`, from context on.
        """
        if self.diffusion is None:
            return jumped
        return advance_diffusion(self.diffusion, theta, x, *step) + left.change

    def events(
        self,
        theta: Params,
        x: Array,
        context: PyTree,
        stream: PyTree,
        n: Array,
        t: Array,
        dt: Array,
        maximum: int,
    ) -> Events:
        """The events of a step that `advance` simulated, at most `maximum` of them."""
        return _simulate_events(
            self, theta, EventStep(x, t, dt, context), _event_key(stream, n), maximum
        ).events

    def observe_events(
        self, theta: Params, step: Step, stream: PyTree, n: Array, observer: jump_twin.Observer
    ) -> tuple[Array, Params, PyTree]:
        """Simulate the events of a step as `advance` does, and observe its waits.

        Args:
            theta: θ.
            step: its x, t, dt and context.
            stream: of the trajectory.
            n: number of the step.
            observer: what is added up.

        Returns: the state after them, their score, and the sums of the observer.
        """
        at = EventStep(step.x, step.t, step.dt, step.context)
        run = _simulate_events(self, theta, at, _event_key(stream, n), 0, observer)
        return run.x, run.score, run.observed

    def observe_recorded(
        self, theta: Params, step: Step, observer: jump_twin.Observer
    ) -> tuple[Params, PyTree]:
        """The score of the recorded events of a step, and the sums of the observer."""
        return _observe_recorded(self, theta, step, observer)

    def check_twin(self, twin: Twin) -> Twin:
        """The twin with its process filled in; refused for what it cannot follow."""
        return jump_twin_sweep.check_twin(self, twin)

    def twin_parts(self, call: sweep.TwinCall) -> sweep.Parts:
        """The two parts of the gradients of simulated trajectories, with a twin."""
        return jump_twin_sweep.simulated_parts(call)

    def recorded_twin_parts(self, call: sweep.RecordedTwinCall) -> sweep.Parts:
        """The two parts of the gradients of recorded trajectories, with a twin."""
        return jump_twin_sweep.recorded_parts(call)

    def score(self, theta: Params, step: Step) -> Params:
        """U of one step, simulated or recorded."""
        if step.events is None:
            raise ValueError(
                "the score of `Jumps` needs the events, not only the states: Trajectories(t, x, "
                "events=bin_events(...))."
            )
        if isinstance(step.events, Scored):
            change, score, _ = step.events
        else:
            change = _sum_changes(step.events)
            score = jax.grad(lambda th: log_likelihood(self, th, step))(theta)
        if self.diffusion is None:
            return score
        smooth = scores.full_score(
            self.diffusion, theta, step._replace(x_next=step.x_next - change, events=None)
        )
        return jax.tree.map(jnp.add, score, smooth)

    def log_ratio(self, new: Params, old: Params, step: Step) -> scores.Ratio:
        """ln p_new − ln p_old of one recorded step: its events and the diffusion between them."""
        if step.events is None:
            raise ValueError(
                "the ratio of `Jumps` needs the events, not only the states: Trajectories(t, x, "
                "events=bin_events(...))."
            )
        log = log_likelihood(self, new, step) - log_likelihood(self, old, step)
        if self.diffusion is None:
            return scores.Ratio(log, -log)
        smooth = scores.log_ratio(
            self.diffusion,
            new,
            old,
            step._replace(x_next=step.x_next - _sum_changes(step.events), events=None),
        )
        return scores.Ratio(log + smooth.log, smooth.divergence - log)

    def counts(self, theta: Params, step: Step) -> tuple[Array, Array]:
        """Number of events in one recorded step and the expected number, ∫a ds. Shape (R,) each."""
        x, _, t, dt, context, events = step

        def one(carry: tuple[Array, ...], event: Events) -> tuple[tuple[Array, ...], None]:
            x, since, happened, expected = carry
            after, channel, change = event
            exists = channel >= 0
            a = self.rates(theta, x, t, context)
            expected = expected + jnp.where(exists, a * (after - since), 0)
            happened = happened + (exists & (jnp.arange(a.size) == channel))
            return (
                jnp.where(exists, x + change, x),
                jnp.where(exists, after, since),
                happened,
                expected,
            ), None

        nothing = jnp.zeros_like(self.rates(theta, x, t, context))
        events = jax.tree.map(
            lambda v: v.astype(x.dtype) if jnp.issubdtype(v.dtype, jnp.floating) else v, events
        )
        (x, since, happened, expected), _ = jax.lax.scan(
            one, (x, jnp.zeros((), x.dtype), nothing, nothing), events
        )
        return happened, expected + self.rates(theta, x, t, context) * (dt - since)

    def check(
        self, theta: Params, x: Array, t: Array, context: PyTree, where: str = "at the first state"
    ) -> Jumps:
        """Check the rates and the changes, and mark the noiseless components of the diffusion.

        Rates are one number per event, finite and not negative; changes have the shape of the
        state.
        """
        rates = np.asarray(self.rates(theta, x, t, context))
        known = None if isinstance(self.changes, RandomJump) else len(self.changes)
        if rates.ndim != 1 or known not in (None, rates.size):
            wanted = "(events,)" if known is None else f"({known},), one for each change"
            raise ValueError(f"`rates` must have shape {wanted}; got {rates.shape}.")
        bad = np.flatnonzero(~(rates >= 0) | ~np.isfinite(rates))
        if bad.size:
            raise ValueError(
                f"the rate of event {bad[0]} is {rates[bad[0]]:g} {where}, x = "
                f"{np.asarray(x).tolist()}: rates must be finite and not negative. Write one that "
                "is zero where the event cannot happen, such as k * x[0]."
            )
        if known is not None and len(self.changes[0]) != x.size:
            raise ValueError(
                f"each change must have the {x.size} components of the state; got "
                f"{len(self.changes[0])}."
            )
        if self.diffusion is None:
            return self
        check.shapes(self.diffusion, theta, x, t, context)
        if where != "at the first state":  # of the diffusion there: `check_along`
            return self
        named = find_noiseless(self.diffusion, theta, x, t, context)
        assert isinstance(named, Process)
        return replace(self, diffusion=named)


def bin_events(
    t: Array, times: Sequence[Array], channels: Sequence[Array], changes: Array | Sequence[Array]
) -> Events:
    """Assign recorded events to the steps of a time grid, for `Trajectories(t, x, events=...)`.

    Args:
        t: the grid (T+1,).
        times: for each trajectory, when its events happened, in order.
        channels: for each trajectory, which events they were, 0 … R−1.
        changes: ν (R, M) of the events; or, where sizes are random, one row per event for each
            trajectory.

    Returns: `Events` with leaves (E, T, K, …).

    >>> grid = np.linspace(0.0, 1.0, 5)
    >>> clicks = fl.bin_events(grid, times=[[0.1, 0.6]], channels=[[0, 0]], changes=[[1.0]])
    >>> clicks.channel[0, :, 0]  # steps 0 and 2 have an event of kind 0
    array([ 0, -1,  0, -1])
    >>> counts = np.array([0.0, 1.0, 1.0, 2.0, 2.0]).reshape(1, 5, 1)
    >>> counted = fl.Trajectories(grid, counts, events=clicks)
    """
    grid = np.asarray(t, float)
    fixed = not isinstance(changes, list | tuple) or all(np.ndim(row) == 1 for row in changes)
    table = np.asarray(changes, float) if fixed else None
    width = table.shape[1] if table is not None else max(np.shape(c)[-1] for c in changes if len(c))
    steps = [np.searchsorted(grid, np.asarray(when, float), side="right") - 1 for when in times]
    for j, (when, step) in enumerate(zip(times, steps, strict=True)):
        if len(when) != len(channels[j]):
            raise ValueError(
                f"trajectory {j} has {len(when)} event times and {len(channels[j])} channels."
            )
        if len(when) and (
            np.any(np.diff(when) < 0) or step.min() < 0 or step.max() >= grid.size - 1
        ):
            raise ValueError(
                f"the events of trajectory {j} must be in order and lie on the grid, from "
                f"{grid[0]:g} to below {grid[-1]:g}; they run from {np.min(when):g} to "
                f"{np.max(when):g}."
            )
    maximum = max([1, *(int(np.bincount(step).max()) for step in steps if len(step))])
    shape = (len(times), grid.size - 1, maximum)
    after = np.zeros(shape)
    channel = np.full(shape, -1)
    change = np.zeros((*shape, width))
    for j, step in enumerate(steps):
        rank = np.arange(len(step)) - np.searchsorted(step, step)  # first, second, … of its step
        after[j, step, rank] = np.asarray(times[j], float) - grid[step]
        channel[j, step, rank] = channels[j]
        if len(step):
            own = changes[j] if table is None else table[np.asarray(channels[j], int)]
            change[j, step, rank] = own
    return Events(after, channel, change)


def _sum_changes(events: Events) -> Array:
    """Sum of ν over the events of one step. Shape (M,)."""
    return jnp.sum(jnp.where((events.channel >= 0)[:, None], events.change, 0), axis=0)


class _LogDensity(NamedTuple):
    """State of the sum over the events of a step.

    x: the state after the last event.
    since: time of the last event.
    total: log-density of the events so far.
    """

    x: Array
    since: Array
    total: Array


def log_likelihood(process: Jumps, theta: Params, step: Step) -> Array:
    """Log-density of the recorded events of one step, as a function of θ."""
    x, _, t, dt, context, events = step

    def add(carry: _LogDensity, event: Events) -> tuple[_LogDensity, None]:
        x, since, total = carry
        after, channel, change = event
        exists = channel >= 0
        a = process.rates(theta, x, t, context)
        # before the logarithm: its derivative at 0 is not a number
        rate = jnp.where(exists, a[channel], 1.0)
        size = _log_size(process, theta, change, x, t, context, channel)
        term = jnp.log(rate) - jnp.sum(a) * (after - since) + size
        carry = _LogDensity(
            jnp.where(exists, x + change, x),
            jnp.where(exists, after, since),
            total + jnp.where(exists, term, 0.0),
        )
        return carry, None

    zero = jnp.zeros((), x.dtype)
    events = jax.tree.map(
        lambda v: v.astype(x.dtype) if jnp.issubdtype(v.dtype, jnp.floating) else v, events
    )
    end, _ = jax.lax.scan(add, _LogDensity(x, zero, zero), events)
    return end.total - jnp.sum(process.rates(theta, end.x, t, context)) * (dt - end.since)


class _EventRun(NamedTuple):
    """The events of one step so far.

    x: the state after them (M,).
    count: number of events.
    time: of the last event; the end of the step once there are no more.
    score: of the events, like θ.
    events: those that are kept.
    observed: sums of an observer; None without one.
    """

    x: Array
    count: Array
    time: Array
    score: Params
    events: Events
    observed: PyTree = None


class EventStep(NamedTuple):
    """The step in which events happen.

    x: the state since the last event (M,).
    t, dt: beginning and length of the step.
    context: of the trajectory.
    """

    x: Array
    t: Array
    dt: Array
    context: PyTree


class EventDraws(NamedTuple):
    """The random numbers of one event.

    exponential: standard exponential.
    uniform: in [0, 1).
    key: for a random size; None otherwise.
    """

    exponential: Array
    uniform: Array
    key: Array | None = None


class NextEvent(NamedTuple):
    """The next event of a step, or the end of the step.

    x: the state afterwards (M,).
    after: time since the step began, afterwards.
    over: whether the step ends without a further event.
    channel, change: of the event.
    score: of the event, or of the rest of the step without one.
    """

    x: Array
    after: Array
    over: Array
    channel: Array
    change: Array
    score: Params


def next_event(
    process: Jumps,
    theta: Params,
    step: EventStep,
    since: Array,
    draws: EventDraws,
    select_row: Callable[[Array, Array], Array] = lambda table, row: table[row],
) -> NextEvent:
    """Compute the next event of a step from its random numbers.

    Args:
        process: its rates and changes.
        theta: θ.
        step: the state since the last event, and the step.
        since: the time of the last event, from the beginning of the step.
        draws: the random numbers of the event.
        select_row: (table, row) -> the row; replaced where a kernel cannot index by a random
            number.
    """
    x, t, dt, context = step
    exponential, uniform, key = draws
    a = process.rates(theta, x, t, context)
    # a negative rate must not pass for a small one, and an infinite one would never let the step
    # end
    total = jnp.where(jnp.all(a >= 0) & (jnp.sum(a) < jnp.inf), jnp.sum(a), jnp.nan)
    wait = (exponential / total).astype(x.dtype)
    over = ~(since + wait < dt)  # also where the rates are not numbers, or all zero
    passed = jnp.cumsum(a) <= uniform * total
    channel = jnp.minimum(jnp.sum(passed), a.size - 1)
    if isinstance(process.changes, RandomJump):
        change = process.changes.sample(key, theta, x, t, context, channel).astype(x.dtype)
    else:
        change = select_row(jnp.asarray(process.changes, x.dtype), channel)

    def log_density(theta: Params) -> Array:
        a = process.rates(theta, x, t, context)
        size = _log_size(process, theta, change, x, t, context, channel)
        return jnp.log(select_row(a, channel)) - jnp.sum(a) * wait + size

    of_event = jax.grad(log_density)(theta)
    of_rest = jax.grad(lambda th: -jnp.sum(process.rates(th, x, t, context)) * (dt - since))(theta)
    return NextEvent(
        jnp.where(jnp.isnan(total), jnp.nan, jnp.where(over, x, x + change)),
        jnp.where(over, dt, since + wait).astype(since.dtype),
        over,
        channel,
        change,
        jax.tree.map(lambda e, r: jnp.where(over, r, e), of_event, of_rest),
    )


def _simulate_events(
    process: Jumps,
    theta: Params,
    step: EventStep,
    key: Array,
    maximum: int,
    observer: jump_twin.Observer | None = None,
) -> _EventRun:
    """Simulate the events of one step with their score.

    maximum: number of events that are kept. observer: of the waits between them.
    """
    x = step.x
    dt = jnp.asarray(step.dt, x.dtype)  # the end of the step is a time that `time` can have
    step = step._replace(dt=dt)

    def one(run: _EventRun) -> _EventRun:
        k_wait, k_channel, k_size = jax.random.split(jax.random.fold_in(key, run.count), 3)
        draws = EventDraws(
            jax.random.exponential(k_wait, dtype=x.dtype),
            jax.random.uniform(k_channel, dtype=x.dtype),
            k_size,
        )
        new = next_event(process, theta, step._replace(x=run.x), run.time, draws)
        kept = run.events
        if maximum:
            place = jnp.where(new.over, maximum, run.count)  # out of bounds is dropped
            event = Events(new.after, new.channel, new.change)
            kept = jax.tree.map(
                lambda v, e: v.at[place].set(e.astype(v.dtype), mode="drop"), kept, event
            )
        score = jax.tree.map(jnp.add, run.score, new.score)
        observed = run.observed
        if observer is not None:
            observed = observer.add(observed, jump_twin.Wait(run.x, run.time, new.after, run.score))
        count = jnp.where(new.over, run.count, run.count + 1)
        return _EventRun(new.x, count, new.after, score, kept, observed)

    nothing = Events(
        jnp.zeros(maximum, x.dtype),
        jnp.full(maximum, -1),
        jnp.zeros((maximum, x.size), x.dtype),
    )
    begin = _EventRun(
        x,
        jnp.zeros((), int),
        jnp.zeros((), x.dtype),
        jax.tree.map(jnp.zeros_like, theta),
        nothing,
        None if observer is None else observer.begin,
    )
    run = jax.lax.while_loop(lambda run: (run.time < dt) & (run.count < MAX_EVENTS), one, begin)
    return run._replace(x=jnp.where(run.time < dt, jnp.nan, run.x))


class _Observed(NamedTuple):
    """State of a sum over recorded events: since the last of them, as in `_EventRun`."""

    x: Array
    since: Array
    score: Params
    sums: PyTree


def _observe_recorded(
    process: Jumps, theta: Params, step: Step, observer: jump_twin.Observer
) -> tuple[Params, PyTree]:
    """The score of the recorded events of a step, and the sums of an observer."""
    x, _, t, dt, context, events = step
    dt = jnp.asarray(dt, x.dtype)

    def log_density(th: Params, x: Array, channel: Array, length: Array, happens: Array) -> Array:
        a = process.rates(th, x, t, context)
        # before the logarithm: its derivative at 0 is not a number
        rate = jnp.where(happens, a[channel], 1.0)
        return jnp.log(rate) - jnp.sum(a) * length

    def wait(carry: _Observed, end: Array, channel: Array, happens: Array) -> _Observed:
        sums = observer.add(carry.sums, jump_twin.Wait(carry.x, carry.since, end, carry.score))
        new = jax.grad(log_density)(theta, carry.x, channel, end - carry.since, happens)
        score = jax.tree.map(jnp.add, carry.score, new)
        return _Observed(carry.x, end, score, sums)

    def one(carry: _Observed, event: Events) -> tuple[_Observed, None]:
        exists = event.channel >= 0
        new = wait(carry, event.after.astype(x.dtype), event.channel, exists)
        new = new._replace(x=carry.x + event.change.astype(x.dtype))
        return jax.tree.map(lambda a, b: jnp.where(exists, a, b), new, carry), None

    zero = jnp.zeros((), x.dtype)
    begin = _Observed(x, zero, jax.tree.map(jnp.zeros_like, theta), observer.begin)
    carry, _ = jax.lax.scan(one, begin, events)
    end = wait(carry, dt, jnp.zeros((), int), jnp.zeros((), bool))
    return end.score, end.sums


def _log_size(
    process: Jumps,
    theta: Params,
    change: Array,
    x: Array,
    t: Array,
    context: PyTree,
    channel: Array,
) -> Array:
    if not isinstance(process.changes, RandomJump):
        return jnp.zeros((), x.dtype)
    return process.changes.log_density(theta, change, x, t, context, channel)


def _event_key(stream: PyTree, n: Array) -> Array:
    """Key of the events of step n; the kick of that step uses `fold_in(stream, n)`."""
    if not isinstance(stream, jax.Array):
        raise ValueError(
            "`Jumps` are simulated with JAX's own generator: leave `wiener` of the simulator off."
        )
    return jax.random.fold_in(jax.random.fold_in(stream, n), 1)
