"""Samples of a network on the CPU: the filter with its pass back, and the information."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fluctua.tcmt.kernel.options import KernelSpec, count_cores
from fluctua.tcmt.native import _native


class FilterNoise(NamedTuple):
    """Noise between samples and in them.

    variance: q of the noise of an interval on each quadrature (N,).
    decay: e^{−2ΓΔ} (N,).
    readout: R, the variance of the measurement on each quadrature; 0 for none.
    """

    variance: np.ndarray
    decay: np.ndarray
    readout: float


class FilterGradients(NamedTuple):
    """The pass back: sums over trajectories and intervals, with λ the gradient by the drift.

    own: Σ λ*ψ, complex (N,).
    bonds: Σ Im(λ_i*ψ_j + λ_j*ψ_i) (B,).
    cubic: Σ Im λ*|ψ|²ψ (N,).
    force: Σ λ, complex (N,).
    by_noise: gradient by the logarithms of noise amplitudes (N,).
    by_readout: gradient by the logarithm of the readout noise.
    """

    own: np.ndarray
    bonds: np.ndarray
    cubic: np.ndarray
    force: np.ndarray
    by_noise: np.ndarray
    by_readout: float


class FilterResult(NamedTuple):
    """Result of the filter.

    squares: mean of |e|²/2S of every resonator (N,).
    lagged: mean of Re e_n* e_{n+1}/2S of every resonator (N,).
    gradients: of the pass back, on request.
    middle: states at the middles of the intervals (E, T, N), complex, on request.
    """

    squares: np.ndarray
    lagged: np.ndarray
    gradients: FilterGradients | None
    middle: np.ndarray | None


@dataclass(frozen=True)
class FilterNetwork:
    """A network for the core: couplings as diagonals of κ, which join sites n and n + offset."""

    sites: int
    diagonal_count: int
    offsets: np.ndarray
    diagonals: np.ndarray
    omega: np.ndarray
    chi: np.ndarray
    damping: np.ndarray
    force_real: np.ndarray
    force_imag: np.ndarray
    interval: float
    steps: int


@dataclass(frozen=True)
class FilterJob:
    """Samples and outputs for the core; see `FilterResult`. products: rows of own, cubic, …"""

    trajectories: int
    intervals: int
    threads: int
    noisy: bool
    scores: bool
    samples: np.ndarray
    variance: np.ndarray
    decay: np.ndarray
    readout: float
    squares: np.ndarray
    lagged: np.ndarray
    middle: np.ndarray | None
    products: np.ndarray | None
    by_noise: np.ndarray | None
    by_readout: np.ndarray | None


def run_filter(
    spec: KernelSpec,
    x: np.ndarray,
    interval: float,
    steps: int,
    noise: FilterNoise,
    *,
    scores: bool = True,
    states: bool = False,
    dtype: str = "float32",
    engine: str = "",
) -> FilterResult:
    """Run the filter of `fluctua.tcmt.innovations` and, with `scores`, its pass back.

    Args:
        spec: a network with a constant drive and without modulation.
        x: samples (E, T+1, 2N).
        interval: time between them.
        steps: of Runge and Kutta per interval.
        noise: of the network and of the readout.
        scores: whether to go back.
        states: whether to keep the states at the middles of the intervals.
        dtype: precision.
        engine: one of `_native.engines()`; "" for the fastest.
    """
    real = np.dtype(dtype)
    n = spec.sites
    low, high = np.sort(spec.bonds, axis=1).T.astype(np.int64)
    offsets, row = np.unique(high - low, return_inverse=True)
    diagonals = np.zeros((len(offsets), n))
    diagonals[row, low] = spec.kappa
    force = np.zeros(n, complex)
    force[spec.drive_sites] = spec.drive[0]

    def cast(v: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(v, real)

    network = FilterNetwork(
        sites=n,
        diagonal_count=len(offsets),
        offsets=offsets,
        diagonals=cast(diagonals),
        omega=cast(spec.omega),
        chi=cast(spec.chi),
        damping=cast(spec.damping),
        force_real=cast(force.real),
        force_imag=cast(force.imag),
        interval=float(interval),
        steps=steps,
    )
    samples = np.ascontiguousarray(x, real)
    count = samples.shape[1] - 1
    job = FilterJob(
        trajectories=len(samples),
        intervals=count,
        threads=count_cores(),
        noisy=noise.readout > 0,
        scores=scores,
        samples=samples,
        variance=np.ascontiguousarray(noise.variance, np.float64),
        decay=np.ascontiguousarray(noise.decay, np.float64),
        readout=float(noise.readout),
        squares=np.empty(n),
        lagged=np.empty(n),
        middle=np.empty((len(samples), count, n, 2), real) if states else None,
        products=np.empty((5 + len(offsets), n)) if scores else None,
        by_noise=np.empty(n) if scores else None,
        by_readout=np.empty(1) if scores else None,
    )
    _native.filter(network, job, dtype == "float64", engine)
    gradients = None
    if job.products is not None and job.by_noise is not None and job.by_readout is not None:
        p = job.products
        gradients = FilterGradients(
            p[0] + 1j * p[1],
            p[5:][row, low],
            p[2],
            p[3] + 1j * p[4],
            job.by_noise,
            float(job.by_readout[0]),
        )
    middle = None
    if job.middle is not None:
        middle = job.middle.view(np.dtype(f"c{2 * real.itemsize}"))[..., 0]
    return FilterResult(job.squares, job.lagged, gradients, middle)


class DriftTerms(NamedTuple):
    """Terms of the drift of a network: phase · feature on a site, number by number.

    start: first term of every number, and their count at the end (G+1,).
    site: (K,).
    feature: (K,).
    phase: complex (K,).
    """

    start: np.ndarray
    site: np.ndarray
    feature: np.ndarray
    phase: np.ndarray

    @property
    def numbers(self) -> int:
        """G."""
        return len(self.start) - 1

    @property
    def count(self) -> int:  # type: ignore[override]
        """K."""
        return len(self.site)


@dataclass(frozen=True)
class InformationJob:
    """Weights, features and the output of the core."""

    sites: int
    features: int
    threads: int
    weight: np.ndarray
    gram: np.ndarray
    information: np.ndarray


def compute_information(terms: DriftTerms, weight: np.ndarray, gram: np.ndarray) -> np.ndarray:
    """Return F_pq = Re Σ_{a∈p, b∈q} phase_a* phase_b W[site_a, site_b] G[feature_a, feature_b].

    weight: W (N, N), Hermitian. gram: G of the features, Hermitian. (G, G)
    """
    job = InformationJob(
        sites=len(weight),
        features=len(gram),
        threads=count_cores(),
        weight=np.ascontiguousarray(weight, np.complex128),
        gram=np.ascontiguousarray(gram, np.complex128),
        information=np.empty((terms.numbers, terms.numbers)),
    )
    _native.information(terms, job)
    return job.information
