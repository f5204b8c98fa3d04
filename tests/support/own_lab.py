"""A laboratory of one's own: a trapped particle with one knob, its model, and drivers with faults.

Tests copy this file to a folder and name what is in it: `lab.py:Trap`.
"""

from pathlib import Path
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

import fluctua as fl
from fluctua import insitu
from fluctua.insitu.instrument import Batch, Health, InstrumentError

T = np.linspace(0.0, 1.0, 81)
NOISE = 0.3
GAIN = 0.8  # of the device; the model expects 1


def drift(settings, x, t, unknowns):
    return jnp.array([unknowns["gain"] * settings["force"] - x[0]])


def model(low=-4.0, high=4.0, start=0.0):
    return insitu.Model(
        fl.Process(drift, lambda settings, x: jnp.array([NOISE])),
        fl.Objective(terminal=lambda settings, x: -((x[0] - 1.0) ** 2)),
        knobs={"force": insitu.Knob(start, bounds=(low, high))},
        unknowns={"gain": insitu.Unknown(1.0, spread=0.3)},
        x0=jnp.zeros(1),
        t=T,
    )


def model_from_driver(driver):
    low, high = driver.limits["force"]
    return model(low / 2, high / 2)


ready = model()
faint = ready._replace(
    process=fl.Process(drift, lambda settings, x: jnp.array([0.5 * NOISE]))
)  # half the noise of the device
renamed = ready._replace(knobs={"forse": insitu.Knob(0.0, bounds=(-4.0, 4.0))})
untimed = ready._replace(x0=None, t=None)


class Trap:
    limits: ClassVar = {"force": (-10.0, 10.0)}
    units: ClassVar = {"force": "pN", "position": "µm"}
    channels = ("position",)
    times = T
    width = 1
    rng = np.random.default_rng(0)
    acquired = 0

    def __init__(self, gain=GAIN):
        self.gain = gain

    def set(self, settings):
        self.force = float(settings["force"])

    def arm(self, count):
        self.count = count

    def acquire(self):
        type(self).acquired += 1
        t = self.times
        x = np.zeros((self.count, len(t), self.width))
        for n, dt in enumerate(np.diff(t)):
            kick = NOISE * np.sqrt(dt) * self.rng.normal(size=(self.count, self.width))
            x[:, n + 1] = x[:, n] + (self.gain * self.force - x[:, n]) * dt + kick
        return Batch(t, x)

    def health(self):
        return Health({"force": np.asarray(self.force)}, identity="trap 7")

    def close(self):
        pass


def open_trap():
    return Trap()


trap = Trap()
wrong = 3
number = lambda: 3


class Off(Trap):
    def __init__(self):
        self.port = {}["port"]


class Deaf:
    def set(self, settings):
        pass


class Needs(Trap):
    def __init__(self, address):
        self.address = address


class Narrow(Trap):
    limits: ClassVar = {"force": (-3.0, 3.0)}


class Other(Trap):
    limits: ClassVar = {"torque": (-10.0, 10.0)}


class Mute(Trap):
    """Without limits: other names are seen when the knob is set."""

    limits: ClassVar = {}

    def set(self, settings):
        self.force = float(settings["torque"])


class Reads(Trap):
    def health(self):
        return Health({"strength": np.asarray(self.force)})


class Stuck(Trap):
    def health(self):
        return Health({"force": np.asarray(self.force + 0.5)})


class Short(Trap):
    times = T[:41]


class Slow(Trap):
    times = 2 * T


class Wide(Trap):
    width = 2


class Frozen(Trap):
    def acquire(self):
        self.rng = np.random.default_rng(5)
        return super().acquire()


class Flat(Trap):
    def acquire(self):
        batch = super().acquire()
        return batch._replace(samples=np.zeros_like(batch.samples))


class Drifts(Trap):
    def acquire(self):
        batch = super().acquire()
        return batch._replace(samples=batch.samples + 2.0 * type(self).acquired * T[:, None])


class Fails(Trap):
    """Fails from the seventh acquisition on, until there is a file `mended`."""

    error = InstrumentError

    def acquire(self):
        if type(self).acquired >= 7 and not Path("mended").exists():
            raise self.error("no trigger")
        return super().acquire()


class Crashes(Fails):
    error = KeyError
