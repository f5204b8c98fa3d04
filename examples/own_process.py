"""Bring your own process: a pendulum in a noisy bath, and the gradient of its mean energy.

Run it with `python examples/own_process.py`.
"""

import jax
import jax.numpy as jnp

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
