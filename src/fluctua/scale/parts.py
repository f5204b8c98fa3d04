"""Partial sums of an estimate over ranges of trajectories, and their combination in order.

Means and central sums of two parts make those of both (Chan, Golub and LeVeque 1979; Pébay 2008),

    δ = m_b − m_a,   m = m_a + δ n_b/n,   S₂ = S₂ᵃ + S₂ᵇ + δ² n_a n_b/n,   S₃, S₄ likewise,

so that nothing is lost where returns are large against their spread. Rounding depends on where an
ensemble is cut and on the order of the sum. Both are functions of the number of trajectories alone,
so the result does not depend on which worker computed what, nor how often.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fluctua.core.arrays import Params
from fluctua.core.estimate import Estimate, Moments, RunningSums, Samples, interval, pooled_error


class Part(NamedTuple):
    """Sums over n trajectories of their P gradients and, last, their returns. (P+1,) each.

    count: n.
    units: independent ones of them; antithetic pairs count once.
    mean: over trajectories.
    second: Σv².
    spread: Σ(v − mean)² over units.
    third, fourth: Σ(v − mean)³ and Σ(v − mean)⁴; None where only means and errors are known, as
        from the fused kernels.
    table: mean return-to-go (T+1,), or with a twin that of Λ, for the next estimate.
    stopped: part of the trajectories that stopped before the horizon; None without a stop.
    """

    count: int  # type: ignore[assignment]
    units: int
    mean: np.ndarray
    second: np.ndarray
    spread: np.ndarray
    third: np.ndarray | None = None
    fourth: np.ndarray | None = None
    table: np.ndarray | None = None
    stopped: float | None = None


def sum_samples(samples: Samples) -> Part:
    """The part of trajectories with known single gradients."""
    returns = np.asarray(samples.returns, np.float64)
    n = len(returns)
    rows = [
        np.asarray(leaf, np.float64).reshape(n, -1) for leaf in jax.tree.leaves(samples.gradient)
    ]
    v = np.concatenate([*rows, returns[:, None]], axis=1)
    mean = v.mean(axis=0)
    d = v - mean
    s2, s3, s4 = (np.sum(d**k, axis=0) for k in (2, 3, 4))
    stopped = None
    if samples.survival is not None:
        stopped = 1 - float(np.asarray(samples.survival, np.float64).mean())
    return Part(n, n, mean, np.sum(v**2, axis=0), s2, s3, s4, stopped=stopped)


def sum_recording(sums: RunningSums) -> Part:
    """The part of the trajectories of a recording."""
    assert sums.origin is not None
    n = sums.count
    powers = sums.powers
    d = powers[1] / n
    s2 = powers[2] - n * d**2
    s3 = powers[3] - 3 * d * powers[2] + 2 * n * d**3
    s4 = powers[4] - 4 * d * powers[3] + 6 * d**2 * powers[2] - 3 * n * d**4
    mean = sums.origin + d
    stopped = None if sums.survival is None else 1 - sums.survival / n
    spread = np.maximum(s2, 0)
    return Part(n, n, mean, spread + n * mean**2, spread, s3, s4, stopped=stopped)


def sum_estimate(estimate: Estimate) -> Part:
    """The part of an estimate, from its mean, errors and second moment."""
    n = estimate.count

    def flat(tree, last):
        return np.append(np.asarray(ravel_pytree(tree)[0], np.float64), np.float64(last))

    mean = flat(estimate.gradient, estimate.value)
    error = flat(estimate.stderr, estimate.value_stderr)
    spread = error**2 * (n * (n - 1))
    second = n * flat(estimate.second_moment, np.square(float(estimate.value)))
    second[-1] += spread[-1]
    return Part(n, n, mean, second, spread, stopped=estimate.stopped)


def add_parts(a: Part, b: Part) -> Part:
    """Combine two parts."""
    n = a.count + b.count
    units = a.units + b.units
    delta = b.mean - a.mean
    share = b.count / n
    third = fourth = table = None
    if (
        a.third is not None
        and b.third is not None
        and a.fourth is not None
        and b.fourth is not None
    ):
        na = a.count
        nb = b.count
        third = a.third + b.third + delta**3 * (na * nb * (na - nb) / n**2)
        third = third + 3 * delta * (na * b.spread - nb * a.spread) / n
        fourth = a.fourth + b.fourth + delta**4 * (na * nb * (na**2 - na * nb + nb**2) / n**3)
        fourth = fourth + 6 * delta**2 * (na**2 * b.spread + nb**2 * a.spread) / n**2
        fourth = fourth + 4 * delta * (na * b.third - nb * a.third) / n
    if a.table is not None and b.table is not None:
        table = a.table + (b.table - a.table) * share
    spread = a.spread + b.spread + delta**2 * (a.units * b.units / units)
    mean = a.mean + delta * share
    stopped = None
    if a.stopped is not None and b.stopped is not None:
        stopped = a.stopped + (b.stopped - a.stopped) * share
    return Part(n, units, mean, a.second + b.second, spread, third, fourth, table, stopped)


def sum_parts(parts: Sequence[Part]) -> Part:
    """Combine all parts, in their order."""
    return reduce(add_parts, parts)


def make_estimate(part: Part, theta: Params) -> Estimate:
    """The estimate of a part; with an interval where third and fourth powers are known."""
    n = part.count
    units = part.units
    if units < 2:
        raise ValueError(f"an estimate needs two independent trajectories at least; got {n}.")
    _, unravel = ravel_pytree(theta)
    dtype = jnp.result_type(*jax.tree.leaves(theta))

    def tree(v):
        return unravel(jnp.asarray(v[:-1], dtype))

    stderr = pooled_error(part.spread, units)
    limits: tuple[np.ndarray, np.ndarray] | None = None
    if part.third is not None and part.fourth is not None:
        unit = np.where(part.spread > 0, part.spread / n, 1)
        skewness = np.where(part.spread > 0, part.third / n / unit**1.5, 0)
        kurtosis = np.where(part.spread > 0, part.fourth / n / unit**2 - 3, 0)
        moments = (part.mean, np.sqrt(part.spread / (n - 1)), skewness, kurtosis)
        low, high = interval(Moments(*(jnp.asarray(v) for v in moments)), n)
        limits = np.asarray(low), np.asarray(high)
    return Estimate(
        tree(part.mean),
        tree(stderr),
        tree(part.second / n),
        jnp.asarray(part.mean[-1]),
        jnp.asarray(stderr[-1]),
        n,
        None if limits is None else (tree(limits[0]), tree(limits[1])),
        None if limits is None else (jnp.asarray(limits[0][-1]), jnp.asarray(limits[1][-1])),
        stopped=part.stopped,
    )
