"""Train a process of your own into a folder that survives a kill: push a particle in a noisy trap
to x = 1.

Run it with `python examples/own_run.py`, kill it, and run it again: it goes on where it was, to the
bit."""

import sys
from pathlib import Path

import jax.numpy as jnp
import optax

import fluctua as fl

process = fl.Process(lambda theta, x: theta["force"] - x, lambda theta, x: 0.3 * jnp.ones_like(x))
objective = fl.Objective(terminal=lambda theta, x: -((x[0] - 1) ** 2))
estimator = fl.ppgt(fl.simulator(process, jnp.zeros(1), jnp.linspace(0, 2, 41)), objective)

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/trap")
theta = {"force": jnp.zeros(())}
training = fl.Training(estimator, theta, optax.adam(0.1), trajectories=200)
print(fl.run(training, iterations=60, folder=folder, checkpoint_seconds=1.0))
