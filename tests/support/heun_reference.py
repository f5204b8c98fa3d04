"""Heun's step of the kernels' network, step by step in float64: scores by automatic
differentiation of its mean.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernel_reference import Path, modulation, normals


def drift(p, bonds, drive_sites, x, f, kappa):
    i, j = jnp.asarray(bonds, int).reshape(-1, 2).T
    hop = jnp.zeros_like(x).at[i].add(kappa * x[j]).at[j].add(kappa * x[i])
    frequency = p["omega"] + p["chi"] * (x.real**2 + x.imag**2)
    return (
        (-1j * (frequency * x + hop) - p["damping"] * x)
        .at[jnp.array(drive_sites)]
        .add(p["drive"] * f)
    )


def mean(p, bonds, drive_sites, dt, x, fields):
    """M of X' = m + noise. fields: drive and δκ at both ends."""
    (f, delta), (f_then, delta_then) = fields
    first = drift(p, bonds, drive_sites, x, f, p["kappa"] + delta)
    return x + dt / 2 * (
        first + drift(p, bonds, drive_sites, x + dt * first, f_then, p["kappa"] + delta_then)
    )


@partial(jax.jit, static_argnums=(1, 2))
def step_and_scores(p, bonds, drive_sites, dt, x, zeta, fields):
    """The mean of a step and ∂θ ln p = ∂θm · r/(2QΔt), for E trajectories."""

    def of_one(x, zeta, fields):
        along = lambda q: (zeta.conj() * mean(q, bonds, drive_sites, dt, x, fields)).real.sum() / dt
        return mean(p, bonds, drive_sites, dt, x, fields), jax.grad(along)(p)

    one_end = (None, 0)
    return jax.vmap(of_one, in_axes=(0, 0, (one_end, one_end)))(x, zeta, fields)


def simulate_heun(spec, seed, count, *, antithetic=False, noise=True):
    """As `kernel_reference.simulate`, with rewards and explicit terms by the trapezoid rule at
    T + 1 times.
    """
    trajectories = np.arange(count)
    stream = trajectories & ~1 if antithetic else trajectories
    sign = np.where(antithetic & (trajectories % 2 == 1), -1.0, 1.0)[:, None] * noise
    n, dt, T, D = spec.omega.size, spec.dt, spec.steps, spec.drive_sites.size
    drive = np.broadcast_to(spec.drive, (T + 1, D))
    incoming = np.broadcast_to(spec.incoming, (T + 1, spec.port_sites.size))
    still = np.zeros((count, len(spec.bonds)))
    delta = modulation(spec, seed, stream) if spec.sigma_kappa else lambda t: still
    bonds, drive_sites = tuple(map(tuple, spec.bonds.tolist())), tuple(spec.drive_sites.tolist())
    x = np.broadcast_to(spec.start, (count, n)).astype(complex)
    psi, zetas, rewards, explicit, scores = [x], [], [], [], []
    with jax.enable_x64(True):
        p = {name: jnp.array(getattr(spec, name)) for name in ("omega", "kappa", "chi", "damping")}
        p["drive"] = jnp.ones(D)
        for k in range(T + 1):
            weight = dt * spec.port_weight * (0.5 if k in (0, T) else 1.0)
            out = spec.port_gain * x[:, spec.port_sites] - incoming[k]
            rewards.append((weight * abs(out) ** 2).sum(1))
            explicit.append(2 * weight * (out.conj() * x[:, spec.port_sites]).real)
            if k == T:
                break
            z = sign * normals(seed, stream, n, k)
            zeta = np.sqrt(dt) * z / spec.noise
            fields = ((drive[k], delta(k * dt)), (drive[k + 1], delta((k + 1) * dt)))
            m, u = step_and_scores(p, bonds, drive_sites, dt, x, zeta, fields)
            scores.append({**jax.tree.map(np.asarray, u), "log_diffusion": abs(z) ** 2 / 2 - 1})
            x = np.asarray(m) + spec.noise**2 * zeta
            zetas.append(zeta)
            psi.append(x)
    stack = lambda v: np.stack(v, 1)
    by_family = {name: stack([u[name] for u in scores]) for name in scores[0]}
    return Path(stack(psi), stack(zetas), stack(rewards), by_family, stack(explicit))


@partial(jax.jit, static_argnums=(1, 2))
def pull_back(p, bonds, drive_sites, dt, x, q, fields):
    """∂ₓ(q·m), for E trajectories. JAX's gradient by a complex number is the conjugate."""

    def of_one(x, q, fields):
        along = lambda y: (q.conj() * mean(p, bonds, drive_sites, dt, y, fields)).real.sum()
        return jax.grad(along)(x).conj()

    one_end = (None, 0)
    return jax.vmap(of_one, in_axes=(0, 0, (one_end, one_end)))(x, q, fields)


class Corrected(NamedTuple):
    direct: dict
    correction: dict
    lam: np.ndarray  # Λ (E, T+1)
    path: Path


def corrected_heun(spec, seed, count, table, *, twin=None, knows=True, antithetic=False):
    """The twin correction by its formulas, backwards in time; `twin_reference.corrected` with
    Heun's step.
    """
    twin = spec if twin is None else twin
    path = simulate_heun(spec, seed, count, antithetic=antithetic)
    T, dt, n = spec.steps, spec.dt, spec.omega.size
    trajectories = np.arange(count)
    stream = trajectories & ~1 if antithetic else trajectories
    still = np.zeros((count, len(spec.bonds)))
    own = modulation(spec, seed, stream) if spec.sigma_kappa else lambda t: still
    told = own if knows else lambda t: still
    shape = tuple(map(tuple, spec.bonds.tolist())), tuple(spec.drive_sites.tolist())
    numbers = lambda of: (
        {name: jnp.array(getattr(of, name)) for name in ("omega", "kappa", "chi", "damping")}
        | {"drive": jnp.ones(of.drive_sites.size)}
    )

    def fields(of, delta, k):
        drive = np.broadcast_to(of.drive, (T + 1, of.drive_sites.size))
        return (drive[k], delta(k * dt)), (drive[k + 1], delta((k + 1) * dt))

    def reward(x, k):
        weight = dt * twin.port_weight * (0.5 if k in (0, T) else 1.0)
        incoming = np.broadcast_to(twin.incoming, (T + 1, twin.port_sites.size))[k]
        out = twin.port_gain * x[:, twin.port_sites] - incoming
        gradient = np.zeros((count, n), complex)
        for p, site in enumerate(twin.port_sites):
            gradient[:, site] += 2 * weight[p] * twin.port_gain[p] * out[:, p]
        return (weight * abs(out) ** 2).sum(1), gradient

    with jax.enable_x64(True):
        model, device = numbers(twin), numbers(spec)
        xbar = [np.broadcast_to(twin.start, (count, n)).astype(complex)]
        for k in range(T):
            none = np.zeros((count, n), complex)
            xbar.append(
                np.asarray(
                    step_and_scores(model, *shape, dt, xbar[-1], none, fields(twin, told, k))[0]
                )
            )
        nu, q = reward(xbar[T], T)
        lam, martingale, to_go = (
            np.zeros((count, T + 1)),
            np.zeros(count),
            path.rewards[:, T].copy(),
        )
        direct = {name: np.zeros((count, u.shape[-1])) for name, u in path.scores.items()}
        correction = {name: np.zeros((count, u.shape[-1])) for name, u in path.scores.items()}
        for k in range(T - 1, -1, -1):
            dot = lambda d, at=q: (at.conj() * d).real.sum(1)
            lam[:, k + 1] = to_go - nu - dot(path.psi[:, k + 1] - xbar[k + 1]) - martingale
            of_q = step_and_scores(device, *shape, dt, path.psi[:, k], q, fields(spec, own, k))[1]
            for name, u in path.scores.items():
                correction[name] += (lam[:, k + 1] - table[k + 1])[:, None] * u[:, k]
                if name in of_q:
                    direct[name] += dt * np.asarray(of_q[name])
            martingale += dot(spec.noise**2 * path.zeta[:, k])
            to_go += path.rewards[:, k]
            g, gradient = reward(xbar[k], k)
            nu, q = (
                nu + g,
                gradient
                + np.asarray(pull_back(model, *shape, dt, xbar[k], q, fields(twin, told, k))),
            )
    lam[:, 0] = to_go - nu - martingale
    direct["gain"], correction["gain"] = path.explicit.sum(1), 0 * path.explicit.sum(1)
    return Corrected(direct, correction, lam, path)
