"""QCoDeS station
==============

Two gates are the knobs, the trace of a digitiser is the record.

Here with simulated instruments and a resonator whose coupling and resonance are hidden. Run it with
`python examples/qcodes_station.py`, or train it into a folder by
`fluctua insitu train FILE:connect --model FILE:model --out FOLDER`, with this file as FILE.
"""

import tempfile
from pathlib import Path

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from qcodes import Instrument, ParameterWithSetpoints, Station, validators
from qcodes.instrument_drivers.mock_instruments import DummyBase, DummyInstrument
from scipy.signal import lfilter

import fluctua as fl
from fluctua import insitu

RNG, T, NOISE = np.random.default_rng(0), np.linspace(0.0, 4.0, 201), 0.1


class Digitiser(DummyBase):  # stands for the hardware
    def __init__(self, gates):
        super().__init__("digitiser")
        t = self.add_parameter("time", get_cmd=lambda: T, vals=validators.Arrays(shape=(201,)))
        vals = validators.Arrays(shape=(201,), valid_types=(np.complexfloating,))
        get = lambda: self.simulate(gates.drive(), gates.detuning())
        self.add_parameter("trace", ParameterWithSetpoints, setpoints=[t], get_cmd=get, vals=vals)

    def simulate(self, drive, detuning):  # from rest
        rate = 1.0 + 1j * (0.7 + detuning)
        keep = np.exp(-rate * T[1])
        kicks = NOISE * np.sqrt((1 - abs(keep) ** 2) / 2) * RNG.normal(size=(T.size - 1, 2))
        forces = 0.8 * drive * (1 - keep) / rate + kicks @ np.array([1, 1j])
        return lfilter([1.0], [1.0, -keep], np.append(0.0, forces))


def connect():
    Instrument.close_all()
    gates = DummyInstrument("gates", gates=("drive", "detuning"))
    station = Station(gates, Digitiser(gates))
    knobs = {name: getattr(gates, name) for name in ("drive", "detuning")}
    return insitu.instrument.make_driver(
        set=lambda settings: [knobs[name].set(value) for name, value in settings.items()],
        acquire=lambda: (station.digitiser.time(), station.digitiser.trace()),  # one trajectory
        limits={name: (knob.vals.min_value, knob.vals.max_value) for name, knob in knobs.items()},
        units={name: knob.unit for name, knob in knobs.items()},
        health=lambda: {name: knob.get() for name, knob in knobs.items()},
        close=station.close_all_registered_instruments,
    )


def drift(settings, x, t, unknowns):
    detuning = settings["detuning"] + unknowns["resonance"]
    drive = unknowns["coupling"] * settings["drive"]
    return jnp.array([-x[0] + detuning * x[1] + drive, -x[1] - detuning * x[0]])


process = fl.Process(drift, lambda settings, x: NOISE * jnp.ones(2), integrator="heun")
goal = fl.Objective(running=lambda settings, x: -((x[0] - 1.0) ** 2 + x[1] ** 2) / T[-1])
knobs = {"drive": insitu.Knob(0.5, (0.0, 3.0)), "detuning": insitu.Knob(0.0, (-2.0, 2.0))}
unknowns = {"resonance": insitu.Unknown(0.0, 0.5), "coupling": insitu.Unknown(1.0, 0.3)}
model = insitu.Model(process, goal, knobs, unknowns, x0=jnp.zeros(2), t=T)

# %%
# A short training on the simulated hardware, and records at its first and its last settings.

if __name__ == "__main__":
    plan = insitu.Plan(iterations=20, trajectories=2, learning_rate=0.2, calibration="training")
    with tempfile.TemporaryDirectory() as folder:
        rows = list(insitu.run(connect, model, plan, Path(folder, "run")))
    for row, _ in rows[::5]:
        print(f"iteration {row.iteration:2d}   J = {row.J:.3f}")
    figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
    driver = connect()
    for name, theta in (("before", rows[0][1].theta), ("after", rows[-1][1].next_theta)):
        settings = {knob: float(value) for knob, value in theta.items()}
        print(f"{name}: " + ", ".join(f"{knob} {value:.2f}" for knob, value in settings.items()))
        driver.set(settings)
        driver.arm(10)
        real, imaginary = np.moveaxis(driver.acquire().x, -1, 0)
        axes.plot(real.T, imaginary.T, "C0" if name == "before" else "C1", lw=0.5)
        axes.plot([], [], "C0" if name == "before" else "C1", label=name)
    driver.close()
    axes.plot(1, 0, "kx", label="wanted")
    axes.set(xlabel="real part", ylabel="imaginary part", aspect="equal")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    plt.show()
