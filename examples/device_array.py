"""Array of devices
================

Four devices that differ, one design for all of them, and a fifth that took no part.

Each box is a driven, noisy mode whose resonance is off by an amount of its own, which a calibration
of that box found. All get the same settings: J of the population is trained. One of them falls
silent for a while. Run it with `python examples/device_array.py`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import fluctua as fl
from fluctua.insitu.instrument import Batch, Health, InstrumentError, Retry, array

T, SIGMA, OFFSETS = (
    np.linspace(0, 6, 151),
    0.2,
    [0.9, 1.2, 0.5, 1.0, 0.8],
)  # the last box takes no part
calls = [0] * len(OFFSETS)


class Box:
    """An instrument."""

    def __init__(self, number):
        self.number, self.rng = number, np.random.default_rng([number, calls[number]])
        self.settings, self.count = {}, 0

    set = lambda self, settings: setattr(self, "settings", settings)
    arm = lambda self, count: setattr(self, "count", count)
    health = lambda self: Health(self.settings, identity=f"box {self.number + 1}")
    close = lambda self: None

    def acquire(self):
        calls[self.number] += 1
        if self.number == 1 and 4 <= calls[1] < 8:
            raise InstrumentError("no trigger")
        rate, psi = (
            -1 - 1j * (OFFSETS[self.number] + self.settings["detuning"]),
            np.zeros((self.count, 151), complex),
        )
        for n, dt in enumerate(np.diff(T)):
            kick = SIGMA * np.sqrt(dt) * self.rng.normal(size=(2, self.count))
            psi[:, n + 1] = psi[:, n] + (rate * psi[:, n] + 1) * dt + kick[0] + 1j * kick[1]
        return Batch(T, np.stack([psi.real, psi.imag], axis=-1))


def drift(theta, x, t, offset):  # offset: of the box, from the context
    return jnp.array([1.0, 0.0]) - x + (offset + theta["detuning"]) * jnp.array([x[1], -x[0]])


process = fl.Process(drift, noise=lambda theta, x: SIGMA * jnp.ones(2))
energy = fl.Objective(running=lambda theta, x: jnp.sum(x**2) / T[-1])
connects = [partial(Box, k) for k in range(5)]
known = [
    partial(np.full, fill_value=offset) for offset in OFFSETS
]  # the calibration of a box, a row a trajectory
boxes = array(
    connects[:4],
    contexts=known[:4],
    retry=Retry(2, first=0.01),
    report=lambda note: print(note.message),
)
estimator, theta = (
    fl.ppgt(boxes, energy, process=process, baseline="twin"),
    {"detuning": jnp.array(0.0)},
)
training = fl.Training(estimator, theta, optax.adam(0.2), trajectories=80)
records = list(fl.train(training, iterations=12))
record = records[-1]
theta = record.next_theta
print(record.estimate, boxes.describe(record.estimate.groups), sep="\n")
fifth = fl.ppgt(array(connects[4:], contexts=known[4:]), energy, process=process)(
    jax.random.key(1), theta, 200
)
print(f"detuning {theta['detuning']:+.2f}; on a box that took no part J = {fifth.value:.3f}")

# %%
# J of the four boxes together, with the error between devices, and of the fifth at the end.

figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
values = [r.estimate.value for r in records]
errors = [r.estimate.value_stderr for r in records]
axes.errorbar(range(len(records)), values, errors, fmt=".-", capsize=3, label="four boxes")
axes.errorbar(len(records), fifth.value, fifth.value_stderr, fmt="s", capsize=3, label="fifth box")
axes.set(xlabel="iteration", ylabel="J ± one standard error")
axes.legend(frameon=False, loc="lower right")
plt.show()
