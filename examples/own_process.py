"""Your own process
================

A pendulum in a noisy bath, and the gradient of its mean energy with an error bar per parameter.

Run it with `python examples/own_process.py`.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

import fluctua as fl


def drift(theta, x):
    angle, speed = x
    return jnp.array([speed, -theta["stiffness"] * jnp.sin(angle) - theta["friction"] * speed])


def noise(theta, x):  # one amplitude per component: angle and speed
    return jnp.array([0.0, theta["shaking"]])


process = fl.Process(drift, noise)
energy = fl.Objective(running=lambda theta, x: x[1] ** 2 / 2)
theta = {"stiffness": jnp.array(2.0), "friction": jnp.array(0.5), "shaking": jnp.array(0.4)}

simulator = fl.simulator(process, start=jnp.array([1.0, 0.0]), t=jnp.linspace(0, 5, 501))
estimate = fl.ppgt(simulator, energy)(jax.random.key(0), theta, 2000)
print(estimate)

# %%
# Some of the trajectories, and the gradient.

figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.8), layout="constrained")
left.plot(simulator.t, simulator(jax.random.key(1), theta, 20).x[..., 0].T, "C0", lw=0.5)
left.set(xlabel="time", ylabel="angle")
for name, slope in estimate.gradient.items():
    right.errorbar(name, slope, 2 * estimate.stderr[name], fmt="C1o", capsize=4)
right.axhline(0, color="0.6", lw=0.8)
right.set(ylabel="∂J/∂θ ± 2 standard errors")
plt.show()
