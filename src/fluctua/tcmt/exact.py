"""Exact moments of the Euler–Maruyama scheme of a linear network (χ = 0, σ_κ = 0), in float64.

A step is ψ' = Fψ + Δt D s⁺ + noise with F = 1 + ΔtA, A = −i(ω + κ) − Γ, so the mean m and the
Hermitian covariance C of ψ follow

    m' = Fm + Δt D s⁺,     C' = F C F† + 4QΔt,

(2QΔt from either quadrature; E[δψ δψᵀ] = 0 because the noise is circular). The reward is a weighted
sum of output powers, E|s⁻|² = |−s⁺ + dᵀm|² + dᵀC d*, and since F = Fᵀ the second part needs vectors
only:

    dᵀC_n d = Σ_{k<n} v_kᵀ 4QΔt v_k*,     v_k = F^k d.

That makes J and its gradient O(T(N + B)): what estimators and kernels are compared with.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.core.arrays import Array, Params, jit
from fluctua.tcmt.coupled_modes import (
    Drive,
    Frame,
    carrier,
    channels,
    damp,
    incoming,
    lead_matrix,
)
from fluctua.tcmt.drift import abs2, couple_bonds, lattice_drift
from fluctua.tcmt.experiment import Experiment
from fluctua.tcmt.network import Network, parameters

__all__ = ["kerr_gradient", "moments", "rewards", "value", "value_and_gradient"]


class StateMoments(NamedTuple):
    """Moments of ψ at every time.

    mean: m (T+1, N) complex.
    covariance: C (T+1, N, N) Hermitian.
    """

    mean: np.ndarray
    covariance: np.ndarray


def value(task: Experiment, theta: Params) -> float:
    """Return J, the expected return of a network without Kerr effect.

    Args:
        task: with a weighted output power as reward, Euler's step and no modulation.
        theta: {family: values}, with χ = 0.

    Returns: the expected return.

    >>> linear = {**theta, "chi": jnp.zeros(6)}
    >>> exact = tcmt.exact.value(task, linear)
    >>> estimate = task.estimator("cpu")(key, linear, 1000)
    >>> bool(abs(estimate.value - exact) < 4 * estimate.value_stderr)
    True
    """
    return float(rewards(task, theta).sum() * _scheme(task).dt)


def value_and_gradient(task: Experiment, theta: Params) -> tuple[float, dict[str, np.ndarray]]:
    """Return J and ∂J/∂θ. χ in θ must be zero; its gradient there is `kerr_gradient`.

    Args:
        task: with a weighted output power as reward, Euler's step and no modulation.
        theta: {family: values}, with χ = 0.

    Returns: J, and {family: gradient} of all families but χ.

    >>> value, gradient = tcmt.exact.value_and_gradient(task, {**theta, "chi": jnp.zeros(6)})
    >>> gradient["kappa"].shape
    (7,)
    """
    rest = {name: leaf for name, leaf in _numbers(task, theta).items() if name != "chi"}
    with jax.enable_x64(True):
        j, gradient = _value_and_gradient(_scheme(task), rest)
        return float(j), {name: np.asarray(leaf) for name, leaf in gradient.items()}


def rewards(task: Experiment, theta: Params) -> np.ndarray:
    """Return the expected reward rate E[g(X_n)] at the start of every step.

    Args:
        task: with a weighted output power as reward, Euler's step and no modulation.
        theta: {family: values}, with χ = 0.

    Returns: (T,).

    >>> tcmt.exact.rewards(task, {**theta, "chi": jnp.zeros(6)}).shape
    (20,)
    """
    numbers = _numbers(task, theta)
    with jax.enable_x64(True):
        return np.asarray(_rewards(_scheme(task), numbers))


def moments(task: Experiment, theta: Params) -> StateMoments:
    """Return mean and covariance of ψ at every time. Memory T·N²: for small networks.

    Args:
        task: with a weighted output power as reward, Euler's step and no modulation.
        theta: {family: values}, with χ = 0.

    Returns: mean (T+1, N) and covariance (T+1, N, N), complex.

    >>> moments = tcmt.exact.moments(task, {**theta, "chi": jnp.zeros(6)})
    >>> moments.mean.shape, moments.covariance.shape
    ((21, 6), (21, 6, 6))
    """
    numbers = _numbers(task, theta)
    with jax.enable_x64(True):
        return StateMoments(*map(np.asarray, _moments(_scheme(task), numbers)))


def kerr_gradient(task: Experiment, theta: Params) -> np.ndarray:
    """Return ∂J/∂χ at χ = 0 (N,). Memory T·N²: for small networks.

    To first order χ_l kicks site l by −iΔt f(z), f = |z|²z, z = ψ_l at step k, and the output at
    step n > k by (F^{n−1−k}d)_l times that. With ε the output's departure from its mean M, Gaussian
    moments give E[(M + ε)* f] = M*(|m|² + 2c)m + 2(|m|² + c) E[ε*δz], with m, c mean and variance
    of z.

    Args:
        task: with a weighted output power as reward, Euler's step and no modulation.
        theta: {family: values}, with χ = 0.

    Returns: (N,).

    >>> tcmt.exact.kerr_gradient(task, {**theta, "chi": jnp.zeros(6)}).shape
    (6,)
    """
    numbers = _numbers(task, theta)
    with jax.enable_x64(True):
        gradient = np.asarray(_kerr(_scheme(task), numbers))
    return gradient.reshape(task.copies, -1).sum(axis=0)


def propagator(
    network: Network, p: dict[str, Array], dt: float, offset: float, psi: Array
) -> Array:
    """Return Fψ, one noise-free step of the linear network. (N,)"""
    drift = lattice_drift(
        p["omega"] + offset,
        0.0,
        psi,
        couple=partial(couple_bonds, network.bonds, p["kappa"]),
        damp=partial(damp, network, p),
    )
    return psi + dt * drift


# Below, all arrays are float64 and of the complete state; θ is repeated for every copy.


class _Scheme(NamedTuple):
    """Part of a task that does not depend on θ; hashable, so that it is compiled once."""

    network: Network
    drives: tuple[Drive, ...]
    frame: Frame
    weights: tuple[float, ...]
    copies: int
    start: float
    dt: float
    steps: int

    def parameters(self, theta: Params) -> dict[str, Array]:
        return parameters(
            self.network, {name: jnp.tile(leaf, self.copies) for name, leaf in theta.items()}
        )

    def propagate(self, p: dict[str, Array], psi: Array) -> Array:
        offset = carrier(self.drives) if self.frame == "lab" else 0.0
        return propagator(self.network, p, self.dt, offset, psi)


def _scheme(task: Experiment) -> _Scheme:
    assert task.weights is not None  # checked by `_numbers`
    steps = len(task.t) - 1
    start = float(task.t[0])
    dt = float(task.t[-1] - task.t[0]) / steps
    network = task.simulated.replace()  # a copy; see `_numbers`
    return _Scheme(network, task.drives, task.frame, task.weights, task.copies, start, dt, steps)


def _mean(scheme: _Scheme, p: dict[str, Array]) -> tuple[Array, Array]:
    """Return m_n (T+1, N), and s⁺_n (T, L)."""
    network = scheme.network
    t = scheme.start + scheme.dt * jnp.arange(scheme.steps)
    s_plus = jax.vmap(lambda when: incoming(scheme.drives, network.leads, when, scheme.frame))(t)
    d = lead_matrix(network, p)

    def body(m: Any, s: Any) -> Any:
        after = scheme.propagate(p, m) + scheme.dt * (d @ s)
        return after, after

    empty = jnp.zeros(network.sites, complex)
    _, path = jax.lax.scan(body, empty, s_plus)
    return jnp.concatenate([empty[None], path]), s_plus


def _responses(scheme: _Scheme, p: dict[str, Array]) -> Array:
    """Return v_k = F^k d of every lead, k = 0…T−1. (T, L, N)"""
    step = jax.vmap(lambda v: scheme.propagate(p, v))
    d = lead_matrix(scheme.network, p).T.astype(complex)
    return jax.lax.scan(lambda v, _: (step(v), v), d, length=scheme.steps)[1]


@partial(jit, static_argnums=0)
def _rewards(scheme: _Scheme, theta: Params) -> Array:
    network = scheme.network
    p = scheme.parameters(theta)
    m, s_plus = _mean(scheme, p)
    mean_power = abs2(-s_plus + m[:-1] @ lead_matrix(network, p))
    v = _responses(scheme, p)
    external = 2 * abs2(v @ lead_matrix(network, p)) @ network.sigma_e**2
    radiative = 4 * abs2(v) @ (network.sigma_r**2 * p["gamma"])
    arriving = scheme.dt * (external + radiative)  # vᵀ 4QΔt v*
    noise_power = jnp.cumsum(arriving, axis=0) - arriving  # Σ_{k<n}: X_0 has no noise yet
    return (mean_power + noise_power) @ jnp.asarray(scheme.weights)


@partial(jit, static_argnums=0)
def _value_and_gradient(scheme: _Scheme, theta: Params) -> tuple[Array, Params]:
    return jax.value_and_grad(lambda th: _rewards(scheme, th).sum() * scheme.dt)(theta)


@partial(jit, static_argnums=0)
def _moments(scheme: _Scheme, theta: Params) -> tuple[Array, Array]:
    p = scheme.parameters(theta)
    columns = jax.vmap(lambda v: scheme.propagate(p, v), in_axes=1, out_axes=1)
    noise = channels(scheme.network, p)
    injected = 2 * scheme.dt * (noise @ noise.T)  # 4QΔt

    def body(c: Any, _: Any) -> Any:
        after = columns(columns(c).conj().T).conj().T + injected
        return after, after

    zero = jnp.zeros((scheme.network.sites, scheme.network.sites), complex)
    _, path = jax.lax.scan(body, zero, length=scheme.steps)
    return _mean(scheme, p)[0], jnp.concatenate([zero[None], path])


@partial(jit, static_argnums=0)
def _kerr(scheme: _Scheme, theta: Params) -> Array:
    p = scheme.parameters(theta)
    m, c = _moments(scheme, theta)
    s_plus = _mean(scheme, p)[1]
    m = m[:-1]
    c = c[:-1]
    output = -s_plus + m @ lead_matrix(scheme.network, p)  # M (T, L)
    v = _responses(scheme, p)
    total = jnp.zeros(scheme.network.sites)
    for lead, weight in enumerate(scheme.weights):
        if weight:
            total += weight * _lead_kerr(scheme, p, m, c, output[:, lead], v[:, lead])
    return total


def _lead_kerr(
    scheme: _Scheme, p: dict[str, Array], m: Array, c: Array, output: Array, v: Array
) -> Array:
    """Return ∂(Σ_n E|s⁻|²Δt)/∂χ of one lead. (N,)

    m: (T, N). c: (T, N, N). output: its mean M (T,). v: (T, N).
    """
    variance = jnp.real(jnp.diagonal(c, axis1=1, axis2=2))

    def backward(a: Any, mean_output: Any) -> Any:  # a_k = Σ_{n>k} M_n* F^{n−1−k} d
        return scheme.propagate(p, a) + mean_output.conj() * v[0], a

    _, arrival = jax.lax.scan(backward, jnp.zeros_like(v[0]), output, reverse=True)
    # W_k[a, l] = Σ_{j=1}^{T−1−k} v_j[a]* v_{j−1}[l]: (C_k W_k)_ll collects E[ε*δz] of all n > k
    products = jnp.einsum("ja,jl->jal", v[1:].conj(), v[:-1])
    upto = jnp.concatenate([jnp.zeros_like(products[:1]), jnp.cumsum(products, axis=0)])
    shared = jnp.einsum("kla,kal->kl", c, jnp.flip(upto, axis=0))  # T−1−k
    kicks = arrival * (abs2(m) + 2 * variance) * m + 2 * (abs2(m) + variance) * shared
    return scheme.dt * 2 * jnp.real(-1j * scheme.dt * kicks).sum(axis=0)


# ------------------------------------------------------------------------------------- the boundary


def _numbers(task: Experiment, theta: Params) -> dict[str, np.ndarray]:
    """Return θ in float64; raise for a task that these formulas do not solve.

    θ and the network are copied before JAX converts them to float64. JAX (0.10) caches a converted
    NumPy array for as long as compiled code holds it: an array that a float32 run uses too would be
    float32 here, or float64 there.
    """
    if task.weights is None:
        raise ValueError(
            "exact moments need a reward that is a weighted output power; this task has another."
        )
    if task.integrator != "euler":
        raise ValueError(
            f'exact moments need integrator="euler"; this task has {task.integrator!r}.'
        )
    if task.modulation is not None:
        raise ValueError(
            "exact moments need σ_κ = 0: a modulated network has no closed moments. "
            "Use finite differences."
        )
    if not np.allclose(np.diff(task.t), np.diff(task.t).mean(), rtol=1e-6):
        raise ValueError("exact moments need a uniform time grid.")
    numbers = {name: np.array(leaf, np.float64) for name, leaf in theta.items()}
    chi = parameters(task.network, numbers)["chi"]
    if np.any(np.asarray(chi) != 0):
        raise ValueError(
            f"exact moments need χ = 0; the largest |χ| is {np.max(np.abs(chi)):g}. "
            "Set theta['chi'] to zero."
        )
    return numbers
