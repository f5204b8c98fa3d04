"""Kicked trap
===========

Move a heavy particle with the least work: the trap learns to kick it off and to catch it.

As in `moving_trap.py`, with mass 1 and friction γ = 1/7, within t_f = 0.3π. The optimum sets the
particle moving by an impulse at the start, carries it at the constant speed c = 5/(t_f + 2γ) and
stops it by an impulse at the end (Gomez-Marin, Schmiedl and Seifert 2008): W* = 25γ/(t_f + 2γ) =
2.90787. The protocol here is a ramp and two kicks, each one of 60 steps long. Only the velocity has
noise. The work is the change of the potential energy and what the force does on the particle,
F·(v + v')/2·Δt per step: the kinetic energy that it gains at any step size; F·(x' − x) is not.
Run it with `python examples/kicked_trap.py`.
"""

import argparse

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import fluctua as fl

STEPS, END, FRICTION, DURATION = 60, 5.0, 1 / 7, 0.3 * np.pi
LEAST, DT = FRICTION * END**2 / (DURATION + 2 * FRICTION), DURATION / STEPS
T = jnp.linspace(0.0, DURATION, STEPS + 1)


def centre(th, t):
    n = jnp.round(t / DT)
    kicks = th["kicks"][0] * (n == 0) + th["kicks"][1] * (n == STEPS - 1)
    return th["level"] + th["rise"] * ((n + 0.5) / STEPS - 0.5) + kicks / DT


force = lambda th, x, t: centre(th, t) - x[0]
process = fl.Process(
    drift=lambda th, x, t: jnp.array([x[1], force(th, x, t) - FRICTION * x[1]]),
    noise=lambda th, x: jnp.array([0.0, np.sqrt(2 * FRICTION)]),
)
start = fl.Density(lambda th, x: -x @ x / 2, lambda key, th: jax.random.normal(key, (2,)))
gained = fl.Objective(
    initial=lambda th, x: x[0] ** 2 / 2,
    per_step=lambda th, x, x_next, t, dt: -force(th, x, t) * (x[1] + x_next[1]) / 2 * dt,
    terminal=lambda th, x: -((x[0] - END) ** 2) / 2,
)
estimator = fl.ppgt(fl.simulator(process, start, T), gained)
RAMP = {"kicks": jnp.zeros(2), "level": jnp.array(END / 2), "rise": jnp.array(END)}


def exact_work(th):
    """E[W] of the simulated chain, by the recursion of its mean m and covariance p."""
    a = jnp.array([[1.0, DT], [-DT, 1 - FRICTION * DT]])

    def step(carry, t):
        m, p = carry
        after = a @ m + jnp.array([0.0, DT * centre(th, t)])
        work = force(th, m, t) * (m[1] + after[1]) / 2 - (p[0, 1] + (p @ a.T)[0, 1]) / 2
        return (after, a @ p @ a.T + jnp.diag(jnp.array([0.0, 2 * FRICTION * DT]))), work * DT

    (m, p), work = jax.lax.scan(step, (jnp.zeros(2), jnp.eye(2)), T[:-1])
    return jnp.sum(work) + ((m[0] - END) ** 2 + p[0, 0]) / 2 - 1 / 2


def mean_position(th):
    """Path of a particle without noise, which is the mean: the drift is linear."""

    def step(m, t):
        return m + DT * process.drift(th, m, t), m[0]

    return jax.lax.scan(step, jnp.zeros(2), T[:-1])[1]


def train(iterations, count):
    rule = optax.sgd(optax.cosine_decay_schedule(0.1, iterations))
    return list(
        fl.train(fl.Training(estimator, RAMP, rule, trajectories=count), iterations=iterations)
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--count", type=int, default=4000, help="trajectories per iteration")
    options = parser.parse_args()
    last = train(**vars(options))[-1]
    work = exact_work(last.next_theta)
    print(f"work: ramp {exact_work(RAMP):.4f}, trained {work:.4f}; W* {LEAST:.5f}")
    print(f"trained / W* = {work / LEAST:.4f} with {last.trajectories:,} trajectories")
    print(
        "kicks at both ends:",
        np.round(last.next_theta["kicks"], 2),
        f"(±{END / (DURATION + 2 * FRICTION):.2f})",
    )
    figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
    for name, th, colour in (("ramp", RAMP, "0.6"), ("trained", last.next_theta, "C0")):
        axes.plot(T[1:-2], jax.vmap(lambda t, th=th: centre(th, t))(T[1:-2]), colour, ls="--")
        axes.plot(T[:-1], mean_position(th), colour, label=f"{name}: work {exact_work(th):.2f}")
    axes.plot([], [], "0.6", ls="--", label="centre of the trap between the kicks")
    axes.set(xlabel="time", ylabel="mean position")
    axes.legend(frameon=False)
    plt.show()
