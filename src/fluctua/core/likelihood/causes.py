"""The most likely cause of a deviation of the residuals, as a sentence."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fluctua.core.likelihood.alternatives import Finding

Words = Callable[[Finding, int, int], str]


def describe_finding(
    finding: Finding, components: np.ndarray, columns: np.ndarray | None = None
) -> str:
    """The likely cause of a finding, one sentence.

    components: numbers of those tested. columns: of those that f is of, if these are others.
    """
    family = finding.family.split(" ")[0]
    if finding.family in ("pairs", "v of all", "step v of all", "drift of all"):
        return WORDS[finding.family](finding, finding.row, finding.column)
    i = int(components[finding.row])
    columns = components if columns is None else columns
    j = finding.column if family == "step" else int(columns[finding.column])
    return WORDS.get(finding.family, WORDS.get(family, WORDS["linear"]))(finding, i, j)


def _show_size(finding: Finding) -> str:
    return (
        f"({abs(finding.statistic):.1f} standard errors, {100 * finding.effect:.2g} % of the drift)"
    )


def _offset(finding: Finding, i: int, j: int) -> str:
    return (
        f"The drift of component {i} has a constant part that the process does not have "
        f"{_show_size(finding)}: a force, or a channel of another gain, sign or offset that it is "
        "coupled to."
    )


def _linear(finding: Finding, i: int, j: int) -> str:
    if i == j:
        size = _show_size(finding)
        return f"Component {i} returns at another rate than its drift predicts {size}."
    return (
        f"The drift of component {i} depends on component {j} in another way than in the process "
        f"{_show_size(finding)}: channels that are swapped, rotated, conjugated, of another "
        "sign or gain, a delay, or a coupling that is missing."
    )


def _drift(finding: Finding, i: int, j: int) -> str:
    which = "every component" if finding.family == "drift of all" else f"component {i}"
    factor = 1 + np.sign(finding.statistic) * finding.effect
    return (
        f"The drift of {which} is about {factor:.3g} times what the process says "
        f"({abs(finding.statistic):.1f} standard errors): a rate, a parameter or the unit of time "
        "is another."
    )


def _nonlinear(degree: str) -> Words:
    def words(finding: Finding, i: int, j: int) -> str:
        return (
            f"The drift of component {i} has a {degree} term in component {j} that the process "
            f"does not have {_show_size(finding)}: the structure of the drift is another."
        )

    return words


def _describe_delay(finding: Finding, i: int, j: int) -> str:
    own = "its own" if i == j else f"component {j}'s"
    return (
        f"Component {i} depends on {own} last {finding.family.split(' ')[1]} samples "
        f"{_show_size(finding)}: a channel is delayed or shifted against the others, or filtered."
    )


def _gain(finding: Finding, i: int, j: int) -> str:
    v = 1 + np.sign(finding.statistic) * finding.effect
    which = "every component" if finding.family == "v of all" else f"component {i}"
    return (
        f"The noise amplitude of {which} is {np.sqrt(max(v, 0)):.3g} times what `noise` gives "
        f"({abs(finding.statistic):.1f} standard errors): the gain of a detector, a unit, or the "
        "noise is another."
    )


def _variance(finding: Finding, i: int, j: int) -> str:
    return (
        f"The noise of component {i} depends on component {j} in another way than `noise` gives "
        f"({abs(finding.statistic):.1f} standard errors, {100 * finding.effect:.2g} % of its "
        "variance): multiplicative noise, or a channel that saturates."
    )


def _correlated(finding: Finding, i: int, j: int) -> str:
    return (
        f"The kicks of components {i} and {j} are correlated ({_correlation(finding)}): "
        "crosstalk, rotated channels, or noise that they share."
    )


def _lag(finding: Finding, i: int, j: int) -> str:
    samples = finding.family.split(" ")[1]
    if i != j:
        return (
            f"Kicks of component {i} follow those of component {j} after {samples} samples "
            f"({_correlation(finding)}): a delay between the channels, or crosstalk."
        )
    why = (
        "noise of the readout, which is no part of the process (use fl.Observed with its "
        "`noise`, or --set readout_noise= for a file)"
        if finding.statistic < 0
        else "a filter or an average in the detector, or noise that is not white"
    )
    return (
        f"Kicks of component {i} repeat after {samples} samples ({_correlation(finding)}): {why}."
    )


def _correlation(finding: Finding) -> str:
    return (
        f"correlation {np.sign(finding.statistic) * finding.effect:.2g}, "
        f"{abs(finding.statistic):.1f} standard errors"
    )


def _step(finding: Finding, i: int, j: int) -> str:
    return (
        f"Component {i} jumps at step {j} of those looked at, by {finding.effect:.2g} times its "
        "noise on average: a record that is shifted or cut together, or a glitch."
    )


def _step_variance(finding: Finding, i: int, j: int) -> str:
    held = finding.statistic < 0
    which = "the states" if finding.family == "step v of all" else f"component {i}"
    return f"The noise of {which} is another at step {j} of those looked at: " + (
        "a channel that is held, stuck, delayed or clipped."
        if held
        else "a glitch, or a record that is cut together."
    )


def _pairs(finding: Finding, i: int, j: int) -> str:
    return (
        f"Trajectories {i} and {j} of those looked at have the same noise: a buffer that "
        "was read twice."
    )


WORDS: dict[str, Words] = {
    "offset": _offset,
    "linear": _linear,
    "drift": _drift,
    "drift of all": _drift,
    "square": _nonlinear("quadratic"),
    "cube": _nonlinear("cubic"),
    "radial": _nonlinear("cubic"),
    "moved": _describe_delay,
    "v": _gain,
    "v of all": _gain,
    "variance": _variance,
    "together": _correlated,
    "lag": _lag,
    "step": _step,
    "step v": _step_variance,
    "step v of all": _step_variance,
    "pairs": _pairs,
}
