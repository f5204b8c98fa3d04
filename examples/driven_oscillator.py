r"""Driven oscillator
=================

A device with three knobs of unknown offset and gain: its model, its driver, and a training.

The oscillator starts at rest and has to reach an amplitude of one and to stay there. In the frame
of the drive its amplitude a = x₀ + i x₁ follows::

    da/dt = −(LOSS + iδ) a + p a* + f + noise,   (f, δ, p) = offset + gain · settings,

with a drive f, a detuning δ and a parametric pump p. Run it with one of::

    python examples/driven_oscillator.py
    fluctua insitu train examples/driven_oscillator.py:connect \
        --model examples/driven_oscillator.py:model --out runs/oscillator \
        --calibration training --trajectories 5 --iterations 60 --set learning_rate=0.3
"""

import argparse
import tempfile
from pathlib import Path

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from scipy.linalg import expm
from scipy.optimize import minimize

import fluctua as fl
from fluctua import insitu

KNOBS = ("drive", "detuning", "pump")
LOSS, NOISE = 1.0, 0.15  # 1/ms, 1/√ms
T = np.linspace(0.0, 4.0, 201)  # ms


# --8<-- the model
def drift(settings, x, t, unknowns):
    """Rate of change of both quadratures at given settings. Shape (2,)."""
    values = jnp.stack([settings[name] for name in KNOBS])
    drive, detuning, pump = unknowns["offset"] + unknowns["gain"] * values
    return jnp.array(
        [
            (pump - LOSS) * x[0] + detuning * x[1] + drive,
            -(pump + LOSS) * x[1] - detuning * x[0],
        ]
    )


def reward(settings, x):
    """Distance from the amplitude 1, squared, averaged over the record, negative."""
    return -((x[0] - 1.0) ** 2 + x[1] ** 2) / T[-1]


model = insitu.Model(
    process=fl.Process(drift, noise=lambda settings, x: NOISE * jnp.ones(2), integrator="heun"),
    objective=fl.Objective(running=reward),
    knobs={
        "drive": insitu.Knob(0.0, bounds=(0.0, 3.0), probe=(0.5, 1.5)),
        "detuning": insitu.Knob(0.0, bounds=(-2.0, 2.0)),
        "pump": insitu.Knob(0.0, bounds=(-1.0, 1.0)),
    },
    unknowns={
        "offset": insitu.Unknown(np.zeros(3), spread=0.3),
        "gain": insitu.Unknown(np.ones(3), spread=0.3),
    },
    x0=jnp.zeros(2),
    t=T,
)
# --8<-- the model


class Oscillator:
    """Stands for the hardware: ten steps per sample, and hidden numbers."""

    offset = np.array([0.1, 0.6, -0.2])
    gain = np.array([0.8, 1.2, 0.9])

    rng = np.random.default_rng(0)  # of the class: noise goes on after a new connection

    def __init__(self):
        self.settings = {}

    def acquire(self, count):
        """Amplitudes (count, times), complex."""
        values = np.array([self.settings[name] for name in KNOBS])
        drive, detuning, pump = self.offset + self.gain * values
        dt = (T[1] - T[0]) / 10
        kicks = self.rng.normal(0.0, NOISE * np.sqrt(dt), (T.size - 1, 10, 2, count))
        a = np.zeros(count, complex)
        record = [a]
        for sample in kicks:
            for re, im in sample:
                rate = -(LOSS + 1j * detuning) * a + pump * a.conj() + drive
                a = a + rate * dt + re + 1j * im
            record.append(a)
        return np.stack(record, axis=1)


# --8<-- the driver
def connect():
    """Open the instrument; called again after every failure."""
    box = Oscillator()
    return insitu.instrument.make_driver(
        box.settings.update,
        box.acquire,
        t=T,
        limits={"drive": (0.0, 3.0), "detuning": (-2.0, 2.0), "pump": (-1.0, 1.0)},
        units={"drive": "V", "detuning": "kHz", "pump": "V"},
        health=lambda: box.settings,
    )


# --8<-- the driver


def compute_return(values, offset, gain):
    """J of an oscillator with such knobs: its mean and covariance, sample by sample."""
    drive, detuning, pump = offset + gain * values
    rate = np.array([[pump - LOSS, detuning], [-detuning, -pump - LOSS]])
    forced = expm(np.array([[*rate[0], drive], [*rate[1], 0.0], [0.0, 0.0, 0.0]]) * T[1])
    spread = np.block([[rate, NOISE**2 * np.eye(2)], [np.zeros((2, 2)), -rate.T]])
    step = forced[:2, :2]
    added = expm(spread * T[1])[:2, 2:] @ step.T
    mean = np.zeros(2)
    covariance = np.zeros((2, 2))
    distance = []
    for _ in T:
        distance.append((mean[0] - 1.0) ** 2 + mean[1] ** 2 + np.trace(covariance))
        mean = step @ mean + forced[:2, 2]
        covariance = step @ covariance @ step.T + added
    return -np.trapezoid(distance, T) / T[-1]


def find_best(offset, gain):
    """The settings at which such an oscillator has the largest J."""
    bounds = [model.knobs[name].bounds for name in KNOBS]
    start = np.array([1.0, 0.0, 0.0])
    return minimize(lambda v: -compute_return(v, offset, gain), start, bounds=bounds).x


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=60, help="of five trajectories each")
    iterations = parser.parse_args().iterations
    plan = insitu.Plan(iterations, trajectories=5, learning_rate=0.3, calibration="training")
    with tempfile.TemporaryDirectory() as folder:
        rows = list(insitu.run(connect, model, plan, Path(folder, "run")))
        calibration = Path(folder, "run", "calibration.txt").read_text()
    for row, _ in (*rows[::10], rows[-1]):
        print(f"iteration {row.iteration:2d}   J = {row.J:.3f}")
    print(calibration.strip())
    last, record = rows[-1]
    designs = {
        "before": np.zeros(3),
        "best by the data sheet": find_best(np.zeros(3), np.ones(3)),
        f"after {last.trajectories} trajectories": np.array(
            [float(record.next_theta[name]) for name in KNOBS]
        ),
        "best by the hidden numbers": find_best(Oscillator.offset, Oscillator.gain),
    }
    print(f"{'':<28}{'drive':>6}{'detuning':>10}{'pump':>7}{'J of the device':>18}")
    figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
    axes.plot([row.trajectories for row, _ in rows], [row.J for row, _ in rows], "k.", ms=4)
    for k, (name, values) in enumerate(designs.items()):
        J = compute_return(values, Oscillator.offset, Oscillator.gain)
        drive, detuning, pump = values
        print(f"{name:<28}{drive:6.2f}{detuning:10.2f}{pump:7.2f}{J:18.4f}")
        axes.axhline(J, color=f"C{k}", lw=1, label=name)
    axes.set(xlabel="measured trajectories", ylabel="J")
    axes.legend(frameon=False, loc="lower right")
    plt.show()
