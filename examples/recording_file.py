"""Recording file
==============

From a measurement to a gradient, through a file: record, inspect, calibrate, estimate.

A laboratory writes every run of a driven mode into a recording as it comes in; a kill in between
would lose nothing. The knobs are not quite what they were set to, which the calibration finds.
`python examples/recording_file.py` runs it.
"""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import fluctua as fl
from fluctua import insitu

jax.config.update("jax_enable_x64", True)
SET, TRUE = {"detuning": 0.8, "gain": 0.5, "loss": 1.0}, {"detuning": 0.9, "gain": 0.5, "loss": 1.0}
T = np.linspace(0, 6, 301)


def runs(count, seed=7):
    """Stands for the instrument: ψ (301, 1) of one run after the other, and the phase of its
    drive.
    """
    rng = np.random.default_rng(seed)
    dt = T[1] - T[0]
    for _ in range(count):
        phase = rng.uniform(0, 2 * np.pi)
        kicks = 0.2 * np.sqrt(dt) * (rng.normal(size=300) + 1j * rng.normal(size=300))
        psi = np.zeros(301, complex)
        for n in range(300):
            rate = (-TRUE["loss"] - 1j * TRUE["detuning"]) * psi[n] + TRUE["gain"] * np.exp(
                1j * phase
            )
            psi[n + 1] = psi[n] + rate * dt + kicks[n]
        yield psi[:, None], {"phase": phase}


def drift(theta, x, t, context):
    """The model, for one run: x = (Re ψ, Im ψ)."""
    (re, im), phase = x, context["phase"]
    return jnp.array(
        [
            -theta["loss"] * re + theta["detuning"] * im + theta["gain"] * jnp.cos(phase),
            -theta["loss"] * im - theta["detuning"] * re + theta["gain"] * jnp.sin(phase),
        ]
    )


process = fl.Process(drift, noise=lambda theta, x: 0.2 * jnp.ones(2))
power = fl.Objective(terminal=lambda theta, x: jnp.sum(x**2))

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "run.nc"
    head = insitu.files.Description(
        T,
        ("psi",),
        "complex128",
        time_units="us",
        context={"phase": ()},
        parameters=SET,
        provenance="example",
    )
    with insitu.files.create(path, head) as writer:
        for psi, known in runs(1000):
            writer.append(psi, known)  # safe on disk when this returns

    with insitu.files.open(path) as recording:
        print(recording)
        found = insitu.files.inspect(recording).findings
        print("\n".join(finding.text for finding in found) or "nothing is wrong with it")

        noise = insitu.calibrate.fit_noise(recording, process, recording.description.theta)
        print(
            f"diffusion: {noise.diffusion[0]:.5f} ± {noise.diffusion_stderr[0]:.5f}, the model has "
            f"{0.2**2 / 2:.5f}"
        )

        fit = insitu.calibrate.fit_drift(recording, process, recording.description.theta)
        for name, value in fit.theta.items():
            print(
                f"{name}: set {SET[name]}, measured {float(value):.4f} ± "
                f"{float(fit.stderr[name]):.4f}"
            )

        print("\nwith the measured knobs")
        print(insitu.estimate(recording, process, power, fit.theta).estimate)

# %%
# What the calibration found, beside what was set.

figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
for k, (name, value) in enumerate(fit.theta.items()):
    axes.errorbar(name, value / TRUE[name], 2 * fit.stderr[name] / TRUE[name], fmt="C0o", capsize=4)
    axes.plot(name, SET[name] / TRUE[name], "C1s", label=None if k else "set")
axes.plot([], [], "C0o", label="measured ± 2 standard errors")
axes.axhline(1, color="0.6", lw=0.8)
axes.set(ylabel="value ÷ true value")
axes.margins(x=0.2)
axes.legend(frameon=False, loc="lower right")
plt.show()
