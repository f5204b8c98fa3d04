"""Exact moments of the Euler–Maruyama scheme of a linear network (χ = 0, σ_κ = 0), in float64.

A step is ψ' = Fψ + Δt D s⁺ + noise with F = 1 + ΔtA, A = −i(ω + κ) − Γ, so the mean m and the Hermitian
covariance C of ψ follow

    m' = Fm + Δt D s⁺,     C' = F C F† + 4QΔt,

(2QΔt from either quadrature; E[δψ δψᵀ] = 0 because the noise is circular). The reward is a weighted sum of
output powers, E|s⁻|² = |−s⁺ + dᵀm|² + dᵀC d*, and since F = Fᵀ the second part needs vectors only:

    dᵀC_n d = Σ_{k<n} v_kᵀ 4QΔt v_k*,     v_k = F^k d.

That makes J and its gradient O(T(N + B)) for any network: what estimators and kernels are compared with.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fluctua.tcmt.network import Network, parameters
from fluctua.tcmt.process import abs2, carrier, channels, coupled, decay, incoming, lead_matrix
from fluctua.tcmt.tasks import Task
from fluctua.types import Array, Params


class Moments(NamedTuple):
    """mean: m (T+1, N) complex. covariance: C (T+1, N, N) Hermitian."""

    mean: np.ndarray
    covariance: np.ndarray


def value(task: Task, theta: Params) -> float:
    """J."""
    return float(rewards(task, theta).sum() * _step(task))


def value_and_gradient(task: Task, theta: Params) -> tuple[float, dict[str, np.ndarray]]:
    """J and ∂J/∂θ. χ in θ must be zero; its gradient there is `kerr_gradient`."""
    rest = {name: leaf for name, leaf in _numbers(task, theta).items() if name != "chi"}
    with jax.enable_x64(True):
        j, gradient = jax.jit(jax.value_and_grad(lambda th: _rewards(task, th).sum() * _step(task)))(rest)
        return float(j), {name: np.asarray(leaf) for name, leaf in gradient.items()}


def rewards(task: Task, theta: Params) -> np.ndarray:
    """The expected reward rate E[g(X_n)] at the start of every step. (T,)"""
    numbers = _numbers(task, theta)
    with jax.enable_x64(True):
        return np.asarray(jax.jit(lambda th: _rewards(task, th))(numbers))


def moments(task: Task, theta: Params) -> Moments:
    """Mean and covariance of ψ at every time. Memory T·N²: for small networks."""
    numbers = _numbers(task, theta)
    with jax.enable_x64(True):
        return Moments(*map(np.asarray, jax.jit(lambda th: _moments(task, th))(numbers)))


def kerr_gradient(task: Task, theta: Params) -> np.ndarray:
    """∂J/∂χ at χ = 0 (N,). Memory T·N²: for small networks.

    To first order χ_l kicks site l by −iΔt f(z), f = |z|²z, z = ψ_l at step k, and the output at step n > k
    by (F^{n−1−k}d)_l times that. With ε the output's departure from its mean M, Gaussian moments give
    E[(M + ε)* f] = M*(|m|² + 2c)m + 2(|m|² + c) E[ε*δz], with m, c mean and variance of z.
    """
    numbers = _numbers(task, theta)
    with jax.enable_x64(True):
        each = np.asarray(jax.jit(lambda th: _kerr(task, th))(numbers))
    return each.reshape(task.copies, -1).sum(axis=0)


def propagator(network: Network, p: dict[str, Array], dt: float, offset: float, psi: Array) -> Array:
    """Fψ. (N,)"""
    return psi + dt * (
        -1j * ((p["omega"] + offset) * psi + coupled(network, p["kappa"], psi)) - decay(network, p, psi)
    )


# Everything below runs in float64 on `task.simulated`, with θ repeated for every copy.


def _parameters(task: Task, theta: Params) -> dict[str, Array]:
    return parameters(task.simulated, {name: jnp.tile(leaf, task.copies) for name, leaf in theta.items()})


def _offset(task: Task) -> float:
    return carrier(task.drives) if task.frame == "lab" else 0.0


def _mean(task: Task, p: dict[str, Array]) -> tuple[Array, Array]:
    """m_n and s⁺_n at every time: (T+1, N), (T+1, L)."""
    network, dt = task.simulated, _step(task)
    s_plus = jax.vmap(lambda t: incoming(task.drives, network.leads, t, task.frame))(jnp.asarray(task.t))
    d = lead_matrix(network, p)

    def body(m: Any, s: Any) -> Any:
        after = propagator(network, p, dt, _offset(task), m) + dt * (d @ s)
        return after, after

    start = jnp.zeros(network.sites, complex)
    _, path = jax.lax.scan(body, start, s_plus[:-1])
    return jnp.concatenate([start[None], path]), s_plus


def _responses(task: Task, p: dict[str, Array]) -> Array:
    """v_k = F^k d of every lead, k = 0…T−1. (T, L, N)"""
    network = task.simulated
    step = jax.vmap(lambda v: propagator(network, p, _step(task), _offset(task), v))
    start = lead_matrix(network, p).T.astype(complex)
    return jax.lax.scan(lambda v, _: (step(v), v), start, length=len(task.t) - 1)[1]


def _rewards(task: Task, theta: Params) -> Array:
    p, weights = _parameters(task, theta), jnp.asarray(task.weights)
    m, s_plus = _mean(task, p)
    mean_power = abs2(-s_plus + m @ lead_matrix(task.simulated, p))[:-1]
    arriving = 2 * _step(task) * jnp.sum(abs2(_responses(task, p) @ channels(task.simulated, p)), axis=-1)
    noise_power = jnp.cumsum(arriving, axis=0) - arriving  # Σ_{k<n}: X_0 has no noise yet
    return (mean_power + noise_power) @ weights


def _moments(task: Task, theta: Params) -> tuple[Array, Array]:
    network, p = task.simulated, _parameters(task, theta)
    columns = jax.vmap(lambda v: propagator(network, p, _step(task), _offset(task), v), in_axes=1, out_axes=1)
    noise = channels(network, p)
    injected = 2 * _step(task) * (noise @ noise.T)  # 4QΔt

    def body(c: Any, _: Any) -> Any:
        after = columns(columns(c).conj().T).conj().T + injected
        return after, after

    start = jnp.zeros((network.sites, network.sites), complex)
    _, path = jax.lax.scan(body, start, length=len(task.t) - 1)
    return _mean(task, p)[0], jnp.concatenate([start[None], path])


def _kerr(task: Task, theta: Params) -> Array:
    p = _parameters(task, theta)
    (m, c), s_plus = _moments(task, theta), _mean(task, p)[1]
    m, c = m[:-1], c[:-1]
    output = -s_plus[:-1] + m @ lead_matrix(task.simulated, p)  # M (T, L)
    responses = _responses(task, p)
    weights = np.asarray(task.weights)
    each = [
        weights[k] * _kerr_of_lead(task, p, m, c, output[:, k], responses[:, k]) for k in weights.nonzero()[0]
    ]
    return sum(each, start=jnp.zeros(task.simulated.sites))


def _kerr_of_lead(task: Task, p: dict[str, Array], m: Array, c: Array, output: Array, v: Array) -> Array:
    """∂(Σ_n E|s⁻|²Δt)/∂χ of one lead. m (T, N), c (T, N, N), output (T,), v (T, N) -> (N,)"""
    dt, steps = _step(task), len(v)
    spread = jnp.real(jnp.diagonal(c, axis1=1, axis2=2))

    def backward(a: Any, mean_output: Any) -> Any:  # a_k = Σ_{n>k} M_n* F^{n−1−k} d
        return propagator(task.simulated, p, dt, _offset(task), a) + mean_output.conj() * v[0], a

    _, arrival = jax.lax.scan(backward, jnp.zeros_like(v[0]), output, reverse=True)
    # W_k[a, l] = Σ_{j=1}^{T−1−k} v_j[a]* v_{j−1}[l], so that (C_k W_k)_ll collects E[ε*δz] of all n > k
    products = jnp.einsum("ja,jl->jal", v[1:].conj(), v[:-1])
    upto = jnp.concatenate([jnp.zeros_like(products[:1]), jnp.cumsum(products, axis=0)])
    shared = jnp.einsum("kla,kal->kl", c, upto[steps - 1 - np.arange(steps)])
    kicks = arrival * (abs2(m) + 2 * spread) * m + 2 * (abs2(m) + spread) * shared
    return dt * 2 * jnp.real(-1j * dt * kicks).sum(axis=0)


# --------------------------------------------------------------------------------------- the boundary


def _step(task: Task) -> float:
    return float(task.t[-1] - task.t[0]) / (len(task.t) - 1)


def _numbers(task: Task, theta: Params) -> dict[str, np.ndarray]:
    """θ in float64, if the task is one that these formulas solve."""
    if task.weights is None:
        raise ValueError(
            "exact moments know rewards that are weighted output powers; this task has another reward."
        )
    if task.modulation is not None:
        raise ValueError(
            "exact moments need σ_κ = 0: a modulated network has no closed moments. Use finite differences."
        )
    if not np.allclose(np.diff(task.t), _step(task), rtol=1e-6):
        raise ValueError("exact moments need a uniform time grid.")
    numbers = {name: np.asarray(leaf, np.float64) for name, leaf in theta.items()}
    chi = parameters(task.network, numbers)["chi"]
    if np.any(np.asarray(chi) != 0):
        raise ValueError(
            f"exact moments need χ = 0; the largest |χ| is {np.max(np.abs(chi)):g}. Zero theta['chi']."
        )
    return numbers
