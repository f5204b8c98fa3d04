"""TensorBoard
===========

The rows of a training, sent to TensorBoard as they come.

Run it with `pip install tensorboardX`, `python examples/log_tensorboard.py`; look with
`tensorboard --logdir runs`.
"""

import sys

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from tensorboardX import SummaryWriter

import fluctua as fl

process = fl.Process(lambda theta, x: theta["force"] - x, lambda theta, x: 0.3 * jnp.ones_like(x))
objective = fl.Objective(terminal=lambda theta, x: -((x[0] - 1) ** 2))
estimator = fl.ppgt(fl.simulator(process, jnp.zeros(1), jnp.linspace(0, 2, 41)), objective)

folder = sys.argv[1] if len(sys.argv) > 1 else "runs/trap-tensorboard"
with SummaryWriter(f"{folder}-events") as writer:

    def log(row, record):
        for name in ("J", "J_stderr", "gradient_norm", "ensemble", "trajectories"):
            writer.add_scalar(name, getattr(row, name), row.iteration)
        writer.add_scalar("force", float(record.theta["force"]), row.iteration)

    print(
        fl.run(
            fl.Training(estimator, {"force": jnp.zeros(())}, optax.adam(0.1), trajectories=200),
            iterations=30,
            folder=folder,
            on_row=log,
        )
    )

# %%
# The same rows are in the history of the run.

rows = np.genfromtxt(f"{folder}/history.csv", delimiter=",", names=True)
figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
axes.errorbar(rows["iteration"], rows["J"], rows["J_stderr"], fmt=".-", lw=0.8)
axes.set(xlabel="iteration", ylabel="J ± one standard error")
plt.show()
