"""Your own training
=================

A training in a folder that survives a kill: push a particle in a noisy trap to x = 1.

Run it with `python examples/own_run.py`, kill it, and run it again: it goes on where it was, to the
bit.
"""

import sys
from pathlib import Path

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import fluctua as fl

process = fl.Process(lambda theta, x: theta["force"] - x, lambda theta, x: 0.3 * jnp.ones_like(x))
objective = fl.Objective(terminal=lambda theta, x: -((x[0] - 1) ** 2))
estimator = fl.ppgt(fl.simulator(process, jnp.zeros(1), jnp.linspace(0, 2, 41)), objective)

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/trap")
theta = {"force": jnp.zeros(())}
training = fl.Training(estimator, theta, optax.adam(0.1), trajectories=200)
print(fl.run(training, iterations=60, folder=folder, checkpoint_seconds=1.0))

# %%
# The history of a run is a table; `fluctua plot FOLDER` draws it too.

rows = np.genfromtxt(folder / "history.csv", delimiter=",", names=True)
figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
axes.errorbar(rows["trajectories"], rows["J"], rows["J_stderr"], fmt=".-", lw=0.8)
axes.axhline(-(0.3**2) / 2, color="0.6", ls=":", label="best: the variance of the noise is left")
axes.set(xlabel="trajectories", ylabel="J ± one standard error")
axes.legend(frameon=False, loc="lower right")
plt.show()
