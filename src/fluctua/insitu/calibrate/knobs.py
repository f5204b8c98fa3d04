"""A network with knobs as a `Process` of its settings, with what is known of the knobs as context.

    ω = offset + gain · ω_set,    κ = offset + gain · κ_set,
    dψ = [−i(ω + κ + δκ(t))ψ − Γψ + f] dt + √(2Q) dW

Where there are knobs for χ, the same of χ|ψ|²ψ; δκ is the modulation that was recorded with a
trajectory, if any.

These values are the context of trajectories, so that those of a drifting instrument can be fitted
anew between two iterations and nothing is compiled again. They are fitted as from any recording
(`fit`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from fluctua.core.arrays import Array, Params
from fluctua.core.likelihood.drift import fit_drift
from fluctua.core.process import Process
from fluctua.core.text import with_error
from fluctua.core.trajectories import Trajectories
from fluctua.core.words import format_count
from fluctua.insitu.calibrate.actuators import OwnGains, fit_knob_gains
from fluctua.insitu.calibrate.fit import SystemFit, fit_system
from fluctua.insitu.calibrate.network import LinearDrift, LinearModel, make_linear_model
from fluctua.insitu.calibrate.report import describe_knobs
from fluctua.learn.effective import read_knob
from fluctua.tcmt.tasks import Task

KNOBS = ("omega", "kappa")
KERR = (*KNOBS, "chi")
REST = ("decay", "drive_re", "drive_im")

KnobValues = dict[str, Array]
"""Calibration of a network with knobs, by name.

omega_offset, omega_gain (N,), kappa_offset, kappa_gain (B,): of each knob.
chi_offset, chi_gain (N,): where χ has knobs.
decay: Γ (N,).
drive_re, drive_im: (drives,).
diffusion: Q of either quadrature (N,).
readout: s² of either quadrature (N,).
readout_seen: 1 if it is more than nothing, else 0.
omega_stderr, … drive_im_stderr: errors of ω, κ, Γ and the drive from all probes; optional.
"""

MIN_GAIN = 0.1
"""Gain below which a knob is not used to correct: its inverse is large and badly known."""
TRUST = 3.0
"""Factor of errors, batch over probes, above which a batch is followed more slowly."""


def list_families(values: KnobValues) -> tuple[str, ...]:
    """List the families of parameters that the knobs of a calibration move."""
    return KERR if "chi_offset" in values else KNOBS


def compute_parameters(values: KnobValues, settings: Mapping[str, Array]) -> dict[str, Array]:
    """ω and κ at these settings, and χ where it has knobs."""
    return {name: read_knob(values, name).set(settings[name]) for name in list_families(values)}


def compute_settings(
    values: KnobValues, theta: Mapping[str, Array], limits: Mapping[str, tuple[float, float]]
) -> dict[str, Array]:
    """Settings at which ω and κ are θ, within limits: u = (θ − offset)/gain.

    A gain below `MIN_GAIN` is not divided by: the knob stays where it has no effect worth the
    noise.
    """

    def correct(name: str) -> Array:
        offset, gain = (jnp.asarray(part) for part in read_knob(values, name))
        works = jnp.abs(gain) > MIN_GAIN
        u = jnp.where(works, (theta[name] - offset) / jnp.where(works, gain, 1), theta[name])
        return jnp.clip(u, *limits[name]).astype(jnp.asarray(theta[name]).dtype)

    return {name: correct(name) for name in theta}


@dataclass(frozen=True)
class KnobDrift:
    """μ of a calibrated network: (settings, x, t, calibration) -> (2N,)."""

    linear: LinearDrift

    def __call__(self, theta: Params, x: Array, t: Array, context: KnobValues) -> Array:
        """dψ/dt as quadratures. (2N,)"""
        rest = {name: context[name].astype(x.dtype) for name in REST}
        return self.linear({**compute_parameters(context, theta), **rest}, x, t, context)


def _noise(theta: Params, x: Array, t: Array, context: KnobValues) -> Array:
    """The measured amplitude on both quadratures. (2N,)"""
    return jnp.tile(jnp.sqrt(2 * context["diffusion"]), 2)


def make_process(task: Task) -> Process:
    """Make the process of a network with knobs.

    θ: settings, {"omega": (N,), "kappa": (B,)}, and chi (N,) where it has knobs.

    context: `KnobValues`, and of a task with modulation what was recorded of it.
    """
    return Process(
        KnobDrift(LinearDrift(task.network, task.drives, task.frame, task.modulation)), _noise
    )


def fit_runs(
    task: Task, runs: list[tuple[Params, Trajectories]], *, kerr: bool = False
) -> list[SystemFit]:
    """Fit drift and noise at each of several settings. kerr: whether χ has knobs."""
    return [
        fit_system(trajectories, *_make_model(task, settings, kerr))
        for settings, trajectories in runs
    ]


def fit_knobs(
    task: Task, runs: list[tuple[Params, Trajectories]], fits: list[SystemFit] | None = None
) -> KnobValues:
    """Fit what the knobs do, from trajectories at two different settings of every knob or more.

    fits: of these runs, if they were made already.
    """
    fits = fit_runs(task, runs) if fits is None else fits
    lines = fit_gains(runs, fits)
    _check_determined(lines)
    known = {name: _average_fits(fits, name) for name in (*lines, *REST)}
    mean = {name: known[name][0] for name in REST} | {
        f"{name}_stderr": error for name, (_, error) in known.items()
    }
    mean["diffusion"] = np.mean([_average_diffusion(f) for f in fits], axis=0)
    each = [f.noise.observation_variance.reshape(2, -1) for f in fits]
    # after the mean: chance below zero balances chance above
    s2 = np.maximum(np.mean(each, axis=(0, 1)), 0)
    mean |= {
        "readout": s2,
        "readout_seen": np.array(float(any(f.noise.observation_seen for f in fits))),
    }
    return {
        f"{name}_{part}": getattr(line, part)
        for name, line in lines.items()
        for part in ("offset", "gain")
    } | mean


def _average_fits(fits: list[SystemFit], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Weighted mean of a family over several fits, and its error.

    Values that a fit does not determine weigh nothing.
    """
    weight = np.stack([np.asarray(f.drift.stderr[name], float) for f in fits]) ** -2
    total = weight.sum(axis=0)
    if not np.all(total > 0):
        raise ValueError(
            f"{name}[{int(np.argmin(total))}] is not determined by any of the {len(fits)} probes: "
            "too little light reaches it. Raise the drive, or probe at other settings."
        )
    values = np.stack([np.asarray(f.drift.theta[name]) for f in fits])
    return np.sum(weight * values, axis=0) / total, total**-0.5


def _check_determined(lines: dict[str, OwnGains]) -> None:
    """Refuse gains whose signs are unknown: a training could move down as well as up."""
    for name, line in lines.items():
        # NaN where a probe left the parameter open
        clear = np.abs(line.gain) > 2 * line.gain_stderr
        if not np.all(np.isfinite(line.gain)) or 2 * clear.sum() < clear.size:
            k = int(np.argmin(np.isfinite(line.gain) & clear))
            raise ValueError(
                f"the probes do not determine the gains of {name}: the gain of knob {k} is "
                f"{line.gain[k]:.2g} ± {line.gain_stderr[k]:.2g}. Probe at settings further "
                "apart, or with more trajectories."
            )


def fit_gains(
    runs: list[tuple[Params, Trajectories]], fits: list[SystemFit]
) -> dict[str, OwnGains]:
    """Fit offset and gain of each knob, family by family."""
    turned = KERR if "chi" in fits[0].drift.theta else KNOBS
    return fit_knob_gains(
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
    """Move offsets, loss and drive towards the fit of a new batch; gains and noise stay.

    To be used for the batches after this one: a batch is not independent of values that it moved.
    What the batch does not determine stays, and what it determines far worse than the probes did (a
    dark batch) moves by less than `rate`, in proportion to 1/error².
    """
    turned = list_families(values)
    model = _make_model(task, settings, "chi" in turned)
    dt = float(np.diff(np.asarray(trajectories.t, float)).mean())
    weight = np.tile(np.asarray(values["diffusion"] + values["readout"] / dt), 2)
    expected = compute_parameters(values, {name: np.asarray(settings[name]) for name in turned})
    start = {**model.theta, **expected, **{name: np.asarray(values[name]) for name in REST}}
    seen = bool(values["readout_seen"])
    fit = fit_drift(
        trajectories, model.process, start, diffusion=weight, noisy_states=seen, most_passes=1
    )

    def step(name: str) -> np.ndarray:
        error = np.asarray(fit.stderr[name], float)
        trusted = TRUST * np.asarray(values.get(f"{name}_stderr", np.inf))
        known = np.isfinite(error)  # else the batch does not determine it
        share = np.minimum(1, trusted / np.where(known & (error > 0), error, 1)) ** 2 * known
        return rate * share * (np.asarray(fit.theta[name]) - start[name])

    moved = {f"{name}_offset": values[f"{name}_offset"] + step(name) for name in turned}
    moved |= {name: values[name] + step(name) for name in REST}
    return {**values, **moved}


def describe(task: Task, runs: list[tuple[Params, Trajectories]], fits: list[SystemFit]) -> str:
    """Report of a calibration: gains, losses, drive, noise, and what does not fit."""
    used = format_count(sum(f.drift.trajectories for f in fits), "trajectory")
    lines = [f"CALIBRATION   {format_count(len(runs), 'setting')}, {used}"]
    lines += ["", describe_knobs(fit_gains(runs, fits))]
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


def _make_model(task: Task, settings: Params, kerr: bool = False) -> LinearModel:
    """The network with settings as parameters; without Kerr effect unless χ has knobs."""
    theta = {name: np.asarray(settings[name]) for name in (KERR if kerr else KNOBS)}
    return make_linear_model(task, theta, kerr=kerr)


def _average_diffusion(fitted: SystemFit) -> np.ndarray:
    """Q of each resonator, the mean of both quadratures. Shape (N,)."""
    q = fitted.noise.diffusion.reshape(2, -1).mean(axis=0)
    if np.any(q <= 0):
        site = int(np.argmin(q))
        raise ValueError(
            f"resonator {site} shows readout noise and no noise of its own: the score would "
            "divide by nothing. Sample less often, lower the readout noise, or "
            "inject noise there."
        )
    return q
