"""Recorded arrays
===============

No simulator: arrays in, gradient out.

A laboratory recorded 4,000 trajectories of a driven mode and saved them as plain arrays. Known are
the drift with its calibrated coefficients and the strength of the noise. The gradient is the
direction in which to turn each knob. Run it with `python examples/recorded_arrays.py`.
"""

import argparse
import tempfile
from pathlib import Path

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import fluctua as fl

KNOBS = {"detuning": 0.8, "gain": 0.5}


def laboratory(path: Path, runs: int, seed: int = 7) -> None:
    """Stands for the instrument: writes t (301,), re and im (runs, 301), and the phase of each
    run's drive.
    """
    rng = np.random.default_rng(seed)
    t = np.linspace(0, 6, 301)
    dt = np.diff(t)
    phase = rng.uniform(0, 2 * np.pi, runs)
    psi = np.zeros((runs, t.size), complex)
    for n in range(t.size - 1):
        kick = rng.normal(size=runs) + 1j * rng.normal(size=runs)
        rate = (-1 - 1j * KNOBS["detuning"]) * psi[:, n] + KNOBS["gain"] * np.exp(1j * phase)
        psi[:, n + 1] = psi[:, n] + rate * dt[n] + 0.2 * np.sqrt(dt[n]) * kick
    np.savez(path, t=t, re=psi.real, im=psi.imag, phase=phase)


def drift(theta, x, t, phase):
    """The calibrated model, for one run: x = (Re ψ, Im ψ)."""
    re, im = x
    return jnp.array(
        [
            -re + theta["detuning"] * im + theta["gain"] * jnp.cos(phase),
            -im - theta["detuning"] * re + theta["gain"] * jnp.sin(phase),
        ]
    )


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--runs", type=int, default=4000)
runs = parser.parse_args().runs

with tempfile.TemporaryDirectory() as folder:
    laboratory(Path(folder) / "run.npz", runs)
    data = np.load(Path(folder) / "run.npz")

recorded = fl.Trajectories(
    data["t"], np.stack([data["re"], data["im"]], axis=-1), context=data["phase"]
)
process = fl.Process(drift, noise=lambda theta, x: 0.2 * jnp.ones(2))
power = fl.Objective(terminal=lambda theta, x: jnp.sum(x**2))
theta = {name: jnp.array(value) for name, value in KNOBS.items()}

# The bins compare runs that had the same power just before the kick.
estimate = fl.gradient(
    process, power, theta, recorded, baseline=fl.baselines.binned(lambda theta, x: jnp.sum(x**2))
)
print(estimate)

detuning, gain = KNOBS["detuning"], KNOBS["gain"]
steady = gain**2 / (1 + detuning**2)  # the power of the mean, long after the drive was switched on
print("\nfor comparison, in the steady state")
slopes = {"detuning": -2 * detuning * steady / (1 + detuning**2), "gain": 2 * steady / gain}
for name, slope in slopes.items():
    print(f"  ∂J/∂{name:<8} = {slope:.4f}")

# %%
# Power of some of the runs, and the gradient.

figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.8), layout="constrained")
left.plot(data["t"], (data["re"] ** 2 + data["im"] ** 2)[:20].T, "C0", lw=0.5)
left.set(xlabel="time", ylabel="power")
for name, slope in slopes.items():
    error = 2 * estimate.stderr[name]
    right.errorbar(name, estimate.gradient[name], error, fmt="C1o", ms=3, capsize=4)
    right.plot(name, slope, "kx")
right.set(ylabel="∂J ± 2 s.e.; × of the steady state")
right.margins(x=0.4)
plt.show()
