"""Lock-in amplifier
=================

Tune a shaken resonator to its drive by what a lock-in amplifier shows, and nothing else.

The reward is the lock-in's R² = X² + Y², the position demodulated at the drive's frequency and
low-passed. The filter's state joins that of the resonator, without noise of its own.
`python examples/lock_in.py` runs it.
"""

import argparse

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import fluctua as fl

FREQUENCY, FRICTION, FORCE, SHAKING = 1.0, 1.0, 20.0, 2.0
HORIZON = 8.0
t = jnp.linspace(0, HORIZON, 1601)


def drift(theta, x, t):
    force = FORCE * jnp.cos(2 * np.pi * FREQUENCY * t)
    return jnp.array([x[1], -theta["stiffness"] * x[0] - FRICTION * x[1] + force])


resonator = fl.Process(drift, noise=lambda theta, x: jnp.array([0.0, SHAKING]))
position = fl.Objective(running=lambda theta, x: x[0])
seen = fl.filters.filtered(
    resonator, position, jnp.zeros(2), fl.filters.lock_in(FREQUENCY, tau=1.0)
)
simulator = fl.simulator(seen.process, seen.start, t)

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--iterations", type=int, default=40)
parser.add_argument("--count", type=int, default=100, help="trajectories per iteration")
options = parser.parse_args()

theta = {"stiffness": jnp.array(30.0)}
estimator = fl.ppgt(simulator, seen.objective, baseline="mean")
training = fl.Training(estimator, theta, optax.adam(0.6), trajectories=options.count)
records = list(fl.train(training, iterations=options.iterations))
for record in records:
    if record.iteration % 10 == 0:
        shown, error = record.estimate.value / HORIZON, record.estimate.value_stderr / HORIZON
        print(f"stiffness {float(record.theta['stiffness']):6.2f}   R² = {shown:.2f} ± {error:.2f}")
last, resonance = float(record.next_theta["stiffness"]), (2 * np.pi * FREQUENCY) ** 2
print(f"in the end {last:.2f}; the resonance is at (2πf)² = {resonance:.2f}")

# %%
# What the lock-in showed at each iteration.

figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
axes.errorbar(
    [record.theta["stiffness"] for record in records],
    [record.estimate.value / HORIZON for record in records],
    [record.estimate.value_stderr / HORIZON for record in records],
    fmt=".-",
    lw=0.8,
)
axes.axvline(resonance, color="0.6", ls=":", label="resonance")
axes.set(xlabel="stiffness", ylabel="R² ± one standard error")
axes.legend(frameon=False)
plt.show()
