"""Your own instrument
===================

A driver for one's own instrument: five short methods, and it trains.

The box is a driven, noisy mode with two knobs, a detuning and a drive. Its resonance is off by 0.9
from the data sheet, which a calibration has found; there is no simulator of it. Every tenth
acquisition fails, as acquisitions do. Run it with `python examples/own_instrument.py`.
"""

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import fluctua as fl
from fluctua.insitu import instrument_substrate
from fluctua.insitu.instrument import Batch, Health, InstrumentError

T = np.linspace(0, 6, 301)
OFFSET, LOSS, SIGMA = 0.9, 1.0, 0.2  # from the calibration


class Box:
    """Stands for the hardware; in a laboratory this is on the other end of the line."""

    rng, runs = np.random.default_rng(3), 0

    def run(self, detuning, drive, count):
        Box.runs += 1
        if Box.runs % 10 == 0:
            raise TimeoutError("no trigger")
        psi = np.zeros((count, T.size), complex)
        for n, dt in enumerate(np.diff(T)):
            kick = (
                SIGMA
                * np.sqrt(dt)
                * (self.rng.normal(size=count) + 1j * self.rng.normal(size=count))
            )
            psi[:, n + 1] = (
                psi[:, n] + ((-LOSS - 1j * (OFFSET + detuning)) * psi[:, n] + drive) * dt + kick
            )
        return psi


# --8<-- the driver
class MyInstrument:
    """Opens the line when it is made, and is made again after every failure."""

    def __init__(self):
        # e.g. fluctua.insitu.instrument.connect("TCPIP::192.168.0.7::5025::SOCKET")
        self.box = Box()

    def set(self, settings):
        self.settings = {name: float(value) for name, value in settings.items()}

    def arm(self, count):
        self.count = count

    def acquire(self):
        try:
            psi = self.box.run(self.settings["detuning"], self.settings["drive"], self.count)
        except TimeoutError as error:
            raise InstrumentError(f"the acquisition failed: {error}") from error
        return Batch(T, np.stack([psi.real, psi.imag], axis=-1), full_scale=5.0)

    def health(self):
        return Health(
            settings=self.settings, identity="box 7"
        )  # as the instrument reports, if it can

    def close(self):
        pass


# --8<-- the driver


def drift(theta, x):
    """The calibrated model as a function of the knobs."""
    re, im = x
    detuning = OFFSET + theta["detuning"]
    return jnp.array([-LOSS * re + detuning * im + theta["drive"], -LOSS * im - detuning * re])


process = fl.Process(drift, noise=lambda theta, x: SIGMA * jnp.ones(2))
energy = fl.Objective(
    running=lambda theta, x: (jnp.sum(x**2) - 0.1 * theta["drive"] ** 2) / T[-1]
)  # drive has a price

substrate = instrument_substrate(
    MyInstrument, batch=100, report=lambda incident: print("note:", incident.message)
)
estimator = fl.ppgt(substrate, energy, process=process)
theta = {"detuning": jnp.array(0.0), "drive": jnp.array(1.0)}
bounds = ({"detuning": -2.0, "drive": 0.0}, {"detuning": 2.0, "drive": 2.0})
training = fl.Training(estimator, theta, optax.adam(0.15), trajectories=200, bounds=bounds)
records = list(fl.train(training, iterations=16))
for record in records:
    if record.iteration % 3 == 0:
        print(
            f"iteration {record.iteration:2d}   J = {record.estimate.value:.3f} ± "
            f"{record.estimate.value_stderr:.3f}"
        )
print(f"detuning {record.next_theta['detuning']:+.2f}, where resonance is at {-OFFSET:+.2f}")
print(substrate.describe())

# %%
# J as measured on the box, and its detuning on the way to resonance.

figure, (left, right) = plt.subplots(1, 2, figsize=(7, 2.8), layout="constrained")
values = [record.estimate.value for record in records]
errors = [record.estimate.value_stderr for record in records]
left.errorbar(range(len(records)), values, errors, fmt=".-", lw=0.8)
left.set(xlabel="iteration", ylabel="J ± one standard error")
right.plot([record.theta["detuning"] for record in records], ".-", lw=0.8)
right.axhline(-OFFSET, color="0.6", ls=":", label="resonance")
right.set(xlabel="iteration", ylabel="detuning")
right.legend(frameon=False)
plt.show()
