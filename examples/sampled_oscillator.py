"""Bead sampled far apart
======================

Calibrate a trapped bead from coarse samples, then read the gradient off the file.

Only the velocity is kicked; the position follows it. Over an interval of a fifth of a period an
Euler step is wrong for both, and the exact transition of the linear part is right for both.
`python examples/sampled_oscillator.py` runs it.
"""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from scipy.linalg import expm

import fluctua as fl
from fluctua import insitu

jax.config.update("jax_enable_x64", True)
TRUE, SET = {"stiffness": 4.0, "friction": 0.5}, {"stiffness": 3.0, "friction": 0.5}
KICKS, INTERVAL, SAMPLES = 0.8, 0.6, 12


def drift(theta, x):
    return jnp.array([x[1], -theta["stiffness"] * x[0] - theta["friction"] * x[1]])


process = fl.Process(drift, noise=lambda theta, x: jnp.array([0.0, KICKS]))
spread = fl.Objective(terminal=lambda theta, x: x[0] ** 2)


def transition(theta):
    """Mean and covariance of the true bead after one interval (Van Loan)."""
    j = np.array([[0.0, 1.0], [-theta["stiffness"], -theta["friction"]]])
    block = expm(np.block([[-j, np.diag([0.0, KICKS**2])], [np.zeros((2, 2)), j.T]]) * INTERVAL)
    return block[2:, 2:].T, block[2:, 2:].T @ block[:2, 2:]


def measure(count, seed=5):
    """Stands for the instrument: exact samples of the true bead, from rest at 1."""
    rng, (step, covariance) = np.random.default_rng(seed), transition(TRUE)
    x, root = np.tile([1.0, 0.0], (count, SAMPLES + 1, 1)), np.linalg.cholesky(covariance)
    for n in range(SAMPLES):
        x[:, n + 1] = x[:, n] @ step.T + rng.normal(size=(count, 2)) @ root.T
    return x


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "bead.nc"
    head = insitu.files.Description(
        INTERVAL * np.arange(SAMPLES + 1), ("position", "velocity"), parameters=SET
    )
    insitu.files.save(path, head, measure(2000))
    with insitu.files.open(path) as recording:
        fit = insitu.calibrate.fit_drift(recording, process, SET, transition=fl.scores.local_linear)
        for name, value in fit.theta.items():
            print(f"{name}: set {SET[name]}, measured {value:.4f} ± {fit.stderr[name]:.4f}")
        score = fl.scores.local_linear_score
        print(insitu.estimate(recording, process, spread, fit.theta, score=score).estimate)

# %%
# Samples of three beads, and what the calibration found of the trap.

figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.8), layout="constrained")
left.plot(INTERVAL * np.arange(SAMPLES + 1), measure(3)[..., 0].T, ".-", lw=0.5)
left.set(xlabel="time", ylabel="position")
for k, (name, value) in enumerate(fit.theta.items()):
    right.errorbar(
        name, value / TRUE[name], 2 * fit.stderr[name] / TRUE[name], fmt="C0o", capsize=4
    )
    right.plot(name, SET[name] / TRUE[name], "C1s", label=None if k else "set")
right.plot([], [], "C0o", label="measured ± 2 standard errors")
right.axhline(1, color="0.6", lw=0.8)
right.set(ylabel="value ÷ true value")
right.margins(x=0.3)
right.legend(frameon=False, loc="lower left")
plt.show()
