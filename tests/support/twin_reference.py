"""The twin correction by its formulas, backwards in time in float64 NumPy, on the paths of
`kernel_reference`.
"""

from typing import NamedTuple

import numpy as np

from kernel_reference import modulation, simulate


def tables(spec):
    full = lambda v, m: np.broadcast_to(np.atleast_2d(v), (spec.steps, m))
    return full(spec.drive, spec.drive_sites.size), full(spec.incoming, spec.port_sites.size)


def hop(spec, kappa, x):
    """Σ_m κ_nm x_m for κ (E, B) and x (E, N)."""
    out = np.zeros_like(x)
    for b, (i, j) in enumerate(spec.bonds):
        out[:, i] += kappa[:, b] * x[:, j]
        out[:, j] += kappa[:, b] * x[:, i]
    return out


def step(spec, x, kappa, drive):
    drift = (
        -1j * (spec.omega + spec.chi * abs(x) ** 2) * x
        - 1j * hop(spec, kappa, x)
        - spec.damping * x
    )
    drift[:, spec.drive_sites] += drive
    return x + spec.dt * drift


def power(spec, x, incoming):
    """gΔt (E,) and its gradient (E, N)."""
    out = spec.port_gain * x[:, spec.port_sites] - incoming
    gradient = np.zeros_like(x)
    for p, site in enumerate(spec.port_sites):
        gradient[:, site] += 2 * spec.dt * spec.port_weight[p] * spec.port_gain[p] * out[:, p]
    return spec.dt * (spec.port_weight * abs(out) ** 2).sum(1), gradient


def pull_back(spec, x, q, kappa):
    return q + spec.dt * (
        1j * spec.omega * q
        + 1j * hop(spec, kappa, q)
        - spec.damping * q
        + 2j * spec.chi * abs(x) ** 2 * q
        - 1j * spec.chi * x**2 * q.conj()
    )


def dot(q, d):
    return (q.conj() * d).real.sum(1)


class Result(NamedTuple):
    direct: dict
    correction: dict
    returns: np.ndarray
    lam: np.ndarray  # Λ (E, T+1)
    q: np.ndarray  # (E, T+1, N)
    path: object


class Curve(NamedTuple):
    """S_k = 2Σ_ports wΔt·gain² Σ_{s<T−k} Πh_s(Πh_s)†, projected on the leading `rank`
    directions of all h.
    """

    at: object  # k -> (N, N)
    basis: np.ndarray


def curve(spec, rank):
    n, T = spec.omega.size, spec.steps
    eye = np.eye(n, dtype=complex)
    zero = spec.replace(chi=np.zeros(n), drive=np.zeros((1, spec.drive_sites.size)))
    kappa = np.tile(spec.kappa, (n, 1))
    F = step(zero, eye, kappa, 0.0).T  # row j of the argument is the image of e_j
    h = []
    for site in spec.port_sites:
        v = [np.eye(n, dtype=complex)[site]]
        for _ in range(T - 1):
            v.append(F.conj().T @ v[-1])
        h.append(v)
    h, w = np.array(h), spec.dt * spec.port_weight * spec.port_gain**2
    gram = np.einsum("p,psa,psb->ab", abs(w), h, h.conj())
    basis = np.linalg.eigh(gram)[1][:, ::-1][:, :rank]
    inside = (h @ basis.conj()) @ basis.T
    return Curve(
        lambda k: 2 * np.einsum("p,psa,psb->ab", w, inside[:, : T - k], inside[:, : T - k].conj()),
        basis,
    )


def correct(spec, seed, count, table, *, twin=None, knows=True, rank=0, segment=1, **options):
    """Direct and correction of every trajectory, with a quadratic term if rank > 0."""
    twin = spec if twin is None else twin
    path = simulate(spec, seed, count, **options)
    T, E, n = spec.steps, count, spec.omega.size
    drive, incoming = tables(twin)
    first = options.get("first", 0)
    trajectories = np.arange(first, first + count)
    stream = trajectories & ~1 if options.get("antithetic") else trajectories
    delta = modulation(spec, seed, stream) if spec.sigma_kappa and knows else lambda t: 0.0
    kappa = [
        np.broadcast_to(twin.kappa + delta(k * spec.dt), (E, len(spec.bonds))) for k in range(T)
    ]
    begin = np.broadcast_to(twin.start, (E, n))

    def follow(x, a, b):
        xs = [x]
        for k in range(a, b):
            xs.append(step(twin, xs[-1], kappa[k], drive[k]))
        return xs

    def adjoint(xs, q, a):
        """q at a … a + len(xs) − 1, and the reward from there to the end of xs."""
        qs, value = [q], [np.zeros(E)]
        for k in range(len(xs) - 2, -1, -1):
            g, gradient = power(twin, xs[k], incoming[a + k])
            qs.insert(0, gradient + pull_back(twin, xs[k], qs[0], kappa[a + k]))
            value.insert(0, value[0] + g)
        return qs, value

    xbar = follow(begin.astype(complex), 0, T)
    q, nu = adjoint(xbar, np.zeros((E, n), complex), 0)
    ahead = list(zip(xbar, q, nu, strict=True))  # what V_{n+1} of step n is made of: at n + 1
    if rank:
        s = curve(twin, rank).at
        for a in range(0, T, segment):
            b = min(a + segment, T)
            xs = follow(path.psi[:, a], a, b)
            d = xs[-1] - xbar[b]
            bent = d @ s(b).T
            qs, value = adjoint(xs, q[b] + bent, a)
            end = nu[b] + dot(q[b], d) + 0.5 * dot(bent, d)
            for k in range(a, b):
                ahead[k + 1] = (xs[k + 1 - a], qs[k + 1 - a], value[k + 1 - a] + end)
    r = spec.noise**2 * path.zeta
    lam = np.zeros((E, T + 1))
    martingale = np.zeros(E)
    to_go = np.zeros(E)
    direct = {k: np.zeros(v.shape[::2]) for k, v in path.scores.items()}
    correction = {k: np.zeros(v.shape[::2]) for k, v in path.scores.items()}
    i, j = spec.bonds.T
    own_drive = tables(spec)[0]
    for k in range(T - 1, -1, -1):
        x, qk, value = ahead[k + 1]
        lam[:, k + 1] = to_go - value - dot(qk, path.psi[:, k + 1] - x) - martingale
        for name, u in path.scores.items():
            correction[name] += (lam[:, k + 1] - table[k + 1])[:, None] * u[:, k]
        y = path.psi[:, k]
        cross = lambda u, v: u.real * v.imag - u.imag * v.real
        direct["omega"] += cross(qk, y) * spec.dt
        direct["chi"] += abs(y) ** 2 * cross(qk, y) * spec.dt
        direct["kappa"] += (cross(qk[:, i], y[:, j]) + cross(qk[:, j], y[:, i])) * spec.dt
        direct["damping"] -= (qk.conj() * y).real * spec.dt
        direct["drive"] += (qk[:, spec.drive_sites].conj() * own_drive[k]).real * spec.dt
        martingale += dot(qk, r[:, k])
        to_go += path.rewards[:, k]
    lam[:, 0] = to_go - nu[0] - martingale
    direct["gain"] = path.explicit.sum(1)
    correction["gain"] = 0 * direct["gain"]
    return Result(direct, correction, path.rewards.sum(1), lam, np.stack(q, 1), path)
