"""Advice from a recording: number of repetitions, sampling interval, and readout noise.

Two things go wrong with the interval Δ. Euler's transition takes kicks for independent that have
reached each other within Δ, and a bent path for a straight one. In units of the kicks, with J =
∂μ/∂x and K = Q^{−1/2} J Q^{1/2},

    Cov[x'] / 2Δ = Q + (JQ + QJᵀ)Δ/2 + …,     bias ≈ max(1.5‖K + Kᵀ‖, 0.75‖J‖) Δ   of the gradient.

The factor is a rule of thumb, from the lattice of docs/calibration.md: it gives 4 % at Δ = 0.002,
20 % at 0.01 and 100 % at 0.05, where the worst family was off by 3.5 %, 19 % and 94 %. ‖K + Kᵀ‖ is
large where a component of little noise has a neighbour of much. Components without noise have no
kicks; there J is that of balanced units, and K that of the others.

The readout adds 2s² to the variance 2QΔ of an increment: a share s²/(QΔ), which can be corrected
for and still costs up to as many more trajectories. It falls with Δ, Euler's bias grows with it.
Where the two leave no room, the local-linear score takes Euler's limit away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy.linalg import matrix_balance

from fluctua.core import check, scores
from fluctua.core.arrays import Params
from fluctua.core.display.fields import show_fields
from fluctua.core.likelihood import spreading
from fluctua.core.likelihood.noise import fit_noise
from fluctua.core.likelihood.report import Residuals
from fluctua.core.process import Process
from fluctua.core.trajectories import Trajectories
from fluctua.insitu import continuing as long_records
from fluctua.insitu import estimating, hidden, splitting
from fluctua.insitu.calibrate import table as tables
from fluctua.insitu.calibrate.fit import require_diffusion
from fluctua.insitu.recording.model import RecordingModel
from fluctua.insitu.recording.reader import RecordingFile
from fluctua.learn import repetitions as repeats
from fluctua.processes.stationary import Stationary

ENOUGH = 200
"""Trajectories from which the noise is measured where the file has no calibration."""


@show_fields
class FileAdvice(NamedTuple):
    """Advice from a recording for the next one, made by `advise_file`.

    repetitions: that the gradient needs.
    sampling: whether the interval suits the score.
    observation: s² (M,), None if none was seen.
    observation_bound: standard deviation that would have been seen, where it was measured here.
    notes: what was used.
    stretches, continuing: of one long record; its repetitions are batches of `continuing.length`.
    residuals: whether they are the noise of the process, where all channels are there.

    >>> advice = insitu.advise_file(recording, model, error=0.2)
    >>> advice.sampling.verdict  # the interval is long for Euler's step
    'faster'
    """

    repetitions: repeats.Repetitions
    sampling: Sampling
    observation: np.ndarray | None
    observation_bound: float | None
    notes: tuple[str, ...]
    stretches: splitting.SplitRecord | None = None
    continuing: Stationary | None = None
    residuals: Residuals | None = None


def advise_file(
    recording: RecordingFile,
    model: RecordingModel,
    *,
    continuing: bool = False,
    error: float = 0.1,
    share: float = 0.9,
    score: str = estimating.AUTO,
    baseline: str = "time",
    noise: str = "auto",
    theta: str = "set",
    progress: Callable[[int, int], None] | None = None,
) -> FileAdvice:
    """Advise on the next recording: repetitions, interval and readout noise.

    The noise is that of its calibration, or else is measured here.

    Args:
        recording: an open one.
        model: what `load_model(recording)` gives.
        continuing: one long record of a steady state, or a few: advice for the gradient of its
            long-run average, whose repetitions are batches.
        error: wanted of the gradient, relative.
        share: of the components, each to that error.
        score: "euler" or "local-linear"; "auto" for the transition of the calibration in the file,
            or Euler's.
        baseline: a name.
        noise: as for `apply_calibration`.
        theta: as for `apply_calibration`.
        progress: (trajectories done, all) -> None.

    Returns: a `FileAdvice`.

    >>> advice = insitu.advise_file(recording, model, error=0.2)
    >>> advice.repetitions.whole.trajectories > 40  # for an error of 20 %
    True
    """
    score = estimating.resolve_score(recording, model.process, score)
    if baseline not in ("time", "none"):
        raise ValueError(
            f'advice from a recording needs the baseline "time" or "none"; got {baseline!r}.'
        )
    require_diffusion(model.process, "advice from a recording is on the interval and the noise")
    if recording.count < 2 * repeats.PARTS and not continuing:
        raise ValueError(
            f"{recording.path} has {recording.count} complete trajectories; advice compares "
            f"{repeats.PARTS} parts of a recording, of two at least. Record more. For one long "
            "record of a steady state use --continuing."
        )
    applied = tables.apply_calibration(recording, model, noise=noise, theta=theta)
    m = applied.model
    notes = list(applied.notes)
    bound = None
    process = _show_observed(m)
    usable = None
    if m.hidden:
        assert m.observed is not None
        assert m.size is not None
        rows = recording.trajectories(0, 1, load=True).context
        one = None if rows is None else {name: leaf[0] for name, leaf in rows.items()}
        usable = hidden.visibility(
            check.process(m.process), None, m.theta, m.observed, m.size, context=one
        ).usable[m.observed]
    pieces = splitting.split_record(recording, m) if continuing else None
    cut = recording if pieces is None else pieces.recording
    some = cut.trajectories(0, min(ENOUGH, cut.count), load=True)
    if applied.ratio is None:
        law = scores.euler if score == "euler" else scores.local_linear
        fit = fit_noise(some, process, m.theta, transition=law, usable=usable)
        # a small sample may leave nothing of Q after s² is taken off; the scale is then the whole
        # variation
        q = np.where(fit.diffusion > 0, fit.diffusion, fit.quadratic_variation)
        s2 = np.maximum(fit.observation_variance, 0) if fit.observation_seen else None
        bound = float(
            np.sqrt(max(np.max(fit.observation_variance + 2 * fit.observation_stderr), 0))
        )
        kind = "trajectories" if pieces is None else "stretches"
        notes.append(
            f"readout and diffusion for the interval: measured here, from {len(some.x):,} {kind}"
        )
    else:
        table = tables.read_noise(recording.description)
        assert table is not None
        q = table.diffusion
        s2 = table.observation_variance
    if pieces is None:
        result = estimating.estimate_model(
            recording,
            m,
            score=score,
            baseline=baseline,
            observation_noise=s2,
            progress=progress,
        )
    else:
        result = long_records.estimate_continuing(recording, m, score=score, observation_noise=s2)
    interval = judge_sampling(
        process, m.theta, some, q, s2, error=error, local_linear=score == "local-linear"
    )
    if pieces is not None and result.parts is None:
        assert result.continuing is not None
        raise ValueError(
            f"{recording.path} is too short for advice: it has {result.estimate.count} batches of "
            f"{result.continuing.length:.3g}, and {repeats.PARTS} parts of two or more are "
            "compared. Record for longer."
        )
    needed = repeats.repetitions(result.estimate, result.parts, error=error, share=share)
    return FileAdvice(
        needed,
        interval,
        s2,
        bound,
        tuple(notes),
        pieces,
        result.continuing,
        result.residuals,
    )


# ------------------------------------------------------------------------------------- the interval

READOUT = 0.25
"""Accepted share of readout noise in an increment's variance."""
FROZEN = 0.25
"""wΔ up to which local linearisation is accurate for non-linear drifts (docs/calibration.md)."""


def _show_observed(model: RecordingModel) -> Process:
    """Process of the components that the file has; hidden ones are at zero."""
    process = check.process(model.process)
    if model.hidden:
        assert model.observed is not None
        assert model.size is not None
        process, _ = hidden.make_observed_model(
            process, model.objective, tuple(map(int, model.observed)), model.size
        )
    return process


def is_stepped(recording: RecordingFile) -> bool:
    """Whether the recording has every step of a simulation: its transition is the simulator's."""
    return int(recording.description.simulation.get("every", 0)) == 1


def judge_euler(
    recording: RecordingFile, model: RecordingModel, observation_variance: Any = None
) -> Sampling | None:
    """Judge the interval of a recording for Euler's score, with the model's own Q.

    Args:
        recording: an open one.
        model: as it is used, with the noise of the calibration.
        observation_variance: s², a number or (M,).

    Returns: a `Sampling`; see `euler_suits`. None where the score is exact, in a simulation
        recorded step by step, or not Euler's: that of another integrator, or of events.

    >>> judge_euler(recording, load_model(recording)) is None  # a simulation, recorded step by step
    True
    """
    whole = check.process(model.process)
    if is_stepped(recording) or not isinstance(whole, Process) or whole.integrator != "euler":
        return None
    process = _show_observed(model)
    some = recording.trajectories()
    q = spreading.average_diffusion(process, check.parameters(model.theta), some)
    return judge_sampling(process, model.theta, some, q, observation_variance)


@show_fields
class Sampling(NamedTuple):
    """Whether the interval of a recording suits its score.

    interval: median Δ.
    rate: w, the fastest of the system.
    euler: relative bias of Euler's score.
    readout: s²/(QΔ), (M,), zero if none was seen and for noiseless components.
    shortest: interval at which `READOUT` is reached.
    longest: interval at which Euler's bias is half the wanted error.
    frozen: interval at which wΔ = `FROZEN`.
    verdict: "good", "faster", "slower" or "local-linear".
    """

    interval: float
    rate: float
    euler: float
    readout: np.ndarray
    shortest: float
    longest: float
    frozen: float
    verdict: str

    @property
    def euler_suits(self) -> bool:
        """Whether the bias of Euler's score is at most half of the wanted error."""
        return self.interval <= self.longest

    @property
    def readout_dominates(self) -> bool:
        """Whether some component's increments are more readout than kick."""
        return bool(np.max(self.readout) > 1)


def judge_sampling(
    process: Process,
    theta: Params,
    data: Trajectories,
    diffusion: np.ndarray,
    observation_variance: np.ndarray | None = None,
    *,
    error: float = 0.1,
    local_linear: bool = False,
) -> Sampling:
    """Judge the interval of a recording.

    Args:
        process: drift and noise of the observed components.
        theta: θ.
        data: some of its trajectories.
        diffusion: Q (M,).
        observation_variance: s² (M,).
        error: wanted of the gradient, relative.
        local_linear: whether that score is used, and not Euler's.

    >>> judge_sampling(process, theta, recording.trajectories(0, 8, load=True), diffusion).longest
    """
    process = check.process(process)
    theta = check.parameters(theta)
    q = np.asarray(diffusion, float)
    noisy = q > 0
    if np.any(q < 0) or not noisy.any():
        raise ValueError(
            "the diffusion of every component with noise must be positive; the "
            f"least is {q.min():.3g}."
        )
    dt = float(np.median(np.diff(np.asarray(data.t, float))))
    slope = 0.0
    rate = 0.0
    for slope_here in spreading.measure_jacobians(process, theta, data):
        jacobian = slope_here.jacobian
        if not noisy.all():  # balance units: those of a position and its velocity differ
            jacobian = matrix_balance(jacobian, permute=False)[0]
        own = jacobian[np.ix_(noisy, noisy)] if not noisy.all() else jacobian
        k = own * np.sqrt(q[noisy]) / np.sqrt(q[noisy])[:, None]
        slope = max(
            slope,
            1.5 * float(np.linalg.norm(k + k.T, 2)),
            0.75 * float(np.linalg.norm(jacobian, 2)),
        )
        rate = max(rate, float(np.abs(np.linalg.eigvals(jacobian)).max()))
    s2 = (
        np.zeros_like(q)
        if observation_variance is None
        else np.broadcast_to(observation_variance, q.shape)
    )
    share = np.where(noisy, s2 / np.where(noisy, q, 1), 0)
    readout = np.where(noisy, s2 / (np.where(noisy, q, 1) * dt), 0)
    shortest = float(np.max(share)) / READOUT
    longest = error / 2 / slope if slope else np.inf
    frozen = FROZEN / rate if rate else np.inf
    end = frozen if local_linear else longest
    if shortest > end and not local_linear:
        verdict = "local-linear"
    elif dt < shortest:
        verdict = "slower"
    else:
        verdict = "good" if dt <= end else "faster"
    return Sampling(dt, rate, slope * dt, readout, shortest, longest, frozen, verdict)
