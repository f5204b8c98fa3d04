r"""First passage
=============

Learn how much evidence to wait for before a decision.

Evidence dX = ±μ dt + dW for one of two answers is collected until \|X\| reaches a bound b, and the
sign of X is the answer. The reward is 1 for a right answer, less 0.2 per unit of time. Trials are
hard (μ = 0.5) or easy (μ = 2). A higher bound makes fewer mistakes and takes longer. The bound b is
trained from trials with the exact drift and noise; the exact reward of each bound serves for
comparison only. `python examples/first_passage.py` runs it.
"""

import argparse

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax

import fluctua as fl

COST = 0.2
DRIFTS = jnp.array([0.5, 2.0])


def exact_reward(bound):  # of exit from (−b, b): P(right answer) − cost · mean time
    right = jax.nn.sigmoid(2 * DRIFTS * bound)
    time = bound / DRIFTS * jnp.tanh(DRIFTS * bound)
    return jnp.mean(right - COST * time)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--iterations", type=int, default=60)
parser.add_argument("--count", type=int, default=500, help="trajectories per iteration")
options = parser.parse_args()

process = fl.Process(
    drift=lambda theta, x, t, context: context[None],  # towards the right answer, x > 0
    noise=lambda theta, x: jnp.ones(1),
)
objective = fl.Objective(
    running=lambda theta, x: -COST * jnp.ones(()),
    terminal=lambda theta, x: jnp.where(x[0] > 0, 1.0, 0.0),
    stop=lambda theta, x: jnp.stack([x[0] - theta["bound"], -theta["bound"] - x[0]]),
    overshoot="bridge",  # allows steps of 0.1
)
simulator = fl.simulator(
    process,
    start=jnp.zeros(1),
    t=jnp.linspace(0, 20, 201),
    context=lambda key: jax.random.choice(key, DRIFTS),
)
estimator = fl.ppgt(simulator, objective)
theta = {"bound": jnp.array(0.3)}
print(estimator(jax.random.key(1), theta, 2000))
print(f"exact: J = {exact_reward(0.3):.4f}, ∂J/∂bound = {jax.grad(exact_reward)(0.3):.4f}")
rule = optax.adam(optax.cosine_decay_schedule(0.05, options.iterations))
training = fl.Training(estimator, theta, rule, trajectories=options.count, bounds=(0.1, 3.0))
records = list(fl.train(training, iterations=options.iterations))
grid = jnp.linspace(0.1, 3.0, 2901)
best = grid[jnp.argmax(jax.vmap(exact_reward)(grid))]
for name, bound in (("learned", records[-1].next_theta["bound"]), ("best", best)):
    print(f"{name}: bound {bound:.3f} with J = {exact_reward(bound):.4f}")

# %%
# Every iteration on the exact curve.

figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
axes.plot(grid, jax.vmap(exact_reward)(grid), color="0.6", label="exact")
axes.errorbar(
    [record.theta["bound"] for record in records],
    [record.estimate.value for record in records],
    [record.estimate.value_stderr for record in records],
    fmt=".",
    lw=0.8,
    label="iterations",
)
axes.set(xlabel="bound b", ylabel="J ± one standard error")
axes.legend(frameon=False)
plt.show()
