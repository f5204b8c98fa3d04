"""Evidence of sampled, noisy states of a resonator network about all of its numbers.

Samples y_n = ψ(t_n) + ε_n are an interval Δ apart, with readout noise of variance R on each
quadrature. The model continues from its estimate of the state by its own flow, and every sample
corrects the estimate (a Kalman filter with one gain per resonator):

    ψ⁻_{n+1} = flow_Δ(ψ_n),   e_n = y_n − ψ⁻_n,   ψ_n = ψ⁻_n + K_n e_n
    K = P/S,   S = P + R,     P_{n+1} = e^{−2ΓΔ}(1 − K_n)P_n + q,   q = ∫(e^{As} 2Q e^{A†s}) ds

The gains are exact where all resonators have the same noise, since the couplings only rotate it.
Without readout noise K = 1, and e is the residual of a transition. The log-likelihood is
ℓ = −Σ(|e|²/2S + ln S), two quadratures per sample. Its gradient takes one pass back in time: with λ
the gradient by the state, Σ λ*ψ over the middles of the intervals holds the scores of ω, κ, χ and
Γ, and the gradients by K and S give those of the noise.

The flow is a fourth-order Runge–Kutta step; Euler's would take (ω² + Σκ²)Δ/2 for a loss.

Information. Where the field changes little within the memory of the filter, Δ/K, the effect of a
drift f on the innovations is Lf, L = (1 − e^{AΔ}(1 − K))⁻¹ ∫e^{As} ds, and F = Σ Re f†L†S⁻¹Lf
follows from one Gram matrix of (ψ, |ψ|²ψ, 1). That of the noise is Whittle's, from the spectrum
q + R|1 − e^{−ΓΔ − iω}|² of what the readout adds to the steps of a resonator.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import scipy

from fluctua.core.arrays import Array
from fluctua.core.trajectories import Trajectories
from fluctua.tcmt import drift as lattice
from fluctua.tcmt import state_scores
from fluctua.tcmt.experiment import Experiment
from fluctua.tcmt.kernel.options import KernelSpec
from fluctua.tcmt.kernel.samples import (
    DriftTerms,
    FilterGradients,
    FilterNoise,
    FilterResult,
    compute_information,
    run_filter,
)
from fluctua.tcmt.sample_filter import FlowRule, run_filter_in_jax, tabulate_shifts

FAMILIES = ("omega", "kappa", "chi", "damping", "drive", "noise", "readout")
"""Numbers of a sampled network, in the order of scores and information.

drive, noise and readout are logarithms: of the drive's amplitude on each driven resonator, of the
noise amplitude of each resonator, of the readout noise.
"""

LONGEST_STEP = 0.02
"""Longest step of the flow in units of 1/κ: a mode of frequency 10 is off by 3e-6 per step."""

LONGEST_NOISE_STEP = 0.3
"""Longest step of the logarithm of a noise amplitude that is not shortened."""

PRECISION = 1e-12
"""Size below which the terms of a series are left out."""

DENSE = 8
"""A matrix with less than this share of its entries is multiplied entry by entry."""

FREQUENCIES = 256
"""Points of the integral over the spectrum."""


class SampledEvidence(NamedTuple):
    """Score and information of every family of `FAMILIES`, and innovations in units of noise.

    score: (G,), of unknowns (K,).
    information: (G, G), of unknowns (K, K).
    squares: mean of |e|²/2S of every resonator (N,), 1 expected.
    lagged: mean of Re e_n* e_{n+1}/2S of every resonator (N,), 0 expected.
    samples: innovations per resonator.
    """

    score: np.ndarray
    information: np.ndarray
    squares: np.ndarray
    lagged: np.ndarray
    samples: int


def count_numbers(spec: KernelSpec) -> dict[str, int]:
    """Return the size of every family of a network."""
    n = spec.sites
    sizes = (n, len(spec.bonds), n, n, len(spec.drive_sites), n, 1)
    return dict(zip(FAMILIES, sizes, strict=True))


def collect_sampled_evidence(
    task: Experiment,
    spec: KernelSpec,
    trajectories: Trajectories,
    readout: float,
    jacobian: scipy.sparse.csr_array | None = None,
) -> SampledEvidence:
    """Return the evidence of samples about all numbers of a network, or about unknowns of them.

    Args:
        task: the model; its drive is constant in its frame.
        spec: its numbers, where derivatives are taken.
        trajectories: x (E, T+1, 2N) at equal intervals; with modulation, its `context` too.
        readout: standard deviation of the measurement on each quadrature.
        jacobian: derivatives of the numbers by unknowns (G, K), of which the evidence is then.
    """
    samples = _take_samples(task, spec, trajectories, readout)
    passed = _pass_filter(samples, states=True)
    assert passed.gradients is not None
    assert passed.middle is not None
    steady = samples.propagation.settle_filter(spec.noise, readout)
    noise = _compute_noise_information(spec, samples.propagation, readout, samples.count)
    score = _collect_score(samples, passed.gradients, noise)
    if jacobian is None:
        jacobian = scipy.sparse.eye_array(len(score), format="csr")
    edge = len(score) - len(noise)
    terms = _combine_terms(_list_drift_terms(spec), jacobian[:edge].tocsc())
    gram = _multiply_features(passed.middle.reshape(-1, spec.sites))
    weight = _weigh_drifts(samples.propagation, steady)
    information = compute_information(terms, weight, gram)
    by_noise = jacobian[edge:]
    rest = (by_noise.T @ scipy.sparse.csr_array(noise) @ by_noise).tocoo()
    information[rest.coords] += rest.data
    return SampledEvidence(
        jacobian.T @ score, information, passed.squares, passed.lagged, samples.count
    )


def collect_sampled_score(
    task: Experiment, spec: KernelSpec, trajectories: Trajectories, readout: float
) -> np.ndarray:
    """Return the score of `collect_sampled_evidence` without the information. (G,)"""
    samples = _take_samples(task, spec, trajectories, readout)
    passed = _pass_filter(samples)
    assert passed.gradients is not None
    noise = _compute_noise_information(spec, samples.propagation, readout, samples.count)
    return _collect_score(samples, passed.gradients, noise)


def measure_innovations(
    task: Experiment, spec: KernelSpec, trajectories: Trajectories, readout: float
) -> tuple[np.ndarray, int]:
    """Return `squares` and `samples` of `collect_sampled_evidence`, without derivatives."""
    samples = _take_samples(task, spec, trajectories, readout)
    return _pass_filter(samples, scores=False).squares, samples.count


class _SampledNetwork(NamedTuple):
    """Samples and the network that they are compared with.

    spec: its numbers.
    x: samples (E, T+1, 2N).
    rule: interval and Runge–Kutta steps.
    shifts: of `tabulate_shifts`.
    propagation: of the linear network.
    readout: standard deviation of the measurement.
    """

    spec: KernelSpec
    x: np.ndarray
    rule: FlowRule
    shifts: Array | None
    propagation: _Propagation
    readout: float

    @property
    def count(self) -> int:  # type: ignore[override]
        """Innovations per resonator."""
        return len(self.x) * (self.x.shape[1] - 1)


def _take_samples(
    task: Experiment, spec: KernelSpec, trajectories: Trajectories, readout: float
) -> _SampledNetwork:
    """Check samples and prepare their network."""
    t = np.asarray(trajectories.t, np.float64)
    interval = (t[-1] - t[0]) / (len(t) - 1)
    if len(spec.drive) > 1 or not np.allclose(np.diff(t), interval, rtol=1e-3, atol=0):
        raise ValueError(
            "samples of a network are calibrated where its drive is constant and they are equally "
            f"far apart; got {len(spec.drive)} values of the drive and intervals from "
            f"{np.diff(t).min():g} to {np.diff(t).max():g}."
        )
    x = np.asarray(trajectories.x)
    rule = FlowRule(interval, max(1, int(np.ceil(interval / LONGEST_STEP - 1e-9))))
    shifts = tabulate_shifts(task, trajectories.context, t, rule)
    power = np.einsum("etn,etn->n", x, x, dtype=np.float64) / (len(x) * len(t))
    intensity = power[: spec.sites] + power[spec.sites :]
    propagation = _propagate(spec, intensity, interval)
    return _SampledNetwork(spec, x, rule, shifts, propagation, readout)


def _collect_score(
    samples: _SampledNetwork, gradients: FilterGradients, noise: np.ndarray
) -> np.ndarray:
    """Return the score of all families. noise: information about amplitudes (N + 1)². (G,)"""
    spec = samples.spec
    force = (gradients.force[spec.drive_sites].conj() * spec.drive[0]).real
    drift = [gradients.own.imag, gradients.bonds, gradients.cubic, -gradients.own.real, force]
    by_noise = np.append(gradients.by_noise, gradients.by_readout)
    return np.concatenate(
        [samples.rule.interval * np.concatenate(drift), _bound_steps(by_noise, np.diag(noise))]
    )


def _bound_steps(score: np.ndarray, information: np.ndarray) -> np.ndarray:
    """Return the score of amplitudes without overlong steps, with the same root and slope there.

    A drift that is not calibrated yet passes for noise, and the score of its amplitude grows with
    the square: d = s/F beyond `LONGEST_NOISE_STEP` is replaced by its logarithm.
    """
    safe = np.where(information > 0, information, 1.0)
    ratio = np.abs(score) / safe / LONGEST_NOISE_STEP
    shorter = np.where(ratio > 1, (1 + np.log(np.maximum(ratio, 1))) / np.maximum(ratio, 1), 1.0)
    return score * shorter


def _pass_filter(
    samples: _SampledNetwork, *, scores: bool = True, states: bool = False
) -> FilterResult:
    """Run the filter on the CPU's kernel; with modulation in JAX, which always goes back."""
    spec, x, rule, shifts, propagation, readout = samples
    unit = propagation.unit_variance
    decay = np.exp(-2 * spec.damping * rule.interval)
    if shifts is None:
        noise = FilterNoise(unit * spec.noise**2, decay, readout**2)
        precision = str(jnp.result_type(float))
        return run_filter(
            spec, x, rule.interval, rule.steps, noise, scores=scores, states=states, dtype=precision
        )
    return run_filter_in_jax(spec, x, rule, shifts, unit, readout)


# ---------------------------------------------------------------------------------- the information


class _SteadyFilter(NamedTuple):
    """Gains K and variances S of the filter, each (N,)."""

    gain: np.ndarray
    variance: np.ndarray


class _Propagation(NamedTuple):
    """The linear network over an interval.

    propagator: e^{AΔ} (N, N).
    integral: ∫e^{As} ds (N, N).
    unit_variance: variance of the noise of an interval per a², diagonal (N,).
    decay: e^{−ΓΔ} (N,).
    """

    propagator: np.ndarray
    integral: np.ndarray
    unit_variance: np.ndarray
    decay: np.ndarray

    def settle_filter(self, noise: np.ndarray, readout: float) -> _SteadyFilter:
        """Return the filter in its steady state, from noise amplitudes √(2Q) (N,)."""
        q = self.unit_variance * noise**2
        r = readout**2
        excess = q - r * (1 - self.decay**2)
        p = (excess + np.sqrt(excess**2 + 4 * q * r)) / 2
        return _SteadyFilter(p / (p + r), p + r)


def _propagate(spec: KernelSpec, intensity: np.ndarray, interval: float) -> _Propagation:
    """Return the propagation of small deviations, with the mean Kerr detuning; by Simpson's rule.

    intensity: mean |ψ|² (N,).
    """
    n = spec.sites
    coupling = lattice.coupling_matrix(spec.bonds, spec.kappa, n)
    shifted = spec.omega + 2 * spec.chi * intensity
    generator = lattice.linear_operator(shifted, coupling, np.diag(spec.damping))
    half = _exponentiate(generator * interval / 2)
    whole = half @ half
    power = spec.noise**2
    arriving = (power + 4 * np.abs(half) ** 2 @ power + np.abs(whole) ** 2 @ power) / 6
    return _Propagation(
        whole,
        interval / 6 * (np.eye(n) + 4 * half + whole),
        interval * arriving / power,
        np.exp(-spec.damping * interval),
    )


def _exponentiate(matrix: np.ndarray) -> np.ndarray:
    """Return e^A by its series, for the small norms of an interval: a tenth of SciPy's time."""
    factor = matrix
    if np.count_nonzero(matrix) < matrix.size / DENSE:
        factor = scipy.sparse.csr_array(matrix)
    total = term = np.eye(len(matrix), dtype=matrix.dtype)
    order = 0
    while np.abs(term).max() > PRECISION:
        order += 1
        term = factor @ term / order
        total = total + term
    return total


@functools.lru_cache(maxsize=8)
def _list_terms(sites: int, bonds: bytes, drive_sites: bytes) -> DriftTerms:
    """Return the terms of ω, κ, χ, Γ and the drive, of phase 1, in features (ψ, |ψ|²ψ, 1).

    bonds, drive_sites: arrays of integers as bytes, which are compared faster than tuples.
    """
    n = sites
    site = np.arange(n)
    ends = np.frombuffer(bonds, np.int64).reshape(-1, 2)
    driven = np.frombuffer(drive_sites, np.int64)
    widths = np.repeat((1, 2, 1, 1, 1), (n, len(ends), n, n, len(driven)))
    places = [site, ends.ravel(), site, site, driven]
    features = [site, ends[:, ::-1].ravel(), n + site, site, np.full(len(driven), 2 * n)]
    # −iψ, −iψ_m, −i|ψ|²ψ and −ψ; that of the drive is its amplitude
    phases = np.repeat((-1j, -1j, -1j, -1.0, 1.0), [len(place) for place in places])
    return DriftTerms(
        np.concatenate([[0], np.cumsum(widths)]),
        np.concatenate(places),
        np.concatenate(features),
        phases,
    )


def _list_drift_terms(spec: KernelSpec) -> DriftTerms:
    """Return the terms of ω, κ, χ, Γ and of the logarithm of the drive."""
    bonds = np.asarray(spec.bonds, np.int64)
    driven = np.asarray(spec.drive_sites, np.int64)
    terms = _list_terms(spec.sites, bonds.tobytes(), driven.tobytes())
    phase = terms.phase.copy()
    phase[len(phase) - len(spec.drive_sites) :] = spec.drive[0]
    return terms._replace(phase=phase)


def _combine_terms(terms: DriftTerms, jacobian: scipy.sparse.csc_array) -> DriftTerms:
    """Return the terms of unknowns, from those of numbers and their derivatives (numbers, K)."""
    number = jacobian.indices
    widths = np.diff(terms.start)[number]
    ends = np.cumsum(widths)
    # of every derivative, the terms of its number one after the other
    within = np.arange(widths.sum()) - np.repeat(ends - widths, widths)
    place = np.repeat(terms.start[number], widths) + within
    return DriftTerms(
        np.concatenate([[0], ends])[jacobian.indptr].astype(np.int64),
        terms.site[place],
        terms.feature[place],
        terms.phase[place] * np.repeat(jacobian.data, widths),
    )


def _weigh_drifts(propagation: _Propagation, steady: _SteadyFilter) -> np.ndarray:
    """Return L†S⁻¹L, the information of a constant drift about itself. (N, N)"""
    loop = np.eye(len(propagation.propagator)) - propagation.propagator * (1 - steady.gain)
    response = np.linalg.solve(loop, propagation.integral)
    return (response.conj().T / steady.variance) @ response


def _multiply_features(psi: np.ndarray) -> np.ndarray:
    """Return Σ z*zᵀ of z = (ψ, |ψ|²ψ, 1) over states (·, N). (2N + 1)²"""
    ones = np.ones((len(psi), 1), psi.dtype)
    return state_scores.multiply_hermitian(
        np.concatenate([psi, psi * np.abs(psi) ** 2, ones], axis=1)
    )


def _compute_noise_information(
    spec: KernelSpec, propagation: _Propagation, readout: float, samples: int
) -> np.ndarray:
    """Return F of the logarithms of noise amplitudes and readout noise. (N + 1)²"""
    n = spec.sites
    angle = np.pi * (np.arange(FREQUENCIES) + 0.5) / FREQUENCIES
    q = (propagation.unit_variance * spec.noise**2)[:, None]
    decay = propagation.decay[:, None]
    added = readout**2 * (1 + decay**2 - 2 * decay * np.cos(angle))  # R|1 − e^{−ΓΔ − iω}|²
    share = q / (q + added)  # ½ ∂ ln f/∂ ln a
    total = np.zeros((n + 1, n + 1))
    # two quadratures, each ½ (∂ ln f)² per sample
    site = np.arange(n)
    total[site, site] = 4 * samples * np.mean(share**2, axis=1)
    cross = 4 * samples * np.mean(share * (1 - share), axis=1)
    total[site, n] = total[n, site] = cross
    total[n, n] = np.sum(4 * samples * np.mean((1 - share) ** 2, axis=1))
    return total
