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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from fluctua.core.arrays import Array, PyTree, jit
from fluctua.core.trajectories import Trajectories
from fluctua.tcmt import coupled_modes, state_scores
from fluctua.tcmt import drift as lattice
from fluctua.tcmt.experiment import Experiment
from fluctua.tcmt.kernel.options import KernelSpec

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

FREQUENCIES = 256
"""Points of the integral over the spectrum."""


class SampledEvidence(NamedTuple):
    """Score and information of every family of `FAMILIES`, and innovations in units of noise.

    score: (G,).
    information: (G, G).
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
    task: Experiment, spec: KernelSpec, trajectories: Trajectories, readout: float
) -> SampledEvidence:
    """Return the evidence of samples about all numbers of a network.

    Args:
        task: the model; its drive is constant in its frame.
        spec: its numbers, where derivatives are taken.
        trajectories: x (E, T+1, 2N) at equal intervals; with modulation, its `context` too.
        readout: standard deviation of the measurement on each quadrature.
    """
    t = np.asarray(trajectories.t, np.float64)
    interval = (t[-1] - t[0]) / (len(t) - 1)
    if len(spec.drive) > 1 or not np.allclose(np.diff(t), interval, rtol=1e-3, atol=0):
        raise ValueError(
            "samples of a network are calibrated where its drive is constant and they are equally "
            f"far apart; got {len(spec.drive)} values of the drive and intervals from "
            f"{np.diff(t).min():g} to {np.diff(t).max():g}."
        )
    y = np.swapaxes(state_scores.to_complex(trajectories.x), 0, 1)
    rule = _FlowRule(interval, max(1, int(np.ceil(interval / LONGEST_STEP - 1e-9))))
    shifts = _tabulate_shifts(task, trajectories.context, t, rule)
    propagation = _propagate(spec, np.mean(np.abs(y) ** 2, axis=(0, 1)), interval)
    law = _IntervalNoise(
        jnp.asarray(propagation.unit_variance, jnp.result_type(float)),
        jnp.asarray(np.exp(-2 * spec.damping * interval), jnp.result_type(float)),
    )
    amplitudes = _Amplitudes(
        jnp.asarray(np.log(spec.noise), jnp.result_type(float)),
        jnp.asarray(np.log(readout) if readout else -np.inf, jnp.result_type(float)),
    )
    samples = _Samples(jnp.asarray(y, jnp.result_type(1j)), shifts)
    graph = _Graph(state_scores.tabulate_network(spec), state_scores.list_slots(spec))
    passed = _run_filter(rule, bool(readout), graph, samples, law, amplitudes)
    passed = jax.tree.map(np.asarray, passed)
    count = (len(t) - 1) * y.shape[1]
    steady = propagation.settle_filter(spec.noise, readout)
    score = _sum_drift_scores(spec, passed, interval)
    information = _compute_drift_information(spec, passed.middle, propagation, steady)
    noise = _compute_noise_information(spec, propagation, readout, count)
    size = len(score)
    whole = np.zeros((size + len(noise), size + len(noise)))
    whole[:size, :size] = information
    whole[size:, size:] = noise
    by_noise = _bound_steps(
        np.append(passed.by_noise, passed.by_readout).astype(np.float64), np.diag(noise)
    )
    return SampledEvidence(
        np.concatenate([score, by_noise]),
        whole,
        passed.squares.astype(np.float64),
        passed.lagged.astype(np.float64),
        count,
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


# --------------------------------------------------------------------------------------- the filter


class _FlowRule(NamedTuple):
    """Interval between samples, and Runge–Kutta steps per interval."""

    interval: float
    steps: int


class _IntervalNoise(NamedTuple):
    """Noise of an interval relative to its amplitude: q/a² (N,), and e^{−2ΓΔ} (N,)."""

    unit_variance: Array
    decay: Array


class _Samples(NamedTuple):
    """Samples y (T+1, E, N), complex, and δκ of `_tabulate_shifts`."""

    y: Array
    shifts: Array | None


class _Graph(NamedTuple):
    """The numbers of a network, and its neighbours."""

    numbers: state_scores.NetworkNumbers
    slots: state_scores.NeighbourSlots


class _Amplitudes(NamedTuple):
    """Logarithms of the noise amplitudes √(2Q) (N,) and of the readout noise ()."""

    noise: Array
    readout: Array


class _FilterPass(NamedTuple):
    """Result of the filter and of its pass back.

    middle: states at the middles of the intervals (T, E, N), complex.
    adjoint: gradients of ℓ by drifts there (T, E, N), complex: Re λ*f per unit of time.
    by_noise, by_readout: gradients by logarithms of amplitudes (N,) and ().
    squares, lagged: see `SampledEvidence`.
    """

    middle: Any
    adjoint: Any
    by_noise: Any
    by_readout: Any
    squares: Any
    lagged: Any


def _tabulate_shifts(
    task: Experiment, context: PyTree, t: np.ndarray, rule: _FlowRule
) -> Array | None:
    """Return δκ at the times of the Runge–Kutta stages (T, 2 steps + 1, E, B); None without."""
    if context is None or task.modulation is None:
        return None
    modulation = task.modulation
    offsets = np.arange(2 * rule.steps + 1) / (2 * rule.steps) * rule.interval
    when = jnp.asarray(t[:-1, None] + offsets)

    def shift(one: PyTree) -> Array:
        each = functools.partial(coupled_modes.delta_kappa, modulation, one)
        return jax.vmap(jax.vmap(each))(when)

    return jnp.moveaxis(jax.vmap(shift)(jax.tree.map(jnp.asarray, context)), 0, 2)


def _flow(rule: _FlowRule, graph: _Graph, psi: Array, shift: Array | None) -> Array:
    """Return the state an interval later, by classical Runge–Kutta steps. psi (E, N)."""
    h = rule.interval / rule.steps

    def drift(psi: Array, stage: int) -> Array:
        delta = None if shift is None else shift[stage]
        return state_scores.compute_drift(*graph, psi, graph.numbers.force, delta)

    for k in range(rule.steps):
        k1 = drift(psi, 2 * k)
        k2 = drift(psi + h / 2 * k1, 2 * k + 1)
        k3 = drift(psi + h / 2 * k2, 2 * k + 1)
        k4 = drift(psi + h * k3, 2 * k + 2)
        psi = psi + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return psi


def _compute_gains(
    law: _IntervalNoise, amplitudes: _Amplitudes, count: int, noisy: bool
) -> tuple[Array, Array]:
    """Return gains K and variances S of the samples 1…count, from a state that is known. (T, N)"""
    q = law.unit_variance * jnp.exp(2 * amplitudes.noise)
    if not noisy:
        ones = jnp.ones((count, q.size), q.dtype)
        return ones, q * ones
    readout = jnp.exp(2 * amplitudes.readout)

    def advance(p: Array, _: None) -> tuple[Array, tuple[Array, Array]]:
        s = p + readout
        gain = p / s
        return law.decay * (1 - gain) * p + q, (gain, s)

    return jax.lax.scan(advance, q, None, count)[1]


@functools.partial(jit, static_argnums=(0, 1))
def _run_filter(
    rule: _FlowRule,
    noisy: bool,
    graph: _Graph,
    samples: _Samples,
    law: _IntervalNoise,
    amplitudes: _Amplitudes,
) -> _FilterPass:
    """Run the filter and its pass back. noisy: whether there is readout noise.

    Zeros are added to the states before and after every interval; the gradients by them are λ.
    """
    y, shifts = samples
    count = len(y) - 1
    zeros = jnp.zeros_like(y[1:])

    def log_likelihood(before: Array, after: Array, gains: Array, variances: Array) -> Any:
        def advance(psi: Array, at: Any) -> tuple[Array, Any]:
            sample, shift, gain, first, second = at
            begin = psi + first
            predicted = _flow(rule, graph, begin, shift) + second
            e = sample - predicted
            return predicted + gain * e, (e, (begin + predicted) / 2)

        start = jnp.zeros_like(y[0]) if noisy else y[0]
        each = (y[1:], shifts, gains, before, after)
        _, (e, middle) = jax.lax.scan(advance, start, each)
        z = e / jnp.sqrt(2 * variances)[:, None, :]
        square = z.real**2 + z.imag**2
        value = -jnp.sum(square) - y.shape[1] * jnp.sum(jnp.log(variances))
        follow = jnp.mean((z[1:].conj() * z[:-1]).real, axis=(0, 1))
        return value, (middle, jnp.mean(square, axis=(0, 1)), follow)

    (gains, variances), pull = jax.vjp(lambda a: _compute_gains(law, a, count, noisy), amplitudes)
    gradients, (middle, squares, lagged) = jax.grad(
        log_likelihood, argnums=(0, 1, 2, 3), has_aux=True
    )(zeros, zeros, gains, variances)
    before, after, by_gain, by_variance = gradients
    by = pull((by_gain, by_variance))[0]
    # the gradient of a real function by a complex number is conjugate in JAX
    adjoint = (before + after).conj() / 2
    return _FilterPass(middle, adjoint, by.noise, by.readout, squares, lagged)


def _sum_drift_scores(spec: KernelSpec, passed: _FilterPass, interval: float) -> np.ndarray:
    """Return the scores of ω, κ, χ, Γ and of the logarithm of the drive. (3N + B + D,)"""
    n = spec.sites
    psi = passed.middle.reshape(-1, n)
    adjoint = passed.adjoint.reshape(-1, n) * interval
    cross = (adjoint.conj().T @ psi).astype(np.complex128)  # Σ λ_a* ψ_b
    own = np.diag(cross)
    i, j = spec.bonds.T
    cubic = np.sum(adjoint.conj() * psi * np.abs(psi) ** 2, axis=0, dtype=np.complex128)
    force = adjoint.sum(axis=0, dtype=np.complex128)[spec.drive_sites].conj() * spec.drive[0]
    return np.concatenate(
        [own.imag, (cross[i, j] + cross[j, i]).imag, cubic.imag, -own.real, force.real]
    )


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
    total = term = np.eye(len(matrix), dtype=matrix.dtype)
    order = 0
    while np.abs(term).max() > PRECISION:
        order += 1
        term = term @ matrix / order
        total = total + term
    return total


class _Entries(NamedTuple):
    """Terms of the drift of a network by number, resonator, feature and phase.

    Features are (ψ, |ψ|²ψ, 1); the drift of a number is Σ phase · feature on the resonators.
    """

    number: np.ndarray
    site: np.ndarray
    feature: np.ndarray
    phase: np.ndarray


def _list_entries(spec: KernelSpec) -> _Entries:
    n = spec.sites
    b = len(spec.bonds)
    d = len(spec.drive_sites)
    site = np.arange(n)
    i, j = spec.bonds.T
    bond = n + np.arange(b)
    columns = [
        (site, site, site, np.full(n, -1j)),
        (bond, i, j, np.full(b, -1j)),
        (bond, j, i, np.full(b, -1j)),
        (n + b + site, site, n + site, np.full(n, -1j)),
        (2 * n + b + site, site, site, np.full(n, -1.0 + 0j)),
        (3 * n + b + np.arange(d), spec.drive_sites, np.full(d, 2 * n), spec.drive[0]),
    ]
    return _Entries(*(np.concatenate(parts) for parts in zip(*columns, strict=True)))


def _compute_drift_information(
    spec: KernelSpec,
    middle: np.ndarray,
    propagation: _Propagation,
    steady: _SteadyFilter,
) -> np.ndarray:
    """Return F of ω, κ, χ, Γ and the drive. (3N + B + D)²"""
    n = spec.sites
    loop = np.eye(n) - propagation.propagator * (1 - steady.gain)
    response = np.linalg.solve(loop, propagation.integral)
    weight = (response.conj().T / steady.variance) @ response
    psi = middle.reshape(-1, n)
    z = np.concatenate([psi, psi * np.abs(psi) ** 2, np.ones((len(psi), 1), psi.dtype)], axis=1)
    gram = (z.conj().T @ z).astype(np.complex128)
    e = _list_entries(spec)
    pairs = weight[np.ix_(e.site, e.site)] * gram[np.ix_(e.feature, e.feature)]
    pairs = (np.outer(e.phase.conj(), e.phase) * pairs).real
    size = 3 * n + len(spec.bonds) + len(spec.drive_sites)
    add = scipy.sparse.csr_array(
        (np.ones(len(e.number)), (e.number, np.arange(len(e.number)))), (size, len(e.number))
    )
    return add @ (add @ pairs.T).T


def _compute_noise_information(
    spec: KernelSpec, propagation: _Propagation, readout: float, samples: int
) -> np.ndarray:
    """Return F of the logarithms of noise amplitudes and readout noise. (N + 1)²"""
    n = spec.sites
    angle = np.pi * (np.arange(FREQUENCIES) + 0.5) / FREQUENCIES
    q = (propagation.unit_variance * spec.noise**2)[:, None]
    added = readout**2 * np.abs(1 - propagation.decay[:, None] * np.exp(-1j * angle)) ** 2
    share = q / (q + added)  # ½ ∂ ln f/∂ ln a
    total = np.zeros((n + 1, n + 1))
    # two quadratures, each ½ (∂ ln f)² per sample
    site = np.arange(n)
    total[site, site] = 4 * samples * np.mean(share**2, axis=1)
    cross = 4 * samples * np.mean(share * (1 - share), axis=1)
    total[site, n] = total[n, site] = cross
    total[n, n] = np.sum(4 * samples * np.mean((1 - share) ** 2, axis=1))
    return total
