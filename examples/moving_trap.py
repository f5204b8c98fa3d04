"""Moving trap
===========

Move a trapped particle with the least work, learnt from its own fluctuations.

A Brownian particle (friction 1, k_BT = 1) sits in a trap of stiffness 1 whose centre goes from 0 to
5 within a time 1, in 100 steps, each of which is a parameter. When the centre is switched from λ to
λ' the work V(x, λ') − V(x, λ) is done: at the start, and after every step at the state where it
arrives. In continuous time the least work is W* = 25/(1 + 2) = 8.3333, by jumps of 5/3 at both ends
and a constant speed between (Schmiedl and Seifert 2007).

Run it with `python examples/moving_trap.py`; the gallery ran
`python examples/moving_trap.py --iterations 40 --count 300`.
"""

import argparse

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import fluctua as fl

STEPS, END, LEAST = 100, 5.0, 25 / 3
T = jnp.linspace(0.0, 1.0, STEPS + 1)


def centre(protocol, t, ahead=0):
    """Centre during the step that begins at t, or that many steps ahead; at the end of time it
    is where it must be.
    """
    return jnp.append(protocol, END)[jnp.round(t * STEPS).astype(int) + ahead]


def compute_work(x, before, after):
    return ((x[0] - after) ** 2 - (x[0] - before) ** 2) / 2


process = fl.Process(lambda p, x, t: centre(p, t) - x, lambda p, x: jnp.sqrt(2.0) * jnp.ones(1))
start = fl.Density(lambda p, x: -(x[0] ** 2) / 2, lambda key, p: jax.random.normal(key, (1,)))
gained = fl.Objective(
    initial=lambda p, x: -compute_work(x, 0.0, p[0]),
    per_step=lambda p, x, x_next, t: -compute_work(x_next, centre(p, t), centre(p, t, 1)),
)
estimator = fl.ppgt(fl.simulator(process, start, T), gained)
RAMP = END * (jnp.arange(STEPS) + 0.5) / STEPS


def exact_work(protocol):
    """E[W] of the simulated chain: the work is linear in x, so that its mean path is all that
    matters.
    """

    def step(mean, centres):
        now, after = centres
        mean = mean + (now - mean) / STEPS
        return mean, mean * (after - now)

    _, off = jax.lax.scan(step, 0.0, (protocol, jnp.append(protocol, END)[1:]))
    return END**2 / 2 - jnp.sum(off)


def best_on_grid():
    nothing = jnp.zeros(STEPS)  # the work is quadratic in the protocol
    return -jnp.linalg.solve(jax.hessian(exact_work)(nothing), jax.grad(exact_work)(nothing))


def train(iterations, count):
    rule = optax.sgd(optax.cosine_decay_schedule(30.0, iterations))
    return list(
        fl.train(fl.Training(estimator, RAMP, rule, trajectories=count), iterations=iterations)
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--count", type=int, default=1000, help="trajectories per iteration")
    options = parser.parse_args()
    last = train(**vars(options))[-1]
    work = exact_work(last.next_theta)
    print(
        f"work: ramp {exact_work(RAMP):.4f}, trained {work:.4f}, best on this grid "
        f"{exact_work(best_on_grid()):.4f}"
    )
    print(f"trained / W* = {work / LEAST:.4f} with {last.trajectories:,} trajectories")
    print(
        "jumps at both ends:",
        np.round([last.next_theta[:5].mean(), END - last.next_theta[-5:].mean()], 2),
    )
    figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
    protocols = {"ramp": RAMP, "trained": last.next_theta, "best on this grid": best_on_grid()}
    for (name, protocol), style in zip(protocols.items(), ("C7-", "C0.", "k-"), strict=True):
        work = exact_work(protocol)
        axes.plot(T[:-1], protocol, style, lw=1, label=f"{name}: work {work:.2f}")
    axes.set(xlabel="time", ylabel="centre of the trap")
    axes.legend(frameon=False)
    plt.show()
