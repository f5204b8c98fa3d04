"""Estimates from one gradient per trajectory: mean, standard error, interval.

**Functions of averages**, J = F(m₁, …, m_K) with m_i = E[R_i]: contrast, fidelity, signal to noise.

By the chain rule ∇J = Σ_i ∂_iF(m) ∇m_i. One set of n trajectories gives the returns R_i and the
gradients G_i of all parts, and F'(m̂) Ḡ of them is biased in two ways, each of order 1/n: m̂ is
correlated with Ḡ, and F' is curved. The weights of trajectory j are therefore of the others (−j),
and the curvature is subtracted,

    F_c(m, C, n) = F(m) − tr[F''(m) C] / 2n,
    w⁽ʲ⁾ = ∂_m F_c(m̂⁽⁻ʲ⁾, Ĉ⁽⁻ʲ⁾, n − 1),
    Ĝ = (1/n) Σ_j w⁽ʲ⁾·G⁽ʲ⁾,

with Ĉ the covariance of the returns: what is left is of order 1/n². The value is F_c(m̂, Ĉ, n). To
first order one trajectory moves Ĝ by 1/n of Σ_i ∂_iF (G_i − Ḡ_i) + Σ_ik ∂_i∂_kF Ḡ_i (R_k − m̂_k),
and its sample differs from the mean by so much. Means of samples are the estimates, and their
errors are those of the delta method, every covariance included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jax.flatten_util import ravel_pytree

from fluctua.core import check
from fluctua.core.arrays import Array, Params, jit, put, put_on_host
from fluctua.core.display.estimates import describe_estimate, render_estimate
from fluctua.core.host.threads import map_on_cores
from fluctua.core.objective import FunctionOfMeans, Objective
from fluctua.core.simulate import planned_calls
from fluctua.core.text import MIN_FOR_COVERAGE
from fluctua.core.trajectories import Trajectories

MINIMUM = 8
"""Trajectories that are needed to estimate skewness and tails."""

TAILS = 6.0
"""Excess kurtosis that is assumed where few samples cannot show theirs: of a product of two normal
numbers.
"""

MAX_HOST_WORK = 2**20
SMALL_CALL = 2**13
"""Numbers that NumPy reduces, over all calls of a training, and the least that a call counts for:
what JAX compiles takes 0.3 s, NumPy 0.4 ms more per call."""

PARAMETERS_AT_ONCE = 4096
"""Parameters whose batches are compared together: what is worked on stays in the cache."""

MIN_DEGREES = 2 / 3
"""Degrees of freedom of Student's t, at the least: two samples of the problems of
`benchmarks/intervals.py`, and two squares of normal numbers, are then covered to 94 % and more. It
is measured and not derived."""


class Variances(NamedTuple):
    """Variances of groups of trajectories.

    between: of the means of groups, τ², without what trajectories add to it.
    within: of one trajectory, σ².
    """

    between: float
    within: float

    def optimal_size(self, group: float = 1.0, trajectory: float = 1.0) -> float:
        """Trajectories per group of least variance at a given cost, n = √(c_g σ² / c_t τ²).

        The variance is (τ² + σ²/n)/K at a cost of K(c_g + c_t n).

        Args:
            group: c_g, the cost of going to another group.
            trajectory: c_t, the cost of one more trajectory, in the same unit.
        """
        if not (group > 0 and trajectory > 0):
            raise ValueError(
                f"costs must be positive; got {group!r} for a group, {trajectory!r} "
                "for a trajectory."
            )
        return (
            float(np.sqrt(group * self.within / (trajectory * self.between)))
            if self.between > 0
            else float("inf")
        )


class Groups(NamedTuple):
    """Results of K groups of trajectories, such as the devices of an array.

    group: their numbers (K,).
    counts: trajectories of each (K,).
    values: the expected return of each (K,).
    value_errors: standard errors of `values` (K,).
    returns: variances of the return.
    gradient: variances of the gradient, summed over its components.
    value_stderr: error of the value, if these groups were all there are.
    stderr: error of the gradient, if these groups were all there are; a pytree like θ.
    """

    group: np.ndarray
    counts: np.ndarray
    values: np.ndarray
    value_errors: np.ndarray
    returns: Variances
    gradient: Variances
    value_stderr: Array
    stderr: Params


class Estimate(NamedTuple):
    """Gradient of J, the expected return, and their errors.

    `gradient`, `stderr` and `second_moment` are pytrees like θ.

    gradient: mean over trajectories.
    stderr: its standard error.
    second_moment: mean square over *single* trajectories; the paper's step size needs it.
    value: the expected return.
    value_stderr: its standard error.
    count: trajectories averaged.
    interval: (low, high), each like θ, that hold the gradient with 95 %. None where only means and
        errors are known, as from the fused kernels; ±1.96 stderr is then right for many
        trajectories and too narrow for few. Below 50 trajectories intervals are widened, with
        a note in print: so few samples show little of their skewness and tails.
    value_interval: the same of the value.
    natural: F⁻¹ times the gradient, of estimators made by `natural`; else None.
    groups: of trajectories of several devices; errors are then those of the mean over all devices
        of which these are a sample.
    stopped: part of the trajectories that the `stop` of the objective ended before the horizon;
        None without a stop.
    batches: number of batches of trajectories whose means give the errors of the gradient; None
        where single trajectories do.

    >>> estimate = estimator(key, theta, 2000)
    >>> estimate.gradient["k"].shape, estimate.stderr["k"].shape
    ((), ())
    >>> low, high = estimate.interval
    >>> bool(low["k"] < estimate.gradient["k"] < high["k"])
    True
    """

    gradient: Params
    stderr: Params
    second_moment: Params
    value: Array
    value_stderr: Array
    count: int  # type: ignore[assignment]
    interval: tuple[Params, Params] | None = None
    value_interval: tuple[Array, Array] | None = None
    natural: Params | None = None
    groups: Groups | None = None
    stopped: float | None = None
    batches: int | None = None

    def __repr__(self) -> str:
        return describe_estimate(self)

    def _repr_html_(self) -> str:
        return render_estimate(self)


class Samples(NamedTuple):
    """One gradient and one return per trajectory.

    gradient: like θ, leaves (E, ...).
    returns: (E,).
    group: (E,), see `Trajectories`.
    survival: probability of having reached the horizon (E,); None without a `stop`.

    >>> samples = fl.Samples({"k": np.array([1.0, 2.0, 3.0])}, returns=np.array([0.1, 0.2, 0.3]))
    >>> fl.reduce_samples(samples).gradient["k"]
    Array(2., dtype=float32)
    """

    gradient: Params
    returns: Array
    group: Array | None = None
    survival: Array | None = None


class Moments(NamedTuple):
    """Mean, unbiased standard deviation, skewness and excess kurtosis of every component."""

    mean: Array
    deviation: Array
    skewness: Array
    kurtosis: Array


def sample_error(samples: Any, factor: float = 1.0) -> Any:
    """Standard error of the mean of samples along the first axis, (E, …) -> (…).

    factor: widens it, such as Student's t for few samples. One sample has no spread: NaN.
    """
    return factor * samples.std(axis=0, ddof=1) / np.sqrt(len(samples))


def pooled_error(squares: np.ndarray, count: int) -> np.ndarray:
    """Standard error of the mean of `count` samples, from their squared deviations, summed."""
    return np.sqrt(squares / (count * (count - 1)))


def standard_error(mean: Any, mean_square: Any, count: int) -> Any:
    """Standard error of the mean of `count` samples, from their mean and mean square.

    NaN where one sample has no spread.
    """
    if count < 2:
        return np.full_like(mean, np.nan)
    return np.sqrt(np.maximum(mean_square - mean**2, 0) / (count - 1))


def interval(moments: Moments, count: int, tails: float = TAILS) -> tuple[Array, Array]:
    """(low, high) that hold the mean with 95 %, of samples that are skewed and have heavy tails.

    Hall's transformation of Student's t (1992), g(T) = T + (γ/√n)(T²/3 + 1/6) + (γ²/27n)T³, is
    normal to second order. Heavy tails make the standard deviation uncertain, as few samples do:
    Student's quantile is that of ν = 2/(2/(n − 1) + c) degrees of freedom, and the variance is
    taken 1 + c times, with c = 2κ/n: twice the kurtosis of the sample, which shows too little of
    the tails. Below n = `MIN_FOR_COVERAGE` it shows next to nothing of them, and
    ν is less by a kurtosis of `TAILS`, c + 6(1/n − 1/50). `python benchmarks/intervals.py` measures
    the coverage. tails: that kurtosis, of samples that are means themselves.
    """
    mean, deviation, skewness, kurtosis = moments
    xp = jnp if isinstance(mean, jax.Array) else np
    if count < 2:  # one sample has no spread
        return xp.full_like(mean, np.nan), xp.full_like(mean, np.nan)
    if count < MINIMUM:  # nothing is known of the tails
        skewness = kurtosis = xp.zeros_like(mean)
    tail = 2 * xp.maximum(kurtosis, 0) / count
    unseen = tails * max(1 / count - 1 / MIN_FOR_COVERAGE, 0)
    least = MIN_DEGREES if count < MIN_FOR_COVERAGE else 2.0
    q = _student(xp.maximum(2 / (2 / (count - 1) + tail + unseen), least))
    error = deviation * xp.sqrt(1 + tail) / np.sqrt(count)
    a = skewness / (3 * np.sqrt(count))
    small = xp.abs(a) < 1e-4

    def back(v):
        return xp.where(
            small, v - a / 2, (xp.cbrt(1 + 3 * a * (v - a / 2)) - 1) / xp.where(small, 1, a)
        )

    return mean - error * back(q), mean - error * back(-q)


def _student(nu: Array | float) -> Array:
    """The quantile of 97.5 % of Student's t with ν ≥ 2/3 degrees of freedom, to 1e-4.

    ln(t/1.96) has a series in 1/ν without a constant; these are its first six terms, fitted. A
    table would have to be searched, which takes longer to compile than the rest of an interval.
    """
    total: Array | float = 0.0
    for term in (-0.03060321, 0.18688266, -0.40461362, 0.2063486, 0.70060854, 1.21057804):
        total = (total + term) / nu
    return 1.959964 * (jnp if isinstance(nu, jax.Array) else np).exp(total)


def label_groups(samples: Samples, trajectories: Any) -> Samples:
    """The samples with the groups of their trajectories, which are one record or a list of them."""
    return samples._replace(group=find_groups(trajectories, len(samples.returns)))


def find_groups(trajectories: Any, count: int) -> np.ndarray | None:
    """The group of each of `count` trajectories; None where they have none."""
    chunks = [trajectories] if isinstance(trajectories, Trajectories) else trajectories
    if not isinstance(chunks, list | tuple):  # read from files, which have no groups
        return None
    groups = [chunk.group for chunk in chunks]
    if all(group is None for group in groups):
        return None
    if any(group is None for group in groups):
        raise ValueError(
            "some chunks have a `group` for their trajectories, and some do not. Give all, or none."
        )
    group = np.concatenate([np.ravel(np.asarray(group)) for group in groups])
    if len(group) != count or not np.issubdtype(group.dtype, np.integer):
        raise ValueError(
            f"`group` must have one whole number per trajectory, ({count},); got "
            f"{group.dtype} {group.shape}."
        )
    return group


def reduce_samples(samples: Samples) -> Estimate:
    """Reduce the gradients of single trajectories to an `Estimate`.

    For an estimator of your own: mean, standard error, second moment and interval over
    trajectories, or over their groups.

    Args:
        samples: one gradient and one return per trajectory.

    Returns: the `Estimate`.

    >>> samples = fl.Samples({"k": np.array([1.0, 2.0, 3.0])}, returns=np.array([0.1, 0.2, 0.3]))
    >>> estimate = fl.reduce_samples(samples)
    >>> round(float(estimate.stderr["k"]), 3)  # 1/√3
    0.577
    """
    if samples.survival is not None:
        stopped = 1 - float(np.asarray(samples.survival, np.float64).mean())
        return reduce_samples(samples._replace(survival=None))._replace(stopped=stopped)
    if samples.group is not None:
        return _reduce_groups(samples, np.asarray(samples.group))
    leaves, tree = jax.tree.flatten(samples.gradient)
    *each, value = _reduce([*leaves, samples.returns])
    mean, stderr, second_moment, low, high = (
        jax.tree.unflatten(tree, part) for part in zip(*each, strict=True)
    )
    return Estimate(
        mean,
        stderr,
        second_moment,
        value.mean,
        value.stderr,
        samples.returns.shape[0],
        (low, high),
        (value.low, value.high),
    )


def _reduce_groups(samples: Samples, group: np.ndarray) -> Estimate:
    """Means of K group means, with errors between groups: Var(Ḡ) = (τ² + σ²/n)/K.

    This holds whatever is alike within a group. Two-stage sampling: the groups are a sample of a
    population, and the trajectories of a group a sample of it. With one group nothing is known of
    the population, and errors are NaN.
    """
    labels, index, counts = np.unique(group, return_inverse=True, return_counts=True)
    flat, unravel = ravel_pytree(jax.tree.map(lambda leaf: leaf[0], samples.gradient))
    leaves = [*jax.tree.leaves(samples.gradient), samples.returns]
    rows = np.concatenate(
        [np.asarray(v, np.float64).reshape(len(samples.returns), -1) for v in leaves], axis=1
    )
    if index.shape != rows.shape[:1]:
        raise ValueError(
            f"`group` must have one number per trajectory, ({len(rows)},); got {np.shape(group)}."
        )

    def total(v):
        return np.stack([v[index == k].sum(axis=0) for k in range(len(labels))])

    means = total(rows) / counts[:, None]
    squares = total((rows - means[index]) ** 2)  # about the mean of each group
    degrees = np.where(counts > 1, counts - 1, np.nan)[:, None]
    # variance of each group's mean, from its own trajectories
    mean_variance = squares / degrees / counts[:, None]
    k = len(labels)
    spare = max(len(rows) - len(labels), 1)
    within = squares.sum(axis=0) / spare
    mean = means.mean(axis=0)
    error = np.full(rows.shape[1], np.nan)
    between = np.full(rows.shape[1], np.nan)
    if k > 1:
        error = sample_error(means)
        # a mean of means: groups count the same
        between = means.var(axis=0, ddof=1) - within * np.mean(1 / counts)
    reach = scipy.stats.t.ppf(0.975, k - 1) * error if k > 1 else error

    def tree(v):
        return unravel(jnp.asarray(v[:-1], flat.dtype))

    def number(v):
        return jnp.asarray(v[-1])

    error_here = (
        np.sqrt(
            np.nansum(
                np.where(np.isnan(mean_variance), within / counts[:, None], mean_variance), axis=0
            )
        )
        / k
    )

    def add_components(v):
        return float(np.maximum(v[:-1].sum(), 0))

    groups = Groups(
        labels,
        counts,
        means[:, -1],
        np.sqrt(mean_variance[:, -1]),
        Variances(float(np.maximum(between[-1], 0)), float(within[-1])),
        Variances(add_components(between), add_components(within)),
        number(error_here),
        tree(error_here),
    )
    second = (total(rows**2) / counts[:, None]).mean(axis=0)
    return Estimate(
        tree(mean),
        tree(error),
        tree(second),
        number(mean),
        number(error),
        len(rows),
        (tree(mean - reach), tree(mean + reach)),
        (number(mean - reach), number(mean + reach)),
        None,
        groups,
    )


def reduce_batches(
    theta: Params, moments: np.ndarray, batches: int, size: int, returns: Array
) -> Estimate:
    """Mean, standard error and interval from moments over batches of trajectories.

    Intervals are those of B samples with the skewness and tails of the batches.

    Args:
        theta: θ, a pytree of floats.
        moments: of `compare_batches` (4, P).
        batches: their number B.
        size: trajectories per batch; the last has the rest.
        returns: R (E,).

    """
    count = returns.shape[0]
    mean, variance, skewness, kurtosis = moments
    error = np.sqrt(variance / count)
    batch_moments = Moments(mean, error * np.sqrt(batches), skewness, kurtosis)
    low, high = interval(batch_moments, batches, TAILS / size)
    leaves, structure = jax.tree.flatten(theta)
    edges = np.cumsum([np.size(leaf) for leaf in leaves])[:-1]

    def tree(flat: np.ndarray) -> Params:
        parts = zip(np.split(flat, edges), leaves, strict=True)
        shaped = [v.astype(leaf.dtype).reshape(np.shape(leaf)) for v, leaf in parts]
        return jax.tree.unflatten(structure, shaped)

    rows = (mean, error, mean**2 + variance, low, high)
    gradient = put_on_host(_Reduced(*map(tree, rows)))
    (value,) = _reduce_on_host([np.asarray(returns)])
    return Estimate(
        gradient.mean,
        gradient.stderr,
        gradient.second_moment,
        value.mean,
        value.stderr,
        count,
        (gradient.low, gradient.high),
        (value.low, value.high),
        batches=batches,
    )


def compare_batches(sums: np.ndarray, size: int, count: int) -> np.ndarray:
    """Mean and variance of one trajectory, skewness and excess kurtosis of batches (4, P).

    The variance is Σ_b n_b (ḡ_b − ḡ)²/(B − 1), unbiased also where the last batch is smaller.

    Args:
        sums: gradients of each batch, added up (B, P).
        size: trajectories per batch; the last has the rest.
        count: trajectories E.

    """
    batches = len(sums)
    sizes = np.full((batches, 1), float(size))
    sizes[-1] = count - size * (batches - 1)
    table = np.empty((4, sums.shape[1]))

    def compare(first: int) -> None:
        some = slice(first, first + PARAMETERS_AT_ONCE)
        table[:, some] = _compare_some(sums[:, some], sizes, count)

    map_on_cores(compare, range(0, sums.shape[1], PARAMETERS_AT_ONCE))
    return table


def _compare_some(sums: np.ndarray, sizes: np.ndarray, count: int) -> np.ndarray:
    """`compare_batches` of some parameters. sizes: trajectories of each batch (B, 1)."""
    batches = len(sums)
    mean = sums.sum(axis=0) / count
    off = (sums / sizes - mean) * np.sqrt(sizes)  # of one variance, whatever the size
    total = (off * off).sum(axis=0)
    z = off / np.where(total > 0, np.sqrt(total / batches), 1)
    squares = z * z
    skewness = np.einsum("bp,bp->p", squares, z) / batches  # NumPy's z**3 takes 60 times as long
    kurtosis = np.einsum("bp,bp->p", squares, squares) / batches - 3
    return np.stack([mean, total / (batches - 1), skewness, np.where(total > 0, kurtosis, 0)])


def estimate_from_moments(theta: Params, moments: np.ndarray, skip: int, count: int) -> Estimate:
    """The estimate from moments over trajectories: mean, standard error and interval.

    Args:
        theta: θ, a pytree of floats.
        moments: mean, unbiased deviation, skewness, excess kurtosis and mean square (5, 1 + skip +
            P): of the return, of `skip` numbers that are not looked at, and of the gradient.
        skip: as above.
        count: trajectories.

    """
    value, gradient = _finish_moments(theta, moments, skip, count)
    return Estimate(
        gradient.mean,
        gradient.stderr,
        gradient.second_moment,
        value.mean,
        value.stderr,
        count,
        (gradient.low, gradient.high),
        (value.low, value.high),
    )


def _finish_moments(
    theta: Params, moments: np.ndarray, skip: int, count: int
) -> tuple[_Reduced, _Reduced]:
    """Return and gradient, each with its error and interval; by NumPy, which compiles nothing."""
    with np.errstate(all="ignore"):  # one sample has no spread
        low, high = interval(Moments(*moments[:4]), count)
    rows = np.stack([moments[0], moments[1] / np.sqrt(count), moments[4], low, high])
    rows = rows.astype(moments.dtype, copy=False)
    leaves, structure = jax.tree.flatten(theta)
    edges = np.cumsum([1 + skip, *(leaf.size for leaf in leaves)])
    parts = [
        rows[:, first:last].astype(leaf.dtype).reshape(-1, *leaf.shape)
        for first, last, leaf in zip(edges[:-1], edges[1:], leaves, strict=True)
    ]
    trees = [jax.tree.unflatten(structure, [part[k] for part in parts]) for k in range(len(rows))]
    return put_on_host((_Reduced(*rows[:, 0]), _Reduced(*trees)))


def unflatten(theta: Params, flat: Array) -> Params:
    """Rows (E, P) as leaves (E, ...) with the structure and precision of θ.

    On the CPU nothing is compiled for it.
    """
    if jax.default_backend() != "cpu":
        return _unflatten_rows(theta, flat)
    rows = np.asarray(flat)
    leaves, tree = jax.tree.flatten(theta)
    edges = np.cumsum([np.size(leaf) for leaf in leaves])[:-1]
    shaped = zip(np.split(rows, edges, axis=1), leaves, strict=True)
    return jax.tree.unflatten(
        tree, [put(v.astype(leaf.dtype).reshape(len(rows), *np.shape(leaf))) for v, leaf in shaped]
    )


@jit
def _unflatten_rows(theta: Params, flat: Array) -> Params:
    like, unravel = ravel_pytree(theta)
    return jax.vmap(unravel)(flat.astype(like.dtype))


class _Reduced(NamedTuple):
    mean: Array
    stderr: Array
    second_moment: Array
    low: Array
    high: Array


def _reduce(leaves: Sequence[Array]) -> list[_Reduced]:
    """Mean, error, second moment and interval of each leaf (E, ...).

    On the CPU, few numbers are left to NumPy: JAX compiles longer than the estimate takes. The rule
    depends on sizes and planned calls alone, as a training must give the same bits again.
    """
    if jax.default_backend() != "cpu":  # it is the number of launches that takes time
        return _reduce_all(list(leaves))
    size = sum(leaf.size for leaf in leaves)
    few = planned_calls() * max(size, SMALL_CALL) <= MAX_HOST_WORK
    if few and not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return _reduce_on_host([np.asarray(leaf) for leaf in leaves])
    return [_reduce_leaf(leaf) for leaf in leaves]


def _reduce_on_host(leaves: Sequence[np.ndarray]) -> list[_Reduced]:
    count = len(leaves[0])
    rows = [leaf.reshape(count, leaf[0].size).T for leaf in leaves]
    # one row per component: NumPy adds up by pairs along the last axis alone
    columns = np.ascontiguousarray(np.concatenate(rows, dtype=np.float64))
    with np.errstate(all="ignore"):  # one sample has no spread, and gradients may overflow
        mean = columns.mean(axis=1)
        second_moment = np.einsum("pe,pe->p", columns, columns) / count
        columns -= mean[:, None]
        mean += columns.mean(axis=1)  # what was lost to rounding
        squares = columns**2
        variance = squares.mean(axis=1)
        deviation = np.sqrt(variance * (count / np.float64(count - 1)))
        unit = np.where(deviation > 0, variance, 1)
        skewness = np.einsum("pe,pe->p", squares, columns) / count / unit**1.5
        fourths = np.einsum("pe,pe->p", squares, squares) / count
        kurtosis = np.where(deviation > 0, fourths / unit**2 - 3, 0)
        limits = interval(Moments(mean, deviation, skewness, kurtosis), count)
        table = np.stack([mean, deviation / np.sqrt(count), second_moment, *limits])
    reduced = []
    last = 0
    for leaf in leaves:
        first = last
        last = first + leaf[0].size
        real = leaf.dtype if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.result_type(float)
        parts = table[:, first:last].astype(real).reshape(len(table), *leaf.shape[1:])
        reduced.append(_Reduced(*parts))
    return put_on_host(reduced)


@jit
def _reduce_leaf(v: Array) -> _Reduced:
    """`_reduce` of one leaf; leaves of one shape, of any θ, share what is compiled."""
    limits = interval(_moments(v), v.shape[0])
    return _Reduced(v.mean(axis=0), sample_error(v), jnp.mean(v**2, axis=0), *limits)


@jit
def _reduce_all(arrays: list[Array]) -> list[_Reduced]:
    return [_reduce_leaf(v) for v in arrays]


def _moments(v: Array) -> Moments:
    """Over the first axis. A sample without spread has neither skewness nor kurtosis."""
    mean = v.mean(axis=0)
    deviation = v.std(axis=0, ddof=1)
    z = (v - mean) / jnp.where(deviation > 0, v.std(axis=0), 1)  # as `RunningSums` has it
    return Moments(
        mean,
        deviation,
        jnp.mean(z**3, axis=0),
        jnp.where(deviation > 0, jnp.mean(z**4, axis=0) - 3, 0),
    )


class RunningSums:
    """Sums of gradients and returns in float64, chunk after chunk, and the estimate that they make.

    parts: also keep the sums of every `parts`-th trajectory, for estimates from tenths of a
        recording.
    """

    def __init__(self, theta: Params, parts: int = 0):
        flat, self._unravel = ravel_pytree(theta)
        self.count = 0
        self.g = np.zeros(flat.size)
        self.g2 = np.zeros(flat.size)
        # Σ dᵏ of gradients and return about the mean of the first chunk
        self.powers = np.zeros((5, flat.size + 1))
        self.origin: np.ndarray | None = None
        self.parts = np.zeros((parts, flat.size))
        self.shift: float | None = None
        self.r = self.r2 = 0.0
        self.survival: float | None = None

    def add(self, samples: Samples) -> None:
        """Add the trajectories of a chunk."""
        returns = np.asarray(samples.returns, np.float64)
        leaves = jax.tree.leaves(samples.gradient)
        rows = np.concatenate(
            [np.asarray(v, np.float64).reshape(len(returns), -1) for v in leaves], 1
        )
        self.g += rows.sum(axis=0)
        self.g2 += (rows**2).sum(axis=0)
        both = np.concatenate([rows, returns[:, None]], axis=1)
        if self.origin is None:
            self.origin = both.mean(axis=0)
        self.powers += [np.sum((both - self.origin) ** k, axis=0) for k in range(5)]
        if len(self.parts):
            np.add.at(self.parts, (self.count + np.arange(len(rows))) % len(self.parts), rows)
        if self.shift is None:  # returns are large against their spread
            self.shift = float(returns.mean())
        self.r += float((returns - self.shift).sum())
        self.r2 += float(((returns - self.shift) ** 2).sum())
        if samples.survival is not None:
            reached = float(np.asarray(samples.survival, np.float64).sum())
            self.survival = (self.survival or 0.0) + reached
        self.count += len(returns)

    def mean_by_part(self) -> np.ndarray | None:
        """Means of every `parts`-th trajectory (parts, P); None if one has fewer than two."""
        many = len(self.parts)
        each = (self.count - np.arange(many) + many - 1) // many if many else np.zeros(0)
        return self.parts / each[:, None] if many and self.count >= 2 * many else None

    def estimate(self) -> Estimate:
        """Mean, standard error and second moment of all that was added."""
        n = self.count

        def tree(v):
            return self._unravel(jnp.asarray(v, jnp.result_type(float)))

        low, high = (np.asarray(v) for v in interval(self._moments(), n))
        return Estimate(
            tree(self.g / n),
            tree(standard_error(self.g / n, self.g2 / n, n)),
            tree(self.g2 / n),
            jnp.asarray((self.shift or 0.0) + self.r / n),
            jnp.asarray(standard_error(self.r / n, self.r2 / n, n)),
            n,
            (tree(low[:-1]), tree(high[:-1])),
            (jnp.asarray(low[-1]), jnp.asarray(high[-1])),
            stopped=None if self.survival is None else 1 - self.survival / n,
        )

    def _moments(self) -> Moments:
        """Central moments of gradients and return, from the powers about another origin."""
        assert self.origin is not None
        _, d, d2, d3, d4 = self.powers / self.count
        variance = np.maximum(d2 - d**2, 0)
        unbiased = variance * self.count / max(self.count - 1, 1)
        unit = np.where(variance > 0, variance, 1)
        skewness = np.where(variance > 0, (d3 - 3 * d * d2 + 2 * d**3) / unit**1.5, 0)
        kurtosis = np.where(
            variance > 0, (d4 - 4 * d * d3 + 6 * d**2 * d2 - 3 * d**4) / unit**2 - 3, 0
        )
        return Moments(
            *(jnp.asarray(v) for v in (self.origin + d, np.sqrt(unbiased), skewness, kurtosis))
        )


# ------------------------------------------------------------------------------- functions of means

MINIMUM_OF_MEANS = 3
"""Trajectories for a function of means: the covariance of those that are left needs two."""


def function_of_means(function: Callable[..., Array], *objectives: Objective) -> FunctionOfMeans:
    """Objective that is a function of several expected returns, J = F(E[R₁], …, E[R_K]).

    For ratios, variances and signal-to-noise ratios; `gradient`, `ppgt` and everything that trains
    with them take it.

    Unbiased to order 1/n from n trajectories, with the error of the delta method. K parts cost K
    sweeps over the same trajectories; an instrument is asked for them once.

    Args:
        function: F, of K numbers, differentiable by JAX.
        objectives: what each of the K means is of.

    Returns: a `FunctionOfMeans`, in the place of an `Objective`.

    >>> first = fl.Objective(terminal=lambda theta, x: x[0])
    >>> second = fl.Objective(terminal=lambda theta, x: x[0] ** 2)
    >>> variance = fl.function_of_means(lambda m, m2: m2 - m**2, first, second)
    >>> estimate = fl.ppgt(simulator, variance)(key, theta, 2000)
    >>> exact = 0.4**2 * (1 - np.exp(-2 * 0.8)) / (2 * 0.8)
    >>> bool(abs(estimate.value - exact) < 4 * estimate.value_stderr)
    True
    """
    if not objectives:
        raise ValueError("`function_of_means` needs at least one objective after F; got none.")
    for objective in objectives:
        check.objective(objective, stops=True)
    numbers = [jax.ShapeDtypeStruct((), jnp.result_type(float))] * len(objectives)
    try:
        shape = getattr(jax.eval_shape(function, *numbers), "shape", None)
    except TypeError as error:
        raise TypeError(
            f"F is called with {len(numbers)} numbers, one for each objective: {error}."
        ) from None
    if shape != ():
        raise ValueError(f"F must return one number, shape (); got shape {shape}.")
    return FunctionOfMeans(function, objectives)


def combine_samples(function: Callable[..., Array], parts: Sequence[Samples]) -> Samples:
    """Samples of F(E[R₁], …, E[R_K]) from those of its parts.

    The parts are of the same trajectories in the same order.

    Args:
        function: F, of K numbers.
        parts: K `Samples` of E trajectories, E ≥ 3.

    Returns: `Samples` whose means are the gradient and the value, and whose spread is their error.
    """
    count = parts[0].returns.shape[0]
    if count < MINIMUM_OF_MEANS:
        raise ValueError(
            f"a function of means needs {MINIMUM_OF_MEANS} trajectories at least; got {count}."
        )
    samples = _combine_samples(function, tuple(parts))
    if not bool(jnp.isfinite(samples.returns).all()):
        means = [float(part.returns.mean()) for part in parts]
        raise FloatingPointError(
            f"F or its derivatives are not finite at the means {means} of {count} trajectories, "
            "or at those of all but one: the function has left its range (such as a square "
            "root or logarithm of a difference of means)."
        )
    return samples


def value_samples(function: Callable[..., Array], returns: Array) -> Array:
    """Samples of the value alone, (E, K) -> (E,): their mean is F_c(m̂, Ĉ, n)."""
    count = returns.shape[0]
    mean = returns.mean(axis=0)
    covariance = jnp.atleast_2d(jnp.cov(returns, rowvar=False))
    f = _take_vector(function)
    return _correct_curvature(f, mean, covariance, count) + (returns - mean) @ jax.grad(f)(mean)


@partial(jit, static_argnums=0)
def _combine_samples(function: Callable[..., Array], parts: tuple[Samples, ...]) -> Samples:
    f = _take_vector(function)
    returns = jnp.stack([part.returns for part in parts], axis=1)  # (E, K)
    rows = [jax.vmap(lambda g: ravel_pytree(g)[0])(part.gradient) for part in parts]
    gradients = jnp.stack(rows, axis=1)  # (E, K, P)
    n = returns.shape[0]
    mean = returns.mean(axis=0)
    off = returns - returns.mean(axis=0)
    total = off.T @ off

    def weights(off: Array) -> Array:
        """∂F_c of all trajectories but the one that is `off` (K,) from the mean."""
        others = (total - n / (n - 1) * jnp.outer(off, off)) / (n - 2)
        return jax.grad(lambda m: _correct_curvature(f, m, others, n - 1))(mean - off / (n - 1))

    each = jnp.einsum("ek,ekp->ep", jax.vmap(weights)(off), gradients)
    # sums to zero: the spread of m̂
    each = each + off @ (jax.hessian(f)(mean) @ gradients.mean(axis=0))
    _, unravel = ravel_pytree(jax.tree.map(lambda leaf: leaf[0], parts[0].gradient))
    return Samples(
        jax.vmap(unravel)(each.astype(gradients.dtype)), value_samples(function, returns)
    )


def _take_vector(function: Callable[..., Array]) -> Callable[[Array], Array]:
    return lambda m: jnp.asarray(function(*m), m.dtype)


def _correct_curvature(
    f: Callable[[Array], Array], mean: Array, covariance: Array, count: int
) -> Array:
    """F_c: F without the bias that its curvature and the scatter of m̂ cause."""
    return f(mean) - jnp.sum(jax.hessian(f)(mean) * covariance) / (2 * count)
