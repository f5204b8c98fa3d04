"""Kernels on the CPU: output arrays, and calls of the compiled core."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fluctua.tcmt.kernel.layout import list_neighbours, make_plan, to_pairs
from fluctua.tcmt.kernel.options import (
    LANES,
    KernelJob,
    KernelTwinModel,
    count_cores,
    require_euler,
)
from fluctua.tcmt.native import _native


@dataclass(eq=False)
class EnsembleSums:
    """Outputs of a backend over an ensemble.

    returns: R (E,).
    reward_sum: Σ over trajectories of gΔt (T,), with Heun's step (T+1,).
    moments: Σv, Σv² and Σ(v₂ⱼ + v₂ⱼ₊₁)² of the gradients (3, P).
    samples: gradients (E, P), on request.
    record: states (E, R, N, 2), on request.
    overflow: the first trajectory that is not finite, and the step after which; −1 for none, or
        unknown.
    """

    returns: np.ndarray
    reward_sum: np.ndarray
    moments: np.ndarray
    samples: np.ndarray | None
    record: np.ndarray | None
    overflow: np.ndarray

    @classmethod
    def empty(cls, e: KernelJob) -> EnsembleSums:
        """Allocate the outputs of a job; sums start at zero."""
        real = e.options.real
        return cls(
            returns=np.empty(e.count),
            reward_sum=np.zeros(e.spec.times),
            moments=np.zeros((3, e.width)),
            samples=np.empty((e.count, e.width), real) if e.samples else None,
            record=np.empty((e.count, e.records, e.spec.sites, 2), real) if e.records else None,
            overflow=np.full(2, -1, np.int64),
        )


@dataclass(eq=False)
class TwinSums:
    """Outputs of a backend over an ensemble with the twin correction.

    returns: R (E,).
    gained: Λ_0 (E,).
    reward_sum: as of `EnsembleSums`.
    prefix_sum: Σ over trajectories of Λ_0 − Λ_n (T+1,).
    moments: of direct part, correction and their sum (3, 3, P).
    direct: samples of the direct part (E, P), on request.
    correction: samples of the correction (E, P), on request.
    overflow: the first trajectory that is not finite, and the first whose twin is not; −1 for none.
    """

    returns: np.ndarray
    gained: np.ndarray
    reward_sum: np.ndarray
    prefix_sum: np.ndarray
    moments: np.ndarray
    direct: np.ndarray | None
    correction: np.ndarray | None
    overflow: np.ndarray

    @classmethod
    def empty(cls, e: KernelJob) -> TwinSums:
        """Allocate the outputs of a job; sums start at zero."""

        def allocate():
            return np.empty((e.count, e.width), e.options.real) if e.samples else None

        return cls(
            returns=np.empty(e.count),
            gained=np.empty(e.count),
            reward_sum=np.zeros(e.spec.times),
            prefix_sum=np.zeros(e.spec.steps + 1),
            moments=np.zeros((3, 3, e.width)),
            direct=allocate(),
            correction=allocate(),
            overflow=np.full(2, -1, np.int64),
        )


@dataclass(frozen=True)
class Pass:
    """One call of the core.

    count: number of trajectories.
    first: number of the first trajectory.
    threads: of the CPU.
    scores: whether scores are computed.
    record_every: steps between recorded states; 0 for none.
    bins: of a second pass of the binned baseline, as the fields below.
    rebin_every: steps between sortings into bins.
    first_returns: returns of the first pass (E,), padded to whole blocks.
    centre: mean return-to-go (T+1,).
    """

    count: int
    first: int
    threads: int
    scores: bool = False
    record_every: int = 0
    bins: int = 0
    rebin_every: int = 0
    first_returns: np.ndarray | None = None
    centre: np.ndarray | None = None


@dataclass(frozen=True)
class TwinTables:
    """`KernelTwinModel` for the core: complex arrays as pairs."""

    segment: int
    full: bool
    rank: int
    basis: np.ndarray | None
    curvature: np.ndarray | None


def run(e: KernelJob) -> EnsembleSums:
    """Run a job on the CPU: one pass, or two with the binned baseline."""
    out = EnsembleSums.empty(e)
    plan = make_plan(e)
    o = e.options
    double = o.dtype == "float64"
    threads = o.threads or count_cores()
    if e.binned is None:
        once = Pass(e.count, e.first, threads, scores=e.scores, record_every=o.record_every)
        _native.sweep(plan, once, out, double, o.engine)
        return out
    # the returns first; then the same noise again, with λ̂ of every trajectory known at every step
    first = EnsembleSums(
        out.returns, out.reward_sum, np.empty((3, 0)), None, out.record, out.overflow
    )
    _native.sweep(
        plan, Pass(e.count, e.first, threads, record_every=o.record_every), first, double, o.engine
    )
    if out.overflow[0] < 0:
        second = Pass(
            e.count,
            e.first,
            threads,
            bins=e.binned.bins,
            rebin_every=e.binned.every,
            first_returns=np.pad(out.returns, (0, -e.count % LANES)),
            centre=mean_to_go(out.reward_sum, e.count),
        )
        _native.binned(plan, second, out, double, o.engine)
    return out


def run_twin(e: KernelJob, twin: KernelTwinModel) -> TwinSums:
    """Run a job with the twin correction on the CPU."""
    out = TwinSums.empty(e)
    o = e.options

    def split(v):
        return None if v is None else to_pairs(v, o.real)

    tables = TwinTables(
        twin.segment, twin.full, twin.rank, split(twin.basis), split(twin.curvature)
    )
    once = Pass(e.count, e.first, o.threads or count_cores(), scores=True)
    model = make_plan(e.replace(spec=twin.spec, table=None))
    _native.twin(make_plan(e), once, model, tables, out, o.dtype == "float64", o.engine)
    return out


@dataclass(frozen=True)
class MeasuredStates:
    """Measured states for the core.

    count: number of trajectories.
    samples: intervals per trajectory.
    stride: steps of the model per interval.
    threads: of the CPU.
    x: states (count, samples + 1, 2N).
    sums: of scores, an output (3N + B,).
    """

    count: int
    samples: int
    stride: int
    threads: int
    x: np.ndarray
    sums: np.ndarray


def sum_measured_scores(e: KernelJob, x: np.ndarray, stride: int) -> np.ndarray:
    """Return ΣU of ω, κ, χ and Γ over measured states x (E, S+1, 2N). (N + B + 2N,)

    Between two samples, `stride` steps apart, the noise-free network runs in its own steps, and
    features are means over them. For a constant drive and no modulation.
    """
    o = e.options
    spec = e.spec
    require_euler(spec.integrator, "the kernel of measured states")
    x = np.ascontiguousarray(x, o.real)
    sums = np.empty(3 * spec.sites + len(spec.bonds))
    states = MeasuredStates(len(x), x.shape[1] - 1, stride, o.threads or count_cores(), x, sums)
    _native.measured(make_plan(e), states, o.dtype == "float64", o.engine)
    omega, chi, damping, kappa = np.split(sums, spec.sites * np.arange(1, 4))
    in_order = np.empty_like(kappa)
    in_order[list_neighbours(spec.sites, spec.bonds).order] = kappa
    return np.concatenate([omega, in_order, chi, damping])


def mean_to_go(reward_sum: np.ndarray, count: int) -> np.ndarray:
    """Return the mean reward to come at each time, 0 after the last. (T,) -> (T+1,)"""
    return np.append(np.cumsum(reward_sum[::-1])[::-1], 0.0) / count
