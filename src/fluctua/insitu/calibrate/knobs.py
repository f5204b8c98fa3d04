"""A network with knobs as a `Process` of its settings, with what is known of the knobs as context.

    ω = offset + gain · ω_set,    κ = offset + gain · κ_set,    dψ = [−i(ω + κ + δκ(t))ψ − Γψ + f]
    dt + √(2Q) dW

Where there are knobs for χ, the same of χ|ψ|²ψ; δκ is the modulation that was recorded with a
trajectory, if any.

These values travel with the trajectories that it belongs to (`context`), so those of a drifting
instrument can be found anew between two iterations and nothing is compiled again. They are fitted
as from any recording (`fit`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from fluctua.core.arrays import Array, Params
from fluctua.core.knob import read_knob
from fluctua.core.likelihood.drift import fit_drift
from fluctua.core.process import Process
from fluctua.core.text import with_error
from fluctua.core.trajectories import Trajectories
from fluctua.insitu.calibrate.actuators import OwnGains, knob_gains
from fluctua.insitu.calibrate.fit import SystemFit, fit_system
from fluctua.insitu.calibrate.network import LinearDrift, LinearModel, linear_model
from fluctua.insitu.calibrate.report import describe_knobs
from fluctua.tcmt.tasks import Task

KNOBS = ("omega", "kappa")
KERR = (*KNOBS, "chi")
REST = ("decay", "drive_re", "drive_im")

KnobValues = dict[str, Array]
"""omega_offset, omega_gain (N,), kappa_offset, kappa_gain (B,), chi_offset, chi_gain (N,) where χ
has knobs, decay: Γ (N,), drive_re, drive_im (drives,), diffusion: Q of either quadrature (N,),
readout: s² of either (N,), readout_seen: 1 if it is more than nothing, else 0.
omega_stderr, … drive_im_stderr: how well all probes together knew ω, κ, Γ and the drive; `follow`
does without. """

MIN_GAIN = 0.1
"""Knobs with less effect are not used to correct: their gain is known too badly, and its inverse is
large.
"""
TRUST = 3.0
"""A batch that knows a parameter worse than the probes did by more than this factor is followed
more slowly.
"""


def families(values: KnobValues) -> tuple[str, ...]:
    """The families that the knobs of a calibration turn."""
    return KERR if "chi_offset" in values else KNOBS


def parameters(values: KnobValues, settings: Mapping[str, Array]) -> dict[str, Array]:
    """ω and κ at these settings, and χ where it has knobs."""
    return {name: read_knob(values, name).set(settings[name]) for name in families(values)}


def settings(
    values: KnobValues, theta: Mapping[str, Array], limits: Mapping[str, tuple[float, float]]
) -> dict[str, Array]:
    """The settings at which ω and κ are θ, as near as the knobs go: u = (θ − offset)/gain within
    limits.

    A gain below `MIN_GAIN` is not divided by: the knob stays where it has no effect worth the
    noise.
    """

    def at(name: str) -> Array:
        offset, gain = (jnp.asarray(part) for part in read_knob(values, name))
        works = jnp.abs(gain) > MIN_GAIN
        u = jnp.where(works, (theta[name] - offset) / jnp.where(works, gain, 1), theta[name])
        return jnp.clip(u, *limits[name]).astype(jnp.asarray(theta[name]).dtype)

    return {name: at(name) for name in theta}


@dataclass(frozen=True)
class KnobDrift:
    """μ of a calibrated network: (settings, x, t, calibration) -> (2N,)."""

    linear: LinearDrift

    def __call__(self, theta: Params, x: Array, t: Array, context: KnobValues) -> Array:
        """dψ/dt as quadratures. (2N,)"""
        rest = {name: context[name].astype(x.dtype) for name in REST}
        return self.linear({**parameters(context, theta), **rest}, x, t, context)


def _noise(theta: Params, x: Array, t: Array, context: KnobValues) -> Array:
    """The measured amplitude on both quadratures. (2N,)"""
    return jnp.tile(jnp.sqrt(2 * context["diffusion"]), 2)


def process(task: Task) -> Process:
    """A network with knobs. θ: settings, {"omega": (N,), "kappa": (B,)}, and chi (N,) where it has
    knobs.

    context: `KnobValues`, and of a task with modulation what was recorded of it.
    """
    return Process(
        KnobDrift(LinearDrift(task.network, task.drives, task.frame, task.modulation)), _noise
    )


def fit_runs(
    task: Task, runs: list[tuple[Params, Trajectories]], *, kerr: bool = False
) -> list[SystemFit]:
    """Drift and noise at each of several settings. kerr: whether χ has knobs."""
    return [
        fit_system(trajectories, *_model(task, settings, kerr)) for settings, trajectories in runs
    ]


def fit_knobs(
    task: Task, runs: list[tuple[Params, Trajectories]], fits: list[SystemFit] | None = None
) -> KnobValues:
    """What the knobs do, from trajectories at several settings, at least two different ones of
    every knob.

    fits: of these runs, if there are any yet.
    """
    fits = fit_runs(task, runs) if fits is None else fits
    lines = gains(runs, fits)
    _determined(lines)
    known = {name: _together(fits, name) for name in (*lines, *REST)}
    mean = {name: known[name][0] for name in REST} | {
        f"{name}_stderr": error for name, (_, error) in known.items()
    }
    mean["diffusion"] = np.mean([_diffusion(f) for f in fits], axis=0)
    each = [f.noise.observation_variance.reshape(2, -1) for f in fits]
    s2 = np.maximum(
        np.mean(each, axis=(0, 1)), 0
    )  # after the mean: chance below zero balances chance above
    mean |= {
        "readout": s2,
        "readout_seen": np.array(float(any(f.noise.observation_seen for f in fits))),
    }
    return {
        f"{name}_{part}": getattr(line, part)
        for name, line in lines.items()
        for part in ("offset", "gain")
    } | mean


def _together(fits: list[SystemFit], name: str) -> tuple[np.ndarray, np.ndarray]:
    """The weighted mean of a family over several fits, and its error; what a fit left open
    weighs nothing.
    """
    weight = np.stack([np.asarray(f.drift.stderr[name], float) for f in fits]) ** -2
    total = weight.sum(axis=0)
    if not np.all(total > 0):
        raise ValueError(
            f"{name}[{int(np.argmin(total))}] is not determined by any of the {len(fits)} probes: "
            "too little light reaches it. Raise the drive, or probe at other settings."
        )
    return np.sum(
        weight * np.stack([np.asarray(f.drift.theta[name]) for f in fits]), axis=0
    ) / total, total**-0.5


def _determined(lines: dict[str, OwnGains]) -> None:
    """Refuse gains whose signs are unknown: the training could walk down as well as up."""
    for name, line in lines.items():
        # NaN where a probe left the parameter open
        clear = np.abs(line.gain) > 2 * line.gain_stderr
        if not np.all(np.isfinite(line.gain)) or 2 * clear.sum() < clear.size:
            k = int(np.argmin(np.isfinite(line.gain) & clear))
            raise ValueError(
                f"the probes do not tell what the knobs of {name} do: the gain of knob {k} is "
                f"{line.gain[k]:.2g} ± {line.gain_stderr[k]:.2g}. Probe at settings further "
                "apart, or with more trajectories."
            )


def gains(runs: list[tuple[Params, Trajectories]], fits: list[SystemFit]) -> dict[str, OwnGains]:
    """What each knob does, family by family."""
    turned = KERR if "chi" in fits[0].drift.theta else KNOBS
    return knob_gains(
        [{name: s[name] for name in turned} for s, _ in runs], [f.drift for f in fits]
    )


def follow(
    values: KnobValues,
    task: Task,
    settings: Params,
    trajectories: Trajectories,
    *,
    rate: float = 0.3,
) -> KnobValues:
    """Offsets, loss and drive moved towards what a new batch says, gains and noise kept: a slow
    drift is followed.

    To be used for the batches after this one. A batch that its own values were moved by is no
    longer independent of it. What the batch leaves open stays, and what it knows far worse than the
    probes did (a dark batch) moves by less than `rate`, in proportion to 1/error².
    """
    turned = families(values)
    model = _model(task, settings, "chi" in turned)
    dt = float(np.diff(np.asarray(trajectories.t, float)).mean())
    weight = np.tile(np.asarray(values["diffusion"] + values["readout"] / dt), 2)
    expected = parameters(values, {name: np.asarray(settings[name]) for name in turned})
    start = {**model.theta, **expected, **{name: np.asarray(values[name]) for name in REST}}
    seen = bool(values["readout_seen"])
    fit = fit_drift(
        trajectories, model.process, start, diffusion=weight, noisy_states=seen, most_passes=1
    )

    def step(name: str) -> np.ndarray:
        error = np.asarray(fit.stderr[name], float)
        trusted = TRUST * np.asarray(values.get(f"{name}_stderr", np.inf))
        known = np.isfinite(
            error
        )  # where not, the batch does not determine it, and its value means nothing
        share = np.minimum(1, trusted / np.where(known & (error > 0), error, 1)) ** 2 * known
        return rate * share * (np.asarray(fit.theta[name]) - start[name])

    moved = {f"{name}_offset": values[f"{name}_offset"] + step(name) for name in turned}
    moved |= {name: values[name] + step(name) for name in REST}
    return {**values, **moved}


def describe(task: Task, runs: list[tuple[Params, Trajectories]], fits: list[SystemFit]) -> str:
    """The calibration for a reader: what each knob does, losses, drive, noise, and what does
    not fit.
    """
    lines = [
        f"CALIBRATION   {len(runs)} "
        f"settings, {sum(f.drift.trajectories for f in fits):,} trajectories"
    ]
    lines += ["", describe_knobs(gains(runs, fits))]
    last = fits[-1]
    lines += [
        "",
        f"{'resonator':<10} {'loss':>20} {'diffusion Q':>20} {'readout, rms':>14} {'white? p':>10}",
    ]
    n = task.network.sites
    q, q_error = (
        v.reshape(2, n).mean(axis=0) for v in (last.noise.diffusion, last.noise.diffusion_stderr)
    )
    readout = np.sqrt(np.maximum(last.noise.observation_variance, 0)).reshape(2, n).mean(axis=0)
    white = last.noise.whiteness.reshape(2, n).min(axis=0)
    for k in range(n):
        loss = with_error(float(last.drift.theta["decay"][k]), float(last.drift.stderr["decay"][k]))
        # two quadratures, each with its own error
        noise = with_error(q[k], q_error[k] / np.sqrt(2))
        lines.append(f"  {k:<8} {loss:>20} {noise:>20} {readout[k]:>14.2g} {white[k]:>10.2g}")
    if white.min() * 2 * n < 1e-3:
        lines.append(
            "→ residuals have a memory: the interval is too long for the drift, or the noise is "
            "not white."
        )
    return "\n".join(lines) + "\n"


def _model(task: Task, settings: Params, kerr: bool = False) -> LinearModel:
    """The network as if the settings were its parameters; without Kerr effect unless that has
    knobs.
    """
    return linear_model(
        task, {name: np.asarray(settings[name]) for name in (KERR if kerr else KNOBS)}, kerr=kerr
    )


def _diffusion(fitted: SystemFit) -> np.ndarray:
    """Q of each resonator, the mean of both quadratures. (N,)"""
    q = fitted.noise.diffusion.reshape(2, -1).mean(axis=0)
    if np.any(q <= 0):
        site = int(np.argmin(q))
        raise ValueError(
            f"resonator {site} shows readout noise and no noise of its own: the score would "
            "divide by nothing. Sample less often, lower the readout noise, or "
            "inject noise there."
        )
    return q
