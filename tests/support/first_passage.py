"""First passage with exact answers, in discrete and in continuous time.

Brownian motion with drift, dX = μ dt + σ dW, leaves the interval (−1, b) from x₀.

`euler_value` is the expected return of the chain of Euler's steps itself: V_n(x) = c Δt +
∫ p(y|x) V_{n+1}(y) dy over the interval, by Gauss and Legendre, plus what exits are worth. Kernels
are Gaussian and V is smooth inside, so that 80 nodes leave 1e-10. It is computed by NumPy:
`numeric.value_and_slope` has its gradient.

`continuous_value` is that of the process itself, without a horizon. JAX differentiates it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import norm

import fluctua as fl
from kept import keep_per_precision

LOW = -1.0
START = 0.2
THETA = {"mu": 0.5, "sigma": 1.0, "cost": 0.7, "gain": 1.3}
NODES = 80
SHIFT = 0.5826
"""−ζ(1/2)/√2π, the mean overshoot of a random walk of normal steps, in units of their deviation."""


def parameters(**more):
    return {name: jnp.asarray(value, float) for name, value in (THETA | more).items()}


PROCESS = fl.Process(
    drift=lambda theta, x: theta["mu"] * jnp.ones(1), noise=lambda theta, x: theta["sigma"][None]
)


def rate(theta, x):
    return theta["cost"]


def side(theta, x):
    return theta["gain"] * jnp.where(x[0] > 0, 1.0, 0.0)


def level(theta, x):
    """≥ 0 outside of (−1, 1)."""
    return jnp.abs(x[0]) - 1


def moving_level(theta, x):
    """Two boundaries: one is ≥ 0 outside of (−1, b)."""
    return jnp.stack([x[0] - theta["b"], LOW - x[0]])


OBJECTIVE = fl.Objective(running=rate, terminal=side, stop=level)


def euler_value(theta, dt, steps, start=START, low=LOW, high=1.0):
    """E[c min(τ, T) + g 1{X > 0}] of Euler's chain on its grid; of each start, if there are
    several.
    """
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    # a reward that jumps at zero, once only: two pieces
    halves = [(low, 0.0), (0.0, high)]
    y = np.concatenate([(b - a) / 2 * nodes + (a + b) / 2 for a, b in halves])
    w = np.concatenate([(b - a) / 2 * weights for a, b in halves])
    scale = theta["sigma"] * np.sqrt(dt)

    def find_step(x):
        """The weights of the states inside, and what the step itself is worth on average."""
        mean = x + theta["mu"] * dt
        right = theta["gain"] * norm.sf(high, mean, scale)
        return norm.pdf(y, mean[:, None], scale) * w, theta["cost"] * dt + right

    inside, worth = find_step(y)
    value = theta["gain"] * (y > 0)
    for _ in range(steps - 1):
        value = worth + inside @ value
    inside, worth = find_step(np.atleast_1d(start))
    values = worth + inside @ value
    return values if np.ndim(start) else values[0]


def continuous_value(theta, low=LOW):
    """E[c τ + g 1{right}] of the process itself, exit from (low, b)."""
    k = 2 * theta["mu"] / theta["sigma"] ** 2
    right = jnp.expm1(-k * (START - low)) / jnp.expm1(-k * (theta["b"] - low))
    time = (low + (theta["b"] - low) * right - START) / theta["mu"]
    return theta["cost"] * time + theta["gain"] * right


def simulator(dt, steps, **options):
    return fl.simulator(PROCESS, np.array([START]), dt * np.arange(steps + 1), **options)


def z_scores(estimate, value, gradient):
    """Deviations from the exact value and gradient, in standard errors; those of zero error left
    out if they are exact.
    """
    off, errors = [float(estimate.value) - float(value)], [float(estimate.value_stderr)]
    for name, exact in gradient.items():
        off.append(float(estimate.gradient[name]) - float(exact))
        errors.append(float(estimate.stderr[name]))
    off, errors = np.array(off), np.array(errors)
    assert np.abs(off[errors == 0]).max(initial=0) < 1e-6
    return off[errors > 0] / errors[errors > 0]


@keep_per_precision
def moving_interval(overshoot):
    """Process, objective, random start, times, θ and context: every kind of reward and a boundary
    that moves, for kernels beside JAX. Some trajectories have stopped before their first step.
    """
    process = fl.Process(
        drift=lambda theta, x, t, context: jnp.array(
            [theta["mu"] + context, x[0] - theta["k"] * x[1]]
        ),
        noise=lambda theta, x: jnp.stack([theta["s"], 0.3 + 0.1 * x[1] ** 2]),
    )
    objective = fl.Objective(
        running=lambda theta, x, t: theta["k"] * x[1] ** 2 + 1,
        terminal=lambda theta, x: theta["mu"] * x[1] + x[0],
        per_step=lambda theta, x, x_next: theta["k"] * (x_next - x)[1],
        initial=lambda theta, x: x[0],
        stop=lambda theta, x, t: jnp.stack([x[0] - 1 - 0.1 * t, -1 - 0.1 * t - x[0]]),
        overshoot=overshoot,
    )
    if overshoot:  # a boundary that depends on θ
        objective = objective._replace(
            stop=lambda theta, x, t: jnp.stack([x[0] - theta["b"] - 0.1 * t, -1 - x[0]])
        )
    start = fl.Density(
        lambda theta, x: -jnp.sum((x - theta["mu"]) ** 2),
        lambda key, theta: theta["mu"] + jnp.sqrt(0.5) * jax.random.normal(key, (2,)),
    )
    numbers = {"mu": 0.5, "k": 1.3, "s": 0.8, "b": 1.1}
    theta = {name: jnp.asarray(value, float) for name, value in numbers.items()}
    times = jnp.linspace(0, 2, 21)
    return process, objective, start, times, theta, jax.random.normal
