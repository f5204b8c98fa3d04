"""How much light each parameter sees: what a parameter can change grows with the field on its sites."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from fluctua.core.types import Params
from fluctua.tcmt.experiment import Experiment
from fluctua.tcmt.fused import kernel_spec
from fluctua.tcmt.kernel.run import run

RECORDS = 500
"""Times at which the field is looked at, evenly spread over the horizon."""


class Exposure(NamedTuple):
    """∫dt ⟨f⟩ with f = |ψ_n|² for ω_n, |ψ_n ψ_m| for κ_nm and |ψ_n|⁴ for χ_n. (N,), (B,), (N,)."""

    omega: np.ndarray
    kappa: np.ndarray
    chi: np.ndarray


def exposure(seed: int, task: Experiment, theta: Params, *, count: int = 32, backend: str = "cpu") -> Exposure:
    """Time-integrated exposure of every parameter at θ: no Wiener noise, modulation on (text on Fig. 1c–e).

    count: trajectories of the average; without modulation all are alike, and one is run.

    >>> exposure(0, transmission(network, sigma_kappa=0.2, horizon=0.2), theta).kappa.shape
    (7,)
    """
    if task.copies > 1:
        raise ValueError(f"exposure is of one experiment; this task runs {task.copies} copies of its network at once.")
    modulated = task.modulation is not None and task.modulation.sigma_kappa > 0
    spec = kernel_spec(task, theta)
    every = math.ceil(spec.steps / RECORDS)
    done = run(spec, seed, count if modulated else 1, backend=backend, noise=False, scores=False, record_every=every)
    assert done.trajectories is not None
    size = np.abs(done.trajectories[:, :-1].astype(np.complex128))  # (E, R, N); left ends, so the last is not counted
    of = lambda f: f.mean(axis=0).sum(axis=0) * every * spec.dt
    first, second = task.network.bonds.T
    return Exposure(of(size**2), of(size[..., first] * size[..., second]), of(size**4))
