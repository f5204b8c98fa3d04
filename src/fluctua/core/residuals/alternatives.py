"""Tests of standardised residuals against common faults: one sum, its variance, and a name for each.

Where the process is right, the standardised residual zₙ of a step is N(0, 1) given all that came before it, so that for
any function f of the past

    T = Σₙ zₙ fₙ,     V = Σₙ fₙ²

is a sum of martingale differences with variance V, and so are Σ (z² − 1) f/√2 and Σ z zₙ₋ₖ. T²/2V is Rao's statistic of
the alternative "the drift (the variance) also has a term along f": the largest one is the most likely single fault.

    mean        f = 1, xⱼ, xⱼ², xⱼ³, |x|²xⱼ, xⱼ(n) − xⱼ(n − d)     offset, rate, coupling, cubic, delay
    variance    f = 1, xⱼ, xⱼ²                                    gain of a channel, noise that depends on the state
    products    zᵢzⱼ, zᵢ(n)zⱼ(n − k)                               crosstalk, readout noise, filter, delay
    steps       mean and variance over the trajectories, by step  a channel that is held, shifted or clipped
    pairs       Σ z z' of two trajectories                        a stale buffer

Sums of batches add up. A deviation counts where chance does not explain it (`CHANCE` for all tests of a batch together)
and where it matters: `Limits` has how large it must be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import scipy

CHANCE = 1e-4
"""False alarms per batch, of all tests together: every family has the same share, every test of it too."""

FEWEST_STEPS = 200
"""Transitions below which nothing but v is tested."""

DELAYS = (3, 20)
"""Samples over which a movement of a channel is looked at."""

MOST_BINS = 1000
"""Steps or groups of them that are looked at one by one."""

SKEW_OF_SQUARE = 2**1.5
"""E[((z² − 1)/√2)³]."""

SKEW_OF_KICK = 1.0
"""Skewness of single kicks that passes where few are averaged: steps of multiplicative noise are not quite Gaussian."""

MOST_KEPT = 5000
"""Sums that are worth adding up over batches; larger systems have enough steps in each."""


class Limits(NamedTuple):
    """Deviations that pass however certain they are.

    mean: of the drift, root mean square over that of the drift itself. variance: of v. product: of a correlation.
    step: of the mean of one step over its noise, and of its v.
    """

    mean: float = 0.1
    variance: float = 0.05
    product: float = 0.03
    step: float = 0.5


KNOWN = Limits()
"""Where the parameters are what they are said to be: a drift that is wrong by a tenth."""

FITTED = Limits(mean=0.01)
"""Where the parameters were fitted to the same trajectories: what is left is not their error."""


class Sums(NamedTuple):
    """T, V, Σ|f|³ times the skewness of its factor, and the number of terms of one family. (rows, columns) each"""

    total: np.ndarray
    variance: np.ndarray
    third: np.ndarray
    count: float


OF_MEAN = ("offset", "linear", "square", "cube", "radial", *(f"moved {delay}" for delay in DELAYS))
"""Families of what the drift lacks."""

Table = dict[str, Sums]
"""Families by name. Rows are components, columns what f is of: components, or nothing."""


class Finding(NamedTuple):
    """One deviation. family: of the test. row, column: its place in it. statistic: T/√V. effect: how large it is."""

    family: str
    row: int
    column: int
    statistic: float
    effect: float


# ------------------------------------------------------------------------------------------ sums


def collect(z: np.ndarray, x: np.ndarray, blurred: bool = False) -> Table:
    """The sums of all families over the trajectories of one batch.

    Args:
        z: standardised residuals (E, T, M), in double precision.
        x: states at the start of each step (E, T, M).
        blurred: whether the samples have noise of a readout, which is in z and x at once.

    """
    if blurred:  # a sample and the residuals on both of its sides share its noise: f is one sample older
        z, x = z[:, 1:], x[:, :-1]
    count, steps, size = z.shape
    flat = z.reshape(-1, size)
    scaled = _scale(x.reshape(-1, size))
    lines = np.concatenate([np.ones((len(scaled), 1)), scaled], axis=1)
    beyond = _projector(lines)
    table = dict(_of_mean(flat, scaled, lines, beyond))
    for delay in DELAYS:
        if steps > 2 * delay:
            moved = np.zeros_like(x)
            moved[:, delay:] = x[:, delay:] - x[:, :-delay]
            table[f"moved {delay}"] = _sum(flat, beyond(_scale(moved.reshape(-1, size))))
    table |= dict(_of_variance(flat, scaled))
    table |= dict(_products(z, blurred))
    excess = np.maximum(1, np.mean(flat**2, axis=0))
    # noise that is larger than it should be is found by v, and must not raise everything else
    table = {name: _widen(name, sums, excess, blurred) for name, sums in table.items()}
    table |= dict(_of_steps(z))
    if count > 1:
        table["pairs"] = _pairs(z)
    return table


def _sum(factor: np.ndarray, f: np.ndarray, skew: float = 0.0) -> Sums:
    """Sums of the columns of a factor (n, M) with those of f (n, K). (M, K)"""
    total = factor.T @ f
    variance = np.broadcast_to(np.sum(f**2, axis=0), total.shape)
    third = np.broadcast_to(skew * np.sum(np.abs(f) ** 3, axis=0), total.shape) if skew else np.zeros_like(total)
    return Sums(total, variance.copy(), third.copy(), float(len(f)))


def _scale(x: np.ndarray) -> np.ndarray:
    """Columns about their mean in units of their spread; zero where they do not vary."""
    away = x - x.mean(axis=0)
    spread = away.std(axis=0)
    return np.where(spread > 0, away / np.where(spread > 0, spread, 1), 0)


def _projector(lines: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """f -> f less what is linear in the states, which has tests of its own."""
    inverse = np.linalg.pinv(lines.T @ lines, rcond=1e-10, hermitian=True)
    return lambda f: f - lines @ (inverse @ (lines.T @ f))


def _of_mean(
    z: np.ndarray, scaled: np.ndarray, lines: np.ndarray, beyond: Callable[[np.ndarray], np.ndarray]
) -> Iterator[tuple[str, Sums]]:
    yield "offset", _sum(z, lines[:, :1])
    yield "linear", _sum(z, scaled)
    yield "square", _sum(z, beyond(scaled**2))
    yield "cube", _sum(z, beyond(scaled**3))
    if scaled.shape[1] > 1:
        yield "radial", _sum(z, beyond(scaled * np.mean(scaled**2, axis=1, keepdims=True)))


def _of_variance(z: np.ndarray, scaled: np.ndarray) -> Iterator[tuple[str, Sums]]:
    w = (z**2 - 1) / np.sqrt(2)
    one = np.ones((len(z), 1))
    yield "v", _sum(w, one, SKEW_OF_SQUARE)
    if z.shape[1] > 1:
        yield "v of all", _sum(w.reshape(-1, 1), np.ones((w.size, 1)), SKEW_OF_SQUARE)
    centred = w - w.mean(axis=0)  # v has a test of its own
    yield "variance linear", _sum(centred, scaled, SKEW_OF_SQUARE)
    yield "variance square", _sum(centred, scaled**2 - 1, SKEW_OF_SQUARE)


def _products(z: np.ndarray, blurred: bool) -> Iterator[tuple[str, Sums]]:
    size = z.shape[2]
    flat = z.reshape(-1, size)
    if size > 1:
        together = _sum(flat, flat)
        above = np.triu(np.ones((size, size), bool), 1)
        yield "together", together._replace(total=np.where(above, together.total, 0))
    for lag in (1, 2, 3):
        if z.shape[1] <= 2 * lag or (blurred and lag == 1):
            continue
        now, before = z[:, lag:].reshape(-1, size), z[:, :-lag].reshape(-1, size)
        yield f"lag {lag}", _sum(now, before)


def _widen(family: str, sums: Sums, excess: np.ndarray, blurred: bool) -> Sums:
    """The sums with the variance that they have where v is not 1, or where the noise of a sample is in two residuals.

    Residuals that share it have a correlation ρ ≥ −½ with the next, and the variance of a sum of their squares or
    products is up to 1 + 2ρ² = 1.5 times as large; that of a sum of residuals is smaller.
    """
    factor = np.ones(len(sums.total)) if family in ("v", "v of all") else excess
    return sums._replace(variance=sums.variance * factor[:, None] * (1.5 if blurred else 1.0))


def _of_steps(z: np.ndarray) -> Iterator[tuple[str, Sums]]:
    """Mean and variance of every step, or of neighbouring ones together where there are many. (M, bins)"""
    count, steps, _ = z.shape
    bins = min(steps, MOST_BINS)
    edges = np.linspace(0, steps, bins + 1).round().astype(int)
    each = np.diff(edges) * float(count)
    variance = np.broadcast_to(each, (z.shape[2], bins)).copy()
    for name, values, skew in (("step", z, SKEW_OF_KICK), ("step v", (z**2 - 1) / np.sqrt(2), SKEW_OF_SQUARE)):
        total = np.add.reduceat(values.sum(axis=0), edges[:-1], axis=0).T
        yield name, Sums(total, variance, skew * variance, float(each.mean()))


def _pairs(z: np.ndarray) -> Sums:
    """Sums over two trajectories, each with every later one. (E, E)"""
    flat = z.reshape(len(z), -1)
    above = np.triu(np.ones((len(z), len(z)), bool), 1)
    total = np.where(above, flat @ flat.T, 0)
    variance = np.outer(np.sum(flat**2, axis=1), np.ones(len(z)))
    return Sums(total, np.where(above, variance, 0), np.zeros_like(total), float(flat.shape[1]))


# ------------------------------------------------------------------------------------------ verdict


def judge(table: Table, drift: np.ndarray, limits: Limits) -> list[Finding]:
    """Deviations that neither chance nor their size excuses, the most likely first.

    drift: root mean square of the drift's step over its noise, (M,).
    """
    found = []
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for family, sums in table.items():
            tests = max(np.count_nonzero(sums.variance), 1)
            certain = scipy.stats.norm.isf(CHANCE / 2 / len(table) / tests)
            statistic = np.where(sums.variance > 0, sums.total / np.sqrt(sums.variance), 0)
            skew = np.where(sums.variance > 0, sums.third / sums.variance**1.5, 0)
            needed = certain + skew * (certain**2 - 1) / 6  # Cornish–Fisher
            effect, limit = _effect(family, sums, statistic, drift, limits)
            for row, column in zip(*np.nonzero((np.abs(statistic) > needed) & (effect > limit)), strict=True):
                place = (int(row), int(column))
                found.append(Finding(family, *place, float(statistic[place]), float(effect[place])))
    return sorted(found, key=lambda one: -abs(one.statistic))


def _effect(
    family: str, sums: Sums, statistic: np.ndarray, drift: np.ndarray, limits: Limits
) -> tuple[np.ndarray, float]:
    """How large a deviation is, in the unit of its limit, and the limit."""
    size = np.abs(statistic) / np.sqrt(sums.count)
    if family == "pairs":
        return np.where(statistic > 0, size, 0), limits.step
    if family.startswith("step"):
        return size * (np.sqrt(2) if family == "step v" else 1), limits.step
    if family.startswith("v"):
        return size * np.sqrt(2), limits.variance
    if family.startswith(("lag", "together")):
        return size, limits.product
    return np.where(drift[:, None] > 0, size / np.where(drift[:, None] > 0, drift[:, None], 1), np.inf), limits.mean


def add(before: Table | None, news: Table, fade: float = 1.0) -> Table:
    """The sums of two batches; those of steps and pairs are of one batch alone and stay out."""
    kept = {name: sums for name, sums in news.items() if name not in ("step", "step v", "pairs")}
    return {**(before or {}), **{name: _add((before or {}).get(name), sums) for name, sums in kept.items()}}


def _add(before: Sums | None, news: Sums) -> Sums:
    if before is None or before.total.shape != news.total.shape:
        return news
    return Sums(*(a + b for a, b in zip(before, news, strict=True)))


def fade(table: Table | None, factor: float) -> Table | None:
    """What was summed counts for less."""
    if table is None or factor == 1:
        return table
    weigh = lambda s: Sums(factor * s.total, factor**2 * s.variance, factor**3 * s.third, factor * s.count)
    return {name: weigh(sums) for name, sums in table.items()} if factor else None


def leave_unexplained(whole: Table, first: Table, second: Table) -> Table:
    """The sums as far as neither of two laws accounts for them; zero where a sum changes its sign between the two.

    first, second: of the same steps by either law. What a law changes in T grows in proportion to V, so that sums over
    more steps (`whole`, by the first) follow.
    """
    made = {}
    for name, sums in whole.items():
        a, b = first.get(name), second.get(name)
        if a is None or b is None or a.total.shape != sums.total.shape:
            made[name] = sums
            continue
        share = np.where(a.variance > 0, sums.variance / np.where(a.variance > 0, a.variance, 1), 0)
        other = sums.total + (b.total - a.total) * share
        smaller = np.where(np.abs(other) < np.abs(sums.total), other, sums.total)
        made[name] = sums._replace(total=np.where(np.sign(other) == np.sign(sums.total), smaller, 0))
    return made
