"""Numbers as text for people."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

MIN_FOR_COVERAGE = 50
"""Samples from which intervals of 95 % are known to cover (`benchmarks/intervals.py`); with fewer
they are widened.
"""


def with_error(value: float, error: float) -> str:
    """`0.3121 ± 0.0042`: as many digits as two figures of the error justify.

    >>> with_error(0.312123, 0.0042)
    '0.3121 ± 0.0042'
    """
    if not np.isfinite(error) or error <= 0:
        return f"{value:.6g}" + (" ± 0" if error == 0 else " ± ?")
    digits = 1 - int(np.floor(np.log10(error)))
    if 0 <= digits <= 8:
        return f"{value:.{digits}f} ± {error:.{digits}f}"
    return f"{value:.3g} ± {error:.2g}"


def names(theta: Any) -> list[str]:
    """`kappa[3, 1]` and the like for every component, in the order of the flattened parameters."""
    labels = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(theta):
        stem = jax.tree_util.keystr(path, simple=True, separator=".") or "theta"
        shape = np.shape(leaf)
        labels += [stem + (str(list(i)) if shape else "") for i in np.ndindex(*shape)]
    return labels


def describe_estimate(estimate: Any, max_rows: int = 12) -> str:
    """The estimate as a table of the components that stand out most from their errors."""

    def flat(tree):
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])

    g = flat(estimate.gradient)
    error = flat(estimate.stderr)
    known = np.isfinite(g)  # what cannot be estimated is NaN
    z = np.where(known, np.abs(g) / np.where(error > 0, error, np.inf), -1)
    value = with_error(float(estimate.value), float(estimate.value_stderr))
    intervals = estimate.interval is not None and estimate.value_interval is not None
    span = ""
    if intervals:
        low, high = (flat(side) for side in estimate.interval)
        least, greatest = estimate.value_interval
        span = _between(float(least), float(greatest), float(estimate.value_stderr))
    lines = [f"J = {value}{span}   ({estimate.count:,} trajectories)"]
    if estimate.stopped is not None:
        lines.append(describe_stops(estimate.stopped))
    if estimate.groups is not None:
        lines.append(describe_groups(estimate.groups))
    shown = np.sort(np.argsort(-z, kind="stable")[: min(max_rows, int(known.sum()))])
    labels = names(estimate.gradient)
    room = max((len(labels[i]) for i in shown), default=0)
    for i in shown:
        span = _between(float(low[i]), float(high[i]), float(error[i])) if intervals else ""
        lines.append(
            f"  ∂J/∂{labels[i]:<{room}} = {with_error(float(g[i]), float(error[i]))}{span}"
        )
    if known.sum() > max_rows:
        lines.append(
            f"  … {known.sum()} components in all; shown: the {max_rows} furthest from zero in "
            "standard errors"
        )
    if estimate.groups is not None and intervals:
        degrees = len(estimate.groups.group) - 1
        lines.append(
            f"  ±: standard error between devices; […]: 95 %, Student's with {degrees} "
            "degrees of freedom"
        )
    elif intervals and estimate.batches is not None:
        lines.append(
            f"  ±: standard error from {estimate.batches} batches of trajectories; […]: 95 %, "
            "corrected for skewness and tails of the batches (Hall, Student)"
        )
    elif intervals and estimate.count < MIN_FOR_COVERAGE:
        lines.append(
            f"  ±: standard error; […]: 95 %, widened, because {estimate.count} samples show "
            "little of their skewness and tails.\n"
            f"  Of very skewed ones fewer than {MIN_FOR_COVERAGE} cover less: take more"
        )
    elif intervals:
        lines.append(
            "  ±: standard error; […]: 95 %, corrected for skewness and tails of the samples "
            "(Hall, Student)"
        )
    elif 0 < estimate.count < MIN_FOR_COVERAGE:
        lines.append(
            f"  ±: standard error; with fewer than {MIN_FOR_COVERAGE} samples ±1.96 of it can "
            "hold as little as 60 %"
        )
    return "\n".join(lines)


MANY_UNSTOPPED = 0.05
"""Fraction of unstopped trajectories from which an estimate explains the effect of the horizon."""


def describe_stops(stopped: float) -> str:
    """How many trajectories stopped, and the effect of the horizon on J."""
    text = f"  {stopped:.1%} of the trajectories stopped before the horizon"
    if 1 - stopped < MANY_UNSTOPPED:
        return text
    return text + f"; {1 - stopped:.1%} reached it: J is of min(τ, T). Compare with a later horizon"


def describe_groups(groups: Any) -> str:
    """How much devices differ beside the noise of their trajectories, and how many are enough."""
    tau = np.sqrt(groups.returns.between)
    sigma = np.sqrt(groups.returns.within)
    text = (
        f"  {len(groups.group)} devices: J differs by {tau:.2g} between them and by {sigma:.2g} "
        "between trajectories"
    )
    if tau > 0:
        enough = max(1, int(np.ceil(10 * (sigma / tau) ** 2)))
        text += f"; {enough:,} trajectories per device are enough for a tenth of that variance"
    return text + f"\n  of these devices alone J is known to ± {float(groups.value_stderr):.2g}"


def _between(low: float, high: float, error: float) -> str:
    """`   [0.3040, 0.3211]`, with the digits of the error."""
    digits = 1 - int(np.floor(np.log10(error))) if np.isfinite(error) and error > 0 else -1
    form = f".{digits}f" if 0 <= digits <= 8 else ".3g"
    return f"   [{low:{form}}, {high:{form}}]"
