"""Evidence of records at a few resonators of a network about all of its numbers.

Samples y_k = ψ_sites(t_k) + ε_k are taken at some resonators alone, an interval Δ apart, with
readout noise of variance ρ² on each quadrature. The network starts at zero and its drive is
constant, so that with A = −i(ω + κ) − Γ and the Green's function v_p(t) = e^{At}e_p of resonator p

    m_p(t) = ∫₀ᵗ v_p(s)·f ds,     ∂m_p/∂A_nm = ∫₀ᵗ v_pn(t − s) ψ_m(s) ds

is the noise-free record and its slope: a convolution per parameter. The noise is coloured by the
network. With C the stationary covariance, AC + CA† + 2(2Q) = 0,

    K_pq(t, s) = v_p(t − s)·Ce_q − v_p(t)·C v_q(s)* + 2ρ²δ,     t ≥ s,

and the log-likelihood is ℓ = −r†K⁻¹r − ln det K of r = y − m, which is that of the innovations of a
Kalman filter. Its Cholesky factor turns r into independent innovations w = L⁻¹r, one after the
other in time. All of this is exact for a linear network. With Kerr effect m is the noise-free path
with it; slopes and noise are those of the network at mean intensities, which leaves the score
unbiased to first order in the noise.

Two parts of the samples serve the fit, whose densities are known as well. The drift is scored on
means of `Grid.averaged` neighbours: the field hardly changes within them. Noise amplitudes are
scored on runs of neighbours, which separate readout noise from that of the network.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from fluctua.core.arrays import Array, jit
from fluctua.core.host.threads import one_blas_thread
from fluctua.tcmt.kernel.options import KernelSpec

SUBSTEPS = 2
"""Steps of the path per interval between samples."""

ORDER = 12
"""Terms of the series of e^{Ah}, |Ah| < 1: the error is below 1e-9."""

MEAN_OVER = 0.2
"""Time over which samples are averaged for the score of the drift, in units of 1/κ.

Of records 0.05 apart on the paper's lattice 0.1 % of the information is lost, whatever the readout
noise; the time of a fit grows with the cube of the number of means.
"""

RUN = 8
RUN_EVERY = 32
"""Samples of a run of neighbours, and from one run to the next, in the score of amplitudes."""

MIN_DECAY = 1e-7
"""The stationary covariance is summed until the slowest mode has decayed to this."""

MAX_MISSED = 1e-3
"""Error of the stationary covariance from modes above which it is summed, in units of the noise.

Its relative error is at most this over the smallest loss in units of that of the noise's site."""

DRIFT = ("omega", "kappa", "chi", "damping", "drive")
"""Numbers of the drift, in the order of scores and information; chi if `Grid.kerr` only.

drive: the logarithm of the drive's amplitude on each driven resonator.
"""


class Grid(NamedTuple):
    """Shape of the records, for which the sums are compiled.

    sites: resonators that are read (D,).
    interval: Δ between two samples.
    samples: K, after the start.
    kerr: whether the path has Kerr effect; its coefficients are scored then.
    doublings: of the time over which the stationary covariance is summed.
    averaged: neighbouring samples whose mean is one number of the likelihood of the drift.
    """

    sites: tuple[int, ...]
    interval: float
    samples: int
    kerr: bool
    doublings: int
    averaged: int = 1

    @property
    def step(self) -> float:
        """Time step of the path."""
        return self.interval / SUBSTEPS


class PortNumbers(NamedTuple):
    """Numbers of a network, in double precision.

    omega, chi, damping: (N,); kappa: (B,); bonds: (B, 2).
    source: f (N,) complex.
    drives: resonators with a drive (F,).
    noise: 2(2Q), the noise power of both quadratures, (N,).
    readout: 2ρ².
    """

    omega: Any
    kappa: Any
    chi: Any
    damping: Any
    bonds: Any
    source: Any
    drives: Any
    noise: Any
    readout: Any


class PortEvidence(NamedTuple):
    """Score and information of records, and their likelihood.

    score, information: of `DRIFT` (G,), (G, G).
    noise_score, noise_information: of the amplitudes, (J,), (J, J).
    log_likelihood: of the means of `Grid.averaged` samples, up to a constant.
    """

    score: Any
    information: Any
    noise_score: Any
    noise_information: Any
    log_likelihood: Any


class PortInnovations(NamedTuple):
    """Innovations of all samples of records, in units of noise.

    squares: mean of |w|² of every channel (D,), 1 expected.
    samples: number of |w|² per channel.
    """

    squares: np.ndarray
    samples: int

    @property
    def misfit(self) -> float:
        """χ² per sample, 1 expected."""
        return float(np.mean(self.squares))


class PortExpectation(NamedTuple):
    """A record as a network makes it, without and with its noise.

    mean: noise-free record [Re, Im] (K, 2D).
    stderr: standard deviation of a sample about it, on each quadrature (K, 2D).
    """

    mean: Any
    stderr: Any


def make_numbers(spec: KernelSpec, readout: float) -> PortNumbers:
    """Return the numbers of a network. readout: ρ, on each quadrature."""
    source = np.zeros(spec.sites, complex)
    source[spec.drive_sites] += np.reshape(spec.drive, -1)
    return PortNumbers(
        spec.omega,
        spec.kappa,
        spec.chi,
        spec.damping,
        spec.bonds,
        source,
        spec.drive_sites,
        2 * spec.noise**2,
        2 * readout**2,
    )


def make_grid(spec: KernelSpec, sites: tuple[int, ...], t: np.ndarray) -> Grid:
    """Return the grid of records at times t. (K+1,)"""
    t = np.asarray(t, np.float64)
    interval = (t[-1] - t[0]) / (len(t) - 1)
    if np.size(spec.drive) > len(spec.drive_sites) or not np.allclose(
        np.diff(t), interval, rtol=1e-3, atol=0
    ):
        raise ValueError(
            "records at ports are calibrated where the drive is constant and samples are equally "
            f"far apart; got {np.size(spec.drive)} values of the drive and intervals from "
            f"{np.diff(t).min():g} to {np.diff(t).max():g}."
        )
    slowest = float(np.min(spec.damping))
    if not slowest > 0:
        raise ValueError(
            "records at ports need a loss at every resonator for the noise to settle; the least "
            f"is {slowest:g}."
        )
    doublings = int(np.ceil(np.log2(-np.log(MIN_DECAY) / (2 * slowest * interval))))
    samples = len(t) - 1
    averaged = min(max(int(MEAN_OVER / interval + 1e-6), 1), samples // 2)
    return Grid(sites, interval, samples, bool(np.any(spec.chi)), max(doublings, 1), averaged)


def max_interval(spec: KernelSpec) -> float:
    """Return the interval between samples above which slopes and propagators are not resolved.

    |A| h < 1 with the step h, by Gershgorin's bound of |A|.
    """
    i, j = spec.bonds.T
    ends = np.abs(spec.kappa)
    coupled = np.bincount(i, ends, spec.sites) + np.bincount(j, ends, spec.sites)
    return SUBSTEPS / float(np.max(np.abs(spec.omega) + spec.damping + coupled))


def collect_port_evidence(
    grid: Grid, numbers: PortNumbers, records: np.ndarray, amplitudes: np.ndarray
) -> PortEvidence:
    """Return the evidence of records that were taken at the same settings.

    Args:
        grid: of `make_grid`.
        numbers: of `make_numbers`, where derivatives are taken.
        records: y (E, K, D) complex, without the sample at the start.
        amplitudes: derivatives of `PortNumbers.noise` and, in the last column, of
            `PortNumbers.readout` by the unknowns of the noise, (J, N + 1).
    """
    with _compute_precisely():
        sums = _collect(
            grid,
            jax.tree.map(jnp.asarray, numbers),
            jnp.asarray(records, jnp.result_type(1j)),
            jnp.asarray(amplitudes, jnp.result_type(float)),
        )
        return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), sums)


def measure_innovations(grid: Grid, numbers: PortNumbers, records: np.ndarray) -> PortInnovations:
    """Return the innovations of records, (E, K, D) complex, at all of their samples."""
    with _compute_precisely():
        power = _square_innovations(
            grid._replace(averaged=1),
            jax.tree.map(jnp.asarray, numbers),
            jnp.asarray(records, jnp.result_type(1j)),
        )
        squares = np.asarray(power, np.float64)
    return PortInnovations(squares / (len(records) * grid.samples), len(records) * grid.samples)


def expect_record(grid: Grid, numbers: PortNumbers) -> PortExpectation:
    """Return the record that a network is expected to make: m and the diagonal of K."""
    with _compute_precisely():
        expected = _expect(grid, jax.tree.map(jnp.asarray, numbers))
        return PortExpectation(*(np.asarray(array, np.float64) for array in expected))


@contextmanager
def _compute_precisely() -> Iterator[None]:
    with one_blas_thread(), jax.default_matmul_precision("highest"):
        yield


@partial(jit, static_argnums=0)
def _expect(grid: Grid, numbers: PortNumbers) -> PortExpectation:
    network = _linearise(grid, numbers)
    stationary = _solve_stationary(grid, network, numbers.noise[None])[0]
    sites = jnp.array(grid.sites)
    mean = _select_record(grid, network)
    green = network.green[SUBSTEPS::SUBSTEPS]
    settled = jnp.diagonal(stationary)[sites].real
    missing = jnp.einsum("knp,nm,kmp->kp", green, stationary, jnp.conj(green)).real
    # half of it on each quadrature
    stderr = jnp.sqrt((settled - missing + numbers.readout) / 2)
    return PortExpectation(
        jnp.concatenate([mean.real, mean.imag], axis=1), jnp.concatenate([stderr, stderr], axis=1)
    )


@partial(jit, static_argnums=0)
def _collect(grid: Grid, numbers: PortNumbers, y: Array, amplitudes: Array) -> PortEvidence:
    network = _linearise(grid, numbers)
    sources = jnp.concatenate([numbers.noise[None], amplitudes[:, :-1]])
    stationary = _solve_stationary(grid, network, sources)
    factor = _factor_covariance(grid, numbers, network, stationary[:1])
    slopes = _average(grid, _compute_slopes(grid, numbers, network)).reshape(len(factor), -1)
    residuals = y - _select_record(grid, network)
    means = jax.vmap(partial(_average, grid))(residuals).reshape(len(y), -1)
    white = solve_triangular(factor, jnp.concatenate([slopes, means.T], axis=1), lower=True)
    features = white[:, : slopes.shape[1]]
    w = white[:, slopes.shape[1] :]
    stacked = jnp.concatenate([features.real, features.imag])
    information = 2 * len(y) * stacked.T @ stacked
    total = w.sum(axis=1)
    score = 2 * stacked.T @ jnp.concatenate([total.real, total.imag])
    log_determinant = 2 * jnp.sum(jnp.log(jnp.diagonal(factor).real))
    times = np.flatnonzero(np.arange(grid.samples) % RUN_EVERY < RUN)
    # at the samples of the runs alone: all of them would take most of the time of a fit
    covariances = _compute_covariances(grid._replace(averaged=1), network, stationary, times)
    readout = jnp.concatenate([numbers.readout[None], amplitudes[:, -1]])
    covariances = covariances + readout[:, None, None] * jnp.eye(covariances.shape[1])
    noise_score, noise_information = _score_noise(
        covariances[0], covariances[1:], residuals[:, times].reshape(len(y), -1)
    )
    return PortEvidence(
        score,
        information,
        noise_score,
        noise_information,
        -jnp.sum(_square_modulus(w)) - len(y) * log_determinant,
    )


@partial(jit, static_argnums=0)
def _square_innovations(grid: Grid, numbers: PortNumbers, y: Array) -> Array:
    """Return Σ|w|² of every channel. (D,)"""
    network = _linearise(grid, numbers)
    stationary = _solve_stationary(grid, network, numbers.noise[None])
    factor = _factor_covariance(grid, numbers, network, stationary)
    residuals = (y - _select_record(grid, network)).reshape(len(y), -1)
    w = solve_triangular(factor, residuals.T, lower=True)
    return _square_modulus(w).reshape(grid.samples, len(grid.sites), len(y)).sum(axis=(0, 2))


def _average(grid: Grid, rows: Array) -> Array:
    """Return the means of `grid.averaged` neighbours each; (K, …) -> (K // averaged, …)."""
    whole = rows[: _count_means(grid) * grid.averaged]
    return whole.reshape(-1, grid.averaged, *rows.shape[1:]).mean(axis=1)


def _count_means(grid: Grid) -> int:
    return grid.samples // grid.averaged


def _select_record(grid: Grid, network: _Network) -> Array:
    """Return the noise-free record. (K, D)"""
    return network.path[SUBSTEPS::SUBSTEPS][:, jnp.array(grid.sites)]


# ------------------------------------------------------------------------------------ the network


class _Network(NamedTuple):
    """Propagators and paths of a network.

    generator: A (N, N).
    propagator: e^{Ah} of one step h.
    green: v_p(t) at all steps (T+1, N, D).
    path: ψ(t), noise-free (T+1, N).
    """

    generator: Array
    propagator: Array
    green: Array
    path: Array


def _linearise(grid: Grid, numbers: PortNumbers) -> _Network:
    path = None
    omega = numbers.omega
    if grid.kerr:
        path = _integrate_kerr_path(grid, numbers)
        omega = omega + 2 * numbers.chi * jnp.mean(_square_modulus(path), axis=0)
    generator = _make_generator(numbers, omega)
    propagator, integral = _exponentiate(generator * grid.step)
    kick = grid.step * integral @ numbers.source
    unit = jnp.zeros((len(omega), len(grid.sites)), generator.dtype)
    unit = unit.at[jnp.array(grid.sites), jnp.arange(len(grid.sites))].set(1)
    steps = SUBSTEPS * grid.samples
    columns = _apply_powers(propagator, jnp.concatenate([unit, kick[:, None]], axis=1), steps)
    if path is None:
        path = jnp.cumsum(columns[:-1, :, -1], axis=0)
        path = jnp.concatenate([jnp.zeros_like(path[:1]), path])
    return _Network(generator, propagator, columns[:, :, :-1], path)


def _make_generator(numbers: PortNumbers, omega: Array) -> Array:
    """Return A. (N, N)"""
    i, j = numbers.bonds.T
    diagonal = jnp.diag(-1j * omega - numbers.damping)
    return diagonal.at[i, j].add(-1j * numbers.kappa).at[j, i].add(-1j * numbers.kappa)


def _exponentiate(x: Array) -> tuple[Array, Array]:
    """Return e^X and ∫₀¹ e^{Xs} ds, by their series. (N, N)"""
    unit = jnp.eye(len(x), dtype=x.dtype)
    whole = unit
    integral = unit
    term = unit
    for k in range(1, ORDER + 1):
        term = term @ x / k
        whole = whole + term
        integral = integral + term / (k + 1)
    return whole, integral


def _apply_powers(propagator: Array, columns: Array, steps: int) -> Array:
    """Return Fᵏ times columns (N, C) for k = 0…steps, by doubling. (steps+1, N, C)"""
    rows = columns[None]
    power = propagator
    while len(rows) <= steps:
        rows = jnp.concatenate([rows, jnp.einsum("nm,kmc->knc", power, rows)])
        power = power @ power
    return rows[: steps + 1]


def _integrate_kerr_path(grid: Grid, numbers: PortNumbers) -> Array:
    """Return ψ(t) with Kerr effect: exact linear steps between half turns of the phase."""
    propagator, integral = _exponentiate(_make_generator(numbers, numbers.omega) * grid.step)
    kick = grid.step * integral @ numbers.source

    def turn(psi: Array) -> Array:
        return psi * jnp.exp(-0.5j * grid.step * numbers.chi * _square_modulus(psi))

    def step(psi: Array, _: None) -> tuple[Array, Array]:
        after = turn(propagator @ turn(psi) + kick)
        return after, after

    start = jnp.zeros(len(kick), kick.dtype)
    path = jax.lax.scan(step, start, None, length=SUBSTEPS * grid.samples)[1]
    return jnp.concatenate([start[None], path])


def _compute_slopes(grid: Grid, numbers: PortNumbers, network: _Network) -> Array:
    """Return ∂m/∂(numbers of the drift) at every sample. (K, D, G)"""
    steps = SUBSTEPS * grid.samples
    i, j = numbers.bonds.T
    path = network.path
    weight = jnp.ones(steps + 1).at[0].set(0.5)  # trapezoids; the path is zero at the other end
    green = jnp.fft.fft(network.green * weight[:, None, None], 2 * steps, axis=0)

    def transform(field: Array) -> Array:
        return jnp.fft.fft(field, 2 * steps, axis=0)[:, :, None]

    field = transform(path)
    by_omega = -1j * green * field
    families = [
        by_omega,
        -1j * (green[:, i] * field[:, j] + green[:, j] * field[:, i]),
        -1j * by_omega,
    ]
    if grid.kerr:
        families.insert(2, -1j * green * transform(_square_modulus(path) * path))
    products = jnp.concatenate(families, axis=1)
    columns = grid.step * jnp.fft.ifft(products, axis=0)[SUBSTEPS : steps + 1 : SUBSTEPS]
    rates = jnp.cumsum(network.green, axis=0) - 0.5 * (network.green + network.green[:1])
    driven = numbers.source[numbers.drives, None]
    by_drive = grid.step * rates[SUBSTEPS::SUBSTEPS][:, numbers.drives] * driven
    return jnp.swapaxes(jnp.concatenate([columns, by_drive], axis=1), 1, 2)


# ------------------------------------------------------------------------------------------- noise


def _factor_covariance(
    grid: Grid, numbers: PortNumbers, network: _Network, stationary: Array
) -> Array:
    """Return the Cholesky factor of K of the means. stationary: C (1, N, N)."""
    times = np.arange(_count_means(grid))
    covariance = _compute_covariances(grid, network, stationary, times)[0]
    readout = numbers.readout / grid.averaged
    return jnp.linalg.cholesky(covariance + readout * jnp.eye(len(covariance)))


def _compute_covariances(
    grid: Grid, network: _Network, stationary: Array, times: np.ndarray
) -> Array:
    """Return the covariance of means for each stationary covariance C (J, N, N) of the states.

    times: indices of the means (S,), rising. Shape (J, SD, SD), channels of a sample side by side.
    """
    sites = jnp.array(grid.sites)
    green = network.green[::SUBSTEPS]
    lag = times[:, None] - times
    # v_p(t − s)·Ce_q: rows by lag, for t ≥ s
    ahead = jnp.einsum("knp,jnq->jkpq", green[: grid.samples], stationary[:, :, sites])
    ahead = _average_lags(grid, ahead)
    behind = jnp.conj(jnp.swapaxes(ahead, 2, 3))
    later = (lag >= 0)[None, :, :, None, None]
    whole = jnp.where(later, ahead[:, np.abs(lag)], behind[:, np.abs(lag)])
    rows = _average(grid, green[1:])[times]
    carried = jnp.einsum("jnm,smq->jnsq", stationary, jnp.conj(rows))
    whole = whole - jnp.einsum("tnp,jnsq->jtspq", rows, carried)
    count = len(times) * len(grid.sites)
    return jnp.swapaxes(whole, 2, 3).reshape(len(stationary), count, count)


def _average_lags(grid: Grid, ahead: Array) -> Array:
    """Return covariances of means from those of samples, by lag. (J, K, D, D) -> (J, S, D, D)

    Samples of two means L apart have the lags from L·averaged − (averaged − 1) to … + (averaged −
    1), the middle one most often.
    """
    reach = grid.averaged - 1
    behind = jnp.conj(jnp.swapaxes(ahead[:, 1 : reach + 1], 2, 3))[:, ::-1]
    both = jnp.concatenate([behind, ahead], axis=1)
    share = (grid.averaged - np.abs(np.arange(-reach, reach + 1))) / grid.averaged**2
    place = grid.averaged * np.arange(_count_means(grid))[:, None] + np.arange(2 * reach + 1)
    return jnp.einsum("jldpq,d->jlpq", both[:, place], jnp.asarray(share, both.real.dtype))


def _solve_stationary(grid: Grid, network: _Network, sources: Array) -> Array:
    """Return C of AC + CA† + diag(source) = 0. (J, N, N)"""
    return jax.lax.platform_dependent(
        network.generator,
        sources,
        cpu=partial(_solve_by_modes, grid),
        default=partial(_sum_stationary, grid),
    )


def _solve_by_modes(grid: Grid, generator: Array, sources: Array) -> Array:
    """Return C by the modes A = VλV⁻¹: (V⁻¹CV⁻†)ₐᵦ = −(V⁻¹ diag(source) V⁻†)ₐᵦ/(λₐ + λᵦ*).

    Five times faster than the sum, and more accurate unless two modes nearly are one: then the
    equation is missed, and C is summed.
    """
    rates, modes = jnp.linalg.eig(generator)
    inverse = jnp.linalg.inv(modes)
    driven = (inverse * sources[:, None]) @ jnp.conj(inverse.T)
    covariance = modes @ (driven / -(rates[:, None] + jnp.conj(rates))) @ jnp.conj(modes.T)
    half = generator @ covariance
    missed = half + jnp.conj(jnp.swapaxes(half, 1, 2)) + jax.vmap(jnp.diag)(sources)
    good = jnp.max(jnp.abs(missed)) <= MAX_MISSED * jnp.max(jnp.abs(sources))
    return jax.lax.cond(
        good,
        lambda: covariance,
        lambda: _sum_stationary(grid, generator, sources).astype(covariance.dtype),
    )


def _sum_stationary(grid: Grid, generator: Array, sources: Array) -> Array:
    """Return C = ∫e^{At} diag(source) e^{A†t} dt, by doubling the time of the sum."""
    short = grid.step / 2**5
    unit = jnp.eye(len(generator), dtype=generator.dtype)
    power = _exponentiate(generator * short)[0]
    half = _exponentiate(generator * short / 2)[0]

    # Simpson's rule over the first, short step
    nodes = [(unit, 1), (half, 4), (power, 1)]
    total = (
        short
        / 6
        * sum(weight * ((node * sources[:, None]) @ jnp.conj(node.T)) for node, weight in nodes)
    )
    for _ in range(grid.doublings + 5 + SUBSTEPS.bit_length() - 1):
        total = total + power @ total @ jnp.conj(power.T)
        power = power @ power
    return total


def _score_noise(covariance: Array, changes: Array, residuals: Array) -> tuple[Array, Array]:
    """Return score and information of the amplitudes from some of the samples.

    Args:
        covariance: K of these samples (S, S).
        changes: its derivatives by the amplitudes (J, S, S).
        residuals: (E, S).
    """
    factor = jnp.linalg.cholesky(covariance)
    w = solve_triangular(factor, residuals.T, lower=True)
    inverse = solve_triangular(factor, jnp.eye(len(covariance), dtype=factor.dtype), lower=True)
    relative = inverse @ changes @ jnp.conj(inverse.T)
    expected = jnp.trace(relative, axis1=1, axis2=2).real
    score = jnp.einsum("ne,jnm,me->j", jnp.conj(w), relative, w).real - w.shape[1] * expected
    information = jnp.einsum("jnm,kmn->jk", relative, relative).real * w.shape[1]
    return score, information


def _square_modulus(psi: Array) -> Array:
    return psi.real**2 + psi.imag**2
