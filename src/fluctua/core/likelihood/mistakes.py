"""The cause of a v that is not 1: a mistake that can be undone, or its growth with the interval."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

import jax
import numpy as np

from fluctua.core import check
from fluctua.core.likelihood import alternatives
from fluctua.core.likelihood.alternatives import KNOWN, Finding
from fluctua.core.likelihood.causes import describe_finding
from fluctua.core.likelihood.report import Residuals, is_wrong
from fluctua.core.likelihood.sample import Sample, collect_sums, reduce_squares, standardise_states
from fluctua.core.trajectories import Trajectories

FEW_TIMES = 2.0
"""v up to which its dependence on the state is separable from v itself."""

UNITS = (1e-9, 1e-6, 1e-3, 1e3, 1e6, 1e9)

NEARLY = 2.0
"""Factor by which v may be off 1 in another unit that explains the residuals best."""

EVIDENCE = 1.0
"""Log-likelihood per step and component by which that unit must be better than another noise."""

MAX_SWAPS = 12
"""Components of which every pair is tried."""


def explain_residuals(
    residuals: Residuals, sample: Sample, data: Trajectories, findings: list[Finding]
) -> Residuals:
    """The residuals with the cause of a v that is not 1.

    findings: what the interval does not account for, the largest first.
    """
    known = np.isfinite(residuals.v) & np.isfinite(residuals.stderr)
    if not known.all():
        which = np.flatnonzero(~known)
        plural = "s" * (len(which) > 1)
        cause = (
            f"The residuals of component{plural} {check.list_indices(which)} are not finite: the "
            f"drift or the noise is not, or they exceed what {sample.x.dtype} can hold (a unit)."
        )
        return residuals._replace(cause=cause)
    x = sample.x
    t = sample.t
    if x.shape[1] > 2:
        coarse = standardise_states(sample, sample.law, x[:, ::2], t[::2])
        residuals = residuals._replace(doubled=reduce_squares(sample, coarse, x[:, ::2], t[::2])[0])
    whole = np.shape(data.x)[0] == len(t) and not jax.tree.leaves(sample.context)
    turned = np.asarray(data.x).swapaxes(0, 1)[sample.rows].astype(x.dtype) if whole else None
    fits = [change.what for change in _undo_mistakes(x, t, turned) if _fits(sample, change)]
    if fits:
        return residuals._replace(cause=f"They fit {' or '.join(fits)}.")
    unit = _find_unit(residuals, sample)
    if unit:
        return residuals._replace(cause=unit)
    v = residuals.v[sample.components]
    named = [one for one in findings if _explains_excess(one, v, residuals.steps)]
    if not named and v.max(initial=0) < FEW_TIMES:  # what a gain alone would not leave
        named = [one for one in findings if one.family.startswith(("variance", "lag"))]
    cause = (
        describe_finding(named[0], sample.components)
        if named
        else _describe_growth(residuals, bool(findings))
    )
    return residuals._replace(cause=cause)


def _fits(sample: Sample, change: _Mistake) -> bool:
    """Whether nothing is wrong with the residuals once a mistake is undone."""
    made = standardise_states(sample, sample.law, change.x, change.t)
    if is_wrong(*reduce_squares(sample, made, change.x, change.t)).any():
        return False
    drift = np.sqrt(np.mean(made.drift[:, sample.components] ** 2, axis=0))
    return not alternatives.judge(collect_sums(sample._replace(x=change.x), made), drift, KNOWN)


def _find_unit(residuals: Residuals, sample: Sample) -> str:
    """A unit in which the model is nearly right and the drift fits; empty if there is none.

    It is compared with a noise of another amplitude, which has the log-likelihood −(1 + ln v)/2 per
    step and component. A unit has −v'/2 and the logarithm of its Jacobian; without a drift the two
    are alike.
    """
    own = sample.components
    other_noise = -0.5 * (1 + np.log(np.maximum(residuals.v[own], np.finfo(float).tiny)))
    best = EVIDENCE
    cause = ""
    for change in _change_units(sample.x, sample.t):
        made = standardise_states(sample, sample.law, change.x, change.t)
        v = reduce_squares(sample, made, change.x, change.t)[0]
        gain = float(np.mean(change.log_jacobian - v[own] / 2 - other_noise))
        if gain > best and np.all((v > 1 / NEARLY) & (v < NEARLY)):
            best = gain
            shown = ", ".join(f"{one:.3g}" for one in v[:5])
            cause = f"They nearly fit {change.what}: {residuals.law} is then {shown}."
    return cause


def _explains_excess(finding: Finding, v: np.ndarray, steps: int) -> bool:
    """Whether a term that the drift lacks, or one jump, makes most of what v is too large by.

    That is, whether T²/V is more than half of n(v − 1).
    """
    if finding.family not in (*alternatives.OF_MEAN, "step"):
        return False
    excess = v[finding.row] - 1
    # T²/V is in units of the residuals' own variance v, that of a step in those of the noise
    unit = 1 if finding.family == "step" else v[finding.row]
    return excess > 0 and finding.statistic**2 * unit > steps * excess / 2


def _describe_growth(residuals: Residuals, unexplained: bool) -> str:
    """Describe the deviation of v and its change with the interval.

    unexplained: whether residuals deviate in a way that a coarse interval does not account for.
    """
    parts = residuals.wrong
    v = residuals.v
    unmoved = [i for i in parts if i in residuals.noiseless]
    if unmoved:
        i = unmoved[0]
        # what an Euler step leaves out grows as Δ³
        readout = residuals.doubled is not None and residuals.doubled[i] < v[i] / 4
        return (
            f"Component {i} has no noise of its own and does not move as its drift predicts: its "
            f"residual is {np.sqrt(v[i]):.3g} times what the interval explains. "
            + (
                "It looks like noise of the readout."
                if readout
                else "Its drift, or a unit, is another."
            )
        )
    which = (
        "every component"
        if len(parts) == len(v)
        else f"component{'s' * (len(parts) > 1)} {check.list_indices(parts)}"
    )
    growth = np.nan
    # twice the interval has half the steps: growth is known to about 2 stderr/|v − 1|
    if (
        residuals.doubled is not None
        and np.median(2 * residuals.stderr[parts] / np.abs(v[parts] - 1)) < 0.2
    ):
        growth = float(np.median((residuals.doubled[parts] - 1) / (v[parts] - 1)))
    factor = ", ".join(f"{np.sqrt(v[i]):.3g}" for i in parts[:5])
    if 1.25 < growth < 3 and not unexplained:
        return (
            f"The deviation of {which} doubles with the interval: the sampling is too coarse for "
            "Euler steps (use score=local_linear_score, or sample faster), or the "
            "drift is wrong."
        )
    if 0.3 < growth < 0.7:
        return (
            f"The deviation of {which} halves when the interval doubles: noise of the readout, "
            "which is no part of the process (correct for it, or sample more slowly with "
            "score=local_linear_score)."
        )
    return (
        f"The noise amplitude of {which} is {factor} times what `noise` gives, or the state or the "
        "time is in another unit than the process."
    )


class _Mistake(NamedTuple):
    """One mistake undone: states and times without it.

    what: completes "They fit …".
    log_jacobian: of a unit, per component: ln of the change of a step in units of its noise.
    """

    what: str
    x: np.ndarray
    t: np.ndarray
    log_jacobian: float = 0.0


def _undo_mistakes(x: np.ndarray, t: np.ndarray, turned: np.ndarray | None) -> Iterator[_Mistake]:
    """States and times with one mistake undone each: a unit, swapped axes or components, a sign."""
    if turned is not None:
        yield _Mistake("as (time, trajectory, state): pass x.swapaxes(0, 1)", turned, t)
    yield from _change_units(x, t)
    yield _Mistake("if time is reversed", x[:, ::-1], t)
    size = x.shape[2]
    if size > MAX_SWAPS:
        return
    for i, j in combinations(range(size), 2):
        order = np.arange(size)
        order[[i, j]] = j, i
        yield _Mistake(f"if components {i} and {j} are swapped", x[..., order], t)
    for i in range(size):
        sign = np.where(np.arange(size) == i, -1, 1).astype(x.dtype)
        yield _Mistake(f"if component {i} has the other sign", x * sign, t)


def _change_units(x: np.ndarray, t: np.ndarray) -> Iterator[_Mistake]:
    """States or times in another unit."""
    for factor in UNITS:
        what = f"if the state is multiplied by {factor:g} (another unit)"
        yield _Mistake(what, x * factor, t, np.log(factor))
    for factor in (*UNITS, 60.0, 1 / 60):
        what = f"if the times are multiplied by {factor:g} (another unit)"
        yield _Mistake(what, x, t * factor, -np.log(factor) / 2)
