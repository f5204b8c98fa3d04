"""Classifier
==========

Classify with your own process: a noisy particle learns which of two classes a point belongs to.

A data point pushes the particle from the start on; at the end it answers by the well it is in, left
or right. `python examples/supervised.py` runs it.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax

import fluctua as fl

points = jax.random.normal(jax.random.key(1), (500, 2))
labels = jnp.where(
    points[:, 0] * points[:, 1] > 0, 1, -1
)  # same signs or not: not linearly separable


def example(key):  # drawn anew for every trajectory: an ensemble is a minibatch
    number = jax.random.randint(key, (), 0, len(points))
    return {"point": points[number], "label": labels[number]}


def drift(theta, x, t, context):
    push = jnp.tanh(theta["inner"] @ context["point"] + theta["shift"]) @ theta["outer"]
    return x - x**3 + push


def log_likelihood(theta, x, context):  # of the label, if the answer is right with σ(5x)
    return jax.nn.log_sigmoid(5 * context["label"] * x[0])


process = fl.Process(drift, noise=lambda theta, x: 0.3 * jnp.ones(1))
grid = jnp.linspace(0, 2, 41)
simulator = fl.simulator(process, start=jnp.zeros(1), t=grid, context=example)
estimator = fl.ppgt(simulator, fl.Objective(terminal=log_likelihood), baseline=fl.Twin())
keys = jax.random.split(jax.random.key(0))
theta = {
    "inner": jax.random.normal(keys[0], (6, 2)),
    "shift": jnp.zeros(6),
    "outer": 0.1 * jax.random.normal(keys[1], (6, 1)),
}
training = fl.Training(estimator, theta, optax.adam(0.05), trajectories=200)
for record in fl.train(training, iterations=150):
    if record.iteration % 30 == 0:
        print(f"iteration {record.iteration}: mean log-likelihood {record.estimate.value:.3f}")

run = simulator(jax.random.key(2), record.next_theta, 1000)
right = jnp.sign(run.x[:, -1, 0]) == run.context["label"]
print(f"right answers of single runs: {right.mean():.1%}")

# %%
# Where the particle ended for each point; the classes are the quadrants.

figure, axes = plt.subplots(figsize=(4.5, 3.4), layout="constrained")
first, second = run.context["point"].T
ends = axes.scatter(first, second, c=run.x[:, -1, 0], s=8, cmap="coolwarm")
figure.colorbar(ends, label="last position, the answer")
axes.axhline(0, color="0.6", lw=0.8)
axes.axvline(0, color="0.6", lw=0.8)
axes.set(xlabel="first coordinate", ylabel="second coordinate")
plt.show()
