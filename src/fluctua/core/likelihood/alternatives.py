"""Tests of standardised residuals against common faults: one sum, its variance and a name for each.

Where the process is right, the standardised residual zₙ of a step is N(0, 1) given all that came
before it, so that for any function f of the past

    T = Σₙ zₙ fₙ,     V = Σₙ fₙ²

is a sum of martingale differences with variance V, and so are Σ (z² − 1) f/√2 and Σ z zₙ₋ₖ. T²/2V
is Rao's statistic of the alternative "the drift (the variance) also has a term along f": the
largest one is the most likely single fault.

    mean        f = 1, xⱼ, xⱼ², xⱼ³, |x|²xⱼ           offset, rate, coupling, cubic term
                xⱼ(n) − xⱼ(n − d)                     delay
    variance    f = 1, xⱼ, xⱼ²                        gain of a channel, multiplicative noise
    products    zᵢzⱼ, zᵢ(n)zⱼ(n − k)                  crosstalk, readout noise, filter, delay
    steps       mean and variance over trajectories   a channel that is held, shifted or clipped
    pairs       Σ z z' of two trajectories            a stale buffer

Sums of batches add up. A deviation counts where chance does not explain it (`CHANCE` for all tests
of a batch together) and where it matters: `Limits` has how large it must be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import scipy

CHANCE = 1e-4
"""False alarms per batch, of all tests together: every family has the same share, every test of it
too.
"""

MIN_STEPS = 200
"""Transitions below which nothing but v is tested."""

DELAYS = (3, 20)
"""Samples over which a movement of a channel is looked at."""

MAX_BINS = 1000
"""Steps or groups of them that are looked at one by one."""

WORK = 1e8
"""Products of pairs of components that a family may take; of longer records short runs are looked
at.
"""

RUN = 4
"""Neighbouring steps of such a run: as many as the lags need."""

MAX_CROSSED = 64
"""Components of which every pair is tested against functions that are not linear."""

MAX_PAIRED = 300
"""Trajectories that are compared with each other."""

SKEW_OF_SQUARE = 2**1.5
"""E[((z² − 1)/√2)³]."""

SKEW_OF_KICK = 1.0
"""Skewness of single kicks that passes where few are averaged: steps of multiplicative noise are
not quite Gaussian.
"""


class Limits(NamedTuple):
    """Deviations that pass however certain they are.

    mean: of the drift, root mean square over that of the drift itself.
    variance: of v.
    product: of a correlation.
    step: of the mean of one step over its noise, and of its v.
    chance: false alarms per batch.
    """

    mean: float = 0.1
    variance: float = 0.05
    product: float = 0.03
    step: float = 0.5
    chance: float = CHANCE


KNOWN = Limits(chance=CHANCE / 3)
"""Where parameters are as they were set: a drift that is wrong by a tenth."""

FITTED = Limits(mean=0.01)
"""Where the parameters were fitted to the same trajectories: what is left is not their error."""


EVERY_STEP = Limits(mean=0.0, chance=CHANCE / 3)
"""Of sums over all that an estimate uses: what they resolve can exceed its error bar."""


class FamilySums(NamedTuple):
    """Sums of one family of tests, (rows, columns) each.

    total: T. variance: V. third: Σ|f|³ times the skewness of its factor. terms: number of terms.
    """

    total: np.ndarray
    variance: np.ndarray
    third: np.ndarray
    terms: float


OF_MEAN = ("offset", "linear", "square", "cube", "radial", *(f"moved {delay}" for delay in DELAYS))
"""Families of what the drift lacks."""

Table = dict[str, FamilySums]
"""Families by name. Rows are components, columns what f is of: components, or nothing."""


class Finding(NamedTuple):
    """One deviation.

    family: of the test. row, column: its place in it. statistic: T/√V. effect: how large it is.
    """

    family: str
    row: int
    column: int
    statistic: float
    effect: float


# ------------------------------------------------------------------------------------------ sums


class Places(NamedTuple):
    """Steps of the residuals.

    steps: their numbers (S,).
    run: how many of them are neighbours.
    blurred: whether the samples have noise of a readout, which is in residuals and states at once.
    """

    steps: np.ndarray
    run: int
    blurred: bool = False


def sum_families(
    z: np.ndarray, square: np.ndarray, x: np.ndarray, where: Places, *, mean: bool = True
) -> Table:
    """The sums of all families over the trajectories of one batch.

    Args:
        z: standardised residuals (E, S, M), in double precision.
        square: z², and 1 at steps without noise, where there is nothing to judge.
        x: states (E, T+1, M).
        where: the steps of z among those of x.
        mean: whether to test what the drift lacks, which is half of the work.

    """
    blurred = where.blurred
    runs = _choose_runs(z.shape, where)
    kicks = _components_first(z, runs)
    squares = _components_first(square, runs)
    # a sample and the residuals on both of its sides share its noise: f is one sample older then
    now = where.steps[runs] - (1 if blurred else 0)
    states = {"now": _components_first(x, now)}
    for delay in DELAYS if mean else ():
        if where.steps[-1] >= 2 * delay:
            moved = states["now"] - _components_first(x, np.maximum(now - delay, 0))
            states[f"moved {delay}"] = moved * (now >= delay)
    table: Table = {}
    for mine, other in _split_folds(*kicks.shape[1:]):
        own = {name: _flatten_rows(values[mine]) for name, values in states.items()}
        theirs = {name: _flatten_rows(values[other]) for name, values in states.items()}
        if mean:
            table = add_tables(table, dict(_sum_by_state(_flatten_rows(kicks[mine]), own, theirs)))
        table = add_tables(
            table, dict(_sum_variance_by_state(_flatten_rows(squares[mine]), own, theirs))
        )
    table |= dict(_sum_variance(_flatten_rows(squares)))
    table |= dict(_sum_products(kicks, blurred))
    excess = np.maximum(1, 1 + np.sqrt(2) * (table["v"].total / table["v"].variance)[:, 0])
    # noise that is larger than it should be is found by v, and must not raise everything else
    table = {name: _widen(name, sums, excess, blurred) for name, sums in table.items()}
    table |= dict(_sum_by_step(z, square))
    if len(z) > 1:
        table["pairs"] = _sum_pairs(z)
    return table


def _components_first(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Some times (R, L) of (E, T, M) as (M, E, R, L) in double precision.

    Sums are over what lies together.
    """
    return np.ascontiguousarray(np.moveaxis(values[:, places], -1, 0), np.float64)


def _flatten_rows(values: np.ndarray) -> np.ndarray:
    """(M, ...) as (M, n)."""
    return values.reshape(len(values), -1)


def _split_folds(count: int, runs: int, length: int) -> list[tuple[Any, Any]]:
    """Places of (M, E, R, L) to sum over, each with others on which its features are centred.

    A mean of the same trajectories depends on their noise, and Σ z(x − x̄) is not zero on average
    then: for a random walk it is −1 or −2 of its standard deviations, and adds up over batches. The
    other half of the trajectories is independent of it; of one trajectory the first half serves the
    second.
    """
    if count > 1:
        return [(np.s_[:, 0::2], np.s_[:, 1::2]), (np.s_[:, 1::2], np.s_[:, 0::2])]
    if runs > 1:
        return [(np.s_[:, :, runs // 2 :], np.s_[:, :, : runs // 2])]
    return [(np.s_[:, :, :, length // 2 :], np.s_[:, :, :, : length // 2])]


def _choose_runs(shape: tuple[int, ...], where: Places) -> np.ndarray:
    """Places of z to look at, in runs of neighbours: all, or short runs evenly over time. (R, L)"""
    count, total, size = shape
    first = 1 if where.blurred and where.steps[0] == 0 else 0
    maximum = int(WORK / size**2 / count)
    if where.run == total and total - first <= max(maximum, 2 * RUN):
        return np.arange(first, total)[None]
    run = RUN if where.run == total else where.run
    begins = np.arange(first if where.run == total else first * run, total - run + 1, run)
    chosen = np.unique(
        np.linspace(0, len(begins) - 1, min(len(begins), max(2, maximum // run))).astype(int)
    )
    return begins[chosen][:, None] + np.arange(run)


def _sum(factor: np.ndarray, f: np.ndarray, skew: float = 0.0) -> FamilySums:
    """Sums of the rows of a factor (M, n) with those of f (K, n). (M, K)"""
    total = factor @ f.T
    square = f * f
    variance = np.broadcast_to(square.sum(axis=1), total.shape).copy()
    third = np.zeros_like(total)
    if skew:
        third += skew * np.einsum("kn,kn->k", square, np.abs(f))
    return FamilySums(total, variance, third, float(f.shape[1]))


def _sum_own(factor: np.ndarray, f: np.ndarray, skew: float = 0.0) -> FamilySums:
    """Sums of every row of a factor (M, n) with the same one of f (M, n). (M, 1)"""

    def multiply(a, b):
        return np.einsum("mn,mn->m", a, b)[:, None]

    square = f * f
    third = skew * multiply(square, np.abs(f))
    return FamilySums(multiply(factor, f), multiply(f, f), third, float(f.shape[1]))


def _choose_sum(size: int) -> Callable[..., FamilySums]:
    """Sums of every component with every other; of large systems with itself alone.

    Products of all components take too long there.
    """
    return _sum if size <= MAX_CROSSED else _sum_own


class _Scale(NamedTuple):
    """Features about a mean (M, 1) in units of a spread (M, 1); zero where there is none."""

    mean: np.ndarray
    spread: np.ndarray

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return np.where(
            self.spread > 0, (x - self.mean) / np.where(self.spread > 0, self.spread, 1), 0
        )


def _measure_scale(x: np.ndarray) -> _Scale:
    return _Scale(x.mean(axis=1, keepdims=True), x.std(axis=1, keepdims=True))


def _sum_by_state(
    z: np.ndarray, states: dict[str, np.ndarray], other: dict[str, np.ndarray]
) -> Iterator[tuple[str, FamilySums]]:
    """Families of functions of the state, of the rows (M, n) of one half.

    other: the other half, which gives the means.
    """
    scale = _measure_scale(other["now"])
    x = scale(states["now"])
    x_other = scale(other["now"])
    bend = _remove_linear(x, x_other)
    add_up = _choose_sum(len(x))
    square = x * x
    square_other = x_other * x_other
    yield "offset", _sum(z, np.ones((1, x.shape[1])))
    yield "linear", _sum(z, x)
    yield "square", add_up(z, bend(square, square_other))
    yield "cube", add_up(z, bend(x * square, x_other * square_other))
    if len(x) > 1:
        yield (
            "radial",
            add_up(z, bend(x * square.mean(axis=0), x_other * square_other.mean(axis=0))),
        )
    for name in [name for name in other if name != "now"]:
        of = _measure_scale(other[name])
        yield name, add_up(z, bend(of(states[name]), of(other[name])))


def _sum_variance_by_state(
    squares: np.ndarray, states: dict[str, np.ndarray], other: dict[str, np.ndarray]
) -> Iterator[tuple[str, FamilySums]]:
    """Families of a variance that depends on the state, of the rows (M, n) of one half.

    other: the other half, which gives the means.
    """
    x = _measure_scale(other["now"])(states["now"])
    w = (squares - 1) / np.sqrt(2)
    add_up = _choose_sum(len(x))
    yield "variance linear", add_up(w, x, SKEW_OF_SQUARE)
    yield "variance square", add_up(w, x * x - 1, SKEW_OF_SQUARE)


def _remove_linear(
    x: np.ndarray, x_other: np.ndarray
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """(f, f of the others) -> f less what is linear in the states, which has tests of its own."""
    if len(x) > MAX_CROSSED:

        def slope(f_other):
            return np.mean(f_other * x_other, axis=1, keepdims=True)  # of rows with unit spread

        return lambda f, f_other: f - f_other.mean(axis=1, keepdims=True) - slope(f_other) * x
    lines = np.concatenate([np.ones((1, x.shape[1])), x])
    lines_other = np.concatenate([np.ones((1, x_other.shape[1])), x_other])
    inverse = np.linalg.pinv(lines_other @ lines_other.T, rcond=1e-10, hermitian=True)
    return lambda f, f_other: f - (f_other @ lines_other.T @ inverse) @ lines


def _sum_variance(squares: np.ndarray) -> Iterator[tuple[str, FamilySums]]:
    """v of every component, rows of z² (M, n), and of all together."""
    return _form_variance_sums(np.sum(squares - 1, axis=1), float(squares.shape[1]))


def _form_variance_sums(excess: np.ndarray, count: float) -> Iterator[tuple[str, FamilySums]]:
    """Families of the variance from Σ(z² − 1) (M,) over `count` steps."""
    total = excess / np.sqrt(2)
    yield "v", _sum_ones(total[:, None], count)
    if len(total) > 1:
        yield "v of all", _sum_ones(total.sum(keepdims=True)[:, None], len(total) * count)


def _sum_ones(total: np.ndarray, count: float) -> FamilySums:
    """Sums of squares without a factor, f = 1."""
    return FamilySums(
        total, np.full(total.shape, count), np.full(total.shape, SKEW_OF_SQUARE * count), count
    )


def tabulate_drift(sums: Any, components: np.ndarray) -> Table:
    """Families of the drift and of v from `StepSums`, of the components that have noise."""
    n = float(sums.steps)
    square = sums.square[components]
    excess = np.maximum(1, square / n)[:, None]  # noise that is too large is found by v
    others = np.zeros((len(components), 1))

    def make(total: np.ndarray, variance: np.ndarray) -> FamilySums:
        return FamilySums(total, variance, np.zeros_like(total), n)

    own = make(sums.own[components, None], excess * sums.drift[components, None])
    crossed = sums.product.shape[1] > 1
    state = sums.state if crossed else sums.state[components, None]
    table = {
        "offset": make(sums.kick[components, None], excess * n),
        "linear": make(sums.product[components], excess * (others + state)),
        "drift": own,
        **dict(_form_variance_sums(square - n, n)),
    }
    if len(components) > 1:
        table["drift of all"] = make(*(v.sum(keepdims=True) for v in own[:2]))
    return table


def _sum_products(z: np.ndarray, blurred: bool) -> Iterator[tuple[str, FamilySums]]:
    """Products of kicks (M, E, R, L), R runs of L neighbours."""
    size = len(z)
    if size > 1:
        together = _sum(_flatten_rows(z), _flatten_rows(z))
        above = np.triu(np.ones((size, size), bool), 1)
        yield "together", together._replace(variance=np.where(above, together.variance, 0))
    for lag in (1, 2, 3):
        if z.shape[3] > lag and not (blurred and lag == 1):
            add_up = _sum if lag == 1 else _choose_sum(size)
            yield f"lag {lag}", add_up(_flatten_rows(z[..., lag:]), _flatten_rows(z[..., :-lag]))


def _widen(family: str, sums: FamilySums, excess: np.ndarray, blurred: bool) -> FamilySums:
    """The sums with their variance where v is not 1, or where samples have readout noise.

    Residuals that share the noise of a sample have a correlation ρ ≥ −½ with the next, and the
    variance of a sum of their squares or products is up to 1 + 2ρ² = 1.5 times as large; that of a
    sum of residuals is smaller.
    """
    factor = np.ones(len(sums.total)) if family in ("v", "v of all") else excess
    return sums._replace(variance=sums.variance * factor[:, None] * (1.5 if blurred else 1.0))


def _sum_by_step(z: np.ndarray, square: np.ndarray) -> Iterator[tuple[str, FamilySums]]:
    """Mean and variance of every step, or of neighbouring ones where there are many. (M, bins)

    Squares of few are far from Gaussian: (χ²/n)^⅓ is nearly so (Wilson and Hilferty), in both
    tails.
    """
    count, steps, size = z.shape
    bins = min(steps, MAX_BINS)
    edges = np.linspace(0, steps, bins + 1).round().astype(int)

    def add_up(values):
        return np.add.reduceat(values, edges[:-1], axis=0).T

    each = np.diff(edges) * float(count)
    whole = np.broadcast_to(each, (size, bins)).copy()
    yield "step", FamilySums(add_up(z.sum(axis=0)), whole, SKEW_OF_KICK * whole, float(each.mean()))
    v = add_up(square.sum(axis=0)) / each
    for name, ratio, n in (
        ("step v", v, each),
        ("step v of all", v.mean(axis=0, keepdims=True), size * each),
    ):
        score = (np.cbrt(ratio) - (1 - 2 / (9 * n))) / np.sqrt(2 / (9 * n))
        more = np.where(ratio > 1, SKEW_OF_KICK * n, 0)
        yield (
            name,
            FamilySums(
                score * np.sqrt(n), np.broadcast_to(n, ratio.shape).copy(), more, float(n.mean())
            ),
        )


def _sum_pairs(z: np.ndarray) -> FamilySums:
    """Sums over two trajectories, each with every later one. (E, E)"""
    flat = z[:MAX_PAIRED].reshape(len(z[:MAX_PAIRED]), -1)
    above = np.triu(np.ones((len(flat), len(flat)), bool), 1)
    total = np.where(above, flat @ flat.T, 0)
    variance = np.outer(np.sum(flat * flat, axis=1), np.ones(len(flat)))
    return FamilySums(
        total, np.where(above, variance, 0), np.zeros_like(total), float(flat.shape[1])
    )


# ------------------------------------------------------------------------------------------ verdict


def judge(table: Table, drift: np.ndarray, limits: Limits) -> list[Finding]:
    """Deviations that neither chance nor their size excuses, the most likely first.

    drift: root mean square of the drift's step over its noise, (M,).
    """
    deviations = []
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for family, sums in table.items():
            tests = max(int(np.count_nonzero(sums.variance)), 1)
            certain = -scipy.special.ndtri(limits.chance / 2 / len(table) / tests)
            statistic = np.where(sums.variance > 0, sums.total / np.sqrt(sums.variance), 0)
            if not (np.abs(statistic) > certain).any():
                continue  # a skewness makes the limit larger, never smaller
            skew = np.where(sums.variance > 0, sums.third / sums.variance**1.5, 0)
            needed = _widen_tail(certain, skew)
            effect, limit = _measure_effect(family, sums, statistic, drift, limits)
            for row, column in zip(
                *np.nonzero((np.abs(statistic) > needed) & (effect > limit)), strict=True
            ):
                size = (float(statistic[row, column]), float(effect[row, column]))
                # one column: every component with itself
                of = row if statistic.shape[1] == 1 else column
                deviations.append(Finding(family, int(row), int(of), *size))
    return sorted(deviations, key=lambda one: -abs(one.statistic))


def _widen_tail(normal: float, skew: np.ndarray) -> np.ndarray:
    """The quantile of a gamma law (Pearson III) of this skewness.

    normal: the quantile of a normal law at the same probability.
    """
    slight = np.maximum(skew, 1e-6)  # below, the two agree to 1e-5
    return 2 / slight * ((1 + slight * normal / 6 - slight**2 / 36) ** 3 - 1)


def _measure_effect(
    family: str, sums: FamilySums, statistic: np.ndarray, drift: np.ndarray, limits: Limits
) -> tuple[np.ndarray, float]:
    """Size of a deviation in the unit of its limit, and the limit."""
    size = np.abs(statistic) / np.sqrt(sums.terms)
    if family == "pairs":
        return np.where(statistic > 0, size, 0), limits.step
    if family.startswith("step"):
        return size * (np.sqrt(2) if family.startswith("step v") else 1), limits.step
    if family.startswith("v"):
        return size * np.sqrt(2), limits.variance
    if family.startswith("drift"):
        return np.abs(statistic) / np.sqrt(sums.variance), limits.mean
    if family.startswith(("lag", "together")):
        return size, limits.product
    return np.where(
        drift[:, None] > 0, size / np.where(drift[:, None] > 0, drift[:, None], 1), np.inf
    ), limits.mean


def add_tables(before: Table | None, new: Table) -> Table:
    """The sums of two batches. Those of steps and pairs are of one batch alone and stay out."""
    kept = {name: sums for name, sums in new.items() if not name.startswith(("step", "pairs"))}
    return {
        **(before or {}),
        **{name: _add((before or {}).get(name), sums) for name, sums in kept.items()},
    }


def _add(before: FamilySums | None, new: FamilySums) -> FamilySums:
    if before is None or before.total.shape != new.total.shape:
        return new
    return FamilySums(
        before.total + new.total,
        before.variance + new.variance,
        before.third + new.third,
        before.terms + new.terms,
    )


def discount(table: Table | None, factor: float) -> Table | None:
    """The sums with a smaller weight, as older data have; None where the factor is 0."""
    if table is None or factor == 1:
        return table

    def weigh(s):
        return FamilySums(
            factor * s.total, factor**2 * s.variance, factor**3 * s.third, factor * s.terms
        )

    return {name: weigh(sums) for name, sums in table.items()} if factor else None


def leave_unexplained(whole: Table, first: Table, second: Table) -> Table:
    """The sums as far as neither of two laws accounts for them.

    A sum that changes its sign between the two laws becomes zero. first, second: of the same steps
    by either law. What a law changes in T grows in proportion to V, so that sums over more steps
    (`whole`, by the first law) follow.
    """
    made = {}
    for name, sums in whole.items():
        a = first.get(name)
        b = second.get(name)
        if a is None or b is None or a.total.shape != sums.total.shape:
            made[name] = sums
            continue
        share = np.where(a.variance > 0, sums.variance / np.where(a.variance > 0, a.variance, 1), 0)
        other = sums.total + (b.total - a.total) * share
        smaller = np.where(np.abs(other) < np.abs(sums.total), other, sums.total)
        made[name] = sums._replace(
            total=np.where(np.sign(other) == np.sign(sums.total), smaller, 0)
        )
    return made
