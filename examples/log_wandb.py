"""Weights & Biases
================

The rows of a training, sent to Weights & Biases as they come.

Run it with `pip install wandb`, `python examples/log_wandb.py`; WANDB_MODE=offline
keeps everything here.
"""

import sys

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import wandb

import fluctua as fl

process = fl.Process(lambda theta, x: theta["force"] - x, lambda theta, x: 0.3 * jnp.ones_like(x))
objective = fl.Objective(terminal=lambda theta, x: -((x[0] - 1) ** 2))
estimator = fl.ppgt(fl.simulator(process, jnp.zeros(1), jnp.linspace(0, 2, 41)), objective)

folder = sys.argv[1] if len(sys.argv) > 1 else "runs/trap-wandb"
settings = {"count": 200, "iterations": 30}
with wandb.init(project="fluctua", config=settings) as board:

    def log(row, record):
        numbers = {"J": row.J, "J_stderr": row.J_stderr, "gradient_norm": row.gradient_norm}
        board.log({**numbers, "force": float(record.theta["force"])}, step=row.row)

    count, iterations = settings["count"], settings["iterations"]
    theta = {"force": jnp.zeros(())}
    print(
        fl.run(
            fl.Training(estimator, theta, optax.adam(0.1), trajectories=count),
            iterations=iterations,
            folder=folder,
            on_row=log,
        )
    )

# %%
# The same rows are in the history of the run.

rows = np.genfromtxt(f"{folder}/history.csv", delimiter=",", names=True)
figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
axes.semilogy(rows["trajectories"], rows["gradient_norm"], ".-", lw=0.8)
axes.set(xlabel="trajectories", ylabel="|∇J| as estimated")
plt.show()
