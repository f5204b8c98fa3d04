"""Slow drifts of one long record: how to find and how to remove them.

A record x of n samples is written in cosines, aₖ = √(2/n) Σₙ xₙ cos(πk(n + ½)/n), k half periods
per record. In a steady state those with k ≪ n/τ, τ the correlation time, are independent and have
the same variance S(0). A drift sits in the slowest, k = 1 and 2:

    F = ½(a₁² + a₂²) / mean(a₃² … a_K²)      is F(2, K−2) distributed without one.

No correlation time enters but through K = n/2πτ, up to which the spectrum is flat within a quarter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy

from fluctua.processes.stationary import memory_time

ALARM = 1e-4
"""Probability of a false alarm, of all components, means and variances together."""
POINTS = 2**15
"""Means of consecutive samples that a record is reduced to."""
SLOWEST = 2
"""Half periods per record in which a drift is searched."""
MIN_FREQUENCIES = 8
MAX_FREQUENCIES = 40
"""Half periods per record that it is compared with, K."""
ASIDE = 4
"""Half periods that are removed before the correlation time is measured."""
LOST = 0.02
"""Share of the variance of its fluctuations that a record may lose with its trend."""


class RecordTrend(NamedTuple):
    """A drift of one component.

    what: "mean" or "variance".
    component: its number.
    change: second half of the record − first.
    errors: the change in standard errors.
    probability: of such a drift by chance, for this component.
    """

    what: str
    component: int
    change: float
    errors: float
    probability: float


class TrendSearch(NamedTuple):
    """Result of the search for a drift.

    trend: the drift that stands out most, or None.
    slowest: number of the slowest component.
    memory: its correlation time 1 + 2Σ|ρ|, in samples.
    resolved: whether the record is long enough to distinguish its fluctuations from a drift.
    """

    trend: RecordTrend | None
    slowest: int
    memory: float
    resolved: bool


def find_trend(x: np.ndarray, *, records: int = 1) -> TrendSearch:
    """Compare the slowest movements of a record (n, M) with those next to them, per component.

    Args:
        x: finite states.
        records: how many are searched, which share the probability of an alarm.

    Returns: a `TrendSearch`.
    """
    group = -(-len(x) // POINTS)
    whole = len(x) // group * group
    alarm = ALARM / (2 * x.shape[1] * records)
    trends: list[RecordTrend] = []
    slowest = 0
    memory = 0.0
    resolved = True
    for i in range(x.shape[1]):
        series = np.asarray(x[:whole, i], np.float64)
        series = series - series.mean()
        if len(series) < 4 * MIN_FREQUENCIES or not np.any(series):
            continue
        means = _average_groups(series, group)
        squares = _average_groups(
            (series - np.repeat(_extract_slow_part(means, SLOWEST), group)) ** 2, group
        )
        for what, values in (("mean", means), ("variance", squares)):
            tested = _test_trend(values)
            if tested.memory * group > memory and what == "mean":
                slowest = i
                memory = tested.memory * group
                resolved = tested.resolved
            limit = alarm if tested.resolved else alarm / 10
            if tested.probability < limit:
                trends.append(
                    RecordTrend(what, i, tested.change, tested.errors, tested.probability)
                )
    clearest = min(trends, key=lambda trend: trend.probability, default=None)
    return TrendSearch(clearest, slowest, memory, resolved)


def describe_trend(trend: RecordTrend, components: tuple[str, ...]) -> str:
    """Say what drifts and by how much, without a full stop."""
    return (
        f"the {trend.what} of {components[trend.component]} differs by {trend.change:.3g} between "
        f"the halves of the record, {trend.errors:.1f} standard errors"
    )


class _TrendTest(NamedTuple):
    probability: float
    change: float
    errors: float
    memory: float
    resolved: bool


def _test_trend(values: np.ndarray) -> _TrendTest:
    """F test of one series (n,), and the difference of its halves."""
    n = len(values)
    a = scipy.fft.dct(values - values.mean(), norm="ortho")
    fast = values - values.mean() - _extract_slow_part(values - values.mean(), ASIDE)
    memory = memory_time(fast[None]) if np.any(fast) else 1.0
    flat = int(n / (np.pi * memory))  # memory is 2τ
    count = min(MAX_FREQUENCIES, max(MIN_FREQUENCIES, flat), n - 1)
    level = float(np.mean(a[SLOWEST + 1 : count + 1] ** 2))
    half = n // 2
    change = float(values[-half:].mean() - values[:half].mean())
    if not level > 0:
        return _TrendTest(1.0, change, 0.0, memory, flat >= MIN_FREQUENCIES)
    statistic = float(np.mean(a[1 : SLOWEST + 1] ** 2)) / level
    probability = float(scipy.stats.f.sf(statistic, SLOWEST, count - SLOWEST))
    return _TrendTest(
        probability, change, abs(change) / (2 * np.sqrt(level / n)), memory, flat >= MIN_FREQUENCIES
    )


def _average_groups(values: np.ndarray, group: int) -> np.ndarray:
    return values.reshape(-1, group).mean(axis=1)


def _extract_slow_part(values: np.ndarray, count: int) -> np.ndarray:
    """Cosines 1 … count of a series (n, …), without its mean."""
    a = scipy.fft.dct(values, axis=0, norm="ortho")
    a[0] = 0
    a[count + 1 :] = 0
    return scipy.fft.idct(a, axis=0, norm="ortho")


def remove_trend(x: np.ndarray, samples: float, name: Any) -> np.ndarray:
    """Remove from a record (n, M) what varies more slowly than `samples`; its mean stays.

    The trend is taken for an offset of the detector, added to a system that is in a steady state.
    A system whose parameters drift is not mended by this. The fluctuations lose 2m/`samples` of
    their variance, m the memory; more than `LOST` is refused.

    Args:
        x: finite states.
        samples: period in samples; the cosines of longer periods are subtracted.
        name: of the record, for messages.
    """
    count = int(2 * len(x) / samples)
    if not count >= 1:
        raise ValueError(
            f"{name} is {len(x)} samples long, less than half a period of {samples:.4g}: nothing "
            "in it varies so slowly. Give a shorter time to --detrend."
        )
    values = np.asarray(x, np.float64)
    fast = values - _extract_slow_part(values, count)
    moving = [i for i in range(values.shape[1]) if np.ptp(values[:, i]) > 0]
    memory = max((memory_time((fast[:, i] - fast[:, i].mean())[None]) for i in moving), default=0.0)
    lost = count * memory / len(x)
    if lost > LOST:
        raise ValueError(
            f"--detrend would take {lost:.0%} of the fluctuations of {name} away with its trend: "
            f"they are correlated over {memory:.3g} samples. Give a time of "
            f"{2 * memory / LOST:.3g} samples or more, or record for longer."
        )
    return fast.astype(x.dtype)


class TrendRemoval(NamedTuple):
    """A trace without its trend.

    x: states (n, M).
    moved: root mean square of the trend, in standard deviations of the rest (M,).
    lost: share of the variance of the fluctuations that went with it.
    """

    x: np.ndarray
    moved: np.ndarray
    lost: float


def subtract_trend(
    x: np.ndarray, position: np.ndarray, samples: float, cuts: np.ndarray, name: Any
) -> TrendRemoval:
    """Remove the trend of a trace with gaps, by a least-squares fit of cosines.

    Args:
        x: finite states (n, M), those of gaps left out.
        position: of each in the trace, in samples (n,).
        samples: period in samples; the cosines of longer periods are subtracted.
        cuts: first samples after gaps, for correlations.
        name: of the trace, for messages.

    Returns: a `TrendRemoval`. Without gaps its states are those of `remove_trend`.
    """
    length = int(position[-1]) + 1
    if not (np.isfinite(samples) and samples > 0):
        raise ValueError(f"`detrend` (--detrend) is a time, above 0; got {samples:g} samples.")
    count = int(2 * length / samples)
    if not count >= 1:
        raise ValueError(
            f"{name} is {length} samples long, less than half a period of {samples:.4g}: nothing "
            "in it varies so slowly. Give a shorter time to --detrend."
        )
    if count >= len(x):
        raise ValueError(
            f"--detrend would take all of {name}: {len(x)} samples have no room for {count} slow "
            "variations. Give a longer time."
        )
    values = np.asarray(x, np.float64)
    centre = values.mean(axis=0)
    slow = _fit_cosines(values - centre, position, length, count)
    fast = values - slow
    spread = fast.std(axis=0)
    moving = np.flatnonzero(spread > 0)
    memory = max((memory_time(fast[None, :, i], cuts) for i in moving), default=0.0)
    lost = count * memory / len(x)
    if lost > LOST:
        raise ValueError(
            f"--detrend would take {lost:.0%} of the fluctuations of {name} away with its trend: "
            f"they are correlated over {memory:.3g} samples. Give a time of "
            f"{2 * memory / LOST:.3g} samples or more, or record for longer."
        )
    moved = slow.std(axis=0) / np.where(spread > 0, spread, 1)
    return TrendRemoval(fast.astype(x.dtype), moved, lost)


def _fit_cosines(values: np.ndarray, position: np.ndarray, length: int, count: int) -> np.ndarray:
    """Least-squares fit of cosines 1 … count to values (n, M) of mean zero; of mean zero too."""
    order = np.arange(1, count + 1)
    blocks = np.array_split(np.arange(len(values)), -(-len(values) * count // 2**22))

    def cosines(rows: np.ndarray) -> np.ndarray:
        return np.cos(np.pi * order * (position[rows, None] + 0.5) / length)

    level = sum(cosines(rows).sum(axis=0) for rows in blocks) / len(values)
    square = np.zeros((count, count))
    product = np.zeros((count, values.shape[1]))
    for rows in blocks:
        basis = cosines(rows) - level
        square += basis.T @ basis
        product += basis.T @ values[rows]
    weights = np.linalg.pinv(square, hermitian=True) @ product
    return np.concatenate([(cosines(rows) - level) @ weights for rows in blocks])
