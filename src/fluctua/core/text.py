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


MANY_UNSTOPPED = 0.05
"""Fraction of unstopped trajectories from which an estimate explains the effect of the horizon."""


def describe_stops(stopped: float) -> str:
    """Describe how many trajectories stopped, and the effect of the horizon on J."""
    text = f"  {stopped:.1%} of the trajectories stopped before the horizon"
    if 1 - stopped < MANY_UNSTOPPED:
        return text
    return text + f"; {1 - stopped:.1%} reached it: J is of min(τ, T). Compare with a later horizon"


def describe_groups(groups: Any) -> str:
    """Describe how much devices differ beside their noise, and how many are enough."""
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


def format_interval(low: float, high: float, error: float) -> str:
    """`[0.3040, 0.3211]`, with the digits of the error."""
    digits = 1 - int(np.floor(np.log10(error))) if np.isfinite(error) and error > 0 else -1
    form = f".{digits}f" if 0 <= digits <= 8 else ".3g"
    return f"[{low:{form}}, {high:{form}}]"
