"""Cluster
=======

A training whose ensembles are computed in shards, here or on a Ray cluster, with the same digits.

A particle in a noisy trap is pushed to x = 1::

    python examples/cluster.py                      # in this process
    python examples/cluster.py --address local      # on Ray, started on this machine
    python examples/cluster.py --address HOST:6379  # on a cluster: `ray start --head` there

Ray comes with `pip install 'fluctua[cluster]'`. All three print the same numbers, to the last
digit, also if you kill some of the workers.
"""

import argparse

import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax

import fluctua as fl

options = argparse.ArgumentParser()
options.add_argument("--address", default=None)
options.add_argument("--count", type=int, default=4000)
options.add_argument("--iterations", type=int, default=10)
arguments = options.parse_args()

process = fl.Process(
    lambda theta, x: theta["force"] - x**3, lambda theta, x: 0.3 * jnp.ones_like(x)
)
objective = fl.Objective(terminal=lambda theta, x: -((x[0] - 1) ** 2))
estimator = fl.ppgt(fl.simulator(process, jnp.zeros(1), jnp.linspace(0, 2, 101)), objective)

with fl.distributed(estimator, arguments.address, shards=16) as sharded:
    training = fl.Training(
        sharded, {"force": jnp.zeros(())}, optax.adam(0.1), trajectories=arguments.count
    )
    records = list(fl.train(training, iterations=arguments.iterations))
    for record in records:
        print(
            f"{record.iteration:3}  J = {float(record.estimate.value):.9f}  force "
            f"{float(record.theta['force']):.9f}"
        )
    lost = (
        f"{len(sharded.losses)} shards were computed again"
        if sharded.losses
        else "no worker was lost"
    )
    print(f"{record.trajectories:,} trajectories; {lost}")

# %%
# Every point is a sum over sixteen shards.

figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
for record in records:
    estimate = record.estimate
    axes.errorbar(record.theta["force"], estimate.value, estimate.value_stderr, fmt="C0.")
axes.set(xlabel="force", ylabel="J ± one standard error")
plt.show()
