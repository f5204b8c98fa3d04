"""Measured states of a resonator network: returns, evidence about parameters, twin correction.

The fused kernels score the noise that they drew. Measured states ψ come from a device whose
parameters are not the model's, so residuals are taken against the model:

    r_n = ψ_{n+1} − ψ_n − μ(ψ_n)Δt,   ζ = r/2Q
    U_ω = Im ζ*ψ,   U_χ = |ψ|²U_ω,   U_κ = Im(ζ_n*ψ_m + ζ_m*ψ_n),   U_Γ = −Re ζ*ψ

The CPU's kernel sums them; with modulation JAX does, a block of steps at a time to stay in the
cache. The drift is linear in ω, κ, χ and Γ, with features −iψ_n, −iψ_m, −i|ψ_n|²ψ_n and −ψ_n, so
the information about all of them follows from one Gram matrix of (ψ, |ψ|²ψ).

If samples are several steps of the model apart, the model runs from one to the next. The residual
is then exact whatever the interval; the features are means over that path.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from fluctua.core import dependence
from fluctua.core.arrays import Array, Params, PyTree, jit
from fluctua.core.likelihood import evidence as likelihood_evidence
from fluctua.core.likelihood.unknowns import At
from fluctua.core.trajectories import Trajectories
from fluctua.core.twin.correction import TwinSamples
from fluctua.tcmt import coupled_modes
from fluctua.tcmt import drift as lattice
from fluctua.tcmt.experiment import Experiment
from fluctua.tcmt.kernel import options
from fluctua.tcmt.kernel.cpu import sum_measured_scores
from fluctua.tcmt.kernel.run import run

KNOWN = ("omega", "kappa", "chi")
"""Families of the twin correction; losses also enter the noise, and take the general path."""

SCORED = (*KNOWN, "gamma")
"""Families of the evidence; of losses only the drift is used, their noise is the model's."""

BLOCK = 500
"""Steps per block."""


class NeighbourSlots(NamedTuple):
    """Neighbours of every site, in D slots, the largest number of neighbours.

    site: neighbour of each slot (N, D).
    bond: bond of each slot (N, D).
    used: 1 where the slot has a neighbour, else 0 (N, D).
    ends: sites of each bond (B, 2).
    """

    site: Array
    bond: Array
    used: Array
    ends: Array


class NetworkNumbers(NamedTuple):
    """A network at its parameters, as arrays of JAX.

    omega: ω (N,).
    chi: χ (N,).
    damping: Γ (N,).
    double_q: 2Q (N,).
    kappa: κ (B,).
    coupling: κ as a matrix (N, N).
    force: drive (N,) or (T, N), complex.
    """

    omega: Array
    chi: Array
    damping: Array
    double_q: Array
    kappa: Array
    coupling: Array
    force: Array


def list_slots(spec: options.KernelSpec) -> NeighbourSlots:
    """Return the neighbours of every site of a network."""
    around: list[list[tuple[int, int]]] = [[] for _ in range(spec.sites)]
    for b, (i, j) in enumerate(spec.bonds.tolist()):
        around[i].append((j, b))
        around[j].append((i, b))
    slots = max((len(neighbours) for neighbours in around), default=0)
    table = np.zeros((3, spec.sites, slots), np.int32)
    for n, neighbours in enumerate(around):
        for d, (m, b) in enumerate(neighbours):
            table[:, n, d] = m, b, 1
    site, bond, used = (jnp.asarray(v) for v in table)
    return NeighbourSlots(site, bond, used, jnp.asarray(spec.bonds))


def tabulate_network(spec: options.KernelSpec) -> NetworkNumbers:
    """Return the numbers of a kernel's network, in JAX's precision."""
    force = np.zeros((len(spec.drive), spec.sites), complex)
    force[:, spec.drive_sites] = spec.drive

    def real(v):
        return jnp.asarray(v, jnp.result_type(float))

    coupling = lattice.coupling_matrix(spec.bonds, spec.kappa, spec.sites)
    drive = jnp.asarray(force if len(force) > 1 else force[0], jnp.result_type(1j))
    return NetworkNumbers(
        real(spec.omega),
        real(spec.chi),
        real(spec.damping),
        real(spec.noise**2),
        real(spec.kappa),
        real(coupling),
        drive,
    )


def to_complex(x: Array) -> Array:
    """Return ψ of states [Re ψ, Im ψ]. (..., 2N) -> (..., N)"""
    n = np.shape(x)[-1] // 2
    return np.asarray(x)[..., :n] + 1j * np.asarray(x)[..., n:]


def compute_returns(spec: options.KernelSpec, t: np.ndarray, x: Array) -> np.ndarray:
    """Return R of every trajectory, by the quadrature of the integrator. x (E, T+1, 2N) -> (E,)"""
    interval = np.diff(np.asarray(t, np.float64))
    weight = interval
    states = np.asarray(x)[:, :-1]
    if spec.integrator != "euler":
        weight = (np.append(interval, 0.0) + np.append(0.0, interval)) / 2
        states = np.asarray(x)
    ports = spec.port_sites
    psi = states[..., ports] + 1j * states[..., spec.sites + ports]
    stride = (spec.steps // len(interval)) or 1
    incoming = spec.incoming[::stride] if len(spec.incoming) > 1 else spec.incoming
    out = spec.port_gain * psi - incoming
    return np.einsum("etp,p,t->e", np.abs(out) ** 2, spec.port_weight, weight)


def collect_evidence(
    task: Experiment,
    spec: options.KernelSpec,
    at: At,
    theta: Params,
    u: np.ndarray,
    trajectories: Trajectories,
    every: int,
    readout: float = 0.0,
    slope: Slopes | None = None,
) -> likelihood_evidence.Evidence:
    """Return the evidence of measured states about unknowns of ω, κ, χ and γ.

    For networks, in place of `fluctua.core.likelihood.evidence.collect_evidence`.

    Args:
        task: the model.
        spec: its numbers at p(θ, u).
        at: (θ, u) -> p.
        theta: the settings at which they were measured.
        u: where the derivatives are taken.
        trajectories: x (E, T+1, 2N); with modulation, its `context` too.
        every: one of so many steps counts for the information.
        readout: standard deviation of the measurement on each quadrature; see `StateSums`.
        slope: ∂p/∂u of `linearise`, if already computed.

    """
    slope = linearise(at, theta, u)[1] if slope is None else slope
    linear = _is_linear(at, _describe(theta), u.shape, jnp.result_type(float))
    sizes = {"omega": spec.sites, "kappa": len(spec.bonds), "chi": spec.sites, "gamma": spec.sites}
    empty = {name: scipy.sparse.csr_array((sizes[name], u.size)) for name in SCORED}
    slope = {name: slope.get(name, empty[name]) for name in SCORED}
    kerr = bool(slope["chi"].count_nonzero())
    sums = sum_states(task, spec, trajectories, every, kerr, readout)
    information = _compute_information(spec, sums.gram, kerr)
    # sparse: a parameter depends on one unknown or two
    jacobian = scipy.sparse.vstack([slope[name] for name in SCORED], format="csr")
    score = sums.scores
    if readout:
        score, information = _weaken(score, information, sums.scatter)
    information = jacobian.T @ (information @ jacobian)
    dense = information.toarray() if scipy.sparse.issparse(information) else information
    return likelihood_evidence.Evidence(
        jacobian.T @ score, dense, linear and count_steps(spec.dt, trajectories.t) <= 1
    )


class StateSums(NamedTuple):
    """Sums over measured states, of all families, without the mean effect of the readout's noise.

    The noise ε of a readout, E|ε|² = ν², adds −Bε to a residual and Cε to its features, with
    B = (1 + AΔt)ᵏ and C the mean of (1 + AΔt)ʲ over the k steps of an interval. The mean of what it
    adds to the scores of a sample is subtracted:

        ΔU_ω = −Im D_nn/2Q_n,   ΔU_Γ = Re D_nn/2Q_n
        ΔU_κ = −Im(D_mn/2Q_n + D_nm/2Q_m),   D = ν² C B†

    scores: ΣU (N + B + 2N,).
    gram: Σ z*zᵀΔt of z = (ψ, |ψ|²ψ), complex.
    scatter: variance that the noise of the readout leaves in the scores (N + B + 2N,).
    """

    scores: np.ndarray
    gram: np.ndarray
    scatter: np.ndarray


def sum_states(
    task: Experiment,
    spec: options.KernelSpec,
    trajectories: Trajectories,
    every: int,
    kerr: bool,
    readout: float = 0.0,
) -> StateSums:
    """Return the sums that evidence is computed from. kerr: whether χ is among the unknowns."""
    t = np.asarray(trajectories.t, np.float64)
    stride = count_steps(spec.dt, t)
    power = 2 * readout**2
    # |ψ + ε|²(ψ + ε) is larger than |ψ|²ψ by 2ν²ψ on average
    corrected = spec.replace(omega=spec.omega - 2 * power * spec.chi) if readout else spec
    native = stride and trajectories.context is None and len(spec.drive) == 1
    if native:
        scores = sum_measured_scores(
            options.KernelJob(corrected, 0, 1, options.KernelOptions(dtype=_precision())),
            trajectories.x,
            stride,
        )
    else:
        scores = _sum_scores(task, corrected, t, trajectories)
    thinned = max(1, every // max(stride, 1))
    gram = np.sum(
        [
            _compute_gram(np.asarray(x)[:-1], np.diff(t), thinned, kerr, power)
            for x in trajectories.x
        ],
        axis=0,
    )
    if not readout:
        return StateSums(scores, gram, np.zeros_like(scores))
    intensity = np.abs(to_complex(np.asarray(trajectories.x)[:, :-1:thinned])) ** 2
    noisy = StateSums(scores, gram, np.zeros_like(scores))
    return _subtract_readout(spec, noisy, intensity, t, power, stride if native else 1)


def _subtract_readout(
    spec: options.KernelSpec,
    noisy: StateSums,
    intensity: np.ndarray,
    t: np.ndarray,
    power: float,
    steps: int,
) -> StateSums:
    """Return the sums without what the noise of a readout adds to them on average.

    noisy: sums as measured. intensity: |ψ|² of a subset of samples (E, ·, N). power: E|ε|². steps:
    of the model per interval.
    """
    scores = noisy.scores
    count = len(intensity)
    n = spec.sites
    samples = count * (len(t) - 1)
    time = float(t[-1] - t[0]) * count
    i, j = spec.bonds.T
    mean_intensity = np.maximum(intensity.mean(axis=(0, 1), dtype=np.float64) - power, 0.0)
    square = np.maximum(
        (intensity**2).mean(axis=(0, 1), dtype=np.float64) - 4 * power * mean_intensity, 0.0
    )
    coupling = lattice.coupling_matrix(spec.bonds, spec.kappa, n)
    shifted = spec.omega + 2 * spec.chi * mean_intensity
    generator = lattice.linear_operator(shifted, coupling, np.diag(spec.damping))
    one_step = np.eye(n) + generator * (t[1] - t[0]) / steps
    propagator = np.eye(n, dtype=complex)
    mean = np.zeros((n, n), complex)
    for _ in range(steps):
        mean = mean + propagator / steps
        propagator = one_step @ propagator
    shared = samples * power * mean @ propagator.conj().T  # D, of all samples
    inverse = 1 / spec.noise**2
    own = np.diag(shared)
    omega = -own.imag * inverse
    loss = own.real * inverse
    kappa = -(shared[j, i].imag * inverse[i] + shared[i, j].imag * inverse[j])
    # −iχ(2|ψ|²ε + ψ²ε*) in the residual meets 2|ψ|²ε + ψ²ε* in the feature
    turned = 2 * mean_intensity * spec.omega + 5 * spec.chi * square
    slower = (steps + 1) / (2 * steps)  # C is the mean over the interval
    chi = 2 * power * scores[:n] - samples * power * (t[1] - t[0]) * slower * turned * inverse
    corrected = scores - np.concatenate([omega, kappa, chi, loss])

    variance = samples * power**2 / 2
    next_sample = inverse[i] ** 2 + inverse[j] ** 2
    scatter = [
        inverse**2,
        next_sample + (inverse[i] - inverse[j]) ** 2,
        4 * square * inverse**2,
        3 * inverse**2,
    ]
    gram = noisy.gram.copy()
    site = np.arange(n)
    gram[site, site] -= power * time
    if len(gram) > n:
        gram[site, n + site] -= 2 * power * time * mean_intensity
        gram[n + site, site] -= 2 * power * time * mean_intensity
        gram[n + site, n + site] -= 5 * power * time * square
    # a dark site may have less power than the noise of its readout
    size, directions = np.linalg.eigh(gram)
    gram = (directions * np.maximum(size, 0)) @ directions.conj().T
    return StateSums(corrected, gram, variance * np.concatenate(scatter))


def _weaken(
    score: np.ndarray, information: Any, scatter: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return score and information if the variance of s is F + R: F(F + R)⁻¹s and F(F + R)⁻¹F."""
    inner = information.toarray()
    factor = scipy.linalg.cho_factor(inner + np.diag(scatter), lower=True)
    weight = scipy.linalg.cho_solve(factor, inner)
    return weight.T @ score, inner @ weight


def count_steps(dt: float, t: np.ndarray) -> int:
    """Return the steps of the model per sample; 0 if that is not the same integer for all."""
    steps = np.diff(np.asarray(t, np.float64)) / dt
    stride = round(float(steps[0]))
    return stride if stride >= 1 and np.allclose(steps, stride, rtol=0, atol=1e-3) else 0


def _precision() -> str:
    return str(jnp.result_type(float))


def _sum_scores(
    task: Experiment, spec: options.KernelSpec, t: np.ndarray, trajectories: Trajectories
) -> np.ndarray:
    """Return ΣU of Euler steps from sample to sample, with modulation and varying drives.

    (N + B + 2N,)
    """
    graph = list_slots(spec)
    numbers = tabulate_network(spec)
    total = np.zeros(3 * spec.sites + len(spec.bonds))
    for j in range(len(trajectories.x)):
        for block in iterate_blocks(
            task, numbers, t, np.asarray(trajectories.x[j]), _select_context(trajectories, j)
        ):
            total += np.asarray(_scores(numbers, graph, *block), np.float64)
    return total


def collect_twin_parts(
    task: Experiment, spec: options.KernelSpec, table: np.ndarray, trajectories: Trajectories
) -> TwinSamples:
    """Return the two parts of the twin correction on measured states: see `kernel.twin`.

    The twin is the model of the score. For a network without modulation, on the time grid of the
    task. table: λ̄ (T+1,). Leaves are (E, ·) of ω, κ and χ.
    """
    graph = list_slots(spec)
    numbers = tabulate_network(spec)
    t = np.asarray(trajectories.t, np.float64)
    dt = np.diff(t)
    path = run(spec, 0, 1, noise=False, scores=False, record_every=1).trajectories
    assert path is not None
    xbar = path[0]
    q = np.asarray(
        _compute_adjoint(numbers, graph, _list_ports(spec), jnp.asarray(path[0]), jnp.asarray(dt))
    )

    def rewards(psi):
        return (
            np.abs(spec.port_gain * psi[:-1, spec.port_sites] - spec.incoming) ** 2
            @ spec.port_weight
            * dt
        )

    def sum_to_go(v):
        return np.append(np.cumsum(v[::-1])[::-1], 0.0)  # Σ_{k ≥ n}

    twin_to_go = sum_to_go(rewards(xbar))  # ν
    direct = []
    correction = []
    values = []
    means = []

    def inner(a, b):
        return np.sum((a.conj() * b).real, axis=1, dtype=np.float64)

    for j in range(len(trajectories.x)):
        x = np.asarray(trajectories.x[j])
        psi = to_complex(x)
        r = np.concatenate(
            [
                np.asarray(_residuals(numbers, graph, *b))
                for b in iterate_blocks(task, numbers, t, x, None)
            ]
        )
        to_go = sum_to_go(rewards(psi))
        guess = twin_to_go + inner(q, psi - xbar)
        lam = to_go - guess - sum_to_go(inner(q[1:], r))  # Λ
        weight = lam[1:] - table[1:]
        zeta = r / np.asarray(numbers.double_q)
        direct.append(sum_products(graph, q[1:] * dt[:, None], psi[:-1]))
        correction.append(
            sum_products(graph, zeta * weight[:, None].astype(zeta.real.dtype), psi[:-1])
        )
        values.append(to_go[0])
        means.append(lam)

    def stack(rows):
        return {name: jnp.stack([jnp.asarray(row[name]) for row in rows]) for name in KNOWN}

    return TwinSamples(
        stack(direct), stack(correction), jnp.asarray(values), np.mean(means, axis=0)
    )


# ----------------------------------------------------------------------------------- one trajectory


def iterate_blocks(
    task: Experiment, numbers: NetworkNumbers, t: np.ndarray, x: np.ndarray, context: PyTree
) -> Iterator[tuple[Array, Array, Array, Array | None]]:
    """Iterate over blocks of b ≤ `BLOCK` steps of a trajectory x (T+1, 2N).

    Yields states (b+1, 2N), intervals (b,), drive (N,) or (b, N), and δκ (b, B) or None.
    """
    steps = len(t) - 1
    varying = numbers.force.ndim == 2
    force = numbers.force[:: max(1, len(numbers.force) // steps)] if varying else numbers.force
    for n in range(0, steps, BLOCK):
        stop = min(n + BLOCK, steps)
        shift = (
            None
            if context is None
            else _tabulate_modulation(task.modulation, context, jnp.asarray(t[n:stop]))
        )
        dt = jnp.asarray(np.diff(t[n : stop + 1]), numbers.omega.dtype)
        yield (
            jnp.asarray(x[n : stop + 1], numbers.omega.dtype),
            dt,
            force[n:stop] if varying else force,
            shift,
        )


@functools.partial(jit, static_argnums=0)
def _tabulate_modulation(modulation: Any, context: PyTree, t: Array) -> Array:
    return jax.vmap(lambda when: coupled_modes.delta_kappa(modulation, context, when))(
        t.astype(jnp.result_type(float))
    )


def compute_drift(
    numbers: NetworkNumbers,
    graph: NeighbourSlots,
    psi: Array,
    force: Array,
    shift: Array | None = None,
) -> Array:
    """Return μ at states ψ. (..., N) complex. shift: δκ (..., B) of the modulation."""

    def couple(psi: Array) -> Array:
        if shift is None:
            # a product with one real matrix is several times faster than gathering neighbours;
            # with a complex one it would take twice as long
            return jax.lax.complex(psi.real @ numbers.coupling, psi.imag @ numbers.coupling)
        kappa = numbers.kappa + shift
        total = jnp.zeros_like(psi)
        for d in range(graph.site.shape[1]):
            k = kappa[..., graph.bond[:, d]] * graph.used[:, d]
            total = total + k * psi[..., graph.site[:, d]]
        return total

    return lattice.lattice_drift(
        numbers.omega,
        numbers.chi,
        psi,
        couple=couple,
        damp=lambda psi: numbers.damping * psi,
        source=force,
    )


class Residual(NamedTuple):
    """Residuals of the steps of a block.

    r: ψ' − ψ − μΔt (b, N) complex.
    psi: ψ (b, N) complex.
    """

    r: Array
    psi: Array


def _residual(
    numbers: NetworkNumbers,
    graph: NeighbourSlots,
    x: Array,
    dt: Array,
    force: Array,
    shift: Array | None,
) -> Residual:
    """Return the residuals of the steps of x (b+1, 2N)."""
    psi = coupled_modes.to_psi(x)
    moved = compute_drift(numbers, graph, psi[:-1], force, shift) * dt[:, None]
    return Residual(psi[1:] - psi[:-1] - moved, psi[:-1])


@jit
def _residuals(numbers: NetworkNumbers, graph: NeighbourSlots, *block: Any) -> Array:
    return _residual(numbers, graph, *block).r


@jit
def _scores(numbers: NetworkNumbers, graph: NeighbourSlots, *block: Any) -> Array:
    """Return ΣU of ω, κ, χ and Γ over a block. (N + B + 2N,)"""
    r, psi = _residual(numbers, graph, *block)
    z_re = r.real / numbers.double_q
    z_im = r.imag / numbers.double_q
    losses = -jnp.sum(z_re * psi.real + z_im * psi.imag, axis=0)
    return jnp.concatenate([_sum_products(graph.ends, z_re, z_im, psi.real, psi.imag), losses])


def _sum_products(ends: Array, z_re: Array, z_im: Array, re: Array, im: Array) -> Array:
    """Return Σ of Im ζ*ψ for ω, of both ends for κ, and of |ψ|² Im ζ*ψ for χ. (N + B + N,)"""
    own = z_re * im - z_im * re
    # of all pairs: one product of matrices is faster than B of columns
    cross = z_re.T @ im - z_im.T @ re
    i, j = ends.T
    return jnp.concatenate(
        [own.sum(axis=0), cross[i, j] + cross[j, i], jnp.sum(own * (re**2 + im**2), axis=0)]
    )


_sum_products_jit = jit(_sum_products)


def sum_products(graph: NeighbourSlots, zeta: np.ndarray, psi: np.ndarray) -> dict[str, np.ndarray]:
    """Return `_sum_products` of ζ (T, N) and ψ (T, N), complex, by family."""
    sites = psi.shape[1]
    total = np.zeros(2 * sites + len(graph.ends))
    for n in range(0, len(psi), BLOCK):
        z = zeta[n : n + BLOCK]
        y = psi[n : n + BLOCK]
        total += np.asarray(
            _sum_products_jit(graph.ends, z.real, z.imag, y.real, y.imag), np.float64
        )
    return dict(zip(KNOWN, np.split(total, [sites, len(total) - sites]), strict=True))


def _compute_gram(
    x: np.ndarray, dt: np.ndarray, every: int, kerr: bool, power: float = 0.0
) -> np.ndarray:
    """Return Σ z* zᵀ Δt of z = (ψ, |ψ|²ψ) (2N, 2N), or of z = ψ (N, N) without `kerr`. Complex

    every: one of so many steps is used. power: E|ε|² of noise on ψ, which adds 2E|ε|²ψ to |ψ|²ψ.
    """
    begins = np.arange(0, len(dt), every)
    share = np.add.reduceat(dt, begins)
    z = to_complex(x[begins])
    z = np.concatenate([z, (np.abs(z) ** 2 - 2 * power) * z], axis=1) if kerr else z
    z = z * np.sqrt(share)[:, None].astype(z.real.dtype)
    return multiply_hermitian(z)


def multiply_hermitian(z: np.ndarray) -> np.ndarray:
    """Return z†z (K, K), complex, of z (n, K): half of a product of matrices."""
    product = scipy.linalg.blas.cherk if z.dtype == np.complex64 else scipy.linalg.blas.zherk
    # of zᵀ, which lies in memory as BLAS reads it: the upper half of (z†z)*
    upper = product(1.0, z.T).astype(np.complex128)
    return np.conj(upper) + np.tril(upper.T, -1)


class ParameterPairs(NamedTuple):
    """Pairs of parameters of one site, whose features' products are the information.

    row: index of the first parameter.
    column: index of the second parameter.
    left: index of the first feature.
    right: index of the second feature.
    phase: phase of the product.
    site: their site.
    """

    row: np.ndarray
    column: np.ndarray
    left: np.ndarray
    right: np.ndarray
    phase: np.ndarray
    site: np.ndarray


@functools.lru_cache(maxsize=8)
def _list_pairs(sites: int, bonds: bytes, kerr: bool) -> ParameterPairs:
    """Return all pairs of parameters that act on the same site.

    bonds: an array of integers (B, 2) as bytes, which are compared faster than tuples.
    """
    n = sites
    ends = np.frombuffer(bonds, np.int64).reshape(-1, 2).tolist()
    b = len(ends)
    # parameter, feature, and phase of the feature: −i, for a loss −1
    around: list[list[tuple[int, int, complex]]] = [
        [(i, i, -1j), (2 * n + b + i, i, -1)] for i in range(n)
    ]
    for i, features in enumerate(around):
        if kerr:
            features.append((n + b + i, n + i, -1j))
    for bond, (i, j) in enumerate(ends):
        around[i].append((n + bond, j, -1j))
        around[j].append((n + bond, i, -1j))
    rows = [
        (p, q, f, g, np.conj(a) * c, site)
        for site, features in enumerate(around)
        for p, f, a in features
        for q, g, c in features
    ]
    return ParameterPairs(*(np.array(column) for column in zip(*rows, strict=True)))


def _compute_information(
    spec: options.KernelSpec, gram: np.ndarray, kerr: bool
) -> scipy.sparse.csr_array:
    """Return the information F of ω, κ, χ and Γ, sparse. (N + B + 2N)²"""
    p = _list_pairs(spec.sites, np.asarray(spec.bonds, np.int64).tobytes(), kerr)
    values = (p.phase * gram[p.left, p.right]).real / spec.noise[p.site] ** 2
    size = 3 * spec.sites + len(spec.bonds)
    return scipy.sparse.csr_array((values, (p.row, p.column)), shape=(size, size))


def on_host() -> Any:
    """Return a context with JAX's arrays on the host; JAX_PLATFORMS=cuda has no host device."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return nullcontext()


Slopes = dict[str, scipy.sparse.csr_array]
"""∂p/∂u of every family of parameters (·, K), in double precision."""


def linearise(at: At, theta: Params, u: np.ndarray) -> tuple[dict[str, np.ndarray], Slopes]:
    """Return p at (θ, u), and ∂p/∂u, on the host: these are small.

    Where each parameter depends on one unknown alone, the slopes are one directional derivative.
    """
    real = jnp.result_type(float)
    with on_host():
        settings = {name: np.asarray(v) for name, v in theta.items()}
        point = np.asarray(u, real)
        sources = _find_sources(at, _describe(settings), u.shape, real)
        if sources is None:
            p, dense = _with_jacobian(at, settings, point)
            slopes = {
                name: scipy.sparse.csr_array(np.asarray(v).reshape(-1, u.size), dtype=np.float64)
                for name, v in dense.items()
            }
        else:
            p, along = _with_slope(at, settings, point)
            slopes = {
                name: _place(np.asarray(v, np.float64), sources[name], u.size)
                for name, v in along.items()
            }
    return {name: np.asarray(v) for name, v in p.items()}, slopes


def _place(values: np.ndarray, columns: np.ndarray, width: int) -> scipy.sparse.csr_array:
    """Return a matrix with one value per row, in the given columns; −1 for a row of zeros."""
    columns = columns.ravel()
    there = (columns >= 0) & (values.ravel() != 0)
    starts = np.concatenate([[0], np.cumsum(there)])
    entries = (values.ravel()[there], columns[there], starts)
    return scipy.sparse.csr_array(entries, shape=(columns.size, width))


def _describe(theta: Params) -> tuple[tuple[str, tuple[int, ...], Any], ...]:
    """Return names, shapes and types of settings, as the key of a cache."""
    return tuple((name, np.shape(v), jnp.result_type(v)) for name, v in theta.items())


@functools.lru_cache(maxsize=32)
def _is_linear(at: At, theta: tuple, shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether ∂p/∂u does not depend on u. Cached: tracing `at` takes longer than calling it."""
    settings = {name: jnp.ones(size, kind) for name, size, kind in theta}
    return not dependence.varies_in_slope(at, settings, jnp.zeros(shape, dtype), on=1)


@functools.lru_cache(maxsize=32)
def _find_sources(
    at: At, theta: tuple, shape: tuple[int, ...], dtype: Any
) -> dict[str, np.ndarray] | None:
    """Return the unknown that each parameter depends on; None if one depends on several."""
    settings = {name: jnp.ones(size, kind) for name, size, kind in theta}
    return dependence.find_sources(at, settings, jnp.zeros(shape, dtype), on=1)


@functools.partial(jit, static_argnums=0)
def _with_jacobian(at: At, theta: Params, u: Array) -> tuple[Params, Params]:
    return at(theta, u), jax.jacfwd(lambda v: at(theta, v))(u)


@functools.partial(jit, static_argnums=0)
def _with_slope(at: At, theta: Params, u: Array) -> tuple[Params, Params]:
    return jax.jvp(lambda v: at(theta, v), (u,), (jnp.ones_like(u),))


class Ports(NamedTuple):
    """Ports that are rewarded, for the adjoint.

    site: (M,).
    gain: √(2γ_e) (M,).
    weight: w (M,).
    incoming: s⁺ (T, M).
    """

    site: Array
    gain: Array
    weight: Array
    incoming: Array


def _list_ports(spec: options.KernelSpec) -> Ports:
    real = jnp.result_type(float)
    return Ports(
        jnp.asarray(spec.port_sites),
        jnp.asarray(spec.port_gain, real),
        jnp.asarray(spec.port_weight, real),
        jnp.asarray(
            np.broadcast_to(spec.incoming, (spec.steps, spec.port_sites.size)), jnp.result_type(1j)
        ),
    )


@jit
def _compute_adjoint(
    numbers: NetworkNumbers, graph: NeighbourSlots, ports: Ports, xbar: Array, dt: Array
) -> Array:
    """Return the adjoint q_n (T+1, N), complex, with q_T = 0: Re q*d is the effect of a kick d."""

    def back(q: Array, step: Any) -> tuple[Array, Array]:
        psi, s_plus, force, dt = step

        def reward_to_go(v: Array) -> Array:  # g Δt + q·(ψ + μΔt), of the quadratures v (2, N)
            out_re = ports.gain * v[0, ports.site] - s_plus.real
            out_im = ports.gain * v[1, ports.site] - s_plus.imag
            after = compute_drift(numbers, graph, jax.lax.complex(v[0], v[1]), force) * dt
            moved = q[0] @ (v[0] + after.real) + q[1] @ (v[1] + after.imag)
            return ports.weight @ (out_re**2 + out_im**2) * dt + moved

        q = jax.grad(reward_to_go)(jnp.stack([psi.real, psi.imag]))
        return q, q

    last = jnp.zeros((2, xbar.shape[1]), xbar.real.dtype)
    force = jnp.broadcast_to(numbers.force, xbar[:-1].shape)
    steps = (xbar[:-1], ports.incoming, force, dt.astype(xbar.real.dtype))
    _, path = jax.lax.scan(back, last, steps, reverse=True)
    adjoint = jnp.concatenate([path, last[None]])
    return jax.lax.complex(adjoint[:, 0], adjoint[:, 1])


def _select_context(trajectories: Trajectories, j: int) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[j], trajectories.context)
