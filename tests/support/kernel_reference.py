"""The kernels' equations, step by step in float64 NumPy: slow, and short enough to check by eye."""

from typing import NamedTuple

import numpy as np

from fluctua.core.draws import philox_seed
from fluctua.core.simulate import noise_key
from fluctua.tcmt.kernel.options import KernelSpec


def noise_seed(key):
    """The seed with which a kernel draws the noise of `simulator(..., wiener=philox)(key, ...)`."""
    return philox_seed(noise_key(key))


def rectangle(
    rows=3,
    columns=4,
    *,
    steps=64,
    dt=5e-3,
    sigma=0.5,
    sigma_kappa=0.0,
    seed=1,
    lab=False,
    harmonics=10,
    Omega=0.1,
    integrator="euler",
):
    """A disordered lattice, driven at one corner and read at two others."""
    rng = np.random.default_rng(seed)
    n = rows * columns
    index = np.arange(n).reshape(rows, columns)
    across = np.stack([index[:, :-1].ravel(), index[:, 1:].ravel()], 1)
    down = np.stack(
        [index[1:].ravel(), index[:-1].ravel()], 1
    )  # reversed on purpose: direction is no matter
    bonds = rng.permutation(np.concatenate([across, down]))
    external = np.zeros(n)
    external[[0, n - 1]] = 1.0, 0.7
    internal = 0.02 + 0.05 * rng.random(n)
    t = dt * np.arange(steps + (integrator == "heun"))
    wave = np.exp(-1j * 2.0 * t) * (1 - np.exp(-t)) if lab else np.ones(1)
    return KernelSpec(
        omega=0.5 * rng.standard_normal(n),
        kappa=1 + 0.3 * rng.standard_normal(len(bonds)),
        chi=0.02 * rng.standard_normal(n),
        bonds=bonds,
        damping=external + internal,
        noise=sigma * np.sqrt(2 * (external + internal)),
        dt=dt,
        steps=steps,
        drive_sites=np.array([0]),
        drive=(np.sqrt(2.0) * 10 * np.exp(0.3j) * wave)[:, None],
        port_sites=np.array([n - 1, 0]),
        port_gain=np.sqrt(2 * external[[n - 1, 0]]),
        port_weight=np.array([1.0, -0.25]) / (100 * steps * dt),
        incoming=np.stack([0 * wave, 10 * np.exp(0.3j) * wave], 1),
        sigma_kappa=sigma_kappa,
        harmonics=harmonics,
        Omega=Omega,
        start=0.1 * (rng.standard_normal(n) + 1j * rng.standard_normal(n)),
        integrator=integrator,
    )


def philox(seed, trajectory, site, pair):
    """Philox4x32-10 of broadcast uint64 arrays holding 32-bit words; the four words."""
    low = np.uint64(0xFFFFFFFF)
    c = [np.asarray(v, np.uint64) for v in np.broadcast_arrays(site, pair, trajectory, 0)]
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [
            (p1 >> np.uint64(32)) ^ c[1] ^ np.uint64(k0),
            p1 & low,
            (p0 >> np.uint64(32)) ^ c[3] ^ np.uint64(k1),
            p0 & low,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def box_muller(first, second):
    radius = np.sqrt(-2 * np.log((first + 0.5) * 2.0**-32))
    return radius * np.exp(2j * np.pi * second * 2.0**-32)


def normals(seed, trajectories, sites, step):
    """z (E, N) of one step."""
    words = philox(seed, trajectories[:, None], np.arange(sites)[None], step // 2)
    return box_muller(*words[2:]) if step % 2 else box_muller(*words[:2])


def modulation(spec, seed, trajectories):
    """A function t -> δκ (E, B)."""
    h, b = spec.harmonics, len(spec.bonds)
    site = 0x80000000 + np.arange(b)[:, None] * h + np.arange(h)
    words = philox(seed, trajectories[:, None, None], site[None], 0xFFFFFFFF)
    a = box_muller(*words[:2]).real
    a /= np.linalg.norm(a, axis=-1, keepdims=True)
    phase = 2 * np.pi * (words[2] + 0.5) * 2.0**-32
    k = np.arange(1, h + 1)
    return lambda t: spec.sigma_kappa * (a * np.sin(k * spec.Omega * t + phase)).sum(-1)


class Path(NamedTuple):
    psi: np.ndarray  # (E, T+1, N)
    zeta: np.ndarray  # r/(2Q) (E, T, N)
    rewards: np.ndarray  # gΔt (E, T), or (E, T+1) where the end counts
    scores: dict  # family -> (E, T, ·)
    explicit: np.ndarray  # ∂g/∂gain Δt, as the rewards (E, T, M)

    @property
    def to_go(self):
        """λ̂ₙ₊₁ (E, T)."""
        so_far = np.cumsum(self.rewards, 1)
        return so_far[:, -1:] - so_far[:, : self.zeta.shape[1]]

    def gradient(self, bar=0.0):
        """Σ(λ̂ₙ₊₁ − λ̄ₙ)Uₙ per trajectory, for `bar` broadcastable to (E, T, 1) or per
        family (E, T, ·).
        """
        weight = self.to_go[..., None]
        of = lambda name: bar[name] if isinstance(bar, dict) else bar
        return {name: ((weight - of(name)) * u).sum(1) for name, u in self.scores.items()}


def simulate(spec, seed, count, *, first=0, antithetic=False, noise=True):
    trajectories = np.arange(first, first + count)
    stream = trajectories & ~1 if antithetic else trajectories
    sign = np.where(antithetic & (trajectories % 2 == 1), -1.0, 1.0)[:, None] * noise
    n, dt, T = spec.omega.size, spec.dt, spec.steps
    i, j = spec.bonds.T
    a = spec.noise
    drive = np.broadcast_to(np.atleast_2d(spec.drive), (T, spec.drive_sites.size))
    incoming = np.broadcast_to(np.atleast_2d(spec.incoming), (T, spec.port_sites.size))
    delta = modulation(spec, seed, stream) if spec.sigma_kappa else lambda t: 0.0
    x = np.broadcast_to(spec.start, (count, n)).astype(complex)
    psi, zetas, rewards, explicit = [x], [], [], []
    scores = {name: [] for name in ("omega", "kappa", "chi", "damping", "log_diffusion", "drive")}
    for step in range(T):
        z = sign * normals(seed, stream, n, step)
        zeta = np.sqrt(dt) * z / a
        out = spec.port_gain * x[:, spec.port_sites] - incoming[step]
        rewards.append(dt * (spec.port_weight * abs(out) ** 2).sum(1))
        explicit.append(2 * dt * spec.port_weight * (out.conj() * x[:, spec.port_sites]).real)
        cross = lambda u, v: u.real * v.imag - u.imag * v.real
        u_omega = cross(zeta, x)
        scores["omega"].append(u_omega)
        scores["chi"].append(abs(x) ** 2 * u_omega)
        scores["kappa"].append(cross(zeta[:, i], x[:, j]) + cross(zeta[:, j], x[:, i]))
        scores["damping"].append(-(zeta.conj() * x).real)
        scores["log_diffusion"].append(abs(z) ** 2 / 2 - 1)
        scores["drive"].append((zeta[:, spec.drive_sites].conj() * drive[step]).real)
        zetas.append(zeta)
        kappa = spec.kappa + delta(step * dt)
        hop = np.zeros_like(x)
        for b in range(len(i)):
            k = kappa[b] if kappa.ndim == 1 else kappa[:, b]
            hop[:, i[b]] += k * x[:, j[b]]
            hop[:, j[b]] += k * x[:, i[b]]
        drift = -1j * (spec.omega + spec.chi * abs(x) ** 2) * x - 1j * hop - spec.damping * x
        drift[:, spec.drive_sites] += drive[step]
        x = x + dt * drift + a**2 * zeta
        psi.append(x)
    stack = lambda v: np.stack(v, 1)
    return Path(
        stack(psi),
        stack(zetas),
        stack(rewards),
        {k: stack(v) for k, v in scores.items()},
        stack(explicit),
    )


def find_bins(values, count):
    """Bin of each of E values (E,): the number of edges, at the ranks ⌊kE/K⌋, that are not
    above it.
    """
    ordered = np.sort(values)
    edges = ordered[np.arange(1, count) * len(values) // count]
    return np.searchsorted(edges, values, side="right")


def optimal_of_others(to_go, score, group):
    """Eq. 20 by its definition for each of E trajectories, over the others with the same `group`.

    (E,)
    """
    bar = np.empty_like(to_go)
    for j in range(len(to_go)):
        others = (group == group[j]) & (np.arange(len(to_go)) != j)
        if not others.any():
            others = np.arange(len(to_go)) != j
        weight = score[others] ** 2
        bar[j] = weight @ to_go[others] / weight.sum() if weight.sum() > 0 else to_go[others].mean()
    return bar


def binned_bars(spec, path, bins, every):
    """λ̄ₙ of the binned baseline for ω, χ and κ: family -> (E, T, ·)."""
    i, j = spec.bonds.T
    power = abs(path.psi) ** 2
    quantity = {"omega": power, "chi": power, "kappa": power[..., i] + power[..., j]}
    bars = {}
    for name, q in quantity.items():
        bars[name] = np.empty_like(path.scores[name])
        for n in range(spec.steps):
            for p in range(q.shape[-1]):
                group = find_bins(q[:, n - n % every, p], bins)
                bars[name][:, n, p] = optimal_of_others(
                    path.to_go[:, n], path.scores[name][:, n, p], group
                )
    return bars
