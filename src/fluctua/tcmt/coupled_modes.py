"""Stochastic temporal coupled-mode theory (End Matter) as a `Process`, the kernels' reference.

    dψ/dt = −i(ω + χ|ψ|²)ψ − i(κ + δκ(t))ψ − Γψ + D(s⁺ + σ⁽ᵉ⁾ η̇⁽ᵉ⁾) + D⁽ʳ⁾σ⁽ʳ⁾ η̇⁽ʳ⁾
    s⁻ = −s⁺ + Dᵀψ
    Γ = (DDᵀ + D⁽ʳ⁾D⁽ʳ⁾ᵀ)/2,     D_nm = weight_nm √(2γ_e,m),     D⁽ʳ⁾ = diag √(2γ_n)

The state is x = [Re ψ, Im ψ] (2N,). Each quadrature of each channel is its own standard Wiener
process, so that on either quadrature Q = (D σ⁽ᵉ⁾² Dᵀ + D⁽ʳ⁾σ⁽ʳ⁾²D⁽ʳ⁾ᵀ)/2.

Frames. `omega` are detunings from the first drive's frequency ω₀ in both. "rotating" (the default)
writes ψ e^{iω₀t}; the noise law is circular and does not change. "lab" adds ω₀ to every resonator,
which makes Euler steps unstable: a step multiplies a free mode by |1 − iωΔt|, a growth rate ω²Δt/2,
which for the paper's ω = 10 and Δt = 10⁻³ is 0.05, more than the loss of 0.02.
`fluctua.tcmt.stability` checks this.

The antagonistic modulation of the couplings is drawn once per bond and trajectory:

    δκ_b(t) = σ_κ Σ_{k=1}^{K} ã_k sin(kΩt + φ_k),   Ω = Ω_max/K
    ã = a/|a|,   a_k ~ N(0, 1),   φ_k ~ U(0, 2π)

The draws are counters of the same generator as the noise, so that a kernel can make them in place.
For bond b and harmonic k = 1…K the four words w of Philox at
(seed, trajectory, site 2³¹ + bK + k − 1, pair 2³² − 1) give a_k as the first Box–Muller normal of
(w₀, w₁) and φ_k = 2π(w₂ + ½)2⁻³². The noise never reaches these counters: its sites and pairs of
steps stay below 2³¹.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core import draws
from fluctua.core.arrays import Array, Params, PyTree
from fluctua.core.process import STEPS, NoiseProduct, Process
from fluctua.tcmt.drift import abs2, couple_bonds, lattice_drift
from fluctua.tcmt.network import Network, parameters

Frame = Literal["rotating", "lab"]
DENSE_LIMIT = 256
"""Largest network whose diffusion is a matrix if a lead sits on several resonators; beyond, a
product."""


class Drive(NamedTuple):
    """A drive s⁺(t) = amplitude e^{i phase} envelope(t) e^{−i frequency t} on one lead.

    Several drives add up; `omega` is measured from the frequency of the first.

    lead: index of the lead.
    amplitude: |s⁺|.
    phase: in radians.
    frequency: angular.
    envelope: t -> a number, in JAX; None for a constant drive.

    >>> pulse = tcmt.Drive(lead=0, amplitude=10.0, envelope=lambda t: jnp.exp(-((t - 1.0) ** 2)))
    >>> task = tcmt.transmission(network, drive=pulse, horizon=2.0)
    """

    lead: int
    amplitude: float = 10.0
    phase: float = 0.0
    frequency: float = 0.0
    envelope: Callable[[Array], Array] | None = None


def check_drives(network: Network, drives: Drive | Sequence[Drive]) -> tuple[Drive, ...]:
    """Return one drive or several as a tuple; raise for a lead that does not exist."""
    many = isinstance(drives, list | tuple) and not isinstance(drives, Drive)
    several: tuple[Any, ...] = tuple(drives) if many else (drives,)
    for drive in several:
        if not isinstance(drive, Drive):
            raise TypeError(
                f"a drive is a Drive(lead, amplitude, ...); got {type(drive).__name__}: {drive!r}."
            )
        if not 0 <= drive.lead < network.leads:
            raise ValueError(
                f"a drive is on lead {drive.lead}, but the network has leads 0…{network.leads - 1}."
            )
        if not np.all(np.isfinite([drive.amplitude, drive.phase, drive.frequency])):
            raise ValueError(
                f"amplitude, phase and frequency of a drive must be finite numbers; got {drive}."
            )
    return several


def carrier(drives: Sequence[Drive]) -> float:
    """Return ω₀, the frequency that `omega` is measured from and that of the rotating frame."""
    return drives[0].frequency if drives else 0.0


def incoming(drives: Sequence[Drive], leads: int, t: Array, frame: Frame = "rotating") -> Array:
    """Return s⁺(t) on every lead, complex. (L,)"""
    origin = carrier(drives) if frame == "rotating" else 0.0
    constant = np.zeros(leads, complex)  # added up before compilation: there may be many drives
    total = jnp.zeros(leads, jnp.result_type(jnp.asarray(t).dtype, jnp.complex64))
    for drive in drives:
        s = drive.amplitude * np.exp(1j * drive.phase) * (np.arange(leads) == drive.lead)
        detuning = drive.frequency - origin
        if drive.envelope is None and not detuning:
            constant += s
            continue
        shape = 1.0 if drive.envelope is None else drive.envelope(t)
        phase = jnp.exp(-1j * detuning * t) if detuning else 1.0
        total += jnp.asarray(s, total.dtype) * shape * phase
    return total + jnp.asarray(constant, total.dtype)


def to_psi(x: Array) -> Array:
    """Return ψ = Re + i Im. (2N,) -> (N,)"""
    n = x.shape[-1] // 2
    return jax.lax.complex(x[..., :n], x[..., n:])


def to_x(psi: Array) -> Array:
    """Return [Re ψ, Im ψ]. (N,) -> (2N,)"""
    return jnp.concatenate([psi.real, psi.imag], axis=-1)


def lead_matrix(network: Network, p: Mapping[str, Array]) -> Array:
    """Return D. (N, L)"""
    return network.lead_weights * jnp.sqrt(2 * p["gamma_e"])


def damp(network: Network, p: Mapping[str, Array], psi: Array) -> Array:
    """Return Γψ = (DDᵀ/2 + γ)ψ. (N,)"""
    d = lead_matrix(network, p)
    if network.local:  # DDᵀ is diagonal
        return ((d**2).sum(axis=1) / 2 + p["gamma"]) * psi
    return d @ (d.T @ psi) / 2 + p["gamma"] * psi


def outgoing(network: Network, p: Mapping[str, Array], psi: Array, s_plus: Array) -> Array:
    """Return s⁻ = −s⁺ + Dᵀψ, without the white noise of the incoming channels. (L,)"""
    return -s_plus + lead_matrix(network, p).T @ psi


@dataclass(frozen=True)
class NetworkDrift:
    """Drift μ of the network: (theta, x, t, context) -> (2N,).

    A record, so that equal drifts share a compilation.
    """

    network: Network
    drives: tuple[Drive, ...]
    frame: Frame = "rotating"
    modulation: Modulation | None = None

    def __call__(self, theta: Params, x: Array, t: Array, context: PyTree) -> Array:
        """Return dψ/dt as quadratures. (2N,)"""
        p = parameters(self.network, theta)
        psi = to_psi(x)
        offset = carrier(self.drives) if self.frame == "lab" else 0.0
        kappa = p["kappa"] + (delta_kappa(self.modulation, context, t) if self.modulation else 0.0)
        s_plus = incoming(self.drives, self.network.leads, t, self.frame)
        rate = lattice_drift(
            p["omega"] + offset,
            p["chi"],
            psi,
            couple=partial(couple_bonds, self.network.bonds, kappa),
            damp=partial(damp, self.network, p),
            source=lead_matrix(self.network, p) @ s_plus,
        )
        return to_x(rate)


# -------------------------------------------------------------------------------------------- noise


@dataclass(frozen=True)
class DiagonalNoise:
    """Noise amplitudes per site and quadrature, for leads on one resonator each. (2N,)

        σ_n = √(2Q_n),   Q_n = Σ_leads on n σ_e²γ_e + σ_r²γ_n

    All channels of a site are one Wiener process: the same law with less noise to draw, as in the
    kernels.
    """

    network: Network

    def __call__(self, theta: Params, *state: Any) -> Array:
        """Return σ. (2N,)"""
        amplitude = site_amplitude(self.network, parameters(self.network, theta))
        return jnp.concatenate([amplitude, amplitude])


def site_amplitude(network: Network, p: Mapping[str, Array]) -> Array:
    """Return √(2Q_n), for leads on one resonator each. (N,)"""
    return jnp.sqrt(
        2
        * (
            network.lead_weights**2 @ (network.sigma_e**2 * p["gamma_e"])
            + network.sigma_r**2 * p["gamma"]
        )
    )


def channels(network: Network, p: Mapping[str, Array]) -> Array:
    """Return [D σ⁽ᵉ⁾, D⁽ʳ⁾ σ⁽ʳ⁾], from channels to resonators for either quadrature. (N, L+N)"""
    radiative = jnp.diag(jnp.sqrt(2 * p["gamma"]) * network.sigma_r)
    return jnp.concatenate([lead_matrix(network, p) * network.sigma_e, radiative], axis=1)


@dataclass(frozen=True)
class DenseNoise:
    """σ as a matrix (2N, 2(L+N)), for leads on several resonators.

    Columns: real quadratures of external, then radiative channels; then imaginary quadratures.
    """

    network: Network

    def __call__(self, theta: Params, *state: Any) -> Array:
        """Return σ. (2N, 2(L+N))"""
        return jnp.kron(jnp.eye(2), channels(self.network, parameters(self.network, theta)))


@dataclass(frozen=True)
class ChannelProduct:
    """The product σ dw (2N,) without the matrix; channels in the order of `DenseNoise`."""

    network: Network

    def __call__(self, theta: Params, x: Array, t: Array, context: PyTree, dw: Array) -> Array:
        """Return σ dw. (2N,)"""
        p = parameters(self.network, theta)
        leads = self.network.leads
        dw = dw.reshape(2, -1)
        external = (dw[:, :leads] * self.network.sigma_e) @ lead_matrix(self.network, p).T
        radiative = dw[:, leads:] * (jnp.sqrt(2 * p["gamma"]) * self.network.sigma_r)
        return (external + radiative).ravel().astype(x.dtype)


def channel_product(network: Network) -> NoiseProduct:
    """Return the noise as a product, for large networks with leads on several resonators."""
    return NoiseProduct(ChannelProduct(network), 2 * (network.leads + network.sites))


def process(
    network: Network,
    drive: Drive | Sequence[Drive],
    *,
    frame: Frame = "rotating",
    modulation: Modulation | None = None,
    integrator: str = "euler",
) -> Process:
    """Return the network as an Itô process with state [Re ψ, Im ψ] (2N,).

    θ is a dict with some of `network.FAMILIES`. Noise is diagonal if every lead sits on one
    resonator, a matrix or a product otherwise.

    Args:
        network: graph, losses and leads.
        drive: one or several.
        frame: "rotating" with the drive, or "lab".
        modulation: of the couplings; the process then needs `context` (see `coupled_modes.Draw`),
            which tasks add.
        integrator: "euler", "heun" or "rk4" (see `fluctua.core.integrators`).

    Returns: the process.

    >>> drive = tcmt.Drive(lead=0, amplitude=10.0)
    >>> process = tcmt.process(network, drive, integrator="heun")
    >>> simulator = fl.simulator(process, start=jnp.zeros(12), t=jnp.linspace(0.0, 0.2, 21))
    >>> simulator(key, theta, 4).x.shape
    (4, 21, 12)
    """
    if frame not in get_args(Frame):
        raise ValueError(
            f"`frame` must be one of {', '.join(map(repr, get_args(Frame)))}; got {frame!r}."
        )
    if integrator not in STEPS:
        raise ValueError(
            f"`integrator` must be one of {', '.join(map(repr, STEPS))}; got {integrator!r}."
        )
    noise: Callable[..., Array] | NoiseProduct
    if network.local:
        noise = DiagonalNoise(network)
    else:
        noise = DenseNoise(network) if network.sites <= DENSE_LIMIT else channel_product(network)
    return Process(
        NetworkDrift(network, check_drives(network, drive), frame, check_modulation(modulation)),
        noise,
        integrator=integrator,
    )


# ------------------------------------------------------------------------ for baselines and kernels


@dataclass(frozen=True)
class FieldIntensity:
    """The field intensity at each parameter (Baseline Variance Reduction), for binned baselines.

    |ψ_n|² for ω_n, χ_n and γ_n; |ψ_n|² + |ψ_m|² for κ_nm; the sum over the sites of the lead for
    γ_e.
    """

    network: Network

    def __call__(self, theta: Params, x: Array) -> PyTree:
        """Return one quantity per parameter, with the structure of θ."""
        power = abs2(to_psi(x))
        i, j = self.network.bonds.T
        touched = (self.network.lead_weights != 0).astype(power.dtype)
        intensity = {"kappa": power[i] + power[j], "gamma_e": touched.T @ power}
        return {name: intensity.get(name, power) for name in theta}


def condition(network: Network) -> FieldIntensity:
    """Return the paper's conditioning quantities, for `fluctua.baselines.binned`.

    For each parameter the power |ψ|² at its own sites. A task passes it by itself.

    Args:
        network: the device.

    Returns: (theta, x) -> {family: powers}.

    >>> by_power = fl.baselines.binned(tcmt.condition(network), bins=20)
    >>> estimator = task.estimator("jax", baseline=by_power)
    """
    return FieldIntensity(network)


class Coefficients(NamedTuple):
    """Coefficients of a step of a network with diagonal noise, float64.

    bonds: pairs of sites (B, 2).
    omega: ω (N,).
    kappa: κ (B,).
    chi: χ (N,).
    decay: Γ_n (N,).
    amplitude: √(2Q_n) (N,).
    lead_site: resonator of each lead (L,).
    lead_coupling: D of each lead (L,).
    """

    bonds: np.ndarray
    omega: np.ndarray
    kappa: np.ndarray
    chi: np.ndarray
    decay: np.ndarray
    amplitude: np.ndarray
    lead_site: np.ndarray
    lead_coupling: np.ndarray


def coefficients(network: Network, theta: Params, *, offset: float = 0.0) -> Coefficients:
    """Return θ and the network as NumPy arrays. offset: added to ω (the carrier, in the lab)."""
    if not network.local:
        raise ValueError(
            "a lead of this network sits on several resonators, so its diffusion is not diagonal "
            'and the fused kernels do not run it. Use backend="jax".'
        )
    p = {name: np.asarray(value, np.float64) for name, value in parameters(network, theta).items()}
    weight = network.lead_weights
    site = network.lead_sites
    return Coefficients(
        bonds=network.bonds,
        omega=p["omega"] + offset,
        kappa=p["kappa"],
        chi=p["chi"],
        decay=weight**2 @ p["gamma_e"] + p["gamma"],
        amplitude=np.sqrt(
            2 * (weight**2 @ (network.sigma_e**2 * p["gamma_e"]) + network.sigma_r**2 * p["gamma"])
        ),
        lead_site=site,
        lead_coupling=weight[site, np.arange(network.leads)] * np.sqrt(2 * p["gamma_e"]),
    )


def tabulate_incoming(
    drives: Sequence[Drive], leads: int, t: Array, frame: Frame = "rotating"
) -> np.ndarray:
    """Return s⁺ at each time. t (T,) -> (T, L) complex"""
    return np.asarray(jax.vmap(lambda when: incoming(drives, leads, when, frame))(jnp.asarray(t)))


def incoming_on_grid(
    drives: Sequence[Drive], leads: int, t: Array, frame: Frame = "rotating"
) -> np.ndarray:
    """Return s⁺ at the start of every step. t (T+1,) -> (T, L) complex"""
    return tabulate_incoming(drives, leads, jnp.asarray(t)[:-1], frame)


# --------------------------------------------------------------------------------------- modulation


FIRST_SITE = 0x8000_0000
PAIR = 0xFFFF_FFFF


class Modulation(NamedTuple):
    """Strength and spectrum of the modulation of the couplings.

    sigma_kappa: σ_κ.
    harmonics: K, N_dyn in the paper.
    omega_max: Ω_max.

    >>> modulation = tcmt.Modulation(sigma_kappa=0.1)
    >>> process = tcmt.process(network, tcmt.Drive(lead=0), modulation=modulation)
    >>> task = tcmt.transmission(network, sigma_kappa=0.1)  # draws it for every trajectory
    """

    sigma_kappa: float
    harmonics: int = 10
    omega_max: float = 1.0

    def frequencies(self) -> np.ndarray:
        """Return kΩ for k = 1…K. (K,)"""
        return np.arange(1, self.harmonics + 1) * self.omega_max / self.harmonics


def check_modulation(modulation: Modulation | None) -> Modulation | None:
    """Return a valid modulation, or None for σ_κ = 0."""
    if modulation is None:
        return None
    if not isinstance(modulation, Modulation):
        raise TypeError(
            "`modulation` must be a Modulation(sigma_kappa) or None; got "
            f"{type(modulation).__name__}."
        )
    if not modulation.sigma_kappa >= 0:
        raise ValueError(f"`sigma_kappa` must not be negative; got {modulation.sigma_kappa}.")
    if int(modulation.harmonics) != modulation.harmonics or modulation.harmonics < 1:
        raise ValueError(
            f"`harmonics` must be a whole number, at least 1; got {modulation.harmonics}."
        )
    return modulation if modulation.sigma_kappa > 0 else None


@dataclass(frozen=True)
class Draw:
    """The draw of a trajectory's modulation: (key of the noise, trajectory) -> quadratures.

    {"sine": ã cos φ (B, K), "cosine": ã sin φ (B, K)}. With quadratures δκ is linear in sin kΩt and
    cos kΩt, which all bonds and trajectories share: 2K of them per step instead of BK.

    bonds: B.
    harmonics: K.
    """

    bonds: int
    harmonics: int

    def __call__(self, key: Array, trajectory: Array) -> PyTree:
        """Return the quadratures of one trajectory."""
        a, phase = self.amplitude_and_phase(key, trajectory)
        return {"sine": a * jnp.cos(phase), "cosine": a * jnp.sin(phase)}

    def amplitude_and_phase(self, key: Array, trajectory: Array) -> tuple[Array, Array]:
        """Return ã and φ, each (B, K)."""
        site = jnp.arange(self.bonds * self.harmonics, dtype=jnp.uint32) + jnp.uint32(FIRST_SITE)

        def broadcast(v):
            return jnp.broadcast_to(jnp.asarray(v, jnp.uint32), site.shape)

        words = draws.philox_words(
            draws.philox_key_words(key), broadcast(trajectory), site, broadcast(PAIR)
        )
        a = draws.box_muller(words[0], words[1])[0].reshape(self.bonds, self.harmonics)
        phase = 2 * jnp.pi * (words[2].astype(a.dtype) + 0.5) * 2.0**-32
        return a / jnp.linalg.norm(a, axis=1, keepdims=True), phase.reshape(a.shape)


def delta_kappa(modulation: Modulation, context: PyTree, t: Array) -> Array:
    """Return δκ_b(t) of one trajectory. (B,)"""
    angle = jnp.asarray(modulation.frequencies(), context["sine"].dtype) * t
    return modulation.sigma_kappa * (
        context["sine"] @ jnp.sin(angle) + context["cosine"] @ jnp.cos(angle)
    )
