"""A nonlinear system without closed moments, against the partial differential equations of the
paper.

    dX = (aX − bX³ + tilt)dt + s√(1 + ηX²) dW,      generator L = μ∂x + Q∂xx,  Q = s²(1 + ηX²)/2
    (Itô)

Grid solutions of the Fokker–Planck equation ∂t p = L†p and of the adjoint equation ∂tλ + Lλ + g = 0
give the gradient by Eq. (3). Crank–Nicolson steps on central differences: the error is O(h² + Δt²),
and is measured below by doubling h and Δt.

The estimator sees the Euler scheme and not the continuous process. How far apart the two are is not
left to hope either: the Gaussian transition kernel of the Euler scheme, as a matrix on a grid,
gives the exact gradient of the scheme (the trapezoidal rule is exact to rounding for Gaussians
wider than the grid spacing)."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from scipy.integrate import trapezoid
from scipy.linalg import solve_banded

import fluctua
from problems import flat

WIDTH, END, SPREAD = 3.0, 1.0, 0.2
STEPS = 100  # of the simulation, Δt = 0.01

NUMBERS = {"a": 1.0, "b": 0.9, "tilt": 0.2, "s": 0.6, "eta": 0.5, "gain": 0.7, "start": 0.8}
THETA = {name: jnp.asarray(number) for name, number in NUMBERS.items()}


def drift(th, x, *_):
    return th["a"] * x - th["b"] * x**3 + th["tilt"]


def noise(th, x, *_):
    return th["s"] * jnp.sqrt(1 + th["eta"] * x**2)


def running(th, x, t):
    return -th["gain"] * jnp.cos(t) * (x - 0.5) ** 2


def terminal(th, x):
    return -((x - 0.5) ** 2) - th["gain"] * jnp.cos(x)


def initial(th, x):
    return jax.scipy.stats.norm.pdf(x, th["start"], SPREAD)


PROCESS = fluctua.Process(drift, noise)
OBJECTIVE = fluctua.Objective(
    lambda th, x, t: running(th, x[0], t), lambda th, x: terminal(th, x[0])
)
START = fluctua.Density(
    lambda th, x0: jnp.log(initial(th, x0[0])),
    lambda key, th: th["start"] + SPREAD * jax.random.normal(key, (1,)),
)

# ----------------------------------------------------------------------- the equations of the paper


def derivatives(f, x):
    """∂f/∂θ on the grid, (P, N), in the order of the flattened parameters."""
    jacobian = jax.jit(jax.jacfwd(lambda th: f(th, x) * jnp.ones_like(x)))(THETA)
    return np.array([jacobian[name] for name in sorted(THETA)])


def generator(x, h):
    """L as a tridiagonal matrix in banded storage (3, N); λ' = 0 at the ends, where nothing
    ever comes.
    """
    mu, q = np.asarray(drift(THETA, x)), np.asarray(noise(THETA, x)) ** 2 / 2
    up, down = q / h**2 + mu / (2 * h), q / h**2 - mu / (2 * h)
    up[0], down[0] = up[0] + down[0], 0.0
    down[-1], up[-1] = up[-1] + down[-1], 0.0
    bands = np.zeros((3, x.size))
    bands[0, 1:], bands[1], bands[2, :-1] = up[:-1], -(up + down), down[1:]
    return bands


def transpose(bands):
    flipped = np.zeros_like(bands)
    flipped[0, 1:], flipped[1], flipped[2, :-1] = bands[2, :-1], bands[1], bands[0, 1:]
    return flipped


def apply(bands, v):
    out = bands[1] * v
    out[:-1] += bands[0, 1:] * v[1:]
    out[1:] += bands[2, :-1] * v[:-1]
    return out


def crank_nicolson(bands, v, source, dt):
    """v(t + Δt) of ∂t v = bands·v + source, with the source at mid-step."""
    implicit = -dt / 2 * bands
    implicit[1] += 1
    return solve_banded((1, 1), implicit, v + dt / 2 * apply(bands, v) + dt * source)


@cache
def solve(points=601, steps=200):
    """Grid x (N,), times (n+1,), λ (n+1, N), J, and ∇J by Eq. (3)."""
    x, h = np.linspace(-WIDTH, WIDTH, points, retstep=True)
    t, dt = np.linspace(0, END, steps + 1, retstep=True)
    backward, forward = generator(x, h), transpose(generator(x, h))

    adjoint = np.empty((steps + 1, points))
    adjoint[-1] = terminal(THETA, x)
    for n in reversed(range(steps)):
        reward = np.asarray(running(THETA, x, t[n] + dt / 2))
        adjoint[n] = crank_nicolson(backward, adjoint[n + 1], reward, dt)
    p = np.empty((steps + 1, points))
    p[0] = initial(THETA, x) * h  # probability of each cell
    for n in range(steps):
        p[n + 1] = crank_nicolson(forward, p[n], 0.0, dt)

    d_mu, d_q = derivatives(drift, x), derivatives(lambda th, x: noise(th, x) ** 2 / 2, x)
    d_p0, d_end = derivatives(initial, x) * h, derivatives(terminal, x)
    d_run = np.moveaxis(
        derivatives(lambda th, x: running(th, x, t[:, None]), x), 0, 1
    )  # (n+1, P, N)
    slope = np.gradient(adjoint, h, axis=1)
    bend = np.zeros_like(adjoint)
    bend[:, 1:-1] = np.diff(adjoint, 2, axis=1) / h**2
    # ⟨∂g/∂θ + (∂L/∂θ)λ, p⟩ at each time, (n+1, P)
    rate = np.einsum("npx,nx->np", d_run + d_mu * slope[:, None] + d_q * bend[:, None], p)
    gradient = d_end @ p[-1] + d_p0 @ adjoint[0] + trapezoid(rate, t, axis=0)
    return x, t, adjoint, p[0] @ adjoint[0], gradient


@cache
def euler(steps):
    """J and ∇J of the Euler scheme with so many steps, from its transition kernel on a grid."""
    x, h = np.linspace(-WIDTH, WIDTH, 301, retstep=True)
    t, dt = np.linspace(0, END, steps + 1, retstep=True)

    def value(th):
        spread = noise(th, x) * dt**0.5
        kernel = jax.scipy.stats.norm.pdf(x, (x + drift(th, x) * dt)[:, None], spread[:, None]) * h
        back = lambda v, s: (running(th, x, s) * dt + kernel @ v, None)
        v, _ = jax.lax.scan(back, terminal(th, x), t[:-1], reverse=True)
        return initial(th, x) @ v * h

    value, slope = jax.jit(jax.value_and_grad(value))(THETA)
    return float(value), flat(slope)
