"""Gene
====

A gene learns to hold its protein at twenty molecules, from the times of its reactions.

A protein is made at a rate that it represses itself, a/(1 + (n/K)²), and lost at rate 1 each.
Without repression its number would be Poissonian, with a variance of 20.
`python examples/reactions.py` runs it.
"""

import argparse

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import fluctua as fl

WANTED = 20.0


def rates(theta, x):
    make, half = jnp.exp(theta["make"]), jnp.exp(theta["half"])  # positive whatever θ is
    return jnp.array([make / (1 + (x[0] / half) ** 2), x[0]])


gene = fl.Jumps(rates, changes=[[1.0], [-1.0]])
steady = fl.Objective(
    running=lambda theta, x, t: -jnp.where(t >= 3.0, (x[0] - WANTED) ** 2, 0.0) / 3.0
)
simulator = fl.simulator(gene, start=jnp.array([WANTED]), t=jnp.linspace(0, 6, 61))


def exact(theta):
    """Mean and variance of n in the steady state: p(n)/p(n−1) is the ratio of the two rates."""
    n = np.arange(1.0, 120.0)
    up, down = np.array([rates(theta, jnp.array([k - 1]))[0] for k in n]), n
    p = np.concatenate([[1.0], np.cumprod(up / down)])
    mean = np.sum(p * np.arange(120)) / p.sum()
    return mean, np.sum(p * (np.arange(120) - mean) ** 2) / p.sum()


parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--iterations", type=int, default=60)
parser.add_argument("--count", type=int, default=400, help="trajectories per iteration")
options = parser.parse_args()

theta = {"make": jnp.log(jnp.array(20.0)), "half": jnp.log(jnp.array(60.0))}
estimator = fl.ppgt(simulator, steady, baseline="mean")
training = fl.Training(estimator, theta, optax.adam(0.1), trajectories=options.count)
for record in fl.train(training, iterations=options.iterations):
    if record.iteration % 10 == 0:
        e = record.estimate
        print(f"iteration {record.iteration:3d}   J = {e.value:7.2f} ± {e.value_stderr:.2f}")
for name, at in (("before", theta), ("after", record.next_theta)):
    mean, variance = exact(at)
    distance = variance + (mean - WANTED) ** 2
    print(f"{name}: mean {mean:.1f}, variance {variance:.1f}, mean squared distance {distance:.1f}")

# %%
# Numbers of molecules from time 3 on, in 400 cells before and after.

figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
for name, at in (("before", theta), ("after", record.next_theta)):
    numbers = simulator(jax.random.key(1), at, 400).x[:, 30:]
    axes.hist(np.ravel(numbers), range(46), density=True, align="left", alpha=0.5, label=name)
axes.axvline(WANTED, color="k", lw=0.8, ls=":", label="wanted")
axes.set(xlabel="molecules", ylabel="share of the time")
axes.legend(frameon=False)
plt.show()
