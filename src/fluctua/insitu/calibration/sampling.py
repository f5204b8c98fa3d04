"""How far apart samples should be: near enough for Euler's score, and far enough for the readout.

Two things go wrong with the interval Δ. Euler's transition takes kicks for independent that have reached each other
within Δ, and a bent path for a straight one. In units of the kicks, with J = ∂μ/∂x and K = Q^{−1/2} J Q^{1/2},

    Cov[x'] / 2Δ = Q + (JQ + QJᵀ)Δ/2 + …,     bias ≈ max(1.5‖K + Kᵀ‖, 0.75‖J‖) Δ   of the gradient.

The factor is a rule of thumb, from the lattice of docs/calibration.md: it gives 4 % at Δ = 0.002, 20 % at 0.01 and
100 % at 0.05, where the worst family was off by 3.5 %, 19 % and 94 %. ‖K + Kᵀ‖ is large where a quiet component has a
loud neighbour.

The readout adds 2s² to the variance 2QΔ of an increment: a share s²/(QΔ), which can be corrected for and still costs up
to as many more trajectories. It falls with Δ, Euler's bias grows with it. Where the two leave no room, the local-linear
score takes Euler's limit away.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fluctua.core import check
from fluctua.core.types import Params, Process, Trajectories
from fluctua.insitu.calibration.spreading import jacobians

READOUT = 0.25
"""Share of readout noise in an increment's variance that is put up with."""
FROZEN = 0.25
"""wΔ up to which local linearisation was found good where the drift is not linear (docs/calibration.md)."""


class Sampling(NamedTuple):
    """interval: Δ, the median one. rate: w, the fastest of the system. euler: bias of Euler's score, relative.

    readout: s²/(QΔ), (M,), zero if none was seen. shortest: where `READOUT` is reached; longest: where Euler's bias is
    half the wanted error; frozen: where wΔ = `FROZEN`. verdict: "good", "faster", "slower" or "local-linear".
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
    def readout_dominates(self) -> bool:
        """Whether some component's increments are more readout than kick."""
        return bool(np.max(self.readout) > 1)


def sampling(
    process: Process,
    theta: Params,
    data: Trajectories,
    diffusion: np.ndarray,
    observation_variance: np.ndarray | None = None,
    *,
    error: float = 0.1,
    local_linear: bool = False,
) -> Sampling:
    """Judge the interval of a recording. data: some of its trajectories. diffusion, observation_variance: Q, s² (M,).

    error: wanted of the gradient, relative. local_linear: whether that score is used, and not Euler's.

    >>> sampling(process, theta, recording.trajectories(0, 8, load=True), q).longest
    """
    process, theta = check.process(process), check.parameters(theta)
    q = np.asarray(diffusion, float)
    if not np.all(q > 0):
        raise ValueError(f"the diffusion of every component must be positive; the least is {q.min():.3g}.")
    dt = float(np.median(np.diff(np.asarray(data.t, float))))
    slope, rate = 0.0, 0.0
    for jacobian, _ in jacobians(process, theta, data):
        k = jacobian * np.sqrt(q) / np.sqrt(q)[:, None]
        slope = max(slope, 1.5 * float(np.linalg.norm(k + k.T, 2)), 0.75 * float(np.linalg.norm(jacobian, 2)))
        rate = max(rate, float(np.abs(np.linalg.eigvals(jacobian)).max()))
    s2 = np.zeros_like(q) if observation_variance is None else np.broadcast_to(observation_variance, q.shape)
    shortest = float(np.max(s2 / q)) / READOUT
    longest = error / 2 / slope if slope else np.inf
    frozen = FROZEN / rate if rate else np.inf
    end = frozen if local_linear else longest
    if shortest > end and not local_linear:
        verdict = "local-linear"
    elif dt < shortest:
        verdict = "slower"
    else:
        verdict = "good" if dt <= end else "faster"
    return Sampling(dt, rate, slope * dt, s2 / (q * dt), shortest, longest, frozen, verdict)
