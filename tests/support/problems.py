"""Systems whose expected return, and so its gradient, is known exactly for the Euler scheme itself.

The drift is affine in the state, σσᵀ and the rewards are at most quadratic, so mean and covariance
of the Euler–Maruyama chain obey a closed recursion, at any step size. Nothing here is a small-Δt
limit: an estimate may differ from the exact gradient by its statistical error and by nothing else.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import norm

import fluctua


class Problem(NamedTuple):
    """A process and an objective, where they start, and what must come out."""

    process: fluctua.Process
    objective: fluctua.Objective
    start: Any  # as `fluctua.simulator` takes it
    t: jax.Array
    theta: dict
    context: Callable | None  # key -> what is drawn once a trajectory
    exact_value: float | None
    exact_gradient: dict | None

    @property
    def simulator(self):
        return fluctua.simulator(self.process, self.start, self.t, context=self.context)

    @property
    def moving_start(self):
        """The start if it depends on θ, as `fluctua.gradient` takes it."""
        return None if isinstance(self.start, jax.Array) else self.start

    def estimator(self, **options):
        return fluctua.ppgt(self.simulator, self.objective, **options)


# ------------------------------------------------------------------------------------ exact moments


def average(f, mean, covariance):
    """E[f(Z)] = f(m) + ½ Σ_ab ∂a∂b f P_ab: exact for Z of any law if f is at most quadratic."""
    return f(mean) + jnp.einsum("...ab,ab->...", jax.hessian(f)(mean), covariance) / 2


def exact_return(process, objective, t, theta, mean, covariance, force_mean, force_variance):
    """J(θ) of the Euler scheme, from the recursion of the mean and covariance of Z = (X, c).

    c is a constant of each trajectory (the force in the context): a component of Z that does not
    move.

        m' = m + E[μ]Δt,    P' = F P Fᵀ + E[σσᵀ]Δt,    F = 1 + ∂μ/∂z Δt
    """
    size = mean.shape[0]
    context = lambda z: {"force": z[size]}
    m = jnp.append(mean, force_mean)
    p = (
        jnp.zeros((size + 1, size + 1))
        .at[:size, :size]
        .set(covariance)
        .at[size, size]
        .set(force_variance)
    )

    def step(carry, when):
        m, p, value = carry
        t, dt = when
        drift = lambda z: jnp.append(process.drift(theta, z[:size], t, context(z)), 0.0)

        def noise_power(z):  # σσᵀ, bordered by zeros for c
            sigma = process.noise(theta, z[:size], t, context(z))
            sigma = jnp.diag(sigma) if sigma.ndim == 1 else sigma
            return jnp.zeros((size + 1, size + 1)).at[:size, :size].set(sigma @ sigma.T)

        reward = lambda z: objective.running(theta, z[:size], t, context(z))
        value = value + average(reward, m, p) * dt
        f = jnp.eye(size + 1) + jax.jacobian(drift)(m) * dt
        m_next, p_next = m + drift(m) * dt, f @ p @ f.T + average(noise_power, m, p) * dt
        if objective.per_step is not None:  # of both ends: their covariance is P Fᵀ
            ends = lambda z: objective.per_step(
                theta, z[:size], z[size + 1 : 2 * size + 1], t, dt, context(z)
            )
            joint = jnp.block([[p, p @ f.T], [f @ p, p_next]])
            value = value + average(ends, jnp.concatenate([m, m_next]), joint)
        return (m_next, p_next, value), None

    initial_reward = 0.0
    if objective.initial is not None:
        initial_reward = average(lambda z: objective.initial(theta, z[:size], context(z)), m, p)
    (m, p, value), _ = jax.lax.scan(step, (m, p, initial_reward), (t[:-1], jnp.diff(t)))
    return value + average(lambda z: objective.terminal(theta, z[:size], context(z)), m, p)


# ------------------------------------------------------------------------------------------ systems


class System(NamedTuple):
    """What a problem is made of, apart from its start. force: mean and standard deviation of c."""

    process: fluctua.Process
    objective: fluctua.Objective
    t: jax.Array
    theta: dict
    force: tuple[float, float] = (0.0, 0.0)


def _arrays(**values):
    return {name: jnp.asarray(value, float) for name, value in values.items()}


@cache
def ornstein_uhlenbeck():
    """dX = −k(X − rest)dt + σ dW in one dimension, noise given as its diagonal."""
    process = fluctua.Process(
        drift=lambda th, x, t, c: -th["k"] * (x - th["rest"]),
        noise=lambda th, x, t, c: th["sigma"] * jnp.ones(1),
    )
    objective = fluctua.Objective(
        running=lambda th, x, t, c: th["gain"] * x[0] - x[0] ** 2,
        terminal=lambda th, x, c: -((x[0] - th["gain"]) ** 2),
    )
    theta = _arrays(k=0.6, rest=0.5, sigma=1.0, gain=0.4, mean=[-0.8], spread=0.9)
    return System(process, objective, jnp.linspace(0, 2, 17), theta)


@cache
def non_normal():
    """Three modes in a row, each feeding the next: transient growth, noise (3, 4), a random force.

    The time grid is not uniform, the force on the first mode is random in amplitude and oscillates
    in time, and the reward knows it too.
    """
    mixing = jnp.array([[1.0, 0.3, 0.0, 0.2], [0.0, 1.0, -0.4, 0.1], [0.5, 0.0, 1.0, -0.3]])

    def drift(th, x, t, c):
        a = -jnp.diag(th["rate"]) + th["feed"] * jnp.eye(3, k=-1)
        return a @ x + jnp.array([1.0, 0.0, 0.0]) * th["coupling"] * c["force"] * jnp.cos(2 * t)

    def noise(th, x, t, c):
        return th["sigma"][:, None] * mixing * (1 + 0.3 * jnp.sin(t))

    objective = fluctua.Objective(
        running=lambda th, x, t, c: x @ x + 0.3 * c["force"] * x[1] + th["gain"] * x[0] * x[2] * t,
        terminal=lambda th, x, c: x[2] + (th["gain"] * x[0] - x[1]) ** 2,
    )
    theta = _arrays(
        rate=[0.6, 0.9, 1.2],
        feed=1.2,
        coupling=0.7,
        sigma=[0.7, 0.9, 1.0],
        gain=0.6,
        mean=[0.5, 0.6, 0.7],
        spread=0.6,
    )
    t = 2 * jnp.linspace(0, 1, 17) ** 1.5  # steps from 0.03 to 0.18
    return System(fluctua.Process(drift, noise), objective, t, theta, force=(1.0, 0.5))


@cache
def multiplicative():
    """dX = (cos t − kX)dt + σ dW₁ + ηX dW₂: the diffusion depends on the state and on two
    parameters.
    """
    process = fluctua.Process(
        drift=lambda th, x, t, c: jnp.cos(t) - th["k"] * x,
        noise=lambda th, x, t, c: jnp.stack([th["sigma"] * jnp.ones(1), th["eta"] * x], axis=1),
    )
    objective = fluctua.Objective(
        running=lambda th, x, t, c: x[0] ** 2 - th["gain"] * x[0] * t,
        terminal=lambda th, x, c: x[0] ** 2 + th["gain"] * x[0],
    )
    theta = _arrays(k=0.7, sigma=0.7, eta=0.4, gain=0.6, mean=[0.8], spread=0.7)
    return System(process, objective, jnp.linspace(0, 2, 17), theta)


@cache
def driven_rotor():
    """A particle in the plane, in a moving trap and a rotating force: heat and work, step by step.

    The heat of a step is force times displacement at its midpoint (Stratonovich); the drive does
    work while the trap moves, at the end of each step; the switching on at the start is work too.
    All of them know θ."""

    def force(th, x, t):
        rotation = jnp.array([[0.0, -1.0], [1.0, 0.0]])
        return -th["k"] * (x - th["pull"] * t * jnp.array([1.0, 0.5])) + th["torque"] * rotation @ x

    def step_reward(th, x, x_next, t, dt, c):
        heat = (force(th, x, t) + force(th, x_next, t)) @ (x_next - x) / 2
        work = th["k"] * th["pull"] * dt * (x_next @ jnp.array([1.0, 0.5]))
        return 0.7 * heat - work + th["gain"] * x[0] * x_next[1]

    process = fluctua.Process(
        drift=lambda th, x, t, c: force(th, x, t),
        noise=lambda th, x, t, c: th["sigma"] * jnp.ones(2),
    )
    objective = fluctua.Objective(
        running=lambda th, x, t, c: th["gain"] * x[0] * t,
        terminal=lambda th, x, c: -th["k"] * x @ x / 2,
        per_step=step_reward,
        initial=lambda th, x, c: -th["k"] * jnp.sum((x - th["gain"]) ** 2) / 2,
    )
    theta = _arrays(k=0.8, pull=0.6, torque=0.5, sigma=0.8, gain=0.6, mean=[0.8, -0.4], spread=0.6)
    return System(process, objective, 2 * jnp.linspace(0, 1, 13) ** 1.2, theta)


# ------------------------------------------------------------------------------------------- starts

FADES = {
    "fade 0": 0.0,
    "fade part": 0.7,
    "fade all": 2.0,
    "fade beyond": 5.0,
}  # every grid ends at t = 2
STARTS = ("fixed", "density", *FADES)


def gaussian_start(kind, size):
    """X₀ ~ N(mean, spread²·1): by the score of its density, or by displacing the path, ξ in the
    context.
    """
    if kind == "density":
        return fluctua.Density(
            lambda th, x0, c: jnp.sum(jax.scipy.stats.norm.logpdf(x0, th["mean"], th["spread"])),
            lambda key, th, c: th["mean"] + th["spread"] * jax.random.normal(key, (size,)),
        )
    return fluctua.Reparameterised(
        lambda th, c: th["mean"] + th["spread"] * c["xi"], fade=FADES[kind]
    )


@cache
def exact(make, random_start):
    """J and its gradient. A start that is fixed is the point `mean`, which is then no parameter."""
    process, objective, t, theta, force = make()
    mean, spread = theta["mean"], 0.0

    def value(th):
        m, s = th.get("mean", mean), th.get("spread", spread)
        return exact_return(
            process, objective, t, th, m, s**2 * jnp.eye(m.size), force[0], force[1] ** 2
        )

    return jax.jit(jax.value_and_grad(value))(select_parameters(theta, random_start))


def select_parameters(theta, random_start):
    if random_start:
        return theta
    return {name: v for name, v in theta.items() if name not in ("mean", "spread")}


@cache
def setting(make, kind="density"):
    """A problem without its exact answer, which is None: for comparisons of two computations."""
    system = make()
    mean, force = system.theta["mean"], system.force

    def draw(key):
        k_force, k_xi = jax.random.split(key)
        amplitude = force[0] + force[1] * jax.random.normal(k_force)
        return {"force": amplitude, "xi": jax.random.normal(k_xi, mean.shape)}

    theta = select_parameters(system.theta, kind != "fixed")
    start = mean if kind == "fixed" else gaussian_start(kind, mean.size)
    needed = force != (0.0, 0.0) or kind in FADES  # where nothing looks at the context it is None
    return Problem(*system[:2], start, system.t, theta, draw if needed else None, None, None)


@cache
def problem(make, kind="density"):
    """A system with the start asked for, one of `STARTS`; all but "fixed" have the same p₀ and
    answer.
    """
    value, slope = exact(make, random_start=kind != "fixed")
    return setting(make, kind)._replace(exact_value=value, exact_gradient=slope)


@cache
def without_noise_parameters(make, kind="density"):
    """The same problem with the parameters of the noise held fixed, so that `drift_score`
    applies.
    """
    whole = problem(make, kind)
    fixed = {name: v for name, v in whole.theta.items() if name in ("sigma", "eta")}
    keep = lambda tree: {name: v for name, v in tree.items() if name not in fixed}
    filled = lambda f: lambda th, *rest: f({**fixed, **th}, *rest)
    return whole._replace(
        process=fluctua.Process(filled(whole.process.drift), filled(whole.process.noise)),
        objective=fluctua.Objective(*(reward and filled(reward) for reward in whole.objective)),
        theta=keep(whole.theta),
        exact_gradient=keep(whole.exact_gradient),
    )


# --------------------------------------------------------------------------------------- statistics


def flat(tree):
    """All components as one vector (P,), in the order of the flattened parameters."""
    leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves) if leaves else np.zeros(0)


def z_scores(estimate, problem):
    """(estimate − exact)/standard error of every component of the gradient, and of J last.

    (P+1,)
    """
    z = (flat(estimate.gradient) - flat(problem.exact_gradient)) / flat(estimate.stderr)
    return np.append(z, (estimate.value - problem.exact_value) / estimate.value_stderr)


def tolerance(comparisons, alarm=1e-3):
    """The |z| that the largest of so many standard normals exceeds with a probability of at most
    `alarm`.

    Bonferroni: `comparisons` · 2Φ(−tolerance) = alarm, whatever their correlations. 3.9 for 10, 4.4
    for 100."""
    return norm.isf(alarm / (2 * comparisons))
