"""Trajectories used again
=======================

Natural steps of a known length, and a look around with the trajectories at hand.

A bead in an optical trap is to be carried from 0 to 1 in time 2; stiffness and two way points of
the trap are trained by the natural gradient. Then one batch tells what other stiffnesses would
give, without a further trajectory. Far away few of them carry the weight, and error bars become too
short. Run it with `python examples/reuse.py`.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

import fluctua as fl

SIGMA, HORIZON = 0.4, 2.0


def drift(theta, x, t):
    way = jnp.concatenate([jnp.zeros(1), theta["way"]])
    centre = jnp.interp(t, jnp.linspace(0, HORIZON, 3), way)
    return -theta["stiffness"] * (x - centre)


process = fl.Process(drift, noise=lambda theta, x: SIGMA * jnp.ones(1))
arrive = fl.Objective(
    running=lambda theta, x: -0.02 * theta["stiffness"] ** 2,  # what a stiff trap costs
    terminal=lambda theta, x: -((x[0] - 1) ** 2),
)
simulator = fl.simulator(process, start=jnp.zeros(1), t=jnp.linspace(0, HORIZON, 101))
theta = {"stiffness": jnp.array(1.0), "way": jnp.array([0.0, 0.0])}

estimator = fl.natural(fl.ppgt(simulator, arrive))
for record in fl.train(
    fl.Training(estimator, theta, fl.optimisers.kl_ascent(0.1), trajectories=200), iterations=25
):
    if record.iteration % 6 == 0:
        print(f"iteration {record.iteration:2d}   J = {record.estimate.value:+.3f}")
theta = record.next_theta

batch = simulator(jax.random.key(1), theta, 500)
print(f"\nstiffness {theta['stiffness']:.2f}: 500 trajectories. Elsewhere, from the same:")
figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
for change in (-0.6, -0.3, 0.3, 0.6, 6.0):
    there = theta | {"stiffness": theta["stiffness"] + change}
    try:
        found = fl.reweighted(process, arrive, there, [(theta, batch)])
    except ValueError as refusal:
        print(f"  {change:+.1f}   {str(refusal).split(':')[0]}")
    else:
        J, error = found.estimate.value, found.estimate.value_stderr
        print(
            f"  {change:+.1f}   J = {J:+.3f} ± {error:.3f}   worth {found.ess:.0f}, KL "
            f"{found.kl[0]:.2f}"
        )
        fresh = fl.evaluate(estimator, there, count=4000)
        axes.errorbar(there["stiffness"], J, 2 * error, fmt="C0o", capsize=4)
        axes.plot(there["stiffness"], fresh.J, "kx")
axes.plot([], [], "C0o", label="from the batch, ± 2 standard errors")
axes.plot([], [], "kx", label="4,000 fresh trajectories")
axes.set(xlabel="stiffness", ylabel="J")
axes.legend(frameon=False)
plt.show()
