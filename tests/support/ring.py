"""A particle on a ring, dx = (f + A sin x) dt + √(2D) dW: its exact response, and records of it.

The torque f drives it round; A sin x is the force of the potential A cos x. Everything is in the
Fourier basis e^{inx}, |n| ≤ N, in which operators are matrices that fall off quickly.
"""

from functools import cache

import numpy as np
import scipy

ORDER = 24
POINTS = 256
"""Of the quadrature; exact up to e^{−100} for the products that occur."""


def drift(x, torque, amplitude):
    return torque + amplitude * np.sin(x)


def expect_matrix(torque, amplitude, diffusion, dt):
    """E[e^{inx'} | x] = Σ_m M_nm e^{imx} of an Euler step, (2N+1, 2N+1)."""
    x = 2 * np.pi * np.arange(POINTS) / POINTS
    n = np.arange(-ORDER, ORDER + 1)
    after = np.exp(1j * n[:, None] * (x + dt * drift(x, torque, amplitude)))
    after = after * np.exp(-(n[:, None] ** 2) * diffusion * dt)
    return after @ np.exp(-1j * np.outer(x, n)) / POINTS


def stationary_means(matrix):
    """E[e^{inx}] in the steady state: m = M m with m_0 = 1."""
    zero = len(matrix) // 2
    rest = np.delete(np.arange(len(matrix)), zero)
    square = np.eye(len(rest)) - matrix[np.ix_(rest, rest)]
    means = np.ones(len(matrix), complex)
    means[rest] = np.linalg.solve(square, matrix[rest, zero])
    return means


@cache
def exact_response(torque, amplitude, diffusion, dt, steps):
    """dE[sin x]/dp, m = 0 … steps after a step of p = (torque, amplitude, D). (steps+1, 3)

    Of the Euler chain; differences of an exact recursion, whose rounding is 1e-9.
    """
    point = np.array([torque, amplitude, diffusion])
    start = stationary_means(expect_matrix(*point, dt))
    sides = []
    for i in range(3):
        small = 1e-4 * np.eye(3)[i]
        paths = []
        for moved in (point + small, point - small):
            matrix = expect_matrix(*moved, dt)
            means = start
            path = [means]
            for _ in range(steps):
                means = matrix @ means
                path.append(means)
            paths.append(np.array(path)[:, ORDER + 1].imag)
        sides.append((paths[0] - paths[1]) / 2e-4)
    return np.array(sides).T


def generator_response(torque, amplitude, diffusion, t):
    """The same in continuous time, from the generator L = (f + A sin x)∂ + D∂² in the basis.

    χ_A(t) = ∫₀^t E[sin x ∂_x E[sin x_s | x]] ds. Shape (len(t),), for the amplitude.
    """
    n = np.arange(-ORDER, ORDER + 1)
    size = len(n)
    generator = np.diag(1j * n * torque - n**2 * diffusion).astype(complex)
    for i in range(size):  # A sin x · in e^{inx} = (A n/2)(e^{i(n+1)x} − e^{i(n−1)x})
        if i + 1 < size:
            generator[i, i + 1] += amplitude * n[i] / 2
        if i > 0:
            generator[i, i - 1] -= amplitude * n[i] / 2
    means = stationary_means(np.eye(size) + generator)
    kick = np.zeros((size, size), complex)  # sin x ∂ in the basis
    for i in range(size):
        if i + 1 < size:
            kick[i, i + 1] += n[i] / 2
        if i > 0:
            kick[i, i - 1] -= n[i] / 2
    # d/ds means = L means; a step of A adds `kick` to L, from the steady state
    grown = np.zeros((2 * size, 2 * size), complex)
    grown[:size, :size] = generator
    grown[:size, size:] = kick
    start = np.concatenate([np.zeros(size), means])
    paths = [(scipy.linalg.expm(grown * s) @ start)[ORDER + 1].imag for s in t]
    return np.array(paths)


def simulate(theta, dt, steps, traces, seed, period=2 * np.pi):
    """Traces (E, steps+1, 1) of the Euler chain in its steady state, wrapped to one turn."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(0, period, traces)
    kicks = np.sqrt(2 * theta["D"] * dt)
    path = np.empty((steps + 1, traces))
    settle = int(20 / dt)
    for n in range(-settle, steps + 1):
        if n >= 0:
            path[n] = x
        x = x + drift(x, theta["torque"], theta["amplitude"]) * dt
        x = x + kicks * rng.normal(size=traces)
    return (path.T % period)[..., None]
