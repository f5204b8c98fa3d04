"""Baselines λ̄ₙ: subtracted from the return-to-go, they change the variance and never the mean.

A baseline is admissible when it is independent of the kick it multiplies. Those here get that
either by leaving the trajectory itself out of every sum or by knowing nothing but the time. Bin
membership uses the state *before* the kick.

Another baseline is a function of `Inputs` that returns (E, P), or anything that broadcasts to it.
It is tried once (`check_admissible`) and refused if it depends on the return or the score of its
own trajectory.

Every entry point (`ppgt`, `gradient`, `Task.estimator`, configurations, recordings, the command
line) takes a name of `TABLE` or a record, has the default `DEFAULT`, and refuses by name what it
does not serve (`resolve_baseline`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core.arrays import Array, Params, PyTree, jit
from fluctua.core.check import drop_extra_arguments, tree_signature
from fluctua.core.process import Process
from fluctua.core.words import close_match

__all__ = ["Baseline", "Inputs", "binned", "carried", "mean", "none", "optimal", "time_only"]

PILOT = 128
"""Trajectories of the independent run behind a time-only baseline, by default."""

BATCH = 256
"""Trajectories that go through time together with a `Twin`, by default."""


class Inputs(NamedTuple):
    """Input of a baseline: one step of the whole ensemble.

    index: n, or −1 for the draw of X₀, whose score is ∂θ ln p₀.
    theta: θ, a pytree of floats.
    x: states before the kick (E, M); None for the draw of X₀.
    t: the time of the step.
    context: pytree with leaves (E, ...), or None.
    returns: λ̂ₙ₊₁ (E,); of trajectories that stop, what is to come if they still run.
    score: Uₙ (E, P), times the survival.
    values: the table of the baseline, if it has one.
    survival: probability that each still runs (E,), 0 for those that stopped; None where nothing
        stops.

    >>> def expected(inputs):  # a table of the mean return-to-go, the same for every trajectory
    ...     return inputs.values[inputs.index + 1]
    >>> table = fl.mean_return_to_go(objective, theta, recorded)
    >>> own = fl.baselines.Baseline(expected, needs_returns=False, min_trajectories=1, values=table)
    >>> estimate = fl.ppgt(simulator, objective, baseline=own)(jax.random.key(1), theta, 200)
    >>> fl.baselines.Inputs._fields[:4]
    ('index', 'theta', 'x', 't')
    """

    index: Array
    theta: Params
    x: Array | None
    t: Array
    context: PyTree
    returns: Array
    score: Array
    values: Array | None
    survival: Array | None = None


class Baseline(NamedTuple):
    """Baseline λ̄ₙ, subtracted from the return-to-go of every trajectory and parameter.

    Made by the functions of `fluctua.baselines`; build one for a baseline of your own.

    function: `Inputs` -> λ̄ₙ, which broadcasts to (E, P).
    needs_returns: whether `function` uses `Inputs.returns`. A simulated ensemble is then run once
        for the returns and replayed.
    min_trajectories: the smallest ensemble that it serves.
    pilot: trajectories of an independent run that fills `values` with the mean return-to-go. Where
        nothing can be run, one half of the trajectories fills them for the other.
    values: the mean return-to-go at each time (T+1,), if known.
    name: its name in `TABLE`; "own" for one that is not there.

    >>> def mean_of_later_states(inputs):  # independent of the kick: a function of x alone
    ...     return -(inputs.x[:, :1] ** 2) * (1.0 - inputs.t)
    >>> own = fl.baselines.Baseline(mean_of_later_states, needs_returns=False, min_trajectories=1)
    >>> fl.ppgt(simulator, objective, baseline=own)(key, theta, 200).count
    200
    """

    function: Callable[[Inputs], Array]
    needs_returns: bool = True
    min_trajectories: int = 2
    pilot: int = 0
    values: Array | None = None
    name: str = "own"


def none() -> Baseline:
    """No baseline, λ̄ = 0.

    For comparisons: as a rule the others have smaller errors.

    Returns: the record to pass as `baseline=`.

    >>> plain = fl.ppgt(simulator, objective, baseline=fl.baselines.none())
    >>> better = fl.ppgt(simulator, objective, baseline=fl.baselines.time_only())
    >>> bool(better(key, theta, 200).stderr["k"] < plain(key, theta, 200).stderr["k"])
    True
    """
    return Baseline(_none, needs_returns=False, min_trajectories=1, name="none")


def _none(inputs: Inputs) -> Array:
    return jnp.zeros((), inputs.score.dtype)


def time_only(values: Array | None = None, *, pilot: int = PILOT) -> Baseline:
    """Mean return-to-go at each time, λ̄ₙ = E[λ̂ₙ₊₁]. The default, by the name "time".

    A simulator runs an independent pilot for it. Trajectories that were recorded or measured come
    in two halves, each of which takes the mean return-to-go of the other.

    Args:
        values: (T+1,), the mean return-to-go at each time, if it is known already, such as
            that of an earlier iteration.
        pilot: trajectories of the pilot.

    Returns: the record to pass as `baseline=`.

    >>> default = fl.ppgt(simulator, objective)
    >>> longer_pilot = fl.ppgt(simulator, objective, baseline=fl.baselines.time_only(pilot=512))
    >>> table = fl.mean_return_to_go(objective, theta, recorded)  # no pilot is run
    >>> known = fl.ppgt(simulator, objective, baseline=fl.baselines.time_only(table))
    >>> known(jax.random.key(1), theta, 200).count
    200
    """
    if values is None:
        if isinstance(pilot, bool) or int(pilot) != pilot or pilot < 1:
            raise ValueError(
                f"`pilot` must be a whole number of trajectories, at least 1; got {pilot!r}."
            )
        return Baseline(
            _time_only, needs_returns=False, min_trajectories=1, pilot=int(pilot), name="time"
        )
    known = jnp.asarray(values)
    if known.ndim == 0:
        raise TypeError(
            "`values` of a time-only baseline is the mean return-to-go at each time, (T+1,); got "
            f"the number {values!r}. For a pilot of so many trajectories write "
            f"time_only(pilot={values!r})."
        )
    bad = np.flatnonzero(~np.isfinite(np.asarray(known)))
    if bad.size:
        raise ValueError(
            f"the values of a time-only baseline are not finite at {bad.size} of {known.size} "
            f"times, first at index {bad[0]}: the gradient would not be either."
        )
    return Baseline(_time_only, needs_returns=False, min_trajectories=1, values=known, name="time")


def _time_only(inputs: Inputs) -> Array:
    assert inputs.values is not None
    return inputs.values[inputs.index + 1]  # n+1: the reward at n precedes the kick


class Halves(NamedTuple):
    """Table of trajectories in two halves. Each takes the mean of the other as its baseline.

    means: mean return-to-go of the first and the second half, (T+1, 2).
    in_second: whether a trajectory is in the second half, (E,).
    """

    means: Array
    in_second: Array


def split_halves(count: int, group: Array | None = None) -> np.ndarray:
    """Choose the second half of trajectories, the same in every run. Shape (count,), bool.

    At random, so that halves are alike whatever the order of the trajectories: sorted by their
    outcome, or alternating. group: (count,), trajectories that depend on each other stay together.
    """
    groups, member = np.unique(np.arange(count) if group is None else group, return_inverse=True)
    if group is not None and len(groups) < 2:
        return split_halves(count)
    drawn = np.random.default_rng(0).permutation(len(groups))
    return (drawn >= (len(groups) + 1) // 2)[member]


def use_other_half(inputs: Inputs) -> Array:
    """λ̄ₙ of trajectories in two halves, each from the mean of the other half (`Halves`)."""
    assert isinstance(inputs.values, Halves)
    first, second = inputs.values.means[inputs.index + 1]
    return jnp.where(inputs.values.in_second, first, second)[:, None]


def carried() -> Baseline:
    """Mean return-to-go of the estimate before: free, and unbiased however far θ has moved since.

    The first estimate runs a pilot. It needs an estimator with state: those of the fused
    kernels.

    Returns: the record to pass as `baseline=`.

    >>> task = tcmt.transmission(tcmt.rectangular(2, 3), horizon=0.2, dt=1e-2)
    >>> estimator = task.estimator("cpu", baseline=fl.baselines.carried())
    >>> estimator(key, tcmt.initial_parameters(key, task.network), 64).count
    64
    """
    return Baseline(
        _time_only, needs_returns=False, min_trajectories=1, pilot=PILOT, name="carried"
    )


def mean() -> Baseline:
    """Mean return-to-go of the other trajectories at each time.

        λ̄ₙ⁽ʲ⁾ = mean of λ̂ₙ₊₁⁽ⁱ⁾ over i ≠ j

    For trajectories that share a start; a simulated ensemble is run twice, for the returns and
    again for the sums.

    Returns: the record to pass as `baseline=`.

    >>> estimator = fl.ppgt(simulator, objective, baseline=fl.baselines.mean())
    >>> estimate = fl.gradient(process, objective, theta, recorded, baseline="mean")  # the same
    """
    return Baseline(_mean, name="mean")


def _mean(inputs: Inputs) -> Array:
    return _average_others(inputs.returns, inputs.survival)[:, None]


def optimal() -> Baseline:
    """The baseline of least variance for each component and step (Eq. 20).

        λ̄⁽ʲ⁾ = Σ_{i≠j} λ̂⁽ⁱ⁾U_i² / Σ_{i≠j} U_i²

    Where every other score vanishes the weights are undefined, and the plain mean of the others is
    taken.

    Returns: the record to pass as `baseline=`.

    >>> estimate = fl.gradient(process, objective, theta, recorded, baseline=fl.baselines.optimal())
    >>> estimate.count
    200
    """
    return Baseline(_optimal, name="optimal")


def _optimal(inputs: Inputs) -> Array:
    return _weighted_average_others(inputs.returns, _weights(inputs.score), inputs.survival)


def binned(
    condition: Callable[..., PyTree] | None = None,
    *,
    bins: int = 20,
    every: int = 1,
    group: int | None = None,
) -> Baseline:
    """Baseline of least variance within quantile bins of the state before the kick (the paper's).

    Equal values share a bin, so the estimate does not depend on the order of the trajectories; bins
    may then be empty. A trajectory alone in its bin takes the baseline of the whole ensemble
    (itself left out).

    Args:
        condition: (theta, x (M,), t, context) -> a pytree that broadcasts to θ: for each parameter
            the quantity whose quantiles make its bins, e.g. {"omega": abs2(psi), "kappa":
            abs2(psi)[i] + abs2(psi)[j]}. A bare scalar conditions every parameter on the same
            quantity. A `Task` brings its own.
        bins: number of bins.
        every: steps between two sortings into bins; 1 is the paper's. Membership that is some steps
            old is as independent of the kick as a fresh one. Fused kernels only.
        group: split a larger ensemble into groups of at most so many trajectories, each with bins
            of its own; None for all together. Fused kernels only.

    Returns: the record to pass as `baseline=`.

    >>> by_distance = fl.baselines.binned(lambda theta, x: x[0] ** 2, bins=10)
    >>> fl.gradient(process, objective, theta, recorded, baseline=by_distance).count
    200
    """
    for name, value, least in (
        ("bins", bins, 1),
        ("every", every, 1),
        ("group", 2 if group is None else group, 2),
    ):
        if isinstance(value, bool) or int(value) != value or value < least:
            raise ValueError(f"`{name}` must be a whole number, at least {least}; got {value!r}.")
    return Baseline(
        Bins(None if condition is None else drop_extra_arguments(condition, 4), bins, every, group),
        name="binned",
    )


class Twin(NamedTuple):
    """A model of the process that explains most of the return; takes the place of a baseline.

    theta: θ -> θ̃, the parameters of the twin; θ itself if not given.
    process: the twin's own, with the same state components; the process of the score if not given.
        That of `Jumps` is a `Jumps` too.
    order: 1 for a linear guess V. 2 for a quadratic one, which also counts what noise adds to the
        return. It is exact for affine drifts with rewards and σσᵀ at most quadratic, and keeps M²
        numbers per trajectory.
    baseline: λ̄ₙ, subtracted from Λₙ₊₁: a name or a record, `time_only` with its values. Those that
        leave one out do so within a batch.
    batch: trajectories at a time; memory is batch·√T·M, not E·T·M. Those of `Jumps` with one start
        and no context go all together.

    Rewards are always taken at θ: they are defined, not modelled. The equations are in
    `fluctua.core.twin.correction`, for `Jumps` in `fluctua.processes.jump_twin`.

    >>> off = fl.Twin(theta=lambda theta: {**theta, "k": 1.2 * theta["k"]})  # a model 20 % off
    >>> with_twin = fl.ppgt(simulator, objective, baseline=off)(key, theta, 200)
    >>> without = fl.ppgt(simulator, objective)(key, theta, 200)
    >>> bool(with_twin.stderr["k"] < without.stderr["k"])  # and both are unbiased
    True
    """

    theta: Callable[[Params], Params] | None = None
    process: Process | None = None
    order: int = 1
    baseline: Baseline | str = mean()
    batch: int = BATCH


TABLE: dict[str, Callable[[], Baseline | Twin]] = {
    "none": none,
    "time": time_only,
    "mean": mean,
    "optimal": optimal,
    "binned": binned,
    "twin": Twin,
    "carried": carried,
}
"""Every baseline of the library by its one name."""

DEFAULT = "time"
"""Its variance is a few per cent above that of "optimal" at half the cost, and it works with
chunks, kernels and readout correction alike (benchmarks/baselines.py)."""

JAX = ("none", "time", "mean", "optimal", "binned", "twin", "own")
"""What estimators of the core serve. "own": a `Baseline` that has no name in `TABLE`."""


def resolve_baseline(
    choice: Baseline | Twin | str | None,
    *,
    caller: str,
    serves: Collection[str] = JAX,
    condition: Callable[..., PyTree] | None = None,
) -> Baseline | Twin:
    """The baseline of a name or record, the default for None; refused if `caller` cannot serve it.

    Args:
        choice: a name of `TABLE`, a record, or None.
        caller: name of the function, for messages.
        serves: names that it can serve.
        condition: for "binned" without one of its own.

    """
    if choice is Twin:
        raise TypeError(
            "`baseline` is the class `Twin`; a twin is an instance of it: baseline=Twin()."
        )
    record: Any = DEFAULT if choice is None else choice
    listed = ", ".join(name for name in serves if name != "own")
    if isinstance(record, str):
        if record not in TABLE:
            raise ValueError(
                f"there is no baseline {record!r}; {caller} supports "
                f"{listed}.{close_match(record, TABLE)}"
            )
        record = TABLE[record]()
    if not isinstance(record, Baseline | Twin):
        raise TypeError(
            f"`baseline` is a name ({listed}) or a record such as fluctua.baselines.optimal(); "
            f"got {type(record).__name__}."
        )
    name = "twin" if isinstance(record, Twin) else record.name
    if name not in serves:
        what = f"the baseline {name!r}" if name != "own" else "a baseline of one's own"
        raise ValueError(f"{caller} does not support {what}; it supports {listed}.")
    if (
        isinstance(record, Baseline)
        and isinstance(record.function, Bins)
        and record.function.condition is None
    ):
        if condition is None:
            raise ValueError(
                'the baseline "binned" needs the quantity whose quantiles make its bins: '
                "binned(lambda theta, x: x[0] ** 2)."
            )
        record = record._replace(
            function=replace(record.function, condition=drop_extra_arguments(condition, 4))
        )
    return record


def refuse_kernel_options(baseline: Baseline | Twin, caller: str) -> None:
    """Refuse the options of `binned` that only kernels serve."""
    if (
        isinstance(baseline, Baseline)
        and isinstance(baseline.function, Bins)
        and (baseline.function.every, baseline.function.group) != (1, None)
    ):
        raise ValueError(
            f"{caller} sorts all trajectories into bins at every step: `every` = "
            f"{baseline.function.every} and `group` = {baseline.function.group} are options of "
            "the fused kernels."
        )


@dataclass(frozen=True)
class Bins:
    """The function of the baseline `binned`.

    A record and not a closure, so that equal baselines share one compilation.
    """

    condition: Callable[..., PyTree] | None
    bins: int
    every: int = 1
    group: int | None = None

    def __call__(self, inputs: Inputs) -> Array:
        """λ̄ₙ, sorted into bins afresh. (E, P)"""
        assert self.condition is not None  # filled in by `resolve_baseline`
        weight = _weights(inputs.score)
        whole = _weighted_average_others(inputs.returns, weight, inputs.survival)
        if inputs.x is None:  # the draw of X₀ has no state before it
            return whole
        quantity = jax.vmap(self.condition, in_axes=(None, 0, None, 0))(
            inputs.theta, inputs.x, inputs.t, inputs.context
        )
        columns, of_parameter = condition_columns(quantity, inputs.theta)
        plain = jnp.ones_like(inputs.returns) if inputs.survival is None else inputs.survival
        return _binned_average_others(
            columns, of_parameter, inputs.returns, weight, whole, plain, self.bins
        )


def condition_columns(quantity: PyTree, theta: Params) -> tuple[Array, np.ndarray]:
    """Distinct conditioning quantities as columns (E, C), and the column of each parameter (P,)."""
    columns: list[Array] = []
    of_parameter: list[np.ndarray] = []
    width = 0

    def add(q: Array, subtree: Params) -> None:
        nonlocal width
        q = jnp.asarray(q)
        index = np.arange(int(np.prod(q.shape[1:]))).reshape(q.shape[1:]) + width
        for leaf in jax.tree.leaves(subtree):
            try:
                of_parameter.append(np.broadcast_to(index, np.shape(leaf)).ravel())
            except ValueError:
                raise ValueError(
                    "the binning condition must broadcast to the parameters it is for: it has "
                    f"shape {q.shape[1:]} for a parameter array of shape {np.shape(leaf)}."
                ) from None
        columns.append(q.reshape(q.shape[0], -1))
        width += index.size

    jax.tree.map(add, quantity, theta)
    return jnp.concatenate(columns, axis=1), np.concatenate(of_parameter)


def quantile_bins(sorted_values: Array, bins: int) -> Array:
    """Bin of each of E sorted values, from edges at the ranks ⌊kE/K⌋; equal values share a bin.

    (E,) int.
    """
    count = sorted_values.shape[0]
    edges = sorted_values[(np.arange(1, bins) * count) // bins]
    return jnp.searchsorted(edges, sorted_values, side="right")


def is_library(function: Callable[[Inputs], Array]) -> bool:
    """Whether a baseline function is one of this module.

    Those are independent of the kick, which the tests show.
    """
    return isinstance(function, Bins) or function in (
        _none,
        _time_only,
        use_other_half,
        _mean,
        _optimal,
    )


def check_baseline(baseline: Baseline, trajectories: int, t: Array) -> None:
    """Enough trajectories to leave one out; a table that fits the grid."""
    if trajectories < baseline.min_trajectories:
        raise ValueError(
            f"a leave-one-out baseline needs at least {baseline.min_trajectories} trajectories; "
            f"got {trajectories}. Take more, or use baseline=none() or time_only(values)."
        )
    if baseline.values is not None and baseline.values.shape != (len(t),):
        raise ValueError(
            "the values of a time-only baseline must be the mean return-to-go at each of the "
            f"{len(t)} times, shape ({len(t)},); got {baseline.values.shape}."
        )


def _weights(score: Array) -> Array:
    """U², scaled so that the square neither overflows nor underflows.

    The scale cancels in the ratio.
    """
    scale = jnp.max(jnp.abs(score), axis=0)
    return (score / jnp.where(scale > 0, scale, 1)) ** 2


def _sum_others(v: Array) -> Array:
    """Σ_{i≠j} v_i along the first axis, as what precedes plus what follows.

    Not Σ − v_j: where one weight dominates, that difference is rounding error, and it depends on j.
    """
    zero = jnp.zeros_like(v[:1])
    before = jnp.concatenate([zero, jnp.cumsum(v, axis=0)[:-1]])
    after = jnp.concatenate([jnp.flip(jnp.cumsum(jnp.flip(v, 0), axis=0), 0)[1:], zero])
    return before + after


def _average_others(returns: Array, survival: Array | None = None) -> Array:
    if survival is None:
        return _sum_others(returns) / (returns.shape[0] - 1)
    total = _sum_others(survival)
    return jnp.where(total > 0, _sum_others(survival * returns) / jnp.where(total > 0, total, 1), 0)


def _weighted_average_others(returns: Array, weight: Array, survival: Array | None = None) -> Array:
    total = _sum_others(weight)
    weighted = _sum_others(returns[:, None] * weight)
    plain = _average_others(returns, survival)[:, None]
    return jnp.where(total > 0, weighted / jnp.where(total > 0, total, 1), plain)


def _binned_average_others(
    columns: Array,
    of_parameter: np.ndarray,
    returns: Array,
    weight: Array,
    whole: Array,
    plain_weight: Array,
    bins: int,
) -> Array:
    """λ̄ within bins; `whole` for a trajectory alone in its bin. plain_weight: of the mean where
    every weight is zero. (E,)
    """
    order = jnp.argsort(columns, axis=0)  # (E, C)
    bin_of = jax.vmap(lambda v: quantile_bins(v, bins), in_axes=1, out_axes=1)(
        jnp.take_along_axis(columns, order, axis=0)
    )
    edge = jnp.ones_like(bin_of[:1], dtype=bool)
    change = bin_of[1:] != bin_of[:-1]
    first = jnp.concatenate([edge, change])  # first member of its bin
    last = jnp.concatenate([change, edge])

    # Counts and plain sums are the same for all parameters that share a column. All sums in one
    # scan: it is unrolled into log E levels, and compiling those is what takes long.
    order_p = order[:, of_parameter]
    first_p = first[:, of_parameter]
    last_p = last[:, of_parameter]
    returns_sorted = returns[order]
    sorted_weight = jnp.take_along_axis(weight, order_p, axis=0)
    plain_sorted = plain_weight[order]
    summands = [
        plain_sorted,
        plain_sorted * returns_sorted,
        sorted_weight,
        sorted_weight * returns_sorted[:, of_parameter],
    ]
    sums = _sum_others_in_segments(
        jnp.concatenate(summands, axis=1),
        jnp.concatenate([first, first, first_p, first_p], axis=1),
        jnp.concatenate([last, last, last_p, last_p], axis=1),
    )
    quantities = order.shape[1]
    parameters = len(of_parameter)
    members, plain, total, weighted = jnp.split(
        sums, np.cumsum([quantities, quantities, parameters]), axis=1
    )
    plain = jnp.where(members > 0, plain / jnp.where(members > 0, members, 1), 0)
    within = jnp.where(total > 0, weighted / jnp.where(total > 0, total, 1), plain[:, of_parameter])

    back = jnp.argsort(order_p, axis=0)
    alone = jnp.take_along_axis(members[:, of_parameter], back, axis=0) == 0
    return jnp.where(alone, whole, jnp.take_along_axis(within, back, axis=0))


class _RunSum(NamedTuple):
    """A sum along runs of rows. begins: whether a run begins within the rows added so far."""

    begins: Array
    total: Array


def _add_runs(a: _RunSum, b: _RunSum) -> _RunSum:
    """The sum over rows a and then b, from the beginning of the last run on."""
    return _RunSum(a.begins | b.begins, jnp.where(b.begins, b.total, a.total + b.total))


def _sum_others_in_segments(v: Array, first: Array, last: Array) -> Array:
    """`_sum_others` within runs along the first axis. first, last: marks of their ends."""
    # forwards and backwards side by side
    starts = jnp.concatenate([first, jnp.flip(last, 0)], axis=1)
    both = jnp.concatenate([v, jnp.flip(v, 0)], axis=1)
    _, running = jax.lax.associative_scan(_add_runs, _RunSum(starts, both))
    shifted = jnp.concatenate([jnp.zeros_like(both[:1]), running[:-1]])
    preceding, following = jnp.split(jnp.where(starts, 0, shifted), 2, axis=1)
    return preceding + jnp.flip(following, 0)


# --------------------------------------------------------------------------- baselines of one's own
#
# (λ̂ⱼ − λ̄ⱼ)Uⱼ has the right mean for every λ̄ⱼ that depends neither on the return λ̂ⱼ nor on the
# score Uⱼ of its own trajectory. A baseline is therefore called on a small made-up ensemble, the
# return or the score of one trajectory is changed, and λ̄ of that trajectory must stay what it was.
# Those of the library have tests of their own, and are not tried. Not seen is what a baseline holds
# besides its `Inputs`: a table made of the trajectories that it is used on passes.

ENSEMBLE = 64
"""Trajectories of the made-up ensemble; a mean that does not leave one out moves by 1/64 of the
change.
"""

CHANGES = (1.0, -1e3, 1e3)
"""What is added to the return or the score of one trajectory, in units of max(1, |λ̄|)."""

START = -1
"""Index of the draw of X₀."""


class Setting(NamedTuple):
    """Trial inputs of a baseline.

    theta: θ, a pytree of floats.
    t: the time grid (T+1,).
    count: trajectories of the call.
    start: () -> states at the start (E, M), some at least, and their contexts. Called for a
        baseline that is tried for the first time.
    """

    theta: Params
    t: Array
    count: int  # type: ignore[assignment]
    start: Callable[[], tuple[Array, PyTree]]


class _Change(NamedTuple):
    """Change of the return and of every score of one trajectory.

    index: the step n. trajectory: its number j.
    """

    index: Array
    trajectory: Array
    of_return: Array
    of_score: Array


_ADMITTED: dict[Any, None] = {}
"""Baselines that were tried and found independent, the latest."""

MAX_ADMITTED = 256


def check_admissible(baseline: Baseline, setting: Setting, *, of_start: bool = False) -> None:
    """Refuse a baseline that depends on the return or the score of its own trajectory.

    It is tried once, not at every call. of_start: whether it is the baseline of the draw of X₀.
    """
    # too few are refused by `check_baseline`
    if is_library(baseline.function) or setting.count < baseline.min_trajectories:
        return
    code = (baseline.function, of_start, tree_signature(setting.theta))
    if code in _ADMITTED:
        return
    size = min(setting.count, max(ENSEMBLE, baseline.min_trajectories))
    try:
        leak = _find_leak(baseline, setting, size, of_start)
    except Exception:  # one that holds a row per trajectory serves no other number of them
        if size == setting.count:
            raise
        leak = _find_leak(baseline, setting, setting.count, of_start)
    if leak is not None:
        raise ValueError(leak)
    _ADMITTED[code] = None
    if len(_ADMITTED) > MAX_ADMITTED:
        _ADMITTED.pop(next(iter(_ADMITTED)))


def _find_leak(baseline: Baseline, setting: Setting, size: int, of_start: bool) -> str | None:
    """The message for a baseline that depends on its own return or score; None without a leak."""
    last = len(setting.t) - 2
    steps = [START] if of_start else sorted({0, last // 2, last})
    inputs = _make_test_inputs(baseline, setting, size, of_start)
    trajectories = sorted({0, size // 2, size - 1})
    places = [(n, j) for n in steps for j in trajectories]

    def evaluate(rows):
        return np.asarray(
            _evaluate(baseline.function, inputs, setting.t, _stack_changes(rows)), np.float64
        )

    before = evaluate([(n, j, 0.0, 0.0) for n, j in places])
    unit = max(1.0, float(np.nanmax(np.abs(before), initial=0.0)))
    # undecided where more than half of the digits are lost
    limit = np.sqrt(np.finfo(inputs.returns.dtype).eps)
    for what, row in (("return", (1.0, 0.0)), ("score", (0.0, 1.0))):
        for change in CHANGES:
            added = unit * change
            after = evaluate([(n, j, added * row[0], added * row[1]) for n, j in places])
            moved = np.abs(after - before).max(axis=1) / abs(added)
            worst = int(np.argmax(np.nan_to_num(moved)))
            if moved[worst] > limit:
                n, j = places[worst]
                return _describe(baseline.function, what, moved[worst], n, j, size)
    return None


def _describe(
    function: Callable[[Inputs], Array], what: str, moved: float, n: int, j: int, size: int
) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    where = "the draw of X₀" if n == START else f"step {n}"
    return (
        f"the baseline `{name}` depends on the {what} of its own trajectory: among {size} made-up "
        f"trajectories the entry of trajectory {j} moved by {moved:.3g} per unit of it, at "
        f"{where}. The gradient would be biased. Leave the trajectory itself out, as mean() and "
        "optimal() do, or look at `inputs.x`, `inputs.t` and `inputs.context` only."
    )


def _make_test_inputs(baseline: Baseline, setting: Setting, size: int, of_start: bool) -> Inputs:
    """An ensemble about the first states, with returns, scores and a table of order one."""
    rng = np.random.default_rng(0)
    theta = setting.theta
    x, context = setting.start()
    width = ravel_pytree(theta)[0].size
    dtype = jnp.result_type(x, *jax.tree.leaves(theta))
    rows = np.arange(size) % len(x)
    first = np.asarray(x)[rows]
    spread = np.maximum(np.abs(first).max(axis=0), 1.0)
    states = jnp.asarray(first + 0.1 * spread * rng.normal(size=first.shape), dtype)
    table = baseline.values
    if table is None and baseline.pilot:
        table = jnp.asarray(rng.normal(size=len(setting.t)), dtype)
    return Inputs(
        index=jnp.array(START),
        theta=theta,
        x=None if of_start else states,
        t=jnp.asarray(setting.t)[0],
        context=jax.tree.map(lambda leaf: leaf[rows], context),
        returns=jnp.asarray(rng.normal(size=size), dtype),
        score=jnp.asarray(rng.normal(size=(size, width)), dtype),
        values=table,
    )


def _stack_changes(rows: list[tuple[int, int, float, float]]) -> _Change:
    index, trajectory, of_return, of_score = zip(*rows, strict=True)
    return _Change(np.array(index), np.array(trajectory), np.array(of_return), np.array(of_score))


@partial(jit, static_argnums=0)
def _evaluate(
    function: Callable[[Inputs], Array], inputs: Inputs, t: Array, changes: _Change
) -> Array:
    """λ̄ of the changed trajectory, one row per change. (C, P)

    Compiled once for all changes: what a baseline draws while it is traced is the same in all of
    them.
    """
    size = inputs.score.shape

    def one(change: _Change) -> Array:
        n, j, of_return, of_score = change
        returns = inputs.returns.at[j].add(of_return.astype(inputs.returns.dtype))
        score = inputs.score.at[j].add(of_score.astype(inputs.score.dtype))
        bar = jnp.asarray(
            function(inputs._replace(index=n, t=t[jnp.maximum(n, 0)], returns=returns, score=score))
        )
        try:
            return jnp.broadcast_to(bar, size)[j]
        except ValueError:
            raise ValueError(
                f"a baseline must broadcast to (trajectories, parameters), {size}; it has shape "
                f"{bar.shape}. One number per trajectory is written values[:, None]."
            ) from None

    return jax.lax.map(one, changes)
