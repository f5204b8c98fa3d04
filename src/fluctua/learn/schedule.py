"""When to spend more trajectories an iteration, and from where to go on (Optimization Details).

`values` is the history of J so far, one number an iteration: values[i] belongs to iteration i, and l = len(values)
is the iteration to come. W is the window. Each rule of the paper is one function; `escalation` puts them together.

The paper leaves three things open, and this is how they are read. A falling trend has stopped improving too, so
only a trend that is significantly positive holds escalation off. A breakpoint is admissible if it lies between
the start of the fit and l − W, since the plateau was seen from there on. A tier has to be W iterations old before
it is judged: what an earlier, smaller ensemble did says nothing about it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

WINDOW = 100
"""W, iterations."""
BUDGETS = (*range(1_000, 20_001, 1_000), 25_000, 30_000)
"""The paper's ensemble sizes."""
FIT_FROM, FIT_TO = 12, 2
"""The quadratic is fitted on [l − 12W, l − 2W]."""


class Trend(NamedTuple):
    """slope: of the least-squares line, per iteration. stderr: its standard error, from the residuals."""

    slope: float
    stderr: float


def trend(values: Sequence[float] | np.ndarray) -> Trend:
    """The straight line through `values`, at least three of them."""
    y = np.asarray(values, float)
    if y.ndim != 1 or len(y) < 3:
        raise ValueError(f"a trend and its error need a sequence of at least 3 values; got shape {y.shape}.")
    x = np.arange(len(y)) - (len(y) - 1) / 2
    spread = x @ x
    slope = float(x @ y / spread)
    residual = y - y.mean() - slope * x
    return Trend(slope, math.sqrt(float(residual @ residual) / (len(y) - 2) / spread))


def is_rising(values: Sequence[float] | np.ndarray, confidence: float = 0.95) -> bool:
    """Whether the slope is positive beyond its two-sided confidence interval (Student's t)."""
    slope, stderr = trend(values)
    return slope > student_quantile((1 + confidence) / 2, len(values) - 2) * stderr


def onset(values: Sequence[float] | np.ndarray, window: int = WINDOW) -> int | None:
    """Iteration at which the plateau began: where the earlier rise, extrapolated, meets the plateau's mean.

    A parabola is fitted to [l − 12W, l − 2W]; of its intersections with the mean of the last W values the one
    where it rises counts. None if there is none, or none between l − 12W and l − W.
    """
    l, level = len(values), float(np.mean(values[-window:]))  # noqa: E741, the paper's letter
    begin, end = l - FIT_FROM * window, l - FIT_TO * window
    if begin < 0:
        return None
    x = np.arange(begin, end)
    middle, half = (begin + end - 1) / 2, (end - begin) / 2  # in units of half the span the fit is well conditioned
    crossing = rising_root(*np.polyfit((x - middle) / half, np.asarray(values[begin:end], float) - level, 2))
    if crossing is None:
        return None
    crossing_at = middle + half * crossing
    return math.floor(crossing_at) if begin <= crossing_at <= l - window else None


def rising_root(a: float, b: float, c: float) -> float | None:
    """The x with ax² + bx + c = 0 and 2ax + b > 0, or None."""
    discriminant = b * b - 4 * a * c
    if discriminant <= 0:
        return None  # never met, or only touched: there it does not rise
    root = math.sqrt(discriminant)  # the slope 2ax + b at the root we want
    # two forms of one number: each is used where it subtracts nothing
    return -2 * c / (b + root) if b >= 0 else (root - b) / (2 * a) if a != 0 else None


def escalation(
    values: Sequence[float] | np.ndarray, tier_start: int, *, window: int = WINDOW, confidence: float = 0.95
) -> int | None:
    """None while J rises; else the iteration from which to go on with the next ensemble size.

    tier_start: iteration at which the present ensemble size began. The answer is `len(values)` for going on in
    place, before the fit window exists; otherwise the plateau's onset, or l − W where no onset is admissible; or
    `tier_start` if that lies within W of it.
    """
    l = len(values)  # noqa: E741
    if l - tier_start < window or is_rising(values[-window:], confidence):
        return None
    if l < FIT_FROM * window:
        return l
    begin_of_plateau = onset(values, window)
    breakpoint_ = l - window if begin_of_plateau is None else begin_of_plateau
    return tier_start if breakpoint_ < tier_start + window else breakpoint_


def student_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t by Hill's expansion about the normal one: to 1e-3 from 8 degrees on, 1e-5 from 30."""
    z, n = NormalDist().inv_cdf(probability), degrees
    g1 = (z**3 + z) / 4
    g2 = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    g3 = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    g4 = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + g1 / n + g2 / n**2 + g3 / n**3 + g4 / n**4
