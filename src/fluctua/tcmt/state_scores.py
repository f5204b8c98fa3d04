"""Measured states of a resonator network: returns, what they say about its parameters, and the twin
correction.

The fused kernels score the noise that they drew. Here are states ψ of a device whose numbers are
not the model's, so that residuals are taken against the model,

    r_n = ψ_{n+1} − ψ_n − μ(ψ_n)Δt,   ζ = r/2Q,   U_ω = Im ζ*ψ,   U_χ = |ψ|²U_ω,   U_κ = Im(ζ_n*ψ_m
    + ζ_m*ψ_n), U_Γ = −Re ζ*ψ,

by the CPU's kernel, or with modulation all steps of a trajectory at once, a block of them at a time
in the cache. The drift is linear in ω, κ, χ and Γ, with features −iψ_n, −i|ψ_n|²ψ_n, −iψ_m and
−ψ_n, so that the information about all of them follows from one Gram matrix of (ψ, |ψ|²ψ).

Samples some steps of the model apart are met by the model's own path from one to the next, ψ̄ being
its mean: the residual is then that of the model whatever the interval, and the features are right
up to what the network does within it.
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

from fluctua.core.arrays import Array, Params, PyTree, jit
from fluctua.core.dependence import varies_in_slope
from fluctua.core.likelihood import evidence as likelihood_evidence
from fluctua.core.likelihood.unknowns import At
from fluctua.core.trajectories import Trajectories
from fluctua.core.twin.correction import TwinSamples
from fluctua.tcmt import coupled_modes
from fluctua.tcmt import drift as lattice
from fluctua.tcmt.experiment import Experiment
from fluctua.tcmt.kernel import options
from fluctua.tcmt.kernel.cpu import measured_scores
from fluctua.tcmt.kernel.run import run

KNOWN = ("omega", "kappa", "chi")
"""Families of the twin correction.

Losses also enter the noise, and are left to the general path.
"""

SCORED = (*KNOWN, "gamma")
"""Families of the evidence.

Losses by what they do to the drift: their noise is taken as the model has it.
"""

BLOCK = 500
"""Steps at a time."""


class NeighbourSlots(NamedTuple):
    """Neighbours of every site in as many slots as the most of them has. site, bond (N, D);
    there (N, D): 1 or 0.
    """

    site: Array
    bond: Array
    there: Array
    ends: Array  # (B, 2)


class NetworkNumbers(NamedTuple):
    """A model at its parameters: ω, χ, Γ, 2Q (N,), κ (B,) and as a matrix (N, N), the drive
    (N,) or (T, N), complex.
    """

    omega: Array
    chi: Array
    damping: Array
    double_q: Array
    kappa: Array
    coupling: Array
    force: Array


def list_slots(spec: options.KernelSpec) -> NeighbourSlots:
    """The neighbours of every site of a network."""
    around: list[list[tuple[int, int]]] = [[] for _ in range(spec.sites)]
    for b, (i, j) in enumerate(spec.bonds.tolist()):
        around[i].append((j, b))
        around[j].append((i, b))
    slots = max((len(each) for each in around), default=0)
    table = np.zeros((3, spec.sites, slots), np.int32)
    for n, each in enumerate(around):
        for d, (m, b) in enumerate(each):
            table[:, n, d] = m, b, 1
    site, bond, there = (jnp.asarray(v) for v in table)
    return NeighbourSlots(site, bond, there, jnp.asarray(spec.bonds))


def tabulate_network(spec: options.KernelSpec) -> NetworkNumbers:
    """The numbers of a kernel's network, in JAX's precision."""
    force = np.zeros((len(spec.drive), spec.sites), complex)
    force[:, spec.drive_sites] = spec.drive

    def real(v):
        return jnp.asarray(v, jnp.result_type(float))

    coupling = lattice.coupling_matrix(spec.bonds, spec.kappa, spec.sites)
    whole = jnp.asarray(force if len(force) > 1 else force[0], jnp.result_type(1j))
    return NetworkNumbers(
        real(spec.omega),
        real(spec.chi),
        real(spec.damping),
        real(spec.noise**2),
        real(spec.kappa),
        real(coupling),
        whole,
    )


def to_complex(x: Array) -> Array:
    """ψ (..., N) of states [Re ψ, Im ψ] (..., 2N)."""
    n = np.shape(x)[-1] // 2
    return np.asarray(x)[..., :n] + 1j * np.asarray(x)[..., n:]


def returns(spec: options.KernelSpec, t: np.ndarray, x: Array) -> np.ndarray:
    """R of every trajectory, by the rule that goes with the step. x: (E, T+1, 2N) -> (E,)"""
    interval = np.diff(np.asarray(t, np.float64))
    weight = interval
    seen = np.asarray(x)[:, :-1]
    if spec.integrator != "euler":
        weight = (np.append(interval, 0.0) + np.append(0.0, interval)) / 2
        seen = np.asarray(x)
    psi = to_complex(seen)[..., spec.port_sites]
    stride = (spec.steps // len(interval)) or 1
    out = spec.port_gain * psi - (
        spec.incoming[::stride] if len(spec.incoming) > 1 else spec.incoming
    )
    return np.einsum("etp,p,t->e", np.abs(out) ** 2, spec.port_weight, weight)


def evidence(
    task: Experiment,
    spec: options.KernelSpec,
    at: At,
    theta: Params,
    u: np.ndarray,
    trajectories: Trajectories,
    every: int,
    readout: float = 0.0,
    slope: dict[str, np.ndarray] | None = None,
) -> likelihood_evidence.Evidence:
    """What measured states say about unknowns of ω, κ, χ and γ: the network's own
    `fluctua.core.likelihood.evidence.collect_evidence`.

    Args:
        task: the model.
        spec: its numbers at p(θ, u).
        at: (θ, u) -> p.
        theta: the settings at which they were measured.
        u: where the derivatives are taken.
        trajectories: x (E, T+1, 2N); with modulation, its `context` too.
        every: steps of which one counts for the information.
        readout: standard deviation of the measurement on each quadrature; see `StateSums`.
        slope: ∂p/∂u of `at_point`, if it is at hand.

    """
    slope = at_point(at, theta, u)[1] if slope is None else slope
    shapes = tuple((name, np.shape(v), jnp.result_type(v)) for name, v in theta.items())
    linear = _is_linear(at, shapes, u.shape, jnp.result_type(float))
    sizes = {"omega": spec.sites, "kappa": len(spec.bonds), "chi": spec.sites, "gamma": spec.sites}
    slope = {name: slope.get(name, np.zeros((sizes[name], u.size))) for name in SCORED}
    kerr = bool(slope["chi"].any())
    sums = sum_states(task, spec, trajectories, every, kerr, readout)
    information = _information(spec, sums.gram, kerr)
    jacobian = scipy.sparse.csr_array(
        np.concatenate([slope[name] for name in SCORED])
    )  # of a knob or two each
    score = sums.scores
    if readout:
        score, information = _weakened(score, information, sums.scatter)
    information = jacobian.T @ (information @ jacobian)
    dense = information.toarray() if scipy.sparse.issparse(information) else information
    return likelihood_evidence.Evidence(
        jacobian.T @ score, dense, linear and _stride(spec, trajectories.t) <= 1
    )


class StateSums(NamedTuple):
    """Sums over measured states, of all families.

    scores: ΣU (N + B + 2N,). gram: Σ z*zᵀΔt of z = (ψ, |ψ|²ψ), complex.

    What the noise ε of a readout adds to them on average is taken off, with E|ε|² = ν² and what it
    adds to a residual and its features, −Bε and Cε, B = (1 + AΔt)ᵏ and C the mean of (1 + AΔt)ʲ
    over the k steps of an interval:

        ΔU_ω = −Im D_nn/2Q_n,   ΔU_Γ = Re D_nn/2Q_n,   ΔU_κ = −Im(D_mn/2Q_n + D_nm/2Q_m),   D = ν² C
        B†   a sample.

    scatter: the variance that ε of one sample with that of the next, and with itself, leaves in
    them, (N + B + 2N,).
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
    """The sums that evidence is made of. kerr: whether χ is among the unknowns."""
    t = np.asarray(trajectories.t, np.float64)
    stride = _stride(spec, t)
    power = 2 * readout**2
    # |ψ + ε|²(ψ + ε) is larger than |ψ|²ψ by 2ν²ψ on average
    lowered = spec.replace(omega=spec.omega - 2 * power * spec.chi) if readout else spec
    native = stride and trajectories.context is None and len(spec.drive) == 1
    if native:
        scores = measured_scores(
            options.KernelJob(lowered, 0, 1, options.KernelOptions(dtype=_precision())),
            trajectories.x,
            stride,
        )
    else:
        scores = _blockwise(task, lowered, t, trajectories)
    thinned = max(1, every // max(stride, 1))
    gram = np.sum(
        [_gram(np.asarray(x)[:-1], np.diff(t), thinned, kerr, power) for x in trajectories.x],
        axis=0,
    )
    if not readout:
        return StateSums(scores, gram, np.zeros_like(scores))
    some = np.abs(to_complex(np.asarray(trajectories.x)[:, :-1:thinned])) ** 2
    noisy = StateSums(scores, gram, np.zeros_like(scores))
    return _without_readout(spec, noisy, some, t, power, stride if native else 1)


def _without_readout(
    spec: options.KernelSpec,
    noisy: StateSums,
    intensity: np.ndarray,
    t: np.ndarray,
    power: float,
    steps: int,
) -> StateSums:
    """The sums less what the noise of a readout adds to them on average.

    noisy: sums as they were measured. intensity: |ψ|² of some samples (E, ·, N). power: E|ε|².
    steps: of the model in an interval.
    """
    scores = noisy.scores
    count = len(intensity)
    n = spec.sites
    samples = count * (len(t) - 1)
    time = float(t[-1] - t[0]) * count
    i, j = spec.bonds.T
    bright = np.maximum(intensity.mean(axis=(0, 1), dtype=np.float64) - power, 0.0)
    square = np.maximum(
        (intensity**2).mean(axis=(0, 1), dtype=np.float64) - 4 * power * bright, 0.0
    )
    coupling = lattice.coupling_matrix(spec.bonds, spec.kappa, n)
    shifted = spec.omega + 2 * spec.chi * bright
    generator = lattice.linear_operator(shifted, coupling, np.diag(spec.damping))
    one = np.eye(n) + generator * (t[1] - t[0]) / steps
    onward = np.eye(n, dtype=complex)
    mean = np.zeros((n, n), complex)
    for _ in range(steps):
        mean = mean + onward / steps
        onward = one @ onward
    shared = samples * power * mean @ onward.conj().T  # D, of all samples
    inverse = 1 / spec.noise**2
    own = np.diag(shared)
    omega = -own.imag * inverse
    loss = own.real * inverse
    kappa = -(shared[j, i].imag * inverse[i] + shared[i, j].imag * inverse[j])
    # −iχ(2|ψ|²ε + ψ²ε*) in the residual meets 2|ψ|²ε + ψ²ε* in the feature
    turned = 2 * bright * spec.omega + 5 * spec.chi * square
    slower = (steps + 1) / (2 * steps)  # C takes half of the turn back, of a long interval
    chi = 2 * power * scores[:n] - samples * power * (t[1] - t[0]) * slower * turned * inverse
    corrected = scores - np.concatenate([omega, kappa, chi, loss])

    lot = samples * power**2 / 2
    next_one = inverse[i] ** 2 + inverse[j] ** 2
    scatter = [
        inverse**2,
        next_one + (inverse[i] - inverse[j]) ** 2,
        4 * square * inverse**2,
        3 * inverse**2,
    ]
    gram = noisy.gram.copy()
    site = np.arange(n)
    gram[site, site] -= power * time
    if len(gram) > n:
        gram[site, n + site] -= 2 * power * time * bright
        gram[n + site, site] -= 2 * power * time * bright
        gram[n + site, n + site] -= 5 * power * time * square
    size, directions = np.linalg.eigh(gram)
    gram = (
        directions * np.maximum(size, 0)
    ) @ directions.conj().T  # a dark site may have less than its noise
    return StateSums(corrected, gram, lot * np.concatenate(scatter))


def _weakened(
    score: np.ndarray, information: Any, scatter: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """s and F of scores with more variance than F, by R: F(F + R)⁻¹s and F(F + R)⁻¹F."""
    inner = information.toarray()
    factor = scipy.linalg.cho_factor(inner + np.diag(scatter), lower=True)
    weight = scipy.linalg.cho_solve(factor, inner)
    return weight.T @ score, inner @ weight


def _stride(spec: options.KernelSpec, t: np.ndarray) -> int:
    return count_steps(spec.dt, t)


def count_steps(dt: float, t: np.ndarray) -> int:
    """Steps of the model between two samples; 0 where that is no whole number, the same for all."""
    steps = np.diff(np.asarray(t, np.float64)) / dt
    stride = round(float(steps[0]))
    return stride if stride >= 1 and np.allclose(steps, stride, rtol=0, atol=1e-3) else 0


def _precision() -> str:
    return str(jnp.result_type(float))


def _blockwise(
    task: Experiment, spec: options.KernelSpec, t: np.ndarray, trajectories: Trajectories
) -> np.ndarray:
    """ΣU of Euler steps from sample to sample, with modulation and drives that vary.

    (N + B + 2N,)
    """
    graph = list_slots(spec)
    numbers = tabulate_network(spec)
    total = np.zeros(3 * spec.sites + len(spec.bonds))
    for j in range(len(trajectories.x)):
        for block in blocks(
            task, numbers, t, np.asarray(trajectories.x[j]), _context(trajectories, j)
        ):
            total += np.asarray(_scores(numbers, graph, *block), np.float64)
    return total


def recorded(
    task: Experiment, spec: options.KernelSpec, table: np.ndarray, trajectories: Trajectories
) -> TwinSamples:
    """The two parts of the twin correction on measured states, model and score being one: see
    `kernel.twin`.

    table: λ̄ (T+1,). For a network without modulation, on the time grid of the task.
    -> leaves (E, ·) of ω, κ and χ.
    """
    graph = list_slots(spec)
    numbers = tabulate_network(spec)
    t = np.asarray(trajectories.t, np.float64)
    dt = np.diff(t)
    path = run(spec, 0, 1, noise=False, scores=False, record_every=1).trajectories
    assert path is not None
    xbar = path[0]
    q = np.asarray(_adjoint(numbers, graph, _ports(spec), jnp.asarray(path[0]), jnp.asarray(dt)))

    def g(psi):
        return (
            np.abs(spec.port_gain * psi[:-1, spec.port_sites] - spec.incoming) ** 2
            @ spec.port_weight
            * dt
        )

    def left(v):
        return np.append(np.cumsum(v[::-1])[::-1], 0.0)  # Σ_{k ≥ n}

    ahead = left(g(xbar))  # ν
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
            [np.asarray(_residuals(numbers, graph, *b)) for b in blocks(task, numbers, t, x, None)]
        )
        to_go = left(g(psi))
        guess = ahead + inner(q, psi - xbar)
        lam = to_go - guess - left(inner(q[1:], r))  # Λ
        weight = lam[1:] - table[1:]
        zeta = r / np.asarray(numbers.double_q)
        direct.append(products(graph, q[1:] * dt[:, None], psi[:-1]))
        correction.append(products(graph, zeta * weight[:, None].astype(zeta.real.dtype), psi[:-1]))
        values.append(to_go[0])
        means.append(lam)

    def shaped(each):
        return {name: jnp.stack([jnp.asarray(row[name]) for row in each]) for name in KNOWN}

    return TwinSamples(
        shaped(direct), shaped(correction), jnp.asarray(values), np.mean(means, axis=0)
    )


# ----------------------------------------------------------------------------------- one trajectory


def blocks(
    task: Experiment, numbers: NetworkNumbers, t: np.ndarray, x: np.ndarray, context: PyTree
) -> Iterator[tuple[Array, Array, Array, Array | None]]:
    """A trajectory x (T+1, 2N) some steps at a time: states, intervals, drive (N,) or (b, N),
    and δκ (b, B) or None.
    """
    steps = len(t) - 1
    varying = numbers.force.ndim == 2
    force = numbers.force[:: max(1, len(numbers.force) // steps)] if varying else numbers.force
    for n in range(0, steps, BLOCK):
        stop = min(n + BLOCK, steps)
        shift = (
            None if context is None else _delta(task.modulation, context, jnp.asarray(t[n:stop]))
        )
        dt = jnp.asarray(np.diff(t[n : stop + 1]), numbers.omega.dtype)
        yield (
            jnp.asarray(x[n : stop + 1], numbers.omega.dtype),
            dt,
            force[n:stop] if varying else force,
            shift,
        )


@functools.partial(jit, static_argnums=0)
def _delta(modulation: Any, context: PyTree, t: Array) -> Array:
    return jax.vmap(lambda when: coupled_modes.delta_kappa(modulation, context, when))(
        t.astype(jnp.result_type(float))
    )


def drift(
    numbers: NetworkNumbers,
    graph: NeighbourSlots,
    psi: Array,
    force: Array,
    shift: Array | None = None,
) -> Array:
    """μ at states ψ (..., N). shift: δκ (..., B) of the modulation. (..., N) complex"""

    def couple(psi: Array) -> Array:
        if shift is None:
            # one matrix for all states: its product is several times faster than gathering
            # neighbours, and one of complex numbers would take twice as long
            return jax.lax.complex(psi.real @ numbers.coupling, psi.imag @ numbers.coupling)
        kappa = numbers.kappa + shift
        total = jnp.zeros_like(psi)
        for d in range(graph.site.shape[1]):
            k = kappa[..., graph.bond[:, d]] * graph.there[:, d]
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
    """r = ψ' − ψ − μΔt and ψ at the steps of a block, (b, N) complex."""

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
    """The residuals of the steps from x (b+1, 2N)."""
    psi = coupled_modes.to_psi(x)
    moved = drift(numbers, graph, psi[:-1], force, shift) * dt[:, None]
    return Residual(psi[1:] - psi[:-1] - moved, psi[:-1])


@jit
def _residuals(numbers: NetworkNumbers, graph: NeighbourSlots, *block: Any) -> Array:
    return _residual(numbers, graph, *block).r


@jit
def _scores(numbers: NetworkNumbers, graph: NeighbourSlots, *block: Any) -> Array:
    """ΣU of ω, κ, χ and Γ over a block. (N + B + 2N,)"""
    r, psi = _residual(numbers, graph, *block)
    z_re = r.real / numbers.double_q
    z_im = r.imag / numbers.double_q
    losses = -jnp.sum(z_re * psi.real + z_im * psi.imag, axis=0)
    return jnp.concatenate([_products(graph.ends, z_re, z_im, psi.real, psi.imag), losses])


def _products(ends: Array, z_re: Array, z_im: Array, re: Array, im: Array) -> Array:
    """Σ of Im ζ*ψ for ω, of both ends for κ, and of |ψ|² Im ζ*ψ for χ. (N + B + N,)"""
    own = z_re * im - z_im * re
    cross = (
        z_re.T @ im - z_im.T @ re
    )  # all pairs: a product of matrices is faster than B of columns
    i, j = ends.T
    return jnp.concatenate(
        [own.sum(axis=0), cross[i, j] + cross[j, i], jnp.sum(own * (re**2 + im**2), axis=0)]
    )


_products_of = jit(_products)


def products(graph: NeighbourSlots, zeta: np.ndarray, psi: np.ndarray) -> dict[str, np.ndarray]:
    """The same of any ζ (T, N) and ψ (T, N), complex, family by family."""
    sites = psi.shape[1]
    total = np.zeros(2 * sites + len(graph.ends))
    for n in range(0, len(psi), BLOCK):
        z = zeta[n : n + BLOCK]
        y = psi[n : n + BLOCK]
        total += np.asarray(_products_of(graph.ends, z.real, z.imag, y.real, y.imag), np.float64)
    return dict(zip(KNOWN, np.split(total, [sites, len(total) - sites]), strict=True))


def _gram(x: np.ndarray, dt: np.ndarray, every: int, kerr: bool, power: float = 0.0) -> np.ndarray:
    """Σ z* zᵀ Δt over every so many steps, z = (ψ, |ψ|²ψ), the latter if asked for. (2N, 2N) or (N,
    N), complex

    power: E|ε|² of noise on ψ, to which |ψ|²ψ owes 2E|ε|²ψ.
    """
    begins = np.arange(0, len(dt), every)
    share = np.add.reduceat(dt, begins)
    z = to_complex(x[begins])
    z = np.concatenate([z, (np.abs(z) ** 2 - 2 * power) * z], axis=1) if kerr else z
    z = z * np.sqrt(share)[:, None].astype(z.real.dtype)
    return (z.conj().T @ z).astype(np.complex128)


class Products(NamedTuple):
    """Pairs of parameters of one site: their places, their features' places, the phase of the
    product, the site.
    """

    row: np.ndarray
    column: np.ndarray
    left: np.ndarray
    right: np.ndarray
    phase: np.ndarray
    site: np.ndarray


@functools.lru_cache(maxsize=8)
def _pairs(sites: int, bonds: tuple[tuple[int, int], ...], kerr: bool) -> Products:
    """Which products of features are the information: those of every site's own parameters."""
    n = sites
    b = len(bonds)
    # parameter, feature, and the feature's phase: −i, or −1 of a loss
    around: list[list[tuple[int, int, complex]]] = [
        [(i, i, -1j), (2 * n + b + i, i, -1)] for i in range(n)
    ]
    for i, each in enumerate(around):
        if kerr:
            each.append((n + b + i, n + i, -1j))
    for bond, (i, j) in enumerate(bonds):
        around[i].append((n + bond, j, -1j))
        around[j].append((n + bond, i, -1j))
    rows = [
        (p, q, f, g, np.conj(a) * c, site)
        for site, each in enumerate(around)
        for p, f, a in each
        for q, g, c in each
    ]
    return Products(*(np.array(column) for column in zip(*rows, strict=True)))


def _information(spec: options.KernelSpec, gram: np.ndarray, kerr: bool) -> scipy.sparse.csr_array:
    """F of ω, κ, χ and Γ, (N + B + 2N)²: every site's own block, whose features are those of
    its parameters.
    """
    p = _pairs(spec.sites, tuple(map(tuple, spec.bonds.tolist())), kerr)
    values = (p.phase * gram[p.left, p.right]).real / spec.noise[p.site] ** 2
    size = 3 * spec.sites + len(spec.bonds)
    return scipy.sparse.csr_array((values, (p.row, p.column)), shape=(size, size))


def _host() -> Any:
    """JAX's arrays on the host, where it has one: JAX_PLATFORMS=cuda leaves it out."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return nullcontext()


def at_point(
    at: At, theta: Params, u: np.ndarray
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """p at (θ, u), and ∂p/∂u of every family (·, K), on the host: a GPU is for the kernels,
    these are small.
    """
    with _host():
        settings = {name: np.asarray(v) for name, v in theta.items()}
        p, slope = _with_jacobian(at, settings, np.asarray(u, jnp.result_type(float)))
        return {k: np.asarray(v) for k, v in p.items()}, {
            k: np.asarray(v, np.float64) for k, v in slope.items()
        }


@functools.lru_cache(maxsize=32)
def _is_linear(at: At, theta: tuple, shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether ∂p/∂u does not depend on u: a property of `at`, which takes longer to trace than
    to use.
    """
    settings = {name: jnp.ones(size, kind) for name, size, kind in theta}
    return not varies_in_slope(at, settings, jnp.zeros(shape, dtype), on=1)


@functools.partial(jit, static_argnums=0)
def _with_jacobian(at: At, theta: Params, u: Array) -> tuple[Params, Params]:
    return at(theta, u), jax.jacfwd(lambda v: at(theta, v))(u)


class Ports(NamedTuple):
    """What is rewarded, for the adjoint."""

    site: Array
    gain: Array
    weight: Array
    incoming: Array


def _ports(spec: options.KernelSpec) -> Ports:
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
def _adjoint(
    numbers: NetworkNumbers, graph: NeighbourSlots, ports: Ports, xbar: Array, dt: Array
) -> Array:
    """q_n (T+1, N) as complex numbers, so that Re q*d is the gradient's product with a push d:
    q_T = 0.
    """

    def back(q: Array, step: Any) -> tuple[Array, Array]:
        psi, s_plus, force, dt = step

        def onward(v: Array) -> Array:  # g Δt + q·(ψ + μΔt), of the quadratures v (2, N)
            out_re = ports.gain * v[0, ports.site] - s_plus.real
            out_im = ports.gain * v[1, ports.site] - s_plus.imag
            after = drift(numbers, graph, jax.lax.complex(v[0], v[1]), force) * dt
            moved = q[0] @ (v[0] + after.real) + q[1] @ (v[1] + after.imag)
            return ports.weight @ (out_re**2 + out_im**2) * dt + moved

        q = jax.grad(onward)(jnp.stack([psi.real, psi.imag]))
        return q, q

    last = jnp.zeros((2, xbar.shape[1]), xbar.real.dtype)
    force = jnp.broadcast_to(numbers.force, xbar[:-1].shape)
    steps = (xbar[:-1], ports.incoming, force, dt.astype(xbar.real.dtype))
    _, path = jax.lax.scan(back, last, steps, reverse=True)
    whole = jnp.concatenate([path, last[None]])
    return jax.lax.complex(whole[:, 0], whole[:, 1])


def _context(trajectories: Trajectories, j: int) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[j], trajectories.context)
