"""Magnet
======

Reverse a small magnet with little dissipation, trained from the fluctuations of its spins.

8 × 8 spins with the energy −Σ s s' − h Σ s follow a protocol of the temperature T and the field h
through 30 sweeps, from h = −1 to 1 at T = 0.7. K = 1/T and b = h/T of every sweep are trained. A
sweep updates the two colours of a checkerboard one after the other, so the spins before and after
it determine its probability.

Run it with `python examples/magnet.py`; the gallery ran
`python examples/magnet.py --iterations 40 --count 200`.
"""

import argparse

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import fluctua as fl

SIDE, SWEEPS, COLD = 8, 30, 1 / 0.7
EVEN = np.indices((SIDE, SIDE)).sum(axis=0) % 2 == 0


def local_field(theta, x, t):  # K Σ s' + b of every spin
    spins = x.reshape(SIDE, SIDE)
    sweep = t.astype(int)
    neighbours = sum(jnp.roll(spins, by, axis) for axis in (0, 1) for by in (1, -1))
    return theta["K"][sweep] * neighbours + theta["b"][sweep]


def sample(key, theta, x, t):
    uniform = jax.random.uniform(key, (SIDE, SIDE))
    for colour in (EVEN, ~EVEN):
        up = jax.nn.sigmoid(2 * local_field(theta, x, t))
        new = jnp.where(uniform < up, 1.0, -1.0)
        x = jnp.where(colour, new, x.reshape(SIDE, SIDE)).ravel()
    return x


def field_at_update(theta, x, x_next, t):  # odd spins are updated after the even ones
    return jnp.where(EVEN, local_field(theta, x, t), local_field(theta, x_next, t)).ravel()


def log_prob(theta, x, x_next, t):
    return jnp.sum(jax.nn.log_sigmoid(2 * x_next * field_at_update(theta, x, x_next, t)))


def reduced_energy(theta, x, n):  # E/T; the protocol begins and ends cold
    spins = x.reshape(SIDE, SIDE)
    inside = (n > 0) & (n < SWEEPS)
    sweep = jnp.clip(n, 0, SWEEPS - 1).astype(int)
    K = jnp.where(inside, theta["K"][sweep], COLD)
    b = jnp.where(inside, theta["b"][sweep], jnp.where(n > 0, COLD, -COLD))
    bonds = jnp.sum(spins * (jnp.roll(spins, 1, 0) + jnp.roll(spins, 1, 1)))
    return -K * bonds - b * jnp.sum(x)


def produced_entropy(theta, x, x_next, t):  # released heat over T, and the change of E/T
    heat = jnp.sum((x_next - x) * field_at_update(theta, x, x_next, t))
    return heat + reduced_energy(theta, x_next, t + 1) - reduced_energy(theta, x, t)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--iterations", type=int, default=150)
parser.add_argument("--count", type=int, default=500, help="trajectories per iteration")
options = parser.parse_args()

phase = jnp.pi * (jnp.arange(SWEEPS) + 0.5) / SWEEPS
theta = {"K": 1 / (0.7 + 4 * jnp.sin(phase)), "b": -jnp.cos(phase) / (0.7 + 4 * jnp.sin(phase))}
objective = fl.Objective(per_step=lambda *step: -produced_entropy(*step[:4]))
simulator = fl.simulator(fl.Chain(sample, log_prob), -jnp.ones(SIDE**2), jnp.arange(SWEEPS + 1.0))
estimator = fl.ppgt(simulator, objective)
decay = optax.cosine_decay_schedule(0.02, options.iterations)
training = fl.Training(estimator, theta, optax.adam(decay), trajectories=options.count)
for record in fl.train(training, iterations=options.iterations):
    if record.iteration % 25 == 0:
        print(f"iteration {record.iteration:3d}   entropy {-record.estimate.value:.2f}")
figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.8), layout="constrained")
for name, parameters in (("before", theta), ("after", record.next_theta)):
    evaluation = fl.evaluate(estimator, parameters, count=2000)
    print(f"{name}: entropy produced {-evaluation.J:.2f} ± {evaluation.J_stderr:.2f}")
    spins = simulator(jax.random.key(0), parameters, 200).x
    left.plot(parameters["b"] / parameters["K"], 1 / parameters["K"], ".-", lw=0.8, label=name)
    right.plot(simulator.t, spins.mean(axis=(0, 2)), label=f"{name}: entropy {-evaluation.J:.1f}")
left.set(xlabel="field h", ylabel="temperature T")
right.set(xlabel="sweep", ylabel="mean magnetisation")
right.legend(frameon=False)
plt.show()
