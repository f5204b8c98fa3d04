"""A calibration as text for people, and as plain numbers for machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import scipy

from fluctua.core.likelihood.regression import ResidualReport
from fluctua.core.likelihood.sources import student_factor
from fluctua.core.text import names, with_error
from fluctua.core.words import format_count
from fluctua.insitu.calibrate.actuators import Gains, OwnGains
from fluctua.insitu.calibrate.fit import Calibration
from fluctua.insitu.recording.model import name_leaves

MAX_ROWS = 8
ALARM = 1e-3
SHARED = 0.05
"""Correlation of kicks below which a diagonal Q is good enough."""

FAR_APART = "Samples too far apart for Euler look like this too; fluctua advise FILE tests for it."
TOO_FAR = (
    "The cause is Euler's interval: what its step leaves out predicts the residuals (slope "
    "{:.2f} ± {:.2f}; 1 if so). Use --score local-linear (with --write estimate follows; "
    "else give it there too), or sample faster."
)
NOT_FAR = (
    "It is not Euler's interval: what its step leaves out does not predict the residuals (slope "
    "{:.2f} ± {:.2f})."
)


def flatten(tree: Any) -> np.ndarray:
    """Concatenate all numbers of a tree, in float64."""
    return np.concatenate(
        [np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)]
    )


def alarm_limit(comparisons: int, freedom: int | None = None) -> float:
    """|z| that the largest of so many standard normals exceeds with probability `ALARM` at most.

    freedom: of errors that are from the scatter of `freedom` + 1 values, and have Student's factor
    already.
    """
    tail = ALARM / (2 * max(1, comparisons))
    if freedom is None or freedom < 1:
        return float(scipy.stats.norm.isf(tail))
    return float(scipy.stats.t.isf(tail, freedom)) / student_factor(freedom)


def describe(c: Calibration, components: tuple[str, ...]) -> str:
    """Report of a calibration, section by section; each ends with what it means."""
    lines = (
        [f"→ this is not the model as it was set: {c.guard!r}", ""]
        if c.guard is not None and c.guard.cause
        else []
    )
    if c.stretches is not None:
        lines += [f"RECORD   {c.stretches!r}", ""]
    lines += [*_describe_drift(c), "", *_describe_noise(c, components)]
    if c.residuals is not None:
        lines += ["", *_describe_residuals(c, components), "", *_describe_bias(c)]
    else:
        lines += [
            "",
            "RESIDUALS, BIAS OF THE GRADIENT   not examined (hidden channels, several "
            "files, or --set bias=false)",
        ]
    return "\n".join(lines)


def _describe_drift(c: Calibration) -> list[str]:
    value = flatten(c.fit.theta)
    error = flatten(c.fit.stderr)
    expected = flatten(c.expected)
    robust = flatten(c.fit.robust_stderr)
    known = np.isfinite(error)
    labels = names(c.fit.theta)
    z = np.where(known, (value - expected) / np.where(known, error, 1), 0)
    kind = "trajectory" if c.stretches is None else "stretch"
    lines = [
        f"DRIFT   {known.sum()} of {len(value)} coefficients, from {c.fit.transitions:,} "
        f"increments of {format_count(c.fit.trajectories, kind)}"
    ]
    lines.append(f"  {'':<12} {'measured':>22} {'as set':>12} {'difference / error':>20}")
    order = np.argsort(-np.abs(z), kind="stable")[: min(MAX_ROWS, int(known.sum()))]
    for i in order:
        lines.append(
            f"  {labels[i]:<12} "
            f"{with_error(value[i], error[i]):>22} {expected[i]:>12.5g} {z[i]:>20.1f}"
        )
    if known.sum() > MAX_ROWS:
        lines.append(
            f"  … the {MAX_ROWS} that differ most of {known.sum()}; typical errors "
            f"{_format_typical_errors(c)}; --json has all"
        )
    if c.fit.unresolved:
        lines.append(
            f"  not determined by these data: {', '.join(c.fit.unresolved[:8])}"
            + (" …" if len(c.fit.unresolved) > 8 else "")
        )
    off = int(np.sum(np.abs(z) > alarm_limit(int(known.sum()))))
    lines.append(
        "  the system is what it was set to, within errors."
        if not off
        else f"  → {off} coefficient{'s are' if off > 1 else ' is'} not what was set. Use the "
        "measured ones: "
        "calibrate --write, then estimate --set theta=calibrated."
    )
    if off and c.transition == "euler":
        lines.append(f"    {_explain_interval(c)}")
    ratio = np.median(robust[known] / error[known]) if known.any() else 1.0
    if not 0.8 < ratio < 1.25 and c.fit.trajectories >= 20:
        lines.append(
            f"  → errors from the scatter of trajectories are {ratio:.2g} × these: the noise "
            "model is off."
        )
    return lines


def _format_typical_errors(c: Calibration) -> str:
    """Median error of each family of parameters."""
    medians = {}
    for name, error in name_leaves(c.fit.stderr).items():
        known = np.asarray(error, float)[np.isfinite(error)]
        if known.size:
            medians[name] = np.median(known)
    return ", ".join(f"{median:.2g} ({name})" for name, median in medians.items())


def _explain_interval(c: Calibration) -> str:
    """Say whether the interval is why Euler's residuals are not zero."""
    if c.defect is not None and c.defect.is_cause:
        return TOO_FAR.format(*c.defect)
    if c.defect is not None and c.defect.is_not:
        return NOT_FAR.format(*c.defect)
    return FAR_APART


def _describe_noise(c: Calibration, components: tuple[str, ...]) -> list[str]:
    n = c.noise
    q = n.diffusion
    error = n.diffusion_stderr
    model = c.model_diffusion
    noiseless = (q == 0) & (error == 0)
    z = np.where(noiseless, 0, (q - model) / np.where(noiseless, 1, error))
    lines = [
        "NOISE   diffusion Q = E[r²] / 2Δt, r what the drift does not explain of a step",
        f"  {'':<12} {'measured':>22} {'model':>12} {'difference / error':>20}",
    ]
    shown = [i for i in np.argsort(-np.abs(z), kind="stable") if not noiseless[i]]
    for i in shown[:MAX_ROWS]:
        lines.append(
            f"  {components[i]:<12} "
            f"{with_error(q[i], error[i]):>22} {model[i]:>12.5g} {z[i]:>20.1f}"
        )
    if len(shown) > MAX_ROWS:
        lines.append(f"  … the {MAX_ROWS} that differ most of {len(shown)}")
    worst = int(np.argmax(np.abs(z)))
    if np.abs(z[worst]) > alarm_limit(len(shown), n.trajectories - 1):
        lines.append(
            f"  → the noise is not the model's: {components[worst]} has "
            f"{q[worst] / model[worst]:.3g} times its Q."
        )
        if c.defect is not None and c.defect.is_cause:
            lines.append("    Euler's interval makes Q look other than it is, too.")
    else:
        lines.append("  the noise is the model's, within errors.")
    lines += _describe_noiseless(c, np.flatnonzero(noiseless), components)
    s2 = n.observation_variance
    e2 = n.observation_stderr
    if n.observation_seen and noiseless.any():  # in units of their own each
        each = ", ".join(
            f"{components[i]} {np.sqrt(max(s2[i], 0)):.3g}" for i in range(min(MAX_ROWS, len(q)))
        )
        lines.append(f"  observation noise: standard deviations {each}; taken off Q.")
        lines.append(
            "  → without that the gradient would be too small. calibrate --write: estimate then "
            "corrects for it."
        )
    elif n.observation_seen:
        size = np.sqrt(max(np.sum(s2 / e2**2) / np.sum(1 / e2**2), 0))
        share = np.median(n.quadratic_variation / q)
        lines.append(
            f"  observation noise: standard deviation {size:.3g} (weighted mean over components), "
            "taken off Q;"
        )
        lines.append(
            f"  → without that Q would be {share:.3g} times too large, and the gradient as much "
            f"too small. Estimate with --set readout_noise={size:.3g}."
        )
    else:
        bound = np.sqrt(max(np.max((s2 + 2 * e2)[~noiseless]), 0))
        which = "every component with noise" if noiseless.any() else "every component"
        lines.append(
            f"  observation noise: none seen (standard deviation below {bound:.2g} in {which})"
        )
    coloured = "the kicks are correlated over lags 2 to 8: coloured noise, or a drift that is wrong"
    lines.append(_format_verdict("white", n.whiteness, components, coloured))
    zs = n.state_dependence_z
    i, k = np.unravel_index(np.argmax(np.abs(zs)), zs.shape)
    if np.abs(zs[i, k]) > alarm_limit(zs.size, n.trajectories - 1) * student_factor(
        max(1, n.trajectories - 1)
    ):
        what = ("x", "x²")[k]
        lines.append(
            f"  → Q depends on the state: {components[i]} by {n.state_dependence[i, k]:+.1%} per "
            f"spread of {what} ({zs[i, k]:+.1f} errors)"
        )
    else:
        lines.append(
            f"  does not depend on the state (largest of {zs.size} "
            f"slopes: {np.abs(zs[i, k]):.1f} errors)"
        )
    m = len(shown)
    if m > 1:
        off = np.abs(n.correlation - np.eye(len(q)))
        a, b = np.unravel_index(np.argmax(off), off.shape)
        size = off[a, b] * np.sqrt(n.transitions)
        tail = (
            f"({components[a]} and {components[b]}: {n.correlation[a, b]:+.3f}, {size:.1f} errors)"
        )
        seen = size > alarm_limit(m * (m - 1) // 2)
        verdict = (
            "→ is shared between components"
            if seen and off[a, b] > SHARED
            else "independent in each component"
        )
        if seen and off[a, b] <= SHARED:  # an interval that is not short shares that much by itself
            verdict = "nearly independent in each component"
        lines.append(f"  {verdict} {tail}")
    return lines


def _describe_noiseless(
    c: Calibration, noiseless: np.ndarray, components: tuple[str, ...]
) -> list[str]:
    """State whether components without noise of their own move as their drift predicts."""
    if not noiseless.size or c.guard is None:
        return []
    lines = []
    for i in noiseless[:MAX_ROWS]:
        off = i in c.guard.wrong
        lines.append(
            f"  → {components[i]} has no noise of its own, and does not move as its drift predicts."
            if off
            else f"  {components[i]} has no noise of its own, and moves as its drift "
            "predicts, to the interval."
        )
    return lines


def _format_verdict(good: str, p: np.ndarray, components: tuple[str, ...], bad: str) -> str:
    worst = int(np.argmin(p))
    if p[worst] * len(p) < ALARM:
        return f"  → not {good}: {bad} (worst {components[worst]}, p = {p[worst]:.1g})"
    return f"  {good} (smallest of {len(p)} p-values: {p[worst]:.2g})"


def _describe_residuals(c: Calibration, components: tuple[str, ...]) -> list[str]:
    assert c.residuals is not None
    r = c.residuals
    lines = ["RESIDUALS   is E[r | x] zero, with the parameters as set?"]
    bad = np.flatnonzero(r.p_values * len(r.p_values) < ALARM)
    if not bad.size:
        return [*lines, f"  yes: smallest of {len(r.p_values)} p-values is {r.p_values.min():.2g}"]
    for i in bad[np.argsort(r.p_values[bad])][:MAX_ROWS]:
        z = r.coefficients[:, i] / np.where(r.stderr[:, i] > 0, r.stderr[:, i], np.inf)
        k = int(np.argmax(np.abs(z)))
        lines.append(
            f"  → {components[i]}: no (p = {r.p_values[i]:.1g}). The drift is off by "
            f"{r.relative[i]:.1%} of its size, most clearly along "
            f"{r.features[k]} ({z[k]:+.1f} errors)"
        )
    if bad.size > MAX_ROWS:
        lines.append(f"  … {bad.size} of {len(r.p_values)} components in all")
    if c.transition == "euler":
        lines.append(f"  {_explain_interval(c)}")
    return lines


def gradient_errors(c: Calibration) -> np.ndarray:
    """Bias over the gradient's own standard error, by component; NaN if not examined. (P,)"""
    assert c.residuals is not None
    assert c.estimate is not None
    return _divide(flatten(c.residuals.bias), flatten(c.estimate.stderr))


def _divide(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Divide, with 0/0 = 0: a component without a score has neither bias nor error."""
    return np.where(above == 0, 0.0, above / np.where(below > 0, below, np.nan))


def _describe_bias(c: Calibration) -> list[str]:
    assert c.residuals is not None
    assert c.estimate is not None
    r = c.residuals
    bias = flatten(r.bias)
    error = flatten(r.bias_stderr)
    labels = names(r.bias)
    g = flatten(c.estimate.gradient)
    ge = flatten(c.estimate.stderr)
    share = gradient_errors(c)
    unseen = _divide(error, ge)
    examined = np.flatnonzero(r.in_drift)
    z = np.zeros(len(bias))
    z[examined] = np.abs(bias[examined]) / np.where(error[examined] > 0, error[examined], np.inf)
    lines = ["BIAS OF THE GRADIENT   that these residuals make"]
    lines.append(
        f"  {'':<12} {'bias':>22} {'gradient':>22} {'bias / its error':>18} "
        f"{'bias / gradient error':>22}"
    )
    order = [i for i in np.argsort(-z, kind="stable") if r.in_drift[i]]
    for i in order[:MAX_ROWS]:
        of_drift = "  of its drift alone" if r.in_noise[i] else ""
        lines.append(
            f"  {labels[i]:<12} {with_error(bias[i], error[i]):>22} {with_error(g[i], ge[i]):>22} "
            f"{z[i]:>18.1f} {np.abs(share[i]):>22.2g}{of_drift}"
        )
    if len(order) > MAX_ROWS:
        lines.append(f"  … the {MAX_ROWS} clearest of {len(order)}")
    lines += _list_unexamined(r, labels)
    if not len(examined):
        return lines
    clear = [i for i in order if z[i] > scipy.stats.t.isf(ALARM / (2 * len(order)), r.groups - 1)]
    if clear:
        worst = max(clear, key=lambda i: np.nan_to_num(np.abs(share[i])))
        many = f"{len(clear)} component{'s' if len(clear) > 1 else ''}"
        lines.append(
            f"  → {many} of the gradient cannot be trusted with these parameters: "
            f"{_join_names([labels[i] for i in clear])}; the worst is {labels[worst]}, biased by "
            f"{np.abs(share[worst]):.2g} times its own error."
        )
    else:
        worst = max(examined, key=lambda i: np.nan_to_num(unseen[i]))
        lines.append(
            f"  no bias is seen; one of about {unseen[worst]:.2g} times the gradient's own error "
            f"would not have been in {labels[worst]}, the worst, and of "
            f"{np.nanmedian(unseen[examined]):.2g} times in the median one."
        )
    return lines


def _join_names(items: list[str]) -> str:
    return ", ".join(items[:MAX_ROWS]) + (", …" if len(items) > MAX_ROWS else "")


def _list_unexamined(r: ResidualReport, labels: list[str]) -> list[str]:
    """Name components that the residuals of the drift do not test, and those without a score."""
    lines = []
    reasons = {
        "not examined, parameters of the noise alone": r.in_noise & ~r.in_drift,
        "no bias, because they have no score": ~r.in_noise & ~r.in_drift,
    }
    for reason, which in reasons.items():
        named = [labels[i] for i in np.flatnonzero(which)]
        if named:
            lines.append(f"  {reason}: {_join_names(named)}")
    return lines


def describe_knobs(gains: Mapping[str, OwnGains]) -> str:
    """Table of offset and gain of every knob, by family, with a test that it is a line."""
    lines = []
    bent = []
    for name, g in gains.items():
        lines.append(f"{name:<10} {'offset':>20} {'gain':>20} {'a line? p':>12}")
        for k in range(len(g.gain)):
            p = "" if np.isnan(g.p_values[k]) else f"{g.p_values[k]:.2g}"
            bent += [f"{name}[{k}]"] if p and g.p_values[k] * len(g.gain) < ALARM else []
            lines.append(
                f"  {k:<8} {with_error(g.offset[k], g.offset_stderr[k]):>20} "
                f"{with_error(g.gain[k], g.gain_stderr[k]):>20} {p:>12}"
            )
        lines.append("")
    if bent:
        lines.append(
            f"→ not linear: {', '.join(bent)}. Give it a smaller range, or a model of its curve.\n"
        )
    return "\n".join(lines[:-1] if not bent else lines)


def describe_gains(g: Gains, max_rows: int = 16) -> str:
    """Table of dθ/d(setting), the clearest first."""
    z = np.nan_to_num(np.abs(g.gain) / np.where(g.stderr > 0, g.stderr, np.inf))
    lines = [
        "ACTUATOR GAINS   dθ / d(setting)",
        f"  {'':<12} {'setting':<12} {'gain':>22} {'linear? p':>10}",
    ]
    order = np.argsort(-z, axis=None, kind="stable")[:max_rows]
    for p, s in zip(*np.unravel_index(order, z.shape), strict=True):
        p_value = "" if np.isnan(g.p_values[p]) else f"{g.p_values[p]:.2g}"
        lines.append(
            f"  {g.parameters[p]:<12} {g.settings[s]:<12} "
            f"{with_error(g.gain[p, s], g.stderr[p, s]):>22} {p_value:>10}"
        )
    if z.size > max_rows:
        lines.append(f"  … the {max_rows} clearest of {z.size}; --json has all")
    return "\n".join(lines)
